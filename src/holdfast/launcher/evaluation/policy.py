"""Evaluates one policy (a model directory or a step of a run): finds its weights, serves them, plays, reports."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config.base import ModelConfig
from holdfast.config.evaluation import EvaluateConfig, check_server
from holdfast.config.load import to_toml
from holdfast.errors import CheckpointError, ConfigError, DataError, RunDirError, printable
from holdfast.launcher.devices import Placement, choose_inference, inference_gpus, this_machine
from holdfast.launcher.preflight import check_in_child
from holdfast.launcher.restart_policy import RestartLimit, death_of
from holdfast.launcher.resume.attempt import CONFIG_NAME
from holdfast.launcher.resume.resume_step import resolve_resume_step
from holdfast.launcher.server_choice import release_all, reserve_first_free
from holdfast.launcher.supervisor import Child, Supervisor
from holdfast.orchestrator.evaluation.evaluator import TURN_ENDS, held_out_sections, settings_of_run
from holdfast.orchestrator.evaluation.results import IDENTITY_NAME, ROLLOUTS_NAME, EvaluatedRollout
from holdfast.orchestrator.evaluation.statistics import Comparison, Estimate, Summary, read_evaluation, summary_in
from holdfast.process.child import available_cores, wait_passively
from holdfast.process.events import EVENTS_ENV, PROCESS_ENV, append
from holdfast.process.gpus import find_gpus, require_vllm
from holdfast.process.imports import module_command
from holdfast.run import atomic
from holdfast.run.checkpoints import TRAINER_DIR
from holdfast.run.choose_run import no_run
from holdfast.run.inputs import check_max_len, check_model_path, check_weights_path
from holdfast.run.manifest import MANIFEST_NAME, file_digest, is_committed, verify
from holdfast.run.run_dir import JUDGEMENTS_NAME, SUMMARY_NAME, RunDir
from holdfast.run.settings import read_settings
from holdfast.run.weights import holds_adapter
from holdfast.view.ckpt_dirs import CheckpointDirs, TensorWorkFailed, export
from holdfast.view.console import code_of_error, event_line, json_lines
from holdfast.view.follow import Tail
from holdfast.view.state import LAUNCHER, RunState
from holdfast.view.tables import Grid, Report, number


def evaluate(config: EvaluateConfig) -> int:
    """Evaluate one policy as `config` says; return the exit code. Raise HoldfastError for settings that cannot be used,
    or what ended the evaluation."""
    config = with_settings_of_run(config)
    directory = RunDir(config.output_dir)
    step = None
    if config.run is not None:
        step = unfinished_step(config, directory)
        step = step_of_run(config.run, config.step) if step is None else step
        config.step = step  # noted in the settings: when the command is repeated, `latest` is another step
    check_servable(config)
    if config.dry_run:
        print(f"resolved configuration: {write_settings(config, directory.path / 'config' / 'dry_run')}")
        print(f"would evaluate {_named(config, step)} in {directory.path}")
        return 0
    # Also before the lock: a refused command leaves no file, and `evaluate --follow` does not wait for its lock.
    _refuse_followed(directory.path.parent)
    directory.lock()
    _refuse_followed(directory.path.parent)
    prepare_directory(config, directory)
    if config.run is not None and step is not None:
        try:
            weights = weights_of_step(config.run, step, directory.path)
        except TensorWorkFailed as failure:
            return failure.exit_code
        config.inference.model = config.inference.model.model_copy(update={"name": str(weights)})
    elif config.model is not None:
        model = served_model(config, config.model.name)
        config.inference.model = config.inference.model.model_copy(update=model.model_dump())
    print(f"evaluating {_named(config, step)}", flush=True)
    with Supervisor() as supervisor:
        code = run_evaluation(config, directory, supervisor, cores=available_cores())
    if code == 0:
        remove_exports(directory.path)
        tell_result(summary_in(directory.path), directory.path, step=step)
    return code


def _refuse_followed(place: Path) -> None:
    """Refuse a step's directory of evaluations that follow a run, which are made by one process."""
    directory = RunDir(place)
    if directory.is_under_way() and not directory.holds_run():
        raise RunDirError(
            f"{place} is written by `evaluate --follow`, or by a run that evaluates its steps (eval). Choose another "
            "--output-dir, or wait for it."
        )


