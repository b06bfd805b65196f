"""Ids of responses and of their items: an item's says whose it is. Pure."""

from __future__ import annotations

import re

_ITEM_ID = re.compile(r"[a-z]+_(?P<response>[0-9a-f]{32})[0-9]+")


def response_id_of(unique: str) -> str:
    """The id of a response; `unique`: 32 hexadecimal digits."""
    return f"resp_{unique}"


def item_id_of(unique: str, prefix: str, number: int) -> str:
    """The id of the response's item of that number."""
    return f"{prefix}_{unique}{number}"


def owner_of(item_id: str) -> str | None:
    """The id of the response that the item belongs to; None where the id is none of ours."""
    found = _ITEM_ID.fullmatch(item_id)
    return response_id_of(found["response"]) if found is not None else None
