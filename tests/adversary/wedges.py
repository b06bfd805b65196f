"""How the generated servers hang: each does it to a case, and to those that it can hurt at this
moment."""

from collections.abc import Callable
from functools import partial

from tests.adversary.case import PROFILE, SLACK_S, Case
from tests.simulation.server import Exchange, LlamaServer
from tests.simulation.strangers import FOREIGN

SUSPECT_S = PROFILE.suspect_after_s or 0.0
IDLE_S = PROFILE.idle_stream_timeout_s or 0.0
LAST_RESORT_S = PROFILE.silent_work_timeout_s or 0.0
ALONE_S = 4 * IDLE_S  # for a request alone, where the slots do not show whose work it is
SILENT_S, LOOK_INTERVAL_S = 60.0, 2.0  # as docs/hung-or-slow.md says

_ROLE = (
    b"data: "
    b'{"choices":[{"index":0,"delta":{"role":"assistant","content":null},"finish_reason":null}]}\n\n'
)
_EMPTY = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":null}]}\n\n'
_NOTHING = b"data: {}\n\n"


Hurt = Callable[[Case, list[Exchange]], object]


def _strike(case: Case, hurt: Hurt, can: Callable[[Exchange], bool] = lambda each: True) -> bool:
    """Hurt our own requests that hold a slot and will go on for a while, if there are any such."""
    server = case.machine.listening()
    if server is None or server.frozen or server.stopped or not server.loaded:
        return False
    if case.scheduler.host_is_halted:  # promises are made to a host that runs
        return False
    targets = [
        each
        for each in server.busy
        if each.request_id < FOREIGN
        and not (each.over or each.dead or each.closed_by_client)
        and each.decoded < each.reply.answer_tokens
        and can(each)
    ]
    if targets:
        hurt(case, targets)
    return bool(targets)


def _promise_by_slots(case: Case, *, clear: bool = True) -> float:
    """Where what the slots show is `clear`, and stays so: nobody new comes. A slot whose tokens no
    request receives is looked at for as long again."""
    if not (case.slots_are_clear and clear):
        return LAST_RESORT_S + SLACK_S
    hidden = any(each.request_id >= FOREIGN or each.closed_by_client for each in case.server.busy)
    return SUSPECT_S * (2 if hidden else 1) + SLACK_S


def _promise_by_steps(case: Case, *, clear: bool = True) -> float:
    """Where all slots generate: one of their tokens may take long."""
    promised_s = _promise_by_slots(case, clear=clear)
    case.by_steps = promised_s == SUSPECT_S + SLACK_S
    return promised_s


def _may_encode(case: Case) -> bool:
    """Whether a slot may encode media, as far as the watch can know."""
    return case.build.takes_media and (case.has_images or not _all_are_heard_of(case.server))


def _all_are_heard_of(server: LlamaServer) -> bool:
    """Else a slot may work for another client, who may have sent an image."""
    return all(
        each.request_id < FOREIGN and not each.closed_by_client and each.has_headers
        for each in server.busy
    )


def freeze(case: Case, targets: list[Exchange], *, spins: bool) -> None:
    """HTTP alive, nothing moves."""
    server = case.server
    server.freeze(spins=spins)
    if any(not each.decoded for each in server.busy):  # as a long batch looks, too
        case.promised_s = LAST_RESORT_S + SLACK_S
        case.by_pace = case.slots_are_clear and not case.was_halted and not _may_encode(case)
    else:
        case.promised_s = _promise_by_steps(case)


def sidecar(case: Case, targets: list[Exchange]) -> None:
    """No CPU, HTTP alive, nothing moves, beside a child that computes for itself."""
    freeze(case, targets, spins=False)
    case.server.begin_sidecar()


def stuck_queue(case: Case, targets: list[Exchange]) -> None:
    """A livelock in which `/slots` does not answer any more, at once or after a while."""
    freeze(case, targets, spins=True)
    server = case.server
    silent_after_s = case.dice.log_between(0.1, 200.0)
    case.later(silent_after_s, partial(setattr, server, "slots_silent", True))
    case.promised_s = LAST_RESORT_S + SLACK_S
    case.by_pace = case.by_steps = False
    if case.slots_are_clear and (case.build.number or 0) >= 10453:
        case.promised_s = max(SUSPECT_S, silent_after_s) + SILENT_S + SLACK_S


