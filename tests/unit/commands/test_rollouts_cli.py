"""The command `rollouts` on a journal of its own: what it shows, exports, and refuses."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer

from holdfast.launcher.resume.resume_step import set_aside_after
from holdfast.protocol.rollouts import (
    Batch,
    Dropped,
    Logprobs,
    LossMask,
    Rewards,
    Rollout,
    Sampling,
    StepRewards,
    TokenIds,
    VersionSpan,
    decode_packed,
)
from holdfast.run import atomic
from holdfast.run.journal import Accepted, Counts, TrainedRewards, note_trained, publish_batch, read_batch
from holdfast.run.run_dir import RunDir
from tests.builders.checkpoint_files import flip, write_checkpoint
from tests.conftest import BASE
from tests.unit.conftest import Command, Refused

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
PROMPT, ANSWER, FEEDBACK = "abc>", "cba<|end|>", "again>"


@pytest.fixture
def rollouts(run_command: Command) -> Command:
    return partial(run_command, "rollouts")


def encode(text: str) -> list[int]:
    return Tokenizer.from_file(str(BASE / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def make_rollout(environment: str, task: int, sample: int, *, version: int) -> Rollout:
    turns = [(False, encode(PROMPT)), (True, encode(ANSWER)), (False, encode(FEEDBACK)), (True, encode("abc"))]
    token_ids = [token for _, ids in turns for token in ids]
    return Rollout(
        environment=environment, task_id=task, sample_index=sample, token_ids=TokenIds(token_ids),
        loss_mask=LossMask([sampled for sampled, ids in turns for _ in ids]),
        logprobs=Logprobs([-0.1 * place for place in range(len(token_ids))]),
        versions=[VersionSpan(version, len(turns[0][1]), len(token_ids))], reward=float(sample),
        truncated=sample == 1, sampling=Sampling(0.5, min_p=0.25), metrics={"exact": float(sample)},
        reference_logprobs=Logprobs([-0.5] * len(token_ids)) if sample == 0 else None,
        step_rewards=StepRewards(TokenIds([7, len(token_ids) - 1]), Rewards([0.1, -1 / 3])) if sample == 1 else None,
    )  # fmt: skip


def make_batch(step: int) -> Batch:
    """Two problems of two rollouts."""
    pairs = [("a", step - 1), ("b", step - 1)]
    made = [make_rollout(*pair, sample, version=step - 1) for pair in pairs for sample in (0, 1)]
    about = {"policy_version": step - 1, "weights_digest": "d" * 32, "metrics": {"reward/mean": 0.5}}
    return Batch(step=step, rollouts=made, **about)


def state_after(step: int) -> Accepted:
    """The orchestrator's state, which has dropped a group of 10 tokens before batch 2."""
    return Accepted(step, 2 * step + 1, 4 * step + 2, 100 * step + 10, dropped={"timeout": Counts(1, 2, 10)})


def publish(run_dir: RunDir, step: int, **changes: Any) -> None:
    batch = msgspec.structs.replace(make_batch(step), **changes)
    publish_batch(run_dir, batch, msgspec.json.encode(state_after(step)))


@pytest.fixture
def run_dir(run_dir: RunDir) -> RunDir:
    """Batches 2, 3 and 4, as retention leaves them."""
    settings = f'[model]\nname = "{BASE}"\n'.encode()
    atomic.write_file(run_dir.configs(1) / "orchestrator.toml", settings)
    for step in (2, 3, 4):
        publish(run_dir, step)
    return run_dir


def document(rollouts: Command, run_dir: RunDir, name: str, *argv: object, code: int = 0) -> dict[str, Any]:
    found, out, err = rollouts(name, run_dir.path, *argv, "--json")
    assert (found, err) == (code, "")
    return json.loads(out)


