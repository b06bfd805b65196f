"""One request through every path, sans-IO, with literal times; and through random ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from llama_worker.bios import STATUS_OPEN
from llama_worker.config import WorkerConfig
from llama_worker.messages import (
    Abandon,
    Begin,
    BiosWritten,
    CallEnded,
    CancelRequest,
    CloseStream,
    DropTool,
    OpenStream,
    RequestEnded,
    RequestMessage,
    RunBios,
    RunTool,
    SignalEmitted,
    StreamClosed,
    StreamEvents,
    StreamOpened,
    Tick,
    ToolsRefused,
)
from llama_worker.profiles import LoopDetector
from llama_worker.request.body import request_body
from llama_worker.request.output import read_output
from llama_worker.request.state import Effects, Request
from llama_worker.request.submission import Submission
from llama_worker.request.table import RequestRecord
from llama_worker.request.turn import Turn, TurnId
from llama_worker.runtime.host_code import write_bios
from llama_worker.stream.events import (
    Done,
    Finish,
    PromptProgress,
    ReasoningDelta,
    RoleOnly,
    ServerError,
    StreamEvent,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from llama_worker.stream.failure import StreamFailure
from llama_worker.types import (
    BiosContext,
    BiosText,
    RequestFailReason,
    RequestFinishReason,
    RequestState,
    ToolDef,
)

E = TypeVar("E")
LINE = f"{'y' * 40}\n"
UNIX = 1000.0  # what makes Unix seconds of the clock here
ADD: ToolDef = {"type": "function", "function": {"name": "add"}}
SIGNAL: ToolDef = {"type": "function", "function": {"name": "signal"}}
FIRST, SECOND = (7, 1), (7, 2)  # streams and tool batches of request 7
REFUSED = StreamFailure(
    reason=RequestFailReason.HTTP_ERROR, detail="HTTP 500: tools param requires --jinja flag", http_status=500
)


class Runner:
    def run_tool(self, *, name: str, arguments: dict[str, Any], request_id: int, job_name: str) -> Any:
        raise AssertionError("nothing here runs a tool")


def config(**changed: Any) -> WorkerConfig:
    given: dict[str, Any] = {"name": "w", "host": "127.0.0.1", "port": 9001, "server_cmd": ("llama-server",)}
    return WorkerConfig(**(given | changed))


def with_tools(**changed: Any) -> WorkerConfig:
    return config(**({"normal_tools": [ADD], "exit_tools": [SIGNAL], "tool_runner": Runner()} | changed))


class Nobody:
    """A mailbox that nothing is told to here."""

    def tell(self, message: object) -> bool:
        raise AssertionError(f"the machine itself tells nobody: {message}")


class Reply:
    """Of a cancel; the WorkerActor answers it."""

    def answer(self, value: bool) -> None:
        raise AssertionError("not the request's to answer")

    def done(self) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        raise AssertionError("not the request's to answer") from error


class NoStream:
    """A stream that the machine has no business with: the RequestActor asks it."""

    def flush(self) -> bool:
        raise AssertionError("not the machine's to ask")

    def hurry(self) -> None:
        raise AssertionError("not the machine's to ask")


NO_STREAM = NoStream()


class Driven(Request):
    """A request with a method for each thing that it may hear; its BIOS is written on the spot."""

    def begin(self, now: float) -> Effects:
        return self._prompted_at_once(super().begin(now), now)

    def hears(self, message: RequestMessage, at: float) -> Effects:
        return self._prompted_at_once(self.step(message, at), at)

    def opened(self, turn_id: TurnId, at: float) -> Effects:
        return self.hears(StreamOpened(turn_id=turn_id, at=at, stream=NO_STREAM), at)

    def keepalive(self, turn_id: TurnId, at: float) -> Effects:
        return self.hears(StreamEvents(turn_id=turn_id, events=(), at=at), at)

    def closed(self, turn_id: TurnId, failure: StreamFailure | None, at: float) -> Effects:
        return self.hears(StreamClosed(turn_id=turn_id, failure=failure, at=at), at)

    def call_ended(self, turn_id: TurnId, *, ok: bool, text: str, at: float) -> Effects:
        return self.hears(CallEnded(turn_id=turn_id, ok=ok, text=text, at=at), at)

    def cancel(self, at: float) -> Effects:
        return self.hears(CancelRequest(request_id=self.request_id, reply=Reply()), at)

    def abandon(self, reason: RequestFailReason, detail: str, at: float) -> Effects:
        return self.hears(Abandon(request_id=self.request_id, reason=reason, detail=detail), at)

    def tick(self, at: float) -> Effects:
        return self.hears(Tick(), at)

    def _prompted_at_once(self, effects: Effects, at: float) -> Effects:
        match effects:
            case [*before, RunBios() as order]:
                return [*before, *self.step(write_bios(order, self._config, UNIX + at), at)]
        return effects


def made(of: WorkerConfig | None = None, *, params: dict[str, Any] | None = None, **changed: Any) -> Driven:
    return Driven(**arguments(of, params=params, **changed))


def arguments(of: WorkerConfig | None = None, *, params: dict[str, Any] | None = None, **changed: Any) -> Any:
    """Of a Request."""
    submission = Submission(job_name="j", system_prompt="Be terse.", user_prompt="Hi", params=params or {}, messages=())
    told: dict[str, Any] = {"request_id": 7, "submission": submission, "prompted": False, "opens_thinking": False}
    order = Begin(transport=Nobody(), tools=Nobody(), **(told | {k: v for k, v in changed.items() if k in told}))
    given = {"order": order, "config": of or config(), "unix_offset": UNIX, "reply_to": Nobody(), "now": 100.0}
    return given | {k: v for k, v in changed.items() if k not in told}


def begun(of: WorkerConfig | None = None, **changed: Any) -> Driven:
    request = made(of, **changed)
    only(OpenStream, request.begin(100.0))
    return request


def only(kind: type[E], effects: Effects) -> E:
    (effect,) = effects
    assert isinstance(effect, kind)
    return effect


def hear(request: Driven, *events: StreamEvent, at: float = 101.0, stream: TurnId = FIRST) -> Effects:
    return request.hears(StreamEvents(turn_id=stream, events=events, at=at), at)


def ended(effects: Effects, *others: object) -> RequestRecord:
    """The record, where the effects are those others and the end."""
    *before, last = effects
    assert isinstance(last, RequestEnded)
    assert [effect for effect in before if not isinstance(effect, SignalEmitted)] == list(others)
    return last.record


def failed(effects: Effects, reason: str, *others: object) -> RequestRecord:
    record = ended(effects, *others)
    result = record.result
    assert (result["state"], result["finish_reason"]) == (RequestState.FAILED, RequestFinishReason.FAILED)
    assert result["fail_reason"] == record.status["fail_reason"] == reason
    assert result["fail_detail"] == record.status["fail_detail"]
    return record


def not_run(record: RequestRecord) -> list[tuple[str, object, str]]:
    """Name, arguments and reason of the calls of the trace, none of which was run."""
    trace = record.result["tool_trace"]
    assert [(entry["ok"], entry["duration_s"]) for entry in trace] == [(False, 0.0)] * len(trace)
    return [(entry["tool_name"], entry["arguments"], entry["error"].removeprefix("not run: ")) for entry in trace]


def call(name: str, arguments: str = "{}", index: int = 0) -> ToolCallDelta:
    return ToolCallDelta(index, f"id{index}", name, arguments)


def in_tools(of: WorkerConfig | None = None) -> Driven:
    request = begun(of or with_tools())
    hear(request, TextDelta("Let me add."), call("add", '{"a": 1}'), Usage(10, 5, 2), Finish("tool_calls"))
    effects = hear(request, Done(), at=102.0)
    assert [type(effect) for effect in effects] == [CloseStream, RunTool]
    return request


def returned(request: Driven, result: str, at: float = 103.0) -> Effects:
    """The call under way of the first turn's batch has returned."""
    return request.call_ended(FIRST, ok=True, text=result, at=at)


