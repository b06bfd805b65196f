"""Admission, slots and kept records."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llama_worker.request.table import Admitted, RequestRecord, RequestTable


def record(request_id: int, ended_at: float = 1.0) -> RequestRecord:
    empty: Any = {}
    return RequestRecord(request_id=request_id, job_name="j", status=empty, result=empty, ended_at=ended_at)


def test_ids_count_from_one_and_a_refusal_uses_none() -> None:
    table = RequestTable(1)
    assert table.admit("a", 0.0) == Admitted(1, 0, "a", 0.0)
    assert table.admit("b", 0.1) is None
    assert table.end(record(1))
    assert table.admit("c", 0.2) == Admitted(2, 0, "c", 0.2)
    assert table.newest_id == 2


def test_the_free_slot_with_the_lowest_number_is_taken() -> None:
    table = RequestTable(3)
    for number in range(3):
        admitted = table.admit("j", 0.0)
        assert admitted is not None
        assert admitted.slot == number
    table.end(record(3))
    table.end(record(1))
    again = table.admit("j", 1.0)
    assert again is not None
    assert (again.request_id, again.slot) == (4, 0)
    assert [a.request_id for a in table.active] == [2, 4]


def test_a_request_is_found_by_id_and_by_slot_until_it_ends() -> None:
    table = RequestTable(2)
    table.admit("a", 0.0)
    second = table.admit("b", 0.0)
    assert table.find(2) == table.in_slot(1) == second
    assert table.record(2) is None
    table.end(record(2))
    assert table.find(2) is table.in_slot(1) is None
    assert table.record(2) == record(2)


def test_an_end_counts_once() -> None:
    table = RequestTable(2)
    table.admit("a", 0.0)
    assert table.end(record(1))
    assert not table.end(record(1, ended_at=9.0))
    assert not table.end(record(7))
    assert table.record(1) == record(1)
    assert table.record(7) is None
    slots = [table.admit("x", 1.0) for _ in range(3)]
    assert [a.slot if a else None for a in slots] == [0, 1, None]


def test_a_released_record_is_forgotten_for_ever() -> None:
    table = RequestTable(1)
    table.admit("a", 0.0)
    table.end(record(1))
    table.release(1)
    table.release(1)
    assert table.record(1) is None
    assert not table.end(record(1))
    assert table.record(1) is None


def test_records_expire_by_their_end() -> None:
    table = RequestTable(3)
    assert table.oldest_end() is None
    for request_id, ended_at in ((1, 5.0), (2, 3.0), (3, 4.0)):
        table.admit("j", 0.0)
        table.end(record(request_id, ended_at))
    assert table.oldest_end() == 3.0
    assert table.expire(3.0) == ()
    assert sorted(table.expire(4.5)) == [2, 3]
    assert table.record(2) is None
    assert table.oldest_end() == 5.0


@given(st.integers(1, 4), st.lists(st.one_of(st.just("admit"), st.integers(1, 12)), max_size=40))
def test_slots_used_are_the_requests_that_have_not_ended(slots: int, steps: list[Any]) -> None:
    table = RequestTable(slots)
    running: set[int] = set()
    for step in steps:
        if step == "admit":
            admitted = table.admit("j", 0.0)
            assert (admitted is None) is (len(running) == slots)
            running |= {admitted.request_id} if admitted is not None else set()
        else:
            assert table.end(record(step)) is (step in running)
            running.discard(step)
        assert {a.request_id for a in table.active} == running
        held = [a.slot for a in table.active]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(slots))
