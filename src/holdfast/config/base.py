"""Base classes of all settings, sections that several processes share, URL checks, and tables of built-in algorithms.

A run chooses policy losses, advantages and preference losses by name. The settings take names, defaults and help from
the tables below and know no torch. The trainer imports the function of a name when a run asks for it. A new one needs
only its function and one line here:

    POLICY_LOSSES      an `Objective` in `holdfast.trainer.rl.losses`
    ADVANTAGES         a function of rewards or rollouts, see `BuiltInAdvantage`, in `holdfast.trainer.rl.advantages`
    PREFERENCE_LOSSES  a function `(PairLogprobs, PreferenceLossConfig) -> PairLosses` in
                       `holdfast.trainer.preference.losses`

Tests ask for a row in docs/losses.md or docs/preferences.md, with formula and source, for a slow reference in float64
(`tests.builders.slow_losses`), and that each name learns in a short run. `holdfast.orchestrator.env.registry` has the
table of environments.
"""

import ipaddress
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from holdfast.errors import ConfigError

DType = Literal["float32", "bfloat16"]
LogFormat = Literal["text", "json"]
KlEstimator = Literal["k1", "k2", "k3", "k3_unbiased"]
DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class DeviceDefaults:
    """Defaults for one kind of device.

    On CUDA the fast dtype is bfloat16. TensorFloat-32 (products with ten bits of mantissa) stays off: trainer and
    engine would disagree by more than `trainer.mismatch_limit` allows for float32.

    Attributes:
        dtype: `model.dtype` of trainer and engine.
        activation_checkpointing: `model.activation_checkpointing`. Memory is what GPUs run out of first.
        logits_chunk_tokens: `model.logits_chunk_tokens`. With 150,000 words, 4096 tokens take 10 GiB in float32.
        eager: `engine.eager`. On CPU compiling costs 15-30 s at the start and brings little; without CUDA graphs a GPU
            waits for the launches of its kernels.
    """

    dtype: DType
    activation_checkpointing: bool
    logits_chunk_tokens: int
    eager: bool


BY_DEVICE: dict[DeviceType, DeviceDefaults] = {
    "cpu": DeviceDefaults(dtype="float32", activation_checkpointing=False, logits_chunk_tokens=4096, eager=True),
    "cuda": DeviceDefaults(dtype="bfloat16", activation_checkpointing=True, logits_chunk_tokens=1024, eager=False),
}


