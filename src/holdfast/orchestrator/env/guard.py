"""Guards calls into environments: converts errors, enforces time limits, checks results, and names blocking calls.

Environments are other people's code. Every exception of theirs, also `sys.exit`, becomes one `EnvironmentFailure` with
environment, task and place in the code. Tasks, messages and scores are checked before anything relies on them. The time
in which a call waits for the engine does not count for `timeout_s`.

asyncio can neither see nor cancel a call that blocks the event loop. A thread names the call after 30 s, and ends the
process after `timeout_s`; the process is then started again.
"""

import asyncio
import inspect
import math
import os
import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.chat.messages import as_dict
from holdfast.chat.template import TemplateRefusal
from holdfast.chat.tokenizer import Tokenizer
from holdfast.chat.written import ANOTHER_TEMPLATE
from holdfast.errors import STUCK, DataError, EnvironmentFailure, ProcessKilled, printable, shown
from holdfast.orchestrator.env.interface import Score, Session, Task, as_messages, as_text, num_characters
from holdfast.orchestrator.env.judge import JudgeFailure
from holdfast.process.events import report
from holdfast.process.heartbeat import awake_s, does, moved
from holdfast.protocol.rollouts import Rewards, StepRewards, TokenIds

_LARGEST = 1e30
"""Sums and squares of such numbers are still finite."""
_MOST_NAME = 80
"""Characters of a metric's name in an error."""
OWN_METRICS = ("pass@", "requests/", "tools/")
"""Beginnings of names of an environment's metrics that the orchestrator counts itself."""


class PromptTooLong(DataError):
    """A prompt leaves no room for a sampled token."""


def prompt_ids_of(
    task: Any, tokenizer: Tokenizer, *, what: str, seq_len: int, tools: Sequence[Any] | None = None
) -> list[int]:
    """Return the token ids of a task's prompt; `tools` are the schemas that the policy sees.

    Raises PromptTooLong if no sampled token fits after it within `seq_len`; EnvironmentFailure if `task` is not a
    `Task`, its prompt or answer has a wrong type, or the template refuses it."""
    if not isinstance(task, Task):
        raise EnvironmentFailure(f"{what}: make_task() must return a Task, got {_shown(task)}")
    if not isinstance(task.answer, str):
        raise EnvironmentFailure(
            f"{what}: the answer of its task must be text, got {_shown(task.answer)}: convert it by str(), or subclass "
            "Task for more than text"
        )
    try:
        prompt = as_text(task.prompt) if isinstance(task.prompt, str) else as_messages(task.prompt)
        characters = len(prompt) if isinstance(prompt, str) else num_characters(prompt)
        if tokenizer.is_too_long(characters, room=seq_len - 1):
            raise PromptTooLong(
                f"{what}: the prompt has {characters} characters, more than {seq_len - 1} tokens can stand for. "
                "Raise seq_len or shorten the prompts."
            )
        if isinstance(prompt, str):
            if tools:
                raise TypeError(
                    "an environment with tools needs messages, in which the chat template shows them; got text"
                )
            token_ids = tokenizer.text_prompt(prompt)
        else:
            token_ids = tokenizer.prompt(prompt, tools=tools)
            if prompt and as_dict(prompt[-1])["role"] == "assistant":
                raise ValueError(
                    "it ends with a message of the assistant, which the policy would not continue: it would answer in "
                    "a new turn. End the prompt with a message of the user, or write the prompt as text."
                )
            if unseen := tokenizer.unseen(prompt, tools=tools):
                raise ValueError(
                    f"the chat template of '{tokenizer.name}' leaves out what messages of role `{unseen[0]}` say, so "
                    "the policy would not see it. Say it in a message of the user, or use another template: "
                    f"{ANOTHER_TEMPLATE}"
                )
    except PromptTooLong:
        raise
    except TemplateRefusal as error:
        raise EnvironmentFailure(
            f"{what}: the prompt of its task: {error} Change the messages, or use another template: {ANOTHER_TEMPLATE}"
        ) from None
    except (TypeError, ValueError, DataError) as error:
        raise EnvironmentFailure(f"{what}: the prompt of its task: {error}") from None
    if not 1 <= len(token_ids) < seq_len:
        raise PromptTooLong(
            f"{what}: the prompt has {len(token_ids)} tokens; allowed are 1 to {seq_len - 1}, so that one sampled "
            f"token fits into seq_len = {seq_len}. Raise seq_len or shorten the prompts."
        )
    return token_ids


