"""The timeline: what every process of a run did when, and when it was started again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from holdfast.commands.live.state import LAUNCHER
from holdfast.commands.report.charts import Block, Lanes, Mark, colour_of
from holdfast.commands.report.curves import colour_of_phase
from holdfast.commands.report.run_data import Event, RunData
from holdfast.shared.process.timeline import Span

MAX_BLOCKS = 6000
_STRETCHES = 1500
_ORDER = ("trainer", "orchestrator", "inference", "evaluation")


def lanes_of(run: RunData, *, key: str, alone: bool) -> Lanes | None:
    """Return the timeline of one run; None where nothing was recorded."""
    spans = [one for one in run.spans if one.name != "start"]
    lanes: dict[str, list[Block]] = {}
    for one in spans:
        lane = f"{one.process}: {one.lane}" if one.lane else one.process
        lanes.setdefault(lane, []).append(Block(lane, one.name, one.begin, one.end, _text(one)))
    for block in _starts(run):
        lanes.setdefault(block.lane, []).append(block)
    if not lanes:
        return None
    whole = sum(map(len, lanes.values()))
    note = "what is not coloured is idle"
    if run.later_attempts:
        note += "; dotted lines with a number: where that attempt of the run began"
    if whole > MAX_BLOCKS:
        begin = min(block.begin for blocks in lanes.values() for block in blocks)
        end = max(block.end for blocks in lanes.values() for block in blocks)
        lanes = {name: _merged(blocks, begin, end) for name, blocks in lanes.items()}
        note += (
            f"; {whole:,} spans are too many to draw: each stretch of {(end - begin) / _STRETCHES:.3g} s shows what "
            "took most of it"
        )
    names = sorted(lanes, key=lambda name: (_rank(name), name))
    blocks = [block for name in names for block in lanes[name]]
    kinds = list(dict.fromkeys(block.name for block in blocks))
    return Lanes(
        key,
        "Timeline" if alone else f"Timeline: {run.name}",
        names,
        blocks,
        {kind: colour_of_phase(kind, number) for number, kind in enumerate(kinds)},
        _marks(run),
        note,
    )


def _rank(lane: str) -> int:
    return next((number for number, name in enumerate(_ORDER) if lane.startswith(name)), len(_ORDER))


def _text(one: Span) -> str:
    told = [f"step {one.step}"] if one.step is not None else []
    told += [f"version {one.version}"] if one.version is not None else []
    told += [f"{one.count} of them"] if one.count > 1 else []
    return ", ".join([one.name, *told, f"{one.end - one.begin:.3g} s"])


def _starts(run: RunData) -> Iterable[Block]:
    """Yield the start-ups, from the first word of a process to its first span, or to the last word."""
    begun = {(one.attempt, one.process): one.begin for one in reversed(run.spans)}
    by_process = lambda event: (event.attempt, event.process)  # noqa: E731 - a key, twice
    for (attempt, process), events in itertools.groupby(sorted(run.events, key=by_process), by_process):
        told = [event for event in events if not event.is_alarm]
        if process in ("", LAUNCHER) or not told:  # the launcher tells of others, and how the attempt ended
            continue
        end = begun.get((attempt, process), _ready(told))
        if end > told[0].time:
            text = f"start-up, attempt {attempt}, {end - told[0].time:.3g} s"
            yield Block(process, "start-up", told[0].time, end, text)


def _ready(events: Sequence[Event]) -> float:
    return next((event.time for event in events if event.phase == "ready"), events[-1].time)


def _marks(run: RunData) -> list[Mark]:
    """Return the starts of attempts, and of processes that were started again within one."""
    marks = [Mark(one.begin, str(one.number)) for one in run.later_attempts if one.begin is not None]
    seen: set[tuple[int, str]] = set()
    for one in run.spans:
        if one.name != "start":
            continue
        place = (one.attempt, one.process)
        if place in seen:
            marks.append(Mark(one.begin, f"{one.process} again", colour_of(3)))
        seen.add(place)
    return marks


def _merged(blocks: Sequence[Block], begin: float, end: float) -> list[Block]:
    """Return one block for each run of stretches of which the same took most; none where that was nothing."""
    width = (end - begin) / _STRETCHES
    kinds = list(dict.fromkeys(block.name for block in blocks))
    seconds = np.zeros((len(kinds) + 1, _STRETCHES))
    for block in blocks:
        row = kinds.index(block.name)
        first = min(_STRETCHES - 1, int((block.begin - begin) / width))
        last = min(_STRETCHES - 1, int((block.end - begin) / width))
        if first == last:
            seconds[row, first] += block.end - block.begin
            continue
        seconds[row, first] += begin + (first + 1) * width - block.begin
        seconds[row, first + 1 : last] += width
        seconds[row, last] += block.end - (begin + last * width)
    seconds[-1] = width - seconds[:-1].sum(axis=0)
    merged = []
    position = 0
    for row, stretches in itertools.groupby(seconds.argmax(axis=0)):
        length = len(list(stretches))
        if row < len(kinds):
            since = begin + position * width
            name = kinds[row]
            merged.append(Block(blocks[0].lane, name, since, since + length * width, f"mostly {name}"))
        position += length
    return merged
