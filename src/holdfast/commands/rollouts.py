"""The command `rollouts`: shows the answers of an RL run, and exports them as JSON lines or Parquet.

`read [RUN] [STEP ...]`, which is meant without a subcommand, `show [RUN] [STEP] [--problem I]`, `trace [RUN] STEP
INDEX`, `stats [RUN] [STEP ...]` and `export [RUN] [STEP ...] --to FILE`. The command verifies every batch against its
manifest before it shows or writes anything. An export has one rollout per line or row.
"""

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from holdfast.arguments import Parser, positive
from holdfast.commands.rollouts_trace import trace
from holdfast.errors import CheckpointError, ConfigError, RunDirError
from holdfast.protocol.rollouts import Batch, Rollout, Sampling, list_packed
from holdfast.run import atomic
from holdfast.run.atomic import is_gone
from holdfast.run.choose_run import RunSubcommands, steps_of
from holdfast.run.journal import STATE_NAME, Counts, dropped_by_reason, read_accepted
from holdfast.run.run_dir import RunDir
from holdfast.view import answers as view
from holdfast.view.tables import Grid, Report, number, working


def _rows(answers: Iterable[view.Answer]) -> Iterator[dict[str, Any]]:
    """Yield all of each rollout: its fields by the names of the journal, and what `rollouts read` shows."""
    for answer in answers:
        rollout = msgspec.to_builtins(answer.rollout, enc_hook=list_packed)
        row = answer.row()
        shown = {name: row[name] for name in row if name not in ("task", "sample", "metrics", "step_rewards")}
        yield shown | rollout.pop("sampling") | rollout


_SHOWN, _MAX_CHARACTERS, _PARQUET_ROWS = 10, 2000, 1000
_NEWLINE = "\n               | "
_EPILOG = (
    "STEP is a number, `latest`, or the path of a batch such as RUN/discarded/attempt_2/rollouts/step_9. "
    "STEPS is also a span such as 3-7 or 3:7, or `all`. A batch stays until the oldest checkpoint needs it no more."
)


