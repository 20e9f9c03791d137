"""Preference pairs and labelled answers: reading, refusing, planning; and a step, however it is split."""

import gc
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config import DpoConfig
from holdfast.config.preference import KtoLoss, PreferenceDataConfig
from holdfast.config.training import LoraConfig, TrainedModelConfig
from holdfast.errors import CheckpointError, DataError
from holdfast.trainer.data.formats import PAIR_FORMATS, RATED_PAIR_FORMATS
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.packing_check import PACKED, Layout
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.preference import pairs as pairing
from holdfast.trainer.preference import reference as preference_reference
from holdfast.trainer.preference.kto import KtoObjective
from holdfast.trainer.preference.losses import kto_loss
from holdfast.trainer.preference.pairs import LabelledAnswer, Pair, fingerprint_preferences, load_answers
from holdfast.trainer.preference.reference import Reference, ReferenceTable, read_pairs, reference_logprobs
from holdfast.trainer.programs.dpo import dpo_objective
from holdfast.trainer.programs.reward_model import end_at_stop_token
from tests.builders.plain_models import copy_with_other_tokens
from tests.builders.preference_steps import check_splits, ragged_pairs, taken_gradients
from tests.conftest import BASE, ModelFactory

TEXTS = [{"prompt": "ab>", "chosen": "ba", "rejected": "ab done"}, {"prompt": "cde>", "chosen": "edc", "rejected": "c"}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def settings(path: Path, rows: list[dict[str, Any]], **more: Any) -> PreferenceDataConfig:
    file = path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PreferenceDataConfig.model_validate({"name": str(file), "seq_len": 32, **more})


def read(path: Path, rows: list[dict[str, Any]], tokenizer: Tokenizer, formats: Any = None, **more: Any) -> list[Pair]:
    """Return the pairs of rows, which are written into a file first."""
    return pairing.load_pairs(settings(path, rows, **more), tokenizer, **({"formats": formats} if formats else {}))


def trained(tokenizer: Tokenizer, pair: Pair) -> tuple[object, ...]:
    """Return what is trained of both sides, as text."""
    return tuple(tokenizer.decode(side.token_ids[side.loss_mask], skip_special_tokens=True) for side in pair.sides)


def test_a_fingerprint_of_text_rows_tells_the_sides_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pairs = read(tmp_path, TEXTS, tokenizer)
    assert [trained(tokenizer, pair) for pair in pairs] == [("ba", "ab done"), ("edc", "c")]
    assert [pair.number for pair in pairs] == [0, 1]
    for pair in pairs:
        assert (~pair.chosen.loss_mask).sum() == (~pair.rejected.loss_mask).sum(), "both follow the same prompt"
    turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in TEXTS]
    assert fingerprint_preferences(read(tmp_path, turned, tokenizer)) != fingerprint_preferences(pairs)


def test_messages_and_conversations_give_the_same_pairs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompt = [user("ab"), assistant("ba"), user("cd")]
    apart = {"prompt": prompt, "chosen": [assistant("dc")], "rejected": [assistant("cd")]}
    whole = {"chosen": [*prompt, assistant("dc")], "rejected": [*prompt, assistant("cd")]}
    expected = read(tmp_path, [apart], tokenizer)
    assert trained(tokenizer, expected[0]) == ("dc", "cd"), "earlier answers belong to the prompt"
    # As some datasets have it: the prompt's text again, beside the chats.
    for row in (whole, {"prompt": "cd", **whole}):
        assert fingerprint_preferences(read(tmp_path, [row], tokenizer)) == fingerprint_preferences(expected)


EITHER = (*RATED_PAIR_FORMATS, *PAIR_FORMATS)


