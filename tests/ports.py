"""Ports for tests, locked against all other tests on this machine."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from llama_worker.runtime.process.free_port import addresses_of, can_listen

# Below those that the kernel hands out by itself. The servers that outlive a test have a range of
# their own.
PORTS, LASTING_PORTS = range(20000, 32000), range(32000, 32768)
_LOCKS = Path(tempfile.gettempdir()) / "llama_worker-test-ports"


@contextlib.contextmanager
def held_ports(ports: range = PORTS) -> Iterator[Callable[[], int]]:
    """A factory of ports that no other test on this machine uses meanwhile. Not thread-safe."""
    _LOCKS.mkdir(exist_ok=True)
    # somewhere else in every process: they seldom meet
    first = os.getpid() * 97 + int(time.monotonic() * 1000)
    candidates = (ports[(first + step) % len(ports)] for step in range(len(ports)))
    with contextlib.ExitStack() as held:

        def take() -> int:
            for port in candidates:
                lock = os.open(_LOCKS / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
                held.callback(os.close, lock)
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if can_listen(addresses_of("127.0.0.1", port)):
                        return port
            raise RuntimeError("no free port")

        yield take
