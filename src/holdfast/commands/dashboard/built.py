"""What the process that makes a page hands to the launcher."""

from __future__ import annotations

import msgspec

PROCESS = "holdfast.commands.report.live"
"""Its module, which is started and not imported."""


class Built(msgspec.Struct):
    """A page as it was made.

    Attributes:
        tag: no other page has it.
        cpu_s: seconds of a core that it took.
        page: the whole of it.
        update: the same less the library that draws: for a page that is open.
    """

    tag: str
    cpu_s: float
    page: bytes
    update: bytes
