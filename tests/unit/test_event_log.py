"""One log line per lifecycle event, and the last of them kept."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import Any

from llama_worker.runtime.futures import write_log
from llama_worker.server.journal import EventLog


def test_an_event_is_kept_as_a_dict_and_written_as_one_line_without_what_is_not_known() -> None:
    lines: list[tuple[int, str]] = []
    log = EventLog("w", lambda *line: lines.append(line))
    facts: dict[str, Any] = {"request_id": 7, "job_name": "two\nlines", "pid": None}
    for level in (logging.INFO, logging.WARNING):
        log.add("request_ended", at=1.5, level=level, **facts)
    line = "request_ended worker='w' request_id=7 job_name='two\\nlines'"
    assert lines == [(logging.INFO, line), (logging.WARNING, line)]
    kept = {"at": 1.5, "event": "request_ended", "worker": "w", "request_id": 7, "job_name": "two\nlines"}
    assert log.recent() == [kept, kept]


def test_the_last_two_hundred_are_kept_and_given_out_as_copies() -> None:
    log = EventLog("w", lambda level, line: None)
    for number in range(250):
        log.add("e", at=float(number))
    log.recent()[0]["at"] = -1.0
    log.recent().clear()
    assert [event["at"] for event in log.recent()] == [float(number) for number in range(50, 250)]


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
