"""`environments ls`: what an `id` may be, and the first line of each docstring."""

from __future__ import annotations

import importlib.util
import inspect

from holdfast.commands.tables import Grid, Report
from holdfast.orchestrator.environments import BUILT_IN, find_class
from holdfast.orchestrator.environments.plugins import find_plugins
from holdfast.orchestrator.environments.reasoning_gym import PREFIX
from holdfast.orchestrator.environments.verifiers_environments import PREFIX as VERIFIERS
from holdfast.shared.errors import HoldfastError
from holdfast.shared.printable import printable


def listing() -> Report:
    """Return every environment that has a name; what cannot be used says why, and stops nothing."""
    rows = [(name, "holdfast", *_about(name)) for name in BUILT_IN]
    missing = "" if importlib.util.find_spec("reasoning_gym") else "not installed: the extra 'reasoning-gym' has it"
    rows.append((f"{PREFIX}NAME", "holdfast", *_about(f"{PREFIX}NAME")[:1], missing))
    rows.append((f"{VERIFIERS}ID", "holdfast", *_about(f"{VERIFIERS}ID")[:1], ""))
    for name, plugins in find_plugins().items():
        rows += [(name, plugin.package, *_about(name)) for plugin in plugins]
    entries = [dict(zip(("id", "from", "about", "error"), row, strict=True)) for row in rows]
    shown = [
        (name, origin, " ".join(filter(None, (about, f"({error})" if error else ""))))
        for name, origin, about, error in rows
    ]
    return Report({"environments": entries}, [Grid(("id", "from", "about"), shown)])


def _about(name: str) -> tuple[str, str]:
    """Return the first line of the docstring, and why the environment cannot be used, empty where it can."""
    if ":" in name and not name.startswith((PREFIX, VERIFIERS)):
        return "", "a name with ':' is read as module:Class"
    try:
        cls = find_class(name, key="environments[0]")
    except HoldfastError as error:
        return "", printable(str(error).removeprefix("environments[0].id: "))
    lines = (inspect.getdoc(cls) or "").splitlines() if cls.__doc__ else []
    return printable(lines[0]) if lines else "", ""
