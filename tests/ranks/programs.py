"""Programs on two ranks, one after the other: `python -m tests.ranks.programs DIRECTORY`, which holds `runs.json`."""

import json
import shutil
from pathlib import Path
from typing import Any

from holdfast.trainer.mesh import Mesh
from tests.forking.commands import shared_commands
from tests.ranks.two import run_on_ranks
from tests.unit.trainer.programs.in_process import train


def on_two_ranks(directory: Path, runs: list[dict[str, Any]]) -> None:
    """Make runs in `directory` one after the other, all of which must end well; see `train_on_two`."""
    directory.mkdir(exist_ok=True)
    (directory / "runs.json").write_text(json.dumps(runs))
    shared_commands().two_ranks("tests.ranks.programs", directory)


def train_on_two(
    mesh: Mesh,
    directory: Path,
    *,
    name: str,
    program: str,
    settings: dict[str, Any],
    until: int,
    resume: int | None = None,
    after: str | None = None,
) -> None:
    """Train in `directory/name`, or in a copy of the run `after`. Collective."""
    if after is not None and mesh.is_main:
        shutil.copytree(directory / after, directory / name)
    mesh.barrier()
    parallel = {"threads": 1, **settings.get("parallel", {}), "num_ranks": mesh.world_size}
    train(program, directory / name, settings | {"parallel": parallel}, until=until, resume=resume)


def _work(mesh: Mesh, directory: Path) -> None:
    for run in json.loads((directory / "runs.json").read_text()):
        train_on_two(mesh, directory, **run)


if __name__ == "__main__":
    run_on_ranks(_work)
