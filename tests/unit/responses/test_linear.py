"""What a request costs grows with its size, not with the square of it: the work is counted."""

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

from llama_worker.responses.api.conversation import ChatMessages, Item
from llama_worker.responses.api.events import ResponseEvents
from llama_worker.responses.api.request import normalise
from llama_worker.responses.api.store import RecalledResponses, StoredResponse, stored_response
from llama_worker.responses.api.tools import NO_TOOLS
from llama_worker.stream.events import ToolCallDelta
from tests.tables import cases

N = 300
Json = dict[str, Any]


def allocated_bytes(items: list[Json]) -> int:
    """While they become messages: what each item's step holds at most beyond what was held before
    it, over all steps."""
    total = 0

    def watched() -> Iterator[Item]:
        nonlocal total
        for item in items:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            yield item
            total += tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        ChatMessages("", cast("list[Item]", watched()), NO_TOOLS)
    finally:
        tracemalloc.stop()
    return total


def steps(action: Callable[[], object]) -> int:
    """Of Python's interpreter."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else the first trace in Python 3.12 sees none of them
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 1000}]}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
SAID = {"type": "message", "role": "assistant", "content": "x" * 1000}


@cases("first, more", {"reasoning": (REASONING, REASONING), "answers behind a call": (CALL, SAID)})
def test_many_items_cost_linear_time(first: Json, more: Json) -> None:
    one, two = (allocated_bytes([first, *[more] * count]) for count in (N, 2 * N))
    assert two < 2.5 * one


def found_tools(count: int) -> list[Json]:
    return [
        {
            "type": "tool_search_output",
            "call_id": f"c{number}",
            "tools": [{"type": "function", "name": f"tool{number}"}],
        }
        for number in range(count)
    ]


def chosen_tools(count: int) -> Json:
    tools = [{"type": "function", "name": f"tool{number}"} for number in range(count)]
    return {"tools": tools, "tool_choice": {"type": "allowed_tools", "tools": tools}}


@cases(
    "body",
    {
        "tools that were found": lambda count: {"input": found_tools(count)},
        "allowed tools": lambda count: {"input": "x", **chosen_tools(count)},
    },
)
def test_no_tool_is_looked_for_among_all(body: Callable[[int], Json]) -> None:
    one, two = (steps(lambda count=count: normalise(body(count))) for count in (N, 2 * N))  # type: ignore[misc]
    assert two < 2.5 * one


def interleaved(count: int) -> None:
    """Two calls whose arguments come in turns."""
    events = ResponseEvents(unique="1", clock=lambda: 0.0, echo={})
    for index in (0, 1):
        events.feed([ToolCallDelta(index, f"c{index}", "add", '{"a": "')])
    for _ in range(count):
        for index in (0, 1):
            events.feed([ToolCallDelta(index, None, None, "x")])


def test_waiting_calls_cost_linear_time() -> None:
    one, two = (steps(lambda count=count: interleaved(count)) for count in (N, 2 * N))  # type: ignore[misc]
    assert two < 2.5 * one


def test_many_references_read_a_response_once() -> None:
    reads = []

    class Counted(StoredResponse, frozen=True):
        def items(self) -> list[Item]:
            reads.append(self.id)
            return super().items()

    output = [{"id": f"msg_{number}", "type": "message"} for number in range(N)]
    stored = stored_response({"id": "resp_1", "output": output}, [{"id": ["no id"]}], None)
    holder = Counted(**{name: getattr(stored, name) for name in stored.__struct_fields__})
    found = RecalledResponses(chain=(), holders={item["id"]: holder for item in output})
    assert found.read()[1] == {item["id"]: item for item in output}
    assert reads == ["resp_1"]
