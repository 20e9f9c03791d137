"""What the same command means in a directory that holds a run, if `ckpt.resume_step` is unset.

- Nothing was trained, saved or generated yet: the run starts.
- An unfinished run of the same configuration: the run goes on, as with `auto`.
- A finished run, or another configuration: refused. No way out that the refusal names removes what can be resumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.config import PROGRAMS
from holdfast.config.base import Command
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import TrainingCommand, schedule_end
from holdfast.errors import RunDirError
from holdfast.launcher.resume.attempt import last_started
from holdfast.launcher.resume.config_diff import compare_settings, describe_stretch, settings_of
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import read_settings

_MOST_LINES = 12
_PROGRAM_FILES = {"trainer" if program == "rl" else program: program for program in PROGRAMS}
_OF_DEVICES = ("model.activation_checkpointing:", "model.logits_chunk_tokens:", "engine.eager:")


def go_on_or_refuse(run_dir: RunDir, number: int, trainer: TrainingCommand, others: Mapping[str, Command]) -> None:
    """Return if attempt `number` may go on with the run in `run_dir`; say so in one line if there is work of it.

    Args:
        others: the settings of the other processes of the run, by the names of their files.

    Raises:
        RunDirError: the run is finished, or was started with settings that compute something else.
        OSError, ReadError: the files of the run cannot be read.
    """
    if not run_dir.has_work():
        return
    elsewhere = "or choose another directory with --output-dir"
    steps = run_dir.steps_there()
    name = "trainer" if isinstance(trainer, TrainerConfig) else trainer.program
    if (other := _other_program(run_dir, number, name)) is not None:
        raise RunDirError(f"{run_dir.path} holds a run of {other}: choose another directory with --output-dir.")
    if (step := _finished_at(run_dir, number)) is not None:
        further = (
            f"raise {trainer.length_flag} and add --ckpt.resume-step latest (step {steps[-1]}) to train further, "
            f"{elsewhere}"
            if steps
            else "choose another directory with --output-dir, and with --model.name "
            f"{run_dir.weights_of(step)} if a new run is to begin with its weights"
        )
        raise RunDirError(f"{run_dir.path} holds a run that is finished, at step {step}: {further}.")
    sections: dict[str, Command] = {name: trainer, **others}
    before = last_started(run_dir, number, tuple(sections))
    has_settings = any(run_dir.path.glob("configs/attempt_*/*.toml"))
    if before is None and run_dir.forked_from() is not None and not has_settings:
        return  # killed between the copy of the other run's checkpoint and the settings: nothing has started
    if before is None:
        raise RunDirError(
            f"{run_dir.path} already holds a run, and its settings are not there to compare with: continue with "
            f"--ckpt.resume-step auto, {elsewhere}."
        )
    changed = _changes(before, sections, trainer, name=name, steps=steps)
    if changed:
        shown = changed[:_MOST_LINES]
        left = [f"and {len(changed) - len(shown)} more"] if len(changed) > len(shown) else []
        raise RunDirError(
            f"{run_dir.path} holds an unfinished run that was started with other settings, those in {before}:\n"
            + "".join(f"         {line}\n" for line in [*shown, *left])
            + "       Give the settings of that run to continue it, or add --ckpt.resume-step auto to continue with "
            f"these settings, {elsewhere}."
        )
    # A store may have what is not here.
    elsewhere_too = run_dir.forked_from() is not None or (trainer.ckpt is not None and trainer.ckpt.dir is not None)
    if run_dir.entries() or run_dir.published_batches() or elsewhere_too:
        print(f"continuing the unfinished run in {run_dir.path}: its settings are the same")
    else:
        print(f"the unfinished run in {run_dir.path} has the same settings and saved no step: it starts again")


def _changes(
    before: Path, sections: Mapping[str, Command], trainer: TrainingCommand, *, name: str, steps: Sequence[int]
) -> list[str]:
    """Return what the settings compute otherwise than those in `before`, a line each.

    Args:
        name: which of `sections` the trainer's are.
        steps: of the checkpoints that are there.
    """
    old = read_settings(before / f"{name}.toml")
    # On another kind of device the launcher has chosen them anew.
    chosen = _OF_DEVICES if old.get("parallel", {}).get("device") != trainer.parallel.device else ()
    changed = [
        line
        for section, config in sections.items()
        for line in compare_settings(read_settings(before / f"{section}.toml"), settings_of(config)).computing
        if not line.startswith(chosen)
    ]
    if stretched := describe_stretch(old, trainer, step=steps[-1] if steps else 0):
        changed.append(stretched)
    critic = trainer.critic if isinstance(trainer, TrainerConfig) else None
    lasts = (old.get("max_steps", trainer.max_steps), trainer.max_steps)
    ends = [schedule_end(critic.optim, last) for last in lasts] if critic is not None else []
    if len(set(ends)) > 1:
        changed.append(f"the schedule of the critic now ends at step {ends[1]} instead of {ends[0]}")
    if steps and trainer.ckpt is None:  # no process would read the checkpoint
        changed.append("ckpt: set -> unset")
    if not steps and (weights := _weights_only(old)) != _weights_only(settings_of(trainer)):
        changed.append(f"ckpt.weights_only: {weights or 'unset'} -> {_weights_only(settings_of(trainer)) or 'unset'}")
    return changed


def _other_program(run_dir: RunDir, number: int, name: str) -> str | None:
    """Return the program of the newest attempt, if its settings are those of another one than `name`."""
    for attempt in range(number - 1, 0, -1):
        there = {path.stem for path in run_dir.configs(attempt).glob("*.toml")} & _PROGRAM_FILES.keys()
        if there:
            return None if name in there else _PROGRAM_FILES[min(there)]
    return None


def _finished_at(run_dir: RunDir, number: int) -> int | None:
    """Return the last step of the run if its newest attempt that ended has finished; None if it has not."""
    for attempt in range(number - 1, 0, -1):
        for line in reversed(_lines(run_dir, attempt)):
            try:
                event = json.loads(line)
            except ValueError:  # torn by a kill
                continue
            if event.get("phase") == "ended":
                return event.get("step") if event.get("exit_code") == 0 else None
        if run_dir.logs(attempt).is_dir():
            return None
    return None


def _lines(run_dir: RunDir, attempt: int) -> list[bytes]:
    try:
        return (run_dir.logs(attempt) / "events.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []


def _weights_only(settings: Mapping[str, object]) -> object:
    ckpt = settings.get("ckpt")
    return ckpt.get("weights_only") if isinstance(ckpt, dict) else None
