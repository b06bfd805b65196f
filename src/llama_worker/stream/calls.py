"""Assembles, parses and classifies the tool calls of a model's turn. Pure.

A turn's calls arrive as fragments (`ToolCallAssembler`) or inside the text (see `tagged_calls`),
become `RawCall`s, and `partition` classifies them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from llama_worker.stream.events import ToolCallDelta, encodable
from llama_worker.types.request import ExitSignal

# limit for a call's arguments: far below where Python's parser, or a copy of them, fails
MAX_JSON_DEPTH = 128

_OWN_ID = re.compile("c(0[0-9]{7})")  # no request makes 10**7 calls
# as the server makes it (b11434)
_KIMI_ID = re.compile(r"functions\.[^:]+:[0-9]+")
# arguments up to this length are parsed again whenever they grow; longer ones once the call ended
_EARLY_CHARS = 1 << 14


class RawCall(Struct, frozen=True):
    """One call as the model made it, not checked yet."""

    # the server's; the Responses proxy passes it on, the model is shown `shown_call_id`
    call_id: str | None
    name: str
    arguments: str  # JSON text, unless the model erred
    # the whole `<tool_call>...</tool_call>`, if it was found in the text
    tagged: str | None = None


class MalformedCall(Struct, frozen=True):
    """A malformed tagged call. It stays in the visible text, too."""

    text: str


class ParsedCall(Struct, frozen=True):
    """A well-formed call of a normal tool."""

    id: str  # see `shown_call_id`
    name: str
    arguments: dict[str, Any]
    arguments_json: str  # as the model wrote it: sent back unchanged, for the prompt cache
    tagged: str | None = None


class Partition(Struct, frozen=True):
    """The calls of one turn by kind. Record `exits` even if there is a `problem`."""

    normal: tuple[ParsedCall, ...]
    exits: tuple[ExitSignal, ...]
    # the first one, for a person: the request fails with it as `tool_parse_error`
    problem: str | None
    unrun: tuple[RawCall | MalformedCall, ...]  # all but the exits, as received


def shown_call_id(call_id: str | None, number: int) -> str:
    """The id under which the model is shown the `number`-th call, whose id was `call_id`: 9
    alphanumerics, which every template accepts. Kimi K2's is kept: its template shows a call by
    nothing else."""
    if call_id is not None and _KIMI_ID.fullmatch(call_id):
        return call_id
    return f"c{number:08d}"


def latest_call_number(messages: Iterable[Mapping[str, Any]]) -> int:
    """The highest number among our ids in a conversation, or 0. Ids must not repeat: some templates
    take two calls with one id for the same call, and lose the second result."""
    calls = (message.get("tool_calls") for message in messages)
    ids = (
        str(call.get("id"))
        for each in calls
        if isinstance(each, list)
        for call in each
        if isinstance(call, Mapping)
    )
    return max((int(own[1]) for id_ in ids if (own := _OWN_ID.fullmatch(id_))), default=0)


# --- fragments ------------------------------------------------------------------------------------


class _Fragments(Struct):
    call_id: str | None
    name: str
    arguments: list[str]
    chars: int = 0  # of the arguments
    taken: bool = False

    @property
    def may_be_complete(self) -> bool:
        """Whether the arguments may be a whole object by now, and short enough to parse again."""
        return self.chars <= _EARLY_CHARS and self.arguments[-1].rstrip().endswith("}")

    def raw(self) -> RawCall:
        call_id = None if self.call_id is None else encodable(self.call_id)
        return RawCall(call_id, encodable(self.name), encodable("".join(self.arguments)))


class ToolCallAssembler:
    """Assembles one turn's structured calls. Not thread-safe: it belongs to one stream."""

    def __init__(self) -> None:
        self._by_index: dict[int, _Fragments] = {}
        # those that `take_complete` has not seen since, and whether the next one has begun
        self._grown: dict[int, bool] = {}

    def feed(self, delta: ToolCallDelta) -> None:
        """Add a fragment: id and name are replaced, arguments appended."""
        if self._by_index and delta.index not in self._by_index:
            self._grown[next(reversed(self._by_index))] = True
        call = self._by_index.setdefault(delta.index, _Fragments(None, "", []))
        call.call_id = delta.call_id or call.call_id
        call.name = delta.name or call.name
        if delta.arguments:
            call.arguments.append(delta.arguments)
            call.chars += len(delta.arguments)
            self._grown.setdefault(delta.index, False)

    def take_complete(self, names: Collection[str]) -> list[RawCall]:
        """Calls of these tools whose arguments are a complete JSON object by now, or none and the
        next call has begun, since a server writes one after the other; checks only calls that grew
        or ended since the last time."""
        complete = []
        grown, self._grown = self._grown, {}
        for index, has_ended in grown.items():
            call = self._by_index[index]
            if call.taken or call.name not in names:
                continue
            if has_ended or call.may_be_complete:
                raw = call.raw()
                try:
                    parse_arguments(raw.arguments)
                except ValueError:
                    continue
                call.taken = True
                complete.append(raw)
        return complete

    def calls(self) -> tuple[RawCall, ...]:
        """The calls not taken so far, by index (gaps do not matter); the last may be incomplete."""
        return tuple(call.raw() for _, call in sorted(self._by_index.items()) if not call.taken)