def _check_plain(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Refuse true and false for numbers, which pydantic would take for 1 and 0, and text that no file can hold."""
    assert info.field_name is not None
    kinds = _kinds(cls.model_fields[info.field_name].annotation)
    if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
        raise ValueError("should be a number, not true or false")
    if Path in kinds and value == "":  # an unset variable of the shell, and not this directory
        raise ValueError("must not be empty; this directory is '.'")
    if not any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds):  # a section checks its own
        for text in _texts(value):
            _check_text(text)
    return value


def _check_text(text: str) -> None:
    if "\0" in text:
        raise ValueError("must not hold the character NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text in UTF-8, without halves of surrogate pairs") from None


def _texts(value: Any) -> Iterator[str]:
    """Yield all text in a value, however deep."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() | Path() as text:
                yield str(text)
            case list() | tuple() as items:
                waiting += items
            case dict() as entries:
                waiting += [*entries.keys(), *entries.values()]


def _kinds(annotation: Any) -> set[Any]:
    parts = typing.get_args(annotation)
    return set().union(*map(_kinds, parts)) if parts else {annotation}


class Section(BaseModel):
    """A part of a configuration. A docstring beneath a field is its ``--help`` text: `docs_tools.listing`."""

    model_config = ConfigDict(
        extra="forbid",
        defer_build=True,
        validate_default=True,
        ser_json_inf_nan="constants",
        allow_inf_nan=False,
    )

    _plain = field_validator("*", mode="before")(classmethod(_check_plain))


S = TypeVar("S", bound=Section)


def read_section(kind: type[S], values: Mapping[str, Any], *, key: str = "") -> S:
    """Return the section with these `values`, which no configuration holds. Raise ConfigError that names each value
    that cannot be used, and `key` before it."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        found = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors(include_input=False)]
        raise ConfigError(
            "; ".join(f"{key}{name} {said.removeprefix('Value error, ')}" for name, said in found)
        ) from None


class Command(Section):
    """The whole configuration of one command: what every command has."""

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of settings: a flag of the first removes the second from a file."""

    output_dir: Path = Path("outputs")
    """The run directory: checkpoints, rollouts, weights, metrics, logs and resolved configs."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """The one seed from which data order, initialisation and sampling are derived."""

    dry_run: bool = False
    """Make the checks that a real run makes before it starts anything, write the resolved TOML, print the plan, start
    nothing. Checked are all settings, local paths, environments and functions of your own (they are imported; the
    constructor of an environment of your own is not called), and every byte of the checkpoint or weights to start
    from. The rows of data on this machine are read. Not checked are names on a hub."""


class CkptConfig(Section):
    """Checkpoints. A bare ``--ckpt`` writes the final step only."""

    interval: int | None = Field(default=None, ge=1)
    """Save after every this many steps; unset: after the final step only."""

    every_minutes: float | None = Field(default=None, gt=0)
    """Save when this many minutes have passed since the last save; goes together with `interval`."""

    save_async: bool = True
    """Copy the state and write it in the background; off: training waits until it is committed."""

    on_failure: Literal["stop", "warn"] = "stop"
    """After a save that failed (disk full, I/O error): end the run, or warn and continue."""

    keep: int | None = Field(default=None, ge=1)
    """Keep this many of the newest checkpoints; unset: all stay, whatever the next two say."""

    keep_interval: int | None = Field(default=None, ge=1)
    """Keep the checkpoints of every this many steps for good, in addition to the newest `keep`."""

    keep_best: str | None = None
    """Keep the checkpoint with the best value of this metric in addition to the newest `keep`. Examples:
    `min:val/loss`, `max:reward/mean`. Without `min:` or `max:`: lower is better for losses, errors and divergences."""

    dir: str | None = None
    """Copy every committed checkpoint there as well, in the background: `s3://bucket/prefix` or any
    other URL of fsspec. A resume finds there what this machine does not have."""

    resume_step: int | Literal["latest", "auto"] | None = None
    """Continue from this step: a number, `latest` (-1 is the same; an error if there is none),
    or `auto` (the newest, or a fresh start if there is none)."""

    resume_dir: Path | None = None
    """Fork another run: start this one from OTHER/checkpoints/step_N with everything that it holds.
    Together with `resume_step = auto`, this run's own checkpoints come first."""

    weights_only: Path | None = None
    """Warm start: take the weights of a checkpoint or a Hugging Face directory and nothing else;
    optimizer, counters and data start from scratch."""

    verify: Literal["full", "size"] = "full"
    """Check before a checkpoint is used: every byte, or sizes only (for very large ones)."""

    grace_s: float = Field(default=60.0, gt=0)
    """On SIGTERM, SIGUSR1, SIGHUP or Ctrl-C: the time to save the current step before everything is stopped."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.keep_best is not None and not self.keep_best.removeprefix("min:").removeprefix("max:"):
            raise ValueError(f"keep_best = '{self.keep_best}' names no metric; write it as `max:reward/mean`")
        if self.weights_only is not None and self.resume_dir is not None:
            raise ValueError("weights_only takes the weights alone and resume_dir everything: give one of them")
        return self


class ModelConfig(Section):
    """Which model, by the name of a local directory or of a model on a hub."""

    name: str = ""
    """Directory with config.json, safetensors and tokenizer, or a hub id such as Qwen/Qwen3-0.6B. Needed."""

    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; unset: the same as `model.name`."""

    @property
    def tokenizer_name(self) -> str:
        """Source of the tokenizer."""
        return self.tokenizer or self.name


def check_url(url: str) -> str:
    """Return the base URL of a server. Other text is refused without repeating it: it may hold a password."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
        parts.hostname.encode("idna")  # sockets raise an error of their own for labels that are too long or empty
        if not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError
    except ValueError:  # also: brackets without an end, a port that is not a number
        raise ValueError("must be the URL of a server, such as http://127.0.0.1:8000") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "must not hold a user name or password, which would be kept with the run's settings and logs: the servers "
            "take an admin token, see admin_token_env"
        )
    if parts.query or parts.fragment:
        raise ValueError("must end with the path that comes before /health, without '?' and '#'")
    return url


Url = Annotated[str, AfterValidator(check_url)]


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine, and no other machine reaches it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_machine(header: str) -> bool:
    """Whether a Host header names this machine, and no other machine reaches it. No browser omits it."""
    if not header:
        return True
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name.removesuffix("."))


@dataclass(frozen=True, kw_only=True)
class BuiltInPolicyLoss:
    """A policy loss and the settings that act on it, with their defaults; docs/losses.md says where they are from.

    Attributes:
        function: its name in `holdfast.trainer.rl.losses`, an `Objective`.
    """

    function: str
    aggregation: Literal["sequence", "token", "constant"]
    ratio_to: Literal["sampler", "old"] | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_max: float | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of `PolicyLossConfig` that act on this loss."""
        values = {one.name: getattr(self, one.name) for one in fields(self)[1:]}
        return {name: value for name, value in values.items() if value is not None}


# fmt: off
POLICY_LOSSES = {
    "grpo": BuiltInPolicyLoss(function="clipped_objective", aggregation="sequence", ratio_to="sampler",
                              clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    "dr_grpo": BuiltInPolicyLoss(function="clipped_objective", aggregation="constant", ratio_to="sampler",
                                 clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    "dapo": BuiltInPolicyLoss(function="clipped_objective", aggregation="token", ratio_to="sampler",
                              clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "gspo": BuiltInPolicyLoss(function="gspo_objective", aggregation="sequence", ratio_to="old",
                              clip_low=3e-4, clip_high=4e-4, dual_clip=3.0),
    "gspo_token": BuiltInPolicyLoss(function="gspo_token_objective", aggregation="sequence", ratio_to="old",
                                    clip_low=3e-4, clip_high=4e-4, dual_clip=3.0),
    "cispo": BuiltInPolicyLoss(function="cispo_objective", aggregation="token", ratio_to="sampler",
                               clip_low=1.0, clip_high=4.0),
    "dppo": BuiltInPolicyLoss(function="dppo_objective", aggregation="token", ratio_to="sampler",
                              clip_low=0.2, clip_high=0.2, ratio_max=20.0),
    "ppo": BuiltInPolicyLoss(function="clipped_objective", aggregation="token", ratio_to="sampler",
                             clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    "policy_gradient": BuiltInPolicyLoss(function="policy_gradient_objective", aggregation="token",
                                         ratio_to="sampler", ratio_max=20.0),
    "sft": BuiltInPolicyLoss(function="likelihood_objective", aggregation="token"),
}
# fmt: on


@dataclass(frozen=True, kw_only=True)
class BuiltInAdvantage:
    """An advantage, and what it needs.

    Attributes:
        function: its name in `holdfast.trainer.rl.advantages`; None if a model beside the policy gives the advantages,
            and not the rewards of the batch.
        takes: `rewards`: the rewards of one problem, for each rollout the sum of its reward and its step rewards;
            `step_rewards`: rewards of rollouts and of steps apart; `rollouts`: `ScoredRollout` of the batch, by
            problem.
        settings: further arguments of the function, by the setting of `trainer` that each is.
        tells_tokens_apart: whether rewards of turns and tokens give the tokens of a rollout advantages of their own.
        compares_group: whether it compares the rollouts of one problem, and so needs two of them at least.
        help: what it is, for `--help`.
    """

    function: str | None
    takes: Literal["rewards", "step_rewards", "rollouts"] = "rewards"
    settings: Mapping[str, str] = field(default_factory=dict)
    tells_tokens_apart: bool = False
    compares_group: bool = True
    help: str


# fmt: off
ADVANTAGES = {
    "dr_grpo": BuiltInAdvantage(function="dr_grpo", help="reward - mean of the group"),
    "grpo": BuiltInAdvantage(function="grpo", help="(reward - mean) / std of the group"),
    "grpo_process": BuiltInAdvantage(function="grpo", takes="step_rewards", tells_tokens_apart=True,
                                     help="`grpo`, and the same among rewards of turns or tokens"),
    "rloo": BuiltInAdvantage(function="rloo", help="reward - mean of the others"),
    "max_rl": BuiltInAdvantage(function="max_rl", help="(reward - mean) / mean"),
    "opo": BuiltInAdvantage(function="opo_of_rollouts", takes="rollouts", help="reward - mean by length"),
    "pass_at_k": BuiltInAdvantage(function="pass_at_k", settings={"k": "advantage_k"},
                                  help="what a rollout adds to the best of `advantage_k`"),
    "gdpo": BuiltInAdvantage(function="gdpo", takes="rollouts", settings={"weights": "rewards.weights"},
                             help="every reward of `rewards.weights` normalised"),
    "online_dpo": BuiltInAdvantage(function="online_dpo", takes="rollouts",
                                   settings={"beta": "advantage_beta"}, help="DPO of the best and the worst"),
    "reinforce_pp_baseline": BuiltInAdvantage(function="reinforce_pp_baseline", takes="rollouts",
                                              help="reward - mean of the group, normalised over the batch's tokens"),
    "reinforce_pp": BuiltInAdvantage(function="reinforce_pp", takes="rollouts", tells_tokens_apart=True,
                                     compares_group=False, help="(reward - mean) / std over the tokens of the batch"),
    "gae": BuiltInAdvantage(function=None, tells_tokens_apart=True, compares_group=False, help="by the critic"),
    "distillation": BuiltInAdvantage(function=None, compares_group=False,
                                     help="of the teacher alone, rewards are only measured"),
}
# fmt: on

GROUP_ADVANTAGES = tuple(name for name, one in ADVANTAGES.items() if one.compares_group)
"""Advantages that compare the rollouts of one problem with one another, and need two of them at least."""
SINGLE_ADVANTAGES = tuple(name for name, one in ADVANTAGES.items() if not one.compares_group)
"""Advantages for which one rollout of a problem is enough."""
REWARD_ADVANTAGES = tuple(name for name, one in ADVANTAGES.items() if one.function is not None)
"""Advantages computed from the rewards of a batch."""
MODEL_ADVANTAGES = tuple(name for name, one in ADVANTAGES.items() if one.function is None)
"""Advantages that need a model beside the policy."""


@dataclass(frozen=True, kw_only=True)
class BuiltInPreferenceLoss:
    """A preference loss, and the settings that it knows.

    Attributes:
        function: its name in `holdfast.trainer.preference.losses`; None for `kto`, whose answers are not pairs.
        beta: default of `loss.beta`.
        margin: default of `loss.margin`; None where it has none.
        has_reference: whether it compares with a reference.
        can_smooth: whether it knows `loss.label_smoothing`.
        source: for `--help`.
    """

    function: str | None
    beta: float = 0.1
    margin: float | None = None
    has_reference: bool = True
    can_smooth: bool = False
    source: str


# fmt: off
PREFERENCE_LOSSES = {
    "dpo": BuiltInPreferenceLoss(function="dpo_loss", can_smooth=True, source="Rafailov et al. 2023"),
    "ipo": BuiltInPreferenceLoss(function="ipo_loss",
                                 source="Azar et al. 2023, by the mean log-ratio of an answer's tokens"),
    "ipo_sum": BuiltInPreferenceLoss(function="ipo_sum_loss", source="the same, by their sum"),
    "hinge": BuiltInPreferenceLoss(function="hinge_loss", source="Zhao et al. 2023"),
    "robust": BuiltInPreferenceLoss(function="robust_loss", can_smooth=True, source="Chowdhury et al. 2024"),
    "apo_zero": BuiltInPreferenceLoss(function="apo_zero_loss", source="D'Oosterlinck et al. 2024"),
    "apo_down": BuiltInPreferenceLoss(function="apo_down_loss", source="the same"),
    "simpo": BuiltInPreferenceLoss(function="simpo_loss", beta=2.0, margin=0.5, has_reference=False,
                                   source="Meng et al. 2024"),
    "orpo": BuiltInPreferenceLoss(function="orpo_loss", has_reference=False, source="Hong et al. 2024"),
    "kto": BuiltInPreferenceLoss(function=None,
                                 source="Ethayarajh et al. 2024, which takes answers that are labelled one by one too"),
}
# fmt: on
