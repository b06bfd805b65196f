"""What the last message says, and so the model."""

import json
from typing import Any

GREETING = "Hello there, my friend."
# begins with the relay's cue
STORY = "Once upon a time there was a small model that said the same."
TALE = " ".join(["tick tock"] * 30)  # 60 tokens: long enough to be cut short
TOO_LONG = "word " * 5000

ADD_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def thinks(thought: str, then: str) -> str:
    """Reasoning, and what follows it."""
    return f"<think>\n{thought}\n</think>\n\n{then}"


def calls(*arguments: dict[str, int]) -> str:
    """Tool calls in one turn."""
    told = (json.dumps({"name": "add", "arguments": given}) for given in arguments)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in told)
