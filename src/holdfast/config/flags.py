"""The settings of a command as flags: their names, and the text that the words of a command line give them.

--trainer.optim.lr 1e-5   --no-data.pack   --ckpt   --orchestrator.environments '[{"id": "reverse_text"}]'

An item of a list of sections has flags by its number or name: --orchestrator.environments.0.args.path rows.jsonl. A
list has one source, the flags, the variables or the last file that gives it, and the flag changes a copy of that.
"""

from __future__ import annotations

import copy
import json
import re
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal

from pydantic import BaseModel

from holdfast.config.by_type import ByType, by_type
from holdfast.config.files import holds, object_of
from holdfast.config.help import hint
from holdfast.config.marks import models_in
from holdfast.errors import ConfigError, masked, nearest

_MOST_CHARACTERS = 300


class StrayWord(Exception):
    """A word of a command line that is neither a flag nor the value of a flag."""


@dataclass(frozen=True)
class Flag:
    """A setting as a flag.

    Attributes:
        key: dotted.
        annotation: of the field.
        chooser: of a section whose settings depend on its type.
    """

    key: str
    annotation: Any
    chooser: ByType | None = None

    @property
    def kinds(self) -> set[Any]:
        """The types that its annotation names at the top level."""
        return _kinds(self.annotation)

    @property
    def words(self) -> set[Any]:
        """The literal words that it allows, such as `all-linear`."""
        parts = [self.annotation, *typing.get_args(self.annotation)]
        return {word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part)}

    @property
    def is_switch(self) -> bool:
        """Whether `--key` and `--no-key` take no value."""
        return self.kinds == {bool}

    @property
    def is_section(self) -> bool:
        """Whether `--key` without a value means the section with its defaults."""
        return model_in(self.annotation) is not None and not self.kinds & {list, dict}

    @property
    def is_table(self) -> bool:
        """Whether its value is a JSON object."""
        return self.is_section or dict in self.kinds

    @property
    def is_list(self) -> bool:
        """Whether its value may be a list."""
        return bool(self.kinds & {list, tuple})

    def value_of(self, text: str, name: str) -> Any:
        """Return the value of a text as far as the type is not needed, as pydantic reads numbers. `name`: the flag or
        variable as it was given, for the error. Raise ConfigError if the setting takes JSON and the text is none."""
        if text == "null" and type(None) in typing.get_args(self.annotation):
            return None
        if self.chooser is not None and not text.startswith("{"):
            return self.chooser.table_of(text)
        if self.is_table or (self.is_list and text.startswith(("[", "{"))):
            try:
                value = json.loads(text, object_pairs_hook=object_of)
            except ValueError as error:
                section = model_in(self.annotation)
                if section and "name" in section.model_fields and name.startswith("--") and text[:1] not in "{[":
                    raise ConfigError(
                        f"{name} is a section of settings. Did you mean {name}.name {cut(text)}?"
                    ) from None
                text = f": '{cut(text)}'" if name.startswith("--") else ""  # a variable may hold a secret
                others = "or in a file of the whole configuration (@ FILE.toml)"
                if self.is_section and name.startswith("--"):
                    others = f"by single settings ({name}.NAME VALUE), or by a file ({name} @ FILE.toml)"
                raise ConfigError(
                    f"a value of {name} is not JSON{text} ({error}). Sections, tables and lists are given as JSON, "
                    f"{others}."
                ) from None
            return [value] if self.is_list and not self.is_table and isinstance(value, dict) else value
        if self.is_list and str not in self.kinds and text not in self.words:
            return text.split(",")
        return text


def _kinds(annotation: Any) -> set[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, UnionType):
        return set().union(*map(_kinds, typing.get_args(annotation))) - {NoneType}
    return {origin or annotation}


@cache
def flags_of(command: type[BaseModel], prefix: str = "") -> Mapping[str, Flag]:
    """Return every flag of `command`, such as `--optim.lr`; a switch has a second one, `--no-`."""
    flags: dict[str, Flag] = {}
    for name, info in command.model_fields.items():
        chosen = by_type(info)
        flag = Flag(f"{prefix}{name}", info.annotation, chosen[0] if chosen is not None else None)
        word = flag.key.replace("_", "-")
        flags[f"--{word}"] = flag
        if flag.is_switch:
            flags[f"--no-{word}"] = flag
        if flag.is_section:
            for model in models_in(info.annotation)[0]:
                for name, inner in flags_of(model, f"{flag.key}.").items():
                    known = flags.get(name)
                    # Models of several types may have a setting: its text is read as any of them reads it.
                    if known is None:
                        flags[name] = inner
                    elif known.annotation != inner.annotation:
                        flags[name] = replace(known, annotation=known.annotation | inner.annotation)
    return flags


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation such as `X | None` or `list[X]` is about, or the first of several."""
    models, place = models_in(annotation)
    return models[0] if models and ".NAME" not in place else None


def read_flags(words: list[str], known: Mapping[str, Flag]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of the flags by dotted key, and the flag that gave each, as the user wrote it. A repeated list
    is continued, a repeated table added to. Raise ConfigError for a word that is not a flag, a flag without its value,
    or a value that must be JSON and is not; StrayWord as said there."""
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    waiting = list(reversed(words))
    unknown, stray = [], ""
    while waiting:
        word = waiting.pop()
        name, has_value, value = word.partition("=")
        if not name.startswith("--"):
            stray = stray or word
            continue
        plain = name.replace("_", "-")
        flag = known.get(plain)
        if flag is None:
            unknown.append(name)
            if not has_value and waiting and not waiting[-1].startswith("--"):
                waiting.pop()  # of the unknown flag
            continue
        given[flag.key] = name
        is_negated = plain != f"--{flag.key.replace('_', '-')}"
        if flag.is_switch and not (has_value or is_negated) and waiting and waiting[-1].lower() in ("true", "false"):
            value, has_value = waiting.pop(), True
        if flag.is_switch and (not has_value or is_negated):
            if has_value:
                raise ConfigError(f"flag '{name}' takes no value, and was given '{cut(value)}'.")
            _put(values, flag.key, not is_negated)
            continue
        if not has_value:
            if flag.is_section and not (waiting and _is_a_value(waiting[-1])):
                value = "{}"
            elif waiting and _is_a_value(waiting[-1]):
                value = waiting.pop()
            else:
                raise ConfigError(
                    f"flag '{name}' needs a value. A value that begins with '-' is written with '=', as in "
                    "--output-dir=-name."
                )
        _put(values, flag.key, flag.value_of(value, name))
        if flag.chooser is not None and not value.startswith("{"):
            given[f"{flag.key}.{flag.chooser.key}"] = name
    if unknown:
        keys = [flag.key for flag in known.values()]
        hints = []
        for name in dict.fromkeys(unknown):
            negated = f"--no-{name[2:].replace('_', '-').replace('.no-', '.')}"
            said = f" Did you mean '{negated}'?" if negated in known else hint(name, keys)
            hints.append(f"unknown flag '{name}'.{said}")
        raise ConfigError("\n       ".join(hints) + " --help lists the sections of settings, --help-all all flags.")
    if stray:
        raise StrayWord(stray)
    return values, given


