"""Finds free TCP ports for servers, and puts off forks while a descriptor is open that no child may
keep."""

from __future__ import annotations

import errno
import itertools
import os
import random
import socket
import threading
from collections.abc import Iterable
from typing import Any

from llama_worker.config.command import without_brackets
from llama_worker.config.validation import checked_str

Address = tuple[socket.AddressFamily, tuple[Any, ...]]  # as `getaddrinfo` returns them

_PORTS = range(20000, 32000)  # below the kernel's ephemeral ports
_turns = itertools.count(random.randrange(len(_PORTS)))

# Who holds it keeps the host's other threads from a fork. Reentrant: the thread that holds it may
# run a signal handler of the host's that forks.
no_fork = threading.RLock()
# the child's copy belongs to the one thread that it has, which has forked
os.register_at_fork(
    before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release
)


def free_port(host: str = "127.0.0.1") -> int:
    """A port from 20000 to 31999 that a server can listen on now; each call returns another one.

    The port is not reserved: if another program takes it before the server does, `start` fails with
    `port_in_use`. That is rare, since every process begins its search at another port. Any thread.
    Raises OSError if no port is free, TypeError or ConfigError if `host` is not a host.
    """
    checked_str("host", host, empty=False)
    for _ in _PORTS:
        turn = next(_turns) + 97 * os.getpid()  # a forked process inherits its parent's count
        port = _PORTS[turn % len(_PORTS)]
        if can_listen(addresses_of(without_brackets(host), port)):
            return port
    raise OSError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free on {host}")


def addresses_of(host: str, port: int) -> list[Address]:
    """Where a server would listen; none if that is unknown. Waits for the name's lookup."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):  # UnicodeError: IDNA does not allow the name
        return []
    return [(family, address) for family, _, _, _, address in found]


def can_listen(addresses: Iterable[Address]) -> bool:
    """Whether a server could listen there now; True if unknown (the server will report it)."""
    for family, address in addresses:
        try:
            with no_fork, socket.socket(family, socket.SOCK_STREAM) as probe:
                # ignore former connections in TIME_WAIT
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return True
