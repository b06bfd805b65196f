"""What a model's turn says about tools: calls put together, parsed, told apart; results encoded. Pure.

A turn's calls arrive as fragments (`ToolCallAssembler`) or inside the text (`PromptedToolFilter`), become
`RawCall`s, and `partition` decides what each of them is. Nothing here runs a tool.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from llama_worker.stream_events import ToolCallDelta
from llama_worker.types import ExitSignal, RequestFailReason

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
MAX_TAGGED_CALL_CHARS = 1 << 20
"""The longest tagged call, tags included; a longer one is malformed. Bounds what the filter holds back."""

_MAX_DEPTH = 128  # of nested JSON in a tagged call: far below where Python's parser gives up
_EXCERPT_CHARS = 200


class ToolResultError(Exception):
    """A tool returned what JSON cannot hold. The text says what."""


@dataclass(frozen=True, slots=True)
class RawCall:
    """One call as the model made it, not judged yet."""

    call_id: str | None  # the server's id: for a person; the worker sends ids of its own
    name: str
    arguments: str  # JSON text, if the model did well
    tagged: str | None = None  # the whole `<tool_call>...</tool_call>`, where it was found in the text


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text that opens a tagged call and is none. It stays in the visible text too."""

    text: str


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A well-formed call of a normal tool."""

    id: str  # the worker's own, see `tool_call_id`
    name: str
    arguments: dict[str, Any]
    arguments_json: str  # as the model wrote it: sent back so, the prompt cache still fits
    tagged: str | None = None


@dataclass(frozen=True, slots=True)
class ToolProblem:
    """Why the request fails over this turn's calls: the fields of the result."""

    fail_reason: RequestFailReason
    fail_detail: str


@dataclass(frozen=True, slots=True)
class Partition:
    """The calls of one turn, told apart. `exits` are to be recorded whatever `problem` says."""

    normal: tuple[ParsedCall, ...]
    exits: tuple[ExitSignal, ...]
    problem: ToolProblem | None  # the first one


def tool_call_id(number: int) -> str:
    """The worker's id of a request's `number`-th call: 9 alphanumerics, the one form every template takes."""
    if not 0 <= number < 10**8:
        raise ValueError(f"number must be from 0 to {10**8 - 1}, not {number}")
    return f"c{number:08d}"


# --- fragments ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Fragments:
    call_id: str | None
    name: str
    arguments: list[str]


class ToolCallAssembler:
    """Puts one turn's structured calls together. Not thread-safe: it belongs to one stream."""

    def __init__(self) -> None:
        self._by_index: dict[int, _Fragments] = {}

    def feed(self, delta: ToolCallDelta) -> None:
        """Adds a fragment: id and name are assigned (they may come again, whole), arguments appended."""
        call = self._by_index.setdefault(delta.index, _Fragments(None, "", []))
        call.call_id = delta.call_id or call.call_id
        call.name = delta.name or call.name
        if delta.arguments:
            call.arguments.append(delta.arguments)

    def calls(self) -> tuple[RawCall, ...]:
        """The calls so far, by index (gaps do not matter); the last may be half a call."""
        return tuple(
            RawCall(call.call_id, call.name, "".join(call.arguments)) for _, call in sorted(self._by_index.items())
        )


# --- judging --------------------------------------------------------------------------------------------


