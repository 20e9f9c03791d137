"""Saving in a training program: every N steps or minutes, at the end, and before a stop (see `trainer.stop`)."""

import logging
import math
import signal
import time
from collections.abc import Mapping, Sequence

import msgspec
import torch

from holdfast.config import CkptConfig
from holdfast.config.load import to_toml
from holdfast.config.resolved import fingerprint
from holdfast.config.training import EvaluatedCommand, TrainingCommand
from holdfast.errors import CheckpointError, SaveError, Stopped, nearest
from holdfast.process.events import report
from holdfast.process.heartbeat import does
from holdfast.run import manifest
from holdfast.run.checkpoints import MODEL_DIR, NAMES_NAME, TRAINER_DIR, BestMetric, Retention
from holdfast.run.metrics import MetricsWriter
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.checkpointer import Checkpointer
from holdfast.trainer.checkpoint.commit import CLOSE_S, Attachment, Identity, ObjectStorage, Storage
from holdfast.trainer.mesh import Mesh, RankGroup
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.tensor_names import TensorLayout
from holdfast.trainer.state import TrainState
from holdfast.trainer.stop import RARE, STOP_REQUEST, StopRequest

_SPARE_S = 60.0
_log = logging.getLogger("trainer")


class GraceOver(SaveError):
    """The save that a signal asked for took longer than `ckpt.grace_s`."""


