"""Configuration of the orchestrator."""

from __future__ import annotations

import math
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from holdfast.shared.config.base import CkptConfig, Command, ModelConfig, Section
from holdfast.shared.wire.sampling import PLAIN_SAMPLING, Sampling

# Spellings of this machine, where one port is one server's in practice.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class EnvironmentConfig(Section):
    """One environment of the mix."""

    id: str = "reverse_text"
    """A built-in environment (`reverse_text`, `sort_letters`, `addition`, `guess_number`, `ledger`,
    `python_code`, `jsonl`), one of an installed package, `reasoning_gym:NAME`, or `module:Class`."""

    name: str | None = None
    """Name in metrics; unset: the id."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the problems of each step, relative to the other environments."""

    args: dict[str, Any] = {}
    """Arguments of the environment's constructor; docs/environments.md has those of the built-in ones."""

    success_reward: float | None = None
    """A rollout with at least this reward counts as solved in `pass@k`; unset: one whose metric `exact` is 1."""

    timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=True)
    """Deadline of playing one rollout, without the time in which the engine samples for it, of scoring one group and
    of making one task; `inf`: none. A call that is silent for 30 s is named in the console."""

    on_error: Literal["stop", "drop"] = "stop"
    """What follows when the environment raises, misses `timeout_s`, or makes a prompt that leaves no room
    within `seq_len`: end the run, or leave the problem's group out of the batch and count it."""

    max_turns: int = Field(default=8, ge=1)
    """Most turns of a session of an environment with `tools`; the calls of the last one are not answered."""

    tool_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one call of a tool; the policy is told when it is over, and the session goes on."""

    tool_parser: Literal["auto", "hermes", "qwen3_coder", "llama3_json", "mistral"] = "auto"
    """Form in which the model writes calls of tools: that which its chat template shows, or one by name."""

    history: Literal["refuse", "keep"] = "refuse"
    """When messages follow behind which the chat template would write earlier turns of the policy otherwise than they
    were sampled (without their thoughts): refuse them, as a failure of the environment, or keep what was sampled."""

    workers: int = Field(default=0, ge=0, le=1024)
    """Processes that play this environment; 0: it is played in the orchestrator's. Code of it that blocks, crashes or
    hangs in a worker costs its own group at most, and which worker plays what changes no result."""

    worker_memory_gb: float | None = Field(default=None, gt=0)
    """Most memory of one worker, in GiB of what it writes to (RLIMIT_DATA), some 0.2 of which it needs itself; unset:
    no limit."""

    @property
    def label(self) -> str:
        """Name under which the environment appears in metrics and state."""
        return self.name or self.id

    @property
    def deadline_s(self) -> float | None:
        """`timeout_s`, None where there is none."""
        return self.timeout_s if math.isfinite(self.timeout_s) else None

    @model_validator(mode="after")
    def _memory_of_workers(self) -> EnvironmentConfig:
        if self.worker_memory_gb is not None and not self.workers:
            raise ValueError(
                f"environment '{self.label}': worker_memory_gb = {self.worker_memory_gb:g} is about workers, and it "
                "has none: set `workers` to 1 or more, or leave worker_memory_gb out"
            )
        return self


class SamplingConfig(Section):
    """How completions are sampled. The trainer computes log-probabilities of the same distribution."""

    temperature: float = Field(default=1.0, ge=0.01, le=2)
    """Softmax temperature."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest likeliest tokens whose probabilities sum to this; 1: from all."""

    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Sample from the k likeliest tokens; 0: from all."""

    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens at least this times as likely as the likeliest; 0: from all."""

    max_tokens: int = Field(default=128, ge=1)
    """Most tokens sampled in one turn."""

    @property
    def distribution(self) -> Sampling:
        """What every token is sampled from."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p)

    @field_validator("top_k")
    @classmethod
    def _leaves_a_choice(cls, top_k: int) -> int:
        if top_k == 1:
            raise ValueError("1 leaves one token to choose from, and nothing to learn: take 0 (all), or 2 and more")
        return top_k


class DynamicSamplingConfig(Section):
    """Replacing groups that teach nothing. A bare ``--orchestrator.dynamic-sampling`` has the defaults."""

    max_problems_per_step: int | None = Field(default=None, ge=1)
    """Most problems drawn for one batch; unset: four times `problems_per_step`."""


def check_url(url: str) -> None:
    """Refuse what is not the base URL of a server; nothing of it is repeated, because it may hold a password."""
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an end, a port that is no number
        parts, usable = None, False
    if parts is None or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("must be URLs such as http://127.0.0.1:8000")
    if parts.scheme not in ("http", "https"):
        raise ValueError("must begin with http:// or https://, such as http://127.0.0.1:8000")
    if not usable:
        raise ValueError("must name a server, such as http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "must not hold a user name or password, which would be kept with the run's settings and logs: the servers "
            "take an admin token, see admin_token_env"
        )
    if parts.query or parts.fragment:
        raise ValueError("must end with the path that comes before /health, without '?' and '#'")


def _server_of(url: str) -> tuple[str, int, str]:
    """Return what two spellings of one server's URL have alike: host, port and path."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return ("localhost" if host in _LOOPBACK else host, port, parts.path.rstrip("/"))


