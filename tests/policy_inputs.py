"""The input of policy losses, for tests that are about some of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.policy.losses import PolicyLossInput


def policy_input(logprobs_N: Tensor, **given: Any) -> PolicyLossInput:
    """Return the input with what is `given`; tokens are else selected, uncorrected and of entropy 0."""
    one_N = torch.ones_like(logprobs_N).detach()
    plain: dict[str, Any] = {"entropy_N": torch.zeros_like(one_N), "correction_N": one_N, "selected_N": one_N}
    return PolicyLossInput(logprobs_N=logprobs_N, **(plain | given))
