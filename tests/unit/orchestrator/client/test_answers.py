"""Answers that no engine can have sampled, and servers that are busy, fail or never end: refused, or waited for."""

import asyncio
import gzip
import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse

from holdfast.config.load import parse_command_line
from holdfast.config.orchestrator import ClientConfig, OrchestratorConfig
from holdfast.errors import ConfigError, DataError, InferenceError
from holdfast.orchestrator.client import pool
from holdfast.orchestrator.client.http import _RETRY_FAILING_S, Unavailable, load_vocab_size
from holdfast.orchestrator.client.pool import FIRST_BACKOFF_S
from holdfast.protocol.rollouts import fault_of_logprobs, vocab_size_in
from holdfast.run.record_log import RecordLog, read_records
from holdfast.run.run_dir import RunDir
from tests.servers.orchestrator_fakes import MODEL, STOP_TOKEN, FakeEngine, make_config, serving
from tests.servers.orchestrator_fakes import run as orchestrated

VOCAB_SIZE = json.loads((Path(MODEL) / "config.json").read_text())["vocab_size"]
Alter = Callable[[dict[str, Any]], None]


def one(field: str, value: Any, place: int = 0) -> Alter:
    """Put `value` at a place of a list of one choice."""

    def alter(answer: dict[str, Any]) -> None:
        answer["choices"][0][field][place] = value

    return alter


def whole(field: str, make: Callable[[dict[str, Any]], Any]) -> Alter:
    """Replace a field of one choice by what `make` makes of the choice."""

    def alter(answer: dict[str, Any]) -> None:
        answer["choices"][0][field] = make(answer["choices"][0])

    return alter


def spans(*borders: tuple[int, int]) -> Alter:
    """Give spans with these borders; negative ends count from the number of tokens."""

    def make(choice: dict[str, Any]) -> list[dict[str, Any]]:
        count = len(choice["token_ids"])
        span = choice["versions"][0]
        return [span | {"start": start, "end": end if end > 0 else count + end} for start, end in borders]

    return whole("versions", make)


def stop_inside(answer: dict[str, Any]) -> None:
    choice = max(answer["choices"], key=lambda one: len(one["token_ids"]))
    assert len(choice["token_ids"]) > 1
    choice["token_ids"][0] = STOP_TOKEN


_OTHER_REASON = {"stop": "length", "length": "stop"}


@pytest.mark.parametrize(("alter", "said"), [
    (lambda answer: answer["choices"].pop(), r"answered 4 seeds with the choices \[1, 2, 3\]"),
    (lambda answer: answer["choices"].append(answer["choices"][0]), r"the choices \[0, 1, 2, 3, 3\]"),
    (whole("logprobs", lambda one: one["logprobs"][:-1]), r"token ids with \d+ logprobs"),
    (whole("token_ids", lambda one: []), "it has 0 token ids"),
    (one("logprobs", 3.5), "logprobs holds 3.5, allowed are numbers from -1000 up to 0"),
    (one("logprobs", 1e39), "(logprobs holds inf|not Logprobs)"), (one("logprobs", True), "logprobs holds 1, allowed"),
    (one("logprobs", -1e38), "logprobs holds -1e[+]38, allowed"),
    (one("token_ids", VOCAB_SIZE), f"token_ids holds {VOCAB_SIZE}, the model has {VOCAB_SIZE} tokens"),
    (one("token_ids", -1), "token_ids holds -1, allowed are 0 and above"), (one("token_ids", 2**31), "not TokenIds"),
    (spans((0, 1), (3, 0)), "(does not name the policy version|versions holds)"),
    (spans((0, 0), (-3, 0)), "versions holds {version: 0, start: -3, end: "),
    (whole("versions", lambda one: [one["versions"][0] | {"end": len(one["token_ids"]) + 5}]), "end: "),
    (whole("versions", lambda one: [one["versions"][0] | {"version": -1}]), "version: -1"),
    (lambda answer: answer.update(version=99), "says that version 99 answered, and its choices are of version 0"),
    (whole("finish_reason", lambda one: "banana"), "finish_reason is 'banana', allowed are stop and length"),
    (whole("finish_reason", lambda one: _OTHER_REASON[one["finish_reason"]]), "finish_reason is '(stop|length)' a"),
    (stop_inside, "stop tokens (are )?at [[]0"),
])  # fmt: skip
def test_what_cannot_have_been_sampled_is_refused_and_not_kept(tmp_path: Path, alter: Alter, said: str) -> None:
    engine, run_dir = FakeEngine(alter=alter), RunDir(tmp_path)
    with serving(engine), pytest.raises(InferenceError, match=said):
        orchestrated(make_config(tmp_path, engine, max_steps=1))
    assert run_dir.published_batches() == []
    assert len(read_records(run_dir.generations(1))[0]) <= 1, "the header alone"
    engine.alter = None
    with serving(engine):
        assert len(orchestrated(make_config(tmp_path, engine, max_steps=1))) == 1, "with a sound engine the run goes on"


