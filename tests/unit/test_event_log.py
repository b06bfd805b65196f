"""One log line per lifecycle event, and the last of them kept."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import Any

import pytest

from llama_worker.runtime.futures import write_log
from llama_worker.server.journal import EventLog


def test_an_event_is_kept_as_a_dict_without_what_is_not_known() -> None:
    log = EventLog("w", lambda level, line: None)
    log.add("request_ended", at=1.5, request_id=7, job_name="j", detail=None)
    assert log.recent() == [{"at": 1.5, "event": "request_ended", "worker": "w", "request_id": 7, "job_name": "j"}]


def test_the_last_two_hundred_are_kept() -> None:
    log = EventLog("w", lambda level, line: None)
    for number in range(250):
        log.add("e", at=float(number))
    assert [event["at"] for event in log.recent()] == [float(number) for number in range(50, 250)]


def test_what_is_given_out_is_a_copy() -> None:
    log = EventLog("w", lambda level, line: None)
    log.add("e", at=1.0)
    log.recent()[0]["event"] = "changed"
    log.recent().clear()
    assert log.recent()[0]["event"] == "e"


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_an_event_is_one_line_with_worker_request_and_job(level: int) -> None:
    lines: list[tuple[int, str]] = []
    log = EventLog("w", lambda *line: lines.append(line))
    facts: dict[str, Any] = {"request_id": 7, "job_name": "two\nlines", "pid": None}
    log.add("request_ended", at=1.0, level=level, **facts)
    assert lines == [(level, "request_ended worker='w' request_id=7 job_name='two\\nlines'")]


def test_lines_are_written_under_the_librarys_name_on_a_thread_of_their_own() -> None:
    written: SimpleQueue[tuple[str, int, str, str]] = SimpleQueue()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.put((record.name, record.levelno, record.getMessage(), threading.current_thread().name))

    logger, handler = logging.getLogger("llama_worker"), Handler()
    logger.addHandler(handler)
    try:
        write_log(logger, logging.DEBUG - 1, "below the level: not written")
        write_log(logger, logging.ERROR, "100 %s")
        assert written.get(timeout=60) == ("llama_worker", logging.ERROR, "100 %s", "llama_worker-log")
    finally:
        logger.removeHandler(handler)
