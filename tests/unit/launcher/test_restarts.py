"""What the launcher starts again, how often and when, what it leaves alone, and what it waits for."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.errors import NOT_SAVED, STORAGE_FAILED, ProcessDied
from holdfast.launcher import restart_policy, restarts
from holdfast.launcher.restart_policy import RestartLimit, engine_failure
from holdfast.launcher.resume.resume_step import clear_unpublished
from holdfast.run.run_dir import RunDir
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S
from tests.runs.stand_ins import Stands
from tests.unit.conftest import Told, When

pytestmark = pytest.mark.usefixtures("restored_signals")


_SERVES = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Well(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
HTTPServer(("127.0.0.1", {port}), Well).serve_forever()
"""
_MAKES_A_BATCH = "if not Path('rollouts/step_1').exists(): made('rollouts/step_1')"
_UNTIL_A_BATCH = "while not Path('rollouts/step_1').exists(): time.sleep(0.02)\n"

_STAY = {"trainer": "time.sleep(600)", "orchestrator": "time.sleep(600)"}


def test_a_dead_trainer_takes_the_orchestrator_along_and_leaves_the_server(stands: Stands) -> None:
    trainer = _UNTIL_A_BATCH + f"if start == 1: os.kill(os.getpid(), {signal.SIGKILL:d})\nmade('weights/step_1')"
    orchestrator = _MAKES_A_BATCH + "\nwhile not Path('weights/step_1').exists(): time.sleep(0.02)"
    port = free_port()
    code = stands.watch(
        health_url=f"http://127.0.0.1:{port}/health",
        inference=_SERVES.format(port=port),
        trainer=trainer,
        orchestrator=orchestrator,
    )
    assert code == 0 and stands.attempts == 2
    assert [stands.starts(name) for name in ("trainer", "orchestrator", "inference")] == [2, 2, 1]


def test_a_server_that_dies_before_it_says_a_word_did_not_die_of_what_the_one_before_said(stands: Stands) -> None:
    said = "00:00:01 inference INFO loading vllm\\n(EngineCore pid=1) Traceback (most recent call last):\\n"
    said += "(EngineCore pid=1) ValueError: no"
    inference = f"if start == 1: print('{said}', flush=True); os._exit(75)\nif start == 2: os._exit(1)\ntime.sleep(600)"
    third = "not Path('inference_starts').exists() or Path('inference_starts').stat().st_size < 3"
    trainer = f"while {third}: time.sleep(0.02)\nmade('weights/step_1')"
    code = stands.watch(inference=inference, trainer=trainer, orchestrator=_MAKES_A_BATCH)
    assert code == 0 and stands.starts("inference") == 3


@pytest.mark.clock
def test_the_launcher_waits_where_it_cannot_write_itself(stands: Stands, capfd: pytest.CaptureFixture[str]) -> None:
    stands.full_disks = 2
    trainer = f"if start == 1: os.kill(os.getpid(), {signal.SIGKILL:d})\n{_UNTIL_A_BATCH}made('weights/step_1')"
    assert stands.watch(trainer=trainer, orchestrator=_MAKES_A_BATCH) == 0
    said = capfd.readouterr().out
    assert said.count("waiting for storage: ") == 2 and "(next try in 2 s)" in said
    assert stands.attempts == 2


def test_a_run_heals_where_its_processes_cannot_be_told(stands: Stands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "HEALING_NAME", "x" * 300)  # longer than a name may be
    trainer = f"if start == 1: sys.exit({STORAGE_FAILED})\n{_UNTIL_A_BATCH}made('weights/step_1')"
    assert stands.watch(trainer=trainer, orchestrator=_MAKES_A_BATCH) == 0


def test_a_host_that_is_lost_while_an_attempt_is_prepared_is_one_more_death(stands: Stands, told: Told) -> None:
    stands.lost_hosts = 2
    trainer = f"if start == 1: sys.exit(1)\n{_UNTIL_A_BATCH}made('weights/step_1')"
    assert stands.watch(trainer=trainer, orchestrator=_MAKES_A_BATCH) == 0
    assert "host_1 is lost" in told() and "(restart 3 of 3)" in told()