CLOSE = CloseStream(turn_id=FIRST)

# ---------------------------------------------------------------- to completion


def test_a_stream_to_its_completion() -> None:
    request = made()
    opened = only(OpenStream, request.begin(100.0))
    assert opened.turn_id == FIRST
    assert [message["role"] for message in opened.body["messages"]] == ["system", "user"]
    assert request.phase == "waiting"
    assert request.opened(FIRST, 101.0) == []
    assert request.phase == "prefill"
    assert hear(request, RoleOnly(), PromptProgress(5, 10, 2), at=102.0) == []
    assert request.phase == "prefill"
    assert hear(request, ReasoningDelta("hm"), at=103.0) == []
    assert request.phase == "generating"
    assert hear(request, TextDelta("Hel"), TextDelta("lo"), at=104.0) == []
    assert hear(request, Finish("stop"), at=105.0) == []
    assert hear(request, Usage(10, 4, 2), at=105.1) == []
    assert request.deadline == 107.0
    record = ended(hear(request, Done(), at=105.2), CLOSE)
    assert record.result == {
        "ok": True,
        "request_id": 7,
        "job_name": "j",
        "state": "completed",
        "finish_reason": "stop",
        "text": "Hello",
        "reasoning": "hm",
        "signals": [],
        "tool_trace": [],
        "usage": {"prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 2},
        "timings": {
            "ttft_s": pytest.approx(3.0),
            "total_s": pytest.approx(5.2),
            "tokens_per_second": pytest.approx(2.0),
        },
    }
    assert (record.ended_at, record.http_status) == (105.2, None)
    assert request.phase == record.status["phase"] == "done"


def test_what_a_status_says_on_the_way() -> None:
    request = begun(with_tools())
    request.opened(FIRST, 101.0)
    hear(request, PromptProgress(5, 10, 2), at=102.0)
    hear(request, TextDelta("x" * 300), at=103.0)
    request.keepalive(FIRST, 104.0)  # a keepalive
    request.saw_liveness(103.5)
    assert request.status() == {
        "ok": True,
        "request_id": 7,
        "job_name": "j",
        "state": "running",
        "phase": "generating",
        "created_at": 1100.0,
        "dispatched_at": 1100.0,
        "first_token_at": 1103.0,
        "last_stream_byte_at": 1104.0,
        "last_liveness_at": 1103.5,
        "last_progress_at": 1103.5,
        "output_chars": 300,
        "reasoning_chars": 0,
        "tool_iters_remaining": 8,
        "tool_calls_count": 0,
        "signals": [],
        "tokens_received": 1,
        "prompt_progress": {"processed": 5, "total": 10, "cached": 2},
        "tail": "x" * 200,
    }
    progress = request.progress()
    assert (progress.headers_at, progress.last_data_at, progress.last_stream_byte_at) == (101.0, 103.0, 104.0)


def test_the_terminal_status_says_how_it_ended() -> None:
    request = begun()
    hear(request, TextDelta("a"), at=101.0)
    status = ended(request.cancel(103.0), CLOSE).status
    assert (status["state"], status["phase"], status["completed_at"]) == ("canceled", "done", 1103.0)
    assert (status["fail_reason"], status["tail"], status["output_chars"]) == ("canceled", "a", 1)


def test_the_servers_own_count_and_speed_win() -> None:
    request = begun()
    timings = Timings(cache_n=1, prompt_n=2, predicted_n=9, predicted_per_second=40.0)
    hear(request, TextDelta("a"), Finish("stop"), timings)
    assert request.status()["tokens_received"] == 9
    record = ended(hear(request, Done()), CLOSE)
    assert record.result["timings"]["tokens_per_second"] == 40.0
    assert record.status["tokens_received"] == 9
    assert "usage" not in record.result


def test_output_is_read_from_any_offset() -> None:
    request = begun()
    hear(request, ReasoningDelta("hmm"), TextDelta("Hello"))
    assert request.read_output(0, 0) == {
        "ok": True, "text": "Hello", "reasoning": "hmm", "text_offset": 5, "reasoning_offset": 3, "done": False,
    }  # fmt: skip
    assert request.read_output(3, 3)["text"] == "lo"
    assert request.read_output(5, 3)["text"] == request.read_output(5, 3)["reasoning"] == ""


def test_an_offset_beyond_the_end_stays() -> None:
    chunk = read_output("abc", "", 9, 0, done=True)
    assert (chunk["text"], chunk["text_offset"], chunk["done"]) == ("", 9, True)


# ---------------------------------------------------------------- the end of a stream


@pytest.mark.parametrize("at", [105.0, 106.9])
def test_after_a_finish_reason_the_rest_is_waited_for(at: float) -> None:
    request = opened(begun())
    hear(request, TextDelta("a"), Finish("stop"), at=105.0)
    assert request.tick(at) == []
    assert request.phase == "generating"


def test_two_seconds_after_a_finish_reason_it_is_complete() -> None:
    request = begun()
    hear(request, TextDelta("a"), Finish("stop"), at=105.0)
    assert ended(request.tick(107.0), CLOSE).result["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "failure",
    [None, StreamFailure(reason=RequestFailReason.STREAM_DISCONNECTED, detail="reset")],
)
def test_after_a_finish_reason_the_streams_end_is_regular_however_it_came(failure: StreamFailure | None) -> None:
    request = begun()
    hear(request, TextDelta("a"), Finish("stop"), at=105.0)
    assert ended(request.closed(FIRST, failure, 105.1), CLOSE).result["state"] == "completed"


def test_an_error_record_after_a_finish_reason_fails_it() -> None:
    request = begun()
    hear(request, TextDelta("a"), Finish("stop"), at=105.0)
    error = ServerError("boom", 500, "server_error")
    record = failed(hear(request, error, at=105.5), "server_error", CLOSE)
    assert (record.result["text"], record.http_status) == ("a", 500)
    assert record.result["fail_detail"] == "boom (server_error), code 500"


@pytest.mark.parametrize("context", [None, {"n_prompt_tokens": 5000, "n_ctx": 4096}])
def test_a_prompt_that_does_not_fit_has_a_reason_of_its_own(context: Any) -> None:
    by_record = hear(begun(), ServerError("no room", 400, "exceed_context_size_error", context))
    refusal = StreamFailure(
        reason=RequestFailReason.CONTEXT_EXCEEDED, detail="HTTP 400: no room", http_status=400, context=context
    )
    by_status = begun().closed(FIRST, refusal, 105.0)
    for effects in (by_record, by_status):
        record = failed(effects, "context_exceeded", CLOSE)
        assert record.result.get("context") == context
        assert "no room" in record.result["fail_detail"]


def test_an_error_record_ends_it_whatever_follows() -> None:
    request = begun()
    record = failed(hear(request, TextDelta("a"), ServerError("boom", None, None), Done()), "server_error", CLOSE)
    assert (record.result["text"], record.result["fail_detail"]) == ("a", "boom")


def test_done_without_a_finish_reason_is_an_end_too() -> None:
    request = begun()
    assert ended(hear(request, TextDelta("a"), Done()), CLOSE).result["finish_reason"] == "stop"


def test_a_stream_that_just_ends_is_disconnected_after_a_while() -> None:
    request = begun()
    hear(request, TextDelta("a"))
    assert request.closed(FIRST, None, 105.0) == []
    assert request.deadline == 105.2
    assert request.tick(105.19) == []
    record = failed(request.tick(105.2), "stream_disconnected", CLOSE)
    assert record.result["text"] == "a"
    assert "without a finish reason" in record.result["fail_detail"]


@pytest.mark.parametrize("reason", [RequestFailReason.STREAM_DISCONNECTED, RequestFailReason.CONNECT_FAILED])
def test_news_of_the_servers_death_explains_a_broken_connection(reason: RequestFailReason) -> None:
    request = begun()
    request.closed(FIRST, StreamFailure(reason=reason, detail="reset"), 105.0)
    failed(request.abandon(RequestFailReason.SERVER_DIED, "exited with -9", 105.2), "server_died", CLOSE)


@pytest.mark.parametrize("reason", [RequestFailReason.STREAM_DISCONNECTED, RequestFailReason.CONNECT_FAILED])
def test_without_such_news_it_is_what_it_was(reason: RequestFailReason) -> None:
    request = begun()
    request.closed(FIRST, StreamFailure(reason=reason, detail="reset"), 105.0)
    assert failed(request.tick(105.31), reason, CLOSE).result["fail_detail"] == "reset"


@pytest.mark.parametrize(
    "reason", [RequestFailReason.PROTOCOL_ERROR, RequestFailReason.HTTP_ERROR, RequestFailReason.UNKNOWN_ERROR]
)
def test_other_failures_of_a_stream_end_it_at_once(reason: RequestFailReason) -> None:
    request = begun()
    hear(request, TextDelta("a"))
    failure = StreamFailure(reason=reason, detail="HTTP 503: busy", http_status=503)
    record = failed(request.closed(FIRST, failure, 105.0), reason, CLOSE)
    assert (record.result["text"], record.http_status) == ("a", 503)
    assert record.result["fail_detail"] == "HTTP 503: busy"


def test_what_was_held_back_is_output_after_any_ending() -> None:
    request = begun(with_tools())
    hear(request, TextDelta("answer <tool_ca"))
    assert request.read_output(0, 0)["text"] == "answer "
    request.closed(FIRST, None, 105.0)
    assert failed(request.tick(106.0), "stream_disconnected", CLOSE).result["text"] == "answer <tool_ca"


def test_the_model_that_runs_into_the_limit_completes_with_max_tokens() -> None:
    request = begun()
    record = ended(hear(request, TextDelta("a"), Finish("length"), Done()), CLOSE)
    assert (record.result["state"], record.result["finish_reason"]) == ("completed", "max_tokens")


# ---------------------------------------------------------------- prompts


def raising(ctx: BiosContext) -> str:
    raise LookupError("no prompt today")


def test_a_provider_that_raises_fails_the_request_before_anything_is_sent() -> None:
    record = failed(made(config(bios_provider=raising)).begin(100.0), "prompt_error")
    assert "LookupError: no prompt today" in record.result["fail_detail"]


def test_a_provider_that_raises_at_a_continuation_keeps_what_came() -> None:
    def once(ctx: BiosContext) -> str:
        return raising(ctx) if ctx.tool_iters_remaining < 8 else "bios"

    request = in_tools(with_tools(bios_provider=once))
    record = failed(returned(request, "1"), "prompt_error")
    assert record.result["text"] == "Let me add."


def test_the_provider_is_told_the_time_and_the_budget_of_the_turn() -> None:
    seen: list[BiosContext] = []

    def remembering(ctx: BiosContext) -> BiosText:
        seen.append(ctx)
        return BiosText("stable", f"left: {ctx.tool_iters_remaining}")

    request = in_tools(with_tools(bios_provider=remembering, timezone_name="Europe/Vienna"))
    returned(request, "1", at=160.0)
    assert [context.tool_iters_remaining for context in seen] == [8, 7]
    assert [context.now.timestamp() for context in seen] == [1100.0, 1160.0]
    assert (seen[0].worker_name, seen[0].timezone_name, seen[0].tool_call_mode) == ("w", "Europe/Vienna", "native")
    assert seen[0].now.utcoffset() is not None
    assert (seen[0].normal_tools, seen[0].exit_tools) == ((ADD,), (SIGNAL,))


# ---------------------------------------------------------------- tools


def test_a_turn_with_calls_goes_to_the_tools() -> None:
    request = begun(with_tools())
    hear(request, ReasoningDelta("hm"), TextDelta("Let me add."), call("add", '{"a": 1}'), call("add", "", 1))
    hear(request, call("signal", '{"s": 1}', 2), Finish("tool_calls"))
    closing, start = hear(request, Done(), at=102.0)
    assert (closing, request.deadline) == (CLOSE, 112.0)
    assert isinstance(start, RunTool)
    assert start.turn_id == FIRST
    assert (start.call.id, start.call.name, start.call.arguments) == ("c00000001", "add", {"a": 1})
    status = request.status()
    assert (status["state"], status["phase"]) == ("tool_running", "tool")
    assert (status["tool_iters_remaining"], status["tool_calls_count"]) == (7, 2)
    assert status["signals"] == [{"tool_name": "signal", "arguments": {"s": 1}, "emitted_at": 1101.0}]


def test_a_continuation_repeats_the_first_turn_to_the_letter_and_holds_only_normal_calls() -> None:
    request = made(with_tools())
    before = only(OpenStream, request.begin(100.0)).body
    hear(request, ReasoningDelta("hm"), TextDelta("Adding."), call("signal", "{}"), call("add", '{"a": 1}', 1))
    hear(request, Finish("tool_calls"), Done(), at=102.0)
    opened = only(OpenStream, returned(request, "3"))
    assert opened.turn_id == SECOND
    sent = opened.body["messages"]
    assert sent[:2] == before["messages"]
    assistant, answer = sent[2:]
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert assistant == {
        "role": "assistant",
        "content": "Adding.",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c00000001", "type": "function", "function": function}],
    }
    assert (answer["role"], answer["tool_call_id"]) == ("tool", "c00000001")
    assert answer["content"].startswith(f"3\n\n{STATUS_OPEN}")
    assert opened.body["tools"] == before["tools"] == [ADD, SIGNAL]
    assert request.phase == "waiting"


def test_text_and_reasoning_are_those_of_every_turn_with_nothing_inserted() -> None:
    request = in_tools()
    returned(request, "3")
    hear(request, ReasoningDelta("ok"), TextDelta("It is 3."), Usage(20, 6, None), Finish("stop"), stream=SECOND)
    record = ended(hear(request, Done(), stream=SECOND, at=104.0), CloseStream(turn_id=SECOND))
    assert (record.result["text"], record.result["reasoning"]) == ("Let me add.It is 3.", "ok")
    assert record.result["usage"] == {"prompt_tokens": 30, "completion_tokens": 11, "cached_tokens": 2}
    assert record.status["tokens_received"] == 11
    assert record.result["timings"]["ttft_s"] == pytest.approx(1.0)


def test_a_failed_tool_fails_the_request_which_keeps_output_and_trace() -> None:
    request = in_tools()
    record = failed(request.call_ended(FIRST, ok=False, text="tool 'add' raised: no", at=103.0), "tool_execution_error")
    assert (record.result["text"], record.result["fail_detail"]) == ("Let me add.", "tool 'add' raised: no")
    assert record.result["tool_trace"] == [
        {
            "tool_call_id": "c00000001",
            "tool_name": "add",
            "arguments": {"a": 1},
            "iteration": 1,
            "started_at": 1102.0,
            "duration_s": 1.0,
            "ok": False,
            "error": "tool 'add' raised: no",
        }
    ]
    assert record.result["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 2}
    assert record.status["tokens_received"] == 5


def test_results_of_another_batch_change_nothing() -> None:
    request = in_tools()
    for ok in (True, False):
        assert request.call_ended(SECOND, ok=ok, text="1", at=103.0) == []
    assert request.phase == "tool"


def test_the_next_turn_begins_once_every_call_has_returned() -> None:
    request = begun(with_tools())
    hear(request, call("add"), call("add", "{}", 1), Finish("tool_calls"), Done(), at=102.0)
    following = only(RunTool, returned(request, "one", at=103.0))
    assert (following.turn_id, following.call.id) == (FIRST, "c00000002")
    assert request.deadline == 113.0
    assert request.phase == "tool"
    sent = only(OpenStream, returned(request, "two", at=105.0)).body["messages"]
    assert [message["content"].partition("\n")[0] for message in sent[-2:]] == ["one", "two"]
    record = ended(request.cancel(106.0), CloseStream(turn_id=SECOND))
    assert [(entry["started_at"], entry["duration_s"]) for entry in record.result["tool_trace"]] == [
        (1102.0, 1.0),
        (1103.0, 2.0),
    ]


def test_a_call_that_takes_too_long_fails_the_request_and_its_batch_is_forgotten() -> None:
    request = begun(with_tools())
    hear(request, call("add"), call("add", "{}", 1), call("add", "{}", 2), Finish("tool_calls"), Done(), at=102.0)
    returned(request, "one", at=111.9)
    assert request.tick(112.0) == []
    assert request.tick(121.8) == []
    record = failed(request.tick(121.9), "tool_execution_error", DropTool(turn_id=FIRST))
    text = "tool 'add' did not return within tool_timeout_s 10 s"
    assert record.result["fail_detail"] == text
    assert [(entry["ok"], entry.get("error")) for entry in record.result["tool_trace"]] == [(True, None), (False, text)]
    assert returned(request, "too late", at=122.0) == []


CUT_SHORT: dict[str, Callable[[Driven], Effects]] = {
    "canceled": lambda r: r.cancel(105.0),
    "worker_stopped": lambda r: r.abandon(RequestFailReason.WORKER_STOPPED, "stop", 105.0),
    "absolute_timeout": lambda r: r.abandon(RequestFailReason.ABSOLUTE_TIMEOUT, "too long", 105.0),
    "worker_restarted": lambda r: r.abandon(RequestFailReason.WORKER_RESTARTED, "restart", 105.0),
    "server_died": lambda r: r.abandon(RequestFailReason.SERVER_DIED, "died", 105.0),
    "unknown_error": lambda r: r.break_off(RequestFailReason.UNKNOWN_ERROR, "a bug", 105.0),
}


@pytest.mark.parametrize(("reason", "ending"), CUT_SHORT.items(), ids=CUT_SHORT)
def test_calls_that_had_begun_are_in_the_trace_whatever_ends_the_request(
    reason: str, ending: Callable[[Driven], Effects]
) -> None:
    request = begun(with_tools())
    calls = [call("add", f'{{"n": {n}}}', n) for n in range(3)]
    hear(request, *calls, Finish("tool_calls"), Done(), at=102.0)
    returned(request, "one", at=103.0)
    trace = ended(ending(request), DropTool(turn_id=FIRST)).result["tool_trace"]
    assert [(entry["arguments"], entry["ok"], entry.get("error")) for entry in trace] == [
        ({"n": 0}, True, None),
        ({"n": 1}, False, f"given up while it ran: {reason}"),
    ]
    assert [(entry["started_at"], entry["duration_s"]) for entry in trace] == [(1102.0, 1.0), (1103.0, 2.0)]


def test_without_iterations_left_a_call_fails_the_request() -> None:
    request = begun(with_tools(max_tool_iterations=0))
    record = failed(
        hear(request, TextDelta("a"), call("add"), Finish("tool_calls"), Done()), "tool_execution_error", CLOSE
    )
    assert "tool iteration budget exhausted" in record.result["fail_detail"]
    assert (record.result["text"], not_run(record)) == ("a", [("add", "{}", "tool_execution_error")])


def test_the_budget_is_one_a_turn_not_one_a_call() -> None:
    request = begun(with_tools(max_tool_iterations=1))
    hear(request, call("add"), call("add", "{}", 1), call("add", "{}", 2), Finish("tool_calls"), Done())
    for result in ("1", "2", "3"):
        returned(request, result)
    assert request.status()["tool_iters_remaining"] == 0
    effects = hear(request, call("add"), Finish("tool_calls"), Done(), stream=SECOND)
    failed(effects, "tool_execution_error", CloseStream(turn_id=SECOND))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(call("subtract"), "subtract"), (call("add", "[1]"), "not a JSON object"), (call("add", '{"a": '), "add")],
)
def test_an_unknown_name_or_bad_arguments_fail_the_request_and_exit_calls_still_count(
    wrong: ToolCallDelta, says: str
) -> None:
    request = begun(with_tools())
    hear(request, TextDelta("a"), wrong, call("signal", '{"s": 1}', 1))
    record = failed(hear(request, Finish("tool_calls"), Done()), "tool_parse_error", CLOSE)
    assert says in record.result["fail_detail"]
    assert [signal["arguments"] for signal in record.result["signals"]] == [{"s": 1}]
    assert record.result["text"] == "a"


