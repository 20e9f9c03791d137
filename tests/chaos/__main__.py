"""A long chaos run: `uv run chaos --kills 70 --seed 1`, from the root of the repository.

First a run that nothing disturbs, then one of the same seed that is hit at random times: SIGKILL, and now
and then SIGSTOP, of every process. Prints what was checked and how long it took to go on; ends with 1 when
an invariant is broken.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.driver import Blow, Chaos, ChaosRun, is_stop
from tests.chaos.invariants import check
from tests.chaos.schedule import SHARES, draw, steps_of
from tests.inference_zygote import free_port
from tests.rl_runs import SMALL_BATCH, succeeded


def main() -> int:
    """Run, check, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="hits to deal; the length of the run follows from them")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="deal no more hits after this time")
    parser.add_argument("--keep", type=Path, help="where the runs are kept; unset: removed when all is well")
    arguments = parser.parse_args()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    max_steps = steps_of(arguments.kills)
    port = str(free_port())
    flags = (*SMALL_BATCH, "--max-steps", str(max_steps), "--ckpt.interval", "2", "--ckpt.keep", "3")
    flags = (*flags, "--inference.server.port", port)
    print(f"runs of {max_steps} steps in {folder}; first the one that nothing disturbs", flush=True)
    reference = succeeded(folder / "reference", *flags)
    print(f"now the one that is hit {arguments.kills} times, by the schedule of seed {arguments.seed}", flush=True)
    hits = draw(arguments.kills, arguments.seed)
    chaos = Chaos(folder / "run", hits, *flags, say=lambda line: print(line, flush=True))
    done = chaos.run(timeout_s=arguments.timeout_s)
    print_blows(done.blows)
    print_report(done)
    try:
        found = check(done, reference, max_steps=max_steps)
    except AssertionError as error:
        print(f"BROKEN: {error}\nthe runs are kept in {folder}")
        return 1
    for what, words in found.items():
        print(f"{what}: {words}")
    if arguments.keep is None:
        shutil.rmtree(folder)
    return 0


def print_blows(blows: Sequence[Blow]) -> None:
    """One line per hit: what, at which step, and seconds to the next trained step."""
    for number, blow in enumerate(blows, start=1):
        went_on = "hit again before" if blow.next_step_s is None else f"{blow.next_step_s:6.1f} s to the next step"
        print(f"{number:3d}. {blow.hit.number.name:7s} {blow.hit.victim:13s} after step {blow.step:4d}: {went_on}")


def print_report(chaos: ChaosRun) -> None:
    """Per victim: hits, and seconds to the next trained step."""
    stops = sum(map(is_stop, chaos.blows))
    kills = len(chaos.blows) - stops
    print(f"\n{kills} SIGKILLs and {stops} SIGSTOPs in {chaos.seconds:.0f} s")
    print(f"{'':13s} {'kills':>6s} {'stops':>6s}   seconds from SIGKILL to the next trained step")
    for victim in SHARES:
        mine = [blow for blow in chaos.blows if blow.hit.victim == victim]
        killed = [blow for blow in mine if not is_stop(blow)]
        taken = sorted(blow.next_step_s for blow in killed if blow.next_step_s is not None)
        spread = (
            f"median {statistics.median(taken):.1f}, {taken[0]:.1f} to {taken[-1]:.1f} ({len(taken)} measured)"
            if taken
            else "-"
        )
        print(f"{victim:13s} {len(killed):6d} {len(mine) - len(killed):6d}   {spread}")
    restarts = ", ".join(f"{name} {count}" for name, count in chaos.restarts().items())
    print(f"restarts: {restarts}\n")


if __name__ == "__main__":
    sys.exit(main())
