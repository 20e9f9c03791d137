"""Every name in the tables of algorithms computes its formula, in random cases, and has function, help and docs."""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from docs_tools.listing import texts_of
from holdfast.config.advantages import ADVANTAGES, PlainAdvantage
from holdfast.config.base import KlEstimator
from holdfast.config.policy_losses import POLICY_LOSSES
from holdfast.config.preference import PREFERENCE_LOSSES, PreferenceLossConfig, ReferencedLoss
from holdfast.protocol.rollouts import Batch, Rewards, StepRewards, TokenIds
from holdfast.run.run_dir import REFERENCE_NAME
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.policy import Policy
from holdfast.trainer.preference import losses as preference_losses
from holdfast.trainer.rl import advantages
from holdfast.trainer.rl import losses as policy_losses
from tests.builders.advantage_settings import NEEDED
from tests.builders.learner_runs import LearnerRun, start_learner
from tests.builders.sampled_rollouts import answered
from tests.builders.slow_advantages import check_advantage
from tests.builders.slow_losses import check_policy_loss
from tests.builders.slow_preferences import check_kl_estimate, check_preference_loss
from tests.conftest import ROOT, ModelFactory
from tests.faults.run_states import differing
from tests.runs.training import PAIRS
from tests.unit.trainer.programs.in_process import end_state, train

TABLES: dict[str, tuple[Iterable[str], Callable[[Any, int], None]]] = {
    "policy losses": (POLICY_LOSSES, check_policy_loss),
    "advantages": (ADVANTAGES, check_advantage),
    "preference losses": (PREFERENCE_LOSSES, check_preference_loss),
    "KL estimators": (get_args(KlEstimator), check_kl_estimate),
}
FEW, MANY = 25, 10_000


@pytest.mark.parametrize("table", TABLES)
def test_every_name_computes_its_formula(table: str) -> None:
    names, check = TABLES[table]
    for name in names:
        for seed in range(FEW):
            check(name, seed)