def spoil(answer: dict[str, Any], how: str) -> None:
    """Make one answer in a log of generations what a version that checked less may have logged."""
    completion = answer["completions"][0]
    match how:
        case "id":
            completion["token_ids"] = struct.pack("<i", VOCAB_SIZE + 100) + completion["token_ids"][4:]
        case "logprob":
            completion["logprobs"] = struct.pack("<f", float("inf")) + completion["logprobs"][4:]
        case "count":
            answer["completions"].pop()
        case "type":
            completion["token_ids"] = "text"


@pytest.mark.parametrize("how", ["id", "logprob", "count", "type"])
def test_what_was_logged_wrong_is_asked_again(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = RunDir(tmp_path)
    engine = FakeEngine(intercept=lambda count: Response(status_code=400) if count == 3 else None)
    with serving(engine):
        client = {"max_concurrency": 4}  # one group at a time
        config = make_config(tmp_path, engine, max_steps=1, client=client)
        with pytest.raises(InferenceError, match="answered 400"):
            orchestrated(config)
        payloads, _ = read_records(run_dir.generations(1))
        assert len(payloads) == 3, "a header and two answers, before the third request failed"
        answer = msgspec.msgpack.decode(payloads[1])
        spoil(answer, how)
        log = RecordLog(run_dir.generations(1), valid_bytes=0)
        for payload in (payloads[0], msgspec.msgpack.encode(answer), payloads[2]):
            log.append(payload)
        log.close(wait=True)
        engine.intercept = None
        (batch,) = orchestrated(config)
    assert "1 of 2 answers cannot be right and are asked for again; the first: " in caplog.text
    assert len(engine.requests) == 2 + 2, "the answer that was wrong and the one that failed"
    assert max(token for rollout in batch.rollouts for token in rollout.token_ids) < VOCAB_SIZE


def test_the_size_of_the_vocabulary_comes_from_the_model(tmp_path: Path) -> None:
    assert load_vocab_size(MODEL) == VOCAB_SIZE
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 77}}))
    assert load_vocab_size(str(tmp_path)) == 77
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="has no vocab_size"):
        load_vocab_size(str(tmp_path))
    with pytest.raises(ConfigError, match="is neither a directory nor a model on the hub"):
        load_vocab_size(str(tmp_path / "nothing" / "there"))


def test_a_config_that_cannot_be_read_and_numbers_whose_sum_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="config.json cannot be read: .*No such file"):
        vocab_size_in(tmp_path / "config.json")
    assert fault_of_logprobs("logprobs", [-1e308, -1e308]) is None
    said = fault_of_logprobs("logprobs", [-1e308, math.nan])
    assert said == "logprobs holds nan, allowed are finite numbers up to 0"


Intercept = Callable[[int], Response | None]


def run(directory: Path, intercept: Intercept, *, ready_timeout_s: float = 60) -> FakeEngine:
    """Make one batch of one group with an engine of which `intercept` answers some requests, and return the engine."""
    engine = FakeEngine(intercept=intercept)
    with serving(engine):
        client = {"ready_timeout_s": ready_timeout_s}
        orchestrated(make_config(directory, engine, max_steps=1, problems_per_step=1, client=client))
    assert RunDir(directory).published_batches() == [1]
    return engine


