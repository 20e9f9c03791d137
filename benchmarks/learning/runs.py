"""One learning run through the commands: training, and how good it is before, meanwhile and after, on held-out tasks.

Whatever is finished in the folder of a run stays: the commands go on where they were interrupted.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning.commands import RECIPES, environment_of, free_port, held_out_environment_of, recipe, run
from benchmarks.learning.preferences import write_pairs
from benchmarks.learning.results import Curve, Estimate, Run
from benchmarks.learning.tasks import TASKS
from examples.smollm2.make_data import NUMBERS, make_pairs, make_rows
from holdfast import read_metrics

TRL_SECONDS = "seconds.json"
"""Of each step of TRL, in the directory of its run."""

CONTROLS = ("permuted_rewards", "zero_advantages", "negated_advantages", "inverted_ratio", "shifted_logprobs")
"""The variants that must not learn."""
STALE = ("bf16_stale_1", "bf16_stale_4", "bf16_stale_4_truncated", "bf16_stale_4_uncorrected")
"""The variants in bfloat16 whose batches are made by weights one or four steps old."""
ROUNDS = ("rounds_2", "rounds_4")
"""The variants in which new weights reach the engine in the middle of answers."""
_SHARED = Path("configs/reverse_text/algorithms")
OVERLAYS = {
    "grpo": None,
    "dr_grpo": _SHARED / "dr_grpo.toml",
    "dapo": RECIPES / "algorithms" / "dapo.toml",
    "gspo": _SHARED / "gspo.toml",
    "cispo": _SHARED / "cispo.toml",
    "rloo": _SHARED / "rloo.toml",
    "max_rl": _SHARED / "max_rl.toml",
    "reinforce_pp": _SHARED / "reinforce_pp.toml",
    "ppo": _SHARED / "ppo.toml",
    **{name: RECIPES / "controls" / f"{name}.toml" for name in CONTROLS},
    **{name: RECIPES / "staleness" / f"{name}.toml" for name in STALE},
    **{name: RECIPES / "schedule" / f"{name}.toml" for name in ROUNDS},
    "bf16_moments": RECIPES / "precision" / "bf16_moments.toml",
}
"""What is laid over the recipe of a task, by the variant's name; None: nothing, it is GRPO."""
TRL = "trl"
"""TRL's GRPOTrainer, on tasks of one turn."""
DPO = "dpo"
"""`dpo` on the start's own answers; of a pretrained model on pairs of examples/smollm2."""
_COMPACT = "sft_bf16_moments"
SUPERVISED = {"sft": "sft", "lora": "sft", _COMPACT: "sft", DPO: "dpo"}
"""The command of each variant that trains on data; of a pretrained model with the settings of examples/smollm2."""
SHOWN = ("grpo", TRL, *ROUNDS, "sft", "lora")
"""The variants of all tasks in the table of docs/evidence.md; of `to_json` it has all."""
_EXAMPLE = Path("examples/smollm2")
_DATA = {"sft": "sft", "dpo": "preferences"}

_SAMPLES = 8
# Words of which `dpo` has answers; the seeds of their evaluation are none that judges a run.
_PAIRED_TASKS = 2000
_PAIRED_SEED = 1000


@dataclass(frozen=True)
class Settings:
    """What all runs share.

    Attributes:
        folder: where the runs go.
        steps: optimizer steps of every run; None: those of the recipe.
        num_tasks: held-out tasks of the evaluations before and after.
        trl_points: how often the weights of TRL are judged.
    """

    folder: Path
    steps: int | None = None
    num_tasks: int = 512
    trl_points: int = 3

    def folder_of(self, task: str, variant: str, seed: int) -> Path:
        """Return where a run is kept; those of other numbers of steps are other runs."""
        return self.folder / task / (f"{variant}_{seed}" + (f"_{self.steps}" if self.steps else ""))

    def steps_of(self, task: str, variant: str) -> int:
        """Return how many optimizer steps a run has."""
        if variant in SUPERVISED and TASKS[task].is_pretrained:
            return self.steps or tomllib.loads(_example_of(variant).read_text())["max_steps"]
        return self.steps or recipe("algorithms/dpo" if variant == DPO else task)["max_steps"]


def _example_of(variant: str) -> Path:
    return _EXAMPLE / f"{'sft' if variant == _COMPACT else variant}.toml"


