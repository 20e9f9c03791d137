"""Plain values, tensors among them, and classes of the standard library as JSON, bit by bit.

JSON lacks these, so each becomes an object with one key:

    {"$tuple": [..]}   {"$float": "inf"}   {"$bytes": "base64"}   {"$dict": [[key, value], ..]}

Named tuples, enums, `Counter`, `OrderedDict`, `defaultdict` and `deque` keep their class, tensors their bits.
"""

import base64
import enum
import math
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.errors import CheckpointError


def encode(value: Any, where: str, tensors: dict[str, Tensor] | None = None) -> Any:
    """Return `value` as JSON that `decode` reverts. Raise CheckpointError if a part of the value is not plain.

    Args:
        where: the name of the value in errors, and of its tensors.
        tensors: gets tensors of more than 1 MiB by name. None: tensors are refused.
    """
    kind: Any = type(value)
    if value is None or kind is bool:
        return value
    if isinstance(value, enum.Flag):  # a union of members has no name
        return {"$flag": [_path_of(kind, where), value.value]}
    if isinstance(value, enum.Enum):
        return {"$enum": [_path_of(kind, where), value.name]}
    if kind is int:
        return value if -(2**63) <= value < 2**64 else {"$int": hex(value)}
    if kind is str or isinstance(value, np.str_):
        return str(_as_text(value, where))
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, np.number | np.bool_):
        return {"$numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor) and tensors is not None:
        return _encode_tensor(value, where, tensors)
    if kind in (list, tuple, torch.Size, deque) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = [encode(item, f"{where}[{number}]", tensors) for number, item in enumerate(value)]
        if kind is list:
            return items
        if kind is deque:
            return {"$deque": [cast("deque[Any]", value).maxlen, items]}
        named = {tuple: "$tuple", torch.Size: "$size"}.get(kind)
        return {named: items} if named else {"$namedtuple": [_path_of(kind, where), items]}
    if isinstance(value, dict) and (kind in _MAPPINGS or kind is defaultdict):
        if kind is dict and all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {
                _as_text(key, where): encode(item, f"{where}.{key}" if "." not in key else f"{where}[{key!r}]", tensors)
                for key, item in value.items()
            }
        pairs = [[encode(key, where), encode(item, f"{where}[{key!r}]", tensors)] for key, item in value.items()]
        if kind is not defaultdict:
            return {_MAPPINGS[kind]: pairs}
        factory = cast("defaultdict[Any, Any]", value).default_factory
        if factory is not None and factory not in _FACTORIES.values():
            raise CheckpointError(
                f"{where} is a defaultdict whose factory has no name in a checkpoint. Allowed: {', '.join(_FACTORIES)}"
            )
        return {"$defaultdict": [factory.__name__ if factory else None, pairs]}
    raise CheckpointError(
        f"{where} is a {kind.__name__}, which a checkpoint cannot keep among its values: these are numbers, "
        "texts, bytes, None, and lists, tuples and dicts of them. Convert it (int(), .item(), .tolist()); tensors "
        "belong into a module, as buffers"
    )


_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple, set)}
_MOST_IN_VALUES = 1 << 20
"""Bytes of a tensor among values that the file of the values holds; larger tensors have entries of their own."""


def _encode_tensor(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tensor, DTensor):
        raise CheckpointError(
            f"{where} is a sharded tensor among values, and only rank 0 saves values. Put the tensor into a module, "
            "as a buffer"
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    check_tensor(where, tensor if not _shows_twice(tensor) else (tensor := tensor.contiguous()))
    if (order := order_of(tensor)) is not None:
        return {"$permuted": [order, _encode_tensor(tensor.permute(order), where, tensors)]}
    while where in tensors:
        where += "'"
    if tensor.numel() * tensor.element_size() > _MOST_IN_VALUES:
        tensors[where] = tensor
        return {"$tensor": where}
    content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    kept = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b64encode(content).decode()]
    return {"$small_tensor": kept}


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError for a tensor that a checkpoint cannot hold as it is."""
    reason = ""
    if tensor.layout is not torch.strided:
        reason = "a sparse tensor"
    elif tensor.is_nested:
        reason = "a nested tensor"
    elif _shows_twice(tensor):
        reason = "a view that shows some numbers several times (expand): clone() it"
    elif tensor.is_conj() or tensor.is_neg():
        reason = "a view that only notes its sign or conjugation: resolve_conj() and resolve_neg() make a tensor of it"
    elif tensor.is_meta:
        reason = "on the meta device, without data"
    elif type(tensor) not in (Tensor, nn.Parameter, nn.Buffer, DTensor) or tensor.is_quantized:
        reason = f"a {type(tensor).__name__}, which says not by __tensor_flatten__ what it consists of"
    elif isinstance(tensor, DTensor) and type(tensor._local_tensor) is not Tensor:
        reason = f"sharded, and its shards are of the class {type(tensor._local_tensor).__name__}"
    if reason:
        raise CheckpointError(f"'{name}' is {reason}: a checkpoint cannot hold it")


def _shows_twice(tensor: Tensor) -> bool:
    """Whether several elements of a tensor are one place in memory, as `expand` makes them."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def order_of(tensor: Tensor) -> list[int] | None:
    """Return the dimensions of a tensor as memory has them, the slowest first; None if that is their own order."""
    if isinstance(tensor, DTensor) or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.is_contiguous():
        return None
    thin = [place for place, size in enumerate(tensor.shape) if size == 1]  # anywhere in memory
    thick = [place for place, size in enumerate(tensor.shape) if size != 1]
    order = sorted(thick, key=lambda place: -tensor.stride(place))
    return [*thin, *order] if order != thick else None


