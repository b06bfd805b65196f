"""One request through every path, sans-IO, with literal times; and through random ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from llama_worker.bios import STATUS_OPEN
from llama_worker.config.settings import WorkerConfig
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
from llama_worker.request.body import request_body
from llama_worker.request.state import Effects, Request, _InTools
from llama_worker.request.submission import Submission
from llama_worker.request.table import RequestRecord
from llama_worker.request.turn import Turn, TurnId
from llama_worker.runtime.host.host_code import write_bios
from llama_worker.stream.events import (
    Done,
    EmptyRecord,
    Finish,
    PromptProgress,
    ReasoningDelta,
    ServerError,
    StreamEvent,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.turn_end import NO_FINISH_REASON, TurnEnd
from llama_worker.types import (
    BiosContext,
    BiosText,
    RequestFailReason,
    RequestFinishReason,
    RequestState,
    ToolDef,
)

E = TypeVar("E")
Act = Callable[["Driven"], Effects]  # what befalls a request
LINE = f"{'y' * 40}\n"
UNIX = 1000.0  # what makes Unix seconds of the clock here
ADD: ToolDef = {"type": "function", "function": {"name": "add"}}
SIGNAL: ToolDef = {"type": "function", "function": {"name": "signal"}}
FIRST, SECOND = (7, 1), (7, 2)  # streams and tool batches of request 7


def stream_failure(
    reason: str, detail: str = "reset", http_status: int | None = None
) -> StreamFailure:
    return StreamFailure(reason=RequestFailReason(reason), detail=detail, http_status=http_status)


REFUSED = stream_failure("http_error", "HTTP 500: tools param requires --jinja flag", 500)
RESET = stream_failure("stream_disconnected")
NOBODY: Any = object()  # a mailbox, a reply or a stream: the machine itself tells and asks nobody


def config(**changed: Any) -> WorkerConfig:
    given: dict[str, Any] = {
        "name": "w",
        "host": "127.0.0.1",
        "port": 9001,
        "server_cmd": ("llama-server",),
    }
    return WorkerConfig(**(given | changed))


def with_tools(**changed: Any) -> WorkerConfig:
    runner = SimpleNamespace(run_tool=lambda **call: None)  # nothing here runs a tool
    return config(
        **({"normal_tools": [ADD], "exit_tools": [SIGNAL], "tool_runner": runner} | changed)
    )


class Driven(Request):
    """A request with a method for each thing that it may hear; its BIOS is written on the spot."""

    def begin(self, now: float) -> Effects:
        return self._prompted_at_once(super().begin(now), now)

    def step(self, message: RequestMessage, now: float) -> Effects:
        return self._prompted_at_once(super().step(message, now), now)

    def opened(self, turn_id: TurnId, at: float) -> Effects:
        return self.step(StreamOpened(turn_id=turn_id, at=at), at)

    def closed(self, turn_id: TurnId, failure: StreamFailure | None, at: float) -> Effects:
        return self.step(StreamClosed(turn_id=turn_id, failure=failure, at=at), at)

    def call_ended(
        self, turn_id: TurnId, *, ok: bool, text: str, at: float, call_id: str | None = None
    ) -> Effects:
        if call_id is None:  # the one under way
            call_id = self._waiting.batch.call.id if isinstance(self._waiting, _InTools) else ""
        return self.step(CallEnded(turn_id=turn_id, call_id=call_id, ok=ok, text=text, at=at), at)

    def cancel(self, at: float) -> Effects:
        return self.step(CancelRequest(request_id=self.request_id, reply=NOBODY), at)

    def abandon(self, reason: RequestFailReason, detail: str, at: float) -> Effects:
        return self.step(Abandon(request_id=self.request_id, reason=reason, detail=detail), at)

    def tick(self, at: float) -> Effects:
        return self.step(Tick(), at)

    def _prompted_at_once(self, effects: Effects, at: float) -> Effects:
        match effects:
            case [*before, RunBios() as order]:
                return [*before, *super().step(write_bios(order, self._config, UNIX + at), at)]
        return effects


def made(
    of: WorkerConfig | None = None, *, params: dict[str, Any] | None = None, **traits: bool
) -> Driven:
    submission = Submission(
        job_name="j", system_prompt="Be terse.", user_prompt="Hi", params=params or {}, messages=()
    )
    traits = {"prompted": False, "opens_thinking": False} | traits
    order = Begin(
        request_id=7,
        submission=submission,
        transport=NOBODY,
        tools=NOBODY,
        process=NOBODY,
        **traits,
    )
    return Driven(order, config=of or config(), unix_offset=UNIX, reply_to=NOBODY, now=100.0)


def begun(of: WorkerConfig | None = None, **changed: Any) -> Driven:
    request = made(of, **changed)
    only(OpenStream, request.begin(100.0))
    return request


def only(kind: type[E], effects: Effects) -> E:
    (effect,) = effects
    assert isinstance(effect, kind)
    return effect


def hear(
    request: Driven, *events: StreamEvent, at: float = 101.0, stream: TurnId = FIRST
) -> Effects:
    return request.step(StreamEvents(turn_id=stream, events=events, at=at), at)


def ended(effects: Effects, *others: object) -> RequestRecord:
    """The record, where the effects are those others and the end."""
    *before, last = effects
    assert isinstance(last, RequestEnded)
    assert [effect for effect in before if not isinstance(effect, SignalEmitted)] == list(others)
    return last.record


def failed(effects: Effects, reason: str, *others: object) -> RequestRecord:
    record = ended(effects, *others)
    result = record.result
    assert (result["state"], result["finish_reason"]) == (
        RequestState.FAILED,
        RequestFinishReason.FAILED,
    )
    assert result["fail_reason"] == record.status["fail_reason"] == reason
    assert result["fail_detail"] == record.status["fail_detail"]
    return record


def call(name: str, arguments: str = "{}", index: int = 0) -> ToolCallDelta:
    return ToolCallDelta(index, f"id{index}", name, arguments)


def in_tools(of: WorkerConfig | None = None) -> Driven:
    request = begun(of or with_tools())
    hear(
        request,
        TextDelta("Let me add."),
        call("add", '{"a": 1}'),
        Usage(10, 5, 2),
        Finish("tool_calls"),
    )
    effects = hear(request, Done(), at=102.0)
    assert [type(effect) for effect in effects] == [CloseStream, RunTool]
    return request


def returned(request: Driven, result: str, at: float = 103.0) -> Effects:
    """The call under way of the first turn's batch has returned."""
    return request.call_ended(FIRST, ok=True, text=result, at=at)


