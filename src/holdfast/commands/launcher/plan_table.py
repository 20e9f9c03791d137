"""What `--dry-run` shows: every process of a run, where it would run, and what it would get there."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from holdfast.commands.launcher.device_choices import names_of
from holdfast.commands.launcher.placement import Placement
from holdfast.commands.tables import Grid
from holdfast.shared.config.inference import InferenceConfig
from holdfast.shared.config.trainer import TrainingCommand
from holdfast.shared.process.child import available_cores
from holdfast.shared.process.gpus import Gpu

_COLUMNS = ("process", "host", "devices", ">ranks", ">threads", ">port", "dtype")


@dataclass(frozen=True)
class PlannedProcess:
    """One process of a run.

    Attributes:
        devices: `CPU`, or its GPUs by name; and whether parameters are offloaded from there.
        ranks: of a trainer; 0: it has none.
        threads: of each rank, or of the process; 0: as many as its libraries take.
        port: that it listens at; 0: none.
        dtype: that it computes the model in; empty: it does not.
    """

    name: str
    devices: str = "CPU"
    ranks: int = 0
    threads: int = 0
    port: int = 0
    dtype: str = ""


def planned_trainer(config: TrainingCommand, placement: Placement) -> PlannedProcess:
    """Return the row of a training program."""
    ranks, devices = config.parallel.ranks, _shown(placement.trainer)
    return PlannedProcess(
        "trainer",
        f"{devices}, CPU offload" if config.parallel.cpu_offload else devices,
        ranks=ranks,
        threads=config.parallel.threads or max(1, available_cores() // ranks),
        dtype=config.model.compute_dtype,
    )


def planned_engine(name: str, config: InferenceConfig, gpus: Sequence[Gpu]) -> PlannedProcess:
    """Return the row of the inference server `name`."""
    return PlannedProcess(
        name,
        _shown(gpus),
        threads=config.engine.threads or 0,
        port=config.server.port,
        dtype=config.model.dtype or "",
    )


def print_table(processes: Sequence[PlannedProcess]) -> None:
    """Print them, one a line."""
    host = socket.gethostname()
    rows = [
        (one.name, host, one.devices, *(str(number or "-") for number in (one.ranks, one.threads, one.port)), one.dtype)
        for one in processes
    ]
    console = Console(highlight=False, soft_wrap=True)
    console.print(Grid(_COLUMNS, rows, expendable=("host",)).fitted(console))


def _shown(gpus: Sequence[Gpu]) -> str:
    return f"GPU {names_of(gpus)}" if gpus else "CPU"
