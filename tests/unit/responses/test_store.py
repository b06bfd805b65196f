"""The store of responses keeps what is used and stays within its bounds."""

import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_worker.responses.api.store import (
    References,
    ResponseStore,
    StoredResponse,
    stored_response,
)
from llama_worker.responses.errors import ApiError


def stored(number: int, previous: int | None = None, text: str = "a") -> StoredResponse:
    said = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": text}
    response: dict[str, Any] = {"id": f"resp_{number}", "output": [said]}
    asked = {"type": "message", "role": "user", "content": f"q{number}"}
    return stored_response(response, [asked], None if previous is None else f"resp_{previous}")


def history(store: ResponseStore, number: int) -> list[Any] | None:
    try:
        found = store.recall(References(previous_response_id=f"resp_{number}")).read()[0]
    except ApiError:
        return None
    return [item["content"] for item in found]


def store_of(*kept: StoredResponse, max_count: int = 10, max_bytes: int = 10**6) -> ResponseStore:
    store = ResponseStore(max_count=max_count, max_bytes=max_bytes)
    for one in kept:
        store.put(one)
    return store


def test_a_conversation_is_a_chain() -> None:
    store = store_of(stored(1, text="a1"), stored(2, 1, text="a2"), stored(3, 1, text="b2"))
    assert history(store, 2) == ["q1", "a1", "q2", "a2"]
    assert history(store, 3) == ["q1", "a1", "q3", "b2"]
    assert history(store, 4) is None


def test_a_conversation_whose_beginning_is_gone_is_unknown() -> None:
    store = store_of(stored(1), stored(2, 1))
    assert store.delete("resp_1")
    assert not store.delete("resp_1")
    assert history(store, 2) is None


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (1, "Previous response with id 'resp_1' not found."),
        (3, "Response with id 'resp_1' not found, from which 'resp_3' continues."),
    ],
)
def test_a_refusal_names_the_response_that_is_missing(wanted: int, says: str) -> None:
    store = store_of(stored(1), stored(2, 1), stored(3, 2))
    store.delete("resp_1")
    recalled = store.recall(References(previous_response_id=f"resp_{wanted}"))
    with pytest.raises(ApiError, match=re.escape(says)) as refusal:
        recalled.read()
    assert (refusal.value.status, refusal.value.param) == (400, "previous_response_id")


def test_the_least_recently_used_goes_first() -> None:
    store = store_of(stored(1), stored(2), max_count=2)
    assert store.get("resp_1") is not None
    store.put(stored(3))
    assert store.get("resp_2") is None
    assert store.get("resp_1") is not None


def test_using_the_end_keeps_the_beginning() -> None:
    store = store_of(stored(1), stored(2), stored(3, 1), stored(4), max_count=3)
    assert store.get("resp_2") is None
    assert history(store, 3) is not None


def test_items_are_forgotten_with_their_response() -> None:
    store = store_of(stored(1), max_count=1)
    wanted = References(item_ids=("msg_1", "msg_9"))
    assert list(store.recall(wanted).read()[1]) == ["msg_1"]
    store.put(stored(2))
    assert store.recall(wanted).read()[1] == {}


def test_a_repeated_item_outlives_either_response() -> None:
    (said,) = stored(1).response()["output"]
    again = stored_response({"id": "resp_2", "output": []}, [said], None)
    wanted = References(item_ids=("msg_1",))
    for gone, left in (("resp_1", "resp_2"), ("resp_2", "resp_1")):
        store = store_of(stored(1), again)
        assert store.delete(gone)
        assert store.recall(wanted).read()[1] == {"msg_1": said}
        assert store.delete(left)
        assert store.recall(wanted).read()[1] == {}


def test_a_response_too_large_evicts_no_other() -> None:
    store = store_of(stored(1), stored(2, text="x" * 4000), max_bytes=4000)
    assert store.get("resp_1") is not None
    assert store.get("resp_2") is None


def test_the_store_stays_within_its_limit() -> None:
    limit = 4 * 1024 * 1024
    store = store_of(max_count=5000, max_bytes=limit)
    tracemalloc.start()
    try:
        for number in range(2000):
            store.put(
                stored(number, number - 1 if number % 10 else None, f"{number} " + "word " * 600)
            )
        assert sum(store.get(f"resp_{number}") is not None for number in range(2000)) > 250
        assert 0.4 < tracemalloc.get_traced_memory()[0] / limit < 2.0
    finally:
        tracemalloc.stop()


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 5), st.integers(0, 300))),
    st.integers(0, 5),
    st.integers(0, 9000),
)
def test_it_stays_within_its_bounds_and_counts_right(
    puts: list[tuple[int, int | None, int]], max_count: int, max_bytes: int
) -> None:
    store = store_of(max_count=max_count, max_bytes=max_bytes)
    kept: dict[str, StoredResponse] = {}
    found, left_bytes = [], max_bytes
    for number, previous, chars in puts:
        one = stored(number, None if previous == number else previous, "x" * chars)
        store.put(one)
        kept[one.id] = one
        found = [one for one in kept.values() if store.get(one.id) is not None]
        left_bytes = max_bytes - sum(each.size_bytes for each in found)
        assert len(found) <= max_count
        assert left_bytes >= 0
    fits = left_bytes - stored(99, text="").size_bytes
    if fits >= 0 and len(found) < max_count:  # none goes for one that just fits
        store.put(stored(99, text="x" * fits))
        assert all(store.get(one.id) is not None for one in (*found, stored(99)))