def _named(config: EvaluateConfig, step: int | None) -> str:
    if config.run is not None:
        return f"step {step} of {config.run}"
    assert config.model is not None, "an evaluation has a policy"
    return config.model.name


def with_settings_of_run(config: EvaluateConfig) -> EvaluateConfig:
    """Return `config` with the settings that it leaves to the run that it names."""
    config = config.model_copy(deep=True)
    trained = settings_of_run(config.run) if config.run is not None else None
    if trained is not None:
        takes = TURN_ENDS - config.sampling.model_fields_set
        if "seq_len" not in config.model_fields_set:
            config.seq_len = trained.seq_len
        if "environments" not in config.model_fields_set:
            config.environments = held_out_sections(trained.environments, seq_len=config.seq_len, takes=takes)
        for name in takes:
            setattr(config.sampling, name, getattr(trained.sampling, name))
    if "max_len" not in config.inference.model.model_fields_set:
        config.inference.model.max_len = max(config.inference.model.max_len, config.seq_len)
    return config


def step_of_run(run: Path, wanted: int | str) -> int:
    """Return the step that is meant, which has a checkpoint that is whole, or weights that are published. Raise
    ConfigError without a run; CheckpointError if the step is not there or damaged, listing the steps that are
    there."""
    run_dir = RunDir(run)
    if not run_dir.holds_run():
        raise no_run(run)
    if wanted == "latest":
        if steps := run_dir.committed_steps():
            return steps[-1]
        if versions := _whole_weights(run_dir):
            return versions[-1]
    elif int(wanted) in run_dir.committed_steps() or int(wanted) in _whole_weights(run_dir):
        return int(wanted)
    raise CheckpointError(
        f"step = {wanted} is not in {run}: it has checkpoints of {_listed(run_dir.committed_steps())}, and whole "
        f"weights of {_listed(_whole_weights(run_dir))}."
    )


def unfinished_step(config: EvaluateConfig, directory: RunDir) -> int | None:
    """Return the step that an unfinished evaluation in `directory` is of, if `config` asks for the latest step."""
    path = directory.path / "config" / "evaluate.toml"
    if config.step != "latest" or config.clean or config.run is None or not path.exists():
        return None
    if (directory.path / SUMMARY_NAME).exists():
        with contextlib.suppress(DataError):  # damaged: the same step is evaluated again
            read_evaluation(directory.path)
            return None
    before = read_settings(path)
    step = before.get("step")
    if not isinstance(step, int) or Path(str(before.get("run"))).resolve() != config.run.resolve():
        return None
    try:
        return step_of_run(config.run, step)
    except CheckpointError:  # it is gone: the evaluation of another step is refused where the answers are
        return None


def weights_of_step(run: Path, step: int, directory: Path, *, takes_published: bool = True) -> Path:
    """Return a directory with the weights of a step: what the run has published, else an export below `directory`.

    A run that trains may remove published weights, so then a checkpoint is exported if there is one. `takes_published`:
    False: a checkpoint is exported in any case. Raise CheckpointError if the checkpoint is damaged, or gone;
    TensorWorkFailed if the export failed, which is reported."""
    run_dir = RunDir(run)
    has_checkpoint = step in run_dir.committed_steps()
    if takes_published and step in _whole_weights(run_dir) and not (has_checkpoint and run_dir.is_under_way()):
        return run_dir.weights_of(step)
    if not has_checkpoint:
        raise CheckpointError(f"the weights of step {step} have just gone from {run}, which has no checkpoint of it")
    target = directory / name_of_export(run_dir, step)
    if target.exists():  # exported by an earlier start of this evaluation: published whole, or not at all
        try:
            verify(target)
            return target
        except CheckpointError as damage:
            print(f"WARNING: {damage}: the step is exported again", flush=True)
            atomic.remove_directory(target)
    resolve_resume_step(run_dir, step)
    model = read_settings(run_dir.checkpoint(step) / TRAINER_DIR / CONFIG_NAME).get("model", {})
    base = model.get("name") if model.get("lora") else None
    export(CheckpointDirs(run), step=str(step), to=target, dtype=None, base=base)
    return target


