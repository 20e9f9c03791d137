"""A Ray cluster of several nodes on this machine, in a process of its own; nodes come and go as a test asks."""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests.conftest import ROOT
from tests.runs.processes import WITH_STUB_ENGINE

_MEMORY_BYTES = 80_000_000


class RayNodes:
    """A head that runs nothing, and nodes with so many cores each, once they are added. Use as a context manager."""

    def __init__(self, *cores: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.runs.ray_clusters", *map(str, cores)], cwd=ROOT,
            env={**os.environ, **WITH_STUB_ENGINE}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address = self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__(None, None, None)  # closes its pipes, by which it ends, and waits for it

    def remove(self, node: int) -> None:
        """Take a node away at once, with all that runs there."""
        self._ask(f"remove {node}")

    def add(self, node: int) -> None:
        self._ask(f"add {node}")

    def _ask(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the Ray cluster did not start"
        return line.strip()


def other_environment(home: Path, *, version: str | None) -> Path:
    """Make an environment with our packages, but another version of holdfast, or none; return its interpreter."""
    venv.create(home, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "holdfast" not in entry.name and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    if version is not None:
        (packages / "holdfast.pth").write_text(str(ROOT / "src"))
        about = packages / f"holdfast-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: holdfast\nVersion: {version}\n")
    return home / "bin" / "python"


@contextmanager
def node_of(python: Path, address: str, *, cores: int, path: str = "") -> Iterator[None]:
    """Have a node in the cluster that `ray start` has started from an environment; `path`: its PYTHONPATH."""
    flags = ("--address", address, "--node-ip-address", "127.0.0.1", "--num-cpus", str(cores), "--block")
    argv = [str(python), "-m", "ray.scripts.scripts", "start", *flags]
    memory = ("--object-store-memory", str(_MEMORY_BYTES))
    with subprocess.Popen(
        [*argv, *memory], cwd=python.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as node:  # fmt: skip
        assert node.stdout is not None
        said = ""
        while "Ray runtime started" not in said:
            line = node.stdout.readline()
            said += line
            assert line, said
        try:
            yield
        finally:
            node.terminate()  # with all that it has started


def main(cores: list[int]) -> None:
    """Be the cluster: say its address, then do what is read."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": _MEMORY_BYTES})

    nodes: dict[int, Any] = {}
    print(cluster.address, flush=True)
    for line in sys.stdin:
        word, node = line.split()
        if word == "remove":
            cluster.remove_node(nodes.pop(int(node)), allow_graceful=False)
        else:
            nodes[int(node)] = cluster.add_node(num_cpus=cores[int(node)], object_store_memory=_MEMORY_BYTES)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
