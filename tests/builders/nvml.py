"""A made-up NVML, a driver's library that says how many GPUs there are: what asks it is real."""

import functools
import os
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


@functools.cache
def library() -> Path:
    # Beside the caches of the tests, which are removed at their end.
    directory = Path(tempfile.mkdtemp(prefix="made-up-nvml-", dir=Path(os.environ["HOLDFAST_CACHE"]).parent))
    path = directory / "libnvidia-ml.so.1"
    named = f"-Wl,-soname,{path.name}"  # by which `dlopen` finds what a process has loaded already
    subprocess.run(["cc", "-shared", "-fPIC", "-w", named, str(_SOURCE), "-o", str(path)], check=True)
    return path


def loading() -> str:
    return f"import ctypes\nctypes.CDLL({str(library())!r})\n"


def machine(gpus: int, *, cuda: int = 13000) -> dict[str, str]:
    """Return variables of a machine with so many GPUs, unknown below 0. `cuda`: 1000 times major + 10 times minor."""
    return {"MADE_UP_GPUS": str(gpus), "MADE_UP_CUDA": str(cuda)}
