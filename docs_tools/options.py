"""One page per command with every option it has: settings from the configuration models, flags from argparse.

`--help` says the same; the pages can be searched and linked to.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from holdfast import config
from holdfast.cli import COMMANDS
from holdfast.config.base import Command
from holdfast.config.evaluation import EvaluateConfig
from holdfast.config.resolved import is_free

SETTINGS: dict[str, type[Command]] = {
    **{name: getattr(config, model) for name, (_, _, model) in COMMANDS.items() if model is not None},
    "evaluate": EvaluateConfig,
}
"""Command -> the model that its settings are read into."""

FORMS = {"evaluate": ["--compare"]}
"""Command -> flags that make another command line of it, with a parser of its own."""

EXAMPLES = {
    "sft": ("data.md", "sft @ configs/reverse_text/sft.toml --ckpt.interval 50"),
    "dpo": ("preferences.md", "dpo @ configs/reverse_text/dpo.toml --ckpt.interval 20"),
    "reward-model": ("preferences.md", "reward-model @ configs/reverse_text/reward_model.toml --ckpt.interval 20"),
    "rl": ("rl_training.md", "rl @ configs/reverse_text/rl.toml --ckpt.interval 10 --ckpt.resume-step auto"),
    "trainer": (
        "guarantees.md",
        "trainer @ configs/reverse_text/train.toml --output-dir outputs/by_hand --max-steps 20",
    ),
    "orchestrator": ("guarantees.md", "orchestrator @ configs/reverse_text/orch.toml --output-dir outputs/by_hand"),
    "inference": ("guarantees.md", "inference @ configs/reverse_text/infer.toml"),
    "evaluate": ("evaluation.md", "evaluate --run outputs/reverse_text_rl --num-tasks 64"),
    "ckpt": ("checkpoints.md", "ckpt verify --output-dir outputs/reverse_text_sft"),
    "environments": ("environments.md", "environments check reverse_text"),
    "rollouts": ("journal.md", "rollouts stats --output-dir outputs/reverse_text_rl"),
}
"""Command -> the page that tells about it, and a command line to begin with; each finds what those before it left."""

_DOCS = Path(__file__).parent.parent / "docs"
_RESUMES = {"sft", "dpo", "reward-model", "trainer", "orchestrator", "inference"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_CODE_OF_PAGE = re.compile(r"\bdocs/(\w+)\.md")


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
    return list(_tables_of(SETTINGS[command], "", "", False, command))


def _tables_of(model: type[BaseModel], key: str, text: str, is_off: bool, command: str) -> Iterator[Table]:
    settings, below = [], []
    for name, info in model.model_fields.items():
        place = f"{key}.{name}" if key else name
        inner = _model_in(info.annotation)
        if inner is None or _default(info) not in ("unset", ""):
            free = is_free(place) if command in _RESUMES else None
            settings.append(Setting(place, kind(info), _default(info) or "unset", _one_line(info.description), free))
        if inner is not None:
            below.append((inner[0], place + inner[1], _one_line(info.description), _default(info) == "unset"))
    yield Table(key, text, settings, is_off)
    for inner_model, place, description, inner_off in below:
        page = next((name for name, other in SETTINGS.items() if other is inner_model and name != command), None)
        if page is not None:
            yield Table(place, description, [], inner_off, page)
        else:
            yield from _tables_of(inner_model, place, description, inner_off, command)


def _model_in(annotation: Any) -> tuple[type[BaseModel], str] | None:
    """Return the model that an annotation is about, and what stands between its name and a key of the model."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return next((found for part in parts if (found := _model_in(part))), None)
    if origin is list and (inner := _model_in(parts[0])):
        return inner[0], "[]" + inner[1]
    if origin is dict and (inner := _model_in(parts[1])):
        return inner[0], ".NAME" + inner[1]
    return None


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


def _default(info: FieldInfo) -> str:
    """Return the default as TOML has it; `unset` for none, an empty string for that of a model."""
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None:
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


def parser_of(command: str, *words: str) -> argparse.ArgumentParser:
    """Return the parser that `command --help` would print.

    Raises:
        TypeError: it prints no help by argparse.
    """
    module, _, function = COMMANDS[command][1].partition(":")
    action = getattr(importlib.import_module(f"holdfast.{module}"), function)
    asked: list[argparse.ArgumentParser] = []
    before = argparse.ArgumentParser.print_help
    argparse.ArgumentParser.print_help = lambda self, file=None: asked.append(self)
    try:
        action(["--help", *words])
    except SystemExit:
        pass
    finally:
        argparse.ArgumentParser.print_help = before
    if not asked:
        raise TypeError(f"{command} --help shows no parser, so there is nothing to make its page of")
    return asked[0]


def _title(page: str) -> str:
    """Return the heading of a page of docs/."""
    return (_DOCS / page).read_text().splitlines()[0].removeprefix("# ")


def page(command: str) -> str:
    """Return the Markdown of a command's page."""
    lines = [f"# {command}", "", _linked(COMMANDS[command][0]), ""]
    if command in EXAMPLES:
        guide, line = EXAMPLES[command]
        lines += ["```console", f"uv run {line}", "```", "", f"How it is used: [{_title(guide)}](../{guide}).", ""]
    if command in SETTINGS:
        lines += _settings_page(command)
    else:
        lines += _parser_page(parser_of(command), command, level=2)
    for form in FORMS.get(command, []):
        parser = parser_of(command, form)
        lines += [f"## {command} {form}", "", parser.description or "", "", *_flags(parser)]
    return "\n".join(lines) + "\n"


def _settings_page(command: str) -> list[str]:
    lines = [
        f"`{command} @ file.toml --section.key value`: files fill from left to right, flags win. In a file a key is",
        "written as it is here, as a flag with `-` for `_`. A setting that is true or false is also",
        "`--key` and `--no-key`.",
        "",
    ]
    if command in _RESUMES:
        lines += [
            "**On resume**, `free` settings may be changed and nothing that is computed changes. Of the others a",
            "resume says which differ and what follows; some are refused:",
            "[what happens when](../checkpoints.md#what-happens-when).",
            "",
        ]
    if command == "rl":
        lines += [
            "What `rl` hands down to its processes may change **on resume** as their pages say: [trainer](trainer.md),",
            "[orchestrator](orchestrator.md), [inference](inference.md).",
            "",
        ]
    for table in tables(command):
        if table.key:
            off = " (Off unless it is given.)" if table.is_off else ""
            lines += [f"## `{table.key}`", "", _linked(table.text) + off, ""]
        if table.elsewhere:
            lines += [f"The settings of [{table.elsewhere}]({table.elsewhere}.md), behind `{table.key}.`.", ""]
        elif table.settings:
            lines += [*_rows(table.settings), ""]
    return lines


def _rows(settings: list[Setting]) -> list[str]:
    free = settings[0].is_free is not None
    head = ["key", "type", "default", *(["on resume"] if free else []), "what it does"]
    rows = [
        [f"`{s.key}`", s.kind, f"`{s.default}`", *(["free" if s.is_free else ""] if free else []), _linked(s.text)]
        for s in settings
    ]
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _linked(text: str) -> str:
    """Turn the pages that a help text names into links; `<` and `*` stay what they are."""
    text = text.replace("``", "`")
    parts = re.split(r"(`[^`]*`)", text)
    plain = [part if part.startswith("`") else part.replace("<", "&lt;").replace("*", "\\*") for part in parts]
    return _CODE_OF_PAGE.sub(lambda match: f"[{match[1]}](../{match[1]}.md)", "".join(plain))


def _parser_page(parser: argparse.ArgumentParser, name: str, *, level: int) -> list[str]:
    subcommands = {
        word: child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for word, child in action.choices.items()
    }
    lines = [parser.description or "", ""] if not subcommands else []
    lines += _flags(parser)
    for word, child in subcommands.items():
        lines += [f"{'#' * level} {name} {word}", "", *_parser_page(child, f"{name} {word}", level=level + 1)]
    if parser.epilog and not subcommands:
        lines += [_linked(parser.epilog), ""]
    return lines


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    left_out = argparse._HelpAction | argparse._SubParsersAction
    actions = [action for action in parser._actions if not isinstance(action, left_out)]
    if not actions:
        return []
    rows = [[_written(action), _linked(_one_line(action.help))] for action in actions]
    return [_row(["argument", "what it does"]), _row(["---", "---"]), *map(_row, rows), ""]


def _written(action: argparse.Action) -> str:
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    metavar = action.metavar or choices
    value = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    name = ", ".join(action.option_strings)
    if not name:
        return f"`{value}`"
    return f"`{name} {value}`" if action.nargs != 0 else f"`{name}`"


def index() -> str:
    """Return the Markdown of the page with every key, and the commands that have it."""
    found: dict[str, dict[str, str]] = {}
    for command in SETTINGS:
        for table in tables(command):
            for setting in table.settings:
                anchor = f"#{re.sub(r'[^a-z0-9_-]', '', table.key.lower())}" if table.key else ""
                found.setdefault(setting.key, {})[command] = f"[{command}]({command}.md{anchor})"
    lines = [
        "# Every setting",
        "",
        "Each key that a TOML file or a flag can set, and the commands that have it. `rl` has those of `trainer`,",
        "`orchestrator` and `inference` behind these words: `trainer.loss.type`. `[]` stands for every item of a list,",
        "`NAME` for a name that you choose.",
        "",
        _row(["key", "commands"]),
        _row(["---", "---"]),
    ]
    lines += [_row([f"`{key}`", ", ".join(links.values())]) for key, links in sorted(found.items())]
    return "\n".join(lines) + "\n"
