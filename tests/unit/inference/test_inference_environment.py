"""What the server exports before it imports vLLM, on either kind of device."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import Any

import pytest

_OURS = ("OMP_", "MKL_", "OPENBLAS_", "VLLM_", "HF_HUB", "TORCHDYNAMO", "TOKENIZERS")
_SET = """
import os
from holdfast.inference.main import set_environment
from holdfast.config import InferenceConfig

before = set(os.environ)
set_environment(InferenceConfig.model_validate({settings}), {device!r})
print({{name: os.environ[name] for name in os.environ if name not in before}})
"""


def exported(device: str, **settings: Any) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    command = [sys.executable, "-c", _SET.format(settings=settings, device=device)]
    return ast.literal_eval(subprocess.check_output(command, env=environment, text=True))


@pytest.mark.launch
def test_on_a_cpu_threads_are_bound_and_nothing_is_compiled() -> None:
    names = exported("cpu", engine={"eager": True, "threads": 3}, deterministic=True)
    assert names["OMP_NUM_THREADS"] == names["MKL_NUM_THREADS"] == "3" and names["TORCHDYNAMO_DISABLE"] == "1"
    assert names["VLLM_CPU_ATTN_SPLIT_KV"] == "0" and "VLLM_BATCH_INVARIANT" not in names
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in names
    assert int(exported("cpu", engine={"eager": False})["OMP_NUM_THREADS"]) >= 1
    assert "TORCHDYNAMO_DISABLE" not in exported("cpu", engine={"eager": False})


@pytest.mark.launch
def test_on_gpus_nothing_of_that_is_exported() -> None:
    names = exported("cuda", engine={"eager": True})
    assert names == {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    assert exported("cuda", engine={"threads": 4})["OMP_NUM_THREADS"] == "4"
    assert exported("cuda", deterministic=True)["VLLM_BATCH_INVARIANT"] == "1"
