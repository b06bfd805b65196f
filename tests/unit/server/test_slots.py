"""What `/slots` says in each build, when it is asked, and what its silence tells."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.request.progress import Batch, Progress
from llama_worker.server.messages import HealthLost, ProbeOutcome, Stalled
from llama_worker.server.pace import PACE_MIN_S
from llama_worker.server.slot_verdicts import STEP_MULTIPLE
from llama_worker.server.slots import (
    LOOK_INTERVAL_S,
    LOOKS_COUNT,
    NO_ANSWER_PAUSE_S,
    PAUSE_S,
    SILENT_S,
    Slot,
    SlotsLook,
    SlotsTimeout,
    SlotsWatch,
    parse_slots,
)
from llama_worker.stream.lazy_reading import MAX_HOLD_S
from llama_worker.types.request import RequestFailReason, RequestPhase
from tests.tables import cases
from tests.virtual_watch import RequestAt, SlotsAt, VirtualWatch, generating, silent, slot, unwatch

WAITING, PREFILL, GENERATING = RequestPhase.WAITING, RequestPhase.PREFILL, RequestPhase.GENERATING
STALL = RequestFailReason.STALL_TIMEOUT

# ---------------------------------------------------------------- what /slots says


def told(**changes: Any) -> dict[str, Any]:
    """A slot that generates, as b11434 tells it."""
    shown: dict[str, Any] = {"id": 0, "is_processing": True, "id_task": 7, "n_ctx": 4096}
    shown |= {"n_prompt_tokens": 20, "n_prompt_tokens_processed": 20, "n_prompt_tokens_cache": 0}
    next_token = {"has_next_token": True, "has_new_line": False, "n_remain": -1, "n_decoded": 3}
    return {**shown, "next_token": [next_token], **changes}


GENERATES = Slot(slot_id=0, is_processing=True, task=7, prompt_tokens=20, decoded_tokens=3)
NEVER_USED = {"id": 0, "n_ctx": 512, "speculative": False, "is_processing": False}


@cases(
    "body, slots",
    {
        "b11434": ([told()], (GENERATES,)),
        "next_token as an object": ([told(next_token={"n_decoded": 3})], (GENERATES,)),
        "state for is_processing": ([told(is_processing=None, state=1)], (GENERATES,)),
        "both": ([told(state=0)], (GENERATES,)),
        "neither": ([told(is_processing=None)], None),
        "idle by its state": ([{"id": 0, "state": 0}], (Slot(slot_id=0, is_processing=False),)),
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
        "no list": (7, None),
    },
)
def test_answers_of_every_build(body: Any, slots: tuple[Slot, ...] | None) -> None:
    assert parse_slots(body) == slots


def test_the_context_and_what_of_it_was_cached_are_read() -> None:
    shown = [told(n_prompt_tokens=30, n_prompt_tokens_cache=5), {**NEVER_USED, "id": 1}]
    read = [(slot.context_tokens, slot.cached_tokens) for slot in parse_slots(shown) or ()]
    assert read == [(30, 5), (None, 0)]


def hiding(**shown: Any) -> dict[str, Any]:
    """A slot of a build that does not show how far a prompt is read."""
    return {"id": 0, "is_processing": True, "id_task": 7, **shown}


def decoded(count: int) -> list[dict[str, int]]:
    return [{"n_decoded": count}]


@cases(
    "body, unseen",
    {
        "no token, and no reading shown": (hiding(next_token=decoded(0)), True),
        "tokens, perhaps of the task before": (hiding(next_token=decoded(3)), True),
        "its reading is shown": (hiding(next_token=decoded(0), n_prompt_tokens_processed=0), False),
        "a draft model, one token": (told(speculative=True, next_token=decoded(1)), True),
        "a draft model, two tokens": (told(speculative=True, next_token=decoded(2)), False),
        "idle": (NEVER_USED, False),
        "no draft model, one token": (told(speculative=False, next_token=decoded(1)), False),
    },
)
def test_which_slots_may_progress_unseen(body: Any, unseen: bool) -> None:
    (found,) = parse_slots([body]) or ()
    assert found.may_progress_unseen is unseen


# ---------------------------------------------------------------- what holds up another

FREE, NEXT, LAST = (Slot(slot_id=n, is_processing=False) for n in range(3))
SECOND = replace(slot(decoded=5, task=2), slot_id=1)


@cases(
    "before, after, holds_up",
    {
        "all generate, and one is idle": ((slot(decoded=1), NEXT), (slot(decoded=2), NEXT), False),
        "none is idle": ((slot(decoded=1),), (slot(decoded=2),), True),
        "one stands still": (
            (slot(decoded=1), SECOND, LAST),
            (slot(decoded=2), SECOND, LAST),
            True,
        ),
        "one reads": ((slot(prompt=1), NEXT), (slot(prompt=2), NEXT), True),
        "one begins": ((FREE, NEXT), (slot(decoded=1), NEXT), True),
        "one ends": ((slot(decoded=1), NEXT), (replace(FREE, decoded_tokens=2), NEXT), True),
        "another task": ((slot(decoded=1), NEXT), (slot(decoded=2, task=2), NEXT), True),
        "another server": ((slot(decoded=1),), (slot(decoded=1), NEXT), True),
        "another slot": ((slot(decoded=1), SECOND, LAST), (slot(decoded=2), LAST), True),
    },
)
def test_which_movement_may_hold_up_a_request_that_waits(
    before: tuple[Slot, ...], after: tuple[Slot, ...], holds_up: bool
) -> None:
    watch = SlotsWatch()
    watch.start_looking(100.0)
    for at, slots in ((100.0, before), (102.0, after)):
        watch.begin_look(at)
        watch.record_look(SlotsLook(asked_at=at, slots=slots), at)
    assert (watch.moved_at, watch.held_up_at) == (100.0, 100.0 if holds_up else None)
    assert not watch.answers_during_batches


# ---------------------------------------------------------------- when it is asked

PROFILE = TimeoutProfile.normal()
ANSWER_S = PROFILE.suspect_after_s or 0.0


def computes(now: float, fresh: bool) -> bool:
    return not fresh


def rests(now: float, fresh: bool) -> bool:
    return False


def watched(
    slots: SlotsAt, *requests: RequestAt, profile: TimeoutProfile = PROFILE, **world: Any
) -> VirtualWatch:
    """A server that computes all the time, and requests that are sent at 0.0."""
    watch = VirtualWatch.ready(profile, slots=slots, **{"evidence": computes, **world})
    watch.begin(*requests)
    return watch


def showing(*slots: Slot) -> SlotsAt:
    return lambda now: slots


def decoding(step_s: float = 1.0, began_s: float = 0.0, until: float = math.inf) -> SlotsAt:
    """A token in so many seconds, the first of which began so long before."""
    return lambda now: (slot(decoded=1 + int((min(now, until) + began_s) / step_s)),)


def writes_on(now: float) -> tuple[Slot, ...]:
    return (slot(decoded=int(now)),)


IN_A_BATCH = showing(slot(prompt=0))
IDLE_BESIDE = Slot(slot_id=1, is_processing=False)


def test_server_holding_text_back_is_not_given_up() -> None:
    watch = watched(writes_on, lambda now: generating(min(now, 100.0)))
    assert watch.run(1000.0, Stalled) is None
    at_ready, *asked = watch.slots_asked_at
    assert at_ready == 0.0
    assert all(two - one >= LOOK_INTERVAL_S - 1e-6 for one, two in pairwise(asked))
    assert len(asked) <= LOOKS_COUNT * (1000.0 - 100.0) / (
        PAUSE_S + LOOK_INTERVAL_S * (LOOKS_COUNT - 1)
    )


@pytest.mark.parametrize("missed", [None, SlotsTimeout()])
def test_a_missed_look_undoes_nothing(missed: SlotsTimeout | None) -> None:
    """Not for one that holds its text back beside one that does not."""

    def slots(now: float) -> tuple[Slot, ...] | SlotsTimeout | None:
        seen = slot(decoded=int(now))
        return missed if 700.0 <= now < 703.0 else (seen, replace(seen, slot_id=1, task=2))

    watch = watched(slots, lambda now: generating(min(now, 100.0)), lambda now: generating(now, 2))
    assert watch.run(1000.0, Stalled) is None
    assert any(700.0 <= at < 703.0 for at in watch.slots_asked_at)


def test_slots_are_asked_at_ready_and_under_suspicion() -> None:
    watch = watched(writes_on, lambda now: generating(now if now < 100.0 or now > 162.0 else 99.9))
    assert watch.run(1000.0, Stalled) is None
    at_ready, *asked = watch.slots_asked_at
    assert at_ready == 0.0
    assert 99.9 + ANSWER_S <= min(asked) <= max(asked) < 180.0


def test_without_suspicion_a_stream_is_dead_beside_others() -> None:
    trusting = replace(PROFILE, suspect_after_s=None)
    watch = watched(writes_on, writes_until(20.0), writes_for_ever, profile=trusting)
    found = watch.run(1000.0, Stalled)
    assert found is not None
    at, stalled = found
    assert 500.0 <= at < 510.0
    assert [each.verdict.alone for each in stalled.given_up] == [True]


def test_slots_of_an_idle_server_are_not_asked() -> None:
    watch = watched(writes_on, writes_until(20.0))
    watch.run(100.0, Stalled)
    watch.tell(unwatch(1))
    watch.run(200.0, Stalled)
    assert 80.0 < max(watch.slots_asked_at) <= 100.0


def test_moving_slot_is_seen_before_short_limit() -> None:
    """The old report comes again after each batch of another client's long prompt."""

    def slots(now: float) -> tuple[Slot, ...]:
        return slot(prompt=64 * int(now)), replace(slot(prompt=512), slot_id=1, task=2)

    def waits_half_read(now: float) -> Progress:
        last = now // 2 * 2
        repeated_at = (last - 4.0, last - 2.0, last)
        return silent(PREFILL, prompt_progress_at=0.0, repeated_at=repeated_at)

    fast = TimeoutProfile.fast()
    watch = watched(slots, waits_half_read, profile=fast)
    assert watch.run((fast.silent_work_timeout_s or 0.0) - 1.0, Stalled) is None


