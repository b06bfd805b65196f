"""What a verdict costs, and what requests that fail cost the server: computed from what the server
did and how requests ended, and not asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llama_worker.config.profiles import RestartPolicy, TimeoutProfile
from llama_worker.request.table import RequestRecord
from llama_worker.server.health import probe_timeout_s
from llama_worker.server.messages import GivenUp, Stalled
from llama_worker.types.request import RequestFailReason, RequestState
from llama_worker.types.worker import WorkerState
from tests.simulation.promises import Promise

if TYPE_CHECKING:
    from tests.simulation.invariants import Invariants, Truth

_TRANSPORT = frozenset(
    {
        RequestFailReason.CONNECT_FAILED,
        RequestFailReason.STREAM_DISCONNECTED,
        RequestFailReason.PROTOCOL_ERROR,
    }
)
_ANSWERED = frozenset(
    {
        RequestFailReason.CONTEXT_EXCEEDED,
        RequestFailReason.HTTP_ERROR,
        RequestFailReason.REPEATED_LINE_LOOP,
        RequestFailReason.REPEATED_TEXT_LOOP,
        RequestFailReason.SERVER_ERROR,
        RequestFailReason.TOOL_EXECUTION_ERROR,
        RequestFailReason.TOOL_PARSE_ERROR,
    }
)
_BESIDE_OTHERS = ("while other requests", "while another slot", "no slot was working on it")
_LAG_S = 5.0  # readers sleep, mailboxes are full


@dataclass(slots=True)
class _Launch:
    """What has counted against the server so far."""

    disconnected: int = 0  # in a row
    jobs_with_errors: set[str] = field(default_factory=set)
    degenerate_jobs: set[str] = field(default_factory=set)
    alone: tuple[int, int] | None = None  # who was given up alone, and the newest request then
    spoke_again_at: float = -math.inf  # when a new request was served behind that
    is_unclear: bool = False  # somebody came at that moment, before it or behind it


class Costs:
    """Of one worker. A verdict costs its request where another is served, once until a new request
    is served, and else the server; failures cost it by their number."""

    def __init__(
        self, invariants: Invariants, policy: RestartPolicy, profile: TimeoutProfile
    ) -> None:
        self._invariants, self._policy = invariants, policy
        self._window_s = max(1.0, 2 * profile.liveness_probe_interval_s)
        limits = (
            profile.suspect_after_s,
            profile.headers_timeout_s,
            profile.idle_stream_timeout_s,
            profile.prefill_liveness_timeout_s,
        )
        self._probe_s = probe_timeout_s(profile)
        self._shortest_s = min(limit for limit in limits if limit is not None)
        self._launches: dict[int, _Launch] = {}

    # ------------------------------------------------------------ verdicts

    def stalled(self, stalled: Stalled) -> None:
        """The watch has come to these verdicts, now."""
        for given_up in stalled.given_up:
            self._given_up(stalled.epoch, given_up)

    def _given_up(self, epoch: int, given_up: GivenUp) -> None:
        truth = self._invariants.requests.get(given_up.request_id)
        reason, now = given_up.verdict.reason, self._invariants.now
        if truth is None or reason is RequestFailReason.ABSOLUTE_TIMEOUT:
            return
        self._check_silence(truth, given_up)
        launch = self._launches.setdefault(epoch, _Launch())
        if launch.alone is not None and launch.alone[0] == truth.request_id:
            return
        is_second = launch.alone is not None
        if given_up.restarts_server:
            is_first = not is_second and now - launch.spoke_again_at > _LAG_S
            if is_first and not launch.is_unclear and self._another_is_served(truth):
                self._fail(given_up, "costs the server, which serves another request")
            self._expect_restart(
                epoch,
                f"the verdict on request {truth.request_id}",
                lambda: truth.record is not None and truth.record.result["fail_reason"] != reason,
            )
            launch.alone = None
            return
        if is_second and not launch.is_unclear:
            self._fail(given_up, "ends alone, as one before it did")
        beside = any(words in given_up.verdict.detail for words in _BESIDE_OTHERS)
        if not beside and self._nobody_is_served(truth):
            self._fail(given_up, "ends alone, and the server serves nobody")
        newest = max(self._invariants.requests)
        launch.alone = truth.request_id, newest
        launch.is_unclear |= now - self._invariants.requests[newest].admitted_at < _LAG_S

    def _check_silence(self, truth: Truth, given_up: GivenUp) -> None:
        """Nobody is given up sooner than the shortest of the limits behind what it last got."""
        got_at = [each.advanced_at for each in truth.exchanges if each.decoded]
        silent_s = self._invariants.now - max((truth.admitted_at, *got_at))
        if silent_s < self._shortest_s - 1e-6:
            self._fail(given_up, f"has waited for {silent_s:.1f} s only")

    def _others(self, truth: Truth) -> list[Truth]:
        known = list(self._invariants.requests.values())[-100:]
        return [each for each in known if each is not truth and each.epoch == truth.epoch]

    def _another_is_served(self, truth: Truth) -> bool:
        """Another has had text for certain, within the time that counts, and the watch knows it: a
        request tells of its present turn only."""
        now = self._invariants.now
        if not self._invariants.ran_for(2 * self._window_s + 60.0):
            return False
        return any(
            now - self._window_s + 1.0 <= at <= now - _LAG_S
            for each in self._others(truth)
            if len(each.exchanges) == 1
            for at in each.text_at
        )

    def _nobody_is_served(self, truth: Truth) -> bool:
        """No other has been sent anything for longer than the time that counts."""
        now = self._invariants.now
        if not self._invariants.ran_for(60.0):
            return False
        quiet_since = now - self._window_s - _LAG_S
        sent = (exchange.sent_at for each in self._others(truth) for exchange in each.exchanges)
        return all(at < quiet_since for at in sent)

    # ------------------------------------------------------------ how requests end

    def ended(
        self, truth: Truth, record: RequestRecord, *, counts: bool, speaks_well: bool
    ) -> None:
        """`counts`: its server takes requests. `speaks_well`: it did not end in nonsense."""
        launch = self._launches.setdefault(truth.epoch, _Launch())
        reason, policy = record.result["fail_reason"], self._policy
        completed = record.result["state"] is RequestState.COMPLETED
        canceled = record.result["state"] is RequestState.CANCELED
        served = completed or (canceled and record.last_data_at is not None)
        if served and launch.alone is not None and truth.request_id > launch.alone[1]:
            launch.alone, launch.spoke_again_at = None, self._invariants.now
        if not counts:
            return
        if not speaks_well:
            launch.disconnected = 0
            launch.degenerate_jobs.add(record.job)
            limit = policy.degenerate_outputs_before_restart or math.inf
            if len(launch.degenerate_jobs) >= limit:
                self._expect_restart(truth.epoch, f"nonsense of {launch.degenerate_jobs}")
        elif completed:
            launch.disconnected = 0
            launch.jobs_with_errors.clear()
            launch.degenerate_jobs.clear()
        elif served:
            launch.disconnected = 0
            launch.jobs_with_errors.clear()
        elif reason in _TRANSPORT:
            launch.disconnected += 1
            if launch.disconnected >= policy.transport_failures_before_restart:
                self._expect_restart(truth.epoch, f"{launch.disconnected} broken connections")
            self._expect_look(truth)
        elif reason in _ANSWERED:
            launch.disconnected = 0
            status = record.http_status
            if status is not None and 500 <= status <= 599:
                launch.jobs_with_errors.add(record.job)
            if len(launch.jobs_with_errors) >= policy.server_errors_before_restart:
                self._expect_restart(truth.epoch, f"errors in {launch.jobs_with_errors}")

    def _expect_look(self, truth: Truth) -> None:
        """Behind a broken connection the server is probed at once: where it does not answer, it is
        ended after one probe, or after the one that was under way and another, once it has served
        nobody for the time that counts. Probes that fail behind a halt may be made again."""
        invariants, now = self._invariants, self._invariants.now
        server = invariants.living_server
        if server is None or server.epoch != truth.epoch or server.answers:
            return
        if not invariants.ran_for(60.0):  # it may lack the threads for a probe
            return

        def is_over() -> bool:
            is_back = server.answers or server.back_at >= now
            return server.gone or server.killed or is_back or self._served(truth.epoch, now)

        what = f"launch {truth.epoch}, which does not answer, is over"
        bound_s = self._window_s + 2 * self._probe_s + _LAG_S
        invariants.expect(
            Promise.HUNG_OR_SLOW, bound_s, what, is_over, lambda: 60.0 - invariants.ran_s
        )

    def _served(self, epoch: int, since: float) -> bool:
        """Whether a request of this launch has got data since."""
        requests = self._invariants.requests.values()
        return any(
            each.epoch == epoch and each.records_at and each.records_at[-1] > since
            for each in requests
        )

    def restarted(self, epoch: int, reason: str, detail: str) -> None:
        """For this reason, as it says."""
        launch, policy = self._launches.get(epoch, _Launch()), self._policy
        too_few = {
            "transport_failures": launch.disconnected < policy.transport_failures_before_restart,
            "server_errors": len(launch.jobs_with_errors) < policy.server_errors_before_restart,
        }
        if too_few.get(reason):
            what = f"launch {epoch} is restarted for {reason}, with {launch}: {detail}"
            raise Promise.HUNG_OR_SLOW(what)

    # ------------------------------------------------------------

    def _expect_restart(
        self, epoch: int, cause: str, unless: Callable[[], bool] = lambda: False
    ) -> None:
        def is_over() -> bool:
            life = self._invariants.lifecycle
            return unless() or life.epoch != epoch or life.public_state is not WorkerState.READY

        what = f"launch {epoch} is over, by {cause}"
        self._invariants.expect(Promise.HUNG_OR_SLOW, _LAG_S, what, is_over)

    def _fail(self, given_up: GivenUp, what: str) -> None:
        detail = f"request {given_up.request_id} {what}: {given_up.verdict.detail}"
        raise Promise.HUNG_OR_SLOW(detail)
