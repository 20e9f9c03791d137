"""The commands: `sft`, `dpo`, `reward-model`, `rl`, `trainer`, `orchestrator`, `inference`, `ckpt`, `rollouts`.

Each parses its configuration before anything heavy is imported, so `--help` and errors come at
once, and then hands over to the launcher, which starts the processes. Nothing is imported above the functions that
Python has not imported at its start: files of the user may come before everything until `_exit`.
"""

from __future__ import annotations

import sys

from holdfast.shared.process.run_module import put_users_last

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from holdfast.shared.config.base import Command


def _run(program: str, choose: Callable[[], tuple[type[Command], Callable[..., int]]]) -> NoReturn:
    """Parse the command line into the configuration that `choose` returns, and launch with its function."""

    def run() -> int:
        command, launch = choose()
        from holdfast.shared.config.load import parse_command_line

        return launch(parse_command_line(command, sys.argv[1:], program=program))

    _exit(run)


def _exit(run: Callable[[], int]) -> NoReturn:
    """Exit with the code that `run` returns, or that of its error."""
    put_users_last()
    import io
    import os
    import signal

    from holdfast.commands.installation import correct_wheel_label
    from holdfast.shared.errors import HoldfastError

    correct_wheel_label()
    for stream in (sys.stdout, sys.stderr):  # names of files that the locale, or UTF-8, has no characters for
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = run()
        sys.stdout.flush()
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `... | head`: whoever read has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(
            f"error: {error.strerror or error}{where}. Check permissions and free space there, or choose another "
            "directory with --output-dir.",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(code)


def sft() -> NoReturn:
    """Supervised fine-tuning."""
    _train("sft", "SftConfig")


def dpo() -> NoReturn:
    """Preference optimisation: DPO, IPO, SimPO, ORPO."""
    _train("dpo", "DpoConfig")


def reward_model() -> NoReturn:
    """Training of a reward model."""
    _train("reward-model", "RewardTrainingConfig")


def trainer() -> NoReturn:
    """The trainer of an RL run, alone: for runs spread over machines."""
    _train("rl", "TrainerConfig", name="trainer")


def _train(program: str, configuration: str, *, name: str = "") -> NoReturn:
    def choose() -> tuple[type[Command], Callable[..., int]]:
        from holdfast.commands.launcher.launch import launch_training
        from holdfast.shared import config

        return getattr(config, configuration), lambda parsed: launch_training(program, parsed)

    _run(name or program, choose)


def rl() -> NoReturn:
    """An RL run: trainer, orchestrator and inference server together."""

    def choose() -> tuple[type[Command], Callable[..., int]]:
        from holdfast.commands.launcher.launch import launch_rl
        from holdfast.shared.config.rl import RlConfig

        return RlConfig, launch_rl

    _run("rl", choose)


def orchestrator() -> NoReturn:
    """The orchestrator of an RL run, alone."""

    def choose() -> tuple[type[Command], Callable[..., int]]:
        from holdfast.commands.launcher.launch import launch_orchestrator
        from holdfast.shared.config.orchestrator import OrchestratorConfig

        return OrchestratorConfig, launch_orchestrator

    _run("orchestrator", choose)


def inference() -> NoReturn:
    """The inference server, alone; `rl` uses one that already answers."""

    def choose() -> tuple[type[Command], Callable[..., int]]:
        from holdfast.commands.launcher.launch import launch_inference
        from holdfast.shared.config.inference import InferenceConfig

        return InferenceConfig, launch_inference

    _run("inference", choose)


def ckpt() -> NoReturn:
    """Checkpoints: list, verify, show, compare, export, thin out, import."""

    def run() -> int:
        from holdfast.commands.ckpt.main import main

        return main(sys.argv[1:])

    _exit(run)


def rollouts() -> NoReturn:
    """Rollouts in the journal: show, statistics, export."""

    def run() -> int:
        from holdfast.commands.rollouts.main import main

        return main(sys.argv[1:])

    _exit(run)
