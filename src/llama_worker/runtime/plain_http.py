"""One small HTTP exchange over a bare socket, within one deadline, for a thread that waits for it.

urllib3 takes twice the CPU, and bounds each read, but not the whole.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from llama_worker.runtime.connections import Abort, connect
from llama_worker.stream.plain_reply import PlainReply

_READ_BYTES = 65536


def exchange(
    abort: Abort,
    address: tuple[str, int],
    method: str,
    path: str,
    *,
    headers: Mapping[str, str],
    body: bytes = b"",
    connect_timeout_s: float,
    deadline: float,
) -> tuple[int, bytearray]:
    """(status, body) of the reply. `deadline` in monotonic seconds.

    Raises Aborted; OSError where there is no connection, where it breaks before the reply's end, or
    (TimeoutError) where the time is up; ValueError for what is not an HTTP response, or longer than
    4 MiB.
    """
    reply = PlainReply()
    connection = connect(abort, *address, min(connect_timeout_s, _left_s(deadline)))
    try:
        connection.settimeout(_left_s(deadline))
        connection.sendall(request_bytes(method, path, headers, body))
        while not reply.over:
            connection.settimeout(_left_s(deadline))
            if received := connection.recv(_READ_BYTES):
                reply.feed(received)
            else:
                reply.end()
    finally:
        abort.detach()
        connection.close()
    return reply.status, reply.body


def request_bytes(method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """The request; HTTP/1.0, so that nobody keeps the connection or sends chunks."""
    lines = [f"{method} {path} HTTP/1.0", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time for the reply is up")
    return left_s
