"""What uv installs: the chosen build of vLLM stays, and no two packages own one file."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w

from holdfast.process.imports import is_checkout
from tests.conftest import ROOT

PROJECT: dict[str, Any] = tomli.loads((ROOT / "pyproject.toml").read_text())
KIND = "import fakellm; print(fakellm.KIND)"


def _wheel(directory: Path, kind: str) -> str:
    """Write the wheel of a package that owns `fakellm`, as both builds of vLLM own `vllm`; return its name."""
    name = f"fakellm_{kind}-1.0-py3-none-any.whl"
    info = f"fakellm_{kind}-1.0.dist-info"
    files = {
        # Of its own length: both have the time 1980, and Python takes old bytecode of a file of the same time and size.
        "fakellm/__init__.py": f"KIND = {kind!r}\n" + "#" * (5 if kind == "gpu" else 9) + "\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: fakellm-{kind}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(directory / name, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))
    return name


class Standin:
    """A project with the groups, the default groups and the conflicts of this one, and a package for each vLLM."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        uv = PROJECT["tool"]["uv"]
        kept = {"cpu", "gpu", "dev"}
        conflicts = [pair for pair in uv["conflicts"] if all(one.get("group") in kept for one in pair)]
        includes = [one for one in PROJECT["dependency-groups"]["dev"] if one in ({"include-group": "cpu"},)]
        sources = {f"fakellm-{kind}": {"path": _wheel(directory, kind)} for kind in ("cpu", "gpu")}
        project = {
            "project": {"name": "standin", "version": "1.0", "requires-python": ">=3.11",
                        "optional-dependencies": {"s3": []}},
            "dependency-groups": {"cpu": ["fakellm-cpu"], "gpu": ["fakellm-gpu"], "dev": includes},
            "tool": {"uv": {"package": False, "default-groups": uv["default-groups"], "conflicts": conflicts,
                            "sources": sources}},
        }  # fmt: skip
        (directory / "pyproject.toml").write_text(tomli_w.dumps(project))

    def uv(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "VIRTUAL_ENV"))}
        uv = shutil.which("uv")
        assert uv is not None
        argv = [uv, words[0], "--offline", "--python", sys.executable, *words[1:]]
        return subprocess.run(argv, cwd=self._directory, env=environment, capture_output=True, text=True)

    def kind(self) -> str:
        """Return what `uv run` finds, which installs what it thinks is missing first."""
        run = self.uv("run", "python", "-c", KIND)
        return run.stdout.strip() if run.returncode == 0 else "none"


@pytest.fixture
def standin(tmp_path: Path) -> Standin:
    return Standin(tmp_path)


def test_commands_leave_the_build_of_vllm_that_was_chosen(standin: Standin) -> None:
    """`uv run` installed the CPU build over the build for GPUs when the CPU build was a default group."""
    for build, other in (("gpu", "cpu"), ("cpu", "gpu"), ("gpu", "cpu")):
        done = standin.uv("sync", "--group", build)
        assert done.returncode == 0, done.stderr
        assert f"- fakellm-{other}" in done.stderr or "Creating virtual environment" in done.stderr
        assert standin.kind() == build and standin.uv("sync", "--inexact", "--extra", "s3").returncode == 0
        assert standin.kind() == build
    assert standin.uv("sync").returncode == 0
    assert standin.kind() == "none", "who chose to do without vLLM does not get one"
    refused = standin.uv("sync", "--group", "gpu", "--group", "cpu")
    assert refused.returncode != 0 and "incompatible" in refused.stderr


def test_developers_get_the_build_for_cpus(standin: Standin) -> None:
    assert standin.uv("sync", "--group", "dev").returncode == 0 and standin.kind() == "cpu"


def _exported(*groups: str) -> set[str]:
    """Return `name==version` of what the lock names for this machine with `groups`."""
    words = ["export", "--frozen", "--offline", "--quiet", "--no-hashes", "--no-annotate", "--no-emit-project"]
    words += [word for group in groups for word in ("--group", group)]
    done = subprocess.run(["uv", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.partition(" ;")[0] for line in done.stdout.splitlines() if "==" in line and not line.startswith("#")}


@pytest.mark.parametrize("group", ["cpu", "gpu", "dev"])
def test_uv_run_replaces_no_version_of_a_group(group: str) -> None:
    """`uv run` installs what the lock names without a group, over what is there."""
    alone = _exported()
    assert len(alone) > 50 and alone <= _exported(group)


def test_cuda_packages_of_the_lock_are_of_one_major_version() -> None:
    """Of cuda-python 12 and cuda-bindings 13, both own the files of `cuda.bindings`."""
    lock = tomli.loads((ROOT / "uv.lock").read_text())
    majors: dict[str, set[str]] = defaultdict(set)
    for package in lock["package"]:
        if package["name"] in ("cuda-python", "cuda-bindings", "cuda-toolkit"):
            majors[package["name"]].add(package["version"].split(".")[0])
    assert majors == {"cuda-python": {"13"}, "cuda-bindings": {"13"}, "cuda-toolkit": {"13"}}
    suffixed = {package["name"] for package in lock["package"] if package["name"].endswith(("-cu11", "-cu12"))}
    # Its wheels for CUDA 12 and 13 have no file in common.
    assert suffixed == {"nvidia-cutlass-dsl-libs-cu12"}, (
        "libraries of another CUDA own the files of those that torch brings"
    )


def test_no_two_installed_packages_own_one_file() -> None:
    owners: dict[str, set[str]] = defaultdict(set)
    for one in distributions():
        name = one.name  # which reads the metadata anew each time
        for line in (one.read_text("RECORD") or "").splitlines():
            path = line.rsplit(",", 2)[0]
            if path.endswith((".py", ".so")) and not path.startswith(".."):
                owners[path].add(name)
    shared = {path: names for path, names in owners.items() if len(names) > 1}
    assert not {one: names for one, names in shared.items() if one.split("/")[0] not in ("tests", "test", "examples")}


def test_a_checkout_is_told_from_an_installation(tmp_path: Path) -> None:
    assert is_checkout() and not is_checkout(tmp_path / "lib" / "python" / "site-packages" / "holdfast")
