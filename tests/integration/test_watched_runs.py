"""Runs watched by Prometheus, trackers, on a page, in a terminal and by a profiler, through kills and resumes."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from holdfast.view.track import main as track
from tests.conftest import ROOT, ModelFactory
from tests.forking.commands import Run, shared_commands, wait_for_step
from tests.integration.conftest import UsedServer
from tests.runs.dashboards import charts_in, curve_in, page_when, request
from tests.runs.ports import free_port
from tests.runs.profiles import Trace, traces
from tests.runs.prometheus import Scrape, scrape, scraped_when
from tests.runs.rl import RlRun, complete, exact_metrics, last_step
from tests.runs.terminal import Terminal
from tests.runs.trackers import TrackedDirectory
from tests.runs.training import SftRun, refused, run_sft, succeeded

pytestmark = pytest.mark.launch

Start = Callable[..., Run]
_ENDLESS = ("--max-steps", "100000", "--optim.schedule-steps", "100", "--ckpt.interval", "20")


@pytest.fixture
def start(tmp_path: Path, tiny_model: ModelFactory, sft_data: Path) -> Iterator[Start]:
    """Return a function that starts an endless run, in a directory by that name."""
    with ExitStack() as stack:

        def begin(name: str, *flags: str) -> Run:
            run = shared_commands().sft(tmp_path / name, tiny_model(weights=False), sft_data, *_ENDLESS, *flags)
            stack.callback(run.kill)
            return run

        yield begin


def test_prometheus_reads_a_run_and_its_resume(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("HOLDFAST_PROMETHEUS", f"127.0.0.1:{port}")
    flags = ("--tracking.backends", "prometheus", "--data.validation-fraction", "0.2", "--val-interval", "5")
    run = start("run", *flags)
    scraped_when(port, lambda found: "holdfast_step" in found.samples and found.value("holdfast_step") >= 20)
    run.kill()
    with pytest.raises(OSError):
        scrape(port)
    again = start("run", *flags, "--ckpt.resume-step", "latest")

    def shown(found: Scrape) -> set[str]:
        return {labels["metric"] for labels, _ in found.samples.get("holdfast_metric", [])}

    resumed = scraped_when(port, lambda found: "val/loss" in shown(found))
    os.kill(again.pid, signal.SIGTERM)
    assert again.wait().code == 128 + signal.SIGTERM
    last = read_metrics(again.output / "metrics.jsonl")[-1]
    assert {name for name, value in last.items() if name != "step" and value is not None} <= shown(resumed)


Tracked = Callable[..., SftRun]
_OWN = "tests.runs.own_tracker:InFile"
_BROKEN = "tests.runs.own_tracker:OutOfOrder"
_PATIENT = ("--tracking.finish-timeout-s", "600")  # on a busy machine the imports of a tracker take long


@pytest.fixture
def run_tracked(tmp_path: Path, tiny_model: ModelFactory, sft_data: Path, in_root: Path) -> Tracked:
    """Return a function that makes a run in one directory."""

    def run(*flags: str) -> SftRun:
        return run_sft(tmp_path / "run", tiny_model(weights=False), sft_data, *flags)

    return run


def _lines(run_dir: RunDir) -> list[list[str]]:
    return [line.split() for line in (run_dir.path / "own.txt").read_text().splitlines()]


def _sent(run_dir: RunDir) -> list[tuple[int, float]]:
    return [(int(words[1]), float(words[2])) for words in _lines(run_dir) if words[0] == "step"]


def _trained(run_dir: RunDir) -> list[tuple[int, float]]:
    return [(int(line["step"]), line["loss"]) for line in read_metrics(run_dir.metrics)]


def test_a_run_its_resume_and_another_way(run_tracked: Tracked) -> None:
    tracked = ("--tracking.backends", f"tensorboard,{_OWN}", *_PATIENT, "--ckpt.interval", "2")
    run_dir = succeeded(run_tracked("--max-steps", "4", *tracked)).run_dir
    assert _sent(run_dir) == _trained(run_dir)
    succeeded(run_tracked("--max-steps", "6", "--ckpt.resume-step", "latest", *tracked))
    assert run_dir.rewinds() == [] and _sent(run_dir) == _trained(run_dir)
    begun = [words[1:] for words in _lines(run_dir) if words[0] == "begin"]
    name, run_id = run_dir.path.name, run_dir.run_id()
    assert begun == [
        [run_id, name, "attempt", "1", "after", "0", "lr", "0.001", "None"],
        [run_id, name, "attempt", "2", "after", "4", "lr", "0.001", "None"],
    ]
    assert [step for step, _ in TrackedDirectory.of(run_dir).steps("tensorboard")["history_1"]] == [1, 2, 3, 4, 5, 6]
    # An older step than the newest, with another rate: what was sent stays, and the new way is a run of its own.
    (run_dir.path / "own.txt").unlink()
    succeeded(run_tracked("--max-steps", "6", "--ckpt.resume-step", "4", "--optim.lr", "1e-2", *tracked))
    assert run_dir.rewinds() == [4]
    assert _lines(run_dir)[0][1:] == [f"{run_id}-2", name, "(2)", "attempt", "3", "after", "0", "lr", "0.01", run_id]
    assert _sent(run_dir) == _trained(run_dir) and len(_trained(run_dir)) == 6


@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_tracker_that_fails_costs_one_warning_and_is_sent_to_later(
    how: str, run_tracked: Tracked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKER_FAILS", how)
    run = succeeded(
        run_tracked("--max-steps", "2", "--tracking.backends", _BROKEN, "--tracking.finish-timeout-s", "20")
    )
    assert "finished step 2 of 2" in run.output
    assert f"`uv run track {run.run_dir.path} --to {_BROKEN}` sends what is missing" in run.output
    assert "Traceback" not in run.output and not (run.run_dir.path / "own.txt").exists()
    monkeypatch.setenv("TRACKER_FAILS", "")
    assert track([str(run.run_dir.path)]) == 0
    assert f"{_BROKEN} has everything up to step 2" in capsys.readouterr().out
    assert _sent(run.run_dir) == _trained(run.run_dir)


def test_a_tracker_that_cannot_be_is_refused_before_anything_starts(run_tracked: Tracked) -> None:
    refused(run_tracked("--tracking.backends", "wandbb"), "Did you mean 'wandb'?")
    refused(run_tracked("--tracking.backends", "wandb,wandb"), "names 'wandb' twice")
    refused(
        run_tracked("--tracking.backends", "tests.runs.own_tracker:NoTracker"), "derive a class from holdfast.Tracker"
    )
    run = run_tracked("--tracking.backends", "tests.runs.own_tracker:Unfinished")
    refused(run, "lacks begin, close, flush, log")
    assert not run.run_dir.path.exists()


def test_sft_is_shown_while_it_goes_on_and_another_run_gets_no_port_of_it(
    start: Start, tmp_path: Path, tiny_model: ModelFactory, sft_data: Path
) -> None:
    port = free_port()
    run = start("run", "--dashboard.port", str(port))
    page = page_when(port, lambda page: len(curve_in(page)) >= 1)
    assert "<td>running</td>" in page and "<td>sft</td>" in page
    assert f"dashboard     ready: http://127.0.0.1:{port}/\n" in run.log
    taken = run_sft(tmp_path / "other", tiny_model(weights=False), sft_data, "--dashboard.port", str(port))
    refused(taken, f"dashboard: 127.0.0.1:{port} cannot be used", "--dashboard.port")
    assert not (tmp_path / "other").exists()
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait().code == 128 + signal.SIGTERM
    with pytest.raises(OSError):
        request(port)
    assert "WARNING" not in run.log


@pytest.mark.timeout(900)
def test_rl_is_shown_through_a_dead_trainer_a_dead_launcher_and_a_resume(rl_server: UsedServer, tmp_path: Path) -> None:
    port = free_port()
    flags = (*rl_server.flags, "--max-steps", "100000", "--trainer.optim.schedule-steps", "100")
    flags = (*flags, "--ckpt.interval", "2", "--ckpt.resume-step", "auto", "--dashboard.port", str(port))
    with RlRun(tmp_path / "run", *flags) as run:
        first = page_when(port, lambda page: len(curve_in(page, "reward")) >= 3)
        assert curve_in(first, "reward")[0] == 1 and "<td>running</td>" in first and 'class="rollout' in first
        run_id = json.loads((run.run_dir.path / "run.json").read_bytes())["run_id"]
        assert f'data-run="{run_id}"' in first
        later = page_when(port, lambda page: len(curve_in(page, "reward")) > len(curve_in(first, "reward")))
        assert charts_in(later)["reward"]["layout"]["shapes"] == []
        run.find("holdfast.trainer.launch")[0].send_signal(signal.SIGKILL)
        run.wait_for_match(r"trainer was killed by signal 9: starting it again \(restart 1 of 3\)")
        killed_at = _step_of_ended(run.run_dir)
        healed = page_when(port, lambda page: curve_in(page, "reward")[-1:] > [killed_at + 2])
        _is_one_curve(healed, run_id, num_starts=2)
        request(port)  # while a page is being made
        run.interrupt(signal.SIGKILL)
        assert not complete(run).survivors
    with pytest.raises(OSError):
        request(port)
    shown = _step_of_ended(run.run_dir)
    with RlRun(tmp_path / "run", *flags) as again:
        _is_one_curve(page_when(port, lambda page: curve_in(page, "reward")[-1:] > [shown + 2]), run_id, num_starts=3)
        request(port)
        again.interrupt(signal.SIGINT)
        ended = complete(again)
    assert ended.exit_code == 128 + signal.SIGINT, ended.output
    assert not ended.survivors and "WARNING: dashboard" not in ended.output
    with pytest.raises(OSError):
        request(port)
    assert not list(run.run_dir.path.glob("*.html")) and not list(run.run_dir.path.glob("*dashboard*"))


def _step_of_ended(run_dir: RunDir) -> int:
    """Return how far the attempts have come that have ended; a page may be older."""
    return int(read_metrics(run_dir.metrics)[-1]["step"])


def _is_one_curve(page: str, run_id: str, *, num_starts: int) -> None:
    """Check that a page shows one run with all its steps, and a mark for every start but the first."""
    steps = curve_in(page, "reward")
    assert steps == list(range(1, len(steps) + 1)) and f'data-run="{run_id}"' in page
    assert len(charts_in(page)["reward"]["layout"]["shapes"]) == num_starts - 1


_SMALL = ("--data.batch-size", "8", "--parallel.threads", "1")


def test_a_run_is_followed_from_elsewhere(command: Callable[[str], str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    sft = [command("sft"), "@", "configs/reverse_text/sft.toml", "--output-dir", str(run), *_SMALL]
    sft += ["--ckpt.interval", "20"]
    begun = [*sft, "--max-steps", "100000", "--optim.schedule-steps", "100"]
    watching = [command("monitor"), str(run), "--wait", "--interval", "0.1"]
    with ExitStack() as stack:
        monitor = stack.enter_context(Terminal(watching))
        monitor.wait_for("waiting")
        launcher = stack.enter_context(Terminal(begun, cwd=ROOT, columns=100, lines=30))
        launcher.wait_for("importing torch (0:")
        monitor.wait_for(lambda screen: "running" in screen[0])
        monitor.wait_for(lambda screen: any(re.match(r"checkpoint  step \d+ committed", line) for line in screen))
        assert any(re.match(r"step +\d+/100000  loss", line) for line in launcher.screen)
        launcher.type("\x03")
        assert launcher.end() == 128 + signal.SIGINT
        assert launcher.has_cursor and launcher.modes_now == launcher.modes
        said = "\n".join(launcher.screen)
        stopped = re.search(r"stopped at step (\d+) of 100000, which is saved", said)
        assert stopped and f"last checkpoint: step {stopped[1]} in " in said, said
        screen = monitor.wait_for(lambda screen: "stopped" in screen[0])
        last = int(stopped[1]) + 3
        resumed = subprocess.run(
            [*sft, "--max-steps", str(last), "--optim.schedule-steps", "100", "--ckpt.resume-step", "latest",
             "--log-format", "json"],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert resumed.returncode == 0, resumed.stderr
        told = [json.loads(line) for line in resumed.stdout.splitlines()]
        assert [one["step"] for one in told if one["type"] == "step"] == [last - 2, last - 1, last]
        assert told[-1]["type"] == "end" and told[-1]["checkpoint"]["step"] == last
        screen = monitor.wait_for(lambda screen: "finished" in screen[0] and f"step {last}/{last}" in screen[1])
        assert "attempt 2" in screen[0]
        monitor.type("\x03")
        assert monitor.end() == 0


def test_two_profiled_ranks_keep_their_bits(tmp_path: Path, tiny_model: Callable[..., Path], sft_data: Path) -> None:
    model = tiny_model(weights=False)

    def train(name: str, *flags: str) -> Run:
        return shared_commands().sft(tmp_path / name, model, sft_data, *flags, ranks=2).succeed()

    train("plain", "--max-steps", "4")
    run = train("profiled", "--max-steps", "4", "--profile", "2:3", "--ckpt.interval", "2")
    plain, profiled = RunDir(tmp_path / "plain"), RunDir(tmp_path / "profiled")
    weights = [(one.weights_of(4) / "model.safetensors").read_bytes() for one in (plain, profiled)]
    assert weights[0] == weights[1] and exact_metrics(plain, range(1, 5)) == exact_metrics(profiled, range(1, 5))
    (path,) = profiled.profiles()
    assert path == profiled.logs(1) / "profile_steps_2_to_3"
    assert run.log.count(f"profile: {path} (a trace of each rank, for https://ui.perfetto.dev)") == 1
    assert not list(profiled.path.rglob(".tmp-*")) and profiled.clear_leftovers() == []
    assert traces(path) == ["rank_0.json.gz", "rank_1.json.gz"]
    for rank in (0, 1):
        trace = Trace.read(path, rank=rank)
        assert trace.steps() == [2, 3]
        for phase in ("forward_backward", "optimizer"):
            trace.check_phase(phase)
    train("profiled", "--max-steps", "6", "--profile", "3:5", "--ckpt.resume-step", "latest")
    (path,) = profiled.profiles()
    assert path == profiled.logs(2) / "profile_steps_5_to_5" and Trace.read(path, rank=1).steps() == [5]


def test_a_kill_tears_nothing_a_stop_records(tmp_path: Path, tiny_model: Callable[..., Path], sft_data: Path) -> None:
    model, output = tiny_model(weights=False), tmp_path / "run"
    flags = ("--max-steps", "100000", "--profile", "2:100000", "--ckpt.interval", "1", "--ckpt.keep", "2")
    flags = (*flags, "--ckpt.resume-step", "auto")
    killed = shared_commands().sft(output, model, sft_data, *flags)
    wait_for_step(4, killed)
    killed.kill()
    run_dir = RunDir(output)
    assert run_dir.profiles() == []
    before = last_step(run_dir)
    stopped = shared_commands().sft(output, model, sft_data, *flags, log=tmp_path / "stopped.out")
    wait_for_step(before + 3, stopped)
    os.kill(stopped.pid, signal.SIGTERM)
    stopped.wait()
    assert stopped.code == 128 + signal.SIGTERM, stopped.log
    (path,) = run_dir.profiles()
    first, last = (int(word) for word in path.name.split("_")[2::2])
    assert path.parent == run_dir.logs(2) and 2 <= first <= last == run_dir.committed_steps()[-1]
    assert Trace.read(path).steps()[: last - first + 1] == list(range(first, last + 1))
    assert stopped.log.count(f"profile: {path} (a trace") == 1
