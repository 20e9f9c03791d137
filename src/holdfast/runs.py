"""Runs from Python: the commands as functions, for notebooks and scripts.

    run = holdfast.sft(model="mine", data="rows.jsonl", output_dir="outputs/x", max_steps=100)
    run.wait()

A function starts the same processes as its command, so this process holds no trainer. The processes end with this
process, after a save; the same call continues the run. `python -m holdfast.runs PARENT NAME ...` is the command.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.config.flags import flags_of
from holdfast.errors import ConfigError, HoldfastError
from holdfast.process.imports import module_command, module_file
from holdfast.run.choose_run import no_run
from holdfast.run.lock import living_holder
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import SUMMARY_NAME, RunDir

_MODULE = "holdfast.runs"
_LOOK_S = 0.2
_KEPT_LINES = 200
_started: list[Run] = []


class RunFailed(HoldfastError):
    """A run ended with an error; the text is the error of its command. `exit_code`: as docs/files.md lists them."""


class Rows(list[dict[str, Any]]):
    """A list of dictionaries, for a data frame: `rows.to_pandas()`."""

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row per dictionary."""
        import pandas as pd

        return pd.DataFrame(list(self))


class Run:
    """A run in a directory; its processes may live. `path`: its directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._run_dir = RunDir(self.path)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.status}, step {self.step}>"

    @property
    def status(self) -> str:
        """One of `running`, `finished`, `stopped`, `failed` and the other words of `monitor`."""
        from holdfast.view.follow import ObservedRun

        observed = ObservedRun(self._run_dir, self.path.name)
        observed.look()
        return "running" if self._is_going() else observed.status

    @property
    def step(self) -> int:
        """The last step that is trained; 0 before the first."""
        lines = self.metrics
        return int(lines[-1]["step"]) if lines else 0

    @property
    def metrics(self) -> Rows:
        """The lines of `metrics.jsonl`, a dictionary per step (docs/metrics.md). Raise DataError for a damaged line."""
        return Rows(read_metrics(self.path)) if self._run_dir.metrics.exists() else Rows()

    @property
    def weights(self) -> Path | None:
        """The directory of the newest exported weights, for `from_pretrained`; None before any are exported."""
        found = self._run_dir.published_weights()
        return self._run_dir.weights_of(found[-1]) if found else None

    @property
    def results(self) -> dict[str, Any] | None:
        """The summary of `evaluate`; None before it has ended, and for other commands."""
        path = self.path / SUMMARY_NAME
        return json.loads(path.read_bytes()) if path.exists() else None

    def rollouts(
        self,
        steps: str = "latest",
        *,
        where: str | None = None,
        sort: str | None = None,
        environment: str | None = None,
        limit: int | None = None,
    ) -> Rows:
        """Return answers of an RL run as `rollouts RUN` shows them, by field. Raise as that command."""
        from holdfast.view.answers import Choice, Expression, choose, find_batches, read_answers, text_of

        if limit is not None and limit < 0:
            raise ConfigError(f"limit: {limit} answers cannot be shown: give 0 or more, or None for all")
        choice = Choice(
            where=Expression(where, key="where") if where is not None else None,
            environment=environment,
            sort=Expression(sort, key="sort") if sort is not None else None,
        )
        answers = read_answers(find_batches(self._run_dir, [steps]), text_of(self._run_dir))
        return Rows(answer.row() for answer in choose(answers, choice)[:limit])

    def wait(self) -> Run:
        """Return this run when its processes have ended, by a stop, too. An interrupt (Ctrl-C, or by the notebook)
        saves the running step and stops the run; a second interrupt stops the run at once. Raise RunFailed if the
        command ended with an error."""
        try:
            self._wait()
        except KeyboardInterrupt:
            self._signal(signal.SIGINT)
            try:
                self._wait()
            except KeyboardInterrupt:
                self._signal(signal.SIGINT)
                self._wait()
            raise
        process = self._process
        if process is not None and process.returncode and process.returncode < 128:  # negative: killed
            lines = [*self._lines]
            at = max((place for place, line in enumerate(lines) if line.startswith("error: ")), default=len(lines))
            ended = f"the command ended with {process.returncode} (below 0: a signal); the same call continues the run"
            told = "\n".join(lines[at:]).removeprefix("error: ") or ended
            raise RunFailed(told, exit_code=process.returncode)
        return self

    def stop(self) -> Run:
        """End and save the running step, and return when the processes have ended; the same call continues the run.
        Raise ConfigError if a process of another machine or container has the run."""
        self._signal(signal.SIGINT)
        self._wait()
        return self

    def _is_going(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None or (self._reader is not None and self._reader.is_alive())
        return living_holder(self.path / "run.lock") is not None

    def _wait(self) -> None:
        while self._is_going():
            time.sleep(_LOOK_S)  # short: an interrupt comes in between

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(number)
            return
        holder = living_holder(self.path / "run.lock")
        if holder is None:
            return
        if not holder.is_here:
            raise ConfigError(f"{self.path} is held by {holder}, out of reach from here: stop the run there")
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder.pid, number)

    def _start(self, words: list[str]) -> None:
        """Start the command `words` in a thread that lives as long as it: the kernel signals when the thread ends."""
        begun = threading.Event()
        command = [*module_command(_MODULE), str(os.getpid()), *words]

        def follow() -> None:
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    encoding="utf-8", errors="replace", start_new_session=True,
                )  # fmt: skip
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                self._failure = error
                return
            finally:
                begun.set()
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self._lines.append(line.rstrip("\n"))
                with contextlib.suppress(OSError, ValueError):  # nobody reads any more: the run continues
                    print(line, end="", flush=True)
            self._process.wait()

        self._reader = threading.Thread(target=follow, name=f"holdfast {words[0]}", daemon=True)
        self._reader.start()
        begun.wait()
        if self._failure is not None:
            raise self._failure
        _started.append(self)


def sft(*files: str | Path, **settings: Any) -> Run:
    """Start supervised fine-tuning, the command `sft`. Raise ConfigError if a setting cannot be used; nothing is
    started.

    Args:
        files: TOML files with settings.
        settings: by keyword; a section is a dictionary, as in `optim={"lr": 1e-5}`, and text for a section, such as
            `model`, is its name. They win over files. A function or class of a module stands for its name, as
            `module:function` in a file.
    """
    return _begin("sft", files, settings)


def dpo(*files: str | Path, **settings: Any) -> Run:
    """Start preference optimisation, the command `dpo`. Arguments and errors as of `sft`."""
    return _begin("dpo", files, settings)


def reward_model(*files: str | Path, **settings: Any) -> Run:
    """Start the training of a reward model, the command `reward-model`. Arguments and errors as of `sft`."""
    return _begin("reward-model", files, settings)


def rl(*files: str | Path, **settings: Any) -> Run:
    """Start reinforcement learning, the command `rl`. Arguments and errors as of `sft`."""
    return _begin("rl", files, settings)


def evaluate(*files: str | Path, **settings: Any) -> Run:
    """Start an evaluation, the command `evaluate`; `results` has its summary. Arguments and errors as of `sft`."""
    return _begin("evaluate", files, settings)


def open_run(path: str | Path) -> Run:
    """Return the run in a directory. Raise ConfigError if no run is there."""
    run_dir = RunDir(Path(path))
    if not run_dir.holds_run() and not (run_dir.path / "config" / "evaluate.toml").exists():
        raise no_run(Path(path))
    return Run(path)


def _begin(name: str, files: Iterable[str | Path], settings: Mapping[str, Any]) -> Run:
    from importlib import import_module

    from holdfast.cli import COMMANDS
    from holdfast.config.given import check_given
    from holdfast.config.load import parse_command_line

    kind = getattr(import_module("holdfast.config"), COMMANDS[name][2] or "")
    words = [word for file in files for word in ("@", str(file))]
    words += [word for key, value in settings.items() for word in _words(kind, key, value)]
    config = parse_command_line(kind, words, name)
    check_given(name, config)
    run = Run(config.output_dir)
    _wait_for_orphan(run)
    run._start([name, *words])
    return run


def _words(kind: type[Any], key: str, value: Any) -> Iterator[str]:
    """Yield the flags of a setting; a section gives a flag for each of its settings."""
    flag = flags_of(kind).get(f"--{key.replace('_', '-')}")
    name = f"--{key.replace('_', '-')}"
    value = _plain(value, key)
    if flag is not None and flag.is_section and value in (True, {}):
        yield name
    elif flag is not None and flag.is_section and isinstance(value, str) and f"{name}.name" in flags_of(kind):
        yield f"{name}.name={value}"
    elif isinstance(value, dict) and (flag is None or flag.is_section):
        for inner, one in value.items():
            yield from _words(kind, f"{key}.{inner}", one)
    elif value is None:
        yield f"{name}=null"
    else:
        yield f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def _plain(value: Any, key: str) -> Any:
    """Return a value for JSON: paths as text, functions and classes by names, and what NumPy has as Python has it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one, f"{key}.{name}") for name, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(one, key) for one in (sorted(value) if isinstance(value, set) else value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value):
        return _name_of(value, key)
    if not isinstance(value, str | int | float | bool | None) and hasattr(value, "tolist"):
        return value.tolist()
    return value


