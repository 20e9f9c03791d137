"""Packing: the tensors of a forward pass. That no loss or gradient depends on it: test_families, test_programs."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.trainer.data.packing import Sample, build_micro_batch

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
