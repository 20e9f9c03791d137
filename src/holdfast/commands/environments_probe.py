"""Plays an environment with scripted answers, and records its tasks, sessions and scores as digests.

    python -m holdfast.commands.environments_probe FINDINGS < request.json

`environments check` runs this probe several times, also in processes of its own, and compares the findings. A digest
covers the parts of a task and is equal in every process. The probe needs no model: it brings a byte tokenizer with its
own chat template.
"""

import dataclasses
import enum
import functools
import math
import random
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
import xxhash
from tokenizers import decoders, models, pre_tokenizers

from holdfast.chat.messages import as_dict
from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import ConfigError, EnvironmentFailure, text_of
from holdfast.orchestrator import episodes
from holdfast.orchestrator.env.guard import PromptTooLong, result_of
from holdfast.orchestrator.env.interface import Environment, HistoryRewritten, Session, Task, as_messages
from holdfast.orchestrator.env.jsonl import Jsonl
from holdfast.orchestrator.env.registry import load_environment
from holdfast.orchestrator.env.solvable import Make, Solvability, rows_of, try_answers
from holdfast.orchestrator.env.tool_loop import ToolUse, tool_use_of
from holdfast.orchestrator.judge_client import judging
from holdfast.orchestrator.state import TaskSeed
from holdfast.protocol.inference import Completion
from holdfast.protocol.rollouts import PLAIN_SAMPLING, Logprobs, TokenIds

_START, _END = "<|im_start|>", "<|im_end|>"
# ChatML, with tools and calls as Hermes and Qwen write them. It never drops earlier text.
_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools, to be called as "
    '<tool_call>{"name": "...", "arguments": {...}}</tool_call>:\' }}'
    "{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def plain_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte, which writes every message, its tools and what they answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_START, _END])
    return Tokenizer(backend, name="plain chat", templates=_TEMPLATE, special={"eos_token": _END})


_DEEPEST = 50


def parts_of(task: Any) -> dict[str, str]:
    """Return a digest of each part of a task, by name: `prompt`, `answer`, and the fields of a subclass."""
    if not isinstance(task, Task):
        return {"task": digest_of(task)}
    names = dict.fromkeys([field.name for field in dataclasses.fields(task)] + list(getattr(task, "__dict__", {})))
    return {name: digest_of(_prompt_of(task) if name == "prompt" else getattr(task, name)) for name in names}


def _prompt_of(task: Task) -> Any:
    """Return the prompt with its messages as dicts."""
    if isinstance(task.prompt, str):
        return task.prompt
    try:
        return [as_dict(message) for message in as_messages(task.prompt)]
    except TypeError:
        return task.prompt  # not messages: the check of the prompts reports this


def digest_of(value: Any) -> str:
    """Return a digest that is equal for equal values."""
    return xxhash.xxh3_128_hexdigest(canonical(value).encode("utf-8", "backslashreplace"))


def canonical(value: Any, *, depth: int = 0) -> str:
    """Return text that is equal for equal values, whatever the order of sets and mappings and their place in memory."""
    if depth > _DEEPEST:
        return "..."
    kind = type(value).__qualname__
    if value is None or (isinstance(value, str | bytes | int | float | complex) and not isinstance(value, enum.Enum)):
        return f"{kind}:{value!r}"
    if isinstance(value, enum.Enum):
        return f"{kind}.{value.name}"
    if isinstance(value, Mapping):
        pairs = [f"{canonical(key, depth=depth + 1)}={canonical(item, depth=depth + 1)}" for key, item in value.items()]
        return f"{{{','.join(sorted(pairs))}}}"
    if isinstance(value, Set):
        return f"<{','.join(sorted(canonical(item, depth=depth + 1) for item in value))}>"
    if isinstance(value, Sequence):
        return f"[{','.join(canonical(item, depth=depth + 1) for item in value)}]"
    if callable(getattr(value, "tolist", None)):  # arrays and scalars of NumPy and torch
        return f"{kind}:{getattr(value, 'dtype', '')}{canonical(value.tolist(), depth=depth + 1)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, random.Random):
        return f"{kind}:{canonical(value.getstate(), depth=depth + 1)}"
    held = {name: getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)}
    held |= getattr(value, "__dict__", {})
    if held:
        return f"{kind}{canonical(held, depth=depth + 1)}"
    # The text of `object` is a place in memory, which says nothing.
    return kind if type(value).__repr__ is object.__repr__ else f"{kind}:{text_of(value)}"


_PLAIN_SEQ_LEN = 1 << 20
"""With a token for each byte there is room enough: only a model's own tokenizer says what fits."""