def from_order(tensor: Tensor, order: list[int]) -> Tensor:
    """Return the view of a tensor, whose dimensions are in the order of memory, that `order_of` was given."""
    return tensor.permute([order.index(place) for place in range(len(order))])


def inner_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a tensor by name; of a tensor of a class of its own, such as torchao's, the tensors that it consists of.
    Raise CheckpointError if a checkpoint cannot hold the tensor."""
    if isinstance(tensor, DTensor) or type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
        check_tensor(name, tensor)
        return {name: tensor}
    if not hasattr(tensor, "__tensor_flatten__"):
        check_tensor(name, tensor)
    parts, _ = cast(Any, tensor).__tensor_flatten__()
    found: dict[str, Tensor] = {}
    for part in parts:
        found |= inner_tensors(f"{name}.{part}", getattr(tensor, part))
    return found


def _as_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{where}: character {error.start} of {text[:40]!a} is half of a surrogate pair, which no file can hold"
        ) from None
    return text


def _path_of(kind: type, where: str) -> str:
    path = f"{kind.__module__}:{kind.__qualname__}"
    if _class_at(path) is not kind:
        raise CheckpointError(
            f"{where} is a {kind.__qualname__}, which is not a class of the module {kind.__module__} itself: define "
            "the class there"
        )
    return path


def _class_at(path: str) -> Any:
    """Return a class of a module that is imported; None if there is none."""
    module, _, name = path.partition(":")
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def decode(value: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Return what `encode` was given; `tensors` are the large ones. Raise CheckpointError if a class is not there."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, content), *_ = value.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, content, tensors or {})
    return {key: decode(item, tensors) for key, item in value.items()}


def _decode_tagged(tag: str, content: Any, tensors: Mapping[str, Tensor]) -> Any:
    def pairs(items: Any) -> dict[Any, Any]:
        return {decode(key, tensors): decode(item, tensors) for key, item in items}

    match tag:
        case "$float":
            return float(content)
        case "$int":
            return int(content, 16)
        case "$bytes":
            return base64.b64decode(content)
        case "$tuple" | "$size":
            return (tuple if tag == "$tuple" else torch.Size)(decode(item, tensors) for item in content)
        case "$deque":
            return deque((decode(item, tensors) for item in content[1]), maxlen=content[0])
        case "$numpy":
            return np.frombuffer(base64.b64decode(content[1]), dtype=content[0])[0]
        case "$permuted":
            return from_order(decode(content[1], tensors), content[0])
        case "$dtype":
            return getattr(torch, content)
        case "$dict":
            return pairs(content)
        case "$ordered":
            return OrderedDict(pairs(content))
        case "$counter":
            return Counter(pairs(content))
        case "$defaultdict":
            return defaultdict(_FACTORIES.get(content[0]), pairs(content[1]))
        case "$tensor":
            return tensors[content]
        case "$small_tensor":
            dtype, shape, data = content
            flat = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8) if data else torch.empty(0)
            return (
                flat.view(getattr(torch, dtype)).reshape(shape)
                if data
                else flat.to(getattr(torch, dtype)).reshape(shape)
            )
        case "$namedtuple" | "$enum" | "$flag":
            path, items = content
            kind = _class_at(path)
            wanted = tuple if tag == "$namedtuple" else enum.Enum
            if not (isinstance(kind, type) and issubclass(kind, wanted)):
                raise CheckpointError(f"the checkpoint holds a {path}, which is not there: import its module first")
            made: Any = kind
            if tag == "$namedtuple":
                return made(*(decode(item, tensors) for item in items))
            try:
                return made[items] if tag == "$enum" else made(items)
            except (KeyError, ValueError):
                raise CheckpointError(f"the checkpoint holds the value {items!r} of {path}, which has none") from None
        case _:
            raise CheckpointError(f"the checkpoint holds a value of the kind {tag}, which this version does not know")