class Saver:
    """Drives a `Checkpointer` between the steps, unless `config` is None. All methods are collective."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CkptConfig | None,
        mesh: Mesh,
        *,
        max_steps: int,
        committed: int | None,
        storage: Storage | None = None,
        stop: StopRequest = STOP_REQUEST,
    ) -> None:
        self._checkpointer = checkpointer
        self._config = config
        self._mesh = mesh
        self._max_steps = max_steps
        self._storage = storage or Storage()
        # All ranks wait while rank 0 waits for the storage, longer than in other collectives: the timeout of one rank
        # would abort the whole job.
        self._patient_ranks: RankGroup | None = None
        if config is not None and self._storage.close_s:
            self._patient_ranks = RankGroup(timeout_s=max(self._storage.close_s, config.grace_s) + _SPARE_S)
        self._stop = stop
        self._asked = 0
        self._is_time = False
        self.due = 0  # the last step that was to be saved; not by a signal
        self._has_warned_of_best = self._has_warned_of_grace = False
        self._step_began = math.inf
        self._committed: list[int] = []
        self.newest = committed or 0  # the last step that is known to be committed
        self._last_save_time = time.monotonic()

    def is_asked_to_stop(self) -> bool:
        """Whether a signal came on any rank. Call once at the start of every step, after waiting for data."""
        if self._config is None:
            return False
        minutes = self._config.every_minutes
        is_time = minutes is not None and time.monotonic() - self._last_save_time >= 60 * minutes
        # The clock of rank 0 decides for all.
        agreed = self._mesh.max({"signal": self._stop.signal_number(), "time": float(is_time and self._mesh.is_main)})
        self._asked, self._is_time = int(agreed["signal"]), bool(agreed["time"])
        self._step_began = time.monotonic()
        return self._asked != 0

    def after_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        attachments: Mapping[str, Attachment] | None = None,
        *,
        is_last: bool = False,
        is_asked: bool = False,
    ) -> list[int]:
        """Save if it is time to, or a hook asked for it; return the steps committed since the last call. Raise
        SaveError if a save failed."""
        config = self._config
        if config is None:
            return []
        self._check_best(step, metrics, is_saved=False)
        self._check_grace(step, time.monotonic() - self._step_began)
        is_due = is_last or is_asked or step == self._max_steps or self._is_time
        if is_due or (config.interval is not None and step % config.interval == 0):
            self.due = step
            if step > self.newest:  # else it was saved when a hook failed
                self._save(step, metrics, attachments)
        self._check_storage()
        return self._take_committed()

    def _take_committed(self) -> list[int]:
        self._poll()
        committed, self._committed = self._committed, []
        return committed

    def save_for_error(
        self, step: int, metrics: Mapping[str, float], attachments: Mapping[str, Attachment] | None
    ) -> bool:
        """Save the current step, unless it is saved, because the run ends with an error. Return whether it is."""
        if self._config is not None and step > self.newest:
            self._save(step, metrics, attachments)
            self.settle()
        return self._config is not None and step <= self.newest

    def _poll(self) -> None:
        committed = self._checkpointer.poll()
        self._committed += committed
        self.newest = max([self.newest, *committed])

    def _check_storage(self) -> None:
        assert self._config is not None
        try:
            self._storage.poll()
        except CheckpointError as error:
            if self._config.on_failure == "stop":
                raise SaveError(str(error)) from error
            _log.error("%s", error)

    def _save(self, step: int, metrics: Mapping[str, float], attachments: Mapping[str, Attachment] | None) -> None:
        self._check_best(step, metrics, is_saved=True)
        self._checkpointer.save(step, metrics=metrics, attachments=attachments)
        self._last_save_time = time.monotonic()
        self._is_time = False

    def _check_best(self, step: int, metrics: Mapping[str, float], *, is_saved: bool) -> None:
        """Warn once if a step lacks the metric of `ckpt.keep_best`, which may be misspelt. Evaluations are rare: they
        may be lacking where nothing is saved."""
        if self._config is None or self._config.keep_best is None or self._has_warned_of_best:
            return
        name = BestMetric.parse(self._config.keep_best).name
        if name not in metrics and (is_saved or not name.startswith(RARE)) and self._mesh.is_main:
            similar = nearest(name, metrics)
            report(f"WARNING: step {step} has no metric '{name}' (ckpt.keep_best) to be the best by.{similar}")
            self._has_warned_of_best = True

    def _check_grace(self, step: int, step_s: float) -> None:
        """Warn once if a step takes longer than `ckpt.grace_s`."""
        if self._config is None or self._has_warned_of_grace or step_s < self._config.grace_s or not self._mesh.is_main:
            return
        report(
            f"WARNING: step {step} took {step_s:.0f} s, longer than ckpt.grace_s = {self._config.grace_s:g} s: after a "
            "SIGTERM a step may not end in time to be saved. Raise ckpt.grace_s, and the time that your scheduler "
            "gives. (Ctrl-C waits for the step)"
        )
        self._has_warned_of_grace = True

    def in_flight(self) -> list[int]:
        """Return the steps whose save may still be running."""
        return [self._checkpointer.in_flight] if self._checkpointer.in_flight is not None else []

    def stop(
        self, step: int, metrics: Mapping[str, float], attachments: Mapping[str, Attachment] | None = None
    ) -> None:
        """Save the current step because a signal asked for it, and wait for the commit. Raise Stopped when the step is
        saved; SaveError if the step could not be saved; `GraceOver` if not within `ckpt.grace_s`, which counts unless
        SIGINT asked."""
        assert self._config is not None
        name = signal.Signals(self._asked).name
        deadline = self._stop.asked_s() + self._config.grace_s  # the launcher, too, counts from the signal
        if self._asked == signal.SIGINT:
            deadline = math.inf
        report("saving before the stop", step=step, signal=name)
        is_in_time = self._checkpointer.wait(_left_s(deadline))
        if is_in_time:
            try:
                self._poll()
            except SaveError as error:  # of an earlier step
                _log.error("%s", error)
            if step > self.newest:
                self._save(step, metrics, attachments)
                is_in_time = self._checkpointer.wait(_left_s(deadline))
        if not is_in_time:
            grace_s = self._config.grace_s
            raise GraceOver(f"{name}: step {step} was not written within ckpt.grace_s = {grace_s:g} s")
        left_s = _left_s(deadline)
        self._close_storage(self._storage.close_s if left_s is None else left_s)
        self._checkpointer.close()
        stopped = Stopped(f"stopped by {name}: step {step} is saved" if step else f"stopped by {name} before step 1")
        stopped.exit_code = 128 + self._asked
        raise stopped

    def settle(self) -> list[int]:
        """Wait until the last save has ended; return the steps committed since the last call. Raise SaveError if it
        failed."""
        self._checkpointer.wait()
        return self._take_committed()

    def close(self) -> None:
        """Wait for the last save and its upload, then leave the process groups. Raise SaveError if one failed."""
        self._checkpointer.close()
        self._close_storage(self._storage.close_s)

    def _close_storage(self, timeout_s: float) -> None:
        """Wait on all ranks until rank 0's storage is closed; a failure is raised on every rank."""
        if self._patient_ranks is None:
            return
        does("its wait for uploads", bound_s=timeout_s + 2 * _SPARE_S)
        self._patient_ranks.on_main(lambda: self._storage.close(timeout_s))
        self._patient_ranks.close()