class Request(msgspec.Struct):
    """A question to an environment.

    Attributes:
        settings: its `EnvironmentConfig`, as JSON.
        num_tasks: tasks to make, from index 0 on.
        num_played: how many of the first tasks to play and score.
        model: whose tokenizer and template; None: a token for each byte, and no limit.
        is_reversed: make the last task first.
    """

    settings: str
    num_tasks: int
    num_played: int
    seed: int
    seq_len: int
    model: str | None = None
    is_reversed: bool = False

    @property
    def config(self) -> EnvironmentConfig:
        """The settings."""
        return EnvironmentConfig.model_validate_json(self.settings)


class Findings(msgspec.Struct):
    """The results of one probe.

    Attributes:
        tasks: index -> part of the task -> digest.
        sessions: index -> name of the answer -> digest of its tokens and mask.
        scores: index -> name of the answer -> its score among the others, as canonical text.
        changed_scores: index -> names of the answers that got another score when the same sessions were scored again.
        num_split: sessions with several branches, because the template rewrote their history.
        lengths: tokens of each prompt.
        is_plain: tokens are bytes: no model was named, or its template does not suit the environment.
        failures: check -> messages, each once.
    """

    tasks: dict[int, dict[str, str]] = {}
    sessions: dict[int, dict[str, str]] = {}
    scores: dict[int, dict[str, str]] = {}
    changed_scores: dict[int, list[str]] = {}
    num_split: int = 0
    lengths: list[int] = []
    is_plain: bool = False
    failures: dict[str, list[str]] = {}

    def fail(self, check: str, what: object) -> None:
        """Note a failure, once."""
        messages = self.failures.setdefault(check, [])
        if str(what) not in messages:
            messages.append(str(what))


def answers_to(task: Task, environment: Environment) -> dict[str, str]:
    """Return answers of a policy by name, each given in every turn."""
    answers = {
        "the right answer": task.answer,
        "an empty answer": "",
        "a huge answer": "0123456789 abc\n" * 2000,
        "a non-ASCII answer": "Größe ⁵ ٣ 漢字 🙂\u202e\x00",
        "an answer behind thoughts": f"<think>\nIs it that?\n</think>\n\n{task.answer}",
    }
    if environment.tools:
        answers["a call of no tool"] = '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>'
    return answers


