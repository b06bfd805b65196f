"""How the generated servers hang: each does it to a case, if there is somebody to hurt at this moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llama_worker.server.slots import BATCH_MIN_S, BATCH_MULTIPLE, LOOK_INTERVAL_S
from tests.adversary.case import FOREIGN, PROFILE, Case
from tests.simulation.server import Exchange

# A look may have begun just before the suspicion; a round of looks may have begun just before what it shows.
LATE_S = 25.0
SUSPECT_S = PROFILE.suspect_after_s or 0.0
IDLE_S = PROFILE.idle_stream_timeout_s or 0.0
LAST_RESORT_S = PROFILE.silent_work_timeout_s or 0.0

_ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null},"finish_reason":null}]}\n\n'
_EMPTY = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":null}]}\n\n'
_NOTHING = b"data: {}\n\n"


def _targets(case: Case, *, generating: bool | None = None) -> list[Exchange]:
    """Our own requests that hold a slot and will go on for a while."""
    server = case.machine.listening()
    if server is None or server.frozen or server.stopped or not server.loaded:
        return []
    return [
        each
        for each in server.busy
        if each.request_id < FOREIGN
        and not each.over
        and not each.dead
        and not each.closed_by_client
        and (generating is None or (each.decoded > 0) is generating)
        and each.decoded < each.reply.answer_tokens
    ]


def _promise_by_slots(case: Case, *, clear: bool = True) -> float:
    """Where what the slots show is `clear`, and stays so: nobody new comes."""
    found = case.build.shows_slots and clear and case.all_have_come
    return (SUSPECT_S if found else LAST_RESORT_S) + LATE_S


def _promise_in_prefill(case: Case, intervals: int) -> float:
    """A livelock while prompts are read is told from a long batch only by batches that were reported before."""
    build = case.build
    learnt = (
        build.shows_slots and build.reports_progress and intervals > 0 and case.all_have_come and not case.was_halted
    )
    batch_s = build.slots * build.batch_tokens / build.prefill_tokens_per_s
    if case.paused_s:  # the simulated server begins the batch anew behind a pause
        batch_s = 2 * batch_s + case.paused_s
    by_batches_s = SUSPECT_S + max(BATCH_MIN_S, BATCH_MULTIPLE * batch_s)
    return (min(by_batches_s, LAST_RESORT_S) if learnt else LAST_RESORT_S) + LATE_S


def _freeze(case: Case, *, spins: bool) -> bool:
    targets = _targets(case)
    if not targets:
        return False
    server = case.server
    server.freeze(spins=spins)
    reading = [each for each in server.busy if not each.decoded]
    if reading:  # what a stranger's prompt has reported, nobody here has heard
        batches = min(each.processed // case.build.batch_tokens * (each.request_id < FOREIGN) for each in reading)
        case.promised_s = _promise_in_prefill(case, batches)
    else:
        case.promised_s = _promise_by_slots(case)
    return True


def sidecar(case: Case) -> bool:
    """No CPU, HTTP alive, nothing moves, beside a child that computes for itself."""
    if not _freeze(case, spins=False):
        return False
    case.server.spare_time(case.server.pid + 1, 95.0)
    return True


def stopped(case: Case) -> bool:
    """SIGSTOP, a debugger: nothing answers."""
    if not _targets(case):
        return False
    case.server.stop_signal()
    case.promised_s = LAST_RESORT_S + LATE_S
    return True


def dead_altogether(case: Case) -> bool:
    """Nothing moves and nothing answers."""
    if not _freeze(case, spins=case.dice.chance(0.5)):
        return False
    case.server.http_dead = True
    case.promised_s = LAST_RESORT_S + LATE_S
    return True


def lost(case: Case) -> bool:
    """The slot is idle, the connection open."""
    targets = _targets(case)
    if not targets or case.build.slots < 2:
        return False
    target = case.dice.choice(targets)
    case.server.release_slot(target)
    target.dead = True
    case.promised_s = _promise_by_slots(case, clear=target.has_headers and len(targets) == 1 and not case.server.queue)
    return True


def dead_stream(case: Case) -> bool:
    """One slot stands still, the others go on."""
    targets = _targets(case, generating=True)
    if not targets:
        return False
    case.dice.choice(targets).dead = True
    others = case.server.busy
    step_s = sum(each.reply.step_tokens for each in others) / case.build.decode_tokens_per_s
    calm = all(each.decoded and not each.reply.twist for each in others) and not case.server.queue
    calm = calm and step_s < LOOK_INTERVAL_S  # so that the others move between any two looks
    case.promised_s = _promise_by_slots(case, clear=calm)
    return True


def _repeat(case: Case, exchange: Exchange, send: Callable[[], object]) -> None:
    if not exchange.over and not case.server.gone:
        send()
        case.later(1.0, partial(_repeat, case, exchange, send))


def frozen_progress(case: Case) -> bool:
    """The same report of progress on every pass of a loop that goes in circles."""
    targets = [each for each in _targets(case, generating=False) if each.wants_progress and each.has_headers]
    if not targets:
        return False
    case.server.freeze(spins=True)
    _repeat(case, targets[0], partial(case.server.send_progress, targets[0]))
    case.promised_s = min(_promise_by_slots(case), IDLE_S + LATE_S)
    return True


def empty_frames(case: Case) -> bool:
    """Role chunks, empty deltas or empty objects for ever."""
    targets = _targets(case, generating=True)
    if not targets:
        return False
    case.server.freeze(spins=True)
    data = case.dice.choice((_ROLE, _EMPTY, _NOTHING))
    _repeat(case, targets[0], partial(case.server.send, targets[0], data))
    generating = all(each.decoded for each in case.server.busy)
    case.promised_s = _promise_by_slots(case) if generating else LAST_RESORT_S + LATE_S
    return True


WEDGES: dict[str, Callable[[Case], bool]] = {
    "livelock": partial(_freeze, spins=True),  # HTTP alive, nothing moves
    "decode dead, HTTP alive": partial(_freeze, spins=False),
    "sidecar's CPU": sidecar,
    "stopped": stopped,
    "dead altogether": dead_altogether,
    "request lost": lost,
    "dead stream": dead_stream,
    "frozen progress": frozen_progress,
    "empty frames": empty_frames,
}
