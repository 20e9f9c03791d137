"""Which server and port a run gets beside other runs, servers and programs."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler
from typing import Any

import msgspec
import pytest
from fastapi import HTTPException

from holdfast.config import RlConfig
from holdfast.config.load import parse_command_line
from holdfast.config.rl import hand_down_shared
from holdfast.errors import ConfigError, InferenceError
from holdfast.launcher import server_choice
from holdfast.launcher.server_choice import Reservation, Servers, picks_its_port, reserve, reserve_first_free
from holdfast.protocol.inference import ServedWeights
from holdfast.run.run_dir import RunDir, directory_name
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S, wait_until
from tests.servers.orchestrator_fakes import MODEL, FakeEngine, serving
from tests.unit.conftest import Told, When

HOST = "127.0.0.1"


@pytest.fixture
def first_port() -> int:
    """The default port of this test's runs, with as many behind it as any of them takes."""
    return free_port(10)


class Launcher:
    """As much of an `rl` command as chooses its server."""

    def __init__(self, directory: Path, port: int, *flags: str) -> None:
        config = parse_command_line(RlConfig, [*flags, "--output-dir", str(directory), "--model.name", MODEL])
        self.picks = picks_its_port(config)
        self.config = hand_down_shared(config)
        if self.picks:  # as if the default were this
            self.config.inference.server.port = port
            self.config.orchestrator.client.urls = [f"http://{HOST}:{port}"]

    def choose(self, stack: ExitStack) -> Servers:
        return stack.enter_context(server_choice.chosen_servers(self.config, picks_port=self.picks))

    @property
    def port(self) -> int:
        assert self.config.orchestrator.client.urls == [f"http://{HOST}:{self.config.inference.server.port}"]
        return self.config.inference.server.port


@contextmanager
def offered(**told: Any) -> Iterator[tuple[FakeEngine, int, ExitStack]]:
    """Serve an engine; give it, its port, and a stack for what launchers choose."""
    engine = FakeEngine(**told)
    with serving(engine), ExitStack() as stack:
        yield engine, int(engine.url.rsplit(":", 1)[1]), stack


