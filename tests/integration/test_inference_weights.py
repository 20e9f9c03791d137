"""Weight updates of a server, with either engine: right after each one, refused without harm, safe in mid-flight."""

import concurrent.futures
import fcntl
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.config.rl_trainer import CollectiveWeights
from holdfast.process.heartbeat import HEARTBEAT_ENV, Beat, read_beat
from holdfast.protocol.inference import UpdateRequest
from holdfast.protocol.transfer import Offer, Transfer
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import weights_digest
from holdfast.trainer.model import weight_offers
from holdfast.trainer.model.safetensors_files import SafetensorsFile
from holdfast.trainer.model.weight_offers import WeightOffers
from tests.builders.checkpoint_files import commit, flip
from tests.forking.engines import config_of, start_server
from tests.forking.popen import Engine
from tests.integration.conftest import PROMPT, Served
from tests.models.served import reference_logprobs, write_model
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S, wait_until

TOLERANCE = 1e-4


class Client(Served):
    """A server, its models a, b and c, and a version that grows with each update."""

    def __init__(self, engine: Engine, models: Path, directory: Path, **model: Any) -> None:
        config = config_of(models / "a", max_len=512, **model)
        env = {HEARTBEAT_ENV: str(directory / "beat")}
        super().__init__(start_server(engine, config, directory / "inference.log", env=env).wait_ready())
        self.engine = engine
        self.models = models
        self.version = 0
        self.boot_id = self.weights()["boot_id"]

    def push(self, path: Path) -> httpx.Response:
        self.version += 1
        return self.update(path, self.version)

    def generate(self, prompt: list[int] = PROMPT, **fields: Any) -> list[dict[str, Any]]:
        return self.choices(**({"token_ids": prompt, "seeds": [1, 2, 3], "max_tokens": 12} | fields))

    def served(self, version: int | None, digest: str | None) -> dict[str, Any]:
        """What it is to say that it serves."""
        other = {"model": str(self.models / "a"), "owner": None, "uid": os.getuid(), "num_workers": 1}
        return {"version": version, "digest": digest, "boot_id": self.boot_id, **other}


def _wait_for_beat(path: Path, doing: str) -> Beat:
    while (beat := read_beat(path)).doing != doing:
        time.sleep(0.01)
    return beat


