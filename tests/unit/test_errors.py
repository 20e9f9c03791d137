"""The tree of exceptions at the top of `holdfast.errors` is that of the code."""

import re
from pathlib import Path

from holdfast import errors

SRC = Path(errors.__file__).parents[1]


def _bases() -> dict[str, str]:
    """Return the first base of every class of `src`, by name."""
    sources = "\n".join(path.read_text() for path in SRC.rglob("*.py"))
    return dict(re.findall(r"^class (\w+)\((?:[\w.]+\.)?(\w+)[,)]", sources, re.MULTILINE))


def _in_code() -> dict[str, str]:
    """Return the public exceptions below `HoldfastError`, each with its base."""
    bases = _bases()

    def is_error(name: str) -> bool:
        return name == "HoldfastError" or (name in bases and is_error(bases[name]))

    return {name: base for name, base in bases.items() if is_error(base) and not name.startswith("_")}


def _drawn() -> dict[str, str]:
    """Return the same as the docstring draws it."""
    tree: dict[str, str] = {}
    parents = ["HoldfastError"]
    for indent, name in re.findall(r"^    ((?:│   )*)[├└]── (\w+)", errors.__doc__ or "", re.MULTILINE):
        depth = len(indent) // 4
        parents = [*parents[: depth + 1], name]
        tree[name] = parents[depth]
    return tree


def test_the_tree_is_that_of_the_code() -> None:
    assert len(_drawn()) > 10
    assert _drawn() == _in_code()
