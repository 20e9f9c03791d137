"""The state of every program is complete: eight steps are five steps, and three more in new objects, bit for bit.

Nothing is killed here. That a save is whole whenever its process dies is for tests/faults/test_kill_during_save.py.
"""

from __future__ import annotations

import shutil
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.shared.config import PROGRAMS
from holdfast.shared.config.base import Section
from holdfast.shared.config.trainer import OptimConfig
from holdfast.shared.errors import CheckpointError, TrainingError
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process import timeline
from holdfast.trainer.checkpoints.plain_state import State
from holdfast.trainer.mesh import Mesh
from tests.conftest import ModelFactory
from tests.faults.run_states import differing
from tests.runs.rl import EVERYTHING
from tests.runs.training import PAIRS
from tests.unit.trainer.programs.in_process import HALF, STEPS, end_state, forget, parts_of, train

MODEL, OTHER_MODEL, REWARD_MODEL, SAMPLES, ALL_PAIRS, ANSWERS = "MODEL", "OTHER", "SCORES", "SAMPLES", "PAIRS", "ROWS"
DROPOUT: dict[str, Any] = {"attention_dropout": 0.3}
"""The model of every case has dropout, so that a generator that is not restored shows."""
SFT = {"name": SAMPLES, "batch_size": 8, "micro_batch_size": 2, "seq_len": 32}
PREFERENCES = {"name": ALL_PAIRS, "batch_size": 8, "micro_batch_size": 2, "seq_len": 40}
VALIDATED = {"validation_fraction": 0.1}
LORA = {"model": {"lora": {"rank": 2, "alpha": 8}}}
RL: dict[str, Any] = {"mismatch_limit": float("inf")}
IN_ALL = {"model", "optim", "step", "samples", "tokens", "random_rank_0.json"}
# Sections of settings without a state of their own.
STATELESS = {"ckpt", "tracking", "prometheus", "dashboard", "slurm", "eval", "distillation"}


@dataclass(frozen=True)
class Case:
    """A program with settings that give it a kind of state.

    Attributes:
        parts: the state beside that of every program, as `parts_of` names it.
        settings: of the program, with names in capitals in the place of files.
        model: fields of its configuration.
    """

    program: str
    parts: set[str] = field(default_factory=set)
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "qwen3"
    model: dict[str, Any] = field(default_factory=lambda: DROPOUT)