def stopped(case: Case, targets: list[Exchange]) -> None:
    """SIGSTOP, a debugger: nothing answers."""
    case.server.stop_signal()
    case.promised_s = LAST_RESORT_S + SLACK_S


def dead_altogether(case: Case, targets: list[Exchange], *, spins: bool) -> None:
    """Nothing moves and nothing answers."""
    case.server.freeze(spins=spins)
    case.server.http_dead = True
    case.promised_s = LAST_RESORT_S + SLACK_S


def lost(case: Case, targets: list[Exchange]) -> None:
    """The slot is idle, the connection open."""
    target = case.dice.choice(targets)
    case.server.release_slot(target)
    target.dead = True
    case.promised_s = _promise_by_slots(
        case, clear=target.has_headers and len(targets) == 1 and not case.server.queue
    )


def dead_stream(case: Case, targets: list[Exchange]) -> None:
    """One slot stands still, the others go on."""
    target = case.dice.choice(targets)
    target.dead = True
    is_known = case.short_ones_come and not (case.has_strangers or case.build.takes_media)
    if target.decoded and (is_known or not case.build.shows_slots):
        case.later(ALONE_S, partial(_promise_alone, case, target, case.scheduler.now))
    others = case.server.busy
    step_s = sum(each.reply.step_tokens for each in others) / case.build.decode_tokens_per_s
    calm = all(each.decoded and not each.reply.twist for each in others) and not case.server.queue
    calm = calm and step_s < LOOK_INTERVAL_S  # so that the others move between any two looks
    case.promised_s = _promise_by_steps(case, clear=calm)  # the others may have ended


def _promise_alone(case: Case, target: Exchange, struck_at: float) -> None:
    """Where others receive data all the time, and no slot shows it to be at work."""
    others = (each for each in case.exchanges if each is not target and each.request_id < FOREIGN)
    lost_s = case.scheduler.now - case.scheduler.host_time
    since = struck_at + IDLE_S
    if any(min(each.sent_at, each.advanced_at + lost_s) >= since for each in others):
        case.promised_s, case.is_bounded = ALONE_S + SLACK_S, True


def frozen_progress(case: Case, targets: list[Exchange]) -> None:
    """The same report of progress on every pass of a loop that goes in circles."""
    case.server.freeze(spins=True)
    case.server.repeat(targets[0], 1.0, partial(case.server.send_progress, targets[0]))
    case.promised_s = _promise_by_slots(case)
    drafts = case.build.drafts and any(each.decoded == 1 for each in case.server.busy)
    if case.build.shows_slots and case.build.answers_during_batches and not drafts:
        # else somebody's batch may be under way, unseen
        case.promised_s = min(case.promised_s, IDLE_S + SLACK_S)


def empty_frames(case: Case, targets: list[Exchange]) -> None:
    """Role chunks, empty deltas or empty objects for ever."""
    case.server.freeze(spins=True)
    data = case.dice.choice((_ROLE, _EMPTY, _NOTHING))
    case.server.repeat(targets[0], 1.0, partial(case.server.send, targets[0], data))
    generating = all(each.decoded for each in case.server.busy)
    case.promised_s = _promise_by_steps(case) if generating else LAST_RESORT_S + SLACK_S


def _reports_progress(each: Exchange) -> bool:
    return not each.decoded and each.wants_progress and each.has_headers


# Each hurts somebody, or says that there is nobody yet.
WEDGES: dict[str, Callable[[Case], bool]] = {
    "livelock": lambda case: _strike(case, partial(freeze, spins=True)),
    "stuck task queue": lambda case: _strike(case, stuck_queue),
    "decode dead, HTTP alive": lambda case: _strike(case, partial(freeze, spins=False)),
    "sidecar's CPU": lambda case: _strike(case, sidecar),
    "stopped": lambda case: _strike(case, stopped),
    "dead altogether": lambda case: _strike(
        case, partial(dead_altogether, spins=case.dice.chance(0.5))
    ),
    "request lost": lambda case: _strike(case, lost),
    "dead stream": lambda case: _strike(case, dead_stream),
    "frozen progress": lambda case: _strike(case, frozen_progress, _reports_progress),
    "empty frames": lambda case: _strike(case, empty_frames, lambda each: each.decoded > 0),
}