def test_a_call_cut_off_by_the_limit_is_not_run() -> None:
    request = begun(with_tools())
    hear(request, TextDelta("a"), call("signal", '{"s": 1}'), call("add", '{"a": ', 1))
    record = ended(hear(request, Finish("length"), Done()), CLOSE)
    assert (record.result["finish_reason"], not_run(record)) == ("max_tokens", [("add", '{"a": ', "max_tokens")])
    assert len(record.result["signals"]) == 1


def test_with_exit_calls_alone_the_request_completes_as_the_model_left_it() -> None:
    request = begun(with_tools())
    record = ended(hear(request, TextDelta("bye"), call("signal"), Finish("tool_calls"), Done(), at=102.0), CLOSE)
    assert (record.result["state"], record.result["text"]) == ("completed", "bye")
    assert record.result["signals"] == [{"tool_name": "signal", "arguments": {}, "emitted_at": 1102.0}]
    assert (record.status["tool_calls_count"], record.status["tool_iters_remaining"]) == (0, 8)


def test_a_malformed_exit_call_is_recorded_with_its_text() -> None:
    request = begun(with_tools())
    record = ended(hear(request, call("signal", '{"s":'), Finish("stop"), Done()), CLOSE)
    (signal,) = record.result["signals"]
    assert (signal["arguments"], signal["malformed"]) == ({}, '{"s":')


