"""Orders to a request, questions about it, what it tells; its streams, its tools, its BIOS.

A request returns orders without a mailbox: whoever carries one out adds where the answer goes.
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
from llama_worker.stream.lazy_reading import TELL_S
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
    """How many tokens the submission's prompt has, as the server would count it.

    The runtime answers, or fails the reply.
    """

    submission: Submission
    reply: Reply[TokenCount]


class GetStatus(Struct, frozen=True, kw_only=True):
    """How far the request is."""

    request_id: int
    reply: Reply[RequestStatus | NotFound]


class ReadOutput(Struct, frozen=True, kw_only=True):
    """`wait`: answered once something lies behind the offsets, or the request has ended."""

    request_id: int
    text_offset: int
    reasoning_offset: int
    reply: Reply[OutputChunk | NotFound]
    wait: bool = False


class CancelRequest(Struct, frozen=True, kw_only=True):
    """Answered True once the running request is cancelled and its slot free, else False.

    Passed on to the RequestActor; the WorkerActor answers.
    """

    request_id: int
    reply: Reply[bool]


class RequestEnded(Struct, frozen=True, kw_only=True):
    """A request reached its terminal state; its record is handed over, whole."""

    record: RequestRecord


class SignalEmitted(Struct, frozen=True, kw_only=True):
    """A request's model called an exit tool."""

    request_id: int
    job_name: str
    signal: ExitSignal


class StreamsClosed(Struct, frozen=True, kw_only=True):
    """No connection to the server is open any more."""

    epoch: int


class ToolsRefused(Struct, frozen=True, kw_only=True):
    """The server does not take `tools`: from now on requests use prompted mode."""

    detail: str


class ToolThreadStuck(Struct, frozen=True, kw_only=True):
    """A tool thread runs on although nobody waits for it any more."""

    turn_id: TurnId


class ToolThreadReturned(Struct, frozen=True, kw_only=True):
    """A stuck one has ended after all."""

    turn_id: TurnId


class WriteBios(Struct, frozen=True, kw_only=True):
    """Ask the BIOS provider for the text of the turn that begins now."""

    turn_id: TurnId
    iterations_left: int
    prompted: bool


class PostChat(Struct, frozen=True, kw_only=True):
    """POST `body` to the chat endpoint. `tell_s`: how long its text may wait to be told."""

    turn_id: TurnId
    body: dict[str, Any]
    tell_s: float = TELL_S


class CallTool(Struct, frozen=True, kw_only=True):
    """Run the turn's next call."""

    turn_id: TurnId
    job_name: str
    call: ParsedCall


class AskIfServerDied(Struct, frozen=True, kw_only=True):
    """A request's connection broke: has the server's process ended?"""

    request_id: int


class CheckServer(AskIfServerDied, frozen=True, kw_only=True):
    """Answered with `ServerChecked`."""

    reply_to: Mailbox[ServerChecked]


class OpenStream(PostChat, frozen=True, kw_only=True):
    """Send what comes to `reply_to`."""

    reply_to: Mailbox[StreamNews]


class CloseStream(Struct, frozen=True, kw_only=True):
    """Close the stream's connection at once, in whatever phase it is."""

    turn_id: TurnId


class CloseAllStreams(Struct, frozen=True):
    """Close every connection; answered by `StreamsClosed` when the last reader has ended."""


class FlushStream(Struct, frozen=True, kw_only=True):
    """Have the stream tell what has come and was not told yet; then `reply_to` gets
    `StreamFlushed`."""

    turn_id: TurnId
    reply_to: Mailbox[StreamFlushed]


class HurryStream(Struct, frozen=True, kw_only=True):
    """Somebody waits for text: what has come is told now, or else the next that comes, at once."""

    turn_id: TurnId


class StreamClosed(Struct, frozen=True, kw_only=True):
    """The stream is over. `failure` None: the server ended the body in the regular way."""

    turn_id: TurnId
    failure: StreamFailure | None
    at: float
    is_aborted: bool = False  # by our side


class Begin(Struct, frozen=True, kw_only=True):
    """Carry out a request, from prompt to result."""

    request_id: int
    submission: Submission
    prompted: bool  # tool calls by text convention: the model's template has no tools
    opens_thinking: bool  # the template ends the prompt inside a think tag


class Abandon(Struct, frozen=True, kw_only=True):
    """Fail the request with this reason, keeping what it has."""

    reason: RequestFailReason
    detail: str
    request_id: int | None = None  # None: whichever is under way


class StreamOpened(Struct, frozen=True, kw_only=True):
    """Response headers with status 200 have come."""

    turn_id: TurnId
    at: float


class StreamEvents(Struct, frozen=True, kw_only=True):
    """What was parsed since the batch before; no events where only keepalives came."""

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
    text: str  # what the runner returned, as JSON text, or what went wrong
    at: float


class ReportProgress(Struct, frozen=True, kw_only=True):
    """Tell `reply_to` how far the request is; `liveness_at` is the newest evidence of work by the
    server."""

    liveness_at: float | None
    for_verdict: bool
    reply_to: Mailbox[ProgressReported]


class StreamFlushed(Struct, frozen=True, kw_only=True):
    """The answer to `FlushStream`, behind all that had come when that was carried out."""

    turn_id: TurnId


class ServerChecked(Struct, frozen=True, kw_only=True):
    """The answer to `CheckServer`."""

    request_id: int
    is_gone: bool  # the server's process has ended; news of it may be on their way


class RunTool(CallTool, frozen=True, kw_only=True):
    """`reply_to` gets `CallEnded`."""

    reply_to: Mailbox[CallEnded]


class DropTool(Struct, frozen=True, kw_only=True):
    """Nobody waits for the turn's call any more; it is left to end by itself."""

    turn_id: TurnId


class ProgressReported(Struct, frozen=True, kw_only=True):
    """The answer to `ReportProgress`; none comes where the request has ended meanwhile."""

    progress: Progress
    for_verdict: bool


Question = GetStatus | ReadOutput
"""Of one request: passed on to the RequestActor while it runs, and answered from its record once it
has ended."""

StreamNews = StreamOpened | StreamEvents | StreamClosed

ToolThreadNews = ToolThreadStuck | ToolThreadReturned

TransportMessage = (
    OpenStream | CloseStream | CloseAllStreams | FlushStream | HurryStream | StreamClosed
)

ToolMessage = RunTool | DropTool

RequestInput = StreamNews | ServerChecked | BiosWritten | CallEnded | CancelRequest | Abandon | Tick
"""What a request itself hears; the rest is its actor's."""

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
"""What a request orders, and tells, in answer."""
