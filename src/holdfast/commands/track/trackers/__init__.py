"""The trackers that a run may be sent to, and how one of the user's own is found."""

from __future__ import annotations

import importlib.util
import inspect

from holdfast.commands.track.trackers.interface import TrackedRun, Tracker
from holdfast.shared.errors import ConfigError
from holdfast.shared.user_functions import load_built_in, load_function

# Name of the setting -> our class, the module that must be installed, and the extra that installs it.
BUILT_IN = {
    "tensorboard": ("tensorboard:TensorBoard", ("tensorboard",)),
    "wandb": ("wandb:WandB", ("wandb",)),
    "mlflow": ("mlflow:MLflow", ("mlflow",)),
    "trackio": ("trackio:Trackio", ("trackio",)),
}


def check_tracker(name: str, *, key: str) -> None:
    """Check that a tracker can be used, as far as that can be told without a network.

    Raises:
        ConfigError: its package is not installed, or the user's class cannot be loaded.
    """
    if name not in BUILT_IN:
        load_tracker(name, key=key)
        return
    for module in BUILT_IN[name][1]:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{key}: '{name}' needs the package {module}, which is not installed: `uv sync --extra {name}` in a "
                f"checkout, or `uv pip install 'holdfast[{name}]'`"
            )


def load_tracker(name: str, *, key: str) -> type[Tracker]:
    """Return the class of a tracker, built in or the user's.

    Raises:
        ConfigError: the user's cannot be loaded, or is none.
    """
    if name in BUILT_IN:
        return load_built_in(BUILT_IN[name][0], package=__name__)  # pyright: ignore[reportReturnType] - a class
    found = load_function(name, key=key)
    if not inspect.isclass(found) or not issubclass(found, Tracker):
        raise ConfigError(f"{key}: '{name}' is no tracker: derive a class from holdfast.Tracker, see docs/tracking.md")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{key}: '{name}' lacks {', '.join(missing)}, see docs/tracking.md")
    return found


__all__ = ["BUILT_IN", "TrackedRun", "Tracker", "check_tracker", "load_tracker"]
