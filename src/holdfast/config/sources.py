"""The sources of settings, for pydantic-settings: flags over the environment over TOML files over defaults.

    sft @ base.toml @ more.toml --max-steps 20
    HOLDFAST_TRAINER__OPTIM__LR=1e-5 rl @ rl.toml

The library merges the sources and reads nested names. A source here adds the form in which this project takes text,
and knows for each setting who gave it: the flag, the variable or the file.

Only variables that begin with `HOLDFAST_` set something. Three kinds are allowed: a setting of the command, a name in
`VARIABLES`, and a name that a setting gives (`server.admin_token_env`). Any other is refused.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.sources.types import EnvNoneType

from holdfast.config.base import Command
from holdfast.config.by_type import with_tables
from holdfast.config.files import holds, leaves, read_file
from holdfast.config.flags import Flag, flags_of, model_in, read_flags, take_items
from holdfast.config.help import VARIABLE_PREFIX, hint, variable_of
from holdfast.errors import ConfigError

_SPELLING = re.compile(rf"{VARIABLE_PREFIX}[A-Z0-9_]+")

VARIABLES = frozenset({
    # of the user: the token of a server, the directory of caches, an interpreter, an address
    "HOLDFAST_ADMIN_TOKEN", "HOLDFAST_CACHE", "HOLDFAST_VERIFIERS_PYTHON", "HOLDFAST_PROMETHEUS",
    # of a scheduler that starts the nodes of a trainer
    "HOLDFAST_NODE_RANK", "HOLDFAST_RDZV_ENDPOINT",
    # of processes that a run started
    "HOLDFAST_ENDPOINT_KEY", "HOLDFAST_EVENTS", "HOLDFAST_HEARTBEAT", "HOLDFAST_LAUNCHER_PID", "HOLDFAST_PROCESS",
    "HOLDFAST_TEMPLATE_DATE",
})  # fmt: skip
"""Variables with the prefix that are not settings."""


class Sources:
    """The sources of one command line, and who gave each setting. `decided`: dotted key -> `flag --NAME` or `variable
    NAME` that set it, once `settings` has read them."""

    def __init__(self, command: type[Command], argv: Sequence[str]) -> None:
        known = flags_of(command)
        files, words = _split_files([*argv], known)
        self._items, words = take_items(words, known)
        self._command = command
        self.flags, self.flag_of = read_flags(words, known)
        self.variables, self.variable_of = _read_variables(command)
        self._unknown = {name: key for key, name in self.variable_of.items() if not _is_known(key, known)}
        self.files = [(path, with_tables(command, data)) for path, data in files]
        self.decided: dict[str, str] = {}
        _check_nesting(self.variables, self.variable_of, self.given)

    def settings(self) -> BaseModel:
        """Return the settings, read from the sources and validated by the framework. Raise ValidationError for a
        value, ConfigError for a variable that sets nothing."""
        self._check_variables()
        self._change_items()
        root = _root_of(self._command)
        flags, variables = FlagSource(root, self.flags), EnvironmentSource(root, self.variables)
        files = [FileSource(root, data) for _, data in reversed(self.files)]
        settings = root(_build_sources=((flags, variables, *files), {}))
        self.decided = {key: self._said(key, self.flag_of, "flag") for key in leaves(flags.taken)}
        for key in leaves(variables.taken):
            if not _decides(flags.taken, key):
                self.decided[key] = self._said(key, self.variable_of, "variable")
        return settings

    def _change_items(self) -> None:
        """Change items of lists as flags say, and give the lists as flags."""
        for item in self._items:
            sources = [self.flags, self.variables, *(data for _, data in reversed(self.files))]
            found = (_value_at(values, item.key) for values in sources)
            self.flags[item.key], key = item.change(next((value for value in found if value is not None), None))
            self.flag_of |= {item.key: self.flag_of.get(item.key, item.name), key: item.name}

    @staticmethod
    def _said(key: str, names: Mapping[str, str], kind: str) -> str:
        return f"{kind} {next(names[one] for one in (key, *_above(key)) if one in names)}"

    def _check_variables(self) -> None:
        """Refuse a variable that is neither a setting nor named by one."""
        named = set(_texts([self.flags, self.variables, [data for _, data in self.files]]))
        unknown = [name for name in self._unknown if name not in named]
        if unknown:
            known = flags_of(self._command)
            raise ConfigError("\n       ".join(_say_unknown(name, known) for name in unknown))
        for name in self._unknown:
            del self.variables[self._unknown[name]], self.variable_of[self._unknown[name]]

    @property
    def given(self) -> dict[str, str]:
        """Dotted key -> the flag or else the variable that gave it, as an error names it."""
        names = {key: f"variable {name}" for key, name in self.variable_of.items()}
        return names | {key: f"flag {name}" for key, name in self.flag_of.items()}

    def origin_of(self, key: str) -> str | None:
        """Return the flag, or else the variable, or else the last file that gave a dotted key, itself or as JSON."""
        places = (key, *_above(key))
        for values, names, kind in ((self.flags, self.flag_of, "flag"), (self.variables, self.variable_of, "variable")):
            for place in places:
                if place in values and (place == key or holds(values[place], key[len(place) + 1 :])):
                    return f"{kind} {names[place]}"
        file = next((path for path, data in reversed(self.files) if holds(data, key)), None)
        return file or next((said for own, said in self.given.items() if own.startswith(f"{key}.")), None)


@cache
def _root_of(command: type[Command]) -> type[BaseSettings]:
    """Return the settings of a command that are read from sources. `command` itself takes what it is given and nothing
    else: a process of a run, and a section of `rl`, must not read the environment again."""
    config = SettingsConfigDict(case_sensitive=True, defer_build=True)
    return type(command.__name__, (BaseSettings, command), {"model_config": config, "__module__": __name__})


class _Source(PydanticBaseSettingsSource):
    """Leaves out a setting if a higher source has its alternative. `taken`: what the library took from this source."""

    taken: Mapping[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()  # pyright: ignore[reportAbstractUsage] - of the source beside it
        for chosen, other in getattr(self.settings_cls, "alternatives", ()):
            if chosen in self.current_state and other not in self.current_state:
                values.pop(other, None)
        self.taken = values
        return values


class FlagSource(_Source, EnvSettingsSource):
    """Flags: the library takes `optim.lr` apart as it takes the names of variables apart."""

    _prefix, _nested = "", "."

    def __init__(self, settings_cls: type[BaseSettings], values: Mapping[str, Any]) -> None:
        self._values = values
        super().__init__(
            settings_cls, env_prefix=self._prefix, env_nested_delimiter=self._nested, env_parse_none_str="null"
        )

    def _load_env_vars(self) -> Mapping[str, str | None]:
        # A section comes before its settings: the library puts them into it.
        keys = sorted(self._values, key=lambda key: key.count("."))
        return {
            self._prefix + key.replace(".", self._nested): EnvNoneType("null") if value is None else value
            for key, value in ((key, self._values[key]) for key in keys)
        }

    def decode_complex_value(self, field_name: str, field: Any, value: Any) -> Any:
        """Return the value: `Flag.value_of` has read it."""
        return value


class EnvironmentSource(FlagSource):
    """Variables: `HOLDFAST_TRAINER__OPTIM__LR`."""

    _prefix, _nested = VARIABLE_PREFIX, "__"


class FileSource(_Source, InitSettingsSource):
    """One TOML file, `@ FILE.toml` or `--section @ FILE.toml`."""


def setting_variables(config: Command) -> list[str]:
    """Return the variables of this process that are settings, also if a flag won over them, for a command that takes
    all settings of `config` from a file and must not read them again."""
    named = set(_texts(config.model_dump(mode="json")))
    return sorted(name for name in os.environ if name.startswith(VARIABLE_PREFIX) and name not in {*VARIABLES, *named})


def _read_variables(command: type[Command]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of variables by dotted key, and the variable that gave each."""
    by_key = {flag.key: flag for flag in flags_of(command).values()}
    values, given = {}, {}
    for name in sorted(os.environ):
        if not name.startswith(VARIABLE_PREFIX) or name in VARIABLES:
            continue
        key, text = name, os.environ[name]
        if _SPELLING.fullmatch(name):  # another spelling is refused: two variables could mean one setting
            key = name.removeprefix(VARIABLE_PREFIX).replace("__", ".").lower()
        flag = by_key.get(key)
        if flag is not None and flag.is_switch:
            text = text.lower()
        values[key] = flag.value_of(text, name) if flag is not None else text
        given[key] = name
    return values, given


