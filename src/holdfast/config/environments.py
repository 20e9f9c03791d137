"""Settings of environments, judges, MCP servers and curricula, and how an environment samples its rollouts."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from holdfast.config.base import Section, Url
from holdfast.config.marks import Mark
from holdfast.protocol.rollouts import Sampling

_StopText = Annotated[str, Field(min_length=1)]
_FIXED = ("model", "messages", "temperature", "n", "stream")


class JudgeConfig(Section):
    """A judge: its server, its prompt, and how its reply becomes a reward."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a URL may hold a password

    url: Url
    """Base URL of a server with OpenAI's chat protocol, without /chat/completions: http://127.0.0.1:8000/v1."""

    model: str = Field(min_length=1)
    """The model's name on the server."""

    prompt: str = Field(min_length=1)
    """The user's message to the judge; `{name}` is replaced by the field of that name, such as `{completion}`."""

    system: str | None = None
    """A system message before the prompt. Nothing is replaced in it."""

    max_tokens: int = Field(default=256, ge=1)
    """Most tokens of a reply. A longer reply is cut, and counts as unreadable."""

    extra_body: dict[str, Any] = {}
    """More keys of the request, such as `reasoning_effort`. The temperature is always 0."""

    pattern: str | None = None
    """Regular expression of the score in a reply: its last match, or the first group of that match. Unset: the only
    number or verdict in the last line."""

    max_score: float = Field(default=1.0, gt=0)
    """The judge's best score. The reward is the score divided by it, from 0 to 1."""

    verdicts: dict[str, float] | None = None
    """Rewards of words instead of numbers: `{ yes = 1.0, no = 0.0 }`. Upper and lower case are equal."""

    unreadable_reward: float | None = None
    """Reward of a reply without a score. Unset: a failure of the environment, `judge_unreadable`."""

    api_key_env: str | None = None
    """Environment variable with the server's key. Unset: no key is sent."""

    requests_per_minute: float | None = Field(default=None, gt=0)
    """Most requests that begin in a minute. Unset: no limit."""

    max_concurrency: int = Field(default=16, ge=1)
    """Most requests at the same time."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a request without an answer has failed."""

    retry_for_s: float = Field(default=600.0, gt=0)
    """Seconds for which a request is repeated while the judge is busy, fails or cannot be reached."""

    _plain_url = field_validator("url")(lambda url: url.rstrip("/"))

    @field_validator("extra_body")
    @classmethod
    def _leaves_what_is_fixed(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if taken := [key for key in extra if key in _FIXED]:
            raise ValueError(f"must not set {', '.join(taken)}: the reply could not be read, or kept for its request")
        return extra

    @field_validator("pattern")
    @classmethod
    def _is_an_expression(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _reads_numbers_or_words(self) -> Self:
        if self.verdicts is not None:
            if "max_score" in self.model_fields_set:
                raise ValueError("max_score is about numbers, and verdicts are words: leave one of them out")
            folded = [word.strip().casefold() for word in self.verdicts]
            if not folded or "" in folded or len(set(folded)) < len(folded):
                raise ValueError(f"verdicts must be different words, each with its reward; got {list(self.verdicts)}")
        return self


class McpServerConfig(Section):
    """One server: a command that speaks MCP on its standard input and output, or a URL (streamable HTTP)."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a URL may hold a password

    command: str | None = Field(default=None, min_length=1)
    """Program started for every rollout that calls one of its tools; it ends with the rollout."""

    args: list[str] = []
    """Its arguments."""

    env: list[str] = []
    """Names of environment variables that it gets beside PATH, HOME, PYTHONPATH and the like; values stay out of the
    settings."""

    url: Url | None = None
    """Instead of a command: the endpoint of a running server, such as http://127.0.0.1:9000/mcp; every rollout has its
    own session."""

    api_key_env: str | None = None
    """With `url`: environment variable with its key; unset: none is sent."""

    tools: list[str] | None = Field(default=None, min_length=1)
    """Which of its tools the policy sees; unset: all."""

    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long the server may take to start, and to name its tools at the start of the run."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("set `command`, or `url`, and not both")
        if self.url is not None and (self.args or self.env):
            raise ValueError("args and env belong to a `command`; a server at a `url` has its own")
        if self.command is not None and self.api_key_env is not None:
            raise ValueError("api_key_env belongs to a `url`; give a command its key with `env`")
        return self


def leaves_a_choice(top_k: int | None) -> int | None:
    """Refuse one token to choose from."""
    if top_k == 1:
        raise ValueError("1 leaves one token to choose from, and nothing to learn: take 0 (all), or 2 and more")
    return top_k


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

    stop: list[_StopText] = []
    """Texts that end a turn after the token that completes such a text; the turn keeps these tokens. `[]`: none."""

    @property
    def of_tokens(self) -> "Sampling":
        """The distribution of every sampled token, and the texts that end a turn."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p, tuple(self.stop))

    _leaves_a_choice = field_validator("top_k")(leaves_a_choice)


class EnvironmentSamplingConfig(Section):
    """Sampling of one environment if it differs from all; unset: as all."""

    temperature: float | None = Field(default=None, ge=0.01, le=2)
    """Softmax temperature."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the fewest likeliest tokens whose probabilities sum to this; 1: from all."""

    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    """Sample from the k likeliest tokens; 0: from all."""

    min_p: float | None = Field(default=None, ge=0, lt=1)
    """Sample from tokens at least this times as likely as the likeliest; 0: from all."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens sampled in one turn."""

    stop: list[_StopText] | None = None
    """Texts that end a turn after the token that completes such a text; the turn keeps these tokens. `[]`: none."""

    _leaves_a_choice = field_validator("top_k")(leaves_a_choice)

    def over(self, common: SamplingConfig) -> "SamplingConfig":
        """Return `common` with the values that are set here."""
        return common.model_copy(update=self.model_dump(exclude_none=True))


class CurriculumConfig(Section):
    """Levels of an environment; its tasks come from one level after the other."""

    levels: list[dict[str, Any]] = Field(min_length=2)
    """Arguments of each level, over `args`, the easiest first: `[{ max_digits = 1 }, { max_digits = 3 }]`."""

    window: int = Field(default=32, ge=1, le=4096)
    """How many of a level's latest groups count."""

    advance_reward: float
    """The next level begins when the mean reward of a full window is at least this."""


METRIC_GROUPS = frozenset({
    "advantage", "clip_fraction", "correction", "curriculum", "distillation", "engine", "eval", "groups", "hooks",
    "kl", "logps", "mismatch", "mismatch_kl", "of_values", "ratio", "reward", "reward_model", "rewards", "rollout",
    "staleness", "time", "tokens", "val",
})  # fmt: skip
"""Metrics of a run begin with these names and a slash; an environment's begin with its own name, in evaluations after
`eval/`."""


class EnvironmentConfig(Section):
    """One environment of the mix."""

    id: Annotated[str, Mark.ANSWERS]
    """A built-in environment (`reverse_text`, `jsonl`), `verifiers:ID`, or `module:Class`."""

    name: str | None = None
    """Name in metrics; unset: the id."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the problems of each step, relative to the other environments."""

    group_size: int | None = Field(default=None, ge=1)
    """Rollouts of one problem of this environment; unset: the `group_size` of all. Not of evaluations."""

    sampling: Annotated[EnvironmentSamplingConfig | None, Mark.ANSWERS] = None
    """Other sampling for this environment: `temperature`, `top_p`, `top_k`, `min_p`, `max_tokens`, `stop`, each unset:
    the `sampling` of all."""

    seq_len: Annotated[int | None, Mark.ANSWERS] = Field(default=None, ge=2)
    """Most tokens of one rollout of this environment, prompt included, or of each of its branches; unset: the `seq_len`
    of all, the largest."""

    args: Annotated[dict[str, Any], Mark.ANSWERS] = {}
    """Arguments of the environment's constructor; docs/environments.md lists the arguments of built-in ones."""

    curriculum: CurriculumConfig | None = None
    """Levels of difficulty, from which training draws its tasks in turn; unset: only `args`. Not of evaluations."""

    success_reward: Annotated[float | None, Mark.ANSWERS] = None
    """A rollout with at least this reward counts as solved in `pass@k`; unset: one whose metric `exact` is 1."""

    timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=True)
    """Deadline of playing one rollout, without the time in which the engine samples for it, of scoring one group and
    of making one task; `inf`: none. A call that blocks all others for 30 s is named in the console."""

    on_error: Literal["stop", "drop"] = "stop"
    """Reaction if the environment raises, misses `timeout_s`, or makes a prompt that leaves no room within `seq_len`:
    end the run, or leave the problem's group out of the batch and count it."""

    max_turns: Annotated[int, Mark.ANSWERS] = Field(default=8, ge=1)
    """Most turns of a session of an environment with `tools`; the calls of the last one are not answered."""

    tool_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one call of a tool; the policy reads when it is over, and the session continues."""

    tool_parser: Annotated[Literal["auto", "hermes", "qwen3_coder", "llama3_json", "mistral"], Mark.ANSWERS] = "auto"
    """Form in which the model writes calls of tools: the form that its chat template shows, or a form by name."""

    mcp_servers: Annotated[dict[str, McpServerConfig], Mark.ANSWERS] = {}
    """MCP servers by name, each a `command` or a `url`: the policy may call their tools, beside the environment's."""

    history: Annotated[Literal["split", "keep"], Mark.ANSWERS] = "split"
    """If the chat template would rewrite earlier turns when messages follow (without their thoughts): `split` continues
    the session in a new branch, with the prompt that the template makes of the chat; `keep` continues after what was
    sampled."""

    max_branches: Annotated[int, Mark.ANSWERS] = Field(default=8, ge=1)
    """Most branches of a session with `history = "split"`; a session that needs more ends there and counts as
    truncated. A forward pass of the trainer holds all branches of a rollout, each of up to `seq_len` tokens."""

    workers: int = Field(default=0, ge=0, le=1024)
    """Processes that play this environment; 0: it is played in the orchestrator's. Code of it that blocks, crashes or
    hangs in a worker costs its own group at most, and which worker plays what changes no result."""

    worker_memory_gb: float | None = Field(default=None, gt=0)
    """Most memory of one worker, in GiB of writable memory (RLIMIT_DATA). The worker itself needs about 0.2; unset: no
    limit."""

    @property
    def label(self) -> str:
        """Name under which the environment appears in metrics and state."""
        return self.name or self.id

    def at_levels(self, key: str) -> "dict[str, EnvironmentConfig]":
        """Return the settings of every level of the curriculum, or these without one, by the dotted key of each. `key`:
        dotted key of these settings."""
        if self.curriculum is None:
            return {key: self}
        return {
            f"{key}.curriculum.levels[{number}]": self.model_copy(update={"args": self.args | level})
            for number, level in enumerate(self.curriculum.levels)
        }

    @property
    def deadline_s(self) -> float | None:
        """`timeout_s`, None for `inf`."""
        return self.timeout_s if math.isfinite(self.timeout_s) else None

    @field_validator("name")
    @classmethod
    def _can_be_shown(cls, name: str | None) -> str | None:
        if name is not None and not (name.strip() and name.isprintable()):
            raise ValueError("must be text on one line, not empty: metrics and tables have it")
        return name

    @model_validator(mode="after")
    def _memory_of_workers(self) -> Self:
        if self.worker_memory_gb is not None and not self.workers:
            raise ValueError(
                f"environment '{self.label}': worker_memory_gb = {self.worker_memory_gb:g} limits workers, and there "
                "are none: set workers to 1 or more, or leave worker_memory_gb out"
            )
        return self


@dataclass(frozen=True)
class RolloutSettings:
    """The rollout settings of one environment.

    Attributes:
        group_size: rollouts of one problem.
        seq_len: most tokens of one rollout, prompt included.
        max_tokens: most tokens sampled in one turn.
        sampling: the distribution that tokens are sampled from, and the texts that end a turn.
    """

    group_size: int
    seq_len: int
    max_tokens: int
    sampling: Sampling
