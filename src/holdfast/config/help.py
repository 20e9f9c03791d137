"""The help of the commands whose settings come from `holdfast.config`, and hints for unknown flags.

    rl --help                what the command does, examples, the settings that people change, the sections
    rl --help trainer.loss   one section
    rl --help-all            every setting

It reads `settings.json` and imports neither pydantic nor the settings themselves.
"""

import difflib
import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tomli

from holdfast.config.files import leaves
from holdfast.errors import ConfigError, nearest

_FILE = Path(__file__).with_name("settings.json")
_FIRST = Path(__file__).with_name("help.toml")
_ELSEWHERE = Path(__file__).with_name("elsewhere.toml")
_SIMILAR = 0.75
_MOST_COLUMNS = 120
_INDENT = "  "
VARIABLE_PREFIX = "HOLDFAST_"


def first(command: str) -> dict[str, list[str]]:
    """Return what the help of a command shows first: its `examples`, and the `settings` that people change."""
    return tomli.loads(_FIRST.read_text(encoding="utf-8"))[command]


def is_asked(argv: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return any(word in ("-h", "--help", "--help-all") for word in argv)


def text(command: str, summary: str, argv: Sequence[str]) -> str:
    """Return the help that `argv` asks for. `summary`: what the command does, in a sentence. Raise ConfigError if no
    section has that name."""
    sections = _sections(command)
    width = min(_MOST_COLUMNS, shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns)
    if "--help-all" in argv:
        return "\n\n".join(_section(name, sections[name], width) for name in sections)
    place = next(position for position, word in enumerate(argv) if word in ("-h", "--help"))
    asked = argv[place + 1].strip("-").replace("-", "_") if place + 1 < len(argv) else ""
    if not asked or asked.startswith("@"):
        return _screen(command, summary, sections, width)
    keys = [one["key"] for table in sections.values() for one in table["settings"]]
    # A section or a setting by its key, else each by the last part of its key.
    for fits in (str.__eq__, lambda key, name: key.endswith(f".{name}")):
        whole = tuple(name for name in sections if name and fits(name, asked))
        if found := [name for name in sections if name in whole or name.startswith(_inside(whole))]:
            return "\n\n".join(_section(name, sections[name], width) for name in found)
        if named := [key for key in keys if fits(key, asked)]:
            tables = {
                name: [one for one in table["settings"] if one["key"] in named] for name, table in sections.items()
            }
            return "\n\n".join(
                _section(name, {**sections[name], "settings": found}, width) for name, found in tables.items() if found
            )
    said = nearest(asked, [*sections]) or hint(asked, keys)
    raise ConfigError(
        f"--help {argv[place + 1]}: {command} has no such section or setting.{said} `{command} --help` lists the "
        "sections."
    )


def _inside(sections: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}{end}" for name in sections for end in ".[")


def _sections(command: str) -> dict[str, dict[str, Any]]:
    """Return the tables of a command by their key, without what `rl` hands down to its processes."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    sections: dict[str, dict[str, Any]] = {}

    def add(tables: Iterable[dict[str, Any]], prefix: str, left_out: Sequence[str]) -> None:
        for table in tables:
            key = table["key"]
            if any(key == name or key.startswith(f"{name}.") for name in left_out if name != "model"):
                continue
            whole = f"{prefix}.{key}".strip(".")
            if table["elsewhere"]:
                process = table["elsewhere"]
                hidden = content["shared"].get(whole, ()) if command == "rl" else ()
                add(content["commands"][process], whole, hidden)
                continue
            settings = [one for one in table["settings"] if not _is_hidden(one["key"], left_out)]
            named = [{**one, "key": f"{prefix}.{one['key']}".strip(".")} for one in settings]
            if named:
                sections[whole] = {**table, "settings": named}

    add(content["commands"][command], "", ())
    return sections


def owners_of(data: Mapping[str, Any], program: str) -> list[str]:
    """Return the commands that know every setting of a file; an empty list if `program` knows them, or has no name."""
    owners = []
    for command in json.loads(_FILE.read_text(encoding="utf-8"))["commands"]:
        keys = [one["key"] for table in _sections(command).values() for one in table["settings"]]
        if all(any(_is_or_has(key, leaf) for key in keys) for leaf in leaves(data)):
            owners.append(command)
    return [] if program in ("", *owners) else owners


def _is_or_has(key: str, leaf: str) -> bool:
    """Whether a leaf of a file is a setting, a list or section of settings, or an entry of a table."""
    is_entry = leaf.startswith(f"{key.partition('.NAME')[0]}.")
    return key == leaf or is_entry or key.startswith((f"{leaf}.", f"{leaf}["))


def _is_hidden(key: str, hidden: Sequence[str]) -> bool:
    # `rl` hands down the name and the tokenizer of the model; the rest is each process's own.
    return key in hidden or ("model" in hidden and key in ("model.name", "model.tokenizer"))


def _screen(command: str, summary: str, sections: dict[str, dict[str, Any]], width: int) -> str:
    by_key = {one["key"]: one for table in sections.values() for one in table["settings"]}
    off = {one["key"] for table in sections.values() if table["is_off"] for one in table["settings"]}
    lines = [
        f"usage: {command} [@ FILE.toml ...] [--SECTION @ FILE.toml ...] [--section.key VALUE ...]",
        "",
        summary,
        "",
    ]
    lines += ["examples:", *(f"{_INDENT}uv run {example}" for example in first(command)["examples"]), ""]
    lines.append("settings that people change (default):")
    for key in first(command)["settings"]:
        if key in by_key:
            one = by_key[key]
            value = "" if one["default"] == "unset" else _plain(one["default"])
            # For a section that is off, the defaults are the defaults of a bare `--section`.
            default = f" ({'off; ' if key in off else ''}{value})" if value else ""
            begin = f"{_INDENT}{_flag(key)}{default}"
            told = one["text"].split(". ")[0].split("; ")[0].rstrip(".")
            lines.append(_cut(f"{begin:<46} {told}", width))
    counts = [f"{name or '(top)'} {len(table['settings'])}" for name, table in sections.items() if name]
    lines += ["", "sections, with the number of their settings:"]
    lines += textwrap.wrap(
        "   ".join(text.replace(" ", "\N{NO-BREAK SPACE}") for text in counts),
        width,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_on_hyphens=False,
    )
    lines += ["", f"`{command} --help SECTION` shows a section, `{command} --help-all` every setting."]
    lines.append(f"A setting may be a variable, too: {variable_of(first(command)['settings'][0])} (a flag wins).")
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def _section(name: str, table: dict[str, Any], width: int) -> str:
    head = f"[{name}] {table['text']}".strip() if name else "settings of the command itself"
    lines = textwrap.wrap(head, width)
    for one in table["settings"]:
        lines += ["", f"{_INDENT}{_flag(one['key'])}   {one['kind']}; default {_plain(one['default'])}"]
        lines += textwrap.wrap(one["text"], width, initial_indent=_INDENT * 3, subsequent_indent=_INDENT * 3)
    return "\n".join(lines)


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}" if "[" not in key and ".NAME" not in key else key


def _plain(default: str) -> str:
    return default.strip('"')


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1].rstrip()}…"


@cache
def names_elsewhere() -> dict[str, Any]:
    """Return name in another system -> `settings` here, the hint `said` if the command has none of them, and in some a
    remark `beside` the setting."""
    return tomli.loads(_ELSEWHERE.read_text(encoding="utf-8"))


def hint_of_table(name: str, known: Iterable[str]) -> str:
    """Return the hint for a name in another system; an empty string for other names. Arguments as of `hint`."""
    keys, given, names = list(known), _dotted(name), names_elsewhere()
    parts = given.split(".")
    for begin in range(len(parts)):
        entry = names.get(".".join(parts[begin:]))
        if entry is None or (begin > 0 and entry.get("only_at_top")):
            continue
        said = entry["said"]
        found = next((one for one in entry["settings"] if one in keys and one != given), None)
        beside = f" {entry['beside']}." if "beside" in entry else ""
        return f" Did you mean '{_as_given(found, name)}'?{beside}" if found else f" Here {said}." if said else ""
    return ""


def _dotted(name: str) -> str:
    return name.removeprefix(VARIABLE_PREFIX).replace("__", ".").lstrip("-").replace("-", "_").lower()


def hint(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?``, a sentence with a space before it, or an empty string for an unknown setting.

    Args:
        name: as it was given, dotted, with or without dashes.
        known: the dotted keys of the command.
    """
    keys, given = list(known), _dotted(name)
    parts = given.split(".")
    if any(".".join(parts[begin:]) in names_elsewhere() for begin in range(len(parts))):
        return hint_of_table(name, keys)
    by_end = sorted((one for one in keys if one.rpartition(".")[2] == parts[-1]), key=lambda one: (len(one), one))
    if by_end:
        return f" Did you mean {' or '.join(repr(_as_given(one, name)) for one in by_end[:3])}?"
    similar = difflib.get_close_matches(given, keys, n=1, cutoff=_SIMILAR)
    similar = similar or difflib.get_close_matches(parts[-1], [one for one in keys if "." not in one], 1, _SIMILAR)
    return f" Did you mean '{_as_given(similar[0], name)}'?" if similar else ""


def variable_of(key: str) -> str:
    """Return the environment variable of a dotted key: `HOLDFAST_OPTIM__LR` of `optim.lr`."""
    return VARIABLE_PREFIX + key.upper().replace(".", "__")


def _as_given(key: str, name: str) -> str:
    if name.startswith(VARIABLE_PREFIX):
        return variable_of(key)
    return f"--{key.replace('_', '-')}" if name.startswith("--") else key
