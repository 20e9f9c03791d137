"""An MCP server on its standard input and output that starts at once: it imports no library. It has one tool, or with
the word `paged` behind it tools on two pages, which say what few servers say.
"""

import json
import sys

_TEXT = {"text": {"type": "string"}}
_NOTE = {
    "name": "note",
    "description": "Note a text, and tell all that were noted.",
    "inputSchema": {"type": "object", "properties": _TEXT, "required": ["text"]},
}
_SCHEMA = {"type": "object", "properties": _TEXT | {"number": {"type": "integer"}}}
_PAGES = {"": (["structured", "silent"], {"nextCursor": "more"}), "more": (["refused", "echo"], {})}
_notes = []


def answer(method, params):
    """Return what a request is answered with, beside its number."""
    match method, params.get("name"):
        case "initialize", _:
            about = {"name": "notes", "version": "1"}
            result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list", _ if sys.argv[1:] == ["paged"]:
            names, following = _PAGES[params.get("cursor") or ""]
            result = {"tools": [{"name": name, "inputSchema": _SCHEMA} for name in names], **following}
        case "tools/list", _:
            result = {"tools": [_NOTE]}
        case "tools/call", "note":
            _notes.append(params["arguments"]["text"])
            result = {"content": [{"type": "text", "text": " ".join(_notes)}], "isError": False}
        case "tools/call", "echo":
            result = {"content": [{"type": "text", "text": repr(params["arguments"])}]}
        case "tools/call", "structured":
            result = {"content": [], "structuredContent": {"sum": 3}}
        case "tools/call", "silent":
            result = {"content": [], "isError": True}
        case "tools/call", _:
            return {"error": {"code": -32602, "message": "not these arguments"}}
        case _:
            return {"error": {"code": -32601, "message": f"no method {method}"}}
    return {"result": result}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            found = answer(message["method"], message.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **found}), flush=True)
