"""The process of the hooks: it calls the classes of the user, and tells rank 0 of the trainer what they ask for.

    python -m holdfast.run.hook_process <pid of rank 0> <socket>

The process has neither model nor optimizer nor random generators of the trainer, so no hook changes a bit of the run.
Rank 0 sends a line of JSON for each call, and gets a line with the replies and the states of the hooks. If the process
is killed, the next process gets the same states and the same call. Without arguments the module loads the hooks of the
settings on stdin, to check them.
"""

from __future__ import annotations

import inspect
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.config.view import HookConfig
from holdfast.errors import ConfigError, HoldfastError
from holdfast.process.child import die_with_launcher, die_with_parent, run_reporting_errors, set_up_logging
from holdfast.process.imports import calling, load_function
from holdfast.run.hooks import Hook, HookReply, StepView


def check_hooks(configs: Sequence[HookConfig]) -> None:
    """Load the class of each hook. Raise ConfigError if a class cannot be loaded, is not a hook, or does not take its
    arguments."""
    for position, config in enumerate(configs):
        _load(config, key=f"hooks[{position}]")


def _load(config: HookConfig, *, key: str) -> type[Hook]:
    found = load_function(config.type, key=f"{key}.type")
    if not inspect.isclass(found) or not issubclass(found, Hook):
        raise ConfigError(f"{key}.type = '{config.type}' is not a hook: derive a class from holdfast.Hook")
    try:
        inspect.signature(found).bind(**config.args)
    except TypeError as error:
        raise ConfigError(f"{key}.args = {config.args}: '{config.type}' does not take them: {error}") from None
    return found


class _Hooks:
    """The hooks of this process, by label. Raises TrainingError that names the hook if one fails."""

    def __init__(self, configs: Sequence[HookConfig], states: Mapping[str, Any]) -> None:
        self._configs = {config.label: config for config in configs}
        self._hooks: dict[str, Hook] = {}
        for position, config in enumerate(configs):
            kind = _load(config, key=f"hooks[{position}]")
            with self._calling(config.label, "the start"):
                hook = self._hooks[config.label] = kind(**config.args)
                if config.label in states:
                    hook.load_state_dict(states[config.label])

    def _calling(self, label: str, what: str) -> Any:
        return calling(self._configs[label].type, key=f"{what} of hook {label}")

    def call(self, methods: Sequence[str], view: StepView) -> dict[str, Any]:
        """Return what all hooks ask for together, their states, and whether one `waits` for saves."""
        waits = any(type(hook).after_save is not Hook.after_save for hook in self._hooks.values())
        answer: dict[str, Any] = {"metrics": {}, "save": False, "stop": "", "states": {}, "waits": waits}
        for method in methods:
            for label in self._hooks:
                self._add(answer, label, method, view)
        for label, hook in self._hooks.items():
            with self._calling(label, f"state_dict at step {view.step}"):
                answer["states"][label] = _plain(hook.state_dict())
        return answer

    def _add(self, answer: dict[str, Any], label: str, method: str, view: StepView) -> None:
        with self._calling(label, f"{method} at step {view.step}"):
            reply = getattr(self._hooks[label], method)(view) or HookReply()
            if not isinstance(reply, HookReply):
                raise TypeError(f"it returned {reply!r}. Allowed: None, or a holdfast.HookReply")
            if method == "after_save" and (reply.metrics or reply.save):
                raise ValueError("its reply may only have `stop`: the step is written and saved")
            named = {f"hooks/{label}/{name}": float(value) for name, value in reply.metrics.items()}
            answer["metrics"].update(named)
            answer["save"] |= bool(reply.save)
            answer["stop"] = answer["stop"] or (reply.stop and f"{label}: {reply.stop}")


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as it is read back from JSON. Raise TypeError if that is something else."""
    back = json.loads(json.dumps(state))
    if repr(back) != repr(state):  # such as tuples, and keys that are numbers
        raise TypeError(
            f"the state {state!r} would come back as {back!r}. Allowed: numbers, texts, None, and lists and dicts of "
            "them with text as keys"
        )
    return back


def _answer(hooks: _Hooks | None, request: dict[str, Any]) -> tuple[_Hooks, dict[str, Any]]:
    if hooks is None:
        return _Hooks([HookConfig(**one) for one in request["hooks"]], request["states"]), {}
    view = request["view"] | {"run": Path(request["view"]["run"])}
    if view["checkpoint"] is not None:
        view["checkpoint"] = Path(view["checkpoint"])
    return hooks, hooks.call(request["methods"], StepView(**view))


def _serve(connection: socket.socket) -> None:
    """Answer until rank 0 closes the connection."""
    hooks = None
    with connection.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            try:
                hooks, answer = _answer(hooks, json.loads(line))
            except HoldfastError as error:
                answer = {"failed": str(error)}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


def _main(arguments: Sequence[str]) -> None:
    if not arguments:
        die_with_launcher()
        configs = json.load(sys.stdin)["hooks"]
        run_reporting_errors(lambda: check_hooks([HookConfig(**one) for one in configs]))
    parent, descriptor = map(int, arguments)
    die_with_parent(parent=parent)
    set_up_logging("hooks")
    run_reporting_errors(lambda: _serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    _main(sys.argv[1:])
