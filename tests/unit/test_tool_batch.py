"""The calls of a turn one by one, with literal times."""

from __future__ import annotations

from llama_worker.request.tool_batch import ToolBatch
from llama_worker.stream.calls import ParsedCall

CALLS = tuple(ParsedCall(f"c0000000{n}", f"tool{n}", {"n": n}, f'{{"n": {n}}}') for n in (1, 2))


def batch() -> ToolBatch:
    return ToolBatch(calls=CALLS, iteration=3, timeout_s=10.0, unix_offset=1000.0, started_at=50.0)


def test_calls_run_in_order_and_each_has_its_own_deadline() -> None:
    state = batch()
    assert (state.deadline, state.done) == (60.0, False)
    state = state.returned('"one"', 54.0)
    assert (state.deadline, state.done, state.results) == (64.0, False, ('"one"',))
    state = state.returned('"two"', 55.0)
    assert (state.done, state.results) == (True, ('"one"', '"two"'))


def test_the_trace_tells_of_each_call_how_it_went() -> None:
    state = batch().returned("1", 54.0).failed("tool 'tool2' raised ValueError: no", 55.5)
    one = {"tool_call_id": "c00000001", "tool_name": "tool1", "arguments": {"n": 1}, "iteration": 3}
    two = {"tool_call_id": "c00000002", "tool_name": "tool2", "arguments": {"n": 2}, "iteration": 3}
    assert state.trace == (
        {**one, "started_at": 1050.0, "duration_s": 4.0, "ok": True},
        {**two, "started_at": 1054.0, "duration_s": 1.5, "ok": False, "error": "tool 'tool2' raised ValueError: no"},
    )
    assert state.results == ("1",)


def test_a_timeout_names_the_call_under_way_and_the_limit() -> None:
    assert batch().timeout_text() == "tool 'tool1' did not return within tool_timeout_s 10 s"
    assert "'tool2'" in batch().returned("1", 54.0).timeout_text()