def test_a_signal_while_storage_is_awaited_ends_the_run(stands: Stands, when: When, told: Told) -> None:
    """The trainer that cannot save has ended, so its step is not saved."""
    trainer = f"""
Path("metrics.jsonl").write_text('{{"step": 1}}\\n')
print("error: the checkpoint of step 1 could not be saved"); sys.exit({STORAGE_FAILED})
"""
    when(lambda: "waiting for storage" in told(), lambda: signal.raise_signal(signal.SIGTERM))
    assert stands.watch(trainer=trainer, orchestrator="time.sleep(600)", ckpt={}) == NOT_SAVED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_a_trainer_alone(stands: Stands, number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    """It saves and ends; that is a stop of the run and no death."""
    trainer = f"sys.exit({128 + number})"
    assert stands.watch(trainer=trainer, orchestrator="time.sleep(600)", ckpt={}) == 128 + number
    assert "starting it again" not in capfd.readouterr().out


def test_an_engine_that_dies_twice_of_the_same_at_the_same_step_ends_the_run(stands: Stands) -> None:
    dies = "print('(EngineCore pid=1) ERROR 11-22 00:12:32 [core.py:1] ' + line, flush=True)"
    lines = ("EngineCore encountered a fatal error.", "Traceback (most recent call last):", "ValueError: no such head")
    inference = f"print('00:12:20 inference INFO loading vllm')\nfor line in {lines!r}: {dies}\nsys.exit(75)"
    with pytest.raises(ProcessDied, match="ValueError: no such head"):
        stands.watch(inference=inference, **_STAY)
    assert stands.starts("inference") == 2, "of 3 restarts that are left"


def test_evaluations_are_started_again_and_end_no_training(
    stands: Stands, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_MAX_EVALUATION_RESTARTS", 1)
    trainer = "while not Path('evaluation_starts').exists() or Path('evaluation_starts').stat().st_size < {}: "
    trainer += "time.sleep(0.02)\nmade('weights/step_1')"
    assert stands.watch(heals=False, evaluation="if start < 3: sys.exit(1)", trainer=trainer.format(2)) == 0
    said = capfd.readouterr().out
    assert stands.starts("evaluation") == 2 and "evaluation ended with exit code 1: starting it again" in said
    assert "WARNING: the run continues without evaluation, which is not started again. evaluation ended with" in said
    assert "finished step" in said and stands.run_dir.given_up.exists()


def test_evaluations_wait_for_storage_as_training_does_and_are_not_given_up(
    stands: Stands, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_MAX_EVALUATION_RESTARTS", 0)
    full = f"if start < 4: sys.exit({STORAGE_FAILED})\nmade('evaluated')"
    trainer = "while not Path('evaluated').exists(): time.sleep(0.02)\nmade('weights/step_1')"
    assert stands.watch(heals=False, evaluation=full, trainer=trainer) == 0
    assert stands.starts("evaluation") == 4 and not stands.run_dir.given_up.exists()
    assert capfd.readouterr().out.count("waiting for storage: ") == 3


def test_a_giving_up_that_nobody_hears_of(stands: Stands, capfd: pytest.CaptureFixture[str]) -> None:
    stands.run_dir.evaluations.write_text("a file")
    assert stands.watch(heals=False, evaluation="sys.exit(2)", trainer="made('weights/step_1')") == 0
    said = capfd.readouterr().out
    assert "WARNING: checkpoints that were to be evaluated stay, whatever ckpt.keep says: " in said
    assert "WARNING: the run continues without evaluation" in said


def test_a_stop_while_evaluations_are_started_again_ends_the_run(
    stands: Stands, when: When, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "_FIRST_DELAY_S", 1e6)
    monkeypatch.setattr(restart_policy, "_LAST_DELAY_S", 1e6)
    said = "evaluation ended with exit code 1: starting it again"
    when(lambda: said in told(), lambda: signal.raise_signal(signal.SIGTERM))
    trainer = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep(600)"
    assert stands.watch(heals=False, evaluation="sys.exit(1)", trainer=trainer) == 128 + signal.SIGTERM


_KILLED = f"os.kill(os.getpid(), {signal.SIGKILL:d})"
_WHEN_GIVEN_UP = "while not Path('given_up').exists(): time.sleep(0.02)\n"


@pytest.mark.parametrize("dies", [
    pytest.param(_KILLED, id="killed again and again"),
    pytest.param(
        "print('00:12:20 inference INFO loading vllm'); print('(EngineCore pid=1) Traceback (most recent call "
        "last):'); print('(EngineCore pid=1) ValueError: no such head', flush=True); sys.exit(75)",
        id="twice of the same exception",
    ),
])  # fmt: skip
def test_the_run_goes_on_without_a_server_that_dies_too_often_and_tries_it_in_the_next_attempt(
    stands: Stands, when: When, told: Told, dies: str
) -> None:
    first = f"if os.path.exists('given_up'): Path('tried_again').touch(); time.sleep(600)\n{dies}"
    # The trainer dies once, when the launcher has said that it goes on.
    trainer = f"{_WHEN_GIVEN_UP}if start == 1: {_KILLED}\n"
    trainer += "while not Path('tried_again').exists(): time.sleep(0.02)\nmade('weights/step_1')"
    when(lambda: "the run continues without inference_0" in told(), (stands.run_dir.path / "given_up").touch)
    code = stands.watch(inference_0=first, inference_1="time.sleep(600)", trainer=trainer, orchestrator=_MAKES_A_BATCH)
    assert code == 0 and stands.attempts == 2
    assert stands.starts("inference_1") == 1
    warnings = [line for line in told().splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1 and "which is not started again" in warnings[0]


def test_the_last_server_ends_the_run(stands: Stands) -> None:
    servers = {f"inference_{number}": _KILLED for number in range(2)}
    with pytest.raises(ProcessDied, match=r"inference_\d was killed by signal 9"):
        stands.watch(**servers, **_STAY, restarts=1)
    assert [stands.starts(f"inference_{number}") for number in range(2)] == [2, 2]


def test_servers_that_die_at_once_are_not_the_last_ones_while_one_of_them_comes_back(stands: Stands) -> None:
    """A machine that runs out of memory kills both: one has no restart left, the other has."""
    waits = "Path(f'{name}_{start}.tmp').write_text(str(os.getpid()))\n"
    waits += "os.rename(f'{name}_{start}.tmp', f'{name}_{start}')\ntime.sleep(600)"
    trainer = """
def pid_of(name):
    while not Path(name).exists(): time.sleep(0.02)
    return int(Path(name).read_text())
os.kill(pid_of("first_1"), 9)
first, second = pid_of("first_2"), pid_of("second_1")
os.kill(second, 19), os.kill(first, 19)
os.kill(first, 9), os.kill(second, 9)
pid_of("second_2")
made("weights/step_1")
"""
    code = stands.watch(
        inference_0=f"name = 'first'\n{waits}",
        inference_1=f"name = 'second'\n{waits}",
        trainer=trainer,
        orchestrator=_MAKES_A_BATCH,
        restarts=1,
    )
    assert code == 0 and [stands.starts(f"inference_{number}") for number in range(2)] == [2, 2]


def test_what_a_server_tells_ends_the_run_whatever_others_there_are(stands: Stands) -> None:
    told = "print('error: no such model', flush=True); sys.exit(2)"
    with pytest.raises(ProcessDied, match="inference_0: no such model"):
        stands.watch(inference_0=told, inference_1="time.sleep(600)", **_STAY)


_WAITS_IN_VAIN_ONCE = f"""
from holdfast.run.journal import wait_for
while not Path("orchestrator_starts").exists(): time.sleep(0.02)
if not wait_for(Path("rollouts/step_1"), timeout_s=2 if start == 1 else {HANG_S}): sys.exit(6)
made("weights/step_1")
"""


@pytest.mark.clock
def test_what_has_no_bound_of_its_own_is_bounded_by_who_waits_for_it(stands: Stands) -> None:
    """As an environment whose constructor never returns: it beats, and says no bound."""
    orchestrator = f"if start == 1: time.sleep(600)\n{_MAKES_A_BATCH}"
    assert stands.watch(trainer=_WAITS_IN_VAIN_ONCE, orchestrator=orchestrator) == 0
    assert (stands.starts("trainer"), stands.starts("orchestrator")) == (2, 2)


@pytest.mark.clock
def test_without_healing_nobody_is_watched_or_started_again(stands: Stands) -> None:
    """As `sft`, `dpo`, `reward-model` and a trainer that is started by hand."""
    slow = "does('a loss of its own', bound_s=0.1)\ntime.sleep(3)\nmade('weights/step_1')"
    assert stands.watch(heals=False, trainer=slow) == 0
    (stands.run_dir.path / "weights" / "step_1").rmdir()
    with pytest.raises(ProcessDied, match="trainer was killed by signal 9"):
        stands.watch(heals=False, trainer=f"os.kill(os.getpid(), {signal.SIGKILL:d})")
    assert stands.starts("trainer") == 2, "one of each run"


@pytest.mark.parametrize("code", [1, 75, -signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGSEGV])
def test_crashes_and_deaths_by_a_signal_are_started_again(code: int) -> None:
    assert RestartLimit(3, 600).delay_s("trainer", code) is not None


@pytest.mark.parametrize("code", [2, 3, 4])
def test_an_error_that_was_told_is_not(code: int) -> None:
    restarts = RestartLimit(3, 600)
    assert restarts.delay_s("trainer", code) is None and restarts.used("trainer") == 0


def test_delays_double_up_to_a_limit() -> None:
    restarts = RestartLimit(9, 600)
    delays = [restarts.delay_s("inference", 1) for _ in range(9)]
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10])


def test_the_allowance_is_each_process_own_and_ends() -> None:
    restarts = RestartLimit(2, 600)
    assert [restarts.delay_s("trainer", 1) is None for _ in range(3)] == [False, False, True]
    assert restarts.used("trainer") == 2 and restarts.delay_s("orchestrator", 1) == 0.2


def test_what_lies_before_the_window_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(restart_policy, "time", SimpleNamespace(monotonic=lambda: now))
    restarts = RestartLimit(1, 60)
    assert restarts.delay_s("trainer", 1) == 0.2
    now += 59
    assert restarts.delay_s("trainer", 1) is None
    now += 2
    assert restarts.delay_s("trainer", 1) == 0.2


def test_a_new_orchestrator_removes_nothing_that_the_trainer_is_removing(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for name in ("step_3", "step_4", ".tmp-step_2-0a1b2c3d", ".tmp-step_5-0a1b2c3d"):
        (run_dir.rollouts / name).mkdir(parents=True)
    clear_unpublished(run_dir)
    assert sorted(path.name for path in run_dir.rollouts.iterdir()) == [".tmp-step_2-0a1b2c3d", "step_3", "step_4"]


START = "00:12:20 inference INFO loading vllm"
ENGINE = "(EngineCore pid=26418) ERROR 11-22 00:12:32 [core.py:1512] "
MAIN = "(MainProcess pid=26947) ERROR 11-22 00:12:33 [async_llm.py:906] "
CHAIN = (
    "EngineCore encountered a fatal error.", "Traceback (most recent call last):", '  File "core.py", line 14, in run',
    "    engine_core.run_busy_loop()", "RuntimeError: Unsupported CPU attention configuration: head_dim=16",
    "  Value error, the second line", "", "The above exception was the direct cause of the following exception:", "",
    "Traceback (most recent call last):", '  File "core.py", line 1', "ValueError: something else",
)  # fmt: skip
KILLED = "00:12:40 inference ERROR the engine died (EngineCore_DP0 %s); the server ends"
SAID = "RuntimeError: Unsupported CPU attention configuration: head_dim=16\n  Value error, the second line"
MUTE = "AssertionError: assert not x.y"
CLIENT = ("Traceback (most recent call last):", "vllm.EngineDeadError: EngineCore encountered an issue")


_ENDS = {
    "chain": ([START, *(ENGINE + line for line in CHAIN), *(MAIN + line for line in CLIENT)], SAID),
    "an assertion": (
        [ENGINE + line for line in (CHAIN[1], "  File", "    assert not x.y", "        ^^^", "AssertionError")],
        MUTE,
    ),
    "an earlier start": ([START, *(ENGINE + line for line in CHAIN), START, "00:13:00 inference INFO ready"], None),
    "of the client alone": ([START, *(MAIN + line for line in CLIENT)], None),
    "cut": ([START, ENGINE + CHAIN[1], ENGINE + CHAIN[2]], None),
    "logged, then killed": ([START, *(ENGINE + line for line in CHAIN), KILLED % "ended with signal SIGKILL"], None),
    "died of it": ([START, *(ENGINE + line for line in CHAIN), KILLED % "ended with exit code 1"], SAID),
    "empty": ([], None),
}


@pytest.mark.parametrize(("lines", "expected"), _ENDS.values(), ids=_ENDS)
def test_the_last_engine_died_of_its_first_exception(lines: list[str], expected: str | None, tmp_path: Path) -> None:
    log = tmp_path / "inference.log"
    log.write_text("\n".join(lines))
    assert engine_failure(log) == expected and engine_failure(tmp_path / "none.log") is None


def test_the_same_failure_at_the_same_step_comes_again() -> None:
    restarts = RestartLimit(9, 600)
    seen = [("a", 1), ("b", 1), ("b", 2), ("b", 2), (None, 2), (None, 2), ("b", 2)]
    told = [restarts.comes_again("inference", failure, step=step) for failure, step in seen]
    assert told == [False, False, False, True, False, False, False]
    assert not restarts.comes_again("trainer", "b", step=2)
