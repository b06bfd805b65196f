"""An MCP server over stdio with one tool, `lookup`: the meaning of a word."""

import json
import sys
from typing import Any

WORD = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
TOOL = {"name": "lookup", "description": "Looks a word up.", "inputSchema": WORD}

for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:  # a notification
        continue
    params, result = request.get("params") or {}, dict[str, Any]()
    match request["method"]:
        case "initialize":
            info = {"name": "dict", "version": "1"}
            result = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": info,
            }
        case "tools/list":
            result = {"tools": [TOOL]}
        case "tools/call":
            result = {
                "content": [
                    {"type": "text", "text": f"the meaning of {params['arguments']['word']}"}
                ]
            }
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
