"""Marks: properties of a setting, in the `Annotated` of its field.

    lr: Annotated[float, Mark.RATE] = Field(default=1e-5, gt=0)

A mark of a section holds for all settings below it. A field that a subclass replaces keeps its marks.
"""

import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import UnionType

from pydantic import BaseModel


class Mark(Enum):
    """A property of a setting."""

    FREE = "free"
    """It may change on resume: it changes nothing that is computed. It says where a run is stored, how long it lasts,
    how often it is saved, what is reported about it, which machines and how many it runs on, or how long it waits."""
    SHARED = "shared"
    """All processes of `rl` that have a setting of this name get the same value."""
    RATE = "rate"
    """A resumed run keeps its value, unless another value is given."""
    PLACE = "place"
    """It says where an attempt starts and writes. The settings of two attempts are compared without it."""
    DEVICE = "device"
    """If unset, the launcher fills it in by the device. It changes results only by rounding."""
    ANSWERS = "answers"
    """The rollouts of an evaluation depend on it: with another value it is another evaluation."""


@dataclass(frozen=True)
class Picked:
    """`rl` may pick the value, so that a training step fits a GPU that it shares with an engine. `cost`: settings with
    a lower cost are picked first."""

    cost: int


Marks = frozenset[Mark | Picked]


def marks_of(model: type[BaseModel]) -> dict[str, Marks]:
    """Return every setting and section of a model by its dotted key, with its marks. In a key `[]` stands for any item
    of a list, and `NAME` for any entry of a table."""
    return dict(_walk(model, "", frozenset()))


def marked(model: type[BaseModel], mark: Mark) -> tuple[str, ...]:
    """Return the fields of `model` that have the mark themselves."""
    return tuple(name for name in model.model_fields if mark in _own_marks(model, name))


def has_mark(model: type[BaseModel], key: str, mark: Mark) -> bool:
    """Return whether a setting, such as `environments[0].timeout_s`, has the mark."""
    return _pattern(model, mark).match(key) is not None


@cache
def _pattern(model: type[BaseModel], mark: Mark) -> re.Pattern[str]:
    """Return a pattern of all keys that have the mark, and of all keys below them."""
    keys = [re.escape(key) for key, marks in marks_of(model).items() if mark in marks]
    places = [key.replace(r"\[\]", r"\[\d*\]").replace("NAME", r"[^.]+") for key in keys]
    return re.compile(rf"(?:{'|'.join(places) or '(?!)'})(?![^.\[])")


def _walk(model: type[BaseModel], prefix: str, above: Marks) -> Iterator[tuple[str, Marks]]:
    for name, info in model.model_fields.items():
        marks = above | _own_marks(model, name)
        yield f"{prefix}{name}", marks
        models, place = models_in(info.annotation)
        for inner in models:
            yield from _walk(inner, f"{prefix}{name}{place}.", marks)


def _own_marks(model: type[BaseModel], name: str) -> Marks:
    classes = [one for one in model.__mro__ if issubclass(one, BaseModel) and name in one.model_fields]
    return frozenset(
        mark for one in classes for mark in one.model_fields[name].metadata if isinstance(mark, Mark | Picked)
    )


def models_in(annotation: object) -> tuple[list[type[BaseModel]], str]:
    """Return the models that an annotation such as `X | None` or `list[X]` names, and the part between the key of the
    field and a key of a model: `[]` for a list, `.NAME` for a table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], ""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return models_in(parts[0])
    if origin in (typing.Union, UnionType):
        found = [one for part in parts if (one := models_in(part))[0]]
        return [model for models, _ in found for model in models], found[0][1] if found else ""
    if origin in (list, dict):
        models, place = models_in(parts[-1])
        return models, ("[]" if origin is list else ".NAME") + place
    return [], ""