def emitted(effects: Effects) -> list[Any]:
    return [effect.signal["arguments"] for effect in effects if isinstance(effect, SignalEmitted)]


def test_an_exit_call_is_recorded_once_it_is_complete_in_the_stream() -> None:
    request = begun(with_tools())
    name = ToolCallDelta(index=0, call_id="x", name="signal", arguments='{"s": {"t": 1')
    assert emitted(hear(request, TextDelta("a"), name, at=101.0)) == []
    assert request.status()["signals"] == []
    more = ToolCallDelta(index=0, call_id=None, name=None, arguments="}")
    assert emitted(hear(request, more, at=102.0)) == []  # of the inner object
    assert emitted(hear(request, more, at=103.0)) == [{"s": {"t": 1}}]
    (signal,) = request.status()["signals"]
    assert (signal["arguments"], signal["emitted_at"]) == ({"s": {"t": 1}}, 103.0 + UNIX)
    effects = hear(request, TextDelta("b"), Finish("stop"), Done(), at=110.0)
    assert emitted(effects) == []
    assert len(ended(effects, CLOSE).result["signals"]) == 1


def test_in_prompted_mode_an_exit_call_is_recorded_with_its_closing_tag() -> None:
    request = begun(with_tools(), prompted=True)
    written = '<tool_call>{"name": "signal", "arguments": {"s": 1}}</tool_call>'
    assert emitted(hear(request, TextDelta(written[:-1]))) == []
    assert emitted(hear(request, TextDelta(written[-1:]))) == [{"s": 1}]
    effects = hear(request, TextDelta(written), TextDelta("b"), Finish("stop"), Done())
    assert emitted(effects) == [{"s": 1}]
    assert [signal["arguments"] for signal in ended(effects, CLOSE).result["signals"]] == [{"s": 1}, {"s": 1}]


def test_in_native_mode_an_exit_call_in_the_text_is_recorded_at_the_end_of_its_turn() -> None:
    request = begun(with_tools())
    written = '<tool_call>{"name": "signal", "arguments": {"s": 1}}</tool_call>'
    assert emitted(hear(request, TextDelta(written))) == []
    assert emitted(hear(request, Finish("stop"), Done())) == [{"s": 1}]