CLOSE = CloseStream(turn_id=FIRST)
TAGGED = '<tool_call>{"name": "signal", "arguments": {"s": 1}}</tool_call>'


# ---------------------------------------------------------------- to completion


def test_a_stream_to_its_completion() -> None:
    request = made()
    opened = only(OpenStream, request.begin(100.0))
    assert opened.turn_id == FIRST
    assert [message["role"] for message in opened.body["messages"]] == ["system", "user"]
    assert request.phase == "waiting"
    assert request.opened(FIRST, 101.0) == []
    assert request.phase == "prefill"
    assert hear(request, EmptyRecord(), PromptProgress(5, 10, 2), at=102.0) == []
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
        "fail_reason": None,
        "conversation": [
            opened.body["messages"][-1],
            {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 2},
        "timings": pytest.approx({"ttft_s": 3.0, "total_s": 5.2, "tokens_per_second": 2.0}),
    }
    assert record.http_status is None
    assert request.phase == record.status["phase"] == "done"


def test_what_a_status_says_on_the_way() -> None:
    request = begun(with_tools())
    request.opened(FIRST, 101.0)
    hear(request, PromptProgress(5, 10, 2), at=102.0)
    hear(request, TextDelta("x" * 300), at=103.0)
    hear(request, at=104.0)  # a keepalive
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
        "fail_reason": None,
        "tokens_received": 1,
        "prompt_progress": {"processed": 5, "total": 10, "cached": 2},
        "tail": "x" * 200,
    }
    progress = request.progress()
    assert (progress.headers_at, progress.last_data_at, progress.last_stream_byte_at) == (
        101.0,
        103.0,
        104.0,
    )


def test_output_is_read_from_any_offset_and_one_beyond_the_end_stays() -> None:
    request = begun()
    hear(request, ReasoningDelta("hmm"), TextDelta("Hello"))
    whole = {"text": "Hello", "reasoning": "hmm", "text_offset": 5, "reasoning_offset": 3}
    assert request.read_output(0, 0) == {"ok": True, **whole, "done": False}
    assert request.read_output(3, 3) == {
        "ok": True,
        **whole,
        "text": "lo",
        "reasoning": "",
        "done": False,
    }
    request.cancel(102.0)
    rest = request.read_output(9, 3)
    assert (rest["text"], rest["text_offset"], rest["done"]) == ("", 9, True)


# ---------------------------------------------------------------- the end of a stream


def test_two_seconds_after_its_first_finish_reason_or_with_the_streams_end_it_is_complete() -> None:
    request = opened(begun())
    for at in (105.0, 106.0):
        assert hear(request, TextDelta("a"), Finish("stop"), at=at) == []
    assert request.tick(106.9) == []
    assert request.phase == "generating"
    result = ended(request.tick(107.0), CLOSE).result
    assert result["finish_reason"] == "stop"
    assert "usage" not in result
    for failure in (None, RESET):
        assert (
            ended(settling(begun()).closed(FIRST, failure, 105.1), CLOSE).result["state"]
            == "completed"
        )


MALFORMED = '<tool_call>{"name": "add"}</tool_call>'


@pytest.mark.parametrize(
    ("said", "reason", "exits", "unrun"),
    [
        ([Done()], "stop", 0, []),
        ([Finish("length"), Done()], "max_tokens", 0, []),
        ([call("signal"), Finish("tool_calls"), Done()], "stop", 1, []),
        (
            [call("signal"), call("add", '{"a": ', 1), Finish("length"), Done()],
            "max_tokens",
            1,
            [("add", '{"a": ')],
        ),
        ([call("signal"), call("add", "{}", 1), Done()], "tool_parse_error", 1, [("add", "{}")]),
        ([TextDelta(MALFORMED), Finish("stop"), Done()], "tool_parse_error", 0, [("", MALFORMED)]),
    ],
    ids=[
        "no finish reason",
        "limit",
        "exit calls alone",
        "a call cut off",
        "calls, no finish reason",
        "malformed",
    ],
)
def test_how_turns_end_requests(
    said: list[StreamEvent], reason: str, exits: int, unrun: list[tuple[str, str]]
) -> None:
    request = begun(with_tools(), prompted=isinstance(said[0], TextDelta))
    record = ended(hear(request, TextDelta("a"), *said), CLOSE)
    assert (record.result.get("fail_reason") or record.result["finish_reason"]) == reason
    assert record.result["text"] == "a" + "".join(
        event.text for event in said if isinstance(event, TextDelta)
    )
    assert (len(record.result["signals"]), record.status["tool_iters_remaining"]) == (exits, 8)
    trace = [
        (entry["tool_name"], entry["arguments"], entry["error"])
        for entry in record.result["tool_trace"]
    ]
    assert trace == [(name, arguments, f"not run: {reason}") for name, arguments in unrun]


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ServerError("boom", 500, "of_a_kind"), "boom (of_a_kind), code 500"),
        (ServerError("boom", None, None), "boom"),
    ],
)
def test_an_error_record_fails_it_after_a_finish_reason_too_whatever_follows(
    error: ServerError, detail: str
) -> None:
    record = failed(
        hear(begun(), TextDelta("a"), Finish("stop"), error, Done()), "server_error", CLOSE
    )
    assert (record.result["text"], record.result["fail_detail"], record.http_status) == (
        "a",
        detail,
        error.code,
    )


