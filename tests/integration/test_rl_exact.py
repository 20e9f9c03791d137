"""A stopped and resumed run equals the uninterrupted one, bit for bit; every batch is by the policy of the schedule."""

from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from holdfast.protocol.inference import MAX_TOKENS, PARITY_PROMPT_NAME
from holdfast.protocol.rollouts import Sampling
from holdfast.run.checkpoints import Kind, kind_of
from holdfast.run.journal import read_batch
from holdfast.run.manifest import verify
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.forking.engines import config_of, start_server
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.runs.processes import HANG_S
from tests.runs.rl import MODEL, CompletedRun, Outcome, assert_same, exact_metrics, journal_files, outcome, succeeded

pytestmark = pytest.mark.launch

# Trainer against sampler, float32 on both sides.
LOG_RATIO_TOLERANCE = 1e-4


def _check_versions(run_dir: RunDir, *, async_level: int) -> list[int]:
    """Check that every journaled token is by the version of the strict schedule; return the batches' steps."""
    steps = run_dir.published_batches()
    for step in steps:
        batch = read_batch(run_dir, step)
        version = max(0, step - 1 - async_level)
        assert batch.policy_version == version
        for rollout in batch.rollouts:
            sampled = [position for position, by_policy in enumerate(rollout.loss_mask) if by_policy]
            stamped = [
                position
                for span in rollout.versions
                for position in range(span.start, span.end)
                if span.version == version
            ]
            assert stamped == sampled, f"batch {step}: {rollout.versions}"
    return steps


def _with_parity_prompt(run_dir: RunDir) -> list[int]:
    return [one for one in run_dir.published_weights() if (run_dir.weights_of(one) / PARITY_PROMPT_NAME).exists()]


@dataclass(frozen=True)
class SynchronousRuns:
    """A run of 9 steps at async_level 0 that keeps 2 checkpoints, then resumed from the older of them. Its rewards are
    penalised for the divergence from the reference, with a coefficient that is steered."""

    run_dir: RunDir
    kept: dict[str, list[int]]  # the steps of checkpoints, batches and weights after the first run
    straight: Outcome  # what the first run amounts to
    batches: dict[int, tuple[int, int]]  # the files of its journal
    metrics: list[dict[str, float]]  # its nine lines of metrics.jsonl
    resumed: CompletedRun  # the second run, from step 6


@pytest.fixture(scope="module")
def synchronous(rl_server: UsedServer, tmp_path_factory: pytest.TempPathFactory) -> SynchronousRuns:
    directory = tmp_path_factory.mktemp("synchronous") / "run"
    penalty = ("--trainer.kl.place", "reward", "--trainer.kl.coef", "0.05", "--trainer.kl.target", "0.1")
    steps = ("--async-level", "0", "--max-steps", "9", "--ckpt.interval", "3", "--ckpt.keep", "2")
    steps = (*steps, "--ckpt.keep-best", "min:samples", "--journal.keep", "7")  # the best is the first
    flags = (*rl_server.flags, *steps, *penalty, "--trainer.kl.horizon", "100")
    run_dir = succeeded(directory, *flags).run_dir
    return SynchronousRuns(
        run_dir=run_dir,
        kept={
            "checkpoints": run_dir.committed_steps(),
            "batches": run_dir.published_batches(),
            "weights": run_dir.published_weights(),
        },
        straight=outcome(run_dir, 9),
        batches=journal_files(run_dir),
        metrics=exact_metrics(run_dir, range(1, 10)),
        resumed=succeeded(directory, *flags, "--ckpt.resume-step", "6"),
    )


