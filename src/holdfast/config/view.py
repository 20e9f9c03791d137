"""Settings of the view of a run: alerts, the live page, experiment trackers, hooks and profiled steps."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from holdfast.config.base import Section
from holdfast.process.imports import check_name


class AlertsConfig(Section):
    """When a metric says that something is wrong: once for each, and again for repeated steps. See docs/metrics.md."""

    window: int = Field(default=20, ge=1)
    """Steps whose median a new value is compared with; no comparison before there are as many."""

    ref_kld_jump: float = Field(default=5.0, gt=1)
    """`ref_kld` this many times its median, and above 0.01."""

    entropy_share: float = Field(default=0.1, ge=0, lt=1)
    """`entropy` below this share of its value at the first step."""

    mismatch_growth: float = Field(default=10.0, gt=1)
    """`mismatch_kl` this many times its median, and above 0.001."""

    zero_variance: float = Field(default=0.95, gt=0, le=1)
    """`groups/zero_variance` at or above this for as many steps as `window`."""


class DashboardConfig(Section):
    """Address at which the report of the run is served during training, for a browser (docs/console.md)."""

    port: int = Field(default=9466, ge=0, le=65535)
    """Port on 127.0.0.1 of this run, each of several on a machine its own; 0: any free one, which the console names."""


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "prometheus")


class TrackingConfig(Section):
    """Trackers that get the metrics, and the name of the run there. Addresses and keys are environment variables of
    each tracker (docs/console.md)."""

    backends: list[str] = Field(default=["tensorboard"], min_length=1)
    """Trackers: `tensorboard`, `wandb`, `mlflow`, `trackio`, `prometheus`, and `module:Class` for your own."""

    project: str = Field(default="holdfast", min_length=1)
    """The project, or experiment, that the run belongs to."""

    name: str | None = Field(default=None, min_length=1)
    """Name of the run; unset: the name of its directory."""

    tags: list[str] = []
    """Tags of the run."""

    answers_interval: int = Field(default=10, ge=0)
    """`rl`: every so many steps W&B, MLflow and TensorBoard get a table of eight answers, from the worst to the best;
    0: none."""

    finish_timeout_s: float = Field(default=60.0, gt=0)
    """How long the end of the run waits for a tracker that has not taken everything yet."""

    @field_validator("backends")
    @classmethod
    def _known_once(cls, names: list[str]) -> list[str]:
        for name in names:
            check_name(name, TRACKERS)
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"names '{twice}' twice")
        return names


class HookConfig(Section):
    """A hook: a class of your own that is called after steps, evaluations and saves (docs/console.md)."""

    type: str
    """`module:Class`, derived from `holdfast.Hook`."""

    name: str | None = Field(default=None, min_length=1)
    """Its name in metrics and errors; unset: the name of the class."""

    args: dict[str, Any] = {}
    """Arguments of the class."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @field_validator("type")
    @classmethod
    def _names_a_class(cls, value: str) -> str:
        module, _, name = value.partition(":")
        if not (module and name.isidentifier()):
            raise ValueError("should be 'module:Class'")
        return value

    @property
    def label(self) -> str:
        """`name`, or else the name of the class."""
        return self.name or self.type.partition(":")[2]


def _named_once(hooks: list[HookConfig]) -> list[HookConfig]:
    labels = [hook.label for hook in hooks]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(f"has two hooks with the name '{twice}': give one of them another `name`")
    return hooks


Hooks = Annotated[list[HookConfig], AfterValidator(_named_once)]
"""A list of hooks, each with its own name."""

_STEPS = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")


@dataclass(frozen=True)
class ProfiledSteps:
    """The steps from `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: object) -> "ProfiledSteps":
        """Return what `FIRST:LAST` names. Raise ValueError if it names no steps."""
        match = _STEPS.fullmatch(text) if isinstance(text, str) else None
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError("should be FIRST:LAST, the first and the last step to profile, from 1 on, such as 3:5")
        return cls(int(match[1]), int(match[2]))

    def check(self, max_steps: int) -> None:
        """Check that the run comes to all of them. Raise ValueError if it ends before."""
        if self.last > max_steps:
            raise ValueError(f"profile = '{self}' ends after max_steps = {max_steps}: choose other steps, or raise it")

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def _names_steps(value: object) -> object:
    ProfiledSteps.parse(value)
    return value


StepWindow = Annotated[str, BeforeValidator(_names_steps)]
"""The text `FIRST:LAST`, checked."""