def test_exit_calls_beside_a_normal_one_are_told_apart_early() -> None:
    request = begun(with_tools())
    effects = hear(request, call("signal", '{"s": 1}'), call("add", '{"a": 1}', index=1))
    assert emitted(effects) == [{"s": 1}]
    run = [e for e in hear(request, Finish("tool_calls"), Done()) if isinstance(e, RunTool)]
    assert [each.call.name for each in run] == ["add"]


ENDINGS: dict[str, Callable[[Driven], Effects]] = {
    "completed": lambda r: hear(r, Finish("tool_calls"), Done()),
    "max_tokens": lambda r: hear(r, Finish("length"), Done()),
    "cancelled": lambda r: r.cancel(105.0),
    "cancelled settling": lambda r: [*hear(r, Finish("stop")), *r.cancel(105.0)],
    "abandoned": lambda r: r.abandon(RequestFailReason.WORKER_RESTARTED, "restart", 105.0),
    "abandoned settling": lambda r: [
        *hear(r, Finish("stop")),
        *r.abandon(RequestFailReason.WORKER_STOPPED, "stop", 105.0),
    ],
    "overflow": lambda r: hear(r, ServerError("no room", 400, "exceed_context_size_error")),
    "error record": lambda r: hear(r, ServerError("boom", 500, None)),
    "error record settling": lambda r: [*hear(r, Finish("stop")), *hear(r, ServerError("boom", 500, None))],
    "disconnected": lambda r: [*r.closed(FIRST, None, 105.0), *r.tick(106.0)],
    "protocol error": lambda r: r.closed(
        FIRST, StreamFailure(reason=RequestFailReason.PROTOCOL_ERROR, detail="garbage"), 105.0
    ),
    "loop": lambda r: hear(r, TextDelta(LINE * 20)),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("prompted", [False, True])
def test_exit_calls_and_text_are_kept_in_every_ending(ending: Callable[[Driven], Effects], prompted: bool) -> None:
    request = begun(with_tools(), prompted=prompted)
    text = TextDelta("kept\n")
    if prompted:
        hear(request, text, TextDelta('<tool_call>{"name": "signal", "arguments": {"s": 1}}</tool_call>'))
    else:
        hear(request, text, call("signal", '{"s": 1}'))
    record = ended(ending(request), CLOSE)
    assert [signal["arguments"] for signal in record.result["signals"]] == [{"s": 1}]
    assert record.result["signals"] == record.status["signals"]
    assert record.result["text"].startswith("kept\n")
    assert "tool_call" not in record.result["text"]


def test_a_servers_report_of_a_malformed_call_is_a_parse_error_and_accuses_no_server() -> None:
    message = "The model produced output that does not match the expected peg-native format"
    request = begun(with_tools())
    record = failed(hear(request, TextDelta("a"), ServerError(message, 500, None)), "tool_parse_error", CLOSE)
    assert (record.result["text"], record.http_status) == ("a", None)
    plain = begun()
    failed(hear(plain, ServerError(message, 500, None)), "server_error", CLOSE)
    refusal = StreamFailure(reason=RequestFailReason.HTTP_ERROR, detail=f"HTTP 500: {message}", http_status=500)
    record = failed(begun(with_tools()).closed(FIRST, refusal, 101.0), "tool_parse_error", CLOSE)
    assert record.http_status is None
    failed(begun().closed(FIRST, refusal, 101.0), "http_error", CLOSE)


# ---------------------------------------------------------------- refused tools


def test_a_request_whose_tools_are_refused_is_sent_again_prompted() -> None:
    request = made(with_tools())
    native = only(OpenStream, request.begin(100.0)).body
    assert native["tools"] == [ADD, SIGNAL]
    assert "<tool_call>" not in native["messages"][0]["content"]
    report, again = request.closed(FIRST, REFUSED, 101.0)
    assert report == ToolsRefused(detail=REFUSED.detail)
    assert isinstance(again, OpenStream)
    assert again.turn_id == SECOND
    assert "tools" not in again.body
    assert "<tool_call>" in again.body["messages"][0]["content"]
    assert again.body["messages"][0]["content"].endswith("Be terse.")
    assert request.phase == "waiting"
    assert hear(request, TextDelta("late"), stream=FIRST) == []
    record = ended(hear(request, TextDelta("a"), Finish("stop"), Done(), stream=SECOND), CloseStream(turn_id=SECOND))
    assert record.result["text"] == "a"


def test_a_second_refusal_is_an_error() -> None:
    request = begun(with_tools())
    request.closed(FIRST, REFUSED, 101.0)
    failed(request.closed(SECOND, REFUSED, 102.0), "http_error", CloseStream(turn_id=SECOND))


@pytest.mark.parametrize("of", [with_tools(tool_call_mode="native"), config()])
def test_without_auto_or_without_tools_a_refusal_is_an_error(of: WorkerConfig) -> None:
    record = failed(begun(of).closed(FIRST, REFUSED, 101.0), "http_error", CLOSE)
    assert record.http_status == 500


def test_in_prompted_mode_calls_and_results_travel_as_text() -> None:
    request = begun(with_tools(), prompted=True)
    tagged = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    hear(request, TextDelta("Adding. "), TextDelta(tagged[:15]), TextDelta(tagged[15:]), Finish("stop"))
    _, start = hear(request, Done())
    assert isinstance(start, RunTool)
    sent = only(OpenStream, returned(request, "3")).body
    assert sent["messages"][2] == {"role": "assistant", "content": f"Adding. {tagged}"}
    assert sent["messages"][3]["role"] == "user"
    assert "\n3\n</tool_response>" in sent["messages"][3]["content"]
    assert "tools" not in sent
    assert request.read_output(0, 0)["text"] == "Adding. "


def test_in_prompted_mode_a_malformed_call_fails_the_request_with_the_text_as_it_was() -> None:
    request = begun(with_tools(), prompted=True)
    text = 'Adding <tool_call>{"name": "add"}</tool_call> now'
    record = failed(hear(request, TextDelta(text), Finish("stop"), Done()), "tool_parse_error", CLOSE)
    assert record.result["text"] == text


# ---------------------------------------------------------------- a think that the template opened


NO_THINKING: list[dict[str, Any]] = [
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"enable_thinking": False},
    {"reasoning_budget": 0},
    {"thinking_budget_tokens": 0},
    {"reasoning_effort": "none"},
]


@pytest.mark.parametrize("place", ["params", "default_params"])
@pytest.mark.parametrize(
    ("params", "said", "reason", "reasoning", "text"),
    [
        ({}, "abc\n</think>\n\nAns", "stop", "abc", "Ans"),
        ({}, "The answer is 4.", "stop", "The answer is 4.", "The answer is 4."),  # the server parses reasoning itself
        ({}, "a <", "stop", "a <", "a <"),
        ({}, "abc", "length", "abc", ""),
        *((params, "Answer", "stop", "", "Answer") for params in NO_THINKING),
        *((params, "a</think>b", "stop", "", "a</think>b") for params in NO_THINKING),
        *((params, "<think>a</think>b", "stop", "a", "b") for params in NO_THINKING),
    ],
)
def test_what_follows_a_think_that_the_template_opened(
    place: str, params: dict[str, Any], said: str, reason: str, reasoning: str, text: str
) -> None:
    of = config(default_params=params if place == "default_params" else {})
    request = begun(of, params=params if place == "params" else {}, opens_thinking=True)
    hear(request, *(TextDelta(char) for char in said))
    result = ended(hear(request, Finish(reason), Done()), CLOSE).result
    assert (result["state"], result["reasoning"], result["text"]) == ("completed", reasoning, text)


