"""Every program, environment and file of settings of examples/ and configs/ runs to its end in a smallest form."""

import ast
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from holdfast.run.metrics import read_metrics
from tests.conftest import ROOT
from tests.forking.commands import shared_commands
from tests.pages import guarantees
from tests.runs.ports import free_port
from tests.runs.rl import MODEL

_README = "test_documented_commands.py::test_the_readme"
_BY_HAND = "test_parts_by_hand.py::test_parts_started_by_hand_end_as_rl_does"
_ALGORITHM = "test_benchmarks.py::test_every_algorithm_is_measured_step_by_step"
_LOOP = "test_example_loops.py::test_an_example_that_was_killed_is_the_example_that_ran_through"
_CLUSTERS = "test_clusters.py::test_the_ray_job_is_one_and_its_run_fits_its_nodes"
_DATA = ("--data.batch-size", "8", "--data.micro-batch-size", "4")
_ROLLOUTS = ("--orchestrator.problems-per-step", "4", "--orchestrator.group-size", "4", "--eval.num-tasks", "2")
_SMOLLM2 = "examples/smollm2"

RUNS = {
    "configs/reverse_text/distillation.toml": ("rl", "--trainer.kl.reference", "{teacher}", *_ROLLOUTS[:4]),
    f"{_SMOLLM2}/dpo.toml": ("dpo", *_DATA), f"{_SMOLLM2}/lora.toml": ("sft", *_DATA),
    f"{_SMOLLM2}/rl.toml": ("rl", *_ROLLOUTS), f"{_SMOLLM2}/rl_after_sft.toml": ("rl", *_ROLLOUTS),
    f"{_SMOLLM2}/sft.toml": ("sft", *_DATA),
}  # fmt: skip
"""Files of settings that are run here for two steps, from the model of the quick start: command and flags."""
PROGRAMS = {
    "reverse_text/make_data.py": ("--kind", "preferences", "--num", "512", "--output", "preferences.jsonl"),
    "reverse_text/make_tokenizer.py": (".",),
    "smollm2/make_data.py": ("--kind", "sft", "--output", "sft.jsonl"),
}
"""Programs that make files which lie beside them: flags."""
ENVIRONMENTS = [
    "examples.environments.addition:Addition", "examples.environments.guess_number:GuessNumber",
    "examples.environments.python_code:PythonCode", "examples.environments.sort_letters:SortLetters",
    "examples.smollm2.tasks:Boxes", "examples.smollm2.tasks:Sums", "examples.smollm2.tasks:ToJson",
]  # fmt: skip
"""Environments that a model answers here."""
TESTED = {
    **{f"configs/reverse_text/{name}.toml": _README for name in ("dpo", "orch", "reward_model", "rl", "sft")},
    "configs/reverse_text/evaluate.toml": "test_documented_commands.py::test_pages_whose_runs_are_looked_into",
    "configs/reverse_text/infer.toml": _BY_HAND,
    "configs/reverse_text/train.toml": _BY_HAND,
    **{
        f"configs/reverse_text/algorithms/{name}.toml": _ALGORITHM
        for name in ("cispo", "dapo", "dr_grpo", "gspo", "max_rl", "ppo", "reinforce_pp", "rloo")
    },
    f"{_SMOLLM2}/evaluate.toml": "test_examples.py::test_every_environment_is_answered_and_scored",
    f"{_SMOLLM2}/make_model.py": "test_smollm2.py::test_the_weights_are_those_of_the_file",
    "examples/environments/sandbox_inside.py": "test_sandbox.py",  # `python_code` starts it
    "examples/kubernetes/rl.yaml": _CLUSTERS,  # needs a cluster: its command is parsed
    "examples/kubernetes/sft.yaml": "test_clusters.py",
    "examples/rl_loop.py": _LOOP,
    "examples/sft_loop.py": _LOOP,
    "examples.environments.generated:ReasoningGym": "test_environment_loading.py",  # reasoning-gym needs a C compiler
    "examples.environments.ledger:Ledger": "test_benchmarks.py::test_the_smallest_form_prints_what_it_measures",
    "examples.rl_loop:Reverse": _LOOP,
}
"""What other tests run, and what needs more than a test has; by the test."""


