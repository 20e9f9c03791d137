"""Finds the class of a tracker by its name in `tracking.backends`: built in, or the user's."""

from __future__ import annotations

import importlib.util
import inspect

from holdfast.errors import ConfigError
from holdfast.process.imports import load_function
from holdfast.view.tracker import Tracker

BUILT_IN = {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow", "trackio": "Trackio",
            "prometheus": "Prometheus"}  # fmt: skip
"""Name in `tracking.backends` -> class in `holdfast.view.backends`. The package to install has the same name."""
_INSTALLED = ("prometheus",)


def check_tracker(name: str, *, key: str) -> None:
    """Check that a tracker can be used, as far as that can be told without a network. Raise ConfigError if its package
    is not installed, or the user's class cannot be loaded."""
    if name not in BUILT_IN:
        load_tracker(name, key=key)
    elif name not in _INSTALLED and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"{key}: '{name}' needs the package {name}, which is not installed: "
            f"`uv sync --inexact --extra {name}` in a checkout, or `uv pip install 'holdfast[{name}]'`"
        )


def load_tracker(name: str, *, key: str) -> type[Tracker]:
    """Return the class of a tracker, built in or the user's. Raise ConfigError if the user's class cannot be loaded, or
    is not a tracker."""
    if name in BUILT_IN:
        from holdfast.view import backends

        return getattr(backends, BUILT_IN[name])
    found = load_function(name, key=key)
    if not inspect.isclass(found) or not issubclass(found, Tracker):
        raise ConfigError(
            f"{key}: '{name}' is not a tracker: derive a class from holdfast.Tracker, see docs/console.md"
        )
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{key}: '{name}' lacks {', '.join(missing)}, see docs/console.md")
    return found
