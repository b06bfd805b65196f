"""The guard, run by hand, with this process for its host; and its decisions."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llama_worker.runtime.process import guard
from llama_worker.runtime.process.guard import KILL, ORPHAN_GRACE_S, TERMINATE, WAIT, ShutdownPlan
from tests.actors.conftest import WAIT_S
from tests.conftest import run_python
from tests.tables import cases

# A server that says on standard output when it may be asked to end, and that it was.
SERVER = """
import os, signal, sys, time
def end(*_):
    os.write(1, b"asked ")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
os.write(1, b"ready ")
signal.alarm(60)
while True:
    time.sleep(0.5)
"""


def changed(lines: str) -> tuple[str, ...]:
    """The guard's main, where these lines come first."""
    begin = "import errno, os, sys\nfrom llama_worker.runtime.process import guard\n"
    return "-c", f"{begin}{lines}guard.main([{guard.__file__!r}, *sys.argv[1:]])\n"


PATIENT = changed("guard.ORPHAN_GRACE_S = 60.0\n")
# The server is another user's: it may not be killed.
POWERLESS = changed("""
def kill(pid, number):
    os.write(int(sys.argv[3]), b"refused\\n")
    raise PermissionError(1, "Operation not permitted")
guard.os.kill = kill
""")
# On a machine that has no descriptor left for a while.
STARVED = changed("""
def lacking(call, *times):
    lacks = [*times]
    def tried(*words):
        if lacks and lacks.pop(0):
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return call(*words)
    return tried
guard.os.listdir = lacking(os.listdir, True, True, True)
guard.pidfd_open = lacking(guard.pidfd_open, False, True)  # the host's, and the server's
""")
# It is killed before its server is a server.
ORPHANING = changed("""
setsid = os.setsid
def orphaned():
    guard_pid = os.getppid()
    os.kill(guard_pid, 9)
    while os.getppid() == guard_pid:
        pass
    setsid()
os.setsid = orphaned
""")
BLINDED = changed("guard.children = lambda: []\n")  # /proc shows no process of another user


