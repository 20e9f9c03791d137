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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from holdfast.trainer.data.packing import PackedIndex
from holdfast.trainer.models.attention import packed_attention

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


MODELS = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "qwen3 with sliding window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_row_gives_what_transformers_gives_for_each_sample(name: str, tiny_model: Callable[..., Path]) -> None:
    kind, fields = MODELS[name]
    directory = tiny_model(kind, **fields)
    eager = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float64)
    packed = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="packed", dtype=torch.float64)
    lengths = [5, 1, 9, 3]
    ids = torch.randint(5, 100, (sum(lengths),), generator=torch.Generator().manual_seed(1)).tolist()
    upstream = torch.randn(sum(lengths), 128, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out = logits(packed, ids, lengths=lengths)
    (out * upstream).sum().backward()
    parts, start = [], 0
    for length in lengths:
        parts.append(logits(eager, ids[start : start + length]))
        start += length
    torch.testing.assert_close(out, torch.cat(parts), rtol=1e-5, atol=1e-6)
    (torch.cat(parts) * upstream).sum().backward()
    for (key, ours), theirs in zip(packed.named_parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and theirs.grad.abs().sum() > 0, key
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=key)


def test_the_window_of_a_model_reaches_the_attention(tiny_model: Callable[..., Path]) -> None:
    _, fields = MODELS["qwen3 with sliding window"]
    directory = tiny_model("qwen3", **fields)
    sliding = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="packed")
    config = AutoConfig.from_pretrained(directory, layer_types=["full_attention", "full_attention"])
    full = AutoModelForCausalLM.from_pretrained(directory, config=config, attn_implementation="packed")
    with torch.no_grad():
        near, far = logits(sliding, list(range(5, 14)), lengths=[9]), logits(full, list(range(5, 14)), lengths=[9])
    torch.testing.assert_close(near[:3], far[:3])
    assert not torch.allclose(near[3:], far[3:])


def test_a_sample_does_not_see_its_neighbours(tiny_model: Callable[..., Path]) -> None:
    """Without the index the neighbours are seen, so the tests above can fail."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), attn_implementation="packed")
    ids, lengths = [7, 8, 9, 10, 11, 12], [3, 3]
    changed = [70, 80, 90, 10, 11, 12]
    with torch.no_grad():
        torch.testing.assert_close(logits(model, ids, lengths=lengths)[3:], logits(model, changed, lengths=lengths)[3:])
        assert not torch.allclose(logits(model, ids)[3:], logits(model, changed)[3:])
