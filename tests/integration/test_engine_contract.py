"""Generation by vLLM, and by the stub engine of most runs: reproducible, exact, never silently cut, always with its
version."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from holdfast.chat.tokenizer import load_tokenizer
from tests.forking.engines import config_of, start_server
from tests.forking.popen import Engine
from tests.integration.conftest import PROMPT, Served
from tests.models.families import FAMILIES
from tests.models.families import write_model as write_family
from tests.models.families_in_rl import TOKENIZER, TOKENIZER_FILES, for_engines
from tests.models.served import greedy_tokens, reference_logprobs, truncated_logprobs, write_model
from tests.runs.processes import HANG_S, wait_until

MAX_LEN = 256
CUT = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), seed=0, tied=True)


def _served(engine: Engine, model: Path, directory: Path, **settings: Any) -> Served:
    config = config_of(model, max_len=MAX_LEN, **settings)
    return Served(start_server(engine, config, directory / "inference.log").wait_ready())


@pytest.fixture(scope="module")
def server(engine: Engine, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with _served(engine, model, tmp_path_factory.mktemp("log")) as server:
        yield server


@pytest.mark.parametrize("cut", [{}, CUT], ids=str)
def test_seeds_fix_tokens_and_logprobs_alone_in_batches_and_across_restarts(
    server: Served, engine: Engine, model: Path, tmp_path: Path, cut: dict[str, float]
) -> None:
    seeds = [3, 1, 2**40, 7, 1]
    alone = [server.choices(seeds=[seed], **cut)[0] for seed in seeds]
    assert len({tuple(choice["token_ids"]) for choice in alone}) == 4 and alone[1] == alone[4]
    in_a_crowd = _in_a_crowd(server, seeds, **cut)
    with _served(engine, model, tmp_path) as other:
        restarted = other.choices(seeds=seeds, **cut)
    for choices in (in_a_crowd, restarted):
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4]
        for expected, choice in zip(alone, choices, strict=True):
            assert choice["token_ids"] == expected["token_ids"] and choice["logprobs"] == expected["logprobs"]


def _in_a_crowd(server: Served, seeds: list[int], **fields: Any) -> list[dict[str, Any]]:
    """Return the answers of these seeds among 48 others."""

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.handle.url, timeout=HANG_S) as client:
            others = [{"token_ids": [9 + i, 20, 30], "seeds": [i, 100 + i], "max_tokens": 30} for i in range(24)]
            bodies = [*others[:12], {"token_ids": PROMPT, "seeds": seeds, "max_tokens": 20} | fields, *others[12:]]
            return await asyncio.gather(*(client.post("/inference/v1/generate", json=body) for body in bodies))

    return asyncio.run(ask_all())[12].json()["choices"]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("threads", "more", "has_experts"),
    [(1, {}, False), (2, {}, False), (2, {"dtype": "bfloat16", "fp32_lm_head": True}, False), (2, {}, True)],
    ids=["1", "2", "float32 head", "experts"],
)
def test_a_wide_model_gives_an_answer_the_same_bits_alone_and_in_batches(
    tmp_path: Path, threads: int, more: dict[str, Any], has_experts: bool
) -> None:
    """oneDNN adds up more than 1,024 products of a row that is alone in another order, PyTorch those of a few rows."""
    directory = tmp_path / "model"
    model = _write_experts(directory) if has_experts else write_model(directory, seed=0, tied=True, width=2304)
    config = config_of(model, max_len=MAX_LEN, **more)
    config.engine.threads = threads
    with Served(start_server("vllm", config, tmp_path / "inference.log").wait_ready()) as server:
        seeds = [3, 1, 2**40]
        alone = [server.choices(seeds=[seed])[0] for seed in seeds]
        crowd = _in_a_crowd(server, seeds)
    is_emulated = "dtype" in more and not torch.cpu._is_avx512_bf16_supported()
    said = "WARNING: this CPU has no instructions for bfloat16" in (tmp_path / "inference.log").read_text()
    assert said == is_emulated
    if is_emulated:  # the bits differ there
        return
    for expected, choice in zip(alone, crowd, strict=True):
        assert (choice["token_ids"], choice["logprobs"]) == (expected["token_ids"], expected["logprobs"])


def _write_experts(directory: Path) -> Path:
    """Write a Qwen3-MoE with wide experts."""
    family = for_engines(next(family for family in FAMILIES if family.name == "qwen3_moe"))
    write_family(replace(family, fields=family.fields | {"moe_intermediate_size": 2304}), directory, seed=1)
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, directory)
    return directory


_COMPILED = """
import torch
from holdfast.inference.worker import _in_sixteens, _never_one_row

