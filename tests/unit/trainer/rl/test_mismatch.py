"""Log-probabilities of fresh rollouts and of the parity prompt are those that the trainer computes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from holdfast.config import RlConfig, TrainerConfig
from holdfast.config.rl import hand_down_shared
from holdfast.config.training import TrainedModelConfig
from holdfast.errors import TrainingError
from holdfast.protocol.inference import TEXT, ParityPrompt
from holdfast.protocol.rollouts import Batch, Rollout, Sampling, VersionSpan
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.logprobs import Reading
from holdfast.trainer.model.policy import Policy, build_policy, predict
from holdfast.trainer.rl.mismatch import measure_parity_prompt, mismatch_limit
from holdfast.trainer.session import Stopwatch
from tests.builders.learner_runs import start_learner
from tests.builders.sampled_rollouts import answered
from tests.conftest import ROOT, ModelFactory

PROMPT, LENGTH = 3, 12
AT_07 = Sampling(0.7)
Learn = Callable[..., dict[str, float]]


def sampled_by(policy: Policy, mesh: Mesh, sampling: Sampling, *, off_by: float) -> list[Rollout]:
    """Rollouts with the very log-probabilities of `policy`, but for `off_by`."""
    generator, rollouts = np.random.default_rng(0), []
    mask = np.arange(LENGTH) >= PROMPT
    policy.eval()
    for number in range(4):
        token_ids = generator.integers(5, 100, LENGTH).astype(np.int32)
        micro = build_micro_batch([Sample(token_ids, mask)], [0], pack=policy.layout.packs, device=mesh.device)
        with torch.no_grad():
            logprobs_N = predict(policy, micro, Reading(sampling)).logprobs_N
        tokens = (token_ids[:PROMPT], token_ids[PROMPT:], (logprobs_N + off_by).tolist())
        rollouts.append(answered(*tokens, versions=[], sample_index=number, sampling=sampling, reward=float(number)))
    policy.train()
    return rollouts


@pytest.fixture
def learn(tiny_model: ModelFactory, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Learn:
    """Return a maker of one step on rollouts that are `age` versions old; None: a teacher's."""

    def step(
        *, off_by: float, age: int | None = 0, is_foreign: bool = False, sampling: Sampling = AT_07, **settings: Any
    ) -> dict[str, float]:
        model = tiny_model(**settings.pop("of_model", {}))
        run = start_learner(tmp_path, model, mesh, tokenizer, **{"mismatch_limit": None, **settings})
        policy = run.session.policy
        before = {name: tensor.clone() for name, tensor in trained_tensors(policy.hf_model).items()}
        rollouts = sampled_by(policy, mesh, sampling, off_by=off_by)
        number = 3
        for rollout in rollouts if age is not None else ():
            rollout.versions = [VersionSpan(version=number - 1 - (age or 0), start=PROMPT, end=LENGTH)]
        batch = Batch(step=number, policy_version=number - 1, weights_digest="d", rollouts=rollouts)
        try:
            return run.learner.learn(batch, Stopwatch(), is_foreign=is_foreign)
        except TrainingError:
            after = trained_tensors(policy.hf_model)
            assert all(torch.equal(before[name], tensor) for name, tensor in after.items()), "no step was taken"
            raise

    return step


DROPOUT = {"of_model": {"attention_dropout": 0.3}}
SEVERAL = {"updates": {"epochs": 2, "minibatches": 2}}


@pytest.mark.parametrize("settings", [{}, SEVERAL, DROPOUT, DROPOUT | SEVERAL], ids=str)
def test_rollouts_of_another_model_end_the_run_before_the_step(learn: Learn, settings: dict[str, Any]) -> None:
    message = r"step 3: trainer and engine do not compute the same model.* mismatch_kl = 0\.0[0-9]+ nats a token"
    with pytest.raises(TrainingError, match=message) as caught:
        learn(off_by=-0.2, **settings)
    for part in ("allowed are 1e-06 (trainer.mismatch_limit, unset: for float32)", "Qwen3ForCausalLM", "soft cap"):
        assert part in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("settings", [{}, SEVERAL, DROPOUT, DROPOUT | SEVERAL], ids=str)