def name_of_export(run_dir: RunDir, step: int) -> str:
    """Return the name of the export of the checkpoint that `step` has now. Raise FileNotFoundError if it has none."""
    # By its content: other runs have this step, too, and this run may train it again.
    return f"model_step_{step}_{file_digest(run_dir.checkpoint(step) / MANIFEST_NAME)[:12]}"


def served_model(config: EvaluateConfig, directory: Path | str) -> ModelConfig:
    """Return the model that the server of an evaluation loads."""
    tokenizer = config.model.tokenizer if config.model is not None else None
    return ModelConfig(name=str(directory), tokenizer=tokenizer)


def _whole_weights(run_dir: RunDir) -> list[int]:
    """Return the versions whose weights are published whole; for a policy with adapters, engines get only adapters."""
    return [
        version
        for version in run_dir.published_weights()
        if is_committed(run_dir.weights_of(version)) and not holds_adapter(run_dir.weights_of(version))
    ]


def _listed(steps: list[int]) -> str:
    return f"steps {', '.join(map(str, steps))}" if steps else "no step"


def summary_report(summary: Summary, directory: Path) -> Report:
    """Return the report of one evaluation: a line per environment and estimate."""
    percent = f"{100 * summary.confidence:g}% interval"
    rows: list[tuple[str, ...]] = []
    more: list[str] = []
    for name, environment in summary.environments.items():
        rows += [
            (name, str(environment.num_tasks), key, number(one.value), interval_of(one))
            for key, one in environment.estimates.items()
        ]
        numbers = {**environment.metrics, "truncated": environment.truncated}
        if environment.sampled_tokens is not None:
            numbers["sampled tokens"] = environment.sampled_tokens
        more.append(f"{name}: " + ", ".join(f"{key} {number(value)}" for key, value in numbers.items()))
        if environment.dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in environment.dropped.items())
            more.append(f"{name}: tasks without rollouts, which count nowhere above: {reasons}")
    grid = Grid(("environment", ">tasks", "estimate", ">value", percent), rows)
    return Report(msgspec.to_builtins(summary), [grid, *more, f"every rollout: {directory}"])


def tell_result(summary: Summary, directory: Path, *, step: int | None) -> None:
    """Print the report of one evaluation, or the object of type `result` that says the same to programs. `step`: of the
    run whose weights they were; None: a model's weights."""
    if (lines := json_lines()) is not None:
        lines.emit("result", step=step, summary=msgspec.to_builtins(summary))
    else:
        summary_report(summary, directory).print(as_json=False)


def comparison_report(comparison: Comparison, first: Path, second: Path) -> Report:
    """Return the report of two evaluations."""
    rows = [
        (
            line.environment,
            line.name,
            str(line.num_tasks),
            f"{number(line.first.value)} {interval_of(line.first)}",
            f"{number(line.second.value)} {interval_of(line.second)}",
            f"{line.paired.difference.value:+.4g} {interval_of(line.paired.difference)}",
            f"{line.paired.p_value:.2g}",
            f"{line.paired.num_higher}/{line.paired.num_lower}",
        )
        for line in comparison.lines
    ]
    columns = ("environment", "estimate", ">tasks", "A", "B", "B - A", ">p", ">higher/lower")
    parts: list[Grid | str] = [
        f"A  {first}  {_shown(comparison.policies[0])}",
        f"B  {second}  {_shown(comparison.policies[1])}",
        Grid(columns, rows),
    ]
    for key, (one, other) in comparison.differing.items():
        parts.append(f"they differ in {key}: A {_plain(one)}, B {_plain(other)}")
    if comparison.skipped:
        parts.append(f"{comparison.skipped} tasks are left out, which one of them has no rollouts of")
    parts += [part for pair in comparison.answers for part in _said(*pair)]
    document = {
        "first": str(first),
        "second": str(second),
        "policies": list(comparison.policies),
        "differing": {key: list(values) for key, values in comparison.differing.items()},
        "skipped": comparison.skipped,
        "lines": msgspec.to_builtins(comparison.lines),
        "answers": msgspec.to_builtins(comparison.answers),
    }
    return Report(document, parts)


