"""Packed numbers per token, exact and checked; and the parity prompt of engine and trainer."""

import asyncio
import math
import struct
from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.orchestrator import ClientConfig
from holdfast.errors import CheckpointError, InferenceError
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.weight_sync import check_parity_prompt, describe_weights
from holdfast.protocol.inference import PARITY_PROMPT_NAME, ParityPrompt, deviation
from holdfast.protocol.rollouts import Logprobs, LossMask, TokenIds, decode_packed, encode_packed
from holdfast.run.run_dir import RunDir
from tests.servers.orchestrator_fakes import FakeEngine, publish_weights, serving


class Holder(msgspec.Struct):
    token_ids: TokenIds
    logprobs: Logprobs
    loss_mask: LossMask


@given(
    ids=st.lists(st.integers(-(2**31), 2**31 - 1)),
    logprobs=st.lists(st.floats(width=32, allow_nan=False)),
    mask=st.lists(st.booleans()),
)
def test_numbers_survive_the_wire_bit_for_bit(ids: list[int], logprobs: list[float], mask: list[bool]) -> None:
    holder = Holder(TokenIds(ids), Logprobs(logprobs), LossMask(mask))
    data = msgspec.msgpack.encode(holder, enc_hook=encode_packed)
    assert msgspec.msgpack.decode(data, type=Holder, dec_hook=decode_packed) == holder
    wire = msgspec.msgpack.decode(data)
    assert wire["token_ids"] == np.array(ids, "<i4").tobytes()
    assert wire["logprobs"] == np.array(logprobs, "<f4").tobytes() and wire["loss_mask"] == bytes(mask)
    assert (holder.token_ids.tolist(), list(map(bool, holder.loss_mask))) == (ids, mask)


@given(mask=st.lists(st.booleans()))
def test_a_mask_counts_sampled_tokens_and_stretches(mask: list[bool]) -> None:
    stretches = sum(sampled and not before for before, sampled in zip([False, *mask], mask, strict=False))
    assert (LossMask(mask).num_sampled, LossMask(mask).num_stretches) == (sum(mask), stretches)


@pytest.mark.parametrize(("answer", "message"), [
    (b'{"token_ids":[1.5],"logprobs":[0],"loss_mask":[]}', "not TokenIds.*token_ids"),
    (b'{"token_ids":[2147483648],"logprobs":[0],"loss_mask":[]}', "not TokenIds.*token_ids"),
    (b'{"token_ids":[1],"logprobs":["a"],"loss_mask":[]}', "not Logprobs.*logprobs"),
    (b'{"token_ids":[1],"logprobs":{},"loss_mask":[]}', "expected Logprobs, got dict.*logprobs"),
    (b'{"token_ids":[1],"logprobs":[0],"loss_mask":[256]}', "not LossMask.*loss_mask"),
])  # fmt: skip
def test_what_is_no_such_number_is_refused_by_its_place(answer: bytes, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(answer, type=Holder, dec_hook=decode_packed)


def test_bytes_are_whole_items_that_numpy_reads_and_what_is_not_packed_is_refused() -> None:
    assert msgspec.msgpack.encode(Logprobs([0.5]), enc_hook=encode_packed)[-4:] == struct.pack("<f", 0.5)
    with pytest.raises(NotImplementedError, match="a ndarray cannot be encoded"):
        msgspec.msgpack.encode(np.array([0.5]), enc_hook=encode_packed)
    with pytest.raises(ValueError, match="itemsize|item size"):
        Logprobs(b"\0\0\0")
    ids = TokenIds([1, 2, 3])
    assert np.shares_memory(np.asarray(ids, dtype=np.int32), np.frombuffer(ids, np.int32))
    assert np.asarray(LossMask([0, 1]), dtype=bool).tolist() == [False, True]


@pytest.mark.parametrize(("theirs", "expected"), [
    ([-1.0, -2.0, -3.0], 0.0), ([-1.5, -2.0, -2.0], 0.5), ([-1.0, -2.0], math.inf), ([], math.inf),
    ([float("nan")] * 3, math.nan),
])  # fmt: skip
def test_a_deviation_is_a_mean_absolute_difference(theirs: list[float], expected: float) -> None:
    found = deviation(ParityPrompt([5, 6, 7, 8], [-1.0, -2.0, -3.0], 0.1), theirs)
    assert found == pytest.approx(expected, nan_ok=True)


def test_a_parity_prompt_is_cut_to_what_engines_take() -> None:
    parity = ParityPrompt([5, 6, 7, 8], [-1.0, -2.0, -3.0], 0.1)
    assert parity.head(9) == parity.head(4) == parity and parity.head(2) == ParityPrompt([5, 6], [-1.0], 0.1)
    assert parity.head(1) == ParityPrompt([5], [], 0.1) and deviation(parity.head(1), []) == 0.0


@pytest.mark.parametrize(
    ("logprob", "allowed", "is_fine"),
    [(-1.5, 1e-3, True), (-1.505, 1e-3, False), (-1.6, 0.2, True), (-2.5, 0.2, False), (-2.5, None, True)],
)
def test_an_engine_that_computes_otherwise_is_refused(logprob: float, allowed: float | None, is_fine: bool) -> None:
    engine = FakeEngine()
    engine.version, engine.digest = 0, "digest"
    parity = ParityPrompt([4, 5, 6], [logprob, logprob], allowed)

    async def check() -> None:
        async with InferenceClient(ClientConfig(urls=[engine.url])) as client:
            await check_parity_prompt(client, client.engines[0], parity, weights_digest="digest")

    said = f"computes other log-probabilities.* {abs(logprob + 1.5):.3g} nats apart"
    with serving(engine), nullcontext() if is_fine else pytest.raises(InferenceError, match=said):
        asyncio.run(check())


def test_weights_may_come_without_a_parity_prompt_but_not_with_a_broken_one(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    publish_weights(run_dir, 3, b"weights")
    weights = describe_weights(run_dir, 3)
    assert weights.read_parity_prompt() is None
    (weights.path / PARITY_PROMPT_NAME).write_bytes(b'{"token_ids": [1, 2], "logprobs": [-0.5], "allowed_nats": null}')
    assert weights.read_parity_prompt() == ParityPrompt([1, 2], [-0.5], None)
    (weights.path / PARITY_PROMPT_NAME).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"parity_prompt\.json is damaged"):
        weights.read_parity_prompt()
