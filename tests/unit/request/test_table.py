"""Admission, slots and kept records."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llama_worker.request.table import Admitted, RequestRecord, RequestTable
from llama_worker.types.request import RequestFailReason, RequestPhase

IDS = range(1, 13)


def record(request_id: int) -> RequestRecord:
    empty: Any = {}
    return RequestRecord(request_id=request_id, job_name="j", status=empty, result=empty)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["admit", "end", "release"]), st.sampled_from(IDS))),
)
def test_a_slot_is_held_until_the_end(slots: int, steps: list[tuple[str, int]]) -> None:
    table = RequestTable(slots)
    running: dict[int, Admitted] = {}
    kept: dict[int, RequestRecord] = {}
    newest_id = 0
    for now, (step, request_id) in enumerate(steps):
        if step == "admit":
            free = set(range(slots)) - {admitted.slot for admitted in running.values()}
            if free:
                newest_id += 1
                running[newest_id] = Admitted(newest_id, min(free), "j", 0.0)
            assert table.admit("j", 0.0) == (running[newest_id] if free else None)
        elif step == "end":
            assert table.end(record(request_id), now) is (request_id in running)
            if running.pop(request_id, None) is not None:
                kept[request_id] = record(request_id)
        else:
            assert table.release(request_id) is (request_id in kept)
            kept.pop(request_id, None)
        assert (table.active, table.newest_id) == (tuple(running.values()), newest_id)
        assert (table.has_free_slot, table.expires_at) == (len(running) < slots, None)
        assert table.finished_ids == list(kept)
        assert all(table.find(request_id) == running.get(request_id) for request_id in IDS)
        assert {table.in_slot(slot) for slot in range(slots)} - {None} == set(running.values())
        assert all(table.in_slot(admitted.slot) == admitted for admitted in running.values())
        assert all(table.record(request_id) == kept.get(request_id) for request_id in IDS)


def test_records_expire_by_the_time_they_are_kept() -> None:
    table = RequestTable(3, ttl_s=60.0)
    assert table.expires_at is None
    for request_id, now in ((1, 3.0), (2, 4.0), (3, 5.0)):
        table.admit("j", 0.0)
        table.end(record(request_id), now)
    assert table.expires_at == 63.0
    assert table.expire(62.9) == ()
    assert table.expire(64.0) == (record(1), record(2))
    assert table.record(2) is None
    assert table.expires_at == 65.0


class Instant(float):
    """Counts how often one is compared."""

    compared = 0

    def __ge__(self, other: float) -> bool:
        Instant.compared += 1
        return super().__ge__(other)


def test_expiring_looks_at_no_younger_record() -> None:
    table = RequestTable(1, ttl_s=60.0)
    for request_id in range(1, 101):
        table.admit("j", 0.0)
        table.end(record(request_id), request_id)
    assert table.expire(Instant(62.0)) == (record(1), record(2))
    assert Instant.compared == 3


@pytest.mark.parametrize(
    ("fail_reason", "is_broken_off"),
    [
        (None, False),
        (RequestFailReason.CANCELED, True),
        (RequestFailReason.STALL_TIMEOUT, True),
        (RequestFailReason.REPEATED_TEXT_LOOP, True),
        (RequestFailReason.STREAM_DISCONNECTED, True),
        (RequestFailReason.CONNECT_FAILED, False),
        (RequestFailReason.HTTP_ERROR, False),
        (RequestFailReason.CONTEXT_EXCEEDED, False),
        (RequestFailReason.SERVER_ERROR, False),
        (RequestFailReason.TOOL_EXECUTION_ERROR, False),
    ],
)
def test_what_server_has_ended_is_not_broken_off(
    fail_reason: RequestFailReason | None, is_broken_off: bool
) -> None:
    result: Any = {"fail_reason": fail_reason}
    assert replace(record(1), result=result).is_broken_off is is_broken_off


@pytest.mark.parametrize("ended", [{"ended_in": RequestPhase.TOOL}, {"was_sent": False}])
def test_request_unknown_to_server_is_not_broken_off(ended: dict[str, Any]) -> None:
    result: Any = {"fail_reason": RequestFailReason.CANCELED}
    assert not replace(record(1), result=result, **ended).is_broken_off
