"""The state that a checkpoint holds, as named tensors and plain values: for any PyTorch training loop.

Plain values become JSON (`plain_values`). Each rank has its own file of random generators, captured with every save and
restored after loading. If the number of ranks changes, the generators are derived from seed and step.
"""

import contextlib
import random
import re
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from holdfast.errors import CheckpointError
from holdfast.trainer.checkpoint.plain_values import decode, encode, from_order, inner_tensors, order_of

_PARAMETER = "$parameter"
"""Ends the name of a parameter of an optimizer that belongs to no module."""


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
      what its parameter groups hold. An optimizer whose class overrides `state_dict` is an object like others;
    - objects with `state_dict` and `load_state_dict` (schedulers, samplers): their values, as JSON, and their tensors;
    - dicts of plain values and tensors: updated in place.

    Every rank saves its shards of the tensors; rank 0 saves the values. Gradients are not state: save and load after
    `optimizer.step()`, not while gradients accumulate.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)
        # State of optimizers that loading fills, by id of the parameter; `restore` hands it over.
        self._moments: dict[int, dict[str, Tensor]] = {}
        # Tensors in groups of optimizers that the checkpoint does not have: (group, key, ...) by optimizer.
        self._surplus: dict[str, list[list[str]]] = {}
        self._orders: dict[str, dict[str, list[int]]] = {}  # of dimensions in memory, by optimizer and tensor
        # Large tensors of values that loading fills, and what is to be restored from them then.
        self._loaded: dict[str, Tensor] = {}
        self._waiting: dict[str, Any] = {}
        for name, thing in self._objects.items():
            is_known = isinstance(thing, nn.Module | Optimizer | MutableMapping)
            if not is_known and not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise CheckpointError(
                    f"'{name}' is a {type(thing).__name__}: a checkpoint takes modules, optimizers, dicts of plain "
                    "values, and objects with state_dict() and load_state_dict()"
                )
            if "." in name or re.fullmatch(r"group_\d+", name):
                what = "has a dot, which separates names of tensors" if "." in name else "stands for a parameter group"
                raise CheckpointError(f"'{name}' {what}: choose another name")

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of modules, optimizers and values. Raise CheckpointError if some state would be lost."""
        tensors: dict[str, Tensor] = {}
        for name, thing in self._objects.items():
            if isinstance(thing, nn.Module):
                tensors |= self._module_tensors(name, thing)
            elif _is_plain_optimizer(thing):
                tensors |= _group_tensors(name, thing)
                for place, parameter, _ in self._named(name, thing):
                    for key, value in thing.state.get(parameter, {}).items():
                        tensors |= inner_tensors(f"{place}.{key}", value) if isinstance(value, Tensor) else {}
            tensors |= self._loose_tensors(name)
        return tensors | self._encoded()[1]

    def volatile(self) -> set[str]:
        """Return the names of tensors that not only optimizers change: buffers, and tensors of values."""
        names = set(self._encoded()[1])
        for name, thing in self._objects.items():
            if isinstance(thing, nn.Module):
                names |= self._module_tensors(name, thing).keys() - {
                    f"{name}.{key}" for key, _ in thing.named_parameters()
                }
        return names

    def targets(self, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
        """Return the tensors to load `saved` into. Raise CheckpointError if the state of an optimizer cannot be made.

        An optimizer without a step has no state, so its tensors are made as the checkpoint says, or by a step without
        gradients. `restore` hands them to the optimizer."""
        targets: dict[str, Tensor] = {}
        self._moments, self._loaded, self._waiting, self._surplus = {}, {}, {}, {}
        for name, thing in self._objects.items():
            if isinstance(thing, nn.Module):
                targets |= self._module_tensors(name, thing)
            elif _is_plain_optimizer(thing):
                targets |= self._optimizer_targets(name, thing, saved)
            targets |= self._loose_tensors(name)
        for name, thing in self._objects.items():
            if not isinstance(thing, nn.Module):
                places = tuple(self._places(name))
                for full_name in saved.keys() - targets.keys():
                    if full_name.startswith((f"{name}.", f"{name}[")) and not full_name.startswith(places):
                        entry = saved[full_name]
                        self._loaded[full_name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return targets | self._loaded

    def _places(self, name: str) -> list[str]:
        """Return how the names of an optimizer's own tensors begin."""
        thing = self._objects[name]
        if not _is_plain_optimizer(thing):
            return []
        groups = [f"{name}.group_{number}." for number in range(len(thing.param_groups))]
        return groups + [f"{place}." for place, _, _ in self._named(name, thing)]

    def _optimizer_targets(
        self, name: str, optimizer: Optimizer, saved: Mapping[str, TensorStorageMetadata]
    ) -> dict[str, Tensor]:
        if self._needs_step(name, optimizer, saved):
            _take_empty_step(name, optimizer)
        keys: dict[str, list[str]] = {}
        for full_name in saved:
            place, _, key = full_name.rpartition(".")
            keys.setdefault(place, []).append(key)
        for number, group in enumerate(optimizer.param_groups):
            prefix = f"{name}.group_{number}."
            for full_name in saved.keys() - _group_tensors(name, optimizer).keys():
                key = full_name.removeprefix(prefix)
                if key != full_name and "." not in key and group["params"]:
                    entry, device = saved[full_name], group["params"][0].device
                    group[key] = torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)
        targets = _group_tensors(name, optimizer)
        surplus = [full_name for full_name in targets if full_name not in saved]
        self._surplus[name] = [full_name.removeprefix(f"{name}.group_").split(".") for full_name in surplus]
        targets = {full_name: tensor for full_name, tensor in targets.items() if full_name in saved}
        orders = self._orders.get(name, {})
        for place, parameter, group in self._named(name, optimizer):
            present = optimizer.state.get(parameter, {})
            made = {}
            for key in keys.get(place, ()):
                if key == _PARAMETER:
                    continue
                entry, order = saved[f"{place}.{key}"], None
                if not isinstance(parameter, DTensor):
                    order = orders.get(f"{place}.{key}".removeprefix(f"{name}."))
                is_there = _fits(present.get(key), entry) and order_of(present[key]) == order
                made[key] = present[key] if is_there else _make_moment(place, key, entry, parameter, group, order)
            of_classes = {
                key: value
                for key, value in present.items()
                if isinstance(value, Tensor) and key not in made and f"{place}.{key}" in keys
            }
            self._moments[id(parameter)] = made | of_classes
            for key, tensor in (made | of_classes).items():
                targets |= inner_tensors(f"{place}.{key}", tensor)
        return targets

    def _needs_step(self, name: str, optimizer: Optimizer, saved: Mapping[str, TensorStorageMetadata]) -> bool:
        """Whether only the optimizer can make a tensor of `saved`: in a group, of another class, or sharded its way."""
        here = _group_tensors(name, optimizer)
        places: dict[str, tuple[Tensor, dict[str, Any]]] = {}
        for place, parameter, _ in self._named(name, optimizer):
            places[place] = parameter, optimizer.state.get(parameter, {})
        for full_name, entry in saved.items():
            if not full_name.startswith(f"{name}.") or full_name in here:
                continue
            place, _, key = full_name.rpartition(".")
            if place in places:
                parameter, state = places[place]
                is_sharded = isinstance(parameter, DTensor) and len(entry.size) > 0 and entry.size != parameter.shape
                if is_sharded and not _fits(state.get(key), entry):
                    return True
            elif re.fullmatch(rf"{re.escape(name)}\.group_\d+", place):
                return True
            else:
                outer, _, key = place.rpartition(".")
                if outer in places and key not in places[outer][1]:
                    return True
        return False

    def values(self) -> dict[str, Any]:
        """Return the plain values of optimizers: all except tensors, states of other objects, and dicts."""
        return self._encoded()[0]

    def _encoded(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the values, and the large tensors among them."""
        values: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, thing in self._objects.items():
            if isinstance(thing, nn.Module):
                continue
            if isinstance(thing, MutableMapping):
                self._refuse_trained(name, thing)
                values[name] = encode(dict(thing), name, tensors)
            else:
                is_plain = _is_plain_optimizer(thing)
                state = self._optimizer_values(name, thing) if is_plain else thing.state_dict()
                values[name] = {"class": type(thing).__qualname__, "state": encode(state, name, tensors)}
        return values, tensors

    def _refuse_trained(self, name: str, values: MutableMapping[str, Any]) -> None:
        """Refuse a dict with a parameter that an optimizer trains: a load would put another tensor into the dict."""
        trained = {
            id(parameter): optimizer
            for optimizer, thing in self._objects.items()
            for parameter in self._loose_parameters(optimizer, thing).values()
        }
        if of := next((trained[id(one)] for one in tree_leaves(dict(values)) if id(one) in trained), None):
            raise CheckpointError(
                f"'{name}' holds a parameter that '{of}' trains and saves: leave the parameter out of the dict"
            )

    def check(self, values: dict[str, Any]) -> None:
        """Raise CheckpointError if `values` are of other objects or classes. Nothing is changed."""
        expected = {name for name, thing in self._objects.items() if not isinstance(thing, nn.Module)}
        if values.keys() != expected:
            raise CheckpointError(
                f"the checkpoint holds values of {sorted(values)}, this state has {sorted(expected)}: use the names "
                "that it was saved with"
            )
        for name, value in values.items():
            thing = self._objects[name]
            saved = value["class"] if isinstance(value, dict) and value.keys() == {"class", "state"} else "dict"
            here = "dict" if isinstance(thing, MutableMapping) else type(thing).__qualname__
            if saved != here and not (here == "dict" and thing.keys() == {"class", "state"}):
                raise CheckpointError(
                    f"'{name}' of the checkpoint is a {saved}, this one a {here}: use the same class, or begin a new "
                    "run from the weights alone (load_weights_only)"
                )
            if _is_plain_optimizer(thing):
                _check_groups(name, thing, value["state"])
                self._orders[name] = value["state"].get("orders", {})

    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `values` returned, and hand the optimizers their part of the last `targets`. Raise
        CheckpointError if other objects were saved; then nothing is changed."""
        self.check(values)
        decoded: dict[str, Any] = {}
        for name, value in values.items():
            thing = self._objects[name]
            decoded[name] = decode(value if isinstance(thing, MutableMapping) else value["state"], self._loaded)
            for number, key, *_ in self._surplus.get(name, ()):
                if key in decoded[name]["param_groups"][int(number)]:
                    raise CheckpointError(f"'{name}' has a tensor as `{key}`, and in the checkpoint that is a number")
        for name, value in decoded.items():
            if any(place.startswith((f"{name}.", f"{name}[")) for place in self._loaded):
                self._waiting[name] = value
            else:
                self._hand_over(name, value)

    def finish(self) -> None:
        """Restore the objects whose tensors have now been loaded."""
        waiting, self._waiting, self._loaded = self._waiting, {}, {}
        for name, value in waiting.items():
            self._hand_over(name, value)

    def _hand_over(self, name: str, value: Any) -> None:
        thing = self._objects[name]
        if _is_plain_optimizer(thing):
            self._restore_optimizer(name, thing, value)
        elif isinstance(thing, MutableMapping):
            thing.clear()
            thing.update(value)
        else:
            thing.load_state_dict(value)

    def _module_tensors(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for key, tensor in module_tensors(module).items():
            tensors |= inner_tensors(f"{name}.{key}", tensor)
        return tensors

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

    def _loose_parameters(self, name: str, optimizer: Any) -> dict[str, Tensor]:
        """Return the parameters of an optimizer that belong to no module, such as a learned temperature."""
        modules = [thing for thing in self._objects.values() if isinstance(thing, nn.Module)]
        owned = {id(parameter) for module in modules for parameter in module.parameters()}
        named = self._named(name, optimizer) if isinstance(optimizer, Optimizer) else ()
        return {f"{place}.{_PARAMETER}": parameter for place, parameter, _ in named if id(parameter) not in owned}

    def _loose_tensors(self, name: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for place, parameter in self._loose_parameters(name, self._objects[name]).items():
            tensors |= inner_tensors(place, parameter.detach())
        return tensors

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
        orders = {
            f"{place}.{key}".removeprefix(f"{name}."): order
            for place, parameter, _ in self._named(name, optimizer)
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and (order := order_of(value)) is not None
        }
        return {"param_groups": groups, "state": state, "orders": orders}

    def _restore_optimizer(self, name: str, optimizer: Optimizer, values: dict[str, Any]) -> None:
        for number, key, *_ in self._surplus.pop(name, ()):
            optimizer.param_groups[int(number)].pop(key, None)  # made by a step that the saved optimizer had not taken
        for group, saved in zip(optimizer.param_groups, values["param_groups"], strict=True):
            group.update(saved)
        for place, parameter, _ in self._named(name, optimizer):
            plain = _moved(values["state"].get(place.removeprefix(f"{name}."), {}), parameter.device)
            state = plain | self._moments.pop(id(parameter), {})
            if state:
                optimizer.state[parameter] = state
            else:
                # The saved optimizer had taken no step.
                optimizer.state.pop(parameter, None)


def _is_plain_optimizer(thing: Any) -> TypeGuard[Optimizer]:
    """Whether torch's own `state_dict` tells the whole state: an optimizer with another one is asked for it."""
    return isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once (the first name wins). Raise CheckpointError if
    a submodule has extra state (`get_extra_state`), which is not a tensor."""
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
    tensors: dict[str, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, Tensor):
                tensors |= inner_tensors(f"{name}.group_{number}.{key}", value)
    return tensors


def _fits(present: Any, saved: TensorStorageMetadata) -> bool:
    """Whether `present` is a tensor that `saved` can be loaded into."""
    return isinstance(present, Tensor) and present.shape == saved.size and present.dtype == saved.properties.dtype


def _make_moment(
    place: str,
    key: str,
    saved: TensorStorageMetadata,
    parameter: Tensor,
    group: Mapping[str, Any],
    order: list[int] | None,
) -> Tensor:
    """Return a tensor for one entry of an optimizer's state, on the device that `Optimizer.load_state_dict` chooses."""
    dtype = saved.properties.dtype
    # A scalar parameter has the shape of its own step counter.
    if saved.size == parameter.shape and key != "step" and order == order_of(parameter):
        return torch.zeros_like(parameter, dtype=dtype)
    if isinstance(parameter, DTensor) and len(saved.size) > 0:
        raise CheckpointError(
            f"'{place}.{key}' has the shape {tuple(saved.size)}, its sharded parameter {tuple(parameter.shape)}: how "
            "to shard it only the optimizer knows. Have the optimizer take a step before loading"
        )
    on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
    device = torch.device("cpu") if on_cpu else parameter.device
    if order is not None:
        return from_order(torch.zeros([saved.size[place] for place in order], dtype=dtype, device=device), order)
    return torch.zeros(saved.size, dtype=dtype, device=device)


def _take_empty_step(name: str, optimizer: Optimizer) -> None:
    """Have an optimizer make its state by a step with gradients of zero. The parameters stay."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    except Exception as error:
        raise CheckpointError(
            f"'{name}' ({type(optimizer).__name__}) makes its state in its first step, and a step without gradients "
            f"failed ({type(error).__name__}: {error}). Have the optimizer take a step before loading"
        ) from error
    finally:
        with torch.no_grad():
            for parameter, value, gradient in kept:
                parameter.copy_(value)
                parameter.grad = gradient


def _check_groups(name: str, optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    there, here = len(values["param_groups"]), len(optimizer.param_groups)
    if there != here:
        raise CheckpointError(f"'{name}' of the checkpoint has {there} parameter groups, this one {here}")


def _moved(value: Any, device: torch.device) -> Any:
    """Return `value` with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) is deque:
        return deque((_moved(item, device) for item in value), maxlen=value.maxlen)
    return type(value)(_moved(item, device) for item in value) if type(value) in (list, tuple) else value


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


@contextlib.contextmanager
def keeping_random_state() -> Iterator[None]:
    """Put the generators of this rank back at the end."""
    state = capture_random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def seed_everything(seed: int, *, step: int, rank: int) -> None:
    """Seed all generators of this rank as a function of (run seed, step, rank)."""
    # numpy guarantees the numbers of SeedSequence, and neighbouring ranks get unlike seeds.
    entropy = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(entropy[0]))
    np.random.seed(int(entropy[1]))
    torch.manual_seed(int(entropy[2]))
