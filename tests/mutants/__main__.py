"""Change `src` in small ways, one at a time, and see whether a test notices.

    uv run python -m tests.mutants --seed 3 --count 150
    uv run python -m tests.mutants --where trainer/preference/reference.py

Each change is tried with the unit tests that import the module, with those of modules that import it, with the other
tests, and last with whole runs, until one notices; that one must pass without the change. What no test sees is
printed: it wants a test, or a word why it makes no difference.
"""

import argparse
import random
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from tests.mutants.choosing import ROOT, rounds_of
from tests.mutants.copies import Copy
from tests.mutants.mutations import Mutation, mutations

_TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Mutant:
    """One change of one module, such as `trainer/session.py`."""

    module: str
    mutation: Mutation

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.mutation.before, self.mutation.after))
        return f"src/{self.module}:{self.mutation.line}: {before!r} -> {after!r}"


def try_out(mutant: Mutant, copy: Copy) -> str | None:
    """Return the test that noticed the change; None if none did. One that fails without the change does not count."""
    original = (ROOT / "src" / mutant.module).read_text()
    for tests in rounds_of(mutant.module):
        copy.write(mutant.module, mutant.mutation.source)
        try:
            code = copy.run(tests, timeout_s=_TIMEOUT_S)
        finally:
            copy.write(mutant.module, original)
        if code is None and copy.run(tests, timeout_s=_TIMEOUT_S) is not None:
            return "no end"
        if code in (None, 0, 5):
            continue
        log = copy.log.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log, re.MULTILINE)
        if failed is None or copy.run([failed[1]], timeout_s=_TIMEOUT_S) != 0:
            print(f"{failed[1] if failed else tests} fails without {mutant} as well:\n{log[-4000:]}", flush=True)
            continue
        return failed[1]
    return None


def choose(arguments: argparse.Namespace) -> list[Mutant]:
    modules = [str(path.relative_to(ROOT / "src")) for path in sorted((ROOT / "src").rglob("*.py"))]
    short = [place.removeprefix("src/").removeprefix("holdfast/") for place in arguments.where]
    where = [f"holdfast/{place}".partition(":")[::2] for place in short]
    if where:
        modules = [module for module in modules if module in {module for module, _ in where}]
    mutants = [
        Mutant(module, change) for module in modules for change in mutations((ROOT / "src" / module).read_text())
    ]
    if where:
        return [
            one for one in mutants if any(one.module == m and line in ("", str(one.mutation.line)) for m, line in where)
        ]
    return random.Random(arguments.seed).sample(mutants, min(arguments.count, len(mutants)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--where", nargs="*", default=[], metavar="FILE[:LINE]", help="all changes there instead")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    mutants = choose(arguments)
    if not mutants:
        parser.error(f"there is nothing to change at {' '.join(arguments.where)}")
    print(f"{len(mutants)} mutants, seed {arguments.seed}", flush=True)
    begin, survivors = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: Queue[Copy] = Queue()
        for number in range(arguments.jobs):
            copies.put(Copy(Path(folder) / str(number)))

        def run(mutant: Mutant) -> None:
            copy = copies.get()
            started = time.monotonic()
            try:
                noticed_by = try_out(mutant, copy)
            finally:
                copies.put(copy)
            if noticed_by is None:
                survivors.append(mutant)
            print(f"{mutant}: {noticed_by or 'SURVIVED'} ({time.monotonic() - started:.0f} s)", flush=True)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(run, mutants))
        while not copies.empty():
            copies.get().close()
    noticed = len(mutants) - len(survivors)
    print(f"{noticed} of {len(mutants)} were noticed, seed {arguments.seed}, {time.monotonic() - begin:.0f} s")
    for survivor in sorted(map(str, survivors)):
        print(f"survived: {survivor}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
