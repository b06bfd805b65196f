"""The body of a request for a response. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from llama_worker.responses.refusal import RequestRefused

_MAX_DEPTH = 200  # what is kept and repeated is put together again, with less of the stack left than here


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object, which can be written as JSON again. Raises RequestRefused."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise RequestRefused(400, "the request's body is not JSON") from None
    if not isinstance(body, dict):
        raise RequestRefused(400, "the request's body is not a JSON object")
    _check(body)
    return body


def _check(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(_MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise RequestRefused(400, f"the request's body is nested deeper than {_MAX_DEPTH} levels")


def _children(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list):
        return value
    if isinstance(value, float) and not math.isfinite(value):  # Python reads NaN and 1e999, JSON has neither
        raise RequestRefused(400, "a number of the request is beyond the range of a double")
    return ()
