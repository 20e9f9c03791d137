"""The advantages that a run chooses by name, and their settings.

The settings take names and help from the table below and know no torch. The trainer imports the function of a name when
a run asks for it. A new advantage needs only its function in `holdfast.trainer.rl.advantages` and one line here, and a
model in `AnyAdvantage` if it has settings. Tests ask for a row in docs/losses.md, with formula and source, and that
each name learns in a short run.
"""

# Types narrow the type of their base, which nobody sets.
# pyright: reportIncompatibleVariableOverride=false

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from holdfast.config.base import Section
from holdfast.config.by_type import ByType
from holdfast.process.imports import check_name


@dataclass(frozen=True, kw_only=True)
class BuiltInAdvantage:
    """An advantage, and what it needs.

    Attributes:
        function: its name in `holdfast.trainer.rl.advantages`; None if a model beside the policy gives the advantages,
            and not the rewards of the batch.
        takes: `rewards`: the rewards of one problem, for each rollout the sum of its reward and its step rewards;
            `step_rewards`: rewards of rollouts and of steps apart; `rollouts`: `ScoredRollout` of the batch, by
            problem.
        tells_tokens_apart: whether rewards of turns and tokens give the tokens of a rollout advantages of their own.
        compares_group: whether it compares the rollouts of one problem, and so needs two of them at least.
        help: what it is, for `--help`.
    """

    function: str | None
    takes: Literal["rewards", "step_rewards", "rollouts"] = "rewards"
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
    "pass_at_k": BuiltInAdvantage(function="pass_at_k", help="what a rollout adds to the best of `k`"),
    "gdpo": BuiltInAdvantage(function="gdpo", takes="rollouts", help="every reward of `rewards.weights` normalised"),
    "online_dpo": BuiltInAdvantage(function="online_dpo", takes="rollouts", help="DPO of the best and the worst"),
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


class AdvantageConfig(Section):
    """An advantage, see docs/losses.md."""

    type: str
    """The advantage by name, or `module:function` of your own."""


class GrpoAdvantage(AdvantageConfig):
    """The standardised reward."""

    type: Literal["grpo"] = "grpo"

    std: Literal["group", "batch"] = "group"
    """Standard deviation by which `grpo` divides: of the rewards of the group, or of the batch."""


class PassAtK(AdvantageConfig):
    """The best of several rollouts."""

    type: Literal["pass_at_k"] = "pass_at_k"

    k: int = Field(ge=2)
    """The k of `pass_at_k`, at most `group_size`."""


class OnlineDpo(AdvantageConfig):
    """The gradient of DPO."""

    type: Literal["online_dpo"] = "online_dpo"

    beta: float = Field(default=0.1, gt=0)
    """The beta of `online_dpo`: strength of the tie to the reference, as for `dpo`."""


class PlainAdvantage(AdvantageConfig):
    """An advantage without settings."""

    types: ClassVar = tuple(name for name in ADVANTAGES if name not in ("grpo", "pass_at_k", "online_dpo"))

    type: str = Field(
        default="dr_grpo",
        description="; ".join(f"`{name}`: {one.help}" for name, one in ADVANTAGES.items()) + ". Or `module:function`.",
    )


class OwnAdvantage(AdvantageConfig):
    """An advantage of your own."""

    @field_validator("type")
    @classmethod
    def _is_a_function(cls, name: str) -> str:
        return check_name(name, ADVANTAGES)


AnyAdvantage = Annotated[PlainAdvantage | GrpoAdvantage | PassAtK | OnlineDpo | OwnAdvantage, ByType("dr_grpo")]
