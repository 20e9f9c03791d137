"""Directories that may not be written, odd clocks and two runs in one place: refused in one message, or no matter."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ModelFactory
from tests.faults.disks import Disk
from tests.faults.run_states import FLAGS, LAST
from tests.forking.commands import Run, shared_commands

pytestmark = pytest.mark.launch

Start = Callable[..., Run]
Chmod = Callable[[Path, int], None]

UNPRIVILEGED = "from tests.faults.disks import drop_capabilities\ndrop_capabilities()\n"
"""Source of a fault: permissions count, also for root."""


@pytest.fixture(scope="module")
def start(tiny_model: ModelFactory, sft_data: Path) -> Start:
    model = tiny_model(weights=False, attention_dropout=0.3)

    def run(output: Path, *flags: str, common: tuple[str, ...] = FLAGS, **options: Any) -> Run:
        return shared_commands().sft(output, model, sft_data, *common, *flags, **options)

    return run


@pytest.fixture
def chmod() -> Iterator[Chmod]:
    """Change modes until the end of the test, so that pytest can clear up."""
    before: dict[Path, int] = {}

    def change(path: Path, mode: int) -> None:
        before.setdefault(path, path.stat().st_mode)
        path.chmod(mode)

    yield change
    for path, mode in before.items():
        if path.exists():  # it may have been set aside
            path.chmod(mode)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    return tmp_path / "run"


def check_refused(run: Run, *parts: str) -> None:
    """It ended before anything was started, with one message that has all `parts`."""
    assert run.code == 2 and "Traceback" not in run.log, run.log
    (message,) = [line for line in run.log.splitlines() if line.startswith("error: ")]
    for part in parts:
        assert part in message, message
    assert "reading data" not in run.log


@pytest.mark.parametrize(("closed", "asked", "named"), [
    (".", ".", "."), (".", "new", "new"), ("checkpoints", ".", "checkpoints"), ("weights", ".", "weights"),
    ("checkpoints/.tmp-step_2", ".", "."),
], ids=["the run", "a new one in it", "its checkpoints", "its weights", "a leftover that is to go"])  # fmt: skip
def test_a_directory_that_may_not_be_written_is_refused(
    start: Start, output: Path, chmod: Chmod, closed: str, asked: str, named: str
) -> None:
    """At the start, and not after the hours that it takes to the first save."""
    is_leftover = closed.endswith("step_2")
    (output / closed / ("trainer" if is_leftover else "")).mkdir(parents=True, exist_ok=True)
    chmod(output / closed, 0o555)
    run = start(output / asked, fault=UNPRIVILEGED, log=output.with_name("log")).wait()
    advice = ("trainer", "start again") if is_leftover else ("--output-dir",)
    check_refused(run, str(output / named), "Permission denied", *advice)


def test_a_read_only_mount_and_a_file_in_place_of_checkpoints_are_refused(start: Start, output: Path) -> None:
    place = output / "checkpoints"
    with Disk(f"mount --bind {place} {place}\nmount -o remount,ro,bind {place}") as disk:
        if disk.problem:
            pytest.skip(f"nothing can be mounted here: {disk.problem}")
        run = start(output, fault=disk.fault).wait()
    check_refused(run, str(place), "Read-only file system", "--output-dir")
    place.rmdir()
    place.write_text("not a directory")
    check_refused(start(output).wait(), str(place), "--output-dir")
    assert place.read_text() == "not a directory"


def test_a_step_that_may_not_be_read_is_not_passed_over(start: Start, output: Path, chmod: Chmod) -> None:
    assert start(output).wait().code == 0
    shard = output / f"checkpoints/step_{LAST}/trainer/__0_0.distcp"
    chmod(shard, 0)
    numbered = start(output, "--ckpt.resume-step", str(LAST), fault=UNPRIVILEGED).wait()
    check_refused(numbered, f"{shard} cannot be read: Permission denied", "choose another step")
    newest = start(output, fault=UNPRIVILEGED, until="prepared").wait()
    check_refused(newest, "no older step replaces step 6", "choose one by number: 4")
    assert shard.exists() and not (output / "discarded").exists()
    older = start(output, "--ckpt.resume-step", "4", fault=UNPRIVILEGED, until="prepared").wait()
    assert older.code == 0 and "from step 4 " in older.log, older.log
    assert (output / f"discarded/attempt_2/checkpoints/step_{LAST}").exists()
