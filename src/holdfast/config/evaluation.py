"""Configuration of evaluations: the command `evaluate`, and evaluations within `sft` and `dpo`."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from holdfast.config.base import Command, LogFormat, ModelConfig
from holdfast.config.environments import EnvironmentConfig
from holdfast.config.inference import InferenceConfig
from holdfast.config.marks import Mark
from holdfast.config.orchestrator import (
    EvalConfig,
    EvaluationSamplingConfig,
    check_held_out,
    check_samples,
    check_sections,
)


class EvaluateConfig(Command):
    """How good a policy is on tasks that training never draws: `uv run evaluate --model.name DIRECTORY`."""

    output_dir: Path = Path("evaluation")
    """The directory of this one evaluation: every rollout, the summary, logs. The same command again resumes it."""

    seed: Annotated[int, Mark.ANSWERS] = Field(default=0, ge=0, lt=2**31)
    """Chooses the held-out tasks and the samples; two policies are compared on the same tasks."""

    model: ModelConfig | None = None
    """Evaluate a Hugging Face directory or a model on the hub."""

    run: Path | None = None
    """Evaluate a step of this run directory. For an RL run, `environments`, `seq_len` and `sampling.max_tokens` default
    to the run's."""

    step: int | Literal["latest"] = "latest"
    """With `run`: the step, which must have a checkpoint or published weights; `latest`: the newest checkpoint."""

    environments: Annotated[list[EnvironmentConfig], Mark.ANSWERS] = []
    """The tasks: `[[environments]]` in TOML, as in training; `weight` means nothing here. Needed, unless they come
    from an RL run."""

    num_tasks: Annotated[int | None, Mark.ANSWERS] = Field(default=None, ge=1)
    """Tasks of each environment; unset: all tasks of an environment with a certain number (`jsonl`), 128 of an
    environment without an end."""

    samples_per_task: Annotated[int, Mark.ANSWERS] = Field(default=1, ge=1, le=4096)
    """Rollouts of each task: the k of `avg@k`, and the largest of `pass@k`."""

    sampling: Annotated[EvaluationSamplingConfig, Mark.ANSWERS] = Field(default_factory=EvaluationSamplingConfig)
    """Sampling of completions."""

    seq_len: Annotated[int, Mark.ANSWERS] = Field(default=1024, ge=2)
    """Most tokens of one rollout, or of each of its branches, prompt included."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of the intervals."""

    max_concurrency: int = Field(default=256, ge=1)
    """Most sessions in flight at once."""

    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    """The inference server that is started for a directory or a step; its port is the first free one from
    `inference.server.port` on."""

    follow: bool = False
    """With `run`: evaluate checkpoints as they appear, and end with the run. `output_dir` is then the directory of the
    run's evaluations, `evaluations` in `run` unless it is set, with one directory for each step."""

    interval: int | None = Field(default=None, ge=1)
    """With `follow`: evaluate the checkpoints of steps that this divides, and of the last step; unset: all."""

    log_format: Annotated[LogFormat, Mark.FREE] = "text"
    """Form of stdout: lines for people, or `json`: one JSON object a line, see docs/console.md."""

    clean: Annotated[bool, Mark.FREE, Mark.PLACE] = False
    """Remove the evaluation that the output directory already holds, then start from scratch."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.model is not None and self.run is not None:
            raise ValueError("evaluate takes one policy: set model.name, or run (a run directory, with step)")
        if self.step != "latest" and (self.run is None or self.step < 0):
            raise ValueError(f"step = {self.step} must be a step of a run, counted from 0: set run = DIRECTORY as well")
        if self.follow and (self.run is None or self.step != "latest"):
            raise ValueError("follow evaluates every step of a run that comes: set run, and leave step out")
        if self.interval is not None and not self.follow:
            raise ValueError(f"interval = {self.interval} is of steps that are followed: set follow as well")
        if self.follow and self.clean:
            raise ValueError("follow continues after the evaluated steps, and clean removes them: leave one out")
        if self.model is not None and self.inference.model.tokenizer not in (None, self.model.tokenizer):
            raise ValueError("inference.model.tokenizer is that of model.tokenizer in an evaluation: leave it out")
        self.dry_run = self.dry_run or self.inference.dry_run
        return self

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        check_samples(self.samples_per_task, self.sampling)
        check_sections(self.environments, seq_len=self.seq_len)
        check_held_out(self.environments)
        return self


def check_server(inference: InferenceConfig, *, seq_len: int) -> None:
    """Refuse a server that is not the one server of an evaluation, serves another model, or has too short sessions.
    Raise ValueError if it is."""
    for name in ("name", "load"):
        if getattr(inference.model, name) != type(inference.model).model_fields[name].default:
            raise ValueError(
                f"inference.model.{name} = '{getattr(inference.model, name)}': the server of an evaluation loads the "
                "policy that is evaluated. Leave it out"
            )
    if seq_len > inference.model.max_len:
        raise ValueError(
            f"seq_len = {seq_len} is more than inference.model.max_len = {inference.model.max_len}, the longest "
            "session that the server takes: lower seq_len or raise max_len"
        )
    if inference.engines > 1:
        raise ValueError(f"inference.engines = {inference.engines}: an evaluation has one server; leave it out")


class CheckpointEvalConfig(EvalConfig):
    """Evaluations of checkpoints during training, on held-out tasks, by default every 10 steps.

    A process beside the trainer runs them one after the other, with its own inference server."""

    interval: int = Field(default=10, ge=1)
    """Evaluate the model that training begins with, every step that this divides, and the last one; `ckpt.interval`
    must divide it, as what is evaluated is a checkpoint."""

    environments: list[EnvironmentConfig] = Field(min_length=1)  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues] - only read
    """The tasks: `[[eval.environments]]` in TOML."""

    sampling: EvaluationSamplingConfig = Field(default_factory=EvaluationSamplingConfig)  # pyright: ignore[reportIncompatibleVariableOverride] - only read
    """Sampling of completions."""

    seq_len: int = Field(default=1024, ge=2)
    """Most tokens of one rollout, or of each of its branches, prompt included."""

    max_concurrency: int = Field(default=256, ge=1)
    """Most sessions in flight at once."""

    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    """The inference server that is started for each evaluation; its port is the first free one from
    `inference.server.port` on."""

    @model_validator(mode="after")
    def _fits_into_the_server(self) -> Self:
        check_sections(self.environments, seq_len=self.seq_len)
        served = self.inference.model
        if "max_len" not in served.model_fields_set:
            served = served.model_copy(update={"max_len": max(served.max_len, self.seq_len)})
            self.inference = self.inference.model_copy(update={"model": served})
        check_server(self.inference, seq_len=self.seq_len)
        return self

    def following(self, run: Path, directory: Path) -> "EvaluateConfig":
        """Return what `evaluate --follow` is told to make these evaluations of `run`, below `directory`."""
        return EvaluateConfig(
            output_dir=directory,
            run=run,
            follow=True,
            **{name: getattr(self, name) for name in type(self).model_fields},
        )
