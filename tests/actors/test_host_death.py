"""The host ends, however: nothing of the server's tree is left, and the exit does not hang."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from llama_worker.runtime.process import launch_mark
from llama_worker.runtime.process.guard import _PR_SET_CHILD_SUBREAPER
from llama_worker.testing import scripts as fs
from llama_worker.types.worker import WorkerState
from tests.actors.conftest import (
    WAIT_S,
    MakeWorker,
    eventually,
    fast_timeouts,
    living,
    running,
    tree,
)
from tests.conftest import FORK_A_CHILD, trace
from tests.conftest import running as running_program

HOST_PROGRAM = Path(__file__).with_name("host_program.py")
ENDLESS = fs.ScriptedReply(
    [fs.Headers(), fs.Repeat(None, [fs.Text("token "), fs.Sleep(0.02)])],
    marker="stream",
    times=None,
)
TREE = (fs.ChildProcess("group"), fs.ChildProcess("session"), fs.ChildProcess("daemon"))
STUBBORN = fs.Script(replies=[ENDLESS], children=TREE, ignore_term=True, floods=[fs.Flood()])
HALTED = replace(STUBBORN)  # by a SIGSTOP
LOADING = replace(STUBBORN, startup=fs.Startup(load_s=None))
OBEDIENT = fs.Script(replies=[ENDLESS])


@dataclass(frozen=True)
class Host:
    """A running host program."""

    process: subprocess.Popen[str]
    journal: fs.JournalReader

    def go(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


RunHost = Callable[[str, fs.Script], Host]


@pytest.fixture
def run_host(free_port: Callable[[], int], tmp_path: Path) -> Iterator[RunHost]:
    running: list[subprocess.Popen[str]] = []

    def run(way: str, script: fs.Script) -> Host:
        journal, port, pipe = tmp_path / "journal", free_port(), subprocess.PIPE
        server = fs.scripted_server_cmd(
            replace(script, lifetime_s=120), host="127.0.0.1", port=port, slots=2, journal=journal
        )
        command = [sys.executable, str(HOST_PROGRAM), way, str(port), *server]
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        running.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            pytest.fail(f"the host did not come up: {process.communicate(timeout=30)}")
        return Host(process, fs.JournalReader(journal))

    yield run
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the children that it forked
        process.communicate()


@pytest.mark.parametrize(
    ("way", "ends_by", "script"),
    [
        ("sys.exit", 3, OBEDIENT),
        ("os._exit", 4, STUBBORN),
        ("killed", -signal.SIGTERM, OBEDIENT),
        ("killed", -signal.SIGKILL, STUBBORN),
        ("killed", -signal.SIGKILL, HALTED),
        ("killed without children", -signal.SIGKILL, OBEDIENT),
        ("exit while starting", 0, LOADING),
        ("exit while starting", -signal.SIGKILL, LOADING),
    ],
)
def test_a_host_that_ends_without_close_leaves_nothing(
    run_host: RunHost, way: str, ends_by: int, script: fs.Script
) -> None:
    host = run_host(way, script)
    eventually(lambda: len(tree(host.journal)) == 2 + len(script.children), "the whole tree")
    seen = tree(host.journal)
    if script is HALTED:
        os.kill(host.journal.wait("launched")["pid"], signal.SIGSTOP)
    if ends_by < 0:
        host.process.send_signal(-ends_by)
    else:
        host.go()
    assert host.process.wait(timeout=WAIT_S) == ends_by
    eventually(lambda: not running(seen), f"end of {seen}")
    assert not running(tree(host.journal))
    if way == "sys.exit":  # patiently; `test_guard` has the patient guard of a host that is killed
        assert [fact["signal"] for fact in host.journal.facts("signal")] == ["SIGTERM"]


def test_a_host_that_calls_exec_leaves_nothing(run_host: RunHost) -> None:
    host = run_host("exec", OBEDIENT)
    seen = tree(host.journal)
    host.go()
    eventually(lambda: not running(seen), f"end of {seen}")
    assert host.process.poll() is None
    forked = [
        child
        for child in psutil.Process(host.process.pid).children()
        if child.status() != psutil.STATUS_ZOMBIE
    ]
    assert len(forked) == 2, "children that the host forked, whose end does not tell of the exec"


def test_host_killed_during_guard_start_leaves_nothing(run_host: RunHost) -> None:
    host = run_host("exit while starting", STUBBORN)
    host.process.kill()
    host.process.wait()
    journal = str(host.journal.path)  # which guard and server are told

    def is_left() -> bool:
        return any(
            journal in (process.info["cmdline"] or ())
            for process in psutil.process_iter(["cmdline"])
        )

    eventually(lambda: not is_left(), "end of guard and server")


def test_child_forked_by_host_does_not_harm_worker(run_host: RunHost) -> None:
    host = run_host("a child runs atexit", OBEDIENT)
    host.go()
    _, errors = host.process.communicate(timeout=WAIT_S)
    assert host.process.returncode == 0, errors
    assert not running(tree(host.journal))


# ------------------------------------------------------------ the guard


def test_guards_death_ends_only_its_server_tree(make_worker: MakeWorker) -> None:
    script, timeouts = fs.Script(children=TREE, ignore_term=True), fast_timeouts(stop_grace_s=0.5)
    swept, other = (make_worker(script, timeouts=timeouts) for _ in range(2))
    for rig in (swept, other):
        rig.journal.wait("child", count=3)
    first, others = swept.tree(), other.tree()
    assert len(first) == len(others) == 2 + 3
    request = swept.submit(fs.Headers(), fs.Tokens(3), fs.WaitClose())
    swept.wait_text(request, "tok2")
    os.kill(swept.journal.wait("launched")["ppid"], signal.SIGKILL)
    result = swept.ended(request)
    assert (result["fail_reason"], result["text"]) == ("server_died", "tok0 tok1 tok2 ")
    swept.wait_restarted()
    assert not running(first), "there are two servers' trees side by side"
    assert living(others) == set(others)
    assert other.status()["restart_count"] == 0


def test_sweep_without_descriptors_goes_on_later(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_worker(fs.Script(children=[fs.ChildProcess("daemon")]))
    daemon, first = rig.journal.wait("child")["pid"], rig.tree()
    lacks = [OSError(errno.EMFILE, os.strerror(errno.EMFILE)) for _ in range(2)]
    read = launch_mark._started_at_ticks

    def lacking(pid: int) -> int:
        if pid == daemon and lacks:
            raise lacks.pop()
        return read(pid)

    monkeypatch.setattr(launch_mark, "_started_at_ticks", lacking)
    os.kill(rig.journal.wait("launched")["ppid"], signal.SIGKILL)
    rig.wait_restarted()
    assert not running(first), "there are two servers' trees side by side"


def test_process_older_than_launch_is_not_inspected(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stuck in the kernel may keep its environment locked."""
    rig = make_worker(fs.Script(children=[fs.ChildProcess("daemon")]))
    daemon, environ, read = rig.journal.wait("child")["pid"], psutil.Process.environ, set()

    def noted(process: psutil.Process) -> dict[str, str]:
        read.add(process.pid)
        return environ(process)

    monkeypatch.setattr(psutil.Process, "environ", noted)
    os.kill(rig.journal.wait("launched")["ppid"], signal.SIGKILL)
    rig.wait_restarted()
    assert daemon in read
    assert os.getpid() not in read


