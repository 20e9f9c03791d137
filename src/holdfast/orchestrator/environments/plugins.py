"""Environments of other packages: entry points of the group `holdfast.environments`, `name = "module:Class"`.

Nothing of a package is imported before somebody asks for one of its environments.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

GROUP = "holdfast.environments"


@dataclass(frozen=True)
class Plugin:
    """One entry point.

    Attributes:
        name: the id of the environment.
        target: `module:Class`, as the package has written it.
        package: that is installed, with its version.
    """

    name: str
    target: str
    package: str

    @property
    def module(self) -> str:
        """The module that holds the class."""
        return self.target.partition(":")[0].strip()

    @property
    def class_name(self) -> str:
        """The class; empty where the package names none."""
        return self.target.partition(":")[2].partition("[")[0].strip()


def find_plugins() -> dict[str, list[Plugin]]:
    """Return the entry points of all installed packages by name: several where packages want the same one.

    What lies in the working directory is not installed: whether it is on the path depends on what was imported before.
    """
    here = Path.cwd()
    path = [entry for entry in sys.path if entry and not (os.path.exists(entry) and here.samefile(entry))]  # noqa: PTH110
    found: dict[str, list[Plugin]] = {}
    seen: set[str] = set()
    for package in metadata.distributions(path=path):
        # Of one package that is there twice, the first is imported.
        identity = (package.name or "").lower().replace("_", "-")
        if identity in seen:
            continue
        seen.add(identity)
        for entry in package.entry_points:
            if entry.group == GROUP:
                plugin = Plugin(entry.name, entry.value, f"{package.name} {package.version}")
                found.setdefault(entry.name, []).append(plugin)
    return {name: sorted(found[name], key=lambda plugin: plugin.package) for name in sorted(found)}
