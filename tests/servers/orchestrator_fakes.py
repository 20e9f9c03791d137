"""A real HTTP server whose stand-in for a model samples by hashing prompt, seed and weights, and a trainer whose next
weights hash the last and the batch: any difference between two runs shows in every later batch."""

import asyncio
import hashlib
import inspect
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil
import pytest
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.orchestrator.main import orchestrate
from holdfast.protocol.rollouts import Batch, Rollout, encode_packed
from holdfast.run import atomic, journal
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import weights_digest
from tests.builders.checkpoint_files import commit
from tests.runs.processes import HANG_S, command_line
from tests.servers.quick_server import served

MODEL = "examples/reverse_text/base"
STOP_TOKEN = 3
_LETTERS = range(5, 31)


def sample(prompt: list[int], seed: int, *, digest: str, max_tokens: int) -> tuple[list[int], list[float]]:
    """Return token ids and log-probabilities that depend on the arguments alone; letters, then a stop token."""
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < max_tokens and STOP_TOKEN not in tokens:
        key = json.dumps([prompt, seed, digest, len(tokens)]).encode()
        number = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
        tokens.append(STOP_TOKEN if number % 10 == 0 else _LETTERS[number % len(_LETTERS)])
        logprobs.append(-(number % 997) / 100)
    return tokens, logprobs


@dataclass
class FakeEngine:
    """One inference server. Set the `lie_` and `fail_` fields, `alter` or `on_generate`, to misbehave. `on_generate` is
    called behind the check of the request, as if something happened while it is answered. What it awaits keeps nobody
    else waiting. `on_claim` is awaited in front of a claim, `before_update` called in front of a push and `on_update`
    behind it. `intercept` gets the number of each generation request, and may answer it in place of the engine.
    `is_away` has every request answered by what stands in front of a server that is not there. `transfers` are the
    ranks and members that it was to have; `tears_weights` has each of them break off."""

    model: str = MODEL
    version: int | None = None
    digest: str | None = None
    url: str = ""
    max_model_len: int = 2048
    token: str | None = None
    claims: int = 0
    refuse: str | None = None
    cannot_read: bool = False
    lease_s: float | None = 90.0
    lie_uid: int = 0
    lie_version: int = 0
    lie_digest: str | None = None
    lie_about_rollouts: int = 0
    admits_everything: bool = False
    boot_id: str = "first"
    owner: str | None = None
    directory: str = "node:/elsewhere"
    released: list[str] = field(default_factory=list)
    fail_requests: int = 0
    forget_weights: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    pushed: list[int] = field(default_factory=list)
    on_generate: Callable[[int], object] | None = None
    on_claim: Callable[[], Awaitable[object]] | None = None
    before_update: Callable[[], object] | None = None
    on_update: Callable[[], object] | None = None
    alter: Callable[[dict[str, Any]], None] | None = None
    intercept: Callable[[int], Response | None] | None = None
    arrived: list[float] = field(default_factory=list)
    is_away: bool = False
    num_workers: int = 1
    transfers: list[tuple[int, int]] = field(default_factory=list)
    tears_weights: bool = False

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def stand_in_front(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
            return JSONResponse({"error": "nobody there"}, 503) if self.is_away else await go_on(request)

        @app.get("/health")
        async def health() -> dict[str, str]:
            return {"status": "ok"}

        @app.get("/weights")
        async def weights() -> dict[str, Any]:
            owner = self.owner and {"run_id": self.owner, "directory": self.directory, "silent_s": 1.0}
            owner = owner and owner | {"lease_s": self.lease_s}
            served = {"version": self.version, "digest": self.digest, "model": self.model, "boot_id": self.boot_id}
            served["uid"], served["num_workers"] = os.getuid() + self.lie_uid, self.num_workers
            return served | {"owner": owner or None}

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [{"id": self.model, "max_model_len": self.max_model_len}]}

        def refused(request: Request, run_id: str) -> Response | None:
            if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
                raise HTTPException(401, "this route needs a token")
            if self.owner in (None, run_id):
                return None
            reason = {"error": "this server is owned by the run in node:/elsewhere", "code": "owned"}
            return JSONResponse(reason, 409)

        @app.post("/claim")
        async def claim(request: Request) -> Any:
            body = await request.json()
            self.claims += 1
            if self.on_claim is not None:
                await self.on_claim()
            if self.directory != body["directory"] and (refusal := refused(request, body["run_id"])):
                return refusal
            self.owner, self.directory = body["run_id"], body["directory"]
            return {}

        @app.post("/update_weights")
        async def update(request: Request) -> Any:
            body = await request.json()
            if refusal := refused(request, body["owner"]["run_id"]):
                return refusal
            if self.refuse:
                raise HTTPException(409, self.refuse)
            if self.cannot_read:
                return JSONResponse({"error": "the storage failed", "code": "unreadable"}, 507)
            if self.before_update is not None:
                self.before_update()
            transfer = body.get("transfer")
            if transfer is not None:
                self.transfers.append((transfer["first_rank"], transfer["num_members"]))
                if self.tears_weights:
                    self.version = self.digest = None
                    return JSONResponse({"error": "the weights are torn", "code": "torn"}, 503)
            # Fails where they are gone: none are taken.
            digest = self.lie_digest or (
                transfer["offer"]["digest"] if transfer else weights_digest(Path(body["path"]))
            )
            self.owner = body["owner"]["run_id"]
            self.pushed.append(body["version"])
            self.version = body["version"] + self.lie_version
            self.digest = digest
            if self.on_update is not None:
                self.on_update()
            return {"version": self.version, "digest": self.digest, "seconds": 0.0}

        @app.post("/release")
        async def release(request: Request) -> dict[str, Any]:
            self.released.append((await request.json())["run_id"])
            self.owner = None
            return {}

        @app.post("/inference/v1/generate")
        async def generate(request: Request) -> Response:
            self.arrived.append(time.monotonic())
            if self.intercept is not None and (answer := self.intercept(len(self.arrived))) is not None:
                return answer
            if self.fail_requests:
                self.fail_requests -= 1
                if self.forget_weights:
                    self.version = self.digest = None
                raise HTTPException(503, "restarting")
            if self.version is None:
                raise HTTPException(503, "no weights yet")
            body = json.loads(await request.body())
            if not self.admits_everything and body["weights_digest"] != self.digest:
                return JSONResponse({"error": "the request is for other weights", "code": "other_weights"}, 409)
            self.requests.append(body)
            if self.on_generate is not None:
                happening = self.on_generate(len(self.requests))
                if inspect.isawaitable(happening):
                    await happening
            return Response(json.dumps(self._answer(body)), media_type="application/json")

        return app

    @property
    def asked(self) -> list[tuple[tuple[int, ...], int]]:
        """Every prompt with a seed that it was asked to sample."""
        return [(tuple(body["token_ids"]), seed) for body in self.requests for seed in body["seeds"]]

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.digest is not None and self.version is not None
        version = self.version + self.lie_about_rollouts
        choices = []
        for index, seed in enumerate(body["seeds"]):
            tokens, logprobs = sample(body["token_ids"], seed, digest=self.digest, max_tokens=body["max_tokens"])
            text = "".join(chr(token + 92) for token in tokens)
            ends = [text.find(one) + len(one) for one in body["stop"] if one in text]
            tokens, logprobs = (part[: min(ends, default=None)] for part in (tokens, logprobs))
            choices.append({
                "index": index, "token_ids": tokens, "logprobs": logprobs,
                "finish_reason": "stop" if ends or tokens[-1] in body["stop_token_ids"] else "length",
                "versions": [{"version": version, "digest": self.digest, "start": 0, "end": len(tokens)}],
                "prompt_logprobs": [-1.5] * (len(body["token_ids"]) - 1) if body["prompt_logprobs"] else None,
            })  # fmt: skip
        # Completion order is up to the server; the client must go by the index.
        answer = {"choices": choices[::-1], "version": version, "boot_id": self.boot_id}
        if self.alter is not None:
            self.alter(answer)
        return answer


