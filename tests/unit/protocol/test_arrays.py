"""Packed numbers per token: exact, checked, and bytes on the wire."""

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.rollouts import Logprobs, LossMask, TokenIds, decode_packed, encode_packed


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
    assert wire["logprobs"] == np.array(logprobs, "<f4").tobytes()
    assert wire["loss_mask"] == bytes(mask)
    assert (holder.token_ids.tolist(), list(map(bool, holder.loss_mask))) == (ids, mask)


@given(mask=st.lists(st.booleans()))
def test_a_mask_counts_sampled_tokens_and_stretches(mask: list[bool]) -> None:
    stretches = sum(sampled and not before for before, sampled in zip([False, *mask], mask, strict=False))
    assert (LossMask(mask).num_sampled, LossMask(mask).num_stretches) == (sum(mask), stretches)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"token_ids":[1.5],"logprobs":[0],"loss_mask":[]}', "not TokenIds.*token_ids"),
        (b'{"token_ids":[2147483648],"logprobs":[0],"loss_mask":[]}', "not TokenIds.*token_ids"),
        (b'{"token_ids":[1],"logprobs":["a"],"loss_mask":[]}', "not Logprobs.*logprobs"),
        (b'{"token_ids":[1],"logprobs":{},"loss_mask":[]}', "expected Logprobs, got dict.*logprobs"),
        (b'{"token_ids":[1],"logprobs":[0],"loss_mask":[256]}', "not LossMask.*loss_mask"),
    ],
)
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
