"""Counts the bytes of all tensors alive, by their purpose, and the bytes that collectives send."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.run.forecast import Collectives, Peak

_NAMES = {
    "all-gather": ("allgather", "all_gather"),
    "reduce-scatter": ("reduce_scatter",),
    "all-reduce": ("allreduce", "all_reduce"),
    "all-to-all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
}
_SMALL_BYTES = 1 << 12  # below, who made a tensor is not looked up
_FRAMES = 12  # from an allocation up to FSDP
_COMPUTING = ("experience", "forward", "backward", "backward of the lower layers")
_FSDP, _SHAPES = "/torch/distributed/fsdp/", "/torch/distributed/tensor/_sharding_prop"


def collective_of(operator: str) -> str | None:
    """Return the kind of collective of an operator such as `c10d._allgather_base_`; None: it sends nothing."""
    namespace, _, name = operator.partition(".")
    if namespace not in ("c10d", "_c10d_functional") or "wait" in name:
        return None
    return next((kind for kind, parts in _NAMES.items() if any(part in name for part in parts)), None)


class StepTracker(TorchDispatchMode):
    """Follows tensors and collectives while the block runs.

    Attributes:
        phase: of the work, set by who works. Tensors of the phases `parameters` and `moments` stay what they are
            called.
        row: which micro-batch is computed.
        now: bytes alive.
        peaks: of each phase and row.
        collectives: of each phase and row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.row, self.now = "parameters", 0, 0
        self.vocabulary, self.chunk = 0, 0
        self.shapes: set[tuple[int, ...]] = set()
        self.peaks: dict[tuple[str, int], Peak] = {}
        self.collectives: dict[tuple[str, int], Collectives] = {}
        self._alive: dict[int, tuple[int, str]] = {}
        self._by_tag: Counter[str] = Counter()

    def begin(self, phase: str, row: int = 0) -> None:
        """Begin a phase of the work."""
        self.phase, self.row = phase, row
        self._meet_peak()

    def know(self, model: nn.Module, *, vocabulary: int, chunk: int = 0) -> None:
        """Tell gradients and logits, of `chunk` tokens at once, from other tensors by their shapes."""
        self.vocabulary, self.chunk = vocabulary, chunk
        self.shapes = {_whole_shape(parameter) for parameter in model.parameters() if parameter.ndim > 1}

    def retag(self, tensors: Iterable[Tensor | None], tag: str) -> None:
        """Say what tensors are for that were made for something else."""
        for tensor in tensors:
            if tensor is not None:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                key = local.untyped_storage()._cdata
                if key in self._alive:
                    size, before = self._alive[key]
                    self._by_tag[before] -= size
                    self._by_tag[tag] += size
                    self._alive[key] = size, tag

    @contextmanager
    def watching(self) -> Iterator[StepTracker]:
        """Track in the block, also storages that FSDP empties and fills again."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._alive:
                self._resized(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]  # no dispatcher sees it
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count what it made and sent."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on shards come here
        result = func(*args, **(kwargs or {}))
        if (kind := collective_of(str(func))) is not None:
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            size = max((one.numel() * one.element_size() for one in given), default=0)
            own = self.collectives.setdefault((self.phase, self.row), Collectives())
            own.add(kind, 1, max(size, _most_bytes(result)))
            if kind == "reduce-scatter" and isinstance(args[0], Tensor):
                self.retag([args[0]], "gradients")  # made by FSDP, as what it gathers
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                self._made(tensor)
        return result

    def _made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            if self._alive[key][0] != size:
                self._resized(key, size)
            return
        tag = self._tag_of(tensor, size)
        if tag is None:
            return
        self._alive[key] = size, tag
        self._change(size, tag)
        weakref.finalize(storage, self._gone, key)

    def _tag_of(self, tensor: Tensor, size: int) -> str | None:
        """Return what a new tensor is for; None: for nobody, as torch only asks for the shape of a whole DTensor."""
        maker = _maker(sys._getframe(3)) if size >= _SMALL_BYTES else ""
        if maker == _SHAPES:
            return None
        if self.phase in ("parameters", "moments"):
            return self.phase
        if self.phase not in _COMPUTING:
            return "temporary"
        if maker == _FSDP:
            return "gathered"
        shape = tuple(tensor.shape)
        if shape == (self.chunk, self.vocabulary) and tensor.dtype == torch.float32:
            return "logits"  # the head's gradient may have this shape, too
        if self.phase in _COMPUTING[2:] and (shape in self.shapes or shape[::-1] in self.shapes):
            return "gradients"
        return "logits" if shape and shape[-1] == self.vocabulary else "activations"

    def _resized(self, key: int, size: int) -> None:
        before, tag = self._alive[key]
        self._alive[key] = size, tag
        self._change(size - before, tag)

    def _gone(self, key: int) -> None:
        size, tag = self._alive.pop(key)
        self._change(-size, tag)

    def _change(self, size: int, tag: str) -> None:
        self.now += size
        self._by_tag[tag] += size
        if size > 0:
            self._meet_peak()

    def _meet_peak(self) -> None:
        before = self.peaks.get((self.phase, self.row))
        if before is None or self.now > before.total:
            self.peaks[self.phase, self.row] = Peak({tag: size for tag, size in self._by_tag.items() if size})


def _whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, or of its experts on this rank, in a computation."""
    mesh, shape = getattr(parameter, "device_mesh", None), tuple(parameter.shape)
    if mesh is None or "ep" not in (mesh.mesh_dim_names or ()):
        return shape
    return shape[0] // mesh["ep"].size(), *shape[1:]


def _maker(frame: FrameType | None) -> str:
    """Return which part of torch made a tensor, if it matters."""
    for _ in range(_FRAMES):
        if frame is None:
            break
        for part in (_SHAPES, _FSDP):
            if part in frame.f_code.co_filename:
                return part
        frame = frame.f_back
    return ""


def _most_bytes(result: Any) -> int:
    made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
    return max((one.numel() * one.element_size() for one in made), default=0)
