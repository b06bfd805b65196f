"""What `llama-worker run` shows of a request and its end, and what to do about a failure. Pure."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from llama_worker.cli import exits
from llama_worker.cli.exits import Problem
from llama_worker.cli.text import one_line, printable, seconds
from llama_worker.errors import WorkerStartError
from llama_worker.start_advice import LESS_MEMORY, NOT_EXECUTED, OUT_OF_MEMORY, described
from llama_worker.types.request import (
    ExitSignal,
    RequestFailReason,
    RequestFinishReason,
    RequestPhase,
    RequestResult,
    RequestState,
    RequestStatus,
)
from llama_worker.types.worker import StartFailReason

# `0.00.003.896 I srv    load_model: ` (b11434)
_LOG_PREFIX = re.compile(r"[\d.]+ [A-Z] \S+ +(\S+: )?")
_LOG_LINES = 12  # shown if a server did not start: a failed model load prints ten lines
_LABEL_CHARS = 200  # a terminal cuts it to its width
_SLOW_HARDWARE = "on slow hardware, use --timeouts slow"
_LOOPS = "the model repeats itself: try another --temperature, --seed or prompt"
_HANGS = f"the server made no progress that could be seen; {_SLOW_HARDWARE}"
_BY_FAILURE = {
    RequestFailReason.SERVER_DIED: (
        "its last log lines say why; `llama-worker doctor MODEL` looks for common causes"
    ),
    RequestFailReason.HEADERS_TIMEOUT: _HANGS,
    RequestFailReason.TTFT_TIMEOUT: _SLOW_HARDWARE,
    RequestFailReason.STALL_TIMEOUT: _HANGS,
    RequestFailReason.REPEATED_LINE_LOOP: _LOOPS,
    RequestFailReason.REPEATED_TEXT_LOOP: _LOOPS,
    RequestFailReason.REQUEST_LOST: (
        "the server lost the request: try again, or use another build of llama-server"
    ),
    RequestFailReason.SERVER_ERROR: "the server refused to go on; the detail says why",
    RequestFailReason.TOOL_PARSE_ERROR: (
        "the model wrote a malformed tool call: try again, or leave out --exit-tools"
    ),
}
_SEE_LOG = "its last log lines say why; run it by hand to see all of them"
_BY_START_FAILURE = {
    StartFailReason.PORT_IN_USE: (
        "leave out --port to get a free one, or end the program that listens there (ss -ltnp)"
    ),
    StartFailReason.UNKILLABLE: (
        "a server process survived SIGKILL and still holds its resources: end what it waits for, "
        "or reboot the machine"
    ),
    StartFailReason.SPAWN_FAILED: (
        "give --server (or --server-cmd) the path of a llama-server that runs on this machine"
    ),
    StartFailReason.STARTUP_TIMEOUT: (
        f"it hangs, or the disk is too slow for the limit; {_SLOW_HARDWARE}"
    ),
}
_CONTEXT = re.compile("exceed.*context|context size|n_ctx", re.IGNORECASE)
_BY_SIGILL = re.compile(rf"\b{described(-signal.SIGILL)}\b")


class Activity(Struct, frozen=True):
    """What the command is waiting for; `done` of `total` tokens, if that is known."""

    label: str
    done: int = 0
    total: int | None = None

    def line(self, elapsed_s: float) -> str:
        """The activity as text, if no progress bar can be drawn."""
        counted = f": {self.done} of {self.total} tokens" if self.total is not None else ""
        return f"{self.label}{counted} ({seconds(elapsed_s)})"


def starting(log_tail: Sequence[str]) -> Activity:
    """The activity of a server that is not READY yet: the last line of its log."""
    said = _LOG_PREFIX.sub("", log_tail[-1]) if log_tail else ""
    return Activity(one_line(f"starting: {said}" if said else "starting", _LABEL_CHARS))


def working(status: RequestStatus) -> Activity:
    """The activity of a request that has no output yet, or whose output is not shown."""
    match status["phase"]:
        case RequestPhase.WAITING:
            return Activity("waiting for the server")
        case RequestPhase.PREFILL:
            progress = status.get("prompt_progress")
            if progress is None or progress["total"] == 0:
                return Activity("reading the prompt")
            return Activity("reading the prompt", progress["processed"], progress["total"])
        case _:
            return Activity(f"generating: {_tokens(status.get('tokens_received', 0))}")


def summary(result: RequestResult, tokens: int | None = None) -> list[str]:
    """`12 tokens, 45.2 tokens/s; prompt: 31 tokens, 8 of them cached`, and `first token after 0.4
    s, 0.7 s in total`. `tokens`: how many came, if the server did not report its usage."""
    timings, usage = result.get("timings"), result.get("usage")
    speed = timings.get("tokens_per_second") if timings is not None else None
    count = usage["completion_tokens"] if usage is not None else tokens or None
    answer = [_tokens(count)] if count is not None else []
    if speed is not None:
        answer.append(f"{speed:.1f} tokens/s")
    lines = [", ".join(answer)] if answer else []
    if usage is not None:
        cached = f", {usage['cached_tokens']} of them cached" if usage["cached_tokens"] else ""
        lines[0] += f"; prompt: {_tokens(usage['prompt_tokens'])}{cached}"
    if timings is not None:
        first = f"first token after {seconds(timings['ttft_s'])}, " if "ttft_s" in timings else ""
        lines.append(f"{first}{seconds(timings['total_s'])} in total")
    return lines


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"


def ending(result: RequestResult, log_tail: Sequence[str], tokens: int | None = None) -> list[str]:
    """The lines after an answer: signals, why it failed and what to do, the numbers."""
    lines = [signal_line(signal) for signal in result["signals"]]
    if result["state"] is RequestState.CANCELED:
        lines.append(
            "cancelled; the output so far is above"
            if result["text"]
            else "cancelled before any output"
        )
    elif result["state"] is RequestState.FAILED:
        lines.append(printable(f"failed: {result['fail_reason']}: {result.get('fail_detail', '')}"))
        if result["fail_reason"] == "server_died":
            lines += [f"  {printable(line)}" for line in log_tail]
    if result["finish_reason"] is RequestFinishReason.MAX_TOKENS:
        lines.append("cut off: raise --max-tokens, or --ctx-size if the context is full")
    if todo := after_failure(result, log_tail):
        lines.append(f"  what to do: {todo}")
    return [*lines, *summary(result, tokens)]


def signal_line(signal: ExitSignal) -> str:
    """`signal request_decision: {"question": ...}`."""
    said = signal.get("malformed") or json.dumps(signal["arguments"], ensure_ascii=False)
    broken = " (malformed)" if "malformed" in signal else ""
    return printable(f"signal {signal['tool_name']}{broken}: {said}")


def exit_code(result: RequestResult) -> int:
    match result["state"]:
        case RequestState.COMPLETED:
            return exits.DONE
        case RequestState.CANCELED:
            return exits.CANCELED
        case _:
            return exits.FAILED


def json_report(result: RequestResult, warnings: Sequence[str]) -> dict[str, Any]:
    """The object of --json. `reason`: the fail reason, or else the finish reason."""
    reason = str(result["fail_reason"] or result["finish_reason"])
    kept = ("text", "reasoning", "usage", "timings", "signals")
    return {
        **json_without_answer(str(result["state"]), reason, result.get("fail_detail")),
        **{name: result.get(name) for name in kept},
        "warnings": list(warnings),
    }


def json_without_answer(outcome: str, reason: str, detail: str | None) -> dict[str, Any]:
    """The same keys if there is no result; `outcome`: `not_started` or `canceled`."""
    facts = {"outcome": outcome, "reason": reason, "detail": detail, "text": "", "reasoning": ""}
    return {**facts, "usage": None, "timings": None, "signals": [], "warnings": []}


def after_failure(result: RequestResult, log_tail: Sequence[str]) -> str | None:
    """What to do about a failed request; None if it did not fail, or was cancelled."""
    reason, detail = result["fail_reason"], result.get("fail_detail", "")
    if reason is None or reason is RequestFailReason.CANCELED:
        return None
    if reason is RequestFailReason.CONTEXT_EXCEEDED or _CONTEXT.search(detail):
        return (
            "the context is too small for prompt and answer: raise --ctx-size or shorten the prompt"
        )
    if reason is RequestFailReason.SERVER_DIED and _BY_SIGILL.search(detail):
        return NOT_EXECUTED
    if reason is RequestFailReason.SERVER_DIED and OUT_OF_MEMORY.search("\n".join(log_tail)):
        return f"the model does not fit into memory: {LESS_MEMORY}"
    return _BY_FAILURE.get(
        reason, "try again; if it persists, `llama-worker doctor MODEL` looks for common causes"
    )


def start_problem(error: WorkerStartError) -> Problem:
    return Problem(
        str(error.reason),
        printable(f"the server did not start: {error.summary}"),
        error.advice or _BY_START_FAILURE.get(error.reason, _SEE_LOG),
        _log_lines(error.log_tail),
    )


def lockout_problem(detail: str, log_tail: Sequence[str]) -> Problem:
    """The server has failed too often; `detail`: the last time, and how often."""
    return Problem(
        "locked_out",
        printable(f"the server is not started again: {detail}"),
        _BY_FAILURE[RequestFailReason.SERVER_DIED],
        _log_lines(log_tail),
    )


def _log_lines(log_tail: Sequence[str]) -> list[str]:
    shown = [f"  {printable(line)}" for line in log_tail[-_LOG_LINES:]]
    return ["the last lines of the server's log:", *shown] if shown else []
