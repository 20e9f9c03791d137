"""The start of every training program (ranks, model, optimizer, counters, checkpoints), and its metrics per step."""

from __future__ import annotations

import logging
import math
import re
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import psutil
import torch
from transformers import PreTrainedTokenizerBase

from holdfast.config.training import TrainingCommand
from holdfast.errors import Stopped
from holdfast.process.events import report
from holdfast.process.heartbeat import moved
from holdfast.run.metrics import MetricsWriter
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import record, start_timeline
from holdfast.trainer.checkpoint.checkpointer import Checkpointer
from holdfast.trainer.checkpoint.init_from import load_weights_only
from holdfast.trainer.checkpoint.state import State, seed_everything
from holdfast.trainer.data.samples import load_tokenizer
from holdfast.trainer.hooks import Hooks
from holdfast.trainer.mesh import Mesh, open_mesh
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.lora import Adapters, is_adapted
from holdfast.trainer.model.parity_check import check_model, was_checked
from holdfast.trainer.model.policy import Policy
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.tensor_names import TensorLayout, names_in_files
from holdfast.trainer.model.value_model import ScalarModel
from holdfast.trainer.optimizer import build_optimizer
from holdfast.trainer.profiling import Profiler
from holdfast.trainer.saving import GraceOver, Saver, identity_of, make_checkpointer, open_storage, resume
from holdfast.trainer.state import Progress, TrainState

_LAST_SAVE_S = 60.0
_log = logging.getLogger("trainer")

M = TypeVar("M", bound=Policy | ScalarModel)

_JUMP = 1000.0
_RECENT_STEPS = 50
_ZERO_STEPS = 3
_HIGH_STEPS = 3
_HIGH_SHARE = 1.5
_HIGH_NATS = 1.0
_MISMATCH_KL = 1.0


class DivergenceWatch:
    """Warns if the metrics of steps show that training diverges or learns nothing, once when it begins.

    Nothing is saved: a resumed run begins without a history."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._num_zeros = 0
        self._lowest = math.inf
        self._highest = -math.inf
        self._high: list[float] = []
        self._lasting: set[str] = set()

    def check(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the warnings of a step, without conditions that an earlier step has reported."""
        found = {
            "jump": self._jump(metrics),
            "zero": self._zero(metrics),
            "high": self._high_loss(metrics),
            "cut": _all_cut(metrics),
            "mismatch": _disagree(metrics),
        }
        new = [text for name, text in found.items() if text is not None and name not in self._lasting]
        self._lasting = {name for name, text in found.items() if text is not None}
        return new

    def _jump(self, metrics: Mapping[str, float | None]) -> str | None:
        norm = metrics.get("grad_norm")
        if not norm:
            return None
        median = statistics.median(self._norms) if self._norms else norm
        if norm <= _JUMP * median:
            self._norms.append(norm)
            return None
        return (
            f"the gradient norm is {norm:.3g}, and {median:.3g} was usual: training diverges. Lower optim.lr, or add "
            "optim.warmup_steps, and continue from an earlier checkpoint"
        )

    def _zero(self, metrics: Mapping[str, float | None]) -> str | None:
        self._num_zeros = self._num_zeros + 1 if metrics.get("grad_norm") == 0 else 0
        if self._num_zeros < _ZERO_STEPS:
            return None
        why = (
            "the answers of every group earn the same reward" if "reward/mean" in metrics else "the loss is at its end"
        )
        return (
            f"the gradient is exactly 0 for {_ZERO_STEPS} steps: nothing is learned any more. Perhaps {why}, or "
            "optim.lr was too high and has spoilt the weights"
        )

    def _high_loss(self, metrics: Mapping[str, float | None]) -> str | None:
        loss = metrics.get("loss")
        if loss is None or "mismatch_kl" in metrics:  # not the loss of `rl`
            return None
        if loss > max(_HIGH_SHARE * self._lowest, self._lowest + _HIGH_NATS, self._highest):
            self._high.append(loss)
        else:
            self._highest = max(self._highest, loss, *self._high)
            self._lowest = min(self._lowest, loss)
            self._high.clear()
        if len(self._high) < _HIGH_STEPS:
            return None
        return (
            f"the loss is {loss:.3g}, {self._lowest:.3g} was its best, and for {_HIGH_STEPS} steps it is above all "
            "before them: the model gets worse. Lower optim.lr, or add optim.warmup_steps, and continue from an "
            "earlier checkpoint"
        )


def finding_of(warning: str) -> str:
    """Return the first clause of a warning, without advice."""
    return re.split(r"[:.] ", warning, maxsplit=1)[0]


def _disagree(metrics: Mapping[str, float | None]) -> str | None:
    mismatch_kl = metrics.get("mismatch_kl")
    if mismatch_kl is None or mismatch_kl <= _MISMATCH_KL:
        return None
    return (
        f"mismatch_kl is {mismatch_kl:.3g} nats per token: the trained policy is far from the policy that sampled. "
        "Lower optim.lr or async_level, and continue from an earlier checkpoint"
    )


