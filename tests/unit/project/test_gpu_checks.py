"""The checks of `tests/gpu` on a CPU, at toy size: so that they work on the day there is a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.attention import KERNELS, Kernel
from tests.gpu import device_checks, run_checks
from tests.gpu.__main__ import main
from tests.gpu.gpu_place import Place
from tests.models.per_sample import PerSample


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place("cpu", tmp_path, is_toy=True)


def numbers(place: Place) -> None:
    run_checks.numbers(place, "float32", ["unpacked"], steps=3)


def numbers_of_adapters(place: Place) -> None:
    run_checks.numbers(place, "float32", ["lora"], steps=3)


def exactness(place: Place) -> None:
    run_checks.exactness(place, "--deterministic", steps=4, is_exact=True)


@pytest.mark.parametrize("check", [
    pytest.param(run_checks.starts, marks=pytest.mark.launch), device_checks.head,
    device_checks.weights_on_streams,
])  # fmt: skip
def test_checks_pass_on_a_cpu(check: Callable[[Place], None], place: Place) -> None:
    check(place)
    assert place.figures


@pytest.mark.launch
@pytest.mark.parametrize("check", [
    numbers, numbers_of_adapters, exactness, run_checks.offload, run_checks.checkpoints, run_checks.plans,
    run_checks.ends, run_checks.preferences, run_checks.rl_over_a_journal,
])  # fmt: skip
def test_long_checks_pass_on_a_cpu(check: Callable[[Place], None], place: Place) -> None:
    check(place)
    assert place.figures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 5])
def test_attention(dtype: torch.dtype, window: int | None, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = PerSample()
    monkeypatch.setitem(KERNELS, "cpu", Kernel(kernel, frozenset({torch.bfloat16}), 64))
    device_checks.attention(place, dtype, window)
    assert (kernel.calls > 0) == (dtype == torch.bfloat16) and "cpu" in KERNELS


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba", "lfm2"])
def test_families(name: str, place: Place, mesh: Mesh) -> None:
    device_checks.family(place, mesh, name)


@pytest.mark.parametrize("check", [device_checks.no_waiting, device_checks.speed, device_checks.files_for_engines])
def test_checks_of_one_rank(check: Callable[[Place, Mesh], None], place: Place, mesh: Mesh) -> None:
    check(place, mesh)
    assert place.figures


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_runner_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and "torch finds no GPU here" in capsys.readouterr().err
