"""Decides when a request has been silent for too long. Pure.

`_limits` lists every limit; the seconds come from `config.profiles.TimeoutProfile`. A tool's
deadline is in `request.request.Request`. Instants (`*_at`, `now`) are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.request.progress import Progress, newest
from llama_worker.server.blame import Verdict
from llama_worker.types.request import RequestFailReason, RequestPhase

STALLED_ALONE_MULTIPLE = 4  # of `idle_stream_timeout_s`, if `/slots` does not show whose work it is


class Neighbours(Struct, frozen=True, kw_only=True):
    """What is known about the other requests of this server."""

    data_at: float | None = None  # the latest data of any of them
    any_is_served: bool = False  # one of them has its headers, and limits of its own
    # when one was broken off (canceled, or given up) whose batch may still be computed
    leftover_since: float | None = None


class SlotSigns(Struct, frozen=True, kw_only=True):
    """What `/slots` has shown about one request while it is suspected."""

    moved_at: float | None = None  # when a slot that may be the request's moved
    any_moved_at: float | None = None  # when any slot of the server moved
    answered_last_look: bool = False  # `/slots` answered the latest look
    may_progress_unseen: bool = (
        False  # it hides prompt progress, or answers only between two batches
    )
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
    for limit in _limits(progress, liveness_at, neighbours, slots, profile):
        limit_s = getattr(profile, limit.setting)
        if limit_s is not None:
            due_at = limit.since + limit.multiple * limit_s
            if due_at <= now:
                over.append((due_at, limit_s, limit))
    if not over:
        return None
    _, limit_s, first = min(over, key=lambda each: each[0])
    waited_s = now - first.since
    times = f"{first.multiple} x " if first.multiple > 1 else ""
    silence = f"{first.what} for {waited_s:.1f} s (limit: {times}{first.setting} {limit_s:g})"
    return Verdict(
        reason=first.reason,
        detail=f"{silence}; {describe(progress, liveness_at=liveness_at, now=now)}",
        alone=first.alone,
    )


def _limits(
    progress: Progress,
    liveness_at: float | None,
    neighbours: Neighbours,
    slots: SlotSigns,
    profile: TimeoutProfile,
) -> Iterator[_Limit]:
    """The limits of the request's phase; if two are exceeded at the same time, the first wins."""
    if progress.phase is RequestPhase.DONE:
        return
    absolute = _Limit(
        "absolute_timeout_s",
        RequestFailReason.ABSOLUTE_TIMEOUT,
        "not finished",
        progress.dispatched_at,
    )
    if progress.concluding:
        yield absolute
        return
    # Not before the turn's start: earlier signs say nothing about this turn.
    working_at = newest(
        progress.turn_started_at, progress.headers_at, progress.data_at, liveness_at
    )
    data_at = newest(progress.turn_started_at, progress.data_at)
    any_data_at = newest(data_at, neighbours.data_at)
    # Batches are filled in slot order: while another prompt is read first, a request gets nothing,
    # or its old report again after each of that prompt's batches (b10453 to b11434).
    any_progress_at = newest(any_data_at, slots.any_moved_at)
    waiting = progress.phase is RequestPhase.WAITING
    prefill = progress.phase is RequestPhase.PREFILL
    generating = progress.phase is RequestPhase.GENERATING
    reporting = prefill and progress.prompt_progress_at is not None
    stall = RequestFailReason.STALL_TIMEOUT

    # A reply in one piece has its headers when it is complete.
    if waiting and not neighbours.any_is_served and not progress.in_one_piece:
        # Connecting has a timeout of its own. Builds of October 2025 to May 2026 hold the headers
        # back for the whole prefill: only the lack of any sign of work counts. Every build holds
        # them back during another request's batch: the limits of that request apply then.
        reason, since = RequestFailReason.HEADERS_TIMEOUT, max(working_at, any_progress_at)
        leftover_since, idle_s = neighbours.leftover_since, profile.idle_stream_timeout_s
        what = "no response headers and no sign of work"
        if leftover_since is None or (
            idle_s is not None and leftover_since + idle_s <= since + profile.headers_timeout_s
        ):
            yield _Limit("headers_timeout_s", reason, what, since)
        else:
            what = f"{what} since an earlier request was aborted"
            yield _Limit("idle_stream_timeout_s", reason, what, leftover_since)
    if waiting and progress.in_one_piece and slots.shows_all and not neighbours.any_is_served:
        # What its slot shows takes the place of progress reports.
        since = newest(max(working_at, any_progress_at), neighbours.leftover_since)
        what = "no slot moved and there was no sign of work"
        yield _Limit("idle_stream_timeout_s", stall, what, since)
    if prefill and not reporting:
        yield _Limit(
            "prefill_liveness_timeout_s",
            stall,
            "no data and no sign of work in prefill",
            max(working_at, any_progress_at),
        )
    if reporting or generating:
        since = max(working_at, any_progress_at) if prefill else working_at
        yield _Limit("idle_stream_timeout_s", stall, "no data and no sign of work", since)
    if prefill or generating:
        since = any_progress_at if prefill else newest(data_at, slots.moved_at)
        waits_unseen = prefill and slots.may_progress_unseen  # perhaps behind another client
        if progress.only_repeats_since(since) and not waits_unseen:
            what = "only repeated records"
            yield _Limit("idle_stream_timeout_s", stall, what, since)
    idle_s, since = profile.idle_stream_timeout_s, newest(data_at, slots.moved_at)
    if (
        generating
        and not slots.answered_last_look
        and idle_s is not None
        and any_data_at - since >= idle_s
    ):
        # A generating request gets a token with every batch, however long another's prompt is.
        what = "no data while other requests receive data,"
        yield _Limit(
            "idle_stream_timeout_s", stall, what, since, multiple=STALLED_ALONE_MULTIPLE, alone=True
        )
    if waiting or prefill:
        yield _Limit(
            "ttft_timeout_s", RequestFailReason.TTFT_TIMEOUT, "no token", progress.turn_started_at
        )
    if waiting or prefill or generating:  # a server that spins gives evidence of work for ever
        waits = prefill and progress.only_repeats_since(progress.turn_started_at)
        # A reply in one piece brings no data until it is complete: slot movement counts instead.
        since = any_progress_at if waits or progress.in_one_piece else any_data_at
        yield _Limit("silent_work_timeout_s", stall, "no data for any request", since)
    yield absolute


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
