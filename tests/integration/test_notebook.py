"""The notebook of the examples, whose kernel is killed: the same cells continue its runs, and the bits are the same."""

import signal
import threading
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from holdfast.run.run_dir import RunDir
from tests.conftest import ROOT
from tests.runs.processes import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.launch, pytest.mark.filterwarnings("ignore")]  # of Jupyter's libraries


class Notebook:
    """The cells of the example, with the runs in another directory; one kernel at a time."""

    def __init__(self, outputs: Path) -> None:
        text = (ROOT / "examples" / "notebook.ipynb").read_text().replace("outputs/notebook", str(outputs))
        self.notebook = nbformat.reads(text, as_version=4)

    def client(self) -> Any:
        resources = {"metadata": {"path": str(ROOT / "examples")}}
        return NotebookClient(self.notebook, timeout=None, resources=resources)

    def shown(self, cell: int) -> str:
        outputs = self.notebook.cells[cell]["outputs"]
        return "".join(one.get("text", "") + one.get("data", {}).get("text/plain", "") for one in outputs)


def killed_at(outputs: Path, step: int) -> None:
    """Execute until `sft` has trained `step`, then kill the kernel."""
    client, metrics = Notebook(outputs).client(), outputs / "sft" / "metrics.jsonl"

    def kill() -> None:
        wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= step)
        client.km.provisioner.process.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(DeadKernelError):
        client.execute()
    killer.join()


def test_a_killed_notebook_continues_with_the_same_cells(tmp_path: Path) -> None:
    whole, again = Notebook(tmp_path / "whole"), Notebook(tmp_path / "killed")
    whole.client().execute()
    killed_at(tmp_path / "killed", 13)
    again.client().execute()
    first, second = (RunDir(tmp_path / name / "sft") for name in ("whole", "killed"))
    assert "step 30/30" in again.shown(3) and "step 12/30" not in again.shown(3), "the kernel's end has saved"
    for name, last in (("sft", 30), ("rl", 6)):
        weights = [
            tmp_path / one / name / "weights" / f"step_{last}" / "model.safetensors" for one in ("whole", "killed")
        ]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    assert first.run_id() != second.run_id() and second.next_attempt() == 3
    assert again.shown(4) == whole.shown(4) and "loss" in whole.shown(4)
    assert "right_answer" in whole.shown(7) and "weights/step_30" in whole.shown(9)
