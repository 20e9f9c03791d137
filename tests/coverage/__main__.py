"""Which statements and branches of `src` no test runs, in whatever process: served, forked and killed ones as well.

    uv run python -m tests.coverage begin
    COVERAGE_MARKS=$PWD/.coverage_marks uv run --group dev python -m tests.lanes
    uv run python -m tests.coverage report --floor 90

Marks of several runs add up: `resume` keeps those of an earlier run, and ends with 1 if `src`, the tests or Python have
changed since, or if no everyday lane has passed with them.

A statement that cannot be run here says why in a comment, `# untested: needs a GPU`, behind it or behind the head of
the block around it. coverage.py was tried: it loses what a process has run that is killed, and on Python 3.11 the
suite takes almost twice as long with it. Here a statement costs one write into a mapped file."""

import argparse
import json
import marshal
import os
import shutil
import sys
import sysconfig
from itertools import groupby
from pathlib import Path

from tests.coverage.marking import Marking

ROOT = Path(__file__).resolve().parents[2]
MARKS = ROOT / ".coverage_marks"
_STARTUP = Path(__file__).parent / "startup"
_PTH = Path(sysconfig.get_path("purelib")) / "_coverage_marks.pth"


def begin() -> None:
    """Mark all modules, forget what was run, and have interpreters of this environment load the marked code."""
    shutil.rmtree(MARKS, ignore_errors=True)
    MARKS.mkdir()
    points, loaded, count = {}, {}, 0
    for number, path in enumerate(sorted((ROOT / "src").rglob("*.py"))):
        marking = Marking(path.read_text(), str(path), count)
        code = MARKS / f"{number}.code"
        code.write_bytes(marshal.dumps(marking.code()))
        status = path.stat()
        loaded[str(path)] = (status.st_size, status.st_mtime_ns, str(code))
        name = str(path.relative_to(ROOT / "src"))
        points[name] = [(point.line, point.kind, point.excused) for point in marking.points]
        count += len(marking.points)
    (MARKS / "marks").write_bytes(bytes(count))
    (MARKS / "index.json").write_text(json.dumps({"points": points, "loaded": loaded, "of": _state()}))
    _PTH.write_text(f"{_STARTUP}\nimport _coverage_marks\n")


def passed(lane: str) -> None:
    """Note in the marks of this process's runs, if there are any, that a whole lane has passed."""
    if directory := os.environ.get("COVERAGE_MARKS"):
        (Path(directory) / f"passed_{lane}").touch()


def resume() -> int:
    """Have interpreters load the marked code again; return 1 if the marks are not of this state and a whole lane."""
    if not (MARKS / "passed_everyday").exists():
        return 1
    if json.loads((MARKS / "index.json").read_text()).get("of") != _state():
        return 1
    _PTH.write_text(f"{_STARTUP}\nimport _coverage_marks\n")
    return 0


def _state() -> dict[str, list[int]]:
    """Return what marks depend on: size and time of change of all code, by path, and the version of Python."""
    files = {path: path.stat() for name in ("src", "tests") for path in (ROOT / name).rglob("*.py")}
    found = {str(path): [status.st_size, status.st_mtime_ns] for path, status in files.items()}
    return found | {"Python": [*sys.version_info[:3]]}


def end() -> None:
    _PTH.unlink(missing_ok=True)


def report(floor: float) -> int:
    """Print what was not run; return 1 if less than `floor` percent of statements and branches were."""
    marks = (MARKS / "marks").read_bytes()
    points = json.loads((MARKS / "index.json").read_text())["points"]
    first, run, there, excused = 0, 0, 0, 0
    for name, of_file in points.items():
        missed, counted = [], 0
        for number, (line, kind, is_excused) in enumerate(of_file, first):
            if is_excused:
                excused += 1
                continue
            counted += 1
            run += marks[number]
            if not marks[number]:
                missed.append((line, kind))
        first += len(of_file)
        there += counted
        if missed:
            lines = _ranges([line for line, kind in missed if kind == "statement"])
            passed = _ranges([line for line, kind in missed if kind == "branch"])
            never = f"; never passed by: {passed}" if passed else ""
            print(f"{name}: {len(missed)} of {counted} not run: {lines or '-'}{never}")
    share = 100 * run / max(there, 1)
    print(f"{run:,} of {there:,} statements and branches of src were run: {share:.2f} % (at least {floor:g} %)")
    print(f"{excused:,} more have a reason beside them")
    return 0 if share >= floor else 1


def _ranges(lines: list[int]) -> str:
    runs = (list(run) for _, run in groupby(enumerate(sorted(set(lines))), lambda pair: pair[1] - pair[0]))
    return ", ".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.coverage", description=__doc__)
    parser.add_argument("command", choices=("begin", "resume", "report", "end"))
    parser.add_argument("--floor", type=float, default=0.0, help="percent that must have been run")
    arguments = parser.parse_args()
    if arguments.command == "report":
        return report(arguments.floor)
    if arguments.command == "resume":
        return resume()
    (begin if arguments.command == "begin" else end)()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
