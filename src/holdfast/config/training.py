"""Settings that every training program has, settings of `sft` and LoRA, and the learning-rate schedule.

The schedule is a pure function of settings and step, so a checkpoint holds no scheduler state.
"""

# Types narrow the type of their base, which nobody sets.
# pyright: reportIncompatibleVariableOverride=false

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from holdfast.config.base import BY_DEVICE, CkptConfig, Command, DType, LogFormat, ModelConfig, Section
from holdfast.config.by_type import ByType
from holdfast.config.cluster import SlurmConfig
from holdfast.config.data import MixedDataConfig, SftDataConfig
from holdfast.config.evaluation import CheckpointEvalConfig
from holdfast.config.marks import Mark, Picked, marked
from holdfast.config.view import DashboardConfig, Hooks, ProfiledSteps, StepWindow, TrackingConfig


class LoraConfig(Section):
    """Low-rank adapters: the model stays as it is, and A and B of W + scale * B A are trained."""

    rank: int = Field(default=16, ge=1)
    """LoRA: rank of the adapters. A has so many rows, and B so many columns."""

    alpha: float = Field(default=32.0, gt=0)
    """The product of B and A counts alpha / rank times, or with `use_rslora` alpha / sqrt(rank) times."""

    use_rslora: bool = False
    """Rank-stabilised LoRA (Kalajdzievski 2023): larger ranks need no smaller learning rate."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapters' input. Not with `rl`, whose engines have none."""

    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Which linear layers get an adapter: all of the decoder, or layers whose names end like a name here, such as
    ["q_proj", "v_proj"]."""

    @property
    def plain_alpha(self) -> float:
        """The alpha with which adapters without `use_rslora` have the same scale."""
        return self.alpha * math.sqrt(self.rank) if self.use_rslora else self.alpha

    @field_validator("target_modules")
    @classmethod
    def _some(cls, names: str | list[str]) -> str | list[str]:
        if not names:
            raise ValueError("must name at least one layer, or be 'all-linear'")
        return sorted(set(names)) if isinstance(names, list) else names


_RDZV_PORT = 29400  # the port of torchrun


class TrainedModelConfig(ModelConfig):
    """The model to train, and how it is held in memory."""

    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` loads the weights of `model.name`; `random` reads its config.json only and
    initialises from `seed`."""

    dtype: DType | None = None
    """Dtype of forward, backward and published weights. Master weights and optimizer state are always float32. Unset:
    the dtype of the run that is resumed, else bfloat16 on CUDA and float32 on CPU."""

    attention: str = "packed"
    """`packed` (causal attention per sample, any device; where a model asks for more, `sdpa` or `eager` of
    transformers) or the name of a transformers attention implementation, such as `flash_attention_2`. `sdpa` and
    `eager` get one sample a row."""

    activation_checkpointing: Annotated[bool | None, Mark.DEVICE, Picked(0)] = None
    """Recompute each layer in the backward pass: less memory, about a third more time. Unset: only on CUDA."""

    compile: bool = False
    """torch.compile each layer. Pays on GPUs; on CPU compiling often costs more than it brings."""

    fp32_lm_head: bool = False
    """Compute logits in float32 if `dtype` is bfloat16. Hidden states and weights of the output layer stay bfloat16;
    sums of their products are float32. `rl` gives it to its inference server."""

    logits_chunk_tokens: Annotated[int | None, Mark.DEVICE, Picked(1)] = Field(default=None, ge=1)
    """Logits exist for at most this many tokens at once. Unset: 1024 on CUDA, 4096 on CPU."""

    lora: Annotated[LoraConfig | None, Picked(3)] = None
    """Train LoRA adapters instead of the weights; a bare `--model.lora` takes the defaults."""

    @property
    def compute_dtype(self) -> DType:
        """`dtype`; if nothing has resolved it for a device, the CPU's."""
        return self.dtype or BY_DEVICE["cpu"].dtype

    @property
    def head_chunk_tokens(self) -> int:
        """`logits_chunk_tokens`; if nothing has resolved it for a device, the CPU's."""
        return self.logits_chunk_tokens or BY_DEVICE["cpu"].logits_chunk_tokens

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> Self:
        if self.lora is not None and self.init == "random":
            raise ValueError("has lora, which adapts pretrained weights, and init = 'random': leave one of them out")
        return self