def test_a_running_server_is_used_told_the_version_and_kept(reference: CompletedRun, rl_server: UsedServer) -> None:
    assert "using the inference server that answers at" in reference.output
    assert "loading vllm" not in reference.output and not (reference.run_dir.logs(1) / "inference.log").exists()
    # It served other weights under the same number before: were those used, the ratio would be far from 1.
    first = read_metrics(reference.run_dir.metrics)[0]
    assert first["staleness/mean"] == 0 and first["mismatch/max_log_ratio"] <= LOG_RATIO_TOLERANCE
    assert httpx.get(f"{rl_server.handle.url}/health", timeout=HANG_S).status_code == 200
    # The engine computed what the trainer computes before any rollout was asked for; it was asked once.
    assert (reference.run_dir.logs(1) / "orchestrator.log").read_text().count("the parity prompt differs by") == 1
    assert not _with_parity_prompt(reference.run_dir), "that of version 0 went with it"


def test_trainer_and_server_agree_on_every_fresh_rollout(synchronous: SynchronousRuns) -> None:
    for line in synchronous.metrics:
        assert line["staleness/mean"] == 0
        # 0.0 would mean that nothing was compared.
        assert 0 < line["mismatch/max_log_ratio"] <= LOG_RATIO_TOLERANCE, line
        assert line["mismatch_kl"] == line["mismatch_kl/age_0"] <= LOG_RATIO_TOLERANCE**2


def test_a_step_begins_at_its_own_policy_and_the_first_at_the_reference(synchronous: SynchronousRuns) -> None:
    for line in synchronous.metrics:
        assert line["ppo_kl"] == 0, line  # measured before the step by another pass over the same rows
        assert (line["ref_kld"] == 0) == (line["kl/sequence"] == 0) == (line["step"] == 1), line
        assert line["ref_kld"] >= 0, line
    coefs = [line["kl_coef"] for line in synchronous.metrics]
    assert coefs[0] == 0.05 and len(set(coefs)) == len(coefs), coefs


def test_keep_bounds_checkpoints_weights_and_journal(synchronous: SynchronousRuns) -> None:
    assert synchronous.kept == {"checkpoints": [3, 6, 9], "weights": [3, 6, 9], "batches": list(range(3, 10))}


def test_resuming_an_older_step_sets_the_future_aside(synchronous: SynchronousRuns) -> None:
    run_dir, output = synchronous.run_dir, synchronous.resumed.output
    discarded = run_dir.discarded(2)
    assert "moved to discarded/attempt_2, because it is later than step 6" in output
    aside = ["checkpoints/step_9", "weights/step_9", "rollouts/step_7", "rollouts/step_8", "rollouts/step_9"]
    for name in (*aside, "metrics.jsonl"):
        assert (discarded / name).exists() and name in output, name
    assert [line["step"] for line in read_metrics(discarded / "metrics.jsonl")] == [7, 8, 9]
    verify(discarded / "checkpoints" / "step_9")
    # They were set aside, so the resumed run made them itself.
    now = journal_files(run_dir)
    assert now.keys() == synchronous.batches.keys()
    assert [step for step in now if now[step] == synchronous.batches[step]] == [3, 4, 5, 6]


def test_resuming_an_older_step_gives_the_same_result(synchronous: SynchronousRuns) -> None:
    assert_same(outcome(synchronous.run_dir, 9), synchronous.straight)
    assert exact_metrics(synchronous.run_dir, range(1, 10)) == synchronous.metrics


def test_every_rollout_is_by_the_version_of_the_strict_schedule(reference: CompletedRun) -> None:
    # The journal keeps the last 20 batches, though the first checkpoint, of step 2, needs none of the first two.
    assert _check_versions(reference.run_dir, async_level=1) == list(range(1, REFERENCE_STEPS + 1))
    ages = [metrics["staleness/max"] for metrics in read_metrics(reference.run_dir.metrics)]
    assert ages == [0] + [1] * (REFERENCE_STEPS - 1)


