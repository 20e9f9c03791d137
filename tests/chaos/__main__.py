"""A long chaos run: `uv run python -m tests.chaos --kills 60 --seed 1`, from the root of the repository.

First a run that nothing disturbs, then one of the same seed that is hit at random times: SIGKILL of every
process, now and then SIGSTOP, and a full disk under the whole run directory. Options add read errors, pauses of
all processes at once, an object store that comes and goes, SIGTERM with a new start on an empty machine,
sessions of two turns with a slow tool between them, or all that plays, scores and tells: workers, MCP servers,
sandboxes, mathematics, a judge, evaluations and a tracker. Prints what was checked and how long it took to go on; ends
with 1 when an invariant is broken.
"""

import argparse
import contextlib
import functools
import json
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.driver import JUDGE, Blow, Chaos, ChaosRun
from tests.chaos.everything import PLAYERS, TURNS, JudgeProcess, settings_of
from tests.chaos.invariants import check
from tests.chaos.schedule import DISK, MACHINE, RUN, STORE, draw, shares, steps_of
from tests.chaos.surroundings import Store
from tests.faults.disks import SmallDisk
from tests.runs.ports import free_port
from tests.runs.rl import SMALL_BATCH, succeeded

_DISK_MIB = 512
# Beside kills: how many there are by default, and what they are.
OTHER_HITS = {
    "--stops": (5, "SIGSTOPs on top"),
    "--full-disks": (4, "how often the disk fills up; 0: it is a usual one"),
    "--read-errors": (0, "how often three files cannot be read"),
    "--freezes": (0, "how often all processes stand still at once"),
    "--outages": (0, "how often an object store is away"),
    "--evictions": (0, "how often the run goes on on an empty machine"),
}
# Rounds of fewer tokens than answers have.
IN_ROUNDS = ("--orchestrator.schedule", "rounds", "--async-level", "2", "--orchestrator.round-tokens", "5")
_TOOL_ENVIRONMENT = {
    "id": "tests.chaos.slow_tool:SlowTool",
    "curriculum": {"levels": [{"max_length": 5}, {"max_length": 7}], "window": 6, "advance_reward": 0.01},
}
_SHORT_TURNS = ("--orchestrator.sampling.max-tokens", "8")


