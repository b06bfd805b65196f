"""What a round of looks at `/slots` tells about one suspected request. Sans-IO.

The CPU time of a process tells that somebody works, not for whom. The counters of the slots do,
where they move: only what moved between several looks counts, since an answer comes also from a
server that is stuck. Facts about `/slots` are of b11434.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llama_worker.gaps import NO_GAPS, Gaps
from llama_worker.request.progress import Progress
from llama_worker.server.blame import Verdict
from llama_worker.server.pace import Pace
from llama_worker.server.slots import Slot, SlotsLook, moved, moved_always
from llama_worker.server.timeouts import describe
from llama_worker.types.request import RequestFailReason, RequestPhase

_PREFILL, _GENERATING = RequestPhase.PREFILL, RequestPhase.GENERATING


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """What moved may be the request's own: a sign of work."""


def judge_by_slots(
    looks: Sequence[SlotsLook],
    suspect: Progress,
    *,
    others: Sequence[Progress],
    all_are_silent: bool,
    still_since: float,
    pace: Pace,
    is_cold: bool,
    liveness_at: float | None,
    now: float,
    gaps: Gaps = NO_GAPS,
) -> Verdict | SlotMoves | None:
    """What a round of looks tells about one suspected request; None: nothing.

    `others` are the other requests in flight, as they are now; `all_are_silent`: for as long as it
    takes to be suspected no request, of those that have ended neither, received data, and no slot
    was seen to move; `still_since`: the first look, of this round or an earlier one, since which
    nothing moved, and nothing was read from disk; `pace`: what was learnt of batches; `is_cold`:
    this launch has computed nothing so far; `liveness_at`: when the server's processes last showed
    work, for whoever reads the verdict; time in `gaps` is no part of a batch.
    """
    still = _Standstill(all_are_silent, still_since, pace, is_cold)
    return _Round(looks, suspect, others, still, liveness_at, now, gaps).judge()


class _Standstill(NamedTuple):
    all_are_silent: bool
    since: float
    pace: Pace
    is_cold: bool