def _all_cut(metrics: Mapping[str, float | None]) -> str | None:
    if metrics.get("rollout/truncated") != 1:
        return None
    return (
        "all answers of the batch ended at a token limit, none by itself. Raise orchestrator.sampling.max_tokens (and "
        "orchestrator.seq_len), or ask for shorter answers. What cut answers count for: trainer.rewards.truncated"
    )


@dataclass(frozen=True)
class TrainSession(Generic[M]):
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
    hooks: Hooks
    profiler: Profiler | None = None
    watch: DivergenceWatch = field(default_factory=DivergenceWatch)
    warned: dict[str, int] = field(default_factory=dict)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of `step`, and warn if training diverges. Call before saving the step."""
        if self.metrics is not None:
            self.metrics.write(step, metrics)
            for warning in self.watch.check(metrics):
                report(f"WARNING: {warning}", step=step)
                self.warned[finding_of(warning)] = step

    def publish_last(self) -> None:
        """Publish the weights of the last step, and remove older versions. Collective."""
        step = self.progress.step
        report("publishing weights", step=step)
        self.publisher.publish(step)
        self.publisher.prune({step})

    def __enter__(self) -> TrainSession[M]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last save, and after success for all ranks."""
        self.hooks.close()
        if kind is not None:
            if not issubclass(kind, GraceOver):
                # Bounded: if another rank has ended, a collective may hang.
                self.checkpointer.wait(_LAST_SAVE_S)
                if self.profiler is not None:
                    self.profiler.stop(self.progress.step, is_agreed=issubclass(kind, Stopped))
            return
        self.saver.close()
        if self.metrics is not None:
            self.metrics.close()
        # The launcher would take the early end of one rank for a failure.
        self.mesh.barrier()
        for warning, step in self.warned.items():
            report(f"WARNING at step {step}: {warning}")
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
    build: Callable[..., M],
    *,
    pack: bool,
    share: bool = False,
    components: Callable[[M], tuple[Mapping[str, State], Sequence[torch.optim.Optimizer]]] | None = None,
    data_fingerprint: str = "",
    older_weights: int = 0,
) -> TrainSession[M]:
    """Build the model and all around it, and load the step that the run resumes. Collective.

    Args:
        build: makes the model: `build_policy` or `build_scalar_model`.
        pack: whether rows hold several samples.
        share: whether samples of a row share the tokens of their prompt.
        components: returns further state and its optimizers, given the model with its first weights.
        data_fingerprint: of the training data, if the trainer has them.
        older_weights: how many earlier versions of published weights a checkpoint needs.
    """
    run_dir = RunDir(config.output_dir)
    ckpt = config.ckpt
    resume_step = ckpt.resume_step if ckpt else None
    policy, layout = build_model(config, mesh, build)
    optimizer = build_optimizer(policy.hf_model, config.optim)
    # Before loading, which writes into their tensors.
    further, optimizers = components(policy) if components else ({}, ())
    adapters = None
    if is_adapted(policy.hf_model):
        adapters = Adapters(policy.hf_model, layout, base_name=config.model.name)
        further = {**further, "base": adapters}
    progress, hooks = Progress(), Hooks(config, run_dir)
    publisher = WeightPublisher(
        run_dir, policy, tokenizer, mesh, dtype=config.model.compute_dtype, layout=layout, adapters=adapters
    )
    metrics = MetricsWriter(run_dir.metrics) if mesh.is_main else None
    storage = open_storage(config, run_dir, mesh, older_weights=older_weights)
    checkpointer = make_checkpointer(
        config,
        run_dir,
        TrainState(policy, optimizer, progress, {**further, "hooks": hooks}),
        identity=identity_of(config, run_dir, publisher, layout, data_fingerprint),
        storage=storage,
        metrics=metrics,
        updated_by=[optimizer, *optimizers],
    )
    if isinstance(resume_step, int):
        resume(checkpointer, run_dir, resume_step, data_fingerprint=data_fingerprint, mesh=mesh)
        _log.info("resumed from step %d: %d samples trained", resume_step, progress.samples)
    # After loading: with the trained weights.
    if not was_checked(config):
        check_model(policy, mesh, name=config.model.name, pack=pack, share=share, dtype=config.model.compute_dtype)
    if ckpt is not None:
        checkpointer.reserve()
        if mesh.is_main:
            _tell_of_room(checkpointer.num_bytes, run_dir)
    if isinstance(resume_step, int):
        storage.publish(run_dir.checkpoint(resume_step))  # the last attempt may have ended during the upload
    if mesh.is_main:
        start_timeline(run_dir.newest_logs(), "trainer", step=progress.step)
    saver = Saver(checkpointer, ckpt, mesh, max_steps=config.max_steps, committed=progress.step, storage=storage)
    window, profiler = config.profiled_steps, None
    if window is not None and progress.step < window.last:
        profiler = Profiler(window, run_dir, mesh, done=progress.step)
    return TrainSession(
        mesh, run_dir, policy, optimizer, progress, checkpointer, saver, publisher, metrics, hooks, profiler
    )