class ParallelConfig(Section):
    """Ranks, threads and devices of the trainer."""

    num_ranks: int | None = Field(default=None, ge=1)
    """Processes to start on this machine; the model is sharded over them. Unset: one for every GPU that the trainer
    is given, one on CPU."""

    replicas: int = Field(default=1, ge=1)
    """Copies of the model (HSDP): each is sharded over the ranks divided by this, and gradients are averaged over the
    copies. Give as many as there are machines, so that parameters are gathered within one."""

    sequence_parallel: int = Field(default=1, ge=1)
    """Ranks that share the rows of a micro-batch (Ulysses), each with a slice of the tokens: for samples too long for
    the memory of one. Divides the heads of attention, so there must be a multiple of them: see docs/clusters.md."""

    expert_parallel: int = Field(default=1, ge=1)
    """Ranks among which the experts of a mixture of experts are divided: tokens travel to their experts, in the place
    of parameters to tokens. Divides the ranks of a replica and the number of experts: see docs/clusters.md."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the memory of the host: a layer is copied to the GPU while it
    is computed, and the optimizer steps on the CPU. For models that do not fit otherwise: it is much slower."""

    nodes: int = Field(default=1, ge=1)
    """Machines that train one model, each with `num_ranks`: start the same command on every one, with one `output_dir`
    that all share. Under an outer `torchrun` or `srun` with one process per machine: as many as it has."""

    rdzv_endpoint: str | None = None
    """`HOST:PORT` where several nodes meet. HOST is a node of the run, which prepares the run, and PORT is free there
    (29400 unless given). Under an outer `torchrun` or `srun`: its first machine."""

    rdzv_timeout_s: float = Field(default=900.0, gt=0)
    """How long nodes wait for one another: at the start, and for a lost node to come back."""

    max_restarts: int = Field(default=3, ge=0)
    """Within ten minutes the trainer of several nodes is started again at most this many times; needs `ckpt`. Under
    `rl` its own `max_restarts` counts."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each rank; unset: the cores this process is given, divided by the ranks; half of them in `rl`
    with an engine on GPUs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA on a machine with GPUs, and is an error where PyTorch cannot use them."""

    card_gb: float | None = Field(default=None, gt=0)
    """With `dry_run`: the memory of one GPU in GB, such as 24 or 80, on this machine or not. Only the plan of a step on
    such GPUs is made, from the config.json of the model: no weights, tokenizer or data are looked at. It is an
    error if something does not fit, with ways out."""

    collective_timeout_s: float = Field(default=1800.0, gt=0)
    """A collective that takes longer than this fails, and names itself."""

    @property
    def ranks(self) -> int:
        """`num_ranks`; where nothing has resolved it for a device, one."""
        return self.num_ranks or 1

    @model_validator(mode="after")
    def _divides_its_ranks(self) -> Self:
        if self.expert_parallel > 1 and self.cpu_offload:
            raise ValueError(
                "cpu_offload does not go with expert_parallel above 1, whose experts stay on the GPU: leave one of "
                "them out"
            )
        if self.num_ranks is not None:  # else when that is known
            self.check_ranks(self.world_size)
        return self

    def check_ranks(self, world_size: int) -> None:
        """Check that all ranks, of all machines, can be divided as the settings say. Raise ValueError if not."""
        for name, size in (("replicas", self.replicas), ("sequence_parallel", self.sequence_parallel)):
            if world_size % size:
                raise ValueError(
                    f"{name} = {size} does not divide the number of ranks, {world_size}: set parallel.num_ranks to a "
                    f"multiple of it, or {name} to a divisor"
                )
        ranks = world_size // self.replicas
        if ranks % self.expert_parallel:
            raise ValueError(
                f"expert_parallel = {self.expert_parallel} does not divide the ranks of a copy of the model, {ranks}: "
                "set parallel.num_ranks to a multiple of it, or expert_parallel to a divisor"
            )

    @property
    def world_size(self) -> int:
        """Ranks of all nodes together."""
        return self.nodes * self.ranks

    @property
    def rendezvous(self) -> tuple[str, int]:
        """Host and port of `rdzv_endpoint`, which is set."""
        assert self.rdzv_endpoint is not None
        return host_and_port(self.rdzv_endpoint)

    @field_validator("rdzv_endpoint")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            host_and_port(value)
        return value


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Split HOST, HOST:PORT or [IPv6]:PORT. Raise ValueError if it is another text."""
    try:
        parts = urlsplit(f"//{endpoint}")
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")
    except ValueError:  # no number, a number above all ports, half a bracket, or a name that no host has
        parts = host = port = None
    is_plain = parts is not None and parts.netloc == endpoint and not re.search(r"[\s@]|:$", endpoint)
    if not (host and is_plain) or port == 0:
        raise ValueError(f"should be HOST:PORT or HOST, such as head:{_RDZV_PORT}, got '{endpoint}'")
    return host, port or _RDZV_PORT


MAX_BFLOAT16_DECAY = 0.96
"""A moment v in bfloat16 stands still where a step changes it by less than half a unit, 2^-8 v at most. Its target must
then differ by the share 2^-8 / (1 - decay): 8 % of v at the default 0.95, a tenth here, four times v at 0.999."""


class OptimConfig(Section):
    """Optimizer, gradient clipping and the learning-rate schedule."""

    type: str
    """`adamw`, or `muon` for the matrices of the decoder layers, with AdamW for embeddings, head, norms, biases and
    stacked experts. Muon's updates are scaled to the size of AdamW's, so the same rates suit both."""

    lr: Annotated[float, Mark.RATE] = Field(default=1e-5, gt=0)
    """Peak learning rate. Unset, adapters (LoRA) have ten times as much."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""

    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of AdamW's two moments and Muon's momentum in memory and in checkpoints. `bfloat16` halves their bytes, as
    in DeepSeek-V3. Steps are computed in float32. It needs decay rates of at most 0.96 (docs/memory.md)."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; vectors (norms, biases) are never decayed."""

    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Clip the global gradient norm to this; `inf`: never clip."""

    schedule: Annotated[Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"], Mark.RATE] = "constant"
    """Shape of the learning rate after warm-up, until `schedule_steps`: `constant`, a line or half a cosine that begins
    at `lr`, or `wsd` (warm-up, stable, decay): a line in the last `decay_steps`. `inverse_sqrt` has no end."""

    schedule_steps: int | None = Field(default=None, ge=1)
    """Last step of the schedule; unset: max_steps. Later steps keep its rate."""

    decay_steps: int | None = Field(default=None, ge=1)
    """With `wsd`: steps in which the rate falls; unset: a tenth of all."""

    warmup_steps: Annotated[int, Mark.RATE] = Field(default=0, ge=0, validate_default=False)
    """Steps of linear warm-up: of 10, the first trains at a tenth of `lr`, the tenth at `lr`. Unset: a tenth of all
    steps if the rate falls in `sft`, `dpo` or `reward-model`, else none."""

    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The schedule falls towards `lr` times this, which a step after its last would have."""

    @field_validator("betas")
    @classmethod
    def _decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("should be two numbers from 0 on and below 1")
        return betas

    @model_validator(mode="after")
    def _moments_move(self) -> Self:
        if self.moments_dtype == "bfloat16" and not self.fits_bfloat16:
            rates = self.model_dump(mode="json", include={"betas", "momentum"})
            given = " and ".join(f"{name} = {rate}" for name, rate in rates.items())
            raise ValueError(
                f"moments_dtype = 'bfloat16' needs decay rates of at most {MAX_BFLOAT16_DECAY:g}, got {given}: a "
                "step changes a slower moment by less than bfloat16 can hold, and the moment stands still. Lower the "
                "rate, or leave moments_dtype out"
            )
        return self

    @property
    def fits_bfloat16(self) -> bool:
        """Whether every moment decays fast enough to be held in bfloat16."""
        return max(self.betas) <= MAX_BFLOAT16_DECAY

    def check_warmup(self, max_steps: int, section: str) -> None:
        """Check that warm-up ends before the schedule does. Raise ValueError if it does not; the message names settings
        as settings of `section`."""
        end, name = max_steps, "max_steps"
        if self.schedule_steps is not None:
            end, name = self.schedule_steps, f"{section}.schedule_steps"
        if self.warmup_steps >= end and self.warmup_steps > 0:
            raise ValueError(f"{section}.warmup_steps ({self.warmup_steps}) must be below {name} ({end})")
        if self.decay_steps is not None and self.warmup_steps + self.decay_steps > end:
            raise ValueError(
                f"{section}.warmup_steps ({self.warmup_steps}) and {section}.decay_steps ({self.decay_steps}) are more "
                f"than {name} ({end})"
            )

    def check_schedule(self, section: str) -> None:
        """Check that settings have an effect with the schedule. Raise ValueError if one has none; the message names
        settings as settings of `section`."""
        instead = f"has no effect with {section}.schedule = '{self.schedule}': leave it out, or set schedule to"
        if self.schedule in _ENDLESS and self.min_lr_ratio:
            raise ValueError(f"{section}.min_lr_ratio = {self.min_lr_ratio:g} {instead} 'linear', 'cosine' or 'wsd'")
        if self.schedule != "wsd" and self.decay_steps is not None:
            raise ValueError(f"{section}.decay_steps = {self.decay_steps} {instead} 'wsd'")


