"""The generated parts of docs/architecture.md, and the ways through the code that its lists tell. `python -m
tests.pages.architecture` writes the parts between `<!-- NAME -->` and `<!-- /NAME -->`."""

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grimp

from tests.conftest import ROOT
from tests.import_contracts import Layers, add_named_modules

PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "holdfast"
_WIDTH = 118
_STEP = re.compile(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`: ")


@dataclass(frozen=True)
class House:
    """A package whose parts a contract of layers puts in order."""

    package: str
    floors: list[list[str]]  # names of its parts, the highest first; those of one floor stand side by side
    imports: dict[str, list[str]]  # part -> the parts that it imports, lazily too, in the order of the floors

    @property
    def rooms(self) -> list[str]:
        """All parts, the highest first."""
        return [room for floor in self.floors for room in floor]

    def upward(self) -> list[str]:
        """Return the imports that do not lead to a lower floor."""
        floor_of = {room: number for number, floor in enumerate(self.floors) for room in floor}
        return [
            f"{self.package}: {room} imports {other}"
            for room, others in self.imports.items()
            for other in others
            if floor_of[other] <= floor_of[room]
        ]


def contracts(kind: str) -> list[dict[str, Any]]:
    """Return the import contracts of one type, such as `forbidden`, in the order of pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return [contract for contract in settings["contracts"] if contract["type"] == kind]


def houses() -> list[House]:
    """Return the houses that the contracts of layers describe."""
    return [
        _house(container, [re.findall(r"\w+", layer) for layer in contract["layers"]])
        for contract in contracts(Layers.type_name)
        for container in contract["containers"]
    ]


def children(package: str) -> set[str]:
    """Return the modules and packages that lie in a package, by their short names, without `__main__`."""
    return {name.rpartition(".")[2] for name in _graph().find_children(package)} - {"__main__"}


def circles() -> list[tuple[str, str]]:
    """Return imports by which neighbours, modules or packages in one package, import one another in a circle."""
    packages = [module for module in _graph().modules if _graph().find_children(module)]
    return sorted({one for package in packages for one in _graph().nominate_cycle_breakers(package)})


def page_with(text: str) -> str:
    """Return the page with its generated parts as they must be."""
    for name, part in (("tree", _tree()), ("picture", _picture()), ("forbidden", _forbidden())):
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, found, rest = text.partition(start)
        assert found and end in rest, f"docs/architecture.md has no {start.strip()} ... {end}"
        text = f"{before}{start}{part}{end}{rest.partition(end)[2]}"
    return text


@dataclass(frozen=True)
class Step:
    """One line `file: function` of a list of the page; `number` counts from 0 within its list."""

    number: int
    line: int
    file: str
    function: str


def ways(text: str) -> list[list[Step]]:
    """Return the numbered lists of the page, each a chain of functions."""
    found = list[list[Step]]()
    for line, content in enumerate(text.splitlines(), start=1):
        match = _STEP.match(content)
        if match:
            if content.startswith("1. "):
                found.append([])
            found[-1].append(Step(len(found[-1]), line, match[1], match[2]))
    return found


def numbered_lines(text: str) -> int:
    """Return how many lines of the page are points of a numbered list."""
    return len(re.findall(r"^\d+\. ", text, re.MULTILINE))


def definition(step: Step) -> ast.AST | None:
    """Return what defines the function, method or class of a step; None where its file does not."""
    path = SOURCE / step.file
    node: ast.AST | None = ast.parse(path.read_text()) if path.is_file() else None
    for name in step.function.split("."):
        node = next((one for one in _bodies(node) if getattr(one, "name", None) == name), None)
    return node


def mentions(file: str) -> set[str]:
    """Return every name and attribute that a file uses, and every text: engines and commands are called by names."""
    nodes = list(ast.walk(ast.parse((SOURCE / file).read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names |= {text.rpartition(":")[2] for text in texts}  # `module:function`
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def _bodies(node: ast.AST | None) -> Iterator[ast.AST]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield from node.body


@cache
def _graph() -> grimp.ImportGraph:
    return add_named_modules(grimp.build_graph("holdfast", cache_dir=None), SOURCE.parent)


def _house(package: str, floors: list[list[str]]) -> House:
    rooms = [room for floor in floors for room in floor]
    graph = _graph()
    imports = {
        room: [
            other
            for other in rooms
            if other != room
            and graph.direct_import_exists(
                importer=f"{package}.{room}", imported=f"{package}.{other}", as_packages=True
            )
        ]
        for room in rooms
    }
    return House(package, floors, imports)


def _tree() -> str:
    lines = ["```text"]
    for package in sorted(path.parent for path in SOURCE.rglob("__init__.py")):
        depth = len(package.relative_to(SOURCE).parts)
        role = _role(package / "__init__.py")
        first = f"{'  ' * depth}{package.name:<{24 - 2 * depth}}"
        lines += textwrap.wrap(role, _WIDTH, initial_indent=first, subsequent_indent=" " * 24, break_on_hyphens=False)
    return "\n".join([*lines, "```"]) + "\n"


def _role(path: Path) -> str:
    """Return the first paragraph of a module's docstring as one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path} does not say what it is for"
    return " ".join(docstring.partition("\n\n")[0].split())


def _picture() -> str:
    (house,) = houses()
    top = len(house.floors)
    floors = [f"{top - number:2}  {', '.join(floor)}" for number, floor in enumerate(house.floors)]
    return "\n".join(["```text", *floors, "```"]) + "\n"


def _forbidden() -> str:
    lines = [f"- {contract['name']}" for kind in ("independence", "forbidden") for contract in contracts(kind)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text()))
    print(f"wrote {PAGE.relative_to(ROOT)}")
