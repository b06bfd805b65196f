"""How far one request is, as the watch is told. Data; instants (`*_at`) are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llama_worker.types import RequestPhase

# The first chunk may say nothing, and a report of progress may come twice. Repeats that come
# together (read in one go behind a pause of this program's) are one.
REPEATS_KEPT = 3
REPEATS_APART_S = 0.5


class Batch(NamedTuple):
    """Part of a prompt that was read between two reports of progress; all of it without reports."""

    began_at: float
    ended_at: float
    tokens: int
    depth: int  # the end of its last token in the context


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one request is. All times but `dispatched_at` are of the turn (HTTP exchange) under
    way."""

    request_id: int
    phase: RequestPhase
    dispatched_at: float  # of the request: the first turn's start
    turn_started_at: float
    headers_at: float | None = None
    first_token_at: float | None = None  # told, and decides nothing: the phase does
    prompt_progress_at: float | None = None  # the latest report of prompt progress
    last_data_at: float | None = None  # what brought the turn forward
    last_stream_byte_at: float | None = None  # any byte, keepalives too: decides nothing
    batches: tuple[Batch, ...] = ()  # of the prompt, the latest few
    has_media: bool = False  # images or sounds are no tokens until they are encoded
    tokens: int = 0  # generated, as far as they were told
    repeated_at: tuple[float, ...] = ()  # the latest repeats since the latest that was new
    # finished or broken off: what may still follow has a short deadline of its own
    concluding: bool = False
    in_one_piece: bool = False  # no stream: nothing comes until the reply is complete

    def only_repeats_since(self, at: float) -> bool:
        """The server has sent the same again and again since then: its loop goes in circles, or
        this request waits for its turn."""
        return len(self.repeated_at) == REPEATS_KEPT and self.repeated_at[0] > at

    @property
    def is_served(self) -> bool:
        """It has its headers, and the server has not finished with it."""
        streams = self.phase in (RequestPhase.PREFILL, RequestPhase.GENERATING)
        return streams and not self.concluding

    @property
    def data_at(self) -> float | None:
        """The latest data of this turn, None where none came. Headers alone are no data."""
        times = [at for at in (self.last_data_at, self.prompt_progress_at) if at is not None]
        return max(times, default=None)


def last_progress_at(progress: Progress, liveness_at: float | None) -> float | None:
    """The latest of data and evidence of work in this turn; None where there was neither."""
    newest_at = newest(progress.turn_started_at, progress.data_at, liveness_at)
    return (
        newest_at if newest_at > progress.turn_started_at or progress.data_at is not None else None
    )


def newest(start: float, *others: float | None) -> float:
    """The latest of the instants that are known."""
    return max([start, *(at for at in others if at is not None)])
