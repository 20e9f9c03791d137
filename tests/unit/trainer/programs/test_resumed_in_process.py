"""The state of every program is complete: eight steps are five, and three more in new objects, bit for bit."""

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import PROGRAMS, program_config
from holdfast.config.base import Section
from holdfast.config.by_type import models_by_type
from holdfast.config.training import AnyOptim, OptimConfig
from holdfast.errors import CheckpointError, TrainingError
from holdfast.trainer.checkpoint.state import State
from tests.faults.run_states import differing
from tests.unit.trainer.programs.cases import CASES, Programs
from tests.unit.trainer.programs.in_process import HALF, STEPS, parts_of

IN_ALL = {"model", "optim", "step", "samples", "tokens", "random_rank_0.json"}
# Sections of settings without a state of their own.
STATELESS = {"ckpt", "tracking", "dashboard", "slurm", "eval", "distillation"}
# Where a part of the state is another one, the next steps are others. What names a frozen model, or what the next
# batch must follow, is compared before anything is trained.
DIFFERS: list[tuple[str, str]] = [
    *[("sft", part) for part in ("model.", "optim.", "samples", "tokens", "random_rank_0.json")],
    *[("rl, everything", part) for part in ("critic.optim.", "ema.", "reference.")],
    *[("rl, everything", part) for part in ("kl", "reward_moments")],
    ("rl, steered beside frozen models", "entropy"),
    ("dpo, kto", "hooks"),
]
REFUSED: list[tuple[str, str]] = [
    ("sft, adapters", "base"), ("rl, steered beside frozen models", "reference"),
    ("rl, steered beside frozen models", "reward_model"), ("rl", "orchestrator.json"), ("rl", "samples"),
]  # fmt: skip
# The classes of the state, and the parts that they are in checkpoints.
KINDS = {
    "ModelState": {"model", "optim", "critic"}, "Adapters": {"base"}, "Ema": {"ema"},
    "EntropyCoefficient": {"entropy"}, "SyncedReference": {"reference"}, "FrozenModel": {"reference", "reward_model"},
    "KlCoefficient": {"kl"}, "RunningMoments": {"reward_moments"}, "Hooks": {"hooks"},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_eight_steps_are_five_and_three_in_new_objects(name: str, programs: Programs, tmp_path: Path) -> None:
    straight, resumed = programs.whole(name), programs.resumed(name, tmp_path / "resumed")
    assert differing(resumed, straight) == []
    assert len({line["loss"] for line in straight["metrics"]}) == STEPS, "every step trains"
    assert parts_of(programs.half(name).checkpoint(HALF)) == IN_ALL | CASES[name].parts


@pytest.mark.parametrize(("name", "part"), DIFFERS)
def test_a_run_that_lost_a_part_of_its_state_differs(name: str, part: str, programs: Programs, tmp_path: Path) -> None:
    """Otherwise the test above could not notice that a checkpoint lacks it."""
    assert differing(programs.resumed(name, tmp_path / "resumed", without=part), programs.whole(name)) != []


@pytest.mark.parametrize(("name", "part"), REFUSED)
def test_a_run_with_another_state_is_refused(name: str, part: str, programs: Programs, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, TrainingError)):
        programs.resumed(name, tmp_path / "resumed", without=part)


def test_every_program_kind_of_state_and_section_that_may_be_left_out_has_a_case() -> None:
    assert {case.program for case in CASES.values()} == PROGRAMS.keys()
    classes = {kind.__name__ for kind in _subclasses(State) if kind.__module__.startswith("holdfast.")}
    assert classes == {"TrainState", *KINDS}, "add a case for a new kind of state"
    parts = IN_ALL.union(*(case.parts for case in CASES.values()))
    assert set().union(*KINDS.values()) <= parts
    damaged = {part.split(".")[0] if part.endswith(".") else part for _, part in (*DIFFERS, *REFUSED)}
    # The step is in the name of the checkpoint; the table of the reference is computed again if it is lost.
    assert parts - damaged == {"step", "reference.json", "reference_logprobs.npz"}
    used = {key for case in CASES.values() for key in case.settings}
    for config in map(program_config, PROGRAMS):
        optional = {name for name, one in config.model_fields.items() if _is_optional_section(one.annotation)}
        assert optional <= used | STATELESS, "add a case, or name a section that has no state"
    assert models_by_type(AnyOptim, OptimConfig).keys() == {"adamw", "muon"}


def _is_optional_section(annotation: Any) -> bool:
    kinds = typing.get_args(annotation)
    return type(None) in kinds and any(isinstance(kind, type) and issubclass(kind, Section) for kind in kinds)


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