class ServersConfig(Section):
    """Inference servers, and how long to wait for them."""

    urls: list[str] = Field(min_length=1)
    """Base URL of every engine; a request goes to the one with the least to do, or that has its prefix."""

    timeout_s: float = Field(default=600.0, gt=0)
    """A request that has no answer after this long is waited for on, as long as its server is well."""

    ready_timeout_s: float = Field(default=900.0, gt=0)
    """How long to wait while no server answers, at the start and later."""

    max_concurrency: int = Field(default=256, ge=1)
    """Most sessions in flight at once, for each of the servers."""

    @field_validator("urls")
    @classmethod
    def _are_servers(cls, urls: list[str]) -> list[str]:
        for url in urls:
            check_url(url)
        named: dict[tuple[str, int, str], str] = {}
        for url in urls:
            server = _server_of(url)
            if (other := named.get(server)) is not None:
                same = f" ('{other}' and '{url}' are one)" if other != url else ""
                raise ValueError(f"must name each server once{same}: more requests for one are max_concurrency")
            named[server] = url
        return urls


class ClientConfig(ServersConfig):
    """The inference servers of the policy. All get every weight update."""

    urls: list[str] = Field(default=["http://127.0.0.1:8000"], min_length=1)
    """Base URL of every engine; a request goes to the one with the least to do, or that has its prefix."""

    admin_token_env: str = "HOLDFAST_ADMIN_TOKEN"
    """Environment variable with the admin token of the servers."""


class TeacherConfig(ServersConfig):
    """A fixed model to learn from, behind inference servers of its own: `uv run inference --model.name TEACHER`."""

    model: str
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
    """Refuse several samples that are all the same.

    Raises:
        ValueError: they would be.
    """
    if sampling.temperature == 0 and samples_per_task > 1:
        raise ValueError(
            f"samples_per_task = {samples_per_task} at sampling.temperature = 0 are {samples_per_task} times the same "
            "answer: set one of them to 1, or the temperature above 0"
        )


class EvalConfig(Section):
    """Evaluations of the policy during the run, on held-out tasks. A bare ``--eval`` makes one every 10 versions."""

    interval: int = Field(default=10, ge=1)
    """Evaluate policy version 0 and every one that this divides, as far as it makes a batch."""

    environments: list[EnvironmentConfig] | None = None
    """What is asked; unset: the environments of training, on other tasks."""

    num_tasks: int | None = Field(default=None, ge=1)
    """Tasks of each environment; unset: all of one that has a certain number (`jsonl`), 128 of one without an end."""

    samples_per_task: int = Field(default=1, ge=1, le=4096)
    """Rollouts of each task: the k of `avg@k`, and the largest of `pass@k`."""

    sampling: EvaluationSamplingConfig | None = None
    """Sampling of completions; unset: at temperature 1, with the `max_tokens` of training."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Chooses the held-out tasks and the samples, as in `evaluate`."""

    @model_validator(mode="after")
    def _can_be_told_apart(self) -> EvalConfig:
        check_samples(self.samples_per_task, self.sampling or EvaluationSamplingConfig())
        labels = [env.label for env in self.environments or ()]
        if len(set(labels)) != len(labels):
            raise ValueError(f"environments need distinct names, got {labels}: set `name` on those with the same id")
        return self


