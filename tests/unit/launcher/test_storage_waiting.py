"""Storage, and a remote store at a stop, that fail are told apart from a crash, and waited for with backoff."""

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from holdfast import errors
from holdfast.config import SftConfig
from holdfast.errors import NOT_SAVED, STORAGE_FAILED, DataError, EnvironmentFailure, SaveError, is_storage_failure
from holdfast.launcher import restarts
from holdfast.launcher.restart_policy import StorageBackoff, fullest
from holdfast.launcher.resume.attempt import Attempt
from holdfast.process.child import _LossyFile
from holdfast.process.events import EVENTS_ENV, report
from holdfast.process.heartbeat import HEARTBEAT_ENV
from holdfast.remote.object_store import _code
from holdfast.run.run_dir import RunDir
from holdfast.view.console import Console
from holdfast.view.follow import Tail
from tests.builders.attempts import tell
from tests.builders.checkpoint_files import write_checkpoint
from tests.runs.stand_ins import Stands
from tests.unit.conftest import Told, When


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


DISK = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EREMOTEIO]
SHARED = [errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN]


@pytest.mark.parametrize("number", [*DISK, *SHARED])
def test_full_broken_read_only_and_lost_storages_are_storage_failures(number: int) -> None:
    assert is_storage_failure(OSError(number, "said"))
    assert is_storage_failure(caused(SaveError("no"), caused(errors.RunDirError("why"), OSError(number, "said"))))
    assert is_storage_failure(Exception(f"Error while serializing: I/O error: said (os error {number})"))


@pytest.mark.parametrize("number", SHARED)
@pytest.mark.parametrize(
    "told", [errors.InferenceError("gone"), EnvironmentFailure("gone"), httpx.ConnectError("gone")]
)
def test_what_a_network_did_to_others_is_none(told: Exception, number: int) -> None:
    assert not is_storage_failure(caused(told, OSError(number, "said")))
    assert not is_storage_failure(caused(DataError("no such model"), caused(told, OSError(number, "said"))))


@pytest.mark.parametrize("error", [
    PermissionError(errno.EACCES, "no"), ConnectionRefusedError(errno.ECONNREFUSED, "no"),
    Exception("Permission denied (os error 13)"), SaveError("step 4 exists already"),
    errors.TrainingError("the loss is NaN"), OSError("without a number"),
])  # fmt: skip
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_storage_failure(error) and not is_storage_failure(caused(SaveError("not saved"), error))


def test_an_error_that_is_its_own_cause_has_no_more_causes_and_a_flag_on_another_rank_counts() -> None:
    # `raise error from error` makes it so; the process that told of it never ended.
    error, other = ValueError("no"), ValueError("neither")
    error.__cause__ = error
    assert not is_storage_failure(error)
    error.__cause__, other.__cause__ = other, error
    assert not is_storage_failure(caused(EnvironmentFailure("it raised"), error)) and _code(error) == ""
    # The flag of a failure on another rank counts.
    flagged = SaveError("rank 1: No space left on device")
    flagged.exit_code = STORAGE_FAILED
    assert is_storage_failure(caused(SaveError("not saved"), flagged))


RAISE = """
import errno, os
from holdfast.errors import RunDirError
from holdfast.process.child import exit_code_of, run_reporting_errors, set_up_logging
from holdfast.process.events import report
set_up_logging("test")
def run():
    report("WARNING: about to fail")
    report("failing")
    print("on stdout")
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/x")
    except OSError as error:
        {how}
"""
TOLD = "raise RunDirError('batch 3 cannot be written') from error"


@pytest.mark.parametrize("how", ["raise", TOLD])
@pytest.mark.parametrize("end", ["run_reporting_errors(run)", "import sys; sys.exit(exit_code_of(run))"])
def test_a_process_says_so_by_its_exit_code_also_where_its_log_is_on_the_full_disk(how: str, end: str) -> None:
    code = f"{RAISE.format(how=how)}\n{end}"
    heard = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert heard.returncode == STORAGE_FAILED and "Traceback" not in heard.stderr, heard.stderr
    assert re.match(r"\S+ test WARNING: about to fail\n\S+ test INFO failing\n", heard.stderr)
    assert heard.stdout == "on stdout\n"
    message = "the storage failed at /disk/x: No space left on device" if how == "raise" else "batch 3 cannot be"
    assert f"error: {message}" in heard.stderr
    with open("/dev/full", "w") as full:
        unheard = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full)
    assert unheard.returncode == STORAGE_FAILED


def test_output_that_its_disk_cannot_take_is_dropped_and_the_rest_is_written() -> None:
    code = (
        "import os, sys\n"
        "from holdfast.process.child import make_output_lossy\n"
        "make_output_lossy(); make_output_lossy()\n"
        "print('lost'); log = os.dup(1); os.dup2(int(sys.argv[1]), 1); print('kept ü')\n"
    )
    read, write = os.pipe()
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", code, str(write)], stdout=full, pass_fds=[write])
    os.close(write)
    with open(read, encoding="utf-8") as kept:
        assert (ended.returncode, kept.read()) == (0, "kept ü\n")