@contextmanager
def answering(handler: type[BaseRequestHandler], port: int = 0) -> Iterator[int]:
    """Have something that is no inference server answer; give its port."""
    with HTTPServer((HOST, port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def held(port: int) -> Iterator[None]:
    reservation = reserve(HOST, port)
    assert reservation is not None
    yield
    reservation.release()


def explicit(directory: Path, port: int) -> Launcher:
    launcher = Launcher(directory, port, "--inference.server.port", str(port))
    assert not launcher.picks
    return launcher


def refused(launcher: Launcher, stack: ExitStack, said: str) -> None:
    with pytest.raises(InferenceError, match=said) as caught:
        launcher.choose(stack)
    assert caught.value.exit_code == 2


def test_runs_side_by_side_get_ports_and_servers_of_their_own(tmp_path: Path, first_port: int) -> None:
    with ExitStack() as stack:
        launchers = [Launcher(tmp_path / str(number), first_port) for number in range(3)]
        chosen = [launcher.choose(stack) for launcher in launchers]
        assert [launcher.port for launcher in launchers] == [first_port, first_port + 1, first_port + 2]
        assert all(servers.starts_own for servers in chosen) and chosen[0].line == ""
        refused(explicit(tmp_path / "another", first_port), stack, f":{first_port} is in use, by a run that starts")
        assert chosen[1].line == (
            f"port {first_port} is not free (another run or program has it): the inference server of this run gets "
            f"{first_port + 1}"
        )
    with ExitStack() as stack:
        assert Launcher(tmp_path / "0", first_port).choose(stack).line == "", "the ports are free again"


def several(directory: Path, port: int, *flags: str) -> Launcher:
    launcher = Launcher(directory, port, "--inference.engines", "3", *flags)
    if launcher.picks:
        launcher.config.orchestrator.client.urls = launcher.config.inference.urls
    return launcher


def test_several_servers_get_ports_in_a_row(tmp_path: Path, first_port: int) -> None:
    with ExitStack() as stack:
        launchers = [several(tmp_path / str(number), first_port) for number in range(2)]
        lines = [launcher.choose(stack).line for launcher in launchers]
        assert [launcher.config.inference.server.port for launcher in launchers] == [first_port, first_port + 3]
        urls = [f"http://{HOST}:{first_port + number}" for number in range(6)]
        assert [launcher.config.orchestrator.client.urls for launcher in launchers] == [urls[:3], urls[3:]]
        assert lines[0] == ""
        assert lines[1].endswith(f"the inference servers of this run get {first_port + 3} to {first_port + 5}")
    # One in the middle: the row begins behind it.
    with held(first_port + 1), ExitStack() as stack:
        launcher = several(tmp_path / "2", first_port)
        assert launcher.choose(stack).starts_own and launcher.config.inference.server.port == first_port + 2


def test_several_servers_at_ports_that_were_named_are_started_there_or_nowhere(tmp_path: Path, first_port: int) -> None:
    named = ("--inference.server.port", str(first_port))
    with ExitStack() as stack:
        assert several(tmp_path / "0", first_port, *named).choose(stack) == Servers(True, "")
        refused(several(tmp_path / "1", first_port, *named), stack, f"{first_port} is in use.* choose another port")
    with held(first_port + 2), ExitStack() as stack:
        refused(several(tmp_path / "2", first_port, *named), stack, f"{first_port + 2} is in use")
    with ExitStack() as stack:
        assert several(tmp_path / "3", first_port, *named).choose(stack).starts_own, "what it held was given back"


def test_several_servers_beside_others_are_all_named_or_none(tmp_path: Path, first_port: int) -> None:
    own = [f"http://{HOST}:{first_port + number}" for number in range(3)]

    def choose(urls: list[str]) -> Servers:
        flags = ("--inference.server.port", str(first_port), "--orchestrator.client.urls", json.dumps(urls))
        with ExitStack() as stack:
            return several(tmp_path, first_port, *flags).choose(stack)

    elsewhere = "http://127.0.0.1:9"
    assert choose([*own, elsewhere]).starts_own
    for some in ([elsewhere], own[:2]):
        with pytest.raises(InferenceError, match=f"names {len(some) - (some == [elsewhere])} of them: name all"):
            choose(some)


def test_launchers_of_the_same_moment_never_get_the_same_port(first_port: int) -> None:
    start = threading.Barrier(8)

    def launch(_: int) -> Reservation:
        start.wait()
        (reservation,) = reserve_first_free(HOST, first_port)
        return reservation

    with ThreadPoolExecutor(8) as pool:
        reservations = list(pool.map(launch, range(8)))
    assert len({one.port for one in reservations}) == 8
    for one in reservations:
        one.release()


_RESERVES = f"import os; from holdfast.launcher.server_choice import reserve; held = reserve('{HOST}', PORT)"
_SERVER = [sys.executable, "-c", "print('holds', flush=True); input()"]


_TAKES_ITS_PLACE = f"held.keep_over_exec(); os.execv({_SERVER[0]!r}, {_SERVER!r})"


@pytest.mark.parametrize("then", ["print('holds', flush=True); input()", _TAKES_ITS_PLACE], ids=["launcher", "exec"])
def test_a_port_is_held_until_its_holder_is_killed(then: str, first_port: int) -> None:
    command = [sys.executable, "-c", f"{_RESERVES.replace('PORT', str(first_port))}; {then}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"holds\n"
        assert reserve(HOST, first_port) is None
        process.kill()
    with held(first_port):
        pass


def test_a_free_server_at_the_default_address_is_used_owned_and_given_back(tmp_path: Path) -> None:
    with offered() as (engine, port, stack):
        servers = Launcher(tmp_path / "first", port).choose(stack)
        assert not servers.starts_own and engine.owner is not None
        assert servers.line.startswith(f"using the inference server that answers at {engine.url}")
        second = Launcher(tmp_path / "second", port)
        assert second.choose(stack).starts_own and second.port != port
        said = r"belongs to the run in .*:.*first.*--inference\.server\.port"
        refused(explicit(tmp_path / "third", port), stack, said)
        # The same run, started again, has its server still.
        assert not Launcher(tmp_path / "first", port).choose(stack).starts_own
        stack.close()
        assert engine.owner is None


def test_a_free_server_of_another_user_is_used_only_where_it_is_named(tmp_path: Path) -> None:
    with offered(lie_uid=1) as (engine, port, stack):
        launcher = Launcher(tmp_path / "first", port)
        servers = launcher.choose(stack)
        assert servers.starts_own and launcher.port > port and engine.owner is None
        assert f"is another user's (uid {os.getuid() + 1})" in servers.line
        assert not explicit(tmp_path / "second", port).choose(stack).starts_own and engine.owner is not None


@pytest.fixture
def ending_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what a run has left at a port for longer than a busy machine takes to end it."""
    monkeypatch.setattr("holdfast.launcher.server_choice._ENDING_S", HANG_S)


WAITING = f"Waiting for up to {HANG_S:g} s: the last start of this run may have left it"


def test_a_run_that_was_killed_and_is_started_again_waits_for_what_it_has_left_at_its_port(
    tmp_path: Path, first_port: int, told: Told, when: When, ending_s: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDir(tmp_path).create()
    engine = FakeEngine(owner="mine", directory=directory_name(RunDir(tmp_path)), lease_s=None)
    with ExitStack() as left, ExitStack() as stack:
        left.enter_context(serving(engine))
        port = int(engine.url.rsplit(":", 1)[1])
        # Nobody asked for this port, so there is nothing to wait for.
        other = Launcher(tmp_path, port)
        assert other.choose(stack).starts_own and other.port > port
        when(lambda: WAITING in told(), left.close)
        assert explicit(tmp_path, port).choose(stack).starts_own
    with socket.socket() as loading, ExitStack() as stack:  # it still loads, and answers nothing
        loading.bind((HOST, first_port))
        when(lambda: told().count(WAITING) == 2, loading.close)
        assert explicit(tmp_path, first_port).choose(stack).starts_own
    monkeypatch.setattr("holdfast.launcher.server_choice._ENDING_S", 0.2)
    with socket.socket() as stays, ExitStack() as stack:
        stays.bind((HOST, first_port))
        refused(explicit(tmp_path, first_port), stack, f":{first_port} is in use")
    assert "Waiting for up to 0.2 s" in told()
    waits = told().count("Waiting")
    RunDir(tmp_path).lock()  # from here on it is under way
    with socket.socket() as loading, ExitStack() as stack:
        loading.bind((HOST, first_port))
        refused(explicit(tmp_path, first_port), stack, f":{first_port} is in use")
    assert told().count("Waiting") == waits


def test_what_a_stranger_at_the_port_says_is_one_harmless_line(tmp_path: Path) -> None:
    with offered(model="\x1b[2J\nerror: forged " + "x" * 5000) as (_, port, stack):
        line = Launcher(tmp_path, port).choose(stack).line
    assert "serves the model '" in line and line.isprintable() and len(line) < 1000
    with offered(model="x" * (1 << 21)) as (_, port, stack):
        line = Launcher(tmp_path, port).choose(stack).line
    assert "is not an inference server of holdfast" in line, "what has no end is not read to it"


def test_a_server_with_another_model_is_left_alone(tmp_path: Path) -> None:
    with offered(model="another/model") as (engine, port, stack):
        launcher = Launcher(tmp_path, port)
        assert "serves the model 'another/model'" in launcher.choose(stack).line
        assert launcher.port != port and engine.owner is None
        refused(explicit(tmp_path, port), stack, "serves the model 'another/model', this run trains")


class _NoHttp(BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


@pytest.mark.parametrize("handler", [BaseHTTPRequestHandler, _NoHttp])
def test_a_program_that_is_not_ours_is_passed_by(tmp_path: Path, handler: type[BaseRequestHandler]) -> None:
    with answering(handler) as foreign, ExitStack() as stack:
        launcher = Launcher(tmp_path, foreign)
        servers = launcher.choose(stack)
        assert servers.starts_own and launcher.port > foreign
        assert "is not an inference server of holdfast" in servers.line
        refused(explicit(tmp_path, foreign), stack, "is not an inference server of holdfast")


def test_a_launcher_claims_its_server_as_long_as_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.launcher.server_choice._HEARTBEAT_S", 0.01)
    with offered() as (engine, port, stack):
        Launcher(tmp_path, port).choose(stack)

        async def refuse_for_a_while() -> None:
            if engine.claims < 5:
                raise HTTPException(503, "loading")

        engine.on_claim = refuse_for_a_while
        engine.owner = None  # restarted
        wait_until(lambda: engine.owner is not None)
        RunDir(tmp_path).create()
        wait_until(lambda: engine.owner == RunDir(tmp_path).run_id())
        stack.close()
        assert engine.owner is None


def test_a_launcher_whose_run_it_was_gives_back_what_was_claimed_before(tmp_path: Path) -> None:
    """A sign of life that came after the orchestrator gave it back would hold the server for a lease more."""
    engine = FakeEngine(directory=directory_name(RunDir(tmp_path)), owner="the run before")
    with serving(engine):
        for is_own in (False, True):
            with ExitStack() as stack:
                Launcher(tmp_path, int(engine.url.rsplit(":", 1)[1])).choose(stack)
                if is_own:
                    RunDir(tmp_path).lock()
            assert (engine.owner is None) is is_own


def test_a_server_that_cannot_be_given_back_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ended", "replaced"):
        with ExitStack() as stack:
            engine = FakeEngine()
            with serving(engine):
                port = int(engine.url.rsplit(":", 1)[1])
                Launcher(tmp_path / name, port).choose(stack)
            if name == "replaced":
                with answering(BaseHTTPRequestHandler, port):
                    stack.close()
        told = capsys.readouterr().out
        assert ("was not given back, so other runs cannot use it yet: HTTP Error 501" in told) is (name == "replaced")


def test_a_server_that_refuses_the_claim_or_does_not_answer_it_is_not_taken(tmp_path: Path) -> None:
    async def taken_just_now() -> None:
        engine.owner = "another"

    async def loading() -> None:
        raise HTTPException(503, "loading")

    with offered() as (engine, port, stack):
        engine.token = "secret"
        refused(explicit(tmp_path, port), stack, r"asks for its admin token \(HOLDFAST_ADMIN_TOKEN\)")
        engine.token = None
        for on_claim, why in ((loading, "says HTTP Error 503"), (taken_just_now, "was taken by another run just now")):
            engine.on_claim = on_claim
            refused(explicit(tmp_path, port), stack, f"{engine.url} {why}")

    class Ending(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            served = ServedWeights(None, None, MODEL, uid=os.getuid(), boot_id="first", owner=None)
            self.wfile.write(msgspec.json.encode(served))

        def do_POST(self) -> None:
            self.close_connection = True

    with answering(Ending) as port, ExitStack() as stack:
        refused(explicit(tmp_path, port), stack, r"gave no answer \(Remote end closed connection")


def test_a_server_claimed_before_a_wait_is_returned(tmp_path: Path, told: Told, when: When, ending_s: None) -> None:
    RunDir(tmp_path).create()
    free, ending = FakeEngine(), FakeEngine(owner="mine", directory=directory_name(RunDir(tmp_path)), lease_s=None)
    with serving(free, ending), ExitStack() as stack:
        launcher = Launcher(tmp_path, 1, "--orchestrator.client.urls", f'["{free.url}", "{ending.url}"]')
        when(lambda: WAITING in told(), lambda: setattr(ending, "owner", None))
        launcher.choose(stack)
        assert free.claims >= 2 and free.owner == ending.owner == RunDir(tmp_path).run_id()
        RunDir(tmp_path).lock()  # it is this run's, so all is given back
        stack.close()
        assert free.released == ending.released == [RunDir(tmp_path).run_id()]


def test_where_the_teacher_samples_no_server_is_chosen(tmp_path: Path) -> None:
    with offered() as (engine, port, stack):
        flags = ("--orchestrator.teacher.model", MODEL, "--orchestrator.teacher.urls", '["http://127.0.0.1:9"]')
        flags += ("--orchestrator.teacher.mode", "samples", "--trainer.loss.type", "sft")
        servers = Launcher(tmp_path, port, *flags).choose(stack)
        assert servers == Servers(False, "the teacher samples: the policy needs no inference server")
        assert engine.owner is None


def test_a_server_is_given_back_also_when_the_storage_is_away(tmp_path: Path) -> None:
    """And what ended the run is told, not that."""
    engine, directory = FakeEngine(), tmp_path / "run"
    with serving(engine), pytest.raises(RuntimeError, match="the end of the run"), ExitStack() as stack:
        Launcher(directory, int(engine.url.rsplit(":", 1)[1])).choose(stack)
        RunDir(directory).lock()
        directory.rename(tmp_path / "away")
        directory.symlink_to(directory)  # whatever is looked for there is an error
        raise RuntimeError("the end of the run")
    assert engine.owner is None


def test_the_server_of_the_teacher_is_not_taken_for_the_policy(tmp_path: Path, first_port: int) -> None:
    with offered() as (engine, port, stack):
        teacher = ("--orchestrator.teacher.model", MODEL, "--orchestrator.teacher.urls")
        launcher = Launcher(tmp_path, port, *teacher, f'["{engine.url}/"]')
        assert launcher.choose(stack).starts_own and launcher.port > port and engine.owner is None
        later = Launcher(tmp_path, first_port, *teacher, f'["http://{HOST}:{first_port}"]')
        assert later.choose(stack).starts_own and later.port == first_port + 1, "its teacher will be served there"
        both = Launcher(tmp_path, 1, *teacher, f'["{engine.url}"]', "--orchestrator.client.urls", f'["{engine.url}"]')
        refused(both, stack, r"is where the teacher is served.*--orchestrator\.client\.urls")


def test_a_dry_run_holds_nothing(tmp_path: Path) -> None:
    with offered() as (engine, port, stack):
        assert not Launcher(tmp_path, port, "--dry-run").choose(stack).starts_own and engine.owner is None


def test_servers_that_were_named_are_used_if_no_other_run_has_them(tmp_path: Path) -> None:
    free, taken = FakeEngine(), FakeEngine(owner="another run")
    with serving(free, taken), ExitStack() as stack:
        named = Launcher(tmp_path, 1, "--orchestrator.client.urls", f'["{free.url}"]')
        assert not named.choose(stack).starts_own and free.owner is not None
        both = Launcher(tmp_path, 1, "--orchestrator.client.urls", f'["{free.url}", "{taken.url}"]')
        refused(both, stack, f"{taken.url} belongs to the run in node:/elsewhere")
        absent = Launcher(tmp_path, 1, "--orchestrator.client.urls", '["http://127.0.0.1:9"]')
        assert absent.choose(stack).line == "using the inference servers at http://127.0.0.1:9"


def test_ports_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.launcher.server_choice.NUM_CANDIDATES", 1)
    with socket.create_server((HOST, 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"no port from {port} to {port} is free"):
            reserve_first_free(HOST, port)
        with pytest.raises(ConfigError, match=f"not 2 ports in a row from {port} to {port + 1} are free"):
            reserve_first_free(HOST, port, count=2)
