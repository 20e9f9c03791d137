"""Real `rl` runs for tests: start one, wait for a step, disturb it, and compare what runs leave behind."""

import json
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.conftest import ROOT
from tests.forking.commands import shared_commands
from tests.forking.popen import Engine
from tests.forking.server import Fork, Started
from tests.runs.processes import HANG_S, command_line

CONFIG = "configs/reverse_text/rl.toml"
MODEL = ROOT / "examples" / "reverse_text" / "model"
# A quarter of the quick start's batch: the start of a trainer is what takes the time here.
SMALL_BATCH = ("--orchestrator.problems-per-step", "8", "--orchestrator.group-size", "4")
POLL_S = 0.01
# Every part of the trainer that has a state of its own, with two passes over two minibatches.
EVERYTHING: dict[str, Any] = {
    "advantage": "gae", "loss": {"type": "ppo", "correction": {"type": "truncate"}},
    "kl": {"coef": 0.1, "place": "reward", "target": 0.05, "horizon": 100, "refresh_interval": 3},
    "critic": {"optim": {"lr": 1e-3}, "warmup_steps": 1}, "rewards": {"scale": "running", "clip": 0.9},
    "updates": {"epochs": 2, "minibatches": 2}, "ema": {"decay": 0.9},
}  # fmt: skip
END_TIMEOUT_S = 600.0
"""How long a test waits for the end of a whole run: the quick start takes a minute, on a busy machine several."""


