"""The parts of the orchestrator one by one: client, mix, seeds, log of generations, publisher, metrics."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.config.environments import EnvironmentConfig
from holdfast.config.orchestrator import ClientConfig, OrchestratorConfig
from holdfast.errors import CheckpointError, ConfigError, RunDirError
from holdfast.orchestrator import main
from holdfast.orchestrator.batch_maker import adopt_mix, next_environment, select
from holdfast.orchestrator.batch_pipeline import BatchPublisher, BatchTimes, batch_metrics
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.client.pool import EngineCounts
from holdfast.orchestrator.env.guard import place_of
from holdfast.orchestrator.episodes import Outcome
from holdfast.orchestrator.generation_log import GenerationLog, discard_generations
from holdfast.orchestrator.main import find_start
from holdfast.orchestrator.state import OrchestratorState, TaskSeed, request_seed
from holdfast.orchestrator.tasks import SessionSlots
from holdfast.orchestrator.weight_sync import PublishedWeights, WeightPusher, describe_weights, wait_for_weights
from holdfast.protocol import rollouts
from holdfast.protocol.inference import Completion, GenerateRequest
from holdfast.protocol.rollouts import Batch, Dropped, Logprobs, Rewards, Rollout, Sampling, TokenIds, VersionSpan
from holdfast.run import atomic, journal, manifest
from holdfast.run.manifest import MANIFEST_NAME, Manifest
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import weights_digest
from tests.builders.checkpoint_files import commit
from tests.builders.sampled_rollouts import sampled_rollout
from tests.runs.processes import HANG_S
from tests.servers import orchestrator_fakes as fakes
from tests.servers.orchestrator_fakes import FakeEngine, commit_checkpoint, make_config, publish_weights, serving


def mix(weights: Mapping[str, float]) -> OrchestratorConfig:
    """A config with environments of these names and weights."""
    return OrchestratorConfig(environments=[EnvironmentConfig(id=name, weight=one) for name, one in weights.items()])


def test_the_mix_keeps_its_shares_over_any_stretch() -> None:
    state = OrchestratorState()
    adopt_mix(state, mix({"a": 0.5, "b": 0.3, "c": 0.2}))
    chosen = [next_environment(state) for _ in range(100)]
    for start in range(0, 100, 10):
        assert Counter(chosen[start : start + 10]) == {"a": 5, "b": 3, "c": 2}
    assert chosen[:5] != ["a"] * 5


def test_the_mix_resumes_from_its_state_and_a_changed_mix_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    weights = {"a": 3.0, "b": 2.0}
    straight, resumed = OrchestratorState(), OrchestratorState()
    adopt_mix(straight, mix(weights))
    expected = [next_environment(straight) for _ in range(13)]
    adopt_mix(resumed, mix(weights))
    begun = [next_environment(resumed) for _ in range(4)]
    resumed = resumed.copy()
    adopt_mix(resumed, mix(weights))
    assert begun + [next_environment(resumed) for _ in range(9)] == expected and not caplog.records
    resumed.environments["a"].next_task = 5
    adopt_mix(resumed, mix({"a": 1.0, "new": 1.0}))
    assert "mix of environments changed" in caplog.text
    assert [next_environment(resumed) for _ in range(4)] == ["a", "new", "a", "new"]
    assert resumed.environments["a"].next_task == 5 and resumed.environments["b"].weight == 0


def test_request_seeds_differ_in_every_part() -> None:
    task, other = (TaskSeed(run_seed=0, environment="env", index=index) for index in range(2))
    places = itertools.product((task, other), range(4), range(4), range(4))
    seeds = {request_seed(one, step=step, sample_index=sample, turn=turn) for one, step, sample, turn in places}
    assert len(seeds) == 2 * 4**3 and seeds.isdisjoint({task.number, other.number, task.shared("epoch", 0)})


def test_the_client_returns_choices_in_the_order_of_the_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, run_dir = FakeEngine(token="secret"), RunDir(tmp_path)
    publish_weights(run_dir, 0, b"zero")
    monkeypatch.setenv("HOLDFAST_ADMIN_TOKEN", "secret")
    asked: dict[str, Any] = {"token_ids": [1, 5, 3, 2], "seeds": [8, 9], "max_tokens": 4, "stop_token_ids": [3]}

    async def use() -> tuple[list[Completion], float]:
        async with InferenceClient(make_config(tmp_path, engine).client, run_dir=run_dir) as client:
            weights = describe_weights(run_dir, 0)
            await WeightPusher(client, run_dir, timeout_s=HANG_S, seq_len=64).serve(weights, check=lambda: None)
            return list(await client.generate(GenerateRequest(**asked, weights_digest=weights.digest))), client.busy_s

    with serving(engine):
        choices, busy_s = asyncio.run(use())
    assert engine.digest == weights_digest(run_dir.weights_of(0)) == describe_weights(run_dir, 0).digest
    answers = {choice["index"]: choice["token_ids"] for choice in engine._answer(engine.requests[0])["choices"]}
    assert [choice.token_ids.tolist() for choice in choices] == [answers[0], answers[1]]
    assert all((choice.finish_reason == "stop") == (choice.token_ids[-1] == fakes.STOP_TOKEN) for choice in choices)
    assert busy_s > 0


async def _wait(config: ClientConfig, *, seq_len: int = 1024) -> None:
    async with InferenceClient(config) as client:
        await client.wait_until_ready(model="examples/reverse_text/base", seq_len=seq_len)


def test_readiness_checks_model_length_and_url(tmp_path: Path) -> None:
    engine = FakeEngine(model=str(Path("examples/reverse_text/base").absolute()), max_model_len=512)
    with serving(engine):
        config = make_config(tmp_path, engine).client
        asyncio.run(_wait(config, seq_len=512))
        said = r"sessions of 513 tokens are more than .* serves \(model\.max_len = 512\)"
        with pytest.raises(ConfigError, match=said):
            asyncio.run(_wait(config, seq_len=513))
        engine.max_model_len = "many"  # type: ignore[assignment]
        asyncio.run(_wait(config, seq_len=513))  # the server itself refuses what is too long


def test_the_place_of_an_error_that_came_through_no_code() -> None:
    assert place_of(ValueError("never raised")) == "an unknown place"


def test_weights_are_described_by_their_manifest_and_known_to_be_replaced(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    publish_weights(run_dir, 0, b"zero")
    weights = describe_weights(run_dir, 0)
    assert not weights.was_replaced()
    publish_weights(run_dir, 0, b"zero")
    assert weights.was_replaced()
    weights = describe_weights(run_dir, 0)
    listing = weights.path / MANIFEST_NAME
    written = listing.stat()
    while listing.stat().st_mtime_ns == written.st_mtime_ns:  # the clock of files stands still for some milliseconds
        listing.write_bytes(listing.read_bytes())
    assert listing.stat().st_ino == written.st_ino and weights.was_replaced(), "ext4 uses the inode of a removed file"
    weights = describe_weights(run_dir, 0)
    atomic.remove_directory(weights.path)
    assert weights.was_replaced()
    weights.path.mkdir()
    (weights.path / "config.json").write_text("{}")
    commit(weights.path, "weights", 0)
    with pytest.raises(CheckpointError, match=r"step_0 lists no \*\.safetensors file in its manifest"):
        describe_weights(run_dir, 0)


def test_weights_published_again_while_described_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    publish_weights(run_dir, 0, b"zero")

    def read_and_replace(path: Path) -> Manifest:
        found = manifest.read_manifest(path)
        publish_weights(run_dir, 0, b"one")
        return found

    monkeypatch.setattr("holdfast.orchestrator.weight_sync.read_manifest", read_and_replace)
    assert describe_weights(run_dir, 0).was_replaced()


def test_weights_taken_away_while_being_described_are_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    publish_weights(run_dir, 0, b"zero")

    def take_away(run_dir: RunDir, version: int) -> PublishedWeights:
        monkeypatch.undo()
        atomic.remove_directory(run_dir.weights_of(version))
        return describe_weights(run_dir, version)

    monkeypatch.setattr("holdfast.orchestrator.weight_sync.describe_weights", take_away)
    check = lambda: publish_weights(run_dir, 0, b"one")  # noqa: E731
    assert asyncio.run(wait_for_weights(run_dir, 0, timeout_s=HANG_S, check=check)) == describe_weights(run_dir, 0)


def test_a_log_of_generations_that_is_empty_or_cannot_be_opened(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    log = make_log(run_dir)
    log.close()
    header = log.path.read_bytes()
    log.path.write_bytes(b"")
    make_log(run_dir).close()
    assert log.path.read_bytes() == header
    log.path.unlink()
    log.path.mkdir()
    with pytest.raises(RunDirError, match=r"generations of batch 1 cannot be kept in .*: Is a directory"):
        make_log(run_dir)


def test_a_start_a_trainer_overtakes_goes_by_the_newest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    for step in (1, 2, 3):
        publish_weights(run_dir, step, b"weights")
        journal.publish_batch(run_dir, make_batch(step), msgspec.json.encode(OrchestratorState(step=step)))
    commit_checkpoint(run_dir, 1)
    start_after = main._state_after

    def overtake(run_dir: RunDir, trainer_step: int, published: set[int]) -> OrchestratorState:
        monkeypatch.undo()
        commit_checkpoint(run_dir, 3)
        for step in (2, 3):
            atomic.remove_directory(run_dir.batch(step))
        return start_after(run_dir, trainer_step, published)

    monkeypatch.setattr(main, "_state_after", overtake)
    trainer_step, state = find_start(run_dir, 1)
    assert (trainer_step, state.step) == (3, 3)


def test_a_start_without_the_state_of_its_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step_5.*is missing"):
        find_start(RunDir(tmp_path), 5)


def make_log(run_dir: RunDir, *, digest: str = "d", step: int = 1) -> GenerationLog:
    return GenerationLog(run_dir, step, weights_digest=digest, stop_token_ids=[3])


def found_in(
    log: GenerationLog, prompt: list[int], seed: int, *, max_tokens: int = 4, top_p: float = 1.0
) -> Completion | None:
    return log.find(prompt, sampling=Sampling(top_p=top_p), max_tokens=max_tokens, seed=seed)


def test_the_log_of_generations_survives_a_torn_end_and_belongs_to_its_weights(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    logprobs, spans = Logprobs([-1.0, -0.5]), [VersionSpan(0, 0, 2)]
    first, second = (Completion(TokenIds([number, 3]), logprobs, "stop", spans) for number in (5, 6))
    log = make_log(run_dir)
    asked: dict[str, Any] = {"sampling": Sampling(), "max_tokens": 4}
    log.append([1, 2], **asked, seeds=[10], completions=[first])
    log.append([1, 2], **asked, seeds=[11], completions=[second])
    log.close()
    whole = log.path.read_bytes()
    for end in (len(whole) - 1, len(whole) - 30):
        log.path.write_bytes(whole[:end])
        torn = make_log(run_dir)
        assert found_in(torn, [1, 2], 10) == first and found_in(torn, [1, 2], 11) is None
        torn.append([1, 2], **asked, seeds=[11], completions=[second])
        torn.close()
        assert log.path.read_bytes() == whole
    again = make_log(run_dir)
    assert found_in(again, [1, 2], 11) == second
    assert found_in(again, [1, 2], 11, max_tokens=5) is None and found_in(again, [1], 11) is None
    assert found_in(again, [1, 2], 11, top_p=0.9) is None
    again.close()
    other = make_log(run_dir, digest="e")
    assert found_in(other, [1, 2], 10) is None
    other.close()
    make_log(run_dir, step=2).close()
    discard_generations(run_dir, up_to=1)
    assert [path.name for path in run_dir.rollouts.iterdir()] == ["generations_2.log"]


def make_batch(step: int) -> Batch:
    return Batch(step=step, policy_version=0, weights_digest="d" * 32, rollouts=[])


def test_batches_are_published_in_order_and_a_failure_is_told(tmp_path: Path) -> None:
    async def publish() -> None:
        async with BatchPublisher(RunDir(tmp_path)) as publisher:
            for step in (1, 2, 3):
                await publisher.submit(make_batch(step), b"{}")
            await publisher.settle()
            assert RunDir(tmp_path).published_batches() == [1, 2, 3]
            await publisher.submit(make_batch(3), b"{}")
            with pytest.raises(RunDirError, match=r"batch 3 cannot be written.*step_3 exists already"):
                await publisher.settle()
            with pytest.raises(RunDirError):
                publisher.check()

    asyncio.run(publish())


def make_rollout(reward: float, *, environment: str = "a", sampled: int = 2, **metrics: float) -> Rollout:
    versions = [VersionSpan(5 if sampled > 2 else 6, 1, sampled + 1)]
    how: dict[str, Any] = {"versions": versions, "truncated": sampled > 2, "metrics": metrics}
    return sampled_rollout(reward, sampled=sampled, environment=environment, **how)


ENGINES = [EngineCounts(requests=4, failures=1, in_flight_s=5.0), EngineCounts()]
TIMES = BatchTimes(period=2.0, wait_for_weights=0.5, update_weights=0.1, generate=1.0, busy=0.5)


def metrics_of(outcomes: Sequence[Outcome], *, num_groups: int = 8, **settings: object) -> dict[str, float]:
    environments = [EnvironmentConfig.model_validate({"id": name, **settings}) for name in ("a", "b")]
    selection = select(outcomes, num_groups=num_groups, signal="sum")
    told: dict[str, Any] = {"step": 8, "num_reused": 3, "engines": ENGINES, "signal": "sum"}
    return batch_metrics(selection, TIMES, environments=environments, **told)


def test_metrics_of_a_batch() -> None:
    first = [make_rollout(1.0, exact=1.0), make_rollout(0.0, exact=0.0)]
    metrics = metrics_of([first, [make_rollout(0.5, environment="b", sampled=4), make_rollout(0.5, environment="b")]])
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == pytest.approx(0.125**0.5)
    assert (metrics["reward/a/mean"], metrics["reward/b/mean"], metrics["a/exact"]) == (0.5, 0.5, 0.5)
    assert (metrics["reward/a/std"], metrics["reward/b/std"]) == (0.5, 0.0)
    assert metrics["rollout/tokens_mean"] == 3.5 and metrics["rollout/sampled_tokens_mean"] == 2.5
    assert metrics["rollout/tokens_max"] == 5.0
    assert metrics["rollout/truncated"] == 0.25 and metrics["groups/zero_variance"] == 0.5
    assert (metrics["groups/drawn"], metrics["groups/dropped/zero_signal"]) == (2.0, 0.0)
    # 4 tokens by version 5, two steps behind batch 8, and 6 tokens by version 6.
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.4, 2.0)
    assert metrics["rollouts_per_s"] == 2.0 and metrics["engine/idle_share"] == 0.75
    of_engines = [[metrics[f"engine/{number}/{name}"] for name in EngineCounts._fields[:2]] for number in (0, 1)]
    assert of_engines == [[4.0, 1.0], [0.0, 0.0]] and metrics["engine/0/in_flight"] == 2.5
    assert all(type(value) is float for value in metrics.values())


def test_metrics_are_about_what_was_sampled_not_about_what_is_trained() -> None:
    unequal, equal = [make_rollout(1.0), make_rollout(0.0)], [make_rollout(1.0), make_rollout(1.0)]
    failed = Dropped(environment="a", task_id=0, reason="timeout", rollouts=2, tokens=9)
    metrics = metrics_of([equal, failed, unequal], num_groups=1)
    assert metrics["reward/mean"] == 0.75 and metrics["groups/zero_variance"] == 0.5
    names = ("drawn", "dropped/zero_signal", "dropped/timeout")
    assert [metrics[f"groups/{name}"] for name in names] == [3.0, 1.0, 1.0]


def test_rewards_turns_and_quantiles_of_single_rollouts() -> None:
    rewards = [0.3, 0.9, 0.1, 0.4, 0.7, 0.2, 0.8]
    metrics = metrics_of([[make_rollout(reward) for reward in rewards]])
    expected = np.quantile(rewards, [0.1, 0.5, 0.9])
    assert [metrics[f"reward/a/{name}"] for name in ("p10", "p50", "p90")] == pytest.approx(expected)
    rollout = make_rollout(1.0)
    rollout.step_rewards = rollouts.StepRewards(TokenIds([1, 2]), Rewards([0.5, 2.0]))
    rollout.token_ids, rollout.logprobs = TokenIds([1] * 7), Logprobs([0.0] * 7)
    rollout.loss_mask = rollouts.LossMask([False, True, True, False, True, False, False])
    metrics = metrics_of([[rollout, make_rollout(0.0)]])
    assert (metrics["rollout/turns"], metrics["reward/steps_mean"]) == (1.5, 1.25)
    metrics = metrics_of([[make_rollout(0.5, exact=1.0)]])
    assert [metrics[f"reward/a/{name}"] for name in ("mean", "std", "p10", "p90")] == [0.5, 0.0, 0.5, 0.5]
    assert metrics["a/pass@1"] == 1.0 and not {"groups/zero_variance", "reward/steps_mean"} & metrics.keys()


def test_pass_at_k_goes_by_the_metric_exact_or_by_the_reward() -> None:
    exact = [make_rollout(0.0, exact=float(place == 0)) for place in range(4)]
    metrics = metrics_of([exact, [make_rollout(0.0, exact=0.0) for _ in range(4)]])
    assert [metrics[f"a/pass@{k}"] for k in (1, 2, 4)] == pytest.approx([0.125, 0.25, 0.5])
    assert "a/pass@3" not in metrics
    graded = [[make_rollout(reward) for reward in (0.2, 0.5, 0.6, 0.1)]]
    assert not any("pass@" in name for name in metrics_of(graded))
    assert metrics_of(graded, success_reward=0.5)["a/pass@1"] == 0.5


def test_whole_groups_pass_in_the_order_in_which_they_came() -> None:
    """A small group waits behind a large one, though there is room for it; a cancelled one gives back what it took."""
    passed: list[str] = []

    async def play(slots: SessionSlots, name: str, size: int, leave: asyncio.Event) -> None:
        async with slots.taking(size):
            passed.append(name)
            await leave.wait()

    async def play_all() -> None:
        slots, leaves = SessionSlots(4), {name: asyncio.Event() for name in "abcde"}
        sizes = {"a": 3, "b": 2, "c": 1, "d": 4, "e": 4}
        tasks = {name: asyncio.create_task(play(slots, name, size, leaves[name])) for name, size in sizes.items()}

        async def settle() -> None:
            for _ in range(20):  # turns of the event loop, in which nothing else is waited for
                await asyncio.sleep(0)

        await settle()
        assert passed == ["a"]
        leaves["a"].set()
        await settle()
        assert passed == ["a", "b", "c"]
        tasks["d"].cancel()
        await settle()
        for name in "bc":
            leaves[name].set()
        await settle()
        assert passed == ["a", "b", "c", "e"], "all four slots were given back"
        leaves["e"].set()
        await asyncio.wait(tasks.values())

    asyncio.run(play_all())