def partition(
    calls: Iterable[RawCall | MalformedCall],
    normal_names: Collection[str],
    exit_names: Collection[str],
    *,
    emitted_at: float,
    first_number: int,
) -> Partition:
    """Tells a turn's calls apart; normal ones get the ids from `first_number` on.

    A normal call needs a known name and a JSON object (nothing at all counts as `{}`: so do servers write a
    call without arguments); else there is a `problem`. An exit call is recorded however it looks.
    """
    normal: list[ParsedCall] = []
    exits: list[ExitSignal] = []
    problems: list[str] = []
    for call in calls:
        if isinstance(call, MalformedCall):
            target = _aimed_at(call.text, normal_names, exit_names)
            if target in exit_names:
                exits.append(_malformed_exit(target, call.text, emitted_at))
            else:
                problems.append(f"a tool call in the text is malformed: {_excerpt(call.text)}")
            continue
        try:
            arguments, error = parse_arguments(call.arguments), ""
        except ValueError as exc:
            arguments, error = {}, str(exc)
        if call.name in exit_names:
            if error:
                exits.append(_malformed_exit(call.name, call.arguments, emitted_at))
            else:
                exits.append({"tool_name": call.name, "arguments": arguments, "emitted_at": emitted_at})
        elif call.name not in normal_names:
            known = ", ".join(sorted([*normal_names, *exit_names])) or "none"
            problems.append(f"the model called an unknown tool, {_excerpt(call.name)}; known: {known}")
        elif error:
            excerpt = _excerpt(call.arguments)
            problems.append(f"the arguments for {call.name!r} are not a JSON object ({error}): {excerpt}")
        else:
            own_id = tool_call_id(first_number + len(normal))
            text = call.arguments if call.arguments.strip() else "{}"
            normal.append(ParsedCall(own_id, call.name, arguments, text, call.tagged))
    problem = ToolProblem(RequestFailReason.TOOL_PARSE_ERROR, problems[0]) if problems else None
    return Partition(tuple(normal), tuple(exits), problem)


def parse_arguments(text: str) -> dict[str, Any]:
    """The JSON object in `text`, `{}` for nothing or whitespace; raises ValueError, whatever the text.

    Stricter than `json.loads`: what llama-server would refuse when it is sent back (numbers beyond a double,
    NaN, lone surrogates) is refused here.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float, parse_int=_finite_int)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number beyond the range of a double")
    return number


def _finite_int(text: str) -> int:
    _finite_float(text)
    return int(text)


def _malformed_exit(name: str, raw: str, emitted_at: float) -> ExitSignal:
    return {"tool_name": name, "arguments": {}, "emitted_at": emitted_at, "malformed": raw}


_NAME_KEY = re.compile(r'"name"\s*:\s*"([^"]*)"')


def _aimed_at(text: str, normal_names: Collection[str], exit_names: Collection[str]) -> str:
    """The tool that a malformed call most likely means; "" if it cannot be told."""
    if named := _NAME_KEY.search(text):
        return named[1]
    known = "|".join(re.escape(name) for name in (*normal_names, *exit_names))
    found = re.search(rf"(?<![\w-])(?:{known})(?![\w-])", text) if known else None
    return found[0] if found else ""


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "...")


# --- results --------------------------------------------------------------------------------------------


def encode_result(value: Any) -> str:
    """The text of a tool message: a str as it is, any other JSON value dumped. Raises ToolResultError.

    It runs code of the value (a subclass of dict may do anything): call it on the tool's thread.
    """
    try:
        if isinstance(value, str):
            text = str.__str__(value)  # of a string enum the value, not its name
        else:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            _refuse_odd_keys(value)
        text.encode()
    except Exception as exc:
        raise ToolResultError(
            f"the tool returned a {type(value).__name__} that JSON cannot hold: {exc or type(exc).__name__}"
        ) from exc
    return text


def _refuse_odd_keys(value: Any) -> None:
    """`json.dumps` turns keys that are numbers or None into strings: the model would read another value."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is no string")
            rest.extend(item.values())
        elif isinstance(item, (list, tuple)):
            rest.extend(item)


# --- calls inside the text ------------------------------------------------------------------------------


def tagged_call(name: str, arguments_json: str) -> str:
    """A call the way prompted mode writes it."""
    return f'{CALL_OPEN}{{"name": {json.dumps(name)}, "arguments": {arguments_json}}}{CALL_CLOSE}'


