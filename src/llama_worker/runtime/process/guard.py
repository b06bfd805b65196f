"""The guard, a process between the host and its server: starts the server, and ends its whole tree.

The host's Python runs it as a script, `guard.py HOST_PID CONTROL_FD REPORT_FD COMMAND...`, or with
`-c` if the file was replaced since the host read it. It imports nothing of the package, so that it
is small and quick to start. It is the server's parent and the subreaper of its orphans. So it knows
the whole tree, including daemons, and can end it without the risk that a pid was reused.

It ends the tree when
- the server's first process has ended, for whatever reason;
- the host orders it: bytes on CONTROL_FD, `T` for SIGTERM to the server's group, `K` to kill;
- the host is gone, for whatever reason: SIGTERM, and SIGKILL after `ORPHAN_GRACE_S`. The first sign
  is CONTROL_FD's end of file, or a pidfd if a forked child of the host keeps CONTROL_FD open.
If the guard itself is killed, the kernel kills the server by its parent-death signal. The kernel
clears that signal if the server's program is set-user-ID or has file capabilities; the host then
kills the server.

Its environment is the host's, since LD_LIBRARY_PATH and the like, if they are set for the server,
might break this Python. The server's own variables are in it under names with `SERVER_PREFIX`.

REPORT_FD gets lines: `started PID` or `failed ERRNO TEXT`; `died RETURNCODE` as soon as the
server's first process has ended; `gone` when nothing of the tree is left. Then the guard ends.
"""

import contextlib
import ctypes
import errno
import os
import select
import signal
import sys
import time

SERVER_PREFIX = "LLAMA_WORKER_SET_"
ORPHAN_GRACE_S = 2.0
RETRY_S = 0.1
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # temporary shortages of the machine
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SYS_PIDFD_SEND_SIGNAL, _SYS_PIDFD_OPEN = 424, 434
_IGNORED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGTSTP,
)


def main(argv: list[str]) -> None:
    """Start the command and watch over it until its tree is gone."""
    host_pid, control_fd, report_fd = (int(word) for word in argv[1:4])
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # some hosts ignore SIGCHLD, and then no child could be waited for
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    host = pidfd_open(host_pid)
    if os.getppid() != host_pid:  # the host died before it could be watched
        return
    server_pid = start_server(argv[4:], report_fd, (host, control_fd, report_fd), prctl)
    if server_pid is None:
        return
    report(report_fd, b"started %d\n" % server_pid)
    watch(server_pid, host, control_fd)
    end_tree(server_pid, report_fd)
    report(report_fd, b"gone\n")


def start_server(
    command: list[str], report_fd: int, private: tuple[int, ...], prctl: object
) -> "int | None":
    """Start the server and return its pid; report it and return None if it cannot be executed."""
    guard_pid = os.getpid()
    failure_read, failure_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for fd in private:
                os.close(fd)
            os.setsid()
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # type: ignore[operator]
            if os.getppid() != guard_pid:
                os._exit(127)
            for number in _IGNORED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            set_server_variables()
            os.execvp(command[0], command)
        except OSError as error:
            os.write(
                failure_write,
                b"failed %d %s\n" % (error.errno or 0, os.strerror(error.errno or 0).encode()),
            )
        finally:
            os._exit(127)
    os.close(failure_write)
    failure = os.read(failure_read, 4096)  # the end of file means that exec took place
    os.close(failure_read)
    if not failure:
        return pid
    os.waitpid(pid, 0)
    report(report_fd, failure)
    return None


def set_server_variables() -> None:
    """Give the server's own variables their names without the prefix."""
    for name in list(os.environ):
        if name.startswith(SERVER_PREFIX):
            os.environ[name.removeprefix(SERVER_PREFIX)] = os.environ.pop(name)


