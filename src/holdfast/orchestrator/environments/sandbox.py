"""Runs Python programs that nobody has read, such as those of a policy, where they can do no harm.

A program sees an interpreter with its standard library, read-only, and 16 MiB of files of its own in memory. It has no
network, no other processes, no rights, and bounds of time, memory, processes and output. All that it leaves is what it
prints. See `sandbox_inside.py` for how; it needs Linux 5.12 and user namespaces, and no root.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.orchestrator.environments import sandbox_inside
from holdfast.shared.errors import ConfigError, EnvironmentFailure

_VISIBLE = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/alternatives")
_WALL_PER_CPU = 4
"""Seconds that may pass for every second of computing: a busy machine shall not decide what a program is worth."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        cpu_s: seconds of computing, of each of its processes; four times as many may pass.
        memory_bytes: address space of each of its processes.
        files_bytes: of all files that it writes.
        processes: most processes and threads at a time.
        output_bytes: most that it may print.
    """

    cpu_s: int = 5
    memory_bytes: int = 512 * 2**20
    files_bytes: int = 16 * 2**20
    processes: int = 16
    output_bytes: int = 2**16


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        output: what it printed, cut at `output_bytes`.
        ending: `ended` by itself or by a bound of the kernel's, or killed for its time or for its output.
    """

    output: bytes
    ending: Literal["ended", "too long", "too much output"]


def require_sandbox() -> None:
    """Try the sandbox with a program that says a word.

    Raises:
        ConfigError: this machine does not let it be built; says what failed.
    """
    done = subprocess.run(
        _command(Limits(cpu_s=60)), input=b"print('word')", capture_output=True, env=_ENVIRONMENT, check=False
    )
    if done.returncode or done.stdout != b"word\n":
        reason = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise ConfigError(
            f"the sandbox cannot be built on this machine: {reason}. It needs Linux 5.12 and user namespaces: see "
            "`sysctl user.max_user_namespaces kernel.apparmor_restrict_unprivileged_userns`; in a container, a seccomp "
            "profile that lets `unshare` and `mount` pass. Programs of a policy are not run without it"
        )


async def run_python(source: str, limits: Limits | None = None) -> Outcome:
    """Run a program and return what became of it.

    Raises:
        EnvironmentFailure: the sandbox could not be built.
    """
    limits = limits or Limits()
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *_command(limits), stdin=pipe, stdout=pipe, stderr=pipe, env=_ENVIRONMENT, start_new_session=True
    )
    ending: Literal["ended", "too long", "too much output"] = "too long"
    output = b""
    try:
        async with asyncio.timeout(_WALL_PER_CPU * limits.cpu_s):
            output = await _exchange(process, source.encode(errors="replace"), most_bytes=limits.output_bytes)
            if len(output) > limits.output_bytes:
                ending = "too much output"
            else:
                await process.wait()  # it may have closed its output, and go on
                ending = "ended"
    except TimeoutError:
        output = b""  # how far it came is a matter of how busy the machine was
    finally:
        if process.returncode is None:
            process.kill()
        error = await _end(process)
    if process.returncode == sandbox_inside.SETUP_FAILED:
        raise EnvironmentFailure(f"the sandbox could not be built: {error.decode(errors='replace')}")
    return Outcome(output[: limits.output_bytes], ending)


async def _exchange(process: asyncio.subprocess.Process, source: bytes, *, most_bytes: int) -> bytes:
    """Write a program, and return what it prints until it says that this was all, or until that is too much."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(source)
    process.stdin.close()
    output = b""
    while len(output) <= most_bytes and (more := await process.stdout.read(2**16)):
        output += more
    return output


async def _end(process: asyncio.subprocess.Process) -> bytes:
    """Wait for the end of a process that has ended or was killed, and return what it had to say."""
    assert process.stdout is not None and process.stderr is not None
    while await process.stdout.read(2**16):
        pass
    error = await process.stderr.read()
    await process.wait()
    return error


_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""The order of sets is the same at every run. Nothing else of the environment, its keys and tokens, goes inside."""


def _command(limits: Limits) -> list[str]:
    prefix = os.path.realpath(sys.base_prefix)
    visible = [path for path in _VISIBLE if Path(path).exists()]
    if not any(Path(prefix).is_relative_to(path) for path in visible):
        visible.append(prefix)
    values = {
        "parent": os.getpid(),
        "visible": visible,
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_bytes,
        "files_bytes": limits.files_bytes,
        "processes": limits.processes,
    }
    # Neither site-packages nor the directory of the script: what the program can import is the standard library.
    interpreter = [os.path.realpath(sys.executable), "-S", "-s", "-P", "-B", "-X", "utf8"]
    return [*interpreter, sandbox_inside.__file__, json.dumps(values)]
