"""What has come of one turn (one HTTP request), and when: what counts as its progress. Not
thread-safe; instants (`*_at`) are monotonic seconds."""

from __future__ import annotations

from llama_worker.request.progress import REPEATS_APART_S, REPEATS_KEPT, Batch
from llama_worker.stream.advance import Advance
from llama_worker.stream.events import (
    PromptProgress,
    ReasoningDelta,
    StreamEvent,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from llama_worker.types import RequestPhase

_BATCHES_KEPT = 16


class TurnProgress:
    """Hand it every event, in order."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.headers_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.last_data_at: float | None = None
        self.last_stream_byte_at: float | None = None
        self.prompt_progress: PromptProgress | None = None
        self.prompt_progress_at: float | None = None  # the latest report of more than before
        self.batches: tuple[Batch, ...] = ()  # between two reports, the latest
        self._reported_at: float | None = None  # the latest report, also one that was there before
        self.repeated_at: tuple[float, ...] = ()  # the latest repeats since the latest that was new
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.is_over = False  # its connection is closed, its tokens are counted
        self._deltas = 0
        self._advance = Advance()

    @property
    def deltas(self) -> int:
        """With something generated in them, so far."""
        return self._deltas

    @property
    def tokens(self) -> int:
        """Generated so far: as the server counts, else the deltas received."""
        if self.usage is not None:
            return self.usage.completion_tokens
        if self.timings is not None and self.timings.predicted_n is not None:
            return self.timings.predicted_n
        return self._deltas

    @property
    def phase(self) -> RequestPhase:
        """While the server is waited for."""
        if self.headers_at is None:
            return RequestPhase.WAITING
        return RequestPhase.PREFILL if self.first_token_at is None else RequestPhase.GENERATING

    def tokens_per_second(self) -> float | None:
        """As the server measured it, else over the deltas; None where neither is known."""
        if self.timings is not None and self.timings.predicted_per_second is not None:
            return self.timings.predicted_per_second
        if (
            self.first_token_at is None
            or self.last_token_at is None
            or self.last_token_at <= self.first_token_at
        ):
            return None
        return (self._deltas - 1) / (self.last_token_at - self.first_token_at)

    def hear(self, event: StreamEvent, at: float) -> bool:
        """Take note of the event; whether it brings the turn forward: then it is its latest
        data."""
        advanced = self._advance.by(event)
        if advanced:
            self.last_data_at = at
            self.repeated_at = ()
        elif not self.repeated_at or at - self.repeated_at[-1] >= REPEATS_APART_S:
            self.repeated_at = (*self.repeated_at, at)[-REPEATS_KEPT:]
        match event:
            case TextDelta(count=count) | ReasoningDelta(count=count):
                self._count(count, at)
            case ToolCallDelta():
                if advanced:
                    self._count(1, at)
            case PromptProgress():
                if advanced:
                    self._batch_done(event, at)
                self.prompt_progress, self._reported_at = event, at
            case Usage():
                self.usage = event
            case Timings():
                self.timings = event
                self._prompt_measured(event)
            case _:
                pass  # nothing to keep
        return advanced

    def _count(self, tokens: int, at: float) -> None:
        """So many deltas with something in them came."""
        self._deltas += tokens
        self.last_token_at = at
        if self.first_token_at is None:
            self.first_token_at = at

    def _prompt_measured(self, timings: Timings) -> None:
        """Where no progress was reported the whole prompt counts as one batch."""
        ended_at, read = self.first_token_at, timings.prompt_n
        seconds = (timings.prompt_ms or 0.0) / 1000
        if ended_at is None or self.prompt_progress_at is not None or not read or seconds <= 0:
            return
        began_at, depth = ended_at - seconds, (timings.cache_n or 0) + read
        self.batches = (Batch(began_at, ended_at, read, depth),)

    def _batch_done(self, told: PromptProgress, at: float) -> None:
        """It began with the latest report: until then the batches were its neighbours'."""
        before = self.prompt_progress
        if before is not None and self._reported_at is not None:
            tokens = told.processed - max(before.processed, told.cached)
            batch = Batch(self._reported_at, at, tokens, told.processed)
            self.batches = (*self.batches, batch)[-_BATCHES_KEPT:]
        self.prompt_progress_at = at
