"""The messages to and from a request, its streams, its tools and its BIOS provider.

A request returns orders without a mailbox; the actor that carries one out adds where to answer.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from llama_worker.mailbox import Mailbox, Reply, Tick
from llama_worker.request.progress import Progress
from llama_worker.request.submission import Submission
from llama_worker.request.table import RequestRecord
from llama_worker.stream.calls import ParsedCall
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.lazy_reading import MAX_HOLD_S
from llama_worker.types.hooks import BiosText
from llama_worker.types.request import (
    ExitSignal,
    NotFound,
    OutputChunk,
    RequestFailReason,
    RequestStatus,
    TokenCount,
)

TurnId = tuple[int, int]
"""Request id, and the number of the request's turn (one HTTP request each), from 1."""


class CountTokens(Struct, frozen=True, kw_only=True):
    """Ask how many tokens the submission's prompt has, as the server would count it.

    The runtime answers, or fails the reply.
    """

    submission: Submission
    reply: Reply[TokenCount]


class GetStatus(Struct, frozen=True, kw_only=True):
    """Ask for the request's status."""

    request_id: int
    reply: Reply[RequestStatus | NotFound]


class ReadOutput(Struct, frozen=True, kw_only=True):
    """Ask for output after the offsets. `wait`: answer once there is some, or the request ended."""

    request_id: int
    text_offset: int
    reasoning_offset: int
    reply: Reply[OutputChunk | NotFound]
    wait: bool


class CancelRequest(Struct, frozen=True, kw_only=True):
    """Cancel the request; answered True once it is cancelled and its slot free, else False.

    Passed on to the RequestActor; the WorkerActor answers.
    """

    request_id: int
    reply: Reply[bool]


class RequestEnded(Struct, frozen=True, kw_only=True):
    """A request reached its terminal state; hands over its complete record."""

    record: RequestRecord


class SignalEmitted(Struct, frozen=True, kw_only=True):
    """A request's model called an exit tool."""

    request_id: int
    job_name: str
    signal: ExitSignal


class AllStreamsClosed(Struct, frozen=True, kw_only=True):
    """No connection to the server is open any more."""

    epoch: int


class ToolsRefused(Struct, frozen=True, kw_only=True):
    """The server does not take `tools`: from now on requests use prompted mode."""

    detail: str


class StuckToolThreads(Struct, frozen=True, kw_only=True):
    """One more tool thread runs although nobody waits for it (1), or one less (-1)."""

    change: int


class WriteBios(Struct, frozen=True, kw_only=True):
    """Ask the BIOS provider for the text of the turn that begins now."""

    turn_id: TurnId
    iterations_left: int
    prompted: bool


class PostChat(Struct, frozen=True, kw_only=True):
    """POST `body` to the chat endpoint. `max_hold_s`: how long text may be held back."""

    turn_id: TurnId
    body: dict[str, Any]
    max_hold_s: float = MAX_HOLD_S


class CallTool(Struct, frozen=True, kw_only=True):
    """Run the turn's next call."""

    turn_id: TurnId
    job_name: str
    call: ParsedCall


class AskIfServerDied(Struct, frozen=True, kw_only=True):
    """A request's connection broke: has the server's process ended?"""

    request_id: int


class CheckServer(AskIfServerDied, frozen=True, kw_only=True):
    """`AskIfServerDied` with a mailbox, which gets `ServerChecked`."""

    reply_to: Mailbox[ServerChecked]


class OpenStream(PostChat, frozen=True, kw_only=True):
    """`PostChat` with a mailbox, which gets the `StreamReport`."""

    reply_to: Mailbox[StreamReport]


class CloseStream(Struct, frozen=True, kw_only=True):
    """Close the stream's connection at once, in whatever phase it is."""

    turn_id: TurnId


class CloseAllStreams(Struct, frozen=True):
    """Close every connection; answered by `AllStreamsClosed` when the last reader has ended."""