def main(argv: list[str]) -> int:
    """Run one subcommand; return 0, or 1 when a batch is damaged. Raise HoldfastError for a mistake in the command, or
    something that is missing or damaged."""
    arguments = parse(argv)
    run_dir = RunDir(arguments.run)
    if arguments.command == "read":
        report = read(
            run_dir, steps=[*arguments.steps, *arguments.step], choice=_choice_of(arguments), is_full=arguments.full
        )
    elif arguments.command == "show":
        report = show(run_dir, step=arguments.step, problem=arguments.problem)
    elif arguments.command == "trace":
        report = trace(run_dir, step=arguments.step, index=arguments.index, server=arguments.server)
    elif arguments.command == "stats":
        report = stats(run_dir, steps=arguments.steps)
    else:
        choice = _choice_of(arguments)
        report = export(run_dir, steps=[*arguments.steps, *arguments.step], to=arguments.to, choice=choice)
    report.print(as_json=arguments.json)
    return report.exit_code


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the arguments: `command`, `run`, `json`, and what the subcommand takes. Raise ConfigError for others."""
    subcommands = RunSubcommands("rollouts", "Look into the rollouts that an rl run trains on.", _EPILOG)
    read_parser = subcommands.add("read", "Read answers: prompt, answer, right answer, reward, advantage.")
    read_parser.add_argument("steps", nargs="*", metavar="STEPS", help="the newest batch if unset")
    _add_choice(read_parser)
    read_parser.add_argument("--full", action="store_true", help="do not cut long texts")
    show_parser = subcommands.add("show", "Show the problems of one batch, or the rollouts of one problem.")
    show_parser.add_argument("step", nargs="?", default="latest", metavar="STEP", help="the newest (latest) if unset")
    show_parser.add_argument("--problem", type=int, metavar="I", help="show all turns of problem I, counted from 0")
    trace_parser = subcommands.add("trace", "Show which weights and which request sampled each token of one rollout.")
    trace_parser.add_argument("step", metavar="STEP")
    trace_parser.add_argument("index", type=int, metavar="INDEX", help="place of the rollout in its batch, from 0")
    trace_parser.add_argument(
        "--server", metavar="URL", help="have this server, which has the weights, sample it again, and compare"
    )
    stats_parser = subcommands.add("stats", "Show a line of numbers per batch.")
    stats_parser.add_argument("steps", nargs="*", metavar="STEPS", help="all batches if unset")
    export_parser = subcommands.add("export", "Write rollouts to a file, one per line or row.")
    export_parser.add_argument("steps", nargs="*", metavar="STEPS", help="all batches if unset")
    export_parser.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="new file: FILE.parquet, or FILE.jsonl (JSON lines)"
    )
    _add_choice(export_parser)
    return subcommands.parse(_with_subcommand(argv))


_SUBCOMMANDS = ("read", "show", "trace", "stats", "export")


def _with_subcommand(argv: list[str]) -> list[str]:
    """Return the words with the subcommand first: `RUN export ...` is `export RUN ...`, and `RUN ...` reads."""
    first, second = [*argv, "", ""][:2]
    if first in (*_SUBCOMMANDS, "", "-h", "--help"):
        return argv
    if second in _SUBCOMMANDS:
        return [second, first, *argv[2:]]
    is_meant = Path(first).is_dir() or steps_of(first, []) is not None or first.startswith("--")
    return ["read", *argv] if is_meant and not set(argv) & set(_SUBCOMMANDS) else argv


def _add_choice(parser: Parser) -> None:
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", nargs="?", type=positive, const=_SHOWN, metavar="N", help="the N lowest rewards (10)")
    order.add_argument("--best", nargs="?", type=positive, const=_SHOWN, metavar="N", help="the N highest rewards (10)")
    order.add_argument("--sort", metavar="FIELD", help="the smallest first, such as advantage; --sort=-tokens: largest")
    parser.add_argument(
        "--where", metavar="TEXT", help="only answers for which this is true: 'reward < 0.2 and truncated'"
    )
    parser.add_argument("--environment", metavar="NAME", help="only answers of this environment")
    parser.add_argument("--step", action="append", default=[], metavar="STEPS", help="the same as STEPS")
    parser.add_argument("--limit", type=positive, metavar="N", help="at most so many answers")


def _choice_of(arguments: argparse.Namespace) -> view.Choice:
    order = "-reward" if arguments.best else "reward" if arguments.worst else arguments.sort
    return view.Choice(
        where=view.Expression(arguments.where, key="--where") if arguments.where is not None else None,
        environment=arguments.environment,
        sort=view.Expression(order, key="--sort") if order is not None else None,
        limit=arguments.limit or arguments.worst or arguments.best,
    )


def read(run_dir: RunDir, *, steps: Sequence[str], choice: view.Choice, is_full: bool = False) -> Report:
    """Show the answers of some batches, at most ten if `choice` says no other number. Raise as `show`; ConfigError for
    an environment or a field that no answer has."""
    directories = view.find_batches(run_dir, steps or ["latest"])
    text = view.text_of(run_dir)
    answers = list(view.read_answers(directories, text))
    found = view.choose(answers, choice)
    shown = found[: choice.limit or _SHOWN]
    batches = ", ".join(str(view.step_of(directory)) for directory in directories[:_SHOWN])
    more = ", ..." if len(directories) > _SHOWN else ""
    title = f"{len(shown):,} of {len(answers):,} answers of batch {batches}{more}"
    title += f"; {len(found):,} are meant" if len(found) < len(answers) else ""
    parts: list[Grid | str] = [title]
    if text.reason:
        parts.append(f"token ids are shown, since {text.reason}")
    for answer in shown:
        parts += ["", *_lines_of(answer, is_full=is_full)]
    document = {"batches": [str(one) for one in directories], "answers": len(answers), "found": len(found)}
    return Report(document | {"no_text": text.reason or None, "shown": [one.row() for one in shown]}, parts)


def _lines_of(answer: view.Answer, *, is_full: bool) -> Iterator[str]:
    rollout, parts = answer.rollout, view.shown_parts(answer)
    yield (
        f"step {answer.step}, {rollout.environment} task {rollout.task_id}, sample {rollout.sample_index}: "
        f"reward {number(rollout.reward)}, advantage {number(answer.advantage)}"
        f"{f', {parts}' if parts else ''}"
    )
    trained = answer.trained_reward
    if trained is not None and trained != rollout.reward:
        yield f"  trained as   | reward {number(trained)}"
    prompt, told = answer.texts()
    yield f"  prompt       | {_laid_out(prompt, is_full=is_full, keeps_end=True)}"
    yield f"  answer       | {_laid_out(told, is_full=is_full)}"
    if rollout.right_answer:
        yield f"  right answer | {_laid_out(rollout.right_answer, is_full=is_full)}"
    turns = f" in {answer.value('turns')} turns" if answer.value("turns") > 1 else ""
    yield f"  ended        | {answer.ended}, after {answer.value('tokens'):,} sampled tokens{turns}"


def _laid_out(text: str, *, is_full: bool, keeps_end: bool = False) -> str:
    text = text.replace("\n", _NEWLINE)
    if is_full or len(text) <= _MAX_CHARACTERS:
        return text
    left_out = f"... {len(text) - _MAX_CHARACTERS:,} characters more: --full ..."
    return f"{left_out} {text[-_MAX_CHARACTERS:]}" if keeps_end else f"{text[:_MAX_CHARACTERS]} {left_out}"


def show(run_dir: RunDir, *, step: str, problem: int | None) -> Report:
    """Show the problems of one batch, or every turn of one of its problems. Raise CheckpointError if the batch is not
    there, or damaged; ConfigError if the problem does not exist, or STEP means several batches."""
    directory = view.find_batch(run_dir, "show", step)
    batch = view.read_batch_at(directory)
    groups = view.problems_of(batch)
    if problem is None:
        return _show_batch(directory, batch, groups)
    if not 0 <= problem < len(groups):
        raise ConfigError(f"--problem {problem}: batch {batch.step} has the problems 0 to {len(groups) - 1}.")
    return _show_problem(batch, problem, groups[problem], view.text_of(run_dir))


def _show_batch(directory: Path, batch: Batch, groups: list[list[Rollout]]) -> Report:
    lines = [_line(group) for group in groups]
    document = {
        "path": str(directory), "step": batch.step, "policy_version": batch.policy_version,
        "weights_digest": batch.weights_digest, "older_digests": batch.older_digests,
        "teacher_digest": batch.teacher_digest,
        "sampling": {name: msgspec.to_builtins(sampling) for name, sampling in _samplings(batch).items()},
        "metrics": batch.metrics, "dropped": msgspec.to_builtins(batch.dropped),
        "problems": [
            {"problem": index, "environment": group[0].environment, "task_id": group[0].task_id, **line}
            for index, (group, line) in enumerate(zip(groups, lines, strict=True))
        ],
    }  # fmt: skip
    rows = [
        (str(index), group[0].environment, str(group[0].task_id), *_cells(line))
        for index, (group, line) in enumerate(zip(groups, lines, strict=True))
    ]
    title = f"batch {batch.step}, sampled by {view.sampler_of(batch)}{_at(batch)}"
    parts: list[Grid | str] = [title, Grid((">problem", "environment", ">task", *_COLUMNS), rows)]
    if batch.dropped:
        dropped = [
            (one.reason, one.environment, str(one.task_id), f"{one.rollouts:,}", f"{one.tokens:,}", one.detail)
            for one in batch.dropped
        ]
        columns = ("dropped", "environment", ">task", ">rollouts", ">tokens", "detail")
        parts += ["", Grid(columns, dropped)]
    return Report(document, parts)


def _samplings(batch: Batch) -> dict[str, Sampling]:
    """Return the distribution that each environment's tokens were sampled from."""
    return {rollout.environment: rollout.sampling for rollout in batch.rollouts}