# --- classifying ----------------------------------------------------------------------------------


def partition(
    calls: Sequence[RawCall | MalformedCall],
    normal_names: Collection[str],
    exit_names: Collection[str],
    *,
    emitted_at: float,
    first_number: int,
    cut_off: bool = False,
) -> Partition:
    """Classify a turn's calls; normal ones get the ids from `first_number` on.

    A normal call needs a known name and a JSON object (empty text counts as `{}`: servers write a
    call without arguments that way, but not the last call of a turn that was `cut_off`); else
    there is a `problem`. An exit call is recorded even if it is malformed.
    """
    normal: list[ParsedCall] = []
    exits: list[ExitSignal] = []
    unrun: list[RawCall | MalformedCall] = []
    problems: list[str] = []
    for call in calls:
        if isinstance(call, MalformedCall):
            target = _intended_tool(call.text, normal_names, exit_names)
            if target in exit_names:
                exits.append(_malformed_exit(target, call.text, emitted_at))
            else:
                unrun.append(call)
                problems.append(f"a tool call in the text is malformed: {_excerpt(call.text)}")
            continue
        try:
            if cut_off and call is calls[-1] and not call.arguments.strip():
                raise ValueError("none came")
            arguments, error = parse_arguments(call.arguments), ""
        except ValueError as exc:
            arguments, error = {}, str(exc)
        if call.name in exit_names:
            if error:
                exits.append(_malformed_exit(call.name, call.arguments, emitted_at))
            else:
                exits.append(
                    {"tool_name": call.name, "arguments": arguments, "emitted_at": emitted_at}
                )
            continue
        unrun.append(call)
        if call.name not in normal_names:
            known = ", ".join(sorted([*normal_names, *exit_names])) or "none"
            problems.append(
                f"the model called an unknown tool, {_excerpt(call.name)}; known tools: {known}"
            )
        elif error:
            problems.append(
                f"the arguments for {call.name!r} are not a JSON object ({error}): "
                f"{_excerpt(call.arguments)}"
            )
        else:
            number = first_number + len(normal)
            shown_id = shown_call_id(call.call_id, number)
            if any(each.id == shown_id for each in normal):  # a model's own may repeat
                shown_id = shown_call_id(None, number)
            text = call.arguments if call.arguments.strip() else "{}"
            normal.append(ParsedCall(shown_id, call.name, arguments, text, call.tagged))
    return Partition(tuple(normal), tuple(exits), problems[0] if problems else None, tuple(unrun))


def parse_arguments(text: str) -> dict[str, Any]:
    """The JSON object in `text`, `{}` if it is blank; raises ValueError for any other text.

    Stricter than `json.loads`: also refuses what llama-server would refuse when it is sent back
    (numbers beyond a double, NaN, lone surrogates), and nesting deeper than `MAX_JSON_DEPTH`.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(
            text, parse_constant=refuse_constant, parse_float=finite_float, parse_int=_finite_int
        )
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}")
    if is_deeper(value, MAX_JSON_DEPTH):
        raise ValueError("nested too deeply")
    return value


def is_deeper(value: Any, depth: int) -> bool:
    """Whether more than `depth` JSON containers are nested in each other."""
    level = [value]
    for _ in range(depth + 1):
        level = [container for container in level if isinstance(container, (dict, list))]
        if not level:
            return False
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return True


def refuse_constant(text: str) -> float:
    """A `parse_constant` for `json.loads`: raises ValueError, since JSON has no NaN or Infinity."""
    raise ValueError(f"{text} is not JSON")


def finite_float(text: str) -> float:
    """A `parse_float` for `json.loads`. Raises ValueError for what would become infinite."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number outside the range of a double")
    return number


def _finite_int(text: str) -> int:
    finite_float(text)
    return int(text)


def _malformed_exit(name: str, raw: str, emitted_at: float) -> ExitSignal:
    return {"tool_name": name, "arguments": {}, "emitted_at": emitted_at, "malformed": raw}


_NAME_KEY = re.compile(r'"name"\s*:\s*"([^"]*)"')


def _intended_tool(text: str, normal_names: Collection[str], exit_names: Collection[str]) -> str:
    """The tool that a malformed call most likely means; "" if that is unclear."""
    if named := _NAME_KEY.search(text):
        return named[1]
    known = "|".join(re.escape(name) for name in (*normal_names, *exit_names))
    found = re.search(rf"(?<![\w-])(?:{known})(?![\w-])", text) if known else None
    return found[0] if found else ""


def _excerpt(text: str) -> str:
    """The start of a text, quoted, for a message to a person."""
    return repr(text if len(text) <= 200 else text[:200] + "...")
