"""The trainer of an RL run dies around every call that others can see: weights, metrics, checkpoints, pruning;
and at random moments. Once with nothing beside the policy, once with every part that a checkpoint can hold.

It trains a journal that is there already, so that nothing but the trainer decides what comes out.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.shared.files.manifest import verify
from holdfast.shared.files.run_dir import RunDir
from tests.conftest import ModelFactory
from tests.faults.faulty_calls import Call, Instant, read_trail
from tests.faults.rl_trainers import STEPS, Trainers, make_journal, run_trainer
from tests.runs.rl import EVERYTHING, Outcome, assert_same, exact_metrics, outcome

_MOST_TRIALS = 48


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_journal(tmp_path_factory.mktemp("journal") / "run")


def _instants(calls: list[Call]) -> list[tuple[int, Instant]]:
    """Around renames and the lines of metrics, and evenly over all other calls that are no plain writes."""
    lines = [call for call in calls if call.name == "write" and call.path == "metrics.jsonl"]
    found: list[tuple[int, Instant]] = []
    for call in [*lines, *(call for call in calls if call.name == "rename")]:
        found.append((call.number, "before"))
        found.append((call.number, "after"))
    found.extend((call.number, "half way") for call in lines)
    others = [call for call in calls if call.name not in ("rename", "write")]
    left = max(1, _MOST_TRIALS - len(found))
    found.extend((others[place * len(others) // left].number, "before") for place in range(left))
    return found


@dataclass(frozen=True)
class Straight:
    """A run that nothing disturbed, and how to repeat it."""

    trainers: Trainers
    folder: Path
    settings: dict[str, Any]
    calls: list[Call]
    expected: Outcome
    lines: list[dict[str, float]]

    @classmethod
    def of(cls, model: Path, journal: Path, folder: Path, **settings: Any) -> Straight:
        """Run it in `folder`."""
        folder.mkdir(exist_ok=True)
        trainers, run_dir = Trainers(model, journal, folder), RunDir(folder / "straight")
        run = run_trainer(trainers.prepare("straight", **settings))
        assert run.code == 0, f"{run.log}\n{run.trainer_log}"
        calls = read_trail(run_dir.path.with_suffix(".trail"))
        renamed = {call.target.split("/")[0] for call in calls if call.name == "rename"}
        assert {"weights", "checkpoints", "rollouts"} <= renamed, renamed  # published, committed, pruned
        lines = exact_metrics(run_dir, range(1, STEPS + 1))
        return cls(trainers, folder, settings, calls, outcome(run_dir, STEPS), lines)

    def survives(self, name: str, **fault: Any) -> bool:
        """Let a run die of `fault`, start it again and compare its end; return whether it did die."""
        config, run_dir = self.trainers.prepare(name, **self.settings), RunDir(self.folder / name)
        run = run_trainer(config, **fault)
        # 0: this time there were fewer calls
        assert run.was_killed or run.code == 0, f"{name}\n{run.log}\n{run.trainer_log}"
        for version in run_dir.published_weights():
            verify(run_dir.weights_of(version))
        again = run_trainer(config)
        assert again.code == 0, f"{name}\n{again.log}\n{again.trainer_log}"
        assert_same(outcome(run_dir, STEPS), self.expected)
        assert exact_metrics(run_dir, range(1, STEPS + 1)) == self.lines, name
        shutil.rmtree(run_dir.path)
        return run.was_killed

    def dies_at(self, number: int, instant: Instant) -> bool:
        """Let a run die around one call."""
        call = self.calls[number - 1]
        return self.survives(
            f"killed_{number}_{instant}_{call.name}".replace(" ", "_"), kill_at=number, instant=instant
        )

    def dies_after(self, delay_s: float) -> bool:
        """Let a run die this long after its first call."""
        return self.survives(f"killed_after_{delay_s:.3f}_s", killer_from=1, killer_delay_s=delay_s)

    @property
    def seconds(self) -> float:
        """From the first call to the last."""
        return self.calls[-1].time_s - self.calls[0].time_s


@pytest.fixture(scope="module")
def everything(tiny_model: ModelFactory, journal: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """The run with every part, of a model with dropout, so that the generators count too."""
    model, folder = tiny_model(attention_dropout=0.1), tmp_path_factory.mktemp("everything")
    return Straight.of(model, journal, folder, **EVERYTHING)


def test_every_part_is_in_the_checkpoint_and_has_moved(everything: Straight) -> None:
    tensors, values = everything.expected.tensors, json.loads(everything.expected.trainer_state["progress.json"])
    for prefix in ("model.", "optim.", "critic.model.", "critic.optim.", "ema.", "reference."):
        assert any(name.startswith(prefix) and any(data) for name, data in tensors.items()), prefix
    assert everything.expected.weights["ema/model.safetensors"] != everything.expected.weights["model.safetensors"]
    weight = "model.layers.0.mlp.up_proj.weight"
    assert len({tensors[f"{part}{weight}"] for part in ("model.", "critic.model.", "ema.", "reference.")}) == 4
    steered = STEPS - EVERYTHING["critic"]["warmup_steps"]  # before, the policy waits for its critic
    assert values["kl"]["num_updates"] == steered and values["kl"]["coef"] != EVERYTHING["kl"]["coef"]
    assert values["reward_moments"]["count"] == STEPS * 12  # replayed rollouts are not counted again
    assert values["ema"]["num_updates"] == STEPS
    assert len(everything.expected.trainer_state["replay.msgpack"]) > 1000
    assert [line["replay/groups"] for line in everything.lines] == [0, 2, 2, 2]
    assert [line["lr"] > 0 for line in everything.lines] == [False, True, True, True], "the critic was warmed up"


def test_with_every_part_a_killed_run_ends_in_the_same_bits(everything: Straight) -> None:
    commits = [call for call in everything.calls if call.target.startswith("checkpoints/step_")]
    died = [everything.dies_at(commits[0].number, "after"), everything.dies_at(commits[1].number, "before")]
    generator = random.Random(0)
    died += [everything.dies_after(generator.uniform(0.0, everything.seconds)) for _ in range(2)]
    assert all(died[:2])


def test_with_every_part_offloaded_a_run_ends_in_the_same_bits(everything: Straight) -> None:
    """Critic, reference and average lie on the host as the policy does."""
    parallel = {"threads": 1, "cpu_offload": True}
    config = everything.trainers.prepare("offloaded", **everything.settings, parallel=parallel)
    run, run_dir = run_trainer(config), RunDir(everything.folder / "offloaded")
    assert run.code == 0, f"{run.log}\n{run.trainer_log}"
    assert_same(outcome(run_dir, STEPS), everything.expected)
    assert exact_metrics(run_dir, range(1, STEPS + 1)) == everything.lines


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["nothing beside the policy", "every part"])
def test_whatever_call_it_dies_at_the_run_comes_out_the_same(
    request: pytest.FixtureRequest, name: str, tmp_path: Path
) -> None:
    if name == "every part":
        straight = request.getfixturevalue("everything")
    else:
        tiny_model, journal = (request.getfixturevalue(of) for of in ("tiny_model", "journal"))
        straight = Straight.of(tiny_model(), journal, tmp_path)
    instants, generator = _instants(straight.calls), random.Random(1)
    died = [straight.dies_at(number, instant) for number, instant in instants]
    assert sum(died) > 0.9 * len(instants)
    for _ in range(6):
        straight.dies_after(generator.uniform(0.0, straight.seconds))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_ranks_with_every_part_end_in_the_same_bits_and_train_as_one_does(
    tiny_model: ModelFactory, journal: Path, tmp_path: Path
) -> None:
    settings = EVERYTHING | {"row_tokens": 64}
    one = Straight.of(tiny_model(), journal, tmp_path / "one", **settings)
    both = {"parallel": {"num_ranks": 2, "threads": 1}}
    two = Straight.of(tiny_model(), journal, tmp_path / "two", **settings, **both)
    assert {"random_rank_0.json", "random_rank_1.json"} <= two.expected.trainer_state.keys()
    commits = [call for call in two.calls if call.target.startswith("checkpoints/step_")]
    assert two.dies_at(commits[1].number, "after")
    two.dies_after(two.seconds / 2)  # which may be behind the end, where the machine was busy before
    for mine, theirs in zip(two.lines, one.lines, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6), f"step {mine['step']}"  # sums in another order


def test_a_critic_whose_loss_breaks_ends_the_step_unpublished_and_unsaved(
    tiny_model: ModelFactory, journal: Path, tmp_path: Path
) -> None:
    trainers, settings = Trainers(tiny_model(), journal, tmp_path), EVERYTHING | {"critic": {"optim": {"lr": 1e30}}}
    run = run_trainer(trainers.prepare("broken", **settings))
    assert run.code == 3, run.log
    run_dir, log = RunDir(tmp_path / "broken"), run.trainer_log
    assert run_dir.published_weights() == [0] and run_dir.committed_steps() == []
    assert not run_dir.metrics.read_text()
    assert "error: the critic's loss is" in log and "critic.optim.lr" in log and "Traceback" not in log