@pytest.mark.clock
@pytest.mark.parametrize("table", TABLES)
def test_every_table_computes_its_formulas_in_ten_thousand_cases(table: str) -> None:
    names, check = TABLES[table]
    for name in names:
        for seed in range(FEW, FEW + MANY // len(list(names))):
            check(name, seed)


PAGES = {
    "policy losses": ("losses.md", POLICY_LOSSES, None, "type", policy_losses.__dict__.get),
    "advantages": ("losses.md", ADVANTAGES, PlainAdvantage, "type", advantages.__dict__.get),
    "preferences": ("preferences.md", PREFERENCE_LOSSES, PreferenceLossConfig, "type", preference_losses.__dict__.get),
}


@pytest.mark.parametrize("names", PAGES)
def test_every_name_has_a_function_help_and_a_row(names: str) -> None:
    page, table, config, field, find = PAGES[names]
    text = (ROOT / "docs" / page).read_text()
    for name, built_in in table.items():
        assert f"\n| `{name}` |" in text, f"docs/{page} has no row for {name}"
        assert config is None or f"`{name}`" in texts_of(config)[field]
        function = getattr(built_in, "function", f"{name}_loss")
        if function is not None:
            assert callable(find(function))


GROUPS, GROUP_SIZE, SAMPLED = 4, 8, 3
GOOD = torch.arange(128) % 2 == 0
"""A token of an answer is right if its id is even; the model takes one as often as the other at first."""
STEPS, HALF = 12, 7


def play(policy: Policy, step: int, *, imitated: bool = False, by_token: bool = False) -> Batch:
    """Return a batch of the policy, or a teacher's: right tokens alone. `by_token`: each token has a reward, too."""
    generator = torch.Generator().manual_seed(step)
    tasks = torch.arange(GROUPS).repeat_interleave(GROUP_SIZE)
    ids = torch.stack([torch.full_like(tasks, 4), 5 + tasks], dim=1)
    logprobs = []
    with torch.no_grad():
        for _ in range(SAMPLED):
            logits = policy.hf_model(ids).logits[:, -1]
            weights = GOOD.float().expand(len(ids), -1) if imitated else logits.softmax(-1)
            drawn = torch.multinomial(weights, 1, generator=generator)
            logprobs.append(logits.log_softmax(-1).gather(1, drawn))
            ids = torch.cat([ids, drawn], dim=1)
    right, sampled, places = GOOD[ids[:, 2:]].float(), torch.cat(logprobs, dim=1), TokenIds(range(2, 2 + SAMPLED))
    rollouts = [
        answered(
            ids[number, :2].tolist(), ids[number, 2:].tolist(), sampled[number].tolist(), version=step - 1,
            environment="letters", task_id=(step - 1) * GROUPS + number // GROUP_SIZE, sample_index=number % GROUP_SIZE,
            reward=float(right[number].mean()), metrics={"other": float(right[number, -1])},
            step_rewards=StepRewards(places, Rewards(right[number].tolist())) if by_token else None,
        )
        for number in range(len(ids))
    ]  # fmt: skip
    digest = "" if imitated else "d" * 32
    return Batch(step=step, policy_version=step - 1, weights_digest=digest, rollouts=rollouts)


def skill(policy: Policy) -> float:
    """Return how many tokens that the policy samples are right."""
    return float(np.mean([rollout.reward for rollout in play(policy, 999).rollouts]))


@dataclass(frozen=True)
class Learned:
    """What a run came to: its metrics by step, and its skill before and after."""

    lines: list[dict[str, float]]
    before: float
    after: float


Learn = Callable[..., Learned]


@pytest.fixture(scope="module")
def learn(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: ModelFactory, mesh: Mesh, tokenizer: PreTrainedTokenizerBase
) -> Learn:
    """Return what has a learner take all steps on what its own policy samples (`play`), and those behind the first half
    once more, from a checkpoint."""

    def make(settings: dict[str, Any], **kind: bool) -> Learned:
        def step_of(run: LearnerRun, step: int) -> dict[str, float]:
            return run.learn_from(play(run.session.policy, step, **kind))

        settings = {"optim": {"lr": 1e-2}, "mismatch_limit": None} | settings
        start = partial(start_learner, tmp_path_factory.mktemp("run"), tiny_model(), mesh, tokenizer, **settings)
        run = start()
        before = skill(run.session.policy)
        lines = [step_of(run, step) for step in range(1, HALF + 1)]
        run.save(HALF)
        lines += [step_of(run, step) for step in range(HALF + 1, STEPS + 1)]
        again = start(resume_step=HALF)
        assert [step_of(again, step) for step in range(HALF + 1, STEPS + 1)] == lines[HALF:]
        expected, found = run.tensors(), again.tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        return Learned(lines, before, skill(run.session.policy))

    return make


@pytest.fixture(scope="module")
def free(learn: Learn) -> Learned:
    """A run that is rewarded, measures its divergence from where it began, and does not pay for it."""
    return learn({"kl": {}})


@pytest.mark.clock
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_learns(name: str, learn: Learn) -> None:
    """Of each batch it takes four updates, so that what bounds ratios acts."""
    constant = (
        {"constant_tokens": SAMPLED} if POLICY_LOSSES[name].model_fields["aggregation"].default == "constant" else {}
    )
    settings = {"loss": {"type": name} | constant, "updates": {"epochs": 2, "minibatches": 2}}
    learned = learn(settings, imitated=name == "sft")
    assert learned.after > learned.before + 0.25, learned


@pytest.mark.clock
@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_learns(name: str, learn: Learn, tiny_model: ModelFactory) -> None:
    """`distillation` comes nearer to its teacher; the others are rewarded for right tokens."""
    settings, is_taught = {"advantage": name} | NEEDED.get(name, {}), name == "distillation"
    settings |= {"kl": {"reference": str(tiny_model(seed=5))}} if is_taught else {}
    learned = learn(settings, by_token=ADVANTAGES[name].takes == "step_rewards")
    if is_taught:
        assert learned.lines[-1]["distillation/kl"] < 0.5 * learned.lines[0]["distillation/kl"]
    else:
        assert learned.after > learned.before + 0.25, learned


@pytest.mark.clock
@pytest.mark.parametrize("name", get_args(KlEstimator))
def test_every_kl_estimator_keeps_the_policy_near_its_reference(name: str, learn: Learn, free: Learned) -> None:
    penalty = {"coef": 2.0, "estimator": name, "place": "reward" if name == "k1" else "loss"}
    assert 0 < learn({"kl": penalty}).lines[-1]["ref_kld"] < 0.5 * free.lines[-1]["ref_kld"]


@pytest.mark.clock
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_every_preference_loss_learns(name: str, tmp_path: Path, tiny_model: ModelFactory, mesh: Mesh) -> None:
    """The program itself, in this process: chosen answers gain on rejected ones."""
    assert mesh.world_size == 1
    (tmp_path / "pairs.jsonl").write_text("".join(PAIRS.read_text().splitlines(keepends=True)[:32]))
    settings = {
        "model": {"name": str(tiny_model())}, "loss": {"type": name}, "optim": {"lr": 3e-3}, "val_interval": STEPS,
        "data": {"name": str(tmp_path / "pairs.jsonl"), "batch_size": 8, "seq_len": 40, "validation_fraction": 0.1},
        "ckpt": {"interval": HALF},
    }  # fmt: skip
    run_dir = train("dpo", tmp_path / "run", settings, until=STEPS)
    assert (run_dir.path / REFERENCE_NAME).exists() == issubclass(PREFERENCE_LOSSES[name], ReferencedLoss)
    shutil.copytree(run_dir.path, tmp_path / "again")
    again = train("dpo", tmp_path / "again", settings, until=STEPS, resume=HALF)
    assert differing(end_state(again, last=STEPS), end_state(run_dir, last=STEPS)) == []
    margins = [line["rewards/margins"] for line in end_state(run_dir, last=STEPS)["metrics"]]
    assert min(margins[-3:]) > max(0.0, margins[0]), margins
