"""The command `environments`: `check ID` checks an environment, `init NAME` creates one, `list` lists built-in ones.

ID is the value of `id` in `[[orchestrator.environments]]`. `init` writes a single-turn environment, a test that passes
as written, and settings for `rl`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import keyword
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.arguments import Subcommands, add_json, natural, positive
from holdfast.errors import ConfigError, RunDirError, nearest
from holdfast.process.imports import is_checkout, to_type

if TYPE_CHECKING:
    from holdfast.config.environments import EnvironmentConfig
    from holdfast.view.tables import Report

_EPILOG = (
    "ID is a built-in environment, `verifiers:ID`, or `module:Class`. `check ID @ run.toml ...` takes settings, model, "
    "length and seed from the files and flags of `rl`; ID is then the name or id of one of its environments."
)
_OF_CHECK = ("--num-tasks", "--json")
_OF_A_RUN = ("--args", "--seed", "--seq-len", "--history", "--model.name")


def main(argv: list[str]) -> int:
    """Run one subcommand; return 0, or 1 where `check` has found something. Raise HoldfastError for a mistake in the
    command, or an environment that cannot be loaded."""
    at = argv.index("@") if argv[:1] == ["check"] and "@" in argv else len(argv)
    of_run, of_check = _split(argv[at:])
    arguments = parse([*argv[:at], *of_check])
    if arguments.command == "list":
        _list().print(as_json=arguments.json)
        return 0
    if arguments.command == "init":
        create(arguments.name, Path.cwd()).print(as_json=False)
        return 0
    from holdfast.config.base import read_section
    from holdfast.config.environments import EnvironmentConfig

    given = {name: getattr(arguments, name) for name in ("id", "args", "history")}
    if at < len(argv):
        if own := [word for word in argv[:at] if word.partition("=")[0] in _OF_A_RUN]:
            raise ConfigError(f"{own[0]} and `@`: the settings of the run have that. Leave one of them out.")
        settings = _take_from_run(arguments, of_run)
    elif arguments.id is None:
        raise ConfigError(
            "environments check needs the ID of an environment, as in\n"
            f"  {to_type('environments check reverse_text')}\n"
            f"       `{to_type('environments list')}` lists the built-in environments."
        )
    else:
        settings = read_section(EnvironmentConfig, given)
    from holdfast.commands.environments_check import check

    report = check(
        settings, num_tasks=arguments.num_tasks, seed=arguments.seed, model=arguments.model, seq_len=arguments.seq_len
    )
    report.print(as_json=arguments.json)
    return report.exit_code


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the files and flags of `rl`, and the flags of `check` among them."""
    of_run, of_check, rest = list[str](), list[str](), iter(words)
    for word in rest:
        flag, joined, _ = word.partition("=")
        (of_check if flag in _OF_CHECK else of_run).append(word)
        if flag == "--num-tasks" and not joined:
            of_check += [value for value in [next(rest, None)] if value is not None]
    return of_run, of_check


def _list() -> Report:
    """Return the built-in environments, and how others are named."""
    from holdfast.orchestrator.env.registry import BUILT_IN, find_class
    from holdfast.view.tables import Grid, Report

    modules = {name: sys.modules[find_class(name, key="id").__module__] for name in BUILT_IN}
    rows = [(name, (module.__doc__ or "").partition("\n")[0]) for name, module in modules.items()]
    others = "Others: `module:Class` of your own, and `verifiers:ID`. docs/environments.md says more."
    return Report({"environments": dict(rows)}, [Grid(("id", "what it is"), rows), others])


