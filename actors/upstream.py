"""UpstreamActor: watches the requests to a server that this program did not start. It cannot see
the server's processes, and never restarts it.

Receives from the threads that serve a proxy's clients a Lease (already granted) for each request
that the server does not answer at once, and EndLease; and what its probes report. Sends nothing.
Owns the leases and the probes under way. It sends no probe while nobody waits for the server.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator

from llama_worker.actors.base import LiveSet, SupervisedActor, message_types
from llama_worker.actors.messages import EndLease, Lease, UpstreamMessage
from llama_worker.config.profiles import TimeoutProfile
from llama_worker.ports import Abortable, UpstreamRuntime
from llama_worker.request.leased import LeaseEffects
from llama_worker.request.messages import Abandon, ProgressReported, RequestEnded, ServerChecked
from llama_worker.request.table import RequestRecord
from llama_worker.runtime.http.leased_exchange import LeasedExchange
from llama_worker.server import messages
from llama_worker.server.watch import ServerWatch
from llama_worker.types.request import RequestFailReason


class UpstreamActor(SupervisedActor[UpstreamMessage]):
    """Watches one server. Every request gets a lease: the server decides how many run at once."""

    role = "upstream"
    accepts = message_types(UpstreamMessage)

    def __init__(self, live: LiveSet, runtime: UpstreamRuntime, timeouts: TimeoutProfile) -> None:
        super().__init__(live, runtime)
        self._runtime = runtime
        self._timeouts = timeouts.without_evidence()
        self._exchanges: dict[int, LeasedExchange] = {}  # by request id
        # The latest watch; the first request after an idle time begins a new one.
        self._epochs = itertools.count()
        self._watch = self._new_watch()
        self._probes: dict[type, Abortable] = {}  # the latest of each kind

    def handle(self, message: UpstreamMessage) -> None:
        now = self._runtime.now()
        match message:
            case Lease():
                self._lease(message, now)
            case EndLease(exchange=exchange):
                if self._exchanges.pop(exchange.request_id, None) is not None:
                    self._step(messages.Unwatch(_end(exchange, now)), now)
            case _:
                self._step(message, now)
        self._alarm.set(self._watch.deadline)

    def release(self, failure: str | None) -> None:
        """Fail the requests in flight: nobody watches them any more."""
        self._abort_probes()
        reason = RequestFailReason.UNKNOWN_ERROR if failure else RequestFailReason.WORKER_STOPPED
        for exchange in self._exchanges.values():
            exchange.fail(reason, failure or "the proxy was closed", self._runtime.now())

    def _lease(self, order: Lease, now: float) -> None:
        if not self._exchanges:
            self._watch = self._new_watch()
            self._watch.adopt(now)
        request_id = order.exchange.request_id
        self._exchanges[request_id] = order.exchange
        self._step(messages.Watch(request_id=request_id), now)

    def _new_watch(self) -> ServerWatch:
        return ServerWatch(self._timeouts, epoch=next(self._epochs), probes_count=0)

    def _step(self, message: messages.WatchdogMessage, now: float) -> None:
        waiting = deque([message])
        while waiting:
            for effect in self._watch.step(waiting.popleft(), now):
                waiting.extend(self._carry_out(effect, now))
            if not waiting and not self._exchanges and self._watch.state == "ready":
                waiting.append(messages.StopWatching())

    def _carry_out(
        self, effect: messages.WatchEffect, now: float
    ) -> Iterator[messages.WatchdogMessage]:
        """Carry out the effect; yields the messages that the watch must get at once."""
        match effect:
            case messages.AskForProgress(for_verdict=for_verdict):
                for exchange in self._exchanges.values():
                    yield ProgressReported(progress=exchange.progress(), for_verdict=for_verdict)
            case messages.Stalled(given_up=given_up):
                for each in given_up:
                    if each.request_id in self._exchanges:
                        reason, detail = each.verdict.reason, each.verdict.detail
                        yield self._give_up(each.request_id, reason, detail, now)
            case messages.HealthLost(detail=detail):
                for request_id in list(self._exchanges):
                    yield self._give_up(request_id, RequestFailReason.STALL_TIMEOUT, detail, now)
            case messages.ProbeReadiness(epoch=epoch):
                self._probes[messages.ProbeReadiness] = self._runtime.probe(epoch, self.me())
            case messages.LookAtSlots():
                look = self._runtime.look_at_slots(effect, self.me())
                self._probes[messages.LookAtSlots] = look
            case messages.AbortProbes():
                self._abort_probes()

    def _give_up(
        self, request_id: int, reason: RequestFailReason, detail: str, now: float
    ) -> messages.Unwatch:
        exchange = self._exchanges.pop(request_id)
        given_up = exchange.step(Abandon(reason=reason, detail=detail), now)
        self._runner.write_log(
            logging.WARNING, f"upstream server: gave up a request: {reason}: {detail}"
        )
        return messages.Unwatch(_record(given_up))

    def _abort_probes(self) -> None:
        for probe in self._probes.values():
            probe.abort()
        self._probes.clear()


def _end(exchange: LeasedExchange, now: float) -> RequestRecord:
    record = exchange.end(now)
    if record is None:  # its connection broke; nobody can tell why
        unknown = ServerChecked(request_id=exchange.request_id, is_gone=False)
        record = _record(exchange.step(unknown, now))
    return record


def _record(effects: LeaseEffects) -> RequestRecord:
    return next(effect.record for effect in effects if isinstance(effect, RequestEnded))