multiplied = _never_one_row(lambda _, x, bias: x * x.shape[0] + bias)
options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}  # as vLLM
zeros = torch.zeros(3)
compiled = torch.compile(lambda x: multiplied(None, x, zeros), backend="eager", fullgraph=True, options=options)
many, one = torch.ones(20, 3), torch.ones(1, 3)
torch._dynamo.mark_dynamic(many, 0)
compiled(many)
assert compiled(one).tolist() == multiplied(None, one, zeros).tolist() == [[2.0] * 3]

filled = _in_sixteens(lambda x, weight, bias: x * x.shape[0])
compiled = torch.compile(lambda x: filled(x, zeros), backend="eager", fullgraph=True, options=options)
assert compiled(many).tolist() == filled(many, zeros).tolist() == [[32.0] * 3] * 20
assert compiled(one).tolist() == filled(one, zeros).tolist() == [[16.0] * 3]
"""


@pytest.mark.engine
def test_no_product_gets_one_row_in_compiled_engines_either() -> None:
    """vLLM traces a graph once, with several rows, and takes it for one row as well."""
    # Marks of statements that ran break graphs.
    plain = {name: value for name, value in os.environ.items() if name != "COVERAGE_MARKS"}
    done = subprocess.run([sys.executable, "-c", _COMPILED], env=plain, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_logprobs_are_of_the_tempered_and_truncated_distribution(server: Served, model: Path) -> None:
    whole = {"temperature": 1.0, "top_p": 1.0, "top_k": 128, "min_p": 0.0}
    tempered = ({"temperature": temperature} for temperature in (0.3, 0.7, 1.0, 2.0))
    for cut in (*tempered, {"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.2}, CUT):
        for choice in server.choices(seeds=[1, 2, 3], **cut):
            expected = truncated_logprobs(model, PROMPT, choice["token_ids"], **(whole | cut))  # type: ignore[arg-type]
            assert choice["logprobs"] == pytest.approx(expected, abs=1e-4), cut


@pytest.mark.engine
@pytest.mark.parametrize("fp32_lm_head", [False, True])
def test_a_float32_head_rounds_no_logit(model: Path, tmp_path: Path, fp32_lm_head: bool) -> None:
    """Differences of log-probabilities are those of logits: of bfloat16 ones, multiples of a power of two."""
    with _served("vllm", model, tmp_path, dtype="bfloat16", fp32_lm_head=fp32_lm_head) as server:
        choices = server.choices(seeds=list(range(200)), max_tokens=1)
    first, *others = {choice["token_ids"][0]: choice["logprobs"][0] for choice in choices}.values()
    assert len(others) >= 5
    steps = [(other - first) * 2**12 for other in others]
    share = sum(abs(step - round(step)) < 0.01 for step in steps) / len(steps)
    assert share < 0.2 if fp32_lm_head else share > 0.9


def test_temperature_zero_takes_the_likeliest_token(server: Served, model: Path) -> None:
    one, other = server.choices(seeds=[1, 2], temperature=0, max_tokens=8)
    assert one["token_ids"] == other["token_ids"] == greedy_tokens(model, PROMPT, 8)
    assert one["logprobs"] == pytest.approx(reference_logprobs(model, PROMPT, one["token_ids"]), abs=1e-4)


def test_stop_token_ends_a_choice_and_is_part_of_it(server: Served) -> None:
    free = server.choices(seeds=[4])[0]
    stop = free["token_ids"][5]
    first = free["token_ids"].index(stop)
    stopped = server.choices(seeds=[4], stop_token_ids=[stop])[0]
    assert stopped["token_ids"] == free["token_ids"][: first + 1]
    assert stopped["logprobs"] == free["logprobs"][: first + 1]
    assert (free["finish_reason"], stopped["finish_reason"]) == ("length", "stop")
    digest = server.weights()["digest"]
    assert stopped["versions"] == [{"version": 0, "digest": digest, "start": 0, "end": first + 1}]


def test_the_token_that_completes_a_stop_text_ends_a_choice_and_is_part_of_it(server: Served, model: Path) -> None:
    decode = load_tokenizer(str(model)).decode
    free = server.choices(seeds=[4])[0]
    stop = decode(free["token_ids"][4:7], skip_special_tokens=False)
    texts = [decode(free["token_ids"][:end], skip_special_tokens=False) for end in range(21)]
    end = next(end for end, text in enumerate(texts) if stop in text)
    stopped, other = server.choices(seeds=[4, 4], stop=["never said", stop])
    assert stopped["token_ids"] == free["token_ids"][:end] == other["token_ids"] and 0 < end <= 7
    assert stopped["logprobs"] == free["logprobs"][:end]
    assert (stopped["finish_reason"], stopped["versions"][-1]["end"]) == ("stop", end)
    assert server.choices(seeds=[4], stop=["never said"])[0] == free


def test_logprobs_of_the_prompt_are_those_of_the_model(server: Served, model: Path) -> None:
    """Whatever is sampled behind it: at temperature 1, and of all tokens."""
    expected = reference_logprobs(model, PROMPT[:1], PROMPT[1:])
    for choice in server.choices(seeds=[1, 2], max_tokens=1, prompt_logprobs=True, **CUT):
        assert choice["prompt_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert server.choices()[0]["prompt_logprobs"] is None


def test_only_the_given_tokens_stop(server: Served) -> None:
    eos = 3
    choices = server.choices(seeds=list(range(64)), temperature=2.0, max_tokens=60)
    assert any(eos in choice["token_ids"][:-1] for choice in choices)
    assert all(len(choice["token_ids"]) == 60 for choice in choices)


@pytest.mark.parametrize(("fields", "reason"), [
    ({"min_tokens": 5}, "unknown field `min_tokens`"),
    ({"max_tokens": MAX_LEN - len(PROMPT) + 1}, f"exceed the model's length of {MAX_LEN}"),
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [5, 128]}, "token_ids holds 128, the vocabulary has 128 tokens"),
    ({"token_ids": [-1]}, "token_ids"), ({"token_ids": "hello"}, "token_ids"), ({"seeds": []}, "seeds"),
    ({"seeds": [-1]}, "seeds"), ({"max_tokens": 0}, "max_tokens"), ({"temperature": -0.5}, "temperature"),
    ({"temperature": 0.001}, "temperature is 0.001"), ({"temperature": 2.5}, "temperature is 2.5"),
    ({"top_p": 0.0}, "top_p"), ({"top_p": 1.01}, "top_p"), ({"top_k": -1}, "top_k"), ({"top_k": 2.5}, "top_k"),
    ({"top_k": 2**40}, "top_k"), ({"min_p": 1.5}, "min_p"),
    ({"stop_token_ids": [500]}, "stop_token_ids holds 500"), ({"stop": [""]}, "stop"), ({"stop": "text"}, "stop"),
])  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused(server: Served, fields: dict[str, Any], reason: str) -> None:
    response = server.ask(**fields)
    assert response.status_code == 400 and reason in response.json()["error"]
    assert response.headers["x-policy-version"] == "0"


def test_the_longest_possible_request_is_served_whole(server: Served) -> None:
    choice = server.choices(max_tokens=MAX_LEN - len(PROMPT))[0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]) == MAX_LEN - len(PROMPT)


@pytest.mark.engine
def test_openai_routes_answer_with_the_version_a_name_and_tools(model: Path, tmp_path: Path) -> None:
    calls = shutil.copytree(model, tmp_path / "calls tools")
    template = (calls / "chat_template.jinja").read_text()
    (calls / "chat_template.jinja").write_text(template + "{% if tools %}<tool_call>{{ tools[0] }}{% endif %}")
    settings = json.loads((calls / "tokenizer_config.json").read_text())
    (calls / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|pad|>"}))
    (calls / "generation_config.json").write_text("{}")  # neither knows how the template ends a turn
    with _served("vllm", calls, tmp_path, server={"model_name": "mine"}) as server:
        _check_openai_routes(server.http, "mine")
        assert server.weights()["model"] == str(calls), "runs go by the model itself"
    assert f'ready: {server.handle.url}/v1, model "mine", tools by hermes\n' in server.handle.log()


def _check_openai_routes(http: httpx.Client, name: str) -> None:
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    chat = {"model": name, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4, "tools": [add]}
    text = {"model": name, "prompt": "abc", "max_tokens": 4, "seed": 1}
    answers = [
        http.post("/v1/chat/completions", json=chat), http.post("/v1/completions", json=text), http.get("/v1/models"),
    ]  # fmt: skip
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-policy-version"] == "0"
    assert answers[0].json()["usage"]["completion_tokens"] == 4
    end = {"logit_bias": {str(load_tokenizer(str(TOKENIZER)).encode("<|end|>")[0]): 100}}
    assert http.post("/v1/chat/completions", json=chat | end).json()["usage"]["completion_tokens"] == 1
    assert answers[2].json()["data"][0]["id"] == name
    assert http.post("/v1/completions", json=text | {"model": "another"}).status_code == 404


_ENDS = 3
_LIKELY = {"logit_bias": {"6": 100, "7": 100}, "temperature": 0}
# Fields of vLLM's routes, and what holds for ids, text and number of the choices of 8 tokens; 5 and 6 are a and b.
_FIELDS: list[tuple[dict[str, Any], Callable[[list[int], str, int], bool]]] = [
    ({"n": 3, "temperature": 0.5}, lambda _ids, _text, number: number == 3),
    ({"stop": ["x", "aab"], "allowed_token_ids": [5, 6]}, lambda _ids, text, _number: "aab" not in text),
    ({"stop": "aa", "logit_bias": {"5": 100}}, lambda ids, text, _number: (ids, text) == ([5, 5], "")),
    ({"stop_token_ids": [5], "logit_bias": {"5": 100}}, lambda ids, _text, _number: ids == [5]),
    ({"logit_bias": {"5": 100}}, lambda ids, _text, _number: ids == [5] * 8),
    ({"logit_bias": {str(_ENDS): 100}}, lambda ids, _text, _number: ids == [_ENDS]),
    ({"logit_bias": {str(_ENDS): 100}, "min_tokens": 4}, lambda ids, _text, _number: ids.index(_ENDS) == 4),
    ({"logit_bias": {str(_ENDS): 100}, "ignore_eos": True}, lambda ids, _text, _number: ids == [_ENDS] * 8),
    (_LIKELY, lambda ids, _text, _number: {*ids} < {6, 7}),
    (_LIKELY | {"presence_penalty": 2.0}, lambda ids, _text, _number: {*ids} == {6, 7}),
    (_LIKELY | {"frequency_penalty": 2.0}, lambda ids, _text, _number: {*ids} == {6, 7}),
    (_LIKELY | {"repetition_penalty": 1.2}, lambda ids, _text, _number: {*ids} == {6, 7}),
    ({"allowed_token_ids": [5, 6]}, lambda ids, _text, _number: {*ids} <= {5, 6}),
    ({"bad_words": ["a"], "allowed_token_ids": [5, 6]}, lambda _ids, text, _number: text == "b" * 8),
    ({"temperature": 0.5, "top_p": 0.5, "top_k": 20, "min_p": 0.01}, lambda ids, _text, _number: len(ids) == 8),
    ({"temperature": 0.5, "stream": True}, lambda ids, _text, _number: len(ids) == 8),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, lambda _ids, text, _number: len(text) == 3 and {*text} <= {*"ab"}),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda _ids, text, _number: text in ("yes", "no")),
    ({"response_format": {"type": "json_object"}}, lambda _ids, text, _number: text.lstrip().startswith("{")),
]


@pytest.mark.engine
def test_openai_routes_serve_each_field_with_the_log_probabilities_of_the_model(model: Path, tmp_path: Path) -> None:
    """As vLLM's own server, whose log-probabilities are before temperature, cuts and penalties."""
    body = {"model": str(model), "prompt": PROMPT, "max_tokens": 8, "seed": 1, "logprobs": 2, "return_token_ids": True}
    with _served("vllm", model, tmp_path) as server:
        for fields, holds in _FIELDS:
            answer = server.http.post("/v1/completions", json=body | fields)
            assert answer.status_code == 200, answer.text
            choices = _streamed(answer.text) if "stream" in fields else answer.json()["choices"]
            for choice in choices:
                ids = choice["token_ids"]
                assert holds(ids, choice["text"], len(choices)), (fields, choice)
                if not {"structured_outputs", "response_format"} & {*fields}:  # a grammar masks before
                    expected = reference_logprobs(model, PROMPT, ids)
                    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4), fields
        for name in ("structured_outputs", "response_format"):
            fields = next(fields for fields, _ in _FIELDS if name in fields) | {"temperature": 0.5}
            refused = server.http.post("/v1/completions", json=body | fields)
            assert refused.status_code == 400 and "Leave temperature out, or leave logprobs out" in refused.text
        most = MAX_LEN - len(PROMPT)
        longest = {"max_tokens": most, "min_tokens": most, "temperature": 0.5, "ignore_eos": True}
        ids = server.http.post("/v1/completions", json=body | longest).json()["choices"][0]["token_ids"]
        assert len(ids) == most - 1
        full = body | {"prompt": [PROMPT[0]] * (MAX_LEN - 1), "max_tokens": 1, "temperature": 0.5}
        refused = server.http.post("/v1/completions", json=full)
        assert refused.status_code == 400 and f"has {MAX_LEN - 1} of {MAX_LEN} tokens" in refused.text, refused.text


