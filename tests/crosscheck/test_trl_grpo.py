"""Policy losses, corrections, KL term and advantages against TRL's GRPOTrainer and RLOOTrainer. Shapes: B sequences, T
tokens of the longest one, N all their tokens."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from holdfast.config.base import KlEstimator
from holdfast.config.policy_losses import PolicyLossConfig
from holdfast.trainer.rl.advantages import sample_std
from holdfast.trainer.rl.kl import KlCoefficient, estimate_kl
from holdfast.trainer.rl.losses import PolicyLossInput, build_policy_loss, with_kl_term
from tests.builders.scored_rollouts import advantage_of, scored_groups
from tests.builders.slow_losses import as_input, random_step

pytestmark = pytest.mark.trl

GROUP_SIZE = 4
LENGTHS = (3, 7, 1, 5, 6, 2, 7, 4)
COMPLETIONS = [[7] * length for length in LENGTHS]
EXACT = {"rtol": 1e-9, "atol": 1e-12}
SCORED = {"rel": 1e-6, "abs": 1e-9}  # TRL takes the standard deviation in part in float32


def step_of(seed: int) -> PolicyLossInput:
    """Return sequences of several lengths whose three policies, and reference, differ by 0.4 nats per token."""
    data = as_input(random_step(2 * seed, spread=0.4, lengths=LENGTHS))
    noise_N = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    # TRL holds what a sampler reports in float32.
    sampler_N = data.sampler_logprobs_N.float().double()
    return replace(data, sampler_logprobs_N=sampler_N, reference_logprobs_N=data.old_logprobs_N + 0.4 * noise_N)


def padded(values_N: Tensor) -> Tensor:
    """Return the values of all tokens as TRL holds them, (B, T), with padding."""
    return pad_sequence(values_N.split(LENGTHS), batch_first=True)


def advantages_of(data: PolicyLossInput) -> Tensor:
    return torch.stack([values[0] for values in data.advantages_N.split(LENGTHS)])


def for_trl(data: PolicyLossInput) -> dict[str, Tensor]:
    assert data.reference_logprobs_N is not None
    mask_BT = padded(torch.ones(sum(LENGTHS), dtype=torch.long))
    return {
        "prompt_ids": torch.full((len(mask_BT), 1), 5), "prompt_mask": torch.ones(len(mask_BT), 1, dtype=torch.long),
        "completion_ids": torch.full_like(mask_BT, 7), "completion_mask": mask_BT, "advantages": advantages_of(data),
        "old_per_token_logps": padded(data.sampler_logprobs_N), "num_items_in_batch": mask_BT.sum(),
        "ref_per_token_logps": padded(data.reference_logprobs_N),
    }  # fmt: skip


def assert_same_loss_and_gradient(theirs: Tensor, ours: Tensor, data: PolicyLossInput) -> None:
    torch.testing.assert_close(ours, theirs, **EXACT)
    gradients = [torch.autograd.grad(loss, data.logprobs_N, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, **EXACT)
    assert gradients[0].count_nonzero() > 0


# Ours, and the settings of TRL that mean the same.
POLICY_LOSSES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "grpo"}, {"loss_type": "grpo"}),
    ({"type": "grpo", "dual_clip": 1.3}, {"loss_type": "grpo", "delta": 1.3}),
    ({"type": "grpo", "clip_low": 0.1, "clip_high": 0.5}, {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.5}),
    ({"type": "dr_grpo", "constant_tokens": 50}, {"loss_type": "dr_grpo", "max_completion_length": 50}),
    ({"type": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    # The denominator of bnpo is the tokens of one micro-batch, here the whole step.
    ({"type": "dapo"}, {"loss_type": "bnpo", "epsilon_high": 0.28}),
    (
        {"type": "gspo", "ratio_to": "sampler", "clip_low": 0.1, "clip_high": 0.2},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2},
    ),
    # TRL's bound of CISPO is the largest ratio itself, ours what it exceeds 1 by.
    ({"type": "cispo", "clip_high": 0.5}, {"loss_type": "cispo", "epsilon_high": 1.5}),
]


@pytest.mark.parametrize(
    ("our_settings", "trl_settings"), POLICY_LOSSES, ids=lambda value: "-".join(map(str, value.values()))
)
def test_losses_gradients_and_clip_fractions_are_those_of_trl(
    our_settings: dict[str, Any], trl_settings: dict[str, Any], trl_trainers: ModuleType, model: Path, tmp_path: Path
) -> None:
    unbounded = {} if our_settings["type"] == "cispo" else {"dual_clip": "inf"}  # TRL bounds only with `delta`
    loss_function = build_policy_loss(PolicyLossConfig.of(**unbounded | our_settings))
    trainer = trl_trainers.grpo_trainer(model, tmp_path, **trl_settings)
    for seed in range(5):
        data = step_of(seed)
        trainer.forwards = [padded(data.logprobs_N)]
        trainer._metrics["train"].clear()
        theirs = trainer._compute_loss(trainer.model, for_trl(data))
        ours, counts = loss_function(data)
        assert_same_loss_and_gradient(theirs, ours, data)
        logged = {name: values[0] for name, values in trainer._metrics["train"].items()}
        if our_settings["type"] == "gspo":
            continue  # TRL logs the share of sequences, ours is the share of their tokens
        low, high = ((counts[f"clip_fraction/{side}"] / sum(LENGTHS)).item() for side in ("low", "high"))
        if our_settings["type"] == "cispo":
            assert high == pytest.approx(logged["cispo_clip_ratio"]) and low == 0
        else:
            assert low == pytest.approx(logged["clip_ratio/low_mean"])
            assert high == pytest.approx(logged["clip_ratio/high_mean"])
            assert low > 0 or high > 0


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("name", ["grpo", "cispo"])
def test_corrections_are_trls(name: str, mode: str, trl_trainers: ModuleType, model: Path, tmp_path: Path) -> None:
    level, kind = mode.split("_")
    # TRL truncates from below as well unless told not to; ours never does.
    low = {"vllm_importance_sampling_clip_min": 0.7} if kind == "mask" else {}
    our_low = {"low": 0.7} if kind == "mask" else {}
    trainer = trl_trainers.grpo_trainer(
        model, tmp_path, loss_type=name, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=1.5,
        **low,
    )  # fmt: skip
    trainer.epsilon_high = 1.5 if name == "cispo" else 0.2
    trainer.use_vllm = True  # set late: the constructor would want a server
    settings: dict[str, Any] = {"clip_high": 0.5} if name == "cispo" else {}
    correction = {"type": kind, "level": level, "high": 1.5, **our_low}
    aggregation = "token" if name == "cispo" else "sequence"
    config = PolicyLossConfig.of(type=name, aggregation=aggregation, correction=correction, **settings)
    bounded = 0
    for seed in range(5):
        data = step_of(seed)
        trainer.completions, trainer.rewards = COMPLETIONS, advantages_of(data).tolist()
        trainer.sampler_logprobs = [part.tolist() for part in data.sampler_logprobs_N.split(LENGTHS)]
        trainer.forwards = [padded(data.old_logprobs_N), padded(data.logprobs_N)]
        scored = trainer._generate_and_score_completions([{"prompt": "a"}] * len(LENGTHS))
        theirs = trainer._compute_loss(trainer.model, scored | {"advantages": advantages_of(data)})
        ours, counts = build_policy_loss(config)(data)
        assert_same_loss_and_gradient(theirs, ours, data)
        bounded += int(counts["correction/bounded"])
    assert bounded > 0


@pytest.mark.parametrize("estimator", ["k3", "k3_unbiased"])
def test_the_kl_term_is_trls(estimator: KlEstimator, trl_trainers: ModuleType, model: Path, tmp_path: Path) -> None:
    """TRL adds beta times the estimate to each token's loss: its weights are those of the policy loss."""
    beta, unbiased = 0.3, estimator == "k3_unbiased"
    trainer = trl_trainers.grpo_trainer(model, tmp_path, loss_type="grpo", beta=beta, use_bias_correction_kl=unbiased)
    data, config = step_of(0), PolicyLossConfig.of(type="grpo")
    trainer.forwards = [padded(data.logprobs_N)] * 2
    theirs = trainer._compute_loss(trainer.model, for_trl(data))
    logged = trainer._metrics["train"]["kl"][0]
    trainer.beta = 0.0
    theirs = theirs - trainer._compute_loss(trainer.model, for_trl(data))
    assert data.reference_logprobs_N is not None
    base = {"base_logprobs_N": data.sampler_logprobs_N}
    kl_N = estimate_kl(data.logprobs_N, data.reference_logprobs_N, estimator, **base)
    loss = build_policy_loss(config)
    ours = with_kl_term(loss, config, KlCoefficient(beta), estimator)(data)[0] - loss(data)[0]
    assert_same_loss_and_gradient(theirs, ours, data)
    assert kl_N.mean().item() == pytest.approx(logged, rel=1e-6)


