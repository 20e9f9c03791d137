"""Letters to be reversed, in two turns, as an environment of verifiers; its interpreter may lack what tests have."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]


class Letters(vf.TaskData):
    answer: str


class Settings(vf.TasksetConfig):
    num_letters: int = 26
    fault: str = ""


class Reverse(vf.Task[Letters]):
    """Scored by the last letters that are right."""

    @vf.reward
    async def right(self, task: Letters, trace: Any) -> float:
        """Return the share of letters that stand where they should."""
        said = trace.last_reply.strip()
        return sum(one == other for one, other in zip(said, task.answer, strict=False)) / len(task.answer)

    @vf.metric
    async def length(self, trace: Any) -> float:
        return float(len(trace.last_reply))


class Reversing(vf.Taskset[Reverse, Settings]):
    def load(self) -> Iterable[Reverse]:
        if self.config.fault == "raises":
            raise FileNotFoundError("no such data")
        if self.config.fault == "exits":
            sys.exit("no key")
        for first, second in itertools.pairwise("abcdefghijklmnopqrstuvwxyz"[: self.config.num_letters]):
            yield Reverse(Letters(prompt=first + second, answer=second + first), self.config.task)

    @classmethod
    def toolsets(cls, config: Settings) -> list[Any]:
        if config.fault == "starts":
            raise RuntimeError("no port")
        return []


class AskerConfig(vf.HarnessConfig):
    """Which faults there are, by the prompt of the task."""

    faults: dict[str, str] = {}
    marks: str = ""


class Asker(vf.Harness[AskerConfig]):
    """Asks twice, in the process of the environment; the second answer is streamed."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        fault = self.config.faults.get(data.prompt)
        chat: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        more = {"temperature": 0.5} if fault == "temperature" else {}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=None, verify=False) as client:
            for question in ("again", None):
                body = {"model": ctx.model, "messages": chat, "stream": question is None, **more}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.is_error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                if question is not None:
                    chat.append(answer.json()["choices"][0]["message"])
                    chat.append({"role": "user", "content": question * (400 if fault == "full" else 1)})
                    await self._go_wrong(fault)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _go_wrong(self, fault: str | None) -> None:
        if fault == "hangs":
            await asyncio.Event().wait()
        if fault == "raises":
            raise KeyError("no")
        mark = Path(self.config.marks) / "killed"
        if fault == "always exits":
            os._exit(7)
        if fault == "killed" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


__all__ = ["Asker", "Reversing"]