def test_a_thought_whose_stream_broke_is_no_answer() -> None:
    request = begun(opens_thinking=True)
    hear(request, TextDelta("abc"))
    request.closed(FIRST, None, 105.0)
    result = failed(request.tick(106.0), "stream_disconnected", CLOSE).result
    assert (result["reasoning"], result["text"]) == ("abc", "")


@pytest.mark.parametrize(
    ("first", "second", "reasoning", "text", "sent_back"),
    [
        (TextDelta("a</think>b"), "c</think>d", "ac", "bd", ("a", "b")),
        (TextDelta("Let me see."), "a</think>b", "Let me see.a", "Let me see.b", (None, "Let me see.")),
        (ReasoningDelta("hm"), "Answer", "hm", "Answer", ("hm", "")),  # it parses reasoning itself, and is believed
    ],
)
def test_in_each_turn_the_template_opens_a_think_of_its_own(
    first: StreamEvent, second: str, reasoning: str, text: str, sent_back: tuple[str | None, str]
) -> None:
    request = begun(with_tools(), opens_thinking=True)
    hear(request, first, call("add"), Finish("tool_calls"), Done())
    assistant = only(OpenStream, returned(request, "3")).body["messages"][-2]
    assert (assistant.get("reasoning_content"), assistant["content"]) == sent_back
    effects = hear(request, TextDelta(second), Finish("stop"), Done(), stream=SECOND)
    result = ended(effects, CloseStream(turn_id=SECOND)).result
    assert (result["reasoning"], result["text"]) == (reasoning, text)


def test_a_tagged_call_in_an_answer_without_any_thinking_is_run() -> None:
    request = begun(with_tools(), opens_thinking=True, prompted=True)
    tagged = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert any(isinstance(effect, RunTool) for effect in hear(request, TextDelta(tagged), Finish("stop"), Done()))


# ---------------------------------------------------------------- cancel and abandon


def opened(request: Driven) -> Driven:
    request.opened(FIRST, 101.0)
    return request


def generating(request: Driven) -> Driven:
    hear(opened(request), TextDelta("a"), at=102.0)
    return request


def settling(request: Driven) -> Driven:
    hear(generating(request), Finish("stop"), at=103.0)
    return request


def broken(request: Driven) -> Driven:
    generating(request).closed(FIRST, None, 103.0)
    return request


IN_STREAM = {
    "waiting": lambda r: r,
    "prefill": opened,
    "generating": generating,
    "settling": settling,
    "broken": broken,
}


@pytest.mark.parametrize("phase", IN_STREAM.values(), ids=IN_STREAM)
def test_a_cancel_closes_the_connection_in_every_phase(phase: Callable[[Driven], Driven]) -> None:
    record = ended(phase(begun()).cancel(104.0), CLOSE)
    assert (record.result["state"], record.result["finish_reason"]) == ("canceled", "canceled")
    assert record.result["fail_reason"] == "canceled"
    assert record.result["text"] == ("a" if phase in (generating, settling, broken) else "")


def test_a_cancel_in_the_tools_forgets_them() -> None:
    record = ended(in_tools().cancel(104.0), DropTool(turn_id=FIRST))
    assert (record.result["state"], record.result["text"]) == ("canceled", "Let me add.")


def test_a_cancel_in_a_later_turn_closes_that_one() -> None:
    request = in_tools()
    returned(request, "3")
    ended(request.cancel(104.0), CloseStream(turn_id=SECOND))


@pytest.mark.parametrize("phase", [IN_STREAM[name] for name in ("waiting", "prefill", "generating", "broken")])
def test_who_is_abandoned_fails_with_the_reason_told(phase: Callable[[Driven], Driven]) -> None:
    request = phase(begun())
    record = failed(request.abandon(RequestFailReason.WORKER_RESTARTED, "stall", 103.2), "worker_restarted", CLOSE)
    assert record.result["fail_detail"] == "stall"


def test_who_is_abandoned_in_the_tools_forgets_them() -> None:
    effects = in_tools().abandon(RequestFailReason.WORKER_STOPPED, "stop", 104.0)
    failed(effects, "worker_stopped", DropTool(turn_id=FIRST))


def test_a_turn_that_had_said_its_finish_reason_still_counts() -> None:
    effects = settling(begun()).abandon(RequestFailReason.WORKER_STOPPED, "stop", 104.0)
    assert ended(effects, CLOSE).result["state"] == "completed"


def test_its_calls_are_not_begun_any_more() -> None:
    request = begun(with_tools())
    hear(request, TextDelta("a"), call("add"), Finish("tool_calls"))
    record = failed(request.abandon(RequestFailReason.WORKER_STOPPED, "stop", 104.0), "worker_stopped", CLOSE)
    assert record.result["text"] == "a"


# ---------------------------------------------------------------- the server's death


def dead(request: Driven, *, at: float = 104.0) -> Driven:
    """Told of its server's death."""
    assert request.abandon(RequestFailReason.SERVER_DIED, "signal 9", at) == []
    assert request.deadline == at + 2.0
    assert request.progress().concluding
    return request


@pytest.mark.parametrize("phase", [IN_STREAM[name] for name in ("waiting", "prefill", "generating")])
@pytest.mark.parametrize("failure", [None, StreamFailure(reason=RequestFailReason.STREAM_DISCONNECTED, detail="reset")])
def test_what_a_dead_server_had_sent_is_heard_out(
    phase: Callable[[Driven], Driven], failure: StreamFailure | None
) -> None:
    request = dead(phase(begun()))
    said = request.status()["output_chars"]
    assert hear(request, TextDelta("bc"), at=104.1) == []
    assert hear(request, TextDelta("d"), at=104.2) == []
    record = failed(request.closed(FIRST, failure, 104.3), "server_died", CLOSE)
    assert record.result["text"] == "a" * said + "bcd"
    assert record.result["fail_detail"] == "signal 9"


def test_a_dead_servers_connection_that_does_not_end_is_not_waited_for() -> None:
    request = dead(generating(begun()))
    hear(request, TextDelta("b"), at=105.9)
    assert request.tick(105.99) == []
    assert failed(request.tick(106.0), "server_died", CLOSE).result["text"] == "ab"


@pytest.mark.parametrize("last", [(Finish("stop"),), (Finish("stop"), Done())], ids=["closed", "done"])
def test_a_dead_server_that_had_said_its_finish_reason_had_answered(last: tuple[StreamEvent, ...]) -> None:
    request = dead(generating(begun()))
    effects = hear(request, TextDelta("b"), *last) or request.closed(FIRST, None, 104.3)
    assert ended(effects, CLOSE).result["state"] == "completed"


def test_usage_that_was_on_its_way_when_the_server_died_counts() -> None:
    request = dead(settling(begun()))
    assert hear(request, Usage(3, 4, None)) == []
    record = ended(request.closed(FIRST, None, 104.3), CLOSE)
    assert (record.result["state"], record.result["usage"]["completion_tokens"]) == ("completed", 4)


@pytest.mark.parametrize("said", [(), (Done(),)], ids=["closed", "done"])
def test_a_dead_servers_calls_are_not_begun(said: tuple[StreamEvent, ...]) -> None:
    request = dead(begun(with_tools()))
    effects = hear(request, TextDelta("a"), call("add"), Finish("tool_calls"), *said)
    failed(effects or request.closed(FIRST, None, 104.3), "server_died", CLOSE)


def test_a_death_in_the_tools_has_nothing_to_be_heard() -> None:
    failed(in_tools().abandon(RequestFailReason.SERVER_DIED, "x", 104.0), "server_died", DropTool(turn_id=FIRST))


def test_who_is_given_up_while_it_hears_a_dead_server_out_ends_at_once_by_its_death() -> None:
    request = dead(generating(begun()))
    failed(request.abandon(RequestFailReason.WORKER_STOPPED, "stop", 104.1), "server_died", CLOSE)


def test_a_cancel_while_a_dead_server_is_heard_out_is_a_cancel() -> None:
    assert ended(dead(generating(begun())).cancel(104.1), CLOSE).result["fail_reason"] == "canceled"