@pytest.mark.parametrize(("batch_s", "began_s"), [(1, 0), (20, 9), (24, 15)])
def test_moving_slot_is_seen_before_header_limit(batch_s: int, began_s: int) -> None:
    """Where no work of the processes is seen: those of a GPU. A batch began so long before."""

    def slots(now: float) -> tuple[Slot, ...]:
        return (slot(prompt=512 * int((now + began_s) / batch_s)),)

    assert watched(slots, waits, evidence=rests).run(1000.0, Stalled) is None


def test_move_between_two_rounds_is_its_own() -> None:
    """Beside another client's prompt: one token per batch."""

    def slots(now: float) -> tuple[Slot, ...]:
        batches = int((now - 40.0) // 80.0)
        reads = slot(prompt=512 * (9 + batches), task=2)
        return reads, replace(slot(decoded=10 + batches), slot_id=1)

    watch = watched(slots, lambda now: silent(GENERATING), evidence=rests)
    assert watch.run(1000.0, Stalled) is None


def test_short_tasks_of_others_are_not_its_work() -> None:
    """Each moves from one look to the next, but none lasts for a whole round."""

    def slots(now: float) -> tuple[Slot, ...]:
        return (slot(decoded=1 + int(now) % 5, task=int(now) // 5),)

    watch = watched(slots, writes_until(20.0), evidence=rests)
    assert watch.run(20.0 + (PROFILE.idle_stream_timeout_s or 0.0) + PAUSE_S, Stalled) is not None


@pytest.mark.parametrize("modalities", [None, {"vision": False}, {"vision": True}])
def test_image_of_another_client_is_encoded_to_end(modalities: dict[str, bool] | None) -> None:
    encodes = replace(slot(prompt=10), slot_id=1, task=2, context_tokens=10)
    idle = Slot(slot_id=0, is_processing=False)
    for request_at, own in ((writes_until(20.0), slot(decoded=20)), (waits, idle)):
        watch = watched(showing(own, encodes), request_at, modalities=modalities)
        watch.watch._requests.pace.learn(7, [Batch(0.0, 1.0, 512, 512)])
        assert (watch.run(1000.0, Stalled) is None) is (modalities == {"vision": True})


@pytest.mark.parametrize("answer", [None, SlotsTimeout()])
def test_slots_refused_at_ready_not_asked_for_minute(answer: SlotsTimeout | None) -> None:
    impatient = replace(PROFILE, suspect_after_s=10.0)
    watch = watched(
        lambda now: answer, lambda now: generating(0.0), profile=impatient, evidence=rests
    )
    watch.run(NO_ANSWER_PAUSE_S + 10.0, Stalled)
    at_ready, again_at, *_ = watch.slots_asked_at
    assert again_at - at_ready >= NO_ANSWER_PAUSE_S


def test_look_that_could_not_be_asked_is_repeated() -> None:
    def blind(now: float) -> bool:
        return 0.0 < now < 6.0

    def slots(now: float) -> tuple[Slot, ...] | None:
        return None if blind(now) else (slot(prompt=64 * int(now)),)

    watch = watched(slots, waits, evidence=rests, blind=blind)
    assert watch.run(5.0 * PROFILE.headers_timeout_s, Stalled) is None


def waits(now: float) -> Progress:
    return silent(WAITING)


def has_headers(now: float) -> Progress:
    return silent(PREFILL)


def waits_for_all(now: float) -> Progress:
    return silent(WAITING, in_one_piece=True)


@pytest.mark.parametrize("request_at", [waits_for_all, has_headers])
def test_moving_slot_is_seen_before_silent_work_limit(request_at: RequestAt) -> None:
    impatient = replace(PROFILE, silent_work_timeout_s=60.0)
    watch = watched(lambda now: (slot(prompt=64 * int(now)),), request_at, profile=impatient)
    assert watch.run(1000.0, Stalled) is None


@cases(
    "request_at",
    {
        "it waits behind a stranger": waits,
        "the same, of a build that sends headers at once": has_headers,
        "its reply comes in one piece": waits_for_all,
    },
)
@pytest.mark.parametrize("step_s", [7, 20, 50])
def test_slow_step_that_nobody_hears_of_is_spared(request_at: RequestAt, step_s: int) -> None:
    for began_s in range(0, step_s, 3):
        assert watched(decoding(step_s, began_s), request_at).run(1100.0, Stalled) is None


@pytest.mark.parametrize("step_s", [7, 20, 50])
@pytest.mark.parametrize("is_known", [True, False])
def test_slow_step_of_held_back_text_is_spared(step_s: int, is_known: bool) -> None:
    gap_s = float(step_s) if is_known else None

    def holds_back(now: float) -> Progress:
        return replace(generating(min(now, 100.0)), longest_gap_s=gap_s)

    for began_s in range(0, step_s, 3):
        assert watched(decoding(step_s, began_s), holds_back).run(1100.0, Stalled) is None


@cases(
    "requests_at, within_s",
    {
        "of its own": ((lambda now: silent(GENERATING, last_data_at=0.0),), ANSWER_S),
        "of one that says more than it waits": ((waits, lambda now: generating(0.0, 2)), ANSWER_S),
        "of one that wrote slowly": (
            (lambda now: replace(generating(0.0), longest_gap_s=4.0),),
            ANSWER_S + STEP_MULTIPLE * 4.0,
        ),
        "of one that wrote a single token": (
            (lambda now: replace(generating(0.0), longest_gap_s=None),),
            2 * ANSWER_S,
        ),
        "of one whose text is held back from the first": (
            (lambda now: silent(PREFILL, prompt_progress_at=0.0),),
            2 * ANSWER_S,
        ),
        "of a reply in one piece": ((waits_for_all,), 2 * ANSWER_S),
        "of a stranger": ((waits,), 2 * ANSWER_S),
        "perhaps of a stranger": ((has_headers,), 2 * ANSWER_S),
    },
)
@pytest.mark.parametrize("stuck_at", [0.0, 50.0, 130.0])
def test_a_livelock_is_found_in_a_slot(
    requests_at: tuple[RequestAt, ...], within_s: float, stuck_at: float
) -> None:
    def slots(now: float) -> tuple[Slot, ...]:
        return (slot(decoded=10 + int(min(now, stuck_at))),)

    found = watched(slots, *requests_at).run(1100.0, Stalled)
    assert found is not None
    assert {each.verdict.reason for each in found[1].given_up} == {STALL}
    assert 0 < found[0] - stuck_at <= within_s + 15.0


def test_portions_of_fast_text_prolong_no_round() -> None:
    assert STEP_MULTIPLE * MAX_HOLD_S <= LOOK_INTERVAL_S * (LOOKS_COUNT - 1)


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

        watch = watched(slots, reads=lambda now: reads, modalities={"vision": True})
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


@cases(
    "has_media, ended_in, next_text_at, may_encode",
    {
        "it may have been in progress": (True, PREFILL, math.inf, True),
        "another request has got text since": (True, PREFILL, 41.0, False),
        "it waited for the batch before that text": (True, WAITING, 41.0, True),
        "it was encoded": (True, GENERATING, math.inf, False),
        "there was none": (False, PREFILL, math.inf, False),
        "it is not gone": (True, None, math.inf, True),
    },
)
def test_a_gone_requests_image_may_be_encoded_still(
    has_media: bool, ended_in: RequestPhase | None, next_text_at: float, may_encode: bool
) -> None:
    batches = (Batch(10.0, 11.0, 512, 512),)

    def writes(now: float) -> Progress:
        data_at = next_text_at if now >= next_text_at else min(now, 20.0)
        return replace(generating(data_at), batches=batches)

    def shows(now: float) -> Progress:
        phase = WAITING if ended_in is WAITING else PREFILL
        return replace(silent(phase), request_id=2, last_data_at=None, has_media=has_media)

    half_read = replace(slot(prompt=560), context_tokens=600, slot_id=1, task=2)
    watch = watched(showing(slot(decoded=9), half_read), writes, shows)
    assert watch.run(40.0, Stalled) is None
    if ended_in is not None:
        watch.tell(unwatch(2, is_broken_off=True, has_media=has_media, ended_in=ended_in))
    assert (watch.run(1000.0, Stalled) is None) is may_encode


@cases(
    "beside, changes, is_found",
    {
        "one slot is idle": (IDLE_BESIDE, {}, True),
        "it picks its slot": (IDLE_BESIDE, {"needs_specific_slots": True}, False),
        "no slot is idle": (None, {}, False),
    },
)
@pytest.mark.parametrize("phase", [WAITING, PREFILL])
def test_lost_request_is_found_beside_endless_stranger(
    beside: Slot | None, changes: dict[str, Any], is_found: bool, phase: RequestPhase
) -> None:
    def slots(now: float) -> tuple[Slot, ...]:
        generates = slot(decoded=1 + int(now))
        return (generates,) if beside is None else (generates, beside)

    found = watched(slots, lambda now: silent(phase, **changes)).run(5000.0, Stalled)
    assert (found is not None) is is_found


def writes_for_ever(now: float) -> Progress:
    return generating(now, 2)


def comes_and_goes(now: float) -> Progress:
    """One short request after the other: none is served at every look of a round."""
    began_at = now // 9 * 9
    waits = silent(WAITING, request_id=2, turn_started_at=began_at)
    wrote = replace(generating(began_at + 3.0, 2), turn_started_at=began_at, concluding=True)
    return waits if now - began_at < 3.0 else wrote


@cases(
    "beside, is_busy, last_resort_s, is_found",
    {
        "one is served": (writes_for_ever, lambda now: True, 1200.0, True),
        "others come and go": (comes_and_goes, lambda now: now % 99 < 50, 1200.0, True),
        "a stranger may have its slot": (comes_and_goes, lambda now: True, 1200.0, False),
        "no limit": (writes_for_ever, lambda now: True, None, False),
    },
)
def test_media_that_never_gets_its_slot_is_lost(
    beside: RequestAt, is_busy: Callable[[float], bool], last_resort_s: float | None, is_found: bool
) -> None:
    def slots(now: float) -> tuple[Slot, ...]:
        busy = replace(slot(decoded=1 + int(now)), is_processing=is_busy(now))
        return busy, IDLE_BESIDE

    profile = replace(PROFILE, silent_work_timeout_s=last_resort_s)
    watch = watched(slots, lambda now: silent(WAITING, has_media=True), beside, profile=profile)
    found = watch.run(3000.0, Stalled)
    assert (found is not None) is is_found
    if found is not None:
        at, stalled = found
        (lost,) = stalled.given_up
        assert (lost.request_id, lost.verdict.reason) == (1, RequestFailReason.REQUEST_LOST)
        assert not lost.restarts_server
        assert 1200.0 <= at <= 1200.0 + 60.0


@cases(
    "its_slot",
    {
        "it reads": lambda now: slot(prompt=64 * int(now)),
        "a task of another kind, such as `/infill`, is computed first": lambda now: slot(prompt=0),
        # before b10453
        "the same, and its slot shows the task before": lambda now: slot(decoded=7),
    },
)
@pytest.mark.parametrize("phase", [WAITING, PREFILL])
def test_request_that_may_have_slot_is_spared(
    its_slot: Callable[[float], Slot], phase: RequestPhase
) -> None:
    def slots(now: float) -> tuple[Slot, ...]:
        others = replace(slot(decoded=1 + int(now)), slot_id=1, task=2)
        return its_slot(now), others, Slot(slot_id=2, is_processing=False)

    assert watched(slots, lambda now: silent(phase)).run(5000.0, Stalled) is None


UNSEEN_SLOT = replace(slot(prompt=0), shows_prompt_progress=False)


def cannot_be_asked_once(now: float) -> SlotsTimeout | None:
    return None if 500.0 <= now < 507.0 else SlotsTimeout()


@pytest.mark.parametrize(
    ("slots", "build"),
    [
        (showing(UNSEEN_SLOT, replace(UNSEEN_SLOT, slot_id=1, task=2)), 9093),
        # the count is of the task before
        (showing(replace(UNSEEN_SLOT, decoded_tokens=37)), 9093),
        (lambda now: SlotsTimeout(), 10019),
        (lambda now: SlotsTimeout(), None),
        (lambda now: IN_A_BATCH(now) if now < 0.1 else cannot_be_asked_once(now), 10019),
    ],
)
def test_who_waits_behind_an_unseen_prefill_is_spared(slots: SlotsAt, build: int | None) -> None:
    def waits(now: float) -> Progress:
        last = now // 10 * 10
        repeated_at = (last - 20.0, last - 10.0, last)
        return replace(silent(PREFILL, prompt_progress_at=0.0), repeated_at=repeated_at)

    at = stalled_at(slots, waits, build=build, until=4000.0)
    assert at is not None
    assert at >= (PROFILE.silent_work_timeout_s or 0.0)


@cases(
    "slots, changes, works_until, by",
    {
        "its prompt stands still": (IN_A_BATCH, {}, 30.0, 150.0 + 3 * PAUSE_S),
        "no work was ever seen": (IN_A_BATCH, {}, 0.0, 120.0 + 3 * PAUSE_S),
        "a batch of 100 s after the other": (
            lambda now: (slot(prompt=512 * int(now / 100.0)),),
            {},
            0.0,
            None,
        ),
        "the server works": (IN_A_BATCH, {}, 2000.0, None),
        "an image is encoded, perhaps": (IN_A_BATCH, {"has_media": True}, 30.0, None),
        "a build that hides its reading": (showing(UNSEEN_SLOT), {}, 30.0, None),
        "no /slots": (lambda now: None, {}, 30.0, None),
    },
)
def test_dead_prefill_of_one_piece_reply_is_found(
    slots: SlotsAt, changes: dict[str, Any], works_until: float, by: float | None
) -> None:
    watch = watched(
        slots,
        lambda now: silent(WAITING, in_one_piece=True, **changes),
        evidence=lambda now, fresh: not fresh and now < works_until,
    )
    found = watch.run(1100.0, Stalled)
    assert (found is None) is (by is None)
    if found is not None and by is not None:
        idle_s = PROFILE.idle_stream_timeout_s or 0.0
        assert works_until - PAUSE_S + idle_s <= found[0] <= by


@pytest.mark.parametrize("dead_at", [None, 100.0])
def test_request_waiting_behind_one_piece_reply_has_limits(dead_at: float | None) -> None:
    slots = decoding(until=math.inf if dead_at is None else dead_at)
    requests_at = (waits_for_all, lambda now: replace(waits(now), request_id=2))
    found = watched(slots, *requests_at, evidence=rests).run(1100.0, Stalled)
    assert (found is None) is (dead_at is None)
    if found is not None and dead_at is not None:
        assert found[0] - dead_at <= 2 * ANSWER_S + 15.0


# ---------------------------------------------------------------- when it is silent


def falls_silent(at: float, before: SlotsAt) -> SlotsAt:
    return lambda now: before(now) if now < at else SlotsTimeout()


def writes_until(at: float) -> RequestAt:
    return lambda now: generating(min(now, at))


def reads(now: float) -> Progress:
    return silent(PREFILL, prompt_progress_at=0.0)


def reads_an_image(now: float) -> Progress:
    return replace(reads(now), has_media=True)


def wrote_about_an_image(now: float) -> Progress:
    return replace(WROTE(now), has_media=True)


def now_and_then(now: float) -> tuple[Slot, ...] | SlotsTimeout:
    return SlotsTimeout() if int(now) // 50 % 2 else writes_on(now)


def copies_prompts_to_its_cache(now: float) -> tuple[Slot, ...] | SlotsTimeout:
    """Whenever requests come; it answers after each time."""
    return writes_on(now) if now < 180.0 or now % 20.0 < 1.0 else SlotsTimeout()


def writes_beside_a_stranger(now: float) -> tuple[Slot, ...]:
    """Of b9093, between two batches of a prompt that is read beside it."""
    return (slot(decoded=int(now)), replace(slot(prompt=0), slot_id=1, shows_prompt_progress=False))


def reads_batches(now: float) -> tuple[Slot, ...]:
    return (slot(prompt=0 if now < 150.0 else 2048),)


def replays_a_draft(now: float) -> tuple[Slot, ...]:
    return (replace(slot(decoded=50 if now < 163.0 else 53), speculates=True),)


WROTE = writes_until(100.0)
SILENT_FROM_180 = falls_silent(180.0, writes_on)
SILENT_IN_PREFILL = falls_silent(180.0, lambda now: (slot(prompt=int(now)),))
SILENT_BEHIND_READY = falls_silent(0.1, writes_on)
BESIDE_A_STRANGER = falls_silent(180.0, writes_beside_a_stranger)
HIDES_ITS_READING = falls_silent(180.0, showing(UNSEEN_SLOT))


def stalled_at(
    slots: SlotsAt, request: RequestAt, *, until: float = 1000.0, **world: Any
) -> float | None:
    found = watched(slots, request, **world).run(until, Stalled)
    return None if found is None else found[0]


@cases(
    "slots, request_at, build, since",
    {
        "while it writes": (SILENT_FROM_180, WROTE, 11434, 180.0),
        "while it writes about an image": (SILENT_FROM_180, wrote_about_an_image, 11434, 180.0),
        "answered at READY alone, writing": (SILENT_BEHIND_READY, WROTE, 11434, 100.0 + ANSWER_S),
        "answered at READY alone, reading": (SILENT_BEHIND_READY, reads, 11434, ANSWER_S),
        "had answered in a batch": (falls_silent(180.0, IN_A_BATCH), reads, 11434, 180.0),
        "had answered in batches": (falls_silent(180.0, reads_batches), reads, None, 180.0),
        "beside an image": (SILENT_IN_PREFILL, reads_an_image, 11434, 180.0),
    },
)
def test_slots_that_fall_silent_restart_the_server(
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
        "always silent": (lambda now: SlotsTimeout(), WROTE, {}),
        "no HTTP": (SILENT_FROM_180, WROTE, {"readiness": is_loading}),
        "a long batch, of an old build": (SILENT_IN_PREFILL, reads, {"build": 10019}),
        "an image, of an old build": (SILENT_IN_PREFILL, reads_an_image, {"build": 10019}),
        "it answers now and then": (now_and_then, WROTE, {}),
        "it answers between two prompts": (copies_prompts_to_its_cache, reads, {}),
        "all is slow": (SILENT_FROM_180, WROTE, {"probes_take_s": lambda now: 3.0 * (now > 180.0)}),
        "its memory comes from disk": (SILENT_FROM_180, WROTE, {"reads": lambda now: now > 180.0}),
        "its slot never went on": (falls_silent(180.0, IN_A_BATCH), reads, {"build": None}),
        "a rejected draft": (falls_silent(180.0, replays_a_draft), WROTE, {"build": 9544}),
        "an unseen batch": (SILENT_FROM_180, WROTE, {"build": 10019}),
        "a stranger's batch": (BESIDE_A_STRANGER, WROTE, {"build": 10019}),
        "hidden reading": (HIDES_ITS_READING, reads, {"build": 9093}),
    },
)
def test_slots_of_an_honest_server_may_be_silent(
    slots: SlotsAt, request_at: RequestAt, world: dict[str, Any]
) -> None:
    assert stalled_at(slots, request_at, **world) is None


def test_probe_beside_silent_slots_is_no_health_probe() -> None:
    failing = watched(
        SILENT_FROM_180,
        WROTE,
        profile=replace(PROFILE, health_probe_interval_s=None),
        readiness=lambda now: ProbeOutcome.READY if now < 150.0 else ProbeOutcome.FAILED,
    )
    assert failing.run(1000.0, HealthLost) is None
