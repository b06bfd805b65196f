"""`ApiError`: an error reply in the form that OpenAI's clients read. Pure."""

from __future__ import annotations

import re
from typing import Any

from llama_worker.stream.failure import exceeds_context

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
CONTEXT_EXCEEDED = "context_length_exceeded"
_LOADING_S = 5
_SECONDS = re.compile("[0-9]{1,6}")


class ApiError(Exception):
    """An error reply: HTTP status and fields of the error object. `message` is for a person."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        should_retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status) or (
            "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    def headers(self) -> list[tuple[str, str]]:
        retry = [("Retry-After", str(self.retry_after_s))] if self.retry_after_s is not None else []
        return retry if self.should_retry else [("X-Should-Retry", "false")]


def refused_by_server(status: int, detail: str, retry_after: str = "") -> ApiError:
    """The server's own error reply, passed on. `detail`: its text by `describe_http_error`;
    `retry_after`: the value of its Retry-After header, "" for none."""
    stated_s = int(retry_after) if _SECONDS.fullmatch(retry_after) else None
    return ApiError(
        status if 400 <= status < 600 else 502,
        detail,
        code=error_code(detail),
        retry_after_s=_LOADING_S if stated_s is None and status == 503 else stated_s,
    )


def error_code(detail: str) -> str | None:
    """The code that clients look for, if the server's error has one: that of a full context."""
    is_full = (
        exceeds_context(detail, None)
        or "exceed_context_size_error" in detail
        or "context size has been exceeded" in detail.lower()
    )
    return CONTEXT_EXCEEDED if is_full else None
