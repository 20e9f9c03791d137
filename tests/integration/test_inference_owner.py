"""A server, with either engine, and the runs that want it: what it serves only to whom, and whose it is."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.run.run_dir import RunDir
from holdfast.run.weights import weights_digest
from tests.forking.engines import config_of, start_server
from tests.forking.popen import Engine
from tests.integration.conftest import Served
from tests.models.served import write_model
from tests.runs.processes import wait_until

SHORT_LEASE_S = 1.0
MINE = {"run_id": "mine", "directory": "node:/mine"}
OTHER = {"run_id": "other", "directory": "node:/other"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        write_model(directory / name, seed=seed, tied=True)
    return directory


class Owned(Served):
    """A server whose owner keeps it however late a test is, unless it is told otherwise."""

    def __init__(
        self, engine: Engine, models: Path, directory: Path, *, owner: Path | None = None, lease_s: float = 3600.0
    ) -> None:
        config = config_of(models / "a", server={"lease_s": lease_s})
        super().__init__(start_server(engine, config, directory / "inference.log", owner=owner).wait_ready())

    def owner(self) -> str | None:
        found = self.weights()["owner"]
        return found and found["run_id"]


@pytest.fixture(scope="module")
def server(engine: Engine, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owned]:
    with Owned(engine, models, tmp_path_factory.mktemp("server")) as server:
        yield server


def test_a_request_is_answered_by_the_weights_that_it_is_for_or_refused(server: Owned, models: Path) -> None:
    a, b = (weights_digest(models / name) for name in "ab")
    assert server.update(models / "a", 1).status_code == 200
    answer = server.ask(weights_digest=a)
    assert answer.status_code == 200
    assert [(span["version"], span["digest"]) for span in answer.json()["choices"][0]["versions"]] == [(1, a)]
    assert answer.json()["boot_id"] == server.weights()["boot_id"]
    # The number stays the same, the weights do not.
    assert server.update(models / "b", 1).status_code == 200
    refused = server.ask(weights_digest=a)
    assert (refused.status_code, refused.json()["code"]) == (409, "other_weights")
    assert a in refused.json()["error"] and b in refused.json()["error"]
    assert server.ask(weights_digest=b).status_code == 200
    assert server.ask().status_code == 200, "who names no weights gets what serves"


def test_weights_of_others_are_refused_until_the_owner_gives_it_back(server: Owned, models: Path) -> None:
    assert server.update(models / "a", 3, MINE).status_code == 200
    for intruder in (OTHER, None):
        refused = server.update(models / "b", 4, intruder)
        assert (refused.status_code, refused.json()["code"]) == (409, "owned")
        said = r"owned by the run in node:/mine \(run mine, last heard of \d+ s ago\)"
        assert re.search(said, refused.json()["error"]), refused.text
    assert server.http.post("/claim", json=OTHER).status_code == 409
    assert server.http.post("/release", json=OTHER).status_code == 200
    assert server.weights()["version"] == 3 and server.owner() == "mine"
    assert server.update(models / "a", 4, MINE | {"directory": "node:/moved"}).status_code == 200
    assert server.http.post("/release", json=MINE).status_code == 200
    assert server.owner() is None and server.weights()["version"] == 4, "it serves on"
    assert server.update(models / "b", 5, OTHER).status_code == 200
    assert server.http.post("/release", json=OTHER).status_code == 200


@pytest.mark.clock
def test_a_run_silent_for_the_lease_owns_the_server_no_more(engine: Engine, models: Path, tmp_path: Path) -> None:
    with Owned(engine, models, tmp_path, lease_s=SHORT_LEASE_S) as server:
        assert server.http.post("/claim", json=MINE).status_code == 200
        wait_until(lambda: server.owner() is None, "the end of the lease")

        def belongs_to_the_next() -> bool:  # who is silent as well where this test is late, and takes it once more
            answers = (
                server.http.post("/claim", json=OTHER),
                server.update(models / "b", 1, MINE),
                server.update(models / "b", 1, OTHER),
            )
            return [answer.status_code for answer in answers] == [200, 409, 200]

        wait_until(belongs_to_the_next, "the next owner")


def test_a_server_of_one_run_is_refused_to_others_after_a_restart(engine: Engine, models: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    run_dir.create()
    mine = {"run_id": run_dir.run_id(), "directory": f"node:{run_dir.path}"}
    boots = set()
    for _ in range(2):
        server = Owned(engine, models, tmp_path, owner=run_dir.path)
        boots.add(server.weights()["boot_id"])
        refused = server.update(models / "b", 1, OTHER)
        assert refused.status_code == 409 and "was started for that run alone" in refused.json()["error"]
        assert server.update(models / "b", 1, mine).status_code == 200
        server.http.close()
        server.handle.kill()
    assert len(boots) == 2
