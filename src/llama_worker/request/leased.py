"""A request that somebody else sends to the worker's server: it holds a slot, and is watched as any
other. Pure; not thread-safe.

Its sender reports what comes (`waits`, `pauses`, `opened`, `heard`, `closed`); the slot's actor
asks for its progress and steps it like a `Request` of its own. The output goes to its client and is
not kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from llama_worker.mailbox import Tick
from llama_worker.request.ending import (
    CANCELED,
    COMPLETED,
    SERVER_GONE,
    TOKEN_LIMIT,
    Outcome,
    failed,
    failed_by,
)
from llama_worker.request.messages import (
    Abandon,
    AskIfServerDied,
    CancelRequest,
    RequestEnded,
    RequestInput,
    ServerChecked,
)
from llama_worker.request.output import Output, read_output
from llama_worker.request.progress import Progress, TurnProgress
from llama_worker.request.report import RequestTotals, build_progress, build_record, build_status
from llama_worker.request.states import DEATH_NEWS_S, LAST_WORDS_S, LATE_NEWS_S
from llama_worker.request.table import Admitted, RequestRecord
from llama_worker.stream.events import ReasoningDelta, ServerError, StreamEvent, TextDelta
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.turn_end import Finished, LastWord, TurnEnd, Verdict
from llama_worker.types.request import OutputChunk, RequestFailReason, RequestPhase, RequestStatus

LeaseEffects = list[RequestEnded | AskIfServerDied]
_BREAKS = (RequestFailReason.CONNECT_FAILED, RequestFailReason.STREAM_DISCONNECTED)


class LeasedRequest:
    """`in_one_piece`: its reply comes at once when it is complete, not as a stream."""

    def __init__(
        self,
        admitted: Admitted,
        *,
        api_key: str | None,
        unix_offset: float,
        has_media: bool = False,
        in_one_piece: bool = False,
    ) -> None:
        self.request_id = admitted.request_id
        self.given_up: Outcome | None = None  # by the worker, and why
        self._api_key = api_key
        self._in_one_piece = in_one_piece
        self._totals = RequestTotals(
            request_id=admitted.request_id,
            job_name=admitted.job_name,
            created_at=admitted.created_at,
            unix_offset=unix_offset,
            output=Output(None),
            iterations_left=0,
            has_media=has_media,
        )
        self._turn = TurnProgress(admitted.created_at)
        self._turn_end = TurnEnd()
        self._text_chars = self._reasoning_chars = 0
        self._waits = False
        self._stream_outcome: Outcome | None = None  # how its stream came to its end
        self._until: float | None = None  # what a dead server had sent is read, or news awaited
        self._is_asked = False  # whether the server died, which would explain a broken connection
        self._ended = False

    # ------------------------------------------------------------ from who sends it

    def waits(self) -> None:
        """Nothing lies ready: from now on the server is waited for."""
        self._waits = True

    def pauses(self) -> None:
        """The client takes nothing, so nothing more is read."""
        self._waits = False

    def opened(self, at: float) -> None:
        """The headers of a good reply have come."""
        self._turn.headers_at = at

    def heard(self, events: Iterable[StreamEvent], at: float) -> None:
        """Something came; no events: keepalives only. No effect once the request has ended."""
        if self._ended:
            return
        self._turn.last_stream_byte_at = at
        for event in events:
            self._turn.hear(event, at)
            match event:
                case TextDelta(text=text):
                    self._text_chars += len(text)
                case ReasoningDelta(text=text):
                    self._reasoning_chars += len(text)
                case _ if isinstance(event, LastWord):
                    self._conclude(self._turn_end.feed(event, at))

    def closed(self, failure: StreamFailure | None) -> None:
        """The exchange with the server is over; None: in the regular way."""
        self._waits = False
        if self._in_one_piece and failure is None:
            self._stream_outcome = self._stream_outcome or COMPLETED
        else:
            self._conclude(self._turn_end.closed(failure))

    def end(self, now: float) -> RequestRecord | None:
        """Who sent it is done with it: its record.

        None where it had ended before, or will once it is known why its connection broke. Without
        an end of the stream its client has left.
        """
        if self._ended or self.is_broken:
            return None
        outcome = self._stream_outcome or CANCELED
        if self.given_up is not None and outcome.fail_reason is not None:
            outcome = self.given_up
        return self._record(outcome, now)

    # ------------------------------------------------------------ from the slot's actor

    def step(self, message: RequestInput, now: float) -> LeaseEffects:
        """What follows from a message."""
        match message:
            case CancelRequest(request_id=self.request_id):
                return self._give_up(CANCELED, now)
            case Abandon(request_id=None | self.request_id):
                outcome = failed(message.reason, message.detail)
                is_first = self.given_up is None
                if is_first and message.reason is RequestFailReason.SERVER_DIED and self._is_open:
                    self.given_up, self._until = outcome, now + LAST_WORDS_S
                    return []
                return self._give_up(outcome if self.is_broken else self.given_up or outcome, now)
            case ServerChecked(request_id=self.request_id) if self._is_unexplained:
                if not message.is_gone:
                    return self._give_up(self._last_outcome, now)
                self.given_up, self._until = failed_by(SERVER_GONE), now + LATE_NEWS_S
            case Tick() if self.deadline is not None and now >= self.deadline:
                if not self._is_unexplained or self._is_asked:
                    return self._give_up(self._last_outcome, now)
                self._is_asked, self._until = True, now + LATE_NEWS_S
                return [AskIfServerDied(request_id=self.request_id)]
        return []

    def hear_out(self, now: float) -> None:
        """The exchange is over. If its connection broke, wait for news of the reason."""
        if self.is_broken and self._until is None:
            self._until = now + DEATH_NEWS_S

    def fail(self, reason: RequestFailReason, detail: str, now: float) -> LeaseEffects:
        """End it whatever it waits for."""
        return self._give_up(failed(reason, detail), now)

    @property
    def has_finished(self) -> bool:
        """The model came to its regular end."""
        has_completed = (
            self._stream_outcome is not None and self._stream_outcome.fail_reason is None
        )
        return has_completed or self._turn_end.finish_reason is not None

    @property
    def has_ended(self) -> bool:
        """It has its record."""
        return self._ended

    @property
    def deadline(self) -> float | None:
        """When a Tick is due; None: none is."""
        return None if self._ended else self._until

    @property
    def is_broken(self) -> bool:
        """The connection broke, and perhaps nobody knows why so far."""
        return self._stream_outcome is not None and self._stream_outcome.fail_reason in _BREAKS

    def saw_liveness(self, at: float | None) -> None:
        """Evidence that the server works; for the status."""
        self._totals.liveness_at = at

    def progress(self) -> Progress:
        """`concluding` while a slow client is served: nobody waits for the server then."""
        concluding = not self._waits or not self._is_open
        return build_progress(
            self._totals,
            self._turn,
            RequestPhase.DONE if self._ended else self._turn.phase,
            concluding=concluding,
            in_one_piece=self._in_one_piece,
        )

    def status(self) -> RequestStatus:
        return self._as_seen(build_status(self._totals, self._turn, self.progress()))

    @property
    def output_chars(self) -> tuple[int, int]:
        """What can be read of it here."""
        return 0, 0

    def read_output(self, text_offset: int, reasoning_offset: int) -> OutputChunk:
        """Nothing: the output is the client's."""
        return read_output("", "", text_offset, reasoning_offset, done=self._ended)

    @property
    def _is_unexplained(self) -> bool:
        """The connection broke, and nobody knows yet if the server's process is gone."""
        return self.is_broken and self.given_up is None and not self._ended

    @property
    def _last_outcome(self) -> Outcome:
        """What is known, once nothing more is waited for."""
        outcome = self.given_up or self._stream_outcome
        assert outcome is not None
        return outcome

    @property
    def _is_open(self) -> bool:
        return self._stream_outcome is None and self._turn_end.finish_reason is None

    def _conclude(self, verdict: Verdict | None) -> None:
        if verdict is None or self._stream_outcome is not None:
            return
        match verdict:
            case Finished(reason=reason):
                self._stream_outcome = TOKEN_LIMIT if reason == "length" else COMPLETED
            case ServerError() | StreamFailure():
                self._stream_outcome = failed_by(verdict)

    def _give_up(self, outcome: Outcome, now: float) -> LeaseEffects:
        """End so, unless the model had finished before."""
        if self._ended:
            return []
        if self._turn_end.finish_reason is not None:
            self._conclude(self._turn_end.closed(None))
        if self._stream_outcome is not None and self._stream_outcome.fail_reason is None:
            outcome = self._stream_outcome
        elif outcome is not self._stream_outcome:
            self.given_up = outcome
        return [RequestEnded(record=self._record(outcome, now))]

    def _record(self, outcome: Outcome, now: float) -> RequestRecord:
        self._ended = True
        outcome = outcome.for_host(self._api_key)
        self._totals.add_turn(self._turn, None)
        record = build_record(self._totals, self._turn, self.progress(), outcome, [], now)
        self._as_seen(record.status)
        return replace(record, is_leased=True)

    def _as_seen(self, status: RequestStatus) -> RequestStatus:
        """What passed by here: of a reply in one piece nothing is taken apart."""
        status["output_chars"] = self._text_chars
        status["reasoning_chars"] = self._reasoning_chars
        if self._in_one_piece:
            del status["tokens_received"]
        return status
