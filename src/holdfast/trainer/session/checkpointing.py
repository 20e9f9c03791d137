"""How a run of ours uses the library of checkpoints: its storage, what manifests say of it, and where it goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import torch

from holdfast.shared.config.fingerprint import fingerprint
from holdfast.shared.config.load import to_toml
from holdfast.shared.config.trainer import EvaluatedCommand, TrainingCommand
from holdfast.shared.files import manifest
from holdfast.shared.files.checkpoints import MODEL_DIR, NAMES_NAME, TRAINER_DIR, Retention
from holdfast.shared.files.metrics import MetricsWriter
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.events import report
from holdfast.trainer.checkpoints.checkpointer import Checkpointer
from holdfast.trainer.checkpoints.commit import Identity
from holdfast.trainer.checkpoints.storage import LocalStorage, ObjectStorage, Storage
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.tensor_layout import TensorLayout
from holdfast.trainer.models.weight_publisher import WeightPublisher
from holdfast.trainer.session.stop import STOP_REQUEST
from holdfast.trainer.session.train_state import TrainState

_log = logging.getLogger("trainer")


def open_storage(config: TrainingCommand, run_dir: RunDir, mesh: Mesh, *, older_weights: int) -> Storage:
    """Return where committed steps are kept, by `ckpt.dir`."""
    ckpt = config.ckpt
    if ckpt is None or ckpt.dir is None:
        return LocalStorage()
    if not mesh.is_main:
        return LocalStorage(close_s=ObjectStorage.close_s)
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
    """Return the checkpointer of a run as its `ckpt` section says. Collective.

    Args:
        metrics: on rank 0, flushed before a step gets its name: a step to resume from has its line.
        updated_by: all optimizers that change the state.
    """
    ckpt = config.ckpt
    return Checkpointer(
        run_dir.checkpoints,
        state,
        save_async=ckpt.save_async if ckpt else False,
        when_busy=ckpt.when_busy if ckpt else "wait",
        on_failure=ckpt.on_failure if ckpt else "stop",
        retention=Retention.of(ckpt),
        seed=config.seed,
        identity=identity,
        storage=storage,
        before_commit=metrics.flush if metrics else lambda: None,
        # Removing takes its time, which nobody has who was asked to stop.
        may_remove=lambda step: not STOP_REQUEST.signal_number() and not _is_to_be_evaluated(config, run_dir, step),
        collective_timeout_s=config.parallel.collective_timeout_s,
        updated_by=updated_by,
    )


def _is_to_be_evaluated(config: TrainingCommand, run_dir: RunDir, step: int) -> bool:
    """Whether who evaluates the run still needs the checkpoint of `step`."""
    if not isinstance(config, EvaluatedCommand) or not config.awaits_evaluation(step):
        return False
    return not run_dir.is_evaluated(step) and not run_dir.given_up.exists()


def identity_of(
    config: TrainingCommand, run_dir: RunDir, publisher: WeightPublisher, layout: TensorLayout, data_fingerprint: str
) -> Identity:
    """Return what the manifests of a run say about it, and the files that are the same in all its checkpoints."""
    files = {f"{TRAINER_DIR}/config.toml": to_toml(config).encode()}
    files |= {f"{MODEL_DIR}/{name}": content for name, content in publisher.config_files.items()}
    if not layout.is_plain:
        files[f"{MODEL_DIR}/{NAMES_NAME}"] = msgspec.json.encode(layout.names)
    return Identity(run_dir.run_id(), config.program, data_fingerprint, fingerprint(config), files)


def resume(checkpointer: Checkpointer, run_dir: RunDir, step: int, *, data_fingerprint: str, mesh: Mesh) -> None:
    """Load the step that the launcher has verified, byte for byte, before it started this process. Collective."""
    report("loading checkpoint", step=step)
    saved = manifest.read_manifest(run_dir.checkpoint(step))
    checkpointer.load(step, verify="size")
    if saved.fingerprints.data != data_fingerprint and mesh.is_main:
        report(
            f"WARNING: the training data are not those of step {step}: the position in them is kept, so samples may "
            "be trained twice or never in this epoch"
        )
