"""Built-in environments, and how an environment of the config is loaded."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, get_type_hints

import pydantic

from holdfast.orchestrator.environments.calls import place_of
from holdfast.orchestrator.environments.interface import Environment
from holdfast.orchestrator.environments.reasoning_gym import PREFIX, ReasoningGym
from holdfast.shared.config.orchestrator import EnvironmentConfig
from holdfast.shared.errors import ConfigError, EnvironmentFailure, HoldfastError, nearest
from holdfast.shared.printable import printable
from holdfast.shared.process.import_path import import_users

BUILT_IN = {
    "reverse_text": "holdfast.orchestrator.environments.reverse_text:ReverseText",
    "sort_letters": "holdfast.orchestrator.environments.sort_letters:SortLetters",
    "addition": "holdfast.orchestrator.environments.addition:Addition",
    "guess_number": "holdfast.orchestrator.environments.guess_number:GuessNumber",
    "ledger": "holdfast.orchestrator.environments.ledger:Ledger",
    "python_code": "holdfast.orchestrator.environments.python_code:PythonCode",
    "jsonl": "holdfast.orchestrator.environments.jsonl:Jsonl",
}


def is_built_in(name: str) -> bool:
    """Whether an id names an environment of holdfast's own, whose constructor starts nothing and may be called."""
    return name in BUILT_IN or name.startswith(PREFIX)


def load_environment(config: EnvironmentConfig, *, key: str) -> Environment:
    """Return the environment that `config` describes; `key` is its dotted key, for messages.

    Raises:
        ConfigError: there is no such environment, or its arguments do not fit.
        EnvironmentFailure: its module or its constructor raised.
    """
    cls, args = find_environment(config, key=key)
    try:
        return cls(**args)
    except HoldfastError:
        raise
    except BaseException as error:
        raise EnvironmentFailure(
            f"environment '{config.label}' ({config.id}) failed in its constructor: {type(error).__name__}: "
            f"{printable(error)} ({place_of(error)})"
        ) from error


def find_environment(config: EnvironmentConfig, *, key: str) -> tuple[type[Environment], dict[str, Any]]:
    """Return the class that `config` names and the checked arguments of its constructor, which is not called.

    Raises:
        ConfigError: there is no such environment, or its arguments do not fit.
        EnvironmentFailure: its module raised.
    """
    if config.id.startswith(PREFIX):
        return ReasoningGym, {"generator": config.id.removeprefix(PREFIX), "settings": config.args}
    cls = _find_class(config.id, key)
    return cls, _checked_args(cls, config.args, key)


def _find_class(name: str, key: str) -> type[Environment]:
    if ":" not in name and name not in BUILT_IN:
        raise ConfigError(
            f"{key}.id: there is no environment '{name}'.{nearest(name, BUILT_IN)} "
            f"Allowed: {', '.join(BUILT_IN)}, '{PREFIX}NAME', or 'module:Class' for one of your own."
        )
    module_name, _, class_name = BUILT_IN.get(name, name).partition(":")
    try:
        module = import_users(module_name)
    except ConfigError as error:
        raise ConfigError(f"{key}.id: {error}") from None
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise EnvironmentFailure(f"environment '{name}': importing {module_name} failed: {error}") from error
        raise ConfigError(
            f"{key}.id: '{name}': there is no module '{error.name}'. It must be importable from where the run "
            "is started: check the spelling, or set PYTHONPATH."
        ) from None
    except BaseException as error:
        raise EnvironmentFailure(
            f"environment '{name}': importing {module_name} failed: {type(error).__name__}: {printable(error)} "
            f"({place_of(error)})"
        ) from error
    classes = {
        label: value
        for label, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Environment) and value is not Environment
    }
    if class_name not in classes:
        there = f"Environments there: {', '.join(sorted(classes))}." if classes else "It defines no environment."
        raise ConfigError(
            f"{key}.id: '{name}': {module_name} has no environment '{class_name}'."
            f"{nearest(class_name, classes)} {there}"
        )
    return classes[class_name]


def _checked_args(cls: type[Environment], args: dict[str, Any], key: str) -> dict[str, Any]:
    """Check `args` against the constructor's parameters and their annotations, and convert them."""
    parameters = dict(inspect.signature(cls).parameters)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return args
    allowed = ", ".join(parameters) or "none"
    for name in args:
        if name not in parameters:
            raise ConfigError(
                f"{key}.args.{name}: {cls.__name__} has no such argument.{nearest(name, parameters)} "
                f"Allowed: {allowed}."
            )
    missing = [name for name, item in parameters.items() if item.default is item.empty and name not in args]
    if missing:
        raise ConfigError(f"{key}.args: {cls.__name__} needs {', '.join(missing)}. Allowed: {allowed}.")
    return {name: _converted(value, _annotation(cls, name), f"{key}.args.{name}") for name, value in args.items()}


def _annotation(cls: type[Environment], name: str) -> Any:
    """Return the annotation of an argument of the constructor; `Any` where it names what is only there for checkers."""
    constructor = cls.__init__
    annotations = getattr(constructor, "__annotations__", {})
    if name not in annotations:
        return Any
    one = SimpleNamespace(__annotations__={name: annotations[name]})
    try:
        return get_type_hints(one, globalns=getattr(constructor, "__globals__", {}))[name]
    except Exception:  # noqa: BLE001 - code of the user's that was never run before, such as under `if TYPE_CHECKING`
        return Any


def _converted(value: Any, annotation: Any, key: str) -> Any:
    try:
        return pydantic.TypeAdapter(annotation).validate_python(value)
    except pydantic.PydanticUserError:  # a class that it does not know, or half: the constructor takes it as it is
        return value
    except pydantic.ValidationError as error:
        reasons = "; ".join(entry["msg"] for entry in error.errors())
        raise ConfigError(f"{key}: {reasons}; got {value!r}") from None
