"""What a person at the command line can do about a server that did not start, or a request that
failed. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from llama_worker import RequestFailReason, RequestResult, StartFailReason, WorkerStartError
from llama_worker.server.start_advice import LESS_MEMORY, NOT_EXECUTED, OUT_OF_MEMORY, described

_READ_ON = "its last lines say why; run it by hand to see all of them"
_SLOWER = "for slow hardware: --timeouts slow_prefill"
_BY_FAILURE = {
    RequestFailReason.SERVER_DIED: (
        "its last lines say why; `llama-worker doctor MODEL` looks for common causes"
    ),
    RequestFailReason.HEADERS_TIMEOUT: f"the server showed no sign of work; {_SLOWER}",
    RequestFailReason.TTFT_TIMEOUT: _SLOWER,
    RequestFailReason.STALL_TIMEOUT: f"the server showed no sign of work; {_SLOWER}",
    RequestFailReason.REPEATED_LINE_LOOP: (
        "the model repeats itself: another --temperature, --seed or prompt"
    ),
    RequestFailReason.REPEATED_TEXT_LOOP: (
        "the model repeats itself: another --temperature, --seed or prompt"
    ),
    RequestFailReason.REQUEST_LOST: (
        "the server forgot the request: try again, or another build of llama-server"
    ),
    RequestFailReason.SERVER_ERROR: "the server refused to go on; the detail says why",
    RequestFailReason.TOOL_PARSE_ERROR: (
        "the model wrote a malformed tool call: try again, or leave out --exit-tools"
    ),
}
_CONTEXT = re.compile("exceed.*context|context size|n_ctx", re.IGNORECASE)
_BY_SIGILL = re.compile(rf"\b{described(-signal.SIGILL)}\b")
_REFUSED = {
    "NO_SLOT_AVAILABLE": (
        "all slots hold a request: wait for one to end, or start with more --slots"
    ),
    "WORKER_NOT_READY": "the server is starting: try again in a moment",
    "WORKER_DRAINING": "the server is about to stop: start again",
    "WORKER_FAILED": "the server could not be kept running: start again",
}


def for_start(error: WorkerStartError) -> str:
    """One line for a `start()` that failed."""
    if error.advice:
        return error.advice
    match error.reason:
        case StartFailReason.PORT_IN_USE:
            return (
                "leave --port out, and a free one is found; or end the program that listens "
                "there (ss -ltnp)"
            )
        case StartFailReason.UNKILLABLE:
            return (
                "a process that SIGKILL does not end still holds the place: end what it waits "
                "for, or the machine"
            )
        case StartFailReason.SPAWN_FAILED:
            return (
                "give --server (or --server-cmd) the path of a llama-server that can be executed "
                "here"
            )
        case StartFailReason.STARTUP_TIMEOUT:
            return f"it hangs, or the disk is slower than the limit allows; {_SLOWER}"
        case StartFailReason.CANARY_FAILED:
            return "try the model by hand: it does not answer as the canary's check wants"
        case StartFailReason.STOPPED:
            return "start again"
        case StartFailReason.EXITED:
            return _READ_ON


def for_failure(result: RequestResult, log_tail: Sequence[str]) -> str | None:
    """One line for a request that failed; None for one that did not."""
    reason = result["fail_reason"]
    if reason is None or reason is RequestFailReason.CANCELED:
        return None
    if reason is RequestFailReason.CONTEXT_EXCEEDED or _CONTEXT.search(
        result.get("fail_detail", "")
    ):
        return (
            "the context is too small for prompt and answer: more --ctx-size, or a shorter prompt"
        )
    if reason is RequestFailReason.SERVER_DIED and _BY_SIGILL.search(result.get("fail_detail", "")):
        return NOT_EXECUTED
    if reason is RequestFailReason.SERVER_DIED and OUT_OF_MEMORY.search("\n".join(log_tail)):
        return f"it does not fit into the memory: {LESS_MEMORY}"
    return _BY_FAILURE.get(
        reason, "try again; if it stays, `llama-worker doctor MODEL` looks for common causes"
    )


def for_refusal(code: str) -> str:
    """One line for a `submit` that was refused."""
    return _REFUSED[code]
