"""A made-up NVML, a driver's library that says how many GPUs there are: what asks it, from `pynvml` to `dlopen`, is
real.
"""

import functools
import os
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


@functools.cache
def library() -> Path:
    """Return the library, which is compiled once."""
    # Beside the caches of the tests, which are removed at their end.
    directory = Path(tempfile.mkdtemp(prefix="made-up-nvml-", dir=Path(os.environ["HOLDFAST_CACHE"]).parent))
    path = directory / "libnvidia-ml.so.1"
    named = f"-Wl,-soname,{path.name}"  # by which `dlopen` finds what a process has loaded already
    subprocess.run(["cc", "-shared", "-fPIC", "-w", named, str(_SOURCE), "-o", str(path)], check=True)
    return path


def loading() -> str:
    return f"import ctypes\nctypes.CDLL({str(library())!r})\n"


def machine(gpus: int, *, cuda: int = 13000) -> dict[str, str]:
    """Return the variables of a machine with so many GPUs; less than 0: its driver cannot say how many. `cuda`: what
    the driver runs, as NVML says it: 1000 times major, plus 10 times minor.
    """
    return {"MADE_UP_GPUS": str(gpus), "MADE_UP_CUDA": str(cuda)}
