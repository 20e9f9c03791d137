"""The command `evaluate`: evaluates one policy, follows a run, or compares two evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.arguments import Parser

if TYPE_CHECKING:
    from holdfast.config.evaluation import EvaluateConfig


def launch(config: EvaluateConfig) -> int:
    """Evaluate as `config` says; return the exit code. Raise HoldfastError for settings that cannot be used, or what
    ended the evaluation."""
    if config.follow:
        from holdfast.launcher.evaluation.follow import follow

        return follow(config)
    from holdfast.launcher.evaluation.policy import evaluate

    return evaluate(config)


def compare(argv: list[str]) -> int:
    """Be `evaluate --compare A B`; return the exit code. Raise HoldfastError for a mistake, or damaged evaluations."""
    parser = Parser(prog="evaluate", description="Show two evaluations of the same tasks.")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), required=True, help="their directories")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the intervals (0.95)")
    parser.add_argument(
        "--answers",
        type=int,
        default=0,
        metavar="N",
        help="show what both said to N tasks of each environment, 500 characters at most; --json has all (0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    arguments = parser.parse_args(argv)
    if not 0.5 < arguments.confidence < 1:
        parser.error(f"--confidence {arguments.confidence:g} is not between 0.5 and 1")
    if arguments.answers < 0:
        parser.error(f"--answers {arguments.answers} is below 0")
    from holdfast.launcher.evaluation.policy import comparison_report
    from holdfast.orchestrator.evaluation import statistics

    first, second = arguments.compare
    found = statistics.compare(first, second, confidence=arguments.confidence, answers=arguments.answers)
    report = comparison_report(found, first, second)
    report.print(as_json=arguments.json)
    return 0
