"""The policy losses, advantages and preference losses that a run chooses by name.

The settings take names, defaults and help from the tables below and know no torch. The trainer imports the function of
a name when a run asks for it. A new one needs only its function and one line here:

    POLICY_LOSSES      an `Objective` in `holdfast.trainer.rl.losses`
    ADVANTAGES         a function of rewards or rollouts, see `BuiltInAdvantage`, in `holdfast.trainer.rl.advantages`
    PREFERENCE_LOSSES  a function `(PairLogprobs, PreferenceLossConfig) -> PairLosses` in
                       `holdfast.trainer.preference.losses`

Tests ask for a row in docs/losses.md or docs/preferences.md, with formula and source, for a slow reference in float64
(`tests.builders.slow_losses`), and that each name learns in a short run. `holdfast.orchestrator.env.registry` has the
table of environments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


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
