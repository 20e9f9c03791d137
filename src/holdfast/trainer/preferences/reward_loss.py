"""The loss of a reward model: a pure function of the rewards of pairs.

Shape legend: P pairs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from holdfast.shared.config.reward_training import RewardLossConfig


def reward_loss(chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor, config: RewardLossConfig) -> Tensor:
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
