"""Batches by the arguments of `rollouts`, and rollouts as text."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import CheckpointError, ConfigError
from holdfast.protocol.rollouts import Batch, Rollout
from holdfast.run.choose_run import command_line, no_run, steps_of
from holdfast.run.journal import read_batch_in
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import read_settings

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_STEP_NAME = re.compile(r"step_(\d+)(\.\d+)?")


def find_batches(run_dir: RunDir, texts: Sequence[str]) -> list[Path]:
    """Return the directories of the batches that STEP arguments name, each once, in their order.

    Raises:
        CheckpointError: a batch is not there; names the batches that are.
        ConfigError: the directory holds no run, or an argument is not a STEP.
    """
    if not (run_dir.holds_run() or run_dir.rollouts.is_dir()):
        raise no_run(run_dir.path, "neither run.json nor rollouts")
    return list(dict.fromkeys(directory for text in texts for directory in _batches_of(run_dir, text)))


def find_batch(run_dir: RunDir, command: str, step: str) -> Path:
    """Return the directory of the one batch that STEP names for a subcommand. Raise as `find_batches`."""
    directories = find_batches(run_dir, [step])
    if len(directories) != 1:
        raise ConfigError(
            f"{command} takes one batch, '{step}' means {len(directories)}. "
            f"`{command_line('rollouts stats', run_dir.path, [step])}` shows several."
        )
    return directories[0]


def _batches_of(run_dir: RunDir, text: str) -> Iterator[Path]:
    there = run_dir.published_batches()
    if _STEP_NAME.fullmatch(Path(text).name) and Path(text).is_dir():
        yield Path(text)
        return
    wanted = steps_of(text, there)
    if wanted is None:
        raise ConfigError(
            f"'{text}' is not a STEP: a number, a span such as 3-7, `latest`, `all`, or a batch's directory"
        )
    for step in wanted:
        if step not in there:
            steps = f"it has {', '.join(map(str, there))}" if there else "it has none, only `rl` makes batches"
            raise CheckpointError(f"batch {text} is not in {run_dir.rollouts}: {steps}.")
        yield run_dir.batch(step)


def step_of(directory: Path) -> int:
    """Return the step of a batch by the name of its directory."""
    match = _STEP_NAME.fullmatch(directory.name)
    assert match is not None
    return int(match[1])


def read_batch_at(directory: Path) -> Batch:
    """Return the batch in a directory that `find_batches` returned, verified.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return read_batch_in(directory, step=step_of(directory))
    except FileNotFoundError as error:  # removed while it was read
        raise CheckpointError(f"{error.filename} is missing") from None


def problems_of(batch: Batch) -> list[list[Rollout]]:
    """Return the rollouts of a batch, problem by problem, in their order."""
    grouped = itertools.groupby(batch.rollouts, key=lambda rollout: (rollout.environment, rollout.task_id))
    return [list(group) for _, group in grouped]


@dataclass(frozen=True)
class TextOf:
    """Decodes token ids, or cannot, for a `reason`."""

    tokenizer: Tokenizer | None
    reason: str = ""

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of `token_ids` with special tokens; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=False)


def text_of(run_dir: RunDir) -> TextOf:
    """Return the tokenizer of the model in the newest configuration of a run, else of its newest checkpoint."""
    names = [str(path) for path in _directories(run_dir)]
    file = next((path for name in names if (path := Path(name) / "tokenizer.json").is_file()), None)
    if file is None:
        return TextOf(None, f"there is no tokenizer.json in {' or '.join(names) or 'any model of the run'}")
    from tokenizers import Tokenizer

    try:
        return TextOf(Tokenizer.from_file(str(file)))
    except Exception as error:  # noqa: BLE001 - the library raises nothing more specific
        return TextOf(None, f"{file} cannot be read: {error}")


def _directories(run_dir: RunDir) -> list[Path]:
    configs = run_dir.configs(run_dir.next_attempt() - 1)
    found = []
    for path in (configs / "orchestrator.toml", configs / "trainer.toml"):
        with contextlib.suppress(CheckpointError, FileNotFoundError):  # damaged: checkpoints hold the tokenizer, too
            model = read_settings(path).get("model", {})
            found += [Path(model[key]) for key in ("tokenizer", "name") if model.get(key)]
    found += [run_dir.checkpoint(step) / "model" for step in reversed(run_dir.committed_steps())]
    return list(dict.fromkeys(found))


def sampler_of(batch: Batch) -> str:
    """Return who sampled a batch, such as `version 3 with digest 4f5a...`."""
    if not batch.weights_digest:
        return f"the teacher with digest {batch.teacher_digest}"
    digests = {**batch.older_digests, batch.policy_version: batch.weights_digest}
    # In rounds the newest version may have come too late to sample any of it.
    sampled = {span.version for rollout in batch.rollouts for span in rollout.versions} or {batch.policy_version}
    return ", ".join(f"version {version} with digest {digests[version]}" for version in sorted(sampled))


def shown_text(text: str | None, token_ids: Sequence[int]) -> str:
    """Return a text indented for a table, or the tokens if there is no text."""
    return " ".join(map(str, token_ids)) if text is None else text.replace("\n", "\n          | ")
