"""A made-up NVML: the shared library of a driver that says how many GPUs there are, for machines without any.

What asks it is the real thing, from `pynvml` down to `dlopen`.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int of(const char *name) { const char *value = getenv(name); return value ? atoi(value) : 0; }

/* A handle is the number of a GPU plus one, times 100, plus that of the part plus one. */
int nvmlInitWithFlags(unsigned flags) { return getenv("MADE_UP_GPUS") ? 0 : 9; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "made up"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = of("MADE_UP_GPUS"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)((index + 1) * 100);
    return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    strncpy(name, "NVIDIA H100 80GB HBM3", length);
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    long number = (long)device / 100 - 1, part = (long)device % 100;
    if (part) snprintf(uuid, length, "MIG-%08lx-%02lx", number, part - 1);
    else snprintf(uuid, length, "GPU-%08lx-5a5a", number);
    return 0;
}
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    if (of("MADE_UP_MIG") < 0) return 999; /* unknown */
    if (!getenv("MADE_UP_MIG")) return 3;  /* not supported */
    *current = *pending = 1;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **part) {
    if (of("MADE_UP_MIG") == 99) return 999;
    if (index >= of("MADE_UP_MIG")) return 6; /* not found */
    *part = (void *)((long)device + index + 1);
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = getenv("MADE_UP_CUDA") ? of("MADE_UP_CUDA") : 13000;
    return 0;
}
int nvmlSystemGetDriverVersion(char *version, unsigned length) { strncpy(version, "580.65.06", length); return 0; }
"""


@functools.cache
def library() -> Path:
    """Return the library, which is compiled once."""
    # Beside the caches of the tests, which are removed at their end.
    directory = Path(tempfile.mkdtemp(prefix="made-up-nvml-", dir=Path(os.environ["HOLDFAST_CACHE"]).parent))
    path = directory / "libnvidia-ml.so.1"
    (directory / "nvml.c").write_text(_SOURCE)
    named = f"-Wl,-soname,{path.name}"  # by which `dlopen` finds what a process has loaded already
    subprocess.run(["cc", "-shared", "-fPIC", "-w", named, str(directory / "nvml.c"), "-o", str(path)], check=True)
    return path


def loading() -> str:
    """Return Python source that gives its process the made-up library."""
    return f"import ctypes\nctypes.CDLL({str(library())!r})\n"


def machine(gpus: int, *, cuda: int = 13000, parts: int | None = None) -> dict[str, str]:
    """Return the variables of a machine with so many GPUs.

    Args:
        cuda: what the driver runs, as NVML says it: 1000 times major, plus 10 times minor.
        parts: MIG instances of each.
    """
    return {
        "MADE_UP_GPUS": str(gpus),
        "MADE_UP_CUDA": str(cuda),
        **({} if parts is None else {"MADE_UP_MIG": str(parts)}),
    }
