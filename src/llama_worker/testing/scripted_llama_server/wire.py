"""What goes over a connection, and into the journal."""

from __future__ import annotations

import json
import math
import os
import select
import socket
import time
from typing import Any

Json = Any
JSON_TYPE = "application/json; charset=utf-8"


def error_body(code: int, message: str = "fake error", error_type: str = "server_error") -> Json:
    return {"error": {"code": code, "message": message, "type": error_type}}


def head(status: int, **headers: object) -> bytes:
    """Status line and headers of a response."""
    lines = [f"HTTP/1.1 {status} {'OK' if status == 200 else 'Status'}", "Server: llama.cpp"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def read_request(file: Any) -> tuple[str, str, dict[str, str], bytes] | None:
    """Method, path, headers (lower-case names) and body; None at the end of the connection."""
    words = file.readline(65536).split()
    if len(words) < 2:
        return None
    headers: dict[str, str] = {}
    while line := file.readline(65536).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return (
        words[0].decode(),
        words[1].decode(),
        headers,
        file.read(int(headers.get("content-length", 0))),
    )


def hung_up(sock: socket.socket, wait_s: float | None = 0.0) -> bool:
    """Whether the client has closed its end, or does so within `wait_s` (None: for ever)."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(None if wait_s is None else math.ceil(wait_s * 1000)))


def write_all(fd: int, data: bytes) -> None:
    """Blocks while the pipe is full, as the real server does; a reader that is gone is no error."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        pass


class JournalWriter:
    """Appends one JSON line per observed fact; single writes, so that threads and children may
    share it."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(self, fact: str, **fields: Json) -> None:
        line = json.dumps({"fact": fact, "at": time.time(), **fields})
        # SIGKILL may cut a write short: the next line is whole again
        os.write(self._fd, f"\n{line}\n".encode())

    def count(self, fact: str) -> int:
        """How often it was noted, by servers before this one, too."""
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0).count(
            json.dumps({"fact": fact})[:-1].encode()
        )
