"""The correction of importance weights where sampler and trainer disagree about the same tokens.

Without a correction the ratio of a loss is pi / mu: trained policy over sampler. With one it splits in
two, pi / mu = (pi / pi_old) * (pi_old / mu), where pi_old is the trainer's policy at the start of the
step. The loss clips the first factor; the second, which the optimizer cannot change, is bounded here.

Shape legend: N predicted tokens of the forward pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from holdfast.shared.config.losses import CorrectionConfig
from holdfast.trainer.rl.losses.base import Counts, PolicyLossInput, over_sequences
from holdfast.trainer.rl.regularization.kl import bounded


@torch.no_grad()
def correction_factors(data: PolicyLossInput, config: CorrectionConfig) -> tuple[Tensor, Counts]:
    """Return the factor of each token's objective, (N,), without gradient, and how many tokens it bounded.

    With w = pi_old / mu, of the token, with `level = "sequence"` the product over its sequence, with `"geometric"`
    the geometric mean over it:

    - `truncate`: min(w, high). Truncated importance sampling (Ionides 2008; for this mismatch Yao et al.
      2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").
    - `mask`: w where low <= w <= high, else 0 (per token: IcePop of Ling Team 2025, "Every Step
      Evolves"; per sequence and geometric: Liu et al. 2025, "When Speed Kills Stability").

    `veto`: 0 for every token of a sequence with a token whose own w is below it.

    The denominator of the loss stays as it is: what is masked counts as 0, not as absent.
    1 and no counts without a correction.
    """
    if config.type == "none":
        return torch.ones_like(data.logprobs_N), {}
    assert config.high is not None  # the config fills it in
    token_N = bounded(data.old_logprobs_N - data.sampler_logprobs_N)
    log_weights_N = token_N
    if config.level != "token":
        reduce = torch.sum if config.level == "sequence" else torch.mean
        # Bounded again: the sum of bounded logs over a long sequence overflows exp.
        log_weights_N = bounded(over_sequences(token_N, data, reduce))
    weights_N = log_weights_N.exp()
    bounded_N = (weights_N < (config.low or 0.0)) | (weights_N > config.high)
    if config.type == "truncate":
        factors_N = weights_N.clamp(max=config.high)
    else:
        factors_N = torch.where(bounded_N, 0.0, weights_N)
    counts = {"correction/bounded": bounded_N.sum()}
    if config.veto is not None:
        vetoed_N = over_sequences(token_N, data, torch.min) < math.log(config.veto)
        factors_N = torch.where(vetoed_N, 0.0, factors_N)
        counts["correction/vetoed"] = vetoed_N.sum()
    return factors_N, counts
