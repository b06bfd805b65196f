"""Ports for servers."""

from __future__ import annotations

import errno
import itertools
import os
import random
import socket

from llama_worker.config.command import without_brackets
from llama_worker.config.validation import checked_str

_PORTS = range(20000, 32000)  # below those that the kernel hands out by itself
_turns = itertools.count(random.randrange(len(_PORTS)))


def free_port(host: str = "127.0.0.1") -> int:
    """A port from 20000 to 31999 that a server could listen on now, and another one with each call.

    Nothing holds it: somebody may take it before the server does, and then `start` fails with
    `port_in_use`. That is rare, since every process begins to look somewhere else. Any thread.
    Raises OSError where no port is free, TypeError or ConfigError for what is no host.
    """
    checked_str("host", host, empty=False)
    for _ in _PORTS:
        turn = next(_turns) + 97 * os.getpid()  # a forked process has its parent's count
        port = _PORTS[turn % len(_PORTS)]
        if can_listen((without_brackets(host), port)):
            return port
    raise OSError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free on {host}")


def can_listen(address: tuple[str, int]) -> bool:
    """Whether a server could listen there now; True where that cannot be told (it will say so
    itself)."""
    try:
        addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):  # the latter from a name that IDNA does not allow
        return True
    for family, kind, protocol, _, sockaddr in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # the past's TIME_WAITs do not count
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(sockaddr)
                probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return True