def _saving_as_asked(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return what takes back the saving of the shipped configuration: a test asks for its own, or for none."""
    if any(flag.startswith("--ckpt") for flag in flags):
        return ("--ckpt.interval", "null", "--ckpt.keep", "null")
    return ("--ckpt", "null")


class RlRun:
    """One start of the `rl` command, in a session of its own as from a terminal. Launcher, trainer, orchestrator and
    inference servers are forked, see `forking.popen`. Use as a context manager: whatever happens in the test, no
    process is left. `environment`: variables on top of those of this process. `engine`: what an inference server of the
    run samples with. `starts_python`: start all of it as a user does, vLLM included."""

    def __init__(
        self, output_dir: Path, *flags: str, environment: Mapping[str, str] | None = None, engine: Engine = "stub",
        starts_python: bool = False,
    ) -> None:  # fmt: skip
        self.run_dir = RunDir(output_dir)
        self._output = output_dir.with_name(f"{output_dir.name}-{time.monotonic_ns()}.out")
        self._output.touch()
        self._seen: set[psutil.Process] = set()
        saving = () if starts_python else _saving_as_asked(flags)
        argv = ["@", CONFIG, "--output-dir", str(output_dir), *saving, *flags]
        variables = {**os.environ, **(environment or {})}
        self._launcher: Started | Fork
        if starts_python:
            command = [str(Path(sys.executable).with_name("rl")), *argv]
            self._launcher = Started(command, self._output, variables)
        else:
            run = shared_commands().start(
                "rl", output_dir, argv, log=self._output, environment=variables, engine=engine
            )
            self._launcher = run.fork

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended():
            self.processes()
            os.kill(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait(HANG_S)
        for process in self.survivors(timeout_s=0):
            process.kill()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def launcher(self) -> psutil.Process:
        return psutil.Process(self._launcher.pid)

    def ended(self) -> bool:
        return self._launcher.has_ended

    def processes(self) -> list[psutil.Process]:
        """Every process that the launcher started and that runs now, children of children included."""
        try:
            found = self.launcher().children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._seen.update(found)
        return found

    def find(self, module: str) -> list[psutil.Process]:
        """Processes of the run that run `module`, such as `holdfast.trainer.launch`: parents before their children."""
        found: list[tuple[int, psutil.Process]] = []
        for process in self.processes():
            try:
                if module in command_line(process):
                    found.append((len(process.parents()), process))
            except psutil.NoSuchProcess:  # it has just ended
                continue
        return [process for _, process in sorted(found, key=lambda one: one[0])]

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: last_step(self.run_dir) >= step, f"step {step}")

    def wait_for_output(self, text: str) -> None:
        self.wait_for(lambda: text in self.output, f"'{text}'")

    def wait_for_match(self, pattern: str) -> None:
        self.wait_for(lambda: re.search(pattern, self.output) is not None, f"/{pattern}/")

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Return as soon as `condition` returns something true; `what` names it in the error."""
        deadline = time.monotonic() + HANG_S
        while not condition():
            assert not self.ended(), f"the run ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"{what} did not come within {HANG_S} s:\n{self.output}"
            time.sleep(POLL_S)

    def interrupt(self, number: int) -> None:
        """Send a signal to the launcher, as Ctrl-C, `kill` and `kill -9` do; its children do not get it."""
        self.processes()
        os.killpg(self._launcher.pid, number)

    def wait(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Return the exit code of the command; a signal's number is negative."""
        try:
            return self._launcher.wait(timeout_s)
        except TimeoutError:
            raise AssertionError(f"the run did not end within {timeout_s} s:\n{self.output}") from None

    def survivors(self, timeout_s: float = HANG_S) -> list[psutil.Process]:
        """What is left of this run after `timeout_s`: processes seen as its children, or that name its directory."""
        return survivors(self.run_dir, self._seen, timeout_s=timeout_s)


def survivors(run_dir: RunDir, processes: set[psutil.Process], *, timeout_s: float = HANG_S) -> list[psutil.Process]:
    """What is left after `timeout_s` of `processes`, and of those that name the directory of a run."""
    processes = processes | {process for process in psutil.process_iter() if _names(run_dir, process)}
    deadline = time.monotonic() + timeout_s
    while (left := [process for process in processes if _is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def _names(run_dir: RunDir, process: psutil.Process) -> bool:
    try:
        return any(word.startswith(f"{run_dir.path}{os.sep}") for word in command_line(process))
    except psutil.Error:
        return False


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class CompletedRun:
    run_dir: RunDir
    exit_code: int
    output: str
    survivors: list[psutil.Process]


def complete(run: RlRun, timeout_s: float = END_TIMEOUT_S) -> CompletedRun:
    code = run.wait(timeout_s)
    return CompletedRun(run.run_dir, code, run.output, run.survivors())


def succeeded(output_dir: Path, *flags: str, timeout_s: float = END_TIMEOUT_S, **options: Any) -> CompletedRun:
    """Run `rl` to its end, which must be a success that leaves no process behind; `options` are those of `RlRun`."""
    with RlRun(output_dir, *flags, **options) as run:
        completed = complete(run, timeout_s)
    assert completed.exit_code == 0, completed.output
    assert not completed.survivors, completed.output
    return completed


def last_step(run_dir: RunDir) -> int:
    """The last whole line's step of `metrics.jsonl`; 0 for none."""
    steps = [int(metrics["step"]) for metrics in read_metrics(run_dir.metrics)] if run_dir.metrics.exists() else []
    return steps[-1] if steps else 0


def journal_files(run_dir: RunDir) -> dict[int, tuple[int, int]]:
    """Inode and modification time of every batch in the journal: others mean that it was made again."""
    stats = {step: (run_dir.batch(step) / "batch.msgpack").stat() for step in run_dir.published_batches()}
    return {step: (stat.st_ino, stat.st_mtime_ns) for step, stat in stats.items()}


# Timing and memory, and what a batch reused of a killed orchestrator's work.
_VARYING = ("time/", "memory_gib", "tflops", "mfu", "engine/", "rollout/reused_turns")


def exact_metrics(run_dir: RunDir, steps: Iterable[int]) -> list[dict[str, float]]:
    """The lines of `metrics.jsonl` of these steps, without what depends on the clock; each step exactly once."""
    wanted = list(steps)
    lines = [line for line in read_metrics(run_dir.metrics) if line["step"] in wanted]
    assert [line["step"] for line in lines] == wanted
    return [
        {key: value for key, value in line.items() if not key.startswith(_VARYING) and not key.endswith("_per_s")}
        for line in lines
    ]


@dataclass(frozen=True)
class Outcome:
    """All that a run amounts to at a committed step, as bytes; weights by file, those of the average below `ema/`."""

    weights: dict[str, bytes]
    tensors: dict[str, bytes]  # every tensor of the trainer's checkpoint (parameters, optimizer moments), by name
    trainer_state: dict[str, bytes]  # counters, random generators of the trainer, by file name
    orchestrator_state: bytes  # the orchestrator's state after the step's batch


def outcome(run_dir: RunDir, step: int) -> Outcome:
    checkpoint = run_dir.checkpoint(step)
    found = Outcome(
        weights=_contents(run_dir.weights_of(step), "*.safetensors")
        | {
            f"ema/{name}": data
            for name, data in _contents(run_dir.weights / f"ema_step_{step}", "*.safetensors").items()
        },
        tensors=checkpoint_tensors(checkpoint / "trainer"),
        trainer_state=_contents(checkpoint / "trainer", "*.json"),
        orchestrator_state=(checkpoint / "orchestrator" / "orchestrator.json").read_bytes(),
    )
    assert found.weights and {"progress.json", "random_rank_0.json"} <= found.trainer_state.keys()
    assert any(name.endswith("exp_avg_sq") and any(data) for name, data in found.tensors.items())
    return found


def assert_same(actual: Outcome, expected: Outcome) -> None:
    for kind in ("weights", "tensors", "trainer_state"):
        mine, theirs = getattr(actual, kind), getattr(expected, kind)
        assert mine.keys() == theirs.keys()
        different = [name for name in mine if mine[name] != theirs[name]]
        assert not different, f"{kind}: {len(different)} of {len(mine)} differ: {different[:3]}"
    assert json.loads(actual.orchestrator_state) == json.loads(expected.orchestrator_state)
    assert actual.orchestrator_state == expected.orchestrator_state


def assert_same_end(actual: CompletedRun, expected: CompletedRun, last: int) -> None:
    """Fail unless a run has ended well, and after `last` steps with the bits and the metrics of another one."""
    assert actual.exit_code == 0, actual.output
    assert not actual.survivors, actual.output
    assert_same(outcome(actual.run_dir, last), outcome(expected.run_dir, last))
    steps = range(1, last + 1)
    assert exact_metrics(actual.run_dir, steps) == exact_metrics(expected.run_dir, steps)


def _contents(directory: Path, pattern: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob(pattern))}


def checkpoint_tensors(directory: Path) -> dict[str, bytes]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(directory)
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), name
        tensors[name] = torch.full(tuple(entry.size), -1, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
