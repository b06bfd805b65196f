"""What `/slots` says in each build, and what four looks at it tell about a request that brings nothing new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from llama_worker.messages import BecameReady, Stalled
from llama_worker.profiles import TimeoutProfile
from llama_worker.request.progress import Batch, Progress
from llama_worker.server.gaps import NO_GAPS, Gaps
from llama_worker.server.slots import (
    BATCH_MIN_S,
    BATCH_MULTIPLE,
    LOOK_INTERVAL_S,
    LOOKS_COUNT,
    PAUSE_S,
    Slot,
    SlotMoves,
    SlotsLook,
    SlotsVerdict,
    judge_by_slots,
    parse_slots,
)
from llama_worker.types import RequestFailReason, RequestPhase
from tests.virtual_watch import SlotsAt, VirtualWatch

WAITING, PREFILL, GENERATING = RequestPhase.WAITING, RequestPhase.PREFILL, RequestPhase.GENERATING
STALL, LOST = RequestFailReason.STALL_TIMEOUT, RequestFailReason.REQUEST_LOST

# ---------------------------------------------------------------- what /slots says


def told(**changes: Any) -> dict[str, Any]:
    """A slot that generates, as b11434 tells it."""
    return {
        "id": 0,
        "n_ctx": 4096,
        "speculative": False,
        "is_processing": True,
        "id_task": 7,
        "n_prompt_tokens": 20,
        "n_prompt_tokens_processed": 20,
        "n_prompt_tokens_cache": 0,
        "params": {"n_predict": -1},
        "next_token": [{"has_next_token": True, "has_new_line": False, "n_remain": -1, "n_decoded": 3}],
        **changes,
    }


GENERATES = Slot(slot_id=0, is_processing=True, task=7, prompt_tokens=20, decoded_tokens=3)


@pytest.mark.parametrize(
    ("body", "slots"),
    [
        pytest.param([told()], (GENERATES,), id="b11434"),
        pytest.param([told(next_token={"n_decoded": 3})], (GENERATES,), id="next_token as an object"),
        pytest.param([told(is_processing=None, state=1)], (GENERATES,), id="state for is_processing"),
        pytest.param(
            [{"id": 0, "n_ctx": 512, "speculative": False, "is_processing": False}],
            (Slot(slot_id=0, is_processing=False),),
            id="never used",
        ),
        pytest.param(
            [told(id=1), told(id=0)], (GENERATES, replace(GENERATES, slot_id=1)), id="in any order: told by id"
        ),
        pytest.param([], None, id="no slot"),
        pytest.param([told(), told()], None, id="the same slot twice"),
        pytest.param([told(next_token=[])], None, id="nothing that could be seen to move"),
        pytest.param([told(next_token=[{"n_decoded": -1}])], None, id="a counter below zero"),
        pytest.param([told(id=True)], None, id="an id that is none"),
        pytest.param([told(is_processing="yes")], None, id="a text for a truth"),
        pytest.param([told(), 7], None, id="a number for a slot"),
        pytest.param({"error": {"code": 501}}, None, id="an error object"),
        pytest.param(None, None, id="no JSON"),
        pytest.param("slots", None, id="a text"),
    ],
)
def test_answers_of_every_build(body: Any, slots: tuple[Slot, ...] | None) -> None:
    assert parse_slots(body) == slots


# ---------------------------------------------------------------- what a round tells

NOW = 106.0


def slot(slot_id: int = 0, *, decoded: int = 0, prompt: int = 20, task: int = 1) -> Slot:
    return Slot(slot_id=slot_id, is_processing=True, task=task, prompt_tokens=prompt, decoded_tokens=decoded)


def idle(slot_id: int = 0) -> Slot:
    return Slot(slot_id=slot_id, is_processing=False, task=1)


def looks(*tracks: Sequence[Slot]) -> list[SlotsLook]:
    """Each track is one slot at the looks at 100, 102, 104 and 106 s."""
    return [
        SlotsLook(asked_at=100.0 + LOOK_INTERVAL_S * number, slots=slots)
        for number, slots in enumerate(zip(*tracks, strict=True))
    ]


def still(one: Slot) -> list[Slot]:
    return [one] * LOOKS_COUNT


def generates(slot_id: int, first: int = 50) -> list[Slot]:
    return [slot(slot_id, decoded=first + 9 * n) for n in range(LOOKS_COUNT)]


def reads(slot_id: int) -> list[Slot]:
    return [slot(slot_id, prompt=512 * n) for n in range(LOOKS_COUNT)]


def silent(phase: RequestPhase = GENERATING, **changes: Any) -> Progress:
    """A request that was sent at 0.0 and brought nothing since 40.0."""
    generating = phase is GENERATING
    progress = Progress(
        request_id=1,
        phase=phase,
        dispatched_at=0.0,
        turn_started_at=0.0,
        headers_at=None if phase is WAITING else 1.0,
        first_token_at=30.0 if generating else None,
        last_data_at=40.0 if generating else None,
        tokens=10 if generating else 0,
    )
    return replace(progress, **changes)


def served(data_at: float = 105.9, **changes: Any) -> Progress:
    """A neighbour that gets data."""
    return replace(silent(request_id=2, last_data_at=data_at), **changes)


def judge(
    seen: list[SlotsLook],
    suspect: Progress,
    *others: Progress,
    all_are_silent: bool | None = None,
    still_since: float = 100.0,
    gaps: Gaps = NO_GAPS,
) -> SlotsVerdict | SlotMoves | None:
    if all_are_silent is None:
        all_are_silent = all((other.data_at or 0.0) < 50.0 for other in others)
    return judge_by_slots(
        seen, suspect, others=others, all_are_silent=all_are_silent, still_since=still_since, now=NOW, gaps=gaps
    )


BATCHES_AT = -1e5


def batches(*lengths_s: float | None) -> tuple[Batch, ...]:
    """That began one after the other."""
    found, at = [], BATCHES_AT
    for length_s in lengths_s:
        if length_s is not None:
            found.append(Batch(at, at + length_s))
            at += length_s
    return tuple(found)


@pytest.mark.parametrize(
    ("seen", "suspect", "others", "reason", "alone"),
    [
        pytest.param(looks(still(idle())), silent(PREFILL), (), LOST, True, id="swallowed before its prefill"),
        pytest.param(looks(still(idle())), silent(), (), LOST, True, id="swallowed while it generated"),
        pytest.param(
            looks(still(idle(0)), generates(1)), silent(PREFILL), (served(),), LOST, True, id="lost beside a live one"
        ),
        pytest.param(
            looks(still(idle(0)), generates(1)),
            silent(WAITING),
            (served(),),
            LOST,
            True,
            id="queued although a slot is idle",
        ),
        pytest.param(looks(still(slot(decoded=11))), silent(), (), STALL, False, id="livelock in decode"),
        pytest.param(
            looks(still(slot(decoded=11)), still(slot(1, decoded=4))),
            silent(WAITING),
            (served(40.0),),
            STALL,
            False,
            id="livelock, found by one who waits",
        ),
        pytest.param(
            looks(still(slot(decoded=11)), generates(1)),
            silent(),
            (served(),),
            STALL,
            True,
            id="dead beside a live one",
        ),
        pytest.param(
            looks(still(slot(decoded=11)), reads(1)),
            silent(),
            (served(40.0, phase=PREFILL),),
            STALL,
            True,
            id="dead beside a prefill without data",
        ),
        pytest.param(
            looks(still(slot(decoded=90)), generates(1, first=10)),
            silent(tokens=88),
            (served(40.0),),
            STALL,
            True,
            id="dead beside one that holds its text back and has said less than this one told",
        ),
        pytest.param(
            looks(still(slot(prompt=512)), generates(1)),
            silent(PREFILL),
            (served(),),
            STALL,
            True,
            id="a prefill that stands still beside one that generates",
        ),
    ],
)
def test_a_wedge_is_found_in_one_round(
    seen: list[SlotsLook], suspect: Progress, others: tuple[Progress, ...], reason: RequestFailReason, alone: bool
) -> None:
    found = judge(seen, suspect, *others)
    assert isinstance(found, SlotsVerdict)
    assert (found.verdict.reason, found.alone, found.verdict.restart) == (reason, alone, True)
    assert "request 1 in phase" in found.verdict.detail


@pytest.mark.parametrize(
    ("seen", "suspect", "others"),
    [
        pytest.param(looks(still(slot(prompt=512))), silent(PREFILL), (), id="one long batch"),
        pytest.param(
            looks(still(slot(decoded=11)), still(slot(1, prompt=0))),
            silent(),
            (served(40.0, phase=PREFILL),),
            id="a neighbour's long batch",
        ),
        pytest.param(looks(generates(0)), silent(), (), id="text that is held back"),
        pytest.param(
            looks(generates(0, first=200), still(slot(1, decoded=60))),
            silent(tokens=10),
            (served(40.0),),
            id="text that is held back, beside a dead one",
        ),
        pytest.param(looks(reads(0)), silent(PREFILL), (), id="prefill without reports"),
        pytest.param(looks(still(idle())), silent(WAITING), (), id="no headers: tokenizing, or a model on demand"),
        pytest.param(
            looks(generates(0)), silent(WAITING), (served(),), id="queued behind the only slot, which is served"
        ),
        pytest.param(
            looks(reads(0), still(idle(1))), silent(WAITING), (), id="prefill by a build that holds headers back"
        ),
        pytest.param(
            looks(still(slot(decoded=11)), [slot(1, decoded=4)] * 2 + [slot(1, decoded=5)] * 2),
            silent(),
            (served(40.0),),
            id="slow steps: another slot moves, but not at every interval",
        ),
        pytest.param(looks([*still(slot(decoded=11))[:3], slot(decoded=12)]), silent(), (), id="a step of six seconds"),
        pytest.param(looks(still(slot(decoded=11))), silent(last_data_at=100.0), (), id="data since the first look"),
        pytest.param(
            looks(still(idle(0)), generates(1)),
            silent(WAITING),
            (served(40.0),),
            id="the slot that works may be its own",
        ),
        pytest.param(
            looks(still(slot(prompt=0)), reads(1)),
            silent(PREFILL),
            (served(40.0, phase=PREFILL),),
            id="another prompt fills the batches",
        ),
        pytest.param(
            looks(still(idle(0)), [slot(1, decoded=9, task=n) for n in range(LOOKS_COUNT)]),
            silent(PREFILL),
            (),
            id="one task after the other",
        ),
        pytest.param(
            looks(still(idle(0)), generates(1)),
            silent(PREFILL),
            (served(turn_started_at=103.0),),
            id="a neighbour that came in between explains nothing",
        ),
    ],
)
def test_an_honest_server_is_spared(seen: list[SlotsLook], suspect: Progress, others: tuple[Progress, ...]) -> None:
    assert not isinstance(judge(seen, suspect, *others), SlotsVerdict)


@pytest.mark.parametrize(
    ("seen", "suspect", "others", "moves"),
    [
        pytest.param(looks(generates(0)), silent(), (), True, id="text that is held back"),
        pytest.param(looks(reads(0)), silent(PREFILL), (), True, id="prefill without reports"),
        pytest.param(looks(reads(0), still(idle(1))), silent(WAITING), (), True, id="prefill without headers"),
        pytest.param(looks(generates(0)), silent(WAITING), (served(),), False, id="what moves is another's"),
        pytest.param(looks(still(slot(prompt=512))), silent(PREFILL), (), False, id="one long batch"),
        pytest.param(looks(generates(0, first=1)), silent(tokens=99), (), False, id="another's, which has said less"),
    ],
)
def test_what_moves_and_may_be_its_own_is_a_sign_of_work(
    seen: list[SlotsLook], suspect: Progress, others: tuple[Progress, ...], moves: bool
) -> None:
    assert isinstance(judge(seen, suspect, *others), SlotMoves) is moves


def test_a_prefill_whose_stream_only_repeats_itself_is_in_no_batch() -> None:
    seen = looks(still(slot(prompt=512)))
    assert judge(seen, silent(PREFILL, prompt_progress_at=40.0, repeats=2)) is None
    found = judge(seen, silent(PREFILL, prompt_progress_at=40.0, repeats=3))
    assert isinstance(found, SlotsVerdict)
    assert found.verdict.reason is STALL


def test_a_step_of_six_seconds_of_a_neighbour_that_got_data_lately_is_no_livelock() -> None:
    seen = looks(still(slot(decoded=11)))
    assert judge(seen, silent(WAITING), served(99.0)) is None
    assert judge(seen, silent(WAITING), served(40.0)) is not None


def test_slots_that_are_others_than_before_tell_nothing() -> None:
    seen = looks(still(idle(0)))
    seen[2] = replace(seen[2], slots=(idle(0), idle(1)))
    assert judge(seen, silent(PREFILL)) is None


@pytest.mark.parametrize(
    ("longest_batch_s", "still_s", "given_up"),
    [
        (None, 1e6, False),
        (1.0, BATCH_MIN_S - 0.1, False),
        (1.0, BATCH_MIN_S, True),
        (75.0, BATCH_MULTIPLE * 75.0 - 0.1, False),
        (75.0, BATCH_MULTIPLE * 75.0, True),
    ],
)
def test_a_prefill_that_stands_still_is_measured_by_its_own_batches(
    longest_batch_s: float | None, still_s: float, given_up: bool
) -> None:
    suspect = silent(PREFILL, longest_batches=batches(longest_batch_s), prompt_progress_at=40.0)
    found = judge(looks(still(slot(prompt=512))), suspect, still_since=NOW - still_s)
    assert (found is not None) is given_up


@pytest.mark.parametrize(
    ("lengths_s", "gap", "limit_s"),  # gap: its end, after the start of the longest batch, and its length
    [
        ((2050.0, 50.0), (2050.0, 2000.0), 200.0),
        ((2001.0, 50.0), (2001.0, 2000.0), 200.0),  # what is left of the longest is not the longest
        ((2050.0,), (2050.0, 2000.0), 200.0),
        ((75.0,), (75.0, 10.0), 260.0),
        ((75.0,), (500.0, 10.0), 300.0),
    ],
)
def test_time_that_was_lost_is_no_part_of_a_batch(
    lengths_s: tuple[float, ...], gap: tuple[float, float], limit_s: float
) -> None:
    suspect = silent(PREFILL, longest_batches=batches(*lengths_s), prompt_progress_at=40.0)
    gaps = NO_GAPS.with_gap(BATCHES_AT + gap[0], gap[1])

    def found(still_s: float) -> bool:
        seen = looks(still(slot(prompt=512)))
        return judge(seen, suspect, still_since=NOW - still_s, gaps=gaps) is not None

    assert (found(limit_s - 0.1), found(limit_s)) == (False, True)


def test_batches_are_learnt_from_whoever_holds_a_slot() -> None:
    def found(*tracks: list[Slot]) -> bool:
        reader = silent(PREFILL, request_id=2, longest_batches=batches(1.0))
        return judge(looks(*tracks), silent(PREFILL), reader, still_since=NOW - BATCH_MIN_S) is not None

    assert found(still(slot(prompt=512)))  # the suspect is queued behind one that reported its batches
    assert not found(still(slot(prompt=512)), still(slot(1, prompt=0)))  # the suspect's own first batch, perhaps


# ---------------------------------------------------------------- when it is asked

PROFILE = TimeoutProfile.normal()
ANSWER_S = PROFILE.suspect_after_s or 0.0


def watched(slots: SlotsAt, *requests: Callable[[float], Progress]) -> VirtualWatch:
    """A server that computes all the time, and requests that are sent at 0.0."""
    watch = VirtualWatch(PROFILE, evidence=lambda now, fresh: not fresh, slots=slots, now=-0.1)
    assert watch.run(1.0, BecameReady) is not None
    watch.begin({request(0.0).request_id: request for request in requests})
    return watch


def generating_until(last_at: float, request_id: int = 1) -> Callable[[float], Progress]:
    """A request that gets a token at every instant up to `last_at`."""
    return lambda now: silent(request_id=request_id, headers_at=0.0, first_token_at=0.0, last_data_at=min(now, last_at))


def test_slots_are_never_asked_while_nobody_is_suspected() -> None:
    watch = watched(lambda now: (slot(decoded=9),), generating_until(7200.0), generating_until(7200.0, 2))
    assert watch.run(7200.0, Stalled) is None
    assert watch.slots_asked_at == []


def test_one_that_holds_its_text_back_is_looked_at_again_and_again_and_spared() -> None:
    watch = watched(lambda now: (slot(decoded=int(now)),), generating_until(100.0))
    assert watch.run(1000.0, Stalled) is None
    asked = watch.slots_asked_at
    assert all(two - one >= LOOK_INTERVAL_S - 1e-6 for one, two in pairwise(asked))
    assert len(asked) <= LOOKS_COUNT * (1000.0 - 100.0) / (PAUSE_S + LOOK_INTERVAL_S * (LOOKS_COUNT - 1))


def test_a_suspicion_that_ends_ends_the_looks() -> None:
    def pauses(now: float) -> Progress:
        return silent(headers_at=0.0, first_token_at=0.0, last_data_at=now if now < 100.0 or now > 162.0 else 99.9)

    watch = watched(lambda now: (slot(decoded=int(now)),), pauses)
    assert watch.run(1000.0, Stalled) is None
    assert watch.slots_asked_at
    assert max(watch.slots_asked_at) < 180.0


def test_a_livelock_in_prefill_is_told_from_a_long_batch_by_what_was_reported() -> None:
    def stuck(now: float) -> Progress:
        return silent(PREFILL, headers_at=0.0, prompt_progress_at=min(now // 8 * 8, 80.0), longest_batches=batches(8.0))

    def one_long_batch(now: float) -> Progress:
        return silent(PREFILL, headers_at=0.0, prompt_progress_at=0.0)

    def slots(now: float) -> tuple[Slot, ...]:
        return (slot(prompt=int(min(now // 8, 10))),)

    found = watched(slots, stuck).run(7200.0, Stalled)
    assert found is not None
    assert found[0] <= 80.0 + ANSWER_S + BATCH_MIN_S + 2 * PAUSE_S
    assert watched(lambda now: (slot(prompt=0),), one_long_batch).run(1000.0, Stalled) is None