def test_process_of_the_launchs_first_tick_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = launch_mark.LaunchMark(1)
    monkeypatch.setattr(launch_mark, "_started_at_ticks", lambda pid: mark._made_at_ticks)
    with running_program("sleep", "120", env=os.environ | mark.variable) as (marked, _):
        mark.kill_all()
        assert marked.poll() is not None


def test_unreaped_orphan_does_not_delay_a_restart(make_worker: MakeWorker) -> None:
    """As in a container whose first process does not wait for children that were not its own."""
    rig = make_worker()
    launched = rig.journal.wait("launched")
    mark = psutil.Process(launched["pid"]).environ()["LLAMA_WORKER_LAUNCH"]
    orphan = f"LLAMA_WORKER_LAUNCH={mark} sleep 120 & exec sleep 120"
    with running_program("sh", "-c", orphan) as (no_reaper, _):
        parent = psutil.Process(no_reaper.pid)
        both = ["sleep", "sleep"]
        eventually(
            lambda: [each.name() for each in (parent, *parent.children())] == both, "the orphan"
        )
        os.kill(launched["ppid"], signal.SIGKILL)
        rig.wait_restarted()
        assert [child.status() for child in parent.children()] == [psutil.STATUS_ZOMBIE]


def test_host_that_adopts_orphans_reaps_its_server(make_worker: MakeWorker) -> None:
    """As one that is a container's first process."""
    rig = make_worker()
    launched = rig.journal.wait("launched")
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        os.kill(launched["ppid"], signal.SIGKILL)
        rig.wait_restarted()
        assert not psutil.pid_exists(launched["pid"]), "it is a zombie"
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_stopped_guard_with_overdue_report_is_resumed(make_worker: MakeWorker) -> None:
    rig = make_worker()
    launched = rig.journal.wait("launched")
    os.kill(launched["ppid"], signal.SIGSTOP)
    os.kill(launched["pid"], signal.SIGSEGV)
    rig.wait_restarted()
    (restart,) = rig.debug()["recent_restarts"]
    assert restart["detail"] == "the server ended with signal 11"


