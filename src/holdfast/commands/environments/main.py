"""The command `environments`: list environments, begin a new one, and check one.

`ls`, `init NAME` and `check ID`. ID is what `id` is in `[[orchestrator.environments]]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from holdfast.commands.subcommands import Subcommands, add_json

_EPILOG = "ID is a built-in environment, one of a package, `reasoning_gym:NAME`, `verifiers:ID`, or `module:Class`."


def main(argv: list[str]) -> int:
    """Run one subcommand; return 0, or 1 where `check` has found something.

    Raises:
        HoldfastError: a mistake in the command, or an environment that cannot be loaded.
    """
    arguments = parse(argv)
    if arguments.command == "ls":
        from holdfast.commands.environments.listing import listing

        listing().print(as_json=arguments.json)
        return 0
    if arguments.command == "init":
        from holdfast.commands.environments.scaffold import create

        create(arguments.name, Path.cwd()).print(as_json=False)
        return 0
    from holdfast.shared.config.environments import EnvironmentConfig

    settings = EnvironmentConfig(id=arguments.id, args=arguments.args, history=arguments.history)
    from holdfast.commands.environments.check import check

    report = check(
        settings, num_tasks=arguments.num_tasks, seed=arguments.seed, model=arguments.model, seq_len=arguments.seq_len
    )
    report.print(as_json=arguments.json)
    return report.exit_code


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the arguments: `command` and what the subcommand takes.

    Raises:
        ConfigError: one that cannot be used.
    """
    return _subcommands().parse(argv)


def _subcommands() -> Subcommands:
    subcommands = Subcommands("environments", "Environments of rl: list, begin, check.", _EPILOG, of_a_run=False)
    add_json(subcommands.add("ls", "List what is built in and what installed packages bring."))
    init = subcommands.add("init", "Write an environment, a test of it and settings for rl into this directory.")
    init.add_argument("name", metavar="NAME", help="the module: letters, digits and _")
    check = subcommands.add("check", "Find what would keep a run with an environment from resuming exactly.")
    check.add_argument("id", metavar="ID")
    check.add_argument("--args", type=_object, default={}, metavar="JSON", help="arguments of its constructor ({})")
    check.add_argument("--seed", type=_natural, default=0, metavar="N", help="the seed of the run (0)")
    check.add_argument("--seq-len", type=_positive, default=1024, metavar="N", help="most tokens of a session (1024)")
    check.add_argument(
        "--history",
        choices=("split", "keep"),
        default="split",
        help="where the template would rewrite earlier turns: as in the settings of a run (split)",
    )
    check.add_argument("--num-tasks", type=_positive, default=32, metavar="N", help="tasks that are made (32)")
    check.add_argument("--model.name", dest="model", metavar="DIR", help="a model, for its tokenizer and chat template")
    add_json(check)
    return subcommands


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON ({error}), got {text!r}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be an object such as {{"max_length": 6}}, got {text!r}')
    return value


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not (number := _natural(text)):
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text!r}")
    return number
