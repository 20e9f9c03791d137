"""Configuration of `rl`: the three processes, and the settings that they share."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from holdfast.config.base import CkptConfig, Command, LogFormat, ModelConfig, Section, read_section
from holdfast.config.cluster import SlurmConfig
from holdfast.config.inference import InferenceConfig
from holdfast.config.marks import Mark, marked, models_in
from holdfast.config.orchestrator import EvalConfig, OrchestratorConfig, check_rounds
from holdfast.config.policy_losses import BuiltInLoss
from holdfast.config.rl_trainer import AnyWeights, CollectiveWeights, JournalConfig, TrainerConfig, check_rewards
from holdfast.config.training import StopConfig
from holdfast.config.view import DashboardConfig, Hooks, ProfiledSteps, StepWindow, TrackingConfig
from holdfast.errors import ConfigError

_PROCESSES = ("trainer", "orchestrator", "inference")


class RlConfig(Command):
    """An RL run: trainer, orchestrator and inference server, started and watched together."""

    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """The trainer; `--trainer @ train.toml` fills it from a file."""

    orchestrator: OrchestratorConfig = Field(default_factory=OrchestratorConfig)
    """The orchestrator; `--orchestrator @ orch.toml`."""

    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    """The inference server; `--inference @ infer.toml`."""

    max_steps: Annotated[int | None, Mark.SHARED] = Field(default=None, ge=1)
    """For trainer and orchestrator: train until this step."""

    async_level: Annotated[int | None, Mark.SHARED] = Field(default=None, ge=0)
    """For trainer and orchestrator: weights of step max(0, N - 1 - async_level) make batch N, except in rounds."""

    model: Annotated[ModelConfig | None, Mark.SHARED] = None
    """For all three: the model."""

    ckpt: Annotated[CkptConfig | None, Mark.SHARED] = None
    """For trainer and orchestrator: checkpoints."""

    journal: Annotated[JournalConfig | None, Mark.SHARED] = None
    """For the trainer: batches that stay after they are trained."""

    weights: Annotated[AnyWeights | None, Mark.SHARED] = None
    """For the trainer: how new weights reach the engines."""

    tracking: Annotated[TrackingConfig | None, Mark.SHARED] = None
    """For the trainer: experiment trackers that get the metrics."""

    hooks: Annotated[Hooks | None, Mark.SHARED] = None
    """For the trainer: classes of your own that are called after steps, evaluations and saves (docs/console.md)."""

    stop: Annotated[StopConfig | None, Mark.SHARED] = None
    """For the trainer: when the run ends before its last step, because a metric does not improve any more."""

    profile: Annotated[StepWindow | None, Mark.SHARED] = None
    """For the trainer: its steps to record, `FIRST:LAST`, both included, such as 3:5: a trace of each rank, for
    ui.perfetto.dev (docs/console.md)."""

    dashboard: Annotated[DashboardConfig | None, Mark.SHARED] = None
    """For the trainer: a live report of the run, by default at 127.0.0.1:9466."""

    eval: Annotated[EvalConfig | None, Mark.SHARED] = None
    """For the orchestrator: evaluations on held-out tasks during the run."""

    share_gpus: bool | None = None
    """Let engines and trainer share GPUs; `false`: each has its own. Unset: they share the GPU of a machine with only
    one (docs/your_model.md)."""

    deterministic: Annotated[bool, Mark.SHARED] = False
    """For trainer and engines: the same bits every time on GPUs, too, for more time (docs/guarantees.md)."""

    max_restarts: int = Field(default=3, ge=0)
    """Start a process that died again, at most this often within `restart_window_s`; 0: the run ends."""

    restart_window_s: float = Field(default=600.0, gt=0)
    """The time in which `max_restarts` are counted, for each process by itself."""

    heartbeat_timeout_s: float = Field(default=120.0, gt=0)
    """A process that sends no heartbeat for this long counts as dead."""

    storage_timeout_s: float = Field(default=3600.0, ge=0)
    """How long to wait for a storage that cannot be written (full disk, quota, I/O errors), counted from the last new
    step; 0: the run ends."""

    cluster: str | None = None
    """Start the processes on the nodes of a cluster: `ray` for the Ray cluster that this machine belongs to,
    `ray://HOST:PORT` for the one with this head, `slurm` within an allocation. Unset: all on this machine."""

    cluster_strategy: Literal["pack", "spread"] = "pack"
    """`pack`: use few nodes of Ray; `spread`: use all."""

    cluster_timeout_s: float = Field(default=900.0, gt=0)
    """How long to wait for nodes: at the start, while others use them, and after one was lost."""

    slurm: SlurmConfig | None = None
    """Submit a SLURM job that makes the run, and end; `--dry-run` prints its script."""

    log_format: Annotated[LogFormat, Mark.SHARED] = "text"
    """Form of stdout: lines for people, or `json`: one JSON object a line, see docs/console.md."""

    clean: bool = False
    """Remove a run that the output directory already holds, then start from scratch."""

    @field_validator("cluster")
    @classmethod
    def _is_a_cluster(cls, value: str | None) -> str | None:
        """Refuse an address without its port."""
        if value is None or value in ("ray", "slurm") or re.fullmatch(r"ray://[^/\s]+:\d+", value):
            return value
        raise ValueError("should be 'ray', 'ray://HOST:PORT' or 'slurm'")

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        if self.profile is not None:
            ProfiledSteps.parse(self.profile).check(self.trainer.max_steps)
        if self.cluster_strategy == "spread" and (self.cluster or "slurm") == "slurm":
            raise ValueError(
                "cluster_strategy = 'spread' is for the nodes of Ray: set cluster = 'ray', or leave it out; on SLURM a "
                "process goes to the node with the most free GPUs"
            )
        return self

    @model_validator(mode="after")
    def _says_it_as_its_processes(self) -> Self:
        """Inherit `log_format` from the trainer's section if unset, and a dry run from any section."""
        if any(one.dry_run for one in (self.trainer, self.orchestrator, self.inference)):
            self.dry_run = True
        if "log_format" in self.trainer.model_fields_set and "log_format" not in self.model_fields_set:
            self.log_format = self.trainer.log_format
        return self

    def note_given(self, given: Mapping[str, str]) -> None:
        """Take note of the flags and variables that set something, in each process that has the setting."""
        super().note_given(given)
        has_it = shared()
        for process in _PROCESSES:
            above = {key: said for key, said in given.items() if process in has_it.get(key.partition(".")[0], ())}
            begin = f"{process}."
            own = {key.removeprefix(begin): said for key, said in given.items() if key.startswith(begin)}
            getattr(self, process).note_given(own | above)

    @model_validator(mode="before")
    @classmethod
    def _trainer_knows_the_last_step(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Let the trainer's section be checked against the last step of the run, wherever that is set."""
        trainer, orchestrator = given.get("trainer", {}), given.get("orchestrator", {})
        last = given.get("max_steps")
        if last is None and isinstance(orchestrator, Mapping):
            last = orchestrator.get("max_steps")
        if not isinstance(trainer, Mapping) or not str(last).isdecimal() or int(str(last)) < 1:
            return given  # other values are refused by their own field
        if given.get("max_steps") is None and "max_steps" in trainer:
            return given  # if they differ, `hand_down_shared` raises an error
        return {**given, "trainer": {**trainer, "max_steps": last}}


def shared() -> dict[str, tuple[str, ...]]:
    """Return every shared setting, and the sections of the processes that have it."""
    fields = RlConfig.model_fields
    processes = {name: models_in(fields[name].annotation)[0][0] for name in _PROCESSES}
    return {
        setting: tuple(name for name, process in processes.items() if setting in process.model_fields)
        for setting in marked(RlConfig, Mark.SHARED)
    }


def hand_down_shared(config: RlConfig) -> RlConfig:
    """Return `config` with every shared setting equal in all processes that have it. A value that is set on `rl` itself
    wins. Otherwise a setting that exactly one process, or several with equal values, was given goes to the others.
    Raise ConfigError if two processes were given different values and `rl` none, or if settings do not fit together."""
    config = config.model_copy(deep=True)
    _check_teacher(config)
    _check_truncation(config)
    check_rewards(config.trainer, config.orchestrator)
    for setting, names in shared().items():
        _check_given(config, setting, names)
        _hand_down_notes(config, setting, names)
        if setting == "model":
            _hand_down_model(config, names)
            continue
        value = _agreed(config, setting, names)
        if value is None and setting not in config.model_fields_set:
            continue
        setattr(config, setting, value)
        for name in names:
            setattr(getattr(config, name), setting, value)
    config.trainer.clean = config.clean = config.clean or config.trainer.clean
    loss = config.trainer.loss
    if isinstance(loss, BuiltInLoss) and loss.aggregation == "constant" and loss.constant_tokens is None:
        loss.constant_tokens = max(
            config.orchestrator.rollouts_of(section).max_tokens for section in config.orchestrator.environments
        )
    check_rounds(config.orchestrator)
    sampling = config.orchestrator.dynamic_sampling
    if sampling is not None and sampling.signal is None:
        sampling.signal = "parts" if config.trainer.tells_tokens_apart else "sum"
    if "urls" not in config.orchestrator.client.model_fields_set:
        _check_ports(config)
        config.orchestrator.client.urls = config.inference.urls
    for name in ("trainer", "orchestrator", "inference"):
        process = getattr(config, name)
        read_section(type(process), process.model_dump(), key=f"{name}:")  # again, as settings were handed down
    return config


def _check_ports(config: RlConfig) -> None:
    """Refuse one port for the live page and for a server that was given it; a server that picks takes another."""
    server, dashboard = config.inference.server, config.trainer.dashboard
    is_here = config.cluster is None and config.slurm is None
    if dashboard is None or not is_here or "port" not in server.model_fields_set:
        return
    for name, one in config.inference.of_each().items():
        if one.server.port == dashboard.port:
            raise ConfigError(
                f"dashboard.port = {dashboard.port} is the port of {name} as well (inference.server.port = "
                f"{server.port}): choose another with --dashboard.port, or 0 for any free one."
            )


def _check_teacher(config: RlConfig) -> None:
    """Refuse a distillation or imitation without a teacher, and two references for one token."""
    judges = config.orchestrator.teacher is not None and not config.orchestrator.is_sampled_by_teacher
    if judges and config.trainer.kl is not None:
        raise ConfigError(
            "trainer.kl and orchestrator.teacher (mode = 'logprobs') both say what the reference is: set one of them"
        )
    if config.trainer.distillation is not None and not judges and config.trainer.kl is None:
        raise ConfigError(
            "trainer.distillation (and trainer.advantage = 'distillation') needs a teacher: set trainer.kl.reference, "
            "or orchestrator.teacher with mode = 'logprobs'"
        )
    if config.trainer.advantage.type == "distillation" and config.orchestrator.dynamic_sampling is not None:
        raise ConfigError(
            "orchestrator.dynamic_sampling drops problems by their rewards, which trainer.advantage = 'distillation' "
            "does not train on: leave it out"
        )
    loss = config.trainer.loss.type
    if loss == "sft" and not config.orchestrator.is_sampled_by_teacher:
        raise ConfigError(
            "trainer.loss.type = 'sft' imitates every rollout whatever its reward, and here the policy itself samples "
            "them: set orchestrator.teacher with mode = 'samples', or another loss, such as 'policy_gradient'"
        )
    weights = config.weights or config.trainer.weights
    if config.orchestrator.is_sampled_by_teacher and isinstance(weights, CollectiveWeights):
        raise ConfigError(
            "weights.transport = 'collective' sends weights to engines, and here a teacher samples (orchestrator."
            "teacher with mode = 'samples'), which takes none: leave it out"
        )
    if config.orchestrator.is_sampled_by_teacher and loss != "sft" and ":" not in loss:
        raise ConfigError(
            f"orchestrator.teacher samples (mode = 'samples'), and trainer.loss.type = '{loss}' "
            "takes the samples for the policy's own: set trainer.loss.type = 'sft'"
        )


def _check_truncation(config: RlConfig) -> None:
    """Refuse a divergence between distributions that have different tokens."""
    if config.trainer.kl is None or config.orchestrator.is_sampled_by_teacher:
        return
    for section in config.orchestrator.environments:
        sampling = config.orchestrator.rollouts_of(section).sampling
        if sampling.is_truncated:
            raise ConfigError(
                f"orchestrator.sampling cuts off tokens ({sampling}, environment '{section.label}'), and trainer.kl "
                "compares log-probabilities with a reference, which cuts off others: where that is a sampled token, "
                "the divergence is infinite. Set top_p, top_k and min_p back to 1, 0 and 0 (a temperature below 1 also "
                "avoids unlikely tokens), or leave trainer.kl out"
            )


def _agreed(config: RlConfig, setting: str, names: tuple[str, ...]) -> object:
    own = getattr(config, setting) if setting in config.model_fields_set else None
    if setting in config.model_fields_set and not isinstance(own, Section):
        return own
    given = {
        name: getattr(getattr(config, name), setting)
        for name in names
        if setting in getattr(config, name).model_fields_set
    }
    values = list(given.values())
    if any(value != values[0] for value in values):
        shown = ", ".join(f"{name}.{setting} = {_plain(value)}" for name, value in given.items())
        flag = setting.replace("_", "-")
        raise ConfigError(f"processes disagree on '{setting}': {shown}. Set it once for all with --{flag}.")
    if isinstance(own, Section):  # unset keys stay as the processes have them
        below = [value.model_dump(exclude_unset=True) for value in values[:1] if isinstance(value, Section)]
        both = _laid_over(below[0] if below else {}, own.model_dump(exclude_unset=True))
        try:  # by the type that both say together
            kind: Any = RlConfig.model_fields[setting].annotation
            return TypeAdapter(kind).validate_python(both)
        except ValidationError as error:
            found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False)]
            raise ConfigError(
                f"'{setting}' of rl and of {' and '.join(given)} do not fit together: {'; '.join(found)}. Give all of "
                f"its settings in one place, as --{setting}.NAME VALUE."
            ) from None
    return values[0] if values else getattr(getattr(config, names[0]), setting)


