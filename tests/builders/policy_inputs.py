"""The input of policy losses, for tests that are about some of it."""

from typing import Any

import torch
from torch import Tensor

from holdfast.trainer.rl.losses import PolicyLossInput


def policy_input(logprobs_N: Tensor, **given: Any) -> PolicyLossInput:
    """Return the input with what is `given`; tokens are else uncorrected and of entropy 0."""
    one_N = torch.ones_like(logprobs_N).detach()
    plain: dict[str, Any] = {"correction_N": one_N, "entropy_N": torch.zeros_like(one_N)}
    return PolicyLossInput(logprobs_N=logprobs_N, **(plain | given))
