"""Turns a command line into validated settings: TOML files first, then flags.

    sft @ base.toml @ more.toml --max-steps 20 --ckpt
    rl --trainer @ train.toml --orchestrator @ orch.toml --ckpt.interval 5

Files compose from left to right; `--section @ file` fills one section; flags win over files. Every error is one message
that names the file or flag, the dotted key, the value and what is allowed.

An unknown flag gets a suggestion: by its name in another system, by its last part, or by spelling.
"""

from __future__ import annotations

import json
import re
import stat
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar

import tomli
import tomli_w
from pydantic import BaseModel, ValidationError

from holdfast.config.base import Command
from holdfast.config.help import hint
from holdfast.errors import ConfigError, nearest

C = TypeVar("C", bound=Command)

# Limits of a configuration file and of a message.
_MOST_BYTES = 16 << 20
_MOST_LINES = 20
_MOST_CHARACTERS = 300
_TOO_DEEP = "its values are nested too deeply"
# User and password of a URL.
_CREDENTIALS = re.compile(r"//[^/\s\"']*@")


@dataclass
class _Files:
    """The merged content of the TOML files, and which file each dotted key came from."""

    data: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, section: tuple[str, ...] = (), *, shown: str) -> None:
        content: Any = _read(path, shown)
        for name in reversed(section):
            content = {name: content}
        try:
            self.data = merged(self.data, content)
            self.origin |= dict.fromkeys(_dotted_keys(content), path)
        except RecursionError:
            raise ConfigError(f"{path} cannot be used: {_TOO_DEEP}") from None


