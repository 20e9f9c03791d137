"""Files that were given to another part of a configuration than they are for, such as trainer and orchestrator swapped.

What pydantic finds in one is a line for each of its keys, and none says that all of them stand elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

_MOST_KEYS = 5


@dataclass(frozen=True)
class Part:
    """A file as it was given.

    Attributes:
        path: of the file.
        section: that it was given to; empty: the whole.
        keys: at its top level.
    """

    path: str
    section: str
    keys: tuple[str, ...]


def misplaced(parts: Iterable[Part], whole: Collection[str], sections: Mapping[str, Collection[str]]) -> list[str]:
    """Return a line for each file whose keys belong to another section, by most of them.

    Sections that know the same keys of a file are all named; where each knows others of them, there is no line.

    Args:
        whole: keys of the whole configuration.
        sections: keys of its sections.
    """
    lines = []
    for part in parts:
        if part.section and part.section not in sections:  # there is none of that name
            continue
        own = sections[part.section] if part.section else whole
        foreign = [key for key in part.keys if key not in own]
        known = {name: sum(key in keys for key in part.keys) for name, keys in sections.items() if name != part.section}
        most = max(known.values(), default=0)
        others = [name for name, number in known.items() if number == most]
        alike = {tuple(key for key in foreign if key in sections[name]) for name in others}
        belongs = alike.pop() if len(alike) == 1 else ()
        if not belongs or most <= len(part.keys) - len(foreign):
            continue
        shown = ", ".join(belongs[:_MOST_KEYS]) + (", ..." if len(belongs) > _MOST_KEYS else "")
        given = f"--{part.section.replace('_', '-')} @ {part.path}" if part.section else f"@ {part.path}"
        lines.append(
            f"{part.path} looks like a file for the section {' or '.join(others)}: {shown} "
            f"{'belongs' if len(belongs) == 1 else 'belong'} there. It was given as '{given}': give it as "
            + " or ".join(f"'--{name.replace('_', '-')} @ {part.path}'" for name in others)
            + "."
        )
    return lines
