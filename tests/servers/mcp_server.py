"""An MCP server that remembers what it was told: `python -m tests.servers.mcp_server [PORT [sessions]]`, else on its
standard input and output. With `sessions` it speaks the protocol as it was before 2026."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

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


def with_sessions() -> Any:
    """Return the app that takes every request for one of the older protocol."""
    app = server.streamable_http_app()

    async def older(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["headers"] = [header for header in scope["headers"] if header[0] != b"mcp-protocol-version"]
        await app(scope, receive, send)

    return older


if __name__ == "__main__":
    if started := os.environ.get("MCP_STARTED"):
        with open(Path(started), "a") as file:
            file.write(f"{os.getpid()}\n")
    if sys.argv[2:] == ["sessions"]:
        import uvicorn  # not where it would only make the start longer

        uvicorn.run(with_sessions(), port=int(sys.argv[1]), log_level="error")
    elif len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