def _dotted_keys(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _dotted_keys(value, f"{prefix}{key}.")


def _read(path: str, shown: str) -> dict[str, Any]:
    try:
        status = Path(path).stat()
        # A pipe without a writer would be waited for, and a device may have no end.
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{shown} is not a regular file, but a pipe or a device")
        if status.st_size > _MOST_BYTES:
            raise ConfigError(f"{shown} has {status.st_size} bytes, allowed are {_MOST_BYTES}")
        return tomli.loads(Path(path).read_bytes().decode())
    except FileNotFoundError:
        raise ConfigError(f"{shown}: there is no such file (from {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        # A storage that is away stays the cause: a process that reads its configuration is started again after it.
        raise ConfigError(f"{shown} cannot be read: {error}") from error
    except ValueError as error:  # tomli's own, and numbers of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} cannot be used: {_TOO_DEEP}") from None


def parse_command_line(command: type[C], argv: list[str]) -> C:
    """Return the validated configuration of `command`. Raise ConfigError if a file, key, type or value cannot be
    used."""
    try:
        "".join(argv).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            "arguments must be text in UTF-8: rename the file that one names, or set LC_ALL=C.UTF-8 if it is right"
        ) from None
    known = flags_of(command)
    files, words = _split_files(argv, known)
    given: dict[str, str] = {}
    try:
        values = _read_flags(words, known, given)
        for one, other in command.alternatives:
            if one in values and other not in values:
                files.data.pop(other, None)  # a flag wins over a file, also over an alternative setting there
        return command.model_validate(merged(files.data, values))
    except ValidationError as error:
        raise ConfigError(_describe(error, command, files, given)) from None
    except RecursionError:
        raise ConfigError(f"a value cannot be used: {_TOO_DEEP}") from None


@dataclass(frozen=True)
class Flag:
    """A setting as a flag.

    Attributes:
        key: dotted.
        annotation: of the field.
    """

    key: str
    annotation: Any

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
        return _model_in(self.annotation) is not None and not self.kinds & {list, dict}


def _kinds(annotation: Any) -> set[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, UnionType):
        return set().union(*map(_kinds, typing.get_args(annotation))) - {NoneType}
    return {origin or annotation}


def flags_of(command: type[BaseModel], prefix: str = "") -> dict[str, Flag]:
    """Return every flag of `command`, such as `--optim.lr`; a switch has a second one, `--no-`."""
    flags: dict[str, Flag] = {}
    for name, info in command.model_fields.items():
        flag = Flag(f"{prefix}{name}", info.annotation)
        word = flag.key.replace("_", "-")
        flags[f"--{word}"] = flag
        if flag.is_switch:
            flags[f"--no-{word}"] = flag
        if flag.is_section and (model := _model_in(info.annotation)) is not None:
            flags |= flags_of(model, f"{flag.key}.")
    return flags


def _read_flags(words: list[str], known: Mapping[str, Flag], given: dict[str, str]) -> dict[str, Any]:
    """Return the values of the flags, nested as their keys are.

    Args:
        given: gets dotted key -> flag as it was given.

    Raises:
        ConfigError: a word that is not a flag, a flag without its value, or a value that is not JSON and must be.
    """
    values: dict[str, Any] = {}
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
                raise ConfigError(f"flag '{name}' takes no value, and was given '{_cut(value)}'.")
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
        _put(values, flag.key, _value(flag, name, value))
    if unknown:
        keys = [flag.key for flag in known.values()]
        hints = [f"unknown flag '{name}'.{hint(name, keys)}" for name in dict.fromkeys(unknown)]
        raise ConfigError("\n       ".join(hints) + " --help lists the sections of settings, --help-all all flags.")
    if stray:
        raise ConfigError(f"unexpected '{_cut(stray)}'. Settings are '--name value', files '@ file.toml'.")
    return values


def _is_a_value(word: str) -> bool:
    return not word.startswith("-") or re.match(r"-[\d.]", word) is not None


def _value(flag: Flag, name: str, text: str) -> Any:
    """Return what the text of a flag stands for, as far as that does not need the type: pydantic reads numbers."""
    if text == "null" and type(None) in typing.get_args(flag.annotation):
        return None
    is_table, is_list = flag.is_section or dict in flag.kinds, bool(flag.kinds & {list, tuple})
    if is_table or (is_list and text.startswith(("[", "{"))):
        try:
            value = json.loads(text)
        except ValueError:
            others = f"by single settings ({name}.NAME VALUE), or by a file ({name} @ FILE.toml)"
            raise ConfigError(
                f"a value of {name} is not JSON: '{_cut(text)}'. Sections, tables and lists are given as JSON, "
                f"{others if flag.is_section else 'or in a file of the whole configuration (@ FILE.toml)'}."
            ) from None
        return [value] if is_list and not is_table and isinstance(value, dict) else value
    if is_list and str not in flag.kinds and text not in flag.words:
        return text.split(",")
    return text


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. Tables are merged, and a repeated list is continued."""
    *parents, last = key.split(".")
    for name in parents:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    before = values.get(last)
    if isinstance(value, dict) and isinstance(before, dict):
        values[last] = merged(before, value)
    else:
        values[last] = [*before, *value] if isinstance(value, list) and isinstance(before, list) else value


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above` in it, table by table."""
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def _split_files(argv: list[str], known: Mapping[str, Flag]) -> tuple[_Files, list[str]]:
    """Take every `@ file` and `--section @ file` out of `argv`."""
    files, flags = _Files(), []
    position = 0
    while position < len(argv):
        word = argv[position]
        if not word.startswith("@"):
            flags.append(word)
            position += 1
            continue
        path = word[1:] or (argv[position + 1] if position + 1 < len(argv) else "")
        position += 1 if word[1:] else 2
        if not path:
            raise ConfigError("'@' needs the path of a TOML file after it")
        section: tuple[str, ...] = ()
        if flags and flags[-1].startswith("--") and "=" not in flags[-1]:
            flag = known.get(flags[-1].replace("_", "-"))
            if flag is None or _model_in(flag.annotation) is not None:  # not a plain setting such as `--clean`
                section = tuple(flags.pop().removeprefix("--").replace("-", "_").split("."))
        files.add(path, section, shown=f"'@ {path}'")
    return files, flags


def _describe(error: ValidationError, command: type[BaseModel], files: _Files, given: dict[str, str]) -> str:
    lines: dict[str, list[str]] = {}
    keys = [flag.key for flag in flags_of(command).values()]
    for finding in error.errors():
        location, model = _resolve(finding["loc"], command)
        key = ".".join(map(str, location))
        if finding["type"] == "extra_forbidden":
            assert model is not None
            known = list(model.model_fields)
            said = nearest(str(location[-1]), known) or hint(key, keys) or f" Allowed here: {', '.join(known)}."
            text = f"unknown key '{key}'.{said}"
        else:
            value = finding["input"]
            shown = "" if isinstance(value, dict | BaseModel) else f", got {_shown(value)}"
            reason = finding["msg"].removeprefix("Value error, ").removeprefix("Input ")
            reason = reason.partition(", unable to parse string")[0]
            if finding["type"] == "missing":
                reason, shown = "is needed", ""
            if finding["type"] == "model_type":  # pydantic names classes here
                reason = f"is a section: give its settings, as in --{key.replace('_', '-')}.NAME VALUE or [{key}]"
                if any(isinstance(part, int) for part in location):
                    reason = 'is an object of settings, {"NAME": VALUE, ...}'
            text = f"'{key}' {reason}{shown}" if key else reason
        lines.setdefault(key, []).append(text)
    shown = [_with_origin(key, _joined(key, texts), files, given) for key, texts in lines.items()][:_MOST_LINES]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more like these")
    return "\n       ".join(shown)


def _joined(key: str, texts: list[str]) -> str:
    """Join the findings of the alternatives of one value: 'a' should be an integer, or 'x', got ..."""
    if len(texts) == 1:
        return texts[0]
    reasons = [text.removeprefix(f"'{key}' ").rsplit(", got ", 1)[0] for text in texts]
    _, with_got, got = texts[0].rpartition(", got ")
    return f"'{key}' {' or '.join(dict.fromkeys(reasons))}{with_got}{got if with_got else ''}"


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}" if isinstance(value, int | list | dict) else repr(value)
    return _CREDENTIALS.sub("//***@", _cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} … ({len(text)} characters)"