@contextmanager
def serving(*engines: FakeEngine) -> Iterator[None]:
    """Serve the engines on ports of their own, and fill in their `url`."""
    with ExitStack() as stack:
        for engine in engines:
            engine.url = stack.enter_context(served(engine.app()))
        yield


def publish_weights(run_dir: RunDir, version: int, content: bytes) -> None:
    """Publish `content` as the weights of `version`, again if need be, in the directory of a run."""
    if not run_dir.holds_run():
        run_dir.create()
    final = run_dir.weights_of(version)
    temporary = atomic.temporary_sibling(final)
    temporary.mkdir(parents=True)
    (temporary / "model.safetensors").write_bytes(content)
    (temporary / "config.json").write_text("{}")
    commit(temporary, "weights", version)
    if final.exists():
        atomic.remove_directory(final)
    atomic.publish_directory(temporary, final)


class FakeTrainer:
    """Publishes weights `start`, then trains on every batch: its weights are a hash of all that came before. Use as a
    context manager; a thread works until `max_steps` or the end of the context."""

    def __init__(self, run_dir: RunDir, *, start: int, max_steps: int) -> None:
        self._run_dir = run_dir
        self._start = start
        self._max_steps = max_steps
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _train(self) -> None:
        if self._start == 0:
            content = b"start"
        else:
            content = (self._run_dir.checkpoint(self._start) / "weights").read_bytes()
        publish_weights(self._run_dir, self._start, content)
        for step in range(self._start + 1, self._max_steps + 1):
            while not journal.wait_for(self._run_dir.batch(step), timeout_s=0.01):
                if self._stop.is_set():
                    return
            batch = journal.read_batch(self._run_dir, step)
            content = hashlib.sha256(content + msgspec.msgpack.encode(batch.rollouts, enc_hook=encode_packed)).digest()
            publish_weights(self._run_dir, step, content)


