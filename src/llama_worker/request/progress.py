"""Measures a request's progress: which events of a turn count, and the report that its watch gets.
Not thread-safe; instants (`*_at`) are monotonic seconds.

A server that hangs may go on sending: the same report of prompt progress on every pass of its loop,
role chunks, empty deltas, `{}`. Only what is new shows that it works on the request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from llama_worker.clock import latest
from llama_worker.stream import events
from llama_worker.types.request import RequestPhase

_BATCHES_KEPT = 16
_MAX_FINGERPRINTS = 4096  # a cycle of more distinct records counts as new content
_MAX_CALL_HEADS = 256  # in one turn; further ones do not count as progress
# Not fewer: the first chunk may say nothing, and a report of progress may come twice. Repeats that
# come together (read at once after a pause of this program) count as one.
REPEATS_KEPT = 3
REPEATS_APART_S = 0.5


class Batch(NamedTuple):
    """The part of a prompt read between two progress reports; all of it if there are none."""

    began_at: float
    ended_at: float
    tokens: int
    depth: int  # tokens in the context at its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of one request. All times except `dispatched_at` are of its current turn."""

    request_id: int
    phase: RequestPhase
    dispatched_at: float  # of the request: the first turn's start
    turn_started_at: float
    headers_at: float | None = None
    first_token_at: float | None = None
    prompt_progress_at: float | None = None  # the latest report of prompt progress
    last_data_at: float | None = None  # the latest data that advanced the turn
    last_stream_byte_at: float | None = None  # any byte, keepalives too; for `describe`
    batches: tuple[Batch, ...] = ()  # the latest few of the prompt
    has_media: bool = False  # images or sounds are no tokens until they are encoded
    links_media: bool = False  # the server fetches it by its URL, before it gives any sign of work
    needs_specific_slots: bool = False  # it may wait for its own slot while another is idle
    tokens: int = 0  # generated, as far as reported; of one answer, if several are asked for
    # between two pieces of generated content; None: fewer than two came
    longest_gap_s: float | None = None
    repeated_at: tuple[float, ...] = ()  # the latest repeats since the last new data
    # finished or broken off: what may still follow has its own short deadline
    concluding: bool = False
    in_one_piece: bool = False  # no stream: nothing comes until the reply is complete

    def only_repeats_since(self, at: float) -> bool:
        """Whether the server only repeats itself since `at`: it hangs, or serves others first."""
        return len(self.repeated_at) == REPEATS_KEPT and self.repeated_at[0] > at

    @property
    def may_encode(self) -> bool:
        """Whether the server may be encoding its media, which it does before the first token."""
        return self.has_media and self.phase in (RequestPhase.WAITING, RequestPhase.PREFILL)

    @property
    def may_await_slot(self) -> bool:
        """Whether it may still wait for its own slot, although another is idle."""
        return self.needs_specific_slots and self.data_at is None

    @property
    def is_served(self) -> bool:
        """Whether it has its headers and the server has not finished with it."""
        streams = self.phase in (RequestPhase.PREFILL, RequestPhase.GENERATING)
        return streams and not self.concluding

    @property
    def awaits_one_piece(self) -> bool:
        """Whether the server may work on its reply, of which nothing is heard."""
        waits = self.phase is RequestPhase.WAITING and not self.concluding
        return self.in_one_piece and waits

    @property
    def data_at(self) -> float | None:
        """When this turn's latest data came; None if none did. Headers do not count as data."""
        return latest(self.last_data_at, self.prompt_progress_at)

    @property
    def heard_at(self) -> float:
        """When this turn's latest data came; when it began if none did."""
        return newest(self.turn_started_at, self.data_at)


def newest(start: float, *others: float | None) -> float:
    """The latest of the instants that are not None."""
    return max([start, *(at for at in others if at is not None)])


# ---------------------------------------------------------------- one turn


class NoveltyDetector:
    """Tells which events of one turn bring something new. Pass it every event, in order."""

    def __init__(self) -> None:
        self._processed = -math.inf  # the most of the prompt ever reported as done
        self._once: set[type[events.StreamEvent]] = set()  # kinds that count once and have come
        self._call_heads: set[tuple[int, str | None, str | None]] = set()
        self._fingerprints: dict[int, bool] = {}  # of unknown content, the latest last

    def is_new(self, event: events.StreamEvent) -> bool:
        """Whether this event brings something new.

        Text, reasoning and arguments always do: repeated ones are left to the loop detector. A
        progress report does if more of the prompt is done than ever before, up to its total. A
        call's head, a finish, usage, timings and unknown content do the first time.
        """
        match event:
            case events.TextDelta() | events.ReasoningDelta():
                return bool(event.text)
            case events.ToolCallDelta():
                return bool(event.arguments) or self._is_new_call(event)
            case events.PromptReport(processed=processed, total=total):
                processed = min(processed, total)
                grown = processed > self._processed
                self._processed = max(processed, self._processed)
                return grown
            case (
                events.Finish()
                | events.UsageReport()
                | events.TimingsReport()
                | events.ServerError()
                | events.Done()
            ):
                is_first = type(event) not in self._once
                self._once.add(type(event))
                return is_first
            case events.UnknownContent(fingerprint=fingerprint):
                return self._is_new_content(fingerprint)
            case events.EmptyRecord():
                return False

    def _is_new_content(self, fingerprint: int) -> bool:
        is_new = not self._fingerprints.pop(fingerprint, False)
        self._fingerprints[fingerprint] = True
        if len(self._fingerprints) > _MAX_FINGERPRINTS:
            del self._fingerprints[next(iter(self._fingerprints))]
        return is_new

    def _is_new_call(self, event: events.ToolCallDelta) -> bool:
        head = (event.index, event.call_id, event.name)
        if (event.call_id is None and event.name is None) or len(
            self._call_heads
        ) >= _MAX_CALL_HEADS:
            return False
        is_new = head not in self._call_heads
        self._call_heads.add(head)
        return is_new


