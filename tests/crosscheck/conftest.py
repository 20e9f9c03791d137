"""What the comparisons with other implementations share."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ModelFactory


@pytest.fixture(scope="session")
def trl_trainers() -> ModuleType:
    """Return `tests.crosscheck.trl_trainers`, which imports TRL, a matter of seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # as TRL sets it, and leaves it to all later processes
        # TRL would import a part of vLLM that the version here does not have; none of it is needed.
        setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda *_, **__: False)  # noqa: B010
        return importlib.import_module("tests.crosscheck.trl_trainers")


@pytest.fixture(scope="session")
def model(tiny_model: ModelFactory) -> Path:
    return tiny_model()
