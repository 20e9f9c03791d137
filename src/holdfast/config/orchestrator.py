"""Configuration of the orchestrator."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from holdfast.config.base import CkptConfig, Command, ModelConfig, Section, check_url
from holdfast.config.environments import EnvironmentConfig, RolloutSettings, SamplingConfig
from holdfast.config.marks import Mark
from holdfast.errors import ConfigError
from holdfast.protocol.rollouts import PLAIN_SAMPLING


class DynamicSamplingConfig(Section):
    """Replacing groups that teach nothing. A bare ``--orchestrator.dynamic-sampling`` has the defaults."""

    max_problems_per_step: int | None = Field(default=None, ge=1)
    """Most problems drawn for one batch; unset: four times `problems_per_step`."""

    signal: Literal["sum", "parts"] | None = None
    """Rewards that must differ in a group: the sums of all rewards of its rollouts (`sum`), or rewards of wholes, turns
    or tokens (`parts`). Unset: `rl` takes what `trainer.advantage` learns from, an orchestrator by itself `parts`."""


class ServersConfig(Section):
    """Inference servers, and how long to wait for them."""

    urls: Annotated[list[str], Mark.FREE] = Field(min_length=1)
    """Base URL of every engine; a request goes to the least busy engine, or to an engine that has its prefix cached."""

    timeout_s: Annotated[float, Mark.FREE] = Field(default=600.0, gt=0)
    """A request without an answer for this long is kept while its server is healthy."""

    ready_timeout_s: Annotated[float, Mark.FREE] = Field(default=900.0, gt=0)
    """How long to wait while no server answers, at the start and later."""

    max_concurrency: Annotated[int, Mark.FREE] = Field(default=256, ge=1)
    """Most sessions in flight at once, for each of the servers."""

    @field_validator("urls")
    @classmethod
    def _are_servers(cls, urls: list[str]) -> list[str]:
        for url in urls:
            check_url(url)
        if len({*map(_server_of, urls)}) < len(urls):
            raise ValueError("must name each server once: more requests for one are max_concurrency")
        return urls


def _server_of(url: str) -> tuple[str, int, str]:
    """Return what two spellings of the URL of one server have alike: host, port and path."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return "localhost" if host in ("127.0.0.1", "::1") else host, port, parts.path.rstrip("/")


class ClientConfig(ServersConfig):
    """The inference servers of the policy. All get every weight update."""

    urls: list[str] = Field(default=["http://127.0.0.1:8000"], min_length=1)
    """Base URL of every engine; a request goes to the least busy engine, or to an engine that has its prefix cached."""

    admin_token_env: str = "HOLDFAST_ADMIN_TOKEN"
    """Environment variable with the admin token of the servers."""


class TeacherConfig(ServersConfig):
    """A fixed model to learn from, on inference servers of its own: `uv run inference --model.name TEACHER`."""

    model: str = Field(min_length=1)
    """The model that the servers serve; it must have the tokenizer of the policy."""

    mode: Literal["logprobs", "samples"] = "logprobs"
    """`logprobs`: the policy samples, and every rollout carries the teacher's log-probabilities of its
    tokens; the servers need `model.max_len` above `seq_len`. `samples`: the teacher samples, and the policy
    needs no inference server."""


