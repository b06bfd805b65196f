"""Admission, slots and kept records."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from llama_worker.request.table import Admitted, RequestRecord, RequestTable


def record(request_id: int, ended_at: float = 1.0) -> RequestRecord:
    empty: Any = {}
    return RequestRecord(request_id=request_id, job_name="j", status=empty, result=empty, ended_at=ended_at)


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


@settings(max_examples=50)
@given(st.integers(1, 4), st.lists(st.one_of(st.just("admit"), st.integers(1, 12)), max_size=40))
def test_ids_count_the_admitted_and_each_holds_the_lowest_free_slot_to_its_end(slots: int, steps: list[Any]) -> None:
    table = RequestTable(slots)
    running: dict[int, Admitted] = {}
    newest_id = 0
    for step in steps:
        free = set(range(slots)) - {admitted.slot for admitted in running.values()}
        if step != "admit":
            assert table.end(record(step)) is (step in running)
            running.pop(step, None)
        elif free:
            newest_id += 1
            running[newest_id] = Admitted(newest_id, min(free), "j", 0.0)
            assert table.admit("j", 0.0) == running[newest_id]
        else:
            assert table.admit("j", 0.0) is None
        assert (table.active, table.newest_id) == (tuple(running.values()), newest_id)
