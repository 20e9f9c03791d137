"""Real orchestrators for tests of faults, in processes of their own."""

from pathlib import Path
from typing import Any

import tomli_w

from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.protocol.rollouts import Batch
from holdfast.run import journal
from holdfast.run.run_dir import RunDir
from tests.faults.faulty_calls import Call, installing, read_trail
from tests.forking.commands import RUN_TIMEOUT_S, shared_commands
from tests.runs.processes import HANG_S
from tests.servers.orchestrator_fakes import FakeEngine, FakeTrainer, make_config

_PATIENT = {"ready_timeout_s": HANG_S, "timeout_s": HANG_S}


def run_orchestrator(config: OrchestratorConfig, **fault: Any) -> int:
    """Run one to its end; return its exit code, negative for a signal. Its log is the output with that suffix. `fault`:
    options of `faulty_calls.install`; the trail is the output with the suffix `.trail`."""
    output, trail = config.output_dir, config.output_dir.with_suffix(".trail")
    trail.unlink(missing_ok=True)
    return _run(config, fault=installing(output, trail, **fault))


def run_undisturbed(folder: Path, engine: FakeEngine, steps: int) -> tuple[list[tuple[Batch, bytes]], list[Call]]:
    """Run one in `folder` from the start to the end; return its journal and its calls."""
    run_dir = RunDir(folder)
    run_dir.path.mkdir()
    with FakeTrainer(run_dir, start=0, max_steps=steps):
        assert run_orchestrator(make_config(run_dir.path, engine, max_steps=steps)) == 0
    return journaled(run_dir, steps), read_trail(run_dir.path.with_suffix(".trail"))


def record_orchestrator(config: OrchestratorConfig, recording: Path) -> int:
    """Run one to its end, write into `recording` what power cuts could have left, and return its exit code."""
    record = (
        "from pathlib import Path\nfrom tests.faults import power_cut\n"
        f"save = power_cut.record(Path({str(config.output_dir)!r}))\n"
    )
    return _run(config, fault=record, at_end=f"save(Path({str(recording)!r}))")


def _run(config: OrchestratorConfig, **sources: str) -> int:
    toml = config.output_dir.with_suffix(".toml")
    values = config.model_dump(mode="json", exclude_none=True)
    # The stand-ins answer at once, but on a busy machine.
    values |= {"weights_timeout_s": HANG_S, "client": values["client"] | _PATIENT}
    toml.write_text(tomli_w.dumps(values))
    log = config.output_dir.with_suffix(".log")
    return shared_commands().module(log, "holdfast.orchestrator.main", toml, **sources).wait(RUN_TIMEOUT_S)


def journaled(run_dir: RunDir, steps: int) -> list[tuple[Batch, bytes]]:
    """Return every batch with the state after it, without what depends on the clock."""
    found = []
    for step in range(1, steps + 1):
        batch = journal.read_batch(run_dir, step)
        batch.metrics = {}
        found.append((batch, (run_dir.batch(step) / journal.STATE_NAME).read_bytes()))
    return found
