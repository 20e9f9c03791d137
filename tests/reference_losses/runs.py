"""The four runs whose numbers are committed: 20 steps of every command that trains. Together they have what a refactor
could change unseen: ragged and packed rows, accumulation, clipping, schedules, validation, both optimizers, adapters
with dropout, stale batches in minibatches. In float32 on one thread, which depend on the machine alone."""

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from holdfast.run.journal import read_batch
from holdfast.run.run_dir import RunDir
from tests.runs.rl import SMALL_BATCH
from tests.runs.training import SftRun

STEPS = 20
SUPERVISED = ("sft", "dpo", "reward-model")
COMMANDS = (*SUPERVISED, "rl")
_CONFIGS = "configs/reverse_text"
_SCHEDULE = {"optim.warmup-steps": 4, "optim.schedule": "cosine", "optim.weight-decay": 0.1}
_DATA = {"data.batch-size": 8, "data.micro-batch-size": 2, "data.seq-len": 64, "val-interval": 8}
# By command. Clipping bounds the gradient at some steps of each, and leaves it alone at others.
_FLAGS: dict[str, dict[str, object]] = {
    "sft": {**_SCHEDULE, **_DATA, "optim.max-grad-norm": 1.5},
    "dpo": {**_SCHEDULE, **_DATA, "optim.max-grad-norm": 1.0, "optim.lr": 1e-3, "model.lora.rank": 4,
            "model.lora.dropout": 0.1},
    "reward-model": {**_SCHEDULE, **_DATA, "optim.type": "muon", "optim.max-grad-norm": 0.5},
    "rl": {**{f"trainer.{name}": value for name, value in _SCHEDULE.items()}, "trainer.optim.max-grad-norm": 1.5,
           "trainer.kl.coef": 0.05, "trainer.kl.estimator": "k3", "trainer.loss.correction.type": "truncate",
           "trainer.updates.epochs": 2, "trainer.updates.minibatches": 2, "trainer.row-tokens": 128},
}  # fmt: skip
_THREADS = {"rl": {"trainer.parallel.threads": 1, "inference.engine.threads": 1}}
_METRICS = {"rl": ("loss", "grad_norm", "reward/mean")}


def command_line(command: str, output: Path) -> list[str]:
    """Return the words that make the run of `command` in `output`, in the root of the repository."""
    config = f"{_CONFIGS}/{command.replace('-', '_')}.toml"
    settings = {
        **_FLAGS[command], **_THREADS.get(command, {"parallel.threads": 1}), "output-dir": output, "max-steps": STEPS,
        "seed": 5,
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    program = str(Path(sys.executable).with_name(command))
    return [program, "@", config, *words, *(SMALL_BATCH if command == "rl" else ())]


@dataclass(frozen=True)
class Numbers:
    metrics: dict[str, list[float]]  # by name, the values of the 20 steps as `metrics.jsonl` has them
    rollouts: list[str]  # SHA-256 of what the engine sampled, per batch; empty without one
    weights: dict[str, str]  # SHA-256 of the tensors of the final weights, by file


def numbers_of(command: str, run: SftRun) -> Numbers:
    """Read what a run amounts to, which must have ended well."""
    assert run.code == 0, run.output
    metrics = {name: run.column(name) for name in _METRICS.get(command, ("loss", "grad_norm"))}
    assert run.column("step") == list(range(1, STEPS + 1)) and all(len(values) == STEPS for values in metrics.values())
    directory = run.run_dir.weights_of(STEPS)
    files = sorted(directory.rglob("*.safetensors"))
    assert files, f"no weights in {directory}"
    rollouts = [_rollouts_digest(run.run_dir, step) for step in run.run_dir.published_batches()]
    return Numbers(metrics, rollouts, {str(path.relative_to(directory)): _tensors_digest(path) for path in files})


def _tensors_digest(path: Path) -> str:
    """Names, dtypes, shapes and bytes; not the order or the remarks of the file."""
    digest = hashlib.sha256()
    with safe_open(path, "numpy") as tensors:
        for name in sorted(tensors.keys()):
            array = tensors.get_tensor(name)
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _rollouts_digest(run_dir: RunDir, step: int) -> str:
    """Every token of a batch, which of them were sampled, and the engine's log-probabilities."""
    digest = hashlib.sha256()
    for rollout in read_batch(run_dir, step).rollouts:
        digest.update(f"{rollout.task_id} {rollout.sample_index} {len(rollout.token_ids)}\n".encode())
        for values in (rollout.token_ids, rollout.loss_mask, rollout.logprobs):
            digest.update(values.tobytes())
    return digest.hexdigest()