def checked_scores(scores: Any, sessions: Sequence[Session], *, what: str) -> list[Score]:
    """Return one score per session, with plain numbers. Raises EnvironmentFailure."""
    if isinstance(scores, str | bytes | Mapping) or not isinstance(scores, Sequence):
        raise EnvironmentFailure(
            f"{what}: score() must return a list of {len(sessions)} Score objects, got {_shown(scores)}"
        )
    if len(scores) != len(sessions):
        raise EnvironmentFailure(f"{what}: score() returned {len(scores)} scores for {len(sessions)} sessions")
    return [_checked(score, session, what) for score, session in zip(scores, sessions, strict=True)]


def checked_truncated(session: Session, *, what: str) -> bool:
    """Return `session.truncated`, which an environment may set. Raises EnvironmentFailure if it is not a bool."""
    value: Any = session.truncated
    if type(value).__name__ not in ("bool", "bool_"):  # the names of Python's and NumPy's
        raise EnvironmentFailure(
            f"{what}: session.truncated = {_shown(value)}, expected True or False: convert it by bool()"
        )
    return bool(value)


def step_rewards(score: Score, session: Session) -> StepRewards | None:
    """Return the rewards of turns (at their last tokens) or tokens of a checked score; None without such rewards."""
    if score.turn_rewards is not None:
        return StepRewards(TokenIds([end - 1 for end in session.turn_ends]), Rewards(score.turn_rewards))
    if score.token_rewards is not None:
        places = [place for place, sampled in enumerate(session.loss_mask) if sampled]
        return StepRewards(TokenIds(places), Rewards(score.token_rewards))
    return None


def _checked(score: Any, session: Session, what: str) -> Score:
    if not isinstance(score, Score):
        raise EnvironmentFailure(f"{what}: score() must return Score objects, got {_shown(score)}")
    if not isinstance(score.metrics, Mapping):
        raise EnvironmentFailure(f"{what}: score() gave metrics = {_shown(score.metrics)}, expected names with numbers")
    metrics: dict[str, float] = {}
    for name, value in score.metrics.items():
        try:
            as_text(name)
        except (TypeError, ValueError) as error:
            raise EnvironmentFailure(f"{what}: score() gave a metric the name {_shown(name)}: {error}") from None
        if name.startswith(OWN_METRICS):
            raise EnvironmentFailure(
                f"{what}: score() gave a metric the name {_shown(name)}; names that begin with "
                f"{', '.join(OWN_METRICS)} are counted by the orchestrator"
            )
        metrics[name] = _number(value, printable(name, most=_MOST_NAME), what)
    if score.turn_rewards is not None and score.token_rewards is not None:
        raise EnvironmentFailure(f"{what}: score() gave turn_rewards and token_rewards; give one of them")
    return Score(
        _number(score.reward, "reward", what),
        metrics,
        _numbers(score.turn_rewards, "turn_rewards", f"{len(session.texts)} sampled turns", len(session.texts), what),
        _numbers(
            score.token_rewards,
            "token_rewards",
            f"{session.loss_mask.num_sampled} sampled tokens",
            session.loss_mask.num_sampled,
            what,
        ),
    )


def _numbers(values: Any, name: str, counted: str, length: int, what: str) -> list[float] | None:
    if values is None:
        return None
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise EnvironmentFailure(f"{what}: score() gave {name} = {_shown(values)}, expected a list of numbers")
    numbers = [_number(value, f"{name}[{place}]", what) for place, value in enumerate(values)]
    if len(numbers) != length:
        raise EnvironmentFailure(f"{what}: score() gave {len(numbers)} {name} for {counted}")
    return numbers


