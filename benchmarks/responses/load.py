"""Streams one after another, and a slow reader."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from benchmarks.common import HOST
from benchmarks.responses.servers import Proxy

STREAMS = 40
RATE_BYTES_S = 100_000
STREAM_BYTES = 120_000_000
SLOW_S = 20.0  # of the twenty minutes that the whole stream would take
_WAIT_S = 30.0
_PIECE = "x" * 4096
_CHAT = {"choices": [{"index": 0, "delta": {"content": _PIECE}, "finish_reason": None}]}
_DELTA = {"type": "response.output_text.delta", "item_id": "msg_1", "delta": _PIECE}


def failing_streams(base_url: str, *, kept: bool) -> int:
    """Of so many streams one after another, those that did not come to `response.completed`.

    `kept`: on one connection for as long as the server's headers promise to keep it, else each on
    its own.
    """
    url = urlsplit(base_url)
    body = json.dumps({"model": "m", "input": "Yes.", "stream": True}).encode()
    connection = http.client.HTTPConnection(url.hostname or HOST, url.port, timeout=_WAIT_S)
    failed = 0
    for _ in range(STREAMS):
        try:
            connection.request(
                "POST", f"{url.path}/responses", body, {"Content-Type": "application/json"}
            )
            failed += b'"type":"response.completed"' not in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            failed += 1
            connection.close()
        if not kept:
            connection.close()
    connection.close()
    return failed


def slow_reader_rss_bytes(proxy: Proxy) -> int:
    """The proxy's peak memory while a client reads slowly what comes as fast as it is taken."""
    url = urlsplit(proxy.base_url)
    body = json.dumps({"model": "m", "input": "Hi", "stream": True}).encode()
    with socket.create_connection(
        (url.hostname or HOST, url.port or 80), timeout=_WAIT_S
    ) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        head = (
            f"POST {url.path}/responses HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: "
            "application/json\r\n"
        )
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        began, taken = time.monotonic(), 0
        while (elapsed := time.monotonic() - began) < SLOW_S:
            time.sleep(max(0.0, taken / RATE_BYTES_S - elapsed))
            data = client.recv(RATE_BYTES_S // 10)
            assert data, "the stream ended"
            taken += len(data)
        return proxy.peak_rss_bytes()


@contextlib.contextmanager
def firehose() -> Iterator[str]:
    """The URL of a server that streams deltas as fast as they are taken, for one request of either
    API."""
    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=_pour, args=(listener,), daemon=True)
        thread.start()
        yield f"http://{HOST}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def _pour(listener: socket.socket) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        with client, contextlib.suppress(OSError):
            request = client.recv(65536)
            record = (
                f"data: {json.dumps(_CHAT if b'/chat/completions' in request else _DELTA)}\n\n"
            ).encode()
            client.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: "
                b"chunked\r\n\r\n"
            )
            for _ in range(STREAM_BYTES // len(_PIECE)):
                client.sendall(b"%x\r\n%b\r\n" % (len(record), record))