def test_stats_has_a_line_per_batch(rollouts: Command, run_dir: RunDir) -> None:
    lines = document(rollouts, run_dir, "stats")["batches"]
    assert [line["step"] for line in lines] == [2, 3, 4]
    length = len(make_batch(2).rollouts[0].token_ids)
    assert lines[0] | {"path": ""} == {
        "step": 2, "path": "", "status": "committed", "policy_version": 1, "problems": 2, "environments": ["a", "b"],
        "weights_digest": "d" * 32,
        "rollouts": 4, "reward_mean": 0.5, "reward_std": 0.5, "tokens": 4 * length, "tokens_mean": length,
        "sampled_tokens": 4 * len(encode(ANSWER) + encode("abc")), "truncated": 2, "versions": [1], "dropped": {},
    }  # fmt: skip
    code, out, _ = rollouts("stats", run_dir.path, "3-4")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["step", "3", "4", "up"]
    assert [line["step"] for line in document(rollouts, run_dir, "stats", "4", "latest", "2")["batches"]] == [4, 2]
    publish(run_dir, 5, rollouts=make_batch(5).rollouts[:1])
    (line,) = document(rollouts, run_dir, "stats", "5")["batches"]
    assert [line[name] for name in ("rollouts", "tokens_mean", "reward_std")] == [1, length, 0]


def test_dropped_groups_are_counted_by_reason_and_listed(rollouts: Command, run_dir: RunDir) -> None:
    batch = make_batch(5)
    batch.dropped = [
        Dropped(environment="a", task_id=4, reason="zero_signal", rollouts=2, tokens=60),
        Dropped(environment="b", task_id=4, reason="environment_error", rollouts=2, tokens=7, detail="too bright"),
        Dropped(environment="a", task_id=5, reason="zero_signal", rollouts=2, tokens=40),
    ]
    dropped = {"zero_signal": Counts(2, 4, 100), "environment_error": Counts(1, 2, 7)}
    state = msgspec.structs.replace(state_after(4), step=5, problems=14, rollouts=28, tokens=617, dropped=dropped)
    publish_batch(run_dir, batch, msgspec.json.encode(state))
    found = document(rollouts, run_dir, "stats")
    assert found["batches"][-1]["dropped"] == msgspec.to_builtins(dropped)
    accepted = {"problems": 14, "rollouts": 28, "tokens": 617}
    batched = {"problems": 11, "rollouts": 22, "tokens": 510}
    counts = {"accepted": accepted, "batched": batched, "dropped": msgspec.to_builtins(dropped)}
    assert found["ledger"] == {"step": 5} | counts
    _, out, _ = rollouts("stats", run_dir.path)
    assert "2 zero_signal, 1 environment_error" in out.splitlines()[-2]
    said = "up to batch 5: 14 problems accepted, 11 in batches, dropped: 2 zero_signal, 1 environment_error"
    assert out.splitlines()[-1] == said
    assert [one["task_id"] for one in document(rollouts, run_dir, "show", "5")["dropped"]] == [4, 4, 5]
    _, out, _ = rollouts("show", run_dir.path, "5")
    assert ["environment_error", "b", "4", "2", "7", "too", "bright"] in [line.split() for line in out.splitlines()]


def test_a_damaged_batch_is_named_and_the_others_shown(rollouts: Command, run_dir: RunDir) -> None:
    flip(run_dir.batch(3) / "batch.msgpack")
    found = document(rollouts, run_dir, "stats", code=1)
    assert [line["status"] for line in found["batches"]] == ["committed", "damaged", "committed"]
    assert "step_3 is damaged" in found["problems"][0] and "batch.msgpack" in found["problems"][0]
    code, out, _ = rollouts("stats", run_dir.path)
    assert code == 1 and "batch.msgpack is damaged: checksum" in out