def test_a_guard_that_cannot_go_on_is_killed(make_worker: MakeWorker) -> None:
    rig = make_worker(fs.Script(children=TREE))
    rig.journal.wait("child", count=3)
    first, launched = rig.tree(), rig.journal.wait("launched")
    trace(launched["ppid"], stop=True)
    os.kill(launched["pid"], signal.SIGKILL)
    rig.wait_restarted()
    assert not running(first)


def test_guard_ignores_broadcast_signals_and_never_delays_stop(make_worker: MakeWorker) -> None:
    rig = make_worker(fs.Script(ignore_term=True), timeouts=fast_timeouts(stop_grace_s=0.5))
    guard = rig.journal.wait("launched")["ppid"]
    by_a_terminal, by_a_manager = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP), signal.SIGTERM
    for number in (*by_a_terminal, by_a_manager):
        os.kill(guard, number)
    assert rig.run()["state"] == "completed"
    assert rig.status()["restart_count"] == 0
    os.kill(guard, signal.SIGSTOP)
    rig.stop()
    assert rig.status()["state"] is WorkerState.STOPPED
    eventually(lambda: not running(rig.tree()), "end of the server")


# ------------------------------------------------------------ small host programs


def program(
    source: str, port: int, *first: str, replies: Sequence[fs.ScriptedReply] = ()
) -> subprocess.CompletedProcess[str]:
    """It gets the `first` words, a port and the command of a scripted server, and is waited for."""
    script = fs.Script(replies=replies, lifetime_s=60)
    command = fs.scripted_server_cmd(script, host="127.0.0.1", port=port, slots=1)
    words = [sys.executable, "-c", source, *first, str(port), *command]
    return subprocess.run(words, timeout=60, capture_output=True, text=True)


_WITHOUT_STREAMS = """
import os, sys
os.closerange(0, 3)
from pathlib import Path
from llama_worker import LlamaWorker, WorkerConfig
said, port, *command = sys.argv[1:]
with LlamaWorker(WorkerConfig("closed", "127.0.0.1", int(port), command)) as worker:
    Path(said).write_text(worker.ask("x").get(timeout=30)["text"])
"""


