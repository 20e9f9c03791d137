"""Which tests may notice a change of a module: those that import it come first."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Whole runs, by the package that they show most of.
_RUNS_OF_ALL = ["integration/test_sft_stop.py", "integration/test_rl_exact.py", "integration/test_rl_heals.py"]
_WHOLE_RUNS = {
    "trainer": [
        "unit/trainer/programs/test_resumed_in_process.py",
        "faults/test_kill_during_save.py",
        "integration/test_sft_exact.py",
    ],
    "orchestrator": ["integration/test_rl_exact.py", "integration/test_rl_dropped.py"],
    "inference": ["integration/test_inference_weights.py", "integration/test_engine_contract.py"],
}
_COMMANDS = ["tests/unit/test_cli.py"]  # which find most modules by their names in a table
_MOST_FILES = 12


def rounds_of(module: str) -> list[list[str]]:
    """Return files of tests for a module such as `holdfast/trainer/saving.py`, in rounds; the fastest first."""
    name = _dotted(Path(module))
    near = _tests_that_import({name})
    far = _tests_that_import({other for other, imported in _imports_of_src().items() if name in imported})
    words = {word for part in name.split(".")[-2:] for word in part.split("_") if len(word) > 4}
    named = [test for test in _imports_of_tests() if words & set(Path(test).stem.split("_"))]
    package = "/".join(["tests", "unit", *Path(module).parts[1:-1]])
    beside = [test for test in _imports_of_tests() if str(Path(test).parent) == package]
    rounds = [
        [test for test in near if "unit/" in test],
        [test for test in named if "unit/" in test],
        beside[:_MOST_FILES],
        [test for test in far if "unit/" in test][:_MOST_FILES],
        _COMMANDS,
        [test for test in (*near, *named) if "unit/" not in test],
        [f"tests/{test}" for test in _WHOLE_RUNS.get(module.split("/")[1], _RUNS_OF_ALL)],
    ]
    seen: set[str] = set()
    chosen = []
    for tests in rounds:
        chosen.append([test for test in dict.fromkeys(tests) if test not in seen])
        seen.update(tests)
    return [tests for tests in chosen if tests]


def _tests_that_import(modules: set[str]) -> list[str]:
    """Return the files of tests that import one of `modules`, those that import least besides first."""
    found = {test: imported for test, imported in _imports_of_tests().items() if imported & modules}
    return sorted(found, key=lambda test: len(found[test]))


@functools.cache
def _imports_of_src() -> dict[str, set[str]]:
    src = ROOT / "src"
    return {_dotted(path.relative_to(src)): _imports(path) for path in sorted(src.rglob("*.py"))}


@functools.cache
def _imports_of_tests() -> dict[str, set[str]]:
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return {str(path.relative_to(ROOT)): _imports(path) for path in tests if "gpu" not in path.parts}


def _imports(path: Path) -> set[str]:
    """Return what a file imports, and whatever it takes from that, which may be modules too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
