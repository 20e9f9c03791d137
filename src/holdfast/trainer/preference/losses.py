"""Losses of preferences: pure functions of the log-probabilities, or rewards, of pairs.

Each returns losses per pair. The program divides by the pairs of the whole optimizer step, over all ranks and
micro-batches, so a step has one loss however it is split.

To add the loss `name`, write `name_loss` here, and its settings in `holdfast.config.preference`.

Shape legend: P pairs, A answers that are labelled one by one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.config import preference

_LARGEST_LOGPROB = -1e-9


@dataclass(frozen=True)
class PairLogprobs:
    """The input of a preference loss. Log-probabilities are sums over an answer's tokens, in nats.

    Attributes:
        chosen_P, rejected_P: under the weights being trained; they carry the gradient.
        reference_chosen_P, reference_rejected_P: under the reference; zeros without one.
        chosen_tokens_P, rejected_tokens_P: tokens of each answer.
        margins_P: by how much the chosen answers are better, as their rows say.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    reference_chosen_P: Tensor
    reference_rejected_P: Tensor
    chosen_tokens_P: Tensor
    rejected_tokens_P: Tensor
    margins_P: Tensor


class PairLosses(NamedTuple):
    """Loss of each pair, with its gradient, and the implicit rewards of both sides, without."""

    losses_P: Tensor
    chosen_rewards_P: Tensor
    rejected_rewards_P: Tensor


def preference_loss(pairs: PairLogprobs, config: preference.PreferenceLossConfig) -> PairLosses:
    """Return the loss that `config` names. With `rpo_alpha`, minus alpha l(y_w) / |y_w| (Pang et al. 2024, "Iterative
    reasoning preference optimization")."""
    assert not isinstance(config, preference.KtoLoss), "kto trains on single answers, not pairs"
    scored: PairLosses = globals()[f"{config.type}_loss"](pairs, config)
    if not isinstance(config, preference.PairLoss) or not config.rpo_alpha:
        return scored
    return scored._replace(losses_P=scored.losses_P - config.rpo_alpha * pairs.chosen_P / pairs.chosen_tokens_P)


def dpo_loss(pairs: PairLogprobs, config: preference.DpoLoss) -> PairLosses:
    """Return DPO (Rafailov et al. 2023, "Direct preference optimization", eq. 7).

    loss = -(1 - e) log sigmoid(h) - e log sigmoid(-h), h = beta [(l_pi(y_w) - l_ref(y_w)) - (l_pi(y_l) -
    l_ref(y_l))]; e is `label_smoothing` (Mitchell 2023, "A note on DPO with noisy preferences"). With `odpo_alpha`,
    h - alpha margin instead of h (Amini et al. 2024, "Direct preference optimization with an offset")."""
    chosen_P, rejected_P = _rewards(pairs, config)
    h_P, smoothing = chosen_P - rejected_P - config.odpo_alpha * pairs.margins_P, config.label_smoothing
    losses_P = -(1 - smoothing) * F.logsigmoid(h_P) - smoothing * F.logsigmoid(-h_P)
    return _scored(losses_P, chosen_P, rejected_P)


def ipo_loss(pairs: PairLogprobs, config: preference.ReferencedPairLoss) -> PairLosses:
    """Return IPO (Azar et al. 2023, "A general theoretical paradigm to understand learning from human preferences").

    loss = (d - 1 / (2 beta))^2, d = (l_pi(y_w) - l_ref(y_w)) / |y_w| - (l_pi(y_l) - l_ref(y_l)) / |y_l|

    Eq. 17 with the mean log-ratio of an answer's tokens: the form of the paper's results, as its authors told TRL
    (`DPOTrainer`, `loss_type = "ipo"`). `ipo_sum_loss` is the equation as printed."""
    chosen_P, rejected_P = _log_ratios(pairs)
    return _squared(chosen_P / pairs.chosen_tokens_P, rejected_P / pairs.rejected_tokens_P, config.beta)