def _take_from_run(arguments: argparse.Namespace, words: list[str]) -> EnvironmentConfig:
    """Return the environment `id` of a run with the settings `words`; put model, length and seed into `arguments`."""
    from holdfast.config import RlConfig
    from holdfast.config.load import parse_command_line
    from holdfast.config.rl import hand_down_shared
    from holdfast.run.settings import describe_variables

    parsed = parse_command_line(RlConfig, words)
    if parsed.variables:
        print("\n".join(describe_variables(parsed)), file=sys.stderr if arguments.json else sys.stdout)
    run = hand_down_shared(parsed).orchestrator
    labels = [section.label for section in run.environments]
    found = [one for one in run.environments if one.label == (arguments.id or one.label)]
    found = found or [one for one in run.environments if one.id == arguments.id]
    if len(found) > 1:
        told = f"'{arguments.id}' is the id of" if arguments.id else "the run has"
        raise ConfigError(f"{told} several environments: give a name, of {', '.join(labels)}.")
    if found:
        (section,) = found
        if section.curriculum is not None:
            raise ConfigError(
                f"environment '{section.label}' has a curriculum: check a level by {section.id} with the --args of it."
            )
        arguments.model, arguments.seed = run.model.tokenizer_name or None, run.seed
        arguments.seq_len = run.rollouts_of(section).seq_len
        return section
    if arguments.id is None:
        raise ConfigError("the run has no environment: orchestrator.environments is empty.")
    raise ConfigError(
        f"'{arguments.id}' is not an environment of the run.{nearest(arguments.id, labels)} Allowed: "
        f"{', '.join(labels) or 'none, as orchestrator.environments is empty'}."
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the arguments: `command` and what the subcommand takes. Raise ConfigError for an unusable argument."""
    subcommands = Subcommands("environments", "Environments of rl: check, begin, list.", _EPILOG, prefix=to_type(""))
    check = subcommands.add("check", "Find what would keep a run with an environment from resuming exactly.")
    check.add_argument("id", metavar="ID", nargs="?", help="with `@`, unset: the only environment of the run")
    check.add_argument("--args", type=_object, default={}, metavar="JSON", help="arguments of its constructor ({})")
    check.add_argument("--seed", type=natural, default=0, metavar="N", help="the seed of the run (0)")
    check.add_argument("--seq-len", type=positive, default=1024, metavar="N", help="most tokens of a session (1024)")
    check.add_argument(
        "--history",
        choices=("split", "keep"),
        default="split",
        help="where the template would rewrite earlier turns: as in the settings of a run (split)",
    )
    check.add_argument("--num-tasks", type=positive, default=32, metavar="N", help="tasks that are made (32)")
    check.add_argument("--model.name", dest="model", metavar="DIR", help="a model, for its tokenizer and chat template")
    add_json(check)
    init = subcommands.add("init", "Write an environment, a test of it and settings for rl into this directory.")
    init.add_argument("name", metavar="NAME", help="the module: letters, digits and _")
    add_json(subcommands.add("list", "List the built-in environments."))
    return subcommands.parse(argv)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON ({error}), got {text!r}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be an object such as {{"max_length": 6}}, got {text!r}')
    return value


def _project_of(directory: Path) -> str:
    """Return what `uv run` needs to find us from `directory`; nothing within our checkout."""
    checkout = Path(__file__).resolve().parents[3]
    return "" if directory.resolve().is_relative_to(checkout) else f"--project {shlex.quote(str(checkout))} "


# In braces: the name of the module, the name of its class, and how commands begin here (`run`).
_TEMPLATES = Path(__file__).parent / "templates"


def create(name: str, directory: Path) -> Report:
    """Write `NAME.py`, `test_NAME.py` and `NAME.toml` into `directory`, and say what to do with them. Raise
    ConfigError, before anything is written, if the name does not suit a module or is taken, or a file is there;
    RunDirError if they cannot be written."""
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name[0] == "_":
        raise ConfigError(
            f"'{name}' cannot be the name of a module: letters, digits and _ are allowed, a letter first, no word of "
            "Python, such as word_game"
        )
    cls = "".join(word[0].upper() + word[1:] for word in name.split("_") if word)
    project = _project_of(directory) if is_checkout() else ""
    run = to_type(project)
    paths = {
        directory / file: (_TEMPLATES / template).read_text("utf-8").format(name=name, cls=cls, run=run)
        for file, template in (
            (f"{name}.py", "module.txt"),
            (f"test_{name}.py", "test.txt"),
            (f"{name}.toml", "settings.txt"),
        )
    }
    if there := [path.name for path in paths if path.exists() or path.is_symlink()]:
        raise ConfigError(
            f"{', '.join(there)}: there already, so nothing was written. Choose another name, or move them away."
        )
    found = importlib.util.find_spec(name)
    if found is not None:
        raise ConfigError(
            f"the name '{name}' belongs to {found.origin or 'another module'}, which would be imported in the place of "
            "yours; nothing was written. Choose another name."
        )
    try:
        for path, text in paths.items():
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise RunDirError(f"{error.filename} cannot be written: {error.strerror or error}") from error
    lines = [
        f"wrote {', '.join(path.name for path in paths)}. What comes next:",
        f"  {f'uv run {project}--with pytest pytest' if run else 'python -m pytest'} test_{name}.py",
        f"  {run}environments check {name}:{cls}",
        f"  {run}rl @ {name}.toml",
    ]
    from holdfast.view.tables import Report

    return Report({}, lines)
