"""Which test runs when, what a run of a lane refuses, and which statements it has run."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.coverage import __main__ as coverage
from tests.lanes import __main__ as lanes
from tests.lanes import parts, skips, written
from tests.lanes.marks import RESOURCES
from tests.lanes.shares import SHARES
from tests.pages import guarantees, promises
from tests.pages.documentation import blocks, commands
from tests.pages.runs import can_be_started


def pytest_run(tmp_path: Path, source: str, *words: str) -> tuple[int, str]:
    """Run pytest on a file of tests with the hooks of this repository; return its exit code and what it printed."""
    (tmp_path / "test_sample.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", "-c"]
    configuration = tmp_path / "pytest.ini"
    marks = "\n".join(f"    {mark}: x" for mark in sorted({*RESOURCES, "everyday", "gpu", "slurm"}))
    configuration.write_text(f"[pytest]\naddopts = --strict-markers\nmarkers =\n{marks}\n")
    done = subprocess.run([*command, configuration, *words, tmp_path], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def git(repository: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=repository, check=True)


def test_every_resource_is_a_mark_with_a_meaning() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.findall(r'^    "(\w+): ', text[text.index("\nmarkers = [") :].partition("]")[0], re.MULTILINE)
    assert set(declared) == RESOURCES | {"everyday", "gpu", "slurm"}


@pytest.mark.parametrize(
    ("words", "ran"), [("-k test_b", "b"), ("--lane everyday", "ad"), ("--lane nightly", "bc"), ("--lane slurm", "e")]
)
def test_a_lane_runs_its_tests_and_paths_run_whatever_they_hold(words: str, ran: str, tmp_path: Path) -> None:
    source = (
        "import pytest\n"
        "def test_a(): pass\n"
        "@pytest.mark.docs\ndef test_b(): pass\n"
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.ranks)])\ndef test_c(x): pass\n"
        "@pytest.mark.launch\n@pytest.mark.everyday\ndef test_d(): pass\n"
        "@pytest.mark.slurm\n@pytest.mark.everyday\ndef test_e(): pass\n"
    )
    code, printed = pytest_run(tmp_path, source, "-v", *words.split())
    assert code == 0, printed
    assert re.findall(r"::test_(\w)\S* PASSED", printed) == list(ran), printed


def test_every_command_of_the_readme_is_run() -> None:
    """By `.ci/run` word for word, or at night by `test_the_readme` with fewer steps."""
    page = ROOT / "README.md"
    assert {block.language for block in blocks(page)} == {"console", "python"}, "a script is read, and not run"
    pasted = subprocess.check_output([ROOT / ".ci" / "readme"], text=True).splitlines()
    whole = [re.escape(f"pip install uv && uv run --group {one}") for one in ("cpu rl @ ", "dev python -m tests.lanes")]
    assert len(pasted) == 2 and all(map(re.match, whole, pasted))
    script = (ROOT / ".ci" / "run").read_text()
    assert script.count("\nmapfile -t lines < <(.ci/readme)\n") == 1
    assert all(script.count(f'\nbash -c "${{lines[{number}]}}"\n') == 1 for number in (0, 1))
    others = [command for command in commands(page) if command.line not in pasted]
    assert [command.line for command in commands(page) if command.line in pasted] == pasted
    assert not [command.line for command in others if not can_be_started(command) and command.program != "sha256sum"]


def test_the_workflows_run_the_scripts() -> None:
    workflows = [(ROOT / ".github" / "workflows" / name).read_text() for name in ("check.yml", "nightly.yml")]
    assert all("run: .ci/run\n" in text for text in workflows) and "run: .ci/nightly\n" in workflows[1]


@pytest.mark.parametrize("name", ["README.md", "outputs/run/metrics.jsonl", "tests/__pycache__/x.pyc"])
def test_a_lane_that_writes_into_the_repository_fails(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("text")
    state = written.state

    def everyday(*_: object) -> int:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("other")
        return 0

    monkeypatch.setattr(written, "state", lambda: state(tmp_path))
    monkeypatch.setattr(lanes, "everyday", everyday)
    is_told = "__pycache__" not in name
    assert lanes.main([]) == is_told and (f"by you: {name}\n" in capsys.readouterr().out) == is_told


def test_light_units_and_what_they_start_may_ask_for_torch_and_not_import_it(tmp_path: Path) -> None:
    source = (
        "import importlib.util, os, pytest, subprocess, sys\n"
        "def test_asks(): assert importlib.util.find_spec('torch') is not None\n"
        "def test_imports(): import torch.nn\n"
        "def test_imports_by_asking(): importlib.util.find_spec('torch.nn')\n"
        "def start(code): subprocess.run([sys.executable, '-c', code], check=True)\n"
        "def test_starts_what_asks(): start('import importlib.util as u; assert u.find_spec(\"torch\")')\n"
        "def test_starts(): start('import torch')\n"
        "@pytest.mark.launch\ndef test_may(): assert 'light_children' not in os.environ.get('PYTHONPATH', '')\n"
    )
    code, printed = pytest_run(tmp_path, source, "--light")
    failed = ["test_imports", "test_imports_by_asking", "test_starts"]
    assert code == 1 and re.findall(r"^FAILED \S*::(\w+)", printed, re.MULTILINE) == failed, printed
    assert "a test of the light units imports torch: move the test" in printed


def test_every_file_of_tests_is_in_one_share() -> None:
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    assert len(files) > 100 and not [file for file in files if sum(share.holds(file) for share in SHARES) != 1]
    assert not [path for share in SHARES for path in share.paths if not (ROOT / path).exists()]


def test_a_change_of_a_part_runs_its_faults() -> None:
    for part, tests in parts.PARTS.items():
        assert (ROOT / part).exists() and all((ROOT / test).exists() for test in tests)
    writer, launcher = "src/holdfast/trainer/checkpoint/writer.py", "src/holdfast/launcher/restarts.py"
    assert parts.tests_of(["README.md", "src/holdfast/trainer/launch.py"]) == []
    assert parts.tests_of([writer]) == list(parts.PARTS["src/holdfast/trainer/checkpoint"])
    resume = "src/holdfast/launcher/resume/prepare.py"
    both = parts.tests_of([writer, launcher, resume, *(f"{part}/x.py" for part in parts.PARTS)])
    assert len(both) == len(set(both)) and set(both) == {test for tests in parts.PARTS.values() for test in tests}
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"`{part}`" in page for part in parts.PARTS)


def test_new_and_moved_files_are_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "old").write_text("text\n" * 9)
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "a"), ("mv", "part/old", "elsewhere")):
        git(tmp_path, *words)
    (tmp_path / "part" / "new").touch()
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    assert sorted(parts.changed_files("HEAD")) == ["elsewhere", "part/new", "part/old"]
    with pytest.raises(SystemExit, match="no-such-commit"):
        parts.changed_files("no-such-commit")


@pytest.mark.parametrize(
    ("dies", "failed"),
    [("False", []), ("'--light' in sys.argv and os.kill(os.getpid(), 9)", ["launcher", "orchestrator", "run"])],
)
def test_a_share_fails_its_lane_whatever_ends_it(
    dies: str, failed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    share = f"import os, sys; os.write(1, b'\\xff is no text\\n'); {dies}"
    monkeypatch.setattr(lanes, "_PYTEST", (sys.executable, "-c", share))
    assert lanes.everyday(["-x"], processes=2) == bool(failed)
    assert (f"failed: {', '.join(failed)}\n" in capsys.readouterr().out) == bool(failed)


def test_promises_have_the_lanes_of_their_tests_and_none_is_noticed() -> None:
    page = "# A\n\nIt lives.[^a] It dies. It was not tried.\n\n" + (
        "| what | test |\n|---|---|\n| one | `test_x.py` |\n| two | none |\n\n- **Bold.** Noted.[^b]\n- Not noted\n\n"
        "## Tests\n\nNothing.\n\n[^a]: `test_x.py::test_a`,\n    `test_y.py`\n[^b]: `test_x.py::test_b`\n"
    )
    notes = guarantees.footnotes(page)
    assert notes == {"a": ["test_x.py::test_a", "test_y.py"], "b": ["test_x.py::test_b"]}
    claims = [one for one in guarantees.claims(page) if not guarantees.is_not_tried(one)]
    without = [one for one in claims if not guarantees.tests_of(one, notes)]
    assert without == ["It dies.", "| two | none |", "- Not noted"] and guarantees.notes_used(page) == {"a", "b"}
    page = "# A\n\nIt lives.[^a] It dies. It was not tried.\n\n## Tests\n\n[^a]: `test_x.py::test_a`, `test_y.py`\n"
    rows = promises.table(page, {"test_x.py::test_a": {"nightly", "everyday"}})
    assert rows == [
        promises.Row("It lives.", "test_x.py::test_a", ("everyday", "nightly")),
        promises.Row("It lives.", "test_y.py", ()),
        promises.Row("It dies.", "", ()),
    ]
    assert not any(row.is_by_hand for row in rows)


@pytest.mark.clock
def test_a_promise_whose_test_was_skipped_is_named_until_it_was_tried(tmp_path: Path) -> None:
    source = (
        "import os, pytest\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_a(x): x == 2 and 'TRY' not in os.environ and pytest.skip('no browser')\n"
        "def test_b(): pytest.skip('this machine computes otherwise: it is another')\n"
        "def test_c(): pass\n"
    )
    rows = [promises.Row(f"It {name}.", f"test_sample.py{name}", ("nightly",)) for name in ("::test_a", "::test_b", "")]
    code, printed = pytest_run(tmp_path, source)
    assert code == 0 and "2 skipped" in printed, printed
    assert promises.not_tried(rows, skips.skipped(tmp_path / skips.NAME)) == [
        "not tried: It ::test_a. (test_sample.py::test_a: no browser)", "not tried: It . (test_sample.py: no browser)"
    ]  # fmt: skip
    pytest_run(tmp_path, source.replace("'TRY'", "'PATH'"))
    assert promises.not_tried(rows, skips.skipped(tmp_path / skips.NAME)) == []


@pytest.mark.docs
def test_every_promise_of_the_guarantees_has_a_test_in_a_lane() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.pages.promises"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    rows = promises.table(guarantees.PAGE.read_text(), {})
    assert done.stdout.count("\n| ") >= len(rows)


SOURCE = '''"""Text."""

class Thing:
    size: int = 3
    """Text."""

    def grown(self, by: int) -> int:
        if by > 5:
            by = 5
        return self.size + by

def unused(device) -> None:  # untested: there is no such device
    if device:
        device()

def kind(value):
    match value:
        case 1:
            return "one"
        case _:
            return "other"
'''


def test_what_a_killed_process_has_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src/holdfast").mkdir(parents=True)
    (tmp_path / "src/holdfast/thing.py").write_text(SOURCE)
    monkeypatch.setattr(coverage, "ROOT", tmp_path)
    monkeypatch.setattr(coverage, "MARKS", tmp_path / "marks")
    monkeypatch.setattr(coverage, "_PTH", tmp_path / "start.pth")
    coverage.begin()
    program = (
        "import os, sys; import _coverage_marks; sys.path.insert(0, 'src')\n"
        "import holdfast.thing\n"
        "if os.fork() == 0: holdfast.thing.kind(1); os.kill(os.getpid(), 9)\n"
        "os.wait(); holdfast.thing.kind(2); os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"COVERAGE_MARKS": str(tmp_path / "marks"), "PYTHONPATH": str(coverage._STARTUP)}
    ended = subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL and coverage.report(70.0) == 1
    assert "holdfast/thing.py: 4 of 11 not run: 8-10; never passed by: 8\n" in capsys.readouterr().out
    assert coverage.report(60.0) == 0
    coverage.end()
    assert not (tmp_path / "start.pth").exists()
    assert coverage.resume() == 1, "no lane has passed with these marks"
    monkeypatch.setenv("COVERAGE_MARKS", str(tmp_path / "marks"))
    coverage.passed("everyday")
    assert coverage.resume() == 0 and (tmp_path / "start.pth").exists()
    assert coverage.report(40.0) == 0, "the marks are kept"
    (tmp_path / "src/holdfast/thing.py").write_text(f"{SOURCE}\n")
    assert coverage.resume() == 1