def test_margins_are_read_by_who_asks_for_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rated = [{**row, "margin": margin} for row, margin in zip(TEXTS, (0.25, -3), strict=True)]
    ignored, asked = read(tmp_path, rated, tokenizer), read(tmp_path, rated, tokenizer, RATED_PAIR_FORMATS)
    assert [pair.margin for pair in ignored] == [0, 0] and [pair.margin for pair in asked] == [0.25, -3]
    assert fingerprint_preferences(ignored) != fingerprint_preferences(asked)
    cut = read(tmp_path, rated, tokenizer, RATED_PAIR_FORMATS, seq_len=9, too_long="truncate")
    with_stops = load_tokenizer(str(BASE))
    assert [end_at_stop_token(pair, with_stops).margin for pair in cut] == [0.25, -3]
    assert [pair.margin for pair in read(tmp_path, TEXTS, tokenizer, EITHER)] == [0, 0]


@pytest.mark.parametrize("margin", [None, "1", True, float("nan"), float("inf"), 10**400])
def test_margins_must_be_numbers(tmp_path: Path, tokenizer: Tokenizer, margin: Any) -> None:
    with pytest.raises(DataError, match="row 2: `margin` must be a number in every row"):
        read(tmp_path, [{**TEXTS[0], "margin": 1}, {**TEXTS[1], "margin": margin}], tokenizer, EITHER)
    with pytest.raises(DataError, match=r"has the columns .* loss\.odpo_alpha, `margin`, a number"):
        read(tmp_path, TEXTS, tokenizer, RATED_PAIR_FORMATS)


def test_pairs_of_no_use_are_left_out(tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    equal = {"prompt": "x>", "chosen": "x", "rejected": "x"}
    assert [pair.number for pair in read(tmp_path, [equal, *TEXTS], tokenizer)] == [0, 1]
    assert "pairs have the same tokens on both sides and are left out (row 1)" in caplog.text
    with pytest.raises(DataError, match="pairs have the same tokens on both sides and are left out .row 1.\n.*strict"):
        read(tmp_path, [equal, *TEXTS], tokenizer, strict=True)
    with pytest.raises(DataError, match="no pairs to train on"):
        read(tmp_path, [equal], tokenizer)
    long = {"prompt": "abcdefgh>", "chosen": "x", "rejected": "y"}  # cut, nothing of the answers is left
    (pair,) = read(tmp_path, [long, TEXTS[1]], tokenizer, seq_len=9, too_long="truncate")
    assert trained(tokenizer, pair) == ("edc", "c")


def test_a_table_of_the_reference_of_which_a_byte_is_damaged_is_no_other_table(tmp_path: Path) -> None:
    """Bytes that zip archives have no use for may be anything."""
    path = tmp_path / "reference.npz"
    content = ReferenceTable(np.ones((4, 2)), "pairs", model="abc").encode()
    cut = [content[:length] for length in range(0, len(content), 16)]
    flipped = [content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :] for place in range(len(content))]
    unnoticed = 0
    for damaged in (*cut, *flipped):
        path.write_bytes(damaged)
        try:
            table = ReferenceTable.read(path)
        except CheckpointError as error:
            assert str(error).startswith(f"{path} is damaged")
        else:
            unnoticed += 1
            assert (table.logprobs_P2.tolist(), table.texts) == ([[1.0, 1.0]] * 4, table.texts | {"model": "abc"})
    assert 0 < unnoticed < len(content) / 2


def _beside(config: DpoConfig, pairs: list[Pair], mesh: Mesh) -> ReferenceTable:
    work = preference_reference.ReferenceWork(config, mesh, pairs, pairs, [])
    work.compute_beside()
    return work.table