def test_output_that_is_closed_is_an_error(tmp_path: Path) -> None:
    """Which is no full disk, and would hide whatever the process says."""
    output = _LossyFile(tmp_path / "log", "w")
    assert output.write(b"said") == 4
    os.close(output.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        output.write(b"more")
    with pytest.raises(OSError, match="Bad file descriptor"):
        output.close()


def test_an_event_that_cannot_be_told_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EVENTS_ENV, "/dev/full")
    report("training", step=3)


def test_the_wait_grows_up_to_a_limit_and_ends(clock: Callable[[float], None]) -> None:
    backoff, delays = StorageBackoff(100), []
    while (delay := backoff.delay_s(7)) is not None:
        delays.append(delay)
        clock(delay)
    assert delays == [1, 2, 4, 8, 16, 30, 30, 9]


@pytest.mark.parametrize("failed", [
    [(0, 7, 1), (9, 8, 1), (9, 6, 1), (1, 8, None)],  # one second is left for step 8 and those before
    [(0, 8, 1), (11, 6, 1), (9, 6, 1), (1, 6, None)],  # also where old steps were trained again meanwhile
])  # fmt: skip
def test_the_time_begins_anew_with_a_step_that_was_never_trained_before(
    failed: list[tuple[float, int, float | None]], clock: Callable[[float], None]
) -> None:
    backoff = StorageBackoff(10)
    for seconds, step, delay_s in failed:
        clock(seconds)
        assert backoff.delay_s(step) == delay_s


def test_no_patience_is_no_wait() -> None:
    assert StorageBackoff(0).delay_s(3) is None


def test_the_fullest_directory_is_named(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    assert fullest(run_dir)[0] == run_dir.path
    run_dir.rollouts.symlink_to("/proc")  # a filesystem without room
    assert fullest(run_dir) == (run_dir.rollouts, 0)


_FAILS = "x" * 300
"""A link to it makes every look at it fail, by a name that is too long; as a storage does that is away."""


@pytest.mark.usefixtures("restored_signals")
def test_an_end_is_told_where_the_storage_fails(stands: Stands) -> None:
    trainer = f"os.makedirs('weights'); os.symlink({_FAILS!r}, 'weights/step_0'); sys.exit(1)"
    with pytest.raises(errors.ProcessDied, match="trainer ended with exit code 1"):
        stands.watch(heals=False, trainer=trainer)


def test_what_the_launcher_notes_may_find_no_storage(run_dir: RunDir) -> None:
    logs = run_dir.logs(1)
    logs.parent.mkdir()
    with Console(run_dir, attempt=1, first_step=0, max_steps=1) as console:
        logs.symlink_to(_FAILS)
        console.note("starting again", restarted="trainer")
        logs.unlink()
        logs.mkdir()
        console.note("ended", exit_code=0)
    assert [event["phase"] for event in Tail(logs / "events.jsonl")] == ["ended"]


def test_an_attempt_begins_without_the_phases_of_the_one_before(run_dir: RunDir) -> None:
    for process, phase in (("trainer", "loading model"), ("launcher", "ended")):
        tell(run_dir, process, phase)
    state = Console(run_dir, attempt=2, first_step=0, max_steps=1)._follower.state
    assert (state.attempt, state.phases, state.ended) == (2, {}, None)


# Saves its step here at once, and then goes on "uploading" as its argument says.
TRAINER = """
import signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with open(sys.argv[1], "a") as metrics:
    metrics.write('{"step": 5}\\n')
signal.sigwait([signal.SIGTERM])
if sys.argv[2] == "hangs":
    signal.pause()
sys.exit(int(sys.argv[2]))
"""


_STORE = "s3://bucket/run"
_ENDS = [(_STORE, "hangs", NOT_SAVED), (_STORE, "137", NOT_SAVED), (_STORE, "3", NOT_SAVED), (_STORE, "143", 143)]


@pytest.mark.parametrize(("store", "end", "code"), [*_ENDS, (None, "hangs", 143)])
def test_the_exit_code_is_that_of_the_upload(
    store: str | None, end: str, code: int, run_dir: RunDir, when: When, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_TELLING_S", 0.1)
    write_checkpoint(run_dir, 5)
    ckpt = {"dir": store, "grace_s": 0.2 if end == "hangs" else 60}
    config = SftConfig.model_validate({"output_dir": str(run_dir.path), "max_steps": 9, "ckpt": ckpt})
    argv = [sys.executable, "-c", TRAINER, str(run_dir.metrics), end]
    plan = restarts.Plan(Attempt(run_dir, 1, None), {"trainer": argv}, config, [])

    def has_trained() -> bool:
        return run_dir.metrics.exists() and run_dir.metrics.stat().st_size > 0

    when(has_trained, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert restarts.watch(plan) == code
    is_here_alone = f"step 5 is saved here, but not at {store}" in told()
    assert is_here_alone == (code == NOT_SAVED) and HEARTBEAT_ENV not in os.environ