def ipo_sum_loss(pairs: PairLogprobs, config: preference.ReferencedPairLoss) -> PairLosses:
    """Return IPO as eq. 17 is printed: as `ipo_loss`, with log-ratios of whole answers instead of means."""
    return _squared(*_log_ratios(pairs), config.beta)


def hinge_loss(pairs: PairLogprobs, config: preference.ReferencedPairLoss) -> PairLosses:
    """Return the hinge of SLiC-HF on DPO's rewards (Zhao et al. 2023; Liu et al. 2023, "Statistical rejection sampling
    improves preference optimization"): loss = max(0, 1 - h), h as in DPO."""
    chosen_P, rejected_P = _rewards(pairs, config)
    return _scored(F.relu(1 - (chosen_P - rejected_P)), chosen_P, rejected_P)


def robust_loss(pairs: PairLogprobs, config: preference.RobustLoss) -> PairLosses:
    """Return robust DPO (Chowdhury et al. 2024, "Provably robust DPO: aligning language models with noisy feedback").

    loss = (-(1 - e) log sigmoid(h) + e log sigmoid(-h)) / (1 - 2 e), h as in DPO: its mean over labels of which the
    share e = `label_smoothing` is wrong is DPO's over the right ones. It has no lower bound."""
    chosen_P, rejected_P = _rewards(pairs, config)
    h_P, smoothing = chosen_P - rejected_P, config.label_smoothing
    losses_P = -(1 - smoothing) * F.logsigmoid(h_P) + smoothing * F.logsigmoid(-h_P)
    return _scored(losses_P / (1 - 2 * smoothing), chosen_P, rejected_P)


def apo_zero_loss(pairs: PairLogprobs, config: preference.ReferencedPairLoss) -> PairLosses:
    """Return APO-zero (D'Oosterlinck et al. 2024, "Anchored preference optimization and contrastive revisions", eq. 7).

    loss = 1 - sigmoid(r_w) + sigmoid(r_l), r = beta (l_pi - l_ref): chosen answers become likelier, rejected ones less
    likely. For answers that are better than the model's own. The 1, as in TRL, keeps it above 0."""
    chosen_P, rejected_P = _rewards(pairs, config)
    return _scored(F.sigmoid(-chosen_P) + F.sigmoid(rejected_P), chosen_P, rejected_P)


def apo_down_loss(pairs: PairLogprobs, config: preference.ReferencedPairLoss) -> PairLosses:
    """Return APO-down (D'Oosterlinck et al. 2024, eq. 8).

    loss = sigmoid(r_w) + 1 - sigmoid(r_w - r_l): both become less likely, the rejected side more so. For answers that
    are all worse than the model's own."""
    chosen_P, rejected_P = _rewards(pairs, config)
    return _scored(F.sigmoid(chosen_P) + F.sigmoid(rejected_P - chosen_P), chosen_P, rejected_P)


def simpo_loss(pairs: PairLogprobs, config: preference.SimpoLoss) -> PairLosses:
    """Return SimPO (Meng et al. 2024, "SimPO: Simple preference optimization with a reference-free reward", eq. 6).

    loss = -log sigmoid(beta l(y_w) / |y_w| - beta l(y_l) / |y_l| - margin)"""
    chosen_P, rejected_P = _means(pairs)
    losses_P = -F.logsigmoid(config.beta * (chosen_P - rejected_P) - config.margin)
    return _scored(losses_P, config.beta * chosen_P, config.beta * rejected_P)


def orpo_loss(pairs: PairLogprobs, config: preference.OrpoLoss) -> PairLosses:
    """Return ORPO (Hong et al. 2024, "ORPO: Monolithic preference optimization without reference model", eq. 6-7).

    loss = -m_w - beta log sigmoid(log odds(m_w) - log odds(m_l)), with m = l(y) / |y| the mean log-probability of an
    answer's tokens and log odds(m) = m - log(1 - exp(m)). The first term is from eq. 6, over the answer of each pair;
    the authors' program, and TRL's, take the mean over the tokens of prompts and answers."""
    chosen_P, rejected_P = _means(pairs)
    odds_P = _log_odds(chosen_P) - _log_odds(rejected_P)
    losses_P = -chosen_P - config.beta * F.logsigmoid(odds_P)
    return _scored(losses_P, config.beta * chosen_P, config.beta * rejected_P)


