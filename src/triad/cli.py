"""The commands: `sft`, `dpo`, `rm`, `rl`, `trainer`, `orchestrator`, `inference`, `ckpt`, `rollouts`.

Each parses its configuration before anything heavy is imported, so `--help` and errors come at
once, and then hands over to the launcher, which starts the processes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from triad.config.base import Command
from triad.errors import TriadError

C = TypeVar("C", bound=Command)


def _run(program: str, command: type[C], launch: Callable[[C], int]) -> NoReturn:
    from triad.config.load import parse_command_line

    _exit(lambda: launch(parse_command_line(command, sys.argv[1:], program=program)))


def _exit(run: Callable[[], int]) -> NoReturn:
    """Exit with the code that `run` returns, or that of its error."""
    try:
        code = run()
    except TriadError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
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
    from triad.config.trainer import SftConfig
    from triad.launch import launch_training

    _run("sft", SftConfig, lambda config: launch_training("sft", config))


def dpo() -> NoReturn:
    """Preference optimisation: DPO, IPO, SimPO, ORPO."""
    from triad.config.dpo import DpoConfig
    from triad.launch import launch_training

    _run("dpo", DpoConfig, lambda config: launch_training("dpo", config))


def rm() -> NoReturn:
    """Training of a reward model."""
    from triad.config.rm import RmConfig
    from triad.launch import launch_training

    # In an activated environment it comes before the command that removes files.
    if any(not word.startswith(("@", "--", "-h")) for word in sys.argv[1:2]):
        print(f"error: {sys.argv[0]} trains reward models; /bin/rm removes files", file=sys.stderr)
        sys.exit(2)
    _run("rm", RmConfig, lambda config: launch_training("rm", config))


def trainer() -> NoReturn:
    """The trainer of an RL run, alone: for runs spread over machines."""
    from triad.config.rl_trainer import TrainerConfig
    from triad.launch import launch_training

    _run("trainer", TrainerConfig, lambda config: launch_training("rl", config))


def rl() -> NoReturn:
    """An RL run: trainer, orchestrator and inference server together."""
    from triad.config.rl import RlConfig
    from triad.launch import launch_rl

    _run("rl", RlConfig, launch_rl)


def orchestrator() -> NoReturn:
    """The orchestrator of an RL run, alone."""
    from triad.config.orchestrator import OrchestratorConfig
    from triad.launch import launch_orchestrator

    _run("orchestrator", OrchestratorConfig, launch_orchestrator)


def inference() -> NoReturn:
    """The inference server, alone; `rl` uses one that already answers."""
    from triad.config.inference import InferenceConfig
    from triad.launch import launch_inference

    _run("inference", InferenceConfig, launch_inference)


def ckpt() -> NoReturn:
    """Checkpoints: list, verify, show, compare, export, thin out, import."""
    from triad.ckpt.main import main

    _exit(lambda: main(sys.argv[1:]))


def rollouts() -> NoReturn:
    """Rollouts in the journal: show, statistics, export."""
    from triad.rollouts_cli import main

    _exit(lambda: main(sys.argv[1:]))


def chaos() -> NoReturn:
    """Kill and stop the processes of a real rl run at random, and check that nothing shows in the end."""
    if not Path("tests/chaos/__main__.py").is_file():
        print("error: chaos runs the checks of a checkout: call it in the repository's root", file=sys.stderr)
        sys.exit(2)
    os.execv(sys.executable, [sys.executable, "-m", "tests.chaos", *sys.argv[1:]])
