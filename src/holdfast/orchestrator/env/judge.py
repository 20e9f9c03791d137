"""A judge: a model that scores completions, asked through the process that keeps its replies.

    judge = Judge(JudgeConfig(url="http://127.0.0.1:8000/v1", model="judge", prompt="Rate from 0 to 1:
{completion}"))
    judgements = await judge.ask_all([{"completion": session.completion} for session in sessions])
    scores = [judgement.score for judgement in judgements]

Requests go to `JUDGES` of the process: a `JudgeClient`, which keeps every reply, or in a worker a link to it.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import xxhash

from holdfast.config.environments import JudgeConfig
from holdfast.errors import ConfigError, EnvironmentFailure, masked, nearest, printable
from holdfast.protocol.inference import ChatReply, read_key

JudgeFailureReason = Literal["judge_away", "judge_refused", "judge_unreadable"]
_FIELD = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?![\w.]*\w)")


class JudgeFailure(EnvironmentFailure):
    """A judge gave no score: it was away or busy for too long, refused, or sent a reply without a score."""

    def __init__(self, message: str, *, reason: JudgeFailureReason) -> None:
        super().__init__(message)
        self.reason: JudgeFailureReason = reason


class JudgeRequest(msgspec.Struct, frozen=True):
    """One request to a judge, whose API key is in the environment variable `api_key_env`."""

    url: str
    body: bytes
    api_key_env: str | None
    timeout_s: float
    retry_for_s: float
    requests_per_minute: float | None
    max_concurrency: int

    @property
    def key(self) -> str:
        """A hash of everything that decides the reply, as 32 hexadecimal digits."""
        return xxhash.xxh3_128_hexdigest(self.url.encode() + b"\n" + self.body)


class Judges(Protocol):
    """Answers requests to judges in a process."""

    async def ask(self, request: JudgeRequest) -> ChatReply:
        """Return the reply, from the log or from the judge. Raises JudgeFailure."""
        ...


JUDGES: ContextVar[Judges] = ContextVar("judges")


@dataclass(frozen=True)
class Judgement:
    """A judge's verdict about one completion.

    Attributes:
        score: the reward: 0 to 1 for numbers, the number in the settings for verdicts.
        is_readable: whether the reply has a score; otherwise `score` is `unreadable_reward`.
        text: the reply.
    """

    score: float
    is_readable: bool
    text: str


class Judge:
    """Asks one judge. Raises ConfigError if its key is missing, or its prompt has a field in braces that is not one of
    `fields` (None: any)."""

    def __init__(self, config: JudgeConfig, *, fields: Sequence[str] | None = None) -> None:
        self._config = config
        self.fields = sorted(set(_FIELD.findall(config.prompt)))
        self._pattern = re.compile(config.pattern, re.DOTALL) if config.pattern is not None else None
        self._verdicts = {word.strip().casefold(): reward for word, reward in (config.verdicts or {}).items()}
        for name in self.fields:
            if fields is not None and name not in fields:
                raise ConfigError(
                    f"judge: its prompt has {{{name}}}, which is not a field.{nearest(name, fields)} "
                    f"Fields: {', '.join(fields)}."
                )
        if config.api_key_env is not None and read_key(config.api_key_env) is None:
            raise ConfigError(
                f"judge: the environment variable {config.api_key_env} (api_key_env) is not set: set it to the key of "
                f"{masked(config.url)}, or leave api_key_env out if it needs none"
            )

    async def ask(self, fields: Mapping[str, str]) -> Judgement:
        """Return the verdict about the fields that the prompt names. Raises JudgeFailure."""
        judges = JUDGES.get(None)
        if judges is None:
            raise RuntimeError("judges cannot be asked here: write `async with holdfast.judging():` around it")
        return self.read(await judges.ask(self.request(fields)))

    async def ask_all(self, rows: Sequence[Mapping[str, str]]) -> list[Judgement]:
        """Return the verdict about each row, asked at once. Raises the first failure in the order of `rows`."""
        found = await asyncio.gather(*map(self.ask, rows), return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if isinstance(one, Judgement)]

    def request(self, fields: Mapping[str, str]) -> JudgeRequest:
        config = self._config
        # In one pass: braces in a completion are not replaced.
        prompt = _FIELD.sub(lambda match: fields[match[1]], config.prompt)
        messages = [{"role": "system", "content": config.system}] if config.system is not None else []
        messages.append({"role": "user", "content": prompt.encode("utf-8", "backslashreplace").decode()})
        body = {"model": config.model, "messages": messages, "temperature": 0, "max_tokens": config.max_tokens}
        return JudgeRequest(
            url=f"{config.url}/chat/completions",
            body=msgspec.json.encode(body | config.extra_body, order="deterministic"),
            api_key_env=config.api_key_env,
            timeout_s=config.timeout_s,
            retry_for_s=config.retry_for_s,
            requests_per_minute=config.requests_per_minute,
            max_concurrency=config.max_concurrency,
        )

    def read(self, reply: ChatReply) -> Judgement:
        """Return the score of a reply. Raises JudgeFailure if it has none, and `unreadable_reward` is not set."""
        config = self._config
        score = None if reply.finish_reason == "length" else self._score_in(reply.text)
        if score is not None:
            return Judgement(score, True, reply.text)
        if config.unreadable_reward is not None:
            return Judgement(config.unreadable_reward, False, reply.text)
        cut = f"a reply longer than max_tokens = {config.max_tokens}" if reply.finish_reason == "length" else "a reply"
        expected = f"a number from 0 to {config.max_score:g}"
        if config.verdicts:
            expected = f"one of {', '.join(config.verdicts)}"
        raise JudgeFailure(
            f"judge '{config.model}' gave {cut} in which there is not {expected}: {printable(reply.text)}. Change "
            "prompt, pattern or max_tokens, or set unreadable_reward",
            reason="judge_unreadable",
        )

    def _score_in(self, text: str) -> float | None:
        found = self._found_in(text)
        if found is None:
            return None
        if self._verdicts:
            return self._verdicts.get(found.strip().casefold())
        try:
            score = float(found)
        except ValueError:
            return None
        return score / self._config.max_score if 0 <= score <= self._config.max_score else None

    def _found_in(self, text: str) -> str | None:
        """Return the text of the score: the last match, or the only number or verdict of the last line."""
        if self._pattern is not None:
            matches = list(self._pattern.finditer(text))
            if not matches:
                return None
            return (matches[-1][1] or "") if self._pattern.groups else matches[-1][0]
        line = text.strip().rpartition("\n")[2]
        if self._verdicts:
            words = "|".join(re.escape(word) for word in sorted(self._verdicts, key=len, reverse=True))
            found = re.findall(rf"(?<!\w)(?:{words})(?!\w)", line.casefold())
        else:
            found = _NUMBER.findall(line)
        return found[0] if len(found) == 1 else None
