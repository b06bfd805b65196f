"""What four looks at `/slots` tell about a request that brings nothing new."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llama_worker.request.progress import Progress
from llama_worker.server.blame import Verdict
from llama_worker.server.pace import PACE_MIN_S, PACE_MULTIPLE, Pace
from llama_worker.server.slot_verdicts import SlotMoves, SlotsRound
from llama_worker.server.slots import LOOK_INTERVAL_S, LOOKS_COUNT, Slot, SlotsLook
from llama_worker.types.request import RequestFailReason, RequestPhase
from tests.tables import cases
from tests.unit.server.test_pace import learnt
from tests.virtual_watch import silent, slot

WAITING, PREFILL, GENERATING = RequestPhase.WAITING, RequestPhase.PREFILL, RequestPhase.GENERATING
STALL, LOST = RequestFailReason.STALL_TIMEOUT, RequestFailReason.REQUEST_LOST
NOW = 106.0
BATCH_TOKENS = 2048
Track = Sequence[Slot]  # one slot at each look


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
BEGINS_TO_WRITE: Track = [
    *(slot(decoded=32, prompt=512 * n) for n in range(LOOKS_COUNT - 1)),
    slot(decoded=1, prompt=1600),
]
BEGINS_LATE: Track = [*IDLE[:2], *STUCK[:2]]
CHANGES_TASKS: Track = [slot(decoded=9, task=n) for n in range(LOOKS_COUNT)]


def looks(*tracks: Track) -> list[SlotsLook]:
    """At 100, 102, 104 and 106 s."""
    numbered = ([replace(seen, slot_id=n) for seen in track] for n, track in enumerate(tracks))
    rows = enumerate(zip(*numbered, strict=True))
    return [
        SlotsLook(asked_at=100.0 + LOOK_INTERVAL_S * number, slots=slots) for number, slots in rows
    ]


IN_ONE_PIECE = silent(WAITING, in_one_piece=True)
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
    ended_at: float = 0.0,  # the latest data of those that have ended
) -> Any:
    silent = all((other.data_at or 0.0) < 50.0 for other in others)
    times: Any = {"unchanged_since": NOW - still_s, "liveness_at": NOW - 7, "now": NOW}
    times |= {"pace": pace or Pace(), "is_cold": is_cold, "all_are_silent": silent}
    times |= {"all_stood_still": still_s >= 60.0, "batch_tokens": BATCH_TOKENS}
    times |= {"silent_work_timeout_s": 1200.0}
    times |= {"others_data_at": max([ended_at, *(other.data_at or 0.0 for other in others)])}
    times |= {"may_encode": any(each.may_encode for each in (suspect, *others))}
    return SlotsRound(looks=seen, suspect=suspect, others=others, **times).judge()


def wedge(
    tracks: list[Track],
    suspect: Progress,
    *others: Progress,
    reason: RequestFailReason = STALL,
    alone: bool = True,
) -> tuple[Any, ...]:
    return tracks, suspect, others, reason, alone


@cases(
    "tracks, suspect, others, reason, alone",
    {
        "swallowed before its prefill": wedge([IDLE], IN_PREFILL, reason=LOST),
        "swallowed while it generated": wedge([IDLE], WRITES, reason=LOST),
        "lost by a picked slot": wedge(
            [IDLE], replace(REPORTED, needs_specific_slots=True), reason=LOST
        ),
        "lost beside a live one": wedge([IDLE, MOVES], IN_PREFILL, SERVED, reason=LOST),
        "queued although a slot is idle": wedge([IDLE, MOVES], WAITS, SERVED, reason=LOST),
        "no headers for 1200 s": wedge(
            [IDLE], replace(WAITS, turn_started_at=-1095.0), reason=LOST
        ),
        "livelock in decode": wedge([STUCK], WRITES, alone=False),
        "livelock, found by one who waits": wedge([STUCK], WAITS, QUIET, alone=False),
        "dead beside a live one": wedge([STUCK, MOVES], WRITES, SERVED),
        "dead beside a slot that changes tasks": wedge(
            [STUCK, MOVES, CHANGES_TASKS], WRITES, SERVED, replace(QUIET_IN_PREFILL, request_id=3)
        ),
        "dead beside a silent prefill": wedge([STUCK, READS], WRITES, QUIET_IN_PREFILL),
        "beside who said less": wedge([stands(decoded=90), decodes(10)], TOLD_88, QUIET),
        "a lone prefill stands still": wedge([IN_A_BATCH, MOVES], REPORTED, SERVED),
        "the same, unreported": wedge([IN_A_BATCH, MOVES, IDLE], IN_PREFILL, SERVED),
        "its slot never has a turn": wedge([stands(prompt=0), MOVES, IDLE], WAITS, SERVED),
        "a reply in one piece, dead while it is written": wedge(
            [STUCK, MOVES, IDLE], IN_ONE_PIECE, SERVED
        ),
        "the same, while its prompt is read": wedge(
            [IN_A_BATCH, MOVES, IDLE], IN_ONE_PIECE, SERVED
        ),
    },
)
def test_a_wedge_is_found_in_one_round(
    tracks: list[Track],
    suspect: Progress,
    others: Sequence[Progress],
    reason: RequestFailReason,
    alone: bool,
) -> None:
    found = judge(looks(*tracks), suspect, *others)
    assert isinstance(found, Verdict)
    assert (found.reason, found.alone) == (reason, alone)
    may_queue = reason is LOST and suspect.phase is WAITING
    assert found.counts_against_server is not may_queue
    assert "request 1 in phase" in found.detail
    assert "last sign of work 7.0 s ago" in found.detail


BESIDE_SHORT_ONES = [CHANGES_TASKS, [*IDLE[:2], *MOVES[:2]]]


@cases(
    "stuck, suspect, ended_at, reason",
    {
        "a dead slot": (STUCK, WRITES, 102.1, STALL),
        "the same, and what ended may have been computed before": (STUCK, WRITES, 102.0, None),
        "a dead slot in prefill": (IN_A_BATCH, REPORTED, 105.0, None),
        "no slot": (IDLE, WRITES, 102.0, LOST),
        "no slot, lost in prefill": (IDLE, REPORTED, 102.0, LOST),
        "it may never have had a slot": (IDLE, IN_PREFILL, 102.0, None),
        "its slot ended just now": ([*STUCK[:3], IDLE[3]], WRITES, 102.0, None),
        "its slot ended before": ([*STUCK[:2], *IDLE[2:]], WRITES, 102.0, LOST),
    },
)
def test_short_requests_hide_no_wedge(
    stuck: Track, suspect: Progress, ended_at: float, reason: RequestFailReason | None
) -> None:
    found = judge(looks(stuck, *BESIDE_SHORT_ONES), suspect, ended_at=ended_at)
    assert (found.reason if isinstance(found, Verdict) else None) is reason


def test_another_clients_kind_of_task_holds_up_what_others_got_before() -> None:
    assert not isinstance(judge(looks(STUCK, MOVES_AT_TIMES), WRITES, ended_at=105.0), Verdict)
    assert not isinstance(judge(looks(STUCK, MOVES), WRITES, ended_at=99.0), Verdict)


def test_a_slot_that_became_idle_reads_no_prompt() -> None:
    ended: Track = [*MOVES[:3], IDLE[3]]
    image = replace(SERVED, request_id=3, has_media=True)
    found = judge(looks(STUCK, MOVES, ended), WRITES, SERVED, image)
    assert isinstance(found, Verdict)


UNSEEN: Track = [replace(slot(prompt=0), shows_prompt_progress=False)] * LOOKS_COUNT
DRAFTS: Track = [replace(slot(decoded=1), speculates=True)] * LOOKS_COUNT
REPEATED = replace(REPORTED, repeated_at=(100.5, 101.5, 103.0))


@cases(
    "tracks, suspect, others",
    {
        "its turn comes behind another client": ([UNSEEN, UNSEEN], REPEATED, []),
        "it reads beside another": ([UNSEEN, MOVES], REPORTED, [SERVED]),
        "a batch beside it": ([UNSEEN, STUCK], WRITES, [QUIET_IN_PREFILL]),
        "a draft model reads its prompt": ([DRAFTS], WRITES, []),
        "a draft model reads a neighbour's prompt": ([DRAFTS, STUCK], WRITES, [QUIET]),
    },
)
def test_slot_with_possible_unseen_progress_not_given_up(
    tracks: list[Track], suspect: Progress, others: list[Progress]
) -> None:
    assert judge(looks(*tracks), suspect, *others, still_s=500.0) is None
    seen = [
        [replace(each, shows_prompt_progress=True, speculates=False) for each in track]
        for track in tracks
    ]
    if STUCK not in tracks:
        assert isinstance(judge(looks(*seen), suspect, *others, still_s=500.0), Verdict)


SERVED_PROMPT = replace(SERVED, phase=PREFILL, first_token_at=None)
LATE_NEIGHBOUR = replace(SERVED, turn_started_at=103.0)
LATE_HEADERS = replace(SERVED, headers_at=103.0)


def spared(
    tracks: list[Track], suspect: Progress, *others: Progress, works: bool = False
) -> tuple[Any, ...]:
    return tracks, suspect, others, works


@cases(
    "tracks, suspect, others, works",
    {
        "text that is held back": spared([MOVES], WRITES, works=True),
        "held back, beside a dead one": spared(
            [decodes(200), stands(decoded=60)], WRITES, QUIET, works=True
        ),
        "held back, beside one that has said less": spared(
            [decodes(90), decodes(10)], TOLD_88, SERVED, works=True
        ),
        "it waits while a neighbour's sounds are encoded": spared(
            [STUCK, READS], WRITES, replace(QUIET_IN_PREFILL, has_media=True), works=True
        ),
        "prefill without reports": spared([READS], IN_PREFILL, works=True),
        "prefill by a build that holds headers back": spared([READS, IDLE], WAITS, works=True),
        "the slot that works may be its own": spared([IDLE, MOVES], WAITS, QUIET, works=True),
        "a step of six seconds": spared([MOVES_AT_LAST], WRITES, works=True),
        "queued behind the only slot, which is served": spared([MOVES], WAITS, SERVED),
        "another's, which has said less": spared([decodes(1)], silent(GENERATING, tokens=99)),
        "one long batch": spared([IN_A_BATCH], IN_PREFILL),
        "a stranger's slow step": spared([STUCK], WAITS),
        "the same, beside a neighbour's": spared([STUCK, STUCK], WAITS, QUIET),
        "a neighbour's long batch": spared([STUCK, stands(prompt=0)], WRITES, QUIET_IN_PREFILL),
        "no headers: tokenizing, or a model on demand": spared([IDLE], WAITS),
        "no headers: its video is decoded": spared(
            [IDLE, MOVES], replace(WAITS, has_media=True), SERVED
        ),
        "no headers: it waits for a slot of its own": spared(
            [IDLE, MOVES], replace(WAITS, needs_specific_slots=True), SERVED
        ),
        "headers at once, of an old build, and no slot": spared(
            [IDLE, MOVES], replace(IN_PREFILL, needs_specific_slots=True), SERVED
        ),
        "another's slow steps": spared([STUCK, MOVES_AT_TIMES], WRITES, QUIET),
        "data since the first look": spared([STUCK], silent(GENERATING, last_data_at=100.0)),
        "another fills batches": spared([stands(prompt=0), READS], IN_PREFILL, SERVED_PROMPT),
        "its own count is of the task before": spared(
            [[replace(each, decoded_tokens=32) for each in READS], MOVES, stands(prompt=4658)],
            IN_PREFILL,
            SERVED,
            works=True,
        ),
        "no headers, and a prompt of another is read": spared(
            [stands(prompt=0), READS, MOVES], WAITS, SERVED, replace(SERVED_PROMPT, request_id=3)
        ),
        "queued, and the slot is a stranger's": spared([stands(prompt=0), MOVES], WAITS, SERVED),
        "the same on a build that sends headers at once": spared(
            [stands(prompt=0), MOVES], IN_PREFILL, SERVED
        ),
        "no headers, and its image is encoded": spared(
            [stands(prompt=0), MOVES, IDLE], replace(WAITS, has_media=True), SERVED
        ),
        "no headers, and it waits for a slot of its own": spared(
            [stands(prompt=0), MOVES, IDLE], replace(WAITS, needs_specific_slots=True), SERVED
        ),
        "queued, and the slot is another's who waits": spared(
            [stands(prompt=0), MOVES, IDLE], WAITS, SERVED, replace(WAITS, request_id=3)
        ),
        "queued, and two slots are strangers'": spared(
            [stands(prompt=0), MOVES, STUCK, IDLE], WAITS, SERVED
        ),
        "a slot that writes is not its own": spared([STUCK, MOVES], WAITS, SERVED),
        "the same, although one is idle": spared([STUCK, MOVES, IDLE], WAITS, SERVED),
        "a reply in one piece is written": spared(
            [decodes(7), MOVES, IDLE], IN_ONE_PIECE, SERVED, works=True
        ),
        "the same, and is queued": spared([STUCK, MOVES], IN_ONE_PIECE, SERVED),
        "the same, and the slot is another's, whose stream is silent": spared(
            [STUCK, MOVES, IDLE], IN_ONE_PIECE, SERVED, replace(QUIET, request_id=3)
        ),
        "the same, beside another's": spared(
            [STUCK, MOVES, IDLE], IN_ONE_PIECE, SERVED, replace(IN_ONE_PIECE, request_id=3)
        ),
        "the same, beside a stranger's": spared([STUCK, MOVES, STUCK, IDLE], IN_ONE_PIECE, SERVED),
        "the same, behind another's prompt, on an old build": spared(
            [stands(decoded=57), BEGINS_TO_WRITE, IDLE], IN_ONE_PIECE, SERVED
        ),
        "the same, and its token took six seconds": spared(
            [MOVES_AT_LAST, MOVES, IDLE], IN_ONE_PIECE, SERVED, works=True
        ),
        "another client's task, which no batch has room beside": spared(
            [MOVES, IN_A_BATCH], IN_PREFILL, works=True
        ),
        "queued behind one that waits for another's slot": spared(
            [IDLE, MOVES], WAITS, SERVED, replace(WAITS, request_id=3, needs_specific_slots=True)
        ),
        "its slot is given to it behind a long batch": spared(
            [IDLE, IN_A_BATCH], WAITS, replace(SERVED_PROMPT, last_data_at=NOW + 0.1)
        ),
        "headers since the first look": spared([IDLE], replace(IN_PREFILL, headers_at=103.0)),
        "each slot was in use at some look": spared(
            [BEGINS_LATE, MOVES], IN_PREFILL, SERVED, replace(SERVED, request_id=3)
        ),
        "two that write, one of them slowly": spared(
            [STUCK, STUCK], WRITES, replace(QUIET, longest_gap_s=4.0)
        ),
        "a stranger that writes beside it": spared(
            [STUCK, STUCK], WRITES, replace(WAITS, request_id=2, longest_gap_s=0.5)
        ),
        "a task that began in between": spared([IDLE, BEGINS_LATE], IN_PREFILL),
        "a neighbour's, and short tasks": spared([MOVES, CHANGES_TASKS], IN_PREFILL, SERVED),
        "one task after the other": spared([IDLE, CHANGES_TASKS], IN_PREFILL),
        "a neighbour that came in between": spared(
            [IDLE, MOVES], IN_PREFILL, LATE_NEIGHBOUR, works=True
        ),
        "a neighbour that got its slot in between": spared(
            [IDLE, MOVES], IN_PREFILL, LATE_HEADERS, works=True
        ),
        "a neighbour's slow step": spared([STUCK], WAITS, replace(SERVED, last_data_at=99.0)),
    },
)
def test_a_working_server_is_not_given_up(
    tracks: list[Track], suspect: Progress, others: Sequence[Progress], works: bool
) -> None:
    assert judge(looks(*tracks), suspect, *others) == (SlotMoves() if works else None)


def test_looks_with_different_slots_give_no_verdict() -> None:
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


def in_batch(tokens: int, depth: int, cached: int = 0) -> Track:
    """A slot that reads so many tokens, the last of which lies so deep."""
    reads = replace(slot(prompt=depth - tokens - cached), cached_tokens=cached)
    return [replace(reads, context_tokens=depth)] * LOOKS_COUNT


LIMIT_OF_60_S = PACE_MULTIPLE * 60.0
A_MINUTE = [(512, 4096, 60.0)]
SLOW_AND_SMALL = [(1, 513, 5.0), (512, 512, 60.0)]
SLOW_AND_FAST = [(512, 512, 60.0), (512, 512, 1.0)]
AS_DEEP = [(512, 3000, 60.0), (512, 8192, 70.0)]
NEARLY_AS_DEEP = [(512, 512, 60.0), (512, 4096, 70.0)]


@cases(
    "earlier, batches, limit_s",
    {
        "as many tokens": (A_MINUTE, [(512, 512)], LIMIT_OF_60_S),
        "fewer": (A_MINUTE, [(100, 512)], LIMIT_OF_60_S),
        "more": (A_MINUTE, [(2048, 2048)], 4 * LIMIT_OF_60_S),
        "deeper": (A_MINUTE, [(512, 8192)], 2 * LIMIT_OF_60_S),
        "beside another in it": (A_MINUTE, [(512, 512), (512, 1024)], 2 * LIMIT_OF_60_S),
        "as many as fit": (A_MINUTE, [(1536, 2048), (1536, 2048)], 4 * LIMIT_OF_60_S),
        # it had no turn yet, and shows the conversation that it had before
        "beside one that waits": (A_MINUTE, [(512, 512), (30_000, 30_000)], LIMIT_OF_60_S),
        "behind a prompt in the cache": (A_MINUTE, [(512, 8192, 7680)], 2 * LIMIT_OF_60_S),
        "never before a minimum": ([(512, 4096, 1.0)], [(512, 512)], PACE_MIN_S),
        "one that was as deep tells more": (AS_DEEP, [(512, 8192)], PACE_MULTIPLE * 70.0),
        "one nearly as deep tells more": (NEARLY_AS_DEEP, [(512, 8192)], 2 * PACE_MULTIPLE * 70.0),
        "a small one tells little": (SLOW_AND_SMALL, [(512, 512)], LIMIT_OF_60_S),
        "the slowest counts": (SLOW_AND_FAST, [(512, 512)], LIMIT_OF_60_S),
    },
)
def test_a_prefill_is_judged_by_earlier_ones(
    earlier: list[tuple[int, int, float]], batches: list[tuple[int, ...]], limit_s: float
) -> None:
    seen, pace = looks(*(in_batch(*batch) for batch in batches)), learnt(*earlier)

    def found(still_s: float, *, is_cold: bool = False) -> Any:
        return judge(seen, REPORTED, still_s=still_s, pace=pace, is_cold=is_cold)

    assert found(limit_s - 0.1) is None
    assert found(limit_s).reason is STALL
    assert found(2 * limit_s - 0.1, is_cold=True) is None
    assert found(2 * limit_s, is_cold=True).reason is STALL


def test_an_image_that_was_read_hides_no_standstill() -> None:
    writes, seen = replace(QUIET, has_media=True), looks(in_batch(512, 512), STUCK)
    found = judge(seen, REPORTED, writes, still_s=1e6, pace=learnt((512, 512, 1.0)))
    assert isinstance(found, Verdict)
    assert found.reason is STALL


@cases(
    "suspect, track",
    {
        "an image in it": (replace(REPORTED, has_media=True), in_batch(512, 512)),
        "a build that does not tell the batch": (REPORTED, IN_A_BATCH),
    },
)
def test_an_unknown_batch_has_no_limit(suspect: Progress, track: Track) -> None:
    assert judge(looks(track), suspect, still_s=1e6, pace=learnt((512, 512, 1.0))) is None
