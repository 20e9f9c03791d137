"""Whether the search has teeth: `uv run python -m tests.search.teeth`. Puts one defect at a time into a copy of the
tree, searches there for `--minutes`, and prints which defects were found, and by which promise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

_COPIED = ("src", "tests", "examples", "configs", "pyproject.toml", "docs_tools", "benchmarks")


@dataclass(frozen=True)
class Defect:
    """`old` becomes `new` in a file of `src/holdfast`. `program`, `only`: of the search, to
    save time: where the defect can show."""

    name: str
    file: str
    old: str
    new: str
    program: str = ""
    only: str = ""


DEFECTS = [Defect(**one) for one in json.loads(Path(__file__).with_name("defects.json").read_text())]
"""The last version of the tree has none of these; several were defects of an earlier version."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="of search for each defect")
    parser.add_argument("--only", nargs="+", default=[""], help="defects whose name contains one of these")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    defects = [one for one in DEFECTS if any(word in one.name for word in arguments.only)]
    with tempfile.TemporaryDirectory(prefix="teeth-") as folder, ThreadPoolExecutor(2) as threads:
        jobs = [(Path(folder) / str(number), one, arguments) for number, one in enumerate(defects)]
        found = list(threads.map(lambda job: hunt(*job), jobs))
    print(f"{sum(found)} of {len(found)} defects were found")
    return 0 if all(found) else 1


def hunt(tree: Path, defect: Defect, arguments: argparse.Namespace) -> bool:
    """Search a copy of the tree with a defect; print and return whether it was found."""
    for name in _COPIED:
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", "outputs")
        shutil.copytree(source, tree / name, ignore=ignored) if source.is_dir() else shutil.copy(source, tree / name)
    (tree / "holdfast").symlink_to("src/holdfast")  # before what is installed, in every process
    path = tree / "src" / "holdfast" / defect.file
    text = path.read_text()
    assert text.count(defect.old) == 1, f"{defect.name}: {text.count(defect.old)} places in {defect.file}"
    path.write_text(text.replace(defect.old, defect.new))
    begin = time.monotonic()
    words = ["--minutes", str(arguments.minutes), "--seed", str(arguments.seed), "--workers", "1", "--first"]
    words += ["--program", defect.program] if defect.program else []
    words += ["--only", defect.only] if defect.only else []
    command = [sys.executable, "-m", "tests.search", *words, "--no-shrink", "--found", str(tree / "found")]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    said = next((line for line in done.stdout.splitlines() if line.startswith("FOUND")), "")
    took = f"after {time.monotonic() - begin:.0f} s"
    print(f"{defect.name}: {'found ' + took + ': ' + said[:160] if said else 'NOT FOUND ' + took}", flush=True)
    shutil.rmtree(tree)
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
