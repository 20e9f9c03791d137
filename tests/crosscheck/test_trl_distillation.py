"""The divergence from a teacher against the loss of TRL's DistillationTrainer, over ragged completions."""

from __future__ import annotations

import importlib

import pytest
import torch

from holdfast.protocol.rollouts import Sampling
from holdfast.trainer.model.logprobs import Reading, Readout, plain_head, token_logprobs

pytestmark = pytest.mark.trl

B, T, H, V = 3, 6, 5, 23


@pytest.mark.usefixtures("trl_trainers")  # imports TRL without what it has no use for here
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_reverse_kl_of_whole_vocabularies(temperature: float, softcap: float | None) -> None:
    trl = importlib.import_module("trl.trainer.distillation_trainer")
    generator = torch.Generator().manual_seed(0)
    student_BTH, teacher_BTH = (torch.randn(B, T, width, generator=generator) for width in (H, H + 2))
    student_VH, teacher_VH = (torch.randn(V, width, generator=generator) for width in (H, H + 2))
    leaves = (student_BTH.requires_grad_(), student_VH.requires_grad_())
    mask_BT = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0], [0] * 6])
    theirs, _, count = trl._chunked_divergence_loss(
        student_BTH, teacher_BTH, student_VH, teacher_VH, mask_BT, beta=1.0, chunk_size=4, temperature=temperature,
        student_final_logit_softcapping=softcap, teacher_final_logit_softcapping=softcap,
    )  # fmt: skip
    chosen = mask_BT == 1
    found = token_logprobs(
        student_BTH[chosen],
        plain_head(student_VH, softcap=softcap),
        torch.zeros(int(count), dtype=torch.long),
        Reading(Sampling(temperature)),
        chunk_tokens=2,
        teacher=Readout(teacher_BTH[chosen], plain_head(teacher_VH, softcap=softcap)),
    )
    assert found.teacher_kl_N is not None
    ours = found.teacher_kl_N.mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    gradients = (torch.autograd.grad(loss, leaves) for loss in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