@pytest.fixture(scope="module", params=["tied", "untied"])
def client(
    engine: Engine, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    models = tmp_path_factory.mktemp(f"models-{request.param}")
    for seed, name in enumerate("abc"):
        write_model(models / name, seed=seed, tied=request.param == "tied")
    with Client(engine, models, models) as client:
        yield client


def _assert_logprobs(model: Path, choices: list[dict[str, Any]], prompt: list[int] = PROMPT) -> None:
    for choice in choices:
        expected = reference_logprobs(model, prompt, choice["token_ids"])
        assert choice["logprobs"] == pytest.approx(expected, abs=TOLERANCE)


def test_logprobs_follow_every_update(client: Client) -> None:
    assert client.weights()["digest"] == weights_digest(client.models / "a")
    _assert_logprobs(client.models / "a", client.generate())
    for name in "bacba":
        response = client.push(client.models / name)
        assert response.status_code == 200, response.text
        digest = weights_digest(client.models / name)
        assert response.json()["version"] == client.version and response.json()["digest"] == digest
        assert client.weights() == client.served(client.version, digest)
        choices = client.generate()
        _assert_logprobs(client.models / name, choices)
        for choice in choices:
            assert choice["versions"] == [{"version": client.version, "digest": digest, "start": 0, "end": 12}]
    choices = client.generate()
    # The models must differ by far more than the tolerance, or none of this could fail.
    others = reference_logprobs(client.models / "b", PROMPT, choices[0]["token_ids"])
    assert max(abs(x - y) for x, y in zip(others, choices[0]["logprobs"], strict=True)) > 1


def test_cached_prefixes_end_with_their_weights(client: Client) -> None:
    prompt = [3 + i * 7 % 100 for i in range(400)]
    for name in "abab":
        client.push(client.models / name)
        _assert_logprobs(client.models / name, client.generate(prompt), prompt)
        # The second time the prefix comes from the cache.
        _assert_logprobs(client.models / name, client.generate(prompt), prompt)


@pytest.mark.engine
def test_a_short_prompt_is_computed_once_for_all_its_answers(tmp_path: Path) -> None:
    write_model(tmp_path / "a", seed=0, tied=True)
    config = config_of(tmp_path / "a", max_len=512)
    config.engine.args = {"disable_log_stats": False}
    prompt = [3 + i * 11 % 100 for i in range(70)]
    with Served(start_server("vllm", config, tmp_path / "inference.log").wait_ready()) as server:
        choices = server.choices(token_ids=prompt, seeds=[1, 2, 3], max_tokens=12)
        lines = server.http.get("/metrics").text.splitlines()
    _assert_logprobs(tmp_path / "a", choices, prompt)
    (hits,) = (line for line in lines if line.startswith("vllm:prefix_cache_hits_total{"))
    assert float(hits.split()[-1]) == 2 * 64, "the second and the third answer take two blocks from the first"


def _edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return damage


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _flip_after_manifest(directory: Path) -> None:
    commit(directory, "weights", 1000)
    flip(directory / "model.safetensors")


def _remove_after_manifest(directory: Path) -> None:
    shutil.copy(directory / "model.safetensors", directory / "other.safetensors")
    commit(directory, "weights", 1000)
    (directory / "model.safetensors").unlink()


NORM = "model.norm.weight"
PROJECTION = "model.layers.1.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "is not a directory"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no .*safetensors"),
    "truncated": (_truncate, "not a whole safetensors file"),
    "not safetensors": (lambda d: (d / "model.safetensors").write_bytes(b"hello"), "not a whole safetensors file"),
    "missing tensor": (_edit(lambda t: t.pop(PROJECTION)), f"'{PROJECTION}' is missing"),
    "unknown tensor": (_edit(lambda t: t.update({"model.extra": torch.ones(2)})), "'model.extra' is not part"),
    "wrong shape": (_edit(lambda t: t.update({NORM: torch.ones(65)})), r"shape \[65\], the model needs \[64\]"),
    "wrong dtype": (_edit(lambda t: t.update({NORM: torch.ones(64, dtype=torch.int32)})), "dtype int32"),
    "NaN": (_edit(lambda t: t[PROJECTION].view(-1)[-1].fill_(float("nan"))), "NaN or infinity"),
    "infinity": (_edit(lambda t: t[NORM][3].fill_(float("inf"))), "NaN or infinity"),
    "manifest: checksum": (_flip_after_manifest, "is damaged: checksum"),
    "manifest: file missing": (_remove_after_manifest, "names, is missing"),
    "manifest: version": (lambda d: commit(d, "weights", 999_999), "holds policy version 999999"),
    "manifest: torn": (lambda d: (d / "manifest.json").write_text("{"), "manifest.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_directory_is_refused_and_changes_nothing(client: Client, damage: str, tmp_path: Path) -> None:
    before, weights = client.generate(), client.weights()
    directory = tmp_path / "weights"
    shutil.copytree(client.models / "c", directory)
    apply, reason = DAMAGES[damage]
    apply(directory)
    response = client.update(directory, 1000)
    assert response.status_code == 409 and str(directory) in response.json()["error"]
    if client.engine == "vllm":
        assert re.search(reason, response.json()["error"]), response.json()["error"]
    assert client.weights() == weights and client.generate() == before


def test_weights_that_cannot_be_read_change_nothing_and_are_told_apart(client: Client, tmp_path: Path) -> None:
    """The kernel answers with an I/O error for address 0 of a process."""
    before, weights = client.generate(), client.weights()
    directory = tmp_path / "weights"
    shutil.copytree(client.models / "c", directory)
    (directory / "manifest.json").symlink_to("/proc/self/mem")
    response = client.update(directory, 1000)
    assert (response.status_code, response.json()["code"]) == (507, "unreadable")
    assert "Input/output error" in response.json()["error"] and client.weights() == weights
    assert client.generate() == before


def _wait_for_tokens(client: Client, count: float) -> None:
    """Wait until the server has sampled so many tokens since its start."""
    wait_until(lambda: client.metric("holdfast_generated_tokens_total") >= count, "more tokens")


def _updated_in_flight(
    client: Client, before: Path, after: Path, *, seeds: list[int], max_tokens: int
) -> tuple[int, list[dict[str, Any]]]:
    """Return the version before, and choices that the update to `after` met: a busy machine may need several tries."""
    deadline = time.monotonic() + HANG_S
    while True:
        client.push(before)
        old, sampled = client.version, client.metric("holdfast_generated_tokens_total")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            future = pool.submit(client.generate, seeds=seeds, max_tokens=max_tokens)
            _wait_for_tokens(client, sampled + 20)
            assert client.push(after).status_code == 200
            choices = future.result()
        if all(len(choice["versions"]) == 2 for choice in choices):
            return old, choices
        assert time.monotonic() < deadline, "no update met a request in flight"


def test_requests_in_flight_go_on_with_the_new_weights(client: Client) -> None:
    models = client.models
    old, choices = _updated_in_flight(client, models / "a", models / "b", seeds=[1, 2], max_tokens=400)
    for choice in choices:
        first, second = choice["versions"]
        assert (first["version"], second["version"]) == (old, client.version)
        assert [span["digest"] for span in (first, second)] == [weights_digest(models / name) for name in "ab"]
        assert (first["start"], first["end"], second["end"]) == (0, second["start"], 400)
        cut = first["end"]
        assert 0 < cut < 400
        by_a = reference_logprobs(models / "a", PROMPT, choice["token_ids"])
        by_b = reference_logprobs(models / "b", PROMPT, choice["token_ids"])
        assert choice["logprobs"] == pytest.approx(by_a[:cut] + by_b[cut:], abs=TOLERANCE)


def test_an_update_to_the_same_weights_changes_no_token(client: Client) -> None:
    same = client.models / "a"
    client.push(same)
    undisturbed = client.generate(seeds=[7, 8], max_tokens=300)
    _, disturbed = _updated_in_flight(client, same, same, seeds=[7, 8], max_tokens=300)
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)


