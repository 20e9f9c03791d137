"""Programs on one rank in a forked process that may be killed: what trains, without launchers and rendezvous."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forking.commands import RUN_TIMEOUT_S, shared_commands
from tests.forking.server import Fork


@dataclass(frozen=True)
class Program:
    name: str
    settings: Mapping[str, Any]
    until: int
    watched: str = "."  # the part of the run directory in which calls are counted


def trail_of(output: Path) -> Path:
    """Return where the calls of the runs in `output` are noted."""
    return output.with_name(f"{output.name}.trail")


def run(
    program: Program, output: Path, *, recording: Path | None = None, by: Mapping[str, str] | None = None, **fault: Any
) -> Fork:
    """Train from the newest checkpoint, or from the start, to the end; return the process, which has ended.
    `recording`: a file for what power cuts could have left, see `power_cut`. `by`: another `function` than
    `be_program`, and what it is given besides. `fault`: options of `faulty_calls.install`."""
    trail_of(output).unlink(missing_ok=True)
    fork = shared_commands().call(
        log=output.with_name(f"{output.name}.out"),
        program=program.name,
        settings=json.dumps(dict(program.settings), default=str),
        until=str(program.until),
        output=str(output),
        watched=str((output / program.watched).resolve()),
        fault=json.dumps(fault),
        recording=str(recording or ""),
        **(by or {"function": "tests.faults.forked_programs:be_program"}),
    )
    fork.wait(RUN_TIMEOUT_S)
    return fork


def be_program(program: str, settings: str, until: str, output: str, watched: str, fault: str, recording: str) -> None:
    """In a child: be the only rank of a run, with a fault in what it does after the directory is prepared."""
    import torch
    import torch.distributed as dist

    from tests.faults import power_cut
    from tests.faults.faulty_calls import install
    from tests.unit.trainer.programs.in_process import prepared, run_prepared

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = prepared(program, Path(output), json.loads(settings), until=int(until), resume="auto")
    if recording:
        save = power_cut.record(Path(output))
        run_prepared(config)
        save(Path(recording))
        return
    install(watched, str(trail_of(Path(output))), **json.loads(fault))
    run_prepared(config)