@pytest.mark.parametrize("phase", IN_STREAM.values(), ids=IN_STREAM)
def test_a_request_that_is_broken_off_keeps_what_was_shown_and_leaves_its_turn_alone(
    phase: Callable[[Driven], Driven], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_: Any, **__: Any) -> Any:
        raise IndexError("a bug")

    request = phase(begun())
    monkeypatch.setattr(Turn, "finish", raising)
    monkeypatch.setattr(Turn, "calls", raising)
    with pytest.raises(IndexError):
        request.abandon(RequestFailReason.UNKNOWN_ERROR, "IndexError: a bug", 104.0)
    record = failed(request.break_off(RequestFailReason.UNKNOWN_ERROR, "a bug", 104.0), "unknown_error", CLOSE)
    assert record.result["text"] == ("a" if phase in (generating, settling, broken) else "")
    assert request.break_off(RequestFailReason.UNKNOWN_ERROR, "a bug", 104.0) == []


# ---------------------------------------------------------------- calls that are not run


def test_calls_that_are_not_run_are_in_the_trace_as_the_model_wrote_them() -> None:
    request = begun(with_tools())
    hear(request, call("add", '{"a": 1}'), call("signal", "{}", 1), call("zap", "{", 2), Finish("tool_calls"))
    record = failed(hear(request, Done(), at=102.0), "tool_parse_error", CLOSE)
    assert record.result["tool_trace"] == [
        {
            "tool_call_id": f"id{index}",
            "tool_name": name,
            "arguments": arguments,
            "iteration": 1,
            "started_at": 1102.0,
            "duration_s": 0.0,
            "ok": False,
            "error": "not run: tool_parse_error",
        }
        for index, name, arguments in [(0, "add", '{"a": 1}'), (2, "zap", "{")]
    ]


@pytest.mark.parametrize("reason", [reason for reason in CUT_SHORT if reason != "unknown_error"])
def test_calls_that_were_on_their_way_are_in_the_trace_whatever_ends_the_request(reason: str) -> None:
    request = begun(with_tools())
    hear(request, TextDelta("a"), call("add", '{"a": 1'))
    effects = CUT_SHORT[reason](request) or request.closed(FIRST, None, 105.1)
    assert not_run(ended(effects, CLOSE)) == [("add", '{"a": 1', reason)]


def test_a_malformed_call_in_the_text_is_in_the_trace_whole() -> None:
    text = '<tool_call>{"name": "add"}</tool_call>'
    request = begun(with_tools(), prompted=True)
    record = failed(hear(request, TextDelta(text), Finish("stop"), Done()), "tool_parse_error", CLOSE)
    assert not_run(record) == [("", text, "tool_parse_error")]


def test_calls_that_ran_are_not_said_not_to_have_run() -> None:
    request = in_tools()
    returned(request, "3")
    hear(request, TextDelta("3"), call("add", "{}"), stream=SECOND)
    record = ended(request.cancel(105.0), CloseStream(turn_id=SECOND))
    assert [(entry["ok"], entry["iteration"]) for entry in record.result["tool_trace"]] == [(True, 1), (False, 2)]


# ---------------------------------------------------------------- a BIOS that takes its time


def prompting(**changed: Any) -> Request:
    """A plain request, which has asked for its first BIOS."""
    request = Request(**arguments(**changed))
    order = only(RunBios, request.begin(100.0))
    assert (order.turn_id, order.iterations_left, order.prompted) == (FIRST, 8, False)
    return request


def written(request: Request, text: str = "bios", *, turn_id: TurnId = FIRST, at: float = 101.0) -> Effects:
    return request.step(BiosWritten(turn_id=turn_id, bios=text, error=None), at)


def test_while_the_bios_is_written_a_request_waits_and_its_watch_has_nothing_to_judge() -> None:
    request = prompting()
    status = request.status()
    assert (status["state"], status["phase"], request.deadline) == ("running", "waiting", 105.0)
    assert request.progress().concluding
    opened = only(OpenStream, written(request))
    assert opened.body["messages"][0]["content"].startswith("bios")
    assert (request.deadline, request.progress().turn_started_at) == (None, 101.0)


def test_a_bios_that_does_not_come_in_time_is_a_prompt_error() -> None:
    request = prompting()
    assert request.step(Tick(), 104.9) == []
    record = failed(request.step(Tick(), 105.0), "prompt_error")
    assert record.result["fail_detail"] == "the BIOS provider did not return within bios_timeout_s 5 s"
    assert written(request, at=106.0) == []


def test_whoever_ends_the_request_does_not_wait_for_the_bios() -> None:
    canceled = prompting().step(CancelRequest(request_id=7, reply=Reply()), 101.0)
    assert ended(canceled).result["state"] == "canceled"
    died = Abandon(request_id=7, reason=RequestFailReason.SERVER_DIED, detail="signal 9")
    failed(prompting().step(died, 101.0), "server_died")


@pytest.mark.parametrize("turn_id", [(7, 0), SECOND, (8, 1)])
def test_a_bios_of_another_turn_changes_nothing(turn_id: TurnId) -> None:
    request = prompting()
    assert written(request, turn_id=turn_id) == []
    assert request.phase == "waiting"
    only(OpenStream, written(request))
    assert written(request) == [], "said twice"


# ---------------------------------------------------------------- a host that did not run for a while


def test_a_tick_that_is_a_second_late_is_just_late() -> None:
    failed(prompting().step(Tick(), 106.0), "prompt_error")


def waiting(kind: str) -> tuple[Driven | Request, float]:
    """A request that waits, and the instant that it waits for."""
    made_so: dict[str, Callable[[], Driven | Request]] = {
        "bios": prompting,
        "settling": lambda: settling(begun()),
        "broken": lambda: broken(begun()),
        "dead": lambda: dead(generating(begun())),
        "tools": in_tools,
    }
    request = made_so[kind]()
    assert request.deadline is not None
    return request, request.deadline


@pytest.mark.parametrize("kind", ["bios", "settling", "broken", "dead", "tools"])
@pytest.mark.parametrize(("gap_s", "most_s"), [(1.5, 1.5), (3600.0, 10.0)])
def test_a_gap_in_which_nothing_ran_puts_off_what_was_waited_for_once(kind: str, gap_s: float, most_s: float) -> None:
    request, due_at = waiting(kind)
    now = due_at + gap_s
    assert request.step(Tick(), now) == []
    again_at = request.deadline
    assert again_at is not None
    assert now < again_at <= now + most_s
    assert request.step(Tick(), again_at - 0.01) == []
    assert isinstance(request.step(Tick(), again_at + gap_s)[-1], RequestEnded), "one gap is forgiven, not every one"


def test_what_was_waited_for_may_come_after_the_gap() -> None:
    request = in_tools()
    assert request.tick(4000.0) == []
    assert [type(effect) for effect in returned(request, "3", at=4001.0)] == [OpenStream]
    late = prompting()
    assert late.step(Tick(), 4000.0) == []
    only(OpenStream, written(late, at=4001.0))


# ---------------------------------------------------------------- loops


def test_a_loop_fails_the_request_and_the_output_ends_with_the_line_that_decided() -> None:
    request = begun()
    text = "Start of it.\n" + LINE * 30
    record = failed(hear(request, TextDelta(text[:100]), TextDelta(text[100:])), "repeated_line_loop", CLOSE)
    assert record.result["text"] == "Start of it.\n" + LINE * 12
    assert LINE.strip() in record.result["fail_detail"]
    assert "12" in record.result["fail_detail"]


TAGGED = '<tool_call>{"name": "signal", "arguments": {"s": 1}}</tool_call>\n'