def test_another_reference_says_its_weights_words(tiny_model: ModelFactory, mesh: Mesh, tmp_path: Path) -> None:
    name, pairs = str(tiny_model(seed=1)), ragged_pairs(5)
    data = {"seq_len": 16, "shuffle": False}
    of_policy = {"model": {"name": str(tiny_model())}, "data": data, "output_dir": tmp_path, "max_steps": 1}
    assert np.isnan(_beside(DpoConfig.model_validate(of_policy), pairs, mesh).logprobs_P2).all()
    config = DpoConfig.model_validate({**of_policy, "loss": {"reference_model": name}})
    found = _beside(config, pairs, mesh)
    theirs = build_policy(TrainedModelConfig(name=name), mesh, seed=0)
    assert found.logprobs_P2.tolist() == reference_logprobs(theirs, pairs, config.data, mesh).tolist()
    gc.collect()  # or what other tests have left would be gone at the second count
    alive = sum(isinstance(thing, Policy) for thing in gc.get_objects())
    _beside(config, pairs, mesh)
    assert sum(isinstance(thing, Policy) for thing in gc.get_objects()) == alive, "it is out of memory again"
    adapted = config.model_copy(update={"model": config.model.model_copy(update={"lora": LoraConfig()})})
    beside = _beside(adapted, pairs, mesh)
    assert beside.model == found.model and beside.logprobs_P2.tolist() == found.logprobs_P2.tolist(), "no adapters"


def test_a_reference_with_other_tokens_is_refused(tiny_model: ModelFactory, mesh: Mesh, tmp_path: Path) -> None:
    other = copy_with_other_tokens(tiny_model(seed=1), tmp_path / "other")
    config = DpoConfig.model_validate({"model": {"name": str(tiny_model())}, "loss": {"reference_model": str(other)}})
    with pytest.raises(DataError, match=r"loss\.reference_model = .* has another tokenizer .*: 2 tokens differ"):
        _beside(config, ragged_pairs(1), mesh)


def test_too_long_pairs_are_refused_dropped_or_cut(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"row 1: a side of the pair has \d+ tokens, data.seq_len is 9"):
        read(tmp_path, TEXTS, tokenizer, seq_len=9)
    dropped, cut = (read(tmp_path, TEXTS, tokenizer, seq_len=9, too_long=how) for how in ("drop", "truncate"))
    assert [trained(tokenizer, pair) for pair in dropped] == [("edc", "c")]
    assert len(cut) == 2 and max(len(side.token_ids) for pair in cut for side in pair.sides) == 9


