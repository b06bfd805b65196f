"""Conversations with one request, from its prompt to its record."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from llama_worker.bios import STATUS_OPEN
from llama_worker.config.profiles import LoopDetector
from llama_worker.config.settings import WorkerConfig
from llama_worker.request.messages import (
    AskIfServerDied,
    CallTool,
    CancelRequest,
    CloseStream,
    DropTool,
    PostChat,
    RequestEnded,
    StreamEvents,
    ToolsRefused,
    WriteBios,
)
from llama_worker.request.report import lost_record
from llama_worker.request.table import Admitted
from llama_worker.request.turn import Turn
from llama_worker.stream.decoder import StreamDecoder
from llama_worker.stream.events import (
    Done,
    EmptyRecord,
    PromptReport,
    ReasoningDelta,
    ServerError,
    StreamEvent,
    TextDelta,
    ToolCallDelta,
    UsageReport,
)
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.lazy_reading import MAX_HOLD_S, WAKE_INTERVAL_S
from llama_worker.stream.turn_end import NO_FINISH_REASON, TurnEnd
from llama_worker.types.hooks import BiosContext, BiosText
from llama_worker.types.request import RequestFailReason
from tests.tables import cases
from tests.unit.config.cases import config
from tests.unit.request.playbook import (
    ADD,
    BOOM,
    CALLS,
    CANCEL,
    LENGTH,
    LINE,
    OPENED,
    PLAIN,
    RESET,
    RESTARTED,
    SERVER_DIED,
    SERVER_IS_ALIVE,
    SERVER_IS_GONE,
    SIGNAL,
    STOP,
    TAGGED,
    TOOLS_REFUSED,
    UNIX,
    WITH_TOOLS,
    Ends,
    Event,
    Play,
    asked,
    bios,
    call,
    closed,
    disconnected,
    failure,
    generating,
    in_tools,
    reading_rest,
    returned,
    settling,
    with_tools,
)

CLOSE, DROP = CloseStream(turn_id=(7, 1)), DropTool(turn_id=(7, 1))
CLOSE_SECOND = CloseStream(turn_id=(7, 2))
Events = list[Event | tuple[StreamEvent, ...]]


def tell(play: Play, events: Events) -> Play:
    for event in events:
        play >> event
    return play


# ---------------------------------------------------------------- to completion


def test_a_stream_to_its_completion() -> None:
    play = asked()
    assert [message["role"] for message in play.body["messages"]] == ["system", "user"]
    phases = [play.request.phase]
    events: Events = [OPENED, (EmptyRecord(), PromptReport(5, 10, 2)), ReasoningDelta("hm")]
    for at, event in enumerate(events, 101):
        assert play >> float(at) >> event
        phases.append(play.request.phase)
    assert phases == ["waiting", "prefill", "prefill", "generating"]
    assert play >> 104.0 >> (TextDelta("Hel"), TextDelta("lo")) >> 105.0 >> STOP
    assert play >> 105.1 >> UsageReport(10, 4, 2)
    assert play >> 105.2 >> Done() << CLOSE << Ends("stop", text="Hello", reasoning="hm")
    assert play.record.result == {
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
            play.body["messages"][-1],
            {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 2},
        "timings": pytest.approx({"ttft_s": 3.0, "total_s": 5.2, "tokens_per_second": 2.0}),
    }
    assert play.record.http_status is None
    progress = play.request.progress()
    kinds = (play.record.is_leased, progress.in_one_piece, progress.links_media)
    assert not any(kinds)
    assert play.record.copy_of_result() == play.record.result
    assert play.record.copy_of_status() == play.record.status


def test_what_a_status_says_on_the_way() -> None:
    play = asked(WITH_TOOLS)
    assert play >> 101.0 >> OPENED >> 102.0 >> PromptReport(5, 10, 2)
    assert play >> 103.0 >> TextDelta("x" * 300) >> 104.0 >> ()  # a keepalive
    play.request.saw_liveness(103.5)
    assert play.request.status() == {
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
    progress = play.request.progress()
    assert (progress.headers_at, progress.last_data_at) == (101.0, 103.0)
    assert progress.last_stream_byte_at == 104.0


def last_progress_at(play: Play) -> float | None:
    return play.request.status().get("last_progress_at")


def test_the_latest_progress_is_data_or_seen_work() -> None:
    play = asked(WITH_TOOLS)
    play.request.saw_liveness(99.0)  # before the request
    assert last_progress_at(play) is None
    play.request.saw_liveness(101.0)
    assert last_progress_at(play) == UNIX + 101.0
    assert play >> 102.0 >> OPENED >> PromptReport(5, 10, 2)
    assert last_progress_at(play) == UNIX + 102.0


def test_the_latest_progress_stays_in_the_next_turn() -> None:
    play = in_tools()  # the latest data at 102.0
    assert play >> 104.0 >> returned("1") << PostChat
    assert last_progress_at(play) == play.request.status()["last_stream_byte_at"] == UNIX + 102.0
    play.request.saw_liveness(103.0)
    assert last_progress_at(play) == UNIX + 103.0


def test_output_is_read_from_any_offset() -> None:
    play = asked()
    assert play >> (ReasoningDelta("hmm"), TextDelta("Hello"))
    whole = {"ok": True, "text": "Hello", "reasoning": "hmm", "done": False}
    whole |= {"text_offset": 5, "reasoning_offset": 3}
    assert play.request.read_output(0, 0) == whole
    assert play.request.output_chars == (5, 3)
    assert play.request.read_output(3, 3) == whole | {"text": "lo", "reasoning": ""}
    assert play >> CANCEL << CLOSE << Ends("canceled")
    rest = {"text": "", "reasoning": "", "text_offset": 9, "done": True}
    assert play.request.read_output(9, 3) == whole | rest


def test_messages_for_others_change_nothing() -> None:
    late = StreamEvents(turn_id=(7, 0), events=(Done(),), at=104.0)
    assert generating() >> late >> CancelRequest(request_id=8, reply=CANCEL.reply)


# ---------------------------------------------------------------- how a turn ends


def test_a_turn_settles_two_seconds_after_its_finish() -> None:
    play = settling()
    assert play >> 104.0 >> STOP >> 104.9  # said again, it gives no more time
    assert play.request.progress().last_data_at == 103.0
    assert play.request.phase == "generating"
    assert play >> 105.0 << CLOSE << Ends("stop", usage=None)


@pytest.mark.parametrize("why", [None, RESET])
def test_a_connection_may_end_after_the_finish_reason(why: StreamFailure | None) -> None:
    assert settling() >> closed(why) << CLOSE << Ends("stop", text="a")


MALFORMED = '<tool_call>{"name": "add"}</tool_call>'


@pytest.mark.parametrize(
    ("said", "outcome", "exits", "not_run"),
    [
        ([Done()], "stop", 0, []),
        ([LENGTH, Done()], "max_tokens", 0, []),
        ([call("signal"), CALLS, Done()], "stop", 1, []),
        ([call("signal"), call("add", "{", 1), LENGTH, Done()], "max_tokens", 1, [("add", "{")]),
        ([call("signal"), call("add", "{}", 1), Done()], "tool_parse_error", 1, [("add", "{}")]),
        ([TextDelta(MALFORMED), STOP, Done()], "tool_parse_error", 0, [("", MALFORMED)]),
    ],
    ids=["no finish reason", "limit", "exits alone", "cut off", "calls unfinished", "malformed"],
)
def test_how_turns_end_requests(
    said: list[StreamEvent], outcome: str, exits: int, not_run: list[tuple[str, str]]
) -> None:
    play = asked(WITH_TOOLS, prompted=isinstance(said[0], TextDelta))
    text = "a" + "".join(event.text for event in said if isinstance(event, TextDelta))
    end = Ends(outcome, text=text, tool_iters_remaining=8)
    assert play >> (TextDelta("a"), *said) << CLOSE << end
    assert len(play.signals) == len(play.record.result["signals"]) == exits
    trace = [(e["tool_name"], e["arguments"], e["error"]) for e in play.record.result["tool_trace"]]
    assert trace == [(name, arguments, f"not run: {outcome}") for name, arguments in not_run]
    assert all(isinstance(e["tool_call_id"], str) for e in play.record.result["tool_trace"])


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ServerError("boom", 500, "of_a_kind"), "boom (of_a_kind), code 500"),
        (ServerError("boom", None, None), "boom"),
        (ServerError("\ud800" + "." * 3000, None, None), "\ufffd" + "." * 1999),
    ],
)
def test_an_error_record_fails_a_finished_turn(error: ServerError, detail: str) -> None:
    play = settling()
    said = [play.body["messages"][-1], {"role": "assistant", "content": "a"}]
    end = Ends("server_error", text="a", fail_detail=detail, conversation=said)
    assert play >> (error, Done()) << CLOSE << end
    assert play.record.http_status == error.code


@pytest.mark.parametrize("context", [None, {"n_prompt_tokens": 5000, "n_ctx": 4096}])
def test_a_prompt_too_long_has_its_reason(context: Any) -> None:
    refusal = StreamFailure(
        reason=RequestFailReason.CONTEXT_EXCEEDED, detail="HTTP 400: no room", context=context
    )
    record = ServerError("no room", 400, "exceed_context_size_error", context)
    for event, detail in (
        (closed(refusal), "HTTP 400: no room"),
        (record, "no room (exceed_context_size_error), code 400"),
    ):
        end = Ends("context_exceeded", context=context, fail_detail=detail)
        assert asked() >> event << CLOSE << end


def test_a_report_of_malformed_output_accuses_no_server() -> None:
    message = "The model produced output that does not match the expected peg-native format"
    refusal = closed(failure("http_error", f"HTTP 500: {message}", 500))
    for of, event, outcome in (
        (WITH_TOOLS, ServerError(message, 500, None), "tool_parse_error"),
        (WITH_TOOLS, refusal, "tool_parse_error"),
        (PLAIN, ServerError(message, 500, None), "server_error"),
        (PLAIN, refusal, "http_error"),
    ):
        play = asked(of)
        assert play >> TextDelta("a") >> event << CLOSE << Ends(outcome, text="a")
        assert play.record.http_status is None
    play = asked(WITH_TOOLS)  # what the host has sent
    assert play >> ServerError(message, 400, None) << CLOSE << Ends("server_error")
    assert play.record.http_status == 400


def test_full_context_shared_by_slots_accuses_no_server() -> None:
    """All that use it fail at once."""
    message = "Context size has been exceeded."
    record = ServerError(message, 500, "server_error")
    refusal = closed(failure("http_error", f"HTTP 500: {message} (server_error)", 500))
    for event, outcome in ((record, "server_error"), (refusal, "http_error")):
        play = asked()
        assert play >> event << CLOSE << Ends(outcome)
        assert play.record.http_status is None


# --------------------------------------------------------------- a broken connection, a dead server


@pytest.mark.parametrize("why", [None, RESET, failure("connect_failed", "refused")])
def test_a_broken_connection_waits_for_its_reason(why: StreamFailure | None) -> None:
    play = generating()
    assert play >> 105.0 >> closed(why) >> 105.19
    assert play >> 105.2 << AskIfServerDied(request_id=7)
    reason, detail = (why.reason, why.detail) if why else (RESET.reason, NO_FINISH_REASON)
    assert play >> SERVER_IS_ALIVE << CLOSE << Ends(reason, text="a", fail_detail=detail)


@pytest.mark.parametrize("events", [[], [103.2], [103.2, SERVER_IS_GONE, 113.0]])
def test_a_servers_death_explains_a_broken_connection(events: Events) -> None:
    play = disconnected()
    for event in events:
        play >> event
        play.drop_effects()
    end = Ends("server_died", text="a", fail_detail="exited with -9")
    assert play >> SERVER_DIED << CLOSE << end


@pytest.mark.parametrize(
    ("events", "outcome"),
    [([SERVER_IS_GONE, 113.2], "server_died"), ([113.2], "stream_disconnected")],
)
def test_news_that_never_comes_is_not_waited_for(events: Events, outcome: str) -> None:
    play = disconnected()
    assert play >> 103.2 << AskIfServerDied
    assert tell(play, events) << CLOSE << Ends(outcome, text="a")


@pytest.mark.parametrize("last", [closed(), closed(RESET), 106.0])
@pytest.mark.parametrize("opened", [True, False])
def test_what_a_dead_server_sent_is_heard(last: Event, opened: bool) -> None:
    play = reading_rest(generating() if opened else asked())
    assert (play.request.deadline, play.request.progress().concluding) == (106.0, True)
    assert play >> TextDelta("bc") >> 105.9 >> TextDelta("d")
    text = "abcd" if opened else "bcd"
    assert play >> last << CLOSE << Ends("server_died", text=text, fail_detail="exited with -9")


@pytest.mark.parametrize("last", [closed(), Done(), 106.0, RESTARTED])
@pytest.mark.parametrize("begin", [generating, settling])
def test_a_dead_server_that_had_finished_had_answered(
    begin: Callable[[], Play], last: Event
) -> None:
    play = reading_rest(begin())
    end = Ends("stop", tokens_received=4)
    assert play >> (STOP, UsageReport(3, 4, None)) >> last << CLOSE << end


@pytest.mark.parametrize("last", [closed(), Done()])
def test_calls_of_a_dead_server_are_not_begun(last: Event) -> None:
    play = reading_rest(asked(WITH_TOOLS))
    assert play >> (TextDelta("a"), call("add"), CALLS) >> last << CLOSE << Ends("server_died")


# ---------------------------------------------------------------- cancel, abandon, fail

IN_STREAM: list[Callable[[], Play]] = [asked, generating, settling, disconnected, reading_rest]
in_every_phase = pytest.mark.parametrize("begin", IN_STREAM)


@in_every_phase
def test_a_cancel_closes_the_connection(begin: Callable[[], Play]) -> None:
    play = begin()
    text = play.request.read_output(0, 0)["text"]
    end = Ends("canceled", text=text, output_chars=len(text), completed_at=play.now + UNIX)
    assert play >> CANCEL << CLOSE << end


def in_second_prompt() -> Play:
    """The tool has returned, and the BIOS of the second turn is not written yet."""
    play = in_tools()
    play.writes_bios = False
    assert play >> returned("3") << WriteBios
    return play


UNSENT = StreamFailure(
    reason=RequestFailReason.UNKNOWN_ERROR, detail="no thread is left", is_unsent=True
)


@cases(
    "begin, end, is_broken_off",
    {
        "the BIOS is not written": (lambda: Play(writes_bios=False), CANCEL, False),
        "of the second turn": (in_second_prompt, CANCEL, False),
        "perhaps sent": (asked, CANCEL, True),
        "not sent, by its stream": (asked, closed(UNSENT), False),
        "generating": (generating, CANCEL, True),
        "in its tools": (in_tools, CANCEL, False),
    },
)
def test_only_what_was_sent_is_broken_off(
    begin: Callable[[], Play], end: Event, is_broken_off: bool
) -> None:
    play = begin()
    play.drop_effects()
    play >> end
    play.drop_effects()
    assert play.record.is_broken_off is is_broken_off


@in_every_phase
def test_who_is_abandoned_fails_with_the_reason_told(begin: Callable[[], Play]) -> None:
    outcome = {settling: "stop", reading_rest: "server_died"}.get(begin, "worker_restarted")
    detail = {"worker_restarted": "stall", "server_died": "exited with -9"}.get(outcome)
    assert begin() >> RESTARTED << CLOSE << Ends(outcome, fail_detail=detail)


@pytest.mark.parametrize("said", [(TextDelta("a"),), (TextDelta("a"), call("add"), CALLS)])
def test_an_aborted_stream_waits_for_the_workers_reason(said: tuple[StreamEvent, ...]) -> None:
    play = asked(WITH_TOOLS)
    assert play >> said >> closed(RESET, is_aborted=True)
    assert play >> RESTARTED << CLOSE << Ends("worker_restarted", text="a")


def raises(*_: Any, **__: Any) -> Any:
    raise IndexError("a bug")


@in_every_phase
def test_failure_of_its_own_keeps_what_was_shown(
    begin: Callable[[], Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    play = begin()
    text = play.request.read_output(0, 0)["text"]
    monkeypatch.setattr(Turn, "finish", raises)
    monkeypatch.setattr(Turn, "calls", raises)
    with pytest.raises(IndexError):
        play >> CANCEL
    assert play.fail("a bug") << CLOSE << Ends("unknown_error", text=text, fail_detail="a bug")
    told_again = play.fail("once more")
    assert told_again << Ends("unknown_error", text=text, fail_detail="a bug")


def test_what_is_told_of_lost_request_is_bounded() -> None:
    lost, detail = Admitted(1, 0, "j", 0.0), f"KeyError: s3cret \ud800{'.' * 3000}"
    record = lost_record(lost, detail, 1.0, unix=UNIX.__add__, secret="s3cret")
    shown = f"KeyError: *** \ufffd{'.' * 3000}"[:2000]
    assert (record.result["fail_detail"], record.status["fail_detail"]) == (shown, shown)
    assert (record.status["tool_iters_remaining"], record.has_media) == (0, False)


def test_a_signal_is_told_although_the_step_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    play = asked(WITH_TOOLS)
    monkeypatch.setattr(TurnEnd, "feed", raises)
    with pytest.raises(IndexError):
        play >> (call("signal", '{"s": 1}'), call("add", index=1), Done())
    assert play.fail("a bug") << CLOSE << Ends("unknown_error")
    assert play.signals == [{"s": 1}]


# ---------------------------------------------------------------- the BIOS


def test_the_provider_is_told_time_and_budget() -> None:
    seen: list[BiosContext] = []

    def once(ctx: BiosContext) -> BiosText:
        seen.append(ctx)
        if ctx.tool_iters_remaining < 8:
            raise LookupError("no prompt today")
        return BiosText("stable", "volatile")

    play = in_tools(with_tools(bios_provider=once, timezone_name="Europe/Vienna"))
    detail = "the BIOS provider raised LookupError: no prompt today"
    end = Ends("prompt_error", text="Let me add.", fail_detail=detail)
    assert play >> 110.0 >> returned("1") << end
    assert [context.tool_iters_remaining for context in seen] == [8, 7]
    assert [context.now.timestamp() for context in seen] == [1100.0, 1110.0]
    first = seen[0]
    assert (first.worker_name, first.tool_call_mode) == ("w", "native")
    assert (first.timezone_name, first.now.utcoffset() is None) == ("Europe/Vienna", False)
    assert (first.normal_tools, first.exit_tools) == ((ADD,), (SIGNAL,))


def prompting() -> Play:
    play = Play(writes_bios=False)
    assert play << WriteBios(turn_id=(7, 1), iterations_left=8, prompted=False)
    return play


def test_a_request_waits_while_the_bios_is_written() -> None:
    play = prompting()
    status = play.request.status()
    assert (status["state"], status["phase"], play.request.deadline) == ("running", "waiting", 105)
    assert play.request.progress().concluding, "its watch has nothing to judge"
    play.turn = (7, 1)
    assert play >> bios()  # of another turn
    play.turn = (7, 0)
    assert play >> 101.0 >> bios() << PostChat
    assert play.body["messages"][0]["content"].startswith("bios")
    assert (play.request.deadline, play.request.progress().turn_started_at) == (None, 101.0)
    play.turn = (7, 0)
    assert play >> bios(), "said twice"


@pytest.mark.parametrize("at", [105.0, 106.0])  # a second late is just late
def test_a_late_bios_is_a_prompt_error(at: float) -> None:
    detail = "the BIOS provider did not return within bios_timeout_s 5 s"
    assert prompting() >> 104.9 >> at << Ends("prompt_error", fail_detail=detail) >> bios()


# ---------------------------------------------------------------- tools


def test_calls_run_one_by_one() -> None:
    play = asked(WITH_TOOLS)
    before = play.body
    calls = (call("add", '{"a": 1}'), call("signal", '{"s": 1}', 1), call("add", "", 2))
    assert play >> 101.0 >> (ReasoningDelta("hm"), TextDelta("Adding."), *calls, CALLS)
    assert play >> 102.0 >> Done() << CLOSE << CallTool
    assert (play.request.deadline, play.call_id) == (112.0, "c00000001")
    status = play.request.status()
    assert (status["state"], status["phase"]) == ("tool_running", "tool")
    assert (status["running_tool"], status["tool_calls_count"]) == ("add", 2)
    assert status["tool_iters_remaining"] == 7
    signal = {"tool_name": "signal", "arguments": {"s": 1}, "emitted_at": 1101.0}
    assert status["signals"] == [signal]
    play.turn = (7, 2)
    assert play >> returned("of another batch") >> returned("of another batch", ok=False)
    play.turn = (7, 1)
    assert play >> 103.0 >> returned("one") << CallTool
    assert (play.request.deadline, play.call_id) == (113.0, "c00000002")
    assert play >> 105.0 >> returned("two") << PostChat
    assert play.turn == (7, 2)
    *earlier, assistant, one, two = play.body["messages"]
    assert earlier == before["messages"]
    assert (assistant["content"], assistant["reasoning_content"]) == ("Adding.", "hm")
    assert [normal["id"] for normal in assistant["tool_calls"]] == ["c00000001", "c00000002"]
    assert one == {"role": "tool", "tool_call_id": "c00000001", "name": "add", "content": "one"}
    assert two["content"].startswith(f"two\n\n{STATUS_OPEN}")
    assert play.body["tools"] == before["tools"] == [ADD, SIGNAL]
    progress = play.request.progress()
    assert (progress.phase, progress.first_token_at) == ("waiting", None)
    assert progress.turn_started_at == 105.0


def test_a_follow_up_gives_new_call_ids() -> None:
    earlier: list[Any] = []
    for requests_count in (1, 2):
        play = asked(WITH_TOOLS, messages=earlier)
        assert play >> 101.0 >> (call("add", "{}"), call("add", "{}", 1), CALLS)
        assert play >> 102.0 >> Done() << CLOSE << CallTool >> returned("1") << CallTool
        assert play >> returned("2") << PostChat
        assert play >> (call("add"), CALLS, Done()) << CLOSE_SECOND << CallTool
        assert play >> returned("3") << PostChat >> TextDelta("All.") >> STOP
        assert play >> Done() << CloseStream << Ends("stop", tool_calls_count=3)
        earlier += play.record.result["conversation"]
        ids = [each["id"] for message in earlier for each in message.get("tool_calls", ())]
        assert len(set(ids)) == len(ids) == 3 * requests_count
        assert ids == [message["tool_call_id"] for message in earlier if message["role"] == "tool"]


def test_a_follow_up_repeats_the_conversation() -> None:
    earlier: list[Any] = [{"role": "user", "content": "Before."}]
    play = asked(WITH_TOOLS, messages=earlier)
    assert play >> (TextDelta("Let me add."), call("add"), CALLS) >> Done() << CLOSE << CallTool
    assert play >> returned("3") << PostChat
    sent = play.body["messages"]
    assert play >> (ReasoningDelta("So it is."), TextDelta("It is 3."), STOP)
    assert play >> Done() << CLOSE_SECOND << Ends("stop")
    conversation = play.record.result["conversation"]
    roles = [message["role"] for message in conversation]
    assert roles == ["user", "assistant", "tool", "assistant"]
    answer = {"role": "assistant", "content": "It is 3.", "reasoning_content": "So it is."}
    follow_up = asked(WITH_TOOLS, messages=[*earlier, *conversation]).body["messages"]
    assert json.dumps(follow_up[:-1]) == json.dumps([*sent, answer])


def test_output_is_that_of_every_turn() -> None:
    play = in_tools()
    assert play >> returned("3") << PostChat
    said = (ReasoningDelta("ok"), TextDelta("It is 3."), UsageReport(20, 6, None), STOP)
    usage = {"prompt_tokens": 30, "completion_tokens": 11, "cached_tokens": 2}
    end = Ends("stop", text="Let me add.It is 3.", reasoning="ok", usage=usage, tokens_received=11)
    assert play >> 104.0 >> said >> Done() << CLOSE_SECOND << end
    assert play.record.result["timings"]["ttft_s"] == pytest.approx(1.0)


def trace_of(play: Play, *names: str) -> list[Any]:
    return [tuple(e.get(name) for name in names) for e in play.record.result["tool_trace"]]


RAISED = "tool 'add' raised ValueError: no s3cret \ud800" + "." * 3000
SHOWN = f"tool 'add' raised ValueError: no *** \ufffd{'.' * 3000}"[:2000]


def test_a_failed_tool_fails_the_request() -> None:
    play = in_tools(with_tools(api_key="s3cret"))
    end = Ends("tool_execution_error", text="Let me add.", fail_detail=SHOWN, tokens_received=5)
    assert play >> 103.0 >> returned(RAISED, ok=False) << DROP << end
    assert play.record.result["usage"]["completion_tokens"] == 5
    assert trace_of(play, "started_at", "error") == [(1102.0, SHOWN)]


LATE = "tool 'add' did not return within tool_timeout_s 10 s"


def test_call_taking_too_long_fails_the_request() -> None:
    play = in_tools(calls_count=2)
    assert play >> 111.9 >> returned("one") << CallTool
    end = Ends("tool_execution_error", fail_detail=LATE)
    assert play >> 112.0 >> 121.8 >> 121.9 << DROP << end
    assert trace_of(play, "ok", "error") == [(True, None), (False, LATE)]
    assert play >> returned("too late")


def test_the_model_may_be_told_an_error() -> None:
    play = in_tools(with_tools(tool_errors="tell", api_key="s3cret"), calls_count=2)
    assert play >> 103.0 >> returned(RAISED, ok=False) << CallTool
    assert play >> 113.0 << DROP << PostChat
    assert play >> returned("late")
    *_, one, two = play.body["messages"]
    assert one["content"] == SHOWN
    assert two["content"].startswith(f"{LATE}\n\n")
    assert play >> (TextDelta("No luck."), STOP, Done()) << CLOSE_SECOND << Ends("stop")
    assert trace_of(play, "ok", "result") == [(False, one["content"]), (False, LATE)]


def test_a_dropped_call_answers_for_no_other() -> None:
    play = in_tools(with_tools(tool_errors="tell"), calls_count=2)
    dropped = play.call_id
    assert play >> 112.0 << DROP << CallTool
    assert play >> returned("late", call_id=dropped) >> returned("two") << PostChat
    assert play >> CANCEL << CLOSE_SECOND << Ends("canceled")
    assert trace_of(play, "result") == [(LATE,), ("two",)]


@pytest.mark.parametrize(
    ("event", "outcome"),
    [(CANCEL, "canceled"), (RESTARTED, "worker_restarted"), (SERVER_DIED, "server_died")],
)
def test_every_call_of_a_turn_is_traced(event: Event, outcome: str) -> None:
    play = in_tools(calls_count=3)
    assert play >> 103.0 >> returned("one") << CallTool >> 105.0 >> event << DROP << Ends(outcome)
    assert trace_of(play, "arguments", "error", "started_at", "duration_s") == [
        ({"n": 0}, None, 1102.0, 1.0),
        ({"n": 1}, f"the request ended while the tool was running: {outcome}", 1103.0, 2.0),
        ('{"n": 2}', f"not run: {outcome}", 1105.0, 0.0),
    ]
    assert trace_of(play, "iteration") == [(1,)] * 3


def test_a_turn_costs_one_iteration() -> None:
    play = in_tools(with_tools(max_tool_iterations=1), calls_count=3)
    assert play >> returned("1") << CallTool >> returned("2") << CallTool
    assert play >> returned("3") << PostChat
    assert play.request.status()["tool_iters_remaining"] == 0
    detail = "the tool iteration budget (max_tool_iterations) is exhausted"
    end = Ends("tool_execution_error", fail_detail=detail)
    assert play >> (TextDelta("a"), call("add"), CALLS, Done()) << CLOSE_SECOND << end
    exhausted = (2, "not run: tool_execution_error")
    assert trace_of(play, "iteration", "error") == [(1, None)] * 3 + [exhausted]


def test_calls_not_run_are_traced_as_written() -> None:
    play = asked(WITH_TOOLS)
    calls = (call("add", '{"a": 1}'), call("signal", "{}", 1), call("zap", "{", 2))
    assert play >> (TextDelta("a"), *calls) >> 102.0
    assert play >> (CALLS, Done()) << CLOSE << Ends("tool_parse_error", text="a")
    assert "zap" in play.record.result["fail_detail"]
    assert play.signals == [{}]
    not_run = {"iteration": 1, "started_at": 1102.0, "duration_s": 0.0, "ok": False}
    assert play.record.result["tool_trace"] == [
        {"tool_call_id": call_id, "tool_name": name, "arguments": arguments, **not_run}
        | {"error": "not run: tool_parse_error"}
        for call_id, name, arguments in [("id0", "add", '{"a": 1}'), ("id2", "zap", "{")]
    ]


FUNCTION = {"type": "function", "function": {"name": "add"}}


@cases(
    "choice, prompted, later",
    {
        "required": ("required", False, None),
        "one function": (FUNCTION, False, None),
        "auto": ("auto", False, "auto"),
        "none": ("none", False, "none"),
        "prompted": ("required", True, None),
    },
)
def test_a_call_is_forced_until_the_first(choice: Any, prompted: bool, later: str | None) -> None:
    play = asked(WITH_TOOLS, params={"tool_choice": choice}, prompted=prompted)
    assert play.body.get("tool_choice") == (None if prompted else choice)
    assert play >> (call("add"), CALLS, Done()) << CLOSE << CallTool
    assert play >> returned("3") << PostChat
    assert play.body.get("tool_choice") == later
    assert play >> (TextDelta("It is 3."), STOP, Done()) << CLOSE_SECOND << Ends("stop")


# ---------------------------------------------------------------- exit calls


def test_exit_call_is_recorded_once_complete() -> None:
    play = asked(WITH_TOOLS)
    more = ToolCallDelta(index=0, call_id=None, name=None, arguments="}")
    assert play >> 101.0 >> (TextDelta("a"), call("signal", '{"s": {"t": 1'))
    assert play >> 102.0 >> more  # the end of the inner object
    assert (play.signals, play.request.status()["signals"]) == ([], [])
    assert play >> 103.0 >> more
    assert play.signals == [{"s": {"t": 1}}]
    (signal,) = play.request.status()["signals"]
    assert (signal["arguments"], signal["emitted_at"]) == ({"s": {"t": 1}}, 103.0 + UNIX)
    assert play >> (TextDelta("b"), STOP, Done()) << CLOSE << Ends("stop", signals=[signal])
    assert len(play.signals) == 1


@pytest.mark.parametrize("following", ["signal", "add"])
@pytest.mark.parametrize(
    "arguments", [{}, {"s": list(range(5_000))}], ids=["none", "too long to be parsed early"]
)
def test_next_call_completes_an_exit_call(arguments: dict[str, Any], following: str) -> None:
    play = asked(WITH_TOOLS)
    assert play >> call("signal", json.dumps(arguments) if arguments else "")
    assert play.signals == []
    assert play >> call(following, '{"a": 1', 1)
    assert play.signals == [arguments]
    assert play >> ToolCallDelta(index=1, call_id=None, name=None, arguments="}")
    assert play.signals == [arguments, {"a": 1}][: 1 + (following == "signal")]


@pytest.mark.parametrize(
    ("of", "prompted", "max_hold_s"),
    [
        (WITH_TOOLS, True, WAKE_INTERVAL_S),
        (WITH_TOOLS, False, MAX_HOLD_S),
        (with_tools(exit_tools=()), True, MAX_HOLD_S),
    ],
)
def test_text_that_may_hold_signal_is_told_sooner(
    of: WorkerConfig, prompted: bool, max_hold_s: float
) -> None:
    play = Play(of, prompted=prompted)
    assert play << PostChat(turn_id=(7, 1), body=play.body, max_hold_s=max_hold_s)


@pytest.mark.parametrize("prompted", [True, False])
def test_native_tagged_exit_calls_count_at_the_end(prompted: bool) -> None:
    play = asked(WITH_TOOLS, prompted=prompted)
    assert play >> TextDelta(TAGGED[:-1])
    assert play.signals == []
    assert play >> TextDelta(TAGGED[-1:])
    assert play.signals == ([{"s": 1}] if prompted else [])
    assert play >> (TextDelta("b"), STOP, Done()) << CLOSE << Ends("stop")
    assert play.signals == [{"s": 1}]


@pytest.mark.parametrize("prompted", [True, False])
def test_host_that_wants_no_calls_gets_their_text(prompted: bool) -> None:
    play = asked(with_tools(default_params={"tool_choice": "none"}), prompted=prompted)
    assert play >> (TextDelta(TAGGED), STOP, Done()) << CLOSE << Ends("stop", text=TAGGED)
    assert play.signals == []


def test_foreign_call_in_native_text_is_text() -> None:
    foreign = TAGGED.replace("signal", "get_weather")
    play = asked(WITH_TOOLS)
    assert play >> TextDelta(f"So: {foreign} en")
    assert play.request.read_output(0, 0)["text"] == f"So: {foreign} en"
    assert (
        play >> (TextDelta("d"), STOP, Done()) << CLOSE << Ends("stop", text=f"So: {foreign} end")
    )


@pytest.mark.parametrize(
    ("said", "prompted"), [(call("signal", "{}"), False), (TextDelta(TAGGED), True)]
)
def test_exit_calls_alone_are_an_answer(said: StreamEvent, prompted: bool) -> None:
    play = asked(WITH_TOOLS, prompted=prompted)
    assert play >> (said, CALLS, Done()) << CLOSE << Ends("stop", text="")
    answer = {"role": "assistant", "content": ""}
    assert play.record.result["conversation"] == [play.body["messages"][-1], answer]
    play = asked()
    unanswered = [play.body["messages"][-1]]
    assert play >> CANCEL << CLOSE << Ends("canceled", conversation=unanswered)


ENDINGS: dict[str, Events] = {
    "completed": [(CALLS, Done())],
    "max_tokens": [(LENGTH, Done())],
    "cancelled": [CANCEL],
    "cancelled settling": [STOP, CANCEL],
    "abandoned": [RESTARTED],
    "abandoned settling": [STOP, RESTARTED],
    "error record": [BOOM],
    "disconnected": [closed(), SERVER_DIED],
    "protocol error": [closed(failure("protocol_error", "garbage"))],
    "loop": [TextDelta(LINE * 300)],
}
in_every_ending = pytest.mark.parametrize("ending", ENDINGS)


@in_every_ending
@pytest.mark.parametrize(
    ("said", "prompted"),
    [(TextDelta(TAGGED), True), (TextDelta(TAGGED), False), (call("signal", '{"s": 1}'), False)],
    ids=["prompted", "native, in the text", "native"],
)
def test_exit_calls_and_text_are_kept(ending: str, said: StreamEvent, prompted: bool) -> None:
    play = asked(WITH_TOOLS, prompted=prompted)
    assert tell(play >> (TextDelta("kept\n"), said), ENDINGS[ending]) << CLOSE << RequestEnded
    result = play.record.result
    assert [signal["arguments"] for signal in result["signals"]] == play.signals == [{"s": 1}]
    assert result["signals"] == play.record.status["signals"]
    assert result["text"].startswith("kept\n")
    assert "tool_call" not in result["text"]


@in_every_ending
def test_exit_call_without_arguments_counts_if_complete(ending: str) -> None:
    play = asked(WITH_TOOLS)
    assert tell(play >> call("signal", ""), ENDINGS[ending]) << CLOSE << RequestEnded
    (signal,) = play.record.result["signals"]
    is_complete = ending == "completed" or ending.endswith("settling")
    assert signal.get("malformed") == (None if is_complete else "")


@in_every_ending
def test_call_that_was_on_its_way_is_traced(ending: str) -> None:
    play = asked(WITH_TOOLS)
    tell(play >> call("add", '{"a": 1'), ENDINGS[ending])
    assert trace_of(play, "arguments", "ok") == [('{"a": 1', False)]


# ---------------------------------------------------------------- refused tools


@pytest.mark.parametrize("opens_thinking", [False, True])
def test_refused_tools_are_described_in_the_prompt(opens_thinking: bool) -> None:
    play = asked(WITH_TOOLS, opens_thinking=opens_thinking)
    assert play.body["tools"] == [ADD, SIGNAL]
    assert "<tool_call>" not in play.body["messages"][0]["content"]
    late = StreamEvents(turn_id=play.turn, events=(TextDelta("late"),), at=101.0)
    refused = ToolsRefused(detail=TOOLS_REFUSED.detail)
    assert play >> 101.0 >> closed(TOOLS_REFUSED) << refused << PostChat >> late
    assert (play.turn, play.request.phase) == ((7, 2), "waiting")
    system = play.body["messages"][0]["content"]
    assert "<tool_call>" in system
    assert system.endswith("Be terse.")
    tagged = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    said = (TextDelta("Adding. "), TextDelta(tagged[:15]), TextDelta(tagged[15:]))
    first = play.body
    assert play >> said >> (TextDelta(TAGGED), STOP) >> Done() << CLOSE_SECOND << CallTool
    assert play.request.read_output(0, 0)["text"] == "Adding. "
    assert play >> returned("3") << PostChat
    assert "tools" not in {*first, *play.body}
    *_, assistant, result = play.body["messages"]
    assert assistant == {"role": "assistant", "content": f"Adding. {tagged}"}
    assert "\n3\n</tool_response>" in result["content"]


@pytest.mark.parametrize(
    ("of", "prompted"),
    [(with_tools(tool_call_mode="native"), False), (PLAIN, False), (WITH_TOOLS, True)],
)
def test_a_refusal_without_another_way_is_an_error(of: Any, prompted: bool) -> None:
    play = asked(of, prompted=prompted)
    end = Ends("http_error", fail_detail=TOOLS_REFUSED.detail)
    assert play >> closed(TOOLS_REFUSED) << CLOSE << end
    assert play.record.http_status == 500


def test_a_refusal_of_a_later_turn_is_an_error() -> None:
    play = asked(WITH_TOOLS)
    assert play >> closed(TOOLS_REFUSED) << ToolsRefused << PostChat
    assert play >> closed(TOOLS_REFUSED) << CLOSE_SECOND << Ends("http_error")
    play = asked(WITH_TOOLS)
    assert play >> (call("add", "{}"), CALLS, Done()) << CLOSE << CallTool
    assert play >> returned("3") << PostChat
    assert play >> closed(TOOLS_REFUSED) << CLOSE_SECOND << Ends("http_error")


# ------------------------------------------------------------- a think tag that the template opened

TO_THE_TEMPLATE = (
    "chat_template_kwargs enable_thinking reasoning_budget thinking_budget_tokens reasoning_effort"
)


@pytest.mark.parametrize(
    ("params", "said", "outcome", "reasoning", "text"),
    [
        ({}, "abc\n</think>\n\nAns", "stop", "abc", "Ans"),
        ({}, "It is 4.", "stop", "It is 4.", "It is 4."),  # the server parses reasoning itself
        ({}, "a <", "stop", "a <", "a <"),
        ({}, "abc", "max_tokens", "abc", ""),
        ({}, "abc", "server_error", "abc", ""),
        *(({name: 0}, "a</think>b", "stop", "", "a</think>b") for name in TO_THE_TEMPLATE.split()),
    ],
)
def test_a_think_opened_by_the_template(
    params: Any, said: str, outcome: str, reasoning: str, text: str
) -> None:
    end = {"stop": STOP, "max_tokens": LENGTH}.get(outcome, BOOM)
    for of, given in ((config(default_params=params), {}), (PLAIN, params)):
        play = asked(of, params=given, opens_thinking=True)
        told = tell(play, [TextDelta(char) for char in said])
        assert told >> (end, Done()) << CLOSE << Ends(outcome, reasoning=reasoning, text=text)


@pytest.mark.parametrize(
    ("first", "second", "reasoning", "text", "sent_back"),
    [
        (TextDelta("a</think>b"), "c</think>d", "ac", "bd", ("a", "b")),
        (TextDelta("Let me."), "a</think>b", "Let me.a", "Let me.b", (None, "Let me.")),
        # it parses reasoning itself, and is believed
        (ReasoningDelta("hm"), "Answer", "hm", "Answer", ("hm", "")),
    ],
)
def test_the_template_opens_a_think_each_turn(
    first: StreamEvent, second: str, reasoning: str, text: str, sent_back: tuple[str | None, str]
) -> None:
    play = asked(WITH_TOOLS, opens_thinking=True)
    assert play >> (first, call("add"), CALLS, Done()) << CLOSE << CallTool
    assert play >> returned("3") << PostChat
    assistant = play.body["messages"][-2]
    assert (assistant.get("reasoning_content"), assistant["content"]) == sent_back
    end = Ends("stop", reasoning=reasoning, text=text)
    assert play >> (TextDelta(second), STOP, Done()) << CLOSE_SECOND << end


# ---------------------------------------------------------------- loops

# held back in native mode, behind a call that may turn out to be text
HELD = f"{TAGGED}\n{LINE * 11}"
PAIR = f"{LINE}z{LINE}"
MORE = ToolCallDelta(0, None, None, "1, 2, ")  # arguments


@pytest.mark.parametrize(
    ("said", "loop", "output", "detail"),
    [
        ([TextDelta("So:\n" + LINE * 30)], "line", ("", "So:\n" + LINE * 12), "came 12 times"),
        ([TextDelta(PAIR * 30)], "line", ("", PAIR * 12), "a block of 2 lines"),
        ([ReasoningDelta(LINE * 30)], "line", (LINE * 12, ""), f"{LINE.strip()!r} came 12 times"),
        ([TextDelta("ha " * 9000)], "text", ("", ("ha " * 9000)[:8192]), "repeat the same 3,"),
        ([call("add", "{"), *[MORE] * 2000], "text", ("", ""), "6"),
        ([TextDelta(HELD), call("add"), TextDelta(LINE)], "line", ("", HELD + LINE), "12 times"),
        ([TextDelta(HELD), TextDelta(LINE * 300)], "text", ("", "\n" + LINE * 311), "the same"),
    ],
    ids=["line", "block", "reasoning", "no line ends", "arguments", "put back", "held back"],
)
def test_a_loop_ends_the_request(
    said: list[StreamEvent], loop: str, output: tuple[str, str], detail: str
) -> None:
    play = asked(WITH_TOOLS)
    end = Ends(f"repeated_{loop}_loop", reasoning=output[0], text=output[1])
    assert play >> (*said, TextDelta("a")) << CLOSE << end
    result = play.record.result
    assert detail in result["fail_detail"]
    assert result["loop"].keys() == {loop, "repeats"}
    assert asked(with_tools(loop_detector=None)) >> (*said, TextDelta("a"))


def test_a_loop_in_what_was_held_back_until_the_end_counts() -> None:
    end = Ends("repeated_line_loop", text="\n" + LINE * 12)
    assert asked(WITH_TOOLS) >> (TextDelta(HELD + LINE), STOP, Done()) << CLOSE << end


THOUGHT = "I need the next file of the list to go on.\nSo I call the tool with its path now."


@cases(
    "said",
    {
        "text": TextDelta("I look at the next file of the list, and then at the one behind it.\n"),
        "thought": ReasoningDelta(THOUGHT),
        "no line ends": TextDelta("The next file, please. " * 50),
    },
)
def test_turns_that_begin_alike_are_no_loop(said: StreamEvent) -> None:
    play = asked(with_tools(max_tool_iterations=30))
    for number in range(30):
        path = call("add", f'{{"file": {number}}}')
        assert play >> (said, path, CALLS) >> Done() << CloseStream << CallTool
        assert play >> returned("its lines") << PostChat
    assert play >> (TextDelta("Done."), STOP) >> Done() << CloseStream << Ends("stop")


def test_loop_in_later_turn_is_cut_behind_it() -> None:
    play = in_tools()
    assert play >> returned("3") << PostChat
    end = Ends("repeated_line_loop", text="Let me add." + LINE * 12)
    assert play >> TextDelta(LINE * 30) << CLOSE_SECOND << end


@cases(
    "said, reasoning, text",
    {
        "text": ((ReasoningDelta("hm"), TextDelta(LINE * 30)), "hm", LINE * 12),
        "thought": ((TextDelta(f"<think>{LINE * 30}</think>So"),), LINE * 12, ""),
        "later turn": ((TextDelta("So."), call("add"), CALLS, Done()), "", LINE * 12),
    },
)
def test_a_conversation_ends_where_a_loop_was_cut(
    said: tuple[StreamEvent, ...], reasoning: str, text: str
) -> None:
    play = asked(WITH_TOOLS)
    play >> said
    play.drop_effects()
    if not play.has_ended:
        assert play >> returned("3") << PostChat
        play >> TextDelta(LINE * 30)
        play.drop_effects()
    answer = play.record.result["conversation"][-1]
    assert (answer.get("reasoning_content", ""), answer["content"]) == (reasoning, text)


def test_of_a_loop_200_characters_are_shown() -> None:
    play = asked(config(loop_detector=LoopDetector(long_line_repeats=2)))
    line = " ".join(map(str, range(1000)))
    assert play >> TextDelta(f"{line}\n" * 2) << CLOSE << Ends("repeated_line_loop")
    result = play.record.result
    assert result["loop"] == {"line": line[:200], "repeats": 2}
    assert result["fail_detail"] == f"the line {line[:200]!r} came 2 times in a row"


def test_a_loop_that_is_shown_is_valid_unicode() -> None:
    play = asked(WITH_TOOLS)
    said = (call("add", '{"a": "'), ToolCallDelta(0, None, None, "\ud83d" * 10_000))
    end = Ends("repeated_text_loop", loop={"text": "\ufffd", "repeats": 8192})
    assert play >> said << CLOSE << end


OPEN_CALL = '<tool_call>{"name": "add", "arguments": {"a": "'


@cases(
    "before, again, output",
    {
        "head": ((), TextDelta("\n"), ("", "")),
        "in a thought": ((TextDelta("<think>"),), TextDelta("\n"), ("", "")),
        "thought's end": ((TextDelta("<think>hm"),), TextDelta(" \n"), ("hm", "")),
        "behind a thought": ((TextDelta("<think>hm</think>"),), TextDelta("\n\n"), ("hm", "")),
        "reasoning_content": ((), ReasoningDelta("\n"), ("", "")),
        "its end": ((ReasoningDelta("hm"),), ReasoningDelta(" "), ("hm", "")),
        "between it and the text": ((ReasoningDelta("hm"),), TextDelta("\n"), ("hm", "")),
        "shown": ((TextDelta("So: "),), TextDelta("ha "), None),
        "open call": ((TextDelta(OPEN_CALL),), TextDelta("ha "), None),
        "behind a call": ((TextDelta(TAGGED.replace("signal", "add")),), TextDelta("ha "), None),
        "calls": ((), TextDelta(TAGGED.replace("1", f'"{"ha" * 50}"') + "\n"), None),
    },
)
@pytest.mark.parametrize("piece", [1, 50])
@pytest.mark.parametrize("prompted", [False, True])
def test_a_loop_that_nobody_sees_ends_the_request(
    before: tuple[StreamEvent, ...],
    again: TextDelta | ReasoningDelta,
    output: tuple[str, str] | None,
    piece: int,
    prompted: bool,
) -> None:
    play = asked(with_tools(max_tokens=None), prompted=prompted)
    assert play >> before
    chars = 0
    while not play.has_ended:
        assert chars < 3 * 8192, "no end"
        play >> type(again)(again.text * piece, piece)
        chars += piece * len(again.text)
    assert chars >= 8192 - len(again.text)
    assert play << CLOSE << Ends("repeated_text_loop")
    if output is not None:
        result = play.record.result
        assert (result["reasoning"], result["text"].strip()) == output


@pytest.mark.parametrize("ending", ["cancelled", "abandoned", "error record", "disconnected"])
@pytest.mark.parametrize("prompted", [False, True])
def test_what_was_held_back_is_no_loop(ending: str, prompted: bool) -> None:
    play = asked(WITH_TOOLS, prompted=prompted)
    half_a_call = '<tool_call>{"name": "add", "arguments": {"a": [\n'
    half_a_call += f'"{"y" * 40}",\n' * 20 + '"and th'
    assert play >> TextDelta("a " + half_a_call)
    assert play.request.read_output(0, 0)["text"] == "a "
    assert tell(play, ENDINGS[ending]) << CLOSE << RequestEnded
    result = play.record.result
    assert result["text"] == "a " + half_a_call
    assert result["fail_reason"] != "repeated_line_loop"


# ---------------------------------------------------------------- a server that keeps to no limit


@pytest.mark.parametrize(
    ("params", "most"),
    [
        ({"max_tokens": 100}, 189),
        ({"max_tokens": 100.0}, 189),
        ({"max_tokens": 100, "n_predict": 1000}, 1314),
        ({}, 4096 * 5 // 4 + 64),
        ({"max_tokens": float("inf")}, None),
        ({"max_tokens": 1.7e308}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 0}, None),
        ({"max_tokens": 1}, 65),
        ({"max_tokens": "100"}, None),
    ],
)
def test_a_server_without_a_limit_is_cut_off(params: Any, most: int | None) -> None:
    play = asked(params=params)
    said = [TextDelta(f"{number} ") for number in range(10_000 if most is None else most)]
    assert play >> tuple(said)
    if most is not None:
        text = "".join(delta.text for delta in said) + "x"
        assert play >> TextDelta("x") << CLOSE << Ends("max_tokens", text=text)


def test_a_count_that_stands_still_saves_nobody() -> None:
    play = asked(params={"max_tokens": 100})
    said = [(TextDelta(f"{number} "), UsageReport(10, 1, 0)) for number in range(190)]
    assert play >> tuple(event for pair in said for event in pair) << CLOSE << Ends("max_tokens")


def test_a_finished_turn_is_not_cut_off() -> None:
    """Whatever its usage counts: of several choices all, perhaps."""
    play = asked(WITH_TOOLS, params={"max_tokens": 10})
    assert play >> (call("add"), CALLS, UsageReport(10, 1000, 0), Done()) << CLOSE << CallTool


def test_a_delta_with_both_fields_is_one_token() -> None:
    """The legacy form, which says its reasoning twice."""
    play, decoder = asked(params={"max_tokens": 100}), StreamDecoder()
    for number in range(150):
        delta = {"reasoning_content": f"{number} ", "content": f"{number} "}
        record = json.dumps({"choices": [{"index": 0, "delta": delta}]})
        assert play >> tuple(decoder.feed(f"data: {record}\n\n".encode()))
    assert play.request.status()["tokens_received"] == 150