def _said(first: EvaluatedRollout, second: EvaluatedRollout) -> list[str]:
    """Return the lines about one task: its prompt and the answers of both policies."""
    prompt = "".join(turn.text for turn in first.turns[:1] if not turn.sampled)
    lines = ["", f"{first.environment}, task {first.task}: {printable(prompt)}"]
    for name, rollout in (("A", first), ("B", second)):
        text = "".join(turn.text for turn in rollout.turns[bool(prompt) :])
        lines.append(f"  {name}  reward {number(rollout.reward)}  {printable(text)}")
    return lines


def interval_of(estimate: Estimate) -> str:
    """Return an interval for people; `-` for a number without an interval."""
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"[{number(estimate.low)}, {number(estimate.high)}]"


def _shown(policy: dict[str, Any]) -> str:
    return " ".join(f"{key} {value}" for key, value in policy.items() if key != "kind" and value is not None)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items())
    return number(value) if isinstance(value, float) else str(value)


_MAX_RESTARTS = 3
_RESTART_WINDOW_S = 600.0
# In the order of their removal: results before the settings that they belong to.
_OURS = (SUMMARY_NAME, ROLLOUTS_NAME, "rollouts", IDENTITY_NAME, JUDGEMENTS_NAME, "run.json", "logs", "config")


def check_servable(config: EvaluateConfig) -> None:
    """Check what can be before anything is started. Raise ConfigError or DataError for what cannot be used."""
    if not config.environments:
        raise ConfigError(
            f"environments is needed: run = {config.run} is not a run of rl. Give [[environments]] with "
            'an `id` in a file, or --environments \'[{"id": "NAME"}]\'; docs/environments.md lists them.'
        )
    require_vllm()
    if config.model is not None:
        check_model_path(config.model.name, key="model.name")
        check_weights_path(config.model.name, needs_index=False)
    try:
        check_server(config.inference, seq_len=config.seq_len)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.model is not None:
        check_max_len(config.inference, config.model.name, key="inference.model")
    check_in_child("holdfast.orchestrator.check", config, "evaluation")


def prepare_directory(config: EvaluateConfig, directory: RunDir) -> None:
    """Make the directory one of an evaluation. Raise RunDirError if it holds a run."""
    path = directory.path
    is_ours = (path / "config" / "evaluate.toml").exists()  # else files of these names belong to somebody else
    if directory.holds_run() and not is_ours:
        raise RunDirError(
            f"{path} holds a run. An evaluation needs a directory of its own: choose another with --output-dir."
        )
    if is_ours:
        atomic.clear_leftovers(path)
    if config.clean and is_ours:
        # Its settings last: with them, the same command removes the rest after a kill.
        remove_exports(path)
        for name in _OURS:
            entry = path / name
            if entry.is_dir() and not entry.is_symlink():
                atomic.remove_directory(entry)
            else:
                entry.unlink(missing_ok=True)
    if is_ours and directory.holds_run():
        try:
            directory.identity()
        except RunDirError as damage:  # it only names the owner of the server
            print(f"WARNING: {str(damage).split(': ')[0]}: the evaluation gets another id", flush=True)
            (path / "run.json").unlink()
    write_settings(config, path / "config")
    atomic.clear_leftovers(path / "config")  # with its settings written, the directory is ours
    directory.create()  # reserves its server: no run can push weights to it


