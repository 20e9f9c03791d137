"""Who may use which routes of the inference server, and how long what they send may be."""

import asyncio
import resource
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from holdfast.errors import ConfigError
from holdfast.inference.access import ADMIN, Gate, RequestError, asks_the_model, decode_body
from holdfast.process.child import allow_connections, allow_many_connections
from holdfast.protocol.inference import GenerateRequest, UpdateRequest, largest_request

MOST = 1000
JSON = {"Content-Type": "application/json"}


def ask(method: str, path: str, *, local: bool = True, token: str | None = None, **request: Any) -> httpx.Response:
    """Return the answer of a server that answers every request which comes through with its length."""

    async def everything(request: Request) -> JSONResponse:
        return JSONResponse({"bytes": len(await request.body())})

    app = Starlette(routes=[Route("/{path:path}", everything, methods=["GET", "POST", "PUT", "DELETE"])])
    gate = Gate(app, local=local, admin_token=token, most_body_bytes=MOST)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, **request)

    return asyncio.run(send())


def test_a_form_of_another_site_replaces_no_weights() -> None:
    """What a browser sends for a page without asking first: a simple request."""
    content = b'{"path": "/weights", "version": 3}'
    for path in ADMIN:
        page = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
        assert ask("POST", path, content=content, headers=page).status_code == 403
        assert ask("POST", path, content=content, headers={"Sec-Fetch-Site": "cross-site", **JSON}).status_code == 403
        assert ask("POST", path, content=content, headers={"Host": "evil.example", **JSON}).status_code == 403
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            assert ask("POST", path, content=content, headers={"Content-Type": kind}).status_code == 415
        kind = {"Content-Type": "application/json; charset=utf-8"}
        assert ask("POST", path, content=content, headers=kind).json() == {"bytes": len(content)}
    assert ask("POST", "/release").status_code == 200, "nothing to take for something else"


def test_a_refusal_has_the_form_of_its_route() -> None:
    """OpenAI's clients read `error.message`, and ours a text."""
    for path, status in (("/v1/chat/completions", 403), ("/inference/v1/generate", 403)):
        answer = ask("POST", path, json={}, headers={"Host": "evil.example"})
        said = answer.json()["error"]
        assert answer.status_code == status and isinstance(said, dict) is (is_openai := path.startswith("/v1/"))
        assert not is_openai or (said["code"] == 403 and "for this machine alone" in said["message"])


def test_what_the_weights_decide_is_told_from_what_they_do_not() -> None:
    """Before the first weights the former is refused: the model holds whatever the engine began with."""
    asking = ["/v1/completions", "/v1/chat/completions", "/v2/embed", "/invocations", "/score", "/generative_scoring"]
    assert all(asks_the_model("POST", path) for path in asking)
    others = ["/tokenize", "/detokenize", "/ping", "/inference/v1/generate", "/update_weights", "/v1/load_lora_adapter"]
    assert not any(asks_the_model("POST", path) for path in others) and not asks_the_model("GET", "/v1/models")
    for path in (*asking, *others[:4]):
        assert ask("POST", path).status_code == 200, path


OWN_NAMES = ("127.0.0.1:8000", "127.1.2.3", "localhost:8000", "LocalHost", "[::1]:8000")
OTHERS = ("evil.example", "127.0.0.1.evil.example", "evil.example:127", "[::1", "localhost@evil.example")


@pytest.mark.parametrize("host", [*OWN_NAMES, *OTHERS])
def test_a_server_for_this_machine_answers_to_its_names_alone(host: str) -> None:
    """A page whose own name was given the address 127.0.0.1 is of the same origin as the server."""
    for method, path in (("GET", "/weights"), ("POST", "/v1/completions"), ("POST", "/update_weights")):
        assert ask(method, path, headers={"Host": host}).status_code == (200 if host in OWN_NAMES else 403)
        assert ask(method, path, headers={"Host": host}, local=False).status_code == 200


@pytest.mark.parametrize(("kind", "host", "comes_through"), [
    ("websocket", b"evil.example", False),
    ("websocket", b"localhost:8000", True),
    ("websocket", None, True),
    ("http", None, True),  # HTTP/1.0; no browser leaves it out
    ("lifespan", None, True),
])  # fmt: skip
def test_a_connection_of_any_kind_is_judged_by_its_host(kind: str, host: bytes | None, comes_through: bool) -> None:
    came, sent = [], []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        came.append(scope["type"])

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    scope = {"type": kind, "method": "GET", "path": "/", "headers": [] if host is None else [(b"host", host)]}
    asyncio.run(Gate(app, local=True, admin_token=None, most_body_bytes=MOST)(scope, receive, send))
    assert came == ([kind] if comes_through else [])
    assert sent == ([] if comes_through else [{"type": "websocket.close", "code": 1008}])


