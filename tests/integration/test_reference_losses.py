"""20 steps of every command give the committed losses and weights, bit for bit; on another kind of machine close
losses. If numbers are meant to change, `python -m tests.reference_losses` records them, and the commit says why."""

from pathlib import Path

import pytest

from holdfast.config import program_config
from holdfast.config.load import parse_command_line
from holdfast.launcher.resume.attempt import write_config
from holdfast.launcher.resume.prepare import prepare
from holdfast.run.run_dir import RunDir
from holdfast.trainer.mesh import Mesh
from tests.integration.conftest import UsedServer
from tests.reference_losses.machine import numerics
from tests.reference_losses.record import RENEW, Record, differences, largest_relative, other_numerics, read_records
from tests.reference_losses.runs import STEPS, SUPERVISED, Numbers, command_line, numbers_of
from tests.runs.training import SftRun, run_command
from tests.unit.trainer.programs.in_process import run_prepared

TOLERANCES = {"sft": 1e-5, "dpo": 1e-5, "reward-model": 1e-3}
"""Of a loss, relative, on another machine. Plainer kernels of torch and of MKL moved it by at most 6e-7, and by 8e-5
where Muon orthogonalises updates in bfloat16."""

RECORDED = read_records()


def _numbers(command: str, output: Path, *flags: str, starts_python: bool = False) -> Numbers:
    words = [*command_line(command, output), *flags]
    return numbers_of(command, run_command(words, output, starts_python=starts_python))


def _numbers_in_process(command: str, output: Path) -> Numbers:
    """Train in this process what the command trains."""
    _, *words = command_line(command, output)
    config = parse_command_line(program_config(command), words)
    write_config(prepare(config, clean=False, dry_run=False), command, config, dry_run=False)
    run_prepared(config)
    return numbers_of(command, SftRun(0, "", RunDir(output)))


def _skip_where_it_computes_otherwise(record: Record, here: dict[str, str]) -> None:
    if other := other_numerics(record.numerics, here):
        pytest.skip(f"this machine computes otherwise: {'; '.join(other)}. `{RENEW}` records what it computes.")


def _assert_close(command: str, recorded: Numbers, now: Numbers) -> None:
    largest = largest_relative(recorded.metrics["loss"], now.metrics["loss"])
    assert largest <= TOLERANCES[command], "\n".join(differences(recorded, now))


def _assert_same(recorded: Numbers, now: Numbers) -> None:
    changed = "\n".join(differences(recorded, now))
    assert not changed, f"{changed}\nIf that is meant, `{RENEW}` records it, and the commit says why."


@pytest.mark.parametrize(
    "command", [name if name == "sft" else pytest.param(name, marks=pytest.mark.clock) for name in SUPERVISED]
)
def test_a_supervised_run_reproduces_what_is_recorded(command: str, mesh: Mesh, in_root: Path, tmp_path: Path) -> None:
    assert mesh.world_size == 1
    record, now = RECORDED[command], _numbers_in_process(command, tmp_path / "run")
    _assert_close(command, record.numbers, now)
    _skip_where_it_computes_otherwise(record, numerics(command))
    _assert_same(record.numbers, now)


@pytest.mark.engine
@pytest.mark.launch
def test_an_rl_run_reproduces_what_is_recorded(vllm_server: UsedServer, tmp_path: Path) -> None:
    """Not even close elsewhere: one token that is sampled otherwise makes another run."""
    record = RECORDED["rl"]
    _skip_where_it_computes_otherwise(record, numerics("rl"))
    now = _numbers("rl", tmp_path / "run", *vllm_server.flags)
    _assert_same(record.numbers, now)
    assert len(now.rollouts) == STEPS


@pytest.mark.launch
@pytest.mark.parametrize("command", ["sft"])
def test_other_kernels_give_close_losses_and_other_bits(
    command: str, tmp_path: Path, in_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another machine would do, and that the comparison of bits sees it."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    recorded, now = RECORDED[command].numbers, _numbers(command, tmp_path / "run", starts_python=True)
    _assert_close(command, recorded, now)
    assert recorded.weights != now.weights and differences(recorded, now)