def test_a_models_own_rollouts_train(learn: Learn, settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    metrics = learn(off_by=0.0, **settings)
    assert ("is trained with dropout, or something else that is random" in caplog.text) == ("of_model" in settings)
    assert metrics["grad_norm"] > 0
    if settings in ({}, SEVERAL):
        assert metrics["mismatch_kl/age_0"] < 1e-9


@pytest.mark.parametrize("accepted", [
    {"age": 1}, {"is_foreign": True}, {"is_foreign": True} | DROPOUT, {"age": None, "loss": {"type": "sft"}},
    {"mismatch_limit": 0.1}, {"mismatch_limit": math.inf}, {"sampler_dtype": "bfloat16"},
], ids=str)  # fmt: skip
def test_older_rollouts_a_teachers_and_allowed_ones_raise_no_alarm(learn: Learn, accepted: dict[str, Any]) -> None:
    learn(off_by=-0.2, **accepted)


def test_a_token_at_the_border_of_a_truncated_distribution_ends_no_run_and_no_number_does(learn: Learn) -> None:
    truncated = Sampling(0.7, top_p=0.9, top_k=50, min_p=1e-3)
    assert learn(off_by=0.0, sampling=truncated)["mismatch_kl/age_0"] < 1e-9
    assert 1e-6 < learn(off_by=-0.03, sampling=truncated)["mismatch_kl/age_0"] < 1e-3
    with pytest.raises(TrainingError, match=r"allowed are 0\.001 "):
        learn(off_by=-0.1, sampling=truncated)
    with pytest.raises(TrainingError, match="mismatch_kl = (nan|inf)"):
        learn(off_by=-math.inf)


@pytest.mark.parametrize(("trainer", "engine", "limit"), [
    ("float32", "float32", 1e-6), ("bfloat16", None, 0.05), ("float32", "bfloat16", 0.05),
])  # fmt: skip
def test_rl_tells_the_trainer_what_its_engines_compute_in(trainer: str, engine: str | None, limit: float) -> None:
    values: dict[str, Any] = {"trainer": {"model": {"dtype": trainer}}}
    if engine is not None:
        values["inference"] = {"model": {"dtype": engine}}
    config = hand_down_shared(RlConfig.model_validate(values)).trainer
    assert config.sampler_dtype == (engine or trainer) and mismatch_limit(config) == limit
    assert mismatch_limit(config, is_truncated=True) == max(limit, 1e-3)


MODEL = ROOT / "examples" / "reverse_text" / "model"


@pytest.mark.parametrize(("changes", "allowed"), [
    ({}, math.sqrt(2e-6)), ({"model": {"dtype": "bfloat16"}}, math.sqrt(0.1)), ({"mismatch_limit": 0.5}, 1.0),
    ({"mismatch_limit": math.inf}, None),
])  # fmt: skip
def test_allowed_follows_dtypes_and_the_setting(changes: dict[str, Any], allowed: float | None, mesh: Mesh) -> None:
    config = TrainerConfig.model_validate({"model": {"name": str(MODEL)}} | changes)
    policy = build_policy(TrainedModelConfig(name=str(MODEL)), mesh, seed=0)
    data = measure_parity_prompt(policy, AutoTokenizer.from_pretrained(MODEL), mesh, config=config)
    assert data is not None
    assert msgspec.json.decode(data, type=ParityPrompt).allowed_nats == (allowed and pytest.approx(allowed))


def test_the_trainer_measures_what_transformers_computes(mesh: Mesh) -> None:
    policy = build_policy(TrainedModelConfig(name=str(MODEL)), mesh, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    before = torch.get_rng_state()
    data = measure_parity_prompt(policy, tokenizer, mesh, config=TrainerConfig())
    assert data is not None
    parity = msgspec.json.decode(data, type=ParityPrompt)
    assert policy.training and torch.equal(torch.get_rng_state(), before), "training goes on as if nothing was measured"
    assert parity.token_ids == tokenizer(TEXT, add_special_tokens=False)["input_ids"][: len(parity.token_ids)]
    ids = torch.tensor([parity.token_ids])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(MODEL)(ids).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(parity.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_one_token_says_nothing_of_what_follows_it(mesh: Mesh) -> None:
    policy = build_policy(TrainedModelConfig(name=str(MODEL)), mesh, seed=0)

    def tokenizer(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [5]}

    assert measure_parity_prompt(policy, tokenizer, mesh, config=TrainerConfig()) is None  # type: ignore[arg-type]
