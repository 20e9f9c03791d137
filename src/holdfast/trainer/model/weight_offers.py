"""Offers a version to the engines over a process group, before and while its directory is written.

`WeightPublisher.publish` gathers a version into the memory of rank 0. `WeightOffers.offer` writes the offer, and a
thread sends the version to the engines: the trainer trains on meanwhile, and no rank waits for an engine. See
`holdfast.protocol.transfer` for the protocol, `holdfast.inference.transfer` for the other side.
"""

import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from ipaddress import ip_address
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.config.rl_trainer import CollectiveWeights
from holdfast.errors import ConfigError
from holdfast.protocol import transfer
from holdfast.protocol.transfer import Offer, PlannedFile, TransferPlan
from holdfast.run import atomic
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import WeightsFile, combined_digest
from holdfast.trainer.model.safetensors_files import SafetensorsFile, bytes_of, split_files

_log = logging.getLogger("trainer")
# While nobody takes an offer, its thread waits: an orchestrator may be busy with a batch for days.
_FOREVER = timedelta(days=365)
_GROUP_BYTES = 64 << 20


def _groups_of(file: SafetensorsFile) -> Iterator[Tensor]:
    """Yield the bytes of the tensors that are sent together."""
    tensors = iter(file.tensors)
    for group in transfer.groups_of(file.entries, most_bytes=_GROUP_BYTES):
        parts = [bytes_of(next(tensors)) for _ in group]
        yield parts[0] if len(parts) == 1 else torch.cat(parts)


class WeightOffers:
    """The offers of one trainer, of which only the newest can be taken. A context manager. `device`: of the trainer:
    NCCL sends from a GPU to GPUs, gloo from a CPU to any. Raise ConfigError if this machine cannot listen at
    `config.host`."""

    def __init__(self, run_dir: RunDir, config: CollectiveWeights, device: torch.device) -> None:
        self._config, self._device = config, device
        # For groups of NCCL from now on: a lost engine is an error of `wait`. Else torch ends the whole process.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        # One for all offers, as each stream keeps memory of its own. On the training step's the step would wait.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            with _listen(config.host) as listener:
                is_address = not ip_address(listener.getsockname()[0]).is_unspecified
            reason = "no engine can connect to that"
        except OSError as error:
            is_address, reason = False, f"this machine cannot listen there ({error.strerror})"
        if not is_address:
            raise ConfigError(
                f"weights.host = '{config.host}': {reason}. Set weights.host to the address at which the engines "
                "reach the machine of the trainer."
            )
        self._path = run_dir.offer
        self._sending: _Sending | None = None
        self._sent: list[_Sending] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._withdraw()
        for sending in self._sent:
            sending.join()

    def offer(self, version: int, tensors: Sequence[tuple[str, Tensor]]) -> str:
        """Offer the tensors of the files of `version`, and return the digest of these files. `tensors`: contiguous, on
        the CPU, and never written to again."""
        self._withdraw()
        files = {name: SafetensorsFile.of(dict(group)) for name, group in split_files(tensors)}
        entries = {name: file.describe() for name, file in files.items()}
        digest = combined_digest(WeightsFile(name, one.size_bytes, one.xxh3_128) for name, one in entries.items())
        planned = [PlannedFile(name, transfer.encode_header(file.entries)) for name, file in files.items()]
        plan = TransferPlan(version, digest, self._device.type, _GROUP_BYTES, planned)
        self._sending = _Sending(plan, list(files.values()), self._config, self._device, self._stream)
        self._sent.append(self._sending)
        offer = Offer(version, digest, self._sending.address, self._config.stall_timeout_s)
        atomic.write_file(self._path, msgspec.json.encode(offer))
        return digest

    def _withdraw(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._sending is not None:
            self._sending.close()
            self._sent = [one for one in self._sent if one.is_alive]
            self._sending = None


class _Sending:
    """One offer: a store, and a thread that sends once, to the first members that join."""

    def __init__(
        self,
        plan: TransferPlan,
        files: list[SafetensorsFile],
        config: CollectiveWeights,
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._version, self._files, self._device, self._stream = plan.version, files, device, stream
        self._stall = timedelta(seconds=config.stall_timeout_s)
        with _listen(config.host) as listener:
            self._host, self._port = listener.getsockname()[:2]
            # The store owns, and closes, the descriptor.
            self._store = self._connect(listen_fd=os.dup(listener.fileno()))
        self._store.set(transfer.PLAN_KEY, msgspec.json.encode(plan).decode())
        self.address = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        self._thread = threading.Thread(target=self._run, name="weight offer", daemon=True)
        self._thread.start()

    def _connect(self, *, listen_fd: int | None = None) -> dist.TCPStore:
        return dist.TCPStore(
            self._host,
            self._port,
            is_master=listen_fd is not None,
            timeout=self._stall,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )

    def close(self) -> None:
        """Let nobody take the offer any more; a transfer that has begun continues."""
        # A connection of its own: the thread's is busy as long as it waits.
        self._connect().compare_set(transfer.MEMBERS_KEY, "", transfer.CLOSED)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread: an interpreter that ends while a thread is within torch aborts the process."""
        self._thread.join(self._stall.total_seconds())

    def _run(self) -> None:
        try:
            self._store.wait([transfer.MEMBERS_KEY], _FOREVER)
            members = self._store.get(transfer.MEMBERS_KEY).decode()
            if members != transfer.CLOSED:
                self._send(transfer.members_of(members))
        except RuntimeError as error:  # of torch.distributed: a member is gone, or stands still
            reason = str(error).partition("\n")[0]
            _log.warning("version %d was not sent to all engines, which get its files: %s", self._version, reason)
        finally:
            self._files.clear()  # a copy of the model

    def _send(self, num_members: int) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
        group = _open_group(self._store, num_members, self._device, self._stall)
        try:
            self._send_by(group, num_members)
        finally:
            if self._stream is not None:
                group.abort()  # its destructor would end the process if that fails

    def _send_by(self, group: Any, num_members: int) -> None:
        # Not by keys of the store: a member that dies here ends the group at once, and no other member waits for it.
        group.allreduce([torch.zeros(1, device=self._device)], dist.AllreduceOptions()).wait()
        for file in self._files:
            for part in _groups_of(file):
                group.broadcast([part.to(self._device)], dist.BroadcastOptions()).wait()
        # Until the engines say that they have all bytes, the connections stay.
        self._store.wait([transfer.received_key(rank) for rank in range(1, num_members)], self._stall)


def _listen(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _open_group(store: dist.TCPStore, num_members: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, 0, num_members, timeout)
    store.set(transfer.joined_key(0), "")
    store.wait([transfer.joined_key(rank) for rank in range(num_members)], timeout)
    nccl: Any = dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue] - missing in builds for CPUs
    options = nccl.Options()
    options._timeout = timeout
    group = nccl(store, 0, num_members, options)
    group.eager_connect_single_device(device)
    return group
