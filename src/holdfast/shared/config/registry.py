"""What a run chooses by name and is built in: policy losses, advantages, preference losses. One line here adds one.

The settings take names, defaults and help from these tables, and know no torch; the trainer imports the function
behind a name when a run asks for it. So one file with the function and one line are all that it takes:

    POLICY_LOSSES      a function `(PolicyLossConfig) -> Objective` in `holdfast.trainer.rl.losses`
    ADVANTAGES         a function of rewards or rollouts, see `BuiltInAdvantage`, in `holdfast.trainer.rl.advantages`
    PREFERENCE_LOSSES  a function `(PreferenceLossConfig) -> PreferenceLoss` in `holdfast.trainer.preferences`

A test asks for its row in docs/losses.md, docs/advantages.md or docs/preferences.md, with formula and source.
Environments have their table in `holdfast.orchestrator.environments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class BuiltInPolicyLoss:
    """A policy loss and the settings that act on it, with their defaults; docs/losses.md says where they are from.

    Attributes:
        function: `module:function` in `holdfast.trainer.rl.losses`, from settings to objective.
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
        """The settings of `PolicyLossConfig` that act on this loss, and no others."""
        values = {one.name: getattr(self, one.name) for one in fields(self)[1:]}
        return {name: value for name, value in values.items() if value is not None}


