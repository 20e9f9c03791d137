"""Turns a command line into validated settings: defaults, then TOML files, the environment, and flags.

    sft @ base.toml @ more.toml --max-steps 20 --ckpt
    rl --trainer @ train.toml --orchestrator @ orch.toml --ckpt.interval 5

Files compose from left to right; `--section @ file` fills one section; variables win over files, flags over both. Every
error is one message that names the file, variable or flag, the dotted key, the value and what is allowed.

An unknown flag gets a suggestion: by its name in another system, by its last part, or by spelling.
"""

import json
import os
import shlex
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from holdfast.config.base import Command
from holdfast.config.by_type import ByType, by_type
from holdfast.config.files import TOO_DEEP, holds, read_file
from holdfast.config.flags import StrayWord, cut, flags_of, model_in
from holdfast.config.help import hint, hint_of_table, owners_of
from holdfast.errors import ConfigError, nearest
from holdfast.process.imports import to_type

C = TypeVar("C", bound=Command)
OriginOf = Callable[[str], str | None]

_MOST_LINES = 20
_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def parse_command_line(command: type[C], argv: list[str], program: str = "") -> C:
    """Return the validated configuration of `command` from flags, environment and files. Raise ConfigError if a file,
    key, type or value cannot be used.

    Args:
        program: the name of the command, for errors that print the right command line.

    Returns:
        A plain `command`: its copies and the processes that it is handed to read no source again.
    """
    from holdfast.config.sources import Sources  # pydantic-settings takes 0.2 s, which children do not need

    try:
        "".join(argv).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            "arguments must be text in UTF-8: rename the file that one names, or set LC_ALL=C.UTF-8 if it is right"
        ) from None
    sources = None
    try:
        sources = Sources(command, argv)
        settings = sources.settings()
    except ValidationError as error:
        assert sources is not None
        for path, data in sources.files:
            if owners := owners_of(data, program):
                told = f"{path} has settings of `{'` or `'.join(owners)}`, which `{program}` does not have. Write:"
                name = f"rl --{owners[0]}" if program == "rl" and owners[0] in command.model_fields else owners[0]
                raise ConfigError(f"{told}\n  {to_type(f'{name} @ {shlex.quote(path)}')}") from None
        raise ConfigError(_describe(error, command, sources.origin_of, sources.given)) from None
    except StrayWord as error:
        raise ConfigError(_describe_stray(error.args[0], command, program, argv)) from None
    except RecursionError:
        raise ConfigError(f"a value cannot be used: {TOO_DEEP}") from None
    config = command.model_construct(settings.model_fields_set, **dict(settings))
    config.note_given(sources.decided)
    return config


def _describe_stray(word: str, command: type[BaseModel], program: str, argv: list[str]) -> str:
    """Say what a word that belongs to no flag may stand for, by the whole command."""
    path, known, flag = Path(word), flags_of(command), None
    with suppress(OSError):  # a name that is too long
        if word.endswith(".toml"):
            flag = "@"
        elif path.suffix in _DATA_SUFFIXES and "--data.name" in known:
            flag = "--data.name"
        elif "--model.name" in known and (
            (path / "config.json").is_file() or (program == "inference" and os.sep in word)
        ):
            flag = "--model.name"
        elif "--run" in known:
            flag = "--run"
        elif os.sep in word and "--output-dir" in known:
            flag = "--output-dir"
    told = f"unexpected '{cut(word)}'. Settings are '--name value', files '@ file.toml'."
    before = argv[argv.index(word) - 1].replace("_", "-") if word in argv[1:] else ""
    if before in known and known[before].is_switch:
        told += f" {before} takes no value{'' if before.startswith('--no-') else ', or true or false'}."
    if f"--{word}".partition("=")[0].replace("_", "-") in known:
        told += f" Did you mean '--{cut(word)}'?"
    if flag is None or argv.count(word) != 1 or (flag == "--output-dir" and flag in argv):
        return told
    at = argv.index(word)
    files = ["@", "FILE.toml"] if flag == "--output-dir" and "@" not in argv and "--model.name" not in argv else []
    line = shlex.join([*files, *argv[:at], flag, *argv[at:]])
    return f"{told} Write:\n  {to_type(program)} {line}"