@pytest.mark.parametrize("context", [None, {"n_prompt_tokens": 5000, "n_ctx": 4096}])
def test_a_prompt_that_does_not_fit_has_a_reason_of_its_own(context: Any) -> None:
    by_record = hear(begun(), ServerError("no room", 400, "exceed_context_size_error", context))
    refusal = replace(stream_failure("context_exceeded", "HTTP 400: no room", 400), context=context)
    for effects in (by_record, begun().closed(FIRST, refusal, 105.0)):
        record = failed(effects, "context_exceeded", CLOSE)
        assert record.result.get("context") == context
        assert "no room" in record.result["fail_detail"]


@pytest.mark.parametrize("failure", [None, RESET, stream_failure("connect_failed", "refused")])
def test_a_connection_that_breaks_waits_a_while_for_news_of_the_servers_death(
    failure: StreamFailure | None,
) -> None:
    unexplained, explained = generating(begun()), generating(begun())
    for request in (unexplained, explained):
        assert request.closed(FIRST, failure, 105.0) == []
        assert request.deadline == 105.2
        assert request.tick(105.19) == []
    reason, detail = (
        (failure.reason, failure.detail) if failure else ("stream_disconnected", NO_FINISH_REASON)
    )
    record = failed(unexplained.tick(105.2), reason, CLOSE)
    assert (record.result["text"], record.result["fail_detail"]) == ("a", detail)
    died = explained.abandon(RequestFailReason.SERVER_DIED, "exited with -9", 105.19)
    assert failed(died, "server_died", CLOSE).result["fail_detail"] == "exited with -9"


def test_what_broke_since_the_server_is_gone_waits_for_how_that_ended() -> None:
    told, untold = broken(begun()), broken(begun())
    for request in (told, untold):
        assert request.waits_for_news
        request.saw_server_gone(105.2)
        assert not request.waits_for_news
        assert request.tick(115.1) == []
    died = told.abandon(RequestFailReason.SERVER_DIED, "exited with -9", 115.1)
    assert failed(died, "server_died", CLOSE).result["fail_detail"] == "exited with -9"
    assert failed(untold.tick(115.2), "server_died", CLOSE).result["text"] == "a"


# ---------------------------------------------------------------- prompts


def test_the_provider_is_told_the_time_and_the_budget_of_the_turn_and_where_it_raises_what_came_is_kept() -> (
    None
):
    seen: list[BiosContext] = []

    def once(ctx: BiosContext) -> BiosText:
        seen.append(ctx)
        if ctx.tool_iters_remaining < 8:
            raise LookupError("no prompt today")
        return BiosText("stable", "volatile")

    request = in_tools(with_tools(bios_provider=once, timezone_name="Europe/Vienna"))
    record = failed(returned(request, "1", at=160.0), "prompt_error")
    assert record.result["text"] == "Let me add."
    assert "LookupError: no prompt today" in record.result["fail_detail"]
    assert [context.tool_iters_remaining for context in seen] == [8, 7]
    assert [context.now.timestamp() for context in seen] == [1100.0, 1160.0]
    assert (seen[0].worker_name, seen[0].timezone_name, seen[0].tool_call_mode) == (
        "w",
        "Europe/Vienna",
        "native",
    )
    assert seen[0].now.utcoffset() is not None
    assert (seen[0].normal_tools, seen[0].exit_tools) == ((ADD,), (SIGNAL,))


# ---------------------------------------------------------------- tools


def test_the_calls_of_a_turn_run_one_by_one_and_the_next_turn_repeats_it_to_the_letter_with_their_results() -> (
    None
):
    request = made(with_tools())
    before = only(OpenStream, request.begin(100.0)).body
    hear(
        request,
        ReasoningDelta("hm"),
        TextDelta("Adding."),
        call("add", '{"a": 1}'),
        call("signal", '{"s": 1}', 1),
    )
    hear(request, call("add", "", 2), Finish("tool_calls"))
    closing, start = hear(request, Done(), at=102.0)
    assert (closing, request.deadline) == (CLOSE, 112.0)
    assert isinstance(start, RunTool)
    assert (start.turn_id, start.call.id, start.call.arguments) == (FIRST, "c00000001", {"a": 1})
    status = request.status()
    assert (status["state"], status["phase"]) == ("tool_running", "tool")
    assert (status["tool_iters_remaining"], status["tool_calls_count"]) == (7, 2)
    assert status["running_tool"] == "add"
    assert status["signals"] == [
        {"tool_name": "signal", "arguments": {"s": 1}, "emitted_at": 1101.0}
    ]
    for ok in (True, False):
        assert request.call_ended(SECOND, ok=ok, text="of another batch", at=102.5) == []
    second = only(RunTool, returned(request, "one"))
    assert (second.turn_id, second.call.id, request.deadline) == (FIRST, "c00000002", 113.0)
    following = only(OpenStream, returned(request, "two", at=105.0))
    assert following.turn_id == SECOND
    *earlier, assistant, one, two = following.body["messages"]
    assert earlier == before["messages"]
    assert (assistant["content"], assistant["reasoning_content"]) == ("Adding.", "hm")
    assert [normal["id"] for normal in assistant["tool_calls"]] == ["c00000001", "c00000002"]
    assert one == {"role": "tool", "tool_call_id": "c00000001", "name": "add", "content": "one"}
    assert two["content"].startswith(f"two\n\n{STATUS_OPEN}")
    assert following.body["tools"] == before["tools"] == [ADD, SIGNAL]
    progress = request.progress()
    assert (request.phase, progress.first_token_at, progress.turn_started_at) == (
        "waiting",
        None,
        105.0,
    )


def test_text_and_reasoning_are_those_of_every_turn_with_nothing_inserted() -> None:
    request = in_tools()
    returned(request, "3")
    hear(
        request,
        ReasoningDelta("ok"),
        TextDelta("It is 3."),
        Usage(20, 6, None),
        Finish("stop"),
        stream=SECOND,
    )
    record = ended(hear(request, Done(), stream=SECOND, at=104.0), CloseStream(turn_id=SECOND))
    assert (record.result["text"], record.result["reasoning"]) == ("Let me add.It is 3.", "ok")
    assert record.result["usage"] == {
        "prompt_tokens": 30,
        "completion_tokens": 11,
        "cached_tokens": 2,
    }
    assert record.status["tokens_received"] == 11
    assert record.result["timings"]["ttft_s"] == pytest.approx(1.0)