def _name_of(found: Callable[..., Any], key: str) -> str:
    """Return `module:name` of a function or class that other processes can import. Raise ConfigError for others."""
    name, module = getattr(found, "__qualname__", ""), getattr(found, "__module__", None) or ""
    told = f"{key}: the processes of the run import {name or type(found).__name__} by its name"
    if not name.isidentifier():
        raise ConfigError(f"{told}, and it has none: give a function or class that stands at the top of a module.")
    if module == "__main__":
        raise ConfigError(
            f"{told}, and it is defined in the notebook or script itself. Move it into a file beside it, such as "
            f"mine.py, and give mine.{name} after `import mine` (in a notebook `%%writefile mine.py` writes the file)."
        )
    there, own = module_file(module), getattr(sys.modules.get(module), "__file__", None)
    if there is None or own is None or not there.samefile(own):
        raise ConfigError(
            f"{told}, and '{module}' is not {own} for them: start Python in the directory of that file, or set "
            "PYTHONPATH."
        )
    return f"{module}:{name}"


def _wait_for_orphan(run: Run) -> None:
    """Wait while processes of a notebook that has ended save their step: then this call continues the run."""
    import psutil

    told = False
    while (holder := living_holder(run.path / "run.lock")) is not None and holder.is_here:
        try:
            words = psutil.Process(holder.pid).cmdline()
        except psutil.Error:
            return
        if _MODULE not in words or psutil.pid_exists(int(words[words.index(_MODULE) + 1])):
            return  # the command itself refuses the directory
        if not told:
            print(f"waiting for {holder}, which saves the run for a notebook or script that has ended", flush=True)
            told = True
        time.sleep(_LOOK_S)


@atexit.register
def _wait_at_exit() -> None:
    """Keep a script alive until its runs have ended; a notebook that ends stops its runs."""
    for run in _started if "ipykernel" not in sys.modules else ():
        run._wait()


def main() -> None:
    """Be the command; the end of the process that started this one is SIGTERM, which saves."""
    from holdfast.cli import main as run_command
    from holdfast.process.child import die_with_parent

    die_with_parent(signal.SIGTERM, parent=int(sys.argv[1]))
    sys.argv = ["holdfast", *sys.argv[2:]]
    run_command()


if __name__ == "__main__":
    main()
