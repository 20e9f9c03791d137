"""An MCP server with one tool, on its standard input and output, that starts at once: it imports no library."""

import json
import sys

_TOOL = {
    "name": "note",
    "description": "Note a text, and tell all that were noted.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
_notes = []


def answer(method, params):
    """Return the result of a request; None for one that is not known."""
    if method == "initialize":
        about = {"name": "notes", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [_TOOL]}
    if method == "tools/call":
        _notes.append(params["arguments"]["text"])
        return {"content": [{"type": "text", "text": " ".join(_notes)}], "isError": False}
    return None


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = answer(message["method"], message.get("params", {}))
        unknown = {"error": {"code": -32601, "message": f"no method {message['method']}"}}
        found = unknown if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **found}), flush=True)
