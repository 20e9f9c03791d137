"""Post-training for language models that survives being killed at any moment.

The names below are the ones to import: `from holdfast import Environment, Score`. Each is loaded when it is first
asked for, so `import holdfast` costs nothing, and what is around an environment does without torch.

runs          the commands as functions of Python
cli           what is typed at a prompt
commands      what people type beside training: `ckpt`, `rollouts`, `environments`, `evaluate`
launcher      starts the processes of a run, watches them, decides where an attempt resumes
view          the state of a run: console, `monitor`, `report`, experiment trackers
trainer       the process that trains, and checkpoints for any training loop
orchestrator  the process that samples rollouts, scores them and makes batches
inference     the process that serves the policy
remote, chat  checkpoints in an object store; messages, chat templates and tokens
run           a run on disk: atomic writes, journal, checkpoints, locks
config        the settings
protocol      what goes over the wire
process       child processes, heartbeats, GPUs
errors        the exceptions and their exit codes
"""

# A user's files may come before everything: nothing is imported here that Python has not imported at its start.
# Type checkers read `__init__.pyi`.
_NAMES_OF = {
    "view.tracker": ("TrackedRun", "Tracker"),
    "orchestrator.env.harness": ("Endpoint", "HarnessEnvironment"),
    "orchestrator.env.interface": ("Environment", "Score", "Session", "SessionFull", "Task"),
    "orchestrator.env.judge": ("Judge", "Judgement"),
    "orchestrator.judge_client": ("judging",),
    "orchestrator.state": ("TaskSeed",),
    "chat.messages": ("Message",),
    "chat.tokenizer": ("Tokenizer", "load_tokenizer"),
    "config.environments": ("JudgeConfig",),
    "config.policy_losses": ("PolicyLossConfig",),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "HoldfastError",
        "ProcessKilled",
        "RankLost",
        "ReadError",
        "SaveError",
    ),
    "run.checkpoints": ("BestMetric", "Retention"),
    "run.hooks": ("Hook", "HookReply", "StepView"),
    "run.metrics": ("read_metrics",),
    "runs": ("Rows", "Run", "RunFailed", "dpo", "evaluate", "open_run", "reward_model", "rl", "sft"),
    "protocol.rollouts": ("Logprobs", "TokenIds"),
    "protocol.inference": ("Completion",),
    "trainer.checkpoint.checkpointer": ("Checkpointer", "load_state_with_optimizer", "save_state"),
    "trainer.checkpoint.state": ("module_tensors",),
    "trainer.checkpoint.init_from": ("load_weights_only",),
    "trainer.rl.advantages": ("grpo",),
    "trainer.rl.token_rewards": ("ScoredRollout",),
    "trainer.rl.losses": ("PolicyLossInput", "build_policy_loss"),
}
__all__ = [name for names in _NAMES_OF.values() for name in names]  # pyright: ignore[reportUnsupportedDunderAll] - see the stub


def __getattr__(name: str) -> object:
    """Load a name of `__all__`, once, and `__version__`; `open` is short for `open_run`."""
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    if name == "open":
        return __getattr__("open_run")
    for module, names in _NAMES_OF.items():
        if name in names:
            from importlib import import_module

            value = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> "list[str]":
    """Return the names of the face beside the module's own."""
    return sorted({*globals(), *__all__})