def commit_checkpoint(run_dir: RunDir, step: int) -> None:
    """Commit a checkpoint of `step` from the published weights and the journaled state."""
    directory = run_dir.checkpoint(step)
    (directory / "orchestrator").mkdir(parents=True)
    state = (run_dir.batch(step) / journal.STATE_NAME).read_bytes()
    (directory / "orchestrator" / journal.STATE_NAME).write_bytes(state)
    (directory / "weights").write_bytes((run_dir.weights_of(step) / "model.safetensors").read_bytes())
    commit(directory, "checkpoint", step)


def make_config(output_dir: Path, *engines: FakeEngine, **changes: Any) -> OrchestratorConfig:
    """Return a small configuration; `changes` are top-level keys, of `client` its own keys where there are engines."""
    client = {"urls": [engine.url for engine in engines], "ready_timeout_s": HANG_S, "timeout_s": HANG_S}
    policy = {"model": {"name": MODEL}, "client": client, "weights_timeout_s": HANG_S}
    tasks = {"environments": [{"id": "reverse_text"}], "problems_per_step": 3, "group_size": 4}
    sizes = {"max_steps": 8, "sampling": {"max_tokens": 24}}
    values: dict[str, Any] = {"output_dir": output_dir, **policy, **tasks, **sizes}
    client = {"client": values["client"] | changes.get("client", {})} if engines else {}
    return OrchestratorConfig.model_validate(values | changes | client)


def read_rollouts(run_dir: RunDir, steps: range) -> list[tuple[int, list[Rollout]]]:
    """Return policy version and rollouts of every batch of `steps`: what must be equal between equal runs."""
    batches: list[Batch] = [journal.read_batch(run_dir, step) for step in steps]
    return [(batch.policy_version, batch.rollouts) for batch in batches]


def run(config: OrchestratorConfig, *, start: int = 0) -> list[Batch]:
    """Run the orchestrator to its end beside a trainer that starts at `start`; return all batches."""
    run_dir = RunDir(config.output_dir)
    with FakeTrainer(run_dir, start=start, max_steps=config.max_steps):
        asyncio.run(orchestrate(config))
    return [journal.read_batch(run_dir, step) for step in run_dir.published_batches()]


def rollouts_of(
    directory: Path, *engines: FakeEngine, max_steps: int = 6, **changes: Any
) -> list[tuple[int, list[Rollout]]]:
    """Return policy version and rollouts of every batch of a whole run, for which the engines serve."""
    with serving(*engines):
        run(make_config(directory, *engines, max_steps=max_steps, **changes))
    return read_rollouts(RunDir(directory), range(1, max_steps + 1))


def resumed_of(
    directory: Path, engine: FakeEngine, *, at: int, stopped: int, max_steps: int = 8, **changes: Any
) -> list[tuple[int, list[Rollout]]]:
    """Return the same of a run that made batches up to `stopped`, and goes on from the checkpoint of step `at`."""
    rollouts_of(directory, engine, max_steps=stopped, **changes)
    commit_checkpoint(RunDir(directory), at)
    engine.requests.clear()
    with serving(engine):
        run(make_config(directory, engine, max_steps=max_steps, ckpt={"resume_step": at}, **changes), start=at)
    return read_rollouts(RunDir(directory), range(1, max_steps + 1))


def cancel_at(number: int, engine: FakeEngine, begin: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Begin something, and cancel it in the middle of request `number` of an engine."""

    async def until_then() -> None:
        work = asyncio.ensure_future(begin())
        loop = asyncio.get_running_loop()
        engine.on_generate = lambda count: count == number and loop.call_soon_threadsafe(work.cancel)
        with pytest.raises(asyncio.CancelledError):
            await work
        engine.on_generate = None

    asyncio.run(until_then())


def run_until(number: int, engine: FakeEngine, config: OrchestratorConfig) -> None:
    """Run the orchestrator beside a trainer until request `number` of an engine, in the middle of which it dies."""
    with FakeTrainer(RunDir(config.output_dir), start=0, max_steps=config.max_steps):
        cancel_at(number, engine, lambda: orchestrate(config))


def played(directory: Path, section: dict[str, Any], *, max_steps: int, **changes: Any) -> list[Batch]:
    """Return the batches of a run with one environment; nothing was sampled twice, and no worker lives on."""
    engine = FakeEngine()
    with serving(engine):
        batches = run(make_config(directory / "run", engine, environments=[section], max_steps=max_steps, **changes))
    assert len(engine.asked) == len(set(engine.asked)), "nothing is sampled twice"
    living = psutil.Process().children(recursive=True)
    assert not [one for one in living if "holdfast.orchestrator.worker" in "".join(command_line(one))]
    return batches