class AdamWConfig(OptimConfig):
    """AdamW."""

    type: Literal["adamw"] = "adamw"


class MuonConfig(OptimConfig):
    """Muon, with AdamW for what Muon is not for."""

    type: Literal["muon"] = "muon"

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of Muon's momentum."""

    @property
    def fits_bfloat16(self) -> bool:
        """Whether every moment decays fast enough to be held in bfloat16."""
        return super().fits_bfloat16 and self.momentum <= MAX_BFLOAT16_DECAY


AnyOptim = Annotated[AdamWConfig | MuonConfig, ByType("adamw")]

_LORA_RATE = 10
"""Schulman et al. 2025, LoRA Without Regret: the best rate of adapters is about ten times the rate of whole weights."""
_WARMUP_SHARE = _DECAY_SHARE = 10
_ENDLESS = ("constant", "inverse_sqrt")
_TIMESCALE = 10_000
"""The scale of `inverse_sqrt` without warm-up, as in transformers."""
RATES = marked(OptimConfig, Mark.RATE)


class StopConfig(Section):
    """When training ends before its last step: a metric has not improved for some time (early stopping)."""

    metric: str = Field(min_length=1)
    """Needed: the metric that has to improve, such as `val/loss`; `min:NAME` or `max:NAME` if the name does not say
    which values are better."""

    patience: int = Field(default=3, ge=1)
    """The run ends when so many values in a row are not better than the best value before."""

    @property
    def is_validated(self) -> bool:
        """Whether the metric comes from validation."""
        return self.metric.removeprefix("min:").removeprefix("max:").startswith("val/")


