"""Small committed checkpoints and weights, for tests that care about files and not about tensors."""

from pathlib import Path
from typing import Any

from holdfast.run import manifest
from holdfast.run.manifest import Manifest
from holdfast.run.run_dir import RunDir


def commit(directory: Path, kind: Any, step: int, **more: Any) -> Path:
    found = {"policy_version": step, "files": manifest.describe_files(directory)}
    manifest.write_manifest(directory, Manifest(kind=kind, step=step, **found | more))
    return directory


def write_checkpoint(
    run_dir: RunDir, step: int, *, content: str = "", run_id: str | None = None, metrics: dict[str, float] | None = None
) -> Path:
    """Write and commit the checkpoint of `step`: six files, one empty, one whose name comes before the manifest."""
    directory = run_dir.checkpoint(step)
    run_id = run_id or (run_dir.run_id() if run_dir.holds_run() else "run")
    (directory / "trainer").mkdir(parents=True)
    (directory / "orchestrator").mkdir()
    for rank in range(2):
        (directory / f"trainer/__{rank}.distcp").write_bytes(f"shard {rank} of {step} {content}".encode() * 100)
    (directory / "trainer/.metadata").write_bytes(b"plan")
    (directory / "trainer/progress.json").write_text(f'{{"step": {step}}}')
    (directory / "orchestrator/empty").touch()
    (directory / "a_first.txt").write_text(f"{step} {content}")
    return commit(directory, "checkpoint", step, run_id=run_id, program="sft", metrics=metrics or {})


def write_weights(run_dir: RunDir, version: int, *, content: str = "") -> Path:
    directory = run_dir.weights_of(version)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(f"weights {version} {content}".encode())
    return commit(directory, "weights", version)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
