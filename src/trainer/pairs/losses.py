"""Preference losses: pure functions of the log-probabilities of pairs.

Each returns losses and rewards per pair. The program divides by the pairs of the whole optimizer
step, over all ranks and micro-batches, so a step has one loss however it is split.

Shape legend: P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from triad.config.dpo import PreferenceLossConfig

_LARGEST_LOGPROB = -1e-9


@dataclass(frozen=True)
class PairLogprobs:
    """What a preference loss sees. Log-probabilities are sums over an answer's tokens, in nats.

    Attributes:
        chosen_P, rejected_P: under the weights being trained; they carry the gradient.
        reference_chosen_P, reference_rejected_P: under the reference; zeros where there is none.
        chosen_tokens_P, rejected_tokens_P: tokens of each answer.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    reference_chosen_P: Tensor
    reference_rejected_P: Tensor
    chosen_tokens_P: Tensor
    rejected_tokens_P: Tensor


class PairLosses(NamedTuple):
    """Loss of each pair, with its gradient, and the implicit rewards of both sides, without."""

    losses_P: Tensor
    chosen_rewards_P: Tensor
    rejected_rewards_P: Tensor


PreferenceLoss = Callable[[PairLogprobs], PairLosses]


def preference_loss(config: PreferenceLossConfig) -> PreferenceLoss:
    """Return the loss that `config` names."""
    makers = {"dpo": dpo_loss, "ipo": ipo_loss, "simpo": simpo_loss, "orpo": orpo_loss}
    return makers[config.type](config)


def dpo_loss(config: PreferenceLossConfig) -> PreferenceLoss:
    """Return DPO (Rafailov et al. 2023, "Direct preference optimization", eq. 7).

    loss = -(1 - e) log sigmoid(h) - e log sigmoid(-h), h = beta [(l_pi(y_w) - l_ref(y_w)) - (l_pi(y_l) -
    l_ref(y_l))]; e is `label_smoothing` (Mitchell 2023, "A note on DPO with noisy preferences").
    """

    def loss(pairs: PairLogprobs) -> PairLosses:
        chosen_P, rejected_P = _log_ratios(pairs)
        h_P = config.scale * (chosen_P - rejected_P)
        smoothing = config.label_smoothing
        losses_P = -(1 - smoothing) * F.logsigmoid(h_P) - smoothing * F.logsigmoid(-h_P)
        return _scored(losses_P, config.scale * chosen_P, config.scale * rejected_P)

    return loss


def ipo_loss(config: PreferenceLossConfig) -> PreferenceLoss:
    """Return IPO (Azar et al. 2023, "A general theoretical paradigm to understand learning from human preferences").

    Eq. 17: loss = (h - 1 / (2 beta))^2 with h as in DPO but without its beta, over whole answers: the
    log-probabilities are sums, not means over tokens.
    """

    def loss(pairs: PairLogprobs) -> PairLosses:
        chosen_P, rejected_P = _log_ratios(pairs)
        losses_P = (chosen_P - rejected_P - 1 / (2 * config.scale)).square()
        return _scored(losses_P, config.scale * chosen_P, config.scale * rejected_P)

    return loss


def simpo_loss(config: PreferenceLossConfig) -> PreferenceLoss:
    """Return SimPO (Meng et al. 2024, "SimPO: Simple preference optimization with a reference-free reward", eq. 6).

    loss = -log sigmoid(beta l(y_w) / |y_w| - beta l(y_l) / |y_l| - margin)
    """
    margin = config.margin or 0.0

    def loss(pairs: PairLogprobs) -> PairLosses:
        chosen_P, rejected_P = _means(pairs)
        losses_P = -F.logsigmoid(config.scale * (chosen_P - rejected_P) - margin)
        return _scored(losses_P, config.scale * chosen_P, config.scale * rejected_P)

    return loss


def orpo_loss(config: PreferenceLossConfig) -> PreferenceLoss:
    """Return ORPO (Hong et al. 2024, "ORPO: Monolithic preference optimization without reference model", eq. 6-7).

    loss = -m_w - beta log sigmoid(log odds(m_w) - log odds(m_l)), with m = l(y) / |y| the mean
    log-probability of an answer's tokens and log odds(m) = m - log(1 - exp(m)).
    """

    def loss(pairs: PairLogprobs) -> PairLosses:
        chosen_P, rejected_P = _means(pairs)
        odds_P = _log_odds(chosen_P) - _log_odds(rejected_P)
        losses_P = -chosen_P - config.scale * F.logsigmoid(odds_P)
        return _scored(losses_P, config.scale * chosen_P, config.scale * rejected_P)

    return loss


def sequence_sums(values_N: Tensor, lengths: list[int]) -> Tensor:
    """Return the sums of consecutive stretches in float64: in a fixed order, so the same every time.

    Args:
        lengths: of the stretches; together N. None of them gives an empty result that has a gradient.
    """
    if not lengths:
        return values_N.double()
    return torch.stack([part.sum() for part in values_N.double().split(lengths)])


def _log_ratios(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    """Return l_pi - l_ref of both sides. The policy comes first: the other sign would prefer the rejected side."""
    return pairs.chosen_P - pairs.reference_chosen_P, pairs.rejected_P - pairs.reference_rejected_P


def _means(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    return pairs.chosen_P / pairs.chosen_tokens_P, pairs.rejected_P / pairs.rejected_tokens_P


def _log_odds(mean_P: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of p = exp(mean_P); a p that rounds to 1 counts as a little less."""
    mean_P = mean_P.clamp(max=_LARGEST_LOGPROB)
    return mean_P - torch.log(-torch.expm1(mean_P))


def _scored(losses_P: Tensor, chosen_rewards_P: Tensor, rejected_rewards_P: Tensor) -> PairLosses:
    return PairLosses(losses_P, chosen_rewards_P.detach(), rejected_rewards_P.detach())
