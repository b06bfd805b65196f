"""Requests one after the other share a thread, requests side by side do not, and none is left at the end."""

from __future__ import annotations

import queue
import threading
from functools import partial

from llama_worker.responses.request_threads import RequestThreads
from tests.actors.conftest import WAIT_S, eventually


def test_a_thread_that_waits_is_taken() -> None:
    threads, ran_on = RequestThreads(), queue.SimpleQueue[int]()
    idents = set()
    for _ in range(20):
        threads.run(lambda: ran_on.put(threading.get_ident()))
        idents.add(ran_on.get(timeout=WAIT_S))
        eventually(lambda: threads.idle, "a thread that waits")
    threads.close()
    assert len(idents) == 1


def test_side_by_side_and_none_is_left() -> None:
    threads, both = RequestThreads(), threading.Barrier(3)
    before = threading.active_count()
    for _ in range(2):
        threads.run(partial(both.wait, WAIT_S))
    both.wait(WAIT_S)
    threads.close()
    assert threading.active_count() == before
