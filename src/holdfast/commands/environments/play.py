"""`environments play`: one task, turn by turn, with answers that a person types."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys

from holdfast.commands.environments.loading import load
from holdfast.commands.environments.plain_chat import plain_tokenizer
from holdfast.commands.tables import Grid, number, print_parts
from holdfast.orchestrator.engines.routing import Affinity
from holdfast.orchestrator.environments.calls import result_of
from holdfast.orchestrator.environments.interface import Score, Session, Task
from holdfast.orchestrator.environments.tool_use import tool_metrics, tool_use_of
from holdfast.orchestrator.judges.desk import judging
from holdfast.orchestrator.rollouts.group import (
    Problem,
    calling_of,
    play_session,
    prompt_ids_for,
    sample_turn_of,
    score_sessions,
)
from holdfast.orchestrator.seeds import TaskSeed
from holdfast.shared.chat.files import load_tokenizer
from holdfast.shared.chat.tokenizer import Tokenizer
from holdfast.shared.config.environments import EnvironmentConfig
from holdfast.shared.errors import ConfigError
from holdfast.shared.wire.arrays import Logprobs, TokenIds
from holdfast.shared.wire.inference_api import Completion
from holdfast.shared.wire.sampling import PLAIN_SAMPLING, Sampling

_ENDLESS = 2**40
"""The longest session without a model's tokenizer: its tokens are bytes."""


def play(settings: EnvironmentConfig, *, seed: int, index: int, model: str | None, seq_len: int) -> int:
    """Play task `index` of a run with `seed`, and show prompt, turns and score; return 0.

    Args:
        model: a model directory for tokenizer and template; None: a plain chat of bytes.

    Raises:
        ConfigError, DataError: the environment, the tokenizer or the input cannot be used.
        EnvironmentFailure: the environment failed.
    """
    problem = Problem(load(settings), settings, TaskSeed(seed, settings.label, index))
    tokenizer = load_tokenizer(model) if model is not None else plain_tokenizer()
    print("A line is a turn. Ctrl-C ends.", flush=True)
    asyncio.run(_play(problem, tokenizer, seq_len=seq_len if model is not None else _ENDLESS))
    return 0


async def _play(problem: Problem, tokenizer: Tokenizer, *, seq_len: int) -> None:
    """Play the session in a task, and read lines beside it: a bad line is not a fault of the environment."""
    typist = _Typist(tokenizer)
    playing = asyncio.create_task(_episode(problem, tokenizer, typist, seq_len=seq_len))
    try:
        while True:
            wanted = asyncio.ensure_future(typist.wanted.get())
            await asyncio.wait((playing, wanted), return_when=asyncio.FIRST_COMPLETED)
            if not wanted.done():
                wanted.cancel()
                return await playing
            wanted.result().set_result(_typed_line())
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


class _Typist:
    """A policy whose turns a person types."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self.wanted: asyncio.Queue[asyncio.Future[str]] = asyncio.Queue()

    def check(self) -> None:
        """Never fails."""

    async def sample(
        self, token_ids: list[int], *, sampling: Sampling, max_tokens: int, seed: int, affinity: Affinity
    ) -> Completion:
        """Show what is new in the session, and return the line that is typed."""
        is_longer = token_ids[: len(self._shown)] == self._shown
        new = token_ids[len(self._shown) :] if is_longer else token_ids
        given = self._tokenizer.decode(new, skip_special_tokens=False)
        print(f"---\n{_shown(given.strip())}", flush=True)
        typed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.wanted.put_nowait(typed)
        ids = [*self._tokenizer.encode(await typed), *self._tokenizer.stop_token_ids[:1]]
        reason, ids = "stop" if len(ids) <= max_tokens else "length", ids[:max_tokens]
        self._shown = [*token_ids, *ids]
        return Completion(TokenIds(ids), Logprobs([0.0] * len(ids)), reason, [])


def _typed_line() -> str:
    # asyncio's own handler would cancel a task that waits for this line.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise KeyboardInterrupt  # Ctrl-C came a moment before
        print("> ", end="", flush=True)
        line = sys.stdin.readline()  # input() drops a Ctrl-C that comes while it flushes the prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"the input is not {sys.stdin.encoding}: {error.reason}") from None
    finally:
        signal.signal(signal.SIGINT, previous)
    if not line:
        raise ConfigError("the input ended before the session did: each turn needs a line")
    return line.removesuffix("\n").encode(errors="replace").decode()


async def _episode(problem: Problem, tokenizer: Tokenizer, typist: _Typist, *, seq_len: int) -> None:
    """Play the session, and show its score."""
    async with calling_of(problem, "make_task"):
        task = await result_of(problem.here.make_task(problem.seed))
    tool_use = tool_use_of(problem.here, problem.settings, tokenizer)
    sample_turn = sample_turn_of(problem, 0, typist, sampling=PLAIN_SAMPLING)
    session = Session(
        prompt_ids_for(task, problem, tokenizer=tokenizer, seq_len=seq_len, tool_use=tool_use),
        tokenizer=tokenizer,
        sample_turn=functools.partial(sample_turn, 0),
        seq_len=seq_len,
        max_tokens=seq_len,
        task=task,
        tool_use=tool_use,
        keeps_history=problem.settings.history == "keep",
        max_branches=problem.settings.max_branches,
    )
    async with judging():
        await play_session(session, task, problem)
        [score] = await score_sessions([session], task, problem)
    print_parts(["---", _outcome(task, session, score)])


def _outcome(task: Task, session: Session, score: Score) -> Grid:
    metrics = {"reward": score.reward, **score.metrics, **tool_metrics(session)}
    rows = [(name, number(value)) for name, value in metrics.items()]
    for name in ("turn_rewards", "token_rewards"):
        if (rewards := getattr(score, name)) is not None:
            rows.append((name, " ".join(map(number, rewards))))
    rows.append(("truncated", "yes" if session.truncated else "no"))
    if task.answer:
        rows.append(("right answer", _shown(task.answer)))
    return Grid(("number", "value"), rows)


def _shown(text: str) -> str:
    """Return text of several lines with everything else escaped that a terminal would act on."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )
