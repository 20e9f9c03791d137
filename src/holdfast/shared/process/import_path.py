"""Whose modules come first: ours and those installed, then those of the directory that a run is started in.

A user's directory may hold a `trainer.py`, a `config.py` or a `logging.py`. They must neither replace ours nor those
of Python and its packages, in any process of a run; still `module:function` in a setting names a module there. So the
processes are started without that directory on their path (`python -P`), what PYTHONPATH names moves to the end of
it, and the directory comes behind that where a user's module is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from holdfast.shared.errors import ConfigError
from holdfast.shared.process.run_module import pythonpath


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of our modules, whatever lies in the working directory."""
    return [sys.executable, "-P", str(Path(__file__).with_name("run_module.py")), module, *arguments]


def protect_children() -> None:
    """Keep the working directory out of the path of Python processes that this one starts, such as compilers."""
    os.environ["PYTHONSAFEPATH"] = "1"


def leave_out_working_directory() -> None:
    """Take the working directory off PYTHONPATH, for a process whose children import no module of the user.

    What else is on it stays: clusters provide packages that way.
    """
    words = [word for word in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if word]
    if others := [word for word in words if Path(word).resolve() != Path.cwd()]:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)


def import_users(name: str) -> ModuleType:
    """Import a module of the user, from PYTHONPATH or the working directory, or one that is installed.

    Raises:
        ConfigError: another module than that file has its name.
        ImportError, and whatever the module raises; an ImportError says where a name in it belongs to another module.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()
    if taken := _taken(name):
        raise ConfigError(f"'{name}': {taken}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and (taken := _taken(error.name)):
            error.msg = f"{error}. {taken[0].upper()}{taken[1:]}"
        raise


def _taken(name: str) -> str | None:
    """Say whose file is imported in the place of the user's file of that name, if any is."""
    top = name.partition(".")[0]
    own = PathFinder.find_spec(top, [*pythonpath(), str(Path.cwd())])
    if own is None or own.origin is None:  # a directory without __init__.py gives way to everything
        return None
    try:
        found = importlib.util.find_spec(top)
    except ValueError:  # a module that was made by hand
        return None
    if found is None or _is_same(found.origin, own.origin):
        return None
    return (
        f"the name '{top}' belongs to {found.origin or found.name}, so {own.origin} cannot be imported by it: "
        "rename your file"
    )


def _is_same(first: str | None, second: str) -> bool:
    return first is not None and Path(first).resolve() == Path(second).resolve()
