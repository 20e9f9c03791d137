"""The command `report [RUN ...]`: one HTML file about one or several runs, built from their files.

The page holds plotly.js and loads nothing. `holdfast.view.serve` serves it while a run is trained.
"""

import argparse
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tomli_w
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from holdfast.arguments import Parser
from holdfast.errors import ConfigError, DataError, HoldfastError, printable
from holdfast.protocol.rollouts import Batch, Rollout
from holdfast.run import atomic
from holdfast.run.choose_run import only_run, refuse_flags
from holdfast.run.journal import read_batch
from holdfast.run.settings import flat_settings
from holdfast.view.answers import Answer, TextOf, problems_of, read_answers, shown_parts, text_of
from holdfast.view.charts import LEARNING, SPEED, Chart, charts_of, evaluation_charts, others, phase_charts, timeline_of
from holdfast.view.follow import short_names
from holdfast.view.run_data import RunData, read_run

MAX_BATCHES = 4
MAX_ANSWERS = 300
_GROUPS_OF_A_BATCH = 2
_MAX_TOKENS = 300
_MAX_CHARACTERS = 200
_MAX_PROMPT, _MAX_ANSWER = 400, 800
_CONTEXT_TOKENS = 6
_MAX_ROWS = 200
_SHOWN_METRICS = ("reward/mean", "loss", "val/loss", "rewards/accuracies")
_HERE = Path(__file__).parent


class SampleRollout(NamedTuple):
    """One rollout to show.

    Attributes:
        advantage: its reward minus the mean of its group.
        tokens: the first tokens: their text, and the log-probability of a sampled one.
        num_left_out: how many more there are.
    """

    step: int
    rollout: Rollout
    advantage: float
    tokens: list[tuple[str, float | None]]
    num_left_out: int


def sample_rollouts(run: RunData) -> tuple[list[SampleRollout], list[str]]:
    """Return the best and worst rollouts of the groups that differ most, of a few batches, and what was not read."""
    there = run.run_dir.published_batches()
    if not there:
        return [], []
    wanted = {there[round((len(there) - 1) * part / (MAX_BATCHES - 1))] for part in range(MAX_BATCHES)}
    text = text_of(run.run_dir)
    notes = [f"texts cannot be shown: {text.reason}"] if text.reason else []
    found: list[SampleRollout] = []
    for step in sorted(wanted, reverse=True):
        try:
            found += _samples_of(read_batch(run.run_dir, step), text)
        except (HoldfastError, OSError) as error:  # it is damaged, or the trainer has just removed it
            if not atomic.is_gone(run.run_dir.batch(step)):
                notes.append(f"batch {step} is left out: {error}")
    return found, notes


def _samples_of(batch: Batch, text: TextOf) -> Iterator[SampleRollout]:
    groups = [sorted(group, key=lambda one: one.reward) for group in problems_of(batch)]
    groups.sort(key=lambda group: group[0].reward - group[-1].reward)
    for group in groups[:_GROUPS_OF_A_BATCH]:
        mean = sum(one.reward for one in group) / len(group)
        for one in [group[-1], group[0]] if len(group) > 1 else group:
            token_ids, sampled, logprobs = list(one.token_ids), list(one.loss_mask), list(one.logprobs)
            pieces = enumerate(_pieces(token_ids[:_MAX_TOKENS], text))
            tokens = [(piece, logprobs[at] if sampled[at] else None) for at, piece in pieces]
            left_out = max(0, len(token_ids) - _MAX_TOKENS)
            yield SampleRollout(batch.step, one, one.reward - mean, tokens, left_out)


def _pieces(token_ids: Sequence[int], text: TextOf) -> list[str]:
    """Return what each token adds to the text: a token may be a part of a character."""
    pieces = []
    for at, token_id in enumerate(token_ids):
        before = token_ids[max(0, at - _CONTEXT_TOKENS) : at]
        head, whole = text.decode(before), text.decode([*before, token_id])
        if head is None or whole is None:
            pieces.append(f"{token_id} ")
            continue
        piece = whole[len(head) :] if whole.startswith(head) else text.decode([token_id]) or ""
        pieces.append(piece if len(piece) <= _MAX_CHARACTERS else f"{piece[:_MAX_CHARACTERS]}…")
    return pieces


class ShownAnswer(NamedTuple):
    """A row of the table of answers; `cut` is how many characters its texts lack."""

    answer: Answer
    parts: str
    prompt: str
    text: str
    cut: int


