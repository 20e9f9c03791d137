"""Receives a version that the trainer offers, and checks all of it on its way into the model.

`Incoming.join` connects, compares the plan with the model, and waits until all members are there: the old weights serve
meanwhile, and a refusal changes nothing. `Incoming.receive` then yields tensor after tensor for the paused model. If
that fails, the model is torn: see `holdfast.inference.weights`. `holdfast.protocol.transfer` has the protocol.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from holdfast.errors import DataError
from holdfast.inference.weight_files import FLOATS, OUTPUT_LAYER, Architecture, check_fit, check_names, checked
from holdfast.protocol import transfer
from holdfast.protocol.transfer import Offer, TensorEntry, Transfer, TransferPlan
from holdfast.run.weights import WeightsFile, combined_digest


class TransferError(Exception):
    """The bytes stopped, or have another digest than the plan."""


class Incoming:
    """A version on its way, for one worker. `digest`: of the whole version, as it was asked for."""

    def __init__(
        self, wanted: Transfer, plan: TransferPlan, store: dist.TCPStore, group: Any, rank: int, device: torch.device
    ) -> None:
        self.digest = wanted.offer.digest
        self._plan, self._store, self._group = plan, store, group
        self._stall_timeout_s = wanted.offer.stall_timeout_s
        self._rank, self._num_members, self._device = rank, wanted.num_members, device
        # One group waits while the model takes another and a third arrives.
        self._arrived: queue.Queue[tuple[list[TensorEntry], torch.Tensor] | str | BaseException] = queue.Queue(
            maxsize=1
        )
        self._is_abandoned = False

    @classmethod
    def join(cls, wanted: Transfer, *, rank: int, architecture: Architecture, device: torch.device) -> Incoming:
        """Return the version that is offered, once all members are there. `rank`: of the worker within its engine.
        Raise DataError if nobody offers it any more, it does not fit the model, or a member did not come."""
        # For groups of NCCL from now on: a lost member is an error of `wait`. Else torch ends the whole process.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        joined: Future[Incoming] = Future()

        def run() -> None:
            try:
                joined.set_result(cls._join(wanted, rank, architecture, device))
            except Exception as error:  # noqa: BLE001 - raised below
                joined.set_exception(error)

        # In a thread: torch waits for ever for a trainer that is frozen, or whose machine is gone.
        threading.Thread(target=run, name="joining", daemon=True).start()
        try:
            return joined.result(2 * wanted.offer.stall_timeout_s)  # its connection, and the members
        except TimeoutError:
            raise DataError(f"{_place(wanted.offer)} cannot be taken: no answer came in time") from None

    @classmethod
    def _join(cls, wanted: Transfer, rank: int, architecture: Architecture, device: torch.device) -> Incoming:
        offer, where = wanted.offer, _place(wanted.offer)
        timeout = timedelta(seconds=offer.stall_timeout_s)
        host, _, port = offer.address.rpartition(":")
        host, rank = host.strip("[]"), wanted.first_rank + rank
        try:
            # First: torch tries a refused connection again and again.
            socket.create_connection((host, int(port)), offer.stall_timeout_s).close()
            store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False)
            plan = msgspec.json.decode(store.get(transfer.PLAN_KEY), type=TransferPlan)
            if (plan.version, plan.digest) != (offer.version, offer.digest):
                raise DataError(f"{where} was replaced by version {plan.version}")
            _check_plan(plan, architecture, where)
            if plan.device == "cpu":
                device = torch.device("cpu")
            elif plan.device != device.type:
                raise DataError(f"{where} is sent from '{plan.device}', and this engine is on '{device.type}'")
            members = transfer.encode_members(wanted)
            if (agreed := store.compare_set(transfer.MEMBERS_KEY, "", members).decode()) != members:
                raise DataError(f"{where} is not open any more: '{agreed}', asked for was '{members}'")
            group = _open_group(store, rank, wanted.num_members, device, timeout)
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{where} cannot be taken: {str(error).partition(chr(10))[0]}") from None
        return cls(wanted, plan, store, group, rank, device)

    def receive(self, architecture: Architecture, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor by name, `checked`. The last one comes before the digest is compared. Raise TransferError
        if the bytes stopped, or have another digest; DataError if a tensor is not finite."""
        fetching = threading.Thread(target=self._fetch, name="weights", daemon=True)
        fetching.start()
        try:
            while True:
                try:
                    arrived = self._arrived.get(timeout=self._stall_timeout_s)
                except queue.Empty:
                    raise TransferError(f"no bytes came for {self._stall_timeout_s:g} s") from None
                if isinstance(arrived, BaseException):
                    if "Timed out waiting" in str(arrived):  # gloo's own clock, which has the same length, was first
                        raise TransferError(f"no bytes came for {self._stall_timeout_s:g} s") from arrived
                    raise TransferError(str(arrived).partition("\n")[0]) from arrived
                if isinstance(arrived, str):
                    if arrived != self.digest:
                        raise TransferError(f"the bytes have the digest {arrived}, expected was {self.digest}")
                    fetching.join()  # it has nothing left to do
                    return
                entries, data = arrived
                if data.is_cuda:  # it is of another stream, which could use its memory before the model has copied it
                    data.record_stream(torch.cuda.current_stream(data.device))
                for name, kind, shape, begin, end in entries:
                    start = begin - entries[0].begin
                    tensor = data[start : start + end - begin].view(FLOATS[kind]).view(shape)
                    yield name, checked(f"version {self._plan.version}", name, tensor, architecture, dtype)
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Let the thread end: it puts one more group at most, for which there is room then."""
        self._is_abandoned = True
        while not self._arrived.empty():
            self._arrived.get_nowait()
        if self._device.type == "cuda":
            self._group.abort()  # NCCL waits for a lost member for ever

    def _fetch(self) -> None:
        """Receive group after group; the model is never touched here, so a thread that hangs does no harm."""
        try:
            self._group.allreduce([torch.zeros(1, device=self._device)], dist.AllreduceOptions()).wait()
            files = []
            for file in self._plan.files:
                header = transfer.header_bytes(file.header)
                checksum, size = xxhash.xxh3_128(header), len(header)
                entries = transfer.entries_of(file)
                for group in transfer.groups_of(entries, most_bytes=self._plan.group_bytes):
                    if self._is_abandoned:
                        return
                    data = torch.empty(group[-1].end - group[0].begin, dtype=torch.uint8, device=self._device)
                    self._group.broadcast([data], dist.BroadcastOptions()).wait()
                    checksum.update(data.cpu().numpy().data)  # on GPUs this waits for the bytes
                    size += len(data)
                    self._arrived.put((group, data))
                files.append(WeightsFile(file.name, size, checksum.hexdigest()))
            self._store.set(transfer.received_key(self._rank), "all")
            end: str | Exception = combined_digest(files)
        except Exception as error:  # noqa: BLE001 - raised by `receive`
            # Its traceback holds this frame, and the frame holds it: the group would stay open until a collection of
            # garbage, and the trainer would wait for it.
            end = error.with_traceback(None)
        if self._is_abandoned:  # the last group may fill the queue for ever
            return
        self._arrived.put(end)
        if self._device.type == "cuda" and isinstance(end, str):
            # NCCL passes the bytes on from member to member, until `receive` has joined this thread and aborts.
            others = [transfer.received_key(rank) for rank in range(1, self._num_members)]
            with suppress(RuntimeError):  # a member failed, and says so itself
                self._store.wait(others, timedelta(seconds=self._stall_timeout_s))


def _place(offer: Offer) -> str:
    return f"the offer of version {offer.version} at {offer.address}"


def _check_plan(plan: TransferPlan, architecture: Architecture, where: str) -> None:
    """Raise DataError if a model does not have these tensors; ValueError if the plan has errors."""
    tensors: dict[str, torch.Tensor] = {}
    for entry in (entry for file in plan.files for entry in transfer.entries_of(file)):
        if entry.name in tensors or entry.dtype not in FLOATS:
            raise ValueError(f"tensor '{entry.name}' is twice in it, or has the dtype {entry.dtype}")
        tensor = torch.empty(entry.shape, dtype=FLOATS[entry.dtype], device="meta")
        if tensor.numel() * tensor.element_size() != entry.end - entry.begin:
            raise ValueError(f"tensor '{entry.name}' has {entry.end - entry.begin} bytes in it")
        check_fit(where, entry.name, tensor, architecture)
        tensors[entry.name] = tensor
    if architecture.tied and OUTPUT_LAYER in tensors:
        raise ValueError("it repeats a tied output layer")
    check_names(where, tensors, architecture)


def _open_group(store: dist.TCPStore, rank: int, num_members: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, num_members, timeout)
    from vllm.utils.nccl import unpinned_nccl_env

    store.set(transfer.joined_key(rank), "")
    store.wait([transfer.joined_key(one) for one in range(num_members)], timeout)
    nccl: Any = dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue] - missing in builds for CPUs
    options = nccl.Options()
    options._timeout = timeout
    with unpinned_nccl_env():  # with `deterministic` vLLM sets variables of NCCL, which the trainer would need as well
        group = nccl(store, rank, num_members, options)
        group.eager_connect_single_device(device)
    return group
