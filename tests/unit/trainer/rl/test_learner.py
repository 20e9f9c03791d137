"""Steps of the RL learner on a tiny model: what is measured when, what the coefficient is, what is trained."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from holdfast.config import TrainerConfig
from holdfast.errors import CheckpointError, ConfigError, DataError, TrainingError
from holdfast.protocol.rollouts import Batch, Logprobs, LossMask, Rewards, Sampling, StepRewards, TokenIds, VersionSpan
from holdfast.trainer.data.packing import build_micro_batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model import attention
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.logprobs import Reading
from holdfast.trainer.model.packing_check import Layout
from holdfast.trainer.model.policy import predict
from holdfast.trainer.rl.advantages import dr_grpo
from holdfast.trainer.rl.batch import to_samples
from holdfast.trainer.rl.losses import PolicyLossInput
from tests.builders.learner_runs import LearnerRun, start_learner
from tests.builders.plain_models import copy_with_other_tokens, write_reward_model
from tests.builders.sampled_rollouts import answered
from tests.conftest import ModelFactory

GROUPS, GROUP_SIZE = 3, 4
REWARD_KL = {"coef": 0.2, "place": "reward", "target": 0.5, "horizon": 50}
AT_09 = Sampling(0.9)

_seen: list[PolicyLossInput] = []


def recording_loss(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """A user's loss: the policy gradient by sequence. It notes what it was given."""
    _seen.append(data)
    return -(data.weights_N * data.advantages_N * data.logprobs_N).sum(), {}


@pytest.fixture
def seen() -> list[PolicyLossInput]:
    """What `recording_loss` is given in this test, call by call."""
    _seen.clear()
    return _seen


class Run(LearnerRun):
    """A trainer in this process, and the made-up batch of every step."""

    def learn(self, step: int, **changes: Any) -> dict[str, float]:
        return self.learn_from(make_batch(step, **changes))


def make_batch(
    step: int, *, truncated: Sequence[int] = (), sampling: Sampling = AT_09, prompts: Sequence[int] = ()
) -> Batch:
    """Three groups of four rollouts that depend on the step; `truncated`: which of the twelve are. `prompts`: how many
    tokens the one prompt of each group has; a tool speaks within its answers."""
    generator, rollouts = np.random.default_rng(step), []
    for number in range(GROUPS * GROUP_SIZE):
        group, length, mask = number // GROUP_SIZE, int(generator.integers(1, 9)), {}
        prompt, answer = np.split(generator.integers(5, 100, 2 + group + length), [2 + group])
        if prompts:
            prompt = np.random.default_rng(group).integers(5, 100, prompts[group])
            mask = {"loss_mask": LossMask([0] * len(prompt) + [k % 4 != 2 for k in range(length)])}
        rollouts.append(answered(
            prompt, answer, generator.uniform(-6, -3, length), version=step - 1, task_id=step * GROUPS + group,
            sample_index=number % GROUP_SIZE, reward=float(generator.normal()), truncated=number in truncated,
            sampling=sampling, **mask,
        ))  # fmt: skip
    return Batch(step=step, policy_version=step - 1, weights_digest="d" * 32, rollouts=rollouts)


def check_advantages(seen: list[PolicyLossInput], rewards: Sequence[float]) -> None:
    """The loss was given the advantages of Dr. GRPO of these rewards, sequence by sequence."""
    found = {int(n): float(a) for data in seen for n, a in zip(data.sequence_N, data.advantages_N, strict=True)}
    groups = [rewards[first : first + GROUP_SIZE] for first in range(0, len(rewards), GROUP_SIZE)]
    expected = [value for group in groups for value in dr_grpo(group)]
    assert [found[number] for number in range(len(rewards))] == pytest.approx(expected, rel=1e-4, abs=1e-5)


Start = Callable[..., Run]


