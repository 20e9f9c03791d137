"""Command lines that argparse reads: its parser, subcommands, and types of arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from holdfast.errors import ConfigError, nearest

_NUMBER = re.compile(r"-?\d+")


class Parser(argparse.ArgumentParser):
    """Raises errors instead of exiting, so that they look like all others of the project. Takes no shortened flags."""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong. Raise ConfigError always."""
        raise ConfigError(f"{message}. {self.prog} --help shows what is allowed.")


class Subcommands:
    """A parser with subcommands, which share the arguments of the parser `shared`."""

    def __init__(self, program: str, description: str, epilog: str, *, shared: Parser | None = None) -> None:
        self._epilog = epilog
        self._shared = shared or Parser(add_help=False)
        self._parser = Parser(prog=program, description=description, epilog=epilog)
        self._subparsers = self._parser.add_subparsers(dest="command", metavar="SUBCOMMAND")
        self._commands: dict[str, Parser] = {}

    def add(self, name: str, text: str) -> Parser:
        """Add a subcommand, and return its parser."""
        self._commands[name] = self._subparsers.add_parser(
            name, help=text, description=text, parents=[self._shared], epilog=self._epilog
        )
        return self._commands[name]

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Return the arguments; prints help and exits on -h.

        Returns:
            `command` (name of the subcommand), what is shared, and what the subcommand takes.

        Raise ConfigError for an unknown subcommand or flag (with the nearest spelling) or a bad value.
        """
        program, commands = self._parser.prog, self._commands
        first = argv[0] if argv else "--help"
        if first.startswith("-"):
            if first not in ("-h", "--help"):
                example = next(iter(commands))
                raise ConfigError(
                    f"'{first}' comes before the subcommand. Write it after, as in `{program} {example} {first} ...`."
                )
            self._parser.parse_args([first])
        _check_words(program, first, argv[1:], commands)
        arguments = self._parse_words(commands[first], argv[1:])
        arguments.command = first
        return arguments

    def _parse_words(self, parser: Parser, words: list[str]) -> argparse.Namespace:
        """Parse the words after the name of a subcommand."""
        return parser.parse_intermixed_args(words)


def first_positional(parser: argparse.ArgumentParser, words: Sequence[str]) -> str | None:
    """Return the first word that is neither a flag nor the value of a flag; None without any."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, joined, _ = word.partition("=")
        if word == "--":
            return rest[0] if rest else None
        if not flag.startswith("-") or _NUMBER.fullmatch(word):
            return word
        action = parser._option_string_actions.get(flag)
        if action is None or action.nargs == 0 or joined:
            continue
        del rest[:1]
        while action.nargs == "+" and rest and not rest[0].startswith("-"):
            del rest[:1]
    return None


def is_natural(text: str) -> bool:
    """Whether `text` is a number from 0 on, of at most 18 digits."""
    return text.isascii() and text.isdecimal() and len(text) < 19


def natural(text: str) -> int:
    """Parse a number from 0 on."""
    if not is_natural(text):
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Parse a number from 1 on."""
    if not (number := natural(text)):
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text!r}")
    return number


def add_json(parser: Parser) -> None:
    """Add the flag `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")


def _check_words(program: str, name: str, words: list[str], commands: Mapping[str, Parser]) -> None:
    if name not in commands:
        hint = nearest(name, commands)
        raise ConfigError(f"unknown subcommand '{name}'.{hint} There are: {', '.join(commands)}.")
    known = set(commands[name]._option_string_actions)
    for word in words:
        flag = word.split("=")[0]
        if flag.startswith("--") and flag not in known:
            raise ConfigError(f"unknown flag '{flag}'.{nearest(flag, known)} {program} {name} --help lists all flags.")
