"""The same two turns, played by a harness over HTTP and by a session; and what a harness may do wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from holdfast import Endpoint, Environment, HarnessEnvironment, Message, Score, Session, Task, TaskSeed
from holdfast.chat.messages import as_dict
from holdfast.orchestrator.env.reverse_text import ReverseText

NEXT = "again"


async def ask(endpoint: Endpoint, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the answer of an endpoint: its message, or why there is none."""
    async with httpx.AsyncClient(timeout=60, verify=False) as client:  # it would read certificates for 20 ms
        answer = await client.post(
            f"{endpoint.base_url}/chat/completions",
            json={"model": endpoint.model, "messages": list(messages), **more},
            headers={"Authorization": f"Bearer {endpoint.api_key}"},
        )
    said = answer.json()
    return said["choices"][0]["message"] if answer.is_success else said


def question(seed: TaskSeed) -> str:
    """Return what is asked first."""
    return "".join(seed.random().choices("abcdefgh", k=5))


def reward_of(texts: Sequence[str]) -> Score:
    """Return a score that depends on all that was said."""
    return Score(float(sum(len(text) * place for place, text in enumerate(texts, start=1))))


class Played(Environment):
    """Two turns in a session."""

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=[Message("user", question(seed))])

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        session.append_messages([Message("user", NEXT)])
        await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        return [reward_of(session.texts) for session in sessions]


class Harness(HarnessEnvironment):
    """Two turns over HTTP.

    Args:
        faults: what goes wrong, by the index of the task.
        marks: directory for a file that says that it has gone wrong once.
    """

    def __init__(self, faults: dict[str, str] | None = None, marks: str = "") -> None:
        self._faults = faults or {}
        self._marks = Path(marks)

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=question(seed), answer=str(seed.index))

    async def play(self, endpoint: Endpoint, task: Task) -> Any:
        fault = self._faults.get(task.answer)
        if fault == "asks nothing":
            return 1.0
        if fault == "too long":
            await ask(endpoint, {"role": "user", "content": "a" * 3000})
            raise KeyError("choices")
        chat: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        chat.append(await ask(endpoint, *chat))
        match fault:
            case "raises":
                raise KeyError("no")
            case "hangs":
                await asyncio.Event().wait()
            case "killed once" if not (self._marks / "killed").exists():
                (self._marks / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                pass
        chat.append({"role": "user", "content": NEXT})
        chat.append(await ask(endpoint, *chat))
        score = reward_of([one["content"] for one in chat if one["role"] == "assistant"])
        return score if fault == "scores" else score.reward


class ReversedOverHttp(HarnessEnvironment):
    """The environment `reverse_text`, played over HTTP."""

    def __init__(self) -> None:
        self._likeness = ReverseText()

    def make_task(self, seed: TaskSeed) -> Task:
        return self._likeness.make_task(seed)

    async def play(self, endpoint: Endpoint, task: Task) -> Score:
        assert not isinstance(task.prompt, str)
        answer = await ask(endpoint, *map(as_dict, task.prompt))
        said: Any = SimpleNamespace(completion=answer["content"])
        return (await self._likeness.score(task, [said]))[0]