def _check_given(config: RlConfig, setting: str, names: tuple[str, ...]) -> None:
    """Refuse a flag or a variable of a process that loses against a value of `rl` itself, unless that value is a flag
    and this one a variable."""
    for key, said in config.given.items():
        name, _, rest = key.partition(".")
        if name not in names or rest.partition(".")[0] != setting or not _is_set(config, rest):
            continue
        winner = config.given.get(rest, "a file")
        by_flag = winner.startswith("flag")
        # The trainer has the `max_steps` of `rl` already: see `_trainer_knows_the_last_step`.
        differs = not by_flag if setting == "max_steps" else _value_at(config, rest) != _value_at(config, key)
        if differs and (said.startswith("flag") or not by_flag):
            raise ConfigError(
                f"{said} has no effect: {rest} = {_plain(_value_at(config, rest))} of rl wins, which {winner} gave. "
                f"Set {rest} itself (--{rest.replace('_', '-')}), or leave it out there."
            )


def _hand_down_notes(config: RlConfig, setting: str, names: tuple[str, ...]) -> None:
    """Let all processes know who gave a shared setting."""
    shared_keys = ("model.name", "model.tokenizer")
    noted = {
        key: said
        for name in names
        for key, said in getattr(config, name).given.items()
        if key.partition(".")[0] == setting and (setting != "model" or key in shared_keys)
    }
    for name in names:
        process = getattr(config, name)
        process.note_given({**noted, **process.given})


