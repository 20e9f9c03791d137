"""Packed attention: every sample attends as if alone, by padded batches or a kernel (tests/gpu has that of GPUs)."""

import ast
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from holdfast.trainer.data.packing import PackedIndex
from holdfast.trainer.model import attention
from holdfast.trainer.model.attention import KERNELS, Kernel, packed_attention
from tests.models.per_sample import PerSample

CPU = torch.device("cpu")
FLASH = KERNELS["cuda"]

MARKS = "COVERAGE_MARKS"
without_marks = pytest.mark.skipif(
    MARKS in os.environ, reason="marks break graphs: test_graphs_are_whole_in_code_without_marks runs it without them"
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PerSample:
    """Take a kernel on the CPU as on a GPU."""
    function = PerSample()
    monkeypatch.setitem(KERNELS, "cpu", Kernel(function, frozenset({torch.float32, torch.float64}), 64))
    return function


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Return the warnings, which grow."""
    monkeypatch.setattr(attention, "_named", set())
    lines = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("trainer")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.mark.parametrize(("given_", "is_taken"), [
    ({}, True), ({"dtype": torch.float16}, True), ({"head_dims": (192, 128)}, True), ({"head_dims": (10, 10)}, True),
    ({"is_usable": False}, False), ({"dtype": torch.float32}, False), ({"value_dtype": torch.float16}, False),
    ({"head_dims": (512, 512)}, False), ({"head_dims": (64, 320)}, False), ({"dropout": 0.1}, False),
    ({"softcap": 50.0}, False), ({"has_sinks": True}, False),
])  # fmt: skip
def test_the_kernel_is_taken_for_what_it_can_do(
    given_: dict[str, Any], is_taken: bool, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    arguments = {"dropout": 0.0, "softcap": None, "has_sinks": False} | given_
    dims, dtype = arguments.pop("head_dims", (128, 128)), arguments.pop("dtype", torch.bfloat16)
    value_dtype, is_usable = arguments.pop("value_dtype", dtype), arguments.pop("is_usable", True)
    monkeypatch.setitem(KERNELS, "cpu", replace(FLASH, is_usable=lambda _: is_usable))
    query, value = torch.empty(1, 2, 3, dims[0], dtype=dtype), torch.empty(1, 2, 3, dims[1], dtype=value_dtype)
    found = attention._kernel_for(nn.Identity(), query, query, value, **arguments)
    assert (found is not None) == is_taken == (not said)


def attend(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, index: PackedIndex | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out, _ = packed_attention(nn.Identity(), query, key, value, None, sliding_window=window, packed_index=index)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    return out, torch.autograd.grad((out * upstream).sum(), (query, key, value))


@given(
    groups=st.lists(st.tuples(st.integers(1, 90), st.lists(st.integers(1, 90), min_size=1, max_size=4)), min_size=1),
    kv_heads=st.sampled_from([4, 2, 1]),
    dims=st.sampled_from([(8, 8), (12, 12), (16, 10), (6, 24)]),
    window=st.sampled_from([None, 1, 3, 70]),
)
@settings(max_examples=30)
def test_answers_that_share_a_prompt_attend_as_in_rows_of_their_own(
    groups: list[tuple[int, list[int]]], kv_heads: int, dims: tuple[int, int], window: int | None
) -> None:
    """By padded batches and by the kernel; each group is a prompt's length and those of its answers."""
    sequences, places, used = list[np.ndarray](), list[np.ndarray](), 0
    for prompt, answers in groups[:4]:
        for number, answer in enumerate(answers):
            kept = np.arange(0) if number == 0 else sequences[-1][:prompt]
            sequences.append(np.concatenate([kept, np.arange(used, used + prompt + answer - len(kept))]))
            places.append(np.arange(len(kept), prompt + answer))
            used += len(places[-1])
    generator = torch.Generator().manual_seed(used)
    query, key, value = (
        torch.randn(1, heads, used, dim, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, dim in ((4, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1]))
    )
    index = PackedIndex.from_sequences(sequences, device=CPU)
    apart = [
        by_hand(query[0, :, tokens], key[0, :, tokens], value[0, :, tokens], window)[:, own].transpose(0, 1)
        for tokens, own in zip(sequences, places, strict=True)
    ]
    upstream = torch.randn((1, used, 4, dims[1]), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = torch.cat(apart)[None]
    gradients = torch.autograd.grad((expected * upstream).sum(), (query, key, value))
    torch.testing.assert_close(attend(query, key, value, window, index), (expected, gradients))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "cpu", Kernel(PerSample(), frozenset({torch.float64}), 64))
        torch.testing.assert_close(attend(query, key, value, window, index), (expected, gradients))


@pytest.mark.parametrize("window", [None, 3, 7])
def test_rows_of_one_sample_each_need_no_index(window: int | None, kernel: PerSample) -> None:
    query, key = (torch.randn(3, heads, 7, 8, requires_grad=True) for heads in (4, 2))
    found = attend(query, key, key, window, None)
    assert kernel.calls == 1, "as samples"
    # No window where it holds all: (-1, 0) is the kernel's faster plain causal attention.
    assert kernel.windows == {(2 if window == 3 else -1, 0)}
    del KERNELS["cpu"]
    padded = attend(query, key, key, window, None)
    torch.testing.assert_close(found, padded)
    for row, out in enumerate(padded[0]):
        torch.testing.assert_close(out, by_hand(query[row], key[row], key[row], window).transpose(0, 1))


def test_a_way_out_is_named_once_with_its_reason(kernel: PerSample, said: list[str]) -> None:
    query = torch.randn(1, 2, 6, 8)
    index = PackedIndex.from_lengths([2, 4], device=CPU)
    for dtype in (torch.float32, torch.bfloat16, torch.bfloat16):
        one = query.to(dtype)
        packed_attention(nn.Identity(), one, one, one, None, packed_index=index)
    assert kernel.calls == 1
    (line,) = said
    assert "Identity attends to padded batches" in line and "in torch.bfloat16 with heads of 8" in line
    KERNELS["cpu"] = replace(KERNELS["cpu"], is_usable=lambda _: False)
    packed_attention(nn.Identity(), query, query, query, None, packed_index=index)
    assert kernel.calls == 1


@without_marks
@pytest.mark.parametrize("dtypes", [{torch.float32}, {torch.bfloat16}, None])
def test_choosing_breaks_no_compiled_graph(
    dtypes: set[torch.dtype] | None, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def plain(query_THD: Tensor, _: Tensor, value_EKD: Tensor, *_others: object, **__: object) -> Tensor:
        return query_THD + value_EKD

    if dtypes is not None:
        monkeypatch.setitem(KERNELS, "cpu", Kernel(plain, frozenset(dtypes), 64))
    query = torch.randn(1, 2, 6, 8)
    index = PackedIndex.from_lengths([2, 4], device=CPU)

    def run(query: Tensor) -> Tensor:
        return packed_attention(nn.Identity(), query, query, query, None, packed_index=index)[0]

    # Padded batches are computed between graphs.
    compiled = torch.compile(run, backend="eager", fullgraph=dtypes == {torch.float32})
    torch.testing.assert_close(compiled(query), run(query))
    assert len(said) == (dtypes == {torch.bfloat16})


@without_marks
def test_rows_of_other_numbers_of_padded_batches_need_no_other_compiled_graph() -> None:
    """After some graphs of one function torch compiles it no more, for the rest of the run."""
    torch.compiler.reset()
    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def run(query: Tensor, index: PackedIndex) -> Tensor:
        return packed_attention(nn.Identity(), 2 * query, query, query, None, packed_index=index)[0] + 1

    compiled, prompt, answer = torch.compile(run, backend=backend), 70, 4
    for groups in range(1, 13):
        starts = (prompt + 2 * answer) * np.arange(groups)
        own = np.arange(prompt + 2 * answer)
        parts = (own[: prompt + answer], np.concatenate([own[:prompt], own[prompt + answer :]]))
        index = PackedIndex.from_sequences([start + part for start in starts for part in parts], device=CPU)
        assert len(index.gather_SL) == 1 + groups
        query = torch.randn(1, 2, groups * len(own), 8)
        torch.testing.assert_close(compiled(query, index), run(query, index))
    assert 0 < len(graphs) <= 4


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the capability of the GPUs that this machine has not, and take the GPU's kernel on `meta`."""
    found = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: ast.literal_eval(f"{tuple(found)}"))
    monkeypatch.setitem(KERNELS, "meta", FLASH)
    return found


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=without_marks, id="compiled")])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("shared", [0, 3])
def test_the_kernel_takes_what_is_given(shared: int, kv_heads: int, is_compiled: bool, capability: list[int]) -> None:
    """On the `meta` device, where torch checks the call and computes shapes alone, also of the gradients."""
    assert capability == [9, 0]
    meta = torch.device("meta")
    query, key = (torch.empty(1, heads, 9, 10, dtype=torch.bfloat16, device=meta) for heads in (4, kv_heads))
    value = torch.empty(1, kv_heads, 9, 6, dtype=torch.bfloat16, device=meta, requires_grad=True)
    sequences = [np.arange(5), np.concatenate([np.arange(shared), np.arange(5, 9)])]
    index = PackedIndex.from_sequences(sequences, device=meta)

    def run(value: Tensor) -> Tensor:
        return packed_attention(nn.Identity(), query, key, value, None, sliding_window=3, packed_index=index)[0]

    out = (torch.compile(run, backend="eager", fullgraph=True) if is_compiled else run)(value)
    assert out.shape == (1, 9, 4, 6) and out.dtype == torch.bfloat16
    out.sum().backward()
    assert value.grad is not None and value.grad.shape == value.shape


