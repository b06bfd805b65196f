"""A relay in front of a llama-server that breaks the streams it is asked to: to whoever asks, it is
the server.

Bytes go through as they are, both ways. A request for the model FAILS or DIES meets a fault as soon
as the server has said the one token "Once": an error record, as llama-server writes it, and the end
of the stream; or the end of the connection, as of a server that was killed.
"""

import contextlib
import json
import re
import select
import socket
import socketserver
import threading

FAILS, DIES = "fails", "dies"
_BROKEN = re.compile(rb'"model": ?"(fails|dies)"')
# a delta of either API, to the end of its chunk: of a record
_CUE = re.compile(rb'"Once".*?\n\n\r\n', re.DOTALL)
_RECORD = (
    b"data: "
    + json.dumps(
        {"error": {"code": 500, "message": "out of memory", "type": "server_error"}}
    ).encode()
)
_FAILURE = b"%x\r\n%b\n\n\r\n0\r\n\r\n" % (len(_RECORD) + 2, _RECORD)


class Listener(socketserver.ThreadingTCPServer):
    """Takes connections until its context ends; every one has a thread, which the end of its peer
    ends."""

    request_queue_size = 128
    daemon_threads = True

    def listen(self) -> None:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class Relay(Listener):
    """On a free port of the upstream's host."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        super().__init__((upstream[0], 0), _Connection)
        self.upstream = upstream
        self.url = f"http://{upstream[0]}:{self.server_address[1]}"
        self.listen()


class _Connection(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        """Until one side ends, or the fault that the client's request named is due."""
        client: socket.socket = self.request
        asked, said = b"", b""
        with contextlib.suppress(OSError), socket.create_connection(self.server.upstream) as server:
            while True:
                for source in select.select([client, server], (), ())[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is client:
                        asked += data
                        server.sendall(data)
                    elif (broken := _BROKEN.search(asked)) is None:
                        client.sendall(data)
                    else:
                        before, said = len(said), said + data
                        cue = _CUE.search(said)
                        client.sendall(said[before : cue.end() if cue else None])
                        if cue:
                            client.sendall(_FAILURE if broken[1] == FAILS.encode() else b"")
                            return
