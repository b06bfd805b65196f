"""A request's test as a conversation: `assert play >> event << effect`.

An event goes in (`>>`), and each effect that follows is named (`<<`), in order; an effect that is
not named fails the test. A number is an instant: the clock moves there, and the request gets a
Tick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from llama_worker.config.settings import WorkerConfig
from llama_worker.mailbox import Tick
from llama_worker.request.messages import (
    Abandon,
    Begin,
    BiosWritten,
    CallEnded,
    CallTool,
    CancelRequest,
    CloseStream,
    PostChat,
    RequestEnded,
    RequestInput,
    RequestOutput,
    ServerChecked,
    SignalEmitted,
    StreamClosed,
    StreamEvents,
    StreamOpened,
    TurnId,
    WriteBios,
)
from llama_worker.request.prompt import write_bios
from llama_worker.request.request import Request
from llama_worker.request.submission import Submission
from llama_worker.request.table import RequestRecord
from llama_worker.stream.events import (
    Done,
    Finish,
    ServerError,
    StreamEvent,
    TextDelta,
    ToolCallDelta,
    UsageReport,
)
from llama_worker.stream.failure import StreamFailure
from llama_worker.types.chat import ChatMessage, ToolDef
from llama_worker.types.request import RequestFailReason
from tests.unit.config.cases import config, tool

UNIX = 1000.0  # what makes Unix seconds of the clock here
NOBODY: Any = object()  # a reply: the request itself answers nobody
ADD: ToolDef = tool("add")
SIGNAL: ToolDef = tool("signal")
LINE = "0123456789" * 4 + "\n"

Event = RequestInput | StreamEvent | float | Callable[["Play"], RequestInput]


def with_tools(**changed: Any) -> WorkerConfig:
    runner = SimpleNamespace(run_tool=lambda **call: None)  # nothing here runs a tool
    return config(
        **({"normal_tools": [ADD], "exit_tools": [SIGNAL], "tool_runner": runner} | changed)
    )


PLAIN, WITH_TOOLS = config(), with_tools()


class Play:
    """Request 7, begun at 100.0, in a conversation."""

    def __init__(
        self,
        of: WorkerConfig | None = None,
        *,
        params: dict[str, Any] | None = None,
        prompted: bool = False,
        opens_thinking: bool = False,
        writes_bios: bool = True,
        messages: Sequence[ChatMessage] = (),
    ) -> None:
        submission = Submission(
            job_name="j",
            system_prompt="Be terse.",
            user_prompt="Hi",
            params=params or {},
            messages=tuple(messages),
        )
        order = Begin(
            request_id=7, submission=submission, prompted=prompted, opens_thinking=opens_thinking
        )
        self.now = 100.0
        self.turn: TurnId = (7, 0)
        self.body: dict[str, Any] = {}  # that was posted last
        self.call_id = ""  # that was ordered last
        self.signals: list[Any] = []  # arguments of exit calls, as they were told
        self._record: RequestRecord | None = None
        self._config = of or PLAIN
        self.writes_bios = writes_bios  # as the default BIOS is, before anything else happens
        self._effects: list[RequestOutput] = []  # not named yet
        self.request = Request(order, config=self._config, unix=UNIX.__add__, now=self.now)
        self._follow(self.request.begin(self.now))

    def __rshift__(self, event: Event | tuple[StreamEvent, ...]) -> Play:
        assert not self._effects, f"not named: {self._effects}"
        message: RequestInput
        if isinstance(event, float):
            self.now, message = event, Tick()
        elif isinstance(event, tuple | StreamEvent):
            events = event if isinstance(event, tuple) else (event,)
            message = StreamEvents(turn_id=self.turn, events=events, at=self.now)
        else:
            message = event(self) if callable(event) else event
        self._follow(self.request.step(message, self.now))
        return self

    def __lshift__(self, expected: object) -> Play:
        assert self._effects, f"nothing follows, and not {expected}"
        effect = self._effects.pop(0)
        if isinstance(expected, type):
            assert isinstance(effect, expected), effect
        else:
            assert expected == effect
        return self

    def __bool__(self) -> bool:
        assert not self._effects, f"not named: {self._effects}"
        return True

    @property
    def has_ended(self) -> bool:
        return self._record is not None

    @property
    def record(self) -> RequestRecord:
        assert self._record is not None, "it has not ended"
        return self._record

    def fail(self, detail: str) -> Play:
        """The request's own code raised."""
        self._follow(self.request.fail(RequestFailReason.UNKNOWN_ERROR, detail, self.now))
        return self

    def drop_effects(self) -> None:
        """Those that are not named so far do not matter."""
        self._effects.clear()

    def _follow(self, effects: list[RequestOutput]) -> None:
        for effect in effects:
            match effect:
                case WriteBios() if self.writes_bios:
                    written = write_bios(effect, self._config, UNIX + self.now)
                    self._follow(self.request.step(written, self.now))
                    continue
                case SignalEmitted(signal=signal):
                    self.signals.append(signal["arguments"])
                    continue
                case PostChat(turn_id=turn_id, body=body):
                    self.turn, self.body = turn_id, body
                case CallTool(call=call):
                    self.call_id = call.id
                case RequestEnded(record=record):
                    self._record = record
            self._effects.append(effect)


