"""One exchange with the server on a connection of its own, pulled by the thread that runs it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import BadStatusLine, HTTPException, RemoteDisconnected
from typing import Any

import requests
import urllib3.exceptions

from llama_worker.config import WorkerConfig
from llama_worker.runtime.connections import Abort
from llama_worker.runtime.timers import call_at
from llama_worker.stream.decoder import StreamDecoder
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.http_errors import describe_http_error
from llama_worker.types import RequestFailReason

_READ_BYTES = 65536
_MAX_ERROR_BODY_BYTES = 65536
_ERROR_BODY_S = 2.0
_SHOWN_CHARS = 40  # of what is no HTTP


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server listens, and what it wants to be shown."""

    base_url: str
    connect_timeout_s: float
    api_key: str | None = None

    @classmethod
    def of(cls, config: WorkerConfig) -> Endpoint:
        """Where the config's server is reached from this machine."""
        host = config.connect_host
        return cls(
            base_url=f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}",
            connect_timeout_s=config.timeouts.connect_timeout_s,
            api_key=config.api_key,
        )

    def headers(self) -> dict[str, str]:
        """For every request to the server."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def send(
    http: requests.Session, abort: Abort, endpoint: Endpoint, request: requests.PreparedRequest
) -> requests.Response | StreamFailure:
    """The response once its headers are here, however long that takes, or why there is none."""
    timeout = (endpoint.connect_timeout_s, None)
    try:
        # Not by `http.send`, which reads the body of a redirect and parses where it leads, if it is followed or not.
        url = request.url or ""
        settings: Any = http.merge_environment_settings(url, {}, stream=True, verify=None, cert=None)
        return http.get_adapter(url).send(request, timeout=timeout, **settings)
    except (OSError, urllib3.exceptions.HTTPError) as error:  # what requests raises is an OSError; Aborted is not
        if abort.connected:
            return disconnected("before the response headers", error)
        return StreamFailure(reason=RequestFailReason.CONNECT_FAILED, detail=_cause(error))


class ChatExchange:
    """A chat completion as a stream of events. One thread; only the Abort is for others."""

    def __init__(self, http: requests.Session, abort: Abort, endpoint: Endpoint) -> None:
        self.decoder = StreamDecoder()
        self.bytes_read = 0
        self.failure: StreamFailure | None = None
        self._http = http
        self._abort = abort
        self._endpoint = endpoint
        self._response: requests.Response | None = None

    def open(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bool:
        """Post it and wait for the headers; False where `failure` says why there is no stream."""
        request = requests.Request(
            "POST",
            f"{self._endpoint.base_url}/v1/chat/completions",
            data=json.dumps(body, separators=(",", ":")).encode(),
            headers={"Content-Type": "application/json", **(headers or {}), **self._endpoint.headers()},
        )
        answer = send(self._http, self._abort, self._endpoint, self._http.prepare_request(request))
        if isinstance(answer, StreamFailure):
            self.failure = answer
        elif answer.status_code != 200:
            self.failure = self._refusal(answer)
        else:
            self._response = answer
        return self._response is not None

    def read(self) -> list[StreamEvent] | None:
        """What comes next, [] for a keepalive; None at the end, where `failure` says whether it was a good one."""
        reply = self._abort.reply
        if self._response is None or reply is None:
            return None
        try:
            data = reply.read1(_READ_BYTES)
            if data:
                self.bytes_read += len(data)
                events = self.decoder.feed(data)
                if self.decoder.error is not None:
                    self.failure = StreamFailure(reason=RequestFailReason.PROTOCOL_ERROR, detail=self.decoder.error)
                    self.close()
                return events
            self.failure = self._judge_end(self._response)
        except (HTTPException, OSError) as error:
            self.failure = disconnected("in mid-stream", error)
        self.close()
        return None

    def close(self) -> None:
        """Give the connection back."""
        if self._response is not None:
            self._response.close()
        self._response = None

    def _refusal(self, response: requests.Response) -> StreamFailure:
        """What an error status says: with as much of its body as comes in good time."""
        limit = call_at(time.monotonic() + _ERROR_BODY_S, self._abort.abort)
        body = b""
        try:
            with response, contextlib.suppress(HTTPException, OSError):
                reply = self._abort.reply
                while reply is not None and len(body) < _MAX_ERROR_BODY_BYTES and (more := reply.read1(_READ_BYTES)):
                    body += more
        finally:
            limit.cancel()
        return describe_http_error(response.status_code, body)

    def _judge_end(self, response: requests.Response) -> StreamFailure | None:
        if self.decoder.partial:
            return disconnected("in the middle of a record")
        content_type = response.headers.get("Content-Type", "")
        if not self.decoder.data_records and "text/event-stream" not in content_type:
            detail = f"the reply is {content_type or 'of no type'}, not text/event-stream"
            return StreamFailure(reason=RequestFailReason.PROTOCOL_ERROR, detail=detail)
        return None


def disconnected(where: str, error: Exception | None = None) -> StreamFailure:
    """The connection ended."""
    cause = f": {_cause(error)}" if error is not None else ""
    return StreamFailure(reason=RequestFailReason.STREAM_DISCONNECTED, detail=f"the connection ended {where}{cause}")


def _cause(error: BaseException) -> str:
    """The innermost error in words: the layers above it only repeat addresses, and show their classes."""
    while (inner := _within(error)) is not None:
        error = inner
    match error:
        case urllib3.exceptions.NewConnectionError(conn=connection):
            return str(error).removeprefix(f"{connection}: ")
        case BadStatusLine() if not isinstance(error, RemoteDisconnected):
            return f"the reply is not HTTP: it begins with {str(error)[:_SHOWN_CHARS]!r}"
        case _:
            return str(error) or type(error).__name__


def _within(error: BaseException) -> BaseException | None:
    """The error that this one wraps, as requests and urllib3 do it."""
    wrapped = (getattr(error, "reason", None), *error.args)
    return next((each for each in wrapped if isinstance(each, BaseException)), None)
