"""What a scripted server may be told to do with one request, at random, and what may come of it. Pure."""

from __future__ import annotations

import random
import signal
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
    key: str
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
    draft = _Draft(rng, key)
    outcome = _KINDS[kind][1](draft)
    return Plan(kind, key, draft.steps, draft.text, draft.reasoning.rstrip(), **outcome)


Outcome = dict[str, Any]  # of a Plan


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

    def perhaps_start(self, chance: float, at_most: int, *, at_least: int = 1) -> _Draft:
        """Headers and some tokens, or nothing at all."""
        return self.start().tokens(at_most, at_least=at_least) if self.rng.random() < chance else self

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

    def any_of(self, *steps: Step) -> _Draft:
        return self.add(self.rng.choice(steps))

    def perhaps(self, step: Step) -> _Draft:
        return self.add(step) if self.rng.random() < 0.5 else self

    def finish(self, reason: str = "stop") -> _Draft:
        return self.add(fs.Finish(reason), fs.Usage(), fs.DoneMarker())

    def completes(self) -> Outcome:
        return {"completes": True}

    def fails(self, *reasons: Reason, sent_whole: bool = True) -> Outcome:
        return {"reasons": frozenset(reasons), "sent_whole": sent_whole}

    def stays(self) -> Outcome:
        """It does not end by itself."""
        return self.fails(sent_whole=False)


def _flood(draft: _Draft) -> Outcome:
    count, text = draft.start().rng.randint(300, 1500), f"{draft.key}:{{i}}\n"
    draft.text = "".join(text.replace("{i}", str(i)) for i in range(count))
    return draft.add(fs.Tokens(count, 0.0, text, batch=50)).finish().completes()


def _silent(draft: _Draft) -> Outcome:
    draft.perhaps_start(0.7, 5, at_least=0)
    if draft.steps[1:] and draft.rng.random() < 0.5:
        draft.add(fs.PingEvery(0.05))
    return draft.add(fs.WaitClose()).stays()


def _half_record(draft: _Draft) -> Outcome:
    draft.start().tokens(10)
    chunk = {"choices": [{"index": 0, "finish_reason": None, "delta": {"content": f"{draft.key} never"}}]}
    draft.add(fs.Record(chunk, cut=draft.rng.randint(1, 60))).perhaps(fs.Fin())
    return draft.fails(Reason.STREAM_DISCONNECTED)


def _error_record(draft: _Draft) -> Outcome:
    draft.start().tokens(10).any_of(fs.ErrorData(400), fs.ErrorData(500), fs.ErrorField())
    return draft.perhaps(fs.DoneMarker()).fails(Reason.SERVER_ERROR)


def _loop(draft: _Draft) -> Outcome:
    line = f"{draft.key} the same line again and again, without end"
    draft.start().tokens(5).add(fs.Repeat(40, [fs.Text(line + "\n")]))
    draft.text += (line + "\n") * 40
    return draft.fails(Reason.REPEATED_LINE_LOOP, sent_whole=False)


def _tools(draft: _Draft) -> Outcome:
    turns = []
    for _ in range(draft.rng.randint(1, 3)):
        calls = [fs.ToolCall("add", {"n": n}, index=n, pieces=2) for n in range(draft.rng.randint(1, 3))]
        turns.append(_turn(draft).add(*calls, fs.Finish("tool_calls"), fs.DoneMarker()).steps)
    return draft.add(fs.Turns([*turns, _turn(draft).finish().steps])).completes()


def _turn(draft: _Draft) -> _Draft:
    """One that goes on where the conversation is."""
    turn = _Draft(draft.rng, draft.key).start()
    turn.text = draft.text
    draft.text = turn.tokens(4).text
    return turn


