"""Command lines that argparse reads: its parser, subcommands, and types of arguments."""

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from holdfast.errors import ConfigError, nearest

_NUMBER = re.compile(r"-?\d+")


class Parser(argparse.ArgumentParser):
    """Raises errors instead of exiting, so that they look like all others of the project. Takes no shortened flags."""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong. Raise ConfigError always."""
        flags = ", ".join(flag for flag in self._option_string_actions if flag.startswith("--") and flag != "--help")
        message += f". Flags are: {flags}" if message.startswith("unrecognized") else ""
        raise ConfigError(f"{message}. {self.prog} --help shows what is allowed.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - the stubs have overloads
        """Parse words as `argparse` does, also for `parse_args`. Raise ConfigError first for an unknown flag, with the
        nearest flag or all flags."""
        known = sorted(flag for flag in self._option_string_actions if flag.startswith("--") and flag != "--help")
        for flag in (word.partition("=")[0] for word in takewhile(lambda word: word != "--", args or ())):
            if flag.startswith("--") and flag not in (*known, "--help"):
                told = nearest(flag, known) or f" There are: {', '.join(known)}."
                raise ConfigError(f"unknown flag '{flag}'.{told} {self.prog} --help explains all flags.")
        return super().parse_known_args(args, namespace)


class Subcommands:
    """A parser with subcommands, which share the arguments of the parser `shared`.

    Commands that messages print begin with `prefix`, such as `uv run `."""

    def __init__(
        self, program: str, description: str, epilog: str, *, prefix: str = "", shared: Parser | None = None
    ) -> None:
        self._prefix = prefix
        self._epilog = epilog
        self._shared = shared or Parser(add_help=False)
        self._parser = Parser(prog=program, description=description, epilog=epilog)
        self._subparsers = self._parser.add_subparsers(dest="command", metavar="SUBCOMMAND")
        self._commands: dict[str, Parser] = {}

    def add(self, name: str, text: str, *, shares: bool = True) -> Parser:
        """Add a subcommand, and return its parser, which `shares` the arguments and the epilog of all."""
        more: dict[str, Any] = {"parents": [self._shared], "epilog": self._epilog} if shares else {}
        self._commands[name] = self._subparsers.add_parser(name, help=text, description=text, **more)
        return self._commands[name]

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Return the arguments; prints help and exits on -h.

        Returns:
            `command` (name of the subcommand), what is shared, and what the subcommand takes.

        Raise ConfigError for an unknown subcommand or flag (with the nearest spelling) or a bad value.
        """
        first = argv[0] if argv else "--help"
        if first in ("-h", "--help"):
            self._parser.parse_args([first])
        if first not in self._commands:
            raise self._without_subcommand(argv)
        arguments = self._parse_words(self._commands[first], argv[1:])
        arguments.command = first
        return arguments

    def _without_subcommand(self, argv: Sequence[str]) -> ConfigError:
        """Return the error that the first word is not a subcommand, with a line that has one: a later word, the nearest
        in spelling, or else the first that there is. A line that would be refused is left out."""
        first = argv[0]
        told = f"'{first}' comes before the subcommand."
        name, others = self.take_subcommand(argv)
        if name is None and not first.startswith("-"):
            near = nearest(first, self._commands)
            told = f"unknown subcommand '{first}'.{near}"
            name = next((one for one in self._commands if f"'{one}'" in near), None)
            is_word = first.isalpha() and len(others) > 1
            others = others[1:] if name or is_word or any(Path(one).is_dir() for one in others[1:]) else others
        directories = [one for one in others if Path(one).is_dir()]
        told += f" There are: {', '.join(self._commands)}. A subcommand comes first"
        first = name or next(iter(self._commands))
        for words in (others, directories[:1]) if name or len(directories) < 2 else (directories[:1],):
            with suppress(ConfigError):
                self._parse_words(self._commands[first], [one for one in words if one not in ("-h", "--help")])
                return ConfigError(f"{told}, as in\n  {self._prefix}{self._parser.prog} {shlex.join([first, *words])}")
        return ConfigError(f"{told}.")

    def take_subcommand(self, words: Sequence[str]) -> tuple[str | None, list[str]]:
        """Return the first word that is a subcommand, if there is such a word, and the other words."""
        at = next((place for place, word in enumerate(words) if word in self._commands), None)
        return (None, [*words]) if at is None else (words[at], [*words[:at], *words[at + 1 :]])

    def _parse_words(self, parser: Parser, words: list[str]) -> argparse.Namespace:
        """Parse the words after the name of a subcommand."""
        return parser.parse_intermixed_args(words)


def placed_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word that is not a flag, after the flag of several values that takes the word; after an empty text if
    the word is an argument. Values of other flags are left out."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, joined, _ = word.partition("=")
        if word == "--":
            yield from (("", word) for word in rest)
            return
        if not flag.startswith("-") or _NUMBER.fullmatch(word):
            yield "", word
            continue
        action = parser._option_string_actions.get(flag)
        if action is None or action.nargs == 0 or joined:
            continue
        if action.nargs != "+":
            del rest[:1]
        while action.nargs == "+" and rest and not rest[0].startswith("-"):
            yield flag, rest.pop(0)


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
