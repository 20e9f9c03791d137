"""`evaluate --follow`: evaluates the checkpoints of a run one after the other, as they appear.

`python -m holdfast.launcher.evaluation.follow <resolved.toml>` is what `sft` and `dpo` start beside their trainer for
`--eval.interval`. See docs/decisions.md.
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from holdfast.config.base import ModelConfig
from holdfast.config.evaluation import EvaluateConfig
from holdfast.config.inference import ServedModelConfig
from holdfast.config.load import read_toml
from holdfast.config.marks import Mark, marked
from holdfast.errors import CheckpointError, ConfigError, DataError
from holdfast.launcher.devices import choose_inference, this_machine
from holdfast.launcher.evaluation import policy
from holdfast.launcher.supervisor import Supervisor
from holdfast.orchestrator.evaluation.evaluator import files_of, settings_of_run
from holdfast.orchestrator.evaluation.results import IDENTITY_NAME, ROLLOUTS_NAME, read_identity
from holdfast.orchestrator.evaluation.statistics import summary_in
from holdfast.process.child import die_with_launcher, keep_date, run_reporting_errors, set_up_logging
from holdfast.process.events import report
from holdfast.process.gpus import find_gpus
from holdfast.run import atomic
from holdfast.run.choose_run import no_run
from holdfast.run.manifest import library_versions
from holdfast.run.run_dir import SUMMARY_NAME, RunDir, numbered_paths
from holdfast.run.settings import settings_of_trainers
from holdfast.run.timeline import span, start_timeline
from holdfast.view.ckpt_dirs import TensorWorkFailed

_LOOK_S = 1.0


@dataclass(frozen=True)
class FollowedRun:
    """A run whose checkpoints are evaluated.

    Attributes:
        max_steps: that its newest attempt trains until.
        base: the model that it began with, if it began with whole weights of a model.
    """

    run_dir: RunDir
    max_steps: int
    base: ModelConfig | None

    @classmethod
    def read(cls, run: Path) -> Self:
        """Return what the settings of the newest attempt say. Raise ConfigError if `run` holds no run; DataError if
        it trains no policy."""
        run_dir = RunDir(run)
        if not run_dir.holds_run():
            raise no_run(run)
        found = list(settings_of_trainers(run_dir))
        if any(program == "reward-model" for program, _ in found):
            raise DataError(f"{run} trains a reward model, which says nothing that could be evaluated")
        attempts = [settings for _, settings in found]
        if not attempts:
            raise DataError(f"{run} has no settings of a run (configs/attempt_N), so nobody can say how far it goes")
        # A later attempt does not say what the first steps began with; the first attempt, which does, may be removed.
        fresh = next((one for one in attempts if one.get("ckpt", {}).get("resume_step") is None), None)
        return cls(run_dir, attempts[0]["max_steps"], _base_of(fresh) if fresh is not None else None)

    def due(self, interval: int | None) -> list[int]:
        """Return the steps that are there and to be evaluated, ascending; 0 is the model that it began with."""
        steps = [step for step in self.run_dir.committed_steps() if step]
        last = self.run_dir.early_end() or self.max_steps
        wanted = [step for step in steps if interval is None or step % interval == 0 or step == last]
        return [0, *wanted] if self.base is not None else wanted

    def is_over(self) -> bool:
        """Whether no further checkpoint comes: the last step is saved, or the run has ended."""
        last = self.run_dir.early_end() or self.max_steps
        return last in self.run_dir.committed_steps() or not self.run_dir.is_under_way()


def _base_of(settings: dict[str, Any]) -> ModelConfig | None:
    """Return the model whose weights a fresh start takes, if it takes a model's weights as they are."""
    model = settings["model"]
    if model.get("init") == "random" or settings.get("ckpt", {}).get("init_from"):
        return None
    return ModelConfig(name=model["name"], tokenizer=model.get("tokenizer"))


