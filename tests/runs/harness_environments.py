"""Asking as a harness does over HTTP, and an environment that a harness plays; imports little."""

from types import SimpleNamespace
from typing import Any

import httpx

from holdfast import Endpoint, HarnessEnvironment, Score, Task, TaskSeed
from holdfast.chat.messages import as_dict
from holdfast.orchestrator.env.reverse_text import ReverseText


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


class ReversedOverHttp(HarnessEnvironment):
    def __init__(self) -> None:
        self._likeness = ReverseText()

    def make_task(self, seed: TaskSeed) -> Task:
        return self._likeness.make_task(seed)

    async def play(self, endpoint: Endpoint, task: Task) -> Score:
        assert not isinstance(task.prompt, str)
        answer = await ask(endpoint, *map(as_dict, task.prompt))
        said: Any = SimpleNamespace(completion=answer["content"])
        return (await self._likeness.score(task, [said]))[0]
