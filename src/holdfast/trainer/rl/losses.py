"""Policy losses: pure functions of per-token tensors that return (loss, counts), chosen by name.

A built-in loss is an objective per token. `build_policy_loss` makes the loss: minus the sum of the objective over the
predicted tokens of this forward pass, times correction and weight. The weights carry the denominator, which is global:
it counts the whole optimizer update, over all ranks and micro-batches. The sum over micro-batches and ranks is the loss
of the update, however it was split. A forward pass always holds whole sequences, so a loss may also work on sequences.

The correction handles sampler and trainer that disagree about the same tokens. Without a correction, the ratio of a
loss is pi / mu: trained policy over sampler. With a correction, the ratio splits in two, pi / mu = (pi / pi_old) *
(pi_old / mu), where pi_old is the trainer's policy at the start of the step. The loss clips the first factor. The
optimizer cannot change the second factor; `correction_factors` bounds it.

To add a loss, write its function here, and its settings in `holdfast.config.policy_losses`.

Shape legend: N predicted tokens of the forward pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.config import policy_losses as settings
from holdfast.config.base import KlEstimator
from holdfast.errors import TrainingError
from holdfast.process.imports import calling, load_loss
from holdfast.trainer.rl.kl import EntropyCoefficient, KlCoefficient, bounded, estimate_kl


@dataclass(frozen=True)
class PolicyLossInput:
    """The input of a policy loss: one number for each of the N trained tokens of a micro-batch.

    Attributes:
        logprobs_N: log-probabilities under the weights being trained, with gradient.
        old_logprobs_N: log-probabilities under the trainer's weights at the start of this step, without gradient.
        sampler_logprobs_N: log-probabilities under the policy version that sampled each token.
        advantages_N: the advantage of each token.
        entropy_N: the entropy of the policy at each token, in nats. It has a gradient in your own loss, and in a
            built-in loss with `loss.entropy`.
        weights_N: 1 / (sequences of the update * trained tokens of the sequence). They sum to 1 over the update.
        correction_N: the factors of `loss.correction`, without gradient; 1 without a correction.
        sequence_N: the number of each token's sequence. Tokens of one sequence are neighbours.
        sequence_lengths: the tokens of each sequence, if the caller knows them. None: a loss counts them, and waits for
            the device.
        step_sequences: the sequences of the whole update, over all ranks.
        step_tokens: the trained tokens of the whole update, over all ranks.
        reference_logprobs_N: log-probabilities under the reference; None without a reference.
        teacher_kl_N: the KL divergence of the policy from its teacher at each token, in nats, with gradient. None
            except with `distillation.divergence = "full"`.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    entropy_N: Tensor
    weights_N: Tensor
    correction_N: Tensor
    sequence_N: Tensor
    step_sequences: int
    step_tokens: int
    reference_logprobs_N: Tensor | None = None
    teacher_kl_N: Tensor | None = None
    sequence_lengths: tuple[int, ...] | None = None


Counts = dict[str, Tensor]
"""Numbers of tokens by name, which are logged as shares of all trained tokens. The names must be the same for every
input, also for one without tokens."""


PolicyLoss = Callable[[PolicyLossInput], tuple[Tensor, Counts]]
"""Returns the loss, a scalar, and counts."""


Objective = Callable[[PolicyLossInput, Any], tuple[Tensor, Counts]]
"""Returns what each token adds to the objective, (N,), to be maximised, and counts."""


def log_ratios(data: PolicyLossInput, config: settings.RatioLoss) -> Tensor:
    """Return log(pi / base) per token, bounded; carries the gradient, (N,).

    The base is the sampler, or with `ratio_to = "old"` the trainer's own policy at the start of the step."""
    return bounded(data.logprobs_N - (data.old_logprobs_N if config.ratio_to == "old" else data.sampler_logprobs_N))