def test_host_with_closed_standard_streams_runs_a_server(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    program(_WITHOUT_STREAMS, free_port(), str(tmp_path / "said"))
    assert (tmp_path / "said").read_text() == "Hello"


_SLOWLY_TOLD = """
import logging, sys, time
class Slow(logging.StreamHandler):
    def emit(self, record):
        time.sleep(0.02)
        super().emit(record)
def slow(event):
    time.sleep(0.02)
    print(event.get("state"), flush=True)
logging.basicConfig(level=logging.INFO, handlers=[Slow()])
from llama_worker import LlamaWorker, WorkerConfig
port, *command = sys.argv[1:]
worker = LlamaWorker(WorkerConfig("told", "127.0.0.1", int(port), command, on_event=slow))
worker.start().get(timeout=30)
"""


def test_last_events_and_log_lines_precede_the_exit(free_port: Callable[[], int]) -> None:
    done = program(_SLOWLY_TOLD, free_port())
    assert done.stdout.splitlines()[-1] == "stopped"
    assert "state='stopped'" in done.stderr.splitlines()[-1]


_CALLS_BACK_AT_EXIT = """
import atexit, sys, threading
from llama_worker import LlamaWorker, WorkerConfig
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
atexit.register(setattr, threading.Thread, "start", refuse)  # as Python 3.12 does
port, *command = sys.argv[1:]
worker = LlamaWorker(WorkerConfig("exits", "127.0.0.1", int(port), command))
worker.start().get(timeout=30)
request = worker.submit("job", "", "stream").get(timeout=30)
result = worker.result(request["request_id"])
result.add_done_callback(lambda future: print(future.get()["fail_reason"], flush=True))
"""


def test_callback_due_at_exit_is_called(free_port: Callable[[], int]) -> None:
    done = program(_CALLS_BACK_AT_EXIT, free_port(), replies=[ENDLESS])
    assert (done.stdout, done.stderr) == ("worker_stopped\n", "")


_HANGS_IN_A_TOOL = """
import asyncio, sys, threading, time
from llama_worker import LlamaWorker, WorkerConfig
hanging = threading.Event()
def hang():
    hanging.set()
    threading.Event().wait()
class Hanging:
    async def run_tool(self, **call):
        await asyncio.to_thread(hang)
function = {"name": "hang", "parameters": {"type": "object", "properties": {}}}
port, *command = sys.argv[1:]
tools = {"normal_tools": [{"type": "function", "function": function}], "tool_runner": Hanging()}
worker = LlamaWorker(WorkerConfig("hangs", "127.0.0.1", int(port), command, **tools))
worker.start().get(timeout=30)
request_id = worker.submit("job", "", "x").get(timeout=30)["request_id"]
assert hanging.wait(30)
worker.cancel(request_id).get(timeout=30)
print(worker.result(request_id).get(timeout=30)["state"])
while worker.get_debug_info().get(timeout=30)["stuck_tool_threads_count"] != 1:
    time.sleep(0.01)
"""


def test_async_tools_hanging_thread_does_not_delay_exit(free_port: Callable[[], int]) -> None:
    steps = fs.plain_reply(fs.ToolCall("hang", {}), reason="tool_calls")
    done = program(_HANGS_IN_A_TOOL, free_port(), replies=[fs.ScriptedReply(steps)])
    assert (done.stdout, done.returncode, done.stderr) == ("canceled\n", 0, "")


_LATE = """
import atexit, sys
from llama_worker import LlamaWorker, WorkerConfig, backend
class Holder:
    def __init__(self):
        command = ["llama-server", "--model", "x"]
        self.worker = LlamaWorker(WorkerConfig("late", "127.0.0.1", 1234, command))
    def __del__(self):
        self.worker.close()
holder = Holder()
atexit.unregister(backend._close_all_at_exit)  # as if its time had been up
"""


def test_close_after_last_thread_has_ended_returns() -> None:
    """As by a `__del__` while the interpreter clears the modules."""
    assert subprocess.run([sys.executable, "-c", _LATE], timeout=60).returncode == 0


_FORKS_MEANWHILE = f"""{FORK_A_CHILD}
import sys
from llama_worker import LlamaWorker, WorkerConfig
port, *command = sys.argv[1:]
make_pipe, children, threads = os.pipe, [], []
def pipe_and_fork():
    ends = make_pipe()
    if threading.current_thread().name == "llama_worker-forks-server":
        threads.append(forking(children))
    return ends
os.pipe = pipe_and_fork
with LlamaWorker(WorkerConfig("forks", "127.0.0.1", int(port), command)) as worker:
    try:
        print(worker.ask("x").get(timeout=30)["text"], len(threads) > 0)
    finally:
        for thread in threads:
            thread.join()
        for child in children:
            os.kill(child, signal.SIGKILL)
"""


def test_child_forked_during_launch_does_not_delay_it(free_port: Callable[[], int]) -> None:
    done = program(_FORKS_MEANWHILE, free_port())
    assert done.stdout == "Hello True\n", done.stderr