def _resolve(
    location: tuple[int | str, ...], command: type[BaseModel]
) -> tuple[tuple[int | str, ...], type[BaseModel] | None]:
    """Return the part of a pydantic location that names keys, and the model that has the last of them. The rest of a
    location names alternatives of a union, which a user never wrote."""
    model: type[BaseModel] | None = command
    parent: type[BaseModel] | None = command
    entries: type[BaseModel] | None = None
    kept: list[int | str] = []
    for part in location:
        if isinstance(part, int):
            kept.append(part)
        elif entries is not None:  # the name of a table, which the user chose
            kept.append(part)
            model, entries = entries, None
        elif model is None:
            break
        else:
            parent, kept = model, [*kept, part]
            info = model.model_fields.get(part)
            entries = _model_of_entries(info.annotation) if info else None
            model = _model_in(info.annotation) if info else None
    return tuple(kept), parent


def _model_of_entries(annotation: Any) -> type[BaseModel] | None:
    """Return the model of the tables in a table of them, `dict[str, X]`."""
    return _model_in(typing.get_args(annotation)[1]) if typing.get_origin(annotation) is dict else None


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation such as `X | None` or `list[X]` is about."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, UnionType, list):
        found = (_model_in(part) for part in typing.get_args(annotation) if part is not NoneType)
        return next((model for model in found if model), None)
    return None


def _with_origin(key: str, text: str, files: _Files, given: dict[str, str]) -> str:
    """Put the file or flag that gave a dotted key before a finding, by the longest part of the key that was given."""
    if key in given:  # the flag says the key
        return f"flag {given[key]} " + text.removeprefix(f"'{key}' ")
    parts = key.split(".")
    # A finding of a whole section may be about a flag in it, beside what a file says.
    flags = [f"flag {flag}" for own, flag in given.items() if own.startswith(f"{key}.")]
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in given:
            return f"flag {given[prefix]}: {text}"
        if prefix in files.origin:
            return f"{', '.join([files.origin[prefix], *flags])}: {text}"
    return f"{', '.join(flags)}: {text}" if flags else text


def to_toml(config: BaseModel) -> str:
    """Return the resolved configuration as TOML; unset values are left out."""
    return tomli_w.dumps(without_none(config.model_dump(mode="json")))


def without_none(value: Any) -> Any:
    """Return `value` without the entries of tables that are unset, which TOML cannot hold."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def read_toml(command: type[C], path: str | Path) -> C:
    """Return the configuration of `command` that `to_toml` wrote to `path`. Raise ConfigError if the file is missing or
    does not hold a valid configuration."""
    files = _Files()
    files.add(str(path), shown=str(path))
    try:
        return command.model_validate(files.data)
    except ValidationError as error:
        raise ConfigError(_describe(error, command, files, {})) from None
