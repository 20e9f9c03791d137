"""The RUN of `ckpt`, `rollouts`, `report`, `monitor` and `track`: an argument, or the only run below `outputs`."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from holdfast.arguments import Parser, placed_words
from holdfast.errors import ConfigError
from holdfast.run.choose_run import HOME, all_runs, no_run, only_run, runs_below
from holdfast.run.run_dir import RunDir
from tests.builders.checkpoint_files import write_checkpoint
from tests.unit.conftest import Command, Refused

PREFIX = "uv run "
"""Commands of a checkout begin so."""
OF_ONE_RUN = [
    "ckpt ls", "ckpt verify", "ckpt show", "ckpt export --to x", "rollouts show", "rollouts trace 1 0",
    "rollouts stats", "rollouts export --to x", "report", "track --to tensorboard",
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(in_tmp_path: Path) -> Path:
    return in_tmp_path


def make_run(path: str, *, changed: float = 1.0) -> Path:
    """Make a run whose newest sign is that old or new."""
    run_dir = RunDir(Path(path))
    run_dir.path.mkdir(parents=True)
    run_dir.create()
    os.utime(run_dir.path / "run.json", (changed, changed))
    return Path(path)


def make_evaluation(path: str) -> Path:
    made = make_run(path)
    (made / "config").mkdir()
    (made / "config" / "evaluate.toml").touch()
    return made


def refused_line(said: str) -> str:
    """Return the command on the last line of an error."""
    return said.splitlines()[-1].strip()


@pytest.mark.parametrize(("old", "new"), [
    ("ckpt ls --output-dir outputs/a", "ckpt ls outputs/a"),
    ("ckpt verify 3 latest --how size --output-dir=outputs/a --json",
     "ckpt verify outputs/a 3 latest --how size --json"),
    ("ckpt show --output-dir outputs/a latest", "ckpt show outputs/a latest"),
    ("ckpt export 3 --to 'my dir' --dtype bfloat16 --output-dir 'my run'",
     "ckpt export 'my run' 3 --to 'my dir' --dtype bfloat16"),
    ("ckpt --output-dir outputs/a ls --json", "ckpt ls outputs/a --json"),
    ("ckpt --output-dir outputs/a", "ckpt ls outputs/a"),
    ("ckpt ls --output_dir outputs/a", "ckpt ls outputs/a"),
    ("ckpt ls --output-dir 3", "ckpt ls ./3"),
    ("ckpt ls --output-dir=-a", "ckpt ls ./-a"),
    ("ckpt ls --output-dir", "ckpt ls DIRECTORY"),
    ("rollouts show 12 --problem 3 --output-dir outputs/a", "rollouts show outputs/a 12 --problem 3"),
    ("rollouts trace 12 0 --server http://h:1 --output-dir outputs/a",
     "rollouts trace outputs/a 12 0 --server http://h:1"),
    ("rollouts stats 1-3 --output-dir outputs/a", "rollouts stats outputs/a 1-3"),
    ("rollouts export all --to r.jsonl --output-dir outputs/a", "rollouts export outputs/a all --to r.jsonl"),
    ("report --output-dir outputs/a --to page.html", "report outputs/a --to page.html"),
    ("monitor --once --output-dir outputs/a", "monitor outputs/a --once"),
    ("track --output-dir outputs/a --to wandb mlflow", "track outputs/a --to wandb mlflow"),
    ("ckpt verify --step 3 --output-dir outputs/a", "ckpt verify outputs/a 3"),
    ("ckpt verify --json --step=3 outputs/a", "ckpt verify outputs/a 3 --json"),
    ("ckpt verify --steps 3", "ckpt verify 3"),
    ("rollouts trace --index 0 --step 12 --run outputs/a", "rollouts trace outputs/a 12 0"),
    ("rollouts trace outputs/a 40 --index 45", "rollouts trace outputs/a 40 45"),
    ("rollouts trace outputs/a latest --index=3 --json", "rollouts trace outputs/a latest 3 --json"),
    ("report --run outputs/a", "report outputs/a"),
    ("track --name x/y --to wandb outputs/a", "track outputs/a --name x/y --to wandb"),
    ("ckpt outputs/a", "ckpt ls outputs/a"),
    ("ckpt --json outputs/a verify", "ckpt verify --json outputs/a"),
    ("rollouts stat outputs/a", "rollouts stats outputs/a"),
    ("environments reverse_text", "environments check reverse_text"),
    ("environments check", "environments check reverse_text"),
    ("evaluate outputs/a --num-tasks 3", "evaluate --run outputs/a --num-tasks 3"),
    ("evaluate --num-tasks 3 model", "evaluate --num-tasks 3 --model.name model"),
    ("inference somebody/model", "inference --model.name somebody/model"),
    ("sft --max-steps 3 rows.jsonl", "sft --max-steps 3 --data.name rows.jsonl"),
    ("rl run.toml --max-steps 3", "rl @ run.toml --max-steps 3"),
    ("rl outputs/new", "rl @ FILE.toml --output-dir outputs/new"),
    ("sft --model.name m outputs/new", "sft --model.name m --output-dir outputs/new"),
    ("monitor --once --outputdir=outputs/a", "monitor outputs/a --once"),
    ("ckpt copy model 3", "ckpt ls model 3"),
    ("ckpt info model 3", "ckpt show model 3"),
    ("ckpt diff model .", "ckpt ls model"),
    ("ckpt copy model --to x", "ckpt ls model"),
])  # fmt: skip
def test_a_wrong_form_is_refused_with_the_whole_right_command(old: str, new: str, refused: Refused) -> None:
    Path("model").mkdir()
    Path("model/config.json").touch()
    said = refused(*shlex.split(old))
    assert "--output-dir" not in old or "takes the run as its first argument, not by --output-dir" in said
    assert f"\n  {PREFIX}{new}\n" in said


def test_what_else_is_wrong_is_told_in_the_place_of_a_command_that_fails(refused: Refused) -> None:
    for words, message in (
        ("--bogus 3", "unknown flag '--bogus'. There are: --how, --json"),
        ("--how half", "invalid choice: 'half'"),
    ):
        said = refused("ckpt", "verify", *words.split(), "--output-dir", "outputs/a")
        assert "takes the run as its first argument" in said and message in said and PREFIX not in said


@pytest.mark.parametrize("line", OF_ONE_RUN)
def test_without_a_run_the_error_says_how_to_make_one_or_lists_the_runs(line: str, refused: Refused) -> None:
    program, *words = line.split()
    said = refused(program, *words)
    name, others = (line, []) if len(words) == 0 else (program, words)
    if program in ("ckpt", "rollouts"):
        name, others = f"{program} {words[0]}", words[1:]
    tail = "".join(f" {word}" for word in others)
    assert "there is no run below outputs (from " in said and f"`{PREFIX}{name} DIRECTORY{tail}`" in said
    assert f"`{PREFIX}rl @ configs/reverse_text/rl.toml`" in said
    make_run("outputs/a", changed=3.0), make_run("outputs/b c", changed=9.0), make_run("outputs/d/e", changed=6.0)
    said = refused(program, *words)
    assert f"{name} needs one run, and there are 3 below outputs" in said
    assert [text.strip() for text in said.splitlines()[1:4]] == ["outputs/b c", "outputs/d/e", "outputs/a"]
    assert refused_line(said) == f"{PREFIX}{name} 'outputs/b c'{tail}"


def test_a_run_after_the_steps_is_told_with_the_right_order(refused: Refused) -> None:
    make_run("outputs/a")
    said = refused("ckpt", "verify", "all", "outputs/a", "--json")
    assert refused_line(said) == f"{PREFIX}ckpt verify outputs/a all --json"


def test_no_line_is_told_that_would_be_refused(refused: Refused) -> None:
    said = refused("ckpt", "rm", str(make_run("outputs/a")))
    assert "Did you mean 'prune'? There are: ls, " in said and said.endswith("comes first.\n")


def test_the_only_run_is_taken(run_command: Command) -> None:
    run_dir = RunDir(make_run("outputs/deep/mine"))
    make_evaluation("outputs/before")
    make_evaluation("outputs/deep/mine/evaluations/step_1")
    for step in (1, 2):
        write_checkpoint(run_dir, step)
    for words, steps in (
        ([], [1, 2]), (["latest"], [2]), (["1", "2"], [1, 2]), (["--how", "size", "1"], [1]), (["all"], [1, 2]),
        (["2-9"], [2]), (["step_1"], [1]), (["outputs/deep/mine", "step_2"], [2]),
    ):  # fmt: skip
        code, out, err = run_command("ckpt", "verify", "--json", *words)
        assert (code, err) == (0, "")
        assert [Path(one["path"]).name for one in json.loads(out)["directories"]] == [f"step_{step}" for step in steps]
        listed = [one for one in words if one not in ("--how", "size")]
        assert [one["step"] for one in json.loads(run_command("ckpt", "ls", "--json", *listed)[1])["steps"]] == steps
    for words in (("outputs/deep/mine", "1", "--json", "2"), ("--how", "size", "outputs/deep/mine", "--json")):
        code, out, err = run_command("ckpt", "verify", *words)
        assert (code, err) == (0, "") and len(json.loads(out)["directories"]) == 2
    code, out, _ = run_command("monitor", "--json")
    assert code == 0 and len(json.loads(out)) == 2, "and the evaluation, which is not of the run"
    assert run_command("report")[0] == 2, "as the evaluation has a page, too"


def test_a_directory_named_like_a_step_is_the_run(run_command: Command, refused: Refused) -> None:
    write_checkpoint(RunDir(make_run("7")), 1)
    write_checkpoint(RunDir(make_run("outputs/a")), 7)
    code, out, _ = run_command("ckpt", "verify", "7", "--json")
    assert code == 0 and [Path(one["path"]).name for one in json.loads(out)["directories"]] == ["step_1"]
    for step in ("8", "8" * 18):
        assert f"step {step} is not in" in refused("ckpt", "verify", step)
    assert "name too long" in refused("ckpt", "verify", "8" * 5000)
    assert "there is no directory latest" in refused("report", "latest"), "it has no steps"


def test_the_directory_of_a_step_names_its_run(run_command: Command) -> None:
    run_dir = RunDir(make_run("elsewhere/mine"))
    write_checkpoint(run_dir, 1)
    write_checkpoint(run_dir, 2)
    for words in (["elsewhere/mine/checkpoints/step_1"], ["elsewhere/mine", "elsewhere/mine/checkpoints/step_1"]):
        code, out, err = run_command("ckpt", "verify", *words, "--json")
        assert (code, err) == (0, "")
        assert [Path(one["path"]).name for one in json.loads(out)["directories"]] == ["step_1"]


@pytest.mark.parametrize("line", [*OF_ONE_RUN, "monitor"])
def test_a_path_that_holds_no_run_is_told_with_the_runs_that_are_there(line: str, refused: Refused) -> None:
    program, *words = line.split()
    at = 1 if program in ("ckpt", "rollouts") else 0
    make_run("outputs/a")
    Path("empty").mkdir()
    Path("file").touch()
    for place, told in (
        ("empty", f"empty holds no run: it has n(o|either) .*run.json.* \\(from {Path.cwd()}\\)"),
        ("file", f"file holds no run: it has n(o|either) .*run.json.* \\(from {Path.cwd()}\\)"),
        ("nowhere", f"there is no directory nowhere \\(from {Path.cwd()}\\)"),
    ):
        said = refused(program, *words[:at], place, *words[at:])
        assert re.search(told, said)
        assert "Name the output directory of a run. Below outputs there is: outputs/a" in said
    assert "Below outputs there is: outputs/a" in refused(program, *words[:at], "outputs", *words[at:])


def test_runs_are_found_a_few_levels_deep_and_not_within_a_run() -> None:
    kept = {make_run(path, changed=1.0) for path in ("outputs", "outputs/a", "outputs/b/c/d", "outputs/a/again")}
    make_run("outputs/b/c/e/f")
    make_run("outputs/a/checkpoints/step_1")
    make_run("outputs/.hidden")
    Path("outputs/link").symlink_to(Path("outputs/a").absolute())
    Path("outputs/loop").symlink_to(Path("outputs").absolute())
    assert {path.resolve() for path in runs_below(HOME)} == {path.resolve() for path in kept}
    assert len(runs_below(HOME)) == len(kept) and runs_below(Path("nowhere")) == []


def test_a_long_list_is_cut() -> None:
    for number in range(25):
        make_run(f"outputs/{number}", changed=float(number + 1))
    with pytest.raises(ConfigError, match="there are 25 below outputs") as caught:
        only_run("ckpt ls", [])
    listed = str(caught.value).splitlines()
    assert (listed[1], *listed[20:22]) == ("  outputs/24", "  outputs/5", "  and 5 more")
    assert "outputs/20, 20 more" in str(no_run(Path("nowhere"))) and len(all_runs("monitor", [])) == 25


def test_the_first_word_is_found_among_flags() -> None:
    parser = Parser(prog="x")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--one")
    parser.add_argument("--many", nargs="+")
    parser.add_argument("--flag", action="store_true")
    for words, first in (
        ("", None), ("a b", "a"), ("--one a b", "b"), ("--one=a b", "b"), ("--flag a", "a"), ("--many a b", None),
        ("--many a --flag b", "b"), ("-1 a", "-1"), ("-- --a", "--a"), ("--", None), ("--one", None),
    ):  # fmt: skip
        assert next((word for flag, word in placed_words(parser, words.split()) if not flag), None) == first, words
