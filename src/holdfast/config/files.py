"""TOML files of settings, read within limits, each error with the path; JSON objects without a lost key."""

import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli

from holdfast.errors import ConfigError

TOO_DEEP = "its values are nested too deeply"
_MOST_BYTES = 16 << 20


def read_file(path: str, shown: str) -> dict[str, Any]:
    """Return the content of a TOML file. Raise ConfigError if it cannot be read."""
    text = ""
    try:
        status = Path(path).stat()
        # A pipe without a writer would be waited for, and a device may have no end.
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{shown} is not a regular file, but a pipe or a device")
        if status.st_size > _MOST_BYTES:
            raise ConfigError(f"{shown} has {status.st_size} bytes, allowed are {_MOST_BYTES}")
        text = Path(path).read_bytes().decode("utf-8-sig")
        return tomli.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{shown}: there is no such file (from {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        # A storage that is away stays the cause: a process that reads its configuration is started again after it.
        raise ConfigError(f"{shown} cannot be read: {error}") from error
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path} {_wrong_in(text, str(error))}") from None
    except ValueError as error:  # tomli's own, and numbers of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} cannot be used: {TOO_DEEP}") from None


def _wrong_in(text: str, error: str) -> str:
    """Say in words what tomli finds wrong in a text."""
    if not re.match("Cannot (overwrite|declare|mutate)|Duplicate", error):
        return f"is not valid TOML: {error}"
    lines, place = text.splitlines(), re.search(r"\(at line (\d+), ", error)
    number = int(place[1]) if place else len(lines)
    shown = f"line {number}, {lines[number - 1].strip()!r:.80}"
    return f"sets a key twice, or begins a table twice: the second time in {shown}. Keep one of them."


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, as the `object_pairs_hook` of `json`. Raise ValueError for a key that occurs twice: one of
    the values would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return found


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a file, except of its sections."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def holds(data: Any, key: str) -> bool:
    """Return whether the content of a file has a dotted key."""
    for part in key.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True
