"""The RUN of a command that looks at runs: its first argument, or the only run below `outputs`.

    ckpt verify outputs/mine 20        step 20 of the run in outputs/mine
    ckpt verify 20                     step 20 of the only run below outputs, if there is no directory `20`
    ckpt verify                        every step of the only run below outputs
    ckpt verify outputs/mine/checkpoints/step_20      step 20 of the run in outputs/mine

`--output-dir` names the directory of a run that a command makes. Commands that look refuse it, and flags such as
`--run` and `--step`, and print the command with the arguments.
"""

import os
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from holdfast.arguments import Parser, Subcommands, add_json, placed_words
from holdfast.errors import ConfigError, printable
from holdfast.process.imports import to_type
from holdfast.run.run_dir import OF_RUN, RunDir

HOME = Path("outputs")
"""The commands look for runs below this directory if no argument names a run."""
_DEPTH = 3
_MOST_DIRECTORIES, _MOST_LISTED, _MOST_NAMED = 5000, 20, 5
_STEP_WORD = re.compile(r"latest|all|-1|(?:step_)?([0-9]{1,18})(?:[-:]([0-9]{1,18}))?")
_STEP_NAME = re.compile(r"step_\d+(\.\d+)?")
_OUTPUT_DIR = ("output_dir", "outputdir", "run")


class RunSubcommands(Subcommands):
    """Subcommands that look at one run: each takes RUN first, and `--json`."""

    def __init__(self, program: str, description: str, epilog: str) -> None:
        shared = Parser(add_help=False)
        add_run(shared)
        add_json(shared)
        epilog += " If the first word is a STEP and not a directory, RUN is the only run below outputs."
        super().__init__(program, description, epilog, prefix=to_type(""), shared=shared)

    def parse(self, argv: list[str]) -> Namespace:
        """Return the arguments, with the directory of the run as `run`. Raise ConfigError also for `--output-dir`, or
        if no run or several runs are meant."""
        name, words = self.take_subcommand(argv)
        if name or words[:1] == [] or words[0].startswith("-"):
            refuse_flags(self._commands[name or next(iter(self._commands))], words)
        return super().parse(argv)

    def _parse_words(self, parser: Parser, words: list[str]) -> Namespace:
        return parse_run(parser, words, takes_steps=True)


def add_run(parser: Parser) -> None:
    """Add the argument RUN, for `parse_run`."""
    told = "the run's directory (unset: the only run below outputs)"
    parser.add_argument("run", type=Path, metavar="[RUN]", help=told)


def parse_run(parser: Parser, words: list[str], *, takes_steps: bool = False) -> Namespace:
    """Parse the words of a command that looks at one run; `run` is its directory. `takes_steps`: a first word may be a
    step. Raise ConfigError for a bad word, or if no run or several runs are meant."""
    placed = list(placed_words(parser, words))
    word, run = next((word for flag, word in placed if not flag), None), None
    if word is None:
        for flag, value in placed:
            if os.sep in value or RunDir(Path(value)).holds_run():
                others = [one for one in words if one != value]
                raise ConfigError(
                    f"{flag} takes '{value}' as one of its values. RUN comes first:\n"
                    f"  {command_line(parser.prog, Path(value), others)}"
                )
    else:
        if takes_steps and _is_step_directory(word):
            run = next((path for path in Path(word).parents if RunDir(path).holds_run()), Path(word).parent)
        elif not (takes_steps and _is_step(word)):
            return parser.parse_intermixed_args(words)
        if late := next((one for flag, one in placed if not flag and RunDir(Path(one)).holds_run()), None):
            others = [one for one in words if one != late]
            raise ConfigError(f"RUN comes before the steps:\n  {command_line(parser.prog, Path(late), others)}")
    arguments = parser.parse_intermixed_args([os.curdir, *words])  # first: a mistake in the other words
    arguments.run = run or only_run(parser.prog, words)
    return arguments


def steps_of(text: str, there: Sequence[int]) -> Sequence[int] | None:
    """Return the steps that a STEP argument means; None if the text is not a number, a span, `latest` or `all`.
    `there`: the steps that there are, ascending."""
    match = _STEP_WORD.fullmatch(text)
    if match is None:
        return None
    if text == "all":
        return there
    if match[1] is None:
        return there[-1:] or [0]
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def _is_step(word: str) -> bool:
    return _STEP_WORD.fullmatch(word) is not None and not os.path.isdir(word)  # noqa: PTH112 - a name may be too long


def _is_step_directory(word: str) -> bool:
    path = Path(word)
    return _STEP_NAME.fullmatch(path.name) is not None and path.is_dir() and not RunDir(path).holds_run()


def only_run(command: str, words: Sequence[str], *, takes_evaluations: bool = False) -> Path:
    """Return the only run below `outputs`, for a command whose words name none. `takes_evaluations`: directories of
    `evaluate` count, too. Raise ConfigError if no run is there, or several runs are. The error holds a command line."""
    found = all_runs(command, words, takes_evaluations=takes_evaluations)
    if len(found) == 1:
        return found[0]
    listed = [f"  {printable(path)}" for path in found[:_MOST_LISTED]]
    listed += [f"  and {len(found) - _MOST_LISTED} more"] if len(found) > _MOST_LISTED else []
    raise ConfigError(
        f"{command} needs one run, and there are {len(found)} below {HOME}. The newest first:\n"
        + "\n".join(listed)
        + f"\nName the run, such as the newest:\n  {command_line(command, found[0], words)}"
    )


