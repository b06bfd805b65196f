"""One small HTTP exchange over a bare socket, within one deadline: how a probe asks.

Probes are all that an idle worker costs. urllib3 takes twice the CPU, and bounds each read, but not the whole.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping

from llama_worker.runtime.connections import Abort, connect

_READ_BYTES = 65536
_MAX_REPLY_BYTES = 4 * 1024 * 1024  # /props holds the chat template
_END_OF_HEAD = b"\r\n\r\n"


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

    Raises Aborted; OSError where there is no connection, where it breaks before the reply's end, or (TimeoutError)
    where the time is up; ValueError for what is not an HTTP response, or longer than 4 MiB.
    """
    # A reply to HTTP/1.0 is never chunked: it is as long as its head says, or ends with the connection.
    lines = [f"{method} {path} HTTP/1.0", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    request = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
    connection = connect(abort, *address, min(connect_timeout_s, _left_s(deadline)))
    try:
        connection.settimeout(_left_s(deadline))
        connection.sendall(request)
        return _read_reply(connection, deadline)
    finally:
        abort.detach()
        connection.close()


def _read_reply(connection: socket.socket, deadline: float) -> tuple[int, bytearray]:
    reply = bytearray()
    end: float | None = None  # the reply's length, once its head is here
    while end is None or len(reply) < end:
        connection.settimeout(_left_s(deadline))
        received = connection.recv(_READ_BYTES)
        if not received:
            if end == math.inf:
                break
            raise ConnectionResetError("the connection ended before the reply")
        reply += received
        if len(reply) > _MAX_REPLY_BYTES:
            raise ValueError(f"a reply of more than {_MAX_REPLY_BYTES} bytes")
        if end is None:
            end = _end(reply)
    head, _, body = reply.partition(_END_OF_HEAD)
    protocol, status = head.split(maxsplit=2)[:2]
    if not protocol.startswith(b"HTTP/"):
        raise ValueError("not an HTTP response")
    return int(status), body


def _end(reply: bytearray) -> float | None:
    """How long the reply is in bytes, infinite where its head does not say; None until its head is here. Pure."""
    head, separator, _ = reply.partition(_END_OF_HEAD)
    if not separator:
        return None
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return len(head) + len(separator) + int(value)
    return math.inf


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time for the reply is up")
    return left_s
