"""Import contracts that also see modules named in a text: `lint-imports` reads them from pyproject.toml.

Some processes are started by the name of a module, such as `module_command("holdfast.trainer.launch")`. These contracts
count such a text as an import."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.layers import LayersContract
from importlinter.domain.contract import ContractCheck

SOURCE = Path(__file__).resolve().parent.parent / "src"
_NAMES_MODULE = re.compile(r"holdfast(\.\w+)+")


def add_named_modules(graph: grimp.ImportGraph, source: Path) -> grimp.ImportGraph:
    """Add to the graph the modules that files of the package name in texts; return the graph.

    A text names `holdfast.a.b` also if a class or the rest of an f-string follows."""
    modules = graph.modules
    for path in sorted(source.rglob("*.py")):
        importer = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for name, line in _names(path):
            module = name
            while module not in modules:
                module = module.rpartition(".")[0]
            if module != importer and "." in module and not importer.startswith(f"{module}."):
                graph.add_import(importer=importer, imported=module, line_number=line, line_contents=f'"{name}"')
    return graph


def _names(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (match := _NAMES_MODULE.match(node.value))
        ):
            yield match[0], node.lineno


class Layers(LayersContract):
    """Layers, as of import-linter, with named modules."""

    type_name = "layers_by_import_or_name"

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        return super().check(add_named_modules(graph, SOURCE), verbose)


class AcyclicSiblings(AcyclicSiblingsContract):
    """No circle among the parts of any package, as of import-linter, with named modules."""

    type_name = "acyclic_by_import_or_name"

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        return super().check(add_named_modules(graph, SOURCE), verbose)