def _at(batch: Batch) -> str:
    samplings = _samplings(batch)
    if len(set(samplings.values())) == 1:
        return f" at {batch.rollouts[0].sampling}"
    return "".join(f"\n  {name} at {sampling}" for name, sampling in samplings.items())


def _show_problem(batch: Batch, index: int, group: list[Rollout], text: view.TextOf) -> Report:
    shown = [
        {
            "sample_index": rollout.sample_index,
            "reward": rollout.reward,
            "truncated": rollout.truncated,
            "versions": msgspec.to_builtins(rollout.versions),
            "metrics": rollout.metrics,
            "step_rewards": rollout.step_rewards.rewards.tolist() if rollout.step_rewards else None,
            "branches": len(rollout.branch_starts),
            "turns": [
                {"sampled": sampled, "branch": number, "token_ids": ids, "text": text.decode(ids)}
                for number, branch in enumerate(rollout.branches)
                for sampled, ids in rollout.stretches(branch)
            ],
        }
        for rollout in group
    ]
    first = group[0]
    document = {"step": batch.step, "problem": index, "environment": first.environment, "task_id": first.task_id}
    parts: list[Grid | str] = [f"batch {batch.step}, problem {index}: task {first.task_id} of {first.environment}"]
    if text.reason:
        parts.append(f"token ids are shown, since {text.reason}")
    for line in shown:
        marks = ", truncated" if line["truncated"] else ""
        marks += f", {line['branches']} branches" if line["branches"] > 1 else ""
        head = f"sample {line['sample_index']}: reward {number(line['reward'])}"
        steps = line["step_rewards"]
        shown_steps = f", {len(steps)} steps: {' '.join(map(number, steps))}" if steps else ""
        parts += ["", f"{head}{marks}{shown_steps}"]
        branch = 0
        for turn in line["turns"]:
            what = "sampled" if turn["sampled"] else "given  " if turn["branch"] == branch else "anew   "
            branch = turn["branch"]
            parts.append(f"  {what} | {view.shown_text(turn['text'], turn['token_ids'])}")
    return Report(document | {"no_text": text.reason or None, "rollouts": shown}, parts)


