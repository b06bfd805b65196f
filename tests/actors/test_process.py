"""The server's processes: how they start, what they inherit, and that nothing of the tree is
left."""

import contextlib
import errno
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from llama_worker import RestartPolicy, WorkerConfig, WorkerStartError
from llama_worker.config import server_program
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.process import guard, launch_mark, server_process
from llama_worker.runtime.process.guard import pidfd_open
from llama_worker.runtime.real import RealRuntime
from llama_worker.server import termination
from llama_worker.server.messages import Died, Exited, Launched, LaunchFailed, LaunchReport
from llama_worker.server.termination import Signal
from llama_worker.testing import scripts as fs
from llama_worker.types.worker import StartFailReason, WorkerState, WorkerStatus
from tests.actors.conftest import HOST, WAIT_S, MakeWorker, fast_timeouts, living
from tests.conftest import Leftovers, shell_program
from tests.tables import cases

TREE = (fs.ChildProcess("group"), fs.ChildProcess("session"), fs.ChildProcess("daemon"))


def _failure(starting: WorkerFuture[WorkerStatus]) -> WorkerStartError:
    with pytest.raises(WorkerStartError) as failure:
        starting.get(timeout=WAIT_S)
    return failure.value


# ------------------------------------------------------------ start


@cases(
    "variable, value",
    {
        "LLAMA_SERVER": ("LLAMA_SERVER", "FOLDER/llama-server"),
        "PATH": ("PATH", f"FOLDER:{os.defpath}"),
        "a relative LLAMA_SERVER": ("LLAMA_SERVER", "./llama-server"),
        "a relative PATH": ("PATH", f".:{os.defpath}"),
    },
)
def test_bare_word_is_sought_where_worker_was_made(
    make_worker: MakeWorker,
    free_port: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
) -> None:
    port = free_port()
    words = fs.scripted_server_cmd(fs.Script(), host=HOST, port=port, slots=1)
    shell_program(tmp_path / "llama-server", f"exec {shlex.join(words)}")
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv(variable, value.replace("FOLDER", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    rig = make_worker(server_cmd=("llama-server",), port=port, start=False)
    monkeypatch.chdir("/")
    monkeypatch.setenv(variable, "/nowhere")
    assert rig.start()["state"] is WorkerState.READY


def test_bare_word_found_nowhere_is_spawn_failed(
    make_worker: MakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("LLAMA_SERVER", str(tmp_path / "none"))
    error = _failure(make_worker(server_cmd=("llama-server",), start=False).worker.start())
    assert error.reason is StartFailReason.SPAWN_FAILED
    assert "LLAMA_SERVER: " in str(error)


def test_relative_path_counts_from_where_worker_was_made(
    make_worker: MakeWorker, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    command = fs.scripted_server_cmd(fs.Script(), host=HOST, port=port, slots=1)
    relative = tuple(fs.SERVER.name if word == str(fs.SERVER) else word for word in command)
    monkeypatch.chdir(fs.SERVER.parent)
    rig = make_worker(server_cmd=relative, port=port)
    monkeypatch.chdir("/")
    rig.worker.restart().get(timeout=WAIT_S)


@pytest.mark.parametrize("gone", ["before", "after"])
def test_a_server_starts_where_the_folder_is_gone(
    make_worker: MakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if gone == "before":
        folder.rmdir()
    rig = make_worker(start=False)
    if gone == "after":
        folder.rmdir()
    rig.start()


def test_server_owns_session_and_group_without_host_descriptors(make_worker: MakeWorker) -> None:
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        server = make_worker().journal.wait("launched")
        ours = os.fstat(file.fileno())
        for fd in Path(f"/proc/{server['pid']}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # a connection that ended meanwhile
                assert not os.path.samestat(fd.stat(), ours)
    assert server["pid"] == server["pgid"] == server["sid"] != os.getsid(0)


def test_variables_that_configure_a_server_are_not_inherited(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "LLAMA_ARG_PORT",
        "LLAMA_ARG_N_PARALLEL",
        "LLAMA_ARG_MODEL",
        "AIP_MODE",
        "LLAMA_SERVER_ROUTER_PORT",
        "LLAMA_SERVER_SLOTS_DEBUG",  # /slots then shows what every slot generates
        "LLAMA_CHAT_TEMPLATE_KWARGS",  # b9093, and so are these
        "LLAMA_LOG_FILE",
        "LLAMA_OFFLINE",
        "MTMD_BACKEND_DEVICE",  # b11434
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("GGML_OF_THE_HOST", "kept")
    monkeypatch.delenv("LLAMA_SERVER", raising=False)  # a test run may be told of one
    folder, name = os.path.split(sys.executable)
    rig = make_worker(start=False)
    command = (name, *rig.config.server_cmd[1:])
    make_worker(
        server_cmd=command, port=rig.config.port, env={"LLAMA_ARG_THREADS": "3", "PATH": folder}
    )
    env = rig.journal.wait("launched")["env"]
    assert env["GGML_OF_THE_HOST"] == "kept"
    assert {name for name in env if name.startswith(("LLAMA", "AIP", "MTMD"))} == {
        "LLAMA_ARG_THREADS",
        "LLAMA_WORKER_LAUNCH",
    }
    assert env["GGML_NO_BACKTRACE"] == "1"


def test_each_launch_has_the_environment_of_its_worker(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may set a variable for each of its workers in turn."""
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    rig = make_worker(start=False)
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "1")
    rig.start()
    rig.worker.restart().get(timeout=WAIT_S)
    environments = [fact["env"] for fact in rig.journal.facts("launched")]
    assert [each["GGML_VK_VISIBLE_DEVICES"] for each in environments] == ["0", "0"]


def test_the_configs_variables_are_the_servers_alone(make_worker: MakeWorker) -> None:
    launched = make_worker(env={"LD_LIBRARY_PATH": "/of/the/server"}).journal.wait("launched")
    server, guard = (psutil.Process(launched[each]).environ() for each in ("pid", "ppid"))
    assert server["LD_LIBRARY_PATH"] == "/of/the/server"
    assert guard.get("LD_LIBRARY_PATH") == os.environ.get("LD_LIBRARY_PATH")


@pytest.mark.parametrize(
    ("path", "why"),
    [("/nowhere/llama-server", "No such file"), ("/etc/passwd", "Permission denied")],
)
def test_program_that_cannot_be_executed_is_spawn_failed(
    make_worker: MakeWorker, path: str, why: str
) -> None:
    rig = make_worker(start=False, server_cmd=(path,))
    error = _failure(rig.worker.start())
    assert error.reason is StartFailReason.SPAWN_FAILED
    assert path in str(error)
    assert why in str(error)
    assert rig.status()["state"] is WorkerState.FAILED


@pytest.mark.parametrize("on_disk", ["import sys; sys.exit('another version')", None])
def test_replaced_or_removed_package_changes_no_running_host(
    make_worker: MakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: str | None
) -> None:
    """The next launch has the guard that the host was made for."""
    guard = tmp_path / "guard.py"
    if on_disk is not None:
        guard.write_text(on_disk)
    monkeypatch.setattr(launch_mark, "_FILE", guard)
    rig = make_worker()
    assert rig.status()["state"] is WorkerState.READY
    rig.stop()
    rig.wait_gone()


@pytest.mark.parametrize("code", [0, 255, -signal.SIGSEGV])
def test_exiting_server_says_why_and_with_which_code(make_worker: MakeWorker, code: int) -> None:
    lines = ["loading", "error: failed to load model 'x.gguf'"]
    rig = make_worker(
        fs.Script(exits=[fs.Exit(code=code, when="before_bind", log=lines)]), start=False
    )
    error = _failure(rig.worker.start())
    assert (error.reason, error.returncode) == (StartFailReason.EXITED, code)
    assert error.log_tail[-2:] == tuple(lines)
    assert lines[1] in str(error)
    assert rig.status()["state"] is WorkerState.FAILED
    assert lines[1] in rig.debug()["recent_logs"]


def test_an_environment_that_changes_meanwhile_can_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Changing(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            return None if name == "GONE" else super().get(name, default)

        def items(self) -> Any:
            raise RuntimeError("changed size during iteration")

    monkeypatch.setattr(os, "environ", Changing(KEPT="1", GONE="2"))
    assert server_program.host_environment() == {"KEPT": "1"}


def test_impossible_start_leaves_no_future_unanswered(make_worker: MakeWorker) -> None:
    too_long = make_worker(start=False, server_cmd=(sys.executable, "x" * 200_000))
    assert _failure(too_long.worker.start()).reason is StartFailReason.SPAWN_FAILED
    too_long.stop()
    # IDNA: 63 at most
    no_name = make_worker(start=False, host="x" * 70 + ".local", server_cmd=("/bin/false",))
    assert _failure(no_name.worker.start()).returncode == 1
    no_name.stop()


# ------------------------------------------------------------ the port


def test_port_taken_before_or_during_launch_is_reported(make_worker: MakeWorker) -> None:
    rig = make_worker(fs.Script(startup=fs.Startup(bind_delay_s=1.0)), start=False)
    with socket.create_server((HOST, rig.config.port)):
        assert _failure(rig.worker.start()).reason is StartFailReason.PORT_IN_USE
    assert rig.status()["state"] is WorkerState.STOPPED
    assert not rig.journal.facts("launched")
    starting = rig.worker.start()
    rig.journal.wait("launched", timeout=WAIT_S)
    with socket.create_server((HOST, rig.config.port)):
        assert _failure(starting).reason is StartFailReason.PORT_IN_USE
    assert rig.status()["state"] is WorkerState.STOPPED
    assert rig.start()["state"] is WorkerState.READY


def test_an_answer_of_another_process_is_not_readiness(make_worker: MakeWorker) -> None:
    rig = make_worker(fs.Script(startup=fs.Startup(never_bind=True), children=TREE), start=False)
    starting = rig.worker.start()
    rig.journal.wait("launched", timeout=WAIT_S)
    command = fs.scripted_server_cmd(
        fs.Script(lifetime_s=120), host=HOST, port=rig.config.port, slots=1
    )
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as stranger:
        failure = _failure(starting)
        assert failure.reason is StartFailReason.PORT_IN_USE
        *_, stopped = (e for e in rig.debug()["recent_events"] if e["event"] == "state")
        assert (stopped["state"], stopped["error"]) == ("stopped", str(failure))
        assert rig.status()["state"] is WorkerState.STOPPED
        rig.wait_gone()
        assert stranger.poll() is None
        stranger.kill()


# ------------------------------------------------------------ stop

STUBBORN = {
    "obedient, a child without output": fs.Script(
        children=[fs.ChildProcess("daemon", keep_output=False)]
    ),
    "children, floods its log, ignores SIGTERM": fs.Script(
        children=TREE, floods=[fs.Flood()], ignore_term=True
    ),
    "children, is SIGSTOPped": fs.Script(children=TREE),
}


@pytest.mark.parametrize("name", STUBBORN)
def test_stop_leaves_nothing(make_worker: MakeWorker, name: str) -> None:
    # of a server that obeys the grace is not waited for
    timeouts = fast_timeouts(stop_grace_s=5 * WAIT_S if "obedient" in name else 1.0)
    rig = make_worker(STUBBORN[name], slots=2, timeouts=timeouts, start=False)
    leftovers = Leftovers()
    for _ in range(2):
        rig.start()
        streams = [
            rig.submit(*steps)
            for steps in ([fs.Headers(), fs.Tokens(1), fs.WaitClose()], [fs.Sleep(60)])
        ]
        rig.wait_text(streams[0], "tok")
        seen = rig.tree()
        if "SIGSTOPped" in name:
            os.kill(rig.status()["pid"], signal.SIGSTOP)
        rig.stop()
        # a server waits for open ones
        connected = [told["connected"] for told in rig.journal.facts("signal")]
        assert "obedient" not in name or connected == [0] * len(connected), "they are closed first"
        assert not living(seen)
        assert rig.status()["state"] is WorkerState.STOPPED
        assert "pid" not in rig.status()
        assert [rig.ended(stream)["fail_reason"] for stream in streams] == ["worker_stopped"] * 2
        assert leftovers.wait_none() == []


def test_server_stuck_in_first_sigterm_gets_a_second(make_worker: MakeWorker) -> None:
    rig = make_worker(fs.Script(term_delay_s=60), timeouts=fast_timeouts(stop_grace_s=30.0))
    rig.stop()
    assert len(rig.journal.facts("signal", signal="SIGTERM")) == 2
    assert rig.journal.facts("exit", code=1), "by its own decision: it was not killed"


def test_guard_that_starts_no_server_is_killed(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one whose Python hangs on a network file system."""
    hangs = shell_program(tmp_path / "python", "exec sleep 120")
    monkeypatch.setattr(server_process, "interpreter", lambda: hangs)
    monkeypatch.setattr(termination, "FORCE_S", 0.1)
    rig = make_worker(start=False, timeouts=fast_timeouts(stop_grace_s=0.1))
    starting = rig.worker.start()
    rig.stop()
    assert _failure(starting).reason is StartFailReason.STOPPED
    assert rig.status()["state"] is WorkerState.STOPPED


def test_guard_that_ends_without_server_is_quoted(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = shell_program(tmp_path / "python", "echo No module named os >&2; exit 1")
    monkeypatch.setattr(server_process, "interpreter", lambda: broken)
    failure = _failure(make_worker(start=False).worker.start())
    assert failure.reason is StartFailReason.SPAWN_FAILED
    assert "the guard process exited early: No module named os" in str(failure)


def test_guard_stopped_after_the_kill_is_resumed(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its last two reports: that of the death, which would be overdue, has come."""
    source = Path(guard.__file__).read_text()
    died = "            server = []\n"
    assert source.count(died) == 1
    stops = source.replace(died, f"{died}            os.kill(os.getpid(), signal.SIGSTOP)\n")
    monkeypatch.setattr(server_process, "guard_program", lambda: ("-c", stops))
    monkeypatch.setattr(termination, "FORCE_S", 0.1)
    rig = make_worker(timeouts=fast_timeouts(stop_grace_s=0.0))
    rig.stop()
    assert rig.status()["state"] is WorkerState.STOPPED
    rig.wait_gone()


@pytest.mark.parametrize("order", [Signal.KILL, Signal.FORCE])
def test_ended_server_is_gone_whoever_has_its_descriptor(
    free_port: Callable[[], int], order: Signal
) -> None:
    reports: queue.SimpleQueue[LaunchReport] = queue.SimpleQueue()
    config = WorkerConfig(name="w", host=HOST, port=free_port(), server_cmd=("sleep", "600"))
    server = RealRuntime(config).start_server(1, Mock(tell=reports.put))
    assert isinstance(reports.get(timeout=WAIT_S), Launched)
    assert not server.is_gone()
    server.send(order)
    assert isinstance(reports.get(timeout=WAIT_S), Died)
    assert isinstance(reports.get(timeout=WAIT_S), Exited)
    with contextlib.ExitStack() as cleanup:
        for _ in range(64):  # one of them has the number of the server's
            cleanup.callback(os.close, pidfd_open(os.getpid()))
        assert server.is_gone()


def test_failed_launch_is_reported_once_its_guard_ended(
    free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = shell_program(tmp_path / "python", "exec sleep 0.5")
    monkeypatch.setattr(server_process, "interpreter", lambda: slow)
    lack = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(server_process, "pidfd_open", Mock(side_effect=lack))
    reports: queue.SimpleQueue[tuple[LaunchReport, set[psutil.Process]]] = queue.SimpleQueue()
    children = psutil.Process().children
    before = set(children())
    config = WorkerConfig(name="w", host=HOST, port=free_port(), server_cmd=("sleep", "600"))
    RealRuntime(config).start_server(
        1, Mock(tell=lambda report: reports.put((report, {*children()} - before)))
    )
    report, left = reports.get(timeout=WAIT_S)
    assert isinstance(report, LaunchFailed)
    assert left == set()


def test_host_that_changed_its_user_stops_in_order(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a daemon that drops root's privileges: the guard is another user's."""
    rig = make_worker(fs.Script(term_delay_s=0.1))
    monkeypatch.setattr(subprocess.Popen, "send_signal", Mock(side_effect=PermissionError))
    rig.stop()
    assert rig.journal.facts("exit", code=0), "by its own decision: it was not killed"
    events = rig.debug()["recent_events"]
    assert [event for event in events if event["event"] == "actor_died"] == []


def test_a_tree_that_outlives_its_root_is_ended(make_worker: MakeWorker) -> None:
    rig = make_worker(
        fs.Script(children=TREE, exits=[fs.Exit(code=7, when="request")]),
        restart=RestartPolicy.never(),
    )
    assert rig.run()["fail_reason"] == "server_died"
    rig.wait_state(WorkerState.FAILED)
    rig.wait_gone(5.0)


@pytest.mark.parametrize("children_count", [0, 3], ids=["at once", "while it loads"])
def test_a_start_that_is_stopped_leaves_nothing(
    make_worker: MakeWorker, children_count: int
) -> None:
    rig = make_worker(
        fs.Script(startup=fs.Startup(load_s=None), children=TREE, ignore_term=True), start=False
    )
    starting = rig.worker.start()
    if children_count:
        rig.journal.wait("child", timeout=WAIT_S, count=children_count)
        assert rig.debug()["recent_events"], "questions are answered meanwhile"
    rig.stop()
    rig.wait_gone(0.0)
    assert _failure(starting).reason is StartFailReason.STOPPED