def _number(value: Any, name: str, what: str) -> float:
    """Return a number of Python, NumPy or torch as a float."""
    is_scalar = hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
    try:
        number = float(value) if is_scalar else math.nan
    except Exception:  # noqa: BLE001 - of other people's classes; refused below
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise EnvironmentFailure(
            f"{what}: score() gave {name} = {_shown(value)}, expected a finite number, at most {_LARGEST:g} in size"
        )
    return number


def _shown(value: Any) -> str:
    return f"{shown(value)} ({type(value).__name__})"


_MOST_FRAMES = 30
_LIBRARIES = tuple(
    {*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages()}
)
_OURS = str(Path(__file__).parents[1])


class CallTimeout(EnvironmentFailure):
    """A call took longer than it may."""


@dataclass(eq=False)
class Call:
    """One running call of a method of an environment.

    `what` begins the messages of its failures, `name` other messages. `deadline` ends it after `timeout_s`, without the
    engine's time."""

    what: str
    _: KW_ONLY
    name: str
    method: str
    timeout_s: float | None
    deadline: asyncio.Timeout
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    _num_sampling: int = 0
    _own_s: float = 0.0
    _since: float = field(default_factory=awake_s)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Stop its clock while the engine samples for it."""
        if self._num_sampling == 0:
            self._own_s += awake_s() - self._since
            self._move_deadline(None)
        self._num_sampling += 1
        try:
            yield
        finally:
            self._num_sampling -= 1
            if self._num_sampling == 0:
                self._since = awake_s()
                if self.timeout_s is not None:
                    loop = asyncio.get_running_loop()
                    self._move_deadline(loop.time() + max(0.0, self.timeout_s - self._own_s))

    def _move_deadline(self, when: float | None) -> None:
        if self in RUNNING and not self.deadline.expired():
            self.deadline.reschedule(when)


RUNNING: set[Call] = set()
"""The running calls of this process."""
_CURRENT: ContextVar[Call] = ContextVar("environment call")


@contextmanager
def pausing_clock() -> Iterator[None]:
    """Stop the clock of the current call, if any, while the engine or a judge works for it."""
    call = _CURRENT.get(None)
    if call is None:
        yield
        return
    with call.sampling():
        yield


@asynccontextmanager
async def calling(what: str, *, name: str, method: str, timeout_s: float | None) -> AsyncIterator[None]:
    """Turn errors of an environment and missed deadlines into EnvironmentFailure (`CallTimeout`) with their place.

    Raises ProcessKilled as it is."""
    deadline = asyncio.timeout(timeout_s)
    call = Call(what, name=name, method=method, timeout_s=timeout_s, deadline=deadline)
    token = _CURRENT.set(call)
    try:
        async with deadline:
            RUNNING.add(call)
            try:
                yield
            finally:
                RUNNING.discard(call)
    except JudgeFailure as failure:
        raise JudgeFailure(f"{what}: {failure}", reason=failure.reason) from None
    except ProcessKilled as killed:
        raise ProcessKilled(f"{what}: {killed}") from None
    except (EnvironmentFailure, PromptTooLong, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, TimeoutError) and deadline.expired():
            at = place_of(error.__cause__ or error)
            raise CallTimeout(f"{what}: {method}() took longer than {timeout_s:g} s (timeout_s), at {at}") from None
        if isinstance(error, asyncio.CancelledError) and call.task is not None and call.task.cancelling():
            raise  # the run ends, or another group has failed
        raise EnvironmentFailure(
            f"{what}: {method}() raised {type(error).__name__}: {printable(error)} ({place_of(error)})"
        ) from error
    finally:
        _CURRENT.reset(token)


async def result_of(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error, cut."""
    places = "".join(traceback.format_tb(error.__traceback__, limit=-_MOST_FRAMES))
    return f"{places}{type(error).__name__}: {printable(error)}"


def place_of(error: BaseException) -> str:
    """Return `file:line` of the user's code where an error came from."""
    return _users([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])