def remove_exports(path: Path) -> None:
    """Remove the models that were exported for an evaluation below `path`; none is ever left in part."""
    for exported in path.glob("model_step_*"):
        atomic.remove_directory(exported)


def run_evaluation(
    config: EvaluateConfig, directory: RunDir, supervisor: Supervisor, *, cores: int | None = None
) -> int:
    """Run server and evaluation to the end; return the exit code. Nothing of them runs on. Raise ProcessDied if a
    process failed. `cores`: for an engine on the CPU that no training runs beside; None: half of them."""
    path = directory.path
    server = config.inference.server
    held = reserve_first_free(server.host, server.port)
    server.port = held[0].port
    machine = this_machine(find_gpus())
    gpus = inference_gpus(config.inference, machine)
    choose_inference(config.inference, machine)
    environment = Placement(engines=(gpus,), hides_gpus=bool(machine.inventory.gpus)).environment(gpus)
    if cores is not None and machine.engine_device == "cpu":
        config.inference.engine.threads = config.inference.engine.threads or cores
        wait_passively()
    settings = write_settings(config, path / "config")
    logs = path / "logs"
    logs.mkdir(exist_ok=True)
    events = logs / "events.jsonl"
    tail = _PhasePrinter(events)
    append(events, LAUNCHER, "starting")
    try:
        served = path / "config" / "inference.toml"
        atomic.write_file(served, to_toml(config.inference).encode())
        supervisor.start(
            "inference",
            module_command("holdfast.inference.main", str(served), str(path)),
            logs / "inference.log",
            environment={**environment, EVENTS_ENV: str(events), PROCESS_ENV: "inference"},
            is_service=True,
        )
        supervisor.start(
            "evaluation",
            module_command("holdfast.orchestrator.evaluation.main", str(settings)),
            logs / "evaluation.log",
            environment={EVENTS_ENV: str(events), PROCESS_ENV: "evaluation"},
            has_done_its_work=(path / SUMMARY_NAME).exists,
        )
        code = _watch(supervisor, tail, path)
    except Exception as error:
        append(events, LAUNCHER, "ended", exit_code=code_of_error(error), error=str(error))
        raise
    else:
        append(events, LAUNCHER, "ended", exit_code=code)
        return code
    finally:
        supervisor.stop()
        # `--follow` keeps one supervisor: by the next step, other processes may have these ids.
        supervisor.children.clear()
        tail.refresh()
        release_all(held)


def _watch(supervisor: Supervisor, progress: _PhasePrinter, path: Path) -> int:
    restarts = RestartLimit(_MAX_RESTARTS, _RESTART_WINDOW_S)
    while True:
        ended = supervisor.run(progress.refresh)
        if ended is None:
            return 0
        if not isinstance(ended, Child):
            return _stopped(supervisor, ended, path)
        delay_s = restarts.delay_s(ended.name, ended.process.returncode)
        if delay_s is None:
            raise death_of(ended, stuck=None, restarts=restarts)
        print(f"{ended.name} died; starting it again", flush=True)
        if (number := supervisor.pause(delay_s, progress.refresh)) is not None:
            return _stopped(supervisor, number, path)
        supervisor.restart(ended)


def _stopped(supervisor: Supervisor, number: int, path: Path) -> int:
    supervisor.stop()
    print(f"stopped; finished tasks are in {path}: the same command continues")
    return 128 + number


class _PhasePrinter:
    def __init__(self, events: Path) -> None:
        self._events = Tail(events)
        list(self._events)  # events of an earlier attempt
        self._state = RunState()
        self._begin = time.monotonic()

    def refresh(self) -> None:
        """Print what is new."""
        for event in self._events:
            told = self._state.take_event(event, attempt=1)
            if told is None:
                continue
            if (lines := json_lines()) is not None:
                lines.emit_news(told, max_steps=0)
            else:
                print(event_line(told, seconds=time.monotonic() - self._begin), flush=True)


def write_settings(config: EvaluateConfig, directory: Path) -> Path:
    path = directory / "evaluate.toml"
    atomic.write_file(path, to_toml(config).encode())
    return path
