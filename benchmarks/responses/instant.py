"""A chat completion that is answered at once, and a bare relay in front of it: what a gateway's
figures are held against.

    python -m benchmarks.responses.instant upstream PORT
    python -m benchmarks.responses.instant relay PORT UPSTREAM
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests

from benchmarks.common import HOST

_LENGTH = re.compile(rb"content-length: *(\d+)", re.I)
_STREAM = re.compile(rb'"stream": ?true')
_USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
_MESSAGE = {"role": "assistant", "content": "Hello"}


def _completion(kind: str, choice: dict[str, object]) -> dict[str, object]:
    head = {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "m", "usage": _USAGE}
    return {**head, "choices": [{"index": 0, "finish_reason": "stop", **choice}]}


def _reply(kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


_WHOLE = _reply(
    b"application/json", json.dumps(_completion("chat.completion", {"message": _MESSAGE})).encode()
)
_CHUNK = json.dumps(_completion("chat.completion.chunk", {"delta": _MESSAGE})).encode()
_STREAMED = _reply(b"text/event-stream", b"data: %b\n\ndata: [DONE]\n\n" % _CHUNK)


class _Upstream(asyncio.Protocol):
    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Requests one after the other; nothing of them is read but their length."""
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, _, rest = self._data.partition(b"\r\n\r\n")
            found = _LENGTH.search(head)
            length = int(found[1]) if found else 0
            if len(rest) < length:
                return
            body, self._data = rest[:length], rest[length:]
            self._transport.write(_STREAMED if _STREAM.search(body) else _WHOLE)


async def _serve_upstream(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Upstream, HOST, port, backlog=1024)
    await server.serve_forever()


def _serve_relay(port: int, upstream: str) -> None:
    """What one writes in ten minutes: a thread for each connection, a session for each thread."""

    class Relay(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # head and body at once

        def setup(self) -> None:
            super().setup()
            self.session = requests.Session()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {"Content-Type": "application/json"}
            answer = self.session.post(upstream + self.path, body, headers=headers)
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 1024
        daemon_threads = True

    Server((HOST, port), Relay).serve_forever()


if __name__ == "__main__":
    what, own_port, *rest = sys.argv[1:]
    if what == "upstream":
        asyncio.run(_serve_upstream(int(own_port)))
    else:
        _serve_relay(int(own_port), *rest)
