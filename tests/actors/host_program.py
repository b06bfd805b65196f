"""A host with one worker, which then ends in the way that its argument names. Run by `test_host_death.py`.

python host_program.py WAY PORT JOURNAL SCRIPT_JSON: prints "ready" once a stream runs, then waits for a line.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from llama_worker import LlamaWorker, TimeoutProfile, WorkerConfig

SERVER = Path(__file__).parents[1] / "fake_llama_server.py"


def main(way: str, port: str, journal: str, script: str) -> None:
    """Start a worker and a stream on it; end as told."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it as ignored
    command = [sys.executable, "-S", "-E", str(SERVER), "--host", "127.0.0.1", "--port", port, "--parallel", "2"]
    worker = LlamaWorker(
        WorkerConfig(
            name="host",
            host="127.0.0.1",
            port=int(port),
            slots=2,
            server_cmd=(*command, "--script", script, "--journal", journal),
            timeouts=TimeoutProfile(stop_grace_s=60.0),
        )
    )
    if way == "exit while starting":
        worker.start()
        print("ready", flush=True)
        sys.stdin.readline()
        return
    worker.start().get(timeout=30)
    submitted = worker.submit("job", "", "stream").get()
    assert submitted["ok"]
    while True:
        output = worker.read_output(submitted["request_id"]).get()
        assert output["ok"]
        if output["text"]:
            break
        time.sleep(0.01)
    WAYS[way](worker)


def announce() -> None:
    """Tell the test that the host may now end, and wait for its word."""
    print("ready", flush=True)
    sys.stdin.readline()


def _end_by(end: Callable[[], object]) -> Callable[[LlamaWorker], None]:
    def run(worker: LlamaWorker) -> None:
        announce()
        end()

    return run


def _return_while_a_thread_waits(worker: LlamaWorker) -> None:
    waiting = worker.result(1)
    threading.Thread(target=lambda: waiting.get(timeout=120), daemon=True).start()
    announce()


def _with_forked_children(end: Callable[[LlamaWorker], None]) -> Callable[[LlamaWorker], None]:
    def run(worker: LlamaWorker) -> None:
        for _ in range(2):
            if os.fork() == 0:
                # Outlives the host, and holds copies of all its descriptors but those that the test waits on.
                null = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):
                    os.dup2(null, fd)
                signal.alarm(30)
                time.sleep(60)
                os._exit(0)
        end(worker)

    return run


def _child_that_runs_atexit(worker: LlamaWorker) -> None:
    """The worker must be unharmed by a forked child's regular exit, its close() and its lost handle."""
    pid = os.fork()
    if pid == 0:
        try:
            worker.close()
        finally:
            sys.exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    assert worker.get_worker_status().get()["state"] == "ready"
    submitted = worker.submit("job", "", "hello").get()
    assert submitted["ok"]
    result = worker.result(submitted["request_id"]).get(timeout=30)
    assert result["ok"]
    assert result["state"] == "completed", result
    announce()
    worker.close()


_killed = _end_by(lambda: time.sleep(120))  # the test sends the signal
WAYS: dict[str, Callable[[LlamaWorker], None]] = {
    "plain return, forked children live on": _with_forked_children(_end_by(lambda: None)),
    "sys.exit": _end_by(lambda: sys.exit(3)),
    "os._exit, forked children live on": _with_forked_children(_end_by(lambda: os._exit(4))),
    "killed": _killed,
    "killed, forked children live on": _with_forked_children(_killed),
    "a thread waits for a result": _return_while_a_thread_waits,
    "a child runs atexit": _child_that_runs_atexit,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
