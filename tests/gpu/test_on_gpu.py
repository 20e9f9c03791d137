"""What can be known on a GPU alone, for `python -m tests.gpu`; test_gpu_checks.py runs it on a CPU, at toy size."""

from collections.abc import Callable

import pytest
import torch

from holdfast.trainer.mesh import Mesh
from tests.gpu import device_checks, run_checks
from tests.gpu.gpu_place import Place
from tests.models.families import FAMILIES

pytestmark = [pytest.mark.gpu, pytest.mark.launch, pytest.mark.timeout(1200)]
REFUSED = {"falcon (alibi)", "rwkv", "qwen3_vl_text"}


@pytest.mark.parametrize(
    "check",
    [
        run_checks.starts,
        run_checks.preferences,
        run_checks.rl_over_a_journal,
        run_checks.offload,
        run_checks.checkpoints,
        run_checks.plans,
        run_checks.ends,
        run_checks.out_of_memory,
        device_checks.head,
        device_checks.weights_on_streams,
    ],
)
def test_a_check(check: Callable[[Place], None], place: Place) -> None:
    check(place)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_are_those_of_the_cpu(dtype: str, place: Place) -> None:
    run_checks.numbers(place, dtype, list(run_checks.VARIANTS))


def test_how_exact_a_plain_run_is(place: Place) -> None:
    run_checks.exactness(place, is_exact=False)


def test_a_deterministic_run_repeats(place: Place) -> None:
    run_checks.exactness(place, "--deterministic", is_exact=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 4096])
def test_attention(dtype: torch.dtype, window: int | None, place: Place) -> None:
    device_checks.attention(place, dtype, window)


@pytest.mark.parametrize("check", [device_checks.no_waiting, device_checks.speed, device_checks.files_for_engines])
def test_a_check_of_one_rank(check: Callable[[Place, Mesh], None], place: Place, mesh: Mesh) -> None:
    check(place, mesh)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.name not in REFUSED])
def test_families(name: str, place: Place, mesh: Mesh) -> None:
    device_checks.family(place, mesh, name)
