"""Describes why a stream broke, and the errors in replies that are not streams. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from llama_worker.config.validation import as_count, json_of
from llama_worker.stream.events import encodable
from llama_worker.types.request import ContextUse, RequestFailReason

_MAX_MESSAGE_CHARS = 2000
# b11434 says this with status 500, as if it had failed itself: of media, of what is in `messages`
# and `tools`, where a template raises, and of schemas
_REFUSES = re.compile(
    "(image|audio|video) input is not supported|does not support multimodal"
    "|Failed to (download|load) image|cannot make GET request|Invalid base64 value"
    "|unsupported URL scheme|invalid URL|HTTPS is not supported"
    "|Failed to parse (messages|tools|tool call arguments)|Cannot (use|specify) both"
    "|Cannot specify grammar with tools|requires --jinja|Unknown reasoning format|While executing "
    "|NotImplemented: |JSON schema error at "
)


class StreamFailure(Struct, frozen=True, kw_only=True):
    """Why an exchange with the server failed; `detail` is for a person."""

    reason: RequestFailReason
    detail: str
    http_status: int | None = None
    is_unsent: bool = False  # nothing of the request was sent
    context: ContextUse | None = None  # if the prompt does not fit

    @property
    def is_disconnect(self) -> bool:
        """Whether the connection broke, or was never made: perhaps because the server died."""
        return self.reason in (
            RequestFailReason.CONNECT_FAILED,
            RequestFailReason.STREAM_DISCONNECTED,
        )


def exceeds_context(message: str, kind: str | None) -> bool:
    """Whether an error says that the prompt does not fit (b11434; before September 2025)."""
    return kind == "exceed_context_size_error" or "exceeds the available context size" in message


def is_of_shared_context(message: str) -> bool:
    """Whether an error says that a context which slots share is full (b11434). Then all of their
    requests fail at once, by no fault of the server."""
    return "Context size has been exceeded" in message


def context_use(error: Mapping[str, Any]) -> ContextUse | None:
    """The token counts of an error that says that the prompt does not fit; None if it has none."""
    prompt, context = as_count(error.get("n_prompt_tokens")), as_count(error.get("n_ctx"))
    if prompt is None or context is None:
        return None
    return {"n_prompt_tokens": prompt, "n_ctx": context}


def describe_http_error(status: int, body: bytes | bytearray) -> StreamFailure:
    """The failure, with the server's own message and the status; a 500 that refuses what it was
    sent becomes 400."""
    text = body.decode(errors="replace").strip()
    reply = json_of(text)
    error = reply.get("error") if isinstance(reply, Mapping) else None
    reason, context = RequestFailReason.HTTP_ERROR, None
    if isinstance(error, Mapping):
        message, kind = error.get("message"), error.get("type")
        if message:
            text = f"{message}" + (f" ({kind})" if kind else "")
        if exceeds_context(str(message), kind):
            reason, context = RequestFailReason.CONTEXT_EXCEEDED, context_use(error)
    elif isinstance(error, str):
        text = error
    return StreamFailure(
        reason=reason,
        detail=f"HTTP {status}: {encodable(text)[:_MAX_MESSAGE_CHARS] or 'no message'}",
        http_status=400 if status == 500 and _REFUSES.search(text) else status,
        context=context,
    )


def disconnected(where: str, cause: str | None = None) -> StreamFailure:
    """The failure of a connection that ended; `where`: at which point of the exchange."""
    detail = f"the connection ended {where}" + (f": {cause}" if cause else "")
    return StreamFailure(reason=RequestFailReason.STREAM_DISCONNECTED, detail=detail)


def refuses_tools(failure: StreamFailure) -> bool:
    """Whether a server accepts no tools at all (and does not just refuse one of them)."""
    detail = failure.detail.lower()
    return failure.http_status is not None and any(
        words in detail
        for words in (
            "tools param requires --jinja",  # b11434 started with --no-jinja, status 500
            "cannot use tools with stream",  # builds before May 2025: none in streams
            "unsupported param: tools",  # builds before January 2025: none at all
            "tools are not supported",
            "does not support tool",
            "doesn't support tool",
            "tool calls are not supported",
            "tool calling is not supported",
        )
    )


def reports_malformed_output(message: str) -> bool:
    """Whether the server says that the model wrote a malformed tool call, or what else the format
    of its chat does not allow (b11434 and older)."""
    text = message.lower()
    said = (
        "output that does not match the expected",
        "failed to parse tool call",
        "failed to parse input at pos",  # b8334, b9378
        "invalid diff:",  # what it had understood before does not fit any more
        "empty grammar stack",  # of a lazy grammar, begun in the middle of a token
    )
    return any(words in text for words in said)
