"""A batch names the weights that sampled it, and a trainer that has others under that number says so."""

import json
from pathlib import Path

import pytest

from holdfast.process.events import EVENTS_ENV
from holdfast.protocol.rollouts import Batch
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import weights_digest
from holdfast.trainer.rl.accounting import check_provenance
from tests.servers.orchestrator_fakes import publish_weights


def make_batch(digest: str, *, version: int = 3) -> Batch:
    return Batch(step=version + 2, policy_version=version, weights_digest=digest, rollouts=[])


def test_a_batch_of_other_weights_with_the_same_number_is_told_with_both_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (events := tmp_path / "events").touch()
    monkeypatch.setenv(EVENTS_ENV, str(events))
    run_dir = RunDir(tmp_path)
    publish_weights(run_dir, 3, b"before the restart")
    sampled = weights_digest(run_dir.weights_of(3))
    assert check_provenance(run_dir, make_batch(sampled)) and events.read_text() == ""
    publish_weights(run_dir, 3, b"made again, with other bits")
    assert not check_provenance(run_dir, make_batch(sampled))
    told = json.loads(events.read_text())
    assert told["step"] == 5
    assert told["phase"].startswith("WARNING: batch 5 was sampled by other weights than version 3 has now")
    assert sampled in told["phase"] and weights_digest(run_dir.weights_of(3)) in told["phase"]


def test_what_cannot_be_compared_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EVENTS_ENV, str(tmp_path / "events"))
    run_dir = RunDir(tmp_path)
    publish_weights(run_dir, 3, b"three")
    assert check_provenance(run_dir, make_batch("of version 2, which is pruned", version=2))
    assert check_provenance(run_dir, make_batch("")), "a teacher sampled it"
    assert not (tmp_path / "events").exists()