@pytest.mark.parametrize(("row", "named"), [
    ({"prompt": "a", "completion": "b"}, "chosen"),
    ({"prompt": "a", "chosen": "b", "rejected": [assistant("c")]}, "row 1: rows need"),
    ({"chosen": "b", "rejected": "c"}, "row 1: rows need .* begin differently"),
    ({"prompt": [user("a")], "chosen": "b", "rejected": "c"}, "row 1: rows need"),
    ({"chosen": [assistant("b")], "rejected": [assistant("c")]}, "row 1: rows need .* begin with different"),
    (
        {"prompt": "q", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
        "row 1: `prompt` is 'q', which none of the messages says",
    ),
    (
        {"prompt": [user("a")], "chosen": [user("a"), assistant("b")], "rejected": [assistant("c")]},
        "row 1: the answer begins with the messages of `prompt`",
    ),
])  # fmt: skip
def test_rows_that_are_no_pairs_are_refused(tmp_path: Path, tokenizer: Tokenizer, row: Any, named: str) -> None:
    with pytest.raises(DataError, match=named) as caught:
        read(tmp_path, [row], tokenizer)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("layout", [PACKED, Layout(packs=False, attention="eager")])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_pair_is_in_one_micro_batch_of_one_rank(layout: Layout, world_size: int, pack: bool) -> None:
    pairs = ragged_pairs(17)
    config = PreferenceDataConfig(seq_len=16, micro_batch_size=2, pack=pack)
    plans = pairing.plan_preferences(pairs, layout, config, world_size)
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(index for plan in plans for micro in plan for index in micro) == list(range(17))
    for micro in (micro for plan in plans for micro in plan):
        assert sum(pairs[index].num_tokens for index in micro) <= 2 * 16 * 2


def test_the_sides_of_a_pair_share_their_prompt_and_so_more_pairs_a_row(policy: Policy, mesh: Mesh) -> None:
    pairs = ragged_pairs(17)
    config = PreferenceDataConfig(seq_len=16, micro_batch_size=2)
    shared, apart = (pairing.plan_preferences(pairs, policy.layout, config, 1, share=on)[0] for on in (True, False))
    sides = [side for pair in pairs for side in pair.sides]
    places = [[2 * index + side for index in micro for side in (0, 1)] for micro in shared]
    rows = [build_micro_batch(sides, own, pack=True, share=True, device=mesh.device) for own in places]
    lengths = [row.input_ids_BL.numel() for row in rows]
    prompts = sum(pair.chosen.prompt_length for pair in pairs)
    assert sum(lengths) == sum(pair.num_tokens for pair in pairs) - prompts and max(lengths) <= 2 * 16 * 2
    assert len(shared) < len(apart)


def test_the_prompt_of_a_pair_attends_to_itself_once_and_costs_as_much() -> None:
    """Counted twice, the long prompt would take a rank for itself, and the other two pairs the other one."""

    def pair(number: int, *, prompt: int, answer: int) -> Pair:
        mask = np.arange(prompt + answer) >= prompt
        return Pair(*(Sample(np.arange(len(mask), dtype=np.int32), mask) for _ in range(2)), number=number)

    pairs = [pair(0, prompt=100, answer=5), *(pair(number, prompt=5, answer=75) for number in (1, 2))]
    layout = replace(PACKED, shares=True, pair_cost=1.0)
    config = PreferenceDataConfig(seq_len=512, micro_batch_size=1)
    plans = pairing.plan_preferences(pairs, layout, config, world_size=2, share=True)
    assert sorted(sorted(row) for plan in plans for row in plan) == [[0, 1], [2]]


@pytest.fixture(scope="module")
def policy(tiny_model: ModelFactory, mesh: Mesh) -> Policy:
    return build_policy(TrainedModelConfig(name=str(tiny_model()), init="pretrained"), mesh, seed=0)


def answer_logprob(policy: Policy, sample: Sample) -> Tensor:
    """Return the summed log-probability of what is trained, by transformers' own logits in float64."""
    ids_L = torch.from_numpy(sample.token_ids.astype(np.int64))
    given = {"input_ids": ids_L[None], "position_ids": torch.arange(len(ids_L))[None]}
    hidden = policy.hf_model.get_decoder()(**given, use_cache=False).last_hidden_state[0]
    logprobs = policy.hf_model.get_output_embeddings()(hidden).double().log_softmax(-1)  # type: ignore[misc]
    picked = [logprobs[place - 1, ids_L[place]] for place in np.flatnonzero(sample.loss_mask)]
    return sum(picked, torch.zeros((), dtype=torch.float64))


def step_of(policy: Policy, mesh: Mesh, pairs: list[Pair], **data: Any) -> tuple[dict[str, float], Tensor]:
    """Return metrics and gradients of one step over all pairs, with the reference a little off the policy."""
    config = DpoConfig.model_validate({"data": {"seq_len": 16, **data}, "loss": {"beta": 0.3}})
    offsets = np.random.default_rng(1).normal(size=(len(pairs), 2))
    reference = Reference(reference_logprobs(policy, pairs, config.data, mesh) + offsets, {})
    return dpo_objective(config, reference, mesh).accumulate_gradients(policy, pairs), taken_gradients(policy)


def test_a_step_is_what_logits_and_the_formula_give_however_it_is_split(policy: Policy, mesh: Mesh) -> None:
    pairs = ragged_pairs(4)
    metrics, gradients = step_of(policy, mesh, pairs)
    offsets = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 2)))
    loss = torch.zeros((), dtype=torch.float64)
    for pair, offset in zip(pairs, offsets, strict=True):
        w, l = (answer_logprob(policy, side) for side in pair.sides)  # noqa: E741
        h = 0.3 * ((w - (w.detach() + offset[0])) - (l - (l.detach() + offset[1])))
        loss = loss - torch.log(torch.sigmoid(h)) / 4
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert 0 <= metrics["token_accuracy"] <= 1 and 0 < metrics["entropy"] < math.log(policy.hf_model.config.vocab_size)
    torch.testing.assert_close(gradients, taken_gradients(policy), rtol=1e-4, atol=1e-6)
    metrics = check_splits(partial(step_of, policy, mesh, ragged_pairs(12)))
    assert 0 < metrics["rewards/accuracies"] < 1
    assert metrics["rewards/margins"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])


