"""Parses llama-server's `/slots`, and decides when to ask for it. Sans-IO.

It is asked once at READY, and then only while a request is suspected. Instants (`*_at`, `now`) are
monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from llama_worker.config.validation import as_count

LOOKS_COUNT = 4  # in one round
LOOK_TIMEOUT_S = 2.0  # it answers within 0.21 s, even in the middle of a long batch (b11434)
# Silence counts only after this time, in which a look is kept open: a server that takes a request
# first copies the prompts of all idle slots to its cache, and answers then.
SILENT_S = 60.0
# more often would disturb the server, which restarts its own 1 s waits at every answer
LOOK_INTERVAL_S = 2.0
PAUSE_S = 5.0  # after a round without a verdict
# after `--no-slots` (501), a missing API key (401), an old build, or if it never answered
NO_ANSWER_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One slot at one look. Both counters are of the current task."""

    slot_id: int
    is_processing: bool
    task: int | None = None
    prompt_tokens: int = 0  # of the prompt, processed so far; grows with each finished batch
    decoded_tokens: int = 0  # 0 in prefill
    context_tokens: int | None = field(default=None, compare=False)  # with the batch in progress
    cached_tokens: int = field(default=0, compare=False)  # of the context; were not processed
    # by `prompt_tokens`. b9093 does not, and in prefill shows what the task before has generated
    shows_prompt_progress: bool = field(default=True, compare=False)
    speculates: bool = field(default=False, compare=False)  # a draft model may work for it

    @property
    def may_progress_unseen(self) -> bool:
        """Whether the slot may work while its counters stand still. A draft model reads the whole
        prompt by itself, in one go, after the first token."""
        drafts_first = self.speculates and self.decoded_tokens == 1
        return self.is_processing and (drafts_first or not self.shows_prompt_progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsLook:
    """One answer of `/slots`."""

    asked_at: float  # at most `LOOK_TIMEOUT_S` before the answer: what it shows is not older
    slots: tuple[Slot, ...]  # sorted by id

    @property
    def busy_count(self) -> int:
        """How many slots work."""
        return sum(slot.is_processing for slot in self.slots)


@dataclass(frozen=True, slots=True)
class SlotsTimeout:
    """Neither an answer nor a refusal in time."""


def parse_slots(body: Any) -> tuple[Slot, ...] | None:
    """The slots in an answer's JSON, sorted by id; None if no known build answers like this.

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
        return None  # no movement could be seen
    prompt_tokens = as_count(entry.get("n_prompt_tokens_processed"))
    return Slot(
        slot_id=slot_id,
        is_processing=is_processing,
        task=as_count(entry.get("id_task")),
        prompt_tokens=prompt_tokens or 0,
        shows_prompt_progress=prompt_tokens is not None,
        decoded_tokens=decoded or 0,
        context_tokens=as_count(entry.get("n_prompt_tokens")),
        cached_tokens=as_count(entry.get("n_prompt_tokens_cache")) or 0,
        speculates=entry.get("speculative") is True,
    )


def moved_between(one: SlotsLook, other: SlotsLook) -> bool:
    """Whether any slot changed between the two looks."""
    if [slot.slot_id for slot in one.slots] != [slot.slot_id for slot in other.slots]:
        return True
    return any(moved(pair) for pair in zip(one.slots, other.slots, strict=True))


def _all_generate_beside_idle(one: SlotsLook, other: SlotsLook) -> bool:
    """Whether every slot that works has generated between the two looks, and one was idle: then a
    request that waits was lost, since the server begins on it after the token (b11434)."""
    pairs = list(zip(one.slots, other.slots, strict=False))
    busy = [(a, b) for a, b in pairs if a.is_processing or b.is_processing]
    generated = all(_progressed(a, b) and a.decoded_tokens < b.decoded_tokens for a, b in busy)
    return len(busy) < len(pairs) and generated


def _progressed(one: Slot, other: Slot) -> bool:
    """Whether a slot changed while working on the same task. A wedged one never does: no batch is
    computed for it."""
    both = one.is_processing and other.is_processing
    return both and one.slot_id == other.slot_id and one.task == other.task and one != other


def moved(track: Sequence[Slot]) -> bool:
    """Whether one slot changed between any two successive looks."""
    return any(one != other for one, other in pairwise(track))


def moved_every_time(track: Sequence[Slot]) -> bool:
    """Whether one slot changed between every two successive looks."""
    return all(one != other for one, other in pairwise(track))


class SlotsWatch:
    """Schedules looks at the slots of one launch, in rounds while a request is suspected, and keeps
    what they showed. Not thread-safe."""

    def __init__(self) -> None:
        # when a look is due; None while no request is suspected, or a look is in progress
        self.deadline: float | None = None
        self.looks: list[SlotsLook] = []  # of the current round, complete or not
        self.unchanged_since: float  # the first look since which nothing moved
        # the latest look after which something moved, of any round
        self.moved_at: float | None = None
        # the same, if what moved may hold up a request of which nothing was heard
        self.held_up_at: float | None = None
        self.answered_last_look = False  # `/slots` answered the latest look that was not refused
        self.may_progress_unseen: bool  # true of some slot in the latest answer
        # its build does, or it answered while a slot stood still that progressed later
        self.answers_during_batches = False
        self._last_unchanged: SlotsLook | None = None  # the latest look that showed no change
        self.silent_since: float | None = None  # the first of the latest looks without an answer
        self._has_answered = False
        self._is_looking = False  # a look is in progress
        self._asked_at: float
        self._last_look: SlotsLook | None = None  # of any round
        # since `_last_look`, a look went without an answer, or looking stopped
        self._was_interrupted = True
        # the looks before and after the latest pause or interruption: movement between them counts
        self.around_gap: tuple[SlotsLook, SlotsLook] | None = None
        self._paused_until = 0.0
        self._active = False

    def start_looking(self, now: float) -> None:
        """A request is suspected: begin a round, unless one is in progress."""
        if not self._active:
            self._active = True
            self.deadline = max(now, self._paused_until)

    def stop_looking(self) -> None:
        """Stop looking: no request is suspected any more, or there is no usable answer."""
        self.deadline, self._was_interrupted, self._active = None, True, False
        self.silent_since, self.looks = None, []

    def begin_look(self, now: float) -> float | None:
        """How many seconds to wait for an answer; None: a look is in progress, whose answer serves
        for this one."""
        self.deadline = None
        if self._is_looking:
            return None
        self._is_looking, self._asked_at = True, now
        return LOOK_TIMEOUT_S if self.silent_since is None else SILENT_S

    def record_look(
        self, look: SlotsLook | SlotsTimeout | None, now: float, *, by_shortage: bool = False
    ) -> None:
        """Record the result of a look; None: no usable answer, or, `by_shortage`, not asked."""
        self._is_looking = False
        self._has_answered = self._has_answered or isinstance(look, SlotsLook)
        is_refused = look is None or not self._has_answered
        if is_refused:  # also at READY, outside a round
            self._paused_until = now + (LOOK_INTERVAL_S if by_shortage else NO_ANSWER_PAUSE_S)
        if not self._active:
            return
        if look is not None:  # else it was refused, or could not be asked
            self.answered_last_look = isinstance(look, SlotsLook)
        if is_refused:
            self.stop_looking()
        elif isinstance(look, SlotsLook):
            self._record_answer(look, now)
        else:
            self._record_timeout(now)

    def _record_answer(self, look: SlotsLook, now: float) -> None:
        self.may_progress_unseen = any(slot.may_progress_unseen for slot in look.slots)
        self.silent_since = None
        begins_round = self._was_interrupted or not self.looks
        if begins_round and self._last_look is not None:
            self.around_gap = (self._last_look, look)
        if self._last_look is not None and moved_between(self._last_look, look):
            self.unchanged_since, self.moved_at = look.asked_at, self._last_look.asked_at
            if not _all_generate_beside_idle(self._last_look, look):
                self.held_up_at = self.moved_at
        elif self._was_interrupted:
            self.unchanged_since = look.asked_at
        elif not self.may_progress_unseen:
            self._last_unchanged = look
        # With a draft model a batch may bring no token: a part of the draft is rejected (b11434).
        still = self._last_unchanged.slots if self._last_unchanged is not None else ()
        pairs = zip(still, look.slots, strict=False)
        if any(_progressed(one, other) and not one.speculates for one, other in pairs):
            self.answers_during_batches = True
        self._last_look, self._was_interrupted = look, False
        self.looks.append(look)
        if not self.complete:
            self.deadline = now + LOOK_INTERVAL_S

    def _record_timeout(self, now: float) -> None:
        """No answer from a launch that has answered before: keep asking."""
        if self.silent_since is None:
            self.silent_since = self._asked_at
        self.looks, self._was_interrupted = [], True
        self.deadline = now + PAUSE_S

    @property
    def complete(self) -> bool:
        """Whether the round is complete, and not judged yet."""
        return len(self.looks) == LOOKS_COUNT

    def end_round(self, now: float) -> None:
        """The round was judged: another one follows later if a request is still suspected."""
        self.looks = []
        self._active = False
        self._paused_until = now + PAUSE_S
