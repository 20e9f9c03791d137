"""Letters to be sorted, as an environment of verifiers: the task of `sort_letters`, asked by a harness of its own.

For an interpreter that has verifiers 0.4, with this directory on PYTHONPATH; nothing else is imported.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]


class Letters(vf.TaskData):
    """One task."""

    answer: str


class Settings(vf.TasksetConfig):
    """Which words there are."""

    num_words: int = 4096
    min_length: int = 3
    max_length: int = 4


class Sort(vf.Task[Letters]):
    """Scored by exact match."""

    @vf.reward
    async def exact(self, task: Letters, trace: Any) -> float:
        """Return whether the reply is the sorted letters."""
        return float(trace.last_reply.strip() == task.answer)


class Sorting(vf.Taskset[Sort, Settings]):
    """Different words of different letters, the same at every start."""

    def load(self) -> Iterable[Sort]:
        draw = random.Random(0)
        words: dict[str, None] = {}
        while len(words) < self.config.num_words:
            length = draw.randint(self.config.min_length, self.config.max_length)
            words["".join(draw.sample(string.ascii_lowercase, k=length))] = None
        for word in words:
            yield Sort(Letters(prompt=word, answer="".join(sorted(word))), self.config.task)


class Asker(vf.Harness[vf.HarnessConfig]):
    """Asks once, in the process of the environment."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        headers = {"Authorization": f"Bearer {secret}"}
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(headers=headers, timeout=None) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=body)
        said = answer.text if answer.is_error else ""
        return vf.ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=said)


__all__ = ["Asker", "Sorting"]
