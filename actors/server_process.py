"""A server's process tree, and the thread that starts it, drains its output and sees it end.

Between the host and the server stands a guard process (`adapters/guard.py`), which ends the tree should the
host die.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from llama_worker import adapters
from llama_worker.messages import ServerGone, ServerNotStarted, ServerStarted
from llama_worker.process_state import Signal
from llama_worker.types import StartFailReason

_GUARD = Path(adapters.__file__).with_name("guard.py")
_MAX_LINE_BYTES = 8192  # a line without an end is cut into pieces of this
_READ_BYTES = 65536

# What would reconfigure a llama-server, or let it start a debugger on an abort and wait for it.
_SCRUBBED_PREFIXES = ("LLAMA_ARG_",)
_SCRUBBED = frozenset({"LLAMA_SERVER_ROUTER_PORT", "AIP_MODE"})


def server_environment(host: Mapping[str, str], configured: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: the host's without what would reconfigure a llama-server, then the config's. Pure."""
    kept = {
        name: value for name, value in host.items() if name not in _SCRUBBED and not name.startswith(_SCRUBBED_PREFIXES)
    }
    return {**kept, "GGML_NO_BACKTRACE": "1", **configured}


class LogRing:
    """The last lines of a server's output, newest last. Thread-safe."""

    def __init__(self, lines: int) -> None:
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=lines)
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Add output; bytes that are not UTF-8 are replaced."""
        *whole, partial = (self._partial + data).split(b"\n")
        while len(partial) > _MAX_LINE_BYTES:
            whole.append(partial[:_MAX_LINE_BYTES])
            partial = partial[_MAX_LINE_BYTES:]
        keep = self._lines.maxlen or 0
        lines = [line.rstrip(b"\r").decode(errors="replace") for line in whole[-keep:]] if keep else []
        with self._lock:
            self._partial = partial
            self._lines.extend(lines)

    def tail(self, count: int | None = None) -> tuple[str, ...]:
        """The newest `count` lines (None: all), an unfinished one among them."""
        with self._lock:
            lines = [*self._lines, self._partial.decode(errors="replace")] if self._partial else list(self._lines)
        return tuple(lines if count is None else lines[-count:])


class ServerProcess:
    """One launch. The constructor starts a daemon thread, which tells; every method may be called by any thread.

    `tell` gets ServerStarted or ServerNotStarted, and after ServerStarted one ServerGone.
    """

    def __init__(
        self,
        *,
        epoch: int,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        address: tuple[str, int],
        log: LogRing,
        tell: Callable[[ServerStarted | ServerNotStarted | ServerGone], object],
        name: str,
    ) -> None:
        self._epoch = epoch
        self._command = command
        self._environment = environment
        self._address = address
        self._log = log
        self._tell = tell
        self._lock = threading.Lock()
        self._control: int | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._orders = b""  # given before the guard was there to take them
        threading.Thread(target=self._run, name=f"{name}-server", daemon=True).start()

    def send(self, what: Signal) -> None:
        """Signal the server; without effect once it is gone. Never blocks."""
        with self._lock:
            if what is Signal.KILL_GUARD:
                if self._guard is not None:
                    self._guard.kill()
                return
            order = b"T" if what is Signal.TERMINATE else b"K"
            if self._control is None:
                self._orders += order
                return
            try:
                os.write(self._control, order)
            except OSError:
                return  # the guard has ended: so has the tree

    def _run(self) -> None:
        if not can_listen(self._address):
            self._fail(
                StartFailReason.PORT_IN_USE,
                f"{self._address[0]}:{self._address[1]} is taken by another process",
            )
            return
        control_read, control_write = os.pipe()
        report_read, report_write = os.pipe()
        try:
            guardian = subprocess.Popen(
                [
                    sys.executable or "python3",
                    *("-I", "-S", str(_GUARD), str(os.getpid()), str(control_read), str(report_write)),
                    *self._command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(self._environment),
                pass_fds=(control_read, report_write),
                start_new_session=True,
            )
        except OSError as error:
            os.close(control_write)
            os.close(report_read)
            self._fail(StartFailReason.SPAWN_FAILED, f"the guard process could not be started: {error}")
            return
        finally:
            os.close(control_read)
            os.close(report_write)
        assert guardian.stdout is not None
        with self._lock:
            self._guard, self._control = guardian, control_write
            if self._orders:
                os.write(control_write, self._orders)
        try:
            started, returncode = self._watch(guardian, guardian.stdout.fileno(), report_read)
        finally:
            with self._lock:
                self._control = None
                guardian.wait()
            os.close(control_write)
            os.close(report_read)
            guardian.stdout.close()
        if started:
            self._tell(
                ServerGone(
                    epoch=self._epoch,
                    returncode=returncode,
                    log_tail=self._log.tail(40),
                    port_taken=not can_listen(self._address),
                )
            )

    def _watch(self, guardian: subprocess.Popen[bytes], output: int, report: int) -> tuple[bool, int | None]:
        """Drain output and reports until the guard has ended: (was a server started, its return code)."""
        os.set_blocking(output, False)
        os.set_blocking(report, False)
        ended = os.pidfd_open(guardian.pid)
        poll = select.poll()
        for fd in (ended, output, report):
            poll.register(fd, select.POLLIN)
        reports = b""
        started, returncode = False, None
        try:
            while True:
                ready = {fd for fd, _ in poll.poll()}
                over = ended in ready
                if output in ready and not self._drain(output, until_empty=over):
                    poll.unregister(output)
                if report in ready or over:
                    new = _read_available(report)
                    if not new and not over:
                        poll.unregister(report)
                    *lines, reports = (reports + new).split(b"\n")
                    for line in lines:
                        word, _, rest = line.decode(errors="replace").partition(" ")
                        if word == "started":
                            started = True
                            self._tell(ServerStarted(epoch=self._epoch, pid=int(rest)))
                        elif word == "exited":
                            returncode = int(rest)
                        elif word == "failed":
                            text = rest.partition(" ")[2]
                            self._fail(StartFailReason.SPAWN_FAILED, f"cannot execute {self._command[0]!r}: {text}")
                            return False, None
                if over:
                    if not started:
                        self._fail(
                            StartFailReason.SPAWN_FAILED,
                            "the guard process ended: " + "\n".join(self._log.tail(5)),
                        )
                    return started, returncode if returncode is not None else -signal.SIGKILL
        finally:
            os.close(ended)

    def _drain(self, output: int, *, until_empty: bool) -> bool:
        """Put what the pipe holds into the ring; False at its end."""
        while True:
            try:
                data = os.read(output, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._log.feed(data)
            if not until_empty:
                return True

    def _fail(self, reason: StartFailReason, detail: str) -> None:
        self._tell(ServerNotStarted(epoch=self._epoch, reason=reason, detail=detail))


def can_listen(address: tuple[str, int]) -> bool:
    """Whether a server could listen there now; True where that cannot be told (it will say so itself)."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return True
    for family, kind, protocol, _, sockaddr in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the past's TIME_WAITs do not count
            try:
                probe.bind(sockaddr)
                probe.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
    return True


def _read_available(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return b""
