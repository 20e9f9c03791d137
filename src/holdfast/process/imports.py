"""Import order and user code: holdfast and installed packages come first, then the directory where a run starts.

A user's `trainer.py` or `logging.py` must not replace modules of holdfast or Python; still, `module:function` in a
setting names a module there. Therefore every process starts without the working directory on its path (`python -P`),
and entries of PYTHONPATH move to its end. The directory comes after them, when a user's module is loaded.

Libraries that upload (botocore, aiohttp) draw from Python's global random generator, as often as the network fails. In
a trainer its state belongs to the run and its checkpoints. `keep_uploads_apart` gives uploads a generator of their own.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.errors import ConfigError, TrainingError, nearest
from holdfast.process.run_module import pythonpath


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of our modules, whatever is in the working directory."""
    return [sys.executable, "-P", str(Path(__file__).with_name("run_module.py")), module, *arguments]


def to_type(command: str) -> str:
    """Return `command` as the user types it: after `uv run` in a checkout."""
    return f"uv run {command}" if is_checkout() else command


def protect_children() -> None:
    """Keep the working directory out of the path of Python processes that this one starts, such as compilers."""
    os.environ["PYTHONSAFEPATH"] = "1"


def leave_out_working_directory() -> None:
    """Take the working directory off PYTHONPATH, for a process whose children import no module of the user. Its
    other entries stay: clusters provide packages that way."""
    words = [word for word in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if word]
    if others := [word for word in words if Path(word).resolve() != Path.cwd()]:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)


def import_users(name: str) -> ModuleType:
    """Import a module of the user, from PYTHONPATH or the working directory, or an installed module. Raise ConfigError
    if another module than that file has its name; ImportError, also with the module that took the name, and whatever
    the module raises."""
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


def module_file(name: str) -> Path | None:
    """Return the file that `import_users` would import as `name`, without importing it; None if no file has it."""
    path, spec = [*pythonpath(), str(Path.cwd()), *sys.path], None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    found = Path(spec.origin) if spec is not None and spec.origin is not None else None
    return found if found is not None and found.is_file() else None


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


UPLOAD_THREAD = "upload"
# The second is where fsspec runs every filesystem that is asynchronous.
_THREADS = (UPLOAD_THREAD, "fsspecIO")
_METHODS = [name for name in random.__all__ if name.islower() and callable(getattr(random.Random, name, None))]
_apart = threading.local()


def keep_uploads_apart() -> None:
    """Let what draws from `random` in a thread of uploads draw from a generator of that thread."""
    if hasattr(random.random, "__wrapped__"):  # done already: wrapping twice would nest
        return
    taken = random.random
    for name in _METHODS:
        setattr(random, name, _divided(name, getattr(random, name)))
    botocore = sys.modules.get("botocore.retries.standard")
    if botocore is not None:  # some library imported it already, and it keeps the function as a default argument
        init = botocore.ExponentialBackoff.__init__
        init.__defaults__ = tuple(random.random if value == taken else value for value in init.__defaults__)


def _divided(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def draw(*arguments: Any, **options: Any) -> Any:
        # By name: libraries make the threads later.
        if threading.current_thread().name not in _THREADS:
            return real(*arguments, **options)
        if not hasattr(_apart, "generator"):
            _apart.generator = random.Random()
        return getattr(_apart.generator, name)(*arguments, **options)

    return draw


def check_name(name: str, built_in: Iterable[str]) -> str:
    """Return `name` if it is one of `built_in` or has the form `module:function`. Raise ValueError, with the allowed
    names, if it is neither."""
    allowed = tuple(built_in)
    module_name, colon, function_name = name.partition(":")
    if name in allowed or (colon and module_name and function_name.isidentifier()):
        return name
    raise ValueError(
        f"there is no '{name}'.{nearest(name, allowed)} Allowed: {', '.join(allowed)}, "
        "or 'module:function' for one of your own"
    )


def load_function(name: str, *, key: str) -> Callable[..., Any]:
    """Return the function that `name`, `module:function`, stands for; `key` is its dotted key, for messages. Raise
    ConfigError if the module cannot be imported, or does not have the function."""
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
    """Return the loss that `name` stands for. Raise ConfigError if it cannot be loaded, or not be called as
    `function(data, **args)`."""
    function = load_function(name, key="loss.type")
    try:
        inspect.signature(function).bind(None, **args)
    except TypeError as error:
        raise ConfigError(f"loss.args = {args}: '{name}' cannot be called as function(data, **args): {error}") from None
    return function


@contextmanager
def calling(name: str, *, key: str, unless: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what the user's function `name` raises into an error that says where in its module that was. `unless`:
    errors that are not the function's own; they are left as they are. Raise TrainingError if it raised: another start
    would end in the same way."""
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


def import_extra(module: str, *, extra: str, needed_by: str) -> ModuleType:
    """Return the module of an extra of holdfast. Raise ConfigError with the command for it without the extra."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(
            f"{needed_by} needs the extra '{extra}', which is not installed: `uv sync --inexact --extra {extra}` in a "
            f"checkout, or `pip install 'holdfast[{extra}]'` where holdfast is installed (see docs/your_model.md)"
        ) from None


def is_checkout(package: Path = Path(__file__).parents[1]) -> bool:
    """Return whether `package`, by default ours, is in a checkout, where commands begin with `uv run`."""
    return (package.parents[1] / "pyproject.toml").is_file()


class _Without:
    """A finder of modules that does not find one package."""

    def __init__(self, finder: Any, package: str) -> None:
        self._finder, self._package = finder, package

    def find_spec(self, name: str, *arguments: Any) -> Any:
        return None if name == self._package else self._finder.find_spec(name, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def hide_package(package: str) -> None:
    """Make this process behave as if `package` were not installed, unless the process has imported the package.

    An entry `sys.modules[package] = None` would forbid the import, too. But libraries take any entry for an imported
    module, import the package, and fail."""
    if package not in sys.modules:
        sys.meta_path[:] = [_Without(finder, package) for finder in sys.meta_path]