class PromptedToolFilter:
    """Takes tagged calls out of one turn's text, whatever its split. Not thread-safe.

    Visible text is the text less the well-formed calls, nothing else changed. What may be (the start of) a
    call is held back until that is decided, at most `MAX_TAGGED_CALL_CHARS`. Time is linear in the text.

    strict (prompted mode): a malformed call is in `calls` as well as in the text.
    Not strict (native mode): it is just text; and since tagged calls count only in a turn without structured
    ones, all that follows the first is held back to the end, where `finish` is told which it was.
    """

    def __init__(self, *, strict: bool) -> None:
        self.calls: list[RawCall | MalformedCall] = []
        self._strict = strict
        self._scanner: _CallScanner | None = None  # None: not inside a call
        self._held: list[str] = []  # undecided text, from the start of a tag
        self._visible: list[str] = []  # decided, not returned yet
        self._malformed: list[str] | None = None  # the malformed call that the text is in
        self._after_call: list[str] = []  # not strict: the visible text after the first call
        self._literal_after: list[str] = []  # the same with the calls, the first too

    def feed(self, text: str) -> str:
        """More of the text; returns what may be shown."""
        if text:
            self._run(text, final=False)
        return self._take_visible()

    def finish(self, *, structured_calls: bool = False) -> str:
        """The end of the turn, however it came; returns the rest of the text. Once only.

        structured_calls: the turn had such calls, so (if not strict) tagged ones are put back.
        """
        self._run("", final=True)
        self._end_malformed()
        if structured_calls and self._literal_after:
            self.calls.clear()
            return self._take_visible() + "".join(self._literal_after)
        return self._take_visible() + "".join(self._after_call)

    def _run(self, text: str, *, final: bool) -> None:
        start = 0  # of the undecided part
        at = 0  # scanned up to here
        if self._scanner is None:
            text = self._join_held(text)
        while True:
            if self._scanner is None:
                tag = _TAG.search(text, at)
                if tag is None:
                    start = len(text) if final else _unfinished_tag(text, at)
                    self._show(text[at:start])
                    break
                closes = tag[0] == CALL_CLOSE
                self._show(text[at : tag.end() if closes else tag.start()])
                self._end_malformed()
                start, at = tag.span()
                if not closes:
                    self._scanner = _CallScanner()
                continue
            at = self._scanner.scan(text, at)
            if self._scanner.verdict is _Verdict.OPEN and not final:
                break
            if self._held:  # the call began in an earlier text
                at += sum(map(len, self._held))
                text = self._join_held(text)
            whole = text[start:at] if self._scanner.verdict is _Verdict.COMPLETE else ""
            self._scanner = None
            if call := _well_formed(whole):
                self._take_call(call, whole)
            else:
                at = start + len(CALL_OPEN)
                if self._strict:
                    self._malformed = []
                self._show(CALL_OPEN)
        if start < len(text):
            self._held.append(text[start:])

    def _join_held(self, text: str) -> str:
        text = "".join([*self._held, text])
        self._held.clear()
        return text

    def _take_visible(self) -> str:
        text = "".join(self._visible)
        self._visible.clear()
        return text

    def _show(self, text: str) -> None:
        if self._malformed is not None:
            self._malformed.append(text)
        if self._literal_after:
            self._literal_after.append(text)
            self._after_call.append(text)
        else:
            self._visible.append(text)

    def _take_call(self, call: RawCall, whole: str) -> None:
        self.calls.append(call)
        if not self._strict:
            self._literal_after.append(whole)

    def _end_malformed(self) -> None:
        if self._malformed is not None:
            self.calls.append(MalformedCall("".join(self._malformed)))
            self._malformed = None


_TAG = re.compile(r"</?tool_call>")


def _unfinished_tag(text: str, at: int) -> int:
    """Where `text` ends in the beginning of a tag; its length if it does not."""
    last = text.rfind("<", max(at, len(text) - len(CALL_CLOSE)))
    if last >= 0 and (CALL_OPEN.startswith(text[last:]) or CALL_CLOSE.startswith(text[last:])):
        return last
    return len(text)