def test_a_failed_tool_fails_the_request_which_keeps_output_and_trace() -> None:
    request = in_tools()
    record = failed(
        request.call_ended(FIRST, ok=False, text="tool 'add' raised: no", at=103.0),
        "tool_execution_error",
    )
    assert (record.result["text"], record.result["fail_detail"]) == (
        "Let me add.",
        "tool 'add' raised: no",
    )
    (entry,) = record.result["tool_trace"]
    assert (entry["started_at"], entry["error"]) == (1102.0, "tool 'add' raised: no")
    assert record.result["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "cached_tokens": 2,
    }
    assert record.status["tokens_received"] == 5


def test_a_call_that_takes_too_long_fails_the_request_and_its_batch_is_forgotten() -> None:
    request = begun(with_tools())
    hear(request, call("add"), call("add", "{}", 1), Finish("tool_calls"), Done(), at=102.0)
    returned(request, "one", at=111.9)
    assert request.tick(112.0) == []
    assert request.tick(121.8) == []
    record = failed(request.tick(121.9), "tool_execution_error", DropTool(turn_id=FIRST))
    text = "tool 'add' did not return within tool_timeout_s 10 s"
    assert record.result["fail_detail"] == text
    assert [(entry["ok"], entry.get("error")) for entry in record.result["tool_trace"]] == [
        (True, None),
        (False, text),
    ]
    assert returned(request, "too late", at=122.0) == []


def test_a_tools_error_is_told_to_the_model_if_so_configured() -> None:
    request = begun(with_tools(tool_errors="tell", api_key="s3cret"))
    hear(request, call("add"), call("add", "{}", 1), Finish("tool_calls"), Done(), at=102.0)
    raised = "tool 'add' raised ValueError: no s3cret \ud800" + "." * 3000
    second = only(RunTool, request.call_ended(FIRST, ok=False, text=raised, at=103.0))
    assert second.call.id == "c00000002"
    dropped, prompting = request.tick(113.0)
    assert dropped == DropTool(turn_id=FIRST)
    assert isinstance(prompting, OpenStream)
    assert request.call_ended(FIRST, ok=True, text="late", at=113.1, call_id="c00000002") == []
    *_, one, two = prompting.body["messages"]
    assert one["content"] == f"tool 'add' raised ValueError: no *** \ufffd{'.' * 3000}"[:2000]
    assert two["content"].startswith("tool 'add' did not return within tool_timeout_s 10 s\n\n")
    hear(request, TextDelta("No luck."), Finish("stop"), stream=SECOND)
    record = ended(hear(request, Done(), stream=SECOND, at=114.0), CloseStream(turn_id=SECOND))
    assert record.result["fail_reason"] is None
    assert [(e["ok"], e["result"]) for e in record.result["tool_trace"]] == [
        (False, one["content"]),
        (False, "tool 'add' did not return within tool_timeout_s 10 s"),
    ]


def test_a_call_that_was_given_up_does_not_answer_for_the_next() -> None:
    request = begun(with_tools(tool_errors="tell"))
    hear(request, call("add"), call("add", "{}", 1), Finish("tool_calls"), Done(), at=102.0)
    dropped, second = request.tick(112.0)
    assert dropped == DropTool(turn_id=FIRST)
    assert isinstance(second, RunTool)
    assert request.call_ended(FIRST, ok=True, text="late", at=112.1, call_id="c00000001") == []
    returned(request, "two", at=113.0)
    results = [e["result"] for e in request._totals.trace]
    assert results == ["tool 'add' did not return within tool_timeout_s 10 s", "two"]