def test_show_decodes_the_turns_of_a_problem(rollouts: Command, run_dir: RunDir) -> None:
    problems = document(rollouts, run_dir, "show", "3")["problems"]
    assert [(one["problem"], one["environment"], one["task_id"]) for one in problems] == [(0, "a", 2), (1, "b", 2)]
    found = document(rollouts, run_dir, "show", "3", "--problem", "1")
    assert (found["environment"], found["task_id"], found["no_text"]) == ("b", 2, None)
    assert [line["reward"] for line in found["rollouts"]] == [0.0, 1.0]
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    turns = found["rollouts"][1]["turns"]
    assert [turn["sampled"] for turn in turns] == [False, True, False, True]
    expected = [tokenizer.decode(encode(text), skip_special_tokens=False) for text in (PROMPT, ANSWER, FEEDBACK, "abc")]
    assert [turn["text"] for turn in turns] == expected and expected[1] == "cba<|end|>"
    _, out, _ = rollouts("show", run_dir.path, "3", "--problem", "1")
    assert "sample 1: reward 1, truncated, 2 steps: 0.1 -0.33333" in out and f"  sampled | {expected[1]}" in out


def test_the_branches_of_a_rollout_are_told_apart(rollouts: Command, run_dir: RunDir, tmp_path: Path) -> None:
    first, split, *others = make_batch(5).rollouts
    split.branch_starts = (0, len(encode(PROMPT + ANSWER)))
    publish(run_dir, 5, rollouts=[first, split, *others])
    one, other = document(rollouts, run_dir, "show", "5", "--problem", "0")["rollouts"]
    assert (one["branches"], other["branches"]) == (1, 2)
    assert [turn["branch"] for turn in one["turns"]] == [0, 0, 0, 0]
    assert [turn["branch"] for turn in other["turns"]] == [0, 0, 1, 1]
    _, out, _ = rollouts("show", run_dir.path, "5", "--problem", "0")
    assert "sample 1: reward 1, truncated, 2 branches" in out and out.count(f"  anew    | {FEEDBACK}") == 1
    assert out.count(f"  given   | {FEEDBACK}") == 1, "of the rollout that goes on"
    document(rollouts, run_dir, "export", "5", "--to", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["branch_starts"] for line in lines] == [[0], list(split.branch_starts), [0], [0]]


def test_without_a_tokenizer_the_ids_are_shown(rollouts: Command, run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    unreadable, elsewhere = f"{tmp_path}/tokenizer.json cannot be read: ", "there is no tokenizer.json in owner/model"
    for name, reason in ((tmp_path, unreadable), ("owner/model", elsewhere)):
        (run_dir.configs(1) / "orchestrator.toml").write_text(f'[model]\nname = "{name}"\n')
        code, out, _ = rollouts("show", run_dir.path, "3", "--problem", "0")
        assert code == 0 and reason in out and "  sampled | " + " ".join(map(str, encode(ANSWER))) in out
    assert document(rollouts, run_dir, "show", "3", "--problem", "0")["rollouts"][0]["turns"][0]["text"] is None
    (run_dir.configs(1) / "orchestrator.toml").write_text("[model")
    code, out, _ = rollouts("show", run_dir.path, "3", "--problem", "0")
    assert code == 0 and "there is no tokenizer.json in any model of the run" in out


def test_a_batch_names_all_weights_that_have_sampled_it_or_the_teacher(rollouts: Command, run_dir: RunDir) -> None:
    first, *others = make_batch(5).rollouts  # by version 4
    for one in others:
        one.versions = [msgspec.structs.replace(span, version=2) for span in one.versions]
    publish(run_dir, 5, rollouts=[first, *others], older_digests={2: "o" * 32})
    publish(run_dir, 7, rollouts=others, older_digests={2: "o" * 32})
    publish(run_dir, 6, weights_digest="", teacher_digest="t" * 32)
    _, out, _ = rollouts("show", run_dir.path, "5")
    assert f"sampled by version 2 with digest {'o' * 32}, version 4 with digest {'d' * 32} at" in out
    assert document(rollouts, run_dir, "show", "5")["older_digests"] == {"2": "o" * 32}
    _, out, _ = rollouts("show", run_dir.path, "7")
    assert f"batch 7, sampled by version 2 with digest {'o' * 32} at" in out, "version 6 came too late"
    _, out, _ = rollouts("show", run_dir.path, "6")
    assert f"batch 6, sampled by the teacher with digest {'t' * 32} at temperature 0.5, min_p 0.25" in out
    assert document(rollouts, run_dir, "show", "6")["teacher_digest"] == "t" * 32


def test_what_was_set_aside_is_shown_by_its_path(rollouts: Command, run_dir: RunDir) -> None:
    set_aside_after(run_dir, 3, 2)
    assert document(rollouts, run_dir, "show", run_dir.discarded(2) / "rollouts" / "step_4")["step"] == 4
    assert [line["step"] for line in document(rollouts, run_dir, "stats")["batches"]] == [2, 3]


def test_an_export_holds_every_rollout(rollouts: Command, run_dir: RunDir, tmp_path: Path) -> None:
    target = tmp_path / "new" / "out.jsonl"
    found = document(rollouts, run_dir, "export", "2-3", "--to", target)
    assert (found["batches"], found["rollouts"], found["size_bytes"]) == (2, 8, target.stat().st_size)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row.pop("step") for row in rows] == [2] * 4 + [3] * 4
    assert {row.pop("policy_version") for row in rows} == {1, 2}
    for row in rows:
        row |= {"sampling": {name: row.pop(name) for name in SAMPLING}}
    expected = read_batch(run_dir, 2).rollouts + read_batch(run_dir, 3).rollouts
    assert msgspec.convert(rows, list[Rollout], dec_hook=decode_packed) == expected
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_export_writes_nothing_when_a_batch_is_damaged(rollouts: Command, run_dir: RunDir, tmp_path: Path) -> None:
    flip(run_dir.batch(4) / "orchestrator.json")
    target = tmp_path / "out" / "out.jsonl"
    code, out, err = rollouts("export", run_dir.path, "all", "--to", target)
    assert (code, out) == (2, "") and "orchestrator.json is damaged" in err and list(target.parent.iterdir()) == []


