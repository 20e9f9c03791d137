"""An inference server without a model, that waits for all sessions before it answers one.

`python -m benchmarks.sessions.stub MODEL DIGEST SESSIONS TOKENS CALL`: prints its port, and serves version 0 with
DIGEST. Requests are kept waiting until SESSIONS sequences wait, so that many are in flight at once, turn by turn; then
all are answered. Every answer begins with the digits of its seed, so that it can be told later whose it is, goes on
with TOKENS letters, and ends its turn, in the first one behind the call of a tool where CALL is not empty.
"""

from __future__ import annotations

import asyncio
import random
import sys

import msgspec
import numpy as np

from benchmarks.journal.stub import Pace, Stub
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.process.child import allow_many_connections

SEED_DIGITS = 19
"""Tokens with which an answer begins: a seed has 63 bits."""


class _Request(msgspec.Struct):
    token_ids: list[int]
    seeds: list[int]


class Turns:
    """Answers of one length, made beforehand but for the digits of the seed.

    Args:
        num_sessions: how many sequences must wait before they are answered.
        num_tokens: letters of a turn.
        call: text of a tool call, with which the first turn of a session ends.
    """

    def __init__(self, model: str, digest: str, *, num_sessions: int, num_tokens: int, call: str) -> None:
        tokenizer = load_tokenizer(model)
        self._num_sessions = num_sessions
        self._digits = {digit: b"%d," % tokenizer.encode(digit)[0] for digit in "0123456789"}
        self._call = tokenizer.encode(call)
        (self._end,) = tokenizer.stop_token_ids
        generator = random.Random(0)
        letters = generator.choices(tokenizer.encode("abcdefghijklmnopqrstuvwxyz"), k=num_tokens)
        self._answers = {
            calls: _fields([*letters, *(self._call if calls else []), self._end], digest, generator)
            for calls in (False, True)
        }
        self._waiting: list[tuple[Asked, _Request]] = []
        self._num_waiting = 0

    def wait(self, connection: Asked, request: _Request) -> None:
        """Answer a request as soon as as many sequences wait as there are sessions."""
        self._waiting.append((connection, request))
        self._num_waiting += len(request.seeds)
        if self._num_waiting < self._num_sessions:
            return
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        for waiter, asked in waiting:
            waiter.write(self._answer(asked))

    def _answer(self, request: _Request) -> bytes:
        # Only the prompt of a session's first turn has no end of a turn of the policy's in it: it has that of the user.
        calls = bool(self._call) and request.token_ids.count(self._end) == 1
        before, after = self._answers[calls]
        choices = b",".join(
            b'{"index":%d,%s%s%s' % (index, before, b"".join(self._digits[one] for one in str(seed).zfill(19)), after)
            for index, seed in enumerate(request.seeds)
        )
        return b'{"version":0,"boot_id":"stub","choices":[' + choices + b"]}"


class Asked(Stub):
    """One connection."""

    def __init__(self, model: str, digest: str, turns: Turns) -> None:
        super().__init__(model, digest, b"", Pace(0.0))
        self._turns = turns

    def generate(self, body: bytes) -> None:
        """Have a request wait for the others."""
        self._turns.wait(self, msgspec.json.decode(body, type=_Request))


def _fields(token_ids: list[int], digest: str, generator: random.Random) -> tuple[bytes, bytes]:
    """Return what stands before and behind the digits of the seed in the fields of a choice, but for its index."""
    count = SEED_DIGITS + len(token_ids)
    rest = {
        # As engines have them: single precision, printed in full.
        "logprobs": [float(np.float32(-generator.expovariate(2))) for _ in range(count)],
        "finish_reason": "stop",
        "versions": [{"version": 0, "digest": digest, "start": 0, "end": count}],
    }
    ids = b",".join(b"%d" % token_id for token_id in token_ids)
    return b'"token_ids":[', ids + b"]," + msgspec.json.encode(rest)[1:]


async def serve(model: str, digest: str, *, num_sessions: int, num_tokens: int, call: str) -> None:
    """Serve until killed."""
    allow_many_connections()
    turns = Turns(model, digest, num_sessions=num_sessions, num_tokens=num_tokens, call=call)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Asked(model, digest, turns), "127.0.0.1", 0, backlog=2048)  # as uvicorn
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    model, digest, sessions, tokens, call = sys.argv[1:]
    asyncio.run(serve(model, digest, num_sessions=int(sessions), num_tokens=int(tokens), call=call))