# fmt: off
POLICY_LOSSES = {
    "grpo": BuiltInPolicyLoss(function="clipped:clipped_objective", aggregation="sequence", ratio_to="sampler",
                              clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    "dr_grpo": BuiltInPolicyLoss(function="clipped:clipped_objective", aggregation="constant", ratio_to="sampler",
                                 clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    "dapo": BuiltInPolicyLoss(function="clipped:clipped_objective", aggregation="token", ratio_to="sampler",
                              clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "gspo": BuiltInPolicyLoss(function="clipped:gspo_objective", aggregation="sequence", ratio_to="old",
                              clip_low=3e-4, clip_high=4e-4, dual_clip=3.0),
    "gspo_token": BuiltInPolicyLoss(function="clipped:gspo_token_objective", aggregation="sequence", ratio_to="old",
                                    clip_low=3e-4, clip_high=4e-4, dual_clip=3.0),
    "cispo": BuiltInPolicyLoss(function="policy_gradient:cispo_objective", aggregation="token", ratio_to="sampler",
                               clip_low=1.0, clip_high=4.0),
    "dppo": BuiltInPolicyLoss(function="policy_gradient:dppo_objective", aggregation="token", ratio_to="sampler",
                              clip_low=0.2, clip_high=0.2, ratio_max=20.0),
    "ppo": BuiltInPolicyLoss(function="clipped:clipped_objective", aggregation="token", ratio_to="sampler",
                             clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    "policy_gradient": BuiltInPolicyLoss(function="policy_gradient:policy_gradient_objective", aggregation="token",
                                         ratio_to="sampler", ratio_max=20.0),
    "sft": BuiltInPolicyLoss(function="policy_gradient:likelihood_objective", aggregation="token"),
}
# fmt: on


@dataclass(frozen=True, kw_only=True)
class BuiltInAdvantage:
    """An advantage, and what it needs.

    Attributes:
        function: `module:function` in `holdfast.trainer.rl.advantages`; None where a model beside the policy gives the
            advantages, and rewards of the batch do not.
        takes: `rewards`: the rewards of one problem, a number for each rollout; `step_rewards`: the same, and by
            themselves those of all parts of its rollouts; `rollouts`: `ScoredRollout` of the batch, by problem.
        settings: further arguments of the function, by the setting of `trainer` that each is.
        compares_group: whether it compares the rollouts of one problem, and so needs two of them at least.
        help: what it is, for `--help`.
    """

    function: str | None
    takes: Literal["rewards", "step_rewards", "rollouts"] = "rewards"
    settings: Mapping[str, str] = field(default_factory=dict)
    compares_group: bool = True
    help: str


# fmt: off
ADVANTAGES = {
    "dr_grpo": BuiltInAdvantage(function="group:dr_grpo", takes="step_rewards", help="reward - mean of the group"),
    "grpo": BuiltInAdvantage(function="group:grpo", takes="step_rewards", help="(reward - mean) / std of the group"),
    "rloo": BuiltInAdvantage(function="group:rloo", help="reward - mean of the others"),
    "max_rl": BuiltInAdvantage(function="group:max_rl", help="(reward - mean) / mean"),
    "opo": BuiltInAdvantage(function="group:opo_of_rollouts", takes="rollouts", help="reward - mean by length"),
    "pass_at_k": BuiltInAdvantage(function="group:pass_at_k", settings={"k": "advantage_k"},
                                  help="what a rollout adds to the best of `advantage_k`"),
    "gdpo": BuiltInAdvantage(function="group:gdpo", takes="rollouts", settings={"weights": "rewards.weights"},
                             help="every reward of `rewards.weights` normalised"),
    "online_dpo": BuiltInAdvantage(function="online_dpo:online_dpo", takes="rollouts",
                                   settings={"beta": "advantage_beta"}, help="DPO of the best and the worst"),
    "reinforce_pp_baseline": BuiltInAdvantage(function="reinforce_pp:reinforce_pp_baseline", takes="rollouts",
                                              help="reward - mean of the group, normalised over the batch's tokens"),
    "reinforce_pp": BuiltInAdvantage(function="reinforce_pp:reinforce_pp", takes="rollouts", compares_group=False,
                                     help="(reward - mean) / std over the tokens of the batch"),
    "gae": BuiltInAdvantage(function=None, compares_group=False, help="by the critic"),
    "distillation": BuiltInAdvantage(function=None, compares_group=False,
                                     help="of the teacher alone, rewards are only measured"),
}
# fmt: on

GROUP_ADVANTAGES = tuple(name for name, one in ADVANTAGES.items() if one.compares_group)
"""Advantages that compare the rollouts of one problem with one another, and need two of them at least."""
SINGLE_ADVANTAGES = tuple(name for name, one in ADVANTAGES.items() if not one.compares_group)
"""Those for which one rollout of a problem is enough."""
REWARD_ADVANTAGES = tuple(name for name, one in ADVANTAGES.items() if one.function is not None)
"""All that are computed from what the rollouts of a batch earned."""
MODEL_ADVANTAGES = tuple(name for name, one in ADVANTAGES.items() if one.function is None)
"""Advantages that need a model beside the policy."""


@dataclass(frozen=True, kw_only=True)
class BuiltInPreferenceLoss:
    """A preference loss, and the settings that it knows.

    Attributes:
        function: `module:function` in `holdfast.trainer.preferences`; None for `kto`, whose answers are no pairs.
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
    "dpo": BuiltInPreferenceLoss(function="losses:dpo_loss", can_smooth=True, source="Rafailov et al. 2023"),
    "ipo": BuiltInPreferenceLoss(function="losses:ipo_loss",
                                 source="Azar et al. 2023, by the mean log-ratio of an answer's tokens"),
    "ipo_sum": BuiltInPreferenceLoss(function="losses:ipo_sum_loss", source="the same, by their sum"),
    "hinge": BuiltInPreferenceLoss(function="losses:hinge_loss", source="Zhao et al. 2023"),
    "robust": BuiltInPreferenceLoss(function="losses:robust_loss", can_smooth=True, source="Chowdhury et al. 2024"),
    "apo_zero": BuiltInPreferenceLoss(function="losses:apo_zero_loss", source="D'Oosterlinck et al. 2024"),
    "apo_down": BuiltInPreferenceLoss(function="losses:apo_down_loss", source="the same"),
    "simpo": BuiltInPreferenceLoss(function="losses:simpo_loss", beta=2.0, margin=0.5, has_reference=False,
                                   source="Meng et al. 2024"),
    "orpo": BuiltInPreferenceLoss(function="losses:orpo_loss", has_reference=False, source="Hong et al. 2024"),
    "kto": BuiltInPreferenceLoss(function=None,
                                 source="Ethayarajh et al. 2024, which takes answers that are labelled one by one too"),
}
# fmt: on
