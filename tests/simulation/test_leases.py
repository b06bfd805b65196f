"""A broken connection of a proxy's client is explained, and its slot is free again, in time."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from llama_worker.actors.base import Ref
from llama_worker.actors.messages import EndLease, Lease, WorkerMessage
from llama_worker.request import leased
from llama_worker.request.states import EXIT_REPORT_WAIT_S
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.http.leased_exchange import LeasedExchange
from llama_worker.stream.events import TextDelta
from llama_worker.stream.failure import disconnected
from llama_worker.types.request import SubmitResult
from tests.simulation.bench import Bench, ready_bench
from tests.simulation.leases import SimAbort


def granted(bench: Bench) -> tuple[Ref[WorkerMessage], LeasedExchange]:
    """A lease of the bench's worker, and the mailbox that ends it."""
    mailbox: Ref[WorkerMessage] = Ref(bench.worker.actor_ref)
    exchange = LeasedExchange(SimAbort())  # type: ignore[arg-type]
    reply: WorkerFuture[SubmitResult] = WorkerFuture()
    mailbox.tell(Lease(job_name="responses:1", exchange=exchange, reply=reply))
    assert bench.answer(reply)["ok"]
    return mailbox, exchange


def test_lease_that_is_heard_out_ends_by_alarm() -> None:
    with ready_bench() as (bench, scheduler, worker):
        mailbox, exchange = granted(bench)
        exchange.opened(scheduler.now)
        exchange.received([TextDelta("Once")], scheduler.now)
        assert exchange.record_closed(disconnected("in mid-stream"))
        mailbox.tell(EndLease(exchange=exchange))
        scheduler.run_for(EXIT_REPORT_WAIT_S - 0.05)
        assert not exchange.has_ended  # the server's death might be told
        scheduler.run_for(0.1)
        assert exchange.has_ended
        assert bench.answer(worker.get_worker_status())["slots_used"] == 0


def test_an_unrecorded_lease_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    with ready_bench() as (bench, _, worker):
        granted(bench)
        monkeypatch.setattr(leased, "build_record", Mock(side_effect=MemoryError))
        bench.answer(worker.cancel(1), 1.0)
