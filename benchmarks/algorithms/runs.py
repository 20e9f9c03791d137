"""Runs of one algorithm through the commands, and what their metrics say about its learning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast import read_metrics
from holdfast.config import DpoConfig
from holdfast.config.load import read_toml
from holdfast.run.run_dir import RunDir

_CONFIGS = Path("configs/reverse_text")
_START = "examples/reverse_text/model"
NAMES = {
    "grpo": "GRPO",
    "dr_grpo": "Dr.GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "max_rl": "MaxRL",
    "ppo": "PPO",
    "dpo": "DPO",
}
"""The algorithms, as they are called."""

METRICS = (
    "reward/mean",
    "reverse_text/exact",
    "rollout/sampled_tokens_mean",
    "entropy",
    "ref_kld",
    "grad_norm",
    "loss",
)
"""The columns of a curve, by their names in `metrics.jsonl`."""

# How often the weights of `dpo` are judged, and by how many problems: it makes no rollouts of its own.
_DPO_POINTS = 4
_DPO_PROBLEMS = 64


@dataclass(frozen=True)
class Settings:
    """What all runs share.

    Attributes:
        folder: where the runs go.
        steps: optimizer steps; None: those of the TOML files.
        port: of the inference server.
        threads: of the trainer; None: its default.
    """

    folder: Path
    steps: int | None
    port: int
    threads: int | None


def measure(algorithm: str, seed: int, settings: Settings) -> dict[int, dict[str, float]]:
    """Run `algorithm` and return METRICS by step.

    Of `rl`, step N is batch N, sampled by the weights of step N - 1 - `async_level`. Of `dpo` it is the weights
    after step N, judged by rollouts of their own.
    """
    run_dir = settings.folder / f"{algorithm}_{seed}"
    if algorithm == "dpo":
        return _measure_dpo(run_dir, seed, settings)
    # The quick start is GRPO; the files of the others hold what differs.
    flags = [] if algorithm == "grpo" else ["@", str(_CONFIGS / "algorithms" / f"{algorithm}.toml")]
    return _chosen(_run_rl(run_dir, seed, settings, [*flags, *_steps(settings.steps)]))


def _measure_dpo(run_dir: Path, seed: int, settings: Settings) -> dict[int, dict[str, float]]:
    """Train on pairs, then let vLLM answer fresh problems with the weights of several steps."""
    flags = ["--seed", str(seed), "--output-dir", str(run_dir), "--clean", *_steps(settings.steps)]
    steps_in_file = read_toml(DpoConfig, _CONFIGS / "dpo.toml").max_steps
    interval = max(1, (settings.steps or steps_in_file) // _DPO_POINTS)
    # A shorter run is the beginning of the whole one.
    flags += ["--optim.schedule-steps", str(steps_in_file), "--ckpt.interval", str(interval)]
    if settings.threads is not None:
        flags += ["--parallel.threads", str(settings.threads)]
    _run("dpo", ["@", str(_CONFIGS / "dpo.toml"), *flags])
    training = _chosen(read_metrics(run_dir / "metrics.jsonl"))
    points = {}
    for step in [0, *RunDir(run_dir).committed_steps()]:
        # One step of `rl`: its batch is sampled by the weights that it starts from.
        flags = ["--max-steps", "1", "--orchestrator.problems-per-step", str(_DPO_PROBLEMS)]
        if step:
            flags += ["--ckpt.init-from", str(RunDir(run_dir).checkpoint(step))]
        judged = _chosen(_run_rl(run_dir / "judged" / f"step_{step}", seed, settings, flags))[1]
        of_training = training.get(step, {})
        points[step] = {name: judged[name] for name in judged if name not in ("loss", "grad_norm")}
        points[step] |= {name: of_training[name] for name in ("loss", "grad_norm") if name in of_training}
    return points


def _run_rl(run_dir: Path, seed: int, settings: Settings, flags: Sequence[str]) -> list[dict[str, float]]:
    shared = ["--seed", str(seed), "--output-dir", str(run_dir), "--clean"]
    # A reference is measured against in every run, whether or not the algorithm is tied to one.
    shared += ["--trainer.kl.reference", _START, "--inference.server.port", str(settings.port)]
    if settings.threads is not None:
        shared += ["--trainer.parallel.threads", str(settings.threads)]
    _run("rl", ["@", str(_CONFIGS / "rl.toml"), *flags, *shared])
    return read_metrics(run_dir / "metrics.jsonl")


def _run(program: str, flags: Sequence[str]) -> None:
    """Run a command of this environment.

    Raises:
        SystemExit: it failed; with the end of what it printed.
    """
    executable = Path(sys.executable).parent / program
    done = subprocess.run([str(executable), *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-20:])
        sys.exit(f"{program} {' '.join(flags)} ended with exit code {done.returncode}:\n{end}")


def _steps(steps: int | None) -> list[str]:
    return [] if steps is None else ["--max-steps", str(steps)]


def _chosen(lines: Sequence[dict[str, float]]) -> dict[int, dict[str, float]]:
    return {int(line["step"]): {name: line[name] for name in METRICS if name in line} for line in lines}