def test_without_weights_the_server_is_healthy_and_waits(engine: Engine, tmp_path: Path) -> None:
    write_model(tmp_path / "a", seed=0, tied=True, weights=False)
    write_model(tmp_path / "b", seed=1, tied=True)
    with Client(engine, tmp_path, tmp_path, load="dummy") as client:
        assert client.http.get("/health").json()["weights"] is None and client.weights() == client.served(None, None)
        for path, body in (
            ("/inference/v1/generate", {"token_ids": PROMPT, "seeds": [1], "max_tokens": 1}),
            ("/v1/completions", {"prompt": "abc"}),
            ("/invocations", {"prompt": "abc"}),
        ):
            response = client.http.post(path, json=body)
            assert (response.status_code, response.headers["x-policy-version"]) == (503, "none")
            assert "no weights yet" in str(response.json()["error"])
        assert client.push(write_model(tmp_path / "c", seed=1, tied=False)).status_code == 409
        assert client.push(tmp_path / "b").json()["digest"] == weights_digest(tmp_path / "b")
        assert client.http.get("/health").json()["weights"] == client.version
        _assert_logprobs(tmp_path / "b", client.generate())


def test_the_engine_goes_on_while_weights_are_read(client: Client, tmp_path: Path) -> None:
    """However long that takes: here the kernel lets nobody open one of the files, until we let go of it."""
    client.push(client.models / "a")
    slow = tmp_path / "slow"
    shutil.copytree(client.models / "b", slow)
    version = client.version + 1
    commit(slow, "weights", version)
    is_wanted = threading.Event()
    before = signal.signal(signal.SIGIO, lambda *_: is_wanted.set())
    try:
        with open(slow / "manifest.json", "r+b") as held, concurrent.futures.ThreadPoolExecutor() as pool:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            pushed = pool.submit(client.push, slow)
            wait_until(lambda: is_wanted.is_set() or pushed.done())
            assert not pushed.done(), pushed.result().text
            _assert_logprobs(client.models / "a", client.generate())
            beat = _wait_for_beat(client.models / "beat", f"reading policy version {version}")
            assert (beat.bound_s, beat.answers) == (1800.0, True) and not pushed.done()
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            assert pushed.result().status_code == 200, pushed.result().text
    finally:
        signal.signal(signal.SIGIO, before)
    _assert_logprobs(client.models / "b", client.generate())


def _offer(run_dir: RunDir, model: Path, version: int, cut: int | None, blow: signal.Signals) -> None:
    """Offer a model tensor by tensor, as a trainer does, and send this process `blow` in front of tensor `cut`."""
    groups = weight_offers._groups_of

    def groups_until(file: SafetensorsFile) -> Iterator[torch.Tensor]:
        for index, part in enumerate(groups(file)):
            if index == cut:
                signal.pthread_kill(threading.get_ident(), blow)  # else another thread gets it, and this one goes on
            yield part

    weight_offers._GROUP_BYTES = 1
    weight_offers._groups_of = groups_until
    with WeightOffers(run_dir, CollectiveWeights(stall_timeout_s=HANG_S), torch.device("cpu")) as offers:
        offers.offer(version, list(load_file(model / "model.safetensors").items()))
        signal.pause()


def _transfer(
    client: Client, model: Path, directory: Path, *, cut: int | None = None, blow: signal.Signals = signal.SIGKILL
) -> httpx.Response:
    """Have a process offer a model and the server take it, from nowhere else; return the answer."""
    run_dir = RunDir(directory / str(client.version))
    run_dir.weights.mkdir(parents=True)
    client.version += 1
    process = _FORK.Process(target=_offer, args=(run_dir, model, client.version, cut, blow))
    process.start()
    try:
        wait_until(lambda: run_dir.offer.exists() or not process.is_alive())
        offer = msgspec.json.decode(run_dir.offer.read_bytes(), type=Offer)
        if blow == signal.SIGSTOP:
            offer = msgspec.structs.replace(offer, stall_timeout_s=1.0)
        request = UpdateRequest(
            "/nowhere", client.version, transfer=Transfer(offer, num_members=2, first_rank=1, attempt="1")
        )
        return client.http.post("/update_weights", content=msgspec.json.encode(request), headers=_JSON)
    finally:
        process.kill()
        process.join()


