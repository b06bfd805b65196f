"""Why a stream broke. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from llama_worker.types import ContextUse, RequestFailReason


class StreamFailure(Struct, frozen=True, kw_only=True):
    """`connect_failed`, `stream_disconnected`, `protocol_error`, `http_error` or `context_exceeded`."""

    reason: RequestFailReason
    detail: str
    http_status: int | None = None
    context: ContextUse | None = None  # of a prompt that does not fit


def exceeds_context(message: str, kind: str | None) -> bool:
    """Whether a server's error says that the prompt does not fit (b11434; builds before September 2025)."""
    return kind == "exceed_context_size_error" or "exceeds the available context size" in message


def context_use(error: Mapping[str, Any]) -> ContextUse | None:
    """The numbers of such an error, where it has them."""
    prompt, context = error.get("n_prompt_tokens"), error.get("n_ctx")
    if not (isinstance(prompt, int) and isinstance(context, int)):
        return None
    return {"n_prompt_tokens": prompt, "n_ctx": context}
