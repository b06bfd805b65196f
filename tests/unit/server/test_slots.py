"""What `/slots` says in each build, and what four looks at it tell about a request that brings
nothing new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.request.progress import Batch, Progress
from llama_worker.server.blame import Verdict
from llama_worker.server.messages import (
    HealthLost,
    ProbeOutcome,
    Stalled,
    Unwatch,
)
from llama_worker.server.pace import PACE_MIN_S, PACE_MULTIPLE, Pace
from llama_worker.server.slot_verdicts import SlotMoves, SlotsRound
from llama_worker.server.slots import (
    LOOK_INTERVAL_S,
    LOOKS_COUNT,
    NO_ANSWER_PAUSE_S,
    PAUSE_S,
    SILENT_S,
    Slot,
    SlotsLook,
    SlotsSilence,
    parse_slots,
)
from llama_worker.types.request import RequestFailReason, RequestPhase
from tests.tables import cases
from tests.virtual_watch import RequestAt, SlotsAt, VirtualWatch, generating

WAITING, PREFILL, GENERATING = RequestPhase.WAITING, RequestPhase.PREFILL, RequestPhase.GENERATING
STALL, LOST = RequestFailReason.STALL_TIMEOUT, RequestFailReason.REQUEST_LOST

# ---------------------------------------------------------------- what /slots says


def told(**changes: Any) -> dict[str, Any]:
    """A slot that generates, as b11434 tells it."""
    tokens = {
        "n_ctx": 4096,
        "n_prompt_tokens": 20,
        "n_prompt_tokens_processed": 20,
        "n_prompt_tokens_cache": 0,
    }
    next_token = {"has_next_token": True, "has_new_line": False, "n_remain": -1, "n_decoded": 3}
    return {
        "id": 0,
        "is_processing": True,
        "id_task": 7,
        **tokens,
        "next_token": [next_token],
        **changes,
    }


GENERATES = Slot(slot_id=0, is_processing=True, task=7, prompt_tokens=20, decoded_tokens=3)
NEVER_USED = {"id": 0, "n_ctx": 512, "speculative": False, "is_processing": False}


@cases(
    "body, slots",
    {
        "b11434": ([told()], (GENERATES,)),
        "next_token as an object": ([told(next_token={"n_decoded": 3})], (GENERATES,)),
        "state for is_processing": ([told(is_processing=None, state=1)], (GENERATES,)),
        "never used": ([NEVER_USED], (Slot(slot_id=0, is_processing=False),)),
        "in any order: by id": ([told(id=1), told()], (GENERATES, replace(GENERATES, slot_id=1))),
        "no slot": ([], None),
        "the same slot twice": ([told(), told()], None),
        "nothing that could be seen to move": ([told(next_token=[])], None),
        "a counter below zero": ([told(next_token=[{"n_decoded": -1}])], None),
        "a truth for an id": ([told(id=True)], None),
        "a text for a truth": ([told(is_processing="yes")], None),
        "a number for a slot": ([told(), 7], None),
        "an error object": ({"error": {"code": 501}}, None),
    },
)
def test_answers_of_every_build(body: Any, slots: tuple[Slot, ...] | None) -> None:
    assert parse_slots(body) == slots


def hiding(**shown: Any) -> dict[str, Any]:
    """A slot of a build that does not show how far a prompt is read."""
    return {"id": 0, "is_processing": True, "id_task": 7, **shown}


def decoded(count: int) -> list[dict[str, int]]:
    return [{"n_decoded": count}]


@cases(
    "body, unseen",
    {
        "no token, and no reading shown": (hiding(next_token=decoded(0)), True),
        "tokens": (hiding(next_token=decoded(3)), False),
        "its reading is shown": (hiding(next_token=decoded(0), n_prompt_tokens_processed=0), False),
        "a draft model, one token": (told(speculative=True, next_token=decoded(1)), True),
        "a draft model, two tokens": (told(speculative=True, next_token=decoded(2)), False),
        "no draft model, one token": (told(speculative=False, next_token=decoded(1)), False),
    },
)
def test_a_slot_may_read_unseen(body: Any, unseen: bool) -> None:
    (found,) = parse_slots([body]) or ()
    assert found.may_read_unseen is unseen


# ---------------------------------------------------------------- what a round tells

NOW = 106.0
Track = Sequence[Slot]  # one slot at each look


def slot(*, decoded: int = 0, prompt: int = 20, task: int = 1) -> Slot:
    return Slot(
        slot_id=0, is_processing=True, task=task, prompt_tokens=prompt, decoded_tokens=decoded
    )


def stands(**counters: int) -> Track:
    return [slot(**counters)] * LOOKS_COUNT


def decodes(first: int) -> Track:
    return [slot(decoded=first + 9 * n) for n in range(LOOKS_COUNT)]


IDLE: Track = [Slot(slot_id=0, is_processing=False, task=1)] * LOOKS_COUNT
STUCK = stands(decoded=11)
IN_A_BATCH = stands(prompt=512)
MOVES = decodes(50)
READS: Track = [slot(prompt=512 * n) for n in range(LOOKS_COUNT)]
MOVES_AT_TIMES: Track = [slot(decoded=4)] * 2 + [slot(decoded=5)] * 2
MOVES_AT_LAST: Track = [*STUCK[:3], slot(decoded=12)]
CHANGES_TASKS: Track = [slot(decoded=9, task=n) for n in range(LOOKS_COUNT)]


def looks(*tracks: Track) -> list[SlotsLook]:
    """At 100, 102, 104 and 106 s."""
    numbered = ([replace(seen, slot_id=n) for seen in track] for n, track in enumerate(tracks))
    rows = enumerate(zip(*numbered, strict=True))
    return [
        SlotsLook(asked_at=100.0 + LOOK_INTERVAL_S * number, slots=slots) for number, slots in rows
    ]


def silent(phase: RequestPhase, **changes: Any) -> Progress:
    """A request that was sent at 0.0 and brought nothing since 40.0."""
    progress = Progress(request_id=1, phase=phase, dispatched_at=0.0, turn_started_at=0.0)
    if phase is not WAITING:
        progress = replace(progress, headers_at=1.0)
    if phase is GENERATING:
        progress = replace(progress, first_token_at=30.0, last_data_at=40.0, tokens=10)
    return replace(progress, **changes)


WAITS, IN_PREFILL, WRITES = silent(WAITING), silent(PREFILL), silent(GENERATING)
REPORTED = silent(PREFILL, prompt_progress_at=40.0)
TOLD_88 = silent(GENERATING, tokens=88)
SERVED = silent(GENERATING, request_id=2, last_data_at=105.9)  # neighbours
QUIET = silent(GENERATING, request_id=2)
QUIET_IN_PREFILL = replace(QUIET, phase=PREFILL)


def judge(
    seen: list[SlotsLook],
    suspect: Progress,
    *others: Progress,
    still_s: float = NOW - 100.0,
    pace: Pace | None = None,
    is_cold: bool = False,
) -> Any:
    silent = all((other.data_at or 0.0) < 50.0 for other in others)
    times: Any = {"still_since": NOW - still_s, "liveness_at": NOW - 7, "now": NOW}
    times |= {"pace": pace or Pace(), "is_cold": is_cold, "all_are_silent": silent}
    return SlotsRound(looks=seen, suspect=suspect, others=others, **times).judge()


@cases(
    "tracks, suspect, others, reason, alone",
    {
        "swallowed before its prefill": ([IDLE], IN_PREFILL, [], LOST, True),
        "swallowed while it generated": ([IDLE], WRITES, [], LOST, True),
        "lost by a picked slot": ([IDLE], replace(REPORTED, picks_slots=True), [], LOST, True),
        "lost beside a live one": ([IDLE, MOVES], IN_PREFILL, [SERVED], LOST, True),
        "queued although a slot is idle": ([IDLE, MOVES], WAITS, [SERVED], LOST, True),
        "livelock in decode": ([STUCK], WRITES, [], STALL, False),
        "livelock, found by one who waits": ([STUCK, STUCK], WAITS, [QUIET], STALL, False),
        "dead beside a live one": ([STUCK, MOVES], WRITES, [SERVED], STALL, True),
        "dead beside a silent prefill": ([STUCK, READS], WRITES, [QUIET_IN_PREFILL], STALL, True),
        "beside who said less": ([stands(decoded=90), decodes(10)], TOLD_88, [QUIET], STALL, True),
        "a lone prefill stands still": ([IN_A_BATCH, MOVES], IN_PREFILL, [SERVED], STALL, True),
    },
)
def test_a_wedge_is_found_in_one_round(
    tracks: list[Track],
    suspect: Progress,
    others: list[Progress],
    reason: RequestFailReason,
    alone: bool,
) -> None:
    found = judge(looks(*tracks), suspect, *others)
    assert isinstance(found, Verdict)
    assert (found.reason, found.alone, found.accuses) == (reason, alone, True)
    assert "request 1 in phase" in found.detail
    assert "last sign of work 7.0 s ago" in found.detail


UNSEEN: Track = [replace(slot(prompt=0), shows_reading=False)] * LOOKS_COUNT
DRAFTS: Track = [replace(slot(decoded=1), speculates=True)] * LOOKS_COUNT
REPEATED = replace(REPORTED, repeated_at=(100.5, 101.5, 103.0))


@cases(
    "tracks, suspect, others",
    {
        "its turn comes behind another client": ([UNSEEN, UNSEEN], REPEATED, []),
        "it reads beside another": ([UNSEEN, MOVES], IN_PREFILL, [SERVED]),
        "a batch beside it": ([UNSEEN, STUCK], WRITES, [QUIET_IN_PREFILL]),
        "a draft model reads its prompt": ([DRAFTS], WRITES, []),
        "a draft model reads a neighbour's prompt": ([DRAFTS, STUCK], WRITES, [QUIET]),
    },
)
def test_who_may_read_unseen_is_not_given_up(
    tracks: list[Track], suspect: Progress, others: list[Progress]
) -> None:
    assert judge(looks(*tracks), suspect, *others, still_s=500.0) is None
    seen = [
        [replace(each, shows_reading=True, speculates=False) for each in track] for track in tracks
    ]
    if STUCK not in tracks:
        assert isinstance(judge(looks(*seen), suspect, *others, still_s=500.0), Verdict)


SERVED_PROMPT = replace(SERVED, phase=PREFILL)
LATE_NEIGHBOUR = replace(SERVED, turn_started_at=103.0)


@cases(
    "tracks, suspect, others, works",
    {
        "text that is held back": ([MOVES], WRITES, [], True),
        "held back, beside a dead one": ([decodes(200), stands(decoded=60)], WRITES, [QUIET], True),
        "prefill without reports": ([READS], IN_PREFILL, [], True),
        "prefill by a build that holds headers back": ([READS, IDLE], WAITS, [], True),
        "the slot that works may be its own": ([IDLE, MOVES], WAITS, [QUIET], True),
        "a step of six seconds": ([MOVES_AT_LAST], WRITES, [], True),
        "queued behind the only slot, which is served": ([MOVES], WAITS, [SERVED], False),
        "another's, which has said less": ([decodes(1)], silent(GENERATING, tokens=99), [], False),
        "one long batch": ([IN_A_BATCH], IN_PREFILL, [], False),
        "a neighbour's long batch": ([STUCK, stands(prompt=0)], WRITES, [QUIET_IN_PREFILL], False),
        "no headers: tokenizing, or a model on demand": ([IDLE], WAITS, [], False),
        "no headers: its video is decoded": (
            [IDLE, MOVES],
            replace(WAITS, has_media=True),
            [SERVED],
            False,
        ),
        "no headers: it waits for a slot of its own": (
            [IDLE, MOVES],
            replace(WAITS, picks_slots=True),
            [SERVED],
            False,
        ),
        "headers at once, of an old build, and no slot": (
            [IDLE, MOVES],
            replace(IN_PREFILL, picks_slots=True),
            [SERVED],
            False,
        ),
        "another's slow steps": ([STUCK, MOVES_AT_TIMES], WRITES, [QUIET], False),
        "data since the first look": ([STUCK], silent(GENERATING, last_data_at=100.0), [], False),
        "another fills batches": ([stands(prompt=0), READS], IN_PREFILL, [SERVED_PROMPT], False),
        "one task after the other": ([IDLE, CHANGES_TASKS], IN_PREFILL, [], False),
        "a neighbour that came in between": ([IDLE, MOVES], IN_PREFILL, [LATE_NEIGHBOUR], True),
        "a neighbour's slow step": ([STUCK], WAITS, [replace(SERVED, last_data_at=99.0)], False),
    },
)
def test_an_honest_server_is_spared(
    tracks: list[Track], suspect: Progress, others: list[Progress], works: bool
) -> None:
    assert judge(looks(*tracks), suspect, *others) == (SlotMoves() if works else None)


def test_other_slots_than_before_tell_nothing() -> None:
    seen = looks(IDLE)
    seen[2] = looks(IDLE, IDLE)[2]
    assert judge(seen, IN_PREFILL) is None


def test_a_prefill_without_reports_may_stand_still() -> None:
    assert judge(looks(IN_A_BATCH), REPORTED, still_s=1e6) is None
    for repeated_at in ((), (100.5, 101.5), (99.0, 101.5, 103.0)):  # the last: behind a batch
        suspect = replace(REPORTED, repeated_at=repeated_at)
        assert judge(looks(IN_A_BATCH), suspect, still_s=6.0) is None
    found = judge(looks(IN_A_BATCH), replace(REPORTED, repeated_at=(100.5, 101.5, 103.0)))
    assert isinstance(found, Verdict)
    assert found.reason is STALL


def learnt(*batches: tuple[int, int, float]) -> Pace:
    """Of prompts that were read long ago: tokens, depth and seconds of each batch."""
    pace = Pace()
    for number, (tokens, depth, seconds) in enumerate(batches):
        pace.learn(number, [Batch(-1e5, -1e5 + seconds, tokens, depth)])
    return pace


def in_batch(tokens: int, depth: int) -> Track:
    """A slot that reads so many tokens, the last of which lies so deep."""
    return [replace(slot(prompt=depth - tokens), context_tokens=depth)] * LOOKS_COUNT


LIMIT_OF_60_S = PACE_MULTIPLE * 60.0
A_MINUTE = [(512, 4096, 60.0)]
SLOW_AND_SMALL = [(1, 513, 5.0), (512, 512, 60.0)]
SLOW_AND_FAST = [(512, 512, 60.0), (512, 512, 1.0)]
AS_DEEP, NEARLY_AS_DEEP = ([(512, 512, 60.0), (512, depth, 70.0)] for depth in (8192, 4096))


@cases(
    "earlier, batches, limit_s",
    {
        "as many tokens": (A_MINUTE, [(512, 512)], LIMIT_OF_60_S),
        "fewer": (A_MINUTE, [(100, 512)], LIMIT_OF_60_S),
        "more": (A_MINUTE, [(2048, 2048)], 4 * LIMIT_OF_60_S),
        "deeper": (A_MINUTE, [(512, 8192)], 2 * LIMIT_OF_60_S),
        "beside another in it": (A_MINUTE, [(512, 512), (512, 1024)], 2 * LIMIT_OF_60_S),
        "never before a minimum": ([(512, 4096, 1.0)], [(512, 512)], PACE_MIN_S),
        "one that was as deep tells more": (AS_DEEP, [(512, 8192)], PACE_MULTIPLE * 70.0),
        "one nearly as deep tells more": (NEARLY_AS_DEEP, [(512, 8192)], 2 * PACE_MULTIPLE * 70.0),
        "a small one tells little": (SLOW_AND_SMALL, [(512, 512)], LIMIT_OF_60_S),
        "the slowest counts": (SLOW_AND_FAST, [(512, 512)], LIMIT_OF_60_S),
    },
)
def test_a_prefill_is_measured_by_earlier_ones(
    earlier: list[tuple[int, int, float]], batches: list[tuple[int, int]], limit_s: float
) -> None:
    seen, pace = looks(*(in_batch(*batch) for batch in batches)), learnt(*earlier)

    def found(still_s: float, *, is_cold: bool = False) -> Any:
        return judge(seen, REPORTED, still_s=still_s, pace=pace, is_cold=is_cold)

    assert found(limit_s - 0.1) is None
    assert found(limit_s).reason is STALL
    assert found(2 * limit_s - 0.1, is_cold=True) is None
    assert found(2 * limit_s, is_cold=True).reason is STALL


@cases(
    "suspect, track",
    {
        "an image in it": (replace(REPORTED, has_media=True), in_batch(512, 512)),
        "a build that does not tell the batch": (REPORTED, IN_A_BATCH),
    },
)
def test_an_unknown_batch_may_take_any_time(suspect: Progress, track: Track) -> None:
    assert judge(looks(track), suspect, still_s=1e6, pace=learnt((512, 512, 1.0))) is None


def test_a_batch_teaches_once_and_never_where_its_report_came_with_another() -> None:
    pace = Pace()
    pace.learn(1, [Batch(100.0, 100.0, 512, 512), Batch(100.0, 100.0, 512, 1024)])
    assert pace.expected_s(512, 512) is None
    for _ in range(100):
        pace.learn(1, [Batch(120.0, 150.0, 512, 512), Batch(150.0, 151.0, 512, 1024)])
    assert pace.expected_s(512, 512) == 30.0


# ---------------------------------------------------------------- when it is asked

PROFILE = TimeoutProfile.normal()
ANSWER_S = PROFILE.suspect_after_s or 0.0


def watched(slots: SlotsAt, *requests: RequestAt, **world: Any) -> VirtualWatch:
    """A server that computes all the time, and requests that are sent at 0.0."""
    watch = VirtualWatch.ready(PROFILE, evidence=lambda now, fresh: not fresh, slots=slots, **world)
    watch.begin(*requests)
    return watch


def writes_on(now: float) -> tuple[Slot, ...]:
    return (slot(decoded=int(now)),)


def test_one_that_holds_its_text_back_is_spared() -> None:
    watch = watched(writes_on, lambda now: generating(min(now, 100.0)))
    assert watch.run(1000.0, Stalled) is None
    at_ready, *asked = watch.slots_asked_at
    assert at_ready == 0.0
    assert all(two - one >= LOOK_INTERVAL_S - 1e-6 for one, two in pairwise(asked))
    assert len(asked) <= LOOKS_COUNT * (1000.0 - 100.0) / (
        PAUSE_S + LOOK_INTERVAL_S * (LOOKS_COUNT - 1)
    )


def test_slots_are_asked_at_ready_and_under_suspicion() -> None:
    watch = watched(writes_on, lambda now: generating(now if now < 100.0 or now > 162.0 else 99.9))
    assert watch.run(1000.0, Stalled) is None
    at_ready, *asked = watch.slots_asked_at
    assert at_ready == 0.0
    assert 99.9 + ANSWER_S <= min(asked) <= max(asked) < 180.0


@pytest.mark.parametrize("answer", [None, SlotsSilence()])
def test_who_refuses_at_ready_is_left_alone_for_a_minute(answer: SlotsSilence | None) -> None:
    impatient = replace(PROFILE, suspect_after_s=10.0)
    watch = VirtualWatch.ready(impatient, slots=lambda now: answer)
    watch.begin(lambda now: generating(0.0))
    watch.run(NO_ANSWER_PAUSE_S + 10.0, Stalled)
    at_ready, again_at, *_ = watch.slots_asked_at
    assert again_at - at_ready >= NO_ANSWER_PAUSE_S


def reads_at(now: float, *, began_at: float, stuck_at: float) -> tuple[Progress, Slot]:
    """A request and its slot: batches of 2 s and 512 tokens, every 8 s, until one is stuck."""
    done = max(0, int((min(now, stuck_at) - began_at) // 8))
    batches = tuple(
        Batch(began_at + 8 * n + 6, began_at + 8 * n + 8, 512, 512 * n + 512) for n in range(done)
    )
    progress = silent(
        PREFILL,
        turn_started_at=began_at,
        prompt_progress_at=began_at + 8 * done,
        batches=batches[-3:],
    )
    return progress, replace(slot(prompt=512 * done), context_tokens=512 * done + 512)


@pytest.mark.parametrize("stuck_at", [0.0, 80.0])
def test_a_livelock_in_prefill_outlasts_earlier_batches(stuck_at: float) -> None:
    def stalled(earlier: list[Batch], reads: bool = False) -> float | None:
        def request(now: float) -> Progress:
            return reads_at(now, began_at=0.0, stuck_at=stuck_at)[0]

        def slots(now: float) -> tuple[Slot, ...]:
            return (reads_at(now, began_at=0.0, stuck_at=stuck_at)[1],)

        watch = watched(slots, reads=lambda now: reads)
        watch.watch._requests.pace.learn(7, earlier)
        watch.begin(request)
        found = watch.run(1100.0, Stalled)
        return None if found is None else found[0]

    at = stalled([Batch(-20.0, -12.0, 512, 512)])
    assert at is not None
    cold = 2.0 if stuck_at == 0.0 else 1.0
    assert 0 <= at - stuck_at - ANSWER_S - cold * PACE_MIN_S <= 3 * PAUSE_S
    assert stalled([Batch(-20.0, -12.0, 512, 512)], reads=True) is None
    if stuck_at == 0.0:
        assert stalled([]) is None


def test_first_batches_are_measured_by_first_batches() -> None:
    pace = learnt((512, 512, 1.0))
    assert pace.longest_standstill_s(512, 512, is_cold=True) == 2 * PACE_MIN_S
    pace.learn(100, [Batch(-60.0, 0.0, 7, 7)], is_cold=True)
    assert pace.longest_standstill_s(512, 512, is_cold=True) == PACE_MULTIPLE * 60.0
    assert pace.longest_standstill_s(512, 512, is_cold=False) == PACE_MIN_S


def test_a_request_that_ends_before_it_is_asked_teaches() -> None:
    watch = watched(lambda now: (slot(prompt=0),), reads)
    batch = Batch(-3.0, -1.0, 512, 512)
    watch.tell(Unwatch(request_id=1, data_at=0.0, batches=(batch,), completed=True))
    assert watch.watch._requests.pace.expected_s(512, 512) == 2.0


@pytest.mark.parametrize("has_media", [True, False])
def test_a_gone_requests_image_may_be_encoded_still(has_media: bool) -> None:
    batches = (Batch(10.0, 11.0, 512, 512),)

    def writes(now: float) -> Progress:
        return replace(generating(min(now, 20.0)), batches=batches)

    def shows(now: float) -> Progress:
        return replace(silent(PREFILL), request_id=2, last_data_at=None, has_media=has_media)

    seen = (slot(decoded=9), replace(in_batch(40, 600)[0], slot_id=1, task=2))
    watch = watched(lambda now: seen, writes, shows)
    assert watch.run(40.0, Stalled) is None
    gone = Unwatch(request_id=2, data_at=None, completed=False, is_broken_off=True)
    watch.tell(structs.replace(gone, has_media=has_media, ended_in=PREFILL))
    assert (watch.run(1000.0, Stalled) is None) is has_media


UNSEEN_SLOT = replace(slot(prompt=0), shows_reading=False)


@pytest.mark.parametrize(
    ("slots", "build"),
    [
        ((UNSEEN_SLOT, replace(UNSEEN_SLOT, slot_id=1, task=2)), 9093),
        (SlotsSilence(), 10019),
        (SlotsSilence(), None),
    ],
)
def test_who_waits_behind_an_unseen_prefill_is_spared(
    slots: tuple[Slot, ...] | SlotsSilence, build: int | None
) -> None:
    def waits(now: float) -> Progress:
        last = now // 10 * 10
        repeated_at = (last - 20.0, last - 10.0, last)
        return replace(silent(PREFILL, prompt_progress_at=0.0), repeated_at=repeated_at)

    at = stalled_at(lambda now: slots, waits, build=build, until=4000.0)
    assert at is not None
    assert at >= (PROFILE.silent_work_timeout_s or 0.0)


# ---------------------------------------------------------------- when it is silent


def falls_silent(at: float, before: Callable[[float], tuple[Slot, ...]]) -> SlotsAt:
    return lambda now: before(now) if now < at else SlotsSilence()


def in_a_batch(now: float) -> tuple[Slot, ...]:
    return (slot(prompt=0),)


def writes_until(at: float) -> RequestAt:
    return lambda now: generating(min(now, at))


def reads(now: float) -> Progress:
    return silent(PREFILL, prompt_progress_at=0.0)


def reads_an_image(now: float) -> Progress:
    return replace(reads(now), has_media=True)


def now_and_then(now: float) -> tuple[Slot, ...] | SlotsSilence:
    return SlotsSilence() if int(now) // 50 % 2 else writes_on(now)


def writes_beside_a_stranger(now: float) -> tuple[Slot, ...]:
    """Of b9093, between two batches of a prompt that is read beside it."""
    return (slot(decoded=int(now)), replace(slot(prompt=0), slot_id=1, shows_reading=False))


def hides_its_reading(now: float) -> tuple[Slot, ...]:
    return (replace(slot(prompt=0), shows_reading=False),)


def reads_batches(now: float) -> tuple[Slot, ...]:
    return (slot(prompt=0 if now < 150.0 else 2048),)


WROTE = writes_until(100.0)
SILENT_FROM_180 = falls_silent(180.0, writes_on)
SILENT_IN_PREFILL = falls_silent(180.0, lambda now: (slot(prompt=int(now)),))
SILENT_BEHIND_READY = falls_silent(0.1, writes_on)
BESIDE_A_STRANGER = falls_silent(180.0, writes_beside_a_stranger)
HIDES_ITS_READING = falls_silent(180.0, hides_its_reading)


def stalled_at(
    slots: SlotsAt, request: RequestAt, *, until: float = 1000.0, **world: Any
) -> float | None:
    found = watched(slots, request, **world).run(until, Stalled)
    return None if found is None else found[0]


@cases(
    "slots, request_at, build, since",
    {
        "while it writes": (SILENT_FROM_180, WROTE, 11434, 180.0),
        "answered at READY alone, writing": (SILENT_BEHIND_READY, WROTE, 11434, 100.0 + ANSWER_S),
        "answered at READY alone, reading": (SILENT_BEHIND_READY, reads, 11434, ANSWER_S),
        "had answered in a batch": (falls_silent(180.0, in_a_batch), reads, 11434, 180.0),
        "had answered in batches": (falls_silent(180.0, reads_batches), reads, None, 180.0),
    },
)
def test_slots_that_fall_silent_cost_the_server(
    slots: SlotsAt, request_at: RequestAt, build: int | None, since: float
) -> None:
    at = stalled_at(slots, request_at, build=build)
    assert at is not None
    assert SILENT_S <= at - since <= SILENT_S + 3 * PAUSE_S


def is_loading(now: float) -> ProbeOutcome:
    return ProbeOutcome.LOADING if now > 180.0 else ProbeOutcome.READY


@cases(
    "slots, request_at, world",
    {
        "always silent": (lambda now: SlotsSilence(), WROTE, {}),
        "no HTTP": (SILENT_FROM_180, WROTE, {"readiness": is_loading}),
        "a long batch, of an old build": (SILENT_IN_PREFILL, reads, {"build": 10019}),
        "an image, perhaps": (SILENT_IN_PREFILL, reads_an_image, {}),
        "it answers now and then": (now_and_then, WROTE, {}),
        "all is slow": (SILENT_FROM_180, WROTE, {"probes_take_s": lambda now: 3.0 * (now > 180.0)}),
        "its memory comes from disk": (SILENT_FROM_180, WROTE, {"reads": lambda now: now > 180.0}),
        "its slot never went on": (falls_silent(180.0, in_a_batch), reads, {"build": None}),
        **{
            f"{name}, b{build}": (slots, request_at, {"build": build})
            for name, slots, request_at, builds in (
                ("an unseen batch", SILENT_FROM_180, WROTE, (9093, 10019, None)),
                ("a stranger's batch", BESIDE_A_STRANGER, WROTE, (9093, 10019, None)),
                ("hidden reading", HIDES_ITS_READING, reads, (9093, None)),
            )
            for build in builds
        },
    },
)
def test_slots_of_an_honest_server_may_be_silent(
    slots: SlotsAt, request_at: RequestAt, world: dict[str, Any]
) -> None:
    assert stalled_at(slots, request_at, **world) is None


def test_a_probe_beside_silent_slots_is_no_health_probe() -> None:
    failing = VirtualWatch.ready(
        replace(PROFILE, health_probe_interval_s=None),
        evidence=lambda now, fresh: not fresh,
        slots=SILENT_FROM_180,
        readiness=lambda now: ProbeOutcome.READY if now < 150.0 else ProbeOutcome.FAILED,
    )
    failing.begin(WROTE)
    assert failing.run(1000.0, HealthLost) is None