def test_export_that_fails_leaves_nothing(
    rollouts: Command, run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "fsync_file", full)
    target = tmp_path / "out" / "out.jsonl"
    code, _, err = rollouts("export", run_dir.path, "all", "--to", target)
    assert code == 2 and f"{target} cannot be written: No space left" in err and list(target.parent.iterdir()) == []


@pytest.mark.parametrize(("argv", "message"), [
    (["show", "7"], "batch 7 is not in"), (["show", "7"], "it has 2, 3, 4"),
    (["stats", "3-5"], "batch 3-5 is not in"), (["show", "2-3"], "show takes one batch, '2-3' means 2"),
    (["show", "x"], "'x' is not a STEP"), (["show", "1" * 5000], "111' is not a STEP"),
    (["stats", f"1-{'1' * 5000}"], "111' is not a STEP"),
    (["show", "3", "--problem", "2"], "batch 3 has the problems 0 to 1"),
    (["trace", "2-3", "0"], "trace takes one batch, '2-3' means 2"),
    (["trace", "3", "4"], "INDEX 4: batch 3 has the rollouts 0 to 3"), (["export", "3"], "required: --to"),
    (["export", "3", "--to", "there.jsonl"], "exists already"),
    (["export", "3", "--to", "new.csv"], "is FILE.jsonl (JSON lines) or FILE.parquet, not '.csv'"),
    (["export", "3", "--to", "there.jsonl/x.jsonl"], "there.jsonl/x.jsonl cannot be written: "),
])  # fmt: skip
def test_a_mistake_is_one_message_and_exit_code_2(
    argv: list[str], message: str, refused: Refused, run_dir: RunDir, in_tmp_path: Path
) -> None:
    (in_tmp_path / "there.jsonl").touch()
    assert message in refused("rollouts", argv[0], run_dir.path, *argv[1:])


def test_a_trace_of_what_a_teacher_sampled_names_the_teacher(rollouts: Command, run_dir: RunDir) -> None:
    made = [msgspec.structs.replace(one, versions=[]) for one in make_batch(5).rollouts]
    publish(run_dir, 5, rollouts=made, weights_digest="", teacher_digest="e" * 32)
    code, out, _ = rollouts("trace", run_dir.path, "5", "0")
    assert code == 0 and out.splitlines()[-1] == f"sampled by the teacher with digest {'e' * 32}"
    code, _, err = rollouts("trace", run_dir.path, "5", "0", "--server", "http://localhost:1")
    assert code == 2 and "Leave --server out" in err


