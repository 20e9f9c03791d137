"""An inference server without a model: `python -m benchmarks.journal.stub MODEL DIGEST NUM_TOKENS RATE`.

It prints its port, serves version 0 with DIGEST, and answers every request with the same NUM_TOKENS
tokens per seed, made beforehand: RATE samples a second, or at once where RATE is 0. It runs in a process
of its own, so that its work is not counted.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

import msgspec
import numpy as np

from holdfast.protocol.inference import ServedWeights

_LETTERS = range(5, 31)  # of the tokenizer in examples/reverse_text


class _Request(msgspec.Struct):
    seeds: list[int]


class Pace:
    """Says when an engine of `rate` samples a second would be done; 0: at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._done_s = 0.0

    def done_s(self, num_samples: int) -> float:
        """Return when `num_samples` more are done, by the clock of the event loop."""
        now = asyncio.get_running_loop().time()
        self._done_s = max(now, self._done_s) + (num_samples / self._rate if self._rate else 0.0)
        return self._done_s


class Stub(asyncio.Protocol):
    """One connection. Requests come one after another; a body may come in pieces."""

    def __init__(self, model: str, digest: str, choice: bytes, pace: Pace) -> None:
        self._pace = pace
        self._pages = {
            b"/health": b"{}",
            b"/weights": msgspec.json.encode(
                ServedWeights(0, digest, model, uid=os.getuid(), boot_id="stub", owner=None)
            ),
            b"/claim": b"{}",
            b"/release": b"{}",
            b"/v1/models": msgspec.json.encode({"data": [{"id": model, "max_model_len": 1 << 20}]}),
        }
        self._choice = choice
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to answer."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer when a request is whole."""
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        if not separator or len(body) < length:
            return
        self._received = b""
        route = head.split(b" ", 2)[1]
        if route in self._pages:
            self.write(self._pages[route])
        else:
            self.generate(body)

    def generate(self, body: bytes) -> None:
        """Answer a request for a generation, now or later."""
        num_choices = len(msgspec.json.decode(body, type=_Request).seeds)
        loop, done_s = asyncio.get_running_loop(), self._pace.done_s(num_choices)
        if done_s <= loop.time():
            self.write(self._answer(num_choices))
        else:
            loop.call_at(done_s, lambda: self.write(self._answer(num_choices)))

    def write(self, page: bytes) -> None:
        """Send a good answer."""
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(page) + page
        )

    def _answer(self, num_choices: int) -> bytes:
        choices = b",".join(b'{"index":%d,%s}' % (index, self._choice) for index in range(num_choices))
        return b'{"version":0,"boot_id":"stub","choices":[' + choices + b"]}"


async def serve(model: str, digest: str, num_tokens: int, rate: float) -> None:
    """Serve until killed."""
    generator = random.Random(0)
    choice = {
        "token_ids": generator.choices(_LETTERS, k=num_tokens),
        # As engines have them: single precision, printed in full.
        "logprobs": [float(np.float32(-generator.expovariate(2))) for _ in range(num_tokens)],
        "finish_reason": "length",
        "versions": [{"version": 0, "digest": digest, "start": 0, "end": num_tokens}],
    }
    fields = msgspec.json.encode(choice)[1:-1]
    loop, pace = asyncio.get_running_loop(), Pace(rate)
    server = await loop.create_server(lambda: Stub(model, digest, fields, pace), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