class TrainingCommand(Command):
    """Settings of every training program."""

    program: ClassVar[str]
    """Name of the program: of its command, its module in `holdfast.trainer.programs`, and in its checkpoints."""

    rates: ClassVar[Mapping[str, Any]] = {}
    """The program's values of unset settings of `optim`, if they are not the defaults."""

    max_steps: Annotated[int, Mark.FREE] = Field(default=100, ge=1)
    """Train until this optimizer step (counted from the start of the run, also on resume)."""

    clean: Annotated[bool, Mark.FREE, Mark.PLACE] = False
    """Remove a run that the output directory already holds, then start from scratch."""

    deterministic: bool = False
    """On GPUs take algorithms that give the same bits every time, for more time a step, and fail if there is none.
    On CPU all do, and this changes nothing."""

    log_format: Annotated[LogFormat, Mark.FREE] = "text"
    """Form of stdout: lines for people, or `json`: one JSON object a line, see docs/console.md."""

    keep_attempts: Annotated[Annotated[int, Field(ge=1)] | Literal["all"], Mark.FREE] = 20
    """Keep logs, settings, and what was set aside, of this many of the newest starts and restarts, or of `all`."""

    profile: Annotated[StepWindow | None, Mark.FREE] = None
    """Steps of the trainer to record, `FIRST:LAST`, both included, such as 3:5: a trace of each rank, for
    ui.perfetto.dev (docs/console.md)."""

    model: TrainedModelConfig = Field(default_factory=TrainedModelConfig)
    """The model to train."""

    optim: AnyOptim = Field(default_factory=AdamWConfig)
    """Optimizer and learning-rate schedule."""

    parallel: Annotated[ParallelConfig, Mark.FREE] = Field(default_factory=ParallelConfig)
    """Ranks, threads and devices."""

    ckpt: Annotated[CkptConfig | None, Mark.FREE] = None
    """Checkpoints: off unless given; a bare `--ckpt` writes the final step."""

    tracking: Annotated[TrackingConfig | None, Mark.FREE] = None
    """Experiment trackers that get the metrics: none unless given; a bare `--tracking` writes for TensorBoard."""

    dashboard: Annotated[DashboardConfig | None, Mark.FREE] = None
    """Serve the report of the run during the run: not unless given; a bare `--dashboard` at 127.0.0.1:9466."""

    stop: Annotated[StopConfig | None, Mark.FREE] = None
    """End the run before its last step, when a metric does not improve any more: not unless given."""

    hooks: Annotated[Hooks, Mark.FREE] = []
    """Classes of your own that are called after steps, evaluations and saves: `module:Class`, or a table with `type`,
    `name` and `args` (docs/console.md)."""

    @property
    def length_flag(self) -> str:
        """The flag that says how long to train."""
        return "--max-steps"

    @property
    def profiled_steps(self) -> ProfiledSteps | None:
        """The steps that `profile` names."""
        return ProfiledSteps.parse(self.profile) if self.profile is not None else None

    def settle_rates(self, kept: Mapping[str, Any]) -> None:
        """Fill in, in place, what is unset of the learning rate and its schedule; what was given stays. `kept`: the
        same settings of the resumed run, which come first."""
        given = set(self.optim.model_fields_set)
        values = {"lr": OptimConfig.model_fields["lr"].default, **self.rates}
        if self.model.lora is not None:
            values["lr"] = float(f"{_LORA_RATE * values['lr']:g}")
        if "schedule" in self.rates and (self.optim.schedule != "constant" or "schedule" not in given):
            values["warmup_steps"] = (self.optim.schedule_steps or self.max_steps) // _WARMUP_SHARE
        values |= {name: kept[name] for name in RATES if name in kept}
        self.optim = self.optim.model_copy(update={name: value for name, value in values.items() if name not in given})
        self.optim.model_fields_set.intersection_update(given)  # what a run keeps may still replace the rest

    def check_steps(self) -> None:
        """Check what depends on the last step, where that is known. Raise ValueError with the reason."""
        if self.max_steps and self.profiled_steps is not None:
            self.profiled_steps.check(self.max_steps)
        if self.max_steps:
            self.optim.check_warmup(self.max_steps, "optim")

    @model_validator(mode="after")
    def _parts_go_together(self) -> Self:
        self.settle_rates({})
        self.check_steps()
        for name in ("sequence_parallel", "expert_parallel"):
            if self.model.compile and getattr(self.parallel, name) > 1:
                raise ValueError(
                    f"model.compile does not go with parallel.{name} above 1, whose exchanges between ranks would cut "
                    "every layer in pieces: leave one of them out"
                )
        if self.parallel.expert_parallel > 1 and self.optim.type == "muon":
            raise ValueError(
                "optim.type = 'muon' does not go with parallel.expert_parallel above 1: set optim.type = 'adamw', or "
                "leave parallel.expert_parallel out"
            )
        if self.optim.type == "muon" and self.model.lora is not None:
            raise ValueError(
                "optim.type = 'muon' is for whole matrices, and model.lora trains factors of a change to them: set "
                "optim.type = 'adamw', or leave lora out"
            )
        return self