def _left_s(deadline: float) -> float | None:
    """Return the seconds until `deadline`; None if there is none."""
    return max(0.0, deadline - time.monotonic()) if deadline < math.inf else None


def open_storage(config: TrainingCommand, run_dir: RunDir, mesh: Mesh, *, older_weights: int) -> Storage:
    """Return the storage that `ckpt.dir` names."""
    ckpt = config.ckpt
    if ckpt is None or ckpt.dir is None:
        return Storage()
    if not mesh.is_main:
        return Storage(close_s=CLOSE_S)
    return ObjectStorage(
        ckpt.dir,
        retention=Retention.of(ckpt),
        protected={ckpt.resume_step} if isinstance(ckpt.resume_step, int) else (),
        older_weights=older_weights,
        weights_of=run_dir.weights_of,
        run_dir=run_dir,
    )


def make_checkpointer(
    config: TrainingCommand,
    run_dir: RunDir,
    state: TrainState,
    *,
    identity: Identity,
    storage: Storage,
    metrics: MetricsWriter | None,
    updated_by: Sequence[torch.optim.Optimizer],
) -> Checkpointer:
    """Return the checkpointer of a run, which flushes `metrics` before each commit. Collective."""
    ckpt = config.ckpt
    return Checkpointer(
        run_dir.checkpoints,
        state,
        save_async=ckpt.save_async if ckpt else False,
        on_failure=ckpt.on_failure if ckpt else "stop",
        retention=Retention.of(ckpt),
        seed=config.seed,
        identity=identity,
        storage=storage,
        before_commit=metrics.flush if metrics else lambda: None,
        # Removing takes time, which a run that is asked to stop does not have.
        may_remove=lambda step: not STOP_REQUEST.signal_number() and not _is_to_be_evaluated(config, run_dir, step),
        collective_timeout_s=config.parallel.collective_timeout_s,
        updated_by=updated_by,
    )


def _is_to_be_evaluated(config: TrainingCommand, run_dir: RunDir, step: int) -> bool:
    """Whether an evaluation still needs the checkpoint of `step`."""
    if not isinstance(config, EvaluatedCommand) or not config.awaits_evaluation(step):
        return False
    return not run_dir.is_evaluated(step) and not run_dir.given_up.exists()


def identity_of(
    config: TrainingCommand, run_dir: RunDir, publisher: WeightPublisher, layout: TensorLayout, data_fingerprint: str
) -> Identity:
    """Return what the manifests of a run say about the run, and the files that all its checkpoints have in common."""
    files = {f"{TRAINER_DIR}/config.toml": to_toml(config).encode()}
    files |= {f"{MODEL_DIR}/{name}": content for name, content in publisher.config_files.items()}
    if not layout.is_plain:
        files[f"{MODEL_DIR}/{NAMES_NAME}"] = msgspec.json.encode(layout.names)
    run_id = run_dir.run_id() if run_dir.holds_run() else ""  # a checkpoint that is imported before the first start
    return Identity(run_id, config.program, data_fingerprint, fingerprint(config), files, run_dir.run_ids())


def resume(checkpointer: Checkpointer, run_dir: RunDir, step: int, *, data_fingerprint: str, mesh: Mesh) -> None:
    """Load a step. The launcher has verified every byte before it started this process. Collective."""
    report("loading checkpoint", step=step)
    saved = manifest.read_manifest(run_dir.checkpoint(step))
    checkpointer.load(step, verify="size")
    told = manifest.other_data(saved.fingerprints.data, data_fingerprint, step=step)
    if told is not None and mesh.is_main:
        report(told)
