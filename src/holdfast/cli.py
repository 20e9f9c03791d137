"""The commands: one table, from which come `holdfast NAME ...`, the console script of every name, and the help.

Each parses its command line before anything heavy is imported, so `--help` and errors come at once. Commands that start
something then hand their configuration over to the launcher. Nothing is imported above the functions that Python has
not imported at its start: files of the user may come before everything until `_exit`.
"""

from __future__ import annotations

import sys

from holdfast.process.run_module import end_output, open_closed_streams, put_users_last

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

# Name -> what it does; the module and the function that do it; the class in `holdfast.config` that its
# command line is read into. Without a class, the function gets the words. It returns the exit code.
# A line here is a command of `holdfast`; a line in [project.scripts] of pyproject.toml, one by its bare name as well.
COMMANDS = {
    "sft": ("Supervised fine-tuning.", "launcher.launch:launch_training", "SftConfig"),
    "dpo": ("Preference optimisation: DPO, IPO, SimPO, ORPO.", "launcher.launch:launch_training", "DpoConfig"),
    "reward-model": ("Training of a reward model.", "launcher.launch:launch_training", "RewardTrainingConfig"),
    "rl": ("An RL run: trainer, orchestrator and inference server together.", "launcher.launch:launch_rl", "RlConfig"),
    "trainer": (
        "The trainer of an RL run, alone: for runs spread over machines.",
        "launcher.launch:launch_training",
        "TrainerConfig",
    ),
    "orchestrator": (
        "The orchestrator of an RL run, alone.",
        "launcher.launch:launch_orchestrator",
        "OrchestratorConfig",
    ),
    "inference": (
        "The inference server, alone; `rl` uses one that already answers.",
        "launcher.launch:launch_inference",
        "InferenceConfig",
    ),
    "evaluate": (
        "How good a policy is on held-out tasks; `--compare A B`: two side by side.",
        "commands.evaluate:launch",
        "EvaluateConfig",
    ),
    "ckpt": ("Checkpoints: list, verify, show, export, import, prune; what takes space.", "commands.ckpt:main", None),
    "chat": ("Talk to a model, or to the newest weights of a run.", "commands.chat:main", None),
    "environments": ("Environments: list, begin one, check one.", "commands.environments:main", None),
    "monitor": ("What runs are doing, from their files alone.", "view.monitor:main", None),
    "track": ("Send a run to experiment trackers, or what they lack of it.", "view.track:main", None),
    "rollouts": ("Rollouts in the journal: show, statistics, export.", "commands.rollouts:main", None),
    "report": ("One page of what runs did: curves, timeline, evaluations, rollouts.", "view.report:main", None),
}
# Commands of TRL and vLLM.
_ELSEWHERE = {"grpo": "rl", "rloo": "rl", "ppo": "rl", "kto": "dpo", "reward": "reward-model", "eval": "evaluate"}
_ELSEWHERE |= {"serve": "inference", "vllm-serve": "inference"}


def main() -> NoReturn:
    """Be `holdfast NAME ...`, which is the same as the command NAME."""
    _exit(lambda: dispatch(sys.argv[1:]))


def __getattr__(name: str) -> Callable[[], NoReturn]:
    """Return the function of a console script: `reward_model` for `reward-model`."""
    command = name.replace("_", "-")
    if command not in COMMANDS or "-" in name:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return lambda: _exit(lambda: run(command, sys.argv[1:]))


def dispatch(argv: list[str]) -> int:
    """Run the command that the first word names, or list the commands; return the exit code. Raise ConfigError
    with the nearest spelling if the command is unknown."""
    name = argv[0] if argv else "--help"
    if name == "help" and len(argv) > 1:
        return dispatch([argv[1], "--help", *argv[2:]])
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name == "--version":
        from importlib.metadata import version

        print(f"holdfast {version('holdfast')}")
        return 0
    if name not in COMMANDS:
        from holdfast.errors import ConfigError, nearest

        said = f" Here that is `{_ELSEWHERE[name]}`." if name in _ELSEWHERE else nearest(name, COMMANDS)
        raise ConfigError(f"unknown command '{name}'.{said} There are: {', '.join(COMMANDS)}.")
    return run(name, argv[1:])


def run(name: str, argv: list[str]) -> int:
    """Run one command; return its exit code. Raise HoldfastError for a mistake in its words, or what stopped it."""
    from importlib import import_module

    summary, function, configuration = COMMANDS[name]
    if name == "evaluate" and any(word.partition("=")[0] == "--compare" for word in argv):
        function, configuration = "commands.evaluate:compare", None
    module, _, attribute = function.partition(":")
    if configuration is None:
        return getattr(import_module(f"holdfast.{module}"), attribute)(argv)
    from holdfast.config import help

    if help.is_asked(argv):
        print(help.text(name, summary, argv))
        return 0
    from holdfast.config.given import check_given
    from holdfast.config.load import parse_command_line

    parsed = parse_command_line(getattr(import_module("holdfast.config"), configuration), argv, name)
    check_given(name, parsed)
    if not parsed.dry_run:
        from holdfast.process.child import make_output_lossy

        make_output_lossy()  # a run continues if its output cannot be written
    # After parsing: this import takes a second, and a mistake on the command line needs none of it.
    act: Callable[[Any], int] = getattr(import_module(f"holdfast.{module}"), attribute)

    def action() -> int:
        if parsed.variables:
            from holdfast.run.settings import describe_variables

            print("\n".join(describe_variables(parsed)))
        return act(parsed)

    if getattr(parsed, "log_format", "text") == "text":
        return action()
    from holdfast.view.console import run_in_json_lines

    return run_in_json_lines(action)


def _help() -> str:
    lines = [f"  {name:<14}{summary}" for name, (summary, _, _) in COMMANDS.items()]
    head = ["usage: holdfast COMMAND ...", "", "Post-training that survives being killed at any moment.", ""]
    return "\n".join(
        [
            *head,
            *lines,
            "",
            "`holdfast COMMAND --help` shows the settings of a command; `holdfast --version` the version.",
        ]
    )


def _exit(run: Callable[[], int]) -> NoReturn:
    """Exit with the code that `run` returns, or the code of its error."""
    put_users_last()
    open_closed_streams()
    import signal

    from holdfast.errors import HoldfastError
    from holdfast.process.child import OUTPUT, make_output_lossy, name_output

    make_output_lossy("stderr")  # an unreadable error keeps its exit code
    name_output()
    try:
        try:
            code = run()
        except SystemExit as end:  # `--help`
            code = end.code
        sys.stdout.flush()
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:  # `... | head`: the reader has had enough
        code = 128 + signal.SIGPIPE
    except OSError as error:
        told = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}. Check permissions and "
        told += "free space there, or choose another directory."
        if error.filename == OUTPUT:
            told = f"the output cannot be written: {error.strerror}. Free space there, or redirect it elsewhere."
        print(f"error: {told}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    end_output()
    sys.exit(code)
