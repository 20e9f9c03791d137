"""Configuration of a judge: a model behind an OpenAI-compatible endpoint that scores completions."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from holdfast.shared.config.base import Section
from holdfast.shared.config.urls import check_url

_FIXED = ("model", "messages", "temperature", "n", "stream")


class JudgeConfig(Section):
    """Whom to ask, what, and how the answer becomes a number."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a URL may hold a password

    url: str
    """Base URL of a server that speaks OpenAI's chat protocol: what comes before /chat/completions, such as
    http://127.0.0.1:8000/v1."""

    model: str = Field(min_length=1)
    """What the server calls the model."""

    prompt: str = Field(min_length=1)
    """The user's message to the judge; `{name}` is replaced by the field of that name, such as `{completion}`."""

    system: str | None = None
    """A system message before it; nothing is replaced in it."""

    max_tokens: int = Field(default=256, ge=1)
    """Most tokens of a reply; one that is cut off counts as unreadable."""

    extra_body: dict[str, Any] = {}
    """Further keys of the request, such as `reasoning_effort`. The temperature is always 0."""

    pattern: str | None = None
    """Regular expression of the score in a reply: its last match, or the first group of that. Unset: the only number,
    or verdict, in the last line."""

    max_score: float = Field(default=1.0, gt=0)
    """The best score that the judge may give; the reward is the score as a share of it, from 0 on."""

    verdicts: dict[str, float] | None = None
    """Rewards of words, such as `{ yes = 1.0, no = 0.0 }`, in the place of numbers; upper and lower case are one."""

    unreadable_reward: float | None = None
    """Reward where a reply has no score; unset: a failure of the environment, `judge_unreadable`."""

    api_key_env: str | None = None
    """Environment variable with the key of the server; unset: none is sent."""

    requests_per_minute: float | None = Field(default=None, gt=0)
    """Most requests that are begun in a minute; unset: no limit."""

    max_concurrency: int = Field(default=16, ge=1)
    """Most requests at once."""

    timeout_s: float = Field(default=60.0, gt=0)
    """A request without an answer for this long counts as failed."""

    retry_for_s: float = Field(default=600.0, gt=0)
    """How long one request is made again while the judge is busy, fails or cannot be reached."""

    @field_validator("url")
    @classmethod
    def _is_a_server(cls, url: str) -> str:
        check_url(url)
        return url.rstrip("/")

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
    def _reads_numbers_or_words(self) -> JudgeConfig:
        if self.verdicts is not None:
            if "max_score" in self.model_fields_set:
                raise ValueError("max_score is about numbers, and verdicts are words: leave one of them out")
            folded = [word.strip().casefold() for word in self.verdicts]
            if not folded or "" in folded or len(set(folded)) < len(folded):
                raise ValueError(f"verdicts must be different words, each with its reward; got {list(self.verdicts)}")
        return self