def token_weights(data: PolicyLossInput, config: settings.PolicyLossConfig) -> Tensor:
    """Return the weight of each token, (N,), by `config.aggregation`.

    `sequence`: 1 / (sequences of the step * tokens of the sequence): every sequence counts the same
    (GRPO). `token`: 1 / tokens of the step: every token counts the same (DAPO, Yu et al. 2025, eq. 8).
    `constant`: 1 / (sequences of the step * constant_tokens): no length enters (Dr.GRPO, Liu et al.
    2025, "Understanding R1-Zero-Like Training", section 3.2)."""
    aggregation = config.aggregation if isinstance(config, settings.BuiltInLoss) else "sequence"
    if aggregation == "token":
        return torch.full_like(data.weights_N, 1 / max(1, data.step_tokens))
    if isinstance(config, settings.BuiltInLoss) and aggregation == "constant":
        assert config.constant_tokens is not None  # nothing starts without it
        return torch.full_like(data.weights_N, 1 / (max(1, data.step_sequences) * config.constant_tokens))
    return data.weights_N


def over_sequences(values_N: Tensor, data: PolicyLossInput, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return, for each token, `reduce` of the values of its sequence, (N,).

    One sequence after the other: scattered sums have no fixed order on GPUs, and so no exact rerun."""
    if values_N.numel() == 0:
        return values_N
    lengths = data.sequence_lengths
    if lengths is None:
        lengths = tuple(torch.unique_consecutive(data.sequence_N, return_counts=True)[1].tolist())
    parts = values_N.split([length for length in lengths if length])
    return torch.cat([reduce(part).expand(len(part)) for part in parts])


def clipped_objective(data: PolicyLossInput, config: settings.PpoLoss) -> tuple[Tensor, Counts]:
    """Return the clipped surrogate of PPO with given advantages (Schulman et al. 2017, eq. 7).

    The `clipped_surrogate` of rho_t = exp(log_ratios), which differs by `aggregation` and clip range in

    - `ppo` (Schulman et al. 2017): token.
    - `grpo` (Shao et al. 2024, "DeepSeekMath", eq. 3, without its KL term): sequence.
    - `dr_grpo` (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2): constant.
    - `dapo` (Yu et al. 2025, "DAPO", eq. 8): token, and clip_high above clip_low."""
    return clipped_surrogate(torch.exp(log_ratios(data, config)), data.advantages_N, config)


def gspo_objective(data: PolicyLossInput, config: settings.PpoLoss) -> tuple[Tensor, Counts]:
    """Return GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization", eq. 5).

    The `clipped_surrogate` of s = exp(mean over the sequence of log_ratios), the same for all tokens of a sequence
    (eq. 7). Counts are tokens of clipped sequences."""
    mean_N = over_sequences(log_ratios(data, config), data, torch.mean)
    return clipped_surrogate(torch.exp(mean_N), data.advantages_N, config)


def gspo_token_objective(data: PolicyLossInput, config: settings.PpoLoss) -> tuple[Tensor, Counts]:
    """Return GSPO-token (Zheng et al. 2025, eqs. 13 and 14), for advantages that differ within a sequence.

    The `clipped_surrogate` of s_t = sg(s) pi_t / sg(pi_t), with s as in `gspo_objective` and sg: no gradient. Its value
    is s; its gradient is s times the gradient of the token's own log-probability. With one advantage per sequence, and
    `aggregation = "sequence"`, loss and gradient equal `gspo`."""
    mean_N = over_sequences(log_ratios(data, config).detach(), data, torch.mean)
    # 0 in value: it only brings in the gradient of the token.
    own_N = data.logprobs_N - data.logprobs_N.detach()
    return clipped_surrogate(torch.exp(mean_N + own_N), data.advantages_N, config)


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, config: settings.PpoLoss) -> tuple[Tensor, Counts]:
    """Return min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), where A < 0 at least `dual_clip` A, and counts.

    The second bound is dual clip (Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement
    Learning", eq. 5; the two-sided clip of INTELLECT-2). Counts are of the tokens that each bound takes the gradient
    from: clipping stops it only where it lowers the objective, hence the signs."""
    low, high = config.clip_range
    clipped_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    dual_N = (ratio_N > config.dual_clip) & (advantages_N < 0)
    # If A < 0, the surrogate is unbounded below in rho: dual clip bounds it, and its gradient.
    return torch.where(dual_N, config.dual_clip * advantages_N, clipped_N), {
        **clip_counts(ratio_N, advantages_N, low, high),
        "clip_fraction/dual": dual_N.sum(),
    }


@torch.no_grad()
def clip_counts(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Counts:
    """Return how many tokens are outside of [low, high] on the side where their advantage pushes."""
    below_N = (ratio_N < low) & (advantages_N < 0)
    above_N = (ratio_N > high) & (advantages_N > 0)
    return {"clip_fraction/low": below_N.sum(), "clip_fraction/high": above_N.sum()}


def cispo_objective(data: PolicyLossInput, config: settings.CispoLoss) -> tuple[Tensor, Counts]:
    """Return CISPO (MiniMax 2025, "MiniMax-M1", eqs. 4 and 5): sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_t l_t.

    With rho = exp(log_ratios) and sg: no gradient. Clipping bounds a token's weight but never takes its gradient away;
    the clip counts say where it bounds."""
    low, high = config.clip_range
    ratio_N = torch.exp(log_ratios(data, config)).detach()
    counts = clip_counts(ratio_N, data.advantages_N, low, high)
    return ratio_N.clamp(low, high) * data.advantages_N * data.logprobs_N, counts


def policy_gradient_objective(data: PolicyLossInput, config: settings.PolicyGradientLoss) -> tuple[Tensor, Counts]:
    """Return REINFORCE (Williams 1992) with given advantages, as RLOO uses it (Ahmadian et al. 2024, "Back to Basics").

    sg(min(rho_t, ratio_max)) A_t l_t, with rho = exp(log_ratios): importance sampling of the policy gradient, truncated
    (Ionides 2008), so that older rollouts and further epochs do not bias it except by the truncation. If rho is 1, as
    with `ratio_to = "old"` and one update a step, it is REINFORCE. With `aggregation = "constant"` it is the policy
    gradient of the whole sequence's log-probability, times 1 / constant_tokens."""
    ratio_N, counts = _truncated_ratios(data, config)
    return ratio_N * data.advantages_N * data.logprobs_N, counts


def dppo_objective(data: PolicyLossInput, config: settings.DppoLoss) -> tuple[Tensor, Counts]:
    """Return DPPO with the binary total variation (arXiv 2602.04879, "Rethinking the Trust Region in LLM RL").

    m_t sg(min(rho_t, ratio_max)) A_t l_t, with rho = exp(log_ratios). The probabilities of the token under policy and
    base are p and b. The mask m_t is 0 if the policy has gone too far already: p - b > clip_high and A > 0, or
    p - b < -clip_low and A < 0. It bounds what moves probability, not its ratio: rare tokens may multiply theirs. The
    truncation is from section 5.4."""
    ratio_N, counts = _truncated_ratios(data, config)
    with torch.no_grad():
        base_N = data.old_logprobs_N if config.ratio_to == "old" else data.sampler_logprobs_N
        moved_N = data.logprobs_N.exp() - base_N.exp()
        counts |= clip_counts(moved_N, data.advantages_N, -config.clip_low, config.clip_high)
        high_N = (moved_N > config.clip_high) & (data.advantages_N > 0)
        low_N = (moved_N < -config.clip_low) & (data.advantages_N < 0)
    return torch.where(high_N | low_N, 0.0, ratio_N * data.advantages_N * data.logprobs_N), counts


def likelihood_objective(data: PolicyLossInput, config: settings.PolicyLossConfig) -> tuple[Tensor, Counts]:
    """Return the log-likelihood of the rollouts, whatever their advantage: l_t.

    For rollouts of a teacher (hard distillation; Kim and Rush 2016, "Sequence-Level Knowledge Distillation")."""
    return data.logprobs_N, {}


@torch.no_grad()
def _truncated_ratios(data: PolicyLossInput, config: settings.PolicyGradientLoss) -> tuple[Tensor, Counts]:
    ratio_N = torch.exp(log_ratios(data, config))
    return ratio_N.clamp(max=config.ratio_max), {"ratio/truncated": (ratio_N > config.ratio_max).sum()}


@torch.no_grad()
def correction_factors(data: PolicyLossInput, config: settings.Correction) -> tuple[Tensor, Counts]:
    """Return the factor of each token's objective, (N,), without gradient, and how many tokens it bounded.

    With w = pi_old / mu, of the token, with `level = "sequence"` the product over its sequence, with `"geometric"`
    the geometric mean over it:

    - `truncate`: min(w, high). Truncated importance sampling (Ionides 2008; for this mismatch Yao et al.
      2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").
    - `mask`: w where low <= w <= high, else 0 (per token: IcePop of Ling Team 2025, "Every Step
      Evolves"; per sequence and geometric: Liu et al. 2025, "When Speed Kills Stability").

    `veto`: 0 for every token of a sequence with a token whose own w is below it.

    The denominator of the loss stays: a masked token counts as 0, not as absent.
    1 and no counts without a correction.
    """
    if isinstance(config, settings.NoCorrection):
        return torch.ones_like(data.logprobs_N), {}
    assert config.high is not None  # the settings fill it in
    exact_N = data.old_logprobs_N - data.sampler_logprobs_N
    log_weights_N = token_N = bounded(exact_N)
    if config.level != "token":
        reduce = torch.sum if config.level == "sequence" else torch.mean
        # Bounded again: the sum of bounded logs over a long sequence overflows exp.
        log_weights_N = bounded(over_sequences(token_N, data, reduce))
    weights_N = log_weights_N.exp()
    bounded_N = weights_N > config.high
    if isinstance(config, settings.Mask):
        bounded_N |= weights_N < (config.low or 0.0)
        factors_N = torch.where(bounded_N, 0.0, weights_N)
    else:
        factors_N = weights_N.clamp(max=config.high)
    counts = {"correction/bounded": bounded_N.sum()}
    if config.veto is not None:
        vetoed_N = over_sequences(exact_N, data, torch.min) < math.log(config.veto)
        factors_N = torch.where(vetoed_N, 0.0, factors_N)
        counts["correction/vetoed"] = vetoed_N.sum()
    return factors_N, counts


_OF_THE_MACHINE = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
"""Errors that come up in any code, also in a loss of the user: a GPU or another rank is gone. A new start may help."""


def build_policy_loss(config: settings.AnyPolicyLoss) -> PolicyLoss:
    """Return the loss that `config.type` names: a built-in loss, or `module:function`.

    A built-in loss is - sum_t w_t c_t objective_t, with the weights w of `aggregation` and the factors c of
    `correction`. Your own function is called as `function(data, **config.args)`, where `data` has both. It returns the
    loss, a scalar, and counts of tokens by name. Raise ConfigError if the function cannot be loaded, or does not accept
    `config.args`."""
    inner = _user_loss(config) if isinstance(config, settings.OwnLoss) else _built_in_loss(config)

    def loss(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        factors_N, counts = correction_factors(data, config.correction)
        value, own = inner(replace(data, correction_N=factors_N))
        return value, counts | own

    return loss


def _built_in_loss(config: settings.BuiltInLoss) -> PolicyLoss:
    objective: Objective = globals()[config.function]

    def loss(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        objective_N, counts = objective(data, config)
        weights_N = token_weights(data, config) * data.correction_N
        return -(weights_N * objective_N).sum(), counts

    return loss


def _user_loss(config: settings.OwnLoss) -> PolicyLoss:
    function = load_loss(config.type, config.args)

    def loss(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        with calling(config.type, key="loss.type", unless=_OF_THE_MACHINE):
            result = function(data, **config.args)
        if not (isinstance(result, tuple) and len(result) == 2 and _is_scalar(result[0]) and _are_scalars(result[1])):
            raise TrainingError(
                f"loss '{config.type}' must return (loss, counts), a scalar tensor that carries the gradient and a "
                f"dict of name -> scalar tensor; got {result!r}"
            )
        return result

    return loss


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and (value.requires_grad or not torch.is_grad_enabled())


def _are_scalars(counts: object) -> bool:
    return isinstance(counts, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) and value.dim() == 0 for name, value in counts.items()
    )


def with_entropy_bonus(loss: PolicyLoss, coefficient: EntropyCoefficient) -> PolicyLoss:
    """Return `loss - coef * mean entropy` (Williams and Peng 1991, "Function optimization using connectionist ...").

    The mean is over all trained tokens of the update, whatever the denominator of the loss, as in TRL: so a coefficient
    means the same for every loss."""

    def rewarded(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        value, counts = loss(data)
        # At least 1: an update may have no trained token on any rank.
        return value - coefficient.coef * data.entropy_N.sum() / max(1, data.step_tokens), counts

    return rewarded


def with_kl_term(
    loss: PolicyLoss, config: settings.PolicyLossConfig, coefficient: KlCoefficient, estimator: KlEstimator
) -> PolicyLoss:
    """Return `loss + coef * sum_t w_t KL_t` (Shao et al. 2024, "DeepSeekMath", which has k3 there).

    The weights w, and so the denominator, are the loss's own, as are the log-probabilities that `k3_unbiased` takes the
    importance ratio to, unless the loss has none: then to the policy at the start of the step."""

    def penalised(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        assert data.reference_logprobs_N is not None, "a KL term needs a reference"
        value, counts = loss(data)
        by_sampler = isinstance(config, settings.RatioLoss) and config.ratio_to == "sampler"
        base_N = data.sampler_logprobs_N if by_sampler else data.old_logprobs_N
        kl_N = estimate_kl(data.logprobs_N, data.reference_logprobs_N, estimator, base_logprobs_N=base_N)
        return value + coefficient.coef * (token_weights(data, config) * kl_N).sum(), counts

    return penalised


def with_distillation_term(loss: PolicyLoss, config: settings.PolicyLossConfig, coef: float) -> PolicyLoss:
    """Return `loss + coef * sum_t w_t KL(policy || teacher)_t`, the divergence over the whole vocabulary at each token.

    The reverse KL of Gu et al. 2024, "MiniLLM", and Agarwal et al. 2024, "On-Policy Distillation of Language Models",
    on rollouts of the policy; how an earlier token leads to a later one carries no gradient. The weights w are the
    loss's own."""

    def taught(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        assert data.teacher_kl_N is not None, "a distillation term needs a teacher"
        value, counts = loss(data)
        term = (token_weights(data, config) * data.teacher_kl_N).sum()
        return value + coef * term, counts | {"distillation/kl": data.teacher_kl_N.detach().sum()}

    return taught


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, weights_N: Tensor, *, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the critic's loss, and counts of tokens that are to be divided by the tokens of the step.

    `0.5 w max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)`, summed, as in PPO2 of OpenAI baselines and in
    TRL's PPOTrainer. The weights hold the denominator, which is the whole step's.

    Counts: `value_clip_fraction`, tokens whose clipped error is the larger one: they have no gradient.

    Args:
        values_N: the critic's values; the loss is differentiable in them.
        old_values_N: its values before the step.
        returns_N: what they should be, from `generalized_advantages`.
        weights_N: weight of each token; 0 where nothing was sampled.
        clip: how far a value may move in one step before moving further pays no more; inf for no limit.
    """
    errors_N = (values_N - returns_N).square()
    clipped_N = torch.clamp(values_N, old_values_N - clip, old_values_N + clip)
    clipped_errors_N = (clipped_N - returns_N).square()
    is_clipped_N = (clipped_errors_N > errors_N) & (weights_N != 0)
    loss = 0.5 * (weights_N * torch.maximum(errors_N, clipped_errors_N)).sum()
    return loss, {"value_clip_fraction": is_clipped_N.sum()}
