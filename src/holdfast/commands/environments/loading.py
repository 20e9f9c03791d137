"""The environment that `check` and `play` ask: one that cannot be loaded is a mistake in what was given."""

from __future__ import annotations

from holdfast.orchestrator.environments import load_environment, require_methods
from holdfast.orchestrator.environments.interface import Environment
from holdfast.shared.config.environments import EnvironmentConfig
from holdfast.shared.errors import ConfigError, EnvironmentFailure

_KEY = "environments[0]"


def load(settings: EnvironmentConfig) -> Environment:
    """Return the environment that `settings` describe.

    Raises:
        ConfigError: there is none, its arguments do not fit, or it lacks a method.
        EnvironmentFailure: its module or its constructor raised; with exit code 2, since nothing was running.
    """
    try:
        environment = load_environment(settings, key=_KEY)
    except EnvironmentFailure as failure:
        failure.exit_code = ConfigError.exit_code
        raise
    require_methods(type(environment), settings.id, key=_KEY)
    return environment
