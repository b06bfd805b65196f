"""Whether a llama-server answers on this machine: one token, with the small model."""

from __future__ import annotations

from dataclasses import replace

from llama_worker import (
    LlamaWorker,
    RestartPolicy,
    TimeoutProfile,
    WorkerConfig,
    WorkerStartError,
    free_port,
)
from llama_worker import llama_server_cmd as server_cmd
from llama_worker.cli import run_report
from llama_worker.cli.exits import Problem

HOST = "127.0.0.1"
IDLE_S = 20.0  # without a sign of work it hangs, however slow the machine is
TIMEOUTS = replace(TimeoutProfile.fast(), startup_timeout_s=IDLE_S)


def check(server: str, model: str) -> float:
    """Seconds that the answer took. Raises Problem: what is wrong with the server, and the
    remedy."""
    port = free_port()
    command = server_cmd(
        model, host=HOST, port=port, slots=1, executable=server, extra_args=("--ctx-size", "512")
    )
    config = WorkerConfig(
        "check", HOST, port, command, timeouts=TIMEOUTS, restart=RestartPolicy.never()
    )
    try:
        with LlamaWorker(config) as worker:
            admitted = worker.submit("check", "", "Say ok.", params={"max_tokens": 1}).get()
            result = worker.result(admitted["request_id"]).get() if admitted["ok"] else None
            log_tail = worker.get_debug_info().get()["recent_logs"]
    except WorkerStartError as error:
        problem = run_report.start_problem(error)
        raise Problem(
            problem.reason, f"{server}: {problem.what}", problem.todo, problem.more
        ) from None
    if result is None or not result["ok"]:
        raise Problem(
            "server_died",
            f"{server} ended as soon as it was ready",
            "take another build of llama-server",
        )
    if todo := run_report.after_failure(result, log_tail):
        told = f"{result['fail_reason']}: {result.get('fail_detail')}"
        raise Problem(
            "no_answer", f"{server} starts, and does not answer: {told}", todo, log_tail[-12:]
        )
    return result["timings"]["total_s"]
