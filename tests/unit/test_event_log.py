"""One log line per lifecycle event, and the last of them kept."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from llama_worker.server.event_log import EventLog


def test_an_event_is_kept_as_a_dict_without_what_is_not_known() -> None:
    log = EventLog("w")
    log.add("request_ended", at=1.5, request_id=7, job_name="j", detail=None)
    assert log.recent() == [{"at": 1.5, "event": "request_ended", "worker": "w", "request_id": 7, "job_name": "j"}]


def test_the_last_two_hundred_are_kept() -> None:
    log = EventLog("w")
    for number in range(250):
        log.add("e", at=float(number))
    assert [event["at"] for event in log.recent()] == [float(number) for number in range(50, 250)]


def test_what_is_given_out_is_a_copy() -> None:
    log = EventLog("w")
    log.add("e", at=1.0)
    log.recent()[0]["event"] = "changed"
    log.recent().clear()
    assert log.recent()[0]["event"] == "e"


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_an_event_is_one_line_with_worker_request_and_job(level: int, caplog: pytest.LogCaptureFixture) -> None:
    facts: dict[str, Any] = {"request_id": 7, "job_name": "two\nlines", "pid": None}
    with caplog.at_level(logging.INFO, logger="llama_worker"):
        EventLog("w").add("request_ended", at=1.0, level=level, **facts)
    (entry,) = caplog.records
    assert (entry.name, entry.levelno) == ("llama_worker", level)
    assert entry.getMessage() == "request_ended worker='w' request_id=7 job_name='two\\nlines'"


def test_an_event_is_kept_also_where_it_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog("w")
    with caplog.at_level(logging.ERROR, logger="llama_worker"):
        log.add("e", at=1.0)
    assert not caplog.records
    assert len(log.recent()) == 1
