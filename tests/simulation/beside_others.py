"""A stream that gets nothing while others do ends in time, whatever comes after them: short
requests that come and go put nothing off."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from llama_worker.config.profiles import TimeoutProfile
from tests.simulation.faults import SLACK_S, Scope
from tests.simulation.promises import Promise
from tests.simulation.server import Build, Exchange

if TYPE_CHECKING:
    from tests.simulation.invariants import Fault, Invariants, Truth

MULTIPLE = 4  # of `idle_stream_timeout_s`
ROUND_S = 15.0  # behind `suspect_after_s`
_APART_S = 1.9  # two looks, at least
_THREE_LOOKS_S = 3.0  # they take longer
_RECENT = 50  # requests at a time, and more


class BesideOthers:
    """Of one worker, where no other client uses the server."""

    def __init__(self, invariants: Invariants, profile: TimeoutProfile, build: Build) -> None:
        self._invariants, self._build = invariants, build
        self._idle_s = profile.idle_stream_timeout_s or math.inf
        self._suspect_s = profile.suspect_after_s or math.inf
        self._looks_s = 2 * profile.liveness_probe_interval_s + SLACK_S

    def expect_end(self, fault: Fault, truth: Truth, own: Exchange) -> None:
        """From now on the request gets nothing; `own` is the only exchange that it has."""
        build = self._build
        if build.shows_slots and build.takes_media:
            return  # each prompt that is read may hold an image, which the request waits for
        # a slot that reads a prompt may show another's tokens
        if own.decoded and not (build.shows_slots and build.keeps_counts):
            within_s = MULTIPLE * self._idle_s + self._looks_s
            self._expect(fault, truth, within_s, self._due_by_times)
        had_slot = bool(own.decoded) or (own.wants_progress and own.spoke)
        looks_at_once = build.shows_slots and build.answers_during_batches
        if fault.kind.name == "request lost" and had_slot and looks_at_once:
            self._expect(fault, truth, self._suspect_s + ROUND_S + SLACK_S, self._due_by_slots)

    def _expect(
        self,
        fault: Fault,
        truth: Truth,
        within_s: float,
        due_at: Callable[[Truth, float, float], float],
    ) -> None:
        if within_s == math.inf:
            return
        due = partial(due_at, truth, within_s, self._invariants.now)
        self._invariants.expect(
            Promise.HUNG_OR_SLOW,
            within_s,
            f"request {truth.request_id} under {fault.kind.name!r}, beside others",
            lambda: truth.ended_at is not None or fault.ended_at is not None,
            lambda: due() - self._invariants.now,
        )

    def _due_by_times(self, truth: Truth, within_s: float, began_at: float) -> float:
        """Since its last data, or since a slot that may be its own was seen to move."""
        since = began_at
        if self._build.shows_slots:
            since = max(since, self._may_have_moved_at(truth))
        later = [
            at for each in self._others(truth) for at in each.text_at if at >= since + self._idle_s
        ]
        if not later:  # the others are as silent: the server's limits apply
            return self._invariants.now + self._idle_s
        return max(since + within_s, min(later) + self._looks_s)

    def _may_have_moved_at(self, truth: Truth) -> float:
        """When a slot last moved as `/slots` may have shown, and no request accounts for that."""
        own = truth.exchanges[-1]
        pieces = own.decoded // own.reply.step_tokens
        unclear = filter(_is_unclear, self._exchanges_beside(truth))
        moved_at = (each.advanced_at for each in unclear if 2 * each.decoded + 1 >= pieces)
        return max(moved_at, default=-math.inf)

    def _due_by_slots(self, truth: Truth, within_s: float, began_at: float) -> float:
        """Since a slot last worked on one task for as long as three looks take."""
        now, faults = self._invariants.now, self._invariants.faults[-_RECENT:]
        if any(each.kind.scope is Scope.SERVER and each.epoch == truth.epoch for each in faults):
            return now + within_s
        held = (
            (each.slot_since, min(each.slot_until, now)) for each in self._exchanges_beside(truth)
        )
        long_until = (until for since, until in held if until - since >= _THREE_LOOKS_S)
        return max((began_at, *long_until)) + within_s

    def _others(self, truth: Truth) -> list[Truth]:
        known = list(self._invariants.requests.values())[-_RECENT:]
        known += [self._invariants.requests[each] for each in self._invariants.active]
        return [each for each in known if each is not truth and each.epoch == truth.epoch]

    def _exchanges_beside(self, truth: Truth) -> list[Exchange]:
        return [each for other in self._others(truth) for each in other.exchanges]


def _is_unclear(exchange: Exchange) -> bool:
    """Whether no data told of its tokens, or it ended before the slots were judged."""
    if not exchange.decoded:
        return False
    is_hidden = exchange.in_one_piece or exchange.closed_by_client or exchange.over
    is_brief = 0.0 <= exchange.sent_at - exchange.read_at < _APART_S
    return is_hidden and not is_brief
