"""Search for faults: `uv run python -m tests.search --minutes 60`, from the root of the repository.

Draws a run (`grammar`), plays it undisturbed and hit (`runs`), and compares every promise (`oracles`). A case that
breaks one is shrunk, and written to `--found`; `--replay FILE ...` plays such cases again, `--draw SEED:NUMBER` one
draw. The last line is `K runs, H hits, F findings`; the exit code is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.search.grammar import BLOCK, Case, draws, every_pair, plain
from tests.search.runs import Played, Player, Refused

FOUND = Path(__file__).with_name("found")
_SHRINKING_S = 120.0


def main() -> int:
    arguments = parse_arguments()
    if arguments.share is not None:
        work(arguments)
        return 0
    begin = time.monotonic()
    totals, findings, met, hits, refused, seconds = (
        Counter[str](),
        [],
        set[str](),
        Counter[str](),
        Counter[str](),
        Counter[str](),
    )
    with contextlib.ExitStack() as stack:
        words = [word for word in sys.argv[1:] if word]
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.search", *words, "--share", f"{number}/{arguments.workers}"],
                    stdout=subprocess.PIPE, text=True,
                )
            )
            for number in range(arguments.workers)
        ]  # fmt: skip
        for line in _lines(workers):
            if not line.startswith("{"):
                print(line, flush=True)
                continue
            told = json.loads(line)
            totals.update({"runs": told["runs"], "cases": 1, "draws again": told["missed"]})
            met |= {json.dumps(pair) for pair in told["pairs"]}
            hits.update(told["hits"])
            refused.update(told["refused"])
            seconds.update(told["seconds"])
            if told["findings"]:
                findings.append(told["name"])
                print(f"FOUND by {told['name']}: {told['findings'][0][:1500]}\n  case: {told['file']}", flush=True)
        ended = [worker.wait() for worker in workers]
    every = {json.dumps(pair) for pair in every_pair()}
    print_hits(hits, refused, seconds)
    print(f"pairs met: {len(met & every)} of {len(every)}; unmet: {len(every - met)}")
    if arguments.pairs:
        print("\n".join(sorted(every - met)))
    took = time.monotonic() - begin
    print(f"{totals['runs'] / took * 3600:.0f} runs an hour, {totals['cases']} cases in {took:.0f} s")
    print(f"{totals['runs']} runs, {sum(hits.values())} hits, {len(findings)} findings")
    return 1 if findings or any(ended) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long new cases are begun")
    parser.add_argument("--cases", type=int, help="how many cases; unset: as --minutes says")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the draws; unset: another one each time")
    parser.add_argument("--draw", metavar="SEED:NUMBER", help="play one draw")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="play cases that were kept")
    parser.add_argument("--found", type=Path, help="where shrunk cases go; unset: a new temporary directory")
    parser.add_argument("--workers", type=int, default=2, help="cases that are played at once")
    parser.add_argument("--pairs", action="store_true", help="print the pairs that were not met")
    parser.add_argument("--program", help="only cases of this program")
    parser.add_argument("--only", help="only cases with this feature or fault, such as `at an event: power`")
    parser.add_argument("--no-shrink", action="store_true", help="keep cases as they were drawn")
    parser.add_argument("--first", action="store_true", help="stop after the first finding")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    return parser.parse_args()


def _lines(workers: list[subprocess.Popen[str]]) -> Iterator[str]:
    """Yield the lines of all workers as they come."""
    import selectors

    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if not line:
                    selector.unregister(key.fileobj)
                else:
                    yield line.rstrip("\n")


def print_hits(hits: Counter[str], refused: Counter[str], seconds: Counter[str]) -> None:
    """Print what happened, by what was going on."""
    for what, counts in (("hits", hits), ("refused by a dry run", refused), ("seconds", seconds)):
        shown = ", ".join(f"{name} {count:.0f}" for name, count in counts.most_common(40))
        print(f"{what}: {shown or 'none'}")


def chosen(arguments: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Yield the cases that this worker is to play, with their names."""
    share, of = map(int, arguments.share.split("/"))
    if arguments.replay:
        named = [(str(path), Case.read(path.read_text())) for path in arguments.replay]
    elif arguments.draw:
        seed, number = map(int, arguments.draw.split(":"))
        named = [(arguments.draw, next(itertools.islice(draws(seed), number, None)))]
    else:
        named = ((f"{arguments.seed}:{number}", case) for number, case in enumerate(draws(arguments.seed)))
    mine = ((name, case) for place, (name, case) in enumerate(named) if place // BLOCK % of == share)
    if arguments.program:
        mine = ((name, case) for name, case in mine if case.program == arguments.program)
    if arguments.only:
        mine = ((name, case) for name, case in mine if any(arguments.only in pair[1] for pair in case.pairs()))
    return itertools.islice(mine, arguments.cases and -(-arguments.cases // of))


def work(arguments: argparse.Namespace) -> None:
    """Play this worker's cases, and print one line of JSON for each."""
    begin, memory = time.monotonic(), Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30 else None
    found = arguments.found or Path(tempfile.gettempdir()) / "holdfast_search_found"
    with tempfile.TemporaryDirectory(prefix="holdfast-search-", dir=place) as folder:
        player = Player(Path(folder))
        for name, case in chosen(arguments):
            if time.monotonic() - begin > arguments.minutes * 60:
                break
            told = {
                "name": name,
                "runs": 0,
                "missed": 0,
                "pairs": [],
                "hits": {},
                "refused": {},
                "findings": [],
                "file": "",
            }
            told["seconds"] = {}
            before, runs = Counter(player.seconds), player.num_runs
            try:
                played = play(player, case, told)
            except Refused as refused:
                told["refused"] = {str(refused).strip().splitlines()[-1][:150]: 1}
                played = None
            except Exception:  # noqa: BLE001 - a worker goes on; what failed is a finding
                told["findings"] = [traceback.format_exc()]
                told["file"] = keep(found, dataclasses.replace(case, found="an exception"), name)
                played = None
            if played is not None and played.findings:
                told["findings"] = list(map(str, played.findings))
                small = played if arguments.no_shrink or arguments.replay else shrunk(player, played)
                told["file"] = keep(found, dataclasses.replace(small.case, found=str(small.findings[0])[:600]), name)
            told["runs"] = player.num_runs - runs
            told["seconds"] = player.seconds - before
            print(json.dumps(told), flush=True)
            if told["findings"] and arguments.first:
                break


def play(player: Player, case: Case, told: dict[str, Any]) -> Played:
    """Play a case; one whose faults met nothing is played again with earlier events, and then counted as missed."""
    for _ in range(2):
        played = player.play(case)
        if played.findings or len(played.hits) == len(case.faults):
            break
        told["missed"] += 1
        earlier = [
            dataclasses.replace(fault, key="", nth=0, share=round(fault.share * 0.7, 4)) for fault in case.faults
        ]
        case = dataclasses.replace(case, faults=tuple(earlier))
    told["pairs"] = sorted(case.pairs()) if played.hits else []
    told["hits"] = Counter(" ".join(hit.split(" (")[0].split()) for hit in played.hits)
    return played


def shrunk(player: Player, played: Played) -> Played:
    """Return the smallest run that still breaks the same promise: fewer faults, plainer features, fewer steps."""
    deadline, smallest = time.monotonic() + _SHRINKING_S, played
    promise = played.findings[0].promise
    changed = True
    while changed and time.monotonic() < deadline:
        changed = False
        for case in simpler(smallest.case):
            if time.monotonic() > deadline:
                break
            try:
                tried = player.play(case)
            except (Refused, AssertionError):
                continue
            if any(one.promise == promise for one in tried.findings):
                smallest, changed = tried, True
                break
    return smallest


def simpler(case: Case) -> Iterator[Case]:
    faults = case.faults
    if case.at_rest != "nothing":
        yield dataclasses.replace(case, at_rest="nothing")
    for number in range(len(faults)):
        yield dataclasses.replace(case, faults=faults[:number] + faults[number + 1 :])
    for name, option in plain(case.program).features.items():
        if case.features[name] != option:
            yield dataclasses.replace(case, features={**case.features, name: option})
    if case.steps > 3:
        yield dataclasses.replace(case, steps=3)


def keep(folder: Path, case: Case, name: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(':', '_').replace('/', '_')}.json"
    path.write_text(case.write())
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