def newest_answers(run: RunData) -> list[ShownAnswer]:
    """Return the answers of the newest batches, some hundreds. `sample_rollouts` names batches that cannot be read."""
    text, found = text_of(run.run_dir), list[ShownAnswer]()
    for step in reversed(run.run_dir.published_batches()):
        with suppress(HoldfastError, OSError):
            for answer in read_answers([run.run_dir.batch(step)], text):
                if len(found) == MAX_ANSWERS:
                    return found
                prompt, told = answer.texts()
                cut = max(0, len(prompt) - _MAX_PROMPT) + max(0, len(told) - _MAX_ANSWER)
                found.append(ShownAnswer(answer, shown_parts(answer), prompt[-_MAX_PROMPT:], told[:_MAX_ANSWER], cut))
    return found


class ReportSection(NamedTuple):
    """Charts under a heading."""

    key: str
    title: str
    charts: Sequence[Chart]
    is_wide: bool = False
    is_folded: bool = False
    note: str = ""


class Table(NamedTuple):
    """A table under a heading; `note` says what is left out."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


class Live(NamedTuple):
    """Facts for a served page: its own tag, the run, and the command that makes the file."""

    tag: str
    run_id: str
    command: str


def page_of(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return everything that a page of some runs shows, for its template."""
    found = [(run, *sample_rollouts(run)) for run in runs]
    notes = [(run, note) for run, _, unread in found for note in (*run.notes, *unread)]
    return {
        "title": " and ".join(run.name for run in runs),
        "made": _time(time.time()),
        "facts": _facts(runs),
        "sections": _sections(runs),
        "tables": [table for table in _tables(runs) if table.rows],
        "answers": [(run.name, answers) for run in runs if (answers := newest_answers(run))],
        "samples": [(run.name, samples) for run, samples, _ in found if samples],
        "settings": {
            f"{run.name}: {name}.toml": tomli_w.dumps(table) for run in runs for name, table in _settings(run).items()
        },
        "notes": [note if len(runs) == 1 else f"{run.name}: {note}" for run, note in notes],
    }


def _time(seconds: float | None) -> str:
    try:
        return "-" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # a damaged line gives an impossible year
        return "-"


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _facts(runs: Sequence[RunData]) -> Table:
    rows = []
    for run in runs:
        ends = [one.end for one in run.spans] + [end for _, end in run.starts.values()]
        begins = [one.begin for one in run.attempts]
        curves = ((name, run.metrics.curve(name)[1]) for name in _SHOWN_METRICS)
        rows.append((
            run.name,
            run.program,
            run.status,
            str(run.last_step) if run.max_steps is None else f"{run.last_step} of {run.max_steps}",
            str(run.attempts[-1].number) if run.attempts else "-",
            f"{(max(ends) - min(begins)) / 3600:.2f} h" if ends and begins else "-",
            ", ".join(f"{name} {_number(float(values[-1]))}" for name, values in curves if len(values)) or "-",
            printable(run.run_dir.path),
        ))  # fmt: skip
    head = ("run", "program", "state", "steps", "attempts", "first to last sign", "last values", "directory")
    return Table("Runs", head, rows)


def _sections(runs: Sequence[RunData]) -> list[ReportSection]:
    timelines = [timeline_of(run, runs, number) for number, run in enumerate(runs)]
    is_resumed = any(run.later_attempts for run in runs)
    note = "Dotted lines: a later attempt of the run resumed from this step." if is_resumed else ""
    other_charts, num_left_out = others(runs, (*LEARNING, *SPEED))
    left_out = f"{num_left_out} more metrics are not shown: metrics.jsonl has them" if num_left_out else ""
    sections = [
        ReportSection("learning", "Learning", charts_of(LEARNING, runs), note=note),
        ReportSection("evaluations", "Evaluations", evaluation_charts(runs)),
        ReportSection("timeline", "Timeline", [one for one in timelines if one is not None], is_wide=True),
        ReportSection("phases", "Phases", phase_charts(runs), is_wide=len(runs) == 1),
        ReportSection("speed", "Speed", charts_of(SPEED, runs)),
        ReportSection("others", "Other metrics", other_charts, is_folded=True, note=left_out),
    ]
    return [section for section in sections if section.charts]