def test_a_loop_behind_a_tagged_call_is_found_although_nobody_sees_it_yet() -> None:
    request = begun(with_tools())
    assert hear(request, TextDelta("a " + TAGGED), TextDelta(LINE * 11)) == []
    assert request.read_output(0, 0)["text"] == "a "
    record = failed(hear(request, TextDelta(LINE * 11)), "repeated_line_loop", CLOSE)
    assert record.result["text"] == "a \n" + LINE * 12
    assert [signal["arguments"] for signal in record.result["signals"]] == [{"s": 1}]


def test_text_behind_a_tagged_call_is_shown_once_there_is_a_structured_call() -> None:
    request = begun(with_tools())
    hear(request, TextDelta("a " + TAGGED), TextDelta("b"))
    assert request.read_output(0, 0)["text"] == "a "
    hear(request, call("add"))
    assert request.read_output(0, 0)["text"] == f"a {TAGGED}b"
    hear(request, TextDelta(" c"))
    assert request.read_output(0, 0)["text"] == f"a {TAGGED}b c"


def test_a_loop_in_what_a_structured_call_puts_back_counts_too() -> None:
    request = begun(with_tools())
    lines = [LINE + TAGGED.replace("1", str(number)) for number in range(20)]
    assert hear(request, TextDelta(TAGGED + "".join(lines) + LINE * 11)) == []
    text = failed(hear(request, call("add"), TextDelta(LINE)), "repeated_line_loop", CLOSE).result["text"]
    assert text == TAGGED + "".join(lines) + LINE * 12


@pytest.mark.parametrize("ending", [ENDINGS[name] for name in ("cancelled", "abandoned", "error record")])
@pytest.mark.parametrize("prompted", [False, True])
def test_what_was_held_back_is_no_loop_and_not_cut_when_the_request_ends_for_another_reason(
    ending: Callable[[Driven], Effects], prompted: bool
) -> None:
    request = begun(with_tools(), prompted=prompted)
    half_a_call = '<tool_call>{"name": "add", "arguments": {"a": [\n' + f'"{"y" * 40}",\n' * 20 + '"and th'
    hear(request, TextDelta("a " + half_a_call))
    assert request.read_output(0, 0)["text"] == "a "
    result = ended(ending(request), CLOSE).result
    assert result["text"] == "a " + half_a_call
    assert result["fail_reason"] != "repeated_line_loop"


def test_a_loop_without_line_ends_fails_the_request_where_it_was_found() -> None:
    request = begun()
    record = failed(hear(request, TextDelta("So: " + "ha " * 10_000)), "repeated_text_loop", CLOSE)
    assert record.result["text"].startswith("So: ha ha")
    assert 8192 <= len(record.result["text"]) < 8192 + 1024 + 4
    assert "repeat 3 of them" in record.result["fail_detail"]


def test_arguments_that_repeat_themselves_are_a_loop_too() -> None:
    request = begun(with_tools())
    piece = ToolCallDelta(0, "c1", "add", '{"a": "')
    more = [ToolCallDelta(0, None, None, "1, 2, ") for _ in range(2000)]
    failed(hear(request, piece, *more), "repeated_text_loop", CLOSE)


@pytest.mark.parametrize(
    ("params", "tokens", "is_over"),
    [
        ({"max_tokens": 100}, 189, False),
        ({"max_tokens": 100}, 190, True),
        ({"max_tokens": 100, "n_predict": 1000}, 1000, False),
        ({"max_tokens": -1}, 100_000, False),
        ({}, 4096 * 5 // 4 + 65, True),
    ],
)
def test_a_server_that_keeps_to_no_limit_is_cut_off_far_beyond_it(
    params: dict[str, Any], tokens: int, is_over: bool
) -> None:
    request = begun(params=params)
    said = [TextDelta(f"{number} ") for number in range(tokens)]
    effects = hear(request, *said)
    assert bool(effects) is is_over
    if is_over:
        result = ended(effects, CLOSE).result
        assert (result["state"], result["finish_reason"]) == ("completed", "max_tokens")
        assert result["text"] == "".join(delta.text for delta in said)


def test_a_loop_in_the_reasoning_counts_too() -> None:
    request = begun()
    record = failed(hear(request, ReasoningDelta(LINE * 30), TextDelta("a")), "repeated_line_loop", CLOSE)
    assert (record.result["reasoning"], record.result["text"]) == (LINE * 12, "")


def test_a_block_of_lines_that_repeats_is_told_as_such() -> None:
    request = begun(config(loop_detector=LoopDetector(max_period=2)))
    record = failed(hear(request, TextDelta(f"{LINE}z{LINE}" * 30)), "repeated_line_loop", CLOSE)
    assert "a block of 2 lines" in record.result["fail_detail"]


def test_without_a_detector_nothing_is_a_loop() -> None:
    request = begun(config(loop_detector=None))
    assert hear(request, TextDelta(LINE * 500)) == []


# ---------------------------------------------------------------- the body


def body(of: WorkerConfig | None = None, params: dict[str, Any] | None = None, tools: Any = ()) -> dict[str, Any]:
    return request_body(of or config(), params or {}, [{"role": "user", "content": "u"}], tools)


def test_the_workers_own_defaults() -> None:
    told = body()
    assert told.pop("sse_ping_interval") > 0
    assert told == {
        "messages": [{"role": "user", "content": "u"}],
        "stream": True,
        "return_progress": True,
        "stream_options": {"include_usage": True},
        "reasoning_format": "deepseek",
        "max_tokens": 4096,
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"return_progress": False},
        {"stream_options": {}},
        {"reasoning_format": "none"},
        {"sse_ping_interval": -1},
        {"max_tokens": 5},
        {"temperature": 0},
        {"unknown_to_everyone": {"a": [1, None]}},
    ],
)
@pytest.mark.parametrize("place", ["params", "default_params"])
def test_what_the_caller_sets_passes_through(changed: dict[str, Any], place: str) -> None:
    told = body(params=changed) if place == "params" else body(config(default_params=changed))
    assert told == body() | changed


def test_params_win_over_default_params_and_these_over_max_tokens() -> None:
    of = config(max_tokens=1, default_params={"max_tokens": 2, "top_k": 3})
    assert body(of)["max_tokens"] == 2
    told = body(of, {"max_tokens": 4, "seed": 5})
    assert (told["max_tokens"], told["top_k"], told["seed"]) == (4, 3, 5)


def test_without_max_tokens_no_bound_is_sent() -> None:
    assert "max_tokens" not in body(config(max_tokens=None))
    assert body(config(max_tokens=None), {"max_tokens": 7})["max_tokens"] == 7


def test_messages_tools_and_stream_are_the_workers() -> None:
    owned = {"messages": [], "tools": [{"x": 1}], "stream": False}
    assert body(config(default_params=owned), owned) == body()
    assert body(params=owned, tools=[ADD])["tools"] == [ADD]


def test_a_body_is_json_and_the_callers_params_stay_as_they_were() -> None:
    params = {"stop": ["x"], "stream": False}
    before = copy.deepcopy(params)
    assert json.loads(json.dumps(body(params=params)))["stop"] == ["x"]
    assert params == before


def test_calls_of_a_turn_without_a_finish_reason_are_not_run() -> None:
    request = begun(with_tools())
    events = (TextDelta("a"), call("signal", "{}"), call("add", "{}", 1), Done())
    record = failed(hear(request, *events), "tool_parse_error", CLOSE)
    assert (record.result["text"], [told["tool_name"] for told in record.result["signals"]]) == ("a", ["signal"])


def test_a_finish_reason_said_again_gives_no_more_time() -> None:
    request = begun()
    for at in (101.0, 102.0):
        assert hear(request, Finish("stop"), at=at) == []
        assert request.deadline == 103.0


def test_the_times_of_a_turn_are_not_those_of_the_turn_before() -> None:
    request = begun(with_tools())
    hear(request, call("add"), Finish("tool_calls"), Done())
    only(OpenStream, returned(request, "3"))
    assert (request.progress().first_token_at, request.progress().turn_started_at) == (None, 103.0)
