"""What a host's `on_event` hears."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from llama_worker.testing.scripts import Text, plain_reply
from tests.actors.conftest import WAIT_S, MakeWorker, fast_timeouts
from tests.actors.test_unkillable import outliving_sigkill


def test_on_event_gets_states_restarts_requests_in_order(make_worker: MakeWorker) -> None:
    heard: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()
    rig = make_worker(on_event=lambda event: heard.put((threading.current_thread().name, event)))
    rig.run(*plain_reply(Text("x")))
    rig.worker.restart("new weights").get(timeout=WAIT_S)
    rig.stop()
    told: list[dict[str, Any]] = []
    while not told or (told[-1]["event"], told[-1].get("state")) != ("state", "stopped"):
        thread, event = heard.get(timeout=WAIT_S)
        assert thread == "llama_worker-callbacks"
        told.append(event)
    assert told == rig.debug()["recent_events"]
    shown = ("state", "restart", "admitted", "ended")
    assert [
        (each["event"], each.get("state") or each.get("reason") or each["job_name"])
        for each in told
        if each["event"] in shown
    ] == [
        *(("state", "running"), ("state", "ready")),
        *(("admitted", "job"), ("ended", "completed")),
        *(("state", "running"), ("restart", "requested"), ("state", "ready")),
        *(("state", "running"), ("state", "stopped")),
    ]


def test_state_event_has_no_earlier_error(make_worker: MakeWorker) -> None:
    rig = make_worker()
    os.kill(rig.status()["pid"], signal.SIGKILL)
    rig.wait_restarted()
    rig.stop()
    states = [each for each in rig.debug()["recent_events"] if each["event"] == "state"]
    assert [each["state"] for each in states if "error" in each] == ["running"]
    assert "server_died" in rig.status()["last_error"]


def test_each_event_of_a_request_names_its_job(make_worker: MakeWorker) -> None:
    heard: SimpleQueue[dict[str, Any]] = SimpleQueue()
    rig = make_worker(on_event=heard.put, result_ttl_s=0.01)
    rig.submit(*plain_reply(Text("x")))
    told: list[dict[str, Any]] = []
    while not told or told[-1]["event"] != "result_expired":
        told.append(heard.get(timeout=WAIT_S))
    named = [(each["event"], each["job_name"]) for each in told if "request_id" in each]
    assert named == [(event, "job") for event in ("admitted", "ended", "result_expired")]


def test_a_blocked_handler_delays_no_call(make_worker: MakeWorker) -> None:
    go_on = threading.Event()
    rig = make_worker(on_event=lambda event: go_on.wait(WAIT_S))
    try:
        assert rig.run(*plain_reply(Text("x")))["text"] == "x"
        rig.stop()
    finally:
        go_on.set()


class Stuck(logging.Handler):
    """Of a host whose terminal was halted."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.go_on.wait()


@contextlib.contextmanager
def halted(name: str) -> Iterator[None]:
    """Meanwhile the logger writes everything, to a handler that does not return."""
    logger, handler = logging.getLogger(name), Stuck()
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        handler.go_on.set()
        logger.removeHandler(handler)
        logger.setLevel(before)


@pytest.mark.parametrize("name", ["", "llama_worker", "pykka", "sseclient"])
def test_a_blocked_log_handler_delays_no_call(make_worker: MakeWorker, name: str) -> None:
    with halted(name):
        rig = make_worker()
        assert rig.run(*plain_reply(Text("x")))["text"] == "x"
        rig.stop()


def test_a_mistake_in_a_callback_delays_no_other(make_worker: MakeWorker) -> None:
    heard = threading.Event()

    def fail(_: Any) -> None:
        raise ValueError

    with halted("llama_worker.futures"):
        status = make_worker().worker.get_worker_status()
        status.add_done_callback(fail)
        status.add_done_callback(lambda _: heard.set())
        assert heard.wait(WAIT_S)


def test_a_blocked_log_handler_does_not_delay_the_close_of_an_unkillable_server(
    make_worker: MakeWorker,
) -> None:
    rig = make_worker(timeouts=fast_timeouts(stop_grace_s=0.3, kill_timeout_s=0.5))
    with halted("llama_worker"), outliving_sigkill(rig):
        closing = threading.Thread(target=rig.worker.close, daemon=True)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()