@pytest.mark.clock
@pytest.mark.skipif(MARKS not in os.environ, reason="without marks every test of this file runs by itself")
def test_graphs_are_whole_in_code_without_marks() -> None:
    plain = {name: value for name, value in os.environ.items() if name != MARKS}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "-k", "compiled", __file__]
    done = subprocess.run(command, env=plain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout


def test_older_gpus_have_no_kernel(capability: list[int], said: list[str]) -> None:
    capability[:] = [7, 5]
    query = torch.empty(1, 2, 6, 8, dtype=torch.bfloat16, device="meta")
    packed_attention(nn.Identity(), query, query, query, None)
    assert len(said) == 1 and "needs an Ampere GPU" in said[0]


def test_samples_share_a_padded_batch_with_those_of_about_their_length() -> None:
    """Attention over padding would cost the square of the longest sample for each: most of a step on ragged data."""
    index = PackedIndex.from_lengths([64, 1000, 3, 748, 750, 100, 96, 1, 60], device=CPU)
    assert [tuple(gather_SL.shape) for gather_SL in index.gather_SL] == [(2, 1000), (1, 748), (2, 100), (4, 64)]
    starts = np.cumsum([0, 64, 1000, 3, 748, 750, 100, 96, 1])
    assert [gather_SL[:, 0].tolist() for gather_SL in index.gather_SL] == [
        [starts[1], starts[4]], [starts[3]], [starts[5], starts[6]], [starts[0], starts[2], starts[7], starts[8]],
    ]  # fmt: skip
    assert len(PackedIndex.from_lengths([64, 30, 1], device=CPU).gather_SL) == 1


def by_hand(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Causal attention of one sample written out: (H, L, D) queries, (K, L, D) keys and values."""
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) / query.shape[2] ** 0.5
    place = torch.arange(query.shape[1])
    seen = place[:, None] >= place[None, :]
    if window is not None:
        seen &= place[:, None] - place[None, :] < window
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
