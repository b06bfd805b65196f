"""The thread behind one open stream: posts the request, reads the reply, tells what it parsed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import requests
import urllib3.exceptions

from llama_worker.actors.connections import Abort, session
from llama_worker.http_errors import describe_http_error
from llama_worker.messages import (
    Mailbox,
    RequestMessage,
    StreamClosed,
    StreamEvents,
    StreamFailure,
    StreamId,
    StreamOpened,
)
from llama_worker.stream_events import ProtocolError, StreamDecoder, StreamEvent
from llama_worker.types import RequestFailReason

_READ_BYTES = 65536
_MAX_ERROR_BODY_BYTES = 65536
_MAX_BATCH = 512  # events; a batch is told when it is full or when reading would wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server listens, and what it wants to be shown."""

    base_url: str
    connect_timeout_s: float
    api_key: str | None = None

    def headers(self) -> dict[str, str]:
        """For every request to the server."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class StreamReader:
    """One stream. The constructor starts a daemon thread; `abort` may be called from any thread.

    `reply_to` gets StreamOpened, StreamEvents and, last, StreamClosed; then `on_end` is called.
    """

    def __init__(
        self,
        *,
        stream_id: StreamId,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        reply_to: Mailbox[RequestMessage],
        on_end: Callable[[], object],
        name: str,
    ) -> None:
        self._stream_id = stream_id
        self._endpoint = endpoint
        self._body = body
        self._reply_to = reply_to
        self._on_end = on_end
        self._abort = Abort()
        self._decoder = StreamDecoder()
        self._events: list[StreamEvent] = []
        self._bytes_read = 0
        self._told_bytes = 0
        self._told_records = 0
        threading.Thread(target=self._run, name=f"{name}-stream-{stream_id[0]}.{stream_id[1]}", daemon=True).start()

    def abort(self) -> None:
        """Close the connection now, in whatever phase it is."""
        self._abort.abort()

    def _run(self) -> None:
        failure: StreamFailure | None
        try:
            with session(self._abort, before_waiting=self._flush) as http:
                failure = self._exchange(http)
        except Exception as error:
            failure = StreamFailure(reason=RequestFailReason.PROTOCOL_ERROR, detail=f"{type(error).__name__}: {error}")
        finally:
            self._abort.detach()
        self._flush()
        self._reply_to.tell(StreamClosed(stream_id=self._stream_id, failure=failure, at=time.monotonic()))
        self._on_end()

    def _exchange(self, http: requests.Session) -> StreamFailure | None:
        try:
            response = http.post(
                f"{self._endpoint.base_url}/v1/chat/completions",
                data=json.dumps(self._body, separators=(",", ":")).encode(),
                headers={"Content-Type": "application/json", **self._endpoint.headers()},
                timeout=(self._endpoint.connect_timeout_s, None),
                stream=True,
                allow_redirects=False,
            )
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:  # the latter: Aborted
            if self._abort.connected:
                return _disconnected("before the response headers", error)
            return StreamFailure(reason=RequestFailReason.CONNECT_FAILED, detail=_cause(error))
        with response:
            try:
                if response.status_code != 200:
                    body = response.raw.read(_MAX_ERROR_BODY_BYTES, decode_content=True)
                    return describe_http_error(response.status_code, body)
                self._reply_to.tell(StreamOpened(stream_id=self._stream_id, at=time.monotonic()))
                return self._read(response)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                return _disconnected("in mid-stream", error)
            except ProtocolError as error:
                self._events += error.events  # what was good before it
                return StreamFailure(reason=RequestFailReason.PROTOCOL_ERROR, detail=str(error))

    def _read(self, response: requests.Response) -> StreamFailure | None:
        read, feed = response.raw.read1, self._decoder.feed
        while data := read(_READ_BYTES):
            self._bytes_read += len(data)
            self._events += feed(data)
            if len(self._events) >= _MAX_BATCH:
                self._flush()
        if self._decoder.partial:
            return _disconnected("in the middle of a record", None)
        content_type = response.headers.get("Content-Type", "")
        if not self._decoder.data_records and "text/event-stream" not in content_type:
            detail = f"the reply is {content_type or 'of no type'}, not text/event-stream"
            return StreamFailure(reason=RequestFailReason.PROTOCOL_ERROR, detail=detail)
        return None

    def _flush(self) -> None:
        """Tell what came since the last time; keepalives alone are told too, as bytes without data."""
        if self._bytes_read == self._told_bytes:
            return
        events, self._events = self._events, []
        records = self._decoder.data_records
        self._reply_to.tell(
            StreamEvents(
                stream_id=self._stream_id,
                events=tuple(events),
                carried_data=records > self._told_records,
                at=time.monotonic(),
            )
        )
        self._told_bytes, self._told_records = self._bytes_read, records


def _disconnected(where: str, error: Exception | None) -> StreamFailure:
    cause = f": {_cause(error)}" if error is not None else ""
    return StreamFailure(reason=RequestFailReason.STREAM_DISCONNECTED, detail=f"the connection ended {where}{cause}")


def _cause(error: BaseException) -> str:
    """The innermost error's own words: the layers above only repeat addresses."""
    reason: Any = error
    while True:
        inner = getattr(reason, "reason", None) or (reason.args[0] if reason.args else None)
        if not isinstance(inner, BaseException):
            break
        reason = inner
    return str(reason) or type(reason).__name__
