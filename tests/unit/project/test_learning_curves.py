"""The curves of `benchmarks.algorithms`: what is written, kept and summed up."""

from __future__ import annotations

from pathlib import Path

from benchmarks.algorithms.curves import Curve, read_curves, summary, write_curves
from benchmarks.algorithms.runs import NAMES
from tests.conftest import ROOT


def curve(algorithm: str, seed: int, rewards: list[float], *, first_step: int = 1) -> Curve:
    points = {first_step + place: {"reward/mean": reward} for place, reward in enumerate(rewards)}
    return Curve(algorithm, seed, points)


def test_the_table_has_mean_and_sample_std_over_seeds() -> None:
    curves = [curve("dpo", 0, [0.1, 0.4], first_step=0), curve("dpo", 1, [0.3, 0.5], first_step=0)]
    shown = summary(curves).splitlines()[1].split()
    # 0.1 and 0.3: std sqrt(2 * 0.1²); 0.4 and 0.5: sqrt(2 * 0.05²); rises 0.3 and 0.2.
    assert " ".join(shown) == "DPO 2 0.200 ± 0.141 0.450 ± 0.071 0.250 ± 0.071 0.200"


def test_a_run_takes_the_place_of_the_same_one_and_leaves_the_others(tmp_path: Path) -> None:
    old, other_seed = curve("grpo", 0, [0.1]), curve("grpo", 1, [0.2])
    other = curve("ppo", 0, [0.3])
    again = curve("grpo", 0, [0.9])
    write_curves(tmp_path / "curves.csv", [again, other, other_seed, old])
    assert read_curves(tmp_path / "curves.csv") == [again, other_seed, other]


def test_the_committed_curves_rise_for_every_seed_and_are_those_of_the_docs() -> None:
    curves = read_curves(ROOT / "benchmarks" / "algorithms" / "curves.csv")
    assert {(one.algorithm, one.seed) for one in curves} == {(name, 0) for name in NAMES}
    assert all(one.end - one.start > 0.1 for one in curves)
    assert summary(curves) in (ROOT / "docs" / "algorithms.md").read_text()
