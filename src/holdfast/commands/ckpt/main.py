"""From the command line to one action, its report and an exit code."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.commands.ckpt.arguments import parse
from holdfast.commands.ckpt.change import export, import_weights, promote, prune
from holdfast.commands.ckpt.checkpoint_dirs import CheckpointDirs
from holdfast.commands.ckpt.inspecting import show, verify
from holdfast.commands.ckpt.listing import ls
from holdfast.commands.ckpt.tensor_work import TensorWorkFailed
from holdfast.commands.tables import Report

_ACTIONS: dict[str, Callable[..., Report]] = {
    "ls": ls,
    "verify": verify,
    "show": show,
    "export": export,
    "promote": promote,
    "prune": prune,
    "import": import_weights,
}


def main(argv: list[str]) -> int:
    """Run one subcommand; return 0, 1 when something is wrong with a checkpoint, or a failure's code.

    Raises:
        HoldfastError: a mistake in the command, or something that is missing or damaged.
    """
    arguments = vars(parse(argv))
    action = _ACTIONS[arguments.pop("command")]
    as_json = arguments.pop("json")
    dirs = CheckpointDirs(arguments.pop("output_dir"))
    try:
        report = action(dirs, **arguments)
    except TensorWorkFailed as failure:
        return failure.exit_code
    report.print(as_json=as_json)
    return report.exit_code
