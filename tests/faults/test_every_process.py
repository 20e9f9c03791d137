"""Every place of the code that starts a process has a row in `PLACES`, and what a kill of it from outside costs:
nothing, or a message."""

import ast
import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.commands import environments_check
from holdfast.commands.environments_probe import Request
from holdfast.config.environments import EnvironmentConfig
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.errors import HoldfastError, ProcessKilled
from holdfast.launcher.preflight import check_in_child
from holdfast.orchestrator.env.math_answers import MathAnswers
from tests.conftest import ROOT
from tests.faults.test_killed_removals import calls
from tests.runs.ports import free_port
from tests.runs.processes import WITH_STUB_ENGINE
from tests.runs.rl import SMALL_BATCH, outcome, succeeded
from tests.servers.orchestrator_fakes import played
from tests.unit.orchestrator.env.test_mcp_tools import STDIO, answers, call, play, settings_of

_STARTS = {
    "Popen", "check_call", "check_output", "create_subprocess_exec", "create_subprocess_shell", "elastic_launch",
    "execv", "execve", "execvp", "execvpe", "fork", "forkpty", "get_context", "popen", "posix_spawn", "posix_spawnp",
    "ProcessPoolExecutor", "start_processes", "stdio_client", "system",
}  # fmt: skip
_STARTS_OF = {"subprocess.run", "subprocess.call", "multiprocessing.Process", "multiprocessing.Pool"}

HERE = "test_every_process.py::test_a_process_that_is_killed_costs_nothing_or_a_message"
PLACES: dict[str, str | tuple[str, ...]] = {
    # Those that play.
    "orchestrator/group_players.py _Running._begin": HERE,
    "orchestrator/worker.py _end_group_with_this_process":
        "test_workers.py::test_what_an_environment_has_started_in_a_worker_ends_with_a_killed_orchestrator",
    "orchestrator/env/math_answers.py MathAnswers._ask": HERE,
    "orchestrator/env/mcp.py _connect": HERE,
    "process/noted_end.py _run": HERE,
    "orchestrator/env/verifiers.py _Player._spawn":
        "test_verifiers.py::test_a_killed_player_is_started_again_and_nobody_is_blamed",
    "examples/environments/python_code.py require_sandbox.tried":
        "test_sandbox.py::test_a_trial_of_the_sandbox_that_is_killed_is_tried_again",
    "examples/environments/python_code.py run_python":
        "test_sandbox.py::test_a_sandbox_that_somebody_killed_is_no_outcome_of_its_program",
    "examples/environments/sandbox_inside.py main":
        "test_sandbox.py::test_what_a_killed_process_had_in_a_sandbox_dies_with_it",
    "examples/environments/sandbox_inside.py _enter_namespaces":
        "test_sandbox.py::test_a_sandbox_with_half_a_map_of_users_is_no_failure",
    "examples/environments/sandbox_inside.py _first_process":
        "test_sandbox.py::test_a_sandbox_that_somebody_killed_is_no_outcome_of_its_program",
    # Those that check.
    "launcher/preflight.py check_in_child": HERE,
    "commands/environments_check.py _probe_in_process.ask": HERE,
    # The parts of a run: trainer, orchestrator, inference, evaluation and trackers, by all that starts them.
    "launcher/cluster/hosts.py start_here": (
        HERE,
        "test_search.py::test_drawn_runs_keep_every_promise",
        "test_rl_killed.py::test_the_end_is_that_of_the_undisturbed_run",
        "test_sft_evaluated.py::test_every_due_step_is_evaluated_once_and_training_is_as_without",
        "test_trackers.py::test_each_step_is_there_once_after_kills_and_a_step_back",
        "test_parts.py::test_a_tracker_that_dies_late_is_started_again",
        "test_live_page.py::test_a_page_whose_process_is_killed_is_served_again",
    ),
    "trainer/launch.py _launch": (
        HERE,
        "test_sft_stop.py::test_a_rank_that_is_killed_during_a_save_ends_the_run_which_goes_on_bit_for_bit",
    ),
    "trainer/hooks.py HookProcess._start": "test_hooks.py::test_hooks_of_a_killed_run_see_each_step_once",
    "trainer/data/tokenizing.py _start_worker":
        "test_data.py::test_a_worker_that_dies_is_named",
    "inference/engine.py _fork_engine": (
        "test_inference_process.py::test_an_engine_killed_while_it_starts_is_worth_another_start",
        "test_inference_process.py::test_an_engine_killed_at_a_first_request_is_worth_another_start",
        "test_inference_process.py::test_the_death_of_the_engine_ends_the_server_with_its_own_code",
        "test_rl_on_vllm.py::test_inference_and_its_engine_die_and_hang",
    ),
    "launcher/cluster/channels.py PipeChannel.__init__":
        "test_remote_processes.py::test_what_runs_there_ends_with_the_agent_and_is_lost",
    # Programs of SLURM, whose failure of any kind is told before anything starts.
    "launcher/cluster/slurm.py _run": "test_slurm_job.py::test_a_job_is_submitted_with_what_the_user_has_set",
    "launcher/cluster/slurm.py _submit": "test_slurm_job.py::test_a_job_is_submitted_with_what_the_user_has_set",
    # The command that a notebook starts.
    "runs.py Run._start.follow": "test_notebook.py::test_a_killed_notebook_continues_with_the_same_cells",
    # No new process: the launcher becomes another program.
    "launcher/launch.py _become": "test_server_choice.py::test_a_port_is_held_until_its_holder_is_killed",
}  # fmt: skip


