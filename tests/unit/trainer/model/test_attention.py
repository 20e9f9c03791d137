"""Packed attention: every sample attends as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from holdfast.trainer.data.packing import PackedIndex
from holdfast.trainer.model.attention import packed_attention

CPU = torch.device("cpu")
lengths_of_rows = st.lists(st.integers(1, 9), min_size=1, max_size=6)


# Below and above what shares a padded batch whatever its lengths.
lengths_of_long_rows = st.lists(st.integers(1, 200), min_size=1, max_size=9)


@given(lengths=st.one_of(lengths_of_rows, lengths_of_long_rows))
@settings(max_examples=50)
def test_the_index_takes_tokens_out_and_puts_them_back(lengths: list[int]) -> None:
    index = PackedIndex.from_lengths(lengths, device=CPU)
    row_T = torch.arange(sum(lengths)) + 100
    padded = [row_T[gather_SL] for gather_SL in index.gather_SL]
    assert torch.equal(torch.cat([batch.flatten() for batch in padded])[index.scatter_T], row_T)
    parts = {int(part[0]): part for part in row_T.split(lengths)}
    for batch in padded:
        for sample_L in batch:
            part = parts.pop(int(sample_L[0]))
            assert torch.equal(sample_L[: len(part)], part)
    assert not parts and index.max_len == max(lengths)
    assert index.cu_seqlens.dtype == torch.int32
    assert index.cu_seqlens.tolist() == [sum(lengths[:k]) for k in range(len(lengths) + 1)]


def test_samples_share_a_padded_batch_with_those_of_about_their_length() -> None:
    """Attention over padding would cost the square of the longest sample for each: most of a step on ragged data."""
    index = PackedIndex.from_lengths([64, 1000, 3, 748, 750, 100, 96, 1, 60], device=CPU)
    assert [tuple(gather_SL.shape) for gather_SL in index.gather_SL] == [(2, 1000), (1, 748), (2, 100), (4, 64)]
    starts = np.cumsum([0, 64, 1000, 3, 748, 750, 100, 96, 1])
    assert [gather_SL[:, 0].tolist() for gather_SL in index.gather_SL] == [
        [starts[1], starts[4]], [starts[3]], [starts[5], starts[6]], [starts[0], starts[2], starts[7], starts[8]],
    ]  # fmt: skip
    assert len(PackedIndex.from_lengths([64, 30, 1], device=CPU).gather_SL) == 1


def by_hand(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    """Causal attention of one sample written out: (H, L, D) queries, (K, L, D) keys and values."""
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * scaling
    place = torch.arange(query.shape[1])
    seen = place[:, None] >= place[None, :]
    if window is not None:
        seen &= place[:, None] - place[None, :] < window
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("window", [None, 3])
def test_rows_of_one_sample_each_need_no_index(window: int | None) -> None:
    query, key, value = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    out, _ = packed_attention(nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window)
    for row in range(2):
        expected = by_hand(query[row], key[row], value[row], 0.3, window).transpose(0, 1)
        torch.testing.assert_close(out[row], expected)


def test_dropout_drops_in_training_and_only_then() -> None:
    query = torch.randn(1, 2, 6, 8)
    index = PackedIndex.from_lengths([2, 4], device=CPU)
    plain, _ = packed_attention(nn.Identity(), query, query, query, None, packed_index=index)
    dropped, _ = packed_attention(nn.Identity(), query, query, query, None, packed_index=index, dropout=0.5)
    assert not torch.allclose(plain, dropped)


def logits(model: PreTrainedModel, ids: list[int], *, lengths: list[int] | None = None) -> Tensor:
    if lengths is None:
        return model(torch.tensor([ids])).logits[0]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    index = PackedIndex.from_lengths(lengths, device=CPU)
    return model(torch.tensor([ids]), position_ids=positions, packed_index=index, use_cache=False).logits[0]


def test_a_sample_does_not_see_its_neighbours(tiny_model: Callable[..., Path]) -> None:
    """Without the index the neighbours are seen, so the tests above can fail."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), attn_implementation="packed")
    ids, lengths = [7, 8, 9, 10, 11, 12], [3, 3]
    changed = [70, 80, 90, 10, 11, 12]
    with torch.no_grad():
        torch.testing.assert_close(logits(model, ids, lengths=lengths)[3:], logits(model, changed, lengths=lengths)[3:])
        assert not torch.allclose(logits(model, ids)[3:], logits(model, changed)[3:])