def test_a_token_is_asked_for_wherever_one_is_set() -> None:
    for local in (True, False):
        for path in ADMIN:
            for given in (None, "S3CRE", "S3CRETS", "s3cret"):
                headers = {"Authorization": f"Bearer {given}"} if given else {}
                assert ask("POST", path, token="S3CRET", local=local, headers=headers).status_code == 401
            good = {"Authorization": "Bearer S3CRET"}
            assert ask("POST", path, token="S3CRET", local=local, headers=good).status_code == 200
        assert ask("POST", "/inference/v1/generate", token="S3CRET", local=local).status_code == 200
        assert ask("GET", "/metrics", token="S3CRET", local=local).status_code == 200


@pytest.mark.parametrize("path", [
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/abort_requests", "/inference/v1/abort_requests", "/sleep",
    "/collective_rpc", "/start_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/update_weight_version", "/update_weights/", "//update_weights", "/fault_tolerance/recover",
])  # fmt: skip
def test_what_else_vllm_can_change_is_no_route_of_this_server(path: str) -> None:
    assert ask("POST", path, headers=JSON, token="S3CRET").status_code == 404
    assert ask("PUT", path, headers={"Authorization": "Bearer S3CRET"}, token="S3CRET").status_code == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/responses/x/cancel"])
def test_what_only_computes_is_open(path: str) -> None:
    assert ask("POST", path, token="S3CRET", headers={"Origin": "http://a.page"}).status_code == 200


def test_bodies_have_a_bound() -> None:
    async def pieces(number: int) -> AsyncIterator[bytes]:
        for _ in range(number):
            yield b"x" * 100

    for path, headers in (("/v1/completions", {}), ("/update_weights", JSON)):
        assert ask("POST", path, content=b"x" * MOST, headers=headers).json() == {"bytes": MOST}
        assert ask("POST", path, content=b"x" * (MOST + 1), headers=headers).status_code == 413
        assert ask("POST", path, content=pieces(10), headers=headers).json() == {"bytes": MOST}
        assert ask("POST", path, content=pieces(11), headers=headers).status_code == 413
    assert largest_request(2048) == 4 * 2**20 + 64 * 2048
    ids = 8 * 1_000_000  # as JSON, of a model for a million tokens
    assert ids < largest_request(1_000_000) < 100_000_000


@pytest.mark.parametrize("body", [
    b'{"token_ids": "x"', b'{"token_ids": "x", "seeds": "\xff"}', b"\xff",
    b'{"token_ids": [1], "seeds": [1], "max_tokens": 1, "temperature": 1e999}',
    b'{"token_ids": [%s], "seeds": [1], "max_tokens": 1}' % (b"1" * 5000),
    b'{"token_ids": %s1%s}' % (b"[" * 100_000, b"]" * 100_000),
    b'{"unknown": %s1%s}' % (b"[" * 100_000, b"]" * 100_000), b'{"unknown": 1, "token_ids": ', b"[1]", b"",
], ids=range(10))  # fmt: skip
def test_a_body_that_cannot_be_right_is_told_so(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode_body(body, GenerateRequest)
    assert caught.value.status == 400 and len(caught.value.reason) < 700


@pytest.mark.parametrize("version", [-1, 2**63, 2**64, 10**30])
def test_a_version_is_a_number_that_all_parts_can_hold(version: int) -> None:
    with pytest.raises(RequestError) as caught:
        decode_body(b'{"path": "x", "version": %d}' % version, UpdateRequest)
    assert caught.value.status == 400


def test_open_files_are_counted_before_they_are_opened() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        allow_connections(100, key="client.max_concurrency")
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256
        allow_connections(500, key="client.max_concurrency")
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 628
        if limits[1] != resource.RLIM_INFINITY:
            with pytest.raises(ConfigError, match=r"client.max_concurrency\) need \d+ open files.* Lower"):
                allow_connections(limits[1], key="client.max_concurrency")
        for _ in range(2):  # a server takes as many as it may need
            allow_many_connections()
            raised, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert 628 < raised <= hard == limits[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