def place_of_frame(frame: FrameType | None) -> str:
    """Return `file:line` of the user's code that a thread runs; `frame` is its innermost frame."""
    stack = traceback.walk_stack(frame) if frame is not None else ()
    return _users([(one.f_code.co_filename, line) for one, line in stack][::-1])


def _users(frames: list[tuple[str, int]]) -> str:
    """Return the innermost frame that is neither a library's nor ours, otherwise the innermost frame."""
    if not frames:
        return "an unknown place"
    own = [frame for frame in frames if not frame[0].startswith((*_LIBRARIES, _OURS, "<"))]
    filename, line = (own or frames)[-1]
    return f"{filename}:{line}"


NAMED_AFTER_S = 30.0
_MOST_PERIOD_S = 1.0
_BENEFIT_OF_DOUBT_S = 5.0
"""On a busy machine a call may only seem to block."""


@contextmanager
def watching_calls(*, named_after_s: float = NAMED_AFTER_S) -> Iterator[None]:
    """Name and end calls that block the event loop of this thread."""
    watch = _Watch(asyncio.get_running_loop(), threading.get_ident(), named_after_s)
    watch.start()
    try:
        yield
    finally:
        watch.end()


@asynccontextmanager
async def beating(*, bound_s: float) -> AsyncIterator[None]:
    """Send a heartbeat of the event loop each second; blocked for longer than `bound_s` it counts as stuck."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(_MOST_PERIOD_S)
            moved(works=False)

    does("its first steps", bound_s=bound_s)
    beats = asyncio.create_task(beat())
    try:
        yield
    finally:
        beats.cancel()
        does("its end")


class _Watch(threading.Thread):
    def __init__(self, loop: asyncio.AbstractEventLoop, thread_id: int, named_after_s: float) -> None:
        super().__init__(name="blocking", daemon=True)
        self._loop = loop
        self._thread_id = thread_id
        self._named_after_s = named_after_s
        self._period_s = min(_MOST_PERIOD_S, named_after_s / 4)
        self._is_over = threading.Event()
        self._answered = threading.Event()
        self._answered.set()
        self._asked_at = 0.0
        self._next_s = named_after_s
        self._blocking: Call | None = None

    def end(self) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        while not self._is_over.wait(self._period_s):
            if self._answered.is_set():
                self._blocking = None
                self._answered.clear()
                self._asked_at = awake_s()
                self._loop.call_soon_threadsafe(self._answered.set)
                continue
            frame = sys._current_frames().get(self._thread_id)
            call = _call_in(frame)
            if call is not self._blocking:
                self._blocking, self._asked_at, self._next_s = call, awake_s(), self._named_after_s
            if call is not None and frame is not None:
                self._report(call, frame, awake_s() - self._asked_at)

    def _report(self, call: Call, frame: FrameType, seconds: float) -> None:
        at = place_of_frame(frame)
        if seconds >= self._next_s:
            self._next_s = 2 * seconds
            report(f"{call.name} blocks all others for {seconds:.0f} s in {call.method}() at {at}")
        if call.timeout_s is None or seconds <= call.timeout_s + _BENEFIT_OF_DOUBT_S:
            return
        failure = EnvironmentFailure(
            f"{call.what}: {call.method}() has blocked the event loop for longer than {call.timeout_s:g} s "
            f"(timeout_s), at {at}. What takes long must be awaited: `await asyncio.to_thread(...)`"
        )
        # Nothing else can end this process: its main thread is stuck.
        sys.stderr.write(f"error: {failure}\n")
        sys.stderr.flush()
        os._exit(STUCK)


def _call_in(frame: FrameType | None) -> Call | None:
    """Return the call that a thread runs, by the coroutines on its stack; None outside of calls."""
    calls = [(call, getattr(call.task.get_coro(), "cr_frame", None)) for call in tuple(RUNNING) if call.task]
    while frame is not None:
        for call, outermost in calls:
            if outermost is frame:
                return call
        frame = frame.f_back
    return None
