"""What a scripted server may be told to do with one request, at random, and what may come of it. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llama_worker.types import RequestFailReason as Reason
from llama_worker.types import ToolDef
from tests import fake_script as fs
from tests.fake_script import Step

EXIT_TOOL = "report"
TOOLS = ("add", "boom", "slow", "odd")


@dataclass(frozen=True, slots=True)
class Plan:
    """One reply. `text` and `reasoning` are what comes of all that is sent, should it come to its own end."""

    kind: str
    steps: Sequence[Step]
    text: str = ""
    reasoning: str = ""
    completes: bool = False
    reasons: frozenset[Reason] = frozenset()  # what it may fail with by itself
    sent_whole: bool = True  # where it ends by itself, everything in `text` was sent before


def tool_def(name: str) -> ToolDef:
    """A tool without parameters to speak of."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def random_plan(rng: random.Random, key: str) -> Plan:
    """A reply whose every delta names `key`, so that no two requests can be mistaken for each other."""
    (kind,) = rng.choices(list(_KINDS), weights=[weight for weight, _ in _KINDS.values()])
    return _KINDS[kind][1](kind, rng, key)


class _Draft:
    """Collects steps and what they say."""

    def __init__(self, rng: random.Random, key: str) -> None:
        self.rng = rng
        self.key = key
        self.steps: list[Step] = [fs.Note(key)]
        self.text = ""
        self.reasoning = ""

    def start(self) -> _Draft:
        if self.rng.random() < 0.2:
            self.steps.append(fs.Newlines(self.rng.choice(["\n", "\r\n", "\r"])))
        framing = self.rng.choice(["chunked", "chunked", "close"])
        self.steps += [fs.Headers(framing=framing), fs.Role()]  # type: ignore[arg-type]
        if self.rng.random() < 0.2:
            self.steps += [fs.PromptProgress(0, 8), fs.PromptProgress(8, 8)]
        return self

    def tokens(self, at_most: int, *, at_least: int = 1, interval_s: float | None = None) -> _Draft:
        count, batch = self.rng.randint(at_least, at_most), self.rng.choice([1, 1, 4])
        pause_s = self.rng.choice([0.0, 0.0, 0.003, 0.01]) if interval_s is None else interval_s
        text, first = f"{self.key}.{{i}} ", len(self.text)
        self.steps.append(fs.Tokens(count, pause_s, text, start=first, batch=batch))
        self.text += "".join(text.replace("{i}", str(i)) for i in range(first, first + count))
        return self

    def thoughts(self, at_most: int) -> _Draft:
        count, text = self.rng.randint(1, at_most), f"{self.key}?{{i}} "
        self.steps.append(fs.Tokens(count, 0.002, text, reasoning=True))
        self.reasoning += "".join(text.replace("{i}", str(i)) for i in range(count))
        return self

    def add(self, *steps: Step) -> _Draft:
        self.steps += steps
        return self

    def finish(self, reason: str = "stop") -> _Draft:
        return self.add(fs.Finish(reason), fs.Usage(), fs.DoneMarker())

    def completes(self, kind: str) -> Plan:
        return self._plan(kind, completes=True)

    def fails(self, kind: str, *reasons: Reason, sent_whole: bool = True) -> Plan:
        return self._plan(kind, reasons=frozenset(reasons), sent_whole=sent_whole)

    def _plan(self, kind: str, **outcome: Any) -> Plan:
        return Plan(kind, self.steps, self.text, self.reasoning.rstrip(), **outcome)


Maker = Callable[[str, random.Random, str], Plan]


def _plain(kind: str, rng: random.Random, key: str) -> Plan:
    return _Draft(rng, key).start().tokens(30, at_least=0).finish().completes(kind)


def _reasoned(kind: str, rng: random.Random, key: str) -> Plan:
    return _Draft(rng, key).start().thoughts(12).tokens(12).finish().completes(kind)


