"""What is resumed in tests of programs: for every program and kind of state a case, with its settings."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.run.run_dir import RunDir
from tests.conftest import ModelFactory
from tests.runs.rl import EVERYTHING
from tests.runs.training import PAIRS
from tests.unit.trainer.programs.in_process import HALF, STEPS, end_state, forget, train

OTHER_MODEL, REWARD_MODEL, SAMPLES, SOME_PAIRS = "OTHER", "SCORES", "SAMPLES", "PAIRS"
DROPOUT: dict[str, Any] = {"attention_dropout": 0.3}
"""The model of every case has dropout, so that a generator that is not restored shows."""
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SFT = {"name": SAMPLES, "batch_size": 8, "micro_batch_size": 2, "seq_len": 32}
PREFERENCES = {"name": SOME_PAIRS, "batch_size": 8, "micro_batch_size": 2, "seq_len": 40}
VALIDATED = {"validation_fraction": 0.1}
LORA = {"model": {"lora": {"rank": 2, "alpha": 8}}}
RL: dict[str, Any] = {"mismatch_limit": float("inf")}


@dataclass(frozen=True)
class Case:
    """A program with settings that give it a kind of state; names in capitals stand for files."""

    program: str
    parts: set[str] = field(default_factory=set)  # the state beside that of every program, as `parts_of` names it
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "qwen3"
    model: dict[str, Any] = field(default_factory=lambda: DROPOUT)  # fields of its configuration


_BATCHES = {"orchestrator.json"}
_REFERENCE = {"reference_logprobs.npz", "reference.json"}
_PATIENT = {"metric": "val/loss", "patience": 99}
CASES = {
    "sft": Case("sft", set(), {"data": SFT | VALIDATED, "val_interval": HALF, "stop": _PATIENT}),
    "sft, unpacked, muon, cosine": Case(
        "sft",
        set(),
        {"data": SFT | {"pack": False}, "optim": {"type": "muon", "schedule": "cosine", "schedule_steps": STEPS}},
    ),
    "sft, muon with moments in bfloat16": Case(
        "sft", set(), {"data": SFT, "optim": {"type": "muon", "moments_dtype": "bfloat16"}}
    ),
    "sft, a row for each sample": Case(
        "sft", set(), {"data": SFT}, "bloom", {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.2}
    ),
    "sft, offloaded": Case("sft", set(), {"data": SFT, "parallel": {"threads": 1, "cpu_offload": True}}),
    "sft, adapters": Case(
        "sft", {"base"}, {"data": SFT, "model": {"lora": {"rank": 2, "alpha": 8, "dropout": 0.3}}}
    ),
    "dpo": Case("dpo", _REFERENCE, {"data": PREFERENCES | VALIDATED, "val_interval": HALF}),
    "dpo, adapters, another reference": Case(
        "dpo", {"base", *_REFERENCE}, LORA | {"data": PREFERENCES, "loss": {"reference_model": OTHER_MODEL}}
    ),
    "dpo, kto": Case(
        "dpo",
        {"hooks", *_REFERENCE},
        {"data": PREFERENCES, "loss": {"type": "kto"}, "hooks": ["tests.runs.own_hooks:Steps"]},
    ),
    "reward-model": Case("reward-model", set(), {"data": PREFERENCES | VALIDATED, "val_interval": HALF}),
    "reward-model, adapters": Case(
        "reward-model", {"base"}, LORA | {"data": PREFERENCES, "optim": {"moments_dtype": "bfloat16"}}
    ),
    "rl": Case("rl", _BATCHES, RL),
    "rl, everything": Case(
        "rl",
        {"critic", "ema", "reference", "kl", "reward_moments", *_BATCHES},
        RL | EVERYTHING | {"critic": {"optim": {"lr": 1e-3, "moments_dtype": "bfloat16"}, "warmup_steps": 1}},
    ),
    "rl, steered beside frozen models": Case(
        "rl",
        {"base", "reference", "kl", "entropy", "reward_model", *_BATCHES},
        RL | LORA | {
            "kl": {"reference": OTHER_MODEL, "coef": 0.1, "target": 0.05, "horizon": 100},
            "loss": {"entropy": {"coef": 0.01, "target": 10.0}},
            "reward_model": {"name": REWARD_MODEL, "rules_weight": 0.5},
            "pretraining": {"data": SFT},
        },
    ),
}  # fmt: skip


class Programs:
    """The runs of the cases in the directory `home`, each made when a test asks for it."""

    def __init__(self, home: Path, tiny_model: ModelFactory, samples: Path) -> None:
        self._home, self._tiny_model = home, tiny_model
        pairs = home / "pairs.jsonl"
        pairs.write_text("".join(PAIRS.read_text().splitlines(keepends=True)[:48]))
        self._files = {SAMPLES: str(samples), SOME_PAIRS: str(pairs), OTHER_MODEL: str(tiny_model(seed=5))}
        self._halves: dict[str, RunDir] = {}
        self._states: dict[str, dict[str, Any]] = {}

    def settings(self, name: str, *, dropout: bool = True, mixture: bool = False) -> dict[str, Any]:
        """Return the settings of a case, with files in the place of their names; `mixture`: of a mixture of experts."""
        case = CASES[name]
        filled = self._filled(case.settings)
        kind, fields = ("qwen3_moe", MIXTURE) if mixture else (case.kind, {})
        model = self._tiny_model(kind, **fields, **(case.model if dropout else {}))
        own = {"optim": {"lr": 1e-3} | filled.get("optim", {}), "model": filled.get("model", {}) | {"name": str(model)}}
        return filled | own

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._filled(one) for key, one in value.items()}
        if value == REWARD_MODEL:
            return str(self.half("reward-model").weights_of(HALF))
        return self._files.get(value, value) if isinstance(value, str) else value

    def half(self, name: str) -> RunDir:
        if name not in self._halves:
            output = self._home / f"half of {name}"
            self._halves[name] = train(CASES[name].program, output, self.settings(name), until=HALF)
        return self._halves[name]

    def whole(self, name: str) -> dict[str, Any]:
        """Return the end of the run of a case that trains all steps in a row, and saves the last one alone."""
        if name not in self._states:
            run_dir = train(CASES[name].program, self._home / name, self.settings(name), until=STEPS)
            self._states[name] = end_state(run_dir)
        return self._states[name]

    def resumed(self, name: str, output: Path, *, without: str | None = None) -> dict[str, Any]:
        """Return the end of the run that new objects resume from step 5, `without` a part of its state."""
        shutil.copytree(self.half(name).path, output)
        if without is not None:
            forget(RunDir(output).checkpoint(HALF), without)
            torch.manual_seed(0)  # the run of `half`, in this process, may have left its generators at this very step
        return end_state(train(CASES[name].program, output, self.settings(name), until=STEPS, resume=HALF))
