"""Lists the settings of every command, as `--help` and the site show them, and makes their JSON schema.

    python -m docs_tools.listing

writes `settings.json` beside the settings. `holdfast.config.help` reads it, so help needs no pydantic. A test holds
that the file is what this module would write. Run the line above after a change of a setting.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from holdfast import config
from holdfast.config.base import Command
from holdfast.config.by_type import ByType, by_type
from holdfast.config.marks import Mark, Marks, marks_of, models_in
from holdfast.config.resolved import is_free
from holdfast.config.rl import shared

SETTINGS: dict[str, type[Command]] = {
    "sft": config.SftConfig,
    "dpo": config.DpoConfig,
    "reward-model": config.RewardTrainingConfig,
    "rl": config.RlConfig,
    "trainer": config.TrainerConfig,
    "orchestrator": config.OrchestratorConfig,
    "inference": config.InferenceConfig,
    "evaluate": config.EvaluateConfig,
}
"""Command -> the model that its settings are read into."""

FILE = Path(config.__file__).with_name("settings.json")
_RESUMES = {"sft", "dpo", "reward-model", "trainer", "orchestrator", "inference"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Setting:
    """One setting of a command.

    Attributes:
        key: dotted; `environments[].id` is one of every item, `mcp_servers.NAME.url` one of every entry.
        kind: its type and what is allowed.
        is_free: whether another value on resume changes nothing that is computed; None where that has no meaning.
    """

    key: str
    kind: str
    default: str
    text: str
    is_free: bool | None


@dataclass(frozen=True)
class Table:
    """The settings of one model within a command: `ckpt.*`.

    Attributes:
        key: dotted, empty for the command itself.
        is_off: nothing of it is set unless one of its settings is given.
        elsewhere: the command whose page has the settings instead.
    """

    key: str
    text: str
    settings: list[Setting]
    is_off: bool
    elsewhere: str | None = None


def tables(command: str) -> list[Table]:
    """Return the settings of a command, model by model, those of the command itself first."""
    return list(_tables_of({"": SETTINGS[command]}, "", "", False, command))


def free_settings() -> set[str]:
    """Return the settings and sections of training runs that may change on resume, without those below them."""
    free: set[str] = set()
    for command in _RESUMES:
        marks = marks_of(SETTINGS[command])
        free |= {key for key, own in marks.items() if Mark.FREE in own and not _is_below(key, marks)}
    return free


def _is_below(key: str, marks: dict[str, Marks]) -> bool:
    """Return whether `key` has its mark from a section."""
    section = key.rpartition(".")[0].removesuffix("[]").removesuffix(".NAME")
    return Mark.FREE in marks.get(section, ())


def _tables_of(
    models: Mapping[str, type[BaseModel]],
    key: str,
    text: str,
    is_off: bool,
    command: str,
    chooser: ByType | None = None,
) -> Iterator[Table]:
    settings, below = [], []
    rates = getattr(SETTINGS[command], "rates", {}) if key == "optim" else {}
    for name, (info, description) in _fields_of(models).items():
        place = f"{key}.{name}" if key else name
        inner, below_it = models_in(info.annotation)
        if not inner or default_of(info) not in ("unset", ""):
            free = is_free(SETTINGS[command], place) if command in _RESUMES else None
            given = {one: fields[name] for one, model in models.items() if name in (fields := model.model_fields)}
            allowed, default = kind(info), json.dumps(rates[name]) if name in rates else _defaults(given)
            if chooser is not None and name == chooser.key:
                allowed, default = " or ".join(map(json.dumps, models)), json.dumps(chooser.default)
            settings.append(Setting(place, allowed, default, description, free))
        if inner:
            how, variants = by_type(info) or (None, {"": inner[0]})
            below.append((variants, place + below_it, description, default_of(info) == "unset", how))
    yield Table(key, text, settings, is_off)
    for inner_models, place, description, inner_off, how in below:
        (inner_model, *_) = inner_models.values()
        page = next((name for name, other in SETTINGS.items() if other is inner_model and name != command), None)
        if page is not None:
            yield Table(place, description, [], inner_off, page)
        else:
            yield from _tables_of(inner_models, place, description, inner_off, command, how)


def _fields_of(models: Mapping[str, type[BaseModel]]) -> dict[str, tuple[FieldInfo, str]]:
    """Return every field of some models, which a type chooses, with its help text and the types that have it."""
    fields: dict[str, tuple[FieldInfo, str]] = {}
    texts = {model: texts_of(model) for model in models.values()}
    for model in models.values():
        for name, info in model.model_fields.items():
            owners = {one for one, other in models.items() if name in other.model_fields}
            fields.setdefault(name, (info, texts[model][name] + _only(owners, list(models))))
    return fields


def _only(owners: Set[str], types: Sequence[str]) -> str:
    """Return for which types a setting is, if not for all."""
    has, lacks = ([f"`{one}`" for one in types if (one in owners) == side] for side in (True, False))
    if not lacks:
        return ""
    return f" Only of {', '.join(has)}." if len(has) <= len(lacks) else f" Not of {', '.join(lacks)}."


def _defaults(given: Mapping[str, FieldInfo]) -> str:
    """Return the default of a setting, with the defaults of single types after the most frequent default."""
    of_types: dict[str, list[str]] = {}
    for one, info in given.items():
        of_types.setdefault(default_of(info) or "unset", []).append(one)
    if len(of_types) == 1:
        return next(iter(of_types))
    common, *others = sorted(of_types, key=lambda default: -len(of_types[default]))
    return "; ".join([common, *(f"{', '.join(of_types[default])}: {default}" for default in others)]).replace('"', "")


def texts_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the help text of every field, in one line: its description, or the docstring beneath it in the source."""
    given = {name: info.description or "" for name, info in model.model_fields.items()}
    texts = dict(given)
    for one in reversed(model.__mro__):
        if not issubclass(one, BaseModel) or not one.__module__.startswith("holdfast."):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in itertools.pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(said))) if (
                    name in texts and not given[name]
                ):
                    texts[name] = said
    return {name: " ".join(text.split()) for name, text in texts.items()}


