"""`environments play`: one task, turn by turn, with answers typed at the terminal or given by an endpoint."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.commands.environments.loading import load
from holdfast.commands.environments.plain_chat import plain_tokenizer
from holdfast.commands.tables import Grid, Report, number
from holdfast.orchestrator.engines.routing import Affinity
from holdfast.orchestrator.environments.calls import result_of
from holdfast.orchestrator.environments.interface import Score, Session, Task
from holdfast.orchestrator.environments.tool_use import tool_metrics, tool_use_of
from holdfast.orchestrator.evaluation.endpoint import EndpointSampler
from holdfast.orchestrator.judges.desk import judging
from holdfast.orchestrator.rollouts.group import (
    Problem,
    TurnSampler,
    calling_of,
    play_session,
    prompt_ids_for,
    sample_turn_of,
    score_sessions,
)
from holdfast.orchestrator.rollouts.transcript import Transcript, messages_of
from holdfast.orchestrator.seeds import TaskSeed
from holdfast.shared.chat.files import load_tokenizer
from holdfast.shared.chat.tokenizer import Tokenizer
from holdfast.shared.config.environments import EnvironmentConfig
from holdfast.shared.config.evaluation import EndpointConfig
from holdfast.shared.errors import ConfigError
from holdfast.shared.wire.arrays import Logprobs, TokenIds
from holdfast.shared.wire.inference_api import Completion
from holdfast.shared.wire.sampling import PLAIN_SAMPLING, Sampling

_ENDLESS = 2**40
"""Of a session without a model's tokenizer: its tokens are bytes."""


def play(
    settings: EnvironmentConfig,
    *,
    seed: int,
    index: int,
    model: str | None,
    url: str | None,
    seq_len: int,
    max_tokens: int,
) -> int:
    """Play task `index` of a run with `seed`, and show all of it; return 0.

    Args:
        model: a model directory for tokenizer and template; with `url` what the server calls the model.
        max_tokens: most tokens of a turn of the endpoint.

    Raises:
        ConfigError, DataError: the environment, the tokenizer or the input cannot be used.
        EnvironmentFailure: the environment failed.
        InferenceError: the endpoint failed.
    """
    environment = load(settings)
    problem = Problem(environment, settings, TaskSeed(seed, settings.label, index))
    if url is None:
        tokenizer = load_tokenizer(model) if model is not None else plain_tokenizer()
        table = _Table(tokenizer, seq_len=seq_len if model is not None else _ENDLESS, shows_tokens=model is not None)
        asyncio.run(_play_typed(problem, table))
        return 0
    table = _Table(Transcript(url), seq_len=_ENDLESS, shows_tokens=False)
    asyncio.run(_play_endpoint(problem, table, url=url, model=str(model), seed=seed, max_tokens=max_tokens))
    return 0


@dataclass(frozen=True)
class _Table:
    """What a session is played with.

    Attributes:
        shows_tokens: at the end with their mask; bytes say nothing.
    """

    tokenizer: Tokenizer
    seq_len: int
    shows_tokens: bool

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return what ids say, with special tokens, fit for a terminal."""
        if isinstance(self.tokenizer, Transcript):
            return _shown("\n".join(_line(message) for message in messages_of(token_ids)))
        return _shown(self.tokenizer.decode(token_ids, skip_special_tokens=False))


def _line(message: dict[str, Any]) -> str:
    return f"{message['role']}: {message['content'] or ''}{_calls(message)}"


def _calls(message: dict[str, Any]) -> str:
    """Return the calls of tools in a message, for people."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return "".join(f"\ncalls {function['name']} {function['arguments']}" for function in functions)


class _Narrator:
    """Shows what a sampler is asked and what it says."""

    def __init__(self, inner: TurnSampler, table: _Table) -> None:
        self._inner = inner
        self._table = table
        self._shown: list[int] = []
        self._turn = 0

    def check(self) -> None:
        """Raise what the sampler has failed with, if it has."""
        self._inner.check()

    async def sample(
        self, token_ids: list[int], *, sampling: Sampling, max_tokens: int, seed: int, affinity: Affinity
    ) -> Completion:
        """Return a turn."""
        self._turn += 1
        goes_on = token_ids[: len(self._shown)] == self._shown
        given = self._table.text_of(token_ids[len(self._shown) :] if goes_on else token_ids).strip()
        title = ("then" if goes_on else "then, as the template writes it anew") if self._shown else "prompt"
        print(f"--- {title}\n{given}\n--- turn {self._turn}", flush=True)
        turn = await self._inner.sample(
            token_ids, sampling=sampling, max_tokens=max_tokens, seed=seed, affinity=affinity
        )
        self._shown = [*token_ids, *turn.token_ids]
        if not isinstance(self._inner, _Typist):
            said = messages_of(turn.token_ids)[0] if isinstance(self._table.tokenizer, Transcript) else {}
            print(_shown(self._table.tokenizer.decode(turn.token_ids) + _calls(said)), flush=True)
        return turn