def _pinged(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key).start().add(fs.PingEvery(0.02), fs.Sleep(0.1)).tokens(8, interval_s=0.01)
    return draft.finish().completes(kind)


def _flood(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key).start()
    count, text = rng.randint(300, 1500), f"{key}:{{i}}\n"
    draft.add(fs.Tokens(count, 0.0, text, batch=50))
    draft.text = "".join(text.replace("{i}", str(i)) for i in range(count))
    return draft.finish().completes(kind)


def _cut_by_limit(kind: str, rng: random.Random, key: str) -> Plan:
    return _Draft(rng, key).start().tokens(10).finish("length").completes(kind)


def _finished_and_silent(kind: str, rng: random.Random, key: str) -> Plan:
    return _Draft(rng, key).start().tokens(5).add(fs.Finish(), fs.WaitClose()).completes(kind)


def _burning(kind: str, rng: random.Random, key: str) -> Plan:
    return _Draft(rng, key).start().tokens(3).add(fs.Burn(0.3)).tokens(3).finish().completes(kind)


def _silent(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key)
    if rng.random() < 0.7:
        draft.start().tokens(5, at_least=0)
    if draft.steps[1:] and rng.random() < 0.5:
        draft.add(fs.PingEvery(0.05))
    return draft.add(fs.WaitClose()).fails(kind, sent_whole=False)


def _burning_for_ever(kind: str, rng: random.Random, key: str) -> Plan:
    return _Draft(rng, key).start().tokens(3).add(fs.Burn(None)).fails(kind, sent_whole=False)


def _endless(kind: str, rng: random.Random, key: str) -> Plan:
    return _Draft(rng, key).start().tokens(2000, at_least=2000, interval_s=0.02).fails(kind, sent_whole=False)


def _disconnect(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key)
    if rng.random() < 0.8:
        draft.start().tokens(10)
    return draft.add(fs.Fin()).fails(kind, Reason.STREAM_DISCONNECTED)


def _no_ending(kind: str, rng: random.Random, key: str) -> Plan:
    return _Draft(rng, key).start().tokens(10).fails(kind, Reason.STREAM_DISCONNECTED)


def _reset(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key).start().tokens(10).add(fs.Reset())
    return draft.fails(kind, Reason.STREAM_DISCONNECTED, sent_whole=False)


def _half_record(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key).start().tokens(10)
    chunk = {"choices": [{"index": 0, "finish_reason": None, "delta": {"content": f"{key} never"}}]}
    draft.add(fs.Record(chunk, cut=rng.randint(1, 60)), rng.choice([fs.Fin(), fs.End()]))
    return draft.fails(kind, Reason.STREAM_DISCONNECTED)


def _garbage(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key).start().tokens(10).add(fs.Record('{"choices": [')).tokens(1)
    return Plan(kind, draft.steps, draft.text, reasons=frozenset({Reason.PROTOCOL_ERROR}), sent_whole=False)


def _error_record(kind: str, rng: random.Random, key: str) -> Plan:
    error: Step = rng.choice([fs.ErrorData(rng.choice([400, 500])), fs.ErrorField()])
    draft = _Draft(rng, key).start().tokens(10).add(error)
    if rng.random() < 0.5:
        draft.add(fs.DoneMarker())
    return draft.fails(kind, Reason.SERVER_ERROR)


def _error_after_finish(kind: str, rng: random.Random, key: str) -> Plan:
    return _Draft(rng, key).start().tokens(10).add(fs.Finish(), fs.ErrorData()).fails(kind, Reason.SERVER_ERROR)


def _refused(kind: str, rng: random.Random, key: str) -> Plan:
    refusal: Step = rng.choice([fs.HttpError(400), fs.HttpError(500), fs.HttpError(503), fs.Redirect("/health")])
    return _Draft(rng, key).add(refusal).fails(kind, Reason.HTTP_ERROR)


def _loop(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key).start().tokens(5)
    line = f"{key} the same line again and again, without end"
    draft.add(fs.Lines([line], n=40))
    draft.text += (line + "\n") * 40
    return draft.fails(kind, Reason.REPEATED_LINE_LOOP, sent_whole=False)