class SupervisedCommand(TrainingCommand):
    """Settings of every training program on rows of data."""

    alternatives = (("max_steps", "epochs"), ("epochs", "max_steps"))
    rates = {"schedule": "linear"}

    max_steps: int = Field(default=0, ge=1, validate_default=False)
    """Train until this optimizer step (counted from the start of the run, also on resume). Unset: for `epochs`."""

    epochs: Annotated[float | None, Mark.FREE] = Field(default=None, gt=0)
    """Train on all samples this many times, in the place of `max_steps`. Unset, as well as that: 1."""

    data: SftDataConfig = Field(default_factory=SftDataConfig)
    """Samples and batches."""

    val_interval: Annotated[int | None, Mark.FREE] = Field(default=None, ge=1)
    """Steps between validations; unset: after the final step only. Needs data.validation_fraction."""

    sample: Annotated[int | None, Mark.FREE] = Field(default=None, ge=1)
    """With `dry_run`: show what is trained of this row of the data, counted from 1, and not of the first."""

    slurm: SlurmConfig | None = None
    """Submit a SLURM job that makes the run, and end; `--dry-run` prints its script."""

    @property
    def length_flag(self) -> str:
        """The flag that says how long to train."""
        return "--max-steps" if self.epochs is None else "--epochs"

    @model_validator(mode="after")
    def _something_to_validate_on(self) -> Self:
        if self.val_interval is not None and self.data.validation_fraction == 0:
            raise ValueError(f"val_interval = {self.val_interval} needs data.validation_fraction above 0, got 0")
        if self.stop is not None and self.stop.is_validated and self.val_interval is None:
            raise ValueError(
                f"stop.metric = '{self.stop.metric}' needs val_interval, and data.validation_fraction above 0"
            )
        return self


