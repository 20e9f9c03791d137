"""Real trainers of RL runs for tests of faults; this file is also the helper's program, see `forking`.

A child does what the launcher of `rl` does before it starts a trainer, and then what the trainer does, on one
rank in the child itself or on several through the trainer's own launcher.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from tests.faults import faulty_calls, power_cut
from tests.faults.forking import ForkingHelper, serve

_IMPORTED = (
    "torch.distributed.launcher.api",
    "holdfast.trainer.launch",
    "holdfast.trainer.programs.rl",
    "transformers.models.qwen3.modeling_qwen3",
    "holdfast.commands.launcher.launch",
)


class Trainers(ForkingHelper):
    """Runs trainers one after the other. Use as a context manager."""

    def run(self, config: dict[str, Any], *, trains: bool = True, recording: Path | None = None, **fault: Any) -> int:
        """Run one to its end; return its exit code, negative for a signal.

        Args:
            config: of the trainer and the orchestrator, by these names, as plain values.
            trains: False: stop when the run directory is prepared.
            recording: where to write what power cuts could have left; see `power_cut`.
            fault: options of `faulty_calls.install`, which counts from the first call of the trainer; its
                trail is the output directory with the suffix `.trail`, its log the one with `.log`.
        """
        log = Path(config["trainer"]["output_dir"]).with_suffix(".log")
        record_as = str(recording) if recording else None
        return self._ask({**config, "trains": trains, "recording": record_as, "fault": fault}, log=log)


def _child(request: dict[str, Any]) -> NoReturn:
    code, output = 1, Path(request["trainer"]["output_dir"])
    save = power_cut.record(output) if request["recording"] else None
    try:
        _train(request, output)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - this is the end of the process
        traceback.print_exc()
    finally:
        if save is not None:
            save(Path(request["recording"]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(request: dict[str, Any], output: Path) -> None:
    """What `holdfast.commands.launcher.launch.launch_rl` does for the trainer, and the trainer's ranks."""
    import holdfast.trainer.launch
    from holdfast.commands.resume.attempt import with_resume, write_config
    from holdfast.commands.resume.plan import prepare
    from holdfast.shared.config.orchestrator import OrchestratorConfig
    from holdfast.shared.config.rl_trainer import TrainerConfig

    config = TrainerConfig.model_validate(request["trainer"])
    orchestrator = OrchestratorConfig.model_validate(request["orchestrator"])
    attempt = prepare(config, clean=False, dry_run=False, orchestrator=orchestrator)
    path = write_config(attempt, "trainer", with_resume(config, attempt.resume_step), dry_run=False)
    write_config(attempt, "orchestrator", orchestrator, dry_run=False)
    if not request["trains"]:
        return
    if not request["recording"]:
        trail = output.with_suffix(".trail")
        trail.unlink(missing_ok=True)
        faulty_calls.install(str(output), str(trail), **request["fault"])
    # A page of memory that its ranks share, and not the helper's, which all runs would share.
    holdfast.trainer.launch.STOP_REQUEST.__init__()
    if config.parallel.num_ranks > 1:
        sys.exit(holdfast.trainer.launch.main(["rl", str(path)]))
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    holdfast.trainer.launch._worker("rl", str(path), os.getppid())


if __name__ == "__main__":
    serve(_IMPORTED, _child)
