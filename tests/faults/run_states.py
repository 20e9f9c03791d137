"""What tests of faults compare: the state that a run ends in, and whether what lies on the disk is whole."""

from pathlib import Path
from typing import Any

from holdfast.run.manifest import Manifest, verify
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir

FLAGS = ("--max-steps", "6", "--ckpt.interval", "2", "--ckpt.keep", "2", "--ckpt.resume-step", "auto")
"""Three saves, of which the last removes the first. Packing, accumulation and shuffling are on by default."""
LAST = 6

# These name the attempt or the path, or are checked by what they list.
_NOT_STATE = {"trainer/.metadata", "trainer/config.toml", "manifest.json"}
_TIMELESS = ("step", "loss", "grad_norm", "lr", "epoch", "samples", "tokens")


def end_state(path: Path, *, last: int = LAST) -> dict[str, Any]:
    """Return the final checkpoint's tensors, counters and random state, the published weights and the metrics."""
    run_dir = RunDir(path)
    state: dict[str, Any] = checkpoint_state(run_dir.checkpoint(last))
    state["weights"] = (run_dir.weights_of(last) / "model.safetensors").read_bytes()
    verify(run_dir.weights_of(last))
    state["metrics"] = [[line[name] for name in _TIMELESS] for line in read_metrics(run_dir.metrics)]
    return state


def checkpoint_state(checkpoint: Path) -> dict[str, bytes]:
    """Return the verified files of a checkpoint, without those that name the attempt."""
    state = {name: (checkpoint / name).read_bytes() for name in verify(checkpoint).files if name not in _NOT_STATE}
    assert any(name.endswith(".distcp") for name in state), sorted(state)
    return state


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return what differs between two end states, by name: contents are too long for messages."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def whole_steps(checkpoints: Path) -> dict[int, Manifest]:
    """Return the committed steps, every byte of which is verified; anything half under a final name is an error."""
    if not checkpoints.exists():
        return {}
    names = [path.name for path in checkpoints.iterdir() if not path.name.startswith(".tmp-")]
    steps = sorted(int(name.removeprefix("step_")) for name in names)
    return {step: verify(checkpoints / f"step_{step}", how="full", step=step) for step in steps}


def lost_batches(run_dir: RunDir, last: int) -> list[int]:
    """Return the steps up to `last` behind the newest checkpoint whose batches are not in the journal any more."""
    return sorted({*range(max(run_dir.committed_steps(), default=0) + 1, last + 1)} - {*run_dir.published_batches()})