def _streamed(events: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in events.split("\n\n")]
    return [json.loads(line)["choices"][0] for line in lines if line.startswith("{")]


def test_metrics_count_requests_tokens_and_busy_time(server: Served) -> None:
    names = ("generation_requests", "generated_tokens", "engine_busy_seconds", "engine_idle_seconds")

    def metrics() -> list[float]:
        return [server.metric(f"holdfast_{name}_total") for name in names]

    before = metrics()
    started = time.monotonic()
    server.choices(seeds=[1, 2, 3], max_tokens=50)
    busy_s = time.monotonic() - started
    requests, tokens, busy, idle = (after - one for one, after in zip(before, metrics(), strict=True))
    assert (requests, tokens) == (1, 150)
    assert 0 < busy <= busy_s and idle > 0


def test_a_client_that_goes_away_is_not_generated_for(server: Served) -> None:
    body = json.dumps({"token_ids": PROMPT, "seeds": list(range(32)), "max_tokens": 250}).encode()
    head = (
        "POST /inference/v1/generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    name = "holdfast_generated_tokens_total"
    before = server.metric(name)
    with socket.create_connection((server.http.base_url.host, server.http.base_url.port or 80)) as client:
        client.sendall(head.encode() + body)
        wait_until(lambda: server.metric(name) > before, "its first token")
    wait_until(lambda: not server.metric("holdfast_requests_in_flight"), "its end")
    before = server.metric(name)
    server.choices(max_tokens=100)
    assert server.metric(name) - before < 200


def test_killing_the_server_leaves_no_orphan_and_frees_its_port(engine: Engine, model: Path, tmp_path: Path) -> None:
    server = _served(engine, model, tmp_path).handle
    children = psutil.Process(server.pid).children(recursive=True)
    assert bool(children) is (engine == "vllm") and server.kill() == -signal.SIGKILL
    for child in children:  # orphans are reaped by init, so gone means gone
        child.wait(HANG_S)
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that were closed do not matter
        port.bind(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        port.listen()