def _starts(call: ast.Call) -> bool:
    called = ast.unparse(call.func)
    return called.rpartition(".")[2] in _STARTS or called in _STARTS_OF


def test_every_place_that_starts_a_process_has_tests_that_kill_it() -> None:
    found: set[str] = set()
    for root, shown in ((ROOT / "src" / "holdfast", ROOT / "src" / "holdfast"), (ROOT / "examples", ROOT)):
        for path in root.rglob("*.py"):
            starting = [name for name, call in calls(ast.parse(path.read_text())) if _starts(call)]
            found |= {f"{path.relative_to(shown)} {name}" for name in starting}
    assert found == PLACES.keys(), "a place that starts a process needs tests that kill the process, named in PLACES"
    for name in {name for names in PLACES.values() for name in ([names] if isinstance(names, str) else names)}:
        file, _, test = name.partition("::")
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {test}(" in path.read_text(), name


async def _again(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Do what `orchestrator.group_players.GroupPlayer` does: a process that was killed is no result."""
    try:
        return await ask()
    except ProcessKilled:
        return await ask()


def _mathematics(_: Path) -> object:
    async def rewards() -> list[float]:
        scorer = MathAnswers()
        found = [await _again(lambda one=one: scorer("\\boxed{\\frac{2}{4}}", one)) for one in ("0.5", "2")]
        scorer.close()
        return found

    return asyncio.run(rewards())


def _mcp_server(_: Path) -> object:
    said = [call("note", text="a"), call("add", a=1, b=2), call("note", text="b"), "done"]
    settings = settings_of({**STDIO, "env": ["KILL_AT"]})

    async def sessions() -> list[str]:
        (session,) = await play(settings, said)
        return [*answers(session), *map(str, session.tool_counts.values())]

    return asyncio.run(_again(sessions))


def _worker(directory: Path) -> object:
    section = {"id": "tests.runs.faulty_environment:Faulty", "name": "mine", "workers": 1}
    return [batch.rollouts for batch in played(directory, section, max_steps=2)]


def _check(_: Path) -> object:
    return check_in_child("holdfast.launcher.preflight", TrainerConfig.model_validate({"model": {"name": "m"}}))


def _probe(_: Path) -> object:
    settings = EnvironmentConfig(id="reverse_text").model_dump_json()
    return environments_check._probe_in_process(Request(settings, 2, 1, seed=0, seq_len=256, model=None), "1")


def _run(directory: Path) -> object:
    both = directory.with_name(f"{directory.name}_path") / "sitecustomize.py"  # Python imports one
    both.parent.mkdir()
    places = (WITH_STUB_ENGINE["PYTHONPATH"], str(Path(__file__).with_name("at_function")))
    both.write_text("import runpy\n" + "".join(f"runpy.run_path('{place}/sitecustomize.py')\n" for place in places))
    paths = {"PYTHONPATH": str(both.parent)}
    flags = (*SMALL_BATCH, "--max-steps", "3", "--ckpt.interval", "2", "--trainer.parallel.threads", "1")
    port = ("--inference.server.port", str(free_port()))
    return outcome(succeeded(directory, *flags, *port, environment=paths, starts_python=True).run_dir, 3)


_BOTH = (signal.SIGKILL, signal.SIGTERM)


@dataclass(frozen=True)
class Victim:
    """A process that is killed while it loads, while it works, and at its end. `moments`: file and function at whose
    begin it dies, and how often that has begun before."""

    does: Callable[[Path], object]  # starts it, and returns what comes of that
    moments: tuple[tuple[str, str, int], ...]
    signals: tuple[signal.Signals, ...] = ()  # each of them is tried at each moment; none: they take turns
    told: str = ""  # what is said where the result is none, and the same works when it is done again


_EXIT = ("threading.py", "_shutdown", 0)
VICTIMS = {
    "math_verify": Victim(
        _mathematics,
        (("math_answers.py", "_main", 0), ("math_answers.py", "_compare", 0), ("math_answers.py", "_compare", 1)),
        signals=_BOTH,
    ),
    "mcp server": Victim(
        _mcp_server,
        (("mcp_server.py", "<module>", 0), ("mcp_server.py", "<module>", 1), ("mcp_server.py", "note", 1), _EXIT),
    ),
    "process before an mcp server": Victim(_mcp_server, (("noted_end.py", "_run", 0), ("noted_end.py", "_run", 1))),
    "worker": Victim(
        _worker,
        (
            ("orchestrator/worker.py", "_main", 0), ("faulty_environment.py", "Faulty.__init__", 0),
            ("faulty_environment.py", "Faulty.run", 5), ("faulty_environment.py", "Faulty.score", 2), _EXIT,
        ),
    ),
    "part of a run": Victim(
        _run,
        (
            ("trainer/launch.py", "_launch", 0), ("programs/rl.py", "<module>", 0),
            ("orchestrator/main.py", "<module>", 0), ("inference/main.py", "<module>", 0),
            ("distributed_c10d.py", "destroy_process_group", 0),
        ),
        signals=(signal.SIGKILL,),  # the other one stops a run
    ),
    "check of a start": Victim(_check, (("launcher/preflight.py", "<module>", 0), _EXIT), told="Nothing was started"),
    "check of an environment": Victim(
        _probe, (("environments_probe.py", "<module>", 0), ("environments_probe.py", "probe", 0), _EXIT)
    ),
}  # fmt: skip
_CASES = [
    pytest.param(name, moment, number, id=f"{name}, {moment[0]} {moment[1]} {moment[2]}, {number.name}")
    for name, victim in VICTIMS.items()
    for place, moment in enumerate(victim.moments)
    for number in victim.signals or (_BOTH[place % 2],)
]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, object]:
    """What comes of each victim that nobody kills, as far as a test has asked."""
    return {}


@pytest.mark.launch
@pytest.mark.parametrize(("name", "moment", "number"), _CASES)
def test_a_process_that_is_killed_costs_nothing_or_a_message(
    name: str, moment: tuple[str, str, int], number: signal.Signals, undisturbed: dict[str, object], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    victim, mark = VICTIMS[name], tmp_path / "killed"
    monkeypatch.setenv("KILL_AT", "null")
    if name not in undisturbed:
        undisturbed[name] = victim.does(tmp_path / "undisturbed")
    file, function, before = moment
    told = {"file": file, "function": function, "before": before, "signal": int(number), "mark": str(mark)}
    monkeypatch.setenv("KILL_AT", json.dumps(told))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("at_function")), prepend=os.pathsep)
    if victim.told:
        with pytest.raises(HoldfastError, match=f"{number.name}.*{victim.told}"):
            victim.does(tmp_path / "run")
        assert mark.exists()
    assert victim.does(tmp_path / "run") == undisturbed[name]
    assert mark.exists(), "nobody was killed"