def shipped() -> list[str]:
    """Return programs and files of settings by their paths, and environments by their ids."""
    found = []
    for path in sorted(path for folder in ("configs", "examples") for path in (ROOT / folder).rglob("*.*")):
        name = str(path.relative_to(ROOT))
        if path.suffix in (".toml", ".yaml"):
            found.append(name)
        elif path.suffix == ".py":
            text = path.read_text()
            found += [name] if '__name__ == "__main__"' in text else []
            classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
            made = {
                node.name
                for node in classes
                if any(isinstance(base, ast.Name) and base.id.endswith("Environment") for base in node.bases)
            }
            made |= {
                node.name
                for node in classes
                if any(isinstance(base, ast.Name) and base.id in made for base in node.bases)
            }
            module = name.removesuffix(".py").replace("/", ".")
            found += [f"{module}:{one}" for one in sorted(made) if not one.startswith("_")]
    return found


def test_everything_shipped_has_a_smallest_form() -> None:
    here = [*RUNS, *(f"examples/{name}" for name in PROGRAMS), *ENVIRONMENTS]
    assert sorted([*here, *TESTED]) == sorted(shipped()), (
        "each needs one line of RUNS, PROGRAMS, ENVIRONMENTS or TESTED"
    )
    assert not [name for name in TESTED.values() if not guarantees.exists(name)]


def run(program: str, directory: Path, *words: str) -> str:
    return shared_commands().start(program, directory, ["@", *words, "--output-dir", str(directory)]).succeed().log


@pytest.mark.launch
@pytest.mark.parametrize("path", RUNS)
def test_settings_train_two_steps(path: str, tmp_path: Path) -> None:
    teacher = shutil.copytree(MODEL, tmp_path / "teacher")
    start = load_file(MODEL / "model.safetensors")
    save_file({name: 1.1 * tensor for name, tensor in start.items()}, teacher / "model.safetensors", {"format": "pt"})
    program, *flags = (word.format(teacher=teacher) for word in RUNS[path])
    files = [f"{_SMOLLM2}/rl.toml", "@", path] if path.endswith("rl_after_sft.toml") else [path]
    own = ["--inference.server.port", str(free_port())] if program == "rl" else []
    run(program, tmp_path / "run", *files, "--model.name", str(MODEL), "--max-steps", "2", *flags, *own)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2] and all(math.isfinite(line["loss"]) for line in lines)
    if "smollm2/rl" in path:
        assert all(0 <= line["reward/mean"] <= 1 for line in lines), "this model has not learned the task"
        return
    assert all(line["grad_norm"] > 0 for line in lines)
    trained = load_file(tmp_path / "run" / "weights" / "step_2" / "model.safetensors")
    assert trained.keys() == start.keys() and any((trained[name] != start[name]).any() for name in start)


@pytest.mark.launch
def test_every_environment_is_answered_and_scored(tmp_path: Path) -> None:
    """By the model of the quick start, with the settings of examples/smollm2/evaluate.toml."""
    sections = [{"id": one, "name": one.partition(":")[2]} for one in ENVIRONMENTS]
    words = ("--model.name", str(MODEL), "--num-tasks", "2", "--inference.server.port", str(free_port()))
    run("evaluate", tmp_path / "run", f"{_SMOLLM2}/evaluate.toml", *words, "--environments", json.dumps(sections))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["environments"]
    assert list(summary) == [section["name"] for section in sections]
    for name, found in summary.items():
        shares = [estimate["value"] for key, estimate in found["estimates"].items() if key.startswith("pass")]
        assert shares and all(0 <= share <= 1 for share in shares), name
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == len(sections) * 2 * 4 and all(0 <= one["reward"] <= 1 for one in rollouts)


@pytest.mark.launch
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_make_the_files_that_are_shipped(name: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / name
    module = ["-m", ".".join(path.relative_to(ROOT).with_suffix("").parts)]
    flags: Sequence[str] = [
        word if word.startswith("-") or "." not in word else str(tmp_path / word) for word in PROGRAMS[name]
    ]
    subprocess.run([sys.executable, *module, *flags], cwd=ROOT, check=True)
    made = list(tmp_path.iterdir())
    kept = path.parent / "base" if "tokenizer" in name else path.parent
    assert made and all(one.read_bytes() == (kept / one.name).read_bytes() for one in made)
