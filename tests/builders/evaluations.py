"""Finished evaluations of a run, as files."""

from typing import Any

from holdfast.orchestrator.evaluation.statistics import EnvironmentSummary, Estimate, Summary
from holdfast.run.run_dir import RunDir


def evaluated(run_dir: RunDir, step: int) -> None:
    """Leave a finished evaluation of `step`, whose values rise with it; one environment dropped all its tasks."""
    estimates = {name: Estimate(step / 10, step / 10 - 0.1, step / 10 + 0.1) for name in ("avg@2", "pass@2")}
    rest: dict[str, Any] = {"metrics": {}, "truncated": 0.0, "sampled_tokens": None}
    one = EnvironmentSummary(num_tasks=5, dropped={}, estimates=estimates, **rest)
    none = EnvironmentSummary(num_tasks=0, dropped={"crash": 5}, estimates={}, **rest)
    alone = EnvironmentSummary(
        num_tasks=1, dropped={}, estimates={"avg@2": Estimate(0.5, None, None)}, metrics={}, truncated=0.0,
        sampled_tokens=None,
    )  # fmt: skip
    environments = {"a $x": one, "none": none, "alone": alone}
    summary = Summary(policy={"kind": "weights"}, tasks={"seed": 0}, confidence=0.95, environments=environments)
    directory = run_dir.evaluation(step)
    directory.mkdir(parents=True)
    (directory / "summary.json").write_bytes(summary.encode())
