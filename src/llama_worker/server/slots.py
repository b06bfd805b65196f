"""What llama-server's `/slots` says, and when it is asked. Sans-IO.

It is asked once at READY and then while a request is suspected. Instants (`*_at`, `now`) are
monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from llama_worker.config.validation import as_count

LOOKS_COUNT = 4  # of one round
LOOK_TIMEOUT_S = 2.0  # it answers within 0.21 s, also in the middle of a long batch (b11434)
SILENT_S = 60.0  # so long without an answer, and it is news
SILENT_LOOKS = 3
# more often would disturb the server, which restarts its own 1 s waits at every answer
LOOK_INTERVAL_S = 2.0
PAUSE_S = 5.0  # after a round without a verdict
# after `--no-slots` (501), a key that is missing (401), an old build, or silence
NO_ANSWER_PAUSE_S = 60.0


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
        """Whether it may be at work without its counters moving. A draft model reads the whole
        prompt by itself, in one go, after the first token."""
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


def parse_slots(body: Any) -> tuple[Slot, ...] | None:
    """The slots in an answer's JSON, by id; None where it is not what `/slots` says in any build.

    Builds before 2025 give `state` (0: idle) for `is_processing` and `next_token` as an object; a
    slot that was never used has no counters.
    """
    if not isinstance(body, list) or not body:
        return None
    slots = [_slot(entry) for entry in body]
    known = [slot for slot in slots if slot is not None]
    if len(known) < len(slots) or len({slot.slot_id for slot in known}) < len(known):
        return None
    return tuple(sorted(known, key=lambda slot: slot.slot_id))


def _slot(entry: Any) -> Slot | None:
    if not isinstance(entry, Mapping):
        return None
    slot_id, is_processing = as_count(entry.get("id")), entry.get("is_processing")
    if is_processing is None and as_count(entry.get("state")) is not None:
        is_processing = entry["state"] != 0
    if slot_id is None or not isinstance(is_processing, bool):
        return None
    next_token = entry.get("next_token")
    if isinstance(next_token, list) and len(next_token) == 1:
        next_token = next_token[0]
    counters = next_token if isinstance(next_token, Mapping) else entry
    decoded = as_count(counters.get("n_decoded"))
    if decoded is None and is_processing:
        return None  # nothing could be seen to move
    prompt_tokens = as_count(entry.get("n_prompt_tokens_processed"))
    return Slot(
        slot_id=slot_id,
        is_processing=is_processing,
        task=as_count(entry.get("id_task")),
        prompt_tokens=prompt_tokens or 0,
        shows_reading=prompt_tokens is not None,
        decoded_tokens=decoded or 0,
        context_tokens=as_count(entry.get("n_prompt_tokens")),
        speculates=entry.get("speculative") is True,
    )


def moved_between(one: SlotsLook, other: SlotsLook) -> bool:
    """Whether any slot did something between the two looks."""
    if [slot.slot_id for slot in one.slots] != [slot.slot_id for slot in other.slots]:
        return True
    return any(moved(pair) for pair in zip(one.slots, other.slots, strict=True))


def _went_on(one: Slot, other: Slot) -> bool:
    """Whether a slot did something for a task that it has still. One that is wedged never does: no
    batch is computed for it."""
    both = one.is_processing and other.is_processing
    return both and one.slot_id == other.slot_id and one.task == other.task and one != other


def moved(track: Sequence[Slot]) -> bool:
    """Whether one slot did something between any two successive looks."""
    return any(one != other for one, other in pairwise(track))


def moved_always(track: Sequence[Slot]) -> bool:
    """Whether one slot did something between every two successive looks."""
    return all(one != other for one, other in pairwise(track))


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
        self.answers_in_batches = False  # one that stood still, and then went on
        self._stood_still: SlotsLook | None = None  # in which some slot did, since the one before
        self.silent_since: float | None = None  # the first of the latest looks without an answer
        self.silent_looks = 0
        self._has_answered = False
        self._is_looking = False  # a look is under way
        self._asked_at = 0.0
        self._last: SlotsLook | None = None  # of any round
        # by looks without an answer, since the last one
        self._was_interrupted = True
        # The looks before and behind the latest interruption: what moved between them did move.
        self.apart: tuple[SlotsLook, SlotsLook] | None = None
        self._paused_until = 0.0
        self._active = False

    def start_looking(self, now: float) -> None:
        """Somebody is suspected: begin a round, unless one is under way."""
        if not self._active:
            self._active = True
            self.looks = []
            self.deadline = max(now, self._paused_until)

    def stop_looking(self) -> None:
        """Stop looking: nobody is suspected any more."""
        self.deadline, self._was_interrupted, self._active = None, True, False
        self.silent_since, self.silent_looks = None, 0
        self.looks = []

    def begin_look(self, now: float) -> bool:
        """Whether to look now; False: a look is under way, whose answer does for this one."""
        self.deadline = None
        if self._is_looking:
            return False
        self._is_looking, self._asked_at = True, now
        return True

    def seen(self, look: SlotsLook | SlotsSilence | None, now: float) -> None:
        """An answer, None where it brings no news."""
        self._is_looking = False
        self._has_answered = self._has_answered or isinstance(look, SlotsLook)
        is_refused = look is None or not self._has_answered
        if is_refused:  # at READY, too
            self._paused_until = now + NO_ANSWER_PAUSE_S
        if not self._active:
            return
        self.tells = isinstance(look, SlotsLook)
        self.is_silent = isinstance(look, SlotsSilence)
        if is_refused:
            self.stop_looking()
        elif isinstance(look, SlotsLook):
            self._seen_slots(look, now)
        else:
            self._seen_silent(now)

    def _seen_slots(self, look: SlotsLook, now: float) -> None:
        self.may_read_unseen = any(slot.may_read_unseen for slot in look.slots)
        self.silent_since, self.silent_looks = None, 0
        if self._was_interrupted and self._last is not None:
            self.apart = (self._last, look)
        if self._last is not None and moved_between(self._last, look):
            self.still_since, self.moved_at = look.asked_at, self._last.asked_at
        elif self._was_interrupted:
            self.still_since = look.asked_at
        elif not self.may_read_unseen:
            self._stood_still = look
        still = self._stood_still.slots if self._stood_still is not None else ()
        if any(map(_went_on, still, look.slots)):
            self.answers_in_batches = True
        self._last, self._was_interrupted = look, False
        self.looks.append(look)
        if not self.complete:
            self.deadline = now + LOOK_INTERVAL_S

    def _seen_silent(self, now: float) -> None:
        """No answer from a launch that has answered before: it is asked on."""
        if self.silent_since is None:
            self.silent_since = self._asked_at
        self.silent_looks += 1
        self.looks, self._was_interrupted = [], True
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
