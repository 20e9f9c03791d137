"""Parts of the product whose nightly tests run with every change of them."""

import subprocess
from collections.abc import Iterable

from tests.lanes.durations import ROOT

PARTS = {
    "src/holdfast/trainer/checkpoint": (
        "tests/faults/test_damage.py", "tests/faults/test_storage.py", "tests/faults/test_power_cut.py",
        "tests/faults/test_kill_during_save.py", "tests/search/test_search.py",
    ),
    "src/holdfast/launcher": (
        "tests/unit/launcher", "tests/faults/test_kill_during_start.py", "tests/integration/test_rl_heals.py",
        "tests/search/test_search.py",
    ),
    "src/holdfast/launcher/resume": ("tests/faults/test_kill_during_start.py", "tests/faults/test_refusals.py"),
    "src/holdfast/run": (
        "tests/faults/test_kill_orchestrator.py", "tests/faults/test_power_cut.py", "tests/faults/test_damage.py",
    ),
    **dict.fromkeys(
        (
            "src/holdfast/trainer/session.py", "src/holdfast/trainer/saving.py", "src/holdfast/trainer/stop.py",
            "src/holdfast/trainer/programs",
        ),
        ("tests/integration/test_sft_stop.py", "tests/integration/test_rl_killed.py"),
    ),
    "src/holdfast/trainer/preference/reference.py": ("tests/faults/test_kill_in_reference.py",),
    "src/holdfast/orchestrator": ("tests/search/test_search.py",),
    "src/holdfast/orchestrator/env": ("tests/faults/test_every_process.py",),
    "src/holdfast/process": ("tests/integration/test_sft_stop.py", "tests/integration/test_rl_stuck.py"),
    "src/holdfast/inference": (
        "tests/integration/test_inference_process.py",
        "tests/integration/test_rl_side_by_side.py",
    ),
}  # fmt: skip
"""A part (a directory or a file) and its fault tests: minutes of each, as `.ci/run` runs them with every change."""


def changed_files(base: str) -> list[str]:
    """Return the files that differ from a commit, those that are not committed included. Raises `SystemExit`: git knows
    no such commit."""
    # Of a file that was moved both names: it is gone from one part, and new in another.
    changed = ["git", "diff", "--name-only", "--no-renames", "--relative", "-z", base, "--"]
    new = ["git", "ls-files", "--others", "--exclude-standard", "-z"]
    files: list[str] = []
    for command in (changed, new):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"error: `{' '.join(command)}` failed: {done.stderr.strip()}. Name a commit that this clone has with "
                "--base, or fetch more of its history"
            )
        files += done.stdout.split("\0")[:-1]
    return files


def tests_of(files: Iterable[str]) -> list[str]:
    """Return the fault tests of all parts that have one of these files."""
    touched = [part for part in PARTS if any(file == part or file.startswith(f"{part}/") for file in files)]
    return list(dict.fromkeys(test for part in touched for test in PARTS[part]))
