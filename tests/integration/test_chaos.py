"""A short chaos run: the long form is `python -m tests.chaos`."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from holdfast.orchestrator.evaluation.results import ROLLOUTS_NAME
from holdfast.orchestrator.judge_client import Replied
from holdfast.run.record_log import read_records
from holdfast.run.run_dir import RunDir
from tests.chaos.__main__ import IN_ROUNDS
from tests.chaos.driver import JUDGE, Chaos
from tests.chaos.everything import AT_ONCE, PLAYERS, TURNS, JudgeProcess, has_sandbox, settings_of
from tests.chaos.invariants import check
from tests.chaos.schedule import DISK, draw, shares, steps_of
from tests.faults.disks import SmallDisk
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.runs.rl import CompletedRun, succeeded
from tests.runs.trackers import TrackedDirectory

_KILLS, _STOPS = 5, 1
_SEED = 7
_DISK_MIB = 128


@pytest.mark.timeout(1800)
@pytest.mark.launch
def test_a_run_that_is_hit_often_ends_alike(rl_server: UsedServer, reference: CompletedRun, tmp_path: Path) -> None:
    """Also where the disk fills up meanwhile, if one can be mounted here."""
    flags = (*rl_server.flags, "--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2")
    victims = shares(engines=0)  # the inference server is somebody else's
    with SmallDisk(tmp_path / "small", size_mib=_DISK_MIB) as small:
        disk = small if small.problem is None else None
        hits = draw(_KILLS, _SEED, victims, stops=_STOPS, full_disks=int(disk is not None), steps_per_hit=2)
        before = rl_server.generated_tokens()
        chaos = Chaos(tmp_path / "run", hits, *flags, disk=disk).run(timeout_s=1500)
        generated = rl_server.generated_tokens() - before
        check(chaos, reference, max_steps=REFERENCE_STEPS)
        assert {blow.hit.victim for blow in chaos.blows} == {*victims, *([DISK] if disk else [])}
        assert (chaos.storage_waits() > 0) == (disk is not None)
        # The server counts what it sampled: more than is in the batches was in flight when somebody died.
        state = chaos.run_dir.checkpoint(REFERENCE_STEPS) / "orchestrator" / "orchestrator.json"
        in_flight = generated - json.loads(state.read_text())["sampled_tokens"]
        batches = chaos.witness.batches().values()
        largest = max(sum(sum(rollout.loss_mask) for rollout in made[-1].rollouts) for made in batches)
        assert 0 <= in_flight < (len(chaos.blows) + chaos.storage_waits() + 1) * largest


@pytest.mark.timeout(1800)
@pytest.mark.launch
def test_a_run_in_rounds_that_is_hit_often_ends_alike(rl_server: UsedServer, tmp_path: Path) -> None:
    """Also with two turns and a slow tool: answers in the middle go on from their parts."""
    environment = ("--orchestrator.environments", '[{"id": "tests.chaos.slow_tool:SlowTool"}]')
    flags = (*rl_server.flags, *IN_ROUNDS, *environment, "--max-steps", "12", "--ckpt.interval", "3")
    reference = succeeded(tmp_path / "reference", *flags)
    hits = draw(4, _SEED, shares(engines=0), steps_per_hit=2)
    chaos = Chaos(tmp_path / "run", hits, *flags).run(timeout_s=1500)
    check(chaos, reference, max_steps=12, turns=None)
    assert chaos.blows


def evaluated(run_dir: RunDir) -> dict[str, list[bytes]]:
    """Return what each evaluation has played, whatever came first."""
    return {
        path.parent.name: sorted(path.read_bytes().splitlines()) for path in run_dir.evaluations.rglob(ROLLOUTS_NAME)
    }


@pytest.mark.timeout(1800)
@pytest.mark.launch
@pytest.mark.parametrize("seed", [11])
def test_whatever_plays_scores_or_tells_is_hit_at_no_cost(seed: int, rl_server: UsedServer, tmp_path: Path) -> None:
    """Workers, MCP servers, sandboxes, mathematics, judge, evaluations, tracker; no kept answer is asked again."""
    with JudgeProcess(tmp_path / "asked_before") as judge:
        victims = {name: 1.0 for name in shares(engines=0, others=(*PLAYERS, JUDGE)) if name != "trainer"}
        if not has_sandbox():
            del victims["sandbox"]
        steps = len(victims) + 6  # a hit may have to wait for a step until its victim is there
        run = ("--orchestrator.problems-per-step", "2", "--orchestrator.group-size", "2", "--max-steps", str(steps))
        flags = (*rl_server.flags, *run, "--ckpt.interval", "2", *settings_of(judge.port))
        reference = succeeded(tmp_path / "reference", *flags)
    hits = draw(len(victims), seed, victims, steps_per_hit=1)
    with JudgeProcess(tmp_path / "asked", port=judge.port) as hit_judge:
        chaos = Chaos(tmp_path / "run", hits, *flags, judge=hit_judge, say=print).run(timeout_s=1500)
    check(chaos, reference, max_steps=steps, turns=TURNS)
    assert {blow.hit.victim for blow in chaos.blows} == set(victims)
    assert len(evaluated(chaos.run_dir)) > 2 and evaluated(chaos.run_dir) == evaluated(reference.run_dir)
    points = [
        TrackedDirectory.of(run).steps("tensorboard", "reward/mean") for run in (chaos.run_dir, reference.run_dir)
    ]
    assert list(points[0].values()) == list(points[1].values()) and [len(one) for one in points[0].values()] == [steps]

    payloads, damages = read_records(chaos.run_dir.judgements)
    kept = [msgspec.msgpack.decode(payload, type=Replied).request for payload in payloads]
    assert not damages and len(kept) == len(set(kept)), "a reply was kept twice"
    assert hit_judge.questions("answered").keys() == judge.questions("answered").keys()
    at_most = AT_ONCE * sum(blow.hit.victim not in PLAYERS for blow in chaos.blows)
    assert hit_judge.questions("asked").total() - len(kept) <= at_most, "so many were in flight when somebody died"


def test_a_schedule_can_be_repeated_and_hits_everybody() -> None:
    everybody = shares(ranks=2, engines=2)
    assert {"inference_0", "engine_1"} <= everybody.keys()
    assert draw(60, 1, everybody) == draw(60, 1, everybody) != draw(60, 2, everybody)
    assert {hit.victim for hit in draw(len(everybody), 3, everybody)} == set(everybody)
    others = {"freezes": 4, "outages": 3, "evictions": 2, "read_errors": 1}
    hits = draw(200, 1, everybody, stops=30, full_disks=20, **others)
    counts = {"SIGKILL": 200, "SIGSTOP": 30, "full": 20, "freeze": 4, "away": 3, "evict": 2, "EIO": 1}
    assert Counter(hit.kind for hit in hits) == counts
    assert max(hit.step or 0 for hit in hits) <= steps_of(260) - 8
    assert not any(hit.victim == "launcher" and hit.kind == "SIGSTOP" for hit in hits)
    assert {hit.victim for hit in hits if hit.kind in ("full", "EIO")} == {DISK}
