"""Training programs in the process of the test: the work of a command, on one rank, without other processes."""

from __future__ import annotations

import importlib
import json
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.commands.resume.attempt import with_resume, write_config
from holdfast.commands.resume.plan import prepare
from holdfast.shared.config import PROGRAMS
from holdfast.shared.config.trainer import TrainingCommand
from holdfast.shared.files import manifest
from holdfast.shared.files.journal import Accepted, EnvironmentPosition, publish_batch
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.wire.arrays import Logprobs, LossMask, TokenIds
from holdfast.shared.wire.rollouts import Batch, Rollout, VersionSpan
from holdfast.trainer.checkpoints.dcp import ShardWriter
from holdfast.trainer.checkpoints.random_state import capture_random_state
from holdfast.trainer.conversion.reading import TensorReader
from holdfast.trainer.mesh import RankGroup
from tests.faults.run_states import checkpoint_state
from tests.runs.rl import exact_metrics

STEPS, HALF = 8, 5
_GROUPS, _GROUP_SIZE = 3, 4
_PROGRESS = "trainer/progress.json"
_SAME_IN_ALL = {".metadata", "__0_0.distcp", "progress.json", "config.toml"}


def train(program: str, output: Path, settings: dict[str, Any], *, until: int, resume: int | None = None) -> RunDir:
    """Train until the step `until`, which is saved, and return the directory of the run.

    Args:
        resume: the committed step that new objects resume from.
    """
    config: TrainingCommand = PROGRAMS[program].model_validate(
        {
            "seed": 3, "parallel": {"threads": 1}, **settings, "output_dir": output, "max_steps": until,
            "ckpt": {"resume_step": resume},
        }
    )  # fmt: skip
    run_dir = RunDir(output)
    attempt = prepare(config, clean=False, dry_run=False, is_locked=True)  # a lock lasts as long as this process
    config = with_resume(config, attempt.resume_step)
    write_config(attempt, program, config, dry_run=False)
    if program == "rl":
        _publish_journal(run_dir, range((resume or 0) + 1, until + 1))
    importlib.import_module(f"holdfast.trainer.programs.{program.replace('-', '_')}").run(config)
    return run_dir


def end_state(run_dir: RunDir) -> dict[str, Any]:
    """Return the final checkpoint without what names the attempt, the published weights and the metrics."""
    weights = {path: path.read_bytes() for path in run_dir.weights.glob(f"*step_{STEPS}/**/*.safetensors")}
    assert weights
    state = checkpoint_state(run_dir.checkpoint(STEPS)) | {
        str(path.relative_to(run_dir.path)): data for path, data in weights.items()
    }
    return state | {"metrics": exact_metrics(run_dir, range(1, STEPS + 1))}


def parts_of(checkpoint: Path) -> set[str]:
    """Return the parts of a checkpoint: first names of tensors, names of values, and further files."""
    tensors = {name.split(".")[0] for name in TensorReader(checkpoint / "trainer").saved}
    files = {path.name for folder in ("trainer", "orchestrator") for path in (checkpoint / folder).glob("*")}
    return tensors | _values(checkpoint).keys() | (files - _SAME_IN_ALL)


def forget(checkpoint: Path, part: str) -> None:
    """Damage a part of a committed checkpoint: a file or a value by its name, tensors by the begin of their names.

    A digest becomes another one, tensors are halved, generators get the state of this process.
    """
    values = _values(checkpoint)
    if part == "random_rank_0.json":
        (checkpoint / "trainer" / part).write_bytes(msgspec.json.encode(capture_random_state()))
    elif (found := [path for path in checkpoint.glob(f"*/{part}") if "." in part]) and found[0].is_file():
        found[0].unlink()
    elif part in values:
        value = values.pop(part)
        if isinstance(value, dict) and "digest" in value:
            values[part] = value | {"digest": "0" * 32}
        if isinstance(value, int):
            values[part] = 0
        (checkpoint / _PROGRESS).write_text(json.dumps(values))
    else:
        _halve_tensors(checkpoint / "trainer", part)
    listing = manifest.read_manifest(checkpoint)
    listing.files = manifest.describe_files(checkpoint)
    manifest.write_manifest(checkpoint, listing)


def _halve_tensors(directory: Path, prefix: str) -> None:
    reader = TensorReader(directory)
    tensors = {name: reader.read(name) for name in reader.saved}
    halved = [tensor.mul_(0.5) for name, tensor in tensors.items() if name.startswith(prefix)]
    assert halved, f"no tensor begins with {prefix}: {sorted(tensors)}"
    with tempfile.TemporaryDirectory(dir=directory.parent.parent) as written:
        ShardWriter(RankGroup()).write(tensors, Path(written))
        for path in Path(written).iterdir():
            path.replace(directory / path.name)


def _values(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / _PROGRESS).read_bytes())


def _publish_journal(run_dir: RunDir, steps: Iterable[int]) -> None:
    """Put the batches of an orchestrator into the journal: random answers with different rewards."""
    for step in steps:
        batch = Batch(step=step, policy_version=step - 1, weights_digest="d" * 32, rollouts=_rollouts(step))
        all_before = [rollout for number in range(1, step + 1) for rollout in _rollouts(number)]
        position = EnvironmentPosition(next_task=_GROUPS * step, group_size=_GROUP_SIZE)
        accepted = Accepted(
            step=step,
            problems=_GROUPS * step,
            rollouts=len(all_before),
            tokens=sum(len(rollout.token_ids) for rollout in all_before),
            environments={"letters": position},
        )
        publish_batch(run_dir, batch, msgspec.json.encode(accepted))


def _rollouts(step: int) -> list[Rollout]:
    generator = random.Random(step)
    found = []
    for number in range(_GROUPS * _GROUP_SIZE):
        task, index = divmod(number, _GROUP_SIZE)
        answer = [*(generator.randrange(5, 90) for _ in range(generator.randint(2, 6))), 3]
        found.append(
            Rollout(
                environment="letters",
                task_id=_GROUPS * (step - 1) + task,
                sample_index=index,
                token_ids=TokenIds([4, 5 + task, *answer]),
                loss_mask=LossMask([False, False, *[True] * len(answer)]),
                logprobs=Logprobs([0.0, 0.0, *(generator.uniform(-6, -4) for _ in answer)]),
                versions=[VersionSpan(step - 1, 2, 2 + len(answer))],
                reward=generator.choice((0.0, 0.5, 1.0)) + 0.01 * index,
            )
        )
    return found
