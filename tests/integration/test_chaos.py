"""A short chaos run: the long form is `python -m tests.chaos`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.chaos.driver import Chaos
from tests.chaos.invariants import check
from tests.chaos.schedule import SHARES, WITHOUT_SERVER, draw, steps_of
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.rl_runs import CompletedRun

_HITS = 7
_SEED = 7


@pytest.mark.timeout(600)
def test_a_run_that_is_hit_again_and_again_ends_as_the_undisturbed_one(
    rl_server: UsedServer, reference: CompletedRun, tmp_path: Path
) -> None:
    hits = draw(_HITS, _SEED, WITHOUT_SERVER, steps_per_hit=2)
    flags = (*rl_server.flags, "--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2")
    before = rl_server.generated_tokens()
    chaos = Chaos(tmp_path / "run", hits, *flags).run(timeout_s=300)
    generated = rl_server.generated_tokens() - before
    check(chaos, reference, max_steps=REFERENCE_STEPS)
    assert {blow.hit.victim for blow in chaos.blows} == set(WITHOUT_SERVER)
    # The server counts what it sampled: more than is in the batches was in flight when somebody died.
    state = chaos.run_dir.checkpoint(REFERENCE_STEPS) / "orchestrator" / "orchestrator.json"
    in_flight = generated - json.loads(state.read_text())["sampled_tokens"]
    batches = chaos.witness.batches().values()
    largest = max(sum(sum(rollout.loss_mask) for rollout in made[-1].rollouts) for made in batches)
    assert 0 <= in_flight < (len(chaos.blows) + 1) * largest


def test_a_schedule_can_be_repeated_and_hits_everybody() -> None:
    assert draw(60, 1) == draw(60, 1) != draw(60, 2)
    assert {hit.victim for hit in draw(len(SHARES), 3)} == set(SHARES)
    hits = draw(200, 1)
    assert {hit.number for hit in hits} == {signal.SIGKILL, signal.SIGSTOP}
    assert max(hit.step or 0 for hit in hits) <= steps_of(200) - 8
    assert not any(hit.victim == "launcher" and hit.number == signal.SIGSTOP for hit in hits)