def _bad_tool(draft: _Draft) -> Outcome:
    call, reason = draft.rng.choice(
        [
            (fs.ToolCall("boom"), Reason.TOOL_EXECUTION_ERROR),
            (fs.ToolCall("slow"), Reason.TOOL_EXECUTION_ERROR),
            (fs.ToolCall("odd"), Reason.TOOL_EXECUTION_ERROR),
            (fs.ToolCall("nobody"), Reason.TOOL_PARSE_ERROR),
            (fs.ToolCall("add", "[1"), Reason.TOOL_PARSE_ERROR),
        ]
    )
    draft.start().tokens(6).add(call, fs.Finish("tool_calls")).perhaps(fs.DoneMarker())
    return draft.fails(reason)


def _garbage(draft: _Draft) -> Outcome:
    draft.start().tokens(10).add(fs.Record('{"choices": [')).tokens(1)
    return draft.fails(Reason.PROTOCOL_ERROR, sent_whole=False)


def _refused(draft: _Draft) -> Outcome:
    draft.any_of(fs.HttpError(400), fs.HttpError(500), fs.HttpError(503), fs.Redirect("/health"))
    return draft.fails(Reason.HTTP_ERROR)


def _endless_tools(draft: _Draft) -> Outcome:
    draft.start().add(fs.ToolCall("add"), fs.Finish("tool_calls"), fs.DoneMarker())
    return draft.fails(Reason.TOOL_EXECUTION_ERROR)


def _exit_call(draft: _Draft) -> Outcome:
    draft.start().tokens(6).add(fs.ToolCall(EXIT_TOOL, {"key": draft.key}))
    return draft.finish("tool_calls").completes()


def _dies(draft: _Draft) -> Outcome:
    deaths = fs.KillSelf(), fs.KillSelf(-signal.SIGABRT), fs.KillSelf(0), fs.KillSelf(3, ["oh no"])
    return draft.perhaps_start(0.8, 10).any_of(*deaths).stays()


def _pinged(draft: _Draft) -> Outcome:
    return draft.start().add(fs.PingEvery(0.02), fs.Sleep(0.1)).tokens(8, interval_s=0.01).finish().completes()


_CUT = Reason.STREAM_DISCONNECTED
_KINDS: dict[str, tuple[float, Callable[[_Draft], Outcome]]] = {
    "plain": (20, lambda draft: draft.start().tokens(30, at_least=0).finish().completes()),
    "reasoned": (10, lambda draft: draft.start().thoughts(12).tokens(12).finish().completes()),
    "pinged": (6, _pinged),
    "flood": (4, _flood),
    "cut by the token limit": (4, lambda draft: draft.start().tokens(10).finish("length").completes()),
    "finished, then silent": (2, lambda draft: draft.start().tokens(5).add(fs.Finish(), fs.WaitClose()).completes()),
    "burning": (2, lambda draft: draft.start().tokens(3).add(fs.Burn(0.3)).tokens(3).finish().completes()),
    "silent": (3, _silent),
    "burning for ever": (0.7, lambda draft: draft.start().tokens(3).add(fs.Burn(None)).stays()),
    "endless": (3, lambda draft: draft.start().tokens(2000, at_least=2000, interval_s=0.02).stays()),
    "disconnect": (2, lambda draft: draft.perhaps_start(0.8, 10).add(fs.Fin()).fails(_CUT)),
    "no ending": (2, lambda draft: draft.start().tokens(10).fails(_CUT)),
    "reset": (2, lambda draft: draft.start().tokens(10).add(fs.Reset()).fails(_CUT, sent_whole=False)),
    "half a record": (2, _half_record),
    "garbage": (2, _garbage),
    "error record": (4, _error_record),
    "error after the finish": (
        2,
        lambda draft: draft.start().tokens(10).add(fs.Finish(), fs.ErrorData()).fails(Reason.SERVER_ERROR),
    ),
    "refused": (4, _refused),
    "loop": (3, _loop),
    "tools": (8, _tools),
    "bad tool": (6, _bad_tool),
    "endless tools": (2, _endless_tools),
    "exit call": (4, _exit_call),
    "dies": (0.8, _dies),
    "stops": (0.7, lambda draft: draft.start().tokens(10).add(fs.StopSelf()).finish().completes()),
    "freezes": (0.5, lambda draft: draft.start().tokens(10).add(fs.FreezeEndpoints(), fs.Fin()).fails(_CUT)),
}