_FORK = multiprocessing.get_context("fork")
_JSON = {"content-type": "application/json"}


def test_both_transports_give_one_digest_and_the_same_bits(client: Client, tmp_path: Path) -> None:
    client.push(client.models / "b")
    expected = client.generate()
    client.push(client.models / "a")
    response = _transfer(client, client.models / "b", tmp_path)
    assert (response.status_code, response.json()["digest"]) == (200, weights_digest(client.models / "b"))
    choices = client.generate()
    assert [choice["versions"][0]["version"] for choice in choices] == [client.version] * 3
    for choice, other in zip(choices, expected, strict=True):
        assert (choice["token_ids"], choice["logprobs"]) == (other["token_ids"], other["logprobs"])


def test_an_offer_that_is_gone_changes_nothing(client: Client, tmp_path: Path) -> None:
    client.push(client.models / "a")
    weights = client.weights()
    offer = Offer(9, "0" * 32, f"127.0.0.1:{free_port()}", HANG_S)
    request = UpdateRequest("/nowhere", 9, transfer=Transfer(offer, num_members=2, first_rank=1, attempt="1"))
    response = client.http.post("/update_weights", content=msgspec.json.encode(request), headers=_JSON)
    assert response.status_code == 409
    assert re.search("the offer of version 9 at .* cannot be taken: .*refused", response.json()["error"])
    assert client.weights() == weights
    _assert_logprobs(client.models / "a", client.generate())


# The tensors come in the order of their names: in front of the first, of the output layer or a norm, and within the
# layers that vLLM joins (gate and up; k, q and v), where a half must not count as a part of the next weights.
@pytest.mark.parametrize("cut", [0, 1, 4, 8, 11, 12, 22])
def test_a_torn_model_never_samples_and_the_next_update_mends_it(client: Client, cut: int, tmp_path: Path) -> None:
    models = client.models
    client.push(models / "a")
    old, sampled = client.version, client.metric("holdfast_generated_tokens_total")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        in_flight = pool.submit(client.generate, seeds=[1, 2], max_tokens=450)
        _wait_for_tokens(client, sampled + 20)
        begin = time.monotonic()
        torn = _transfer(client, models / "c", tmp_path, cut=cut)
        seconds, frozen = time.monotonic() - begin, client.metric("holdfast_generated_tokens_total")
        served, health = client.weights(), client.http.get("/health")
        refused = [client.ask(max_tokens=1), client.http.post("/v1/completions", json={"prompt": "abc"})]
        sampled = client.metric("holdfast_generated_tokens_total")
        # Before anything is compared: what is in flight waits for this.
        mended = client.push(models / "b") if cut % 2 else _transfer(client, models / "b", tmp_path)
        choices = in_flight.result()
    assert (torn.status_code, torn.json()["code"]) == (503, "torn"), torn.text
    assert "transfer broke off" in torn.json()["error"]
    assert seconds < HANG_S / 2, "noticed by the connection, not by a time-out"
    assert (served["version"], served["digest"], health.status_code) == (None, None, 200)
    assert all(answer.status_code == 503 and "torn" in str(answer.json()["error"]) for answer in refused)
    assert sampled == frozen
    assert mended.status_code == 200, mended.text
    assert client.weights()["digest"] == weights_digest(models / "b")
    _assert_logprobs(models / "b", client.generate())
    for choice in choices:
        assert {span["version"] for span in choice["versions"]} <= {old, client.version}
        cut_at = choice["versions"][0]["end"]
        by_a = reference_logprobs(models / "a", PROMPT, choice["token_ids"])
        by_b = reference_logprobs(models / "b", PROMPT, choice["token_ids"])
        assert choice["logprobs"] == pytest.approx(by_a[:cut_at] + by_b[cut_at:], abs=TOLERANCE)


def test_a_sender_that_stands_still_is_given_up(client: Client, tmp_path: Path) -> None:
    client.push(client.models / "a")
    torn = _transfer(client, client.models / "b", tmp_path, cut=3, blow=signal.SIGSTOP)
    # Our clock, or gloo's, whichever is first.
    assert torn.status_code == 503, torn.text
    said = torn.json()["error"]
    assert "no bytes came for 1 s" in said or "Timed out" in said, said
    assert client.push(client.models / "b").status_code == 200
    _assert_logprobs(client.models / "b", client.generate())