def flat(groups: list[list[float]]) -> list[float]:
    return [value for group in groups for value in group]


REWARDS_PG = [[1.0, 0.0, 0.0, 0.5], [2.0, -1.0, 0.25, 7.0]]


def scored_rewards(trainer: Any, rewards_PG: list[list[float]]) -> list[float]:
    """Return the advantages that TRL gives these rewards."""
    trainer.completions, trainer.rewards = COMPLETIONS, flat(rewards_PG)
    trainer.forwards = [padded(step_of(0).old_logprobs_N)]
    return trainer._generate_and_score_completions([{"prompt": "a"}] * len(trainer.rewards))["advantages"].tolist()


@pytest.mark.parametrize(
    ("name", "settings", "scale"),
    [("grpo", {}, "group"), ("grpo", {"std": "batch"}, "batch"), ("dr_grpo", {}, "none"), ("rloo", {}, None)],
)
def test_group_advantages_are_those_of_trl(
    name: str, settings: dict[str, str], scale: str | None, trl_trainers: ModuleType, model: Path, tmp_path: Path
) -> None:
    if scale is None:
        trainer = trl_trainers.rloo_trainer(model, tmp_path, beta=0.0)
    else:
        trainer = trl_trainers.grpo_trainer(model, tmp_path, scale_rewards=scale)
    ours = advantage_of(name, **settings)(scored_groups(REWARDS_PG))
    if name == "grpo":  # TRL adds 1e-4 to the standard deviation, ours adds 1e-6
        stds = [sample_std(flat(REWARDS_PG) if scale == "batch" else group) for group in REWARDS_PG]
        ours = [[a * (std + 1e-6) / (std + 1e-4) for a in group] for group, std in zip(ours, stds, strict=True)]
    assert flat(ours) == pytest.approx(scored_rewards(trainer, REWARDS_PG), **SCORED)
    equal = [[3.25] * GROUP_SIZE] * 2
    assert scored_rewards(trainer, equal) == flat(advantage_of(name, **settings)(scored_groups(equal)))