class _Typist:
    """Has turns typed; asks for them in a queue, as nothing may wait for a person within a call of the environment."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.wanted: asyncio.Queue[asyncio.Future[str]] = asyncio.Queue()

    def check(self) -> None:
        """Never fails."""

    async def sample(
        self, token_ids: list[int], *, sampling: Sampling, max_tokens: int, seed: int, affinity: Affinity
    ) -> Completion:
        """Return what is typed, as much of it as there is room for."""
        typed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.wanted.put_nowait(typed)
        ids = [*self._tokenizer.encode(await typed), *self._tokenizer.stop_token_ids[:1]]
        reason = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        return Completion(TokenIds(ids), Logprobs([0.0] * len(ids)), reason, [])


async def _play_typed(problem: Problem, table: _Table) -> None:
    typist = _Typist(table.tokenizer)
    print("A line is a turn; one that ends with \\ goes on in the next. Ctrl-C ends.", flush=True)
    async with _working(_episode(problem, table, typist, max_tokens=table.seq_len)) as playing:
        while True:
            wanted = asyncio.ensure_future(typist.wanted.get())
            await asyncio.wait((playing, wanted), return_when=asyncio.FIRST_COMPLETED)
            if not wanted.done():
                wanted.cancel()
                return await playing
            wanted.result().set_result(_typed_turn())


@asynccontextmanager
async def _working(episode: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Play beside what the body does; cancelled where that fails."""
    playing = asyncio.create_task(episode)
    try:
        yield playing
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


def _typed_turn() -> str:
    """Return lines from the input.

    Raises:
        ConfigError: it has ended.
        KeyboardInterrupt: Ctrl-C.
    """
    # Of asyncio's own handler the first Ctrl-C cancels a task, which waits for this line.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    lines: list[str] = []
    try:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise KeyboardInterrupt  # it came a moment before
        while True:
            line = _typed_line()
            if not line.endswith("\\"):
                return "\n".join([*lines, line]).encode(errors="replace").decode()
            lines.append(line[:-1])
    except EOFError:
        raise ConfigError("the input ended before the session did: each turn needs a line") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the input is not {sys.stdin.encoding}: {error.reason}") from None
    finally:
        signal.signal(signal.SIGINT, previous)


def _typed_line() -> str:
    if sys.stdin.isatty():
        return input("> ")
    # input() would drop a Ctrl-C that comes while it flushes the prompt, and wait.
    print("> ", end="", flush=True)
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.removesuffix("\n")


async def _play_endpoint(problem: Problem, table: _Table, *, url: str, model: str, seed: int, max_tokens: int) -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-play-") as directory:
        sampler = EndpointSampler(EndpointConfig(retry_for_s=30), url=url, model=model, directory=Path(directory))
        try:
            await sampler.guard(_episode(problem, table, sampler, max_tokens=max_tokens))
        finally:
            await sampler.close()


async def _episode(problem: Problem, table: _Table, sampler: TurnSampler, *, max_tokens: int) -> None:
    """Play the session, and show what came out."""
    tokenizer = table.tokenizer
    async with calling_of(problem, "make_task"):
        task = await result_of(problem.here.make_task(problem.seed))
    tool_use = tool_use_of(problem.here, problem.settings, tokenizer)
    prompt_ids = prompt_ids_for(task, problem, tokenizer=tokenizer, seq_len=table.seq_len, tool_use=tool_use)
    session = Session(
        prompt_ids,
        tokenizer=tokenizer,
        sample_turn=functools.partial(
            sample_turn_of(problem, 0, _Narrator(sampler, table), sampling=PLAIN_SAMPLING), 0
        ),
        seq_len=table.seq_len,
        max_tokens=max_tokens,
        task=task,
        tool_use=tool_use,
        keeps_history=problem.settings.history == "keep",
        max_branches=problem.settings.max_branches,
    )
    async with judging():
        await play_session(session, task, problem)
        [score] = await score_sessions([session], task, problem)
    _outcome(task, session, score, table).print(as_json=False)


def _outcome(task: Task, session: Session, score: Score, table: _Table) -> Report:
    numbers = [("reward", number(score.reward))]
    numbers += [(name, number(value)) for name, value in (score.metrics | tool_metrics(session)).items()]
    for name in ("turn_rewards", "token_rewards"):
        if (rewards := getattr(score, name)) is not None:
            numbers.append((name, " ".join(map(number, rewards))))
    numbers.append(("truncated", "yes" if session.truncated else "no"))
    if len(session.branch_starts) > 1:
        numbers.append(("branches", str(len(session.branch_starts))))
    if task.answer:
        numbers.append(("right answer", _shown(task.answer)))
    parts: list[Grid | str] = ["---", Grid(("number", "value"), numbers)]
    if table.shows_tokens:
        rows = [
            (str(place), str(token), ascii(table.tokenizer.decode([token], skip_special_tokens=False)), "x" * sampled)
            for place, (token, sampled) in enumerate(zip(session.token_ids, session.loss_mask, strict=True))
        ]
        parts += ["", Grid((">place", ">id", "token", "sampled"), rows)]
    return Report({}, parts)


def _shown(text: str) -> str:
    """Return text of several lines with everything else escaped that a terminal would act on."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )
