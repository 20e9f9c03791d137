"""One page per command with every option it has: settings from the configuration models, flags from argparse.

`--help` says the same; the pages can be searched and linked to.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from docs_tools.listing import SETTINGS, Setting, tables
from holdfast.cli import COMMANDS, run

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
    "ckpt": ("checkpoints.md", "ckpt verify outputs/reverse_text_sft"),
    "environments": ("environments.md", "environments check reverse_text"),
    "rollouts": ("files.md", "rollouts stats outputs/reverse_text_rl"),
}
"""Command -> the page that tells about it, and a command line to begin with; each finds what those before it left."""

_DOCS = Path(__file__).parent.parent / "docs"
_RESUMES = {"sft", "dpo", "reward-model", "trainer", "orchestrator", "inference"}
_LONG_KEY = 28
_CODE_OF_PAGE = re.compile(r"\bdocs/(\w+)\.md")


def parser_of(command: str, *words: str) -> argparse.ArgumentParser:
    """Return the parser that `command --help` would print.

    Raises:
        TypeError: it prints no help by argparse.
    """
    asked: list[argparse.ArgumentParser] = []
    before = argparse.ArgumentParser.print_help
    argparse.ArgumentParser.print_help = lambda self, file=None: asked.append(self)
    try:
        run(command, ["--help", *words])
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
    lines = [f"# {command}", "", linked(COMMANDS[command][0]), ""]
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
            lines += [f"## `{table.key}`", "", linked(table.text) + off, ""]
        if table.elsewhere:
            lines += [f"The settings of [{table.elsewhere}]({table.elsewhere}.md), behind `{table.key}.`.", ""]
        elif table.settings:
            lines += [*table_of(table.settings), ""]
    return lines


def table_of(settings: list[Setting]) -> list[str]:
    free = settings[0].is_free is not None
    head = ["key", "type", "default", *(["on resume"] if free else []), "what it does"]
    rows = [
        [cell_of(s.key), s.kind, f"`{s.default}`", *(["free" if s.is_free else ""] if free else []), linked(s.text)]
        for s in settings
    ]
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def cell_of(key: str) -> str:
    """Return the cell of a key; a long key may break before its last part, so that its table fits the page."""
    before, dot, last = key.rpartition(".")
    return f"`{key}`" if len(key) < _LONG_KEY else f"<code>{before}{dot}<wbr>{last}</code>"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def linked(text: str) -> str:
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
        lines += [linked(parser.epilog), ""]
    return lines


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    left_out = argparse._HelpAction | argparse._SubParsersAction
    actions = [action for action in parser._actions if not isinstance(action, left_out)]
    if not actions:
        return []
    rows = [[_written(action), linked(" ".join((action.help or "").split()))] for action in actions]
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
