"""Ranks can use CUDA, and compute there what the settings say, whatever the process that forks them asks of torch."""

import os
from pathlib import Path

import pytest
import torch

from holdfast.process.gpus import TorchBuild, torch_build
from holdfast.trainer.mesh import set_numerics
from tests.builders.nvml import loading, machine
from tests.conftest import ModelFactory
from tests.forking.commands import shared_commands

# In the process that forks the ranks: every child of it tells whether CUDA would refuse to start there, as it does in
# those of a process that has begun to use it. torch's own handler of forks runs before Python's.
_TELL = """
import os
import torch

def tell():
    with open({path!r}, "a") as file:
        file.write(f"{{torch._C._cuda_isInBadFork()}} {{os.environ.get('CUDA_VISIBLE_DEVICES')}}\\n")

os.register_at_fork(after_in_child=tell)
"""


# This machine has no NVML, and of MIG names torch does not ask it: both ways it asks CUDA how many devices there are.
@pytest.mark.launch
@pytest.mark.parametrize("visible", [None, "MIG-5e1c0a2b-0000-0000-0000-000000000000"])
def test_ranks_inherit_no_cuda(visible: str | None, tiny_model: ModelFactory, sft_data: Path, tmp_path: Path) -> None:
    output, told = tmp_path / "run", tmp_path / "told"
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    run = shared_commands().sft(
        output, tiny_model(weights=False), sft_data, *("--max-steps", "1"), ranks=2, environment=environment,
        trainer_fault=_TELL.format(path=str(told)),
    )  # fmt: skip
    assert run.wait().code == 0, run.log
    lines = told.read_text().splitlines()
    assert len(lines) >= 2 and set(lines) == {f"False {visible}"}, lines


def test_numbers_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        torch.set_float32_matmul_precision("high")
        set_numerics(deterministic=False)
        assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
        assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark
        set_numerics(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.launch
def test_cublas_learns_early_that_sums_are_to_repeat(tiny_model: ModelFactory, sft_data: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    tell = _TELL.format(path=str(told)).replace("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")
    for name, flags in (("plain", ()), ("deterministic", ("--deterministic",))):
        run = shared_commands().sft(
            tmp_path / name, tiny_model(weights=False), sft_data, *("--max-steps", "1", *flags),
            environment={**os.environ, **machine(1)}, fault=loading(), trainer_fault=tell,
        )  # fmt: skip
        assert run.wait().code == 2 and "torch finds no GPU here" in run.log, run.log
    assert set(told.read_text().splitlines()) == {"False None", "False :4096:8"}


def test_the_installed_torch_is_known_without_importing_it() -> None:
    assert torch_build() == TorchBuild(torch.__version__, torch.version.cuda)
