"""The loops in examples/, as they stand there: killed and started again each is the loop that ran through."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import runpy
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from holdfast.shared.files import manifest
from holdfast.shared.files.checkpoints import list_entries
from tests.conftest import ROOT
from tests.runs.processes import HANG_S, wait_until

MAX_STEPS = 9
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def server() -> multiprocessing.context.ForkServerContext:
    """A process that has imported what the loops import, which takes longer than they do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["transformers.models.qwen3.modeling_qwen3", "transformers.generation", "torch.distributed.checkpoint"]
    )
    return context


def run_script(script: str, directory: str, pipe: str, is_killed: bool) -> None:
    """What a process of the server does: `python SCRIPT DIRECTORY MAX_STEPS > PIPE`.

    One that is to be killed waits for that at its last step but one, if it comes so far.
    """
    os.dup2(os.open(pipe, os.O_WRONLY), 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    say = print

    def hold(*words: object, **options: Any) -> None:
        say(*words, **options)
        if str(words[0]).startswith(f"step {MAX_STEPS - 1}/"):
            signal.pause()

    if is_killed:
        builtins.print = hold
    sys.argv = [script, directory, str(MAX_STEPS)]
    runpy.run_path(script, run_name="__main__")


def run(server: multiprocessing.context.ForkServerContext, script: Path, directory: Path, *, kill: bool) -> list[str]:
    """Run a loop; with `kill` until SIGKILL, at a step behind the first checkpoint. Return its lines about steps."""
    pipe = directory.with_suffix(".pipe")
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    process: BaseProcess = server.Process(target=run_script, args=(str(script), str(directory), str(pipe), kill))
    process.start()
    lines: list[str] = []
    with pipe.open() as printed:
        for line in printed:
            lines += [line] if line.startswith("step ") else []
            if kill and len(lines) > 5:
                wait_until(lambda: bool(committed(directory)), "its first checkpoint")
                process.kill()
                break
    process.join(HANG_S)
    assert process.exitcode == (-9 if kill else 0)
    return lines


def committed(directory: Path) -> list[int]:
    return [entry.step for entry in list_entries(directory) if entry.status == "committed"]


@pytest.mark.parametrize("name", ["sft_loop.py", "rl_loop.py"])
def test_an_example_that_was_killed_is_the_example_that_ran_through(
    name: str, server: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    whole = run(server, EXAMPLES / name, straight, kill=False)
    assert len(whole) == MAX_STEPS and len(set(whole)) == MAX_STEPS

    first = run(server, EXAMPLES / name, killed, kill=True)
    (step,) = committed(killed)
    second = run(server, EXAMPLES / name, killed, kill=False)
    assert step == 5 and len(first) < MAX_STEPS
    assert first == whole[: len(first)] and second == whole[step:]

    files = [manifest.verify(path / f"step_{MAX_STEPS}").files["trainer/__0_0.distcp"] for path in (straight, killed)]
    assert files[0] == files[1]
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (straight, killed)]
    assert weights[0] == weights[1]