def _is_a_value(word: str) -> bool:
    return not word.startswith("-") or re.match(r"-[\d.]", word) is not None


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. A later flag wins: over settings of a section that it sets, over a section that was unset."""
    for other in [*values]:
        inside = other.startswith(f"{key}.") and (not isinstance(value, dict) or holds(value, other[len(key) + 1 :]))
        if inside or (key.startswith(f"{other}.") and not isinstance(values[other], dict)):
            del values[other]
    values[key] = _continued(values.get(key), value)


def _continued(before: Any, value: Any) -> Any:
    if isinstance(before, list) and isinstance(value, list):
        return [*before, *value]
    if isinstance(before, dict) and isinstance(value, dict):
        return {**before, **{name: _continued(before.get(name), one) for name, one in value.items()}}
    return value


def cut(text: str) -> str:
    """Return a text of the user for a message: cut, and without passwords."""
    text = masked(text)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} … ({len(text)} characters)"


@dataclass(frozen=True)
class ItemFlag:
    """A flag `name` of an item of the list `key`; `place`: what comes after the key, `ITEM.SETTING`."""

    name: str
    key: str
    model: type[BaseModel]
    place: str
    text: str

    def change(self, items: Any) -> tuple[list[Any], str]:
        """Return a copy of the list with the setting, and the dotted key of the setting. Raise ConfigError if the list
        lacks the item."""
        changed: list[Any] = [{"type": item} if isinstance(item, str) else item for item in copy.deepcopy(items or [])]
        number, setting = self._find(changed)
        known = flags_of(self.model).get(f"--{setting.replace('_', '-')}")
        path = known.key.split(".") if known is not None else setting.split(".")
        section: Any = changed[number]
        for part in path[:-1]:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        section[path[-1]] = known.value_of(self.text, self.name) if known is not None else _value_of(self.text)
        return changed, ".".join([self.key, str(number), *path])

    def _find(self, items: list[Any]) -> tuple[int, str]:
        """Return the number of the item, and the rest of the place."""
        names = [_label(item) for item in items]
        for number, name in enumerate(names):
            for one in (str(number), name):
                if self.place.startswith(f"{one}."):
                    return number, self.place[len(one) + 1 :]
        given = self.place.partition(".")[0]
        listed = ", ".join(f"{number} ({name})" for number, name in enumerate(names)) or "none"
        raise ConfigError(
            f"flag '{self.name}': {self.key} has no item '{given}'.{nearest(given, names)} There are: {listed}"
        )


def _label(item: Any) -> str:
    found = item if isinstance(item, dict) else {}
    return str(found.get("name") or found.get("id") or str(found.get("type", "")).rpartition(":")[2])


def _value_of(text: str) -> Any:
    """Return the value of an argument: as JSON if the text is JSON, else the text."""
    with suppress(ValueError):
        return json.loads(text)
    return text


def take_items(words: list[str], known: Mapping[str, Flag]) -> tuple[list[ItemFlag], list[str]]:
    """Return the item flags of a command line, and the words that are left. Raise ConfigError if one has no value."""
    lists = [(flag, model_in(flag.annotation)) for flag in known.values() if list in flag.kinds]
    places = {f"{flag.key}.": (flag.key, model) for flag, model in lists if model is not None}
    items, rest, left = list[ItemFlag](), list[str](), iter(words)
    for word in left:
        name, has_value, value = word.partition("=")
        prefix = next((one for one in places if _key(name).startswith(one)), None)
        if prefix is None or name in known:
            rest.append(word)
            continue
        text = value if has_value else next(left, "--")
        if not has_value and text.startswith("--"):
            raise ConfigError(f"flag '{name}' needs a value")
        items.append(ItemFlag(name, *places[prefix], name.removeprefix("--")[len(prefix) :], text))
    return items, rest


def _key(name: str) -> str:
    return name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
