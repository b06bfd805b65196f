"""What llama-server's `/slots` tells about a request that brings nothing new. Sans-IO.

The CPU time of a process tells that somebody works, not for whom. The counters of the slots do,
where they move: they are asked only while a request is suspected, and only what moved between
several looks counts, since an answer comes also from a server that is stuck. Facts about `/slots`
are of b11434. Instants (`*_at`, `now`) are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from llama_worker.config.validation import as_count
from llama_worker.gaps import NO_GAPS, Gaps
from llama_worker.request.progress import Progress
from llama_worker.server.pace import Pace
from llama_worker.server.timeouts import Verdict, describe
from llama_worker.types import RequestFailReason, RequestPhase

LOOKS_COUNT = 4  # of one round
LOOK_TIMEOUT_S = 2.0  # it answers within 0.21 s, also in the middle of a long batch (b11434)
SILENT_S = 60.0  # so long without an answer, and it is news
SILENT_LOOKS = 3
# more often would disturb the server, which restarts its own 1 s waits at every answer
LOOK_INTERVAL_S = 2.0
PAUSE_S = 5.0  # after a round without a verdict
# after `--no-slots` (501), a key that is missing (401), an old build, or silence
NO_ANSWER_PAUSE_S = 60.0

_PREFILL, _GENERATING = RequestPhase.PREFILL, RequestPhase.GENERATING


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One slot at one look. Both counters are of the task under way."""

    slot_id: int
    is_processing: bool
    task: int | None = None
    prompt_tokens: int = 0  # of the prompt, that are done; moves with each finished batch
    decoded_tokens: int = 0  # 0 in prefill
    context_tokens: int | None = field(default=None, compare=False)  # the batch under way included
    shows_reading: bool = field(default=True, compare=False)  # by `prompt_tokens`; b9093 does not
    speculates: bool = field(default=False, compare=False)  # another model drafts for it, perhaps

    @property
    def may_read_unseen(self) -> bool:
        """That it stands still tells nothing. A draft model reads the whole prompt by itself, in
        one go, behind the first token."""
        drafts_first = self.speculates and self.decoded_tokens == 1
        unseen = not self.decoded_tokens and not self.shows_reading
        return self.is_processing and (unseen or drafts_first)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsLook:
    """One answer."""

    asked_at: float
    slots: tuple[Slot, ...]  # by id


@dataclass(frozen=True, slots=True)
class SlotsSilence:
    """No answer within the time for it, and no refusal."""


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """What moved may be the request's own: a sign of work."""


def parse_slots(body: Any) -> tuple[Slot, ...] | None:
    """The slots in an answer's JSON, by id; None where it is not what `/slots` says in any build.

    Builds before 2025 give `state` (0: idle) for `is_processing` and `next_token` as an object; a
    slot that was never used has no counters.
    """
    if not isinstance(body, list) or not body:
        return None
    slots = [_slot(told) for told in body]
    known = [slot for slot in slots if slot is not None]
    if len(known) < len(slots) or len({slot.slot_id for slot in known}) < len(known):
        return None
    return tuple(sorted(known, key=lambda slot: slot.slot_id))


def _slot(told: Any) -> Slot | None:
    if not isinstance(told, Mapping):
        return None
    slot_id, is_processing = as_count(told.get("id")), told.get("is_processing")
    if is_processing is None and as_count(told.get("state")) is not None:
        is_processing = told["state"] != 0
    if slot_id is None or not isinstance(is_processing, bool):
        return None
    next_token = told.get("next_token")
    if isinstance(next_token, list) and len(next_token) == 1:
        next_token = next_token[0]
    counters = next_token if isinstance(next_token, Mapping) else told
    decoded = as_count(counters.get("n_decoded"))
    if decoded is None and is_processing:
        return None  # nothing could be seen to move
    prompt_tokens = as_count(told.get("n_prompt_tokens_processed"))
    return Slot(
        slot_id=slot_id,
        is_processing=is_processing,
        task=as_count(told.get("id_task")),
        prompt_tokens=prompt_tokens or 0,
        shows_reading=prompt_tokens is not None,
        decoded_tokens=decoded or 0,
        context_tokens=as_count(told.get("n_prompt_tokens")),
        speculates=told.get("speculative") is True,
    )


