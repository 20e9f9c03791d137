"""Chooses the inference servers of an `rl` run: a free server that already answers, servers given by URL, or its own.

The launcher chooses and claims servers before it touches anything. Two launchers that look at the same moment never
take the same server or port. A port reservation is an abstract Unix socket with the port in its name. The kernel gives
a name to one process at a time, frees it however that process ends, and separates names by network namespace, as it
separates ports. A loading server does not listen yet, so nothing else could show that its port is taken.
"""

import os
import socket
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException

import msgspec

from holdfast.config.rl import RlConfig
from holdfast.errors import ConfigError, InferenceError, printable
from holdfast.launcher.liveness import open_directly
from holdfast.protocol import inference as api
from holdfast.run.run_dir import RunDir, directory_name, owner_of

NUM_CANDIDATES = 100
"""Ports to try."""


class Reservation:
    """A port of this process, and of the server that it starts or becomes, until `release` or its end."""

    def __init__(self, port: int, holder: socket.socket) -> None:
        self.port = port
        self._holder = holder

    def keep_over_exec(self) -> None:
        """Let the program that takes the place of this one keep the port."""
        self._holder.set_inheritable(True)

    def release(self) -> None:
        """Let go of the port."""
        self._holder.close()


def reserve(host: str, port: int) -> Reservation | None:
    """Reserve `port`; return None if a launcher or a server has it, or any program listens at it on `host`."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0holdfast-port-{port}".encode())
    except OSError:
        holder.close()
        return None
    reservation = Reservation(port, holder)
    # After the name is taken: two launchers that look at once must not both find it free.
    if not _can_bind(host, port):
        reservation.release()
        return None
    return reservation


def reserve_first_free(host: str, first: int, *, count: int = 1) -> list[Reservation]:
    """Reserve the first `count` free ports in a row from `first` on. Raise ConfigError if there are none among
    `NUM_CANDIDATES`."""
    last = min(first + NUM_CANDIDATES + count - 2, 65535)
    held: list[Reservation] = []
    for port in range(first, last + 1):
        reservation = reserve(host, port)
        if reservation is None:
            release_all(held)
        else:
            held.append(reservation)
        if len(held) == count:
            return held
    release_all(held)
    free = "no port" if count == 1 else f"not {count} ports in a row"
    raise ConfigError(
        f"{free} from {first} to {last} {'is' if count == 1 else 'are'} free on {host}. Name one with "
        "--inference.server.port, or another address with --inference.server.host."
    )


def release_all(held: list[Reservation]) -> None:
    """Release all ports in the list, and empty the list."""
    while held:
        held.pop().release()


def _can_bind(host: str, port: int) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server binds it: connections that ended a moment ago do not matter, a listener does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


_REFUSED = 2  # nothing was started: an error of the configuration
_TIMEOUT_S = 10.0
# The orchestrator sends heartbeats as well, but may not have started, or be dead.
_HEARTBEAT_S = 20.0
_ENDING_S = 30.0  # for what a launcher that was killed leaves
_LOOK_AGAIN_S = 0.05
_FAILURES = (OSError, ValueError, HTTPException, RecursionError)
_MOST_BYTES = 1 << 20  # of an answer: a foreign server may send without end


class _Taken(Exception):
    """Why this run cannot use a server or port. `may_be_ending`: the last start of the run may have left it; then it
    ends by itself."""

    def __init__(self, reason: str, *, may_be_ending: bool = False) -> None:
        super().__init__(reason)
        self.may_be_ending = may_be_ending


@dataclass(frozen=True)
class Servers:
    """The engines of a run.

    Attributes:
        starts_own: the run starts servers of its own at the addresses in its configuration.
        line: printed for the user; may be empty.
    """

    starts_own: bool
    line: str


def picks_its_port(config: RlConfig) -> bool:
    """Whether `config`, as the user wrote it, leaves the port of the server to the run."""
    return (
        "port" not in config.inference.server.model_fields_set
        and "urls" not in config.orchestrator.client.model_fields_set
    )


@contextmanager
def chosen_servers(config: RlConfig, *, picks_port: bool) -> Iterator[Servers]:
    """Choose servers, and hold them until the end; then give them back.

    A port that is picked is written into `config`. A dry run holds nothing. Raise InferenceError with exit code 2 if
    the address is taken by another run, another model or another program; ConfigError if no port is free."""
    choice = _ServerChoice(config)
    try:
        yield choice.make(picks_port=picks_port)
    finally:
        choice.end()


class _ServerChoice:
    def __init__(self, config: RlConfig) -> None:
        self._config = config
        self._run_dir = RunDir(config.output_dir)
        self._new_id = uuid.uuid4().hex
        teacher = config.orchestrator.teacher
        self._teachers = {url.rstrip("/") for url in teacher.urls} if teacher else set[str]()
        self._claimed: dict[str, bool] = {}  # by URL: whether the server was free
        self._held: list[Reservation] = []
        self._is_over = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, daemon=True)

    def make(self, *, picks_port: bool) -> Servers:
        config = self._config
        if config.orchestrator.is_sampled_by_teacher:
            return Servers(False, "the teacher samples: the policy needs no inference server")
        deadline, is_told = time.monotonic() + _ENDING_S, False
        while True:
            try:
                return self._choose(picks_port=picks_port)
            except _Taken as taken:
                release_all(self._held)
                if picks_port:
                    return self._own_servers(str(taken))
                # Processes that a launcher started end moments after the launcher.
                was_cut_off = self._run_dir.holds_run() and not self._run_dir.is_under_way()
                if not (taken.may_be_ending and was_cut_off and time.monotonic() < deadline):
                    other = "choose another port with --inference.server.port"
                    if config.orchestrator.client.urls != config.inference.urls:
                        other = "name other servers with --orchestrator.client.urls"
                    raise InferenceError(f"{taken}. Wait for it, or {other}.", exit_code=_REFUSED) from None
                if not is_told:
                    is_told = True
                    why = "the last start of this run may have left it"
                    print(f"{taken}. Waiting for up to {_ENDING_S:g} s: {why}", flush=True)
                time.sleep(_LOOK_AGAIN_S)  # no event tells when another process lets go of a port

    def _choose(self, *, picks_port: bool) -> Servers:
        """Make the choice. Raise _Taken if the address is not for this run."""
        config = self._config
        own, urls = config.inference.urls, config.orchestrator.client.urls
        for url in urls:
            if url.rstrip("/") in self._teachers:
                raise _Taken(f"{url} is where the teacher is served (orchestrator.teacher.urls)")
            if url not in own:
                self._claim_if_there(url)
        starts = [url for url in own if url in urls]
        if len(own) > 1 and len(starts) < len(own):
            raise InferenceError(
                f"inference.engines = {len(own)} starts servers at {', '.join(own)}, and orchestrator.client.urls "
                f"names {len(starts)} of them: name all, or leave one of the two settings out",
                exit_code=_REFUSED,
            )
        if not starts:
            return Servers(False, f"using the inference servers at {', '.join(urls)}")
        # Several are always started: which of them were there already would be hard to tell.
        if len(own) == 1 and (model := self._use(own[0], anyones=not picks_port)) is not None:
            return Servers(False, f"using the inference server that answers at {own[0]} (model {model})")
        if picks_port:
            return self._own_servers("another run or program has it")
        if not config.dry_run:
            for number, url in enumerate(own):
                reservation = reserve(config.inference.server.host, config.inference.server.port + number)
                if reservation is None:
                    raise _Taken(f"{url} is in use, by a run that starts or by another program", may_be_ending=True)
                self._held.append(reservation)
        return Servers(True, "")

    def end(self) -> None:
        """Give the servers and ports back."""
        self._is_over.set()
        if self._claimed:
            self._heartbeat.join()  # it would claim the server again, after its release
        # A launcher that found its run under way gives back only what was free. The launcher of the run gives back all:
        # its last heartbeat may have come after the orchestrator gave the server back.
        is_own = self._run_dir.is_own()
        for url in [url for url, was_free in self._claimed.items() if was_free or is_own]:
            try:
                self._post(url, api.RELEASE_ROUTE)
            except _FAILURES as error:
                if isinstance(getattr(error, "reason", None), ConnectionRefusedError):
                    continue  # it has ended
                print(f"{url} was not given back, so other runs cannot use it yet: {error}")
        release_all(self._held)

    def _send_heartbeats(self) -> None:
        while not self._is_over.wait(_HEARTBEAT_S):
            for url in tuple(self._claimed):  # a copy: the other thread adds to it
                with suppress(*_FAILURES):  # the orchestrator raises the error when it needs the server
                    self._post(url, api.CLAIM_ROUTE)

    def _own_servers(self, why: str) -> Servers:
        """Start servers of this run at the first free ports."""
        inference = self._config.inference
        server, count = inference.server, inference.engines
        first = wanted = server.port
        while True:
            self._held = reserve_first_free(server.host, first, count=count)
            server.port = self._held[0].port
            if self._teachers.isdisjoint(inference.urls):  # the teacher may not have started yet
                break
            release_all(self._held)
            first = server.port + 1
        self._config.orchestrator.client.urls = inference.urls
        if server.port == wanted:
            return Servers(True, "")
        gets = f"the inference server of this run gets {server.port}"
        if count > 1:
            gets = f"the inference servers of this run get {server.port} to {server.port + count - 1}"
        return Servers(True, f"port {wanted} is not free ({why}): {gets}")

    def _use(self, address: str, *, anyones: bool) -> str | None:
        """Claim the server at `address` and return its model; None if nobody listens. `anyones`: the user named it;
        otherwise it must be a server of the same user. Raise _Taken if the server belongs to another run."""
        served = _look(address)
        if served is None:
            return None
        if not anyones and served.uid != os.getuid():
            raise _Taken(f"the inference server at {address} is another user's (uid {served.uid})")
        wanted = self._config.inference.model.name
        if not api.same_model(served.model, wanted):
            raise _Taken(
                f"the inference server at {address} serves the model '{printable(served.model)}', this run "
                f"trains '{wanted}'"
            )
        self._claim(address, served)
        return served.model

    def _claim_if_there(self, url: str) -> None:
        """Claim a server that the user named; the orchestrator waits for a server that is not started yet."""
        try:
            served = _look(url)
        except _Taken:  # the orchestrator raises the error, after it has waited
            return
        if served is not None:
            self._claim(url, served)

    def _claim(self, url: str, served: api.ServedWeights) -> None:
        """Own the server at `url`. Raise _Taken if another run does."""
        owner, me = served.owner, self._me
        if owner is not None and owner.run_id != me.run_id and owner.directory != me.directory:
            raise _Taken(f"the inference server at {url} belongs to the run in {printable(owner.directory)}")
        if owner is not None and owner.lease_s is None and not self._run_dir.is_under_way():
            # The server's launcher has ended, so the server will end, too.
            raise _Taken(f"the inference server at {url} is of the last start of this run", may_be_ending=True)
        if self._config.dry_run:
            return
        try:
            self._post(url, api.CLAIM_ROUTE)
        except urllib.error.HTTPError as error:
            error.close()
            why = {
                401: f"asks for its admin token ({self._config.orchestrator.client.admin_token_env})",
                409: "was taken by another run just now",
            }
            raise _Taken(f"the inference server at {url} {why.get(error.code, f'says {error}')}") from None
        except _FAILURES as error:
            raise _Taken(f"the inference server at {url} gave no answer ({error})", may_be_ending=True) from None
        self._claimed.setdefault(url, owner is None)
        if not self._heartbeat.is_alive():
            self._heartbeat.start()

    @property
    def _me(self) -> api.Owner:
        """The run as an owner, also before its directory exists."""
        if self._run_dir.holds_run() and not self._run_dir.is_copy():
            return owner_of(self._run_dir)
        return api.Owner(self._new_id, directory_name(self._run_dir))

    def _post(self, url: str, route: str) -> None:
        token = api.read_admin_token(self._config.orchestrator.client.admin_token_env)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(f"{url}{route}", msgspec.json.encode(self._me), headers)
        with open_directly(request, timeout_s=_TIMEOUT_S):
            return


def _look(url: str) -> api.ServedWeights | None:
    """Return what the server at `url` serves; None if nobody listens. Raise _Taken if something else answers."""
    try:
        with open_directly(f"{url}{api.WEIGHTS_ROUTE}", timeout_s=_TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(_MOST_BYTES), type=api.ServedWeights)
    except urllib.error.HTTPError as error:
        error.close()
        why, may_be_ending = f"HTTP {error.code}", False
    except _FAILURES as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ConnectionRefusedError):
            return None
        why, may_be_ending = f"{type(error).__name__}: {reason}", isinstance(error, OSError)
    message = f"something answers at {url}, but it is not an inference server of holdfast ({printable(why)})"
    raise _Taken(message, may_be_ending=may_be_ending)
