"""In front of a server, on its port: passes everything on, and loses the requests whose body holds
a word.

Run as `swallower.py INNER_PORT WORD COMMAND...`: it starts the command with INNER_PORT in place of
its `--port`, and listens on that port itself. A lost request has its response headers; then its
connection to the server is closed, so that its slot is idle, and the client's stays open without a
byte.
"""

import contextlib
import select
import socket
import subprocess
import sys
import threading


def main(inner_port: str, word: str, *command: str) -> None:
    """Until the server ends."""
    at = command.index("--port") + 1
    with socket.create_server(("127.0.0.1", int(command[at]))) as listener:
        server = subprocess.Popen([*command[:at], inner_port, *command[at + 1 :]])
        threading.Thread(
            target=_accept, args=(listener, int(inner_port), word.encode()), daemon=True
        ).start()
        sys.exit(server.wait())


def _accept(listener: socket.socket, inner_port: int, word: bytes) -> None:
    while True:
        threading.Thread(
            target=_pass_on, args=(listener.accept()[0], inner_port, word), daemon=True
        ).start()


def _pass_on(client: socket.socket, inner_port: int, word: bytes) -> None:
    sent, head = b"", b""
    with (
        client,
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", inner_port)) as server,
    ):
        while True:
            for source in select.select([client, server], (), ())[0]:
                data = source.recv(65536)
                if not data:
                    return
                if source is client:
                    sent += data
                    server.sendall(data)
                elif word not in sent:
                    client.sendall(data)
                else:
                    head += data
                if b"\r\n\r\n" in head:
                    client.sendall(head.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
                    server.shutdown(socket.SHUT_RDWR)
                    client.recv(1)  # nothing but its end
                    return


if __name__ == "__main__":
    main(*sys.argv[1:])
