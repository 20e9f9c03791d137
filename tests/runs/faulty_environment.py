"""An environment that does what it should not at chosen tasks, for runs in worker processes; imports little."""

import asyncio
import ctypes
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast import Environment, Message, Score, Session, Task, TaskSeed
from holdfast.errors import ConfigError, ProcessKilled
from holdfast.orchestrator.worker import Ready, frame


class Faulty(Environment):
    """Two turns and a score. `faults`: what goes wrong, by task; `once`, or one `then` another. `marks`: attempts."""

    def __init__(self, faults: dict[str, str] | None = None, marks: str = "", load: str = "") -> None:
        self.faults = faults or {}
        self.marks = Path(marks)
        if load == "refused":
            raise ConfigError("it is not to be")
        if load == "exit":
            os._exit(9)
        if load.startswith("killed") and self._attempts("load") < int(load.split()[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=[Message("user", f"{seed.number}")], answer=str(seed.index))

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        fault = self.faults.get(task.answer, "")
        if fault.startswith("halfway") and self._attempt(task) == 0:
            raise MemoryError if "memory" in fault else ProcessKilled("its helper was killed from outside")
        session.append_messages([Message("user", "again")])
        await session.sample()
        match fault:
            case "waits":
                await asyncio.Event().wait()
            case "detached once" if self._attempt(task) == 0:  # ends the process where no code of a group runs
                asyncio.get_running_loop().call_soon(os._exit, 8)
                await asyncio.Event().wait()
            case _:
                pass

    def score(self, task: Task, sessions: Sequence[Session]) -> Any:
        fault = self.faults.get(task.answer, "")
        if fault and not fault.startswith(("detached", "halfway")):
            attempt = self._attempt(task)
            if "once" not in fault or attempt == 0:
                stages = fault.split(" then ")
                self._go_wrong(stages[min(attempt, len(stages) - 1)].split()[0])
        if fault == "spoils":  # what is read after the call
            sessions[0].request_counts = {}  # type: ignore[assignment]
        if fault == "nan":
            return [Score(float("nan")) for _ in sessions]
        if fault == "type":
            return "good"
        return [Score(len(session.texts[0]) + len(session.texts[1]) / 100) for session in sessions]

    def _attempt(self, task: Task) -> int:
        return self._attempts(task.answer)

    def _attempts(self, name: str) -> int:
        """Return how many attempts there were before this one, and leave its mark."""
        number = len(list(self.marks.glob(f"{name}_*")))
        (self.marks / f"{name}_{number}_{uuid.uuid4()}").write_text(str(os.getpid()))
        return number

    def _go_wrong(self, fault: str) -> None:
        match fault:
            case "raises":
                raise KeyError("no")
            case "exits":
                print("my last words", flush=True)
                os._exit(7)
            case "faults":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "terminated":
                os.kill(os.getpid(), signal.SIGTERM)
            case "bereft":  # of a process of its own
                raise ProcessKilled("its helper was killed from outside")
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "blocks":
                while True:
                    time.sleep(0.01)
            case "holds":
                ctypes.PyDLL(None).sleep(1000)  # with the lock of the interpreter
            case "leaks":
                kept = []
                while True:
                    kept.append(bytearray(1 << 24))
            case "garbles" | "greets":  # writes where the worker speaks to the orchestrator
                said = frame(Ready()) if fault == "greets" else (4).to_bytes(8, "little") + b"\xc1" * 4
                for entry in Path("/proc/self/fd").iterdir():
                    if entry.is_symlink() and entry.readlink().name.startswith("socket:"):
                        os.write(int(entry.name), said)
            case "prints":
                sys.stdout.write("x" * 1_000_000)
            case _:
                pass
