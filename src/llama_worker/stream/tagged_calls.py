"""Finds tool calls that a model writes into its text: `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto

from llama_worker.bios import CALL_CLOSE, CALL_OPEN
from llama_worker.stream.calls import MalformedCall, RawCall, parse_arguments

MAX_TAGGED_CALL_CHARS = 1 << 20
"""The longest tagged call, tags included; a longer one is malformed. Bounds what the filter holds
back."""


class TaggedCallFilter:
    """Removes tagged calls from one turn's text, split anywhere. Not thread-safe.

    Visible text is the text without the well-formed calls, otherwise unchanged. What may be (the
    start of) a call is held back until that is decided, at most `MAX_TAGGED_CALL_CHARS`. Time is
    linear in the text.

    strict (prompted mode): a malformed call is in `calls` as well as in the text.
    Not strict (native mode): a malformed call, or one of a tool that is not in `names`, is just
    text, and tagged calls count only in a turn without structured ones. So all text from the first
    call on is held back, until the end (`finish`) or a structured call (`put_back`).
    """

    def __init__(self, names: Collection[str], *, strict: bool) -> None:
        """`names`: of the tools on offer."""
        self.calls: list[RawCall | MalformedCall] = []
        self._seen_count = 0  # how many of `calls` `take` has seen
        self._names = names
        self._strict = strict
        self._scanner: _CallScanner | None = None  # None: not inside a call
        self._held: list[str] = []  # undecided text, from the start of a tag
        self._visible: list[str] = []  # decided, not returned yet
        self._malformed: list[str] | None = None  # the malformed call under way
        # not strict, from the first call on: all text, with the calls and without
        self._undecided: tuple[list[str], list[str]] | None = None

    def feed(self, text: str) -> str:
        """Take more of the text; returns what may be shown."""
        self._run(text, final=False)
        return self._take_visible()

    def take(self, names: Collection[str]) -> list[RawCall]:
        """Take from `calls` and return the well-formed calls of these tools since the last time."""
        new = self.calls[self._seen_count :]
        taken = [call for call in new if isinstance(call, RawCall) and call.name in names]
        self.calls[self._seen_count :] = [call for call in new if call not in taken]
        self._seen_count = len(self.calls)
        return taken

    def put_back(self) -> str:
        """Tagged calls are text after all; returns what was held back. Call nothing after it."""
        self.calls.clear()
        literal = self._undecided[0] if self._undecided is not None else []
        return "".join([*literal, *self._held])

    def finish(self) -> str:
        """The turn ended in any way; returns the rest of the text. Call nothing after it."""
        self._run("", final=True)
        self._end_malformed()
        if self._undecided is not None:
            self._visible += self._undecided[1]
        return self._take_visible()

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
            if self._scanner.state is _CallScan.OPEN and not final:
                break
            at += sum(map(len, self._held))  # the call may have begun in an earlier piece
            text = self._join_held(text)
            whole = text[start:at] if self._scanner.state is _CallScan.COMPLETE else ""
            self._scanner = None
            call = _well_formed(whole)
            if call is not None and (self._strict or call.name in self._names):
                self._take_call(call, whole)
            else:
                at = start + len(CALL_OPEN)
                if self._strict:
                    self._malformed = []
                self._show(CALL_OPEN)
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
        if self._undecided is None:
            self._visible.append(text)
        else:
            for form in self._undecided:
                form.append(text)

    def _take_call(self, call: RawCall, whole: str) -> None:
        self.calls.append(call)
        if not self._strict:
            self._undecided = self._undecided or ([], [])
            self._undecided[0].append(whole)

    def _end_malformed(self) -> None:
        if self._malformed is not None:
            self.calls.append(MalformedCall("".join(self._malformed)))
            self._malformed = None


_TAG = re.compile(r"</?tool_call>")


def _unfinished_tag(text: str, at: int) -> int:
    """Where an unfinished tag begins at the end of `text`; len(text) if none does."""
    last = text.rfind("<", at)
    # without a "<" it is the last character, which begins no tag
    if CALL_OPEN.startswith(text[last:]) or CALL_CLOSE.startswith(text[last:]):
        return last
    return len(text)


def _well_formed(whole: str) -> RawCall | None:
    """The call, if it holds exactly a name and an object of arguments; else None."""
    try:
        value = parse_arguments(whole[len(CALL_OPEN) : -len(CALL_CLOSE)])
    except ValueError:
        return None
    name, arguments = value.get("name"), value.get("arguments")
    if (
        value.keys() != {"name", "arguments"}
        or not isinstance(name, str)
        or not isinstance(arguments, dict)
    ):
        return None
    return RawCall(None, name, json.dumps(arguments, ensure_ascii=False), whole)


class _CallScan(Enum):
    OPEN = auto()
    COMPLETE = auto()
    MALFORMED = auto()


# every character that JSON allows there
_OUTSIDE_STRING = re.compile(r"[ \t\n\r0-9:,.+\-Eaeflnrstu{}\[\]]*")
_STRING = re.compile(r'(?:[^"\\\x00-\x1f]++|\\.)*+', re.DOTALL)


class _CallScanner:
    """Finds the end of a tagged call, which comes in pieces; starts after its opening tag.

    It does not check the JSON, but stops at once at what no JSON can hold, above all a `<` outside
    a string: so of many opening tags in a row at most two are ever scanned far.
    """

    def __init__(self) -> None:
        self.state = _CallScan.OPEN
        self._in_string = False
        self._unread = ""  # half an escape, or a part of the closing tag
        self._chars_left = MAX_TAGGED_CALL_CHARS - len(CALL_OPEN)

    def scan(self, text: str, start: int) -> int:
        """Scan from `start`; returns the call's end once it is complete."""
        known = len(self._unread)  # 0 unless `text` begins a new piece
        text, last = self._unread + text, start + self._chars_left
        end = min(len(text), last)
        at = self._scan(text, start, end)
        if self.state is _CallScan.OPEN:
            self._unread = text[at:end]
            self._chars_left -= at - start
            if end == last:
                self.state = _CallScan.MALFORMED
        return at - known

    def _scan(self, text: str, at: int, end: int) -> int:
        """Returns up to where the text is read."""
        while self.state is _CallScan.OPEN:
            at = _skip(_STRING if self._in_string else _OUTSIDE_STRING, text, at, end)
            rest = text[at : min(end, at + len(CALL_CLOSE))]
            if rest.startswith('"'):
                self._in_string, at = not self._in_string, at + 1
            elif rest == CALL_CLOSE:  # a string would hold it
                self.state, at = _CallScan.COMPLETE, at + len(CALL_CLOSE)
            elif rest in ("", "\\") if self._in_string else CALL_CLOSE.startswith(rest):
                break  # the rest is to come
            else:
                self.state = _CallScan.MALFORMED
        return at


def _skip(pattern: re.Pattern[str], text: str, at: int, end: int) -> int:
    found = pattern.match(text, at, end)
    return found.end() if found else at