@pytest.fixture
def start(tiny_model: ModelFactory, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Start:
    def run(**settings: Any) -> Run:
        settings = {"max_steps": 10, "loss": {"type": f"{__name__}:recording_loss"}} | settings
        return Run(**vars(start_learner(tmp_path, tiny_model(), mesh, tokenizer, **settings)))

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", [{}, {"logits_chunk_tokens": 8}, {"activation_checkpointing": True}], ids=str)
@pytest.mark.parametrize("heads", [2, 4])
def test_with_several_minibatches_the_first_one_diverges_from_nothing_exactly(
    start: Start, seen: list[PolicyLossInput], tiny_model: ModelFactory, dtype: str, settings: Any, heads: int
) -> None:
    """What is measured before the update has the bits of what is trained."""
    model = {"name": str(tiny_model(num_key_value_heads=heads)), "dtype": dtype, **settings}
    metrics = start(kl={}, updates={"epochs": 2, "minibatches": 3}, model=model).learn(1)
    assert len(seen) == 6 and {data.step_sequences for data in seen} == {4}
    assert torch.equal(seen[0].logprobs_N.detach(), seen[0].old_logprobs_N)
    assert seen[0].reference_logprobs_N is not None
    assert torch.equal(seen[0].logprobs_N.detach(), seen[0].reference_logprobs_N)
    for data in seen[1:]:
        assert data.logprobs_N.numel() and not torch.equal(data.logprobs_N.detach(), data.old_logprobs_N)
    assert metrics["ppo_kl"] > 0


def test_a_bonus_for_entropy_is_its_coefficient_times_the_mean_over_tokens(start: Start) -> None:
    losses = ({"type": "grpo", "entropy": {"coef": coef}} for coef in (0.0, 0.5))
    plain, bonus = (start(loss=loss, row_tokens=32).learn(1) for loss in losses)
    assert bonus["entropy_coef"] == 0.5 and "entropy_coef" not in plain
    assert bonus["entropy"] == plain["entropy"] > 1
    assert bonus["loss"] == pytest.approx(plain["loss"] - 0.5 * plain["entropy"], rel=1e-5)
    assert bonus["grad_norm"] != plain["grad_norm"]


@pytest.mark.parametrize("target", [1.0, 100.0])
def test_a_steered_bonus_acts_below_its_target(start: Start, target: float) -> None:
    run = start(loss={"type": "grpo", "entropy": {"coef": 0.1, "target": target, "step_size": 0.04, "largest": 0.15}})
    found = [run.learn(step)["entropy_coef"] for step in (1, 2, 3, 4)]
    assert found == pytest.approx([0.0, 0.14, 0.15, 0.15] if target == 100.0 else [0.0] * 4)


@pytest.mark.parametrize(("advantage", "share"), [("dr_grpo", 2 / 3), ("grpo_process", 1 / 3)])
def test_groups_without_signal_count_by_what_advantages_learn_from(start: Start, advantage: str, share: float) -> None:
    run, batch = start(advantage=advantage), make_batch(1)
    for number, rollout in enumerate(batch.rollouts[: 2 * GROUP_SIZE]):
        # All sums are equal; in the second group the turns earn them differently.
        turns = [1.0, 1.0] if number < GROUP_SIZE else [2.0 * (number % 2), 2.0 - 2.0 * (number % 2)]
        rollout.token_ids, rollout.loss_mask = TokenIds(range(5, 11)), LossMask([0, 0, 1, 1, 1, 1])
        rollout.logprobs, rollout.versions = Logprobs([0, 0, -4, -4, -4, -4]), [VersionSpan(version=0, start=2, end=6)]
        rollout.reward, rollout.step_rewards = 0.5, StepRewards(TokenIds([3, 5]), Rewards(turns))
    assert run.learn_from(batch)["groups/zero_variance"] == pytest.approx(share)
    batch.metrics["groups/zero_variance"] = 0.25  # as dynamic sampling has counted it
    assert "groups/zero_variance" not in run.learn_from(batch)


def test_the_reported_coefficient_is_the_one_that_the_step_was_penalised_with(start: Start) -> None:
    run = start(kl=REWARD_KL)
    coef, steered = 0.2, []
    for step in (1, 2, 3):
        metrics = run.learn(step)
        assert metrics["kl_coef"] == coef
        error = min(max(metrics["kl/sequence"] / 0.5 - 1, -0.2), 0.2)
        coef *= 1 + error * GROUPS * GROUP_SIZE / 50
        steered.append(error)
        assert run.parts.kl is not None and run.parts.kl.coef == pytest.approx(coef, rel=1e-12)
    assert steered[0] == -0.2 and all(steered)


def test_a_kl_term_has_the_coefficient_of_before_the_step(start: Start, seen: list[PolicyLossInput]) -> None:
    run = start(kl={"coef": 5.0, "target": 0.01, "horizon": 20, "estimator": "k2"})
    run.learn(1)
    seen.clear()
    metrics = run.learn(2)
    ((data,), reference_N) = (seen, seen[0].reference_logprobs_N)
    assert reference_N is not None and metrics["kl_coef"] != 5.0
    assert run.parts.kl is not None and run.parts.kl.coef != metrics["kl_coef"]
    weights_N = data.weights_N.double()
    base = -(weights_N * data.advantages_N.double() * data.logprobs_N.double()).sum()
    penalty = (weights_N * (data.logprobs_N.double() - reference_N.double()).square() / 2).sum()
    assert float(penalty.detach()) > 1e-6
    assert metrics["loss"] == pytest.approx(float((base + metrics["kl_coef"] * penalty).detach()), rel=1e-5)


def test_a_batch_of_truncated_rollouts_alone_changes_nothing(start: Start) -> None:
    loss = {"type": "grpo", "entropy": {"target": 1.0}}
    run = start(loss=loss, rewards={"truncated": "mask"}, kl=REWARD_KL, optim={"lr": 1e-3, "weight_decay": 0.0})
    before = {name: tensor.clone() for name, tensor in trained_tensors(run.session.policy.hf_model).items()}
    metrics = run.learn(1, truncated=tuple(range(12)))
    assert metrics["loss"] == metrics["grad_norm"] == 0.0
    after = trained_tensors(run.session.policy.hf_model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert run.parts.kl is not None and run.parts.kl.num_updates == 1, "they diverge like any other"
    assert run.parts.entropy is not None and run.parts.entropy.values()["last"] is None


@pytest.mark.parametrize(
    "settings", [{}, {"updates": {"epochs": 1, "minibatches": 2}}, {"advantage": "reinforce_pp"}, {"row_tokens": 16}]
)
def test_masked_rollouts_count_for_the_advantages_of_the_others_without_being_trained(
    start: Start, seen: list[PolicyLossInput], settings: dict[str, Any]
) -> None:
    truncated = (1, 2, 8, 9, 10, 11)
    found: dict[str, dict[tuple[int, int], list[float]]] = {}
    divergence = {}
    for treatment in ("keep", "mask"):
        run = start(rewards={"truncated": treatment}, kl=REWARD_KL | {"coef": 5.0}, **settings)
        run.learn(1)  # the policy leaves its reference
        seen.clear()
        metrics = run.learn(2, truncated=truncated)
        divergence[treatment] = metrics["kl/sequence"]
        found[treatment] = {
            (call, number): data.advantages_N[data.sequence_N == number].tolist()
            for call, data in enumerate(seen)
            for number in set(data.sequence_N.tolist())
        }
        if "updates" not in settings:
            assert metrics["ppo_kl"] == 0.0 and {data.step_sequences for data in seen} == {12}
            assert {data.step_tokens for data in seen} == {sum(len(data.logprobs_N) for data in seen)}
    assert len(found["mask"]) == 6 < len(found["keep"]) == 12
    for place, advantages in found["mask"].items():
        assert advantages == pytest.approx(found["keep"][place], rel=1e-4, abs=1e-6)
    assert divergence["mask"] == pytest.approx(divergence["keep"], rel=1e-4) and divergence["mask"] != 0.0


def test_a_batch_of_groups_of_one_is_refused_before_training_unless_the_advantage_compares_none(start: Start) -> None:
    batch = make_batch(1)
    batch.rollouts = batch.rollouts[::GROUP_SIZE]
    with pytest.raises(TrainingError, match="'dr_grpo' compares.*task 3 of environment 'e' has a single one"):
        start().learn_from(batch)
    alone = {"advantage": "gae", "critic": {"optim": {"lr": 1e-3}}}
    for settings in ({"advantage": "reinforce_pp"}, alone, {"loss": {"type": "sft"}}):
        metrics = start(**settings).learn_from(batch)
        assert math.isfinite(metrics["loss"]) and metrics["loss"] != 0.0


def test_a_truncated_distribution_is_not_compared_with_a_reference(start: Start) -> None:
    says = "batch 1: environment 'e' was sampled at temperature 0.9, top_k 2, and trainer.kl compares"
    with pytest.raises(ConfigError, match=says):
        start(kl={}).learn(1, sampling=Sampling(0.9, top_k=2))


def test_rollouts_are_read_at_the_distribution_they_were_sampled_by(start: Start, seen: list[PolicyLossInput]) -> None:
    """In the pass before the update and in the update."""
    samplings = [Sampling(0.9), Sampling(0.5), Sampling(1.3, top_p=0.8)]
    run = start(optim={"lr": 1e-12}, updates={"minibatches": 2})
    reference = run.session.policy
    batch = make_batch(1)
    for rollout in batch.rollouts:
        rollout.sampling = samplings[rollout.task_id % 3]
    run.learn_from(batch)
    trained = {}
    for data in seen:
        ends = np.cumsum(data.sequence_lengths)
        for column in (data.logprobs_N, data.old_logprobs_N):
            for part in np.split(column.detach().numpy(), ends[:-1]):
                trained[part.tobytes()] = part
    for rollout, sample in zip(batch.rollouts, to_samples(batch.rollouts, trained_version=1), strict=True):
        micro = build_micro_batch([sample], [0], pack=True, device=run.session.mesh.device)
        with torch.no_grad():
            alone_N = predict(reference, micro, Reading(rollout.sampling)).logprobs_N.numpy()
        assert any(len(one) == len(alone_N) and np.allclose(one, alone_N, atol=2e-5) for one in trained.values())
    assert {rollout.sampling for rollout in batch.rollouts} == set(samplings)


def test_a_teachers_samples_are_imitated_by_the_whole_distribution(start: Start, seen: list[PolicyLossInput]) -> None:
    run = start(optim={"lr": 1e-12})
    for batch in (make_batch(1), make_batch(1, sampling=Sampling(0.9, top_k=2))):
        batch.weights_digest = ""
        run.learn_from(batch)
    torch.testing.assert_close(seen[0].logprobs_N, seen[1].logprobs_N)


def test_a_teacher_is_added_to_advantages(start: Start, seen: list[PolicyLossInput], tiny_model: ModelFactory) -> None:
    kl = {"reference": str(tiny_model(seed=5))}
    signals, taught = {}, {"both": {"distillation": {"coef": 0.5}}, "teacher": {"advantage": "distillation"}}
    for name, settings in ({"rewards": {}} | taught).items():
        seen.clear()
        metrics = start(kl=kl, **settings).learn(1)
        (data,) = seen
        assert data.reference_logprobs_N is not None
        divergence_N = data.old_logprobs_N - data.reference_logprobs_N
        signals[name] = data.advantages_N
        assert ("distillation/kl" in metrics) == (name != "rewards")
    assert metrics["distillation/kl"] == pytest.approx(float(divergence_N.mean()), rel=1e-5)
    torch.testing.assert_close(signals["teacher"], -divergence_N)
    torch.testing.assert_close(signals["both"], signals["rewards"] - 0.5 * divergence_N, rtol=1e-5, atol=1e-5)
    assert divergence_N.abs().max() > 0.01


def test_a_named_reference_and_critic_have_weights_of_their_own(start: Start, tiny_model: ModelFactory) -> None:
    named, model = str(tiny_model(seed=5)), {"name": str(tiny_model()), "init": "random"}
    run = start(model=model, kl={"reference": named}, advantage="gae", critic={"name": named})
    assert run.parts.reference is not None and run.parts.critic is not None
    weight, expected = "model.norm.weight", AutoModelForCausalLM.from_pretrained(named).model.norm.weight
    for part in (run.parts.reference, run.parts.critic.model):
        torch.testing.assert_close(trained_tensors(part.hf_model)[weight], expected.detach())
    assert start(model=model, kl={}).learn(1)["ref_kld"] == 0, "unset, it is what the policy begins with"


@pytest.mark.parametrize("settings", [
    {"loss": {"type": "gspo"}, "kl": {}, "updates": {"epochs": 2, "minibatches": 2}},
    {"advantage": "gae", "loss": {"type": "ppo"}, "critic": {}, "kl": REWARD_KL},
    {"rewards": {"truncated": "mask"}, "loss": {"type": "cispo"}, "row_tokens": 100},
], ids=["minibatches", "critic", "small rows"])  # fmt: skip
def test_a_step_learns_the_same_whether_answers_share_their_prompt_or_not(start: Start, settings: Any) -> None:
    """Prompts are longer and shorter than those that attend again with each answer."""
    lines, computed = list[list[dict[str, float]]](), list[int]()
    for share in (True, False):
        run = start(share_prompts=share, **settings)
        computed.append(0)

        def count(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            computed[-1] += given[0].numel()

        run.session.policy.hf_model.get_input_embeddings().register_forward_pre_hook(count)
        lines.append([run.learn(step, truncated=(1, 2), prompts=(65, 64, 7)) for step in (1, 2)])
    assert computed[0] < 0.75 * computed[1]
    for shared, apart in zip(*lines, strict=True):
        assert shared == pytest.approx(apart, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("settings", [{"kl": {}}, {"advantage": "gae", "critic": {}}], ids=["reference", "critic"])
def test_prompts_are_shared_if_all_models_can(start: Start, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plain = start(**settings), attention._seen
    without_first = lambda *sizes: plain(*sizes) & (torch.arange(sizes[1]) > 0)  # noqa: E731
    monkeypatch.setattr(attention, "_seen", without_first)
    with pytest.raises(DataError, match="answers that share the tokens of their prompt are"):
        run.parts.check_models()
    start(**settings, share_prompts=False).parts.check_models()
    assert run.parts.shares_prompts(run.session.policy)
    beside = run.parts.reference or (run.parts.critic and run.parts.critic.model)
    assert beside is not None
    beside.layout = replace(beside.layout, shares=False)
    assert not run.parts.shares_prompts(run.session.policy)


FULL = {"divergence": "full", "coef": 0.5}


@pytest.mark.parametrize(("section", "field"), [("kl", "reference"), ("critic", "name")])
def test_a_model_beside_the_policy_must_know_its_tokens(
    start: Start, tiny_model: ModelFactory, tmp_path: Path, section: str, field: str
) -> None:
    """Also one with as many tokens, which would read other text without a word."""
    other = copy_with_other_tokens(tiny_model(seed=7), tmp_path / "other")
    settings = {section: {field: str(other)}} | ({"advantage": "gae"} if section == "critic" else {})
    with pytest.raises(DataError, match=rf"{section}\.{field} = '{other}' has another tokenizer .*: 2 tokens differ"):
        start(**settings)


@pytest.mark.parametrize("chunk", [5, 4096])
def test_whole_vocabularies_of_a_teacher_are_a_term_of_the_loss(
    start: Start, tiny_model: ModelFactory, seen: list[PolicyLossInput], chunk: int
) -> None:
    """The gradient is that of transformers' own models, and the term counts as the loss does: by sequence."""
    kl, model = {"reference": str(tiny_model(seed=5))}, {"name": str(tiny_model()), "logits_chunk_tokens": chunk}
    settings: dict[str, Any] = {"kl": kl, "model": model, "row_tokens": 32, "optim": {"lr": 1e-3, "max_grad_norm": 1e9}}
    run = start(**settings, advantage="distillation", distillation=FULL)
    metrics = run.learn(1)
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64) for name in (model["name"], kl["reference"])
    )
    term, mean, tokens = torch.zeros((), dtype=torch.float64), 0.0, 0
    rollouts = make_batch(1).rollouts
    for rollout in rollouts:
        ids = torch.tensor([list(rollout.token_ids)])
        own, other = (one(ids).logits[0, :-1].div(0.9).log_softmax(-1) for one in (student, teacher))
        divergence_T = (own.exp() * (own - other.detach())).sum(-1)[torch.tensor(rollout.loss_mask[1:]) == 1]
        term = term + divergence_T.mean() / len(rollouts)
        mean, tokens = mean + float(divergence_T.detach().sum()), tokens + len(divergence_T)
    (0.5 * term).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in student.parameters() if p.grad is not None))
    assert metrics["loss"] == pytest.approx(0.5 * float(term.detach()), rel=1e-5)
    assert metrics["distillation/kl"] == pytest.approx(mean / tokens, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert not any(data.advantages_N.any() for data in seen)
    lines = [metrics, *(run.learn(step) for step in (2, 3))]
    assert lines[2]["distillation/kl"] < lines[0]["distillation/kl"]
    seen.clear()
    both = start(**settings, distillation=FULL | {"coef": 1e-3}).learn(1)
    assert any(data.advantages_N.any() for data in seen) and both["distillation/kl"] == metrics["distillation/kl"]


def test_a_teacher_of_other_tokens_or_of_another_shape_is_refused(start: Start, tiny_model: ModelFactory) -> None:
    other = tiny_model(vocab_size=136)
    with pytest.raises(DataError, match=r"kl.reference = '.*' has 136 tokens, the policy \d+. Set distillation"):
        start(kl={"reference": str(other)}, distillation=FULL)
    run = start(kl={"reference": str(tiny_model(seed=5))}, distillation=FULL)
    assert run.parts.reference is not None
    run.parts.reference.layout = Layout(packs=False, attention="sdpa")
    with pytest.raises(DataError, match="only one of them takes several samples a row"):
        run.parts.begin(run.session.policy)
    other = tiny_model(intermediate_size=48)
    with pytest.raises(DataError, match=rf"kl.reference = '{other}' is a model of another shape .* such as .*mlp"):
        start(kl={"reference": str(other), "refresh_interval": 2})


def test_the_score_of_a_reward_model_is_weighed_against_the_rules(
    start: Start, seen: list[PolicyLossInput], tiny_model: ModelFactory, tmp_path: Path
) -> None:
    model = write_reward_model(tmp_path / "judge", tiny_model()).eval()
    settings = {"name": str(tmp_path / "judge"), "weight": 3.0, "rules_weight": 0.5, "missing_eos_penalty": 2.0}
    metrics = start(reward_model=settings, advantage="dr_grpo", row_tokens=32).learn(1, truncated=(1, 6))
    with torch.no_grad():
        scores = [float(model(torch.tensor([one.token_ids])).logits) for one in make_batch(1).rollouts]
    assert metrics["reward_model/mean"] == pytest.approx(np.mean(scores), rel=1e-4)
    assert metrics["reward_model/std"] == pytest.approx(np.std(scores), rel=1e-4) and np.std(scores) > 0.01
    rewards = [3.0 * s + 0.5 * one.reward for s, one in zip(scores, make_batch(1).rollouts, strict=True)]
    for number in (1, 6):
        rewards[number] -= 3.0 * 2.0
    check_advantages(seen, rewards)


def test_the_reward_is_the_weighted_sum_of_the_environments(start: Start, seen: list[PolicyLossInput]) -> None:
    def batch(**metrics: float) -> Batch:
        made = make_batch(1)
        for number, rollout in enumerate(made.rollouts):
            rollout.metrics = {name: value * number for name, value in metrics.items()}
        return made

    run = start(rewards={"weights": {"reward": 2.0, "style": -0.5}})
    run.learn_from(batch(style=1.0, other=100.0, reward=7.0))  # a metric of that name is another
    check_advantages(seen, [2.0 * one.reward - 0.5 * number for number, one in enumerate(make_batch(1).rollouts)])
    with pytest.raises(TrainingError, match=r"names 'style'.*'e' does not.*Did you mean 'styles'\? .*: styles, reward"):
        run.learn_from(batch(styles=1.0))


def test_long_answers_cost_their_groups_what_the_settings_say(start: Start, seen: list[PolicyLossInput]) -> None:
    most, buffer = 6, 4
    shaping = {"length_max_tokens": most, "length_buffer_tokens": buffer, "length_penalty": 0.5}
    metrics = start(rewards=shaping, advantage="dr_grpo", row_tokens=32).learn(1)
    rollouts = make_batch(1).rollouts
    lengths = [sum(one.loss_mask) for one in rollouts]
    assert min(lengths) <= most - buffer and max(lengths) > most
    penalties = [0.5 * min(0.0, max(-1.0, (most - buffer - length) / buffer)) for length in lengths]
    rewards = [one.reward + penalty for one, penalty in zip(rollouts, penalties, strict=True)]
    assert metrics["reward/shaped/mean"] == pytest.approx(np.mean(rewards))
    check_advantages(seen, rewards)


def test_until_the_critic_is_warm_the_policy_stays_as_it_is(start: Start, seen: list[PolicyLossInput]) -> None:
    critic = {"optim": {"lr": 1e-2}, "warmup_steps": 2}
    settings: dict[str, Any] = {"advantage": "gae", "critic": critic, "kl": {}, "ema": {}}
    settings |= {"updates": {"epochs": 2, "minibatches": 2}}
    run = start(**settings)
    begin = run.tensors()
    warm = [run.learn(1)]
    run.save(1)
    warm.append(run.learn(2))
    assert len(seen) == 4, "the minibatches of one pass, without gradient"
    assert not any(data.logprobs_N.requires_grad for data in seen)
    after = run.tensors()
    changed = {name.split(".")[0] for name in begin if not torch.equal(begin[name], after[name])}
    assert changed == {"critic"}, "policy, its optimizer and its average are what they were"
    assert all(line["lr"] == line["ppo_kl"] == line["ref_kld"] == 0 and "grad_norm" not in line for line in warm)
    assert all(line["entropy"] > 1 and line["mismatch_kl"] > 0 and line["value_lr"] == 1e-2 for line in warm)
    assert warm[1]["value_loss"] < warm[0]["value_loss"]
    last = run.learn(3)
    assert last["lr"] == 1e-3 and last["grad_norm"] > 0 and last["ppo_kl"] > 0
    moved = run.tensors()
    assert all(not torch.equal(moved[name], after[name]) for name in moved if name.startswith("optim."))
    resumed = start(**settings, resume_step=1)
    assert [resumed.learn(2), resumed.learn(3)] == [warm[1], last]
    assert all(torch.equal(tensor, moved[name]) for name, tensor in resumed.tensors().items())


def test_until_the_critic_is_warm_nothing_is_steered_by_the_policy(start: Start) -> None:
    loss = {"type": "ppo", "entropy": {"coef": 0.1, "target": 100.0}}
    run = start(advantage="gae", critic={"warmup_steps": 2}, kl=REWARD_KL, loss=loss)
    found = [run.learn(step) for step in (1, 2, 3, 4)]
    assert [line["kl_coef"] for line in found[:3]] == [0.2] * 3 and found[3]["kl_coef"] != 0.2
    assert [line["entropy_coef"] for line in found] == pytest.approx([0.0, 0.0, 0.0, 0.105])
    assert all("kl/sequence" in line for line in found)


@pytest.mark.parametrize(("settings", "num_passes"), [
    ({}, 1), ({"kl": {"place": "reward"}}, 1), ({"kl": {"place": "reward", "coef": 0.1}}, 2),
    ({"kl": {"target": 1.0, "coef": 0.1}}, 2), ({"distillation": {}}, 2),
    ({"distillation": {"divergence": "full"}}, 1), ({"advantage": "gae", "critic": {}}, 1),
    ({"updates": {"minibatches": 2}}, 4),
])  # fmt: skip
def test_the_policy_reads_a_batch_as_often_as_its_settings_need(
    start: Start, tiny_model: ModelFactory, settings: dict[str, Any], num_passes: int
) -> None:
    if "distillation" in settings:
        settings = settings | {"kl": {"reference": str(tiny_model(seed=1))}}
    run = start(**settings)
    passes: list[None] = []
    run.session.policy.register_forward_hook(lambda *_: passes.append(None))
    run.learn(1)
    assert len(passes) == num_passes


def test_a_policy_that_is_never_trained_or_that_no_reference_can_follow_is_refused() -> None:
    settings = {"advantage": "gae", "max_steps": 5, "critic": {"warmup_steps": 5}}
    with pytest.raises(ValueError, match="critic.warmup_steps .5. must be below max_steps .5."):
        TrainerConfig.model_validate(settings)
    TrainerConfig.model_validate(settings | {"max_steps": 6})
    with pytest.raises(ValueError, match="kl.refresh_interval is for a policy .* whole"):
        TrainerConfig.model_validate({"kl": {"refresh_interval": 2}, "model": {"lora": {}}})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_a_refresh_the_divergence_is_nothing(start: Start, tiny_model: ModelFactory, dtype: str) -> None:
    settings: dict[str, Any] = {"kl": {"refresh_interval": 2}, "model": {"name": str(tiny_model()), "dtype": dtype}}
    run = start(**settings)
    lines = [run.learn(1)]
    run.save(1)
    lines += [run.learn(step) for step in (2, 3, 4, 5)]
    run.save(5)
    assert [line["ref_kld"] == 0 for line in lines] == [True, False, True, False, True]
    for step in (1, 5):
        resumed = start(**settings, resume_step=step)
        assert [resumed.learn(number) for number in range(step + 1, 6)] == lines[step:]
    assert resumed.learn(6) == run.learn(6)


def test_another_reference_is_refused_by_its_weights(start: Start, tiny_model: ModelFactory) -> None:
    run = start(kl={})
    run.learn(1)
    run.save(1)
    other, same = tiny_model(seed=5), tiny_model(max_position_embeddings=128)
    with pytest.raises(CheckpointError) as caught:
        start(kl={"reference": str(other)}, resume_step=1)
    message = str(caught.value)
    assert f"kl.reference = '{other}' holds other weights" in message and f"'{tiny_model()}'" in message
    assert "--ckpt.init-from" in message and caught.value.exit_code == 2
    start(kl={"reference": str(same)}, resume_step=1)  # equal weights in another place


def test_what_is_switched_on_later_starts_afresh_and_says_so(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    run = start()
    run.learn(1)
    run.save(1)
    with caplog.at_level("INFO"):
        resumed = start(kl=REWARD_KL, rewards={"scale": "running"}, resume_step=1)
    for part in ("kl", "reference", "reward_moments"):
        assert f"the checkpoint holds no {part}: it starts from scratch" in caplog.text
    metrics = resumed.learn(2)
    assert metrics["kl_coef"] == 0.2 and metrics["ref_kld"] > 0, "the reference is what the run began with"
    resumed.save(2)
    caplog.clear()
    start(resume_step=2)
    assert "the checkpoint holds kl, which this configuration does not use" in caplog.text
