"""In front of a server, on its port: passes everything on, and loses the requests whose body holds a word.

Run as `swallower.py INNER_PORT WORD COMMAND...`: it starts the command with INNER_PORT in place of its `--port`, and
listens on that port itself. A lost request has its response headers; then its connection to the server is closed, so
that its slot is idle, and the client's stays open without a byte.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading


class Passage:
    """One connection of a client's, and the one to the server behind it."""

    def __init__(self, client: socket.socket, inner_port: int, word: bytes) -> None:
        self._client = client
        self._server = socket.create_connection(("127.0.0.1", inner_port))
        self._word = word
        self._is_to_be_lost = False

    def start(self) -> None:
        for pump in (self._up, self._down):
            threading.Thread(target=pump, daemon=True).start()

    def _up(self) -> None:
        sent = b""
        with contextlib.suppress(OSError):
            while data := self._client.recv(65536):
                sent += data
                self._is_to_be_lost = self._is_to_be_lost or self._word in sent
                with contextlib.suppress(OSError):
                    self._server.sendall(data)
        self._close(self._server)

    def _down(self) -> None:
        head = b""
        with contextlib.suppress(OSError):
            while data := self._server.recv(65536):
                if self._is_to_be_lost:
                    head += data
                    if b"\r\n\r\n" in head:
                        self._client.sendall(head.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
                        self._close(self._server)
                        return
                else:
                    self._client.sendall(data)
        self._close(self._client)

    def _close(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def main(inner_port: str, word: str, *command: str) -> None:
    """Until the server ends."""
    at = command.index("--port") + 1
    with socket.create_server(("127.0.0.1", int(command[at]))) as listener:
        server = subprocess.Popen([*command[:at], inner_port, *command[at + 1 :]])
        threading.Thread(target=_accept, args=(listener, int(inner_port), word.encode()), daemon=True).start()
        sys.exit(server.wait())


def _accept(listener: socket.socket, inner_port: int, word: bytes) -> None:
    while True:
        client, _ = listener.accept()
        try:
            Passage(client, inner_port, word).start()
        except OSError:  # the server does not listen yet
            client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
