"""A host with one worker, which then ends in the way that its argument names. Run by
`test_host_death.py`.

host_program.py WAY PORT COMMAND...: prints "ready" once a stream runs, then waits for a line.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from llama_worker import LlamaWorker, TimeoutProfile, WorkerClosed, WorkerConfig, backend


def main(way: str, port: str, *command: str) -> None:
    """Start a worker and a stream on it; end as told."""
    # a shell's background jobs inherit it as ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    backend._EXIT_GRACE_S = 60.0  # a slow machine's server notes the SIGTERM, too
    timeouts = TimeoutProfile(stop_grace_s=60.0)
    config = WorkerConfig("host", "127.0.0.1", int(port), command, slots=2, timeouts=timeouts)
    worker = LlamaWorker(config)
    starting = worker.start()
    if way == "exit while starting":
        announce()
        return
    starting.get(timeout=30)
    submitted = worker.submit("job", "", "stream").get()
    assert submitted["ok"]
    next(worker.iter_output(submitted["request_id"]))
    if way == "a child runs atexit":
        be_unharmed_by_a_child(worker)
        announce()
        worker.close()
        return
    if way != "killed without children":
        fork_children()
    waiting = worker.result(submitted["request_id"])
    threading.Thread(target=lambda: waiting.get(timeout=120), daemon=True).start()
    announce()
    ENDS[way]()


def announce() -> None:
    """Tell the test that the host may now end, and wait for its word."""
    print("ready", flush=True)
    sys.stdin.readline()


def fork_children() -> None:
    """They outlive the host, and hold copies of all its descriptors but those that the test waits
    on."""
    for _ in range(2):
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            signal.alarm(100)
            time.sleep(120)  # the alarm ends it sooner
            os._exit(0)


def be_unharmed_by_a_child(worker: LlamaWorker) -> None:
    """By its regular exit, its close() and its lost handle."""
    pid = os.fork()
    if pid == 0:
        try:
            worker.get_worker_status()
        except WorkerClosed as closed:
            worker.close()
            sys.exit("forked" not in closed.__notes__[0])
        os._exit(3)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    assert worker.get_worker_status().get()["state"] == "ready"
    result = worker.ask("hello").get(timeout=30)
    assert result["state"] == "completed", result


ENDS: dict[str, Callable[[], object]] = {
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(4),
    "exec": lambda: os.execvp("sleep", ("sleep", "60")),
    "killed": lambda: time.sleep(120),  # the test sends the signal
    "killed without children": lambda: time.sleep(120),  # likewise
}


if __name__ == "__main__":
    main(*sys.argv[1:])