class OrchestratorConfig(Command):
    """The orchestrator: environments, rollouts and batches."""

    max_steps: int = Field(default=100, ge=1)
    """Make batches until this step."""

    model: ModelConfig = ModelConfig()
    """The model that is trained; its tokenizer is used here."""

    environments: list[EnvironmentConfig] = Field(default=[EnvironmentConfig()], min_length=1)
    """The mix of environments: `[[environments]]` in TOML, each with `id`, `name`, `weight`, `args`,
    `success_reward`, `timeout_s` and `on_error`; docs/environments.md describes them."""

    problems_per_step: int = Field(default=16, ge=1)
    """Problems of one batch."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Drop groups whose rewards are all equal, and draw further problems for them; unset: keep them."""

    group_size: int = Field(default=8, ge=1)
    """Rollouts of one problem; at least two where the advantage compares them with one another."""

    async_level: int = Field(default=1, ge=0)
    """Batch N is made wholly by the weights of step max(0, N - 1 - async_level)."""

    seq_len: int = Field(default=1024, ge=2)
    """Most tokens of one rollout, prompt included."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of completions."""

    client: ClientConfig = ClientConfig()
    """Inference servers."""

    teacher: TeacherConfig | None = None
    """A teacher for distillation; unset: none."""

    eval: EvalConfig | None = None
    """Evaluations during the run; unset: none."""

    weights_timeout_s: float = Field(default=1800.0, gt=0)
    """Give up when the trainer publishes no weights, and nobody gets anything else done, for this long."""

    hang_timeout_s: float = Field(default=900.0, gt=0)
    """An event loop that something blocks for this long counts as hung. What an environment does within its `timeout_s`
    is ended by that, if it is shorter."""

    ckpt: CkptConfig | None = None
    """Only `resume_step`, and `verify` while it is looked up, matter here: the trainer commits the checkpoints."""

    @property
    def is_sampled_by_teacher(self) -> bool:
        """Whether completions come from the teacher, and not from the policy."""
        return self.teacher is not None and self.teacher.mode == "samples"

    @property
    def max_problems_per_step(self) -> int:
        """Most problems that are drawn for one batch."""
        if self.dynamic_sampling is None:
            return self.problems_per_step
        return self.dynamic_sampling.max_problems_per_step or 4 * self.problems_per_step

    @model_validator(mode="after")
    def _room_for_a_batch(self) -> OrchestratorConfig:
        if self.max_problems_per_step < self.problems_per_step:
            raise ValueError(
                f"dynamic_sampling.max_problems_per_step = {self.max_problems_per_step} is less than "
                f"problems_per_step = {self.problems_per_step}; it must be at least that"
            )
        if self.dynamic_sampling is not None and self.group_size == 1:
            raise ValueError(
                "dynamic_sampling drops groups whose rewards are all equal, which every group of one is: set "
                "group_size to 2 or more, or leave dynamic_sampling off"
            )
        return self

    @model_validator(mode="after")
    def _has_a_policy_to_evaluate(self) -> OrchestratorConfig:
        if self.eval is not None and self.is_sampled_by_teacher:
            raise ValueError(
                "eval asks the engines of the policy, and with a teacher that samples (teacher.mode = 'samples') there "
                "are none: leave eval out, and evaluate checkpoints with `evaluate --run`"
            )
        return self

    @model_validator(mode="after")
    def _comparable_with_a_teacher(self) -> OrchestratorConfig:
        judged = self.teacher is not None and self.teacher.mode == "logprobs"
        if judged and self.sampling.distribution != PLAIN_SAMPLING:
            raise ValueError(
                f"sampling at {self.sampling.distribution}: the log-probabilities of a teacher (mode = 'logprobs') are "
                "at temperature 1 and of all tokens, so those of the policy must be: leave temperature, top_p, top_k "
                "and min_p of sampling at 1, 1, 0 and 0"
            )
        return self

    @model_validator(mode="after")
    def _unique_names(self) -> OrchestratorConfig:
        labels = [env.label for env in self.environments]
        if len(set(labels)) != len(labels):
            raise ValueError(f"environments need distinct names, got {labels}: set `name` on those with the same id")
        return self
