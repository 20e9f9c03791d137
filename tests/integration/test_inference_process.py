"""The server as a process: every death is clean or loud."""

import functools
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from holdfast.config import InferenceConfig
from holdfast.launcher.liveness import LivenessMonitor
from holdfast.launcher.restart_policy import engine_failure
from holdfast.launcher.supervisor import error_message
from holdfast.process.heartbeat import HEARTBEAT_ENV, read_beat
from holdfast.process.scratch import remove_abandoned
from tests.conftest import ModelFactory
from tests.forking.engines import ServerHandle, config_of, shared_engines
from tests.models.served import write_model
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S, command_line, wait_until

pytestmark = pytest.mark.engine

Ends = Callable[..., bool]

REQUEST = {"token_ids": [5, 6, 7], "seeds": [1], "max_tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), seed=0, tied=True)


def _start(
    model: Path, tmp_path: Path, *, server: dict[str, Any] | None = None, max_len: int = 256, **options: Any
) -> ServerHandle:
    config = config_of(model, max_len=max_len, server=server)
    return shared_engines().start(config, tmp_path / "inference.log", **options)


def _engine(server: ServerHandle) -> psutil.Process:
    """Return the engine's process as soon as it is there."""

    def engines() -> list[psutil.Process]:
        children = psutil.Process(server.pid).children(recursive=True)
        return [child for child in children if "EngineCore" in "".join(command_line(child))]

    (found,) = wait_until(engines, "the engine")
    return found


@pytest.mark.parametrize(("args", "message"), [
    ({"no-such-thing": 1}, "no-such-thing"),
    ({"load_format": "auto"}, "engine.args.load-format cannot be set"),
    ({"hf_overrides": "{}"}, 'add "head_dtype": "float32" to it'),
])  # fmt: skip
def test_unusable_engine_arguments_are_refused(model: Path, tmp_path: Path, args: dict[str, Any], message: str) -> None:
    config = InferenceConfig.model_validate(
        {"model": {"name": str(model), "fp32_lm_head": True}, "server": {"port": free_port()}, "engine": {"args": args}}
    )
    server = shared_engines().start(config, tmp_path / "inference.log")
    assert server.wait() == 2
    assert message in server.log() and "Traceback" not in server.log()


@pytest.mark.parametrize("is_long", [False, True])
def test_sockets_end_with_their_server_however_it_ends(model: Path, tmp_path: Path, is_long: bool, ends: Ends) -> None:
    """Those of a killed one are removed by whoever comes next; a path that is too long for a socket is not used."""
    with tempfile.TemporaryDirectory(prefix="t-") as made:
        home = Path(made) / ("long" * 16 if is_long else "short")
        home.mkdir()
        options = {"env": {"TMPDIR": str(home)}, "sabotage": "import tempfile; tempfile.tempdir = None"}
        servers = [_start(model, tmp_path / name, **options) for name in ("ended", "killed")]
        scratch = [_scratch(server) for server in servers]
        assert all(path.parent == (Path("/tmp") if is_long else home) for path in scratch)
        assert servers[0].terminate() == 0
        assert not scratch[0].exists() and scratch[1].is_dir()
        engine = _engine(servers[1])
        servers[1].kill()
        assert ends(engine.pid)
        remove_abandoned(scratch[1].parent)
        assert not scratch[1].exists()
        assert is_long or not [path for path in home.iterdir() if not path.name.startswith("torchinductor_")]


def _scratch(server: ServerHandle) -> Path:
    """Return the directory of its sockets, of which it has several."""
    server.wait_ready()
    sockets = [Path(str(one.laddr)) for one in psutil.Process(server.pid).net_connections("unix")]
    (directory,) = {path.parent for path in sockets if path.name.count("-") == 4}
    return directory


_CANNOT_DECODE = """
from vllm.v1.engine import core
decode = core.MsgpackDecoder.decode
def decoded(self, frames):
    found = decode(self, frames)
    assert getattr(getattr(found, "sampling_params", None), "max_tokens", 0) != 7, "cannot be decoded"
    return found
core.MsgpackDecoder.decode = decoded
"""


def test_an_engine_that_reads_no_requests_any_more_ends(model: Path, tmp_path: Path) -> None:
    """The thread that reads them ends at a message that it cannot decode. The engine would live on and serve nobody."""
    server = _start(model, tmp_path, sabotage=_CANNOT_DECODE).wait_ready()
    with httpx.Client(base_url=server.url, timeout=HANG_S) as client:
        assert client.post("/inference/v1/generate", json=REQUEST).status_code == 200
        assert client.post("/inference/v1/generate", json=REQUEST | {"max_tokens": 7}).status_code == 503
    assert server.wait() == 75 and "cannot be decoded" in server.log()


def test_damaged_weights_at_the_start_end_the_server_with_the_reason(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", seed=0, tied=True)
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"
    path.write_bytes(content)
    server = _start(model, tmp_path)
    assert server.wait() == 3 and "holds NaN or infinity" in server.log()


def test_weights_that_no_file_sets_end_the_server_with_their_name(tmp_path: Path) -> None:
    """vLLM would serve whatever the memory held before."""
    model = write_model(tmp_path / "model", seed=0, tied=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    server = _start(model, tmp_path)
    assert server.wait() == 3
    assert "has 1 weights that are in no file, such as 'lm_head.weight'" in (engine_failure(server.log_path) or "")


def test_sigterm_ends_a_busy_server_cleanly(model: Path, tmp_path: Path, ends: Ends) -> None:
    events = tmp_path / "events.jsonl"
    server = _start(model, tmp_path, env={"HOLDFAST_EVENTS": str(events)}).wait_ready()
    phases = [line.split('"phase": "')[1].split('"')[0] for line in events.read_text().splitlines()]
    assert phases == ["loading vllm", "starting the engine", "ready"]
    assert server.log().count(f'ready: {server.url}/v1, model "{model}"\n') == 1
    engine = _engine(server)
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as busy:
        body = b'{"token_ids": [5], "seeds": [1, 2, 3, 4], "max_tokens": 255}'
        head = (
            "POST /inference/v1/generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        busy.sendall(head.encode() + body)
        assert server.terminate() == 0
    assert ends(engine.pid) and "Traceback" not in server.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_start_up_ends_the_server_cleanly(model: Path, tmp_path: Path, number: int, ends: Ends) -> None:
    server = _start(model, tmp_path)
    wait_until(lambda: "starting the engine" in server.log(), "the start of the engine")
    children = wait_until(lambda: psutil.Process(server.pid).children(recursive=True), "the engine")
    server.send_signal(number)
    assert server.wait() == 0 and all(ends(child.pid) for child in children)


_SLOW_TO_FORK = """
import os, time
server = os.getpid()
def wait_for_its_death():
    while os.getppid() == server:
        time.sleep(0.01)
os.register_at_fork(after_in_child=wait_for_its_death)
"""


def test_an_engine_that_was_just_forked_does_not_outlive_its_server(model: Path, tmp_path: Path, ends: Ends) -> None:
    """It could not yet ask the kernel to end it too, and would wait minutes for a server's answer."""
    server = _start(model, tmp_path, sabotage=_SLOW_TO_FORK)
    children = wait_until(lambda: psutil.Process(server.pid).children(recursive=True), "the engine")
    assert server.kill() == -signal.SIGKILL and all(ends(child.pid) for child in children)


def test_a_model_that_cannot_be_read_is_the_fault_of_the_storage(model: Path, tmp_path: Path) -> None:
    """Reading /proc/self/mem is an I/O error. vLLM says in many ways that its process did not come up."""
    copied = shutil.copytree(model, tmp_path / "model")
    weights = copied / "model.safetensors"
    breaks = (
        f"import os, holdfast.inference.engine as s; weights = {str(weights)!r}\n"
        "def engine(_):\n"
        "    os.remove(weights); os.symlink('/proc/self/mem', weights)\n"
        "    raise RuntimeError('Engine core initialization failed.')\n"
        "s.running_engine = engine"
    )
    server = _start(copied, tmp_path, sabotage=breaks)
    assert server.wait(300) == 5, server.log()
    assert f"error: {weights} cannot be read: Input/output error" in server.log()
    as_it_starts = _start(copied, tmp_path)  # it is looked at before the engine starts
    assert as_it_starts.wait(300) == 5 and "Input/output error" in as_it_starts.log()


def test_the_death_of_the_engine_ends_the_server_with_its_own_code(model: Path, tmp_path: Path) -> None:
    server = _start(model, tmp_path).wait_ready()
    _engine(server).kill()
    assert server.wait(HANG_S) == 75 and "the engine died (EngineCore ended with signal SIGKILL)" in server.log()


def _held_loading(mark: Path) -> str:
    """Return source that keeps an engine from coming further than to its weights; it makes a file when it is there."""
    return (
        "import pathlib, signal, holdfast.inference.worker as w\n"
        f"w.read_weights = lambda *_, **__: (pathlib.Path({str(mark)!r}).touch(), signal.pause())\n"
    )


# As between the end of its files and that of the process: who asks without waiting gets no answer.
_LATE = "import os; ask = os.waitpid; os.waitpid = lambda pid, how: (0, 0) if how & os.WNOHANG else ask(pid, how)\n"


@pytest.mark.parametrize("when", ["as it appears", "while it loads", "while it loads, known late"])
def test_an_engine_killed_while_it_starts_is_worth_another_start(model: Path, tmp_path: Path, when: str) -> None:
    late = _LATE if "late" in when else ""
    server = _start(model, tmp_path, sabotage=late + _held_loading(tmp_path / "loads"))
    engine = _engine(server)
    if "loads" in when:
        wait_until((tmp_path / "loads").exists, "its weights")
    engine.kill()
    assert server.wait() == 75
    assert "the engine died while it started" in server.log() and "'EngineCore': -9" in server.log()
    assert "error: " not in server.log()


@pytest.mark.parametrize("ahead_of", ["EngineWeights.adopt_initial", "_check_first_token"])
def test_an_engine_killed_at_a_first_request_is_worth_another_start(model: Path, tmp_path: Path, ahead_of: str) -> None:
    kill = (
        f"import psutil, holdfast.inference.server as s; real = s.{ahead_of}\n"
        f"s.{ahead_of} = lambda it: (psutil.Process().children()[0].kill(), real(it))[1]"
    )
    server = _start(model, tmp_path, sabotage=kill)
    assert server.wait() == 75
    assert "ERROR the engine died while it started" in server.log() and "error: " not in server.log()


def test_a_model_that_the_engine_cannot_run_is_told_before_ready(tiny_model: ModelFactory, tmp_path: Path) -> None:
    """vLLM loads heads of 16 numbers on CPU, and fails at the first token."""
    server = _start(tiny_model("qwen3", head_dim=16), tmp_path)
    assert server.wait() == 3
    assert "error: the engine cannot run this model: it failed at its first token" in server.log()
    assert "inference INFO ready" not in server.log()
    reason = engine_failure(server.log_path)
    assert reason is not None and "head_dim=16" in reason


def test_what_vllm_refuses_in_a_configuration_is_told_whole(model: Path, tmp_path: Path) -> None:
    untold = Path(shutil.copytree(model, tmp_path / "untold"))  # so that vLLM alone knows how many positions it has
    fields = json.loads((untold / "config.json").read_text())
    del fields["max_position_embeddings"]
    (untold / "config.json").write_text(json.dumps(fields))
    server = _start(untold, tmp_path, max_len=10_000_000)
    assert server.wait() == 3
    said = error_message(server.log_path)
    assert said is not None and "max_model_len" in said and "10000000" in said
    assert "validation error" not in said and "pydantic" not in said


def test_a_failed_swap_ends_the_server(model: Path, tmp_path: Path) -> None:
    sabotage = "import holdfast.inference.worker as w; w.finalize_layerwise_reload = lambda *a: 1 / 0"
    server = _start(model, tmp_path, sabotage=sabotage).wait_ready()
    try:
        response = httpx.post(f"{server.url}/update_weights", json={"path": str(model), "version": 1}, timeout=HANG_S)
        assert response.status_code >= 500
    except httpx.TransportError:
        pass
    assert server.wait(HANG_S) == 75
    assert "half-written" in server.log() and "EngineCore ended with exit code 70" in server.log()
    assert engine_failure(server.log_path) == "ZeroDivisionError: division by zero"


def test_an_engine_that_takes_weights_says_for_how_long_it_may_not_answer(model: Path, tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    sabotage = (
        "import holdfast.inference.worker as w; finish = w.finalize_layerwise_reload\n"
        f"w.finalize_layerwise_reload = lambda *args: (open({str(held)!r}).read(), finish(*args))[1]"
    )
    beats = tmp_path / "beats"
    server = _start(
        model, tmp_path, server={"update_timeout_s": 77}, sabotage=sabotage, env={HEARTBEAT_ENV: str(beats)}
    )
    server.wait_ready()
    update = {"path": str(model), "version": 1}
    with ThreadPoolExecutor() as pool:
        pushed = pool.submit(httpx.post, f"{server.url}/update_weights", json=update, timeout=HANG_S)
        wait_until(lambda: not read_beat(beats).answers or pushed.done())
        beat = read_beat(beats)
        assert (beat.doing, beat.bound_s) == ("taking policy version 1", 77.0)
        held.write_text("go on")
        assert pushed.result().status_code == 200
    wait_until(lambda: read_beat(beats).answers)
    assert server.terminate() == 0


def test_health_fails_when_the_engine_hangs(model: Path, tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare", seed=0, tied=True, weights=False)
    config = config_of(bare, load="dummy", server={"health_timeout_s": 0.5})
    server = shared_engines().start(config, tmp_path / "inference.log").wait_ready()
    engine = _engine(server)
    engine.suspend()
    try:
        response = httpx.get(f"{server.url}/health", timeout=HANG_S)
        assert response.status_code == 503 and "no answer to a probe within 0.5 s" in response.json()["reason"]
    finally:
        engine.resume()
    server.wait_ready()
    assert server.terminate() == 0


def test_a_server_whose_engine_is_stopped_while_it_starts_sends_no_heartbeat(model: Path, tmp_path: Path) -> None:
    beats = tmp_path / "beats" / "inference"
    server = _start(model, tmp_path, env={HEARTBEAT_ENV: str(beats)})
    engine = _engine(server)
    monitor = LivenessMonitor(beats)
    for is_starting in (True, False):  # the launcher may ask for `/health` only later
        engine.suspend()
        try:
            wait_until(lambda: monitor.silent_s() > 5, "silence")
            assert monitor.pids() == [server.pid]
        finally:
            engine.resume()
        wait_until(lambda: monitor.silent_s() < 2, "heartbeats")
        if is_starting:
            server.wait_ready()
    assert server.terminate() == 0


def test_admin_routes_of_a_public_server_need_the_token(model: Path, tmp_path: Path) -> None:
    server = _start(model, tmp_path, server={"host": "0.0.0.0"}, env={"HOLDFAST_ADMIN_TOKEN": "s3cret"}).wait_ready()
    update = {"path": str(model), "version": 1}
    get, post = (functools.partial(one, timeout=HANG_S) for one in (httpx.get, httpx.post))
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
        for path in ("/update_weights", "/claim", "/release"):
            response = post(server.url + path, json=update, headers=headers)
            assert response.status_code == 401 and "s3cret" not in response.text
    assert get(f"{server.url}/weights").json()["version"] == 0
    assert post(f"{server.url}/inference/v1/generate", json=REQUEST).status_code == 200
    page = {"authorization": "Bearer s3cret", "origin": "http://evil.example"}
    assert post(f"{server.url}/update_weights", json=update, headers=page).status_code == 403
    assert post(f"{server.url}/update_weights", content=json.dumps(update)).status_code == 415
    scale = post(f"{server.url}/scale_elastic_ep", json={"new_data_parallel_size": 1})
    assert scale.status_code == 404, "vLLM's own administration is not part of the server"
    assert post(f"{server.url}/v1/completions", content=(b" " * 65536 for _ in range(1000))).status_code == 413
    allowed = post(f"{server.url}/update_weights", json=update, headers={"authorization": "Bearer s3cret"})
    assert allowed.status_code == 200, allowed.text
    assert get(f"{server.url}/weights").json()["version"] == 1 and server.terminate() == 0


_SPAWNS = """
import os
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
from holdfast.inference import engine
engine._fork_engine = lambda: None
os.register_at_fork(after_in_child=lambda: os._exit(1))  # an engine that is forked does not come up
"""


def test_an_engine_that_is_spawned_as_on_gpus_ends_with_its_server(model: Path, tmp_path: Path, ends: Ends) -> None:
    server = _start(model, tmp_path, sabotage=_SPAWNS).wait_ready()
    children = [_engine(server), *psutil.Process(server.pid).children(recursive=True)]
    assert server.kill() == -signal.SIGKILL and all(ends(child.pid) for child in children)


_TELLS_ARGUMENTS = """
import json
from pathlib import Path
from holdfast.inference.engine import vllm_arguments
from holdfast.config import InferenceConfig
from holdfast.config.resolved import choose_for_engine

told = {{}}
for device in ("cpu", "cuda"):
    config = InferenceConfig.model_validate({{"model": {{"max_len": 32768}}}})
    choose_for_engine(config, device)
    told[device] = vllm_arguments(config, Path("model"), Path("tokenizer"), device)
Path({path!r}).write_text(json.dumps(told))
raise SystemExit(0)
"""


def test_long_prompts_are_prefilled_in_chunks_on_gpus_alone(model: Path, tmp_path: Path) -> None:
    server = _start(model, tmp_path, sabotage=_TELLS_ARGUMENTS.format(path=str(tmp_path / "told")))
    assert server.wait() == 0, server.log()
    told = json.loads((tmp_path / "told").read_text())
    on_cpu = {"--no-enable-chunked-prefill", "--max-num-batched-tokens=32768", "--enforce-eager", "--dtype=float32"}
    assert on_cpu <= set(told["cpu"])
    assert {"--no-enforce-eager", "--dtype=bfloat16", "--gpu-memory-utilization=0.9"} <= set(told["cuda"])
    assert not any("chunked" in word or "batched" in word or "kv-cache" in word for word in told["cuda"])
