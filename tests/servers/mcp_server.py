"""An MCP server for tests: on its standard input and output, or at a port.

    python -m tests.servers.mcp_server [PORT]

It remembers what it was told for as long as it lives, so whoever shares it with others would notice.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes", log_level="ERROR")
_notes: list[str] = []


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Note a text, and tell all that were noted."""
    _notes.append(text)
    return " ".join(_notes)


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
def draw() -> Image:
    """Draw a picture."""
    return Image(data=b"picture", format="png")


@server.tool()
async def wait() -> str:
    """Wait for ever."""
    await asyncio.Event().wait()
    return "never"


@server.tool()
def die() -> str:
    """Die."""
    os._exit(7)


@server.tool()
def process() -> str:
    """Tell who this is, and the value of a variable."""
    return f"{os.getpid()} {os.environ.get('MCP_SECRET', 'no secret')}"


if __name__ == "__main__":
    if started := os.environ.get("MCP_STARTED"):
        with open(Path(started), "a") as file:
            file.write(f"{os.getpid()}\n")
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