def _is_set(config: Section, key: str) -> bool:
    """Whether a dotted key was given, or a section that holds it was unset."""
    name, _, rest = key.partition(".")
    if name not in config.model_fields_set:
        return False
    value = getattr(config, name)
    return _is_set(value, rest) if rest and isinstance(value, Section) else True


def _value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name, None)
    return config


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with the settings of `below` where `above` has none."""
    both = {**below, **above}
    return both | {
        key: _laid_over(below[key], value)
        for key, value in above.items()
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
    }


def _hand_down_model(config: RlConfig, names: tuple[str, ...]) -> None:
    for field in ("name", "tokenizer"):
        sections = {name: getattr(config, name).model for name in names}
        if config.model is not None and field in config.model.model_fields_set:
            value = getattr(config.model, field)
        else:
            given = {name: getattr(model, field) for name, model in sections.items() if field in model.model_fields_set}
            if len(set(given.values())) > 1:
                shown = ", ".join(f"{name}.model.{field} = '{value}'" for name, value in given.items())
                raise ConfigError(
                    f"processes disagree on the model: {shown}. Set it once for all with --model.{field}."
                )
            value = next(iter(given.values()), getattr(config.trainer.model, field))
        for model in sections.values():
            setattr(model, field, value)
    trained, served = config.trainer.model, config.inference.model
    for field in ("dtype", "fp32_lm_head"):
        if field in trained.model_fields_set and field not in served.model_fields_set:
            setattr(served, field, getattr(trained, field))
    if config.trainer.sampler_dtype is None:
        config.trainer.sampler_dtype = config.inference.model.dtype
    if config.trainer.model.init == "random":
        config.inference.model.load = "dummy"


def _plain(value: object) -> str:
    return f"'{value}'" if isinstance(value, str | Path) else str(value)
