"""A server's process tree, and the thread that starts it, reads its output and reports its end.

A guard process (`guard.py`) between the host and the server ends the tree if the host dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping

from msgspec import Struct

from llama_worker.config.server_program import ServerNotFound, interpreter, located
from llama_worker.config.settings import WorkerConfig
from llama_worker.mailbox import Mailbox
from llama_worker.runtime.host.threads import never_block_this_thread, start_thread
from llama_worker.runtime.process.free_port import Address, addresses_of, can_listen, no_fork
from llama_worker.runtime.process.guard import SERVER_PREFIX, pidfd_open, pidfd_send_signal
from llama_worker.runtime.process.launch_mark import LaunchMark, guard_program
from llama_worker.runtime.process.log_ring import LogRing
from llama_worker.runtime.process.oom_watch import OomWatch
from llama_worker.server.messages import Died, Exited, Launched, LaunchFailed, LaunchReport
from llama_worker.server.termination import Signal, SilentGuardWatch
from llama_worker.start_advice import not_executed
from llama_worker.types.worker import StartFailReason

_READ_BYTES = 65536
_PAUSE_S = 0.1


class _Server(Struct, frozen=True):
    pid: int
    pidfd: int | None  # None if the process was gone before it could be opened


class GuardedServer:
    """One launch; see `ports.ServerProcess` and `Runtime.start_server`. The constructor starts a
    daemon thread, which sends the news; any thread may call every method."""

    def __init__(
        self,
        *,
        epoch: int,
        config: WorkerConfig,
        folder: str | None,
        inherited: Mapping[str, str],
        log: LogRing,
        reply_to: Mailbox[LaunchReport],
    ) -> None:
        self._epoch = epoch
        self._config = config
        self._mark = LaunchMark(epoch)
        self._folder = folder  # working directory; None, or if it is gone: the host's
        self._inherited = inherited  # environment, without the config's part
        # looked up once: at the server's end a slow lookup would look like a server that lives on
        self._addresses: list[Address] = []
        self._log = log
        self._reply_to = reply_to
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._orders = b""  # given before the guard was started
        self._server: _Server | None = None  # once it was started
        self._death_reported = False  # the guard said that the server's first process has ended,
        self._reaped = False  # and that nothing of the tree is left
        # kept if the guard was killed and could not report it: the kernel killed the server
        self._returncode: int = -signal.SIGKILL
        self._failure: str | None = None
        self._oom: OomWatch | None = None
        self.ended = False  # no process is left; set before the last message is sent
        log.begin_launch()
        start_thread(f"llama_worker-{config.name}-server", self._run)

    def send(self, what: Signal) -> None:
        with self._lock:
            if what is Signal.FORCE:
                self._force()
                return
            order = b"T" if what is Signal.TERMINATE else b"K"
            if self._control is None or self._guard is None:
                self._orders += order
                return
            with contextlib.suppress(OSError):  # the guard has ended: so has the tree
                self._control.send(order, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            _signal(self._guard, signal.SIGCONT)  # a stopped guard must run to obey

    def is_gone(self) -> bool:
        with self._lock:
            if self._server is None:
                return False
            return self._server.pidfd is None or _has_ended(self._server.pidfd)

    def _force(self) -> None:
        """Kill the server, since the guard did not obey. The guard lives on: a killed server may
        only need time to free its memory."""
        if self._server is not None:
            _kill(self._server)
            if self._guard is not None:
                # a guard that was stopped after the order must run to reap
                _signal(self._guard, signal.SIGCONT)
        elif self._guard is not None:
            _signal(self._guard, signal.SIGKILL)  # it has not started a server yet

    def _run(self) -> None:
        never_block_this_thread()
        try:
            with contextlib.ExitStack() as cleanup:
                final_report = self._run_guard(cleanup)
        # Out of descriptors, processes or memory; `cleanup` has released what there was.
        except Exception as error:
            detail = f"cannot start the server: {error}"
            final_report = self._exited() if self._server else self._not_started(detail)
        if self._oom is not None:
            self._oom.close()
        with self._lock:  # by the next `send` a closed descriptor's number may be reused
            if self._server is not None and self._server.pidfd is not None:
                os.close(self._server.pidfd)
                self._server = _Server(self._server.pid, None)
        self.ended = True
        self._reply_to.tell(final_report)

    def _run_guard(self, cleanup: contextlib.ExitStack) -> LaunchFailed | Exited:
        """Start the guard and watch until it has ended; returns the thread's last message."""
        host, port = self._config.host, self._config.port
        self._addresses = addresses_of(host, port)
        if not can_listen(self._addresses):
            taken = f"another process listens on {host}:{port}: stop it, or use another port"
            return self._not_started(taken, StartFailReason.PORT_IN_USE)
        try:
            guard_process, reports_from = self._start_guard(cleanup)
        except ServerNotFound as error:
            return self._not_started(str(error))
        return self._watch(guard_process, reports_from)

    def _start_guard(
        self, cleanup: contextlib.ExitStack
    ) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the guard, which starts the server; returns it and the socket of its reports."""
        own = {**self._config.env, **self._mark.variable}
        command = located(self._config.server_cmd, {**self._inherited, **own}, self._folder)
        guard_end, control = _socket_pair(cleanup)
        _controls.add(control)
        cleanup.callback(_controls.discard, control)
        reports_from, report_to = _socket_pair(cleanup)
        # Popen would wait for the end of a child that was forked meanwhile
        with no_fork:
            guard_process = subprocess.Popen(
                [
                    interpreter(),
                    *("-I", "-S", *guard_program(), str(os.getpid())),
                    *(str(guard_end.fileno()), str(report_to.fileno())),
                    *command,
                ],
                bufsize=0,
                cwd=self._folder if self._folder and may_enter(self._folder) else None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={
                    **self._inherited,
                    **{SERVER_PREFIX + name: value for name, value in own.items()},
                },
                pass_fds=(guard_end.fileno(), report_to.fileno()),
                start_new_session=True,
            )
        cleanup.callback(self._end_guard, guard_process)
        guard_end.close()
        report_to.close()
        with self._lock:
            self._guard, self._control = guard_process, control
            if self._orders:
                control.send(self._orders, socket.MSG_NOSIGNAL)
        return guard_process, reports_from

    def _end_guard(self, guard_process: subprocess.Popen[bytes]) -> None:
        """Reap the guard. If it is still alive, order it to end the tree: the host's forked child
        may hold the connection open."""
        self.send(Signal.KILL)
        with self._lock:
            if self._control is not None:
                self._control.close()
                self._control = None
        guard_process.wait()
        with self._lock:
            self._guard = None
        assert guard_process.stdout is not None
        guard_process.stdout.close()

    def _watch(
        self, guard_process: subprocess.Popen[bytes], reports_from: socket.socket
    ) -> LaunchFailed | Exited:
        """Drain output and reports until the guard has ended."""
        assert guard_process.stdout is not None
        output, report = guard_process.stdout.fileno(), reports_from.fileno()
        poll = select.poll()
        ended = pidfd_open(guard_process.pid)
        try:
            for fd in (ended, output, report):
                poll.register(fd, select.POLLIN)
            reports = b""
            guard_watch, server_registered = SilentGuardWatch(), False
            while True:
                ready = {fd for fd, _ in poll.poll(guard_watch.wait_ms(time.monotonic()))}
                over = ended in ready
                if output in ready and not self._drain(output):
                    poll.unregister(output)
                if report in ready:
                    new = os.read(report, _READ_BYTES)
                    if not new:
                        poll.unregister(report)
                    *lines, reports = (reports + new).split(b"\n")
                    for line in lines:
                        self._reported(line.decode(errors="replace"))
                if over:
                    return self._final_report()
                server = self._server.pidfd if self._server is not None else None
                if server in ready:
                    poll.unregister(server)
                elif server is not None and not server_registered:
                    poll.register(server, select.POLLIN)
                    server_registered = True
                overdue = self.is_gone() and not self._death_reported
                number = guard_watch.step(time.monotonic(), overdue=overdue)
                if number is not None:
                    _signal(guard_process, number)
        finally:
            os.close(ended)

    def _reported(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        match word:
            case "started":
                pid = int(rest)
                self._oom = OomWatch(pid, time.monotonic())
                with self._lock:
                    self._server = _Server(pid, _pidfd(pid))
                self._reply_to.tell(Launched(epoch=self._epoch, pid=pid))
            case "died":
                self._death_reported, self._returncode = True, int(rest)
                evidence = self._oom_evidence()
                died = Died(epoch=self._epoch, returncode=self._returncode, oom_evidence=evidence)
                self._reply_to.tell(died)
            case "gone":
                self._reaped = True
            case "failed":
                number, _, why = rest.partition(" ")
                self._failure = not_executed(self._config.server_cmd[0], int(number), why)

    def _final_report(self) -> LaunchFailed | Exited:
        if self._server is None:
            detail = self._failure or "the guard process exited early: " + "\n".join(
                self._log.tail(5)
            )
            return self._not_started(detail)
        # the guard was killed, and so the kernel kills the server: wait for its end
        if not self._reaped:
            _kill(self._server)
            if self._server.pidfd is not None:
                _has_ended(self._server.pidfd, None)
            # only the guard knew the tree; the mark in their environment shows its processes
            self._mark.kill_all()
            # its processes are now children of the host if that is the container's first process
            with contextlib.suppress(ChildProcessError):
                while os.waitid(os.P_PGID, self._server.pid, os.WEXITED | os.WNOHANG):
                    pass
        return self._exited()

    def _exited(self) -> Exited:
        return Exited(
            epoch=self._epoch,
            returncode=self._returncode,
            log_tail=self._log.tail(40),
            port_taken=not can_listen(self._addresses),
            oom_evidence=self._oom_evidence(),
        )

    def _oom_evidence(self) -> str | None:
        if self._oom is None:
            return None
        return self._oom.evidence(self._returncode, self._log.tail(5))

    def _not_started(
        self, detail: str, reason: StartFailReason = StartFailReason.SPAWN_FAILED
    ) -> LaunchFailed:
        return LaunchFailed(epoch=self._epoch, reason=reason, detail=detail)

    def _drain(self, output: int) -> bool:
        """Move what the pipe holds (at most its capacity) into the ring; False at end of file."""
        try:
            data = os.read(output, fcntl.fcntl(output, fcntl.F_GETPIPE_SZ))
            self._log.feed(data)
        except MemoryError:  # a shortage of this machine: lines may be lost, the server goes on
            time.sleep(_PAUSE_S)
            return True
        if self._oom is not None:
            self._oom.look(time.monotonic())
        return bool(data)


def may_enter(folder: str) -> bool:
    """Whether a process may make it its working directory: who is in it already need not be allowed
    to enter it."""
    return os.path.isdir(folder) and os.access(folder, os.X_OK, effective_ids=True)


def _signal(guard_process: subprocess.Popen[bytes], number: int) -> None:
    """No effect if the guard has ended, or if the host has changed its user since: orders still
    reach it then."""
    with contextlib.suppress(PermissionError):
        guard_process.send_signal(number)


def _has_ended(pidfd: int, timeout_ms: int | None = 0) -> bool:
    """Whether the process has ended, after a wait of `timeout_ms` at most; None: for ever."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def _pidfd(pid: int) -> int | None:
    try:
        return pidfd_open(pid)
    except ProcessLookupError:
        return None


def _kill(server: _Server) -> None:
    """Send SIGKILL to a server's group and, through its pidfd, to the server itself. No effect once
    it is gone."""
    if server.pidfd is None:
        return
    try:
        pidfd_send_signal(server.pidfd, signal.SIGKILL)
        os.killpg(server.pid, signal.SIGKILL)
    except OSError:
        return


def _socket_pair(cleanup: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """`cleanup` closes both ends. Not a pipe: a write to one that nobody reads kills a host whose
    SIGPIPE has its default action."""
    low = socket.socketpair()
    with low[0], low[1]:
        one, other = (
            cleanup.enter_context(socket.socket(fileno=_above_streams(end.fileno()))) for end in low
        )
    return one, other


def _above_streams(fd: int) -> int:
    """A copy of the descriptor, above 2: if the host's standard streams are closed, it may have one
    of their numbers, which the guard needs for its own."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


_controls: set[socket.socket] = set()  # the host's ends of the connections to its guards


def _close_in_child() -> None:
    """Close a forked child's copies: they would hide from the guards that the host called exec."""
    for control in _controls:
        control.close()
    _controls.clear()


os.register_at_fork(after_in_child=_close_in_child)
