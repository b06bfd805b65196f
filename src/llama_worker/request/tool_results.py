"""What a tool returned, as the text that the model gets. Pure, but for the code of the value
itself."""

from __future__ import annotations

import json
from typing import Any


class ToolResultError(Exception):
    """A tool returned what JSON cannot hold. The text says what."""


def encode_result(value: Any) -> str:
    """The text of a tool message: a str as it is, any other JSON value dumped. Raises
    ToolResultError.

    It runs code of the value (a subclass of dict may do anything): call it on the tool's thread.
    """
    try:
        if isinstance(value, str):
            text = str.__str__(value)  # of a string enum the value, not its name
        else:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            _refuse_odd_keys(value)
        text.encode()
    except Exception as exc:
        raise ToolResultError(
            f"the tool returned a {type(value).__name__} that JSON cannot hold: "
            f"{exc or type(exc).__name__}"
        ) from exc
    return text


def _refuse_odd_keys(value: Any) -> None:
    """`json.dumps` turns keys that are numbers or None into strings: the model would read another
    value."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is not a str")
            rest.extend(item.values())
        elif isinstance(item, (list, tuple)):
            rest.extend(item)