class EvaluationSamplingConfig(SamplingConfig):
    """How completions of an evaluation are sampled."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """Softmax temperature, from 0.01 on; 0: the likeliest token."""

    @field_validator("temperature")
    @classmethod
    def _engines_take_it(cls, temperature: float) -> float:
        if 0 < temperature < 0.01:
            raise ValueError(
                f"{temperature:g} is more than engines take for 0 and less than they sample at: take 0, or 0.01"
            )
        return temperature


def check_samples(samples_per_task: int, sampling: SamplingConfig) -> None:
    """Refuse several samples that are all the same. Raise ValueError if temperature 0 makes them so."""
    if sampling.temperature == 0 and samples_per_task > 1:
        raise ValueError(
            f"samples_per_task = {samples_per_task} at sampling.temperature = 0 are {samples_per_task} times the same "
            "answer: set one of them to 1, or the temperature above 0"
        )


def check_sections(environments: Sequence[EnvironmentConfig], *, seq_len: int | None = None) -> None:
    """Refuse environments that cannot be told apart, and longer rollouts of one than the `seq_len` of all. Raise
    ValueError with the name of the environment."""
    labels = [section.label for section in environments]
    if len(set(labels)) != len(labels):
        raise ValueError(f"environments need distinct names, got {labels}: set `name` on those with the same id")
    for section in environments:
        if seq_len is not None and section.seq_len is not None and section.seq_len > seq_len:
            raise ValueError(
                f"environment '{section.label}': seq_len = {section.seq_len} is more than the seq_len = {seq_len} of "
                "all, which engines and trainer have room for: raise that one, or lower this one"
            )


def check_held_out(environments: Sequence[EnvironmentConfig]) -> None:
    """Refuse settings of training that an evaluation replaces. Raise ValueError with the name of the environment."""
    for section in environments:
        if section.group_size is not None:
            raise ValueError(
                f"environment '{section.label}': group_size = {section.group_size} means nothing in an evaluation, "
                "which makes `samples_per_task` rollouts of every task: leave it out"
            )
        if section.curriculum is not None:
            raise ValueError(
                f"environment '{section.label}': an evaluation asks the same tasks each time, and curriculum chooses "
                "them: leave it out, and set `args`"
            )


class EvalConfig(Section):
    """Evaluations of the policy during the run, on held-out tasks. A bare ``--eval`` makes one every 10 versions."""

    interval: int = Field(default=10, ge=1)
    """Evaluate policy version 0 and every version that this divides, if it makes a batch."""

    environments: list[EnvironmentConfig] | None = None
    """Environments to evaluate on; unset: the environments of training, on other tasks."""

    num_tasks: int | None = Field(default=None, ge=1)
    """Tasks of each environment; unset: all tasks of an environment with a certain number (`jsonl`), 128 of an
    environment without an end."""

    samples_per_task: int = Field(default=1, ge=1, le=4096)
    """Rollouts of each task: the k of `avg@k`, and the largest of `pass@k`."""

    sampling: EvaluationSamplingConfig | None = None
    """Sampling of completions; unset: at temperature 1, with each environment's `max_tokens` and `stop` of training."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Chooses the held-out tasks and the samples, as in `evaluate`."""

    @model_validator(mode="after")
    def _can_be_told_apart(self) -> Self:
        check_samples(self.samples_per_task, self.sampling or EvaluationSamplingConfig())
        check_sections(self.environments or ())
        check_held_out(self.environments or ())
        return self


def check_rounds(config: "OrchestratorConfig") -> None:
    """Refuse rounds without batches to sample side by side: not a validator, because `rl` hands `async_level` down."""
    if config.schedule == "rounds" and config.async_level == 1:
        raise ConfigError(
            "orchestrator.schedule = 'rounds' samples `async_level` batches side by side, and async_level = 1. "
            "Set it to 2 or more (3 is a good start), or take the strict schedule"
        )