def measure(task: str, variant: str, seed: int, start: Path, settings: Settings) -> Run:
    """Run `variant` on `task` from the weights `start`, and return what was measured."""
    folder = settings.folder_of(task, variant, seed)
    folder.mkdir(parents=True, exist_ok=True)
    steps = settings.steps_of(task, variant)
    # The start is the same for all runs of a task.
    before = estimates(task, start, settings.folder / task / "before", settings)
    train = {TRL: _train_trl, DPO: _train_dpo}.get(variant, _train)
    if variant in SUPERVISED and TASKS[task].is_pretrained:
        train = _train_on_data
    curve, weights = train(task, variant, seed, start, folder, steps, settings)
    after = estimates(task, weights, folder / "after", settings)
    curve = {0: before["pass@1"].value, **curve, steps: after["pass@1"].value}
    return Run(task, variant, seed, before, after, dict(sorted(curve.items())), _step_s(folder / "run"))


def _step_s(run_dir: Path) -> float | None:
    """Return the median of the seconds of a step, without the first, which waits for the engine."""
    if (of_trl := run_dir / TRL_SECONDS).exists():
        seconds = json.loads(of_trl.read_text())
    else:
        seconds = [line["time/step"] for line in read_metrics(run_dir / "metrics.jsonl") if "time/step" in line]
    return statistics.median(seconds[1:]) if len(seconds) > 1 else None


def estimates(
    task: str,
    weights: Path,
    folder: Path,
    settings: Settings,
    played: Mapping[str, Any] | None = None,
    more_tokens: int = 0,
) -> dict[str, Estimate]:
    """Return how good weights are: `greedy`, and sampled at temperature 1 `pass@1` and `pass@8`, with intervals.

    `played` is an environment instead of the task's held-out one, with `more_tokens` above what the recipe samples.
    """
    told = (task, weights, played or held_out_environment_of(task), more_tokens)
    num = settings.num_tasks
    sampled = _evaluate(*told, folder / f"sampled_{num}", num, "--samples-per-task", _SAMPLES)
    greedy = _evaluate(*told, folder / f"greedy_{num}", num, "--sampling.temperature", 0)
    return {"greedy": greedy["pass@1"], **{name: sampled[name] for name in ("pass@1", f"pass@{_SAMPLES}")}}


def _evaluate(
    task: str, weights: Path, played: Mapping[str, Any], more_tokens: int, folder: Path, num_tasks: int, *flags: object
) -> dict[str, Estimate]:
    summary = folder / "summary.json"
    if not summary.exists():
        orchestrator = recipe(task)["orchestrator"]
        section = {**{name: value for name, value in played.items() if name != "weight"}, "name": task}
        run(
            "evaluate", "--model.name", weights, "--environments", json.dumps([section]), "--num-tasks", num_tasks,
            "--seq-len", orchestrator["seq_len"],
            "--sampling.max-tokens", orchestrator["sampling"]["max_tokens"] + more_tokens,
            "--output-dir", folder, *flags,
        )  # fmt: skip
    found = json.loads(summary.read_text())["environments"][task]["estimates"]
    return {name: Estimate(one["value"], one["low"], one["high"]) for name, one in found.items() if "pass" in name}


def weights_of(task: str, variant: str, folder: Path, steps: int) -> Path:
    """Return where a run of so many steps in `folder` has its last weights."""
    if variant != TRL:
        return folder / "run" / "weights" / f"step_{steps}"
    return folder / "run" / f"checkpoint-{steps * _updates(task)}"


def _updates(task: str) -> int:
    """Return what TRL's trainer counts as steps: updates of the policy, in one step of a run."""
    return recipe(task)["trainer"].get("updates", {}).get("minibatches", 1)


def _train(
    task: str, variant: str, seed: int, start: Path, folder: Path, steps: int, _: Settings
) -> tuple[Curve, Path]:
    """Run `rl`; return held-out exact match by version, and the trained weights."""
    run_dir = folder / "run"
    weights = weights_of(task, variant, folder, steps)
    if not weights.exists():
        overlay = OVERLAYS[variant]
        if TASKS[task].is_pretrained and (own := RECIPES / "smollm2" / f"{variant}.toml").exists():
            overlay = own
        run(
            "rl", "@", RECIPES / f"{task}.toml", *([] if overlay is None else ["@", overlay]), "--model.name", start,
            "--seed", seed, "--max-steps", steps, "--inference.server.port", free_port(), "--output-dir", run_dir,
        )  # fmt: skip
    lines = read_metrics(run_dir / "metrics.jsonl")
    return {int(line["eval/version"]): line[f"eval/{task}/pass@1"] for line in lines if "eval/version" in line}, weights