NOT_ON_NODES = (
    "eval has a server beside the trainer, on one machine, and this run has several nodes or is a job of SLURM: leave "
    "eval out, and start `evaluate --run OUTPUT_DIR --follow` where there is room for it"
)


class EvaluatedCommand(SupervisedCommand):
    """Settings of every training program of a policy on rows of data."""

    eval: Annotated[CheckpointEvalConfig | None, Mark.FREE] = None
    """Evaluations on held-out tasks during training; unset: none."""

    @model_validator(mode="after")
    def _has_checkpoints_to_evaluate(self) -> Self:
        if self.eval is None:
            return self
        interval, every = self.eval.interval, self.ckpt.interval if self.ckpt is not None else None
        if every is None or interval % every:
            found = "there are none but of the last step" if every is None else f"ckpt.interval = {every}"
            raise ValueError(
                f"eval.interval = {interval} evaluates the checkpoint of every step that it divides, and {found}: set "
                f"ckpt.interval to {interval}, or to what divides that"
            )
        if self.parallel.nodes > 1 or self.slurm is not None:
            raise ValueError(NOT_ON_NODES)
        return self

    def awaits_evaluation(self, step: int) -> bool:
        """Whether the checkpoint of `step` is evaluated."""
        return self.eval is not None and (step % self.eval.interval == 0 or step == self.max_steps)


class SftConfig(EvaluatedCommand):
    """Supervised fine-tuning: `uv run sft @ configs/reverse_text/sft.toml`."""

    program = "sft"
    rates = {"lr": 2e-5, "schedule": "linear"}

    data: MixedDataConfig = Field(default_factory=MixedDataConfig)
    """Samples and batches."""


def schedule_end(config: OptimConfig, max_steps: int) -> int | None:
    """Return the step at which the schedule ends; None if the rate does not depend on it."""
    return None if config.schedule in _ENDLESS else config.schedule_steps or max_steps


def learning_rate(step: int, config: OptimConfig, max_steps: int) -> float:
    """Return the learning rate of the 1-based optimizer step `step`; it is never 0.

    Linear warm-up, `lr * step / warmup_steps`; then `lr`, or from `lr` on the first step after the warm-up down a line
    or half a cosine, which would be at `lr * min_lr_ratio` on the step after `schedule_steps` (unset: `max_steps`), or
    by `lr * sqrt(warmup_steps / step)` without an end (without warm-up: as after 10,000 steps).
    That is what transformers' schedules give after `step - 1` steps, and within the warm-up after `step`: theirs begins
    with a step at rate 0, which trains nothing. Steps after `schedule_steps` keep the rate of that step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    end = schedule_end(config, max_steps)
    if end is None:
        scale = config.warmup_steps or _TIMESCALE
        root = math.sqrt((step - 1 - config.warmup_steps + scale) / scale)
        return config.lr / root if config.schedule == "inverse_sqrt" else config.lr
    begin = config.warmup_steps
    if config.schedule == "wsd":
        begin = max(begin, end - (config.decay_steps or max(1, end // _DECAY_SHARE)))
    progress = max(0.0, (min(step, end) - 1 - begin) / (end - begin))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
