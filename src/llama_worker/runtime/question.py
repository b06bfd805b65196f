"""Questions to the server, beside its streams: one that no thread waits for, and one that is
answered in JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from llama_worker.config import WorkerConfig
from llama_worker.messages import Mailbox, SlotsSeen
from llama_worker.runtime.chat_exchange import Endpoint
from llama_worker.runtime.connections import Abort, Aborted, shut_down
from llama_worker.runtime.loop_connection import LoopConnection
from llama_worker.runtime.plain_http import exchange, request_bytes
from llama_worker.runtime.timers import call_at
from llama_worker.server.slots import SlotsLook, SlotsSilence, parse_slots
from llama_worker.stream.plain_reply import PlainReply

NO_ANSWER = (Aborted, OSError, ValueError)  # what `ask` raises, and what a Question ends with
_READ_BYTES = 65536
_SLOTS_TIMEOUT_S = 2.0  # it answers within 0.21 s, also in the middle of a long batch (b11434)


class Question(LoopConnection):
    """A GET within `timeout_s`. `on_end` is called once, on any thread, with the whole reply or one
    of NO_ANSWER.

    It must not block. Thread-safe, and no call takes time. Raises OSError or RuntimeError where the
    host lacks threads, descriptors, ports or memory; then nothing is called.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        path: str,
        *,
        timeout_s: float,
        name: str,
        on_end: Callable[[PlainReply | Exception], object],
    ) -> None:
        super().__init__(endpoint, request_bytes("GET", path, _headers(endpoint)))
        self._reply = PlainReply()
        self._on_end: Callable[[PlainReply | Exception], object] | None = on_end
        self._deadline = call_at(time.monotonic() + timeout_s, self._is_late)
        with self._lock:
            try:
                self._begin(name)
            except BaseException:
                self._deadline.cancel()
                raise

    def abort(self) -> None:
        """Close the connection now, in whatever phase it is."""
        self.on_error(Aborted("the question was aborted"))

    def on_tick(self) -> None:
        """It never rests."""

    def on_error(self, error: Exception) -> None:
        """It ends with this error."""
        with self._lock:
            self._end(error)

    def _on_readable(self) -> None:
        assert self._socket is not None
        try:
            while not self._reply.over:
                if data := self._socket.recv(_READ_BYTES):
                    self._reply.feed(data)
                else:
                    self._reply.end()
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._end(error)
        else:
            self._end(None)

    def _on_no_connection(self, error: OSError | None) -> None:
        self._end(error or OSError("the host has no address"))

    def _is_late(self) -> None:
        with self._lock:
            if self._connected and not self._closed:
                self._on_readable()  # nothing may have run for a while, and the reply be there
            self._end(TimeoutError("the time for the reply is up"))

    def _end(self, error: Exception | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._cancel_timer()
        self._deadline.cancel()
        self._unsent = None
        if self._socket is not None and error is not None:
            shut_down(self._socket)
        self._drop_socket()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(error or self._reply)


def look_at_slots(
    endpoint: Endpoint, epoch: int, name: str, reply_to: Mailbox[SlotsSeen]
) -> Question:
    """Ask for `/slots`; one SlotsSeen follows. Raises as Question."""
    asked_at = time.monotonic()

    def tell(reply: PlainReply | Exception) -> None:
        look: SlotsLook | SlotsSilence | None = None
        if isinstance(reply, TimeoutError):
            look = SlotsSilence()
        elif isinstance(reply, PlainReply) and reply.status == 200:
            slots = parse_slots(json_of(reply.body))
            look = None if slots is None else SlotsLook(asked_at=asked_at, slots=slots)
        reply_to.tell(SlotsSeen(epoch=epoch, look=look))

    return Question(endpoint, "/slots", timeout_s=_SLOTS_TIMEOUT_S, name=name, on_end=tell)


def ask(
    abort: Abort,
    config: WorkerConfig,
    endpoint: Endpoint,
    method: str,
    path: str,
    *,
    timeout_s: float,
    body: object = None,
) -> tuple[int, Any]:
    """(status, the JSON of the body or None), within `timeout_s`; blocks."""
    status, told = exchange(
        abort,
        (config.connect_host, config.port),
        method,
        path,
        headers=_headers(endpoint),
        body=json.dumps(body).encode() if body is not None else b"",
        connect_timeout_s=endpoint.connect_timeout_s,
        deadline=time.monotonic() + timeout_s,
    )
    return status, json_of(told)


def json_of(told: bytes | bytearray) -> Any:
    """None where it is no JSON."""
    try:
        return json.loads(told)
    except (ValueError, RecursionError):
        return None


def _headers(endpoint: Endpoint) -> dict[str, str]:
    host = endpoint.base_url.removeprefix("http://")
    return {"Host": host, "Content-Type": "application/json", **endpoint.headers()}
