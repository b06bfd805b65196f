"""What a person can do about a server that did not start, or a request that failed. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from llama_worker import RequestFailReason, RequestResult, StartFailReason, WorkerStartError

_LESS_MEMORY = (
    "it does not fit into the memory: a smaller context (--ctx-size 4096), a smaller quantisation of the model,"
    " or other --gpu-layers; `llama-worker doctor MODEL` compares the sizes"
)
_MEMORY = re.compile(
    r"insufficient memory|failed to allocate|unable to allocate|out of memory|alloc.* failed|bad_alloc"
    r"|cannot allocate memory|ErrorOutOf\w*Memory|unable to fit",
    re.IGNORECASE,
)
# What the server's log says (b11434 and older builds), most telling first.
_BY_LOG: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"invalid argument|unknown argument|error while handling argument", re.IGNORECASE),
        "the server does not take an option as it was given: compare --server-arg with `llama-server --help`",
    ),
    (_MEMORY, _LESS_MEMORY),
    (
        re.compile("corrupted or incomplete|not within the file bounds|failed to read magic|unexpected end", re.I),
        "the model file is incomplete: download it again and compare its size with that of the source",
    ),
    (
        re.compile("unknown model architecture|unknown pre-tokenizer|unknown .*architecture", re.IGNORECASE),
        "this llama-server is too old for the model: take a newer build (--server)",
    ),
    (re.compile("invalid magic"), "the file is no GGUF model: download it again, in the GGUF format"),
    (
        re.compile("error while loading shared libraries|cannot open shared object|GLIBC(XX)?_", re.IGNORECASE),
        "the program lacks libraries: take a llama-server that was built for this system, or set LD_LIBRARY_PATH",
    ),
    (
        re.compile("CUDA driver version is insufficient|no CUDA-capable device|ROCm error|CUDA error", re.IGNORECASE),
        "the GPU or its driver fails: look at nvidia-smi, or run without it (--gpu-layers 0)",
    ),
    (re.compile("permission denied", re.IGNORECASE), "the server may not read a file: look at its permissions"),
    (re.compile("couldn't bind|address already in use", re.IGNORECASE), "leave --port out: a free one is found"),
)
_BY_SIGNAL = {
    signal.SIGKILL: "somebody killed it, mostly the kernel when memory ran out (see dmesg): " + _LESS_MEMORY,
    signal.SIGILL: "the program was built for another CPU: build llama.cpp on this machine, or take another build",
    signal.SIGABRT: "the server gave up by itself: its last lines say why; a newer build (--server) may help",
    signal.SIGSEGV: "the server crashed: a newer build (--server), or --gpu-layers 0, may help",
}
_READ_ON = "its last lines say why; run it by hand to see all of them"
_SLOWER = "for slow hardware: --timeouts slow_prefill"
_BY_FAILURE = {
    RequestFailReason.SERVER_DIED: "its last lines say why; `llama-worker doctor MODEL` looks for common causes",
    RequestFailReason.HEADERS_TIMEOUT: f"the server showed no sign of work; {_SLOWER}",
    RequestFailReason.TTFT_TIMEOUT: _SLOWER,
    RequestFailReason.STALL_TIMEOUT: f"the server showed no sign of work; {_SLOWER}",
    RequestFailReason.REPEATED_LINE_LOOP: "the model repeats itself: another --temperature, --seed or prompt",
    RequestFailReason.SERVER_ERROR: "the server refused to go on; the detail says why",
    RequestFailReason.TOOL_PARSE_ERROR: "the model wrote a call that is none: try again, or leave out --exit-tools",
}
_CONTEXT = re.compile("exceed.*context|context size|n_ctx", re.IGNORECASE)
_REFUSED = {
    "NO_SLOT_AVAILABLE": "all slots hold a request: wait for one to end, or start with more --slots",
    "WORKER_NOT_READY": "the server is starting: try again in a moment",
    "WORKER_FAILED": "the server could not be kept running: start again",
}


def for_start(error: WorkerStartError) -> str:
    """One line for a `start()` that failed."""
    match error.reason:
        case StartFailReason.PORT_IN_USE:
            return "leave --port out, and a free one is found; or end the program that listens there (ss -ltnp)"
        case StartFailReason.SPAWN_FAILED:
            return "give --server the path of a llama-server that can be executed here"
        case StartFailReason.STARTUP_TIMEOUT:
            return f"it hangs, or the disk is slower than the limit allows; {_SLOWER}"
        case StartFailReason.STOPPED:
            return "start again"
        case StartFailReason.EXITED:
            return for_exit(error.returncode, error.log_tail)


def for_exit(returncode: int | None, log_tail: Sequence[str]) -> str:
    """One line for a server that ended; `returncode` is negative for a signal, None where it is not known."""
    log = "\n".join(log_tail)
    for pattern, todo in _BY_LOG:
        if pattern.search(log):
            return todo
    if returncode is not None and returncode < 0:
        return _BY_SIGNAL.get(signal.Signals(-returncode), _READ_ON)
    return _READ_ON


def for_failure(result: RequestResult, log_tail: Sequence[str]) -> str | None:
    """One line for a request that failed; None for one that did not."""
    reason = result.get("fail_reason")
    if reason is None or reason is RequestFailReason.CANCELED:
        return None
    if _CONTEXT.search(result.get("fail_detail", "")):
        return "the context is too small for prompt and answer: more --ctx-size, or a shorter prompt"
    if reason is RequestFailReason.SERVER_DIED and _MEMORY.search("\n".join(log_tail)):
        return _LESS_MEMORY
    return _BY_FAILURE.get(reason, "try again; if it stays, `llama-worker doctor MODEL` looks for common causes")


def for_refusal(code: str) -> str:
    """One line for a `submit` that was refused."""
    return _REFUSED[code]
