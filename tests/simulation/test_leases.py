"""A broken connection of a proxy's client is explained, and its slot is free again, in time."""

from __future__ import annotations

from typing import NoReturn

import pytest

from llama_worker.actors.base import Ref
from llama_worker.actors.messages import EndLease, Lease, WorkerMessage
from llama_worker.request import leased
from llama_worker.request.states import DEATH_NEWS_S
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.streams.leased_exchange import LeasedExchange
from llama_worker.stream.events import TextDelta
from llama_worker.stream.failure import disconnected
from llama_worker.types.request import SubmitResult
from tests.simulation.bench import quiet_bench
from tests.simulation.leases import SimAbort


def test_a_lease_that_is_heard_out_ends_by_its_alarm() -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    mailbox: Ref[WorkerMessage] = Ref(worker.actor_ref)
    exchange = LeasedExchange(SimAbort())  # type: ignore[arg-type]
    with bench.ready():
        granted: WorkerFuture[SubmitResult] = WorkerFuture()
        mailbox.tell(Lease(job_name="responses:1", exchange=exchange, reply=granted))
        assert scheduler.run_until(granted.done, scheduler.now + 1.0)
        exchange.opened(scheduler.now)
        exchange.heard([TextDelta("Once")], scheduler.now)
        assert exchange.breaks(disconnected("in mid-stream"))
        mailbox.tell(EndLease(exchange=exchange))
        scheduler.run_for(DEATH_NEWS_S - 0.05)
        assert not exchange.has_ended  # the server's death might be told
        scheduler.run_for(0.1)
        assert exchange.has_ended
        status = worker.get_worker_status()
        assert scheduler.run_until(status.done, scheduler.now + 1.0)
        assert status.get(timeout=0)["slots_used"] == 0


def test_an_unrecorded_lease_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    mailbox: Ref[WorkerMessage] = Ref(worker.actor_ref)
    exchange = LeasedExchange(SimAbort())  # type: ignore[arg-type]

    def lacks_memory(*_: object) -> NoReturn:
        raise MemoryError

    with bench.ready():
        granted: WorkerFuture[SubmitResult] = WorkerFuture()
        mailbox.tell(Lease(job_name="responses:1", exchange=exchange, reply=granted))
        assert scheduler.run_until(granted.done, scheduler.now + 1.0)
        monkeypatch.setattr(leased, "build_record", lacks_memory)
        canceled = worker.cancel(1)
        assert scheduler.run_until(canceled.done, scheduler.now + 1.0)