def test_a_stop_and_resume_changes_nothing(reference: CompletedRun, rl_server: UsedServer, tmp_path: Path) -> None:
    flags = (*rl_server.flags, "--ckpt")
    run_dir = succeeded(tmp_path / "run", *flags, "--max-steps", "6").run_dir
    assert run_dir.committed_steps() == [6]
    # Batch 7 is made by version 5: it must outlive the step that trained version 6.
    assert run_dir.published_weights() == [5, 6] and run_dir.published_batches() == list(range(1, 7))
    second = succeeded(tmp_path / "run", *flags, "--max-steps", "12", "--ckpt.resume-step", "6", "--journal.keep", "4")
    assert "resuming from step 6" in second.output
    assert "are in the journal" not in second.output, "batches that were trained are kept, not trained again"
    assert run_dir.published_batches() == list(range(7, 13)), "the checkpoint of step 6 needs what follows"
    log = (run_dir.logs(2) / "orchestrator.log").read_text()
    assert "no longer" not in log
    # Batch 7 is by version 5, which the first attempt published: the engine is asked with the next one.
    assert log.count("the parity prompt differs by") == 1 and _with_parity_prompt(run_dir) == [6]
    assert_same(outcome(run_dir, 12), outcome(reference.run_dir, 12))
    assert exact_metrics(run_dir, range(1, 13)) == exact_metrics(reference.run_dir, range(1, 13))


CUT = ("--orchestrator.sampling.temperature", "0.7", "--orchestrator.sampling.top-p", "0.9",
       "--orchestrator.sampling.top-k", "40", "--orchestrator.sampling.min-p", "0.005")  # fmt: skip


def test_truncated_sampling_is_trained_as_it_was_sampled(rl_server: UsedServer, tmp_path: Path) -> None:
    """Both sides cut the same tokens: else the log-probabilities of the others would differ by more than rounding."""
    flags = (*rl_server.flags, *CUT, "--async-level", "0", "--max-steps", "5")
    run_dir = succeeded(tmp_path / "run", *flags).run_dir
    for line in exact_metrics(run_dir, range(1, 6)):
        assert 0 < line["mismatch/max_log_ratio"] <= LOG_RATIO_TOLERANCE, line
        assert line["mismatch_kl/age_0"] <= 1e-10, line
        assert line["ppo_kl"] == 0 and line["clip_fraction"] == 0, line
    assert {rollout.sampling for rollout in read_batch(run_dir, 3).rollouts} == {Sampling(0.7, 0.9, 40, 0.005)}


LORA = ("--trainer.model.lora.rank", "2", "--trainer.model.lora.alpha", "8")


def test_rl_sends_adapters_to_the_engine_which_computes_as_the_trainer(rl_server: UsedServer, tmp_path: Path) -> None:
    flags = (*rl_server.flags, *LORA, "--trainer.optim.lr", "5e-3", "--async-level", "0", "--ckpt.interval", "2")
    run_dir = succeeded(tmp_path / "run", *flags, "--max-steps", "6").run_dir
    for version in run_dir.published_weights():
        assert kind_of(run_dir.weights_of(version)) is (Kind.WEIGHTS if version == 6 else Kind.ADAPTER)
    # Of a fresh batch, the ratio shows whether the engine computes what the trainer computes.
    for line in read_metrics(run_dir.metrics):
        assert 0 < line["mismatch/max_log_ratio"] <= LOG_RATIO_TOLERANCE, line
    base, trained = (load_file(place / "model.safetensors") for place in (MODEL, run_dir.weights_of(6)))
    changes = [float((base[name] - trained[name]).abs().max()) for name in base]
    assert max(changes) > 1e-2, "an adapter that does not matter would show nothing"


def test_sessions_may_be_as_short_as_the_parity_prompt(tmp_path: Path) -> None:
    """An engine that takes `MAX_TOKENS` in all is asked for fewer of them, and one to sample."""
    lengths = ("--inference.model.max-len", str(MAX_TOKENS), "--orchestrator.seq-len", str(MAX_TOKENS))
    handle = start_server("stub", config_of(MODEL, max_len=MAX_TOKENS), tmp_path / "inference.log").wait_ready()
    with UsedServer(handle) as server:
        run = succeeded(tmp_path / "run", *server.flags, *lengths, "--max-steps", "1")
    assert "the parity prompt differs by" in (run.run_dir.logs(1) / "orchestrator.log").read_text()
