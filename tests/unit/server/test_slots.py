"""What `/slots` says in each build, and what four looks at it tell about a request that brings
nothing new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.gaps import NO_GAPS, Gaps
from llama_worker.request.progress import Batch, Progress
from llama_worker.server.blame import Verdict
from llama_worker.server.messages import (
    HealthLost,
    Launch,
    ProbeOutcome,
    Stalled,
    StandDown,
    Unwatch,
)
from llama_worker.server.pace import PACE_MIN_S, PACE_MULTIPLE, Pace
from llama_worker.server.slot_verdicts import SlotMoves, judge_by_slots
from llama_worker.server.slots import (
    LOOK_INTERVAL_S,
    LOOKS_COUNT,
    PAUSE_S,
    SILENT_S,
    Slot,
    SlotsLook,
    SlotsSilence,
    parse_slots,
)
from llama_worker.types.request import RequestFailReason, RequestPhase
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


@pytest.mark.parametrize(
    ("body", "slots"),
    [
        pytest.param([told()], (GENERATES,), id="b11434"),
        pytest.param(
            [told(next_token={"n_decoded": 3})], (GENERATES,), id="next_token as an object"
        ),
        pytest.param(
            [told(is_processing=None, state=1)], (GENERATES,), id="state for is_processing"
        ),
        pytest.param([NEVER_USED], (Slot(slot_id=0, is_processing=False),), id="never used"),
        pytest.param(
            [told(id=1), told()],
            (GENERATES, replace(GENERATES, slot_id=1)),
            id="in any order: told by id",
        ),
        pytest.param([], None, id="no slot"),
        pytest.param([told(), told()], None, id="the same slot twice"),
        pytest.param([told(next_token=[])], None, id="nothing that could be seen to move"),
        pytest.param([told(next_token=[{"n_decoded": -1}])], None, id="a counter below zero"),
        pytest.param([told(id=True)], None, id="a truth for an id"),
        pytest.param([told(is_processing="yes")], None, id="a text for a truth"),
        pytest.param([told(), 7], None, id="a number for a slot"),
        pytest.param({"error": {"code": 501}}, None, id="an error object"),
    ],
)
def test_answers_of_every_build(body: Any, slots: tuple[Slot, ...] | None) -> None:
    assert parse_slots(body) == slots


def test_a_build_that_does_not_show_how_far_a_prompt_is_read() -> None:
    body = {"id": 0, "is_processing": True, "id_task": 7, "next_token": [{"n_decoded": 0}]}
    (reading,) = parse_slots([body]) or ()
    assert reading.may_read_unseen
    (generating,) = parse_slots([{**body, "next_token": [{"n_decoded": 3}]}]) or ()
    (shown,) = parse_slots([{**body, "n_prompt_tokens_processed": 0}]) or ()
    assert not generating.may_read_unseen
    assert not shown.may_read_unseen


def test_a_draft_model_reads_the_prompt_behind_the_first_token() -> None:
    def parsed(speculative: bool, decoded: int) -> Slot:
        (found,) = (
            parse_slots([told(speculative=speculative, next_token=[{"n_decoded": decoded}])]) or ()
        )
        return found

    assert parsed(True, 1).may_read_unseen
    assert not parsed(True, 2).may_read_unseen
    assert not parsed(False, 1).may_read_unseen


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
    gaps: Gaps = NO_GAPS,
    pace: Pace | None = None,
    is_cold: bool = False,
) -> Any:
    silent = all((other.data_at or 0.0) < 50.0 for other in others)
    times: Any = {"still_since": NOW - still_s, "now": NOW, "gaps": gaps}
    times |= {"pace": pace or Pace(), "is_cold": is_cold}
    return judge_by_slots(seen, suspect, others=others, all_are_silent=silent, **times)


@pytest.mark.parametrize(
    ("tracks", "suspect", "others", "reason", "alone"),
    [
        pytest.param([IDLE], IN_PREFILL, [], LOST, True, id="swallowed before its prefill"),
        pytest.param([IDLE], WRITES, [], LOST, True, id="swallowed while it generated"),
        pytest.param([IDLE, MOVES], IN_PREFILL, [SERVED], LOST, True, id="lost beside a live one"),
        pytest.param(
            [IDLE, MOVES], WAITS, [SERVED], LOST, True, id="queued although a slot is idle"
        ),
        pytest.param([STUCK], WRITES, [], STALL, False, id="livelock in decode"),
        pytest.param(
            [STUCK, STUCK], WAITS, [QUIET], STALL, False, id="livelock, found by one who waits"
        ),
        pytest.param([STUCK, MOVES], WRITES, [SERVED], STALL, True, id="dead beside a live one"),
        pytest.param(
            [STUCK, READS],
            WRITES,
            [QUIET_IN_PREFILL],
            STALL,
            True,
            id="dead beside a silent prefill",
        ),
        pytest.param(
            [stands(decoded=90), decodes(10)],
            TOLD_88,
            [QUIET],
            STALL,
            True,
            id="beside one that said less",
        ),
        pytest.param(
            [IN_A_BATCH, MOVES],
            IN_PREFILL,
            [SERVED],
            STALL,
            True,
            id="a prefill that stands still alone",
        ),
    ],
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


UNSEEN: Track = [replace(slot(prompt=0), shows_reading=False)] * LOOKS_COUNT
DRAFTS: Track = [replace(slot(decoded=1), speculates=True)] * LOOKS_COUNT
REPEATED = replace(REPORTED, repeated_at=(100.5, 101.5, 103.0))


@pytest.mark.parametrize(
    ("tracks", "suspect", "others"),
    [
        pytest.param([UNSEEN, UNSEEN], REPEATED, [], id="its turn comes behind another client"),
        pytest.param([UNSEEN, MOVES], IN_PREFILL, [SERVED], id="it reads beside another"),
        pytest.param([UNSEEN, STUCK], WRITES, [QUIET_IN_PREFILL], id="a batch beside it"),
        pytest.param([DRAFTS], WRITES, [], id="a draft model reads its prompt"),
        pytest.param(
            [DRAFTS, STUCK], WRITES, [QUIET], id="a draft model reads a neighbour's prompt"
        ),
    ],
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


@pytest.mark.parametrize(
    ("tracks", "suspect", "others", "works"),
    [
        pytest.param([MOVES], WRITES, [], True, id="text that is held back"),
        pytest.param(
            [decodes(200), stands(decoded=60)],
            WRITES,
            [QUIET],
            True,
            id="held back, beside a dead one",
        ),
        pytest.param([READS], IN_PREFILL, [], True, id="prefill without reports"),
        pytest.param(
            [READS, IDLE], WAITS, [], True, id="prefill by a build that holds headers back"
        ),
        pytest.param([IDLE, MOVES], WAITS, [QUIET], True, id="the slot that works may be its own"),
        pytest.param([MOVES_AT_LAST], WRITES, [], True, id="a step of six seconds"),
        pytest.param(
            [MOVES], WAITS, [SERVED], False, id="queued behind the only slot, which is served"
        ),
        pytest.param(
            [decodes(1)],
            silent(GENERATING, tokens=99),
            [],
            False,
            id="another's, which has said less",
        ),
        pytest.param([IN_A_BATCH], IN_PREFILL, [], False, id="one long batch"),
        pytest.param(
            [STUCK, stands(prompt=0)],
            WRITES,
            [QUIET_IN_PREFILL],
            False,
            id="a neighbour's long batch",
        ),
        pytest.param([IDLE], WAITS, [], False, id="no headers: tokenizing, or a model on demand"),
        pytest.param(
            [IDLE, MOVES],
            replace(WAITS, has_media=True),
            [SERVED],
            False,
            id="no headers: its video is decoded before it gets a slot",
        ),
        pytest.param([STUCK, MOVES_AT_TIMES], WRITES, [QUIET], False, id="another's slow steps"),
        pytest.param(
            [STUCK],
            silent(GENERATING, last_data_at=100.0),
            [],
            False,
            id="data since the first look",
        ),
        pytest.param(
            [stands(prompt=0), READS],
            IN_PREFILL,
            [SERVED_PROMPT],
            False,
            id="another fills the batches",
        ),
        pytest.param([IDLE, CHANGES_TASKS], IN_PREFILL, [], False, id="one task after the other"),
        pytest.param(
            [IDLE, MOVES], IN_PREFILL, [LATE_NEIGHBOUR], True, id="a neighbour that came in between"
        ),
        pytest.param(
            [STUCK],
            WAITS,
            [replace(SERVED, last_data_at=99.0)],
            False,
            id="a served neighbour's slow step",
        ),
    ],
)
def test_an_honest_server_is_spared_and_what_moves_and_may_be_its_own_is_a_sign_of_work(
    tracks: list[Track], suspect: Progress, others: list[Progress], works: bool
) -> None:
    assert judge(looks(*tracks), suspect, *others) == (SlotMoves() if works else None)


def test_slots_that_are_others_than_before_tell_nothing() -> None:
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
        pace.learn(number, [Batch(-1e5, -1e5 + seconds, tokens, depth)], NO_GAPS)
    return pace


def in_batch(tokens: int, depth: int) -> Track:
    """A slot that reads so many tokens, the last of which lies so deep."""
    return [replace(slot(prompt=depth - tokens), context_tokens=depth)] * LOOKS_COUNT


LIMIT_OF_60_S = PACE_MULTIPLE * 60.0
A_MINUTE = learnt((512, 4096, 60.0))


@pytest.mark.parametrize(
    ("pace", "tracks", "limit_s"),
    [
        pytest.param(A_MINUTE, [in_batch(512, 512)], LIMIT_OF_60_S, id="as many tokens"),
        pytest.param(A_MINUTE, [in_batch(100, 512)], LIMIT_OF_60_S, id="fewer"),
        pytest.param(A_MINUTE, [in_batch(2048, 2048)], 4 * LIMIT_OF_60_S, id="more"),
        pytest.param(A_MINUTE, [in_batch(512, 8192)], 2 * LIMIT_OF_60_S, id="deeper"),
        pytest.param(
            A_MINUTE,
            [in_batch(512, 512), in_batch(512, 1024)],
            2 * LIMIT_OF_60_S,
            id="beside another in the same batch",
        ),
        pytest.param(
            learnt((512, 4096, 1.0)), [in_batch(512, 512)], PACE_MIN_S, id="never before a minimum"
        ),
        pytest.param(
            learnt((512, 512, 60.0), (512, 8192, 70.0)),
            [in_batch(512, 8192)],
            PACE_MULTIPLE * 70.0,
            id="one that was as deep tells more",
        ),
        pytest.param(
            learnt((512, 512, 60.0), (512, 4096, 70.0)),
            [in_batch(512, 8192)],
            2 * PACE_MULTIPLE * 70.0,
            id="one that was nearly as deep tells more",
        ),
        pytest.param(
            learnt((1, 513, 5.0), (512, 512, 60.0)),
            [in_batch(512, 512)],
            LIMIT_OF_60_S,
            id="a small one tells little",
        ),
        pytest.param(
            learnt((512, 512, 60.0), (512, 512, 1.0)),
            [in_batch(512, 512)],
            LIMIT_OF_60_S,
            id="the slowest counts",
        ),
    ],
)
def test_a_prefill_that_stands_still_is_measured_by_what_earlier_prompts_took(
    pace: Pace, tracks: list[Track], limit_s: float
) -> None:
    def found(still_s: float, *, is_cold: bool = False) -> Any:
        return judge(looks(*tracks), REPORTED, still_s=still_s, pace=pace, is_cold=is_cold)

    assert found(limit_s - 0.1) is None
    assert found(limit_s).reason is STALL
    assert found(2 * limit_s - 0.1, is_cold=True) is None
    assert found(2 * limit_s, is_cold=True).reason is STALL


@pytest.mark.parametrize(
    ("suspect", "track"),
    [
        pytest.param(replace(REPORTED, has_media=True), in_batch(512, 512), id="an image in it"),
        pytest.param(REPORTED, IN_A_BATCH, id="a build that does not tell the batch"),
    ],
)
def test_a_batch_of_which_nothing_is_known_may_take_any_time(
    suspect: Progress, track: Track
) -> None:
    assert judge(looks(track), suspect, still_s=1e6, pace=learnt((512, 512, 1.0))) is None


def test_batches_near_a_gap_teach_nothing_and_each_teaches_once() -> None:
    pace, gaps = Pace(), NO_GAPS.with_gap(100.0, 50.0)
    for began_at in (90.0, 100.0, 109.0):  # over it, and reports that had waited for its end
        pace.learn(1, [Batch(began_at, began_at + 0.1, 512, 512)], gaps)
    assert pace.expected_s(512, 512) is None
    for _ in range(100):
        pace.learn(1, [Batch(120.0, 150.0, 512, 512), Batch(150.0, 151.0, 512, 1024)], gaps)
    assert pace.expected_s(512, 512) == 30.0


# ---------------------------------------------------------------- when it is asked

PROFILE = TimeoutProfile.normal()
ANSWER_S = PROFILE.suspect_after_s or 0.0


def watched(slots: SlotsAt, *requests: RequestAt) -> VirtualWatch:
    """A server that computes all the time, and requests that are sent at 0.0."""
    watch = VirtualWatch.ready(PROFILE, evidence=lambda now, fresh: not fresh, slots=slots)
    watch.begin(*requests)
    return watch


def writes_on(now: float) -> tuple[Slot, ...]:
    return (slot(decoded=int(now)),)


def test_one_that_holds_its_text_back_is_looked_at_again_and_again_and_spared() -> None:
    watch = watched(writes_on, lambda now: generating(min(now, 100.0)))
    assert watch.run(1000.0, Stalled) is None
    at_ready, *asked = watch.slots_asked_at
    assert at_ready == 0.0
    assert all(two - one >= LOOK_INTERVAL_S - 1e-6 for one, two in pairwise(asked))
    assert len(asked) <= LOOKS_COUNT * (1000.0 - 100.0) / (
        PAUSE_S + LOOK_INTERVAL_S * (LOOKS_COUNT - 1)
    )


def test_slots_are_asked_once_at_ready_and_while_somebody_is_suspected() -> None:
    watch = watched(writes_on, lambda now: generating(now if now < 100.0 or now > 162.0 else 99.9))
    assert watch.run(1000.0, Stalled) is None
    at_ready, *asked = watch.slots_asked_at
    assert at_ready == 0.0
    assert 99.9 + ANSWER_S <= min(asked) <= max(asked) < 180.0


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
def test_a_livelock_in_prefill_is_told_from_a_long_batch_by_what_was_learnt(
    stuck_at: float,
) -> None:
    def stalled(earlier: list[Batch], reads: bool = False) -> float | None:
        def request(now: float) -> Progress:
            return reads_at(now, began_at=0.0, stuck_at=stuck_at)[0]

        def slots(now: float) -> tuple[Slot, ...]:
            return (reads_at(now, began_at=0.0, stuck_at=stuck_at)[1],)

        watch = VirtualWatch.ready(
            PROFILE, evidence=lambda now, fresh: not fresh, slots=slots, reads=lambda now: reads
        )
        watch.watch._pace.learn(7, earlier, NO_GAPS)
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


def test_the_first_batch_of_a_launch_is_measured_by_first_batches() -> None:
    pace = learnt((512, 512, 1.0))
    assert pace.longest_standstill_s(512, 512, is_cold=True) == 2 * PACE_MIN_S
    pace.learn(100, [Batch(-60.0, 0.0, 7, 7)], NO_GAPS, is_cold=True)
    assert pace.longest_standstill_s(512, 512, is_cold=True) == PACE_MULTIPLE * 60.0
    assert pace.longest_standstill_s(512, 512, is_cold=False) == PACE_MIN_S


def test_a_request_that_ends_before_it_is_asked_teaches() -> None:
    watch = watched(lambda now: (slot(prompt=0),), reads)
    batch = Batch(-3.0, -1.0, 512, 512)
    watch.tell(Unwatch(request_id=1, data_at=0.0, batches=(batch,), completed=True))
    assert watch.watch._pace.expected_s(512, 512) == 2.0


def test_what_was_learnt_outlives_a_launch() -> None:
    watch = watched(
        lambda now: (slot(prompt=0),), lambda now: reads_at(now, began_at=0.0, stuck_at=80.0)[0]
    )
    assert watch.run(100.0, Stalled) is None
    watch.tell(StandDown())
    watch.tell(Launch(epoch=2))
    assert watch.watch._pace.expected_s(512, 512) == 2.0


@pytest.mark.parametrize("has_media", [True, False])
def test_the_image_of_a_request_that_is_gone_may_still_be_encoded(has_media: bool) -> None:
    batches = (Batch(10.0, 11.0, 512, 512),)

    def writes(now: float) -> Progress:
        return replace(generating(min(now, 20.0)), batches=batches)

    def shows(now: float) -> Progress:
        return replace(silent(PREFILL), request_id=2, last_data_at=None, has_media=has_media)

    seen = (slot(decoded=9), replace(in_batch(40, 600)[0], slot_id=1, task=2))
    watch = watched(lambda now: seen, writes, shows)
    assert watch.run(40.0, Stalled) is None
    watch.tell(Unwatch(request_id=2, data_at=None, completed=False))
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
def test_who_waits_behind_another_client_whose_prompt_is_read_unseen_is_spared(
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


def stalled_at(
    slots: SlotsAt,
    request: RequestAt,
    readiness: Callable[[float], ProbeOutcome] = lambda now: ProbeOutcome.READY,
    *,
    build: int | None = 11434,
    until: float = 1000.0,
) -> float | None:
    profile = TimeoutProfile.normal()
    watch = VirtualWatch.ready(
        profile,
        evidence=lambda now, fresh: not fresh,
        slots=slots,
        readiness=readiness,
        build=build,
    )
    watch.begin(request)
    found = watch.run(until, Stalled)
    return None if found is None else found[0]


def test_slots_that_fall_silent_while_the_rest_answers_cost_the_server_after_a_minute() -> None:
    at = stalled_at(falls_silent(180.0, writes_on), writes_until(100.0))
    assert at is not None
    assert SILENT_S <= at - 180.0 <= SILENT_S + 3 * PAUSE_S


@pytest.mark.parametrize("request_at", [writes_until(100.0), reads])
def test_slots_that_answered_at_ready_alone_are_missed(request_at: RequestAt) -> None:
    at = stalled_at(falls_silent(0.1, writes_on), request_at)
    suspected_at = ANSWER_S + (request_at(1000.0).data_at or 0.0)
    assert at is not None
    assert SILENT_S <= at - suspected_at <= SILENT_S + 3 * PAUSE_S


@pytest.mark.parametrize(
    ("slots", "request_at", "readiness", "build"),
    [
        pytest.param(
            lambda now: SlotsSilence(),
            writes_until(100.0),
            ProbeOutcome.READY,
            11434,
            id="always silent",
        ),
        pytest.param(
            falls_silent(180.0, writes_on),
            writes_until(100.0),
            ProbeOutcome.LOADING,
            11434,
            id="no HTTP",
        ),
        pytest.param(
            falls_silent(180.0, lambda now: (slot(prompt=int(now)),)),
            reads,
            ProbeOutcome.READY,
            10019,
            id="a long batch, of a build that answers between batches",
        ),
        pytest.param(
            falls_silent(180.0, lambda now: (slot(prompt=int(now)),)),
            lambda now: replace(reads(now), has_media=True),
            ProbeOutcome.READY,
            11434,
            id="an image is encoded, perhaps",
        ),
        pytest.param(
            lambda now: SlotsSilence() if int(now) // 50 % 2 else writes_on(now),
            writes_until(100.0),
            ProbeOutcome.READY,
            11434,
            id="it answers now and then",
        ),
    ],
)
def test_silent_slots_are_no_news(
    slots: SlotsAt, request_at: RequestAt, readiness: ProbeOutcome, build: int
) -> None:
    answers = lambda now: readiness if now > 180.0 else ProbeOutcome.READY  # noqa: E731
    at = stalled_at(slots, request_at, answers, build=build)
    assert at is None


def test_slots_that_answered_in_a_batch_and_fall_silent_in_a_prefill_are_news() -> None:
    at = stalled_at(falls_silent(180.0, in_a_batch), reads)
    assert at is not None
    assert SILENT_S <= at - 180.0 <= SILENT_S + 3 * PAUSE_S


def writes_beside_a_stranger(now: float) -> tuple[Slot, ...]:
    """Of b9093, between two batches of a prompt that is read beside it."""
    return (slot(decoded=int(now)), replace(slot(prompt=0), slot_id=1, shows_reading=False))


@pytest.mark.parametrize("build", [9093, 10019, None])
def test_a_batch_of_a_request_that_is_gone_or_of_a_stranger_silences_an_old_build(
    build: int | None,
) -> None:
    silent_from = falls_silent(180.0, writes_on)
    assert stalled_at(silent_from, writes_until(100.0), build=build) is None
    beside = falls_silent(180.0, writes_beside_a_stranger)
    assert stalled_at(beside, writes_until(100.0), build=build) is None


@pytest.mark.parametrize("build", [9093, None])
def test_a_slot_that_hides_its_reading_does_not_show_that_batches_are_interrupted(
    build: int | None,
) -> None:
    hides = falls_silent(180.0, lambda now: (replace(slot(prompt=0), shows_reading=False),))
    assert stalled_at(hides, reads, build=build) is None


@pytest.mark.parametrize(
    "world",
    [
        pytest.param({"probes_take_s": lambda now: 3.0 if now > 180.0 else 0.0}, id="all is slow"),
        pytest.param({"reads": lambda now: now > 180.0}, id="its memory comes from disk"),
    ],
)
def test_slots_of_a_server_whose_every_answer_is_slow_are_not_silent(world: dict[str, Any]) -> None:
    busy: dict[str, Any] = {"evidence": lambda now, fresh: not fresh}
    watch = VirtualWatch.ready(PROFILE, slots=falls_silent(180.0, writes_on), **busy, **world)
    watch.begin(writes_until(100.0))
    assert watch.run(1000.0, Stalled) is None


def test_a_build_that_is_not_known_was_seen_to_answer_in_a_batch() -> None:
    in_batches = falls_silent(180.0, lambda now: (slot(prompt=0 if now < 150.0 else 2048),))
    at = stalled_at(in_batches, reads, build=None)
    assert at is not None
    assert SILENT_S <= at - 180.0 <= SILENT_S + 3 * PAUSE_S


def test_a_slot_that_never_goes_on_shows_no_batch() -> None:
    assert stalled_at(falls_silent(180.0, in_a_batch), reads, build=None) is None


def test_a_probe_beside_silent_slots_is_no_health_probe() -> None:
    failing = VirtualWatch.ready(
        replace(PROFILE, health_probe_interval_s=None),
        evidence=lambda now, fresh: not fresh,
        slots=falls_silent(180.0, writes_on),
        readiness=lambda now: ProbeOutcome.READY if now < 150.0 else ProbeOutcome.FAILED,
    )
    failing.begin(writes_until(100.0))
    assert failing.run(1000.0, HealthLost) is None