class Scripted:
    """Gives the same answer in every turn."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._ids = [*tokenizer.encode(text), *tokenizer.stop_token_ids[:1]]

    def check(self) -> None:
        """Never fails."""

    def leave(self, sample_index: int) -> None:
        """Nothing waits for the end of a session."""

    async def sample(self, turn: episodes.TurnRequest) -> Completion:
        """Return the answer, cut to as many tokens as are asked for."""
        ids = self._ids[: turn.max_tokens] or [0]
        reason = "stop" if len(self._ids) <= turn.max_tokens else "length"
        return Completion(TokenIds(ids), Logprobs([0.0] * len(ids)), reason, [])


async def probe(environment: Environment, request: Request) -> Findings:
    """Make the tasks, play and score the first of them, and return the results."""
    found = Findings(is_plain=request.model is None)
    config = request.config
    tokenizer, seq_len = plain_tokenizer(), _PLAIN_SEQ_LEN
    tool_use = tool_use_of(environment, config, tokenizer)
    if request.model is not None:
        try:
            named = load_tokenizer(request.model)
            tool_use = tool_use_of(environment, config, named)
            tokenizer, seq_len = named, request.seq_len
        except ConfigError as error:  # the template leaves tools out
            found.fail("template", error)
            found.is_plain = True
    order = range(request.num_tasks)
    async with judging():
        for index in reversed(order) if request.is_reversed else order:
            problem = episodes.Problem(environment, config, TaskSeed(request.seed, config.label, index))
            asked = _Asked(problem, tokenizer, seq_len, tool_use, found)
            await asked.ask(is_played=index < request.num_played)
    return found


async def solve(environment: Environment, request: Request) -> Solvability | None:
    """Return what the answers of all rows, or of some tasks, earn; None if a judge scores, or tasks have no answer."""
    tokenizer, config = plain_tokenizer(), request.config
    tool_use = tool_use_of(environment, config, tokenizer)

    def problem_of(index: int) -> episodes.Problem:
        return episodes.Problem(environment, config, TaskSeed(request.seed, config.label, index))

    async def make_one(index: int) -> Task:
        async with episodes.calling_of(problem := problem_of(index), "make_task"):
            return await result_of(environment.make_task(problem.seed))

    async def score(task: Task, completions: list[str], index: int) -> list[float]:
        problem = problem_of(index)
        asked = _Asked(problem, tokenizer, _PLAIN_SEQ_LEN, tool_use, Findings())
        ids = episodes.prompt_ids_for(task, problem, tokenizer=tokenizer, seq_len=_PLAIN_SEQ_LEN, tool_use=tool_use)
        sessions = [await asked.play(text, task, ids) for text in completions]
        return [one.reward for one in await episodes.score_sessions(sessions, task, problem)]

    make: Make = rows_of(environment) if isinstance(environment, Jsonl) else make_one
    is_judged = isinstance(environment, Jsonl) and environment.scorer_name == "judge"
    if is_judged or not (await make(0)).answer:
        return None
    async with judging():
        return await try_answers(environment, make, score, most_s=math.inf)


@dataclasses.dataclass(frozen=True)
class _Asked:
    problem: episodes.Problem
    tokenizer: Tokenizer
    seq_len: int
    tool_use: ToolUse | None
    found: Findings

    async def ask(self, *, is_played: bool) -> None:
        index = self.problem.seed.index
        try:
            async with episodes.calling_of(self.problem, "make_task"):
                task = await result_of(self.problem.here.make_task(self.problem.seed))
                self.found.tasks[index] = parts_of(task)
        except EnvironmentFailure as failure:
            self.found.fail("tasks", failure)
            return
        try:
            prompt_ids = episodes.prompt_ids_for(
                task, self.problem, tokenizer=self.tokenizer, seq_len=self.seq_len, tool_use=self.tool_use
            )
        except (EnvironmentFailure, PromptTooLong) as failure:
            self.found.fail("prompts", failure)
            return
        self.found.lengths.append(len(prompt_ids))
        if not is_played:
            return
        sessions = {
            name: session
            for name, text in answers_to(task, self.problem.here).items()
            if (session := await self._play(name, text, task, prompt_ids)) is not None
        }
        self.found.num_split += sum(len(session.branch_starts) > 1 for session in sessions.values())
        self.found.sessions[index] = {
            name: digest_of([session.token_ids.tobytes(), session.loss_mask.tobytes(), repr(session.branch_starts)])
            for name, session in sessions.items()
        }
        first = await self._scores(task, sessions, "all answers in one group")
        again = await self._scores(task, sessions, "the same sessions, scored again") if first else {}
        self.found.scores[index] = first
        self.found.changed_scores[index] = [name for name, score in again.items() if score != first[name]]
        for name, session in sessions.items():
            await self._scores(task, {name: session}, f"{name}, alone in its group")

    async def _play(self, name: str, text: str, task: Task, prompt_ids: list[int]) -> Session | None:
        try:
            return await self.play(text, task, prompt_ids)
        except EnvironmentFailure as failure:
            check = "template" if isinstance(failure.__cause__, HistoryRewritten) else "sessions"
            self.found.fail(check, f"{name}: {failure}")
            return None

    async def play(self, text: str, task: Task, prompt_ids: list[int]) -> Session:
        sampler = Scripted(self.tokenizer, text)
        session = Session(
            prompt_ids,
            tokenizer=self.tokenizer,
            sample_turn=functools.partial(
                episodes.sample_turn_of(self.problem, 0, sampler, sampling=PLAIN_SAMPLING), 0
            ),
            seq_len=self.seq_len,
            max_tokens=self.seq_len,
            task=task,
            tool_use=self.tool_use,
            keeps_history=self.problem.settings.history == "keep",
            max_branches=self.problem.settings.max_branches,
        )
        await episodes.play_session(session, task, self.problem)
        return session

    async def _scores(self, task: Task, sessions: dict[str, Session], what: str) -> dict[str, str]:
        try:
            scores = await episodes.score_sessions(list(sessions.values()), task, self.problem) if sessions else []
        except EnvironmentFailure as failure:
            self.found.fail("scores", f"{what}: {failure}")
            return {}
        return {name: canonical(score) for name, score in zip(sessions, scores, strict=True)}


def main(argv: list[str]) -> None:
    """Probe in this process, and write the findings to the file that `argv` names."""
    import asyncio

    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    environment = load_environment(request.config, key="environments[0]")
    findings: Any = asyncio.run(probe(environment, request))
    Path(argv[0]).write_bytes(msgspec.json.encode(findings))


if __name__ == "__main__":
    from holdfast.process.child import die_with_launcher, run_reporting_errors

    die_with_launcher()
    run_reporting_errors(lambda: main(sys.argv[1:]))
