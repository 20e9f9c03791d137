"""Which GPUs a process may use, by a driver that is made up and by the files of one."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.process.gpus import Gpu, Inventory, TorchBuild, find_gpus, visible, why_unusable
from tests.builders.nvml import library, machine

H100 = "NVIDIA H100 80GB HBM3"
_FIND = """
from holdfast.process.gpus import find_gpus
found = find_gpus()
models = sorted({(gpu.model, gpu.num_bytes) for gpu in found.gpus})
print([[gpu.name for gpu in found.gpus], models, found.driver, found.cuda])
"""


def found(**settings: str) -> Any:
    """Return what a process of that environment finds: names of GPUs, their models, driver and CUDA."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library().parent), **settings}
    if "CUDA_VISIBLE_DEVICES" not in settings:
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    ran = subprocess.run([sys.executable, "-c", _FIND], env=environment, capture_output=True, text=True)
    return ast.literal_eval(ran.stdout) if ran.returncode == 0 else ran.stderr


def test_a_driver_is_asked_for_its_gpus() -> None:
    assert found(**machine(8)) == [[str(number) for number in range(8)], [(H100, 0)], "580.65.06", (13, 0)]
    known = [["1"], [(H100, 80 * 10**9)], "580.65.06", (12, 8)]
    assert found(**machine(2, cuda=12080), MADE_UP_GB="80", CUDA_VISIBLE_DEVICES="1") == known
    assert found(**machine(2), CUDA_VISIBLE_DEVICES="") == found(CUDA_VISIBLE_DEVICES="-1") == [[], [], "", None]
    assert found() == [[], [], "", None]  # the library is there, and no driver


def test_a_driver_that_cannot_answer_is_named() -> None:
    assert "ConfigError: the NVIDIA driver cannot say which GPUs there are (" in found(**machine(-1))


def test_what_the_environment_leaves_keeps_the_names_that_it_has_there() -> None:
    gpus = [Gpu(str(number), H100, f"GPU-{number}a-5a5a") for number in range(4)]

    def names(wanted: str | None) -> list[str]:
        return [gpu.name for gpu in visible(gpus, wanted)]

    assert names(None) == ["0", "1", "2", "3"] and names("3, 1") == ["3", "1"]
    assert names("GPU-2a,GPU-0a-5a5a") == ["GPU-2a", "GPU-0a-5a5a"]
    assert names("MIG-5e1c,0") == ["MIG-5e1c", "0"]  # an instance of one that is split, which is not looked up
    assert visible([Gpu("0"), Gpu("1")], "GPU-1b,1") == (Gpu("GPU-1b"), Gpu("1"))  # a machine that tells no uuids
    for wanted in ("4", "0,GPU-7", "0,,1"):
        with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES = {wanted} names '.*', which is not one of the 4"):
            names(wanted)
    for wanted in ("1,1", "1,GPU-1a"):
        with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES = {wanted} names a GPU twice"):
            names(wanted)


def test_without_nvml_the_files_of_the_driver_count(tmp_path: Path) -> None:
    assert find_gpus({}, files=tmp_path) == Inventory()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert find_gpus({}, files=tmp_path) == Inventory((Gpu("0"), Gpu("1")))
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1"}, files=tmp_path) == Inventory((Gpu("1"),))
    by_driver = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert find_gpus(by_driver, files=tmp_path) == Inventory((Gpu("1"),))
    with pytest.raises(ConfigError, match="CUDA_DEVICE_ORDER = FASTEST_FIRST: the numbers in CUDA_VISIBLE_DEVICES are"):
        find_gpus({**by_driver, "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, files=tmp_path)


def test_gpus_that_torch_cannot_use_are_told_with_what_to_do() -> None:
    eight = Inventory(tuple(Gpu(str(number), H100) for number in range(8)), "570.86", (12, 8))
    of_13 = TorchBuild("2.13.0+cu130", "13.0")
    reason = why_unusable(eight, of_13)
    assert reason is not None and "8 x NVIDIA H100" in reason and "driver 570.86 runs CUDA up to 12.8" in reason
    assert "PyTorch 2.13.0+cu130 is built for CUDA 13.0: install a newer driver" in reason
    assert why_unusable(eight, TorchBuild("2.13.0+cu126", "12.6")) is None
    without = why_unusable(Inventory((Gpu("0"),)), TorchBuild("2.13.0+cpu", None))
    assert without is not None and "1 x an NVIDIA GPU" in without and "is built without CUDA" in without
    assert why_unusable(Inventory((Gpu("0"),)), of_13) is None  # nobody knows the driver: CUDA itself will say