def follow(config: EvaluateConfig) -> int:
    """Evaluate every due step of the run that `config` names, until the run is over; return the exit code. Each has a
    directory of its own. Finished evaluations are kept, unfinished ones continued. Raise ConfigError if
    the run evaluates itself; HoldfastError for settings that cannot be used, or what ended an evaluation; at the end,
    CheckpointError if checkpoints are damaged."""
    directory = config.run
    assert directory is not None, "a run is followed"
    run = FollowedRun.read(directory)
    config = policy.with_settings_of_run(config)
    if "output_dir" not in config.model_fields_set:
        config.output_dir = run.run_dir.evaluations
    trained = settings_of_run(directory)
    if trained is not None and trained.eval is not None:
        raise ConfigError(f"{directory} evaluates itself (eval): its engines do, between two weight updates")
    policy.check_servable(config)
    if config.dry_run:
        missing = _missing(config, run)
        print(f"would evaluate {_listed(missing)} of {directory} in {config.output_dir}, and what comes")
        return 0
    RunDir(config.output_dir).lock()
    keep_date(run.run_dir.created_unix_s())
    _clear_leftovers(config.output_dir)
    if config.output_dir.resolve() == run.run_dir.evaluations.resolve():
        start_timeline(run.run_dir.newest_logs(), "evaluation")
    busy: list[int] = []
    damaged: dict[int, str] = {}
    with Supervisor() as supervisor:
        while True:
            # In this order: a checkpoint that came in between is seen by the next look.
            is_over, missing = run.is_over(), [step for step in _missing(config, run) if step not in damaged]
            told, busy = busy, [step for step in missing if RunDir(_directory(config, step)).is_under_way()]
            for step in (step for step in busy if step not in told):
                print(f"{_directory(config, step)} is evaluated by another `evaluate`, which is waited for", flush=True)
            if free := [step for step in missing if step not in busy]:
                try:
                    if code := _evaluate_step(config, run, free[0], supervisor):
                        return code
                except CheckpointError as error:  # the others can be evaluated
                    damaged[free[0]] = f"step {free[0]} is not evaluated: {error}"
                    print(f"WARNING: {damaged[free[0]]}", flush=True)
            elif is_over and not missing:
                if damaged:
                    raise CheckpointError("; ".join(damaged.values()))
                print(f"every step that was to be evaluated is; the results are in {config.output_dir}")
                return 0
            elif (number := supervisor.pause(_LOOK_S, lambda: None)) is not None:
                return 128 + number
            run = FollowedRun.read(directory)


def _missing(config: EvaluateConfig, run: FollowedRun) -> list[int]:
    return [step for step in run.due(config.interval) if not _is_done(config, run, step)]


def _is_done(config: EvaluateConfig, run: FollowedRun, step: int) -> bool:
    """Whether the weights that `step` has now are evaluated. A run that is resumed sets evaluations of later steps
    aside in its own directory; elsewhere they may be of weights that were discarded."""
    path = _directory(config, step)
    if not (path / SUMMARY_NAME).exists():
        return False
    if config.output_dir.resolve() == run.run_dir.evaluations.resolve():
        return True
    settings = path / "config" / "evaluate.toml"
    try:
        wanted = policy.name_of_export(run.run_dir, step) if step else ""
    except FileNotFoundError:  # removed since it was listed: nobody can evaluate it any more
        return True
    try:
        served = read_toml(EvaluateConfig, settings).inference.model.name if settings.exists() else ""
    except ConfigError:  # damaged: nobody can say which weights were evaluated
        return False
    return Path(served).name == wanted if step else run.base is not None and served == run.base.name


def _directory(config: EvaluateConfig, step: int) -> Path:
    return config.output_dir / f"step_{step}"


def _evaluate_step(config: EvaluateConfig, run: FollowedRun, step: int, supervisor: Supervisor) -> int:
    directory = RunDir(_directory(config, step))
    if (directory.path / SUMMARY_NAME).exists():
        what = f"not of the weights that step {step} has now, or damaged"
        print(f"{directory.path} is {what}: evaluating it again", flush=True)
        atomic.remove_directory(directory.path)
    one = config.model_copy(deep=True, update={"output_dir": directory.path, "follow": False, "interval": None})
    if step:
        one.step = step
        # Noted before the export: the name identifies the weights of the answers.
        with contextlib.suppress(FileNotFoundError):  # told below
            one.inference.model.name = str(directory.path / policy.name_of_export(run.run_dir, step))
    else:
        assert run.base is not None, "step 0 is due where there is a base"
        one.run, one.model = None, run.base
        one.inference.model = one.inference.model.model_copy(
            update=policy.served_model(one, run.base.name).model_dump()
        )
    choose_inference(one.inference, this_machine(find_gpus()))  # the dtype is part of the evaluated model
    _clear_other_evaluation(one, directory)
    policy.prepare_directory(one, directory)
    if step:
        try:
            # Exported in any case: published weights have other bytes, and are removed with the next step.
            weights = policy.weights_of_step(run.run_dir.path, step, directory.path, takes_published=False)
        except (CheckpointError, TensorWorkFailed) as error:
            if step not in run.run_dir.committed_steps():
                print(f"step {step} is not evaluated: its checkpoint went away (ckpt.keep)", flush=True)
                atomic.remove_directory(directory.path)
                return 0
            if isinstance(error, TensorWorkFailed):
                return error.exit_code
            raise
        if str(weights) != one.inference.model.name:  # trained again in between
            return 0
    print(f"evaluating step {step} of {run.run_dir.path}", flush=True)
    report("evaluating", step=step)
    with span("evaluate", version=step):
        code = policy.run_evaluation(one, directory, supervisor)
    if code:
        return code
    policy.remove_exports(directory.path)
    summary = summary_in(directory.path)
    policy.tell_result(summary, directory.path, step=step)
    shown = {name.removeprefix("eval/"): f"{value:.4g}" for name, value in summary.metrics().items() if "@" in name}
    report("evaluated", step=step, **shown)
    return 0


def _clear_other_evaluation(config: EvaluateConfig, directory: RunDir) -> None:
    """Remove what was begun there with other tasks, sampling or weights: nobody continues it."""
    if (directory.path / "config" / "evaluate.toml").exists() and (differing := _differing(config, directory.path)):
        print(f"{directory.path} was begun with other {', '.join(differing)}: evaluating it again", flush=True)
        atomic.remove_directory(directory.path)


def _differing(config: EvaluateConfig, directory: Path) -> list[str]:
    try:
        before = read_toml(EvaluateConfig, directory / "config" / "evaluate.toml")
    except ConfigError:  # of another version, or damaged
        return ["settings"]
    asked = marked(EvaluateConfig, Mark.ANSWERS)
    differing = [name for name in asked if getattr(before, name) != getattr(config, name)]
    if _is_of_others(before.inference.model, config.inference.model, directory):
        differing.append("weights")
    if before.inference.engine.args != config.inference.engine.args:
        differing.append("inference.engine.args")
    if differing:
        return differing
    if not (directory / IDENTITY_NAME).exists():
        return [IDENTITY_NAME] if (directory / ROLLOUTS_NAME).exists() else []  # rollouts of an unknown policy
    try:
        noted = read_identity(directory)
        files = {one.label: noted["environments"][one.label]["files"] for one in config.environments}
        differing += ["files"] if any(files[one.label] != files_of(one) for one in config.environments) else []
        differing += ["libraries"] if noted["libraries"] != library_versions() else []
    except (DataError, LookupError):  # of another version, or damaged
        return [IDENTITY_NAME]
    return differing


def _is_of_others(before: ServedModelConfig, now: ServedModelConfig, directory: Path) -> bool:
    """Whether another policy was served; the name of an export holds a digest of its checkpoint."""
    # By which path the directory is found does not matter.
    names = {Path(one.name).name if Path(one.name).parent.name == directory.name else one.name for one in (before, now)}
    computed = [(one.dtype, one.fp32_lm_head, one.tokenizer) for one in (before, now)]
    return len(names) > 1 or computed[0] != computed[1]


def _clear_leftovers(place: Path) -> None:
    """Remove what an earlier start left below `place` when it was killed: half exports, and models that have served."""
    atomic.clear_leftovers(place)
    for directory in numbered_paths(place):
        if RunDir(directory).is_under_way():  # waited for
            continue
        atomic.clear_leftovers(directory)
        if (directory / SUMMARY_NAME).exists():
            policy.remove_exports(directory)


def _listed(steps: Sequence[int]) -> str:
    return f"steps {', '.join(map(str, steps))}" if steps else "no step that is there now"


def main(argv: Sequence[str]) -> None:
    """Follow as the resolved configuration says that `argv` names; never returns."""
    die_with_launcher()
    set_up_logging("evaluation")
    if len(argv) != 1:
        raise ConfigError("usage: python -m holdfast.launcher.evaluation.follow <resolved.toml>")
    run_reporting_errors(lambda: sys.exit(follow(read_toml(EvaluateConfig, argv[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])
