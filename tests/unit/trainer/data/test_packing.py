"""Packing: the tensors of a forward pass, and that no loss or gradient depends on how a step is split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from holdfast.config.training import TrainedModelConfig
from holdfast.trainer.data.packing import Sample, build_micro_batch, first_fit_decreasing
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.supervised import cross_entropy

CPU = torch.device("cpu")


def sample(tokens: list[int], trained: list[bool]) -> Sample:
    return Sample(
        np.asarray(tokens, dtype=np.int32),
        np.asarray(trained, dtype=bool),
        per_token={"advantage": np.asarray(tokens, dtype=np.float32) / 8},
    )


SAMPLES = [
    sample([11, 12, 13, 14], [False, False, True, True]),
    sample([21, 22], [False, True]),
    sample([31, 32, 33], [False, True, False]),
]


def test_a_packed_micro_batch_by_hand() -> None:
    micro = build_micro_batch(SAMPLES, [2, 0], pack=True, device=CPU)
    assert micro.input_ids_BL.tolist() == [[31, 32, 33, 11, 12, 13, 14]]
    assert micro.position_ids_BL.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert micro.predict_index_N.tolist() == [0, 4, 5]
    assert micro.target_ids_N.tolist() == [32, 13, 14]
    assert micro.sample_index_N.tolist() == [2, 0, 0]
    assert micro.per_token["advantage"].tolist() == [32 / 8, 13 / 8, 14 / 8]
    assert micro.packed_index is not None and micro.packed_index.cu_seqlens.tolist() == [0, 3, 7]


def test_answers_that_share_a_prompt_by_hand() -> None:
    """11 12 is the prompt of three answers; the last sample has another, and so has the one that comes before it."""
    answers = [[13, 14], [15], [16, 17, 18]]
    samples = [sample([11, 12, *answer], [False, False] + [True] * len(answer)) for answer in answers]
    samples += [SAMPLES[2], sample([31, 34], [False, True])]
    micro = build_micro_batch(samples, [0, 2, 1, 3, 4], pack=True, share=True, device=CPU)
    assert micro.input_ids_BL.tolist() == [[11, 12, 13, 14, 16, 17, 18, 15, 31, 32, 33, 34]]
    assert micro.position_ids_BL.tolist() == [[0, 1, 2, 3, 2, 3, 4, 2, 0, 1, 2, 1]]
    assert micro.predict_index_N.tolist() == [1, 2, 1, 4, 5, 1, 8, 8], "the prompt's last token predicts every first"
    assert micro.target_ids_N.tolist() == [13, 14, 16, 17, 18, 15, 32, 34]
    assert micro.sample_index_N.tolist() == [0, 0, 2, 2, 2, 1, 3, 4]
    assert micro.per_token["advantage"].tolist() == [token / 8 for token in micro.target_ids_N.tolist()]
    index = micro.packed_index
    assert index is not None and index.tokens_E is not None and index.places_T is not None
    assert index.tokens_E.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 0, 1, 7, 8, 9, 10, 8, 11]
    assert index.cu_seqlens.tolist() == [0, 4, 9, 12, 15, 17] and index.max_len == 5
    assert index.tokens_E[index.places_T].tolist() == list(range(12))
    (gathered,) = index.gather_SL
    assert gathered.flatten()[index.scatter_T].tolist() == list(range(12))
    apart = build_micro_batch(samples, [0, 3, 1], pack=True, share=True, device=CPU)
    assert apart.input_ids_BL.tolist() == [[11, 12, 13, 14, 31, 32, 33, 11, 12, 15]], "only neighbours share"


@given(data=st.data(), pack=st.booleans())
def test_the_token_before_predicts_each_target(data: st.DataObject, pack: bool) -> None:
    samples = [
        sample(
            list(range(100 * k, 100 * k + length)), data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
        )
        for k, length in enumerate(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6)))
    ]
    micro = build_micro_batch(samples, list(range(len(samples))), pack=pack, device=CPU)
    assert len(micro.target_ids_N) == sum(s.num_targets for s in samples)
    flat = micro.input_ids_BL.flatten()
    assert torch.equal(flat[micro.predict_index_N], micro.target_ids_N - 1)
    assert torch.equal(flat[micro.predict_index_N + 1], micro.target_ids_N)
    assert torch.equal(micro.target_ids_N // 100, micro.sample_index_N)
    assert torch.equal(micro.per_token["advantage"], micro.target_ids_N.float() / 8)


def test_the_first_token_is_never_a_target() -> None:
    everything = sample([5, 6], [True, True])
    assert everything.num_targets == 1
    assert build_micro_batch([everything], [0], pack=True, device=CPU).target_ids_N.tolist() == [6]


@pytest.fixture(scope="module")
def policy(tiny_model: Callable[..., Path], mesh: Mesh) -> Policy:
    return build_policy(TrainedModelConfig(name=str(tiny_model())), mesh, seed=0)


def ragged(seed: int) -> list[Sample]:
    generator = np.random.default_rng(seed)
    return [
        sample(generator.integers(5, 100, length).tolist(), (generator.random(length) < 0.6).tolist())
        for length in generator.integers(2, 30, 12)
    ]


def loss_and_gradients(
    policy: Policy, samples: list[Sample], groups: list[list[int]], *, pack: bool
) -> tuple[float, dict[str, Tensor]]:
    total = sum(s.num_targets for s in samples)
    loss_sum = 0.0
    for group in groups:
        micro = build_micro_batch(samples, group, pack=pack, device=CPU)
        logprobs, *_ = policy(
            micro.input_ids_BL, micro.position_ids_BL, micro.predict_index_N, micro.target_ids_N,
            packed_index=micro.packed_index,
        )  # fmt: skip
        loss = cross_entropy(logprobs, torch.full_like(logprobs, 1 / total))
        loss.backward()
        loss_sum += loss.item()
    gradients = {}
    for name, parameter in policy.hf_model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    policy.zero_grad(set_to_none=True)
    return loss_sum, gradients


@pytest.mark.parametrize("seed", [0, 1])
def test_however_a_step_is_split_loss_and_gradients_are_those_of_transformers(
    seed: int, policy: Policy, tiny_model: Callable[..., Path]
) -> None:
    samples = ragged(seed)
    total = sum(s.num_targets for s in samples)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model(), attn_implementation="eager", dtype=torch.float32)
    loss_sum = 0.0
    for one in samples:  # one sample at a time, the plainest way there is
        ids = torch.as_tensor(one.token_ids, dtype=torch.long)[None]
        labels = ids.masked_fill(torch.as_tensor(~one.loss_mask)[None], -100)
        logits = reference(ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum") / total
        loss.backward()
        loss_sum += loss.item()
    lengths = [len(s.token_ids) for s in samples]
    splits = {
        "one packed row": ([list(range(len(samples)))], True),
        "packed rows": (first_fit_decreasing(lengths, 40), True),
        "packed rows and empty ones": ([[], *first_fit_decreasing(lengths, 64), []], True),
        "one padded batch": ([list(range(len(samples)))], False),
        "one sample a time": ([[k] for k in range(len(samples))], False),
    }
    for name, (groups, pack) in splits.items():
        got, gradients = loss_and_gradients(policy, samples, groups, pack=pack)
        assert got == pytest.approx(loss_sum, rel=1e-5), name
        for key, parameter in reference.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-3, atol=2e-6, msg=f"{name}: {key}")


def test_a_micro_batch_of_nothing_contributes_exactly_nothing(policy: Policy) -> None:
    loss, gradients = loss_and_gradients(policy, SAMPLES, [[]], pack=True)
    assert loss == 0.0
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients.values())