class Guard:
    """A guard and its server. `say` gives it orders."""

    def __init__(self, cleanup: contextlib.ExitStack, *program: str) -> None:
        control, self._control = os.pipe()
        self.reports_from, report = os.pipe()
        self.process = cleanup.enter_context(
            subprocess.Popen(
                [
                    *(sys.executable, *program, str(os.getpid()), str(control), str(report)),
                    *(sys.executable, "-S", "-c", SERVER),
                ],
                stdout=subprocess.PIPE,
                pass_fds=(control, report),
            )
        )
        cleanup.callback(self.process.kill)
        os.close(control)
        os.close(report)
        cleanup.callback(os.close, self.reports_from)
        cleanup.callback(self.close_control)
        assert self.process.stdout is not None
        self._output = self.process.stdout
        assert self._output.read(len("ready ")) == b"ready "
        self.server_pid = int(os.read(self.reports_from, 100).split()[1])

    def say(self, order: bytes) -> None:
        """On the control pipe."""
        os.write(self._control, order)

    def close_control(self) -> None:
        """As the kernel does where the host is gone."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def ended(self) -> tuple[bytes, bytes]:
        """What the server said, and what the guard reported, once both have ended."""
        self.process.wait(WAIT_S)
        reports = b""
        while more := os.read(self.reports_from, 100):
            reports += more
        return self._output.read(), reports


@pytest.fixture
def cleanup() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


ITSELF = ("-I", "-S", str(Path(guard.__file__)))
ASKED, KILLED = (b"asked ", b"died 0\ngone\n"), (b"", b"died -9\ngone\n")


@cases(
    "program, order, said",
    {
        # it comes before the pidfd says that the host has ended
        "the control pipe's end": (PATIENT, None, ASKED),
        "SIGTERM": (ITSELF, b"T", ASKED),
        "SIGKILL": (ITSELF, b"K", KILLED),
        "SIGKILL without descriptors": (STARVED, b"K", KILLED),
        "SIGKILL of what is not shown": (BLINDED, b"K", KILLED),
    },
)
def test_the_guard_ends_its_tree(
    cleanup: contextlib.ExitStack,
    program: tuple[str, ...],
    order: bytes | None,
    said: tuple[bytes, bytes],
) -> None:
    # what a thread of the host blocks, and a stop, delay nothing
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    cleanup.callback(signal.pthread_sigmask, signal.SIG_SETMASK, blocked)
    run = Guard(cleanup, *program)
    os.kill(run.server_pid, signal.SIGSTOP)
    if order is None:
        run.close_control()
    else:
        run.say(order)
    assert run.ended() == said


@cases(
    "program, host_pid", {"its host": (ITSELF, os.getppid()), "the guard": (ORPHANING, os.getpid())}
)
def test_nothing_is_started_if_who_would_end_it_is_gone(
    program: tuple[str, ...], host_pid: int
) -> None:
    words = [sys.executable, *program, str(host_pid), "0", "2", "echo", "started"]
    done = subprocess.run(words, timeout=WAIT_S, stdin=subprocess.DEVNULL, capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_a_command_that_cannot_be_executed_leaves_no_zombie() -> None:
    """To a host that is the container's first process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(guard._PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    children = psutil.Process().children
    before = set(children())
    try:
        words = [sys.executable, *ITSELF, str(os.getpid()), "0", "2", "/no/such/program"]
        done = subprocess.run(words, timeout=WAIT_S, stdin=subprocess.DEVNULL, capture_output=True)
        assert done.stderr == b"failed 2 No such file or directory\n"
        assert set(children()) == before
    finally:
        prctl(guard._PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_a_guard_without_permission_to_kill_waits(cleanup: contextlib.ExitStack) -> None:
    run = Guard(cleanup, *POWERLESS)
    run.say(b"K")
    assert os.read(run.reports_from, 100) == b"refused\n"
    os.kill(run.server_pid, signal.SIGTERM)
    assert run.ended() == (b"asked ", b"died 0\ngone\n")


def test_a_process_has_a_descriptor_on_every_python(cleanup: contextlib.ExitStack) -> None:
    pidfd = guard.pidfd_open(os.getpid())
    cleanup.callback(os.close, pidfd)
    assert not os.get_inheritable(pidfd)
    guard.pidfd_send_signal(pidfd, 0)
    with pytest.raises(ProcessLookupError, match="pidfd_open"):  # as a sandbox may forbid it
        guard.pidfd_open(2**22 + 1)  # above the highest pid


# As root without its leave to enter every folder; prctl has no effect for others.
WITHOUT_LEAVE = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
MAY_ENTER = """
import sys
from llama_worker.runtime.process.server_process import may_enter
print([may_enter(folder) for folder in sys.argv[1:]])
"""


def test_no_folder_is_entered_that_may_not_be(tmp_path: Path) -> None:
    closed, absent = tmp_path / "closed", tmp_path / "absent"
    closed.mkdir(mode=0o600)
    done = run_python(WITHOUT_LEAVE, MAY_ENTER, *map(str, (tmp_path, closed, absent)))
    assert done.stdout == "[True, False, False]\n", done.stderr


# ---------------------------------------------------------------- /proc of another PID namespace

OTHER_NAMESPACE = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")
HAS_CHILDREN_OUTSIDE = """
import os, sys
from llama_worker.runtime.process import guard
os.getpid = lambda: int(sys.argv[1])
print(guard.children())
"""
SWEEPS = """
import subprocess
from llama_worker.runtime.process.launch_mark import LaunchMark
mark = LaunchMark(1)
marked = subprocess.Popen(["sleep", "600"], env=mark.variable)
mark.kill_all()
print(marked.poll())
"""
STARTS = """
import sys
from llama_worker import LlamaWorker
from llama_worker.testing import ScriptedServer
with LlamaWorker(ScriptedServer(sys.argv[2]).config()) as worker:
    print(worker.get_worker_status().get()["state"])
"""


@cases(
    "program, said",
    {
        "strangers are no children": (HAS_CHILDREN_OUTSIDE, "[]"),
        "a sweep ends": (SWEEPS, "None"),
        "the port is the server's": (STARTS, "ready"),
    },
)
def test_pids_of_another_namespace_mean_nothing(program: str, said: str, tmp_path: Path) -> None:
    if subprocess.run([*OTHER_NAMESPACE, "true"]).returncode != 0:
        pytest.skip("this machine allows no PID namespace")
    words = [*OTHER_NAMESPACE, sys.executable, "-c", program, str(os.getpid()), str(tmp_path)]
    done = subprocess.run(words, timeout=WAIT_S, stdout=subprocess.PIPE, text=True)
    assert done.stdout == f"{said}\n"


# ---------------------------------------------------------------- decisions

Seen = tuple[float, bool, bool, bytes]  # now, the server's end, the host's, orders


@pytest.mark.parametrize(
    ("seen", "follows"),
    [
        ([(0.0, False, False, b"")], [WAIT]),
        ([(0.0, True, False, b"")], [KILL]),
        ([(0.0, True, True, b"T")], [KILL]),
        ([(0.0, False, False, b"K")], [KILL]),
        ([(0.0, False, False, b"TK")], [KILL]),
        ([(0.0, False, False, b"T"), (2.0, False, False, b"T")], [TERMINATE, TERMINATE]),
        (
            [
                (5.0, False, True, b""),  # the control pipe's end
                (5.1, False, True, b""),  # the pidfd
                (5.0 + ORPHAN_GRACE_S - 0.01, False, False, b""),
                (5.0 + ORPHAN_GRACE_S, False, False, b""),
            ],
            [TERMINATE, WAIT, WAIT, KILL],
        ),
        (
            [
                (5.0, False, False, b"T"),
                (6.0, False, True, b""),  # a second SIGTERM would cut short what the first began
                (6.0 + ORPHAN_GRACE_S, False, False, b""),
            ],
            [TERMINATE, WAIT, KILL],
        ),
        ([(5.0, False, True, b""), (5.1, True, False, b"")], [TERMINATE, KILL]),
    ],
)
def test_the_guards_plan_for_each_observation(seen: list[Seen], follows: list[str]) -> None:
    plan = ShutdownPlan()
    assert [
        plan.step(now, ended=ended, host_gone=host_gone, orders=orders)
        for now, ended, host_gone, orders in seen
    ] == follows
