"""`rl` on the real engine, killed and frozen: what it samples is trained on, and a run of which nothing is left goes on
in the same bits. Most runs of the tests are on the stub engine."""

import json
import random
import signal
from pathlib import Path

import pytest

from holdfast.chat.tokenizer import load_tokenizer
from holdfast.commands.rollouts_trace import trace
from holdfast.errors import InferenceError
from holdfast.run.journal import read_batch
from holdfast.run.metrics import read_metrics
from tests.faults.blows import STEPS, Blow, awaited, deal, find_process
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.integration.test_rl_exact import LOG_RATIO_TOLERANCE
from tests.runs.ports import free_port
from tests.runs.rl import MODEL, SMALL_BATCH, CompletedRun, RlRun, assert_same_end, complete, exact_metrics, succeeded

pytestmark = [pytest.mark.engine, pytest.mark.launch, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def straight(vllm_server: UsedServer, tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    """The run of 20 steps that nothing disturbs."""
    return succeeded(tmp_path_factory.mktemp("straight") / "run", *vllm_server.flags, *STEPS)


@pytest.mark.everyday
def test_a_short_run_trains_on_what_vllm_samples(vllm_server: UsedServer, tmp_path: Path) -> None:
    before = vllm_server.generated_tokens()
    flags = (*vllm_server.flags, "--async-level", "0", "--max-steps", "3", "--ckpt.interval", "2")
    run = succeeded(tmp_path / "run", *flags)
    assert run.run_dir.committed_steps() == [2, 3] and vllm_server.weights()["version"] == 2
    lines = exact_metrics(run.run_dir, range(1, 4))
    assert all(0 < line["mismatch/max_log_ratio"] <= LOG_RATIO_TOLERANCE for line in lines), lines
    rollouts = [rollout for step in (1, 2, 3) for rollout in read_batch(run.run_dir, step).rollouts]
    assert vllm_server.generated_tokens() - before >= sum(rollout.loss_mask.num_sampled for rollout in rollouts) > 0
    for index in (0, 5):
        traced = trace(run.run_dir, step="3", index=index, server=vllm_server.handle.url)
        assert traced.document["parts"] and not traced.problems
    with pytest.raises(InferenceError, match="sampled no token of this rollout"):
        trace(run.run_dir, step="2", index=0, server=vllm_server.handle.url)


def test_turns_that_stop_texts_end_are_trained_as_sampled_also_through_a_death(
    vllm_server: UsedServer, tmp_path: Path
) -> None:
    """In two turns and in rounds, so that a turn follows a stop text, and a stop text may lie across two parts."""
    stop = ["ab", "ba", "c"]
    section = {"id": "tests.runs.environments:TwoTurns", "sampling": {"stop": stop}}
    flags = ("--orchestrator.environments", json.dumps([section]), *vllm_server.flags, "--max-steps", "5")
    flags += ("--ckpt.interval", "2")
    rounds = ("--orchestrator.schedule", "rounds", "--orchestrator.round-tokens", "3", "--async-level", "2")
    for name, more in {"strict": ("--async-level", "0"), "rounds": rounds}.items():
        straight = succeeded(tmp_path / f"{name} straight", *flags, *more)
        lines = exact_metrics(straight.run_dir, range(1, 6 if name == "strict" else 2))
        assert all(0 < line["mismatch/max_log_ratio"] <= LOG_RATIO_TOLERANCE for line in lines), lines
        rollouts = [rollout for step in range(1, 6) for rollout in read_batch(straight.run_dir, step).rollouts]
        decode = load_tokenizer(str(MODEL)).decode
        texts = [decode(ids, skip_special_tokens=False) for one in rollouts for own, ids in one.stretches() if own]
        ended = [text for text in texts if text.endswith(tuple(stop))]
        assert len(ended) > 20 and not any(one in text[:-1] for text in ended for one in stop)
        with RlRun(tmp_path / f"{name} killed", *flags, *more, engine="vllm") as run:
            run.wait_for_step(1)
            awaited(run, "orchestrator").kill()
            run.wait_for_match("orchestrator was killed by signal 9")
            killed = complete(run)
        assert_same_end(killed, straight, 5)


_OWN_SERVER = [
    Blow(3, "inference", signal.SIGKILL, r"inference was killed by signal 9: starting it again \(restart 1 of 3\)"),
    Blow(7, "engine", signal.SIGKILL, r"inference ended with exit code \d+: starting it again \(restart 2 of 3\)"),
    Blow(11, "engine", signal.SIGSTOP, r"inference has (sent no heartbeat|made no progress) for \d+ s.*: killing it"),
]


def test_inference_and_its_engine_die_and_hang(straight: CompletedRun, tmp_path: Path) -> None:
    # An engine that is stopped while it takes new weights has this long.
    flags = (*SMALL_BATCH, "--inference.server.port", str(free_port()), "--inference.server.update-timeout-s", "10")
    healed = deal(tmp_path / "run", _OWN_SERVER, *flags, engine="vllm")
    assert_same_end(healed, straight, REFERENCE_STEPS)
    assert "Traceback" not in healed.output
    # Orchestrator and trainer went on as they were.
    assert [path.name for path in (healed.run_dir.path / "configs").iterdir()] == ["attempt_1"]


def test_two_engines_of_a_run_die_at_random_and_come_back(straight: CompletedRun, tmp_path: Path) -> None:
    """With vLLM, whose log-probabilities must not depend on which requests share a batch."""
    seed = random.SystemRandom().randrange(1000)
    rng = random.Random(seed)
    flags = ("--inference.engines", "2", "--inference.server.port", str(free_port(2)), "--ckpt.interval", "2")
    flags = (*SMALL_BATCH, "--max-steps", str(REFERENCE_STEPS), *flags)
    with RlRun(tmp_path / "run", *flags, engine="vllm") as run:
        run.wait_for_step(rng.randrange(1, 6))
        run.wait_for(lambda: find_process(run, "engine_1"), f"the second engine (seed {seed})")
        awaited(run, "inference_0").kill()
        run.wait_for_match(r"inference_0 was killed by signal 9: starting it again \(restart 1 of 3\)")
        # The first one still loads: now and then nobody is there.
        run.wait_for_step(rng.randrange(6, 12))
        awaited(run, "engine_1").kill()
        run.wait_for_match(r"inference_1 ended with exit code 75: starting it again \(restart 1 of 3\)")
        done = complete(run)
    assert_same_end(done, straight, REFERENCE_STEPS)
    metrics = list(read_metrics(done.run_dir.metrics))
    assert any(step["engine/0/requests"] for step in metrics) and any(step["engine/1/requests"] for step in metrics)
    # Trainer and orchestrator went on as they were.
    assert [path.name for path in (done.run_dir.path / "configs").iterdir()] == ["attempt_1"]