def all_runs(command: str, words: Sequence[str], *, takes_evaluations: bool = False) -> list[Path]:
    """Return all runs below `outputs`, the newest first. Raise ConfigError without any. Arguments as `only_run`."""
    found = [path for path in runs_below(HOME) if takes_evaluations or not is_evaluation(path)]
    if not found:
        raise ConfigError(
            f"there is no run below {HOME} (from {Path.cwd()}). Name the directory of a run, such as "
            f"`{command_line(command, Path('DIRECTORY'), words)}`. `sft`, `dpo`, `reward-model` and `rl` make runs: "
            f"`{to_type('rl @ configs/reverse_text/rl.toml')}`."
        )
    return found


def runs_below(directory: Path) -> list[Path]:
    """Return `directory` and directories up to three levels below it with a run or an evaluation, the newest first."""
    budget = iter(range(_MOST_DIRECTORIES))
    found = {path.resolve(): path for path in _runs_in(directory, _DEPTH, budget)}
    return sorted(found.values(), key=_changed, reverse=True)


def _runs_in(directory: Path, depth: int, budget: Iterator[int]) -> Iterator[Path]:
    if next(budget, None) is None:
        return
    with suppress(OSError):  # nobody may read it, or it is removed at this moment
        is_run = RunDir(directory).holds_run()
        if is_run:
            yield directory
        for path in sorted(directory.iterdir()) if depth else ():
            if path.is_dir() and not path.name.startswith(".") and not (is_run and path.name in OF_RUN):
                yield from _runs_in(path, depth - 1, budget)


def _changed(run: Path) -> float:
    """Return when a run was last started, or trained a step."""
    times = [0.0]
    for name in ("run.json", "run.lock", "metrics.jsonl"):
        with suppress(OSError):
            times.append((run / name).stat().st_mtime)
    return max(times)


def is_evaluation(path: Path) -> bool:
    """Whether the directory is of `evaluate`."""
    return (path / "config" / "evaluate.toml").exists()


def no_run(path: Path, lacks: str = "no run.json") -> ConfigError:
    """Return the error that `path`, which lacks something, holds no run; it names runs that are there."""
    path = path.relative_to(here) if path.is_relative_to(here := Path.cwd()) else path
    if os.path.lexists(path):
        told = f"{path} holds no run: it has {lacks} (from {here})."
    else:
        told = f"there is no directory {path} (from {here})."
    place, below = path, runs_below(path)
    if not below:
        place, below = HOME, runs_below(HOME)
    names = [printable(one) for one in below[:_MOST_NAMED]]
    names += [f"{len(below) - _MOST_NAMED} more"] if len(below) > _MOST_NAMED else []
    there = f" Below {place} there {'are' if len(names) > 1 else 'is'}: {', '.join(names)}." if names else ""
    return ConfigError(f"{told} Name the output directory of a run.{there}")


def refuse_flags(parser: Parser, argv: Sequence[str]) -> None:
    """Refuse `--output-dir`, and flags with the name of an argument, such as `--step`. Raise ConfigError with the whole
    command to type, or else with the other mistake in that command."""
    given: dict[str, list[str]] = {action.dest: [] for action in parser._actions if not action.option_strings}
    runs, others, refused, words = next(iter(given)), list[str](), list[str](), iter(argv)
    for word in words:
        flag, joined, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        dest = runs if name in _OUTPUT_DIR else next((one for one in given if one.rstrip("s") == name.rstrip("s")), "")
        if not dest or not flag.startswith("--") or flag in parser._option_string_actions:
            others.append(word)
            continue
        refused.append(flag)
        given[dest].append(
            (value if joined else next(words, "")) or ("DIRECTORY" if dest == runs else dest.rstrip("s").upper())
        )
    if not refused:
        return
    run = (given.pop(runs) or [None])[0]
    if run is None:
        run = next((word for flag, word in placed_words(parser, others) if not flag and not _is_step(word)), None)
        others = [word for word in others if word != run]
    for values in given.values():
        word = next((word for flag, word in placed_words(parser, others) if not flag), None)
        if not values and word is not None:  # flags gave arguments that come after the argument
            values.append(word)
            del others[others.index(word)]
    words = [*([] if run is None else [_typed(run)]), *chain.from_iterable(given.values()), *others]
    told = f"{parser.prog} takes {refused[0].strip('-')} as an argument, not by a flag."
    if old := [flag for flag in refused if flag.startswith("--output")]:
        told = (
            f"{parser.prog.split()[0]} takes the run as its first argument, not by {old[0]}, which names the "
            "directory of a new run."
        )
    try:
        parser.parse_intermixed_args(words if run else [os.curdir, *words])
    except ConfigError as error:
        raise ConfigError(f"{told} Also: {error}") from None
    raise ConfigError(f"{told} The command is:\n  {to_type(shlex.join([*parser.prog.split(), *words]))}")


def command_line(command: str, run: Path, words: Sequence[str] = ()) -> str:
    """Return the line to type that runs a command on a run; `words` are its other words."""
    return to_type(f"{command} {shlex.join([_typed(str(run)), *words])}")


def _typed(run: str) -> str:
    """Return the name of a directory as RUN, which is neither a flag nor a step."""
    return os.path.join(os.curdir, run) if run.startswith("-") or _STEP_WORD.fullmatch(run) else run  # noqa: PTH118 - a Path drops the dot
