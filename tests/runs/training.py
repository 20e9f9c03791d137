"""Runs of the real `sft`, `dpo` and `reward-model` commands on tiny models, for the integration tests."""

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import psutil

from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.runs.processes import command_line

SFT = str(Path(sys.executable).with_name("sft"))
DEADLINE_S = 280
OPTIM = {"optim.lr": 1e-3, "optim.schedule": "constant"}
PAIRS = Path(__file__).resolve().parents[2] / "examples" / "reverse_text" / "preferences.jsonl"


def write_data(path: Path) -> Path:
    generator = random.Random(0)
    with open(path, "w") as file:
        for _ in range(60):
            text = "".join(generator.choices("abcdefgh", k=generator.randint(1, 12)))
            file.write(json.dumps({"prompt": f"{text}>", "completion": text[::-1]}) + "\n")
    return path


@dataclass(frozen=True)
class SftRun:
    code: int
    output: str
    run_dir: RunDir

    def column(self, name: str) -> list[float]:
        """Values of one metric, step by step; steps without it are left out."""
        return [line[name] for line in read_metrics(self.run_dir.metrics) if name in line]

    def weights(self, step: int) -> bytes:
        return (self.run_dir.weights_of(step) / "model.safetensors").read_bytes()


def sft_command(output: Path, model: Path, data: Path, *flags: str) -> list[str]:
    """Return a command line: small steps, several micro-batches each, one thread, `flags` last."""
    settings = {
        "output-dir": output, "model.name": model, "model.init": "random", "data.name": data, "data.batch-size": 8,
        "data.micro-batch-size": 2, "data.seq-len": 32, **OPTIM, "parallel.threads": 1, "seed": 3,
    }  # fmt: skip
    return [SFT, *(word for key, value in settings.items() for word in (f"--{key}", str(value))), *flags]


def succeeded(run: SftRun) -> SftRun:
    assert run.code == 0, run.output
    return run


def refused(run: SftRun, *words: str) -> None:
    """Check that a run ended by one message with `words`."""
    assert run.code == 2 and "Traceback" not in run.output, run.output
    for word in words:
        assert word in run.output, run.output


def run_sft(output: Path, model: Path, data: Path, *flags: str, starts_python: bool = False) -> SftRun:
    return run_command(sft_command(output, model, data, *flags), output, starts_python=starts_python)


def run_command(command: list[str], output: Path, *, starts_python: bool = False) -> SftRun:
    """Run a command that trains in `output` to its end. `starts_python`: as a user does, not forked."""
    if not starts_python:
        from tests.forking.commands import shared_commands

        run = shared_commands().start(Path(command[0]).name, output, command[1:]).wait()
        assert run.code is not None
        return SftRun(run.code, run.log, RunDir(output))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S)
    return SftRun(done.returncode, done.stdout, RunDir(output))


class LiveRun:
    """A run that goes on, as a context manager that leaves nothing."""

    def __init__(self, command: list[str], output: Path) -> None:
        self.run_dir = RunDir(output)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.output = ""
        self.descendants: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.descendants += self._children()
            self.process.kill()
        for pid in self.descendants:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        self._stdout.close()

    @property
    def _stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def wait_for(self, text: str) -> None:
        """Wait until the launcher prints `text`, and note the processes that it has then."""
        for line in self._stdout:
            self.output += line
            if text in line:
                self.descendants = self._children()
                return
        raise AssertionError(f"the run ended before {text!r}:\n{self.output}")

    def _children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        (trainer,) = psutil.Process(self.process.pid).children()
        return [child for child in trainer.children() if command_line(child) == trainer.cmdline()]

    def wait(self, *, within_s: float) -> int:
        code = self.process.wait(within_s)
        self.output += self._stdout.read()
        return code


class LiveSft(LiveRun):
    def __init__(self, output: Path, model: Path, data: Path, *flags: str) -> None:
        super().__init__(sft_command(output, model, data, "--max-steps", "1000000", *flags), output)
