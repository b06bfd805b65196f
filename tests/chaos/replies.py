"""What a scripted server may be told to do with one request, at random, and a ledger of what comes
of it."""

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.testing import scripts as fs
from llama_worker.testing.scripts import Step
from llama_worker.types.request import RequestFailReason as Reason
from llama_worker.types.request import RequestState
from tests.scenarios.scenario import sent
from tests.simulation.dice import Dice

EXIT_TOOL = "report"
TOOLS = ("add", "boom", "slow", "odd")
# any request has ended: 3 s at most, 1 s for the news, 3 s for a machine whose cores are all busy
REQUEST_S = 7.0
# What any request may fail with while others kill, stop and stall the server.
_TIMEOUTS = {
    Reason.HEADERS_TIMEOUT,
    Reason.TTFT_TIMEOUT,
    Reason.STALL_TIMEOUT,
    Reason.ABSOLUTE_TIMEOUT,
}
_GONE = {Reason.WORKER_RESTARTED, Reason.WORKER_STOPPED, Reason.SERVER_DIED}
_WEATHER = _TIMEOUTS | _GONE | {Reason.CONNECT_FAILED, Reason.STREAM_DISCONNECTED}


@dataclass(frozen=True, slots=True)
class Reply:
    """`due`: what it comes to by itself; None where it does not end."""

    kind: str
    due: RequestState | Reason | None
    steps: list[Step]
    text: str
    reasoning: str