def _well_formed(whole: str) -> RawCall | None:
    """The call, if it holds exactly a name and an object of arguments."""
    try:
        value = parse_arguments(whole[len(CALL_OPEN) : -len(CALL_CLOSE)])
    except ValueError:
        return None
    name, arguments = value.get("name"), value.get("arguments")
    if value.keys() != {"name", "arguments"} or not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return RawCall(None, name, json.dumps(arguments, ensure_ascii=False), whole)


class _Verdict(Enum):
    OPEN = auto()
    COMPLETE = auto()
    MALFORMED = auto()


class _Part(Enum):
    BEFORE = auto()  # the object
    OUTSIDE = auto()  # a string
    STRING = auto()
    ESCAPE = auto()
    AFTER = auto()  # the object
    CLOSING = auto()  # inside the closing tag


_SPACE = re.compile(r"[ \t\n\r]*")
_OUTSIDE = re.compile(r"[ \t\n\r0-9:,.+\-Eaeflnrstu]*")  # every character JSON knows there, brackets aside
_STRING = re.compile(r'[^"\\\x00-\x1f]*')


class _CallScanner:
    """Finds where a tagged call ends, from after its opening tag, in pieces.

    It does not check the JSON, but what no JSON can hold ends it at once: a `<` outside a string above all,
    so that of many opening tags in a row at most two are ever scanned far.
    """

    def __init__(self) -> None:
        self.verdict = _Verdict.OPEN
        self._part = _Part.BEFORE
        self._depth = 0
        self._closing_chars = 0
        self._room = MAX_TAGGED_CALL_CHARS - len(CALL_OPEN)

    def scan(self, text: str, start: int) -> int:
        """Reads on at `start`; returns where it stopped: at the end of `text` unless there is a verdict."""
        at, end = start, min(len(text), start + self._room)
        while at < end and self.verdict is _Verdict.OPEN:
            at = self._step(text, at, end)
        self._room -= at - start
        if self.verdict is _Verdict.OPEN and self._room == 0:
            self.verdict = _Verdict.MALFORMED
        return at

    def _step(self, text: str, at: int, end: int) -> int:
        match self._part:
            case _Part.BEFORE | _Part.AFTER:
                at = _skip(_SPACE, text, at, end)
                if at < end:
                    expected = "{" if self._part is _Part.BEFORE else "<"
                    self._expect(text[at] == expected)
                    self._part = _Part.OUTSIDE if self._part is _Part.BEFORE else _Part.CLOSING
            case _Part.OUTSIDE:
                at = _skip(_OUTSIDE, text, at, end)
                if at < end:
                    self._structure(text[at])
                    at += 1
            case _Part.STRING:
                at = _skip(_STRING, text, at, end)
                if at < end:
                    self._expect(text[at] in '"\\')
                    self._part = _Part.OUTSIDE if text[at] == '"' else _Part.ESCAPE
                    at += 1
            case _Part.ESCAPE:
                self._part = _Part.STRING
                at += 1
            case _Part.CLOSING:
                self._expect(text[at] == CALL_CLOSE[self._closing_chars])
                self._closing_chars += 1
                at += 1
                if self._closing_chars == len(CALL_CLOSE) and self.verdict is _Verdict.OPEN:
                    self.verdict = _Verdict.COMPLETE
        return at

    def _structure(self, char: str) -> None:
        if char == '"':
            self._part = _Part.STRING
        elif char in "{[":
            self._depth += 1
            self._expect(self._depth <= _MAX_DEPTH)
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._part = _Part.AFTER
        else:
            self._expect(False)

    def _expect(self, holds: bool) -> None:
        if not holds:
            self.verdict = _Verdict.MALFORMED


def _skip(pattern: re.Pattern[str], text: str, at: int, end: int) -> int:
    found = pattern.match(text, at, end)
    return found.end() if found else at