class Ends:
    """Equal to the RequestEnded of this outcome: why it failed, or else its finish reason."""

    def __init__(self, outcome: str, **fields: Any) -> None:
        self._outcome = outcome
        self._fields = fields  # of the result, else of the status

    def __eq__(self, effect: object) -> bool:
        assert isinstance(effect, RequestEnded), effect
        result, status = effect.record.result, effect.record.status
        reason = result["fail_reason"]
        finished = {"stop": "completed", "max_tokens": "completed", "canceled": "canceled"}
        assert (reason or result["finish_reason"]) == self._outcome
        assert result["state"] == status["state"] == finished.get(self._outcome, "failed")
        assert (result["finish_reason"] == "failed") == (result["state"] == "failed")
        assert (status["fail_reason"], status["phase"]) == (reason, "done")
        assert status.get("fail_detail") == result.get("fail_detail")
        said = {name: {**status, **result}.get(name) for name in self._fields}
        assert said == self._fields
        return True

    __hash__ = None  # type: ignore[assignment]


def asked(of: WorkerConfig | None = None, **given: Any) -> Play:
    """The first turn is posted."""
    play = Play(of, **given)
    assert play << PostChat
    return play


def generating(of: WorkerConfig | None = None, **given: Any) -> Play:
    """Text has come."""
    play = asked(of, **given)
    assert play >> 101.0 >> OPENED >> 102.0 >> TextDelta("a")
    return play


def settling(of: WorkerConfig | None = None, **given: Any) -> Play:
    """The finish reason has come."""
    play = generating(of, **given)
    assert play >> 103.0 >> Finish("stop")
    return play


def disconnected() -> Play:
    play = generating()
    assert play >> 103.0 >> closed()
    return play


def reading_rest(play: Play | None = None) -> Play:
    """The server died."""
    play = play or generating()
    assert play >> 104.0 >> SERVER_DIED
    return play


def in_tools(of: WorkerConfig | None = None, calls_count: int = 1) -> Play:
    """The first call of so many runs."""
    play = asked(of or WITH_TOOLS)
    calls = (call("add", f'{{"n": {index}}}', index) for index in range(calls_count))
    assert play >> 101.0 >> (TextDelta("Let me add."), *calls, UsageReport(10, 5, 2), CALLS)
    assert play >> 102.0 >> Done() << CloseStream << CallTool
    return play


# ---------------------------------------------------------------- events

CANCEL = CancelRequest(request_id=7, reply=NOBODY)
SERVER_DIED = Abandon(request_id=7, reason=RequestFailReason.SERVER_DIED, detail="exited with -9")
RESTARTED = Abandon(reason=RequestFailReason.WORKER_RESTARTED, detail="stall")
SERVER_IS_GONE = ServerChecked(request_id=7, is_gone=True)
SERVER_IS_ALIVE = ServerChecked(request_id=7, is_gone=False)
STOP, CALLS, LENGTH = Finish("stop"), Finish("tool_calls"), Finish("length")
BOOM = ServerError("boom", 500, None)
TAGGED = '<tool_call>{"name": "signal", "arguments": {"s": 1}}</tool_call>'


def OPENED(play: Play) -> RequestInput:
    return StreamOpened(turn_id=play.turn, at=play.now)


def failure(reason: str, detail: str = "reset", http_status: int | None = None) -> StreamFailure:
    return StreamFailure(reason=RequestFailReason(reason), detail=detail, http_status=http_status)


TOOLS_REFUSED = failure("http_error", "HTTP 500: tools param requires --jinja flag", 500)
RESET = failure("stream_disconnected")


def closed(
    why: StreamFailure | None = None, *, is_aborted: bool = False
) -> Callable[[Play], RequestInput]:
    return lambda play: StreamClosed(
        turn_id=play.turn, failure=why, at=play.now, is_aborted=is_aborted
    )


def bios(text: str = "bios", error: str | None = None) -> Callable[[Play], RequestInput]:
    """The BIOS of the next turn is written."""
    return lambda play: BiosWritten(
        turn_id=(play.turn[0], play.turn[1] + 1), bios=text, error=error
    )


def returned(
    text: str, *, ok: bool = True, call_id: str | None = None
) -> Callable[[Play], RequestInput]:
    """The call that runs has returned, or another one."""
    return lambda play: CallEnded(
        turn_id=play.turn, call_id=call_id or play.call_id, ok=ok, text=text, at=play.now
    )


def call(name: str, arguments: str = "{}", index: int = 0) -> ToolCallDelta:
    return ToolCallDelta(index, f"id{index}", name, arguments)