@dataclass(slots=True)
class Tracked:
    """What its caller knows of one admitted request."""

    reply: Reply
    request_id: int
    admitted_at: float
    text: str = ""
    reasoning: str = ""
    cancel_called: bool = False
    ending: tuple[Any, ...] = ()  # state, reason, detail
    ended_by: float = 0.0  # known to have ended at this instant
    # of `result()`, until they are taken
    held: list[WorkerFuture[Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"request {self.request_id} ({self.reply.kind})"

    def answered(self, answer: Any) -> dict[str, Any]:
        """What is said of it while nobody has taken its result."""
        assert answer["ok"], f"asked for {self}, which nobody took: {answer}"
        assert answer.get("request_id", self.request_id) == self.request_id, f"not {self}: {answer}"
        return dict(answer)

    def saw(self, text: str, reasoning: str) -> None:
        """Output only grows, and is what the server was told to send."""
        pairs = (
            (text, self.text, self.reply.text),
            (reasoning, self.reasoning, self.reply.reasoning),
        )
        for seen, before, due in pairs:
            assert len(seen) >= len(before), (
                f"{self} had shown {before[-300:]!r}, and now {seen[-300:]!r}"
            )
            assert due.startswith(seen), (
                f"{self}: {seen[-300:]!r} is no beginning of {due[: len(seen) + 40][-300:]!r}"
            )
        self.text, self.reasoning = text, reasoning

    def ended(self, seen: Any) -> None:
        """A terminal state was seen: it is always the same, and one that may come of this."""
        ending = state, reason, detail = (
            seen["state"],
            seen.get("fail_reason"),
            str(seen.get("fail_detail")),
        )
        if not self.ending:
            self.ending, self.ended_by = ending, time.monotonic()
        assert self.ending == ending, f"{self} ended as {self.ending} and as {ending}"
        poisoned = reason is Reason.UNKNOWN_ERROR and "poison" in detail
        allowed = {
            RequestState.COMPLETED: self.reply.due is RequestState.COMPLETED,
            RequestState.CANCELED: self.cancel_called,
            RequestState.FAILED: poisoned or reason in _WEATHER | {self.reply.due},
        }
        assert allowed[state], f"{self} ended as {ending}"

    def took(self, result: Any) -> None:
        """A result has all that was shown before, and, where it ended by itself, all that was
        sent."""
        self.saw(result["text"], result["reasoning"])
        self.ended(result)
        if (result.get("fail_reason") or result["state"]) in {self.reply.due} - _WEATHER - {
            Reason.REPEATED_LINE_LOOP
        }:
            due = self.reply.text, self.reply.reasoning
            assert (self.text, self.reasoning) == due, (
                f"{self} lost output: {result}, and {due} was sent"
            )
        if result["state"] is RequestState.COMPLETED:
            assert len(result["signals"]) == (self.reply.kind == "exit call"), (
                f"the signals of {self}: {result}"
            )


def random_reply(dice: Dice, key: str) -> Reply:
    """One of the kinds below. Each delta names `key`: no two requests can be mistaken for each
    other."""
    kind = dice.weighted({name: weight for name, (weight, *_) in _KINDS.items()})
    _, due, write = _KINDS[kind]
    steps = list(write(_Writer(dice, key)))
    return Reply(kind, due, steps, sent(steps), sent(steps, reasoning=True).rstrip())


@dataclass(frozen=True)
class _Writer:
    dice: Dice
    key: str

    def perhaps(self, *steps: Step) -> tuple[Step, ...]:
        return steps if self.dice.chance(0.5) else ()

    def head(self) -> list[Step]:
        dice = self.dice
        newlines = [fs.Newlines(dice.choice(["\n", "\r\n", "\r"]))] if dice.chance(0.2) else []
        progress = [fs.PromptProgress(0, 8), fs.PromptProgress(8, 8)] if dice.chance(0.2) else []
        return [
            *newlines,
            fs.Headers(framing=dice.choice(["chunked", "chunked", "close"])),
            fs.Role(),
            *progress,
        ]

    def begin(self, at_most: int = 10) -> list[Step]:
        """Headers and so many tokens."""
        return [*self.head(), self.tokens(self.dice.below(at_most + 1))]

    def tokens(self, count: int = 5, interval_s: float | None = None) -> Step:
        dice, first = self.dice, self.dice.below(1000)
        pause_s = dice.choice([0.0, 0.0, 0.003, 0.01]) if interval_s is None else interval_s
        return fs.Tokens(
            count, pause_s, f"{self.key}.{{i}} ", start=first, batch=dice.choice([1, 1, 4])
        )

    def said(self, count: int, text: str, *, batch: int = 1, reasoning: bool = False) -> Step:
        return fs.Tokens(
            count, text=f"{self.key} {text}", start=0, batch=batch, reasoning=reasoning
        )

    def conversation(self) -> Step:
        """Some turns with tool calls, and one that ends it."""
        turns = []
        for _ in range(1 + self.dice.below(3)):
            calls = [
                fs.ToolCall("add", {"n": n}, index=n, pieces=2)
                for n in range(1 + self.dice.below(3))
            ]
            turns.append([*self.begin(4), *calls, *_TO_TOOLS])
        return fs.Turns([*turns, [*self.begin(4), *_END]])


_COMPLETED, _CUT = RequestState.COMPLETED, Reason.STREAM_DISCONNECTED
_HALF = 'data: {"choices": [{"index": 0, "finish_reason": null, "delta": {"content": "nev'
_END = fs.Finish(), fs.Usage(), fs.DoneMarker()
_TO_TOOLS = fs.Finish("tool_calls"), fs.DoneMarker()
_DEATHS = fs.KillSelf(), fs.KillSelf(-signal.SIGABRT), fs.KillSelf(0), fs.KillSelf(3, ["oh no"])
_ERRORS = fs.ErrorData(400), fs.ErrorData(500), fs.ErrorField()
_REFUSALS = fs.HttpError(400), fs.HttpError(500), fs.HttpError(503), fs.Redirect("/health")
_FAILING = fs.ToolCall("boom"), fs.ToolCall("slow"), fs.ToolCall("odd")
_NONSENSE = fs.ToolCall("nobody"), fs.ToolCall("add", "[1")
_Write = Callable[[_Writer], Iterable[Step]]
_KINDS: dict[
    str, tuple[float, RequestState | Reason | None, _Write]
] = {  # each with its weight and what is due
    "plain": (20, _COMPLETED, lambda it: [*it.begin(30), *_END]),
    "reasoned": (
        10,
        _COMPLETED,
        lambda it: [*it.head(), it.said(8, "? {i}", reasoning=True), it.tokens(), *_END],
    ),
    "pinged": (
        6,
        _COMPLETED,
        lambda it: [*it.head(), fs.PingEvery(0.02), fs.Sleep(0.1), it.tokens(8, 0.01), *_END],
    ),
    "flood": (4, _COMPLETED, lambda it: [*it.head(), it.said(1000, "{i}\n", batch=50), *_END]),
    "cut by the token limit": (
        4,
        _COMPLETED,
        lambda it: [*it.begin(), fs.Finish("length"), *_END[1:]],
    ),
    "finished, then silent": (2, _COMPLETED, lambda it: [*it.begin(), fs.Finish(), fs.WaitClose()]),
    "burning": (2, _COMPLETED, lambda it: [*it.begin(), fs.Burn(0.3), it.tokens(), *_END]),
    "stops": (0.7, _COMPLETED, lambda it: [*it.begin(), fs.StopSelf(), *_END]),
    "tools": (8, _COMPLETED, lambda it: [it.conversation()]),
    "exit call": (
        4,
        _COMPLETED,
        lambda it: [*it.begin(), fs.ToolCall(EXIT_TOOL, {"key": it.key}), *_TO_TOOLS],
    ),
    "mute": (1, None, lambda it: [fs.WaitClose()]),
    "silent": (2, None, lambda it: [*it.begin(), *it.perhaps(fs.PingEvery(0.05)), fs.WaitClose()]),
    "burning for ever": (0.7, None, lambda it: [*it.begin(), fs.Burn(None)]),
    "endless": (3, None, lambda it: [*it.head(), it.tokens(2000, 0.02)]),
    "dies": (0.8, None, lambda it: [*it.perhaps(*it.begin()), it.dice.choice(_DEATHS)]),
    "disconnect": (2, _CUT, lambda it: [*it.perhaps(*it.begin()), fs.Fin()]),
    "no ending": (2, _CUT, lambda it: it.begin()),
    "reset": (2, _CUT, lambda it: [*it.begin(), fs.Reset()]),
    "half a record": (2, _CUT, lambda it: [*it.begin(), fs.Raw(_HALF), *it.perhaps(fs.Fin())]),
    "freezes": (0.5, _CUT, lambda it: [*it.begin(), fs.FreezeEndpoints(), fs.Fin()]),
    "garbage": (2, Reason.PROTOCOL_ERROR, lambda it: [*it.begin(), fs.Record('{"choices": [')]),
    "error record": (
        4,
        Reason.SERVER_ERROR,
        lambda it: [*it.begin(), it.dice.choice(_ERRORS), fs.DoneMarker()],
    ),
    "error after the finish": (
        2,
        Reason.SERVER_ERROR,
        lambda it: [*it.begin(), fs.Finish(), fs.ErrorData()],
    ),
    "refused": (4, Reason.HTTP_ERROR, lambda it: [it.dice.choice(_REFUSALS)]),
    "loop": (
        3,
        Reason.REPEATED_LINE_LOOP,
        lambda it: [*it.begin(), it.said(40, "the same line again and again\n")],
    ),
    "failing tool": (
        4,
        Reason.TOOL_EXECUTION_ERROR,
        lambda it: [*it.begin(), it.dice.choice(_FAILING), *_TO_TOOLS],
    ),
    "endless tools": (
        2,
        Reason.TOOL_EXECUTION_ERROR,
        lambda it: [*it.head(), fs.ToolCall("add"), *_TO_TOOLS],
    ),
    "bad call": (
        2,
        Reason.TOOL_PARSE_ERROR,
        lambda it: [*it.begin(), it.dice.choice(_NONSENSE), *_TO_TOOLS],
    ),
}
