"""`make_server`: servers of one connection, for the code that talks to one."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.actors.conftest import HOST

Serve = Callable[[socket.socket], None]


class Server:
    """Serves one connection on a thread and keeps it until the client has closed it.

    `served` is set when `serve` has returned, `closed` when the client has closed the connection.
    """

    def __init__(self, serve: Serve, certificate: Path | None) -> None:
        self.served, self.closed = threading.Event(), threading.Event()
        self._serve = serve
        self._tls = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate)
        self._ends = [socket.create_server((HOST, 0))]
        self.port = int(self._ends[0].getsockname()[1])
        self.url = f"{'https' if self._tls else 'http'}://localhost:{self.port}"
        self._thread = threading.Thread(target=self._run, name="server")
        self._thread.start()

    def close(self) -> None:
        """End the connection and the thread."""
        for end in self._ends:
            with contextlib.suppress(OSError):  # it has ended
                end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._ends[0].close()

    def _run(self) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as cleanup:  # a reset is a close
            connection = cleanup.enter_context(self._ends[0].accept()[0])
            if self._tls is not None:
                connection = cleanup.enter_context(
                    self._tls.wrap_socket(connection, server_side=True)
                )
            self._ends.append(connection)
            self._serve(connection)
            self.served.set()
            while connection.recv(1 << 16):
                pass
        self.closed.set()


def sends(*pieces: bytes, close: bool = False, delay_s: float = 0.0) -> Serve:
    """Reads a request's head, sends the pieces and, perhaps, ends the connection."""

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        for piece in pieces:
            connection.sendall(piece)
            threading.Event().wait(delay_s)
        if close:
            connection.shutdown(socket.SHUT_WR)

    return serve


MakeServer = Callable[..., Server]


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    """A factory of servers, with TLS where there is a certificate; ended at the end of the test."""
    with contextlib.ExitStack() as cleanup:

        def make(serve: Serve, certificate: Path | None = None) -> Server:
            server = Server(serve, certificate)
            cleanup.callback(server.close)
            return server

        yield make