def main() -> int:
    arguments = parse_arguments()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    others = (*PLAYERS, JUDGE) if arguments.everything else ()
    victims = shares(ranks=arguments.ranks, engines=arguments.engines, others=others)
    hits = draw(
        arguments.kills, arguments.seed, victims, **{name: getattr(arguments, name) for name in map(_name, OTHER_HITS)}
    )
    max_steps = steps_of(len(hits))
    port = arguments.port or free_port(arguments.engines)
    flags = (
        *SMALL_BATCH, "--max-steps", str(max_steps), "--ckpt.interval", "2", "--ckpt.keep", "3",
        "--trainer.parallel.num-ranks", str(arguments.ranks), "--trainer.parallel.threads", "1",
        "--inference.engines", str(arguments.engines), "--inference.server.port", str(port),
    )  # fmt: skip
    turns = 1 if arguments.schedule == "strict" else None
    if arguments.schedule == "rounds":
        flags = (*flags, *IN_ROUNDS)
    if arguments.collective:
        flags = (*flags, "--weights.transport", "collective", "--weights.stall-timeout-s", "5")
    if arguments.slow_tool:
        turns = turns and 2
        flags = (*flags, "--orchestrator.environments", json.dumps([_TOOL_ENVIRONMENT]), *_SHORT_TURNS)
    with contextlib.ExitStack() as stack:
        disk = judge = None
        if arguments.everything:
            judge = stack.enter_context(JudgeProcess(folder / "asked"))
            turns, flags = turns and TURNS, (*flags, *settings_of(judge.port))
        store = stack.enter_context(Store()) if arguments.outages or arguments.evictions else None
        if arguments.full_disks:
            disk = stack.enter_context(SmallDisk(folder / "run", size_mib=_DISK_MIB))
            if disk.problem:
                print(f"no filesystem can be mounted here ({disk.problem}): see --full-disks 0", file=sys.stderr)
                return 2
        print(f"runs of {max_steps} steps in {folder}; first the one that nothing disturbs", flush=True)
        reference = succeeded(folder / "reference", *flags, timeout_s=arguments.timeout_s, engine="vllm")
        print(f"now the one that is hit {len(hits)} times, by the schedule of seed {arguments.seed}", flush=True)
        say = functools.partial(print, flush=True)
        chaos = Chaos(folder / "run", hits, *flags, disk=disk, store=store, judge=judge, starts_python=True, say=say)
        done = chaos.run(timeout_s=arguments.timeout_s)
        print_blows(done.blows)
        print_report(done, [*victims, DISK, RUN, STORE, MACHINE])
        try:
            found = check(done, reference, max_steps=max_steps, turns=turns)
            assert store is None or store.holds(max_steps), "the last checkpoint is not in the store"
        except AssertionError as error:
            if disk is not None:
                shutil.copytree(disk.path, folder / "run-left", symlinks=True)
            print(f"BROKEN: {error}\nthe runs are kept in {folder}")
            return 1
    for what, words in found.items():
        print(f"{what}: {words}")
    if arguments.keep is None:
        shutil.rmtree(folder)
    return 0


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="SIGKILLs; the length of the run follows from all hits")
    for flag, (default, words) in OTHER_HITS.items():
        parser.add_argument(flag, type=int, default=default, help=words)
    parser.add_argument(
        "--slow-tool",
        action="store_true",
        help="sessions of two turns with a slow tool between them, with a curriculum",
    )
    parser.add_argument("--schedule", choices=["strict", "rounds"], default="strict", help="of the batches")
    parser.add_argument("--everything", action="store_true", help="with all that plays, scores and tells")
    parser.add_argument("--collective", action="store_true", help="the trainer sends weights from its memory")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer")
    parser.add_argument("--engines", type=int, default=1, help="inference servers of the run")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule")
    parser.add_argument("--port", type=int, help="of the (first) inference server; unset: a free one")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="deal no more hits after this time")
    parser.add_argument("--keep", type=Path, help="where the runs are kept; unset: removed when all is well")
    return parser.parse_args()


def print_blows(blows: Sequence[Blow]) -> None:
    """One line per hit: what, at which step, and seconds to the next trained step."""
    for number, blow in enumerate(blows, start=1):
        went_on = "hit again before" if blow.next_step_s is None else f"{blow.next_step_s:6.1f} s to the next step"
        print(f"{number:3d}. {blow.hit.kind:7s} {blow.hit.victim:13s} after step {blow.step:4d}: {went_on}")


def print_report(chaos: ChaosRun, victims: Sequence[str]) -> None:
    counts = Counter(blow.hit.kind for blow in chaos.blows)
    dealt = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"\n{dealt} in {chaos.seconds:.0f} s")
    print(f"{'':13s} {'hits':>6s} {'stops':>6s}   seconds to the next trained step, but for stops")
    for victim in victims:
        mine = [blow for blow in chaos.blows if blow.hit.victim == victim]
        hit = [blow for blow in mine if blow.hit.kind != "SIGSTOP"]
        taken = sorted(blow.next_step_s for blow in hit if blow.next_step_s is not None)
        spread = (
            f"median {statistics.median(taken):.1f}, {taken[0]:.1f} to {taken[-1]:.1f} ({len(taken)} measured)"
            if taken
            else "-"
        )
        print(f"{victim:13s} {len(hit):6d} {len(mine) - len(hit):6d}   {spread}")
    restarts = ", ".join(f"{name} {count}" for name, count in chaos.restarts().items())
    print(f"restarts: {restarts}; waits for storage: {chaos.storage_waits()}\n")


if __name__ == "__main__":
    sys.exit(main())
