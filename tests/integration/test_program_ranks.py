"""Two ranks train what one does, and resume bit for bit: every program, and every division of the ranks."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from holdfast.run import manifest
from holdfast.run.run_dir import RunDir
from holdfast.trainer.mesh import Mesh
from tests.conftest import ModelFactory
from tests.faults.run_states import differing
from tests.ranks.programs import on_two_ranks
from tests.runs.rl import exact_metrics
from tests.unit.trainer.programs.cases import CASES, Programs
from tests.unit.trainer.programs.in_process import end_state, train

pytestmark = pytest.mark.ranks

STEPS, HALF = 4, 2
NAMES = ("sft", "sft, adapters", "dpo", "dpo, kto", "reward-model", "rl", "rl, everything",
         "rl, steered beside frozen models")  # fmt: skip
DIVISIONS: dict[str, dict[str, Any]] = {
    "offloaded": {"cpu_offload": True}, "copies": {"replicas": 2}, "slices": {"sequence_parallel": 2},
}  # fmt: skip
# Of a mixture, each rank with half of the experts.
EXPERTS = {"mixtures/sft": "sft", "mixtures/rl": "rl, everything"}
# Who is ahead where both sides are equal up to rounding.
ROUNDED = ("accuracies", "fraction")


@pytest.fixture(scope="module")
def programs(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: ModelFactory, sft_data: Path, mesh: Mesh
) -> Programs:
    assert mesh.world_size == 1
    return Programs(tmp_path_factory.mktemp("programs"), tiny_model, sft_data)


@pytest.fixture(scope="module")
def runs(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all runs, by the names of their cases and divisions."""
    directory, made = tmp_path_factory.mktemp("two"), []

    def add(name: str, case: str, *, dropout: bool = False, parallel: dict[str, Any] | None = None, **run: Any) -> None:
        mixture = parallel == {"expert_parallel": 2}
        settings = programs.settings(case, dropout=dropout, mixture=mixture)
        settings |= {"parallel": parallel} if parallel else {}
        if "val_interval" in settings:
            settings["val_interval"] = HALF
        made.append({"name": name, "program": CASES[case].program, "settings": settings, **run})

    def add_three(name: str, case: str, **options: Any) -> None:
        add(f"{name}, whole", case, until=STEPS, **options)
        add(f"{name}, parts", case, until=HALF, **options)
        add(f"{name}, resumed", case, until=STEPS, resume=HALF, after=f"{name}, parts", **options)

    for case in NAMES:
        add_three(case, case)
    add_three("dropout", "sft", dropout=True)
    add_three("slices", "sft", parallel=DIVISIONS["slices"])
    add("rl in slices", "rl", parallel=DIVISIONS["slices"], until=STEPS)
    for name, parallel in DIVISIONS.items():
        add(f"shards and {name}", "sft", parallel=parallel, until=STEPS, resume=HALF, after="sft, parts")
    on_two_ranks(directory, made)
    made.clear()
    for name, case in EXPERTS.items():
        add_three(Path(name).name, case, parallel={"expert_parallel": 2})
    on_two_ranks(directory / "mixtures", made)
    return directory


@pytest.mark.parametrize("name", [*NAMES, "dropout", "slices", *EXPERTS])
def test_two_ranks_resume_bit_for_bit(name: str, runs: Path) -> None:
    straight, resumed = (RunDir(runs / f"{name}, {kind}") for kind in ("whole", "resumed"))
    assert differing(end_state(resumed, last=STEPS), end_state(straight, last=STEPS)) == []
    assert manifest.verify(straight.checkpoint(STEPS)).world_size == 2
    drawn = {(straight.checkpoint(STEPS) / f"trainer/random_rank_{rank}.json").read_bytes() for rank in (0, 1)}
    assert len(drawn) == 2, "each rank has a generator of its own"


@pytest.mark.parametrize("name", [*(name for name in NAMES if "adapters" not in name), *EXPERTS])
def test_two_ranks_train_what_one_does(name: str, runs: Path, programs: Programs, tmp_path: Path) -> None:
    case = EXPERTS.get(name, name)
    settings = programs.settings(case, dropout=False, mixture=name in EXPERTS)
    one = train(CASES[case].program, tmp_path / "one", settings, until=STEPS)
    same_metrics(RunDir(runs / f"{name}, whole"), one, relative=1e-3)


@pytest.mark.parametrize("name", [*(f"shards and {name}" for name in DIVISIONS), "slices, whole", "rl in slices"])
def test_however_ranks_are_divided_they_go_on_as_shards_would(name: str, runs: Path) -> None:
    """From a checkpoint of shards; offloaded ranks with the bits of others."""
    shards, other = RunDir(runs / ("rl, whole" if name.startswith("rl") else "sft, whole")), RunDir(runs / name)
    same_metrics(other, shards, relative=1e-6 if "slices" not in name else 1e-4)
    if "offloaded" in name:
        assert differing(end_state(other, last=STEPS), end_state(shards, last=STEPS)) == []
    sizes = [
        sum(path.stat().st_size for path in run.checkpoint(STEPS).glob("trainer/*.distcp")) for run in (shards, other)
    ]
    assert sizes[1] <= 1.1 * sizes[0], "what two ranks have alike is saved once"


@pytest.mark.parametrize(
    "name", ["sft, whole", "sft, adapters, whole", "shards and copies", "shards and offloaded", "mixtures/sft, whole"]
)
def test_one_rank_publishes_what_two_have_saved(name: str, runs: Path, programs: Programs) -> None:
    """No step is left for it, so its weights are those that it loaded."""
    case = "sft, adapters" if "adapters" in name else "sft"
    two = RunDir(runs / name).weights_of(STEPS)
    before = load_file(two / "model.safetensors")
    settings = programs.settings(case, dropout=False, mixture="mixtures" in name)
    train("sft", runs / name, settings, until=STEPS, resume=STEPS)
    after = load_file(two / "model.safetensors")
    assert before.keys() == after.keys() and all(after[key].equal(tensor) for key, tensor in before.items())


def same_metrics(one: RunDir, other: RunDir, *, relative: float) -> None:
    """Check that two runs measured the same up to rounding."""
    steps = range(1, STEPS + 1)
    for mine, theirs in zip(exact_metrics(one, steps), exact_metrics(other, steps), strict=True):
        for key in theirs.keys() & mine.keys():  # one validates at its half as well
            if not any(word in key for word in ROUNDED):
                assert mine[key] == pytest.approx(theirs[key], rel=relative, abs=1e-5), f"step {mine['step']}: {key}"
