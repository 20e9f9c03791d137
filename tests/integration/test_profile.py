"""`--profile`, in real runs: the traces that Perfetto opens, and not one other bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.run.run_dir import RunDir
from tests.forking.commands import Run, shared_commands, wait_for_step
from tests.runs.profiles import Trace, traces
from tests.runs.rl import exact_metrics, last_step

pytestmark = pytest.mark.launch


def test_two_profiled_ranks_keep_their_bits(tmp_path: Path, tiny_model: Callable[..., Path], sft_data: Path) -> None:
    model = tiny_model(weights=False)

    def train(name: str, *flags: str) -> Run:
        return shared_commands().sft(tmp_path / name, model, sft_data, *flags, ranks=2).succeed()

    train("plain", "--max-steps", "4")
    run = train("profiled", "--max-steps", "4", "--profile", "2:3", "--ckpt.interval", "2")
    plain, profiled = RunDir(tmp_path / "plain"), RunDir(tmp_path / "profiled")
    weights = [(one.weights_of(4) / "model.safetensors").read_bytes() for one in (plain, profiled)]
    assert weights[0] == weights[1]
    assert exact_metrics(plain, range(1, 5)) == exact_metrics(profiled, range(1, 5))
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
    assert path == profiled.logs(2) / "profile_steps_5_to_5"
    assert Trace.read(path, rank=1).steps() == [5]


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
