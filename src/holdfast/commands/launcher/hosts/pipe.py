"""The launcher's end of an agent: a command that reaches one on another host, such as `srun`, and its two pipes."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from contextlib import suppress
from typing import Any

from holdfast.commands.launcher.hosts.remote import HostLost
from holdfast.shared.errors import ConfigError
from holdfast.shared.process.import_path import module_command

_CALL_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 10.0


def agent_command() -> list[str]:
    """Return the command line of an agent."""
    return module_command("holdfast.commands.launcher.hosts.agent")


class PipeWire:
    """Leads to a place in an agent.

    Args:
        argv: starts the agent; its stdin and stdout are the agent's.
    """

    def __init__(self, argv: list[str]) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the launcher alone
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._end: int | None = None
        self._said = ""
        self._is_lost = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the place, and wait for its result."""
        if self.is_lost:
            raise self._lost()
        if method == "start":
            self._end = None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps({'method': method, 'arguments': arguments})}\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=_CALL_TIMEOUT_S)
        except (OSError, queue.Empty):
            answer = None
        if answer is None:
            raise self._lost()
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer["result"]

    def ended(self) -> int | None:
        """Return how the process there ended."""
        if self._end is None and self._is_lost.is_set():
            raise self._lost()
        return self._end

    @property
    def is_lost(self) -> bool:
        """Whether the agent has ended."""
        return self._is_lost.is_set()

    def close(self) -> None:
        """End the agent, with what it started."""
        assert self._process.stdin is not None
        try:
            # By the end of its stdin: an agent on another host would not hear of a dead `srun`.
            self._process.stdin.close()
            self._process.wait(_CLOSE_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _lost(self) -> HostLost:
        """Give the agent up: an answer that comes late must not be taken for that of a later call."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        if not self._is_lost.wait(_CALL_TIMEOUT_S):
            self._process.kill()
            self._is_lost.set()
        return HostLost(self._said or "it does not answer")

    def _read(self) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        with self._process.stdout as stdout, self._process.stderr as stderr:
            for line in stdout:
                message = json.loads(line)
                if "ended" in message:
                    self._end = message["ended"]
                else:
                    self._answers.put(message)
            errors = [line for line in stderr if "error" in line]
        self._said = errors[0].strip() if errors else f"its connection has ended (exit code {self._process.wait()})"
        self._is_lost.set()
        self._answers.put(None)