def test_the_reference_is_computed_without_dropout_and_leaves_training_on(policy: Policy, mesh: Mesh) -> None:
    pairs = ragged_pairs(7)
    config = PreferenceDataConfig(seq_len=16, micro_batch_size=1, batch_size=3)  # blocks of 3, 3 and 1
    logprobs = reference_logprobs(policy, pairs, config, mesh)
    assert policy.training and logprobs.shape == (7, 2) and (logprobs < 0).all()
    alone = [read_pairs(policy, pairs, [k], pack=False, device=mesh.device).logprobs_N for k in range(7)]
    np.testing.assert_allclose(logprobs, torch.cat(alone).tolist(), rtol=1e-5)


def test_a_rank_without_pairs_or_answers_takes_part_with_a_gradient_of_zero(policy: Policy, mesh: Mesh) -> None:
    policy.zero_grad(set_to_none=True)
    nothing = read_pairs(policy, ragged_pairs(2), [], pack=True, device=mesh.device).logprobs_N
    assert nothing.shape == (0, 2)
    nothing.sum().backward()
    assert not taken_gradients(policy).any()
    answers = ragged_answers(2)
    columns = objective_of(policy, mesh, answers, offset=0.0)._compared_with(0.5).forward(policy, answers, [])
    assert {name: column.shape for name, column in columns.items()} == dict.fromkeys(columns, (0,))
    columns["loss"].sum().backward()
    assert not taken_gradients(policy).any()


LABELLED = [
    {"prompt": "ab>", "completion": "ba", "label": True},
    {"prompt": "ab>", "completion": "ab done", "label": False},
    {"prompt": "cde>", "completion": "edc", "label": True},
]


@pytest.mark.parametrize("label", [True, False])
@pytest.mark.parametrize("ratio", [0.0, 1e4, -1e4, 1e-300, 1e300, -1e300])
@pytest.mark.parametrize("kl", [0.0, 1e4])
def test_the_loss_of_kto_stays_finite_and_bounded(label: bool, ratio: float, kl: float) -> None:
    ratios_A = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    losses_A, _ = kto_loss(ratios_A, torch.tensor([label]), kl, KtoLoss(type="kto", beta=0.3))
    (gradient,) = torch.autograd.grad(losses_A.sum(), ratios_A)
    assert 0 <= losses_A.item() <= 1 and abs(gradient.item()) <= 0.3 / 4


