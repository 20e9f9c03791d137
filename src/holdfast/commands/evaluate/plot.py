"""`evaluate --plot`: the evaluations of a run over its steps, as a table and as a picture."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.commands.evaluate.report import interval_of
from holdfast.commands.tables import Grid, Report, number
from holdfast.orchestrator.environments.extras import import_extra
from holdfast.orchestrator.evaluation.summary import EnvironmentSummary, Summary, summary_in
from holdfast.shared.errors import ConfigError, DataError
from holdfast.shared.files.run_dir import SUMMARY_NAME

FORMATS = (".png", ".svg", ".pdf")
_STEP = re.compile(r"step_(\d+)$")


@dataclass(frozen=True)
class EvaluatedSteps:
    """Evaluations of one run that can stand in one curve.

    Attributes:
        steps: finished ones of the same tasks, by step, ascending.
        others: steps whose evaluation asked something else, or in another way, than that of the last one.
    """

    steps: dict[int, Summary]
    others: list[int]

    @property
    def environments(self) -> list[str]:
        """Their names."""
        return list(next(iter(self.steps.values())).environments)

    def of(self, environment: str) -> dict[int, EnvironmentSummary]:
        """Return what came of one environment, by step."""
        return {step: summary.environments[environment] for step, summary in self.steps.items()}


def read_steps(directory: Path) -> EvaluatedSteps:
    """Return the finished evaluations of a run directory, or of a directory with evaluations of steps.

    Raises:
        DataError: there are none, or one is damaged.
    """
    place = directory / "evaluations" if (directory / "evaluations").is_dir() else directory
    matches = [(path, _STEP.match(path.name)) for path in place.glob("step_*") if (path / SUMMARY_NAME).exists()]
    found = {int(match[1]): summary_in(path) for path, match in matches if match}
    if not found:
        raise DataError(
            f"{place} holds no finished evaluations (step_N/{SUMMARY_NAME}): --plot takes the directory of a run that "
            "was evaluated (--eval.interval, evaluate --follow)"
        )
    asked = found[max(found)].tasks
    alike = {step: found[step] for step in sorted(found) if found[step].tasks == asked}
    return EvaluatedSteps(alike, sorted(set(found) - set(alike)))


def steps_report(found: EvaluatedSteps, picture: Path | None) -> Report:
    """Return the report: a line for each environment and step, a column for each estimate."""
    every = [one for environment in found.environments for one in found.of(environment).values()]
    names = list(dict.fromkeys(name for one in every for name in one.estimates))
    rows: list[tuple[str, ...]] = []
    for environment in found.environments:
        for step, one in found.of(environment).items():
            estimates = [one.estimates.get(name) for name in names]
            cells = ["-" if each is None else f"{number(each.value)} {interval_of(each)}" for each in estimates]
            rows.append((environment, str(step), str(one.num_tasks), *cells))
    parts: list[Grid | str] = [Grid(("environment", ">step", ">tasks", *names), rows)]
    if found.others:
        shown = ", ".join(map(str, found.others))
        parts.append(f"left out, as they were asked otherwise than the last one: steps {shown}")
    if picture is not None:
        parts.append(f"picture: {picture}")
    document = {
        "steps": {str(step): msgspec.to_builtins(summary) for step, summary in found.steps.items()},
        "left_out": found.others,
    }
    return Report(document, parts)


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is read.

    Raises:
        ConfigError: its format is none of `FORMATS`, or what draws is not installed.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"--output {path}: a picture ends with {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no directory {path.parent}")
    import_extra("matplotlib", extra="plot", needed_by="evaluate --plot")


def draw(found: EvaluatedSteps, path: Path) -> None:
    """Draw every estimate by step with its interval, a panel for each environment.

    Raises:
        DataError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    environments = found.environments
    figure = Figure(figsize=(4.8 * len(environments), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(environments), squeeze=False)[0]
    for panel, environment in zip(panels, environments, strict=True):
        of_steps = found.of(environment)
        for name in dict.fromkeys(name for one in of_steps.values() for name in one.estimates):
            estimates = {step: one.estimates[name] for step, one in of_steps.items() if name in one.estimates}
            steps = list(estimates)
            [line] = panel.plot(steps, [one.value for one in estimates.values()], marker="o", markersize=3, label=name)
            lows = [one.value if one.low is None else one.low for one in estimates.values()]
            highs = [one.value if one.high is None else one.high for one in estimates.values()]
            panel.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
        panel.set_title(environment, fontsize=10, parse_math=False)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DataError(f"--output {path} cannot be written: {error.strerror or error}") from None


def plot(directory: Path, picture: Path | None) -> Report:
    """Return what `--plot` shows, with the picture drawn if one is asked for.

    Raises:
        ConfigError, DataError: as of the parts.
    """
    if picture is not None:
        check_picture(picture)
    found = read_steps(directory)
    if picture is not None:
        draw(found, picture)
    return steps_report(found, picture)