class FlushStream(Struct, frozen=True, kw_only=True):
    """Deliver what the stream has received and holds back; then `reply_to` gets `StreamFlushed`."""

    turn_id: TurnId
    reply_to: Mailbox[StreamFlushed]


class HurryStream(Struct, frozen=True, kw_only=True):
    """A reader waits for text: deliver what has come now, and what comes next at once."""

    turn_id: TurnId


class StreamClosed(Struct, frozen=True, kw_only=True):
    """The stream is over. `failure` is None if the server ended the body regularly."""

    turn_id: TurnId
    failure: StreamFailure | None
    at: float
    is_aborted: bool = False  # by our side


class Begin(Struct, frozen=True, kw_only=True):
    """Carry out a request, from prompt to result."""

    request_id: int
    submission: Submission
    prompted: bool  # tool calls by text convention: the model's template has no tools
    opens_thinking: bool  # by the template, in a way that the server may not parse


class Abandon(Struct, frozen=True, kw_only=True):
    """Fail the request with this reason, keeping the output that it has."""

    reason: RequestFailReason
    detail: str
    request_id: int | None = None  # None: whichever is under way


class StreamOpened(Struct, frozen=True, kw_only=True):
    """Response headers with status 200 have come."""

    turn_id: TurnId
    at: float


class StreamEvents(Struct, frozen=True, kw_only=True):
    """What was parsed since the previous batch; no events if only keepalives came."""

    turn_id: TurnId
    events: tuple[StreamEvent, ...]
    at: float


class BiosWritten(Struct, frozen=True, kw_only=True):
    """From the thread of a BIOS provider: the text, or why there is none."""

    turn_id: TurnId
    bios: BiosText | str
    error: str | None


class CallEnded(Struct, frozen=True, kw_only=True):
    """From a tool thread: the call has ended."""

    turn_id: TurnId
    call_id: str
    ok: bool
    text: str  # the result as text (see `encode_result`), or what went wrong
    at: float


class ReportProgress(Struct, frozen=True, kw_only=True):
    """Tell `reply_to` how far the request is; `liveness_at` is the newest evidence of work by the
    server."""

    liveness_at: float | None
    for_verdict: bool
    reply_to: Mailbox[ProgressReported]


class StreamFlushed(Struct, frozen=True, kw_only=True):
    """The answer to `FlushStream`, sent after all that had been received by then."""

    turn_id: TurnId


class ServerChecked(Struct, frozen=True, kw_only=True):
    """The answer to `CheckServer`."""

    request_id: int
    is_gone: bool  # the server's process has ended; the news may still be on its way


class RunTool(CallTool, frozen=True, kw_only=True):
    """`CallTool` with a mailbox, which gets `CallEnded`."""

    reply_to: Mailbox[CallEnded]


class DropTool(Struct, frozen=True, kw_only=True):
    """Nobody waits for the turn's call any more; it is left to end by itself."""

    turn_id: TurnId


class ProgressReported(Struct, frozen=True, kw_only=True):
    """The answer to `ReportProgress`; none comes if the request has ended meanwhile."""

    progress: Progress
    for_verdict: bool


Question = GetStatus | ReadOutput
"""About one request: passed on to the RequestActor while it runs, and answered from its record once
it has ended."""

StreamReport = StreamOpened | StreamEvents | StreamClosed

TransportMessage = (
    OpenStream | CloseStream | CloseAllStreams | FlushStream | HurryStream | StreamClosed
)

ToolMessage = RunTool | DropTool

RequestInput = (
    StreamReport | ServerChecked | BiosWritten | CallEnded | CancelRequest | Abandon | Tick
)
"""The messages that a request takes; its actor handles the others itself."""

RequestOutput = (
    WriteBios
    | PostChat
    | CloseStream
    | CallTool
    | DropTool
    | AskIfServerDied
    | SignalEmitted
    | ToolsRefused
    | RequestEnded
)
"""The effects that a request returns."""