def test_a_directory_without_a_run_is_refused(rollouts: Command, refused: Refused, tmp_path: Path) -> None:
    lacks = f"{tmp_path} holds no run: it has neither run.json nor rollouts"
    for place, said in ((tmp_path / "nowhere", "there is no directory"), (tmp_path, lacks)):
        assert said in refused("rollouts", "stats", place)
    RunDir(tmp_path).create()
    code, out, _ = rollouts("stats", tmp_path)
    assert code == 0 and out.startswith("no batches in")
    for words, said in (
        (("export", "all", "--to", tmp_path / "x.jsonl"), "there is no batch in"),
        (("show", "latest"), "it has none, only `rl` makes batches"),
    ):
        assert said in refused("rollouts", words[0], tmp_path, *words[1:])


@pytest.mark.parametrize("words", ["rollouts --help", "rollouts stats", "rollouts show 3", "ckpt ls", "ckpt verify"])
def test_looking_imports_nothing_heavy(words: str, run_dir: RunDir) -> None:
    write_checkpoint(run_dir, 2)
    command, *argv = words.split()
    code = (
        "import sys\nfrom holdfast import cli\n"
        f"try:\n    cli.{command}()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'tokenizers'}\n"
        "print('HEAVY', sorted(heavy & sys.modules.keys()))\n"
    )
    argv[1:1] = [str(run_dir.path)] if argv != ["--help"] else []
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout


def test_a_mix_of_distributions_is_shown_and_exported_by_environment(rollouts: Command, run_dir: RunDir) -> None:
    made = make_batch(5).rollouts
    for rollout in made:
        rollout.sampling = {"a": Sampling(), "b": Sampling(0.5, top_k=7)}[rollout.environment]
    publish(run_dir, 5, rollouts=made)
    code, out, _ = rollouts("show", run_dir.path, "5")
    assert code == 0 and f"digest {'d' * 32}\n  a at temperature 1\n  b at temperature 0.5, top_k 7\n" in out
    sampling = document(rollouts, run_dir, "show", "5")["sampling"]
    assert sampling["b"] == {"temperature": 0.5, "top_p": 1.0, "top_k": 7, "min_p": 0.0, "stop": []}
    target = run_dir.path / "exported.jsonl"
    document(rollouts, run_dir, "export", "5", "--to", target)
    lines = [json.loads(line) for line in target.read_bytes().splitlines()]
    written = {(line["environment"], line["temperature"], line["top_k"]) for line in lines}
    assert written == {("a", 1.0, 0), ("b", 0.5, 7)}


TRAINED = TrainedRewards(rewards=[0.0, 2.0] * 2, advantages=[-1.0, 1.0, None, 0.25])


def test_answers_are_read_with_right_answer_advantage_and_parts(rollouts: Command, run_dir: RunDir) -> None:
    made = make_batch(5).rollouts
    for rollout in made:
        rollout.right_answer = "cba"
    publish(run_dir, 5, rollouts=made)
    note_trained(run_dir, 5, TRAINED)
    code, out, _ = rollouts(run_dir.path, "5", "--best", "1")
    assert code == 0 and out.splitlines() == [
        "1 of 4 answers of batch 5", "",
        "step 5, a task 4, sample 1: reward 1, advantage 1, exact 1, rewards of turns 0.1 -0.33333",
        "  trained as   | reward 2",
        f"  prompt       | {PROMPT}",
        f"  answer       | {ANSWER}{FEEDBACK}abc",
        "  right answer | cba",
        f"  ended        | token limit, after {len(encode(ANSWER) + encode('abc'))} sampled tokens in 2 turns",
    ]  # fmt: skip
    _, out, _ = rollouts(run_dir.path, "4")
    assert "4 of 4 answers of batch 4" in out and "advantage -" in out and "right answer" not in out


