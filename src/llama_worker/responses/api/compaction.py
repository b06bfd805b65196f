"""Compaction: the model sums a conversation up, to go on in a smaller context. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_worker.responses.api.conversation import Item, seal
from llama_worker.responses.api.request import ChatRequest, input_items, normalise
from llama_worker.responses.errors import ApiError

_ORDER = (
    "The conversation so far is about to be replaced by a summary that you write now, so that it "
    "can go on in a smaller context. Write that summary and nothing else. Keep what is needed to "
    "go on: what the user wants, word for word where the words matter; facts, names, numbers, "
    "file paths and code that were settled; what was done, and what came of it; what is still to "
    "be done. Call no tool, and answer no earlier question."
)


def compaction_request(
    body: Mapping[str, Any], history: tuple[Item, ...] | None, found: Mapping[str, Item]
) -> ChatRequest:
    """The chat completion that sums the conversation up. Raises ApiError for a bad request."""
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise ApiError(400, "Missing required parameter: 'model'.", param="model")
    items = input_items(body)
    if not items and history == ():
        raise ApiError(400, "Missing required parameter: 'input'.", param="input")
    order = {"type": "message", "role": "user", "content": _ORDER}
    asked = {**body, "input": [*items, order], "store": False, "stream": False}
    asked |= {"tool_choice": "none", "text": None}
    asked |= dict.fromkeys(("generate", "prompt_cache_options"))  # a summary is always generated
    return normalise(asked, history, found)


def compacted(response: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    """The reply with the conversation's new beginning, from the response to `compaction_request`.

    Raises ApiError if the model wrote no summary.
    """
    messages = [item for item in response["output"] if item["type"] == "message"]
    summary = "\n\n".join(message["content"][0]["text"] for message in messages).strip()
    if not summary:
        raise ApiError(502, "the model wrote no summary", code="upstream_failed")
    item = {"id": item_id, "type": "compaction", "encrypted_content": seal(summary)}
    return {
        "id": response["id"],
        "object": "response.compaction",
        "created_at": response["created_at"],
        "output": [item],
        "usage": response["usage"],
    }
