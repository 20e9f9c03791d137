"""The start of an attempt: from scratch, a checkpoint or another run, and which files of the directory it keeps.

Nothing in the run directory is touched before everything that can be refused has been. If `ckpt.resume_step` is unset,
the same command continues an unfinished run of the same settings. A finished run, or other settings, are refused. No
way out that a refusal names removes what can be resumed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.config import PROGRAMS
from holdfast.config.base import CkptConfig, Command
from holdfast.config.inference import InferenceConfig
from holdfast.config.marks import Mark, has_mark
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.resolved import is_free
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import LoraConfig, SupervisedCommand, TrainingCommand, schedule_end
from holdfast.errors import CheckpointError, ConfigError, DataError, ReadError, RunDirError, StorageError
from holdfast.launcher.resume import attempt as attempts
from holdfast.launcher.resume import config_diff, resume_step
from holdfast.orchestrator.state import OrchestratorState, refuse_open_groups
from holdfast.run.checkpoints import MODEL_DIR, ORCHESTRATOR_DIR, TRAINER_DIR, Kind, kind_of, verify_checkpoint
from holdfast.run.inputs import check_warm_start
from holdfast.run.journal import STATE_NAME
from holdfast.run.manifest import Verification, read_manifest
from holdfast.run.run_dir import OF_RUN, RunDir
from holdfast.run.settings import read_settings
from holdfast.run.weights import read_scaling

_MOST_LINES = 12
_PROGRAM_FILES = {"trainer" if program == "rl" else program: program for program in PROGRAMS}

S = TypeVar("S")


def prepare(
    trainer: TrainingCommand,
    *,
    clean: bool,
    dry_run: bool,
    orchestrator: OrchestratorConfig | None = None,
    inference: InferenceConfig | None = None,
    again: bool = False,
    is_locked: bool = False,
) -> attempts.Attempt:
    """Lock the run directory, decide where to start, and set aside what that supersedes. Raise RunDirError if the
    directory is in use, cannot be written, or holds a run that is finished or of other settings, without resume or
    --clean. Raise ConfigError if options contradict each other. Raise CheckpointError if the step to resume from is
    missing, damaged, or of another model. Raise ReadError if a file that decides about it cannot be read.

    Args:
        trainer: its `output_dir` is the run directory.
        clean: remove the run that is there.
        dry_run: decide and check everything, touch nothing.
        orchestrator, inference: of RL runs; journaled batches are kept only if these settings still make them.
        again: this process has started the run before: continue from the newest checkpoint, or the beginning.
        is_locked: this process holds the lock already.
    """
    run_dir = RunDir(trainer.output_dir)
    ckpt = trainer.ckpt or CkptConfig()
    if again:
        ckpt = ckpt.model_copy(update={"resume_step": "auto"})
    _refuse_contradictions(ckpt, clean=clean)
    _refuse_directory(run_dir, ckpt)
    for place in (run_dir.checkpoints, run_dir.weights, run_dir.rollouts):
        if place.is_symlink() and not place.exists():
            raise ReadError(f"{place} is a link to {place.readlink()}, which is away. Mount it, or remove the link.")
    if not (dry_run or again or is_locked):  # then this process holds the lock
        run_dir.lock()
        if orchestrator is not None:
            run_dir.lock_orchestrator()
    if not again and run_dir.is_being_removed():
        print(f"{run_dir.path} holds the rest of a run whose removal by --clean was interrupted: a start removes it")
        if dry_run:
            clean, ckpt = True, ckpt.model_copy(update={"resume_step": None})
        else:
            _remove_rest(run_dir)
    async_level = trainer.async_level if isinstance(trainer, TrainerConfig) else 0
    sections = (trainer, orchestrator, inference)
    store, whole = _store_of(run_dir, ckpt, dry_run=dry_run, again=again)
    if not clean and ckpt.resume_step is None and _goes_on(run_dir, trainer, _sections(*sections)):
        ckpt = ckpt.model_copy(update={"resume_step": "auto"})
    attempt = _decide(run_dir, ckpt, clean=clean, store=store, whole=whole, async_level=async_level, again=again)
    if attempt.resume_step is None:
        _refuse_own_weights(run_dir, trainer, clean=clean)
        if ckpt.init_from is not None:
            _require_reference(trainer)
            check_warm_start(ckpt.init_from, trainer.model, how=ckpt.verify)
            _refuse_other_weights(ckpt.init_from, trainer)
    _check_fits(attempt, trainer)
    if orchestrator is not None and attempt.checkpoint is not None:
        state = attempt.checkpoint / ORCHESTRATOR_DIR / STATE_NAME
        refuse_open_groups(msgspec.json.decode(state.read_bytes(), type=OrchestratorState), orchestrator)
    inputs = config_diff.find_inputs(trainer, orchestrator, is_fresh=attempt.resume_step is None)
    attempt = replace(attempt, inputs=inputs, to_go_on=_to_go_on(trainer))
    window, done = trainer.profiled_steps, attempt.resume_step or 0
    if window is not None and done >= window.last:
        print(f"WARNING: profile = {window}: nothing is profiled, the run continues from step {done}")
    if not dry_run:
        _make_room(attempt, ckpt, sections, store, clean=clean, again=again)
    elif not clean:
        _, last_batch, _ = _look_at_the_rest(attempt, ckpt, sections, clean=clean)
        kept = attempt.resume_step or 0 if last_batch is None else last_batch
        if left := [batch for batch in run_dir.published_batches() if batch > kept]:
            print(f"a start makes journaled batches again: {left[0]}{f' to {left[-1]}' if len(left) > 1 else ''}")
    return attempt


def _refuse_directory(run_dir: RunDir, ckpt: CkptConfig) -> None:
    """Refuse a directory of an evaluation, and a step to resume from in a directory that does not exist."""
    if (run_dir.path / "config" / "evaluate.toml").exists():
        raise RunDirError(f"{run_dir.path} holds an evaluation: choose another directory with --output-dir.")
    if ckpt.dir is None and not run_dir.path.exists() and ckpt.resume_step != "auto":
        # Before the lock makes the directory.
        resume_step.resolve_resume_step(run_dir, ckpt.resume_step, how=ckpt.verify)


def _store_of(run_dir: RunDir, ckpt: CkptConfig, *, dry_run: bool, again: bool) -> tuple[str | None, int | None]:
    """Return the store that the attempt needs, and the newest step that is whole here if no store is needed for it."""
    if ckpt.dir is not None and dry_run:
        from holdfast.remote.object_store import ObjectStore

        print(f"a dry run does not look for checkpoints at {ObjectStore(ckpt.dir, connects=False).url}")
        return None, None
    if ckpt.dir is None or not again:
        return ckpt.dir, None
    # A run that has all it needs here continues without its store.
    whole = _newest_if_whole(run_dir, ckpt.verify)
    return (ckpt.dir if whole is None and run_dir.entries() else None), whole


def _to_go_on(trainer: TrainingCommand) -> str:
    """Return how the user continues the run, by the flags of its command."""
    if trainer.clean:
        return "give the same command again without --clean"
    if trainer.ckpt is not None and trainer.ckpt.resume_step not in (None, "auto", "latest", -1):
        return "give the same command again with --ckpt.resume-step latest"
    return "give the same command again"


def _goes_on(run_dir: RunDir, trainer: TrainingCommand, sections: Mapping[str, Command]) -> bool:
    """Whether the same command continues what is in `run_dir`; raise `RunDirError` if it must not."""
    if not (run_dir.holds_run() or run_dir.entries()):
        return False
    source = trainer.ckpt.resume_dir if trainer.ckpt else None
    if source is not None and run_dir.has_work() and not _is_forked_from(run_dir, source.resolve()):
        raise RunDirError(
            f"{run_dir.path} already holds a run that was not forked from {source}: continue that run by "
            "--ckpt.resume-step auto, or choose another directory with --output-dir."
        )
    _go_on_or_refuse(run_dir, run_dir.next_attempt(), trainer, sections)
    return True


def _is_forked_from(run_dir: RunDir, source: Path) -> bool:
    """Whether the run began with the checkpoint at `source`, wherever that run is now."""
    if run_dir.forked_from() in (None, str(source)):
        return run_dir.forked_from() is not None
    fork = run_dir.identity()["forked_from"]
    try:
        there = read_manifest(source)
    except (CheckpointError, ReadError):
        return False
    return bool(there.run_id) and (there.run_id, there.step) == (fork.get("run_id"), fork.get("step"))


def _sections(
    trainer: TrainingCommand, orchestrator: OrchestratorConfig | None = None, inference: InferenceConfig | None = None
) -> dict[str, Command]:
    """Return the settings of the processes of a run, by the names of their files."""
    found = {attempts.process_name(trainer): trainer, "orchestrator": orchestrator, "inference": inference}
    return {name: section for name, section in found.items() if section is not None}


def _look_at_the_rest(
    attempt: attempts.Attempt,
    ckpt: CkptConfig,
    sections: tuple[TrainingCommand, OrchestratorConfig | None, InferenceConfig | None],
    *,
    clean: bool,
) -> tuple[bool, int | None, bool]:
    """Print which inputs have changed. Return whether none has changed, the last batch that is kept, and whether an
    orchestrator that was started by hand lives. Raise RunDirError if it would be left without its batches."""
    trainer, orchestrator, inference = sections
    lives = orchestrator is None and attempt.run_dir.has_orchestrator()  # started by hand, as this trainer
    holds = True if clean else _tell_changed_inputs(attempt, trainer)
    # A trainer that is started by hand does not know the settings of its orchestrator.
    keeps = not clean and (holds or orchestrator is None)
    last_batch = resume_step.last_kept_batch(attempt, ckpt, trainer, orchestrator, inference) if keeps else None
    if lives:
        resume_step.refuse_to_leave_behind(attempt, last_batch, clean=clean)
    return holds, last_batch, lives


def _make_room(
    attempt: attempts.Attempt,
    ckpt: CkptConfig,
    sections: tuple[TrainingCommand, OrchestratorConfig | None, InferenceConfig | None],
    store: str | None,
    *,
    clean: bool,
    again: bool,
) -> None:
    """Set aside or remove what the attempt supersedes in the store and the run directory."""
    trainer, orchestrator, _ = sections
    run_dir = attempt.run_dir
    try:
        holds, last_batch, lives = _look_at_the_rest(attempt, ckpt, sections, clean=clean)
        if not again and _finished_at(run_dir, attempt.number) is not None:
            run_dir.note_early_end(None)  # the user continues a run that has ended
        run_dir.require_writable()
        is_other = not holds or (not again and _takes_another_way(attempt, ckpt, trainer, orchestrator))
        if run_dir.holds_run() and not clean and (origin := run_dir.note_place()) is not None:
            print(f"{run_dir.path} is a copy of the run in {origin}: it is a run of its own from here on")
        if attempt.number > 1 and run_dir.holds_run() and is_other:
            run_dir.note_rewind(attempt.resume_step or 0, by_attempt=attempt.number)
        if again:
            # They will be published again, bit for bit, and many copies would fill the disk.
            run_dir.remove_weights_after(attempt.resume_step or 0)
        if store is not None and attempt.fork is None:
            from holdfast.launcher.resume.remote import set_aside_remote_after

            # Before the steps here: otherwise a kill between leaves later ones there, which `auto` would bring back.
            _with_store(lambda: set_aside_remote_after(store, attempt.resume_step or 0, run_dir), again=again)
        if clean:
            run_dir.remove_run()
        if is_other and attempt.resume_step is None and run_dir.evaluation(0).exists():  # of another beginning
            resume_step.set_aside(run_dir, run_dir.evaluation(0), attempt.number)
        exports = trainer.program == "rl"
        _settle(attempt, how=ckpt.verify, last_batch=last_batch, of_batches=not lives, exports_again=exports)
        if trainer.keep_attempts != "all":
            _forget_attempts(attempt, trainer.keep_attempts, tuple(_sections(*sections)))
    except OSError as error:
        raise RunDirError(
            f"{run_dir.path} could not be prepared: {error}. No committed checkpoint is lost: mend the storage "
            "or the permissions, then start again."
        ) from error


def _remove_rest(run_dir: RunDir) -> None:
    try:
        run_dir.remove_run()
    except OSError as error:
        raise RunDirError(
            f"{run_dir.path} holds the rest of a run that --clean began to remove, and it cannot be removed: {error}. "
            "Mend the storage or the permissions, then start again."
        ) from error


def _tell_changed_inputs(attempt: attempts.Attempt, trainer: TrainingCommand) -> bool:
    """Print which libraries and files have changed; return whether the last attempt trained with the same."""
    saved, is_known = config_diff.libraries_of(attempt.checkpoint), True
    try:
        before = attempts.last_started(attempt.run_dir, attempt.number, (attempts.process_name(trainer),))
        # In the run directory itself: from another machine.
        noted = {} if attempt.fork else config_diff.inputs_of(before or attempt.run_dir.path)
    except DataError as error:
        print(f"WARNING: whether files or libraries have changed since the last attempt is not known: {error}")
        noted, is_known = {}, False
    since_last = config_diff.changed_inputs(attempt.inputs, {**saved, **noted})
    for line in dict.fromkeys([*config_diff.changed_inputs(attempt.inputs, saved), *since_last]):
        print(f"WARNING: changes what is computed from here on: {line}")
    return is_known and not config_diff.change_training(since_last)


def _takes_another_way(
    attempt: attempts.Attempt, ckpt: CkptConfig, trainer: TrainingCommand, orchestrator: OrchestratorConfig | None
) -> bool:
    """Whether the steps that are trained again will differ: trackers must not mix the two."""
    step, wanted = attempt.resume_step or 0, ckpt.resume_step
    if wanted not in (None, "latest", "auto", -1) and any(later > step for later in attempt.run_dir.steps_there()):
        return True
    given = _sections(trainer, orchestrator)
    before = attempts.last_started(attempt.run_dir, attempt.number, tuple(given))
    return before is not None and any(
        config_diff.compare_settings(read_settings(before / f"{name}.toml"), config).computing
        for name, config in given.items()
    )


def _forget_attempts(attempt: attempts.Attempt, keep: int, names: tuple[str, ...]) -> None:
    """Remove what the oldest attempts left, except the settings that the next attempt compares with."""
    started = attempts.last_started(attempt.run_dir, attempt.number, names)
    last = attempt.number - keep
    if started is not None:
        last = min(last, int(started.name.removeprefix("attempt_")) - 1)
    attempt.run_dir.remove_old_attempts(last)


def _with_store(action: Callable[[], S], *, again: bool) -> S | None:
    """Do what needs the object store; `again`: continue without the store, since this machine has all checkpoints."""
    try:
        return action()
    except StorageError as error:
        if not again:
            raise
        print(f"WARNING: continuing with the checkpoints of this machine only: {error}", flush=True)
        return None


def _refuse_contradictions(ckpt: CkptConfig, *, clean: bool) -> None:
    wanted = ckpt.resume_step
    if clean and wanted is not None:
        raise ConfigError("--clean removes what --ckpt.resume-step needs: give one of them")
    for key, path, other in (
        ("resume_dir", ckpt.resume_dir, "continues from another run's checkpoint"),
        ("init_from", ckpt.init_from, "starts from scratch with other weights"),
    ):
        if path is not None and wanted not in (None, "auto"):
            flag = key.replace("_", "-")
            raise ConfigError(
                f"ckpt.resume_step = {wanted} continues from a checkpoint of this run, ckpt.{key} = {path} {other}: "
                f"give one of them. `--ckpt.resume-step auto --ckpt.{flag} {path}` takes this run's newest "
                "checkpoint, and the other if there is none."
            )


def _require_reference(trainer: TrainingCommand) -> None:
    """Refuse the default reference, `model.name`, if the run begins with other weights."""
    if isinstance(trainer, TrainerConfig) and trainer.kl is not None and trainer.kl.reference is None:
        raise ConfigError(
            "kl.reference is needed with ckpt.init_from: by default the reference is model.name, and this run "
            "begins with other weights. Name a model directory; `ckpt export` makes one of a checkpoint."
        )


def _refuse_own_weights(run_dir: RunDir, trainer: TrainingCommand, *, clean: bool) -> None:
    """Refuse models of this directory for a fresh start, which moves them or, with --clean, removes them."""
    cleared = [run_dir.path / name for name in OF_RUN] if clean else [run_dir.checkpoints, run_dir.weights]
    used = [*config_diff.models_of(trainer, is_fresh=True).items(), ("model.tokenizer", trainer.model.tokenizer_name)]
    if isinstance(trainer, SupervisedCommand):
        used += [(trainer.data.key, source.name) for source in trainer.data.sources]
    for key, name in used:
        if any(Path(name).resolve().is_relative_to(directory.resolve()) for directory in cleared):
            raise ConfigError(
                f"{key} = {name} lies in {run_dir.path}, which a fresh start clears. "
                "Choose another directory with --output-dir."
            )


def _refuse_other_weights(path: Path, trainer: TrainingCommand) -> None:
    """Refuse weights of other sizes than the model's, and adapters of another strength, by the files beside them: the
    trainer would find out too late, or never."""
    lora, settings, kind = trainer.model.lora, path / TRAINER_DIR / attempts.CONFIG_NAME, kind_of(path)
    wanted = found = lora and {"rank": lora.rank, "alpha": lora.plain_alpha}
    if settings.is_file():
        found = read_settings(settings).get("model", {}).get("lora")
        if found and "alpha" in found:
            found |= {"alpha": LoraConfig.model_validate(found).plain_alpha}
    elif kind is Kind.ADAPTER:
        found = {"rank": (scaling := read_scaling(path)).r, "alpha": scaling.alpha}
    elif kind in (Kind.WEIGHTS, Kind.HUGGING_FACE):
        found = None
    keys = ("rank", "alpha") if found and wanted and "alpha" in found else ("rank",)
    pairs = {key: [str((of or {}).get(key, "unset")) for of in (found, wanted)] for key in keys}
    if changed := [
        f"         model.lora.{key}: {' -> '.join(pair)}\n" for key, pair in pairs.items() if len({*pair}) > 1
    ]:
        raise CheckpointError(
            f"{path} (ckpt.init_from) does not fit this configuration:\n{''.join(changed)}"
            "       Give rank and alpha of the weights. Whole weights are given as --model.name to train adapters of "
            "them; `ckpt export RUN STEP --to DIR --base NAME` merges adapters."
        )
    config_diff.refuse_other_model(
        (path / MODEL_DIR if kind is Kind.CHECKPOINT else path) / "config.json",
        Path(trainer.model.name) / "config.json",
        model_name=trainer.model.name,
        what=f"{path} (ckpt.init_from)",
        keys=config_diff.SIZES,
        remedy="Give a model of these sizes as --model.name.",
    )


def _newest_if_whole(run_dir: RunDir, how: Verification) -> int | None:
    """Return the step of the newest checkpoint here if it is whole; then the store has nothing newer of this run."""
    entries = [entry for entry in run_dir.entries() if entry.status != "foreign"]
    if not entries:
        return None
    try:
        return verify_checkpoint(entries[-1].path, how=how, step=entries[-1].step, to_resume=True).step
    except CheckpointError:
        return None


def _decide(
    run_dir: RunDir,
    ckpt: CkptConfig,
    *,
    clean: bool,
    store: str | None,
    whole: int | None,
    async_level: int,
    again: bool,
) -> attempts.Attempt:
    """Find the step to start from, verified (`whole` already is); checkpoints of this run come first."""
    wanted, source = ckpt.resume_step, ckpt.resume_dir
    number = 1 if clean else run_dir.next_attempt()
    is_there = not clean and (run_dir.holds_run() or bool(run_dir.entries()))
    if store is not None:
        from holdfast.launcher.resume.remote import fetch  # takes 0.1 s

        brought = _with_store(
            lambda: fetch(store, run_dir, wanted, how=ckpt.verify, older_weights=async_level), again=again
        )
        is_there |= brought is not None
    step = whole
    if whole is None and (is_there or wanted != "auto"):
        step = resume_step.resolve_resume_step(run_dir, wanted, how=ckpt.verify, again=again)
    if step is not None:
        for flag, path in (("resume-dir", source), ("init-from", ckpt.init_from)):
            if path is not None:
                print(
                    f"this run has a checkpoint of its own (step {step}): --ckpt.{flag} {path} is not needed any more"
                )
        return attempts.Attempt(run_dir, number, step, run_dir.checkpoint(step))
    if source is None:
        return attempts.Attempt(run_dir, number, None)
    fork = attempts.find_fork(source, run_dir, how=ckpt.verify, async_level=async_level)
    return attempts.Attempt(run_dir, number, fork.listing.step, fork.directory, fork)


def _check_fits(attempt: attempts.Attempt, trainer: TrainingCommand) -> None:
    """Refuse a checkpoint that the trainer cannot continue from."""
    step, directory = attempt.resume_step, attempt.checkpoint
    if step is None or directory is None:
        return
    if step > trainer.max_steps:
        steps = [] if attempt.fork else attempt.run_dir.steps_there()
        earlier = [str(other) for other in steps if other <= trainer.max_steps]
        others = f", or resume from one of: {', '.join(earlier)}" if earlier else ""
        raise ConfigError(
            f"max_steps = {trainer.max_steps} is before step {step}, from which the run would continue. "
            f"Raise --max-steps{others}."
        )
    made_by = read_manifest(directory).program
    if made_by != trainer.program:
        raise CheckpointError(
            f"{directory} is a checkpoint of {made_by or 'another training loop or an older version'}, and "
            f"{trainer.program} cannot continue from it. --ckpt.init-from {directory} with another "
            "--output-dir starts a new run from its weights."
        )
    saved, wanted = directory / MODEL_DIR / "config.json", Path(trainer.model.name) / "config.json"
    config_diff.refuse_other_model(saved, wanted, model_name=trainer.model.name, what=f"the checkpoint of step {step}")
    settings = directory / TRAINER_DIR / attempts.CONFIG_NAME
    if settings.exists():
        config_diff.refuse_other_tensors(read_settings(settings), trainer, step=step)


def _settle(
    attempt: attempts.Attempt, *, how: Verification, last_batch: int | None, of_batches: bool, exports_again: bool
) -> None:
    """Bring the directory into the state that the attempt starts from; print the changes."""
    run_dir, number = attempt.run_dir, attempt.number
    for path in run_dir.clear_leftovers(of_batches=of_batches):
        print(f"removed {path.relative_to(run_dir.path)}: it was never committed")
    if attempt.fork is not None or attempt.resume_step is None or not run_dir.holds_run():
        fork, there = attempt.fork, attempt.checkpoint
        run_id = read_manifest(there).run_id if there and not fork else None
        if run_id:
            print(f"WARNING: {run_dir.path} has no run.json, and gets the run id of step {attempt.resume_step}")
        run_dir.create(
            forked_from=fork.origin if fork else None,
            created_unix_s=fork.created_unix_s if fork else None,
            run_id=run_id,
        )
    aside = run_dir.discarded(number)
    for path, reason in resume_step.set_aside_damaged(run_dir, number):
        print(f"WARNING: moved {path.relative_to(run_dir.path)} aside, because it is damaged: {reason}")
    step = attempt.resume_step or 0
    after = 0 if attempt.fork else step
    # Before the fork is copied, which may need the names.
    if moved := resume_step.set_aside_after(run_dir, after, number, last_batch=last_batch, exports_again=exports_again):
        print(f"moved to {aside.relative_to(run_dir.path)}, because it is later than step {after}:")
        # Whole paths if they are on another filesystem.
        paths = (path.relative_to(aside if path.is_relative_to(aside) else run_dir.path) for path in moved)
        print("  " + ", ".join(map(str, paths)))
    if attempt.fork is not None:
        attempts.copy_fork(attempt.fork, run_dir, how=how)
        print(f"forked {attempt.fork.directory} (run {attempt.fork.listing.run_id or 'of no id'})")
    replayed = [batch for batch in run_dir.published_batches() if batch > step]
    if replayed:
        print(f"batches {replayed[0]} to {replayed[-1]} are in the journal: training them again, without sampling")
    if number > 1 or attempt.resume_step is not None:
        verb = "starting" if attempt.resume_step is None else "resuming"
        print(f"{verb} {attempt.start} in {run_dir.path} (attempt {number})")


def _go_on_or_refuse(run_dir: RunDir, number: int, trainer: TrainingCommand, sections: Mapping[str, Command]) -> None:
    """Return if attempt `number` may continue the run in `run_dir`, and print that there is work of it. Raise
    RunDirError if the run is finished, or was started with settings that compute something else. Raise OSError or
    ReadError if the files of the run cannot be read.

    Args:
        sections: settings of the processes of the run, by the names of their files.
    """
    if not run_dir.has_work():
        return
    elsewhere = "or choose another directory with --output-dir"
    steps = run_dir.steps_there()
    name = attempts.process_name(trainer)
    if (other := _other_program(run_dir, number, name)) is not None:
        raise RunDirError(f"{run_dir.path} holds a run of {other}: choose another directory with --output-dir.")
    if (step := _finished_at(run_dir, number)) is not None:
        ways = {"": f"raise {trainer.length_flag}", "stop": "raise --stop.patience", "hooks": "change hooks"}
        longer = ways[run_dir.ended_by()]
        further = (
            f"{longer} and add --ckpt.resume-step latest (step {steps[-1]}) to train further, {elsewhere}"
            if steps
            else "choose another directory with --output-dir, and with --model.name "
            f"{run_dir.weights_of(step)} if a new run is to begin with its weights"
        )
        raise RunDirError(f"{run_dir.path} holds a run that is finished, at step {step}: {further}.")
    before = attempts.last_started(run_dir, number, tuple(sections))
    has_settings = any(run_dir.path.glob("configs/attempt_*/*.toml"))
    if before is None and run_dir.forked_from() is not None and not has_settings:
        return  # killed after the copy of the checkpoint: nothing has started
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
    # A store may have checkpoints that this machine lacks.
    elsewhere_too = run_dir.forked_from() is not None or (trainer.ckpt is not None and trainer.ckpt.dir is not None)
    if run_dir.entries() or run_dir.published_batches() or elsewhere_too:
        print(f"continuing the unfinished run in {run_dir.path}: its settings are the same")
    else:
        print(f"the unfinished run in {run_dir.path} has the same settings and saved no step: it starts again")


def _changes(
    before: Path, sections: Mapping[str, Command], trainer: TrainingCommand, *, name: str, steps: Sequence[int]
) -> list[str]:
    """Return a line for each setting that changes the computation of `before`."""
    old = read_settings(before / f"{name}.toml")
    is_moved = old.get("parallel", {}).get("device") != trainer.parallel.device
    changed = [
        line
        for section, config in sections.items()
        for key, line in _differing(before / f"{section}.toml", config).items()
        if not (is_free(type(config), key) or (is_moved and has_mark(type(config), key, Mark.DEVICE)))
    ]
    if stretched := config_diff.describe_stretch(old, trainer, step=steps[-1] if steps else 0):
        changed.append(stretched)
    critic = trainer.critic if isinstance(trainer, TrainerConfig) else None
    lasts = (old.get("max_steps", trainer.max_steps), trainer.max_steps)
    ends = [schedule_end(critic.optim, last) for last in lasts] if critic is not None else []
    if len(set(ends)) > 1:
        changed.append(f"the schedule of the critic now ends at step {ends[1]} instead of {ends[0]}")
    if steps and trainer.ckpt is None:
        changed.append("ckpt: set -> unset")
    if not steps and (weights := _init_from(old)) != _init_from(config_diff.settings_of(trainer)):
        changed.append(
            f"ckpt.init_from: {weights or 'unset'} -> {_init_from(config_diff.settings_of(trainer)) or 'unset'}"
        )
    return changed


def _differing(before: Path, config: Command) -> dict[str, str]:
    return config_diff.changed_settings(read_settings(before), config_diff.settings_of(config), type(config))


def _other_program(run_dir: RunDir, number: int, name: str) -> str | None:
    """Return the program of the newest attempt, if it is not `name`."""
    for attempt in range(number - 1, 0, -1):
        there = {path.stem for path in run_dir.configs(attempt).glob("*.toml")} & _PROGRAM_FILES.keys()
        if there:
            return None if name in there else _PROGRAM_FILES[min(there)]
    return None


def _finished_at(run_dir: RunDir, number: int) -> int | None:
    """Return the last step of the run if the newest attempt that ended has finished it; else None."""
    for attempt in range(number - 1, 0, -1):
        if attempts.was_refused(run_dir, attempt):
            continue
        if (end := attempts.end_of(run_dir, attempt)) is not None:
            return end.get("step") if end.get("exit_code") == 0 else None
        if run_dir.logs(attempt).is_dir():
            return None
    return None


def _init_from(settings: Mapping[str, object]) -> object:
    ckpt = settings.get("ckpt")
    return ckpt.get("init_from") if isinstance(ckpt, dict) else None