def _tables(runs: Sequence[RunData]) -> list[Table]:
    alerts = [
        (run.name, _time(one.unix_s), "-" if one.step is None else str(one.step), f"{one.kind.upper()}: {one.text}")
        for run in runs
        for one in run.alarms[-_MAX_ROWS:]
    ]
    num_alerts = sum(len(run.alarms) for run in runs)
    estimates = [
        (run.name, "-" if version is None else str(version), environment, str(num_tasks), name, _number(one.value),
         f"{_number(one.low)} to {_number(one.high)}")
        for run in runs
        for version, environment, num_tasks, name, one in run.estimates
    ]  # fmt: skip
    return [
        _settings_diff(runs),
        Table("Alerts", ("run", "time (UTC)", "step", "alert"), alerts, _part(len(alerts), num_alerts)),
        Table("Evaluated", ("run", "version", "environment", "tasks", "estimate", "value", "interval"),
              estimates[-_MAX_ROWS:], _part(min(_MAX_ROWS, len(estimates)), len(estimates))),
    ]  # fmt: skip


def _part(shown: int, there: int) -> str:
    return f"the last {shown} of {there}" if shown < there else ""


def _settings_diff(runs: Sequence[RunData]) -> Table:
    flats = [_flat(run) for run in runs]
    rows = []
    for key in sorted({key for flat in flats for key in flat}):
        values = [repr(flat[key]) if key in flat else "unset" for flat in flats]
        if len(set(values)) > 1:
            rows.append((key, *values))
    return Table("Settings that differ", ("setting", *(run.name for run in runs)), rows)


def _settings(run: RunData) -> dict[str, dict[str, Any]]:
    """Return the settings by file, of `rl` only the file that has all parts."""
    return {"rl": run.settings["rl"]} if "rl" in run.settings else run.settings


def _flat(run: RunData) -> dict[str, Any]:
    flat = {key: value for table in _settings(run).values() for key, value in flat_settings(table).items()}
    return {key: value for key, value in flat.items() if not key.endswith(("output_dir", "resume_step", "clean"))}


def render(page: dict[str, Any], plotly_js: str, *, live: Live | None = None) -> str:
    """Return the HTML of a page.

    All text of the run is escaped. A policy in the page forbids all network; a live page may ask its server."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    figures = {chart.key: chart.figure for section in page["sections"] for chart in section.charts}
    text = environment.get_template("page.html").render(
        page=page,
        figures=Markup(_script_json(figures)),
        # Files of the package and the library only, nothing of a run.
        plotly_js=Markup(plotly_js),
        live=live,
        live_js=Markup((_HERE / "live.js").read_text(encoding="utf-8")),
        page_js=Markup((_HERE / "page.js").read_text(encoding="utf-8")),
        page_css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        nonce=secrets.token_urlsafe(16),
    )
    # Names of directories are bytes, a page is text.
    return text.encode(errors="backslashreplace").decode()


def _script_json(value: object) -> str:
    """Return JSON for a script element: nothing in it ends the element, or begins a comment."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def library() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def main(argv: list[str]) -> int:
    """Write the report that `argv` asks for; return the exit code. Raise ConfigError if a path is not a run; DataError
    if the page cannot be written."""
    arguments = parse(argv)
    to = arguments.to or arguments.runs[0] / "report.html"
    if to.suffix not in (".html", ".htm"):
        raise ConfigError(f"--to {to}: the name of a page ends with .html")
    runs = read_runs(arguments.runs)
    if not to.absolute().parent.is_dir():
        raise ConfigError(f"--to {to}: there is no directory {to.parent}")
    content = render(page_of(runs), library()).encode()
    try:
        atomic.write_file(to, content)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{to} cannot be written: {reason}. Choose another place with --to FILE.html.") from None
    print(f"{printable(to)}: {len(content) / 1e6:.1f} MB, of {', '.join(run.name for run in runs)}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="report",
        description="Curves, timeline, evaluations and rollouts of runs, as one HTML file.",
        epilog="A report changes and disturbs no run. See docs/console.md.",
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="*",
        metavar="RUN",
        help="run directories; several are overlaid (unset: the only run below outputs)",
    )
    parser.add_argument("--to", type=Path, metavar="FILE.html", help="the file (report.html in the first RUN)")
    refuse_flags(parser, argv)
    arguments = parser.parse_args(argv)
    arguments.runs = arguments.runs or [only_run("report", argv, takes_evaluations=True)]
    return arguments


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Return what is there of some runs, each once, with names that differ. Raise ConfigError for no run."""
    paths = list(dict.fromkeys(path.absolute() for path in paths))
    return [replace(read_run(path), name=name) for path, name in zip(paths, short_names(paths), strict=True)]