def kto_loss(ratios_A: Tensor, is_desirable_A: Tensor, kl: float, config: preference.KtoLoss) -> tuple[Tensor, Tensor]:
    """Return losses (A,) and rewards (A,) of KTO (Ethayarajh et al. 2024, "KTO: Model alignment as prospect theoretic
    optimization").

    loss = lambda_D (1 - sigmoid(beta (r - z))) of a desirable answer, lambda_U (1 - sigmoid(beta (z - r))) of another,
    r = l_pi(y) - l_ref(y). A gradient is lambda beta / 4 at most, whatever r.

    Args:
        ratios_A: r in nats.
        is_desirable_A: bool.
        kl: z, the divergence of policy from reference, at least 0, without gradient.
    """
    gains_A = torch.where(is_desirable_A, ratios_A - kl, kl - ratios_A)
    losses_A = F.sigmoid(-config.beta * gains_A)
    losses_A = torch.where(is_desirable_A, config.desirable_weight * losses_A, config.undesirable_weight * losses_A)
    return losses_A, (config.beta * ratios_A).detach()


def sequence_sums(values_N: Tensor, lengths: list[int]) -> Tensor:
    """Return the sums of consecutive stretches in float64: in a fixed order, so the same every time. `lengths`: of the
    stretches; together N. Without stretches the result is empty and has a gradient."""
    if not lengths:
        return values_N.double()
    return torch.stack([part.sum() for part in values_N.double().split(lengths)])


def _log_ratios(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    """Return l_pi - l_ref of both sides. The policy comes first: the other sign would prefer the rejected side."""
    return pairs.chosen_P - pairs.reference_chosen_P, pairs.rejected_P - pairs.reference_rejected_P


def _rewards(pairs: PairLogprobs, config: preference.PreferenceLossConfig) -> tuple[Tensor, Tensor]:
    """Return the implicit rewards beta (l_pi - l_ref) of both sides."""
    chosen_P, rejected_P = _log_ratios(pairs)
    return config.beta * chosen_P, config.beta * rejected_P


def _squared(chosen_P: Tensor, rejected_P: Tensor, beta: float) -> PairLosses:
    losses_P = (chosen_P - rejected_P - 1 / (2 * beta)).square()
    return _scored(losses_P, beta * chosen_P, beta * rejected_P)


def _means(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    return pairs.chosen_P / pairs.chosen_tokens_P, pairs.rejected_P / pairs.rejected_tokens_P


def _log_odds(mean_P: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of p = exp(mean_P); a p that rounds to 1 counts as a little less."""
    mean_P = mean_P.clamp(max=_LARGEST_LOGPROB)
    return mean_P - torch.log(-torch.expm1(mean_P))


def _scored(losses_P: Tensor, chosen_rewards_P: Tensor, rejected_rewards_P: Tensor) -> PairLosses:
    return PairLosses(losses_P, chosen_rewards_P.detach(), rejected_rewards_P.detach())


def reward_loss(chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor, config: preference.RewardLossConfig) -> Tensor:
    """Return the loss of each pair (P,).

    loss = -log sigmoid(r_w - r_l - margin) + center_coef (r_w + r_l)^2

    The first term is the negative log-likelihood of the preferences under Bradley and Terry (1952), as in
    Christiano et al. 2017, "Deep reinforcement learning from human preferences", and Ouyang et al. 2022,
    "Training language models to follow instructions with human feedback"; the margin of a pair is of Touvron et al.
    2023, "Llama 2", eq. 2. The second fixes the sum, on which the first does not depend (Eisenstein et al. 2023,
    "Helping or herding?").

    Args:
        chosen_P, rejected_P: rewards of both sides.
        margins_P: how much more reward the chosen side should have, such as how clearly it was preferred.
    """
    losses_P = -F.logsigmoid(chosen_P - rejected_P - margins_P)
    return losses_P + config.center_coef * (chosen_P + rejected_P).square()
