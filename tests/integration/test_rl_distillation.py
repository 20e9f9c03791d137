"""Distillation from a real server: what the teacher says, that a kill changes nothing, and that the student learns; and
learning from a reward model."""

from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM

from holdfast.protocol.rollouts import Rollout
from holdfast.run.journal import read_batch
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.faults.blows import killed_twice
from tests.forking.commands import shared_commands
from tests.forking.engines import config_of, start_server
from tests.integration.conftest import UsedServer
from tests.runs.ports import free_port
from tests.runs.rl import MODEL, assert_same_end, exact_metrics, succeeded

pytestmark = [pytest.mark.launch, pytest.mark.timeout(1800)]

_STEPS = 6
_ROLLOUTS = 8 * 4  # of a step: `SMALL_BATCH`
# The student has the teacher's shape and begins with random weights.
_STUDENT = ("--trainer.model.init", "random", "--trainer.optim.lr", "1e-3", "--max-steps", str(_STEPS))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UsedServer]:
    handle = start_server("stub", config_of(MODEL, max_len=80), tmp_path_factory.mktemp("teacher") / "inference.log")
    with UsedServer(handle.wait_ready()) as server:
        yield server


def _flags(teacher: UsedServer, mode: str) -> tuple[str, ...]:
    return (
        *("--orchestrator.teacher.urls", teacher.handle.url, "--orchestrator.teacher.model", str(MODEL)),
        *("--orchestrator.teacher.mode", mode),
    )


def _logprobs(rollout: Rollout) -> list[float]:
    """The teacher's log-probability of every token but the first, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokens_1T = torch.tensor([rollout.token_ids.tolist()])
    with torch.no_grad():
        logprobs_1TV = model(tokens_1T).logits.log_softmax(dim=-1)
    return logprobs_1TV[0, :-1].gather(-1, tokens_1T[0, 1:, None])[:, 0].tolist()


def test_an_on_policy_distillation_survives_kills_bit_for_bit_and_asks_nothing_twice(
    rl_server: UsedServer, teacher: UsedServer, tmp_path: Path
) -> None:
    distil = ("--trainer.advantage", "distillation", "--trainer.loss.type", "policy_gradient", "--ckpt.interval", "1")
    flags = (*rl_server.flags, *_flags(teacher, "logprobs"), *_STUDENT, *distil)
    straight = succeeded(tmp_path / "straight", *flags)
    asked = teacher.generated_tokens()
    killed = killed_twice(tmp_path / "killed", *flags, orchestrator=1, rank=3, held=4)
    assert_same_end(killed, straight, _STEPS)
    # One token is sampled for each question; what was in flight at the two kills may be asked again.
    again = teacher.generated_tokens() - asked - _STEPS * _ROLLOUTS
    assert again <= 2 * _ROLLOUTS
    rollout = read_batch(killed.run_dir, _STEPS).rollouts[0]
    first = rollout.loss_mask.index(1)
    assert rollout.reference_logprobs is not None and rollout.reference_logprobs[:first].tolist() == [0.0] * first
    assert rollout.reference_logprobs[first:].tolist() == pytest.approx(_logprobs(rollout)[first - 1 :], abs=1e-3)
    divergences = [line["ref_kld"] for line in exact_metrics(straight.run_dir, range(1, _STEPS + 1))]
    assert divergences[-1] < divergences[0]


def test_a_hard_distillation_needs_no_server_of_the_policy(teacher: UsedServer, tmp_path: Path) -> None:
    flags = ("--trainer.loss.type", "sft", "--inference.server.port", str(free_port()))
    served = teacher.weights()
    small = ("--orchestrator.problems-per-step", "8", "--orchestrator.group-size", "4")
    run = succeeded(tmp_path / "run", *small, *flags, *_flags(teacher, "samples"), *_STUDENT)
    assert "the policy needs no inference server" in run.output
    assert not (run.run_dir.logs(1) / "inference.log").exists() and teacher.weights() == served
    losses = [line["loss"] for line in exact_metrics(run.run_dir, range(1, _STEPS + 1))]
    assert losses[-1] < losses[0] - 0.3


_LEARNING_STEPS = 30
_PPO = "configs/reverse_text/algorithms/ppo.toml"


def test_a_policy_learns_from_a_reward_model_that_pairs_taught(rl_server: UsedServer, tmp_path: Path) -> None:
    """The environment's own reward is shown and not trained on; it rises since the pairs prefer what it pays for."""
    # With as many threads as cores, two runs side by side take ten times as long: the threads wait spinning.
    argv = ["@", "configs/reverse_text/reward_model.toml", "--output-dir", str(tmp_path / "judge")]
    shared_commands().start("reward-model", tmp_path / "judge", [*argv, "--parallel.threads", "1"]).succeed()
    (version,) = RunDir(tmp_path / "judge").published_weights()
    judge = str(RunDir(tmp_path / "judge").weights_of(version))
    parts = ("--trainer.reward-model.name", judge, "--trainer.critic.name", judge)
    run = succeeded(
        tmp_path / "run", "@", _PPO, *rl_server.flags, "--max-steps", str(_LEARNING_STEPS), "--ckpt", *parts
    )
    lines = read_metrics(run.run_dir.metrics)
    assert len(lines) == _LEARNING_STEPS
    scores = [line["reward_model/mean"] for line in lines]
    rules = [line["reward/mean"] for line in lines]
    assert mean(scores[-5:]) > mean(scores[:5]) and mean(rules[-5:]) > mean(rules[:5])