def _tools(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key)
    turns = []
    for _ in range(rng.randint(1, 3)):
        turn = _Draft(rng, key).start()
        turn.text = draft.text  # numbers go on
        turn.tokens(4)
        draft.text = turn.text
        calls = [fs.ToolCall("add", {"n": n}, index=n, pieces=2) for n in range(rng.randint(1, 3))]
        turns.append([*turn.steps, *calls, fs.Finish("tool_calls"), fs.DoneMarker()])
    last = _Draft(rng, key).start()
    last.text = draft.text
    last.tokens(4).finish()
    draft.text = last.text
    return draft.add(fs.Turns([*turns, last.steps])).completes(kind)


def _bad_tool(kind: str, rng: random.Random, key: str) -> Plan:
    call, reason = rng.choice(
        [
            (fs.ToolCall("boom"), Reason.TOOL_EXECUTION_ERROR),
            (fs.ToolCall("slow"), Reason.TOOL_EXECUTION_ERROR),
            (fs.ToolCall("odd"), Reason.TOOL_EXECUTION_ERROR),
            (fs.ToolCall("nobody"), Reason.TOOL_PARSE_ERROR),
            (fs.ToolCall("add", "[1"), Reason.TOOL_PARSE_ERROR),
        ]
    )
    draft = _Draft(rng, key).start().tokens(6).add(call, fs.Finish("tool_calls"))
    draft.add(rng.choice([fs.DoneMarker(), fs.End()]))
    return draft.fails(kind, reason)


def _endless_tools(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key).start().add(fs.ToolCall("add"), fs.Finish("tool_calls"), fs.DoneMarker())
    return draft.fails(kind, Reason.TOOL_EXECUTION_ERROR)


def _exit_call(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key).start().tokens(6).add(fs.ToolCall(EXIT_TOOL, {"key": key}))
    return draft.finish("tool_calls").completes(kind)


def _dies(kind: str, rng: random.Random, key: str) -> Plan:
    draft = _Draft(rng, key)
    if rng.random() < 0.8:
        draft.start().tokens(10)
    death: Step = rng.choice([fs.KillSelf(), fs.KillSelf("SIGABRT"), fs.ExitSelf(0), fs.ExitSelf(3, ["oh no"])])
    return draft.add(death).fails(kind, sent_whole=False)


def _stops(kind: str, rng: random.Random, key: str) -> Plan:
    return _Draft(rng, key).start().tokens(10).add(fs.StopSelf()).finish().completes(kind)


def _freezes(kind: str, rng: random.Random, key: str) -> Plan:
    return (
        _Draft(rng, key).start().tokens(10).add(fs.FreezeEndpoints(), fs.Fin()).fails(kind, Reason.STREAM_DISCONNECTED)
    )


_KINDS: dict[str, tuple[float, Maker]] = {
    "plain": (20, _plain),
    "reasoned": (10, _reasoned),
    "pinged": (6, _pinged),
    "flood": (4, _flood),
    "cut by the token limit": (4, _cut_by_limit),
    "finished, then silent": (2, _finished_and_silent),
    "burning": (2, _burning),
    "silent": (3, _silent),
    "burning for ever": (0.7, _burning_for_ever),
    "endless": (3, _endless),
    "disconnect": (2, _disconnect),
    "no ending": (2, _no_ending),
    "reset": (2, _reset),
    "half a record": (2, _half_record),
    "garbage": (2, _garbage),
    "error record": (4, _error_record),
    "error after the finish": (2, _error_after_finish),
    "refused": (4, _refused),
    "loop": (3, _loop),
    "tools": (8, _tools),
    "bad tool": (6, _bad_tool),
    "endless tools": (2, _endless_tools),
    "exit call": (4, _exit_call),
    "dies": (0.8, _dies),
    "stops": (0.7, _stops),
    "freezes": (0.5, _freezes),
}