def _check_nesting(variables: Mapping[str, Any], names: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Refuse a variable that sets a section to a value, such as null, beside a setting in it, which would be lost."""
    for key, said in given.items():
        for above in _above(key):
            if above in variables and not isinstance(variables[above], dict):
                raise ConfigError(
                    f"variable {names[above]} unsets the section that {said} sets: leave one of them out."
                )


def _decides(values: Any, key: str) -> bool:
    """Whether values say what a dotted key is, themselves or by a section that they unset."""
    for part in key.split("."):
        if not isinstance(values, Mapping):
            return True
        if part not in values:
            return False
        values = values[part]
    return True


def _value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return what a source says of a dotted key, as one name or in sections; None if it says nothing."""
    found: Any = values.get(key, values)
    for part in key.split(".") if key not in values else ():
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _above(key: str) -> list[str]:
    """Return the dotted keys of the sections that hold a key, the innermost first."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]


def _is_known(key: str, known: Mapping[str, Flag]) -> bool:
    """Whether a dotted key is a setting, or is inside a section, whose model refuses unknown names with a hint."""
    keys = {flag.key: flag for flag in known.values()}
    nearest = next((keys[one] for one in _above(key) if one in keys), None)
    return key in keys or (nearest is not None and nearest.is_section)


def _say_unknown(name: str, known: Mapping[str, Flag]) -> str:
    key = name.removeprefix(VARIABLE_PREFIX).replace("__", ".").lower()
    above = _above(key)
    inside = next((flag for flag in known.values() if (flag.is_list or dict in flag.kinds) and flag.key in above), None)
    said = hint(name, [flag.key for flag in known.values()]) or " Unset it, or name it otherwise."
    if inside is not None:
        form = "{...}" if dict in inside.kinds else "[{...}]"
        said = f" A list or a table is given whole, as JSON: {variable_of(inside.key)}='{form}'."
    if key in {flag.key for flag in known.values()}:
        return f"variable {name} sets nothing: write it in capitals, {variable_of(key)}."
    return f"variable {name} sets nothing: this command has no setting '{key}'.{said}"


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case list() as items:
                waiting += items
            case dict() as entries:
                waiting += entries.values()


def _split_files(argv: list[str], known: Mapping[str, Flag]) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """Take every `@ file` and `--section @ file` out of `argv`; return path and content of each, and the rest."""
    files: list[tuple[str, dict[str, Any]]] = []
    flags: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        if not word.startswith("@"):
            flags.append(word)
            position += 1
            continue
        path = word[1:] or (argv[position + 1] if position + 1 < len(argv) else "")
        position += 1 if word[1:] else 2
        if not path:
            raise ConfigError("'@' needs the path of a TOML file after it")
        content = read_file(path, f"'@ {path}'")
        if flags and flags[-1].startswith("--") and "=" not in flags[-1]:
            flag = known.get(flags[-1].replace("_", "-"))
            if flag is None or model_in(flag.annotation) is not None:  # not a plain setting such as `--clean`
                for name in reversed(flags.pop().removeprefix("--").replace("-", "_").split(".")):
                    content = {name: content}
        files.append((path, content))
    return files, flags
