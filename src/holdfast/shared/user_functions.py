"""Functions that a setting names: losses and advantages, the user's as `module:function` and built-in ones."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from holdfast.shared.errors import ConfigError, TrainingError, nearest
from holdfast.shared.process.import_path import import_users


def check_name(name: str, built_in: Iterable[str]) -> str:
    """Return `name` if it is one of `built_in` or has the form `module:function`.

    Raises:
        ValueError: it is neither, with what is allowed.
    """
    allowed = tuple(built_in)
    module_name, colon, function_name = name.partition(":")
    if name in allowed or (colon and module_name and function_name.isidentifier()):
        return name
    raise ValueError(
        f"there is no '{name}'.{nearest(name, allowed)} Allowed: {', '.join(allowed)}, "
        "or 'module:function' for one of your own"
    )


def load_built_in(function: str, *, package: str) -> Callable[..., Any]:
    """Return the function that a table of `holdfast.shared.config.registry` names as `module:function` in `package`."""
    module_name, _, function_name = function.partition(":")
    return getattr(import_module(f"{package}.{module_name}"), function_name)


def load_function(name: str, *, key: str) -> Callable[..., Any]:
    """Return the function that `name`, `module:function`, stands for; `key` is its dotted key, for messages.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = import_users(module_name)
    except ConfigError as error:
        raise ConfigError(f"{key} = {error}") from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key} = '{name}': there is no module '{error.name}'. It must be importable from where the run is "
            "started: check the spelling, or set PYTHONPATH."
        ) from None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} = '{name}': importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        there = [label for label, value in vars(module).items() if callable(value) and not label.startswith("_")]
        raise ConfigError(
            f"{key} = '{name}': {module_name} has no function '{function_name}'.{nearest(function_name, there)}"
        )
    return function


def load_loss(name: str, args: dict[str, Any]) -> Callable[..., Any]:
    """Return the loss that `name` stands for.

    Raises:
        ConfigError: it cannot be loaded, or not be called as `function(data, **args)`.
    """
    function = load_function(name, key="loss.type")
    try:
        inspect.signature(function).bind(None, **args)
    except TypeError as error:
        raise ConfigError(f"loss.args = {args}: '{name}' cannot be called as function(data, **args): {error}") from None
    return function


@contextmanager
def calling(name: str, *, key: str, unless: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what the user's function `name` raises into an error that says where in its module that was.

    Args:
        unless: errors that are not the function's own; they are left as they are.

    Raises:
        TrainingError: it raised; a start after that would end in the same way.
    """
    try:
        yield
    except unless:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
        frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
        raise TrainingError(
            f"{key} = '{name}' failed: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        ) from error
