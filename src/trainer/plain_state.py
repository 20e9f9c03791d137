"""What a checkpoint holds, as tensors by name and plain values: for any PyTorch training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch import Tensor, nn

from triad.errors import CheckpointError


@runtime_checkable
class State(Protocol):
    """State that can be saved and loaded."""

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, as it lies in memory; loading writes into them."""
        ...

    def values(self) -> dict[str, Any]:
        """Return everything else as values that JSON can hold."""
        ...

    def restore(self, values: dict[str, Any]) -> None:
        """Take over what `values` returned when the state was saved."""
        ...


def as_state(state: State | Mapping[str, Any]) -> State:
    """Return `state` itself, or the state of the objects in a mapping."""
    return ObjectsState(state) if isinstance(state, Mapping) else state


class ObjectsState:
    """Modules, optimizers and other objects, by name.

    - `torch.nn.Module` (also sharded by FSDP2): parameters and persistent buffers, `NAME.<parameter>`;
    - `torch.optim.Optimizer` of those modules' parameters: moments, `NAME.<parameter>.<key>`, and the
      numbers in its parameter groups;
    - objects with `state_dict` and `load_state_dict` (schedulers, samplers): their values, as JSON;
    - dicts of plain values: updated in place.

    Save and load at step boundaries, where gradients are cleared.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)
        for name, thing in self._objects.items():
            is_known = isinstance(thing, nn.Module | torch.optim.Optimizer | MutableMapping)
            if not is_known and not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise CheckpointError(
                    f"'{name}' is a {type(thing).__name__}: a checkpoint takes modules, optimizers, dicts of plain "
                    "values, and objects with state_dict() and load_state_dict()"
                )

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of modules and optimizers. An optimizer's are made where no step was taken yet."""
        tensors: dict[str, Tensor] = {}
        for name, thing in self._objects.items():
            if isinstance(thing, nn.Module):
                tensors |= {f"{name}.{key}": tensor for key, tensor in module_tensors(thing).items()}
            elif isinstance(thing, torch.optim.Optimizer):
                make_optimizer_state(thing)
                for parameter_name, parameter in self._named(thing):
                    for key, value in thing.state[parameter].items():
                        if isinstance(value, Tensor):
                            tensors[f"{name}.{parameter_name}.{key}"] = value
        return tensors

    def values(self) -> dict[str, Any]:
        """Return numbers of optimizers, states of other objects, and dicts."""
        values: dict[str, Any] = {}
        for name, thing in self._objects.items():
            if isinstance(thing, torch.optim.Optimizer):
                values[name] = self._optimizer_values(thing)
            elif isinstance(thing, MutableMapping):
                values[name] = dict(thing)
            elif not isinstance(thing, nn.Module):
                values[name] = thing.state_dict()
            if name in values:
                _check_plain(name, values[name])
        return values

    def restore(self, values: dict[str, Any]) -> None:
        """Take over what `values` returned.

        Raises:
            CheckpointError: it was saved from other objects.
        """
        expected = {name for name, thing in self._objects.items() if not isinstance(thing, nn.Module)}
        if values.keys() != expected:
            raise CheckpointError(
                f"the checkpoint holds values of {sorted(values)}, this state has {sorted(expected)}: use the names "
                "that it was saved with"
            )
        for name, value in values.items():
            thing = self._objects[name]
            if isinstance(thing, torch.optim.Optimizer):
                self._restore_optimizer(thing, value)
            elif isinstance(thing, MutableMapping):
                thing.clear()
                thing.update(value)
            else:
                thing.load_state_dict(value)

    def _named(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's parameters under the names that their module gives them."""
        names = {
            id(parameter): name
            for thing in self._objects.values()
            if isinstance(thing, nn.Module)
            for name, parameter in thing.named_parameters()
        }
        for group_number, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                yield names.get(id(parameter), f"group_{group_number}.parameter_{number}"), parameter

    def _optimizer_values(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        make_optimizer_state(optimizer)
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        state = {
            name: plain
            for name, parameter in self._named(optimizer)
            if (plain := {k: v for k, v in optimizer.state[parameter].items() if not isinstance(v, Tensor)})
        }
        return {"param_groups": groups, "state": state}

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        groups = values["param_groups"]
        if len(groups) != len(optimizer.param_groups):
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(groups)} parameter groups, this one {len(optimizer.param_groups)}"
            )
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        for name, parameter in self._named(optimizer):
            optimizer.state[parameter].update(values["state"].get(name, {}))


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once (the first name wins)."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return {name: parameter.detach() for name, parameter in module.named_parameters()} | buffers


@torch.no_grad()
def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer that has taken no step make its state: by a step that changes nothing.

    Raises:
        CheckpointError: there are gradients, which such a step would apply.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if all(optimizer.state.get(parameter) for parameter in parameters):
        return
    if any(parameter.grad is not None for parameter in parameters):
        raise CheckpointError("save and load between steps, after optimizer.zero_grad(): there are gradients now")
    # Only parameters without state get a gradient, so those that have stepped are left alone.
    fresh = [parameter for parameter in parameters if not optimizer.state.get(parameter)]
    before = [parameter.clone() for parameter in fresh]
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    type(optimizer).step(optimizer)  # not the instance's, which a scheduler may have wrapped to count
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, value in zip(fresh, before, strict=True):
        parameter.grad = None
        parameter.copy_(value)
        for key, entry in optimizer.state[parameter].items():
            if isinstance(entry, Tensor):
                entry.zero_()
            elif key == "step":
                optimizer.state[parameter][key] = 0


def _check_plain(name: str, value: Any) -> None:
    try:
        same = msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"the state of '{name}' does not fit into JSON: {error}") from None
    if not _equal(same, value):
        raise CheckpointError(
            f"the state of '{name}' does not survive JSON: keep numbers, texts, lists and dicts in it"
        )


def _equal(decoded: Any, value: Any) -> bool:
    """Whether `decoded` is `value`, lists standing for tuples."""
    if isinstance(value, Mapping):
        return decoded.keys() == value.keys() and all(_equal(decoded[key], value[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(decoded) == len(value) and all(_equal(a, b) for a, b in zip(decoded, value, strict=True))
    return decoded == value
