"""An environment of two turns with a slow tool between them, during which nobody may ask the engine anything."""

import asyncio

from holdfast.orchestrator.env.interface import Message, Session, Task
from holdfast.orchestrator.env.reverse_text import ReverseText

_TOOL_S = 0.3


class SlowTool(ReverseText):
    """Reverses a text, after the answer of a tool that says nothing new."""

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        await asyncio.sleep(_TOOL_S)
        session.append_messages([Message("user", "again")])
        await session.sample()