_BATCHES = {"orchestrator.json"}
_REFERENCE = {"reference_logprobs.npz"}
CASES = {
    "sft": Case("sft", set(), {"data": SFT | VALIDATED, "val_interval": HALF}),
    "sft, unpacked, muon, cosine": Case(
        "sft",
        set(),
        {"data": SFT | {"pack": False}, "optim": {"type": "muon", "schedule": "cosine", "schedule_steps": STEPS}},
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
    "dpo, kto": Case("dpo", _REFERENCE, {"data": PREFERENCES | {"name": ANSWERS}, "loss": {"type": "kto"}}),
    "reward-model": Case("reward-model", set(), {"data": PREFERENCES | VALIDATED, "val_interval": HALF}),
    "reward-model, adapters": Case("reward-model", {"base"}, LORA | {"data": PREFERENCES}),
    "rl": Case("rl", _BATCHES, RL),
    "rl, everything": Case(
        "rl", {"critic", "ema", "reference", "kl", "reward_moments", "replay.msgpack", *_BATCHES}, RL | EVERYTHING
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
# Where a part of the state is another one, the next steps are others. What names a frozen model, or what the next
# batch must follow, is compared before anything is trained.
DIFFERS: list[tuple[str, str]] = [
    *[("sft", part) for part in ("model.", "optim.", "samples", "tokens", "random_rank_0.json")],
    *[("rl, everything", part) for part in ("critic.model.", "critic.optim.", "ema.", "reference.", "replay.msgpack")],
    *[("rl, everything", part) for part in ("kl", "reward_moments", "ema")],
    ("rl, steered beside frozen models", "entropy"),
]
REFUSED: list[tuple[str, str]] = [
    ("dpo", "reference_logprobs.npz"),
    ("sft, adapters", "base"),
    ("rl, steered beside frozen models", "reference"),
    ("rl, steered beside frozen models", "reward_model"),
    ("rl", "orchestrator.json"),
    ("rl", "samples"),
]
# The classes of the state, and the parts that they are in checkpoints.
KINDS = {
    "ModelState": {"model", "optim", "critic"},
    "Adapters": {"base"},
    "Ema": {"ema"},
    "EntropyCoefficient": {"entropy"},
    "FollowingModel": {"reference"},
    "FrozenModel": {"reference", "reward_model"},
    "KlCoefficient": {"kl"},
    "RunningMoments": {"reward_moments"},
}


class Programs:
    """The runs of the cases, each made when a test asks for it."""

    def __init__(self, home: Path, tiny_model: ModelFactory, files: dict[str, str]) -> None:
        self._home, self._tiny_model, self._files = home, tiny_model, files
        self._halves: dict[str, RunDir] = {}
        self._states: dict[str, dict[str, Any]] = {}

    def settings(self, case: Case) -> dict[str, Any]:
        """Return the settings of a case, with files in the place of their names."""
        filled = {"optim": {"lr": 1e-3}} | self._filled(case.settings)
        filled["optim"] = {"lr": 1e-3} | filled["optim"]
        filled["model"] = filled.get("model", {}) | {"name": str(self._tiny_model(case.kind, **case.model))}
        return filled

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._filled(one) for key, one in value.items()}
        if value == REWARD_MODEL:
            return str(self.half("reward-model").weights_of(HALF))
        return self._files.get(value, value) if isinstance(value, str) else value

    def half(self, name: str) -> RunDir:
        """Return the run of a case until step 5."""
        if name not in self._halves:
            case = CASES[name]
            output = self._home / f"half of {name}"
            self._halves[name] = train(case.program, output, self.settings(case), until=HALF)
        return self._halves[name]

    def whole(self, name: str) -> dict[str, Any]:
        """Return the end of the run of a case that trains all steps in a row, and saves the last one alone."""
        if name not in self._states:
            case = CASES[name]
            run_dir = train(case.program, self._home / name, self.settings(case), until=STEPS)
            self._states[name] = end_state(run_dir)
        return self._states[name]

    def resumed(self, name: str, output: Path, *, without: str | None = None) -> dict[str, Any]:
        """Return the end of the run that new objects resume from step 5, `without` a part of its state."""
        case = CASES[name]
        shutil.copytree(self.half(name).path, output)
        if without is not None:
            forget(RunDir(output).checkpoint(HALF), without)
        return end_state(train(case.program, output, self.settings(case), until=STEPS, resume=HALF))


@pytest.fixture(scope="module")
def programs(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: ModelFactory, sft_data: Path, mesh: Mesh
) -> Iterator[Programs]:
    assert mesh.world_size == 1
    home = tmp_path_factory.mktemp("programs")
    rows = PAIRS.read_text().splitlines(keepends=True)[:48]
    (home / "pairs.jsonl").write_text("".join(rows))
    other = str(tiny_model(seed=5))
    files = {SAMPLES: str(sft_data), ALL_PAIRS: str(home / "pairs.jsonl"), ANSWERS: str(home / "pairs.jsonl")}
    yield Programs(home, tiny_model, files | {OTHER_MODEL: other})
    timeline._own = None  # later tests of this process are no part of these runs


@pytest.mark.parametrize("name", CASES)
def test_eight_steps_are_five_and_three_in_new_objects(name: str, programs: Programs, tmp_path: Path) -> None:
    straight, resumed = programs.whole(name), programs.resumed(name, tmp_path / "resumed")
    assert differing(resumed, straight) == []
    assert len({line["loss"] for line in straight["metrics"]}) == STEPS, "every step trains"
    assert parts_of(programs.half(name).checkpoint(HALF)) == IN_ALL | CASES[name].parts


@pytest.mark.parametrize(("name", "part"), DIFFERS)
def test_a_run_that_has_lost_a_part_of_its_state_is_another(
    name: str, part: str, programs: Programs, tmp_path: Path
) -> None:
    """Otherwise the test above could not notice that a checkpoint lacks it."""
    assert differing(programs.resumed(name, tmp_path / "resumed", without=part), programs.whole(name)) != []


@pytest.mark.parametrize(("name", "part"), REFUSED)
def test_a_run_with_another_part_of_its_state_is_refused(
    name: str, part: str, programs: Programs, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, TrainingError)):
        programs.resumed(name, tmp_path / "resumed", without=part)


def test_every_program_and_every_kind_of_state_has_a_case() -> None:
    assert {case.program for case in CASES.values()} == PROGRAMS.keys()
    classes = {kind.__name__ for kind in _subclasses(State) if kind.__module__.startswith("holdfast.")}
    assert classes == {"TrainState", *KINDS}, "add a case for a new kind of state"
    parts = IN_ALL.union(*(case.parts for case in CASES.values()))
    assert set().union(*KINDS.values()) <= parts
    damaged = {part.split(".")[0] if part.endswith(".") else part for _, part in (*DIFFERS, *REFUSED)}
    assert parts - damaged == {"step"}, "the step is in the name of the checkpoint"


def test_every_section_of_settings_that_may_be_left_out_has_a_case() -> None:
    used = {key for case in CASES.values() for key in case.settings}
    for config in PROGRAMS.values():
        optional = {name for name, one in config.model_fields.items() if _is_optional_section(one.annotation)}
        assert optional <= used | STATELESS, "add a case, or name a section that has no state"
    assert set(typing.get_args(OptimConfig.model_fields["type"].annotation)) == {"adamw", "muon"}


def _is_optional_section(annotation: Any) -> bool:
    kinds = typing.get_args(annotation)
    return type(None) in kinds and any(isinstance(kind, type) and issubclass(kind, Section) for kind in kinds)


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
