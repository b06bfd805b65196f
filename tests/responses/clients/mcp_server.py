"""An MCP server over stdio with one tool, `lookup`: the meaning of a word."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "lookup",
    "description": "Looks a word up.",
    "inputSchema": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}


def result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """What a request of that method is answered with."""
    match method:
        case "initialize":
            info = {"name": "dict", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": f"the meaning of {params['arguments']['word']}"}]}
    return {}


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:  # else it is a notification
            answer = result(request["method"], request.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": answer}), flush=True)


if __name__ == "__main__":
    main()
