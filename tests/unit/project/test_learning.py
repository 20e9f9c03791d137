"""The benchmarks of runs that learn: their tasks, controls, tables and curves, and what of them is committed."""

import json
from pathlib import Path

import pytest

from benchmarks.algorithms.curves import read_curves, summary
from benchmarks.algorithms.runs import NAMES
from benchmarks.learning import lengths
from benchmarks.learning.commands import environment_of
from benchmarks.learning.draw import FIRST_SCREEN, draw_first_screen, first_screen_of
from benchmarks.learning.results import read_runs
from benchmarks.learning.results import summary as summary_of_runs
from benchmarks.learning.runs import CONTROLS, OVERLAYS, ROUNDS, SHOWN
from benchmarks.learning.start import make_base
from benchmarks.learning.tasks import TASKS, demonstrations, phrases
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config import RlConfig
from holdfast.config.load import parse_command_line
from tests.conftest import ROOT
from tests.runs.interpreters import NO_VERIFIERS, VERIFIERS_PYTHON
from tests.unit.conftest import Command

BENCHMARK = ROOT / "benchmarks" / "learning"


def _skip_without_its_extra(task: str) -> None:
    if task == "spell_backward":
        pytest.importorskip("reasoning_gym", reason="`uv sync --inexact --extra reasoning-gym` installs it")


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if not task.is_pretrained])
def test_demonstrations_are_made_again_and_fit_into_the_recipe(task: str, tmp_path: Path) -> None:
    _skip_without_its_extra(task)
    rows = demonstrations(task, 20)
    assert rows == demonstrations(task, 20) and len({str(row) for row in rows}) > 10
    make_base(tmp_path, phrases(task))
    tokenizer = load_tokenizer(str(tmp_path))
    for row in rows:
        messages = row.get("messages") or [*row["prompt"], *row["completion"]]
        text = "".join(message["content"] for message in messages)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) < 64


@pytest.mark.docs
@pytest.mark.parametrize("path", sorted(BENCHMARK.glob("recipes/*.toml")), ids=lambda path: path.stem)
def test_recipes_can_be_used(
    path: Path, in_tmp_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Command
) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "gsm8k_train.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n')
    (tmp_path / "gsm8k_test.jsonl").write_text('{"prompt": "2+3", "answer": "5"}\n')
    if path.stem == "verifiers_sort":
        if not VERIFIERS_PYTHON:
            pytest.skip(NO_VERIFIERS)
        (tmp_path / "verifiers-env").symlink_to(Path(VERIFIERS_PYTHON).parents[1])
        monkeypatch.setenv("PYTHONPATH", str(BENCHMARK / "verifiers_tasks"))
    if path.stem in TASKS:
        _skip_without_its_extra(path.stem)
        make_base(tmp_path / "base", phrases(path.stem))
        model = ["--model.name", tmp_path / "base"]
    else:
        model = []  # on the hub: its name alone is checked
    code, _, err = run_command("rl", "@", path, *model, "--output-dir", tmp_path / "run", "--dry-run")
    assert code == 0, err


@pytest.mark.parametrize("variant", [name for name, overlay in OVERLAYS.items() if overlay is not None])
def test_variants_fit_over_the_recipe_and_change_it(variant: str) -> None:
    recipe = ["@", str(BENCHMARK / "recipes" / "sort_letters.toml")]
    plain = parse_command_line(RlConfig, recipe)
    changed = parse_command_line(RlConfig, [*recipe, "@", str(ROOT / str(OVERLAYS[variant]))])
    assert (changed.trainer, changed.orchestrator) != (plain.trainer, plain.orchestrator)
    assert variant in ROUNDS or changed.orchestrator == plain.orchestrator
    assert variant == "bf16_moments" or changed.trainer.optim == plain.trainer.optim


@pytest.mark.docs
def test_the_settings_of_dpo_can_be_used(tmp_path: Path, run_command: Command) -> None:
    make_base(tmp_path / "base", ())
    row = {"prompt": "ba", "chosen": "ab", "rejected": "ba"}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 32)
    sorting = json.dumps([environment_of("sort_letters")])
    code, _, err = run_command(
        "dpo", "@", BENCHMARK / "recipes" / "algorithms" / "dpo.toml", "--model.name", tmp_path / "base",
        "--data.name", tmp_path / "pairs.jsonl", "--eval.environments", sorting,
        "--output-dir", tmp_path / "run", "--dry-run",
    )  # fmt: skip
    assert code == 0, err


def test_the_committed_runs_are_those_of_the_page_and_learned_unless_they_are_controls() -> None:
    runs = read_runs(BENCHMARK)
    shown = [run for run in runs if run.variant in SHOWN or run.task == "to_json"]
    assert summary_of_runs(shown) in (ROOT / "docs" / "evidence.md").read_text()
    for run in runs:
        before, after = run.before["pass@1"], run.after["pass@1"]
        if (run.task, run.variant, run.seed) == ("sums", "grpo", 1):  # the page tells it
            assert before.value < after.value < before.high
            continue
        assert (after.value <= before.high) if run.variant in CONTROLS else (after.low > before.high), run


def test_the_picture_of_the_readme_is_drawn_from_the_committed_runs(tmp_path: Path) -> None:
    runs = first_screen_of(read_runs(BENCHMARK))
    draw_first_screen(runs, FIRST_SCREEN, tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == (BENCHMARK / "smollm2.svg").read_text()
    assert {"grpo", "permuted_rewards"} <= {run.variant for run in runs}


def test_the_committed_lengths_are_those_of_the_page() -> None:
    judged = lengths.read(BENCHMARK / "lengths.csv")
    assert lengths.table(judged) in (ROOT / "docs" / "evidence.md").read_text()
    for length in {one.length for one in judged}:
        (before,) = (one for one in judged if one.length == length and one.variant == "start")
        after = [one for one in judged if one.length == length and one.variant == "grpo"]
        assert len(after) == 3 and all(one.numbers["pass@1"].low > before.numbers["pass@1"].high for one in after)


def test_the_committed_curves_rise_for_every_seed_and_are_those_of_the_docs() -> None:
    curves = read_curves(ROOT / "benchmarks" / "algorithms" / "curves.csv")
    assert {(one.algorithm, one.seed) for one in curves} == {(name, 0) for name in NAMES}
    assert all(one.end - one.start > 0.1 for one in curves)
    assert summary(curves) in (ROOT / "docs" / "algorithms.md").read_text()