def _tell_of_room(num_bytes: int, run_dir: RunDir) -> None:
    """Print the size of a checkpoint, and how many the disk has room for."""
    try:
        room = shutil.disk_usage(run_dir.path).free // max(1, num_bytes)
    except OSError:  # the save reports this
        return
    report(f"a checkpoint takes about {num_bytes / 1e6:,.1f} MB; the disk has room for {room:,}")


def build_model(config: TrainingCommand, mesh: Mesh, build: Callable[..., M]) -> tuple[M, TensorLayout]:
    """Return the model with the weights of a fresh run, and their layout in files."""
    resume_step = config.ckpt.resume_step if config.ckpt else None
    init_from = config.ckpt.init_from if config.ckpt else None
    report("loading model")
    has_other_weights = resume_step is not None or init_from is not None
    policy = build(config.model, mesh, seed=config.seed, weights=not has_other_weights)
    layout = TensorLayout(policy.hf_model, names_in_files(config.model.name))
    if init_from is not None:
        report("loading weights", path=str(init_from))
        tensors = trained_tensors(policy.hf_model)
        load_weights_only(tensors, init_from, how="size", layout=layout)  # the launcher read every byte
    return policy, layout


# Spans of a name and step in the timeline; later spans are joined, else many updates would make it too long.
_SPANS_OF_A_NAME = 2


class Stopwatch:
    """Seconds in named phases since the last `take`, and spans for the timeline, without the time of the profiler."""

    def __init__(self, profiler: Profiler | None = None) -> None:
        self._profiler = profiler
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        self._step = 0
        self._counts: dict[str, int] = {}
        self._rest: dict[str, tuple[float, float]] = {}

    def begin_step(self, step: int) -> None:
        """Begin `step`. Collective."""
        self._tell_rest()
        self._step, self._counts = step, {}
        if self._profiler is not None:
            begin = time.perf_counter()
            self._profiler.begin_step(step)
            self._started += time.perf_counter() - begin

    def end(self) -> None:
        """End the last step. Collective."""
        self._tell_rest()
        if self._profiler is not None:
            self._profiler.end()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `time/<name>`."""
        moved()
        now, begin = time.time(), time.perf_counter()
        try:
            with nullcontext() if self._profiler is None else self._profiler.phase(name):
                yield
        finally:
            moved()
            key, seconds = f"time/{name}", time.perf_counter() - begin
            self._seconds[key] = self._seconds.get(key, 0.0) + seconds
            self._tell(name, now, now + seconds)

    def _tell(self, name: str, begin: float, end: float) -> None:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count <= _SPANS_OF_A_NAME:
            record(name, begin, end, step=self._step)
        else:
            self._rest[name] = (self._rest.get(name, (begin, end))[0], end)

    def _tell_rest(self) -> None:
        for name, (begin, end) in self._rest.items():
            record(name, begin, end, step=self._step, count=self._counts[name] - _SPANS_OF_A_NAME)
        self._rest = {}

    def take(self) -> dict[str, float]:
        """Return the phases and `time/step`, the wall time since the last call, and reset."""
        self._tell_rest()
        now = time.perf_counter()
        taken = {**self._seconds, "time/step": now - self._started}
        self._seconds, self._started = {}, now
        return taken


# Dense bfloat16 peak of one GPU in FLOP/s, by a part of its name (NVIDIA's data sheets).
_PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}


def throughput(mesh: Mesh, num_parameters: int, *, num_tokens: int, seconds: float) -> dict[str, float]:
    """Return `tokens_per_s`, `tflops` per device, and `mfu`, the share of the device's peak, if that is known.

    A token takes 6 operations per parameter (Chowdhery et al. 2022, "PaLM", appendix B, without its term for
    attention). Recomputed activations, passes without gradient and further epochs do not count."""
    flops_per_s = 6.0 * num_parameters * num_tokens / seconds / mesh.world_size
    metrics = {"tokens_per_s": num_tokens / seconds, "tflops": flops_per_s / 1e12}
    if mesh.device.type == "cuda":
        name = torch.cuda.get_device_name(mesh.device)
        peak = next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)
        metrics |= {"mfu": flops_per_s / peak} if peak is not None else {}
    return metrics


def memory_gib(mesh: Mesh) -> float:
    """Return the most memory of any rank in GiB: peak on a GPU, resident on a CPU."""
    if mesh.device.type == "cuda":
        own = torch.cuda.max_memory_allocated() / 2**30
    else:
        own = psutil.Process().memory_info().rss / 2**30
    return mesh.max({"memory": own})["memory"]


def step_metrics(session: TrainSession[Any], stopwatch: Stopwatch, *, num_tokens: int) -> dict[str, float]:
    """Return the metrics that every program reports after a step of `num_tokens` tokens. Collective."""
    mesh, progress = session.mesh, session.progress
    num_parameters = sum(parameter.numel() for parameter in session.policy.hf_model.parameters())
    memory = memory_gib(mesh)
    times = stopwatch.take()
    seconds = times["time/step"] - times.get("time/validation", 0.0)
    rates = throughput(mesh, num_parameters, num_tokens=num_tokens, seconds=seconds)
    counters = {"samples": progress.samples, "tokens": progress.tokens}
    return {"memory_gib": memory, **times, **rates, **counters}