def kind(info: FieldInfo) -> str:
    """Return the type of a field, and its bounds: `int, ≥ 1`."""
    return ", ".join([_type_of(info.annotation), *_bounds(info.metadata)])


def _type_of(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(json.dumps(value) for value in parts)
    if origin is typing.Annotated:
        limits = [bound for item in parts[1:] for bound in _bounds([item, *getattr(item, "metadata", [])])]
        return ", ".join([_type_of(parts[0]), *limits])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_of(part) for part in parts if part is not types.NoneType)
    if origin is list:
        return f"list of {_type_of(parts[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_type_of, parts))}]"
    if origin is dict:
        return f"table of {_type_of(parts[1])}"
    if annotation is Path:
        return "path"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return {Any: "any value"}.get(annotation) or annotation.__name__


def _bounds(metadata: list[Any]) -> list[str]:
    found = [
        f"{sign} {getattr(item, name)}" for item in metadata for name, sign in _BOUNDS.items() if hasattr(item, name)
    ]
    return found + ["not empty" for item in metadata if getattr(item, "min_length", 0)]


def default_of(info: FieldInfo) -> str:
    """Return the default as TOML has it; `unset` for none, an empty string for that of a model."""
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None or info.validate_default is False:  # what stands there is no value that can be given
        return "unset"
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, list) and any(isinstance(item, BaseModel) for item in value):
        value = [item.model_dump(mode="json", exclude_defaults=True) | _names(item) for item in value]
    return json.dumps(value, default=str, ensure_ascii=False)


def _names(item: BaseModel) -> dict[str, Any]:
    """Return the `id` of an item, which says what it is though it is the default."""
    return {"id": item.model_dump()["id"]} if "id" in type(item).model_fields else {}


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def listing() -> dict[str, Any]:
    """Return what `settings.json` holds: the tables of each command, and the settings that `rl` hands down."""
    handed_down: dict[str, list[str]] = {}
    for setting, processes in shared().items():
        for process in processes:
            handed_down.setdefault(process, []).append(setting)
    commands = {command: [asdict(table) for table in tables(command)] for command in SETTINGS}
    return {"shared": handed_down, "commands": commands}


def json_schema(command: str) -> str:
    """Return the JSON schema of the TOML files of `command`."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **SETTINGS[command].model_json_schema()}
    models = {model.__name__: model for model in _models_in(SETTINGS[command])}
    for name, definition in [*schema.get("$defs", {}).items(), (SETTINGS[command].__name__, schema)]:
        texts = texts_of(models[name]) if name in models else {}
        for key, described in definition.get("properties", {}).items():
            described.pop("title", None)
            described |= {"description": texts[key]} if texts.get(key) else {}
    # Settings without a type fit several models, and JSON Schema knows no default type.
    return json.dumps(schema, indent=1, ensure_ascii=False).replace('"oneOf"', '"anyOf"')


def _models_in(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for info in model.model_fields.values():
        for inner in models_in(info.annotation)[0]:
            yield from _models_in(inner)


def text_of_listing() -> str:
    """Return the content of `settings.json`, a line for each setting."""
    whole = json.dumps(listing(), ensure_ascii=False)
    return re.sub(r'(?=\{"key": |"shared": |"commands": )', "\n", whole) + "\n"


if __name__ == "__main__":
    FILE.write_text(text_of_listing())