class OrchestratorConfig(Command):
    """The orchestrator: environments, rollouts and batches."""

    max_steps: Annotated[int, Mark.FREE] = Field(default=100, ge=1)
    """Make batches until this step."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model that is trained; its tokenizer is used here."""

    environments: list[EnvironmentConfig] = []
    """Needed: the mix of environments, `[[environments]]` in TOML, each with `id`, `name`, `weight`, `args`, and
    perhaps a `group_size`, `sampling` and `seq_len` of its own; docs/environments.md describes them."""

    problems_per_step: int = Field(default=16, ge=1)
    """Problems of one batch."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Drop groups whose rewards are all equal, and draw further problems for them; unset: keep them."""

    group_size: int = Field(default=8, ge=1)
    """Rollouts of one problem, unless its environment sets its own number; at least two if the advantage compares
    them."""

    async_level: int = Field(default=1, ge=0)
    """Batch N is made wholly by the weights of step max(0, N - 1 - async_level). In rounds, groups begin with the
    weights of that step or a later step."""

    schedule: Literal["strict", "rounds"] = "strict"
    """`strict`: one version samples a whole batch. `rounds`: groups of several batches are sampled side by side, and no
    engine waits for the slowest answer of a batch. Faster with async_level 2 or more."""

    round_tokens: int | None = Field(default=None, ge=1)
    """In rounds: most tokens that a session samples before groups are collected and drawn again; unset: 256."""

    seq_len: int = Field(default=1024, ge=2)
    """Most tokens of one rollout, or of each of its branches, prompt included."""

    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling of completions, unless an environment sets its own."""

    client: Annotated[ClientConfig, Mark.FREE] = Field(default_factory=ClientConfig)
    """Inference servers."""

    teacher: TeacherConfig | None = None
    """A teacher for distillation; unset: none."""

    eval: Annotated[EvalConfig | None, Mark.FREE] = None
    """Evaluations during the run; unset: none."""

    weights_timeout_s: Annotated[float, Mark.FREE] = Field(default=1800.0, gt=0)
    """Give up if the trainer publishes no weights, and no process makes progress, for this long."""

    hang_timeout_s: Annotated[float, Mark.FREE] = Field(default=900.0, gt=0)
    """An event loop that is blocked for this long counts as hung. A shorter `timeout_s` ends calls of an environment
    before."""

    ckpt: Annotated[CkptConfig | None, Mark.FREE] = None
    """Only `resume_step`, and `verify` while it is looked up, matter here: the trainer commits the checkpoints."""

    @property
    def is_sampled_by_teacher(self) -> bool:
        """Whether completions come from the teacher, and not from the policy."""
        return self.teacher is not None and self.teacher.mode == "samples"

    @property
    def versions_behind(self) -> int:
        """How many versions before its own step the weights are that serve while a batch is made."""
        return min(1, self.async_level) if self.schedule == "rounds" else self.async_level

    @property
    def tokens_of_round(self) -> int:
        """The tokens of a round; 0: no end."""
        return (self.round_tokens or 256) if self.async_level else 0

    @property
    def max_problems_per_step(self) -> int:
        """Most problems that are drawn for one batch."""
        if self.dynamic_sampling is None:
            return self.problems_per_step
        return self.dynamic_sampling.max_problems_per_step or 4 * self.problems_per_step

    @property
    def signal(self) -> Literal["sum", "parts"]:
        """Rewards that must differ in a group that teaches something."""
        return (self.dynamic_sampling and self.dynamic_sampling.signal) or "parts"

    def rollouts_of(self, section: EnvironmentConfig) -> "RolloutSettings":
        """Return the rollout settings of one environment: its own, else the shared ones."""
        sampling = self.sampling if section.sampling is None else section.sampling.over(self.sampling)
        return RolloutSettings(
            group_size=section.group_size or self.group_size,
            seq_len=section.seq_len or self.seq_len,
            max_tokens=sampling.max_tokens,
            sampling=sampling.of_tokens,
        )

    @property
    def largest_group(self) -> int:
        """The most rollouts of one problem of any environment."""
        return max(self.rollouts_of(section).group_size for section in self.environments)

    @model_validator(mode="after")
    def _room_for_a_batch(self) -> Self:
        if self.max_problems_per_step < self.problems_per_step:
            raise ValueError(
                f"dynamic_sampling.max_problems_per_step = {self.max_problems_per_step} is less than "
                f"problems_per_step = {self.problems_per_step}; it must be at least that"
            )
        alone = [section.label for section in self.environments if self.rollouts_of(section).group_size == 1]
        if self.dynamic_sampling is not None and alone:
            raise ValueError(
                f"dynamic_sampling drops groups whose rewards are all equal, which every group of one is (environment "
                f"'{alone[0]}'): set group_size to 2 or more, or leave dynamic_sampling off"
            )
        return self

    @model_validator(mode="after")
    def _fits_its_schedule(self) -> Self:
        if self.schedule == "strict":
            if self.round_tokens is not None:
                raise ValueError("round_tokens is for schedule = 'rounds': set that, or leave round_tokens out")
            return self
        if self.teacher is not None:
            raise ValueError("schedule = 'rounds' is for answers of the policy alone: leave teacher out")
        if found := [section.label for section in self.environments if section.id.startswith("verifiers:")]:
            raise ValueError(
                f"environment '{found[0]}' of verifiers plays in a process whose episodes may wait for one another, "
                "which schedule = 'rounds' does not support: take the strict schedule"
            )
        if self.dynamic_sampling is not None:
            raise ValueError(
                "schedule = 'rounds' draws as many problems as a batch has, and dynamic_sampling draws more: leave one "
                "of them out"
            )
        return self

    @model_validator(mode="after")
    def _has_a_policy_to_evaluate(self) -> Self:
        if self.eval is not None and self.is_sampled_by_teacher:
            raise ValueError(
                "eval asks the engines of the policy, and with a teacher that samples (teacher.mode = 'samples') there "
                "are none: leave eval out, and evaluate checkpoints with `evaluate --run`"
            )
        return self

    @model_validator(mode="after")
    def _comparable_with_a_teacher(self) -> Self:
        judged = self.teacher is not None and self.teacher.mode == "logprobs"
        for section in self.environments:
            sampling = self.rollouts_of(section).sampling.distribution
            if judged and sampling != PLAIN_SAMPLING:
                raise ValueError(
                    f"sampling of environment '{section.label}' at {sampling}: the log-probabilities of a teacher "
                    "(mode = 'logprobs') are at temperature 1 and of all tokens, so those of the policy must be: leave "
                    "temperature, top_p, top_k and min_p of sampling at 1, 1, 0 and 0"
                )
        return self

    @model_validator(mode="after")
    def _check_environments(self) -> Self:
        check_sections(self.environments, seq_len=self.seq_len)
        return self