def pidfd_open(pid: int) -> int:
    """A descriptor of the process. By a system call: a Python that was built on an old system, as
    many of uv's are, has no `os.pidfd_open`. Raises OSError."""
    return _system_call("pidfd_open", _SYS_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """As that of `signal`, which such a Python lacks, too. Raises OSError."""
    _system_call("pidfd_send_signal", _SYS_PIDFD_SEND_SIGNAL, pidfd, number, None, 0)


def _system_call(name: str, *words: "int | None") -> int:
    """The call's result. Raises an OSError that names the call, which a sandbox may forbid."""
    result = int(ctypes.CDLL(None, use_errno=True).syscall(*words))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


WAIT, TERMINATE, KILL = "wait", "terminate", "kill"  # what to do with the server


class ShutdownPlan:
    """Decides when the server gets SIGTERM, and when its tree is killed. Sans-IO.

    `kill_at`: monotonic seconds, set once the host is gone. No `step` may follow KILL.
    """

    def __init__(self) -> None:
        self.kill_at: float | None = None
        self._sigterm_sent = False  # a second one makes llama-server drop what it does

    def step(self, now: float, *, ended: bool, host_gone: bool, orders: bytes) -> str:
        """What to do, given whether the server has ended and the host is gone, and its orders."""
        if ended or b"K" in orders or (self.kill_at is not None and now >= self.kill_at):
            return KILL
        if host_gone and self.kill_at is None:
            self.kill_at = now + ORPHAN_GRACE_S
            if self._sigterm_sent:
                return WAIT
        elif b"T" not in orders:
            return WAIT
        self._sigterm_sent = True
        return TERMINATE


def patient_pidfd_open(pid: int) -> int:
    """Wait while this machine is short of something."""
    while True:
        try:
            return pidfd_open(pid)
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            time.sleep(RETRY_S)


def watch(server_pid: int, host: int, control_fd: int) -> None:
    """Pass on SIGTERM when it is due; return when the tree must be killed."""
    server, plan = patient_pidfd_open(server_pid), ShutdownPlan()
    poll = select.poll()
    for fd in (server, host, control_fd):
        poll.register(fd, select.POLLIN)
    while True:
        wait_s = None if plan.kill_at is None else max(0.0, plan.kill_at - time.monotonic())
        ready = dict(poll.poll(None if wait_s is None else wait_s * 1000))
        orders = os.read(control_fd, 64) if control_fd in ready else b""
        gone = [fd for fd in ready if fd == host or (fd == control_fd and not orders)]
        for fd in gone:
            poll.unregister(fd)
        action = plan.step(
            time.monotonic(), ended=server in ready, host_gone=bool(gone), orders=orders
        )
        if action == KILL:
            return
        if action == TERMINATE:
            terminate(server_pid)


def terminate(server_pid: int) -> None:
    """Send the server's group SIGTERM, and SIGCONT: a stopped process must run to handle it."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        try:
            os.killpg(server_pid, number)
        except OSError:
            return


def end_tree(server_pid: int, report_fd: int) -> None:
    """Kill and reap every process that is left. Report the server's end when it is seen: before the
    first kill if it has ended.

    A killed process leaves its children to the guard, so the loop finds all of them, and every pid
    that it signals is an unreaped child of its own.
    """
    if not proc_is_ours():  # its group is all that can be found
        with contextlib.suppress(OSError):
            os.killpg(server_pid, signal.SIGKILL)
    pid, status = os.waitpid(server_pid, os.WNOHANG)
    server = [server_pid]
    while True:
        if pid == server_pid:
            report(report_fd, b"died %d\n" % os.waitstatus_to_exitcode(status))
            server = []
        try:
            # /proc may hide a server with privileges of its own, or show other processes only
            found, has_seen_all = sorted({*server, *children()}), True
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            found, has_seen_all = server, False  # the others once they can be seen
        for child in found:
            try:
                os.kill(child, signal.SIGKILL)
            except PermissionError:  # a set-user-ID program of another user: wait for its end
                continue
        try:
            pid, status = os.waitpid(-1, 0 if has_seen_all else os.WNOHANG)
        except ChildProcessError:
            return
        if not has_seen_all:
            time.sleep(RETRY_S)


def report(report_fd: int, line: bytes) -> None:
    """Send the host a line, if it is still alive."""
    try:
        os.write(report_fd, line)
    except OSError:
        return


def proc_is_ours() -> bool:
    """Whether /proc shows this process's PID namespace. In that of another (`unshare --pid` without
    `--mount-proc`) the same pids are strangers'."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except (FileNotFoundError, PermissionError):
        return False


def children() -> list[int]:
    """The pids whose parent is this process. Raises OSError if not all can be seen."""
    guard_pid = os.getpid()
    pids: list[int] = []
    if not proc_is_ours():
        return pids
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    fields = stat.read().rpartition(b")")[2].split()
            except OSError as error:
                if error.errno in SHORTAGES:
                    raise
                continue
            if int(fields[1]) == guard_pid:
                pids.append(int(name))
    return pids


if __name__ == "__main__":
    main(sys.argv)
    os._exit(0)