_COLUMNS = (">rollouts", ">reward mean", ">std", ">tokens mean", ">sampled", ">truncated", "versions")


def _line(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the numbers of some rollouts; the deviation is of these rollouts (population)."""
    rewards = [rollout.reward for rollout in rollouts]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return {
        "rollouts": len(rollouts),
        "reward_mean": mean,
        "reward_std": (sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards))) ** 0.5,
        "tokens": sum(lengths),
        "tokens_mean": sum(lengths) / max(1, len(lengths)),
        "sampled_tokens": sum(rollout.loss_mask.num_sampled for rollout in rollouts),
        "truncated": sum(rollout.truncated for rollout in rollouts),
        "versions": sorted({span.version for rollout in rollouts for span in rollout.versions}),
    }


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    numbers = (number(line[name]) for name in ("reward_mean", "reward_std", "tokens_mean"))
    rollouts, *sampled = (f"{line[name]:,}" for name in ("rollouts", "sampled_tokens", "truncated"))
    return (rollouts, *numbers, *sampled, ", ".join(map(str, line["versions"])))


def _shown_reasons(dropped: Mapping[str, Counts]) -> str:
    return ", ".join(f"{counts.problems:,} {reason}" for reason, counts in dropped.items()) or "none"


def _ledger(directory: Path, step: int) -> tuple[dict[str, Any], str]:
    """Return what the orchestrator's state after a batch counts, as a document and as a line."""
    accepted = read_accepted(directory / STATE_NAME, step=step)
    counts = {"accepted": accepted.drawn, "batched": accepted.batched, "dropped": accepted.dropped}
    document = {"step": step, **msgspec.to_builtins(counts)}
    line = (
        f"up to batch {step}: {accepted.problems:,} problems accepted, {accepted.batched.problems:,} in batches, "
        f"dropped: {_shown_reasons(accepted.dropped)}"
    )
    return document, line


def stats(run_dir: RunDir, *, steps: Sequence[str]) -> Report:
    """Show a line per batch, and what was accepted and dropped up to the last one; damaged ones are problems."""
    directories = view.find_batches(run_dir, steps or ["all"])
    lines: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []
    problems: list[str] = []
    ledger: dict[str, Any] = {}
    total = ""
    for directory in directories:
        try:
            batch = view.read_batch_at(directory)
            ledger, total = _ledger(directory, batch.step)
        except CheckpointError as error:
            if is_gone(directory):  # the trainer has just removed it
                continue
            problems.append(f"{directory.name} is damaged: {error}")
            lines.append({"step": view.step_of(directory), "path": str(directory), "status": "damaged"})
            rows.append((str(view.step_of(directory)), "damaged", *("-" for _ in range(len(_COLUMNS) + 3))))
            continue
        line = _line(batch.rollouts)
        names = sorted({rollout.environment for rollout in batch.rollouts})
        num_problems = len(view.problems_of(batch))
        dropped = dropped_by_reason(batch.dropped)
        lines.append({
            "step": batch.step, "path": str(directory), "status": "committed", "policy_version": batch.policy_version,
            "weights_digest": batch.weights_digest, "problems": num_problems, "environments": names,
            "dropped": msgspec.to_builtins(dropped), **line,
        })  # fmt: skip
        cells = (*_cells(line), _shown_reasons(dropped), ", ".join(names))
        rows.append((str(batch.step), "committed", f"{num_problems:,}", *cells))
    grid = Grid((">step", "status", ">problems", *_COLUMNS, "dropped", "environments"), rows)
    parts: list[Grid | str] = [grid, *([total] if total else [])] if rows else [f"no batches in {run_dir.rollouts}"]
    document = {"rollouts": str(run_dir.rollouts), "batches": lines, "ledger": ledger, "problems": problems}
    return Report(document, parts, problems)


def export(run_dir: RunDir, *, steps: Sequence[str], to: Path, choice: view.Choice) -> Report:
    """Write the rollouts of some batches to a new file, or nothing. Raise CheckpointError if a batch is damaged or
    there are none; ConfigError if the file exists, or its name has another ending; RunDirError if it cannot be written.
    """
    if to.suffix not in ("", ".jsonl", ".ndjson", ".parquet"):
        raise ConfigError(f"--to {to}: an export is FILE.jsonl (JSON lines) or FILE.parquet, not '{to.suffix}'.")
    if to.exists():
        raise ConfigError(f"--to {to} exists already; nothing is written over. Name a new file.")
    directories = view.find_batches(run_dir, steps or ["all"])
    if not directories:
        raise CheckpointError(f"there is no batch in {run_dir.rollouts} to export.")
    temporary = atomic.temporary_sibling(to)
    answers: Iterable[view.Answer] = view.read_answers(directories, view.text_of(run_dir))
    if choice != view.Choice():  # else batch by batch, which takes little memory
        answers = view.choose(answers, choice)[: choice.limit]
    try:
        atomic.make_directory(to.parent.absolute())
        try:
            with working(f"writing {to}"), open(temporary, "wb") as file:
                count = (_write_parquet if to.suffix == ".parquet" else _write_lines)(_rows(answers), file)
            atomic.fsync_file(temporary)
            os.rename(temporary, to)
        finally:
            temporary.unlink(missing_ok=True)
        atomic.fsync_directory(to.parent)
    except OSError as error:
        raise RunDirError(f"{to} cannot be written: {error.strerror or error}") from None
    document = {"path": str(to), "batches": len(directories), "rollouts": count, "size_bytes": to.stat().st_size}
    return Report(document, [f"wrote {to}: {count:,} rollouts of {len(directories)} batches"])


def _write_lines(rows: Iterable[dict[str, Any]], file: BinaryIO) -> int:
    count = 0
    for row in rows:
        file.write(msgspec.json.encode(row) + b"\n")
        count += 1
    return count


def _write_parquet(rows: Iterator[dict[str, Any]], file: BinaryIO) -> int:
    """Write a column per field, and a column `metrics/NAME` per part of the rewards."""
    import pyarrow
    from pyarrow import parquet

    tables = []
    for part in iter(lambda: list(islice(rows, _PARQUET_ROWS)), []):
        flat = [row | {f"metrics/{name}": value for name, value in row.pop("metrics").items()} for row in part]
        names = dict.fromkeys(name for row in flat for name in row)
        tables.append(pyarrow.table({name: pyarrow.array([row.get(name) for row in flat]) for name in names}))
    table = pyarrow.concat_tables(tables, promote_options="permissive") if tables else pyarrow.table({})
    parquet.write_table(table, file, compression="zstd")
    return table.num_rows
