"""A port for a server."""

from __future__ import annotations

import os
import socket

from llama_worker.cli.exits import Problem

_FIRST_PORT, _LAST_PORT = 20000, 31999  # below those that the kernel hands out by itself


def free_port(host: str = "127.0.0.1") -> int:
    """One that nothing listens on; processes begin to look at different ones. Raises Problem `no_port`."""
    for port in range(_FIRST_PORT + os.getpid() % 5000, _LAST_PORT):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise Problem("no_port", f"no port from {_FIRST_PORT} to {_LAST_PORT} is free on {host}", "give one with --port")
