"""What a scripted server may be told to do with one request, at random, and what may come of it. Pure."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

from llama_worker.types import RequestFailReason as Reason
from llama_worker.types import ToolDef
from tests import fake_script as fs
from tests.fake_script import Step

EXIT_TOOL = "report"
TOOLS = ("add", "boom", "slow", "odd")


class Plan:
    """One reply, drawn from `rng`, whose every delta names `key`: no two requests can be mistaken for each other.

    `text` and `reasoning` are what comes of all that is sent, should it come to its own end.
    """

    def __init__(self, rng: random.Random, key: str) -> None:
        self.rng = rng
        self.key = key
        self.kind = ""
        self.steps: list[Step] = [fs.Note(key)]
        self.text = ""
        self.reasoning = ""
        self.completes = True
        self.reasons: frozenset[Reason] = frozenset()  # what it may fail with by itself
        self.sent_whole = True  # where it ends by itself, everything in `text` was sent before

    def start(self) -> Plan:
        if self.rng.random() < 0.2:
            self.add(fs.Newlines(self.rng.choice(["\n", "\r\n", "\r"])))
        self.any_of(fs.Headers(), fs.Headers(), fs.Headers(framing="close")).add(fs.Role())
        if self.rng.random() < 0.2:
            self.add(fs.PromptProgress(0, 8), fs.PromptProgress(8, 8))
        return self

    def perhaps_start(self, chance: float, at_most: int, *, at_least: int = 1) -> Plan:
        """Headers and some tokens, or nothing at all."""
        return self.start().tokens(at_most, at_least=at_least) if self.rng.random() < chance else self

    def tokens(self, at_most: int, *, at_least: int = 1, interval_s: float | None = None) -> Plan:
        count, batch = self.rng.randint(at_least, at_most), self.rng.choice([1, 1, 4])
        pause_s = self.rng.choice([0.0, 0.0, 0.003, 0.01]) if interval_s is None else interval_s
        text, first = f"{self.key}.{{i}} ", len(self.text)
        self.text += _said(text, first, count)
        return self.add(fs.Tokens(count, pause_s, text, start=first, batch=batch))

    def thoughts(self, at_most: int) -> Plan:
        count, text = self.rng.randint(1, at_most), f"{self.key}?{{i}} "
        self.reasoning = _said(text, 0, count).rstrip()
        return self.add(fs.Tokens(count, 0.002, text, reasoning=True))

    def lines(self, text: str, count: int, *, batch: int) -> Plan:
        self.text += _said(text, 0, count)
        return self.add(fs.Tokens(count, text=text, batch=batch))

    def add(self, *steps: Step) -> Plan:
        self.steps += steps
        return self

    def any_of(self, *steps: Step) -> Plan:
        return self.add(self.rng.choice(steps))

    def perhaps(self, step: Step) -> Plan:
        return self.add(step) if self.rng.random() < 0.5 else self

    def finish(self, reason: str = "stop") -> Plan:
        return self.add(fs.Finish(reason), fs.Usage(), fs.DoneMarker())

    def fails(self, *reasons: Reason, sent_whole: bool = True) -> None:
        self.completes, self.reasons, self.sent_whole = False, frozenset(reasons), sent_whole

    def stays(self) -> None:
        """It does not end by itself."""
        self.fails(sent_whole=False)


def tool_def(name: str) -> ToolDef:
    """A tool without parameters to speak of."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def random_plan(rng: random.Random, key: str) -> Plan:
    """A reply of one of the kinds below."""
    plan = Plan(rng, key)
    (plan.kind,) = rng.choices(list(_KINDS), weights=[weight for weight, _ in _KINDS.values()])
    _KINDS[plan.kind][1](plan)
    return plan


def _said(text: str, first: int, count: int) -> str:
    return "".join(text.replace("{i}", str(i)) for i in range(first, first + count))


def _silent(plan: Plan) -> None:
    plan.perhaps_start(0.7, 5, at_least=0)
    if plan.steps[1:]:
        plan.perhaps(fs.PingEvery(0.05))
    plan.add(fs.WaitClose()).stays()


def _half_record(plan: Plan) -> None:
    chunk = {"choices": [{"index": 0, "finish_reason": None, "delta": {"content": f"{plan.key} never"}}]}
    plan.start().tokens(10).add(fs.Record(chunk, cut=plan.rng.randint(1, 60))).perhaps(fs.Fin()).fails(_CUT)


def _loop(plan: Plan) -> None:
    line = f"{plan.key} the same line again and again, without end\n"
    plan.start().tokens(5).lines(line, 40, batch=1).fails(Reason.REPEATED_LINE_LOOP, sent_whole=False)