def test_every_answer_is_taken_once_with_another_prompt_unless_one_prompt_has_more_than_half() -> None:
    random = np.random.default_rng(0)
    for case in range(300):
        count = int(random.integers(2, 30))
        prompts = [bytes([letter]) for letter in random.integers(0, random.integers(2, 9), count)]
        if len(set(prompts)) < 2:
            continue
        others = pairing.mismatched_places(prompts)
        assert all(prompts[other] != prompts[place] for place, other in enumerate(others)), case
        most = max(map(prompts.count, set(prompts)))
        taken = [others.count(place) for place in range(count)]
        assert set(taken) == {1} if 2 * most <= count else max(taken) <= -(-most // (count - most)), case
    assert pairing.mismatched_places([b"a"] * 3) == pairing.mismatched_places([b"a"]) == []


def text_of(tokenizer: Tokenizer, sample: Sample) -> str:
    return str(tokenizer.decode(sample.token_ids, skip_special_tokens=True))


def test_labelled_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answers = load_answers(settings(tmp_path, LABELLED), tokenizer)
    found = [(answer.is_desirable, answer.number, answer.row) for answer in answers]
    assert found == [(True, 0, 0), (False, 1, 1), (True, 2, 2)]
    assert [text_of(tokenizer, answer.answer) for answer in answers] == ["ab>ba", "ab>ab done", "cde>edc"]
    assert [text_of(tokenizer, answer.mismatched) for answer in answers] == ["ab>edc", "ab>edc", "cde>ba"]
    for answer in answers:
        trained = answer.mismatched.token_ids[answer.mismatched.loss_mask]
        other = answers[0 if answer.number == 2 else 2].answer
        assert trained.tolist() == other.token_ids[other.loss_mask].tolist()
    turned = load_answers(settings(tmp_path, [{**row, "label": not row["label"]} for row in LABELLED]), tokenizer)
    assert fingerprint_preferences(answers) != fingerprint_preferences(turned), "labels are part of it"


def test_pairs_are_a_good_and_a_bad_answer_each(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = settings(tmp_path, [{**TEXTS[0], "rejected": "ab"}, TEXTS[1]])
    answers, pairs = load_answers(config, tokenizer), pairing.load_pairs(config, tokenizer)
    assert [(answer.is_desirable, answer.row) for answer in answers] == [(True, 0), (False, 0), (True, 1), (False, 1)]
    sides = [side for pair in pairs for side in pair.sides]
    assert [text_of(tokenizer, answer.answer) for answer in answers] == [text_of(tokenizer, side) for side in sides]
    mismatched = [text_of(tokenizer, answer.mismatched) for answer in answers]
    assert mismatched == ["ab>edc", "ab>c", "cde>ba", "cde>ab"], "good and bad ones, never that of the same prompt"


def test_labelled_rows_of_no_use(tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    def load(rows: list[dict[str, Any]], **more: Any) -> list[LabelledAnswer]:
        return load_answers(settings(tmp_path, rows, **more), tokenizer)

    long = {**LABELLED[0], "prompt": "abcdefgh>"}  # cut, nothing of the answer is left
    cutting = {"seq_len": 9, "too_long": "truncate"}
    wrong = [[*LABELLED[:2], {**LABELLED[2], "label": label}] for label in (1, "true", None)]
    for rows, more, said in (
        *((rows, {}, "row 3: `label` must be true .* or false") for rows in wrong),
        (LABELLED[:2], {}, "all answers have the same prompt, and KTO needs at least two"),
        ([{"prompt": "a", "completion": "b"}], {}, "rows need `prompt`, `completion` and `label` .*; or `prompt`, `ch"),
        (LABELLED, {"seq_len": 9}, r"row 2: the sample has \d+ tokens, data.seq_len is 9"),
        ([long], cutting, "no answers to train on are left"),
    ):
        with pytest.raises(DataError, match=said):
            load(rows, **more)
    assert len(load(LABELLED, seq_len=9, too_long="drop")) == 2
    assert [len(answer.answer.token_ids) for answer in load(LABELLED, **cutting)][1] == 9
    assert len(load([long, *LABELLED], **cutting)) == 3
    for said in (
        "answers of more than 9 tokens are dropped (row 2)",
        "answers of more than 9 tokens are cut (row 2)",
        "answers have nothing to train on and are left out (row 1)",
    ):
        assert said in caplog.text
    mismatched = [one.mismatched for one in load([LABELLED[0], {**LABELLED[2], "completion": "edcedc"}], seq_len=11)]
    assert max(len(sample.token_ids) for sample in mismatched) <= 11


def ragged_answers(count: int) -> list[LabelledAnswer]:
    """Return answers of random tokens and lengths; two of three are good."""
    random = np.random.default_rng(0)
    samples = []
    for number in range(count):
        prompt, answer = random.integers(5, 40, random.integers(1, 6)), random.integers(5, 40, random.integers(1, 9))
        mask = np.repeat([False, True], [len(prompt), len(answer)])
        samples.append(Sample(np.concatenate([prompt, answer]).astype(np.int32), mask, value=float(number % 3 > 0)))
    both = enumerate(zip(samples, [*samples[1:], samples[0]], strict=True))
    return [LabelledAnswer(one, replace(other, value=0.0), number, number // 2) for number, (one, other) in both]


def test_held_out_pairs_keep_their_numbers_and_both_answers_of_a_row_go_together() -> None:
    pairs, answers = ragged_pairs(20), ragged_answers(20)
    for given, fraction, sizes in ((pairs, 0.25, (15, 5)), (answers, 0.3, (14, 6))):
        training, held_out = pairing.split_preferences(given, fraction, seed=1)
        assert (len(training), len(held_out)) == sizes
        assert sorted(one.number for one in (*training, *held_out)) == list(range(20))
        assert all(given[one.number] is one for one in (*training, *held_out))
    assert not {answer.row for answer in training} & {answer.row for answer in held_out}
    with pytest.raises(DataError, match="validation_fraction"):
        pairing.split_preferences([], 0.9, seed=1)


def objective_of(
    policy: Policy, mesh: Mesh, answers: list[LabelledAnswer], *, offset: float, **data: Any
) -> KtoObjective:
    """Return the objective against a reference that is a little off the policy, by `offset` nats in the mean."""
    settings = {"type": "kto", "beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8}
    config = DpoConfig.model_validate({"data": {"seq_len": 16, **data}, "loss": settings})
    noise = np.random.default_rng(1).normal(size=(len(answers), 2)) - offset
    return KtoObjective(config, Reference(reference_logprobs(policy, answers, config.data, mesh) + noise, {}), mesh)


@pytest.mark.parametrize("offset", [2.5, -2.5], ids=["above the reference", "below it, where z is 0"])
def test_a_step_of_kto_is_what_logits_and_the_formula_give(offset: float, policy: Policy, mesh: Mesh) -> None:
    answers = ragged_answers(5)
    objective = objective_of(policy, mesh, answers, offset=offset)
    metrics = objective.accumulate_gradients(policy, answers)
    found = taken_gradients(policy)
    reference = objective.reference.logprobs_P2
    with torch.no_grad():
        ratios = [answer_logprob(policy, a.mismatched).item() - reference[a.number, 1] for a in answers]
    kl = max(0.0, sum(ratios) / 5)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-5) and (kl > 1) == (offset > 0)
    loss, by_label = torch.zeros((), dtype=torch.float64), {True: list[tuple[float, float]](), False: []}
    for answer in answers:
        logp = answer_logprob(policy, answer.answer)
        ratio = logp - reference[answer.number, 0]
        by_label[answer.is_desirable].append((logp.item(), 0.3 * ratio.item()))
        gain = 0.3 * (ratio - kl) * (1 if answer.is_desirable else -1)
        loss = loss + (1.2 if answer.is_desirable else 0.8) * (1 - torch.sigmoid(gain)) / 5
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(found, taken_gradients(policy), rtol=1e-4, atol=1e-6)
    for side, label in (("chosen", True), ("rejected", False)):
        found_of_side = [metrics[f"{kind}/{side}"] for kind in ("logps", "rewards")]
        assert found_of_side == pytest.approx(np.mean(by_label[label], axis=0).tolist(), rel=1e-5, abs=1e-5)
    assert metrics["rewards/margins"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])
    alone = objective.measure(policy, [answer for answer in answers if answer.is_desirable])
    assert "rewards/rejected" not in alone and "rewards/margins" not in alone and alone["desirable"] == 1


def test_a_step_of_kto_is_the_same_however_it_is_split(policy: Policy, mesh: Mesh) -> None:
    answers = ragged_answers(12)

    def step(**data: Any) -> tuple[dict[str, float], Tensor]:
        objective = objective_of(policy, mesh, answers, offset=1.0, **data)
        return objective.accumulate_gradients(policy, answers), taken_gradients(policy)

    metrics = check_splits(step)
    assert metrics["kl"] > 0.1 and metrics["desirable"] == pytest.approx(2 / 3) and policy.training
    whole = objective_of(policy, mesh, answers, offset=1.0, micro_batch_size=12)
    assert whole.measure(policy, answers) == pytest.approx(metrics, rel=1e-6)
