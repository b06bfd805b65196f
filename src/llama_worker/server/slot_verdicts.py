"""Judges one suspected request by a round of looks at `/slots`. Sans-IO.

The CPU time of a process shows that it works, but not for which request. The counters of the slots
do, if they move: only movement between looks counts, since a stuck server may still answer. Facts
about `/slots` are of b11434.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from msgspec.structs import replace

from llama_worker.request.progress import Progress, newest
from llama_worker.server.blame import Verdict
from llama_worker.server.pace import Pace
from llama_worker.server.slots import Slot, SlotsLook, moved, moved_between, moved_every_time
from llama_worker.server.timeouts import describe
from llama_worker.types.request import RequestFailReason, RequestPhase

# A standstill is a hang only beyond this many times the longest time between two tokens. Text that
# comes fast is delivered in portions (`lazy_reading.MAX_HOLD_S` apart); so many of those are below
# the time that a round of looks takes, or they would prolong it.
STEP_MULTIPLE = 6.0

_WAITING, _PREFILL = RequestPhase.WAITING, RequestPhase.PREFILL
_GENERATING = RequestPhase.GENERATING


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """A slot that moved may be the request's own: a sign of work."""


@dataclass(frozen=True, kw_only=True)
class SlotsRound:
    """A round of looks, one suspected request, and what else is needed to judge it."""

    looks: Sequence[SlotsLook]
    suspect: Progress
    others: Sequence[Progress]  # the other requests in flight, as they are now
    others_data_at: float | None  # when another request received data, also one that has ended
    # For `suspect_after_s`, no request (ended ones included) received data, no slot was seen to
    # move, and nothing was read from disk.
    all_are_silent: bool
    # The looks have covered `suspect_after_s`, in which nothing moved.
    all_stood_still: bool
    # since when nothing moved, and nothing was read from disk; it may lie before this round
    unchanged_since: float
    pace: Pace  # the times of earlier batches
    batch_tokens: int | None  # at most, of all slots together; None: unknown
    may_encode: bool  # images or sounds, of any client
    is_cold: bool  # this launch has computed nothing so far
    silent_work_timeout_s: float | None  # of the profile
    liveness_at: float | None  # the latest work of the server's processes; for `Verdict.detail`
    now: float

    def judge(self) -> Verdict | SlotMoves | None:
        """What the looks show about the request; None: nothing."""
        same_slots = len({tuple(slot.slot_id for slot in look.slots) for look in self.looks}) == 1
        if not same_slots or self.suspect.heard_at >= self._began_at:
            return None
        if self._is_lost():
            times = f"no slot was working on it in {len(self.looks)} polls of /slots"
            lost = RequestFailReason.REQUEST_LOST
            verdict = self._verdict(lost, f"the server has lost the request: {times}", alone=True)
            # Before its headers it may also be in the queue, behind one that had its turn at the
            # last slot that became free and could not begin: that slot stays idle (b11434).
            return replace(verdict, counts_against_server=self.suspect.headers_at is not None)
        if not any(map(moved, self._tracks)):
            return self._judge_standstill()
        if self._may_wait_for_media():
            return SlotMoves()
        if self._is_stalled_alone():
            what = "its slot makes no progress while another slot of the server does"
            return self._stalled(what, alone=True)
        moving = [track for track in self._tracks if moved(track) and self._has_one_task(track)]
        may_be_its = any(map(self._matches_task, moving))
        return SlotMoves() if may_be_its and len(moving) > len(self._other_candidates) else None

    def _is_lost(self) -> bool:
        """It had a slot, which it would keep to its end, and each is idle or changes tasks. Or, at
        every look, other requests account for each slot that works, and one slot is idle.

        A request without headers may still be on its way to a slot of a server that serves no other
        (one that loads its model on demand), or its media is being decoded: it is lost only if
        others are served and it has no media, or if it has waited for `silent_work_timeout_s`. One
        that picks its slots may wait for them until its first data, and others behind it in the
        queue.
        """
        had_slot = self.suspect.phase is _GENERATING or self.suspect.prompt_progress_at is not None
        # what a slot ended before the look before the last would have come by now
        if had_slot and not any(_works_on_one_task(track[:-1]) for track in self._tracks):
            return True
        if self._anybody_picks_slots:
            return False
        others_use_the_rest = all(
            sum(slot.is_processing for slot in look.slots) <= len(self._served)
            for look in self.looks
        )
        has_headers = (
            self.suspect.headers_at is not None and self.suspect.headers_at < self._began_at
        )
        limit_s = self.silent_work_timeout_s
        is_overdue = limit_s is not None and self.now - self.suspect.heard_at >= limit_s
        would_have_slot = is_overdue or (bool(self._served) and not self.suspect.may_encode)
        return self._one_is_idle and others_use_the_rest and (has_headers or would_have_slot)

    @property
    def _one_is_idle(self) -> bool:
        """Whether some slot was free at every look, so that no request had to queue."""
        return any(all(not slot.is_processing for slot in track) for track in self._tracks)

    @property
    def _anybody_picks_slots(self) -> bool:
        return any(each.may_await_slot for each in (self.suspect, *self.others))

    def _judge_standstill(self) -> Verdict | None:
        """Nothing moved in any slot. If something did recently, a slow server may just be in a long
        step or a pause: no verdict."""
        busy = [slot for *_, slot in self._tracks if slot.is_processing]
        if not self.all_are_silent or not busy or any(slot.may_progress_unseen for slot in busy):
            return None
        still_s = self.now - self.unchanged_since
        what = f"no slot of the server made progress for {still_s:.1f} s"
        if all(slot.decoded_tokens for slot in busy):
            # One token may take longer than a round, also one that no request here receives.
            if not self.all_stood_still and still_s < self._longest_step_s(len(busy)):
                return None
            return self._stalled(f"{what}, and none is in prefill")
        if self.suspect.only_repeats_since(self.unchanged_since):
            return self._stalled(f"{what}, and the server sends only repeated records")
        limit_s = self._longest_batch_s(busy)
        if limit_s is None or still_s < limit_s:
            return None
        why = f"many times longer than earlier batches predict (limit: {limit_s:.1f} s)"
        return self._stalled(f"{what}, {why}")

    def _longest_step_s(self, busy_count: int) -> float:
        """The limit for the next token of so many slots, from the times between earlier ones;
        infinite if one of them is another client's, or of a request that has not received two."""
        requests = (self.suspect, *self.others)
        gaps = [each.longest_gap_s for each in requests if each.is_served and each.longest_gap_s]
        return STEP_MULTIPLE * max(gaps) if len(gaps) >= busy_count else math.inf

    def _longest_batch_s(self, busy: Sequence[Slot]) -> float | None:
        """The limit for the batch in progress, from earlier ones; None if they do not compare."""
        if self.may_encode:
            return None
        tokens, depth = 0, 0
        for slot in busy:
            if slot.decoded_tokens:
                tokens += 1
            elif slot.context_tokens is None:
                return None
            else:
                in_batch = slot.context_tokens - slot.cached_tokens - slot.prompt_tokens
                if self.batch_tokens is not None and in_batch > self.batch_tokens:
                    continue  # it had no turn yet, and shows the task before
                tokens += max(0, in_batch)
                depth = max(depth, slot.context_tokens)
        if self.batch_tokens is not None:
            tokens = min(tokens, self.batch_tokens)
        return self.pace.longest_standstill_s(tokens, depth, is_cold=self.is_cold)

    def _may_wait_for_media(self) -> bool:
        """A slot that reads a prompt moves, perhaps with each of its images or sounds: they are
        encoded one after the other, and nothing else has a turn meanwhile (b11434)."""
        reads = any(
            moved(track) and track[-1].is_processing and not track[-1].decoded_tokens
            for track in self._tracks
        )
        return self.may_encode and reads

    def _is_stalled_alone(self) -> bool:
        """The server computes what is the request's turn, too; one slot that may be the request's
        never moves, and other requests account for those that may be and moved."""
        if not (self._others_get_tokens or self._others_account_for_all_moves):
            return False
        if any(track[0].may_progress_unseen for track in self._tracks):
            return False
        its = [track for track in self._tracks if self._matches_task_and_phase(track)]
        moving = [track for track in its if moved(track)]
        return len(moving) < len(its) and len(moving) <= len(self._other_candidates)

    @property
    def _others_get_tokens(self) -> bool:
        """Every batch that gives another request something gives each that generates a token
        (b11434). What came after the second look was not computed before the first."""
        at = self.others_data_at
        is_recent = at is not None and at > self.looks[1].asked_at
        goes_on = all(moved_between(look, following) for look, following in pairwise(self.looks))
        return self.suspect.phase is _GENERATING and is_recent and goes_on

    @property
    def _others_account_for_all_moves(self) -> bool:
        """A slot moves at every interval, and other requests account for each that moved: another
        client's `/infill`, say, is not computed beside the request's."""
        moved_count = sum(map(moved, self._tracks))
        goes_on = any(map(moved_every_time, self._tracks))
        return goes_on and moved_count <= sum(other.is_served for other in self.others)

    @cached_property
    def _tracks(self) -> list[tuple[Slot, ...]]:
        """Each slot at every look; all looks show the same slots."""
        return list(zip(*(look.slots for look in self.looks), strict=True))

    @property
    def _began_at(self) -> float:
        return self.looks[0].asked_at

    @cached_property
    def _served(self) -> list[Progress]:
        return [other for other in self.others if self._has_been_served(other)]

    @property
    def _other_candidates(self) -> list[Progress]:
        """Other requests that are served, and whose slot may look like the suspect's."""
        generating = self.suspect.phase is _GENERATING
        return [other for other in self._served if not generating or other.phase is _GENERATING]

    def _has_one_task(self, track: tuple[Slot, ...]) -> bool:
        """Whether the slot worked on one task at every look; on one that has generated something,
        if the suspect has."""
        has_begun = self.suspect.phase is not _GENERATING or track[0].decoded_tokens > 0
        return has_begun and _works_on_one_task(track)

    def _matches_task(self, track: tuple[Slot, ...]) -> bool:
        """Whether the slot had one task (`_has_one_task`), and has generated no less than the
        suspect received."""
        # `tokens` counts the pieces received; one token may come in two, hence half of it.
        is_enough = track[0].decoded_tokens >= self.suspect.tokens // 2
        return self._has_one_task(track) and (self.suspect.phase is not _GENERATING or is_enough)

    def _matches_task_and_phase(self, track: tuple[Slot, ...]) -> bool:
        """Whether the slot could be the suspect's (`_matches_task`) and is in its phase."""
        if not self._matches_task(track):
            return False
        if self.suspect.phase is _GENERATING:
            return True
        # A reply in one piece is awaited to its end: its slot may be generating.
        if track[0].decoded_tokens and not self.suspect.awaits_one_piece:
            return False
        # Only if no other prompt is read, which would fill the batches.
        if sum(map(_may_read, self._tracks)) != 1:
            return False
        if self.suspect.phase is _WAITING:
            return self._must_have_slot
        # An older build may send headers before there is a slot, but no report.
        return self.suspect.prompt_progress_at is not None or self._one_is_idle

    @property
    def _must_have_slot(self) -> bool:
        """Whether the one slot for which no request accounts must be the suspect's, which has no
        headers: a server sends them at the slot's first turn (b10453 to b11434). If none is idle,
        it may queue behind another client's."""
        others_are_served = all(
            other in self._served
            for other in self.others
            if other.is_served or other.phase in (_WAITING, _PREFILL)
        )
        one_is_left = all(
            sum(slot.is_processing for slot in look.slots) == len(self._served) + 1
            for look in self.looks
        )
        may_wait = self.suspect.may_encode or self._anybody_picks_slots
        return self._one_is_idle and others_are_served and one_is_left and not may_wait

    def _has_been_served(self, other: Progress) -> bool:
        """Whether the request had a slot at every look: it had its headers before, and received
        data between them, or a token before and data afterwards."""
        data_at, token_at = other.data_at, other.first_token_at
        if data_at is None or data_at < self._began_at:
            return False
        had_slot = token_at is not None and token_at < self._began_at
        heard_between = data_at <= self.looks[-1].asked_at
        is_old = newest(other.turn_started_at, other.headers_at) < self._began_at
        return other.is_served and is_old and (had_slot or heard_between)

    def _stalled(self, what: str, *, alone: bool = False) -> Verdict:
        return self._verdict(RequestFailReason.STALL_TIMEOUT, what, alone=alone)

    def _verdict(self, reason: RequestFailReason, what: str, *, alone: bool) -> Verdict:
        slots = ", ".join(_shown(slot) for slot in self.looks[-1].slots)
        heard = describe(self.suspect, liveness_at=self.liveness_at, now=self.now)
        return Verdict(reason=reason, detail=f"{what}; slots: {slots}; {heard}", alone=alone)


def _works_on_one_task(track: Sequence[Slot]) -> bool:
    return all(slot.is_processing for slot in track) and len({slot.task for slot in track}) == 1


def _may_read(track: Sequence[Slot]) -> bool:
    """Whether the slot may have been reading a prompt: before b10453 it shows meanwhile what the
    task before has generated."""
    seen = [slot for slot in track if slot.is_processing]
    counts = {slot.decoded_tokens for slot in seen}
    has_read = len({slot.prompt_tokens for slot in seen}) > 1
    return has_read or 0 in counts or len(counts) == 1


def _shown(slot: Slot) -> str:
    if not slot.is_processing:
        return f"{slot.slot_id} idle"
    return f"{slot.slot_id} at {slot.prompt_tokens} prompt tokens, {slot.decoded_tokens} generated"
