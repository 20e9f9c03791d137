"""Staging: a consistent copy of the state in CPU memory, taken before training goes on.

Optimizers update in place, so what is written behind the training must be a copy. The buffers are
made once and reused by every save: allocating gigabytes costs more than copying them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_SMALL_ELEMENTS = 1 << 15  # torch itself copies fewer on one thread


class Stager:
    """Copies this rank's shards into buffers of its own, which the next copy overwrites."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of `tensors` on the CPU, complete when this returns.

        DTensors stay DTensors of the same mesh and placements, over the copied shard. The result
        is valid until the next call.
        """
        staged = {}
        copies_from_gpu = False
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            buffer = self._buffer(name, local)
            _copy(buffer, local)
            copies_from_gpu |= local.is_cuda
            staged[name] = _like(tensor, buffer)
        for name in self._buffers.keys() - tensors.keys():
            del self._buffers[name]
        if copies_from_gpu:  # untested: needs a GPU
            # The copies above are only queued; until they end the buffers hold the save before.
            torch.cuda.current_stream().synchronize()
        return staged

    @torch.no_grad()
    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the buffers for `tensors` and touch every page, so that the first copy is as fast as later ones."""
        for name, tensor in tensors.items():
            self._buffer(name, tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def _buffer(self, name: str, local: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            # Pinned: only then does a copy from the GPU go on beside this thread.
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        return buffer


def _copy(buffer: Tensor, local: Tensor) -> None:
    """Copy on the calling thread alone: torch would start a second team of threads on the cores that train."""
    if local.is_cuda or local.numel() < _SMALL_ELEMENTS or not local.is_contiguous():
        buffer.copy_(local, non_blocking=local.is_cuda)
    else:
        # As bytes: numpy has no bfloat16.
        np.copyto(buffer.view(torch.uint8).numpy(), local.view(torch.uint8).numpy())


def _like(tensor: Tensor, shard: Tensor) -> Tensor:
    """Return `shard` in the place that `tensor` has among the ranks; on the CPU whatever the mesh's device."""
    if not isinstance(tensor, DTensor):
        return shard
    return DTensor(shard, tensor._spec, requires_grad=False)  # from_local would move it to the mesh's device