@pytest.mark.parametrize(("words", "expected"), [
    (["--where", "advantage > 0"], [("a", 1), ("b", 1)]), (["--where", "advantage is None"], [("b", 0)]),
    (["--where", "not advantage > 0 and environment == 'a'"], [("a", 0)]),
    (["--where", "'again' in answer and exact and metrics['exact'] * 2 == 2", "--environment", "b"], [("b", 1)]),
    (["--where", "0 <= reward < 1 or trained_reward < 0"], [("a", 0), ("b", 0)]),
    (["--sort=-advantage"], [("a", 1), ("b", 1), ("a", 0), ("b", 0)]),
    (["--sort", "environment", "--limit", "2"], [("a", 0), ("a", 1)]),
    (["--worst"], [("a", 0), ("b", 0), ("a", 1), ("b", 1)]), (["--where", "len(prompt) > 100"], []),
])  # fmt: skip
def test_answers_are_chosen_and_sorted(
    words: list[str], expected: list[tuple[str, int]], rollouts: Command, run_dir: RunDir, tmp_path: Path
) -> None:
    note_trained(run_dir, 4, TRAINED)
    shown = document(rollouts, run_dir, "read", "--step", "4", *words)["shown"]
    assert [(one["environment"], one["sample"]) for one in shown] == expected
    document(rollouts, run_dir, "export", "4:4", "--to", tmp_path / "out.jsonl", *words)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["environment"], line["sample_index"]) for line in lines] == expected


@pytest.mark.parametrize(("words", "said"), [
    (["--where", "rewrd < 1"], "no answer has 'rewrd'. Did you mean 'reward'?"),
    (["--where", "metrics['exakt'] > 0.5"], "no answer has 'exakt'. Did you mean 'exact'? There are: exact"),
    (["--sort=-metrics['b']"], "--sort: no answer has 'b'. There are: exact"),
    (["--where", "reward <"], "it is not an expression of Python"),
    (["--where", "__import__('os').system('x')"], "is not allowed. Allowed are names"),
    (["--where", "answer.upper() == 'X'"], "'answer.upper()' is not allowed"),
    (["--where", "reward < 'x'"], "--where 'reward < 'x'': '<' not supported"),
    (["--where", "1 / reward > 1"], "division by zero"), (["--sort", "metrics"], "Sort by a number or a text"),
    (["--environment", "aa"], "no answer is of it. Did you mean 'a'?"),
    (["--worst", "0"], "must be a number from 1 on"), (["--worst", "--best"], "not allowed with argument"),
])  # fmt: skip
def test_a_choice_that_cannot_be_is_refused(words: list[str], said: str, refused: Refused, run_dir: RunDir) -> None:
    assert said in refused("rollouts", "read", run_dir.path, *words)


def test_an_export_to_parquet_is_a_data_frame_in_a_line(rollouts: Command, run_dir: RunDir, tmp_path: Path) -> None:
    note_trained(run_dir, 3, TRAINED)
    made = make_batch(5).rollouts
    made[0].metrics = {"other": 0.5}
    publish(run_dir, 5, rollouts=made)
    code, _, _ = rollouts(run_dir.path, "export", "3", "5", "--to", tmp_path / "out.parquet")
    assert code == 0
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["advantage"] for row in rows] == [-1.0, 1.0, None, 0.25, *[None] * 4]
    assert [row["metrics/exact"] for row in rows] == [0, 1, 0, 1, None, 1, 0, 1]
    assert [row["metrics/other"] for row in rows] == [None] * 4 + [0.5, None, None, None]
    assert rows[1]["prompt"] == PROMPT and rows[1]["answer"] == f"{ANSWER}{FEEDBACK}abc"
    assert rows[1]["token_ids"] == list(read_batch(run_dir, 3).rollouts[1].token_ids)
    assert (rows[1]["task_id"], rows[1]["ended"], rows[0]["ended"]) == (2, "token limit", "finished")


def test_numbers_of_the_trainer_that_are_damaged_are_named(refused: Refused, run_dir: RunDir) -> None:
    note_trained(run_dir, 4, TRAINED)
    flip(run_dir.batch(4) / "trained.json")
    assert "trained.json is damaged" in refused("rollouts", "read", run_dir.path)