@pytest.mark.parametrize(
    ("reason", "ending"),
    [
        ("canceled", lambda r: r.cancel(105.0)),
        (
            "absolute_timeout",
            lambda r: r.abandon(RequestFailReason.ABSOLUTE_TIMEOUT, "too long", 105.0),
        ),
        ("server_died", lambda r: r.abandon(RequestFailReason.SERVER_DIED, "died", 105.0)),
        ("unknown_error", lambda r: r.break_off(RequestFailReason.UNKNOWN_ERROR, "a bug", 105.0)),
    ],
)
def test_calls_that_had_begun_are_in_the_trace_whatever_ends_the_request(
    reason: str, ending: Act
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
    assert [(entry["started_at"], entry["duration_s"]) for entry in trace] == [
        (1102.0, 1.0),
        (1103.0, 2.0),
    ]


def test_the_budget_is_one_a_turn_not_one_a_call() -> None:
    request = begun(with_tools(max_tool_iterations=1))
    hear(
        request,
        call("add"),
        call("add", "{}", 1),
        call("add", "{}", 2),
        Finish("tool_calls"),
        Done(),
    )
    for result in ("1", "2", "3"):
        returned(request, result)
    assert request.status()["tool_iters_remaining"] == 0
    effects = hear(
        request, TextDelta("a"), call("add"), Finish("tool_calls"), Done(), stream=SECOND
    )
    record = failed(effects, "tool_execution_error", CloseStream(turn_id=SECOND))
    assert (record.result["text"], record.result["fail_detail"]) == (
        "a",
        "tool iteration budget exhausted",
    )
    trace = [(entry["iteration"], entry.get("error")) for entry in record.result["tool_trace"]]
    assert trace == [(1, None)] * 3 + [(2, "not run: tool_execution_error")]


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


@pytest.mark.parametrize("prompted", [True, False])
def test_a_tagged_exit_call_is_recorded_with_its_closing_tag_and_in_native_mode_at_the_end(
    prompted: bool,
) -> None:
    request = begun(with_tools(), prompted=prompted)
    assert emitted(hear(request, TextDelta(TAGGED[:-1]))) == []
    assert emitted(hear(request, TextDelta(TAGGED[-1:]))) == ([{"s": 1}] if prompted else [])
    effects = hear(request, TextDelta("b"), Finish("stop"), Done())
    assert emitted(effects) == ([] if prompted else [{"s": 1}])
    assert [signal["arguments"] for signal in ended(effects, CLOSE).result["signals"]] == [{"s": 1}]


ENDINGS: dict[str, Act] = {
    "completed": lambda r: hear(r, Finish("tool_calls"), Done()),
    "max_tokens": lambda r: hear(r, Finish("length"), Done()),
    "cancelled": lambda r: r.cancel(105.0),
    "cancelled settling": lambda r: hear(r, Finish("stop")) or r.cancel(105.0),
    "abandoned": lambda r: r.abandon(RequestFailReason.WORKER_RESTARTED, "restart", 105.0),
    "abandoned settling": lambda r: hear(r, Finish("stop")) or ENDINGS["abandoned"](r),
    "error record": lambda r: hear(r, ServerError("boom", 500, None)),
    "disconnected": lambda r: r.closed(FIRST, None, 105.0) or r.tick(106.0),
    "protocol error": lambda r: r.closed(FIRST, stream_failure("protocol_error", "garbage"), 105.0),
    "loop": lambda r: hear(r, TextDelta(LINE * 20)),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize(
    ("said", "prompted"),
    [(TextDelta(TAGGED), True), (TextDelta(TAGGED), False), (call("signal", '{"s": 1}'), False)],
    ids=["prompted", "native, in the text", "native"],
)
def test_exit_calls_and_text_are_kept_in_every_ending(
    ending: Act, said: StreamEvent, prompted: bool
) -> None:
    request = begun(with_tools(), prompted=prompted)
    hear(request, TextDelta("kept\n"), said)
    record = ended(ending(request), CLOSE)
    assert [signal["arguments"] for signal in record.result["signals"]] == [{"s": 1}]
    assert record.result["signals"] == record.status["signals"]
    assert record.result["text"].startswith("kept\n")
    assert "tool_call" not in record.result["text"]


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_call_that_was_on_its_way_is_in_the_trace_in_every_ending(ending: Act) -> None:
    request = begun(with_tools())
    hear(request, call("add", '{"a": 1'))
    (entry,) = ended(ending(request), CLOSE).result["tool_trace"]
    assert (entry["arguments"], entry["ok"]) == ('{"a": 1', False)


def test_a_servers_report_of_a_malformed_call_is_a_parse_error_and_accuses_no_server() -> None:
    message = "The model produced output that does not match the expected peg-native format"
    refusal = stream_failure("http_error", f"HTTP 500: {message}", 500)
    for of, by_record, by_status, accused in (
        (with_tools(), "tool_parse_error", "tool_parse_error", None),
        (config(), "server_error", "http_error", 500),
    ):
        record = failed(
            hear(begun(of), TextDelta("a"), ServerError(message, 500, None)), by_record, CLOSE
        )
        assert (record.result["text"], record.http_status) == ("a", accused)
        assert (
            failed(begun(of).closed(FIRST, refusal, 101.0), by_status, CLOSE).http_status == accused
        )


# ---------------------------------------------------------------- refused tools


@pytest.mark.parametrize(
    "opens_thinking", [False, True], ids=["no thinking", "an answer without any thinking"]
)
def test_a_request_whose_tools_are_refused_is_sent_again_with_calls_and_results_as_text(
    opens_thinking: bool,
) -> None:
    request = made(with_tools(), opens_thinking=opens_thinking)
    native = only(OpenStream, request.begin(100.0)).body
    assert native["tools"] == [ADD, SIGNAL]
    assert "<tool_call>" not in native["messages"][0]["content"]
    report, again = request.closed(FIRST, REFUSED, 101.0)
    assert report == ToolsRefused(detail=REFUSED.detail)
    assert isinstance(again, OpenStream)
    assert (again.turn_id, request.phase) == (SECOND, "waiting")
    assert "<tool_call>" in again.body["messages"][0]["content"]
    assert again.body["messages"][0]["content"].endswith("Be terse.")
    assert hear(request, TextDelta("late"), stream=FIRST) == []
    tagged = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    hear(
        request,
        TextDelta("Adding. "),
        TextDelta(tagged[:15]),
        TextDelta(tagged[15:]),
        stream=SECOND,
    )
    hear(request, TextDelta(TAGGED), Finish("stop"), stream=SECOND)
    assert isinstance(hear(request, Done(), stream=SECOND)[-1], RunTool)
    assert request.read_output(0, 0)["text"] == "Adding. "
    sent = only(OpenStream, request.call_ended(SECOND, ok=True, text="3", at=103.0)).body
    assert "tools" not in {*again.body, *sent}
    assert sent["messages"][-2] == {"role": "assistant", "content": f"Adding. {tagged}"}
    assert "\n3\n</tool_response>" in sent["messages"][-1]["content"]


def test_a_second_refusal_or_one_without_auto_or_without_tools_is_an_error() -> None:
    for of in (with_tools(tool_call_mode="native"), config()):
        record = failed(begun(of).closed(FIRST, REFUSED, 101.0), "http_error", CLOSE)
        assert (record.result["fail_detail"], record.http_status) == (REFUSED.detail, 500)
    request = begun(with_tools())
    request.closed(FIRST, REFUSED, 101.0)
    failed(request.closed(SECOND, REFUSED, 102.0), "http_error", CloseStream(turn_id=SECOND))


# ---------------------------------------------------------------- a think that the template opened


TO_THE_TEMPLATE = (
    "chat_template_kwargs enable_thinking reasoning_budget thinking_budget_tokens reasoning_effort"
)


@pytest.mark.parametrize(
    ("params", "said", "reason", "reasoning", "text"),
    [
        ({}, "abc\n</think>\n\nAns", "stop", "abc", "Ans"),
        (
            {},
            "The answer is 4.",
            "stop",
            "The answer is 4.",
            "The answer is 4.",
        ),  # the server parses reasoning itself
        ({}, "a <", "stop", "a <", "a <"),
        ({}, "abc", "length", "abc", ""),
        ({}, "abc", None, "abc", ""),  # the stream broke
        *(
            ({param: 0}, "a</think>b", "stop", "", "a</think>b")
            for param in TO_THE_TEMPLATE.split()
        ),
    ],
)
def test_a_think_opened_by_the_template(
    params: Any, said: str, reason: str | None, reasoning: str, text: str
) -> None:
    by_default = begun(config(default_params=params), opens_thinking=True)
    for request in (by_default, begun(params=params, opens_thinking=True)):
        hear(request, *(TextDelta(char) for char in said))
        effects = (
            hear(request, Finish(reason), Done()) if reason else ENDINGS["disconnected"](request)
        )
        result = ended(effects, CLOSE).result
        assert (result["reasoning"], result["text"]) == (reasoning, text)
        assert result["state"] == ("completed" if reason else "failed")


@pytest.mark.parametrize(
    ("first", "second", "reasoning", "text", "sent_back"),
    [
        (TextDelta("a</think>b"), "c</think>d", "ac", "bd", ("a", "b")),
        (
            TextDelta("Let me see."),
            "a</think>b",
            "Let me see.a",
            "Let me see.b",
            (None, "Let me see."),
        ),
        (
            ReasoningDelta("hm"),
            "Answer",
            "hm",
            "Answer",
            ("hm", ""),
        ),  # it parses reasoning itself, and is believed
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


def dead(request: Driven) -> Driven:
    """Told of its server's death."""
    assert request.abandon(RequestFailReason.SERVER_DIED, "signal 9", 104.0) == []
    assert request.deadline == 106.0
    assert request.progress().concluding
    return request


Phase = Callable[[Driven], Driven]  # brings a request into it
IN_STREAM: list[tuple[Phase, str]] = [  # each with the text that came
    (lambda r: r, ""),
    (opened, ""),
    (generating, "a"),
    (settling, "a"),
    (broken, "a"),
    (lambda r: dead(generating(r)), "a"),
]
every_phase = pytest.mark.parametrize(("phase", "text"), IN_STREAM)


@every_phase
def test_a_cancel_closes_the_connection_in_every_phase(phase: Phase, text: str) -> None:
    record = ended(phase(begun()).cancel(104.0), CLOSE)
    assert (record.result["state"], record.result["finish_reason"]) == ("canceled", "canceled")
    assert record.result["fail_reason"] == record.status["fail_reason"] == "canceled"
    assert (record.result["text"], record.status["output_chars"]) == (text, len(text))
    assert (record.status["phase"], record.status["completed_at"]) == ("done", 1104.0)


@pytest.mark.parametrize("phase", [lambda r: r, opened, generating, broken])
def test_who_is_abandoned_fails_with_the_reason_told_unless_its_turn_had_ended_or_its_server_died(
    phase: Phase,
) -> None:
    effects = phase(begun()).abandon(RequestFailReason.WORKER_RESTARTED, "stall", 104.1)
    assert failed(effects, "worker_restarted", CLOSE).result["fail_detail"] == "stall"
    effects = settling(begun()).abandon(RequestFailReason.WORKER_RESTARTED, "stall", 104.1)
    assert ended(effects, CLOSE).result["state"] == "completed"
    effects = dead(generating(begun())).abandon(RequestFailReason.WORKER_RESTARTED, "stall", 104.1)
    failed(effects, "server_died", CLOSE)


# ---------------------------------------------------------------- the server's death


@pytest.mark.parametrize(("phase", "text"), IN_STREAM[:3])
@pytest.mark.parametrize("failure", [None, RESET])
def test_what_a_dead_server_sent_is_heard_for_a_while(
    phase: Phase, text: str, failure: StreamFailure | None
) -> None:
    ends, stays = dead(phase(begun())), dead(phase(begun()))
    for request in (ends, stays):
        assert hear(request, TextDelta("bc"), at=104.1) == []
        assert hear(request, TextDelta("d"), at=105.9) == []
    assert stays.tick(105.99) == []
    for effects in (ends.closed(FIRST, failure, 105.9), stays.tick(106.0)):
        record = failed(effects, "server_died", CLOSE)
        assert (record.result["text"], record.result["fail_detail"]) == (f"{text}bcd", "signal 9")


@pytest.mark.parametrize(
    "last", [(Usage(3, 4, None),), (Usage(3, 4, None), Done())], ids=["closed", "done"]
)
@pytest.mark.parametrize("phase", [generating, settling])
def test_a_dead_server_that_said_its_finish_reason_had_answered(
    phase: Phase, last: tuple[StreamEvent, ...]
) -> None:
    request = dead(phase(begun()))
    result = ended(
        hear(request, Finish("stop"), *last) or request.closed(FIRST, None, 104.3), CLOSE
    ).result
    assert (result["state"], result["usage"]["completion_tokens"]) == ("completed", 4)


@pytest.mark.parametrize("said", [(), (Done(),)], ids=["closed", "done"])
def test_the_calls_of_a_dead_server_or_of_an_abandoned_request_are_not_begun(
    said: tuple[StreamEvent, ...],
) -> None:
    request = dead(begun(with_tools()))
    effects = hear(request, TextDelta("a"), call("add"), Finish("tool_calls"), *said)
    failed(effects or request.closed(FIRST, None, 104.3), "server_died", CLOSE)
    request = begun(with_tools())
    hear(request, TextDelta("a"), call("add"), Finish("tool_calls"))
    failed(
        request.abandon(RequestFailReason.WORKER_STOPPED, "stop", 104.0), "worker_stopped", CLOSE
    )


@every_phase
def test_breaking_off_keeps_just_what_was_shown(
    phase: Phase, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_: Any, **__: Any) -> Any:
        raise IndexError("a bug")

    request = phase(begun())
    monkeypatch.setattr(Turn, "finish", raising)
    monkeypatch.setattr(Turn, "calls", raising)
    with pytest.raises(IndexError):
        request.abandon(RequestFailReason.UNKNOWN_ERROR, "IndexError: a bug", 104.0)
    record = failed(
        request.break_off(RequestFailReason.UNKNOWN_ERROR, "a bug", 104.0), "unknown_error", CLOSE
    )
    assert record.result["text"] == text
    assert request.break_off(RequestFailReason.UNKNOWN_ERROR, "a bug", 104.0) == []


def test_a_signal_is_told_although_the_step_that_recorded_it_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = begun(with_tools())

    def raising(*_: Any, **__: Any) -> Any:
        raise IndexError("a bug")

    monkeypatch.setattr(TurnEnd, "feed", raising)
    with pytest.raises(IndexError):
        hear(request, call("signal"), call("add", index=1), Done())
    monkeypatch.undo()
    signal, *others = request.break_off(RequestFailReason.UNKNOWN_ERROR, "a bug", 104.0)
    assert isinstance(signal, SignalEmitted)
    assert failed(others, "unknown_error", CLOSE).result["signals"] == [signal.signal]


# ---------------------------------------------------------------- calls that are not run


def test_calls_that_are_not_run_are_in_the_trace_as_the_model_wrote_them_and_exit_calls_count() -> (
    None
):
    request = begun(with_tools())
    hear(
        request,
        TextDelta("a"),
        call("add", '{"a": 1}'),
        call("signal", "{}", 1),
        call("zap", "{", 2),
    )
    record = failed(
        hear(request, Finish("tool_calls"), Done(), at=102.0), "tool_parse_error", CLOSE
    )
    assert (record.result["text"], len(record.result["signals"])) == ("a", 1)
    assert "zap" in record.result["fail_detail"]
    unrun: dict[str, Any] = {"iteration": 1, "started_at": 1102.0, "duration_s": 0.0, "ok": False}
    unrun["error"] = "not run: tool_parse_error"
    assert record.result["tool_trace"] == [
        {"tool_call_id": "id0", "tool_name": "add", "arguments": '{"a": 1}', **unrun},
        {"tool_call_id": "id2", "tool_name": "zap", "arguments": "{", **unrun},
    ]


# ---------------------------------------------------------------- a BIOS that takes its time


def prompting() -> Driven:
    """A plain request, which has asked for its first BIOS."""
    request = made()
    order = only(RunBios, Request.begin(request, 100.0))
    assert (order.turn_id, order.iterations_left, order.prompted) == (FIRST, 8, False)
    return request


def written(request: Driven, *, turn_id: TurnId = FIRST, at: float = 101.0) -> Effects:
    return request.step(BiosWritten(turn_id=turn_id, bios="bios", error=None), at)


@pytest.mark.parametrize("another", [(7, 0), SECOND, (8, 1)])
def test_while_the_bios_is_written_a_request_waits_and_its_watch_has_nothing_to_judge(
    another: TurnId,
) -> None:
    request = prompting()
    assert written(request, turn_id=another) == []
    status = request.status()
    assert (status["state"], status["phase"], request.deadline) == ("running", "waiting", 105.0)
    assert request.progress().concluding
    opened = only(OpenStream, written(request))
    assert opened.body["messages"][0]["content"].startswith("bios")
    assert (request.deadline, request.progress().turn_started_at) == (None, 101.0)
    assert written(request) == [], "said twice"


@pytest.mark.parametrize("at", [105.0, 106.0])  # a second late is just late
def test_a_bios_that_does_not_come_in_time_is_a_prompt_error(at: float) -> None:
    request = prompting()
    assert request.tick(104.9) == []
    record = failed(request.tick(at), "prompt_error")
    assert (
        record.result["fail_detail"] == "the BIOS provider did not return within bios_timeout_s 5 s"
    )
    assert written(request, at=106.0) == []


def test_whoever_ends_the_request_does_not_wait_for_the_bios() -> None:
    assert ended(prompting().cancel(101.0)).result["state"] == "canceled"
    failed(prompting().abandon(RequestFailReason.SERVER_DIED, "signal 9", 101.0), "server_died")


# ---------------------------------------------------------------- a host that did not run for a while


WAITING: dict[str, Callable[[], Driven]] = {
    "bios": prompting,
    "settling": lambda: settling(begun()),
    "broken": lambda: broken(begun()),
    "dead": lambda: dead(generating(begun())),
    "tools": in_tools,
}


@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize(("gap_s", "most_s"), [(1.5, 1.5), (3600.0, 10.0)])
def test_a_gap_in_which_nothing_ran_puts_off_what_was_waited_for(
    waiting: str, gap_s: float, most_s: float
) -> None:
    request = WAITING[waiting]()
    assert request.deadline is not None
    now = request.deadline + gap_s
    assert request.tick(now) == []
    again_at = request.deadline
    assert now < again_at <= now + most_s
    assert request.tick(again_at - 0.01) == []
    assert isinstance(request.tick(again_at + gap_s)[-1], RequestEnded), (
        "one gap is forgiven, not every one"
    )


def test_what_was_waited_for_may_come_after_the_gap() -> None:
    tools, bios = in_tools(), prompting()
    assert tools.tick(4000.0) == bios.tick(4000.0) == []
    for effects in (returned(tools, "3", at=4001.0), written(bios, at=4001.0)):
        only(OpenStream, effects)


# ---------------------------------------------------------------- loops


HELD = f"{TAGGED}\n{LINE * 11}"  # back in native mode, behind a call that may turn out to be text


@pytest.mark.parametrize(
    ("said", "reason", "output", "detail"),
    [
        (
            [TextDelta("So:\n" + LINE * 30)],
            "line",
            ("", "So:\n" + LINE * 12),
            f"{LINE.strip()!r} came 12 times",
        ),
        (
            [TextDelta(f"{LINE}z{LINE}" * 30)],
            "line",
            ("", f"{LINE}z{LINE}" * 12),
            "a block of 2 lines",
        ),
        ([ReasoningDelta(LINE * 30)], "line", (LINE * 12, ""), "12 times"),
        ([TextDelta("ha " * 9000)], "text", ("", ("ha " * 9000)[:8192]), "repeat 3 of them"),
        (
            [call("add", '{"a": "'), *[ToolCallDelta(0, None, None, "1, 2, ")] * 2000],
            "text",
            ("", ""),
            "repeat 6",
        ),
        (
            [TextDelta(HELD), call("add"), TextDelta(LINE)],
            "line",
            ("", HELD + LINE),
            "came 12 times",
        ),
        ([TextDelta(HELD), TextDelta(LINE * 9)], "line", ("", "\n" + LINE * 12), "came 12 times"),
    ],
    ids=[
        "line",
        "block",
        "reasoning",
        "no line ends",
        "arguments",
        "put back by a structured call",
        "held back",
    ],
)
def test_a_loop_ends_the_request(
    said: list[StreamEvent], reason: str, output: tuple[str, str], detail: str
) -> None:
    record = failed(
        hear(begun(with_tools()), *said, TextDelta("a")), f"repeated_{reason}_loop", CLOSE
    )
    assert (record.result["reasoning"], record.result["text"]) == output
    assert detail in record.result["fail_detail"]
    assert hear(begun(with_tools(loop_detector=None)), *said, TextDelta("a")) == []


OPEN_CALL = '<tool_call>{"name": "add", "arguments": {"a": "'


@pytest.mark.parametrize(
    ("before", "again", "output"),
    [
        ([], TextDelta("\n"), ("", "")),
        ([TextDelta("<think>")], TextDelta("\n"), ("", "")),
        ([TextDelta("<think>hm")], TextDelta(" \n"), ("hm", "")),
        ([TextDelta("<think>hm</think>")], TextDelta("\n\n"), ("hm", "")),
        ([], ReasoningDelta("\n"), ("", "")),
        ([ReasoningDelta("hm")], ReasoningDelta(" "), ("hm", "")),
        ([ReasoningDelta("hm")], TextDelta("\n"), ("hm", "")),
        ([TextDelta("So: ")], TextDelta("ha "), None),
        ([TextDelta(OPEN_CALL)], TextDelta("ha "), None),
        ([TextDelta(TAGGED.replace("signal", "add"))], TextDelta("ha "), None),
    ],
    ids=[
        *("head", "in a thought", "thought's end", "behind a thought"),
        *("reasoning_content", "its end", "between it and the text"),
        *("shown", "open call", "behind a call"),
    ],
)
@pytest.mark.parametrize("piece", [1, 50])
@pytest.mark.parametrize("prompted", [False, True])
def test_a_loop_that_nobody_sees_ends_the_request(
    before: list[StreamEvent],
    again: TextDelta | ReasoningDelta,
    output: tuple[str, str] | None,
    piece: int,
    prompted: bool,
) -> None:
    request = begun(with_tools(max_tokens=None), prompted=prompted)
    assert hear(request, *before) == []
    said = 0
    effects: Effects = []
    while not effects:
        assert said < 3 * 8192, "no end"
        effects = hear(request, type(again)(again.text * piece, piece))
        said += piece * len(again.text)
    assert said >= 8192 - len(again.text)
    result = failed(effects, "repeated_text_loop", CLOSE).result
    if output is not None:
        assert (result["reasoning"], result["text"].strip()) == output


@pytest.mark.parametrize("ending", ["cancelled", "abandoned", "error record", "disconnected"])
@pytest.mark.parametrize("prompted", [False, True])
def test_what_was_held_back_is_no_loop_and_not_cut_when_the_request_ends_otherwise(
    ending: str, prompted: bool
) -> None:
    request = begun(with_tools(), prompted=prompted)
    half_a_call = (
        '<tool_call>{"name": "add", "arguments": {"a": [\n' + f'"{"y" * 40}",\n' * 20 + '"and th'
    )
    hear(request, TextDelta("a " + half_a_call))
    assert request.read_output(0, 0)["text"] == "a "
    result = ended(ENDINGS[ending](request), CLOSE).result
    assert result["text"] == "a " + half_a_call
    assert result["fail_reason"] != "repeated_line_loop"


@pytest.mark.parametrize(
    ("params", "tokens", "is_over"),
    [
        ({"max_tokens": 100}, 189, False),
        ({"max_tokens": 100}, 190, True),
        ({"max_tokens": 100.0}, 189, False),
        ({"max_tokens": 100.0}, 190, True),
        ({"max_tokens": math.inf}, 10_000, False),
        ({"max_tokens": 100, "n_predict": 1000}, 1000, False),
        ({"max_tokens": -1}, 10_000, False),
        ({}, 4096 * 5 // 4 + 65, True),
    ],
)
def test_a_server_that_keeps_to_no_limit_is_cut_off_far_beyond_it(
    params: Any, tokens: int, is_over: bool
) -> None:
    said = [TextDelta(f"{number} ") for number in range(tokens)]
    effects = hear(begun(params=params), *said)
    assert bool(effects) is is_over
    if is_over:
        result = ended(effects, CLOSE).result
        assert (result["state"], result["finish_reason"]) == ("completed", "max_tokens")
        assert result["text"] == "".join(delta.text for delta in said)


def test_a_server_that_reports_the_same_count_for_ever_is_cut_off() -> None:
    request = begun(params={"max_tokens": 100})
    said = [(TextDelta(f"{number} "), Usage(10, 1, 0)) for number in range(190)]
    effects = hear(request, *(event for pair in said for event in pair))
    assert ended(effects, CLOSE).result["finish_reason"] == "max_tokens"


# ---------------------------------------------------------------- the body


def body(
    of: WorkerConfig | None = None, params: dict[str, Any] | None = None, tools: Any = ()
) -> dict[str, Any]:
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


def test_params_win_over_default_params_and_these_over_the_workers_own() -> None:
    instead = {
        "return_progress": False,
        "stream_options": {},
        "reasoning_format": "none",
        "sse_ping_interval": -1,
    }
    changed = {**instead, "max_tokens": 5, "unknown_to_everyone": {"a": [1, None]}}
    of = config(max_tokens=1, default_params=changed)
    assert body(params=changed) == body(of) == body() | changed
    assert body(of, {"max_tokens": 4, "seed": 5}) == body(of) | {"max_tokens": 4, "seed": 5}
    assert "max_tokens" not in body(config(max_tokens=None))


def test_messages_tools_and_stream_are_the_workers_and_the_callers_params_stay_as_they_were() -> (
    None
):
    owned: dict[str, Any] = {"messages": [], "tools": [{"x": 1}], "stream": False}
    before = copy.deepcopy(owned)
    assert body(config(default_params=owned), owned) == body()
    assert body(params=owned, tools=[ADD])["tools"] == [ADD]
    assert owned == before