class _Round:
    def __init__(
        self,
        looks: Sequence[SlotsLook],
        suspect: Progress,
        others: Sequence[Progress],
        still: _Standstill,
        liveness_at: float | None,
        now: float,
        gaps: Gaps,
    ) -> None:
        self._looks = looks
        self._suspect = suspect
        self._others = others
        self._still = still
        self._still_s = now - still.since - gaps.lost_s(still.since)
        self._liveness_at = liveness_at
        self._now = now
        self._began_at = looks[0].asked_at
        self._served = [other for other in others if self._has_been_served(other)]
        # The same slot at each look; a server that was started anew in between may have others.
        self._tracks = list(zip(*(look.slots for look in looks), strict=False))
        self._same_slots = len({tuple(slot.slot_id for slot in look.slots) for look in looks}) == 1

    def judge(self) -> Verdict | SlotMoves | None:
        suspect = self._suspect
        heard_at = suspect.data_at if suspect.data_at is not None else suspect.turn_started_at
        if not self._same_slots or heard_at >= self._began_at:
            return None
        if self._is_lost():
            detail = (
                f"the server has lost it: at {len(self._looks)} looks at /slots no slot was "
                "working on it"
            )
            return self._verdict(RequestFailReason.REQUEST_LOST, detail, alone=True)
        if not any(map(moved, self._tracks)):
            return self._judge_standstill()
        if self._is_left_behind():
            detail = "its slot stands still while another slot of the server moves"
            return self._verdict(RequestFailReason.STALL_TIMEOUT, detail, alone=True)
        moving = [track for track in self._tracks if moved(track) and self._could_be_its(track)]
        return SlotMoves() if len(moving) > len(self._explained) else None

    def _is_lost(self) -> bool:
        """Every slot that works is explained by another request, and one is free, at every look.

        Without headers it may still be on its way to a slot of a server that serves nobody else
        (one that loads its model on demand), or its images and sounds are still being decoded; so
        then others have to be served, and it has none.
        """
        one_is_free = any(all(not slot.is_processing for slot in track) for track in self._tracks)
        explained = all(
            sum(slot.is_processing for slot in look.slots) <= len(self._served)
            for look in self._looks
        )
        has_headers = (
            self._suspect.headers_at is not None and self._suspect.headers_at < self._began_at
        )
        would_be_placed = bool(self._served) and not self._suspect.has_media
        return one_is_free and explained and (has_headers or would_be_placed)

    def _judge_standstill(self) -> Verdict | None:
        """Nothing moved in any slot. Where something did lately, a step of a slow server is just
        long, or it pauses."""
        if not self._still.all_are_silent:
            return None
        busy = [track[-1] for track in self._tracks if track[-1].is_processing]
        if not busy:
            return None
        if any(slot.may_read_unseen for slot in busy):
            return None
        if all(slot.decoded_tokens for slot in busy):
            detail = f"no slot of the server moved in {self._still_s:.1f} s, and none is in prefill"
            return self._verdict(RequestFailReason.STALL_TIMEOUT, detail, alone=False)
        if self._suspect.only_repeats_since(self._still.since):
            detail = (
                f"no slot of the server moved in {self._still_s:.1f} s, and it sends the same "
                "again and again"
            )
            return self._verdict(RequestFailReason.STALL_TIMEOUT, detail, alone=False)
        limit_s = self._longest_batch_s(busy)
        if limit_s is None or self._still_s < limit_s:
            return None
        detail = (
            f"no slot of the server moved in {self._still_s:.1f} s, many times what such a batch "
            f"takes by its prompts so far (limit: {limit_s:.1f} s)"
        )
        return self._verdict(RequestFailReason.STALL_TIMEOUT, detail, alone=False)

    def _longest_batch_s(self, busy: Sequence[Slot]) -> float | None:
        """By what was learnt of earlier ones; None where they tell nothing of this one."""
        if any(each.has_media for each in (self._suspect, *self._others)):
            return None
        tokens, depth = 0, 0
        for slot in busy:
            if slot.decoded_tokens:
                tokens += 1
            elif slot.context_tokens is None:
                return None
            else:
                tokens += max(0, slot.context_tokens - slot.prompt_tokens)
                depth = max(depth, slot.context_tokens)
        return self._still.pace.longest_standstill_s(tokens, depth, is_cold=self._still.is_cold)

    def _is_left_behind(self) -> bool:
        """Others move at every interval, one that may be its slot never does, and none that moved
        may be its slot."""
        if not any(moved_always(track) for track in self._tracks):
            return False
        if any(track[0].may_read_unseen for track in self._tracks):
            return False
        its = [track for track in self._tracks if self._may_be_its(track)]
        moving = [track for track in its if moved(track)]
        return len(moving) < len(its) and len(moving) <= len(self._explained)

    @property
    def _explained(self) -> list[Progress]:
        """Others that are served, whose slot may look like the suspect's."""
        generating = self._suspect.phase is _GENERATING
        return [other for other in self._served if not generating or other.phase is _GENERATING]

    def _could_be_its(self, track: tuple[Slot, ...]) -> bool:
        """Whether the slot worked on one task at every look, and not on one that has said less than
        the suspect."""
        if not all(slot.is_processing for slot in track) or len({slot.task for slot in track}) > 1:
            return False
        first = track[0].decoded_tokens
        # The request has received that many pieces; a token may come in two.
        return self._suspect.phase is not _GENERATING or (
            first > 0 and first >= self._suspect.tokens // 2
        )

    def _may_be_its(self, track: tuple[Slot, ...]) -> bool:
        """Whether the slot could be the suspect's (`_could_be_its`) and is in its phase."""
        if self._suspect.phase is _GENERATING or not self._could_be_its(track):
            return self._suspect.phase is _GENERATING and self._could_be_its(track)
        # In prefill only where no other prompt is read, which would fill the batches.
        alone = (
            sum(
                1
                for other in self._tracks
                if any(s.is_processing and not s.decoded_tokens for s in other)
            )
            == 1
        )
        return self._suspect.phase is _PREFILL and track[0].decoded_tokens == 0 and alone

    def _has_been_served(self, other: Progress) -> bool:
        """It has a slot of its own at every look, and has brought data since the first."""
        heard = other.data_at is not None and other.data_at >= self._began_at
        return other.is_served and heard and other.turn_started_at < self._began_at

    def _verdict(self, reason: RequestFailReason, what: str, *, alone: bool) -> Verdict:
        slots = ", ".join(_shown(slot) for slot in self._looks[-1].slots)
        heard = describe(self._suspect, liveness_at=self._liveness_at, now=self._now)
        detail = f"{what}; slots: {slots}; {heard}"
        return Verdict(reason=reason, detail=detail, alone=alone)


def _shown(slot: Slot) -> str:
    if not slot.is_processing:
        return f"{slot.slot_id} idle"
    return f"{slot.slot_id} at {slot.prompt_tokens} prompt tokens, {slot.decoded_tokens} generated"