def test_a_busy_server_is_asked_again_with_growing_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six failures are more than any number of attempts that a fast loop had."""
    monkeypatch.setattr(pool, "FIRST_BACKOFF_S", 0.02)
    statuses = [429, 500, 502, 503, 504, 429]
    engine = run(tmp_path, lambda count: Response(status_code=statuses[count - 1]) if count <= 6 else None)
    pauses = [later - earlier for earlier, later in zip(engine.arrived, engine.arrived[1:], strict=False)]
    assert len(pauses) == 6 and all(pause >= 0.02 * 2**number for number, pause in enumerate(pauses))


@pytest.mark.clock
def test_the_pause_a_server_asks_for_is_kept_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FIRST_BACKOFF_S", FIRST_BACKOFF_S)
    monkeypatch.setattr(pool, "_LONGEST_PAUSE_S", 1.5)
    values = {1: "1", 2: "Fri, 31 Dec 2199 23:59:59 GMT", 3: "whenever"}

    def busy(count: int) -> Response | None:
        return Response(status_code=503, headers={"Retry-After": values[count]}) if count in values else None

    engine = run(tmp_path, busy)
    first, second, third = (later - earlier for earlier, later in zip(engine.arrived, engine.arrived[1:], strict=False))
    assert first >= 1.0 and second >= 1.5 and third >= 0.4


@pytest.mark.parametrize(("failure", "pauses", "over_s"), [
    (Unavailable("busy"), [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5], 900),
    (Unavailable("busy", retry_after_s=7), [7] * 9, 900),
    (Unavailable("busy", retry_after_s=3600), [60] * 9, 900),
    (Unavailable("fails", retry_for_s=_RETRY_FAILING_S), [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5], 120),
], ids=["busy", "asks for a pause", "asks for a long one", "500"])  # fmt: skip
def test_the_pauses_and_their_end_are_those_of_the_documentation(
    monkeypatch: pytest.MonkeyPatch, failure: Unavailable, pauses: list[float], over_s: float
) -> None:
    now, slept = 1000.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    monkeypatch.setattr(pool, "FIRST_BACKOFF_S", FIRST_BACKOFF_S)
    monkeypatch.setattr(pool.asyncio, "sleep", sleep)
    monkeypatch.setattr(pool, "awake_s", lambda: now)
    limit_s = ClientConfig().ready_timeout_s
    assert limit_s == 900

    async def fail() -> None:
        asked = pool.RetryPolicy(limit_s, key="client.ready_timeout_s")
        while True:
            asked.count(failure, url="http://host")
            await asked.pause(failure)

    with pytest.raises(InferenceError, match="was lost"):
        asyncio.run(fail())
    assert slept[:9] == pauses and over_s <= now - 1000 <= over_s + 60


def test_a_server_that_only_fails_ends_the_run_after_its_time(tmp_path: Path) -> None:
    said = r"was lost \d+ times in a row within \d+ s \(client\.ready_timeout_s\): .* was answered 503"
    with pytest.raises(InferenceError, match=said):
        run(tmp_path, lambda count: Response(status_code=503), ready_timeout_s=1)


def endless(count: int) -> Response:
    async def pieces() -> object:
        for _ in range(1000):  # 64 MB
            await asyncio.sleep(0)
            yield b" " * 65536

    return StreamingResponse(pieces(), media_type="application/json")  # type: ignore[arg-type]


def bomb(count: int) -> Response:
    return Response(gzip.compress(bytes(1 << 26)), headers={"Content-Encoding": "gzip"})


_NO_TEXT = b'{"boot_id": "\xff", "version": 0, "choices": []}'
_MEANINGLESS: dict[str, tuple[Intercept, str]] = {
    "endless": (endless, r"was answered with more than \d+ bytes, the most that a right answer can have"),
    "bomb": (bomb, "content encoding 'gzip', which was not asked for"),
    "no text": (lambda count: Response(_NO_TEXT), "gave an answer that is not a GenerateResponse"),
    "deep": (lambda count: Response(b'{"x": ' + b"[" * 50_000), "gave an answer that is not a GenerateResponse"),
    "no text in an error": (lambda count: Response(b"\xff\xfe", status_code=400), "was answered 400: "),
    "a list": (lambda count: Response(b'["too hot"]', status_code=400), r"was answered 400: \['too hot'\]"),
}


@pytest.mark.parametrize(("answer", "said"), _MEANINGLESS.values(), ids=_MEANINGLESS)
def test_an_answer_without_an_end_or_a_meaning_is_one_error(tmp_path: Path, answer: Intercept, said: str) -> None:
    with pytest.raises(InferenceError, match=said):
        run(tmp_path, answer)


def test_what_a_server_says_is_one_harmless_line(tmp_path: Path) -> None:
    text = "\x1b[31mred\x1b[0m\nINFO forged line\r\0 \u202e" + "x" * 5000
    with pytest.raises(InferenceError) as caught:
        run(tmp_path, lambda count: Response(text, status_code=418))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000
    assert re.search(r"answered 418: .x1b\[31mred.x1b\[0m.nINFO forged line", str(caught.value))


_NO_SERVERS = ("127.0.0.1:8000", "http://", f"http://{'a' * 70}:1", "http://[::1", "http://host/ x")


@pytest.mark.parametrize(("url", "said"), [
    *((url, "must be the URL of a server") for url in _NO_SERVERS),
    ("http://host/?a=b", "without '[?]'"),
    ("http://user:S3CRET@host", "must not hold a user name or password"),
])  # fmt: skip
def test_urls_are_checked_before_anything_starts(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClientConfig(urls=[url])
    assert ClientConfig(urls=["http://[::1]:8000", "https://host.name/behind/a/proxy"])


def test_a_password_in_a_url_is_never_repeated() -> None:
    for scheme in ("http", "ftp"):
        flags = ["--client.urls", f'["{scheme}://user:S3CRET@host"]']
        with pytest.raises(ConfigError) as caught:
            parse_command_line(OrchestratorConfig, flags)
        assert "client.urls" in str(caught.value) and "S3CRET" not in str(caught.value)
