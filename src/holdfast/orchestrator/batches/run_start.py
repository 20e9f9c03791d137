"""Where a run begins: behind the batches that the journal holds, or behind the newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.orchestrator.batches.state import OrchestratorState, read_state
from holdfast.shared.errors import CheckpointError
from holdfast.shared.files import journal
from holdfast.shared.files.manifest import verify
from holdfast.shared.files.run_dir import RunDir


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        trainer_step: the step that the trainer begins after: that of the checkpoint, or 0.
        state: the orchestrator's state after the last batch that exists.
    """

    trainer_step: int
    state: OrchestratorState


def find_start(run_dir: RunDir, resume_step: int | None) -> Start:
    """Return where to begin: after the journal's batches if some follow the checkpoint, else after the checkpoint.

    The trainer trains on the batches that are there, so they are never made again. An orchestrator that
    is started again in the middle of a run goes by the newest checkpoint, which may be later than
    `resume_step`: batches before it may be gone.

    Raises:
        CheckpointError: the state is missing or damaged.
    """
    while True:
        # The trainer may save and prune meanwhile. In this order what follows the newest checkpoint is seen whole.
        published = set(run_dir.published_batches())
        trainer_step = max([resume_step or 0, *run_dir.committed_steps()])
        try:
            return _start_after(run_dir, trainer_step, published)
        except (CheckpointError, FileNotFoundError):
            # A newer checkpoint means that the trainer pruned while we looked: look again.
            if max(run_dir.committed_steps(), default=0) <= trainer_step:
                raise


def _start_after(run_dir: RunDir, trainer_step: int, published: set[int]) -> Start:
    last = trainer_step
    # Only without a gap: state N belongs to all batches before it.
    while last + 1 in published:
        last += 1
    if last > trainer_step:
        verify(run_dir.batch(last))
        state = read_state(run_dir.batch(last) / journal.STATE_NAME, step=last)
    elif trainer_step > 0:
        path = run_dir.checkpoint(trainer_step) / "orchestrator" / journal.STATE_NAME
        state = read_state(path, step=trainer_step)
    else:
        state = OrchestratorState()
    return Start(trainer_step=trainer_step, state=state)
