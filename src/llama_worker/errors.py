"""The library's exceptions, and texts for errors. Pure. Bad types raise plain `TypeError`s."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from traceback import format_exception_only

from llama_worker.start_advice import advice_for, described
from llama_worker.types.request import RequestResult, SubmitErrorCode
from llama_worker.types.worker import StartFailReason

_SHOWN_LOG_LINES = 20
MASK = "***"
# Temporary shortages of this machine: descriptors, threads, ports, memory.
_SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EADDRNOTAVAIL, errno.ENOMEM, errno.ENOBUFS}
)
_REFUSALS: dict[SubmitErrorCode, str] = {
    "NO_SLOT_AVAILABLE": "all slots are in use; wait for a request to end, or configure more slots",
    "WORKER_NOT_READY": "the server is stopped or starting; wait for start(), or try again later",
    "WORKER_DRAINING": "drain() was called, so no new requests are admitted; use another worker",
    "WORKER_FAILED": (
        "the server failed; last_error in get_worker_status() says why, and start() tries again"
    ),
}


def described_error(error: BaseException | None) -> str:
    """An exception's type and text in one line, even if its `str()` fails. Never raises."""
    try:
        return "".join(format_exception_only(error)).strip()
    except Exception:  # a SyntaxError whose arguments are of odd types
        return type(error).__name__


def is_shortage(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, is a shortage of this machine, which says
    nothing about the server. Pure."""
    while error is not None:
        if isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error.errno in _SHORTAGES
        ):
            return True
        if isinstance(error, RuntimeError) and "new thread" in str(error):
            return True
        hidden = error.__suppress_context__  # raised "from None" or from a cause
        error = error.__cause__ if hidden else error.__context__
    return False


def masked(text: str, api_key: str | None) -> str:
    """The text, such as a line of the server's log, with the key masked. Pure."""
    return text.replace(api_key, MASK) if api_key else text


class LlamaWorkerError(Exception):
    """The base class of all errors of this library."""


class ConfigError(LlamaWorkerError, ValueError):
    """A value that the library cannot work with, in a configuration or in a submitted request."""


class WorkerStartError(LlamaWorkerError):
    """`start()` or `restart()` failed. `log_tail` holds the last lines that the server wrote,
    newest last."""

    def __init__(
        self,
        reason: StartFailReason | str,
        detail: str,
        returncode: int | None = None,
        log_tail: Sequence[str] = (),
    ) -> None:
        self.reason = StartFailReason(reason)
        self.detail = detail
        self.returncode = returncode
        self.log_tail = tuple(log_tail)
        # the arguments as given, so that it can be pickled
        super().__init__(self.reason, detail, returncode, self.log_tail)

    @property
    def advice(self) -> str | None:
        """The cause and what to do, in one line; None if the server's log does not tell."""
        return advice_for(self.reason, self.detail, self.returncode, self.log_tail)

    @property
    def summary(self) -> str:
        """The text without advice and without the server's last lines."""
        ended = f" ({described(self.returncode)})" if self.returncode is not None else ""
        return f"{self.reason}: {self.detail}{ended}"

    def __str__(self) -> str:
        head = f"{self.summary}; {self.advice}" if self.advice else self.summary
        shown = self.log_tail[-_SHOWN_LOG_LINES:]
        return (
            "\n  ".join((f"{head}; the last lines of the server's log:", *shown)) if shown else head
        )


class WorkerStopError(LlamaWorkerError):
    """`stop()` or `drain()` could not end the server: SIGKILL had no effect. `detail` has its pid,
    its state and what it waits for in the kernel."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(reason, detail)

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class RequestRefused(LlamaWorkerError):
    """`ask` got no slot, `wait_slot` can get none, or `count_tokens` has no READY server. `error`
    is a code as in `SubmitErr`, such as NO_SLOT_AVAILABLE."""

    def __init__(self, error: SubmitErrorCode) -> None:
        self.error = error
        super().__init__(error)

    def __str__(self) -> str:
        return f"{self.error}: {_REFUSALS[self.error]}"


class RequestFailed(LlamaWorkerError):
    """The request of `ask` ended in another state than `completed`. `result` is what
    `LlamaWorker.result` would have returned, with all output received."""

    def __init__(self, result: RequestResult) -> None:
        self.result = result
        super().__init__(result)

    def __str__(self) -> str:
        result, kept = self.result, len(self.result["text"])
        detail = result.get("fail_detail", "")
        what = f"{result['fail_reason']}: {detail}" if detail else str(result["fail_reason"])
        which = f"request {result['request_id']}, {result['job_name']!r}"
        return f"{what} ({which}; .result has the {kept} characters of text received)"


class WorkerClosed(LlamaWorkerError):
    """The call came after `close()`, in a forked child, or after the worker's own actor failed."""

    def __init__(self, worker_name: str) -> None:
        self.worker_name = worker_name
        super().__init__(worker_name)

    def __str__(self) -> str:
        return f"worker {self.worker_name!r} is closed; create another LlamaWorker"