def _describe(error: ValidationError, command: type[BaseModel], origin_of: OriginOf, given: Mapping[str, str]) -> str:
    lines: dict[str, list[str]] = {}
    keys = [flag.key for flag in flags_of(command).values()]
    for finding in error.errors():
        location, model, choice = _resolve(finding["loc"], command)
        key = ".".join(map(str, location))
        if finding["type"] == "extra_forbidden":
            assert model is not None
            known = list(model.model_fields)
            if choice is not None and (said := choice.said(str(location[-1]), origin_of, given)) is not None:
                lines.setdefault(key, []).append(f"'{key}' {said}")
                continue
            others = [one for one in keys if not key.startswith(f"{one}.")]
            said = hint_of_table(key, keys) or nearest(str(location[-1]), known) or hint(key, others)
            said = said or f" Allowed here: {', '.join(known)}."
            text = f"unknown key '{key}'.{said}"
        else:
            value = finding["input"]
            # JSON in a variable may hold a secret, and a message may go into a log.
            is_hidden = key not in given and (_origin(key, origin_of) or "").startswith("variable ")
            shown = "" if is_hidden or isinstance(value, dict | BaseModel) else f", got {_shown(value)}"
            reason = finding["msg"].removeprefix("Value error, ").removeprefix("Input ")
            reason = reason.partition(", unable to parse string")[0]
            if finding["type"] == "missing":
                reason, shown = "is needed", ""
            if finding["type"] == "union_tag_invalid":
                assert choice is not None and "ctx" in finding
                key = f"{key}.{choice.chooser.key}"
                reason = choice.chooser.told(finding["ctx"]["tag"], choice.models)
            if finding["type"] in ("model_type", "union_tag_not_found"):  # pydantic names classes here
                reason = f"is a section: give its settings, as in --{key.replace('_', '-')}.NAME VALUE or [{key}]"
                if isinstance(location[-1], int) and model is not None:
                    entry = model_in(model.model_fields[str(location[-2])].annotation)
                    needed = (
                        [name for name, field in entry.model_fields.items() if field.is_required()] if entry else []
                    )
                    reason = f'is an object of settings, such as {{"{(*needed, "NAME")[0]}": VALUE}}'
            text = f"'{key}' {reason}{shown}" if key else reason
        lines.setdefault(key, []).append(text)
    shown = [_with_origin(key, _joined(key, texts), origin_of, given) for key, texts in lines.items()][:_MOST_LINES]
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
    return cut(text)


@dataclass(frozen=True)
class _Choice:
    """A section whose model its type chooses.

    Attributes:
        key: dotted, of the section.
        type: the chosen type; empty if the value chooses none.
    """

    key: str
    chooser: ByType
    models: Mapping[str, type[BaseModel]]
    type: str = ""

    def said(self, name: str, origin_of: OriginOf, given: Mapping[str, str]) -> str | None:
        """Return why a setting has no effect, if other types have it."""
        owners = [f"'{one}'" for one, model in self.models.items() if name in model.model_fields]
        if not owners:
            return None
        key = f"{self.key}.{self.chooser.key}".strip(".")
        usual = "the default" if self.type == self.chooser.default else ""
        by = origin_of(key) or usual
        listed = ", ".join(owners)
        way = f"Leave it out, or set {key} to {'one of these' if len(owners) > 1 else listed}"
        return f"has no effect with {key} = '{self.type}'{f' ({by})' if by else ''}: it belongs to {listed}. {way}"


def _resolve(
    location: tuple[int | str, ...], command: type[BaseModel]
) -> tuple[tuple[int | str, ...], type[BaseModel] | None, _Choice | None]:
    """Return the part of a pydantic location that names keys, the model that has the last of them, and how that model,
    or the model that is missing there, is chosen. The rest of a location names alternatives of a union, which a user
    never wrote."""
    model: type[BaseModel] | None = command
    parent: type[BaseModel] | None = command
    entries: type[BaseModel] | None = None
    open_choice = made = choice = None
    kept: list[int | str] = []
    for part in location:
        if open_choice is not None and isinstance(part, str):
            made, open_choice = replace(open_choice, type=part), None
            model = made.models[part]
        elif isinstance(part, int):
            kept.append(part)
        elif entries is not None:  # the name of a table, which the user chose
            kept.append(part)
            model, entries = entries, None
        elif model is None:
            break
        else:
            parent, kept, choice, made = model, [*kept, part], made, None
            info = model.model_fields.get(part)
            chosen = by_type(info) if info else None
            open_choice = _Choice(".".join(map(str, kept)), *chosen) if chosen else None
            entries = _model_of_entries(info.annotation) if info else None
            model = model_in(info.annotation) if info else None
    return tuple(kept), parent, open_choice or choice


def _model_of_entries(annotation: Any) -> type[BaseModel] | None:
    """Return the model of the tables in a table of them, `dict[str, X]`."""
    return model_in(typing.get_args(annotation)[1]) if typing.get_origin(annotation) is dict else None


def _with_origin(key: str, text: str, origin_of: OriginOf, given: Mapping[str, str]) -> str:
    """Put the flag, variable or file that gave a dotted key before a finding, by the longest part of the key."""
    if key in given and text.startswith(f"'{key}' "):  # the flag says the key
        said = text.removeprefix(f"'{key}' ")
        return f"{given[key]}: {said}" if said.startswith("there is") else f"{given[key]} {said}"
    # A finding of a whole section may be about a flag in it, beside what a file says.
    inside = [name for own, name in given.items() if own.startswith(f"{key}.")]
    named = list(dict.fromkeys([*filter(None, [_origin(key, origin_of)]), *inside]))
    return f"{', '.join(named)}: {text}" if named else text


def _origin(key: str, origin_of: OriginOf) -> str | None:
    """Return who gave the longest part of a dotted key that anybody gave."""
    parts = key.split(".")
    found = (origin_of(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    return next((origin for origin in found if origin is not None), None)


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
    data = read_file(str(path), str(path))
    try:
        return command.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_describe(error, command, lambda key: str(path) if holds(data, key) else None, {})) from None
