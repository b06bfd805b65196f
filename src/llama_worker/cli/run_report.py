"""What `llama-worker run` shows of a snapshot, and of the end. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from llama_worker import (
    ChatMessage,
    ExitSignal,
    RequestFinishReason,
    RequestPhase,
    RequestResult,
    RequestState,
    RequestStatus,
    WorkerStartError,
)
from llama_worker.cli import advice, exits
from llama_worker.cli.exits import Problem
from llama_worker.cli.text import harmless, one_line, seconds

# `0.00.003.896 I srv    load_model: ` (b11434)
_LOG_PREFIX = re.compile(r"[\d.]+ [A-Z] \S+ +(\S+: )?")
_LOG_LINES = 12  # of a server that did not start: a model that cannot be loaded takes ten to say so
_LABEL_CHARS = 200  # a terminal shows what it has room for


class Activity(Struct, frozen=True):
    """What is being waited for; `done` of `total` tokens where that is known."""

    label: str
    done: int = 0
    total: int | None = None

    def line(self, elapsed_s: float) -> str:
        """For where no bar can be drawn."""
        counted = f": {self.done} of {self.total} tokens" if self.total is not None else ""
        return f"{self.label}{counted} ({seconds(elapsed_s)})"


def starting(log_tail: Sequence[str]) -> Activity:
    """A server that is not ready yet: the last thing that it said."""
    said = _LOG_PREFIX.sub("", log_tail[-1]) if log_tail else ""
    return Activity(one_line(f"starting: {said}" if said else "starting", _LABEL_CHARS))


def working(status: RequestStatus) -> Activity:
    """A request whose output is not shown, or that has put out nothing yet."""
    match status["phase"]:
        case RequestPhase.WAITING:
            return Activity("waiting for the server")
        case RequestPhase.PREFILL:
            progress = status.get("prompt_progress")
            if progress is None or progress["total"] == 0:
                return Activity("reading the prompt")
            return Activity("reading the prompt", progress["processed"], progress["total"])
        case _:
            return Activity(f"generating: {status.get('tokens_received', 0)} tokens")


def summary(result: RequestResult, tokens: int | None = None) -> list[str]:
    """`12 tokens, 45.2 tokens/s; prompt: 31 tokens, 8 of them cached`, and `first token after 0.4
    s, 0.7 s in all`. `tokens`: how many came, where the server did not come to say it."""
    timings, usage = result.get("timings"), result.get("usage")
    speed = timings.get("tokens_per_second") if timings is not None else None
    fast = [f"{speed:.1f} tokens/s"] if speed is not None else []
    counted = [f"{tokens} tokens"] if tokens else []
    lines = [", ".join((*counted, *fast))] if counted or fast else []
    if usage is not None:
        cached = f", {usage['cached_tokens']} of them cached" if usage["cached_tokens"] else ""
        answer = ", ".join((f"{usage['completion_tokens']} tokens", *fast))
        lines = [f"{answer}; prompt: {usage['prompt_tokens']} tokens{cached}"]
    if timings is not None:
        first = f"first token after {seconds(timings['ttft_s'])}, " if "ttft_s" in timings else ""
        lines.append(f"{first}{seconds(timings['total_s'])} in all")
    return lines


def ending(result: RequestResult, log_tail: Sequence[str], tokens: int | None = None) -> list[str]:
    """The lines after an answer: signals, how it ended where it did not end well, and the
    numbers."""
    lines = [signal_line(signal) for signal in result["signals"]]
    if result["state"] is RequestState.CANCELED:
        lines.append(
            "cancelled; what had come is above" if result["text"] else "cancelled; nothing had come"
        )
    elif result["state"] is RequestState.FAILED:
        lines.append(harmless(f"failed: {result['fail_reason']}: {result.get('fail_detail', '')}"))
        if result["fail_reason"] == "server_died":
            lines += [f"  {harmless(line)}" for line in log_tail]
    if result["finish_reason"] is RequestFinishReason.MAX_TOKENS:
        lines.append("cut off: more --max-tokens, or, where the context is full, more --ctx-size")
    if todo := advice.for_failure(result, log_tail):
        lines.append(f"  what to do: {todo}")
    return [*lines, *summary(result, tokens)]


def signal_line(signal: ExitSignal) -> str:
    """`signal request_decision: {"question": ...}`."""
    said = signal.get("malformed") or json.dumps(signal["arguments"], ensure_ascii=False)
    broken = " (malformed)" if "malformed" in signal else ""
    return harmless(f"signal {signal['tool_name']}{broken}: {said}")


def exit_code(result: RequestResult) -> int:
    """Of a command that ran this one request."""
    match result["state"]:
        case RequestState.COMPLETED:
            return exits.DONE
        case RequestState.CANCELED:
            return exits.CANCELED
        case _:
            return exits.FAILED


def json_report(result: RequestResult, warnings: Sequence[str]) -> dict[str, Any]:
    """The object of --json. `reason`: the fail reason, or else the finish reason."""
    return {
        "outcome": str(result["state"]),
        "reason": str(result["fail_reason"] or result["finish_reason"]),
        "detail": result.get("fail_detail"),
        "text": result["text"],
        "reasoning": result["reasoning"],
        "usage": result.get("usage"),
        "timings": result.get("timings"),
        "signals": result["signals"],
        "warnings": list(warnings),
    }


def json_without_answer(outcome: str, reason: str, detail: str) -> dict[str, Any]:
    """The same, for a request that never was; `outcome`: `not_started` or `canceled`."""
    empty: dict[str, Any] = {
        "text": "",
        "reasoning": "",
        "usage": None,
        "timings": None,
        "signals": [],
        "warnings": [],
    }
    return {"outcome": outcome, "reason": reason, "detail": detail, **empty}


def start_problem(error: WorkerStartError) -> Problem:
    """A `start()` that failed, with what to do."""
    shown = [f"  {harmless(line)}" for line in error.log_tail[-_LOG_LINES:]]
    more = ["the server's last lines:", *shown] if shown else []
    return Problem(
        str(error.reason),
        harmless(f"the server did not start: {error.summary}"),
        advice.for_start(error),
        more,
    )


def history_with(
    history: Sequence[ChatMessage], prompt: str, result: RequestResult
) -> list[ChatMessage]:
    """The conversation after a turn. One without an answer leaves no trace: templates want turns to
    alternate."""
    if not result["text"]:
        return list(history)
    turn: list[ChatMessage] = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": result["text"]},
    ]
    return [*history, *turn]
