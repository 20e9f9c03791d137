"""The built-in environments, and how the `id` of an environment in the settings becomes an environment."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

import pydantic

from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import ConfigError, EnvironmentFailure, HoldfastError, nearest, printable
from holdfast.orchestrator.env.guard import place_of
from holdfast.orchestrator.env.harness import HarnessEnvironment
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.env.verifiers import VERIFIERS, Verifiers
from holdfast.process.imports import import_users

BUILT_IN = {
    "reverse_text": "holdfast.orchestrator.env.reverse_text:ReverseText",
    "jsonl": "holdfast.orchestrator.env.jsonl:Jsonl",
}
_ABSENT = "It must be importable from where the run is started: check the spelling, or set PYTHONPATH."


def is_built_in(name: str) -> bool:
    """Whether holdfast has the environment, so that its constructor may be called to check its arguments."""
    return name in BUILT_IN or name.startswith(VERIFIERS)


def load_environment(config: EnvironmentConfig, *, key: str) -> Environment:
    """Return the environment that `config` describes; `key` is its dotted key, for messages.

    Raises ConfigError if it does not exist, or its arguments do not fit; EnvironmentFailure if its code raised."""
    cls, args = find_environment(config, key=key)
    try:
        environment = cls(**args)
        if isinstance(environment, HarnessEnvironment):
            environment.tool_parser = config.tool_parser
        return environment
    except HoldfastError:
        raise
    except BaseException as error:
        raise EnvironmentFailure(
            f"environment '{config.label}' ({config.id}) failed in its constructor: {type(error).__name__}: "
            f"{printable(error)} ({place_of(error)})"
        ) from error


def find_environment(config: EnvironmentConfig, *, key: str) -> tuple[type[Environment], dict[str, Any]]:
    """Return the class that `config` names and the checked arguments of its constructor, which is not called."""
    cls = find_class(config.id, key=key)
    if config.mcp_servers and issubclass(cls, HarnessEnvironment):
        raise ConfigError(
            f"{key}.mcp_servers: '{config.id}' is played by a harness, which brings the tools of its requests along: "
            "have it call the servers"
        )
    if cls is Verifiers:
        return cls, {"name": config.id.removeprefix(VERIFIERS), "settings": config.args}
    return cls, _checked_args(cls, config.args, key)


def load_levels(config: EnvironmentConfig, *, key: str) -> list[Environment]:
    """Return the environment of every level of a curriculum, or the only one; see `load_environment`."""
    find_class(config.id, key=key)  # first, so that the error does not name a level
    return [load_environment(one, key=own_key) for own_key, one in config.at_levels(key).items()]


def find_class(name: str, *, key: str) -> type[Environment]:
    """Return the class of the environment `name`. Raises ConfigError, or EnvironmentFailure if its module raised."""
    if name.startswith(VERIFIERS):
        return Verifiers
    if ":" in name:
        return _class_of(name, name, key=key, load=import_users)
    if name in BUILT_IN:
        return _class_of(name, BUILT_IN[name], key=key, load=importlib.import_module)
    hint = nearest(name, BUILT_IN) or (f" {_as_file(name)}" if _as_file(name) else "")
    raise ConfigError(
        f"{key}.id: there is no environment '{name}'.{hint} Allowed: {', '.join(BUILT_IN)}, '{VERIFIERS}ID', or "
        "'module:Class' of your own."
    )


def _class_of(name: str, target: str, *, key: str, load: Callable[[str], ModuleType]) -> type[Environment]:
    """Return the class that `target`, `module:Class`, names."""
    module_name, _, class_name = target.partition(":")
    try:
        module = load(module_name)
    except ConfigError as error:
        raise ConfigError(f"{key}.id: {error}") from None
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and (module_name + ".").startswith(f"{error.name}."):
            raise ConfigError(
                f"{key}.id: '{name}': there is no module '{error.name}'. {_as_file(name) or _ABSENT}"
            ) from None
        is_unreadable = isinstance(error, SyntaxError)
        told = error.msg if is_unreadable else printable(error)
        at = f"{error.filename}:{error.lineno}" if is_unreadable else place_of(error)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        remedy = f". Install {missing} where holdfast is installed" if missing else ""
        raise EnvironmentFailure(
            f"environment '{name}': importing {module_name} failed: {type(error).__name__}: {told} ({at}){remedy}"
        ) from error
    classes = {
        label: value
        for label, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Environment) and value is not Environment
    }
    if class_name not in classes:
        there = f"Environments there: {', '.join(sorted(classes))}." if classes else "It defines no environment."
        hint = nearest(class_name, classes)
        if class_name in vars(module) and not hint:
            hint = (
                f" What it calls '{class_name}' is not derived from holdfast.Environment, with make_task and "
                "score: `environments init NAME` begins one."
            )
        raise ConfigError(f"{key}.id: '{name}': {module_name} has no environment '{class_name}'.{hint} {there}")
    return classes[class_name]


def require_methods(cls: type[Environment], name: str, *, key: str) -> None:
    """Refuse a class without a method that every environment needs, before anything is started."""
    for method in ("make_task", "score"):
        if getattr(cls, method) is getattr(Environment, method):
            like = nearest(method, [one for one in vars(cls) if not one.startswith("_")])
            raise ConfigError(
                f"{key}.id: '{name}': {cls.__name__} has no method {method}, which every environment needs.{like} "
                "`environments init NAME` begins one with both."
            )


def _as_file(name: str) -> str:
    path, _, class_name = name.partition(":")
    if not path.endswith(".py"):
        return ""
    return (
        "A file is named by its module, without .py, and its directory by PYTHONPATH: "
        f"'{Path(path).stem}:{class_name or 'Class'}'."
    )


def _checked_args(cls: type[Environment], args: dict[str, Any], key: str) -> dict[str, Any]:
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
    constructor = cls.__init__
    one = SimpleNamespace(__annotations__={name: getattr(constructor, "__annotations__", {}).get(name, Any)})
    try:
        return get_type_hints(one, globalns=getattr(constructor, "__globals__", {}))[name]
    except Exception:  # noqa: BLE001 - of the user's, such as a name that is imported `if TYPE_CHECKING`
        return Any


def _converted(value: Any, annotation: Any, key: str) -> Any:
    try:
        return pydantic.TypeAdapter(annotation).validate_python(value)
    except pydantic.PydanticUserError:  # pydantic does not know the class
        return value
    except pydantic.ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" if entry["loc"] else f"{entry['msg']}; got {value!r}"
            for entry in error.errors()  # without the values of a section, which may hold a password
        )
        raise ConfigError(f"{key}: {reasons}") from None
