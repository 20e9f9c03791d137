"""From the command line to an evaluation, or to a comparison of two."""

from __future__ import annotations

from pathlib import Path

from holdfast.commands.subcommands import Parser
from holdfast.shared.config.evaluation import EvaluateConfig
from holdfast.shared.config.load import parse_command_line
from holdfast.shared.process.child import make_output_lossy

_COMPARE = "--compare"


def main(argv: list[str]) -> int:
    """Run `evaluate`; return its exit code.

    Raises:
        HoldfastError: a mistake on the command line, or what ended the evaluation.
    """
    if any(word.split("=")[0] == _COMPARE for word in argv):
        return _compare(argv)
    config = parse_command_line(EvaluateConfig, argv, program="evaluate")
    from holdfast.commands.evaluate.launch import launch

    if not config.dry_run:
        make_output_lossy()  # the results are in files
    if config.log_format == "text":
        return launch(config)
    from holdfast.commands.live.output import run_in_json_lines

    return run_in_json_lines(lambda: launch(config))


def _compare(argv: list[str]) -> int:
    parser = Parser(prog="evaluate", allow_abbrev=False, description="Show two evaluations of the same tasks.")
    parser.add_argument(_COMPARE, nargs=2, type=Path, metavar=("A", "B"), required=True, help="their directories")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the intervals (0.95)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    arguments = parser.parse_args(argv)
    if not 0.5 < arguments.confidence < 1:
        parser.error(f"--confidence {arguments.confidence:g} is not between 0.5 and 1")
    from holdfast.commands.evaluate.report import comparison_report
    from holdfast.orchestrator.evaluation.comparison import compare

    first, second = arguments.compare
    report = comparison_report(compare(first, second, confidence=arguments.confidence), first, second)
    report.print(as_json=arguments.json)
    return 0
