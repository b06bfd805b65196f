"""A relay in front of a llama-server that breaks the streams it is asked to: to whoever asks, it is the server.

Bytes go through as they are, both ways. A request for the model FAILS or DIES meets a fault as soon as the server has
said the one token "Once": an error record, as llama-server writes it, and the end of the stream; or the end of the
connection, as of a server that was killed.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from types import TracebackType
from typing import Self

FAILS, DIES = "fails", "dies"
_CUE = b'"Once"'  # the text of a delta, in a chat completion and in a response alike
_END_OF_CHUNK = b"\n\n\r\n"  # llama-server ends every chunk of a stream with the end of a record
_RECORD = b"data: " + json.dumps({"error": {"code": 500, "message": "out of memory", "type": "server_error"}}).encode()
_FAILURE = b"%x\r\n%b\n\n\r\n0\r\n\r\n" % (len(_RECORD) + 2, _RECORD)


class Relay:
    """Takes connections until closed; every one has a thread."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        """Listens on a free port of the same host."""
        self._upstream = upstream
        self._listener = socket.create_server((upstream[0], 0), backlog=128)
        self.url = f"http://{upstream[0]}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name="relay", daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the listener and every connection; blocks until no thread is left."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):  # it has ended by itself
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), name="relay", daemon=True)
            self._threads = [known for known in self._threads if known.is_alive()] + [thread]
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            with self._lock:
                self._open.add(client)
            try:
                with socket.create_connection(self._upstream) as server:
                    _pump(client, server)
            except OSError:
                pass  # one of the two is not there, or has gone
            finally:
                with self._lock:
                    self._open.discard(client)


def _pump(client: socket.socket, server: socket.socket) -> None:
    """Until one side ends, or the fault that the client's request named is due."""
    asked, said = b"", b""
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ)
        selector.register(server, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = key.fileobj.recv(65536)  # type: ignore[union-attr]  # both are sockets
                if not data:
                    return
                if key.fileobj is client:
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
