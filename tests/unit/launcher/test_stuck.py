"""Work that comes no further is noticed, named and healed; whoever waits for it goes on waiting meanwhile."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import STUCK, ProcessDied
from holdfast.launcher.liveness import Health, LivenessMonitor
from holdfast.launcher.restart_policy import RestartLimit
from holdfast.process.heartbeat import HEALING_NAME, HEARTBEAT_ENV, Wait, show_stacks
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S
from tests.runs.stand_ins import Stands

pytestmark = pytest.mark.usefixtures("restored_signals")


_WAITS = """
from holdfast.run.journal import wait_for
if not wait_for(Path("rollouts/step_1"), timeout_s={timeout_s}):
    print("error: gave up"); sys.exit(3)
made("weights/step_1")
"""
_TRAINER = _WAITS.format(timeout_s=HANG_S)


@pytest.mark.clock
def test_a_trainer_waits_while_the_launcher_awaits_storage(stands: Stands, capfd: pytest.CaptureFixture[str]) -> None:
    """However much longer that takes than the trainer would wait for nothing: 1 + 2 + 4 s here."""
    full = """
if start <= 3:
    print("error: batch 1 cannot be written: No space left on device"); sys.exit(5)
made("rollouts/step_1")
"""
    begun = "while not Path('orchestrator_starts').exists(): time.sleep(0.01)"
    assert stands.watch(trainer=begun + _WAITS.format(timeout_s=6), orchestrator=full) == 0
    assert capfd.readouterr().out.count("waiting for storage") == 3


_BLOCKED_ONCE = """
import asyncio
from holdfast.orchestrator.main import FreezeTolerantLoop
from holdfast.orchestrator.env.guard import beating
async def main():
    async with beating(bound_s=3):
        await asyncio.sleep(2)
        if not Path("blocked").exists():
            Path("blocked").touch()
            time.sleep(600)
with asyncio.Runner(loop_factory=FreezeTolerantLoop) as runner:
    runner.run(main())
made("rollouts/step_1")
"""


@pytest.mark.clock
def test_a_blocked_event_loop_is_killed_and_started_again(stands: Stands, capfd: pytest.CaptureFixture[str]) -> None:
    """Though a thread of the process beats on."""
    assert stands.watch(trainer=_TRAINER, orchestrator=_BLOCKED_ONCE) == 0
    said = r"orchestrator has made no progress for \d+ s in its first steps: killing it"
    assert re.search(said, capfd.readouterr().out)
    stacks = (stands.run_dir.logs(1) / "orchestrator.log").read_text()
    assert "most recent call first" in stacks and "in main" in stacks, "where it was is in its log"


_MANY_THREADS = """
import sys, threading
from holdfast.process.heartbeat import write_stacks_on_request
def deep(levels): deep(levels - 1) if levels else threading.Event().wait()
def main():
    write_stacks_on_request()
    for _ in range(60): threading.Thread(target=deep, args=(60,), daemon=True).start()
    print(flush=True)
    deep(1)
main()
"""


@pytest.mark.clock
def test_stacks_of_all_threads_are_awaited_and_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the main thread, which counts, is written last; ranks share a log."""
    for name, seconds in (("_WAIT_S", HANG_S), ("_QUIET_S", 1.5), ("_MOST_S", HANG_S)):  # of a machine that is busy
        monkeypatch.setattr(f"holdfast.process.heartbeat.{name}", seconds)
    log = tmp_path / "log"
    with log.open("ab") as output:
        argv = [sys.executable, "-c", _MANY_THREADS]
        processes = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=output) for _ in range(3)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline()
        processes[1].send_signal(signal.SIGSTOP)
        show_stacks([process.pid for process in processes], of=os.getpid(), log=log)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    kinds = r'(Thread|Current thread) 0x\w+.*:|  File "[^"]+", line \d+ in \S+|'
    lines = log.read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(kinds, line)] == []
    assert sum("most recent call first" in line for line in lines) == 2 * 61
    assert sum("in main" in line for line in lines) == 2


def test_what_is_stuck_at_the_same_step_again_and_again_ends_the_run(stands: Stands) -> None:
    """It takes longer to notice than the window in which deaths are counted."""
    stuck = "does('a loss of its own', bound_s=0.1); time.sleep(600)"
    with pytest.raises(ProcessDied, match="trainer made no progress in a loss of its own") as raised:
        stands.watch(restarts=1, trainer=stuck, orchestrator="time.sleep(600)")
    assert "it was started again 1 times after step 0" in str(raised.value)


