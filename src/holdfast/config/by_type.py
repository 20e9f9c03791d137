"""Sections whose settings depend on a type: each type has a model of its own, and `ByType` chooses it.

    Correction = Annotated[NoCorrection | Truncation | Mask, ByType("none")]

Each model has a `type` that is a `Literal` of its names, or has them in `types`. A model whose `type` is any other text
is for code of the user, `module:function`. Settings without a type get the default type. A text in the place of the
section is its type: `advantage = "grpo"`.
"""

import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import BaseModel, Discriminator, GetCoreSchemaHandler, Tag
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from holdfast.config.marks import models_in
from holdfast.errors import nearest

M = TypeVar("M", bound=BaseModel)

OWN = "module:function"
"""The type of the user's code in lists of types."""


class ByType:
    """Chooses the model of a section in a union, by the setting `key` of the section."""

    def __init__(self, default: str, key: str = "type") -> None:
        self.default = default
        self.key = key

    def models(self, union: Any) -> dict[str, type[BaseModel]]:
        """Return the models of a union by type."""
        return {name: model for model in models_in(union)[0] for name in self._names(model)}

    def told(self, name: object, types: typing.Iterable[str]) -> str:
        """Return why there is no type `name`."""
        known = list(types)
        allowed = ", ".join(one for one in known if one != OWN)
        own = f", or '{OWN}' for one of your own" if OWN in known else ""
        return f"there is no '{name}'.{nearest(str(name), known)} Allowed: {allowed}{own}"

    def _names(self, model: type[BaseModel]) -> tuple[str, ...]:
        annotation = model.model_fields[self.key].annotation
        if listed := getattr(model, "types", ()):
            return listed
        return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else (OWN,)

    def table_of(self, value: Any) -> Any:
        """Return the settings of a section that is given only by its type, and any other value as it is."""
        return {self.key: value} if isinstance(value, str) else value

    def _type_of(self, value: Any) -> str | None:
        if isinstance(value, BaseModel):
            name = getattr(value, self.key, None)
        elif isinstance(value, dict):
            name = value.get(self.key, self.default)
        else:
            return None
        return OWN if isinstance(name, str) and ":" in name else str(name)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of pydantic's discriminated union."""
        tagged = tuple(Annotated[model, Tag(name)] for name, model in self.models(source).items())
        tables = handler.generate_schema(Annotated[Union[tagged], Discriminator(self._type_of)])  # noqa: UP007
        return core_schema.no_info_before_validator_function(
            self.table_of, tables, json_schema_input_schema=core_schema.union_schema([tables, core_schema.str_schema()])
        )


def models_by_type(union: Any, base: type[M]) -> dict[str, type[M]]:
    """Return the models of a union that derive from `base`, by type."""
    (chooser,) = (one for one in typing.get_args(union)[1:] if isinstance(one, ByType))
    return {name: model for name, model in chooser.models(union).items() if issubclass(model, base)}


def by_type(info: FieldInfo) -> tuple[ByType, dict[str, type[BaseModel]]] | None:
    """Return how the model of a field is chosen, and its models by type; None if it has one model, or none."""
    chooser = next((one for one in info.metadata if isinstance(one, ByType)), None) or _inside(info.annotation)
    return None if chooser is None else (chooser, chooser.models(info.annotation))


def with_tables(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of a model, with a table for each section that is given only by its type."""
    found = dict(values)
    for name in [name for name in found if name in model.model_fields]:
        info = model.model_fields[name]
        chosen, (models, place) = by_type(info), models_in(info.annotation)
        if chosen is not None:
            found[name] = chosen[0].table_of(found[name])
        for inner in models if isinstance(found[name], dict) and not place else ():
            found[name] = with_tables(inner, found[name])
    return found


def _inside(annotation: Any) -> ByType | None:
    parts = typing.get_args(annotation)
    found = [part if isinstance(part, ByType) else _inside(part) for part in parts]
    return next((one for one in found if one is not None), None)
