"""Decides when a request has been silent for too long. Pure.

`_Limits` lists them; the seconds come from `config.profiles.TimeoutProfile`. A tool's
deadline is in `request.request.Request`. Instants (`*_at`, `now`) are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from llama_worker.clock import earliest
from llama_worker.config.profiles import TimeoutProfile
from llama_worker.request.progress import Progress, newest
from llama_worker.server.blame import Verdict
from llama_worker.types.request import RequestFailReason, RequestPhase

STALLED_ALONE_MULTIPLE = 4  # of `idle_stream_timeout_s`, if `/slots` does not show whose work it is


class Neighbours(Struct, frozen=True, kw_only=True):
    """What is known about the other requests of this server."""

    data_at: float | None = None  # the latest data of any of them
    any_is_served: bool = False  # one of them has its headers, and limits of its own
    # a reply in one piece is awaited: unseen, its batches may hold back the headers of this request
    any_awaits_one_piece: bool = False
    # when one was broken off (canceled, or given up) whose batch may still be computed
    leftover_since: float | None = None


class SlotSigns(Struct, frozen=True, kw_only=True):
    """What `/slots` has shown about one request while it is suspected."""

    moved_at: float | None = None  # when a slot that may be the request's moved
    any_moved_at: float | None = None  # when any slot of the server moved
    # the same, if that may hold up a request of which nothing was heard
    held_up_at: float | None = None
    shows_prompt_progress: bool = False  # and shows how far each slot has read its prompt
    # a round of looks has just ended that leaves out nothing the server might do for a request
    shows_all: bool = False


NO_NEIGHBOURS, NO_SLOT_SIGNS = Neighbours(), SlotSigns()


class _Limit(Struct, frozen=True):
    setting: str  # of the profile: None turns it off
    reason: RequestFailReason
    what: str
    since: float
    multiple: int = 1  # of the setting
    alone: bool = False


def timeout_verdict(
    progress: Progress,
    *,
    liveness_at: float | None,
    neighbours: Neighbours = NO_NEIGHBOURS,
    slots: SlotSigns = NO_SLOT_SIGNS,
    profile: TimeoutProfile,
    now: float,
) -> Verdict | None:
    """Why to give up the request; None while it may go on.

    `liveness_at` is the newest evidence of work by the server's processes; evidence from before the
    turn began does not count. `slots` is what `/slots` has shown.

    If several limits are exceeded, the first one exceeded gives the reason: a late tick decides the
    same as a punctual one, and a verdict, once due, stays the same until something new is heard.
    """
    over = []
    for limit in _Limits(progress, liveness_at, neighbours, slots, profile):
        limit_s = getattr(profile, limit.setting)
        if limit_s is not None:
            due_at = limit.since + limit.multiple * limit_s
            if due_at <= now:
                over.append((due_at, limit_s, limit))
    if not over:
        return None
    _, limit_s, first = min(over, key=lambda each: each[0])
    waited_s = now - first.since
    times = f"{first.multiple} x " if first.multiple != 1 else ""
    silence = f"{first.what} for {waited_s:.1f} s (limit: {times}{first.setting} {limit_s:g})"
    return Verdict(
        reason=first.reason,
        detail=f"{silence}; {describe(progress, liveness_at=liveness_at, now=now)}",
        alone=first.alone,
        counts_against_server=first.reason is not RequestFailReason.ABSOLUTE_TIMEOUT,
    )


class _Limits:
    """The limits of one request in its phase; of two that are exceeded at the same time, the first
    wins."""

    def __init__(
        self,
        progress: Progress,
        liveness_at: float | None,
        neighbours: Neighbours,
        slots: SlotSigns,
        profile: TimeoutProfile,
    ) -> None:
        self._progress, self._neighbours, self._slots = progress, neighbours, slots
        self._profile = profile
        # Not before the turn's start: earlier signs say nothing about this turn.
        self._data_at = progress.heard_at
        self._working_at = newest(self._data_at, progress.headers_at, liveness_at)
        self._any_data_at = newest(self._data_at, neighbours.data_at)
        # Batches are filled in slot order: while another prompt is read first, a request gets
        # nothing, or its old report again after each of that prompt's batches (b10453 to b11434).
        self._any_progress_at = newest(self._any_data_at, slots.any_moved_at)
        self._any_sign_at = max(self._working_at, self._any_progress_at)

    def __iter__(self) -> Iterator[_Limit]:
        progress = self._progress
        if progress.phase is RequestPhase.DONE:
            return
        if not progress.concluding:
            yield from self._of_phase()
        reason = RequestFailReason.ABSOLUTE_TIMEOUT
        yield _Limit("absolute_timeout_s", reason, "not finished", progress.dispatched_at)

    def _of_phase(self) -> Iterator[_Limit]:
        match self._progress.phase:  # a tool has its own
            case RequestPhase.WAITING:
                yield from self._waiting()
            case RequestPhase.PREFILL:
                yield from self._prefill()
            case RequestPhase.GENERATING:
                yield from self._generating()

    def _waiting(self) -> Iterator[_Limit]:
        # what the server does for a reply in one piece, also for another's, only slots show
        is_unseen = self._progress.in_one_piece or self._neighbours.any_awaits_one_piece
        if self._neighbours.any_is_served or self._progress.links_media:
            pass  # a dead server is found by the limits of that one; what is fetched is not seen
        elif not is_unseen:
            yield self._no_headers()
        elif self._slots.shows_all:
            since = newest(self._any_sign_at, self._neighbours.leftover_since)
            yield self._idle("no slot moved and there was no sign of work", since)
        yield self._no_token()
        in_one_piece = self._progress.in_one_piece
        yield self._no_data(self._slots.any_moved_at if in_one_piece else self._slots.held_up_at)

    def _prefill(self) -> Iterator[_Limit]:
        if self._progress.prompt_progress_at is not None:
            yield self._idle("no data and no sign of work", self._any_sign_at)
        else:
            what = "no data and no sign of work in prefill"
            yield self._stalled("prefill_liveness_timeout_s", what, self._any_sign_at)
        if self._slots.shows_prompt_progress:  # else it may wait behind another client
            yield from self._only_repeats(self._any_progress_at)
        yield self._no_token()
        if self._progress.only_repeats_since(self._progress.turn_started_at):
            yield self._no_data(self._slots.any_moved_at)
        elif self._progress.data_at is None:  # no client asked for reports
            moves = (self._slots.moved_at, self._slots.held_up_at)
            yield self._no_data(None if None in moves else earliest(*moves))
        else:
            yield self._no_data()

    def _generating(self) -> Iterator[_Limit]:
        yield self._idle("no data and no sign of work", self._working_at)
        since = newest(self._data_at, self._slots.moved_at)
        yield from self._only_repeats(since)
        yield from self._no_data_beside_others(since)
        yield self._no_data()

    def _no_headers(self) -> _Limit:
        """Connecting has a timeout of its own. Builds of October 2025 to May 2026 hold the headers
        back for the whole prefill, every build during another request's batch: only the lack of any
        sign of work counts."""
        reason, since = RequestFailReason.HEADERS_TIMEOUT, self._any_sign_at
        leftover_since = self._neighbours.leftover_since
        idle_s, headers_s = self._profile.idle_stream_timeout_s, self._profile.headers_timeout_s
        what = "no response headers and no sign of work"
        if leftover_since is None or (
            idle_s is not None and leftover_since + idle_s <= since + headers_s
        ):
            return _Limit("headers_timeout_s", reason, what, since)
        what = f"{what} since an earlier request was aborted"
        return _Limit("idle_stream_timeout_s", reason, what, leftover_since)

    def _only_repeats(self, since: float) -> Iterator[_Limit]:
        if self._progress.only_repeats_since(since):
            yield self._idle("only repeated records", since)

    def _no_data_beside_others(self, since: float) -> Iterator[_Limit]:
        """A generating request gets a token with every batch, however long another's prompt is."""
        idle_s = self._profile.idle_stream_timeout_s
        if idle_s is None or self._any_data_at - since < idle_s:
            return
        setting, reason = "idle_stream_timeout_s", RequestFailReason.STALL_TIMEOUT
        what, multiple = "no data while other requests receive data,", STALLED_ALONE_MULTIPLE
        yield _Limit(setting, reason, what, since, multiple=multiple, alone=True)

    def _no_token(self) -> _Limit:
        reason, since = RequestFailReason.TTFT_TIMEOUT, self._progress.turn_started_at
        return _Limit("ttft_timeout_s", reason, "no token", since)

    def _no_data(self, moved_at: float | None = None) -> _Limit:
        """A server that spins gives evidence of work for ever. `moved_at`: what a slot does counts
        as data, since none are to be expected."""
        since = newest(self._any_data_at, moved_at)
        return self._stalled("silent_work_timeout_s", "no data for any request", since)

    def _idle(self, what: str, since: float) -> _Limit:
        return self._stalled("idle_stream_timeout_s", what, since)

    def _stalled(self, setting: str, what: str, since: float) -> _Limit:
        return _Limit(setting, RequestFailReason.STALL_TIMEOUT, what, since)


def describe(progress: Progress, *, liveness_at: float | None, now: float) -> str:
    """The request's phase and times, on one line, for a person."""
    ages = (
        f"{name} never" if at is None else f"{name} {now - at:.1f} s ago"
        for name, at in _instants(progress, liveness_at).items()
    )
    return f"request {progress.request_id} in phase {progress.phase.value}, {', '.join(ages)}"


def ages(
    progress: Progress, *, liveness_at: float | None, now: float
) -> dict[str, str | float | None]:
    """The phase and times of `describe` as JSON for `get_debug_info`: seconds since each instant,
    None if it has not happened."""
    ages_s = {
        f"{name.replace(' ', '_')}_ago_s": None if at is None else round(now - at, 3)
        for name, at in _instants(progress, liveness_at).items()
    }
    return {"phase": progress.phase.value, **ages_s}


def _instants(progress: Progress, liveness_at: float | None) -> dict[str, float | None]:
    return {
        "turn began": progress.turn_started_at,
        "headers": progress.headers_at,
        "first token": progress.first_token_at,
        "prompt progress": progress.prompt_progress_at,
        "last data": progress.last_data_at,
        "last byte": progress.last_stream_byte_at,
        "last sign of work": liveness_at,
    }
