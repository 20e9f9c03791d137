"""Real trainers of RL runs for tests of faults, each a process of its own.

A helper process imports torch and the trainer once and forks a child for every request, which does what the
launcher of `rl` does before it starts a trainer, and then what the trainer does, on one rank in the child itself
or on several through the trainer's own launcher. This file is also the helper's program
(`python -m tests.faults.rl_trainers`): one JSON request per line, one exit code per line.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn, Self

from tests.conftest import ROOT


class Trainers:
    """Runs trainers one after the other. Use as a context manager."""

    def __enter__(self) -> Self:
        self._helper = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.rl_trainers"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._helper.kill()
        self._helper.communicate()

    def run(self, config: dict[str, Any], *, trains: bool = True, **fault: Any) -> int:
        """Run one to its end; return its exit code, negative for a signal.

        Args:
            config: of the trainer and the orchestrator, by these names, as plain values.
            trains: False: stop when the run directory is prepared.
            fault: options of `faulty_calls.install`, which counts from the first call of the trainer; its
                trail is the output directory with the suffix `.trail`, its log the one with `.log`.
        """
        assert self._helper.stdin is not None and self._helper.stdout is not None
        self._helper.stdin.write(json.dumps({**config, "trains": trains, "fault": fault}) + "\n")
        self._helper.stdin.flush()
        return int(self._helper.stdout.readline())


def _main() -> None:
    from triad.process import die_with_parent

    die_with_parent()
    for name in (
        "torch.distributed.launcher.api",
        "trainer.launch",
        "trainer.rl",
        "transformers.models.qwen3.modeling_qwen3",
        "triad.launch",
    ):
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _child(json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _child(request: dict[str, Any]) -> NoReturn:
    from triad.process import die_with_parent

    die_with_parent()
    output = Path(request["trainer"]["output_dir"])
    log = os.open(output.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        _train(request, output)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - this is the end of the process
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(request: dict[str, Any], output: Path) -> None:
    """What `triad.launch.launch_rl` does for the trainer, and the trainer's ranks."""
    import trainer.launch
    from tests.faults import faulty_calls
    from triad.config.orchestrator import OrchestratorConfig
    from triad.config.rl_trainer import TrainerConfig
    from triad.resume import prepare, with_resume, write_config

    config = TrainerConfig.model_validate(request["trainer"])
    orchestrator = OrchestratorConfig.model_validate(request["orchestrator"])
    attempt = prepare(config, clean=False, dry_run=False, orchestrator=orchestrator)
    path = write_config(attempt, "trainer", with_resume(config, attempt.resume_step), dry_run=False)
    write_config(attempt, "orchestrator", orchestrator, dry_run=False)
    if not request["trains"]:
        return
    trail = output.with_suffix(".trail")
    trail.unlink(missing_ok=True)
    faulty_calls.install(str(output), str(trail), **request["fault"])
    if config.parallel.num_ranks > 1:
        sys.exit(trainer.launch.main(["rl", str(path)]))
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    trainer.launch._worker("rl", str(path), os.getppid())


if __name__ == "__main__":
    _main()
