"""Weights from the trainer to engines over a process group: the offer, and the plan of the bytes.

    offer      the trainer has a version in memory, and listens at an address     `weights/offer.json`
    plan       name and header of each file of that version                       `PLAN_KEY` of the store
    members    the trainer is rank 0, then come the workers of all engines        `MEMBERS_KEY`: the first value counts
    joined     over NCCL: one key for each member, before any of them connects
    ready      all members add up a number, each worker once its engine has stopped to sample
    bytes      groups of whole tensors, in the order of the files
    received   one key for each worker that has all bytes

The files of `weights/step_N` have the same bytes, so both transports have one digest. Each tensor is compared with the
plan before it reaches a model. An offer is for one group and one attempt: after any failure the orchestrator pushes the
directory. Nothing here needs torch.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

OFFER_NAME = "offer.json"
PLAN_KEY = "plan"
MEMBERS_KEY = "members"
CLOSED = "closed"
"""Value of `MEMBERS_KEY` for an offer that nobody can take any more."""

# The order of safetensors' files: by dtype, then by name.
_DTYPES = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "I8", "U8", "BOOL")


class Offer(msgspec.Struct, frozen=True):
    """A version that the trainer sends to the first group of members.

    Attributes:
        digest: `holdfast.run.weights` of the files that the trainer writes at the same time.
        address: `HOST:PORT` of the store.
        stall_timeout_s: the transfer is given up after so long without bytes.
    """

    version: int
    digest: str
    address: str
    stall_timeout_s: float


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an engine takes part in a transfer: its workers have the ranks from `first_rank` on, of `num_members`.
    `attempt`: another text each time that an orchestrator tries, so that nobody joins the group of an attempt whose
    orchestrator died."""

    offer: Offer
    num_members: int
    attempt: str
    first_rank: int


class PlannedFile(msgspec.Struct, frozen=True):
    """One file: its name, and the JSON text of its safetensors header, with the spaces that fill it up."""

    name: str
    header: str


class TransferPlan(msgspec.Struct, frozen=True):
    """All bytes of a version.

    Attributes:
        device: `cpu` or `cuda`: of the sender, and then of the receivers.
        group_bytes: most bytes of one broadcast, except for a larger tensor. A receiver holds three groups at most.
    """

    version: int
    digest: str
    device: str
    group_bytes: int
    files: list[PlannedFile]


class TensorEntry(NamedTuple):
    """One tensor of a file: its dtype as safetensors names it, and its place in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def in_file_order(names: Iterable[tuple[str, str]]) -> list[str]:
    """Return names of (name, dtype) in the order in which safetensors writes the tensors."""
    return [name for name, _ in sorted(names, key=lambda one: (_DTYPES.index(one[1]), one[0].encode()))]


def encode_header(entries: Iterable[TensorEntry]) -> str:
    """Return the header of a file with these tensors, the same bytes as safetensors writes."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, dtype, shape, begin, end in entries:
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % 8)


def header_bytes(header: str) -> bytes:
    """Return all bytes of a file in front of its data."""
    encoded = header.encode()
    return len(encoded).to_bytes(8, "little") + encoded


def entries_of(file: PlannedFile) -> list[TensorEntry]:
    """Return the tensors of a file in the order of their bytes. Raise ValueError unless they fill its data."""
    try:
        described = json.loads(file.header)
        described.pop("__metadata__", None)
        entries = [
            TensorEntry(name, one["dtype"], tuple(one["shape"]), *one["data_offsets"])
            for name, one in described.items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the header of {file.name} describes no tensors: {error!r}") from None
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise ValueError(f"the header of {file.name} leaves a gap in front of '{entry.name}'")
        end = entry.end
    return entries


def groups_of(entries: Sequence[TensorEntry], *, most_bytes: int) -> Iterator[list[TensorEntry]]:
    """Yield neighbouring tensors that are sent together: at most `most_bytes`, or a single tensor."""
    group: list[TensorEntry] = []
    for entry in entries:
        if group and entry.end - group[0].begin > most_bytes:
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def encode_members(wanted: Transfer) -> str:
    """Return the value of `MEMBERS_KEY` for the group of one attempt."""
    return f"{wanted.num_members} {wanted.attempt}"


def members_of(value: str) -> int:
    """Return how many members the group of a value of `MEMBERS_KEY` has."""
    return int(value.partition(" ")[0])


def joined_key(rank: int) -> str:
    """Return the key that the member `rank` sets before it connects over NCCL.

    NCCL waits for a missing member for ever, so all members meet by these keys first. A member that dies between its
    key and its connection still blocks the others."""
    return f"joined/{rank}"


def received_key(rank: int) -> str:
    """Return the key that the member `rank` sets once it has all bytes."""
    return f"received/{rank}"
