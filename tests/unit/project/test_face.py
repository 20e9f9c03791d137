"""`from holdfast import ...`: every name that documents use, loaded when it is asked for and not before."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.conftest import ROOT

_NEEDS_TORCH = {  # what takes or returns tensors
    *("Checkpointer", "load_state_with_optimizer", "load_weights_only", "module_tensors", "save_state"),
    *("PolicyLossInput", "build_policy_loss"),
}


def _run(code: str) -> str:
    """Run `code` in a Python of its own; return what it printed."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import holdfast; print(sorted(set(sys.modules) - before))"
    assert _run(code) == "['holdfast']"


@pytest.mark.parametrize("name", holdfast.__all__)
def test_a_name_is_what_its_module_has(name: str) -> None:
    (module,) = (module for module, names in holdfast._NAMES_OF.items() if name in names)
    assert getattr(holdfast, name) is getattr(importlib.import_module(f"holdfast.{module}"), name)
    assert name in dir(holdfast)


def test_what_is_around_an_environment_does_without_torch() -> None:
    names = [name for name in holdfast.__all__ if name not in _NEEDS_TORCH]
    assert {"Environment", "Task", "Score", "Message", "Retention", "grpo"} <= set(names)
    heavy = "{'torch', 'transformers', 'vllm'}"
    assert _run(f"from holdfast import {', '.join(names)}\nimport sys\nprint({heavy} & sys.modules.keys())") == "set()"


def test_an_environment_and_an_advantage_need_no_settings() -> None:
    code = "import sys\nfrom holdfast import Environment, Message, Score, Session, Task, TaskSeed, grpo\n"
    heavy = "{'pydantic', 'numpy', 'jinja2', 'tokenizers', 'aiohttp', 'holdfast.config.base'}"
    assert _run(f"{code}print({heavy} & sys.modules.keys())") == "set()"


def test_checkers_see_the_same_names_in_the_same_modules() -> None:
    tree = ast.parse(Path(holdfast.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {str(node.module).removeprefix("holdfast."): tuple(name.name for name in node.names) for node in imports}
    assert seen == holdfast._NAMES_OF
    assert sorted(name for names in seen.values() for name in names) == sorted(holdfast.__all__)


def test_checkers_may_use_the_annotations_where_it_is_installed() -> None:
    assert Path(holdfast.__file__).with_name("py.typed").is_file()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'Enviroment'"):
        holdfast.Enviroment  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Enviroment' from 'holdfast'"):
        exec("from holdfast import Enviroment")


def test_nothing_of_the_houses_imports_the_face() -> None:
    """Through it, a lower house would reach a higher one behind the contracts."""
    for path in sorted((ROOT / "src" / "holdfast").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert (node.module, node.level) != ("holdfast", 0), f"{path}:{node.lineno}"
            elif isinstance(node, ast.Import):
                assert all(alias.name != "holdfast" for alias in node.names), f"{path}:{node.lineno}"
