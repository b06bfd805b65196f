"""A client's request that the proxy sends to the worker's server: it holds a slot and is watched
like any other. Pure; not thread-safe.

Its sender, a thread of the proxy, reports what happens (`started_waiting`, `stopped_waiting`,
`opened`, `received`, `closed`); the slot's actor asks for its progress and steps it like a
`Request`. The output goes to the client and is not kept.

The table lists every transition; any other event leaves the state unchanged.

    state         event                                                   next state
    ------------  ------------------------------------------------------  ------------
    Streaming     [DONE] | error record | HTTP error | the reply is whole  Over
    Streaming     connection lost                                         Disconnected
    Streaming     server died                                             ReadingRest
    ReadingRest   [DONE] | error record | HTTP error | the reply is whole  Over
    ReadingRest   connection lost                                         Over
    Disconnected  server is alive | deadline, after the server was asked  Ended
    ReadingRest | Over  deadline                                          Ended
    any but Ended and Disconnected  sender is done                        Ended
    any but Ended  cancelled | abandoned                                  Ended
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from msgspec import Struct

from llama_worker.clock import ToUnix
from llama_worker.mailbox import Tick
from llama_worker.request import ending, messages
from llama_worker.request.output import Output, read_output
from llama_worker.request.progress import Progress, TurnProgress
from llama_worker.request.report import RequestTotals, build_progress, build_record, build_status
from llama_worker.request.states import EXIT_REPORT_WAIT_S, LATE_EXIT_REPORT_WAIT_S, READ_REST_S
from llama_worker.request.table import Admitted, RequestRecord
from llama_worker.stream.events import Finish, ReasoningDelta, ServerError, StreamEvent, TextDelta
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.turn_end import SETTLE_S, Finished, TurnEnd, TurnEndEvent, TurnOutcome
from llama_worker.types.request import OutputChunk, RequestFailReason, RequestPhase, RequestStatus

LeaseEffects = list[messages.RequestEnded | messages.AskIfServerDied]


class _Streaming(Struct, frozen=True):
    """The server works on the request, or has given its finish reason."""

    until: None = None


class _ReadingRest(Struct, frozen=True):
    """The server died; what it sent before is still being read."""

    until: float


class _Over(Struct, frozen=True):
    """The stream ended; the sender has not said yet that it is done."""

    outcome: ending.Outcome
    until: float | None


class _Disconnected(Struct, frozen=True):
    """The connection broke, perhaps because the server died: that may still be reported, has been
    asked for, or is known."""

    outcome: ending.Outcome  # as far as known
    until: float | None = None  # None: the sender has not said yet that it is done
    is_asked: bool = False


class _Ended(Struct, frozen=True):
    """Terminal: the record was made."""

    until: None = None


_State = _Streaming | _ReadingRest | _Over | _Disconnected | _Ended


class LeasedRequest:
    """One client's request. `in_one_piece`: the reply comes once it is complete, not as a stream.
    `answers`: how many are asked for; each has its own end. `job_key`: the same if the client
    asks again."""

    def __init__(
        self,
        admitted: Admitted,
        *,
        api_key: str | None,
        unix: ToUnix,
        has_media: bool = False,
        links_media: bool = False,
        needs_specific_slots: bool = False,
        in_one_piece: bool = False,
        answers: int = 1,
        offers_tools: bool = False,
        job_key: str = "",
    ) -> None:
        self.request_id = admitted.request_id
        self.given_up: ending.Outcome | None = None  # why the worker gave it up; None: it did not
        # when to stop waiting for the rest of the reply; None until a `TurnEndEvent` came
        self.settled_at: float | None = None
        self._api_key = api_key
        self._answers = self._answers_left = answers
        self._offers_tools = offers_tools
        self._totals = RequestTotals(
            request_id=admitted.request_id,
            job_name=admitted.job_name,
            created_at=admitted.created_at,
            unix=unix,
            output=Output(None),
            iterations_left=0,
            job_key=job_key,
            has_media=has_media,
            links_media=links_media,
            needs_specific_slots=needs_specific_slots,
            is_leased=True,
            in_one_piece=in_one_piece,
        )
        self._turn = TurnProgress(admitted.created_at)
        self._turn_end = TurnEnd()
        self._text_chars = self._reasoning_chars = 0
        self._was_sent = False  # or is about to be
        self._is_waiting = False
        self._state: _State = _Streaming()

    # ------------------------------------------------------------ called by the sender

    def started_waiting(self) -> None:
        """The sender waits for the server from now on: it has read all that came."""
        self._was_sent = self._is_waiting = True

    def stopped_waiting(self) -> None:
        """The client does not read, so the sender reads nothing more from the server."""
        self._is_waiting = False

    def opened(self, at: float) -> None:
        """The headers of a reply with status 200 have come."""
        self._turn.headers_at = at

    def received(self, events: Iterable[StreamEvent], at: float) -> None:
        """Bytes came; no events if only keepalives. No effect once the request has ended."""
        if self.has_ended:
            return
        self._turn.last_stream_byte_at = at
        for event in events:
            self._turn.record(event, at)
            match event:
                case TextDelta(text=text):
                    self._text_chars += len(text)
                case ReasoningDelta(text=text):
                    self._reasoning_chars += len(text)
                case Finish() if self._answers_left > 1:
                    self._answers_left -= 1
                case _ if isinstance(event, TurnEndEvent):
                    if self.settled_at is None:  # a second such event gives no more time
                        self.settled_at = at + SETTLE_S
                    self._conclude(self._turn_end.feed(event))

    def closed(self, failure: StreamFailure | None) -> None:
        """The exchange with the server is over; `failure` is None if it ended regularly."""
        if self._totals.in_one_piece and not failure:
            self._conclude(Finished(None))
        else:
            self._conclude(self._turn_end.closed(failure))

    def failure_for_client(self, failure: StreamFailure | None) -> StreamFailure | None:
        """The failure to report to the client: the worker's own reason if it has one."""
        given_up = self.given_up
        if failure is None or given_up is None or self.has_finished:
            return failure
        reason = given_up.fail_reason
        assert reason is not None  # as in every outcome of what was given up
        detail = f"{reason}: {given_up.fail_detail or 'the request was canceled'}"
        return StreamFailure(reason=reason, detail=detail)

    def end(self, now: float) -> RequestRecord | None:
        """The sender is done: end the request and return its record.

        None if it has ended before, or will end once it is known why its connection broke. If the
        stream has not ended, the client has left: the request counts as canceled.
        """
        if self.has_ended or self.is_broken:
            return None
        self._conclude_finished()
        outcome = self._state.outcome if isinstance(self._state, _Over) else ending.CANCELED
        if self.given_up is not None and outcome.fail_reason is not None:
            outcome = self.given_up
        return self._record(outcome, now)

    # ------------------------------------------------------------ called by the slot's actor

    def step(self, message: messages.RequestInput, now: float) -> LeaseEffects:
        match message:
            case messages.CancelRequest(request_id=self.request_id):
                return self._give_up(ending.CANCELED, now)
            case messages.Abandon(request_id=None | self.request_id):
                outcome = ending.failed(message.reason, message.detail)
                if message.reason is RequestFailReason.SERVER_DIED and self._is_streaming:
                    self.given_up, self._state = outcome, _ReadingRest(now + READ_REST_S)
                    return []
                return self._give_up(outcome if self.is_broken else self.given_up or outcome, now)
            case messages.ServerChecked(request_id=self.request_id, is_gone=is_gone) if isinstance(
                self._state, _Disconnected
            ):
                if not is_gone:
                    return self._end(self._state.outcome, now)
                self.given_up = gone = ending.failed_by(ending.SERVER_GONE)
                self._state = _Disconnected(gone, now + LATE_EXIT_REPORT_WAIT_S, is_asked=True)
            case Tick() if self.deadline is not None and now >= self.deadline:
                return self._deadline_passed(now)
        return []

    def _deadline_passed(self, now: float) -> LeaseEffects:
        match self._state:
            case _Disconnected(outcome=outcome, is_asked=False):
                self._state = _Disconnected(outcome, now + LATE_EXIT_REPORT_WAIT_S, is_asked=True)
                return [messages.AskIfServerDied(request_id=self.request_id)]
            case _Disconnected(outcome=outcome):
                return self._end(outcome, now)
            case _:
                assert self.given_up is not None  # there is no deadline otherwise
                return self._give_up(self.given_up, now)

    def await_cause(self, now: float) -> None:
        """The exchange is over. If its connection broke, wait to learn the reason."""
        if isinstance(self._state, _Disconnected) and self._state.until is None:
            self._state = _Disconnected(self._state.outcome, now + EXIT_REPORT_WAIT_S)

    def fail(self, reason: RequestFailReason, detail: str, now: float) -> LeaseEffects:
        """End the request, whatever its state."""
        return self._give_up(ending.failed(reason, detail), now)

    @property
    def has_finished(self) -> bool:
        """Whether the model finished regularly."""
        match self._state:
            case _Over(outcome=ending.Outcome(fail_reason=None)):
                return True
        return self._turn_end.finish_reason is not None

    @property
    def has_ended(self) -> bool:
        """Whether the record was made."""
        return isinstance(self._state, _Ended)

    @property
    def deadline(self) -> float | None:
        """When the next Tick is due, or None."""
        return self._state.until

    @property
    def is_broken(self) -> bool:
        """Whether the connection broke; the reason may not be known yet."""
        return isinstance(self._state, _Disconnected)

    def saw_liveness(self, at: float | None) -> None:
        """Note the newest evidence that the server works; for the status."""
        self._totals.liveness_at = at

    def progress(self) -> Progress:
        """`concluding` also while a slow client is served: then nobody waits for the server."""
        reads = isinstance(self._state, _Streaming | _ReadingRest)
        concluding = not (self._is_waiting and reads and self._turn_end.finish_reason is None)
        phase = RequestPhase.DONE if self.has_ended else self._turn.phase
        progress = build_progress(self._totals, self._turn, phase, concluding=concluding)
        return replace(progress, tokens=progress.tokens // self._answers)  # of one slot

    def status(self) -> RequestStatus:
        return self._with_own_counts(build_status(self._totals, self._turn, self.progress()))

    def read_output(self, text_offset: int, reasoning_offset: int) -> OutputChunk:
        """Always empty: the output goes to the client."""
        return read_output("", "", text_offset, reasoning_offset, done=self.has_ended)

    @property
    def _is_streaming(self) -> bool:
        return isinstance(self._state, _Streaming) and self._turn_end.finish_reason is None

    def _conclude(self, ended: TurnOutcome | None) -> None:
        if not isinstance(self._state, _Streaming | _ReadingRest):
            return
        match ended:
            case Finished(reason=reason):
                outcome = ending.TOKEN_LIMIT if reason == "length" else ending.COMPLETED
                self._state = _Over(outcome, self._state.until)
            case StreamFailure() if ended.is_disconnect and self.given_up is None:
                self._state = _Disconnected(ending.failed_by(ended))
            case ServerError() | StreamFailure():
                outcome = ending.failed_by(ended, offers_tools=self._offers_tools)
                self._state = _Over(outcome, self._state.until)

    def _conclude_finished(self) -> None:
        """If the model has finished, conclude: nothing more is awaited."""
        if self._turn_end.finish_reason is not None:
            self._conclude(self._turn_end.closed(None))

    def _give_up(self, outcome: ending.Outcome, now: float) -> LeaseEffects:
        """End with `outcome`, unless the stream ended before: the client may have seen that end."""
        if self.has_ended:
            return []
        self._conclude_finished()
        match self._state:
            case _Over(outcome=over) if self.given_up is None or over.fail_reason is None:
                return self._end(over, now)
        self.given_up = outcome
        return self._end(outcome, now)

    def _end(self, outcome: ending.Outcome, now: float) -> LeaseEffects:
        return [messages.RequestEnded(record=self._record(outcome, now))]

    def _record(self, outcome: ending.Outcome, now: float) -> RequestRecord:
        progress, self._state = self.progress(), _Ended()
        outcome = outcome.for_host(self._api_key)
        self._totals.add_turn(self._turn)
        record = build_record(
            self._totals, self._turn, progress, outcome, [], now, was_sent=self._was_sent
        )
        self._with_own_counts(record.status)
        return record

    def _with_own_counts(self, status: RequestStatus) -> RequestStatus:
        """Set what was counted here; a reply in one piece is not parsed, so has no token count."""
        status["output_chars"] = self._text_chars
        status["reasoning_chars"] = self._reasoning_chars
        if self._totals.in_one_piece:
            del status["tokens_received"]
        return status