def _tools(plan: Plan) -> None:
    turns = []
    for _ in range(plan.rng.randint(1, 3)):
        calls = [fs.ToolCall("add", {"n": n}, index=n, pieces=2) for n in range(plan.rng.randint(1, 3))]
        turns.append(_turn(plan).add(*calls, fs.Finish("tool_calls"), fs.DoneMarker()).steps)
    plan.add(fs.Turns([*turns, _turn(plan).finish().steps]))


def _turn(plan: Plan) -> Plan:
    """One that goes on where the conversation is."""
    turn = Plan(plan.rng, plan.key)
    turn.text = plan.text
    plan.text = turn.start().tokens(4).text
    return turn


def _bad_tool(plan: Plan) -> None:
    call, reason = plan.rng.choice(
        [
            (fs.ToolCall("boom"), Reason.TOOL_EXECUTION_ERROR),
            (fs.ToolCall("slow"), Reason.TOOL_EXECUTION_ERROR),
            (fs.ToolCall("odd"), Reason.TOOL_EXECUTION_ERROR),
            (fs.ToolCall("nobody"), Reason.TOOL_PARSE_ERROR),
            (fs.ToolCall("add", "[1"), Reason.TOOL_PARSE_ERROR),
        ]
    )
    plan.start().tokens(6).add(call, fs.Finish("tool_calls")).perhaps(fs.DoneMarker()).fails(reason)


_CUT = Reason.STREAM_DISCONNECTED
_DEATHS = fs.KillSelf(), fs.KillSelf(-signal.SIGABRT), fs.KillSelf(0), fs.KillSelf(3, ["oh no"])
_ERRORS = fs.ErrorData(400), fs.ErrorData(500), fs.ErrorField()
_REFUSALS = fs.HttpError(400), fs.HttpError(500), fs.HttpError(503), fs.Redirect("/health")
_CALL = fs.ToolCall("add"), fs.Finish("tool_calls"), fs.DoneMarker()
_KINDS: dict[str, tuple[float, Callable[[Plan], object]]] = {  # each with its weight; the reply completes, or fails
    "plain": (20, lambda it: it.start().tokens(30, at_least=0).finish()),
    "reasoned": (10, lambda it: it.start().thoughts(12).tokens(12).finish()),
    "pinged": (6, lambda it: it.start().add(fs.PingEvery(0.02), fs.Sleep(0.1)).tokens(8, interval_s=0.01).finish()),
    "flood": (4, lambda it: it.start().lines(f"{it.key}:{{i}}\n", it.rng.randint(300, 1500), batch=50).finish()),
    "cut by the token limit": (4, lambda it: it.start().tokens(10).finish("length")),
    "finished, then silent": (2, lambda it: it.start().tokens(5).add(fs.Finish(), fs.WaitClose())),
    "burning": (2, lambda it: it.start().tokens(3).add(fs.Burn(0.3)).tokens(3).finish()),
    "silent": (3, _silent),
    "burning for ever": (0.7, lambda it: it.start().tokens(3).add(fs.Burn(None)).stays()),
    "endless": (3, lambda it: it.start().tokens(2000, at_least=2000, interval_s=0.02).stays()),
    "disconnect": (2, lambda it: it.perhaps_start(0.8, 10).add(fs.Fin()).fails(_CUT)),
    "no ending": (2, lambda it: it.start().tokens(10).fails(_CUT)),
    "reset": (2, lambda it: it.start().tokens(10).add(fs.Reset()).fails(_CUT, sent_whole=False)),
    "half a record": (2, _half_record),
    "garbage": (
        2,
        lambda it: (
            it.start()
            .tokens(10)
            .add(fs.Record('{"choices": ['))
            .tokens(1)
            .fails(Reason.PROTOCOL_ERROR, sent_whole=False)
        ),
    ),
    "error record": (
        4,
        lambda it: it.start().tokens(10).any_of(*_ERRORS).perhaps(fs.DoneMarker()).fails(Reason.SERVER_ERROR),
    ),
    "error after the finish": (
        2,
        lambda it: it.start().tokens(10).add(fs.Finish(), fs.ErrorData()).fails(Reason.SERVER_ERROR),
    ),
    "refused": (4, lambda it: it.any_of(*_REFUSALS).fails(Reason.HTTP_ERROR)),
    "loop": (3, _loop),
    "tools": (8, _tools),
    "bad tool": (6, _bad_tool),
    "endless tools": (2, lambda it: it.start().add(*_CALL).fails(Reason.TOOL_EXECUTION_ERROR)),
    "exit call": (
        4,
        lambda it: it.start().tokens(6).add(fs.ToolCall(EXIT_TOOL, {"key": it.key})).finish("tool_calls"),
    ),
    "dies": (0.8, lambda it: it.perhaps_start(0.8, 10).any_of(*_DEATHS).stays()),
    "stops": (0.7, lambda it: it.start().tokens(10).add(fs.StopSelf()).finish()),
    "freezes": (0.5, lambda it: it.start().tokens(10).add(fs.FreezeEndpoints(), fs.Fin()).fails(_CUT)),
}
