"""What the tests of programs share: a process group, and runs in this process that leave nothing to later tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.run import timeline
from holdfast.trainer.mesh import Mesh
from tests.conftest import ModelFactory
from tests.unit.trainer.programs.cases import Programs


@pytest.fixture(scope="module", autouse=True)
def one_rank(mesh: Mesh) -> Iterator[None]:
    """Be the only rank, also in tests that train without `programs`."""
    assert mesh.world_size == 1
    yield
    timeline._own = None  # later tests of this process are no part of these runs


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, tiny_model: ModelFactory, sft_data: Path) -> Programs:
    """Return the runs of the cases, each made when a test asks for it."""
    return Programs(tmp_path_factory.mktemp("programs"), tiny_model, sft_data)
