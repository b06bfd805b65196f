"""Stores the responses and items that later requests refer to by id. It is bounded by count and
bytes; the least recently used go first. Pure.

They are kept as JSON text, whose size the store can count: parsed objects would take several times
that.
"""

from __future__ import annotations

import json
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from llama_worker.responses.api.conversation import Item, item_type
from llama_worker.responses.errors import ApiError

_ITEM_ID = re.compile(r"[a-z]+_(?P<response>[0-9a-f]{32})[0-9]+")
_ENTRY_BYTES = 1024  # of a response besides its text: the object, its id, its table entries
_ITEM_ID_BYTES = 256  # of each item id, about


def response_id_of(unique: str) -> str:
    """The id of a response; `unique`: 32 hexadecimal digits."""
    return f"resp_{unique}"


def item_id_of(unique: str, prefix: str, number: int) -> str:
    """The id of the response's item of that number."""
    return f"{prefix}_{unique}{number}"


def owner_of(item_id: str) -> str | None:
    """The id of the response that the item belongs to; None if this proxy did not make the id."""
    found = _ITEM_ID.fullmatch(item_id)
    return response_id_of(found["response"]) if found is not None else None


class References(Struct, frozen=True, kw_only=True):
    """What the request wants from the store."""

    previous_response_id: str | None = None
    item_ids: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.previous_response_id is not None or bool(self.item_ids)

    def response_ids(self) -> set[str]:
        """The ids of the previous response and of the responses that the items belong to."""
        owners = {self.previous_response_id, *map(owner_of, self.item_ids)}
        return {owner for owner in owners if owner is not None}


# What the store has of a request's references: the history, and by id the items, of which unknown
# ones are left out.
RecalledItems = tuple[tuple[Item, ...], Mapping[str, Item]]


class StoredResponse(Struct, frozen=True, kw_only=True):
    """One response, and the input items of its own request, as JSON. `item_ids`: those of the
    input, then those of the output."""

    id: str
    response_json: bytes
    input_json: bytes
    item_ids: tuple[str, ...]
    previous_response_id: str | None = None

    @property
    def size_bytes(self) -> int:
        texts = sys.getsizeof(self.response_json) + sys.getsizeof(self.input_json)
        ids = sum(_ITEM_ID_BYTES + len(item_id) for item_id in self.item_ids)
        return _ENTRY_BYTES + texts + ids

    def response(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.response_json)
        return found

    def input_items(self) -> list[Item]:
        found: list[Item] = json.loads(self.input_json)
        return found

    def items(self) -> list[Item]:
        """The items that the request and its response add to the conversation."""
        return [*self.input_items(), *self.response()["output"]]

    def items_by_id(self) -> dict[str, Item]:
        """The items that have an id; the latest if several have the same."""
        return {item["id"]: item for item in self.items() if isinstance(item.get("id"), str)}


def stored_response(
    response: Mapping[str, Any], input_items: Sequence[Item], previous_response_id: str | None
) -> StoredResponse:
    ids = [item.get("id") for item in (*input_items, *response["output"])]
    return StoredResponse(
        id=response["id"],
        response_json=_json(response),
        input_json=_json(input_items),
        item_ids=tuple(dict.fromkeys(item_id for item_id in ids if isinstance(item_id, str))),
        previous_response_id=previous_response_id,
    )


class RecalledResponses(Struct, frozen=True, kw_only=True):
    """The responses that hold what was asked for. `chain`: those of the conversation, oldest first.
    `missing_id`: the response before them that is unknown. `holders`: by item id, a response that
    has the item."""

    chain: tuple[StoredResponse, ...] = ()
    missing_id: str | None = None
    holders: Mapping[str, StoredResponse] = {}

    def read(self) -> RecalledItems:
        """The items themselves. It parses the JSON, so it is for the thread that asked. Raises
        ApiError if a response of the conversation is missing."""
        if self.missing_id is not None:
            raise _missing_response(self.missing_id, self.chain)
        holders = {holder.id: holder for holder in self.holders.values()}  # parsed once each
        by_id = {response_id: holder.items_by_id() for response_id, holder in holders.items()}
        items = {item_id: by_id[holder.id][item_id] for item_id, holder in self.holders.items()}
        return tuple(item for stored in self.chain for item in stored.items()), items