def test_being_stuck_is_counted_by_step_and_not_by_time() -> None:
    restarts = RestartLimit(2, window_s=0.0)
    assert [restarts.delay_s("trainer", STUCK, stuck_at=7) is not None for _ in range(3)] == [True, True, False]
    assert restarts.delay_s("trainer", STUCK, stuck_at=8) is not None


_SERVER = f"""
from http.server import BaseHTTPRequestHandler, HTTPServer
if start == 2:
    print("error: the engine did not start: free memory is less than desired"); sys.exit(3)
class Well(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.flush()
        self.connection.recv(1)  # until the launcher has noted it, and hangs up
        self.server.asked = True
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Well)
server.asked = False
while start == 1 and not server.asked:
    server.handle_request()
if start == 1:
    os.kill(os.getpid(), {signal.SIGKILL:d})
Path("rollouts/step_1").mkdir()
server.serve_forever()
"""


@pytest.mark.clock
def test_a_server_that_was_well_and_cannot_start_retries(stands: Stands, capfd: pytest.CaptureFixture[str]) -> None:
    """Its predecessor may not have let go of memory and port yet: the same error at a first start ends the run."""
    port = free_port()
    server = _SERVER.replace("int(sys.argv[1])", str(port))
    made = "\nwhile not Path('rollouts/step_1').exists(): time.sleep(0.05)\n"
    url = f"http://127.0.0.1:{port}/health"
    assert stands.watch(health_url=url, inference=server, trainer=_TRAINER, orchestrator=made) == 0
    assert "inference ended with exit code 3: starting it again (restart 2 of 3)" in capfd.readouterr().out
    (stands.run_dir.path / "inference_starts").write_text("x")
    (stands.run_dir.path / "rollouts" / "step_1").rmdir()
    with pytest.raises(ProcessDied, match="the engine did not start") as raised:
        stands.watch(inference=server, trainer="time.sleep(600)", orchestrator=made)
    assert raised.value.exit_code == 3


def test_the_rank_that_stands_still_is_named(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """Both beat, and one of them moves on."""
    monitor = LivenessMonitor(tmp_path / "trainer")
    for second in range(12):
        clock(1)
        for rank, moves in enumerate((second, 7)):
            (tmp_path / "new").write_text(f'{{"moves": {moves}, "doing": "step 3", "bound_s": 10}}')
            (tmp_path / "new").replace(tmp_path / f"trainer_rank_{rank}")
        assert monitor.silent_s() < 2 and (monitor.stuck() is None) == (second < 11)
    stuck = monitor.stuck()
    assert stuck is not None and (stuck.part, stuck.doing, stuck.seconds) == ("rank 1", "step 3", 11.0)


def test_an_update_of_weights_is_no_silence(tmp_path: Path) -> None:
    """The engine answers nobody meanwhile: what bounds it is the time for an update."""
    beats = tmp_path / "inference"
    beats.write_text('{"moves": 1, "doing": "taking policy version 3", "bound_s": 600, "answers": false}')
    monitor = LivenessMonitor(beats, Health("http://127.0.0.1:9/health"), probe_period_s=60)
    assert monitor._health is not None
    monitor._health._last_good = -1000.0
    assert monitor.silent_s() < 100
    beats.write_text('{"moves": 2, "doing": "serving"}')
    assert monitor.silent_s() < 100, "it could not be asked until just now"


def test_a_wait_is_over_when_nobody_gets_anything_done(
    tmp_path: Path, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEARTBEAT_ENV, str(tmp_path / "trainer"))
    own, other, healing = (tmp_path / name for name in ("trainer_rank_0", "orchestrator", HEALING_NAME))
    other.write_text('{"moves": 1, "work": 1}')
    wait = Wait(60)

    def passes(seconds: float) -> bool:
        clock(seconds)
        return wait.is_over()

    assert not passes(59)
    own.write_text('{"work": 9}')
    other.write_text('{"moves": 99, "work": 2}')
    assert not passes(2), "something was done"
    healing.touch()
    assert not passes(61), "the launcher heals something"
    other.write_text('{"moves": 100, "work": 2}')
    assert passes(61), "an event loop that only turns gets nothing done"
