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
        for each in server.slots
        if each is not None
        and each.request_id < FOREIGN
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
    busy = [each for each in server.slots if each is not None]
    if all(each.decoded for each in busy):
        case.promised_s = _promise_by_slots(case)
    else:
        # What a stranger's prompt has reported, nobody here has heard.
        done = [
            each.processed // case.build.batch_tokens if each.request_id < FOREIGN else 0
            for each in busy
            if not each.decoded
        ]
        case.promised_s = _promise_in_prefill(case, min(done))
    return True


def livelock(case: Case) -> bool:
    """100 % CPU, HTTP alive, nothing moves."""
    return _freeze(case, spins=True)


def decode_dead(case: Case) -> bool:
    """No CPU, HTTP alive, nothing moves."""
    return _freeze(case, spins=False)


def sidecar(case: Case) -> bool:
    """The same, beside a child that computes for itself."""
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
    others = [each for each in case.server.slots if each is not None]
    step_s = sum(each.reply.step_tokens for each in others) / case.build.decode_tokens_per_s
    calm = all(each.decoded and not each.reply.twist for each in others) and not case.server.queue
    calm = calm and step_s < LOOK_INTERVAL_S  # so that the others move between any two looks
    case.promised_s = _promise_by_slots(case, clear=calm)
    return True


def _repeat(case: Case, exchange: Exchange, data: bytes | None) -> None:
    if exchange.over or case.server.gone:
        return
    if data is None:
        case.server.send_progress(exchange)
    else:
        case.server.send(exchange, data)
    case.later(1.0, partial(_repeat, case, exchange, data))


def frozen_progress(case: Case) -> bool:
    """The same report of progress on every pass of a loop that goes in circles."""
    targets = [each for each in _targets(case, generating=False) if each.wants_progress and each.has_headers]
    if not targets:
        return False
    case.server.freeze(spins=True)
    _repeat(case, targets[0], None)
    case.promised_s = min(_promise_by_slots(case), IDLE_S + LATE_S)
    return True


def empty_frames(case: Case) -> bool:
    """Role chunks, empty deltas or empty objects for ever."""
    targets = _targets(case, generating=True)
    if not targets:
        return False
    case.server.freeze(spins=True)
    _repeat(case, targets[0], case.dice.choice((_ROLE, _EMPTY, _NOTHING)))
    busy = [each for each in case.server.slots if each is not None]
    case.promised_s = _promise_by_slots(case) if all(each.decoded for each in busy) else LAST_RESORT_S + LATE_S
    return True


WEDGES: dict[str, Callable[[Case], bool]] = {
    "livelock": livelock,
    "decode dead, HTTP alive": decode_dead,
    "sidecar's CPU": sidecar,
    "stopped": stopped,
    "dead altogether": dead_altogether,
    "request lost": lost,
    "dead stream": dead_stream,
    "frozen progress": frozen_progress,
    "empty frames": empty_frames,
}
