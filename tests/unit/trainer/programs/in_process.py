"""Training programs in a process of the tests, in whose process group all ranks call `train`."""

import importlib
import json
import random
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch.distributed as dist

from holdfast.config import program_config
from holdfast.config.training import TrainingCommand
from holdfast.launcher.resume.attempt import with_resume, write_config
from holdfast.launcher.resume.prepare import prepare
from holdfast.protocol.rollouts import Batch, Rollout
from holdfast.run import manifest
from holdfast.run.journal import Accepted, EnvironmentPosition, publish_batch
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.dcp import ShardWriter
from holdfast.trainer.checkpoint.state import capture_random_state
from holdfast.trainer.export import TensorReader
from holdfast.trainer.mesh import RankGroup
from tests.builders.sampled_rollouts import answered
from tests.faults.run_states import checkpoint_state
from tests.runs.rl import exact_metrics

STEPS, HALF = 8, 5
_GROUPS, _GROUP_SIZE = 3, 4
_PROGRESS = "trainer/progress.json"
_SAME_IN_ALL = {".metadata", "__0_0.distcp", "progress.json", "config.toml"}


Resume = int | Literal["latest", "auto"] | None


def train(program: str, output: Path, settings: Mapping[str, Any], *, until: int, resume: Resume = None) -> RunDir:
    """Train until the step `until`, which is saved, from `resume` in new objects; return the directory of the run."""
    run_prepared(prepared(program, output, settings, until=until, resume=resume))
    return RunDir(output)


def prepared(
    program: str, output: Path, settings: Mapping[str, Any], *, until: int, resume: Resume = None
) -> TrainingCommand:
    """Prepare the directory of a run as its command does, and return the settings for its ranks."""
    config: TrainingCommand = program_config(program).model_validate(
        {
            "seed": 3, "parallel": {"threads": 1}, **settings, "output_dir": output, "max_steps": until,
            "ckpt": {"resume_step": resume} | settings.get("ckpt", {}),
            "optim": {"schedule": "constant"} | settings.get("optim", {}),  # which another last step does not stretch
        }
    )  # fmt: skip
    if dist.get_rank() == 0:
        attempt = prepare(config, clean=False, dry_run=False, is_locked=True)  # a lock lasts as long as this process
        write_config(attempt, program, with_resume(config, attempt.resume_step), dry_run=False)
        if program == "rl":
            publish_journal(attempt.run_dir, range((attempt.resume_step or 0) + 1, until + 1))
        resume = attempt.resume_step
    dist.barrier()
    assert resume is None or isinstance(resume, int)
    return with_resume(config, resume)


def run_prepared(config: TrainingCommand) -> None:
    importlib.import_module(f"holdfast.trainer.programs.{config.program.replace('-', '_')}").run(config)


def column(run_dir: RunDir, name: str) -> list[float]:
    """Return the values of a metric, of the steps that have it."""
    return [line[name] for line in read_metrics(run_dir.metrics) if name in line]


def end_state(run_dir: RunDir, *, last: int = STEPS, first: int = 1) -> dict[str, Any]:
    """Return the final checkpoint without what names the attempt, the published weights and the metrics."""
    weights = {path: path.read_bytes() for path in run_dir.weights.glob(f"*step_{last}/**/*.safetensors")}
    assert weights
    state = checkpoint_state(run_dir.checkpoint(last)) | {
        str(path.relative_to(run_dir.path)): data for path, data in weights.items()
    }
    return state | {"metrics": exact_metrics(run_dir, range(first, last + 1))}


def parts_of(checkpoint: Path) -> set[str]:
    """Return the parts of a checkpoint: first names of tensors, names of values, and further files."""
    tensors = {name.split(".")[0] for name in TensorReader(checkpoint / "trainer").saved}
    files = {path.name for folder in ("trainer", "orchestrator") for path in (checkpoint / folder).glob("*")}
    return tensors | _values(checkpoint).keys() | (files - _SAME_IN_ALL)


def forget(checkpoint: Path, part: str) -> None:
    """Damage a part of a committed checkpoint: digests become others, tensors are halved, generators those of now."""
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


def publish_journal(run_dir: RunDir, steps: Iterable[int]) -> None:
    """Put the batches of an orchestrator into the journal, unless they are there: random answers and rewards."""
    for step in [step for step in steps if not run_dir.batch(step).exists()]:
        batch = Batch(step=step, policy_version=step - 1, weights_digest="d" * 32, rollouts=_rollouts(step))
        all_before = [rollout for number in range(1, step + 1) for rollout in _rollouts(number)]
        position = EnvironmentPosition(next_task=_GROUPS * step, group_size=_GROUP_SIZE)
        accepted = Accepted(
            step=step, problems=_GROUPS * step, rollouts=len(all_before),
            tokens=sum(len(rollout.token_ids) for rollout in all_before), environments={"letters": position},
        )  # fmt: skip
        publish_batch(run_dir, batch, msgspec.json.encode(accepted))


def _rollouts(step: int) -> list[Rollout]:
    generator = random.Random(step)
    found = []
    for number in range(_GROUPS * _GROUP_SIZE):
        task, index = divmod(number, _GROUP_SIZE)
        answer = [*(generator.randrange(5, 90) for _ in range(generator.randint(2, 6))), 3]
        logprobs = [generator.uniform(-6, -4) for _ in answer]
        found.append(answered(
            [4, 5 + task], answer, logprobs, version=step - 1, environment="letters", sample_index=index,
            task_id=_GROUPS * (step - 1) + task, reward=generator.choice((0.0, 0.5, 1.0)) + 0.01 * index,
        ))  # fmt: skip
    return found
