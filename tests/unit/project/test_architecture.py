"""docs/architecture.md is drawn from the code; lengths of files; `from holdfast import ...` and when it loads what."""

import ast
import importlib
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import grimp
import pytest
from importlinter.configuration import configure

import holdfast
from tests import import_contracts
from tests.conftest import ROOT
from tests.import_contracts import AcyclicSiblings, Layers
from tests.pages import architecture
from tests.pages.architecture import PAGE, House, Step, ways

WAYS = ways(PAGE.read_text())
STEPS = [step for way in WAYS for step in way]


def test_the_page_is_what_contracts_imports_and_docstrings_say() -> None:
    text = PAGE.read_text()
    assert text == architecture.page_with(text), "write it anew: uv run python -m tests.pages.architecture"


def test_imports_lead_down_without_circles_and_every_package_has_its_floor() -> None:
    (house,) = architecture.houses()
    assert house.upward() == architecture.circles() == []
    assert set(house.rooms) == architecture.children("holdfast") and len(architecture.contracts("forbidden")) == 3
    house = House("x", [["a"], ["b", "c"]], {"a": ["b"], "b": ["c"], "c": ["a"]})
    assert house.upward() == ["x: b imports c", "x: c imports a"]


def test_a_module_that_a_text_names_counts_as_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """import-linter reads statements only."""
    texts = {
        "view/backends": "from holdfast.view.tracker import Tracker",
        "view/tracker": 'import_module("holdfast.view.backends")',
        "launcher/launch": 'f"holdfast.commands.ckpt:{name}"',
        "commands/ckpt": "'ckpt'",
    }
    graph = grimp.ImportGraph()
    for package in ("holdfast", *(f"holdfast.{name}" for name in ("view", "launcher", "commands"))):
        graph.add_module(package)
    for name, text in texts.items():
        path = tmp_path / "holdfast" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        graph.add_module(f"holdfast.{name.replace('/', '.')}")
    graph.add_import(importer="holdfast.view.backends", imported="holdfast.view.tracker")
    configure()
    layers = {"containers": ["holdfast"], "layers": ["commands", "launcher", "view"]}
    for contract, options in ((Layers, layers), (AcyclicSiblings, {"ancestors": ["holdfast"]})):
        one = contract("", {"root_packages": ["holdfast"]}, options)
        for source, is_kept in ((tmp_path / "nowhere", True), (tmp_path, False)):
            monkeypatch.setattr(import_contracts, "SOURCE", source)
            assert one.check(deepcopy(graph), verbose=False).kept is is_kept


def test_the_page_tells_its_ways_in_lines_that_can_be_checked() -> None:
    assert len(STEPS) == architecture.numbered_lines(PAGE.read_text()) > 20


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.file}-{step.function}")
def test_every_function_of_a_way_is_where_the_page_says(step: Step) -> None:
    assert architecture.definition(step) is not None, f"docs/architecture.md:{step.line}"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"line-{way[0].line}")
def test_every_function_of_a_way_is_used_by_a_file_before_it(way: list[Step]) -> None:
    used = architecture.mentions(way[0].file)
    for step in way[1:]:
        name = step.function.rpartition(".")[2]
        assert name in used, f"docs/architecture.md:{step.line}: nothing before it uses {name}"
        used |= architecture.mentions(step.file)


def directories(home: Path, pattern: str) -> set[str]:
    return {str(path.parent.relative_to(home)) for path in home.rglob(pattern) if path.name != "__init__.py"}


def test_unit_tests_lie_in_directories_of_the_packages() -> None:
    packages = directories(ROOT / "src" / "holdfast", "*.py")
    tested = directories(ROOT / "tests" / "unit", "test_*.py") - {"project"}  # of what is no package
    assert tested == packages, sorted(tested ^ packages)


def test_no_file_has_more_lines_than_the_rules_allow() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert not {path: number for path, number in lines.items() if number > 650} and len(lines) <= 261


def test_bytes_that_are_not_utf8_count_as_damage_wherever_msgspec_reads() -> None:
    """msgspec raises a `UnicodeDecodeError` for them, which is not one of its own errors."""
    caught = re.compile(r"except [^\n]*msgspec\.(?:Decode|Msgspec)Error[^\n]*")
    lines = [line for path in (ROOT / "src").rglob("*.py") for line in caught.findall(path.read_text())]
    assert len(lines) > 10 and not [line for line in lines if not re.search("UnicodeDecodeError|ValueError", line)]


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import holdfast; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['holdfast']\n"


@pytest.mark.parametrize("name", holdfast.__all__)
def test_a_name_is_what_its_module_has(name: str) -> None:
    (module,) = (module for module, names in holdfast._NAMES_OF.items() if name in names)
    assert getattr(holdfast, name) is getattr(importlib.import_module(f"holdfast.{module}"), name)
    assert name in dir(holdfast)


def test_checkers_see_the_same_names_in_the_same_modules() -> None:
    tree = ast.parse(Path(holdfast.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    seen = {str(node.module).removeprefix("holdfast."): tuple(name.name for name in node.names) for node in imports}
    assert seen == holdfast._NAMES_OF
    assert sorted(name for names in seen.values() for name in names) == sorted(holdfast.__all__)
    assert Path(holdfast.__file__).with_name("py.typed").is_file(), "or they may not use the annotations"


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
