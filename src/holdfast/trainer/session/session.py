"""What every training program starts with: ranks, model, optimizer, counters, checkpoints, weights, metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from holdfast.shared.config.trainer import TrainedModelConfig, TrainingCommand
from holdfast.shared.errors import Stopped
from holdfast.shared.files.metrics import MetricsWriter
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.events import report
from holdfast.shared.process.timeline import start_timeline
from holdfast.trainer.checkpoints.checkpointer import Checkpointer
from holdfast.trainer.checkpoints.plain_state import State
from holdfast.trainer.checkpoints.random_state import seed_everything
from holdfast.trainer.checkpoints.warm_start import load_weights_only
from holdfast.trainer.data.samples import load_tokenizer
from holdfast.trainer.mesh import Mesh, open_mesh
from holdfast.trainer.models.lora import Adapters, is_adapted
from holdfast.trainer.models.policy import Policy
from holdfast.trainer.models.pretrained import trained_tensors
from holdfast.trainer.models.scalar_model import ScalarModel
from holdfast.trainer.models.self_check import check_model
from holdfast.trainer.models.tensor_layout import TensorLayout, names_in_files
from holdfast.trainer.models.weight_publisher import WeightPublisher
from holdfast.trainer.optim.optimizers import build_optimizer
from holdfast.trainer.session.checkpointing import identity_of, make_checkpointer, open_storage, resume
from holdfast.trainer.session.profiling import Profiler
from holdfast.trainer.session.saving import GraceOver, Saver
from holdfast.trainer.session.train_state import Progress, TrainState

_LAST_SAVE_S = 60.0
_log = logging.getLogger("trainer")


M = TypeVar("M", bound=Policy | ScalarModel)
M_co = TypeVar("M_co", bound=Policy | ScalarModel, covariant=True)


class Build(Protocol[M_co]):
    """Makes the model that is trained; `weights`: whether to fill it, or leave that to a checkpoint."""

    def __call__(self, config: TrainedModelConfig, mesh: Mesh, *, seed: int, weights: bool) -> M_co: ...


@dataclass(frozen=True)
class Session(Generic[M]):
    """The parts of one training run on this rank, ready for the next step."""

    mesh: Mesh
    run_dir: RunDir
    policy: M
    optimizer: torch.optim.Optimizer
    progress: Progress
    checkpointer: Checkpointer
    saver: Saver
    publisher: WeightPublisher
    metrics: MetricsWriter | None
    profiler: Profiler | None = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of `step`, on rank 0. Do so before saving: a step to resume from has its line."""
        if self.metrics is not None:
            self.metrics.write(step, metrics)

    def publish_last(self) -> None:
        """Publish the weights of the step that training ended with, as the only ones. Collective."""
        step = self.progress.step
        report("publishing weights", step=step)
        self.publisher.publish(step)
        self.publisher.prune({step})

    def __enter__(self) -> Session[M]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last save, also where training failed; where it did not, for all ranks."""
        if kind is not None:
            # Then there is no time left to wait in.
            if not issubclass(kind, GraceOver):
                # Bounded: where another rank has ended, its collectives may not.
                self.checkpointer.wait(_LAST_SAVE_S)
                if self.profiler is not None:
                    self.profiler.stop(self.progress.step, is_agreed=issubclass(kind, Stopped))
            return
        self.saver.close()
        if self.profiler is not None:
            self.profiler.close()
        if self.metrics is not None:
            self.metrics.close()
        # The early end of one rank would be taken for the end of all.
        self.mesh.barrier()
        report("finished", step=self.progress.step)


@contextmanager
def start_program(config: TrainingCommand) -> Iterator[tuple[Mesh, PreTrainedTokenizerBase]]:
    """Join the ranks, seed all generators and read the tokenizer; leave the ranks after the block."""
    with open_mesh(config.parallel) as mesh:
        seed_everything(config.seed, step=0, rank=mesh.rank)
        yield mesh, load_tokenizer(config.model.tokenizer_name)


def start_session(
    config: TrainingCommand,
    mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase,
    build: Build[M],
    *,
    pack: bool,
    components: Callable[[M], tuple[Mapping[str, State], Sequence[torch.optim.Optimizer]]] | None = None,
    data_fingerprint: str = "",
    older_weights: int = 0,
) -> Session[M]:
    """Build the model and everything around it, and bring it to the step that the run goes on from. Collective.

    Args:
        build: makes the model.
        pack: whether rows are to hold several samples.
        components: makes what else is in the state, and the further optimizers that change it, from the
            model with the weights that a new run begins with.
        data_fingerprint: of the training data, where the trainer has them.
        older_weights: how many published versions before its own a checkpoint needs.
    """
    run_dir = RunDir(config.output_dir)
    ckpt = config.ckpt
    resume_step = ckpt.resume_step if ckpt else None
    policy, layout = _build_model(config, mesh, build)
    optimizer = build_optimizer(policy.hf_model, config.optim)
    # Before loading, which then writes into the tensors that they make.
    further, optimizers = components(policy) if components else ({}, ())
    adapters = None
    if is_adapted(policy.hf_model):
        adapters = Adapters(policy.hf_model, layout, base_name=config.model.name)
        further = {**further, "base": adapters}
    progress = Progress()
    publisher = WeightPublisher(
        run_dir, policy, tokenizer, mesh, dtype=config.model.compute_dtype, layout=layout, adapters=adapters
    )
    metrics = MetricsWriter(run_dir.metrics) if mesh.is_main else None
    storage = open_storage(config, run_dir, mesh, older_weights=older_weights)
    checkpointer = make_checkpointer(
        config,
        run_dir,
        TrainState(policy, optimizer, progress, further),
        identity=identity_of(config, run_dir, publisher, layout, data_fingerprint),
        storage=storage,
        metrics=metrics,
        updated_by=[optimizer, *optimizers],
    )
    if isinstance(resume_step, int):
        resume(checkpointer, run_dir, resume_step, data_fingerprint=data_fingerprint, mesh=mesh)
        _log.info("resumed from step %d: %d samples trained", resume_step, progress.samples)
    # After loading: what is compared are the weights that are trained.
    check_model(policy, mesh, name=config.model.name, pack=pack, dtype=config.model.compute_dtype)
    if ckpt is not None:
        checkpointer.reserve()
    if isinstance(resume_step, int):
        storage.publish(run_dir.checkpoint(resume_step))  # the attempt before may have ended in its upload
    if mesh.is_main:
        start_timeline(run_dir.newest_logs(), "trainer", step=progress.step)
    saver = Saver(checkpointer, ckpt, mesh, max_steps=config.max_steps, committed=progress.step, storage=storage)
    window, profiler = config.profiled_steps, None
    if window is not None and progress.step < window.last:
        profiler = Profiler(window, run_dir, mesh, done=progress.step)
    return Session(mesh, run_dir, policy, optimizer, progress, checkpointer, saver, publisher, metrics, profiler)


def _build_model(config: TrainingCommand, mesh: Mesh, build: Build[M]) -> tuple[M, TensorLayout]:
    """Return the model, with the weights that a fresh run begins with, and how they lie in files."""
    resume_step = config.ckpt.resume_step if config.ckpt else None
    weights_only = config.ckpt.weights_only if config.ckpt else None
    report("loading model")
    has_other_weights = resume_step is not None or weights_only is not None
    policy = build(config.model, mesh, seed=config.seed, weights=not has_other_weights)
    layout = TensorLayout(policy.hf_model, names_in_files(config.model.name))
    if weights_only is not None:
        report("loading weights", path=str(weights_only))
        tensors = trained_tensors(policy.hf_model)
        load_weights_only(tensors, weights_only, how="size", layout=layout)  # the launcher read every byte
    return policy, layout