def judge_by_slots(
    looks: Sequence[SlotsLook],
    suspect: Progress,
    *,
    others: Sequence[Progress],
    all_are_silent: bool,
    still_since: float,
    pace: Pace,
    is_cold: bool,
    now: float,
    gaps: Gaps = NO_GAPS,
) -> Verdict | SlotMoves | None:
    """What a round of looks tells about one suspected request; None: nothing.

    `others` are the other requests in flight, as they are now; `all_are_silent`: for as long as it
    takes to be suspected no request, of those that have ended neither, received data, and no slot
    was seen to move; `still_since`: the first look, of this round or an earlier one, since which
    nothing moved, and nothing was read from disk; `pace`: what was learnt of batches; `is_cold`:
    this launch has computed nothing so far; time in `gaps` is no part of a batch.
    """
    still = _Standstill(all_are_silent, still_since, pace, is_cold)
    return _Round(looks, suspect, others, still, now, gaps).judge()


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
        now: float,
        gaps: Gaps,
    ) -> None:
        self._looks = looks
        self._suspect = suspect
        self._others = others
        self._still = still
        self._still_s = now - still.since - gaps.lost_s(still.since)
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
                f"the server has lost it: at {len(self._looks)} looks at /slots no slot was left "
                "that worked on it"
            )
            return self._verdict(RequestFailReason.REQUEST_LOST, detail, alone=True)
        if not any(map(_moved, self._tracks)):
            return self._judge_standstill()
        if self._is_left_behind():
            detail = "its slot stands still while another slot of the server moves"
            return self._verdict(RequestFailReason.STALL_TIMEOUT, detail, alone=True)
        moved = [track for track in self._tracks if _moved(track) and self._could_be_its(track)]
        return SlotMoves() if len(moved) > len(self._explained) else None

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
        """By what was learnt of earlier ones; None where that tells nothing of the one under way."""
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
        if not any(_moved_always(track) for track in self._tracks):
            return False
        if any(track[0].may_read_unseen for track in self._tracks):
            return False
        its = [track for track in self._tracks if self._may_be_its(track)]
        moved = [track for track in its if _moved(track)]
        return len(moved) < len(its) and len(moved) <= len(self._explained)

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
        # It has told that many; a token may come in two pieces.
        return self._suspect.phase is not _GENERATING or (
            first > 0 and first >= self._suspect.tokens // 2
        )

    def _may_be_its(self, track: tuple[Slot, ...]) -> bool:
        """Likewise, and in the suspect's own phase."""
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
        shown = ", ".join(_shown(slot) for slot in self._looks[-1].slots)
        detail = (
            f"{what}; slots: {shown}; {describe(self._suspect, liveness_at=None, now=self._now)}"
        )
        return Verdict(reason=reason, detail=detail, restart=True, alone=alone)


def moved_between(one: SlotsLook, other: SlotsLook) -> bool:
    """Whether any slot did something between the two looks."""
    if [slot.slot_id for slot in one.slots] != [slot.slot_id for slot in other.slots]:
        return True
    return any(_moved(pair) for pair in zip(one.slots, other.slots, strict=True))


def _moved(track: Sequence[Slot]) -> bool:
    return any(one != other for one, other in pairwise(track))


def _moved_always(track: Sequence[Slot]) -> bool:
    return all(one != other for one, other in pairwise(track))


def _shown(slot: Slot) -> str:
    if not slot.is_processing:
        return f"{slot.slot_id} idle"
    return f"{slot.slot_id} at {slot.prompt_tokens} prompt tokens, {slot.decoded_tokens} generated"


class SlotsWatch:
    """When to look at the slots of one launch, and what was seen: rounds of looks while somebody is
    suspected. Not thread-safe."""

    def __init__(self) -> None:
        # when a look is due; None: while nobody is suspected, or one is under way
        self.deadline: float | None = None
        self.looks: list[SlotsLook] = []  # of the round under way, or of the one that is complete
        self.still_since = 0.0  # the first look since which nothing moved
        # the last look behind which something moved, of any round
        self.moved_at: float | None = None
        self.tells = False  # it answered when it was asked last
        self.is_silent = False  # it did not, nor did it refuse
        self.may_read_unseen = False  # some slot, when it answered last
        self.answers_in_batches = False  # one that stands still was seen to answer
        self.silent_since: float | None = None  # the first of the latest looks without an answer
        self.silent_looks = 0
        self._has_answered = False
        self._asked_at = 0.0
        self._last: SlotsLook | None = None
        self._paused_until = 0.0
        self._active = False

    def suspect(self, now: float) -> None:
        """Somebody is suspected: begin a round, unless one is under way."""
        if not self._active:
            self._active = True
            self.looks = []
            self.deadline = max(now, self._paused_until)

    def rest(self) -> None:
        """Nobody is suspected any more, or what was seen is from before a gap."""
        self.deadline, self._last, self._active = None, None, False
        self.silent_since, self.silent_looks = None, 0
        self.looks = []

    def asked(self, now: float) -> None:
        """The look that was due is under way."""
        self.deadline, self._asked_at = None, now

    def seen(self, look: SlotsLook | SlotsSilence | None, now: float) -> bool:
        """An answer, None where it brings no news; whether the round is complete."""
        self._has_answered = self._has_answered or isinstance(look, SlotsLook)
        if not self._active:
            return False
        self.tells = isinstance(look, SlotsLook)
        self.is_silent = isinstance(look, SlotsSilence)
        if isinstance(look, SlotsSilence) and self._has_answered:
            self._seen_silent(now)
            return False
        if not isinstance(look, SlotsLook):
            self.rest()
            self._paused_until = now + NO_ANSWER_PAUSE_S
            return False
        self.may_read_unseen = any(slot.may_read_unseen for slot in look.slots)
        self.silent_since, self.silent_looks = None, 0
        if self._last is None:
            self.still_since = look.asked_at
        elif moved_between(self._last, look):
            self.still_since, self.moved_at = look.asked_at, self._last.asked_at
        elif any(slot.is_processing for slot in look.slots) and not self.may_read_unseen:
            self.answers_in_batches = True
        self._last = look
        self.looks.append(look)
        if len(self.looks) == LOOKS_COUNT:
            return True
        self.deadline = now + LOOK_INTERVAL_S
        return False

    def _seen_silent(self, now: float) -> None:
        """No answer from a launch that has answered before: it is asked on."""
        if self.silent_since is None:
            self.silent_since = self._asked_at
        self.silent_looks += 1
        self.looks, self._last = [], None
        self.deadline = now + PAUSE_S

    @property
    def complete(self) -> bool:
        """The round is, and nothing was concluded from it yet."""
        return len(self.looks) == LOOKS_COUNT

    def conclude(self, now: float) -> None:
        """The round was judged: another one follows later, if somebody is still suspected."""
        self.looks = []
        self._active = False
        self._paused_until = now + PAUSE_S
