"""A relay in front of a llama-server that breaks the streams it is asked to: to whoever asks, it is the server.

Bytes go through as they are, both ways. A request for the model FAILS or DIES meets a fault as soon as the server has
said the one token "Once": an error record, as llama-server writes it, and the end of the stream; or the end of the
connection, as of a server that was killed.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import socketserver
import threading
from typing import Any

FAILS, DIES = "fails", "dies"
_CUE = b'"Once"'  # the text of a delta, in a chat completion and in a response alike
_END_OF_CHUNK = b"\n\n\r\n"  # llama-server ends every chunk of a stream with the end of a record
_RECORD = b"data: " + json.dumps({"error": {"code": 500, "message": "out of memory", "type": "server_error"}}).encode()
_FAILURE = b"%x\r\n%b\n\n\r\n0\r\n\r\n" % (len(_RECORD) + 2, _RECORD)


class Relay(socketserver.ThreadingTCPServer):
    """Takes connections on a free port of the upstream's host until its context ends; every one has a thread."""

    request_queue_size = 128

    def __init__(self, upstream: tuple[str, int]) -> None:
        super().__init__((upstream[0], 0), _Connection)
        self.upstream = upstream
        self.url = f"http://{upstream[0]}:{self.server_address[1]}"
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, name="relay", daemon=True)
        self._thread.start()

    def get_request(self) -> tuple[socket.socket, Any]:
        client, address = super().get_request()
        self._open.add(client)
        return client, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        for client in list(self._open):
            with contextlib.suppress(OSError):  # it has ended by itself
                client.shutdown(socket.SHUT_RDWR)
        self.server_close()  # waits for the threads


class _Connection(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        with contextlib.suppress(OSError), socket.create_connection(self.server.upstream) as server:
            _pump(self.request, server)


def _pump(client: socket.socket, server: socket.socket) -> None:
    """Until one side ends, or the fault that the client's request named is due."""
    asked, said = b"", b""
    while True:
        for source in select.select([client, server], (), ())[0]:
            data = source.recv(65536)
            if not data:
                return
            if source is client:
                asked += data
                server.sendall(data)
                continue
            fault = _fault(asked)
            if fault is None:
                client.sendall(data)
                continue
            before, said = len(said), said + data
            end = _end_of_cue(said)
            client.sendall(said[before:end])
            if end is not None:
                client.sendall(fault)
                return


def _end_of_cue(said: bytes) -> int | None:
    """Where the chunk with the cue ends; None where it has not come yet."""
    at = said.find(_CUE)
    end = said.find(_END_OF_CHUNK, at) if at >= 0 else -1
    return end + len(_END_OF_CHUNK) if end >= 0 else None


def _fault(asked: bytes) -> bytes | None:
    """What to end the reply with; None: nothing of the sort was asked for."""
    for model, fault in ((FAILS, _FAILURE), (DIES, b"")):
        if b'"model":"%b"' % model.encode() in asked.replace(b'": "', b'":"'):
            return fault
    return None
