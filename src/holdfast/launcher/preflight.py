"""Checks before anything starts, the length of a run, and the lines that describe it.

The checks cover models and data with local paths, settings that the processes of `rl` must share, and the user's code.
A child process imports environments, losses and advantages, to keep the launcher light and free of their side effects.
Another one reads the data of a dry run, and of a run whose steps are epochs.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from pydantic import BaseModel

from holdfast.config.base import ModelConfig
from holdfast.config.environments import METRIC_GROUPS
from holdfast.config.inference import InferenceConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.policy_losses import BuiltInLoss, OwnLoss
from holdfast.config.preference import DpoConfig
from holdfast.config.rl import RlConfig
from holdfast.config.rl_trainer import ATTENDED_TOKENS, TrainerConfig
from holdfast.config.training import NOT_ON_NODES, RATES, EvaluatedCommand, SupervisedCommand, TrainingCommand
from holdfast.errors import ConfigError, EnvironmentFailure, HoldfastError
from holdfast.launcher.devices import rates_of_run, settings_of_run
from holdfast.process.child import LAUNCHER_ENV, die_with_launcher, killed_by, run_reporting_errors
from holdfast.process.gpus import require_vllm
from holdfast.process.imports import load_function, load_loss, module_command
from holdfast.protocol.inference import read_admin_token
from holdfast.run import inputs
from holdfast.run.data_files import find_files
from holdfast.run.run_dir import RunDir
from holdfast.view.tables import size


def check_training(config: TrainingCommand) -> None:
    """Check models, data and functions of the user of one training program. Raise DataError or ReadError if a local
    path is missing, of another kind or unreadable; ConfigError if a function of the user cannot be loaded, or a setting
    is missing that `rl` would hand down."""
    inputs.check_model_path(config.model.name, key="model.name")
    ckpt = config.ckpt
    if config.model.init == "pretrained" and not (ckpt and (ckpt.resume_step or ckpt.resume_dir or ckpt.init_from)):
        inputs.check_weights_path(config.model.name)
    if isinstance(config, SupervisedCommand):
        key = "model.tokenizer" if config.model.tokenizer else "model.name"
        inputs.check_tokenizer_path(config.model.tokenizer_name, key=key)
        for source in config.data.sources:
            inputs.check_data_path(source.name, key=config.data.key, split=source.split)
    if isinstance(config, DpoConfig) and config.reference_model:
        _check_weights(config.reference_model, key="loss.reference_model")
    if config.hooks:
        check_in_child("holdfast.run.hook_process", config)
    if not isinstance(config, TrainerConfig):
        return
    if config.dry_run and Path(config.model.tokenizer_name).is_dir():  # else the trainer does it
        check_in_child("holdfast.trainer.survey", config, config.program, os.devnull)
    for key, name in (
        ("kl.reference", config.kl and config.kl.reference),
        ("critic.name", config.critic and config.critic.name),
        ("reward_model.name", config.reward_model and config.reward_model.name),
    ):
        if name:
            _check_weights(name, key=key)
    if config.pretraining is not None:
        data = config.pretraining.data
        inputs.check_data_path(data.name, key="pretraining.data.name", split=data.split)
    loss = config.loss
    if isinstance(loss, BuiltInLoss) and loss.aggregation == "constant" and loss.constant_tokens is None:
        raise ConfigError(
            "loss.aggregation = 'constant' needs loss.constant_tokens: set it to orchestrator.sampling.max_tokens, "
            "which `rl` does by itself"
        )
    if any(":" in name for name in (config.loss.type, *config.advantages)):
        check_in_child("holdfast.launcher.preflight", config)


def _check_weights(name: str, *, key: str) -> None:
    inputs.check_model_path(name, key=key)
    inputs.check_weights_path(name, key=key)


def check_orchestrator(config: OrchestratorConfig) -> None:
    """Check the admin token, and that every environment exists, takes its arguments, and hides no metrics of the run by
    its name; else raise an error."""
    read_admin_token(config.client.admin_token_env)
    for section in config.environments:  # names in evaluations come after `eval/`
        if (first := section.label.partition("/")[0]) in METRIC_GROUPS:
            raise ConfigError(
                f"environment '{section.label}': metrics of the run begin with '{first}/': give another `name`"
            )
    check_in_child("holdfast.orchestrator.check", config, "environments")


def check_inference(config: InferenceConfig) -> None:
    """Check that model, weights and tokenizer are there, and whole as far as headers tell. Raise DataError or ReadError
    if they are not; ConfigError if vLLM or the admin token is missing, or the settings ask for several servers or too
    long sessions."""
    if config.engines > 1:
        raise ConfigError(
            f"engines = {config.engines}: `inference` is one server. Start it once for each, with a --server.port and "
            "an --output-dir of its own, or let `rl` start them with --inference.engines."
        )
    read_admin_token(config.server.admin_token_env)
    inputs.check_model_path(config.model.name, key="model.name")
    if config.model.load == "auto":
        inputs.check_weights_path(config.model.name, needs_index=False)
    key = "model.tokenizer" if config.model.tokenizer else "model.name"
    inputs.check_tokenizer_path(config.model.tokenizer_name, key=key)
    inputs.check_max_len(config, config.model.name, key="model")
    require_vllm()


def check_rl(config: RlConfig, *, starts_inference: bool) -> None:
    """Check the three processes of `rl`, and that the server takes the longest sessions; else raise an error."""
    if starts_inference:
        require_vllm()
    model = config.orchestrator.model
    inputs.check_tokenizer_path(model.tokenizer_name, key="model.tokenizer" if model.tokenizer else "model.name")
    check_training(config.trainer.model_copy(update={"dry_run": config.dry_run}))
    check_orchestrator(config.orchestrator)
    seq_len, max_len = config.orchestrator.seq_len, config.inference.model.max_len
    if starts_inference and seq_len > max_len:
        raise ConfigError(
            f"orchestrator.seq_len = {seq_len} is more than inference.model.max_len = {max_len}, the longest session "
            "that the inference server takes. Lower seq_len or raise max_len."
        )
    if starts_inference:
        inputs.check_max_len(config.inference, config.inference.model.name, key="inference.model")


def check_evaluations(config: TrainingCommand) -> None:
    """Check the evaluations of a training program, if it has any; they must not use data that it trains on."""
    if not isinstance(config, EvaluatedCommand) or config.eval is None:
        return
    if config.parallel.nodes > 1:  # by an outer launcher
        raise ConfigError(NOT_ON_NODES)
    require_vllm()
    inputs.check_max_len(config.eval.inference, config.model.name, key="eval.inference.model")
    for section in config.eval.environments:
        for value in section.args.values():
            sources = [source.name for source in config.data.sources]
            if isinstance(value, str) and (of := next((name for name in sources if _is_part(value, of=name)), None)):
                raise ConfigError(
                    f"eval.environments: '{section.label}' asks what is in {value}, and that is trained on "
                    f"({config.data.key} = '{of}'): nothing of it is held out. Name another file."
                )
    asked = config.eval.following(config.output_dir, config.output_dir)
    model = ModelConfig(name=config.model.name, tokenizer=config.model.tokenizer)
    check_in_child(
        "holdfast.orchestrator.check",
        asked.model_copy(update={"run": None, "follow": False, "interval": None, "model": model}),
        "evaluation",
    )


def _is_part(name: str, *, of: str) -> bool:
    """Whether the file `name` is the data `of`, or in them."""
    return os.path.isfile(name) and Path(name).resolve().is_relative_to(Path(of).resolve())  # noqa: PTH113 - whatever the text is


def check_in_child(module: str, config: BaseModel, *arguments: str) -> None:
    """Run `module` with the configuration on its standard input. Print its warnings, raise its error."""
    with tempfile.TemporaryFile() as output:  # not a pipe, which children of the user's code may hold open
        child = subprocess.run(
            module_command(module, *arguments),
            input=config.model_dump_json().encode(),
            stdout=subprocess.DEVNULL,
            stderr=output,
            env={**os.environ, LAUNCHER_ENV: str(os.getpid())},
        )
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    if child.returncode == 0:
        for line in said.splitlines():
            if line.startswith("WARNING: environment "):
                print(line, file=sys.stderr)
        return
    message = f"\n{said}".rpartition("\nerror: ")[2].strip()
    if child.returncode == ConfigError.exit_code:
        raise ConfigError(message)
    if child.returncode == EnvironmentFailure.exit_code:
        raise EnvironmentFailure(message, exit_code=ConfigError.exit_code)  # nothing was started
    if (by := killed_by(child.returncode)) is not None:
        said = f"the check of the configuration was killed by {by.name}. Nothing was started: give the command again"
    else:
        said = f"checking the configuration failed (exit code {child.returncode}):\n{said}"
    raise HoldfastError(said, exit_code=1)


def settle_length(config: TrainingCommand, *, clean: bool) -> inputs.Survey | None:
    """Fill in, in place, the length and rates of a run that its settings leave open.

    A resumed run keeps its values; a new one reads its data if its length is a number of epochs.

    Args:
        clean: the run in the directory is removed, and nothing of it kept.

    Returns:
        The size of the data, if they were read, as `--dry-run` does.

    Raise ConfigError if the data cannot be used, or other settings exceed the last step.
    """
    is_fork = config.ckpt is not None and config.ckpt.resume_dir is not None
    before = settings_of_run(config, clean=clean) if is_fork or RunDir(config.output_dir).has_work() else {}
    survey = None
    if isinstance(config, SupervisedCommand):
        is_open = "max_steps" not in config.model_fields_set
        if is_open and before and config.epochs in (None, before.get("epochs")):
            config.max_steps, config.epochs = before["max_steps"], before.get("epochs")
            is_open = False
        if is_open or (config.dry_run and _is_here(config)):
            survey = _survey(config)
            if is_open:
                config.epochs = config.epochs or 1.0
                config.max_steps = inputs.steps_of(config, survey, config.epochs)
    config.settle_rates({})
    fresh = config.optim
    config.settle_rates(
        {name: value for name, value in rates_of_run(config, before, clean=clean).items() if name in RATES}
    )
    for name in RATES:
        kept, new = getattr(config.optim, name), getattr(fresh, name)
        if kept != new:
            print(f"optim.{name} = {kept}, kept from the run; a new run would take {new}")
    try:
        config.check_steps()
        config.optim.check_schedule("optim")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return survey


def _is_here(config: SupervisedCommand) -> bool:
    """Whether data and tokenizer are files of this machine: a dry run asks no hub."""
    sources = config.data.sources
    is_here = all(find_files(each.name, key=config.data.key, split=each.split) is not None for each in sources)
    return is_here and Path(config.model.tokenizer_name).exists()


def _survey(config: SupervisedCommand) -> inputs.Survey:
    model, tokenizer = config.model.name, config.model.tokenizer_name
    for name, key, file in ((model, "model.name", "config.json"), (tokenizer, "model.tokenizer", "tokenizer.json")):
        if not Path(name).is_dir():
            print(f"asking the hub for {name}", flush=True)
            inputs.ask_hub(name, key=key, file=file)
    print(f"reading {config.data.label}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "survey.json"
        asked = config.model_copy(update={"max_steps": 2**31, "profile": None})
        check_in_child("holdfast.trainer.survey", asked, config.program, str(path))
        return msgspec.json.decode(path.read_bytes(), type=inputs.Survey)


def summary(
    config: TrainingCommand, survey: inputs.Survey | None, orchestrator: OrchestratorConfig | None = None
) -> str:
    """Return the lines that describe a run; `survey`: of its data, if they were read."""
    return "\n".join(_lines(config, survey, orchestrator))


def _lines(
    config: TrainingCommand, survey: inputs.Survey | None, orchestrator: OrchestratorConfig | None
) -> Iterator[str]:
    parameters = inputs.count_parameters(config.model.name)
    adapters = f", LoRA of rank {config.model.lora.rank}" if config.model.lora is not None else ""
    count = f", {inputs.in_short(parameters)} parameters" if parameters else ""
    is_unseen = config.dry_run and survey is None and not Path(config.model.name).is_dir()
    where = ", of the hub, not looked at" if is_unseen else ""
    yield f"model: {config.model.name}{where}{count}, {config.model.compute_dtype}{adapters}"
    if survey is not None and isinstance(config, SupervisedCommand):
        yield inputs.data_line(config, survey)
        if told := inputs.too_few_for_a_step(config, survey):
            yield f"  {told}"
        yield from (f"  WARNING: {note}" for note in survey.notes if config.dry_run)  # else the trainer reports them
        yield from (f"  {side} {text}" for side, text in survey.first.items())
    optim = config.optim
    rate = f"lr {optim.lr:g} {optim.schedule}, warm-up {optim.warmup_steps} steps"
    if isinstance(config, SupervisedCommand):
        data = config.data
        micro = min(data.micro_batch_size, data.batch_size)
        yield (
            f"steps: {config.max_steps:,} with a batch of {data.batch_size} (micro-batches of {micro}), at most "
            f"{data.seq_len} tokens each; {rate}"
        )
    if orchestrator is not None:
        names = ", ".join(section.label for section in orchestrator.environments)
        yield f"tasks: {names}"
        settings = [orchestrator.rollouts_of(section) for section in orchestrator.environments]
        sizes = sorted({own.group_size for own in settings})
        size = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        yield (
            f"steps: {config.max_steps:,} of {orchestrator.problems_per_step} x {size} rollouts, at most "
            f"{max(own.max_tokens for own in settings)} sampled tokens per turn and "
            f"{max(own.seq_len for own in settings)} tokens per rollout; {rate}"
        )
        if orchestrator.schedule == "rounds":
            yield _rounds(orchestrator)
        if isinstance(config, TrainerConfig) and config.share_prompts:
            yield from _shared_prompts(config, orchestrator)
    yield _checkpoints(config, is_rl=orchestrator is not None)
    if parameters:
        yield _memory(config, parameters)


def _rounds(config: OrchestratorConfig) -> str:
    if not config.tokens_of_round:
        return "schedule: rounds without an end, as async_level = 0"
    slots = max(config.client.max_concurrency * len(config.client.urls), config.largest_group)
    return (
        f"schedule: rounds of {config.tokens_of_round:,} tokens, answers up to {config.async_level} versions old, "
        f"{slots:,} slots (max_concurrency x engines)"
    )


def _shared_prompts(config: TrainerConfig, orchestrator: OrchestratorConfig) -> Iterator[str]:
    """Return how often the prompt of a group is computed if every rollout has one turn and is as long as allowed: a
    line for all environments with equal settings. Groups of one share nothing, and have no line."""
    row, kinds = config.row_tokens, dict[tuple[int, int, int], list[str]]()
    for section in orchestrator.environments:
        own = orchestrator.rollouts_of(section)
        kinds.setdefault((own.group_size, own.seq_len, own.max_tokens), []).append(section.label)
    for (group, seq_len, most), labels in kinds.items():
        if group == 1:
            continue
        prompts = f"prompts of {', '.join(labels)}" if len(kinds) > 1 else "prompts"
        answer = min(most, seq_len - 1)
        prompt = seq_len - answer
        fitting = min((row - prompt) // answer, ATTENDED_TOKENS * row // (prompt + answer))
        held = min(group, max(1, fitting))
        whole = max(prompt + group * answer, -(-group * (prompt + answer) // ATTENDED_TOKENS))
        if held == group:
            longest = f"{prompt + group * answer:,}"
            yield f"{prompts}: each is computed once for its {group} answers; the longest group has {longest} tokens"
            continue
        yield (
            f"{prompts}: the longest is computed {-(-group // held)} times for its {group} answers, as {held} of them "
            f"fit trainer.row_tokens = {row:,} with it, and all of them {whole:,}"
        )


def _checkpoints(config: TrainingCommand, *, is_rl: bool) -> str:
    ckpt = config.ckpt
    if ckpt is None:
        again = "trains its journaled batches again from step 1" if is_rl else "starts from scratch"
        return f"no checkpoints: a killed run {again}; --ckpt.interval N saves after every N steps"
    parts = [f"every {ckpt.interval} steps"] if ckpt.interval else []
    parts += [f"every {ckpt.every_minutes:g} minutes"] if ckpt.every_minutes else []
    kept = f", the newest {ckpt.keep} are kept" if ckpt.keep else ""
    return f"checkpoints: {' and '.join(parts) or 'after the final step'}{kept}"


def _memory(config: TrainingCommand, parameters: int) -> str:
    """Return the estimate of docs/memory.md: float32 weights, and gradients and two moments of the trained
    parameters, in float32 or bfloat16."""
    shards = config.parallel.world_size // config.parallel.replicas
    width = 12 if config.optim.moments_dtype == "bfloat16" else 16
    each = (4 if config.model.lora is not None else width) * parameters / max(1, shards)
    what = "weights, gradients and optimizer, plus"
    if config.model.lora is not None:
        what = "frozen weights, plus the adapter with its gradients and optimizer,"
    about = "at most" if config.optim.type == "muon" else "about"  # which keeps one moment of some parameters
    return f"memory: {about} {size(each)} per rank for {what} activations and logits (docs/memory.md)"


def check_functions(config: TrainerConfig) -> None:
    """Load the loss and the advantages of the user; the launcher has a child do it: `python -m` this module. Raise
    ConfigError if a function cannot be loaded, or does not take `loss.args`."""
    for name in config.advantages:
        if ":" in name:
            load_function(name, key="advantage")
    if isinstance(config.loss, OwnLoss):
        load_loss(config.loss.type, config.loss.args)


if __name__ == "__main__":
    die_with_launcher()
    run_reporting_errors(lambda: check_functions(TrainerConfig.model_validate_json(sys.stdin.buffer.read())))
