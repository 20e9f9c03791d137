"""An MCP server for tests whose tools come on two pages, and which says what few servers say."""

import asyncio
from typing import Any

from mcp import MCPError, types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "number": {"type": "integer"}}}
_PAGES = {"": (["structured", "silent"], "more"), "more": (["refused", "echo"], None)}


async def _list(context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    names, following = _PAGES[(params and params.cursor) or ""]
    return types.ListToolsResult(
        tools=[types.Tool(name=name, input_schema=_SCHEMA) for name in names], next_cursor=following
    )


async def _call(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    match params.name:
        case "structured":
            return types.CallToolResult(content=[], structured_content={"sum": 3})
        case "silent":
            return types.CallToolResult(content=[], is_error=True)
        case "refused":
            raise MCPError(-32602, "not these arguments")
        case _:
            return types.CallToolResult(content=[types.TextContent(type="text", text=repr(params.arguments))])


async def _serve() -> None:
    server: Server[Any] = Server("paged", on_list_tools=_list, on_call_tool=_call)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(_serve())
