"""Ports for runs outside pytest, under the same locks as the `free_port` fixture's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

FIRST_PORT, LAST_PORT = 20000, 31999
_FOLDER = Path(tempfile.gettempdir()) / "llama_worker-test-ports"


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """So many ports that no test on this machine uses meanwhile."""
    _FOLDER.mkdir(exist_ok=True)
    ports: list[int] = []
    with contextlib.ExitStack() as locks:
        for step in range(LAST_PORT - FIRST_PORT):
            if len(ports) == count:
                break
            port = FIRST_PORT + (os.getpid() * 97 + step) % (LAST_PORT - FIRST_PORT)
            lock = os.open(_FOLDER / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue
            locks.callback(os.close, lock)
            if _is_free(port):
                ports.append(port)
        if len(ports) < count:
            raise RuntimeError(f"only {len(ports)} of {count} ports are free")
        yield ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
