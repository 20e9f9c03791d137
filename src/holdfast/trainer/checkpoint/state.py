"""The state that a checkpoint holds, as named tensors and plain values: for any PyTorch training loop.

Plain Python values become JSON and come back exactly, including tuples, infinities, bytes and keys that are numbers.
JSON lacks these, so each becomes an object with one key:

    {"$tuple": [..]}   {"$float": "inf"}   {"$bytes": "base64"}   {"$dict": [[key, value], ..]}

Each rank has its own file of random generators, captured with every save and restored after loading. If the number of
ranks changes, the generators are derived from seed and step.
"""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol, cast, runtime_checkable

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import CheckpointError


def encode(value: Any, where: str) -> Any:
    """Return `value` as JSON that `decode` reverts. Raise CheckpointError that names `where` a value is not plain."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        return {"$dict": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot keep among its values: these are numbers, "
        "texts, bytes, None, and lists, tuples and dicts of them. Convert it (int(), .item(), .tolist()); tensors "
        "belong into a module, as buffers"
    )


def decode(value: Any) -> Any:
    """Return what `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, content), *_ = value.items()
        if tag == "$float":
            return float(content)
        if tag == "$bytes":
            return base64.b64decode(content)
        if tag == "$tuple":
            return tuple(decode(item) for item in content)
        if tag == "$dict":
            return {decode(key): decode(item) for key, item in content}
    return {key: decode(item) for key, item in value.items()}


@runtime_checkable
class State(Protocol):
    """State that can be saved and loaded: tensors, plain values, or both."""

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, as it is in memory; loading writes into the tensors."""
        return {}

    def values(self) -> dict[str, Any]:
        """Return all other state as values that JSON can hold."""
        return {}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `values` returned when the state was saved."""


def as_state(state: State | Mapping[str, Any]) -> State:
    """Return `state` itself, or the state of the objects in a mapping."""
    return ObjectsState(state) if isinstance(state, Mapping) else state


class ObjectsState:
    """Modules, optimizers and other objects, by name.

    - `torch.nn.Module` (also sharded by FSDP2): parameters and persistent buffers, `NAME.<parameter>`;
    - `torch.optim.Optimizer` of those modules' parameters: moments, `NAME.<module>.<parameter>.<key>`, and
      what its parameter groups hold;
    - objects with `state_dict` and `load_state_dict` (schedulers, samplers): their values, as JSON;
    - dicts of plain values: updated in place.

    Every rank saves its shards of the tensors; rank 0 saves the values. Gradients are not state: save and load after
    `optimizer.step()`, not while gradients accumulate.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)
        # State of optimizers that loading fills, by id of the parameter; `restore` hands it over.
        self._moments: dict[int, dict[str, Tensor]] = {}
        for name, thing in self._objects.items():
            is_known = isinstance(thing, nn.Module | Optimizer | MutableMapping)
            if not is_known and not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise CheckpointError(
                    f"'{name}' is a {type(thing).__name__}: a checkpoint takes modules, optimizers, dicts of plain "
                    "values, and objects with state_dict() and load_state_dict()"
                )
            if "." in name:
                raise CheckpointError(f"'{name}' has a dot, which separates names of tensors: choose another name")

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of modules and optimizers. Raise CheckpointError if some state would be lost."""
        tensors: dict[str, Tensor] = {}
        for name, thing in self._objects.items():
            if isinstance(thing, nn.Module):
                tensors |= self._module_tensors(name, thing)
            elif isinstance(thing, Optimizer):
                tensors |= _group_tensors(name, thing)
                for place, parameter, _ in self._named(name, thing):
                    state = thing.state.get(parameter, {})
                    tensors |= {f"{place}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        sparse = [name for name, tensor in tensors.items() if tensor.layout is not torch.strided]
        if sparse:
            raise CheckpointError(f"'{sparse[0]}' is a sparse tensor, which a checkpoint cannot hold")
        return tensors

    def targets(self, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
        """Return the tensors to load `saved` into.

        An optimizer without a step has no state, so its tensors are made as the checkpoint says. `restore` hands them
        to the optimizer.

        Raises:
            CheckpointError: the state of an optimizer cannot be made.
        """
        keys: dict[str, list[str]] = {}
        for full_name in saved:
            place, _, key = full_name.rpartition(".")
            keys.setdefault(place, []).append(key)
        targets: dict[str, Tensor] = {}
        self._moments = {}
        for name, thing in self._objects.items():
            if isinstance(thing, nn.Module):
                targets |= self._module_tensors(name, thing)
            elif isinstance(thing, Optimizer):
                targets |= _group_tensors(name, thing)
                for place, parameter, group in self._named(name, thing):
                    present = thing.state.get(parameter, {})
                    made = {}
                    for key in keys.get(place, ()):
                        entry = saved[f"{place}.{key}"]
                        is_there = _fits(present.get(key), entry)
                        made[key] = present[key] if is_there else _make_moment(place, key, entry, parameter, group)
                    self._moments[id(parameter)] = made
                    targets |= {f"{place}.{key}": tensor for key, tensor in made.items()}
        return targets

    def values(self) -> dict[str, Any]:
        """Return the plain values of optimizers: all except tensors, states of other objects, and dicts."""
        values: dict[str, Any] = {}
        for name, thing in self._objects.items():
            if isinstance(thing, Optimizer):
                values[name] = encode(self._optimizer_values(name, thing), name)
            elif isinstance(thing, MutableMapping):
                values[name] = encode(dict(thing), name)
            elif not isinstance(thing, nn.Module):
                values[name] = encode(thing.state_dict(), name)
        return values

    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `values` returned, and hand the optimizers their part of the last `targets`.

        Raises:
            CheckpointError: other objects were saved; then nothing is changed.
        """
        expected = {name for name, thing in self._objects.items() if not isinstance(thing, nn.Module)}
        if values.keys() != expected:
            raise CheckpointError(
                f"the checkpoint holds values of {sorted(values)}, this state has {sorted(expected)}: use the names "
                "that it was saved with"
            )
        decoded = {name: decode(value) for name, value in values.items()}
        for name, value in decoded.items():
            thing = self._objects[name]
            if isinstance(thing, Optimizer):
                _check_groups(name, thing, value)
        for name, value in decoded.items():
            thing = self._objects[name]
            if isinstance(thing, Optimizer):
                self._restore_optimizer(name, thing, value)
            elif isinstance(thing, MutableMapping):
                thing.clear()
                thing.update(value)
            else:
                thing.load_state_dict(value)

    def _module_tensors(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        return {f"{name}.{key}": tensor for key, tensor in module_tensors(module).items()}

    def _named(self, name: str, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield the optimizer's parameters with their place in the checkpoint, and their group."""
        names = {
            id(parameter): f"{module_name}.{key}"
            for module_name, thing in self._objects.items()
            if isinstance(thing, nn.Module)
            for key, parameter in thing.named_parameters()
        }
        for group_number, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                yield f"{name}.{names.get(id(parameter), f'group_{group_number}.{number}')}", parameter, group

    def _optimizer_values(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        foreign = [key for key in optimizer.state if id(key) not in known]
        if foreign:
            shown = f"{foreign[0]!r}" if isinstance(foreign[0], str) else f"a {type(foreign[0]).__name__}"
            raise CheckpointError(
                f"'{name}' ({type(optimizer).__name__}) keeps state under {shown}, which is not one of its parameters: "
                "a checkpoint holds state of parameters only"
            )
        groups = [
            {key: value for key, value in group.items() if key != "params" and not isinstance(value, Tensor)}
            for group in optimizer.param_groups
        ]
        state = {
            place.removeprefix(f"{name}."): plain
            for place, parameter, _ in self._named(name, optimizer)
            if (plain := {k: v for k, v in optimizer.state.get(parameter, {}).items() if not isinstance(v, Tensor)})
        }
        return {"param_groups": groups, "state": state}

    def _restore_optimizer(self, name: str, optimizer: Optimizer, values: dict[str, Any]) -> None:
        for group, saved in zip(optimizer.param_groups, values["param_groups"], strict=True):
            group.update(saved)
        for place, parameter, _ in self._named(name, optimizer):
            state = values["state"].get(place.removeprefix(f"{name}."), {}) | self._moments.pop(id(parameter), {})
            if state:
                optimizer.state[parameter] = state
            else:
                # The saved optimizer had taken no step.
                optimizer.state.pop(parameter, None)


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once (the first name wins).

    Raises:
        CheckpointError: a submodule has extra state (`get_extra_state`), which is not a tensor.
    """
    transient = set()
    for prefix, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"the module '{prefix}' ({type(part).__name__}) has extra state (get_extra_state): pass that to the "
                "checkpoint under a name of its own, as a dict"
            )
        transient |= {f"{prefix}.{name}" if prefix else name for name in part._non_persistent_buffers_set}
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in transient}
    # Detached: loading in place needs no gradient.
    return {name: parameter.detach() for name, parameter in module.named_parameters()} | buffers


def _group_tensors(name: str, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return tensors among the settings of parameter groups, such as a learning rate on the GPU."""
    return {
        f"{name}.group_{number}.{key}": value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, Tensor)
    }


def _fits(present: Any, saved: TensorStorageMetadata) -> bool:
    """Whether `present` is a tensor that `saved` can be loaded into."""
    return isinstance(present, Tensor) and present.shape == saved.size and present.dtype == saved.properties.dtype


def _make_moment(
    place: str, key: str, saved: TensorStorageMetadata, parameter: Tensor, group: Mapping[str, Any]
) -> Tensor:
    """Return a tensor for one entry of an optimizer's state, on the device that `Optimizer.load_state_dict` chooses."""
    dtype = saved.properties.dtype
    # A scalar parameter has the shape of its own step counter.
    if saved.size == parameter.shape and key != "step":
        return torch.zeros_like(parameter, dtype=dtype)
    if isinstance(parameter, DTensor) and len(saved.size) > 0:
        raise CheckpointError(
            f"'{place}.{key}' has the shape {tuple(saved.size)}, its sharded parameter {tuple(parameter.shape)}: how "
            "to shard it only the optimizer knows. Have the optimizer take a step before loading"
        )
    on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.zeros(saved.size, dtype=dtype, device="cpu" if on_cpu else parameter.device)


def _check_groups(name: str, optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    there, here = len(values["param_groups"]), len(optimizer.param_groups)
    if there != here:
        raise CheckpointError(f"'{name}' of the checkpoint has {there} parameter groups, this one {here}")


class RandomState(msgspec.Struct):
    """State of the random generators of one rank."""

    torch_cpu: bytes
    numpy_keys: bytes
    numpy_rest: tuple[int, int, float]
    python_version: int
    python_keys: list[int]
    python_gauss: float | None
    torch_cuda: bytes | None = None


def capture_random_state() -> RandomState:
    """Return the state of python's, numpy's and torch's generators of this rank."""
    python_version, python_keys, python_gauss = random.getstate()
    _, keys, position, has_gauss, gauss = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    return RandomState(
        torch_cpu=torch.get_rng_state().numpy().tobytes(),
        # Little-endian: the same bytes whatever machine reads them.
        numpy_keys=keys.astype("<u4").tobytes(),
        numpy_rest=(position, has_gauss, gauss),
        python_version=python_version,
        python_keys=list(python_keys),
        python_gauss=python_gauss,
        # Only if this process uses CUDA: asking would take memory of the first GPU.
        torch_cuda=torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else None,
    )


def restore_random_state(state: RandomState) -> None:
    """Put the generators of this rank back into `state`."""
    # A bytearray: torch warns of read-only memory.
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch_cpu), dtype=torch.uint8))
    keys = np.frombuffer(state.numpy_keys, dtype="<u4")
    np.random.set_state(("MT19937", keys, *state.numpy_rest))
    random.setstate((state.python_version, tuple(state.python_keys), state.python_gauss))
    if state.torch_cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state.torch_cuda), dtype=torch.uint8))


def seed_everything(seed: int, *, step: int, rank: int) -> None:
    """Seed all generators of this rank as a function of (run seed, step, rank)."""
    # numpy guarantees the numbers of SeedSequence, and neighbouring ranks get unlike seeds.
    entropy = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(entropy[0]))
    np.random.seed(int(entropy[1]))
    torch.manual_seed(int(entropy[2]))
