"""A judge: a real HTTP server that speaks OpenAI's chat protocol, in a thread, or as a program of its own, `python -m
tests.servers.judge PORT ASKED.jsonl`, which scores by a hash of what it is asked, and writes a line before and behind
each answer."""

import asyncio
import hashlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from tests.servers.quick_server import served

Body = dict[str, Any]


def completion(text: str, finish_reason: str = "stop") -> Response:
    message = {"role": "assistant", "content": text}
    return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]})


def score_of(body: Body) -> str:
    """Return a number from 0 to 10 that depends on the messages alone."""
    return str(hashlib.sha256(json.dumps(body["messages"]).encode()).digest()[0] % 11)


@dataclass
class FakeJudge:
    """A judge in a thread. `answer`: what a request is answered with; unset: the number of the request, so that none is
    answered alike."""

    answer: Callable[[Body], Awaitable[Response]] | None = None
    asked: list[Body] = field(default_factory=list)  # the bodies, in order
    headers: list[dict[str, str]] = field(default_factory=list)  # of the requests
    url: str = ""  # base URL, once it serves
    most_at_once: int = 0  # requests that were there together
    _num_there: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            self._num_there += 1
            self.most_at_once = max(self.most_at_once, self._num_there)
            try:
                body = await request.json()
                self.asked.append(body)
                self.headers.append(dict(request.headers))
                if self.answer is not None:
                    return await self.answer(body)
                return completion(f"Score: {len(self.asked)}")
            finally:
                self._num_there -= 1

        return app

    @property
    def questions(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.asked]


@contextmanager
def judge_serving(judge: FakeJudge) -> Iterator[FakeJudge]:
    """Serve it on a port of its own, and fill in its `url`."""
    with served(judge.app(), at_once=True) as url:
        judge.url = f"{url}/v1"
        yield judge


def _main(port: int, asked: Path) -> None:
    with open(asked, "a", buffering=1) as log:

        async def answer(body: Body) -> Response:
            question = body["messages"][-1]["content"]
            log.write(json.dumps(["asked", question]) + "\n")
            await asyncio.sleep(0.02)  # a judge takes its time
            log.write(json.dumps(["answered", question]) + "\n")
            return completion(score_of(body))

        uvicorn.run(FakeJudge(answer).app(), host="127.0.0.1", port=port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
