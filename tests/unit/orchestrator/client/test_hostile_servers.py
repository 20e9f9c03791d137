"""Servers that are busy, fail, or answer without an end: waited for with growing pauses, or refused by name."""

import asyncio
import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse

from holdfast.config.orchestrator import ClientConfig
from holdfast.errors import InferenceError
from holdfast.orchestrator.client import pool
from holdfast.orchestrator.client.http import _RETRY_FAILING_S, Unavailable
from holdfast.orchestrator.client.pool import FIRST_BACKOFF_S
from holdfast.orchestrator.main import orchestrate
from holdfast.run.run_dir import RunDir
from tests.servers.orchestrator_fakes import FakeEngine, FakeTrainer, make_config, serving

Intercept = Callable[[int], Response | None]


def run(directory: Path, intercept: Intercept, *, ready_timeout_s: float = 60) -> FakeEngine:
    """Make one batch of one group with an engine of which `intercept` answers some requests, and return the engine."""
    engine = FakeEngine(intercept=intercept)
    with serving(engine), FakeTrainer(RunDir(directory), start=0, max_steps=1):
        client = {"ready_timeout_s": ready_timeout_s}
        asyncio.run(orchestrate(make_config(directory, engine, max_steps=1, problems_per_step=1, client=client)))
    assert RunDir(directory).published_batches() == [1]
    return engine


def test_a_busy_server_is_asked_again_with_growing_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six failures are more than any number of attempts that a fast loop had."""
    monkeypatch.setattr(pool, "FIRST_BACKOFF_S", 0.02)
    statuses = [429, 500, 502, 503, 504, 429]
    engine = run(tmp_path, lambda count: Response(status_code=statuses[count - 1]) if count <= 6 else None)
    pauses = [later - earlier for earlier, later in zip(engine.arrived, engine.arrived[1:], strict=False)]
    assert len(pauses) == 6
    assert all(pause >= 0.02 * 2**number for number, pause in enumerate(pauses))


@pytest.mark.clock
def test_the_pause_that_a_server_asks_for_is_kept_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "FIRST_BACKOFF_S", FIRST_BACKOFF_S)
    monkeypatch.setattr(pool, "_LONGEST_PAUSE_S", 1.5)
    values = {1: "1", 2: "Fri, 31 Dec 2199 23:59:59 GMT", 3: "whenever"}

    def busy(count: int) -> Response | None:
        return Response(status_code=503, headers={"Retry-After": values[count]}) if count in values else None

    engine = run(tmp_path, busy)
    first, second, third = (later - earlier for earlier, later in zip(engine.arrived, engine.arrived[1:], strict=False))
    assert first >= 1.0 and second >= 1.5 and third >= 0.4


@pytest.mark.parametrize(
    ("failure", "pauses", "over_s"),
    [
        (Unavailable("busy"), [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5], 900),
        (Unavailable("busy", retry_after_s=7), [7] * 9, 900),
        (Unavailable("busy", retry_after_s=3600), [60] * 9, 900),
        (Unavailable("fails", retry_for_s=_RETRY_FAILING_S), [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5], 120),
    ],
    ids=["busy", "asks for a pause", "asks for a long one", "500"],
)
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
    assert slept[:9] == pauses
    assert over_s <= now - 1000 <= over_s + 60


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


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (endless, r"was answered with more than \d+ bytes, the most that a right answer can have"),
        (bomb, "content encoding 'gzip', which was not asked for"),
        (
            lambda count: Response(b'{"boot_id": "\xff", "version": 0, "choices": []}'),
            "gave an answer that is no GenerateResponse",
        ),
        (lambda count: Response(b'{"x": ' + b"[" * 50_000), "gave an answer that is no GenerateResponse"),
        (lambda count: Response(b"\xff\xfe", status_code=400), "was answered 400: "),
        (lambda count: Response(b'["too hot"]', status_code=400), r"was answered 400: \['too hot'\]"),
    ],
    ids=["endless", "bomb", "no text", "deep", "no text in an error", "a list"],
)
def test_an_answer_without_an_end_or_a_meaning_is_one_error(tmp_path: Path, answer: Intercept, said: str) -> None:
    with pytest.raises(InferenceError, match=said):
        run(tmp_path, answer)


def test_what_a_server_says_is_one_harmless_line(tmp_path: Path) -> None:
    text = "\x1b[31mred\x1b[0m\nINFO forged line\r\0 \u202e" + "x" * 5000
    with pytest.raises(InferenceError) as caught:
        run(tmp_path, lambda count: Response(text, status_code=418))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000
    assert re.search(r"answered 418: .x1b\[31mred.x1b\[0m.nINFO forged line", str(caught.value))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "must begin with http"),
        ("http://", "must name a server"),
        ("http://[::1", "must be URLs such as"),
        ("http://host/ x", "must be URLs such as"),
        ("http://host/?a=b", "without '[?]'"),
        ("http://user:S3CRET@host", "must not hold a user name or password"),
    ],
)
def test_urls_are_checked_before_anything_starts(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClientConfig(urls=[url])
    assert ClientConfig(urls=["http://[::1]:8000", "https://host.name/behind/a/proxy"])


def test_a_password_in_a_url_is_never_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    from holdfast.config.load import parse_command_line
    from holdfast.config.orchestrator import OrchestratorConfig
    from holdfast.errors import ConfigError

    for scheme in ("http", "ftp"):
        flags = ["--client.urls", f'["{scheme}://user:S3CRET@host"]']
        with pytest.raises(ConfigError) as caught:
            parse_command_line(OrchestratorConfig, flags)
        assert "client.urls" in str(caught.value) and "S3CRET" not in str(caught.value)