class TurnProgress:
    """Collects what one turn brings: tokens, times, batches of the prompt. Pass it every event, in
    order."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.headers_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float  # set with `first_token_at`
        self.longest_gap_s: float | None = None  # between two deltas with generated content
        self.last_data_at: float | None = None
        self.last_stream_byte_at: float | None = None
        self.prompt_progress: events.PromptReport | None = None
        self.prompt_progress_at: float | None = None  # the latest report of more progress
        self.batches: tuple[Batch, ...] = ()  # the latest few of the prompt
        self._first_batch: Batch | None = None  # until the second is reported
        self._reported_at: float  # when `prompt_progress` came
        self.repeated_at: tuple[float, ...] = ()  # the latest repeats since the last new data
        self.usage: events.UsageReport | None = None
        self.timings: events.TimingsReport | None = None
        self.is_over = False  # its connection is closed, and the totals include it
        self.deltas = 0  # only those with generated content
        self._novelty = NoveltyDetector()

    @property
    def tokens(self) -> int:
        """Generated so far: the server's count, else the number of deltas received."""
        if self.usage is not None:
            return self.usage.completion_tokens
        if self.timings is not None and self.timings.predicted_n is not None:
            return self.timings.predicted_n
        return self.deltas

    @property
    def phase(self) -> RequestPhase:
        """What the server does, as far as is known: waiting, prefill or generating."""
        if self.headers_at is None:
            return RequestPhase.WAITING
        return RequestPhase.PREFILL if self.first_token_at is None else RequestPhase.GENERATING

    def tokens_per_second(self) -> float | None:
        """As measured by the server, else computed from the deltas; None if neither is known."""
        if self.timings is not None and self.timings.predicted_per_second is not None:
            # b11434 reports 0 for a single token, which has no speed
            return self.timings.predicted_per_second or None
        if self.first_token_at is None or self.last_token_at <= self.first_token_at:
            return None
        return (self.deltas - 1) / (self.last_token_at - self.first_token_at)

    def record(self, event: events.StreamEvent, at: float) -> None:
        """Note the event."""
        advanced = self._novelty.is_new(event)
        if advanced:
            self.last_data_at = at
            self.repeated_at = ()
        elif not self.repeated_at or at - self.repeated_at[-1] >= REPEATS_APART_S:
            self.repeated_at = (*self.repeated_at, at)[-REPEATS_KEPT:]
        match event:
            case events.TextDelta(count=count) | events.ReasoningDelta(count=count):
                self._count(count, at)
            case events.ToolCallDelta():
                if advanced:
                    self._count(1, at)
            case events.PromptReport():
                if advanced:
                    self._batch_done(event, at)
                self.prompt_progress, self._reported_at = event, at
            case events.UsageReport():
                self.usage = event
            case events.TimingsReport():
                self.timings = event
                self._prompt_measured(event)

    def _count(self, tokens: int, at: float) -> None:
        """Count deltas with generated content."""
        self.deltas += tokens
        if self.first_token_at is None:
            self.first_token_at = at
        else:
            self.longest_gap_s = max(at - self.last_token_at, self.longest_gap_s or 0.0)
        self.last_token_at = at

    def _prompt_measured(self, timings: events.TimingsReport) -> None:
        """If no progress was reported, the whole prompt counts as one batch."""
        ended_at, read = self.first_token_at, timings.prompt_n
        seconds = (timings.prompt_ms or 0.0) / 1000
        if ended_at is None or self.prompt_progress_at is not None or not read or seconds <= 0:
            return
        began_at, depth = ended_at - seconds, (timings.cache_n or 0) + read
        self.batches = (Batch(began_at, ended_at, read, depth),)

    def _batch_done(self, report: events.PromptReport, at: float) -> None:
        """It began at the last report, new or repeated: until then other requests' batches ran.

        On a GPU a report may come before its batch is computed, and the next one after it: so the
        first batch took as long as the second, at least.
        """
        before = self.prompt_progress
        if before is not None:
            tokens = report.processed - max(before.processed, report.cached)
            batch = Batch(self._reported_at, at, tokens, report.processed)
            first, self._first_batch = self._first_batch, None
            if first is not None:
                began_at = min(first.began_at, first.ended_at - (at - self._reported_at))
                self.batches = (first._replace(began_at=began_at), batch)
            elif self.batches or report.processed >= report.total:
                self.batches = (*self.batches, batch)[-_BATCHES_KEPT:]
            else:
                self._first_batch = batch
        self.prompt_progress_at = at