def _train_dpo(
    task: str, variant: str, seed: int, start: Path, folder: Path, steps: int, _: Settings
) -> tuple[Curve, Path]:
    """Have the start answer, and run `dpo` on what was right and wrong; return as `_train`."""
    answers, pairs, run_dir = folder / "answers", folder / "pairs.jsonl", folder / "run"
    # Where tasks are rows of lists, of the list that is trained on.
    flags = ("--samples-per-task", _SAMPLES, "--seed", _PAIRED_SEED + seed)
    _evaluate(task, start, environment_of(task), 0, answers, _PAIRED_TASKS, *flags)
    weights = weights_of(task, variant, folder, steps)
    if not weights.exists():
        write_pairs(answers / "rollouts.jsonl", pairs)
        run(
            "dpo", "@", RECIPES / "algorithms" / "dpo.toml", "--model.name", start, "--data.name", pairs,
            "--eval.environments", json.dumps([held_out_environment_of(task)]), "--seed", seed, "--max-steps", steps,
            "--output-dir", run_dir,
        )  # fmt: skip
    return _evaluated(task, run_dir), weights


def _train_on_data(
    task: str, variant: str, seed: int, start: Path, folder: Path, steps: int, _: Settings
) -> tuple[Curve, Path]:
    """Train a pretrained model on demonstrations or pairs of a task; return as `_train`."""
    command, data = SUPERVISED[variant], folder / "data.jsonl"
    weights = weights_of(task, variant, folder, steps)
    if not weights.exists():
        kind = _DATA[command]
        make = {"sft": make_rows, "preferences": make_pairs}[kind]
        data.write_text("".join(json.dumps(row) + "\n" for row in make(task, NUMBERS[kind], seed=_PAIRED_SEED + seed)))
        sections = json.dumps([held_out_environment_of(task)])
        told = recipe(task)
        run(
            command, "@", _example_of(variant), *(["--optim.moments-dtype", "bfloat16"] if variant == _COMPACT else []),
            "--model.name", start, "--data.name", data, "--seed", seed,
            "--max-steps", steps, "--eval.environments", sections, "--eval.interval", told["eval"]["interval"],
            "--ckpt.interval", told["eval"]["interval"],
            "--eval.num-tasks", told["eval"]["num_tasks"], "--eval.seq-len", told["orchestrator"]["seq_len"],
            "--eval.sampling.max-tokens", told["orchestrator"]["sampling"]["max_tokens"],
            "--output-dir", folder / "run",
        )  # fmt: skip
    return _evaluated(task, folder / "run"), weights


def _evaluated(task: str, run_dir: Path) -> Curve:
    """Return what the evaluations beside a run on data found, by step."""
    curve = {}
    for evaluated in (run_dir / "evaluations").glob("step_*"):
        found = json.loads((evaluated / "summary.json").read_text())["environments"][task]["estimates"]
        curve[int(evaluated.name.removeprefix("step_"))] = found["pass@1"]["value"]
    return curve


def _train_trl(
    task: str, variant: str, seed: int, start: Path, folder: Path, steps: int, settings: Settings
) -> tuple[Curve, Path]:
    """Run TRL's trainer; return held-out exact match of the weights that it saved, and the last of them."""
    save_every = max(1, steps // settings.trl_points)
    weights = weights_of(task, variant, folder, steps)
    if not weights.exists():
        told = {"task": task, "model": str(start), "folder": str(folder / "run"), "seed": seed, "steps": steps,
                "save_every": save_every}  # fmt: skip
        program = [sys.executable, "-m", "benchmarks.learning.trl_grpo", json.dumps(told)]
        done = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"TRL ended with exit code {done.returncode}:\n{done.stdout[-4000:]}")
    num_tasks = recipe(task)["eval"]["num_tasks"]
    curve = {}
    for step in range(save_every, steps, save_every):
        saved, judged = weights_of(task, variant, folder, step), folder / "judged" / f"step_{step}"
        curve[step] = _evaluate(task, saved, held_out_environment_of(task), 0, judged, num_tasks)["pass@1"].value
    return curve, weights