class ResponseStore:
    """The stored responses. Not thread-safe: one actor owns it. A conversation is a chain of
    responses, each stored once."""

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        # the least recently used first
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        # by item id, the ids of the responses that have the item, the latest last
        self._owners: dict[str, dict[str, None]] = {}
        self._bytes = 0

    def put(self, stored: StoredResponse) -> None:
        """Store a response, unless it alone is larger than the store may be."""
        self.delete(stored.id)
        if stored.size_bytes > self._max_bytes or self._max_count < 1:
            return
        self._chain(stored.previous_response_id)  # as recently used as its successor
        self._stored[stored.id] = stored
        self._bytes += stored.size_bytes
        for item_id in stored.item_ids:
            self._owners.setdefault(item_id, {})[stored.id] = None
        while len(self._stored) > self._max_count or self._bytes > self._max_bytes:
            self.delete(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse | None:
        """The response, which counts as a use."""
        return self._used(response_id) if response_id in self._stored else None

    def _used(self, response_id: str) -> StoredResponse:
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def delete(self, response_id: str) -> StoredResponse | None:
        """Delete and return the response; None if it is unknown."""
        stored = self._stored.pop(response_id, None)
        if stored is None:
            return None
        self._bytes -= stored.size_bytes
        for item_id in stored.item_ids:
            owners = self._owners[item_id]
            del owners[response_id]
            if not owners:
                del self._owners[item_id]
        return stored

    def recall(self, wanted: References) -> RecalledResponses:
        """The conversation up to the wanted response, and the wanted items; counts as a use."""
        chain, missing_id = self._chain(wanted.previous_response_id)
        return RecalledResponses(
            chain=chain,
            missing_id=missing_id,
            holders={
                item_id: self._used(next(reversed(self._owners[item_id])))
                for item_id in wanted.item_ids
                if item_id in self._owners
            },
        )

    def _chain(self, response_id: str | None) -> tuple[tuple[StoredResponse, ...], str | None]:
        """The response and all before it, oldest first, and the id of one that is missing.

        All count as used, the oldest last, so that a conversation is evicted from its end.
        """
        chain: list[StoredResponse] = []
        while response_id is not None:
            stored = self.get(response_id)
            if stored is None or len(chain) == len(self._stored):  # the latter: a cycle
                break
            chain.append(stored)
            response_id = stored.previous_response_id
        return tuple(chain[::-1]), response_id


def not_found(message: str, param: str) -> ApiError:
    """The refusal of a request that refers to what the store lacks."""
    return ApiError(
        400,
        f"{message} Responses are kept in memory, the least recently used are dropped first, and "
        "with `store: false` none is kept: send the whole conversation as `input`.",
        code="previous_response_not_found",
        param=param,
    )


def _missing_response(missing_id: str, chain: Sequence[StoredResponse]) -> ApiError:
    message = f"Previous response with id {missing_id!r} not found."
    if chain:
        message = (
            f"Response with id {missing_id!r} not found, from which {chain[-1].id!r} continues."
        )
    return not_found(message, "previous_response_id")


def input_list(items: Iterable[Item]) -> dict[str, Any]:
    """The listing of a request's own input items, with the fields that clients may leave out."""
    data = [_listed(item, f"item_{number}") for number, item in enumerate(items)]
    first_id, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    ends = {"first_id": first_id, "last_id": last_id}
    return {"object": "list", "data": data, **ends, "has_more": False}


def _listed(item: Item, item_id: str) -> dict[str, Any]:
    given = {key: value for key, value in item.items() if value is not None}
    listed = {"id": item_id, "type": item_type(item), "status": "completed", **given}
    if listed["type"] == "message":
        content = given.get("content", [])
        parts = content if isinstance(content, list) else [content]
        is_ours = given.get("role") == "assistant"
        listed["content"] = [_listed_part(part, is_ours) for part in parts if part is not None]
    return listed


def _listed_part(part: Any, is_ours: bool) -> Any:
    if isinstance(part, str):
        part = {"type": "output_text" if is_ours else "input_text", "text": part}
    return {"annotations": [], **part} if part.get("type") == "output_text" else part


def _json(value: object) -> bytes:
    """Lone surrogates, which JSON can hold and UTF-8 cannot, are escaped."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")
