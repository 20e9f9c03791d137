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
    """Make runs in `directory` one after the other, or in a copy of the run `after`; all of them must end well."""
    directory.mkdir(exist_ok=True)
    (directory / "runs.json").write_text(json.dumps(runs))
    shared_commands().two_ranks("tests.ranks.programs", directory)


def _work(mesh: Mesh, directory: Path) -> None:
    for run in json.loads((directory / "runs.json").read_text()):
        output, settings = directory / run["name"], run["settings"]
        if run.get("after") and mesh.is_main:
            shutil.copytree(directory / run["after"], output)
        mesh.barrier()
        parallel = {"threads": 1, **settings.get("parallel", {}), "num_ranks": mesh.world_size}
        settings |= {"parallel": parallel}
        train(run["program"], output, settings, until=run["until"], resume=run.get("resume"))


if __name__ == "__main__":
    run_on_ranks(_work)
