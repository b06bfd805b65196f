"""The responses that can be referred to: bounded by count and bytes, the least recently used go first. Pure."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llama_worker.responses.conversation import Item
from llama_worker.responses.request import Recalled, References


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response, and the input items of its own request."""

    response: Mapping[str, Any]
    input_items: tuple[Item, ...]
    previous_response_id: str | None = None

    @property
    def id(self) -> str:
        return str(self.response["id"])


class ResponseStore:
    """Not thread-safe: one actor owns it. A conversation is a chain of responses, each stored once."""

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()  # the least recently used first
        self._items: dict[str, dict[str, Item]] = {}  # by item id, and by the response that has it: it may come again
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def size_bytes(self) -> int:
        """As JSON."""
        return self._bytes

    def put(self, stored: StoredResponse) -> None:
        """Keep it; one that is larger than the whole store is not kept."""
        self.delete(stored.id)
        size = len(json.dumps([stored.response, stored.input_items]))
        if size > self._max_bytes or self._max_count < 1:
            return
        self._chain(stored.previous_response_id)  # as recently used as its successor
        self._stored[stored.id] = (stored, size)
        self._bytes += size
        for item in _items(stored):
            if isinstance(item.get("id"), str):
                self._items.setdefault(item["id"], {})[stored.id] = item
        while len(self._stored) > self._max_count or self._bytes > self._max_bytes:
            self.delete(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse | None:
        """The response, which counts as a use."""
        found = self._stored.get(response_id)
        if found is None:
            return None
        self._stored.move_to_end(response_id)
        return found[0]

    def delete(self, response_id: str) -> bool:
        """Whether it was there."""
        found = self._stored.pop(response_id, None)
        if found is None:
            return False
        stored, size = found
        self._bytes -= size
        for item in _items(stored):
            item_id = str(item.get("id"))
            owners = self._items.get(item_id, {})
            owners.pop(response_id, None)
            if not owners:
                self._items.pop(item_id, None)
        return True

    def recall(self, wanted: References) -> Recalled:
        """The conversation up to a response, and the items asked for."""
        history: tuple[Item, ...] | None = ()
        if wanted.previous_response_id is not None:
            chain = self._chain(wanted.previous_response_id)
            history = None if chain is None else tuple(item for stored in chain for item in _items(stored))
        items = {}
        for item_id in wanted.item_ids:
            if item_id in self._items:
                owner, items[item_id] = next(reversed(self._items[item_id].items()))
                self.get(owner)
        return Recalled(history=history, items=items)

    def _chain(self, response_id: str | None) -> list[StoredResponse] | None:
        """The response and all before it, oldest first; None where one is missing.

        All are used, the oldest last: of a conversation that is forgotten, the end goes first.
        """
        chain: list[StoredResponse] = []
        while response_id is not None:
            stored = self.get(response_id)
            if stored is None or len(chain) == len(self._stored):  # the latter: it holds itself
                return None
            chain.append(stored)
            response_id = stored.previous_response_id
        return chain[::-1]


def _items(stored: StoredResponse) -> tuple[Item, ...]:
    return (*stored.input_items, *stored.response["output"])
