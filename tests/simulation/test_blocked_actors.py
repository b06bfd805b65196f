"""An actor whose handler does not return counts as dead; if it goes on one day, nobody listens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llama_worker import RequestFailed
from llama_worker.actors.request import RequestActor
from llama_worker.actors.transport import TransportActor
from llama_worker.request.messages import (
    PostChat,
    RequestEnded,
    RequestInput,
    RequestOutput,
)
from llama_worker.request.request import Request
from llama_worker.request.states import DEATH_NEWS_S, LATE_NEWS_S
from llama_worker.server.messages import Died
from llama_worker.server.roll_call import ANSWER_S, EVERY_S
from llama_worker.server.termination import Signal
from llama_worker.types.request import RequestFailReason, RequestState
from tests.simulation.bench import Bench, quiet_bench
from tests.simulation.runtime import SimServerProcess, SimStream
from tests.simulation.scheduler import SimulatedActor
from tests.simulation.server import Reply
from tests.simulation.world import TOOL

FOUND_S = EVERY_S + ANSWER_S + 5.0
RESTARTED_S = 30.0


def actor_of(bench: Bench, name: str) -> SimulatedActor:
    return next(each for each in bench.scheduler.actors if each.name == name)


def first_is_long(request_id: int, turn: int) -> Reply:
    return Reply(
        key=f"r{request_id}",
        prompt_tokens=100,
        reasoning_tokens=0,
        text_tokens=2_000 if request_id == 1 else 20,
        step_tokens=1,
    )


@pytest.mark.parametrize("name", ["request[0]", "process", "transport", "watchdog", "tool_loop"])
@pytest.mark.parametrize("wakes", [True, False])
def test_a_blocked_actor_is_replaced_and_its_request_fails(name: str, wakes: bool) -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    bench.machine.reply_to = first_is_long
    with bench.ready():
        submitted = worker.submit("job", "", "a long answer")
        result = worker.result(1)
        scheduler.run_for(5.0)
        assert submitted.get(timeout=0)["ok"]
        blocked = actor_of(bench, name)
        scheduler.block_actor(blocked)

        assert scheduler.run_until(result.done, scheduler.now + FOUND_S)
        told = result.get(timeout=0)
        assert told["ok"]
        assert told["state"] is RequestState.FAILED
        assert len(told["text"]) > 100
        if name == "request[0]":
            assert told["fail_reason"] is RequestFailReason.UNKNOWN_ERROR
            assert f"has not answered for {ANSWER_S:g} s" in told["fail_detail"]
        assert blocked.actor.is_given_up

        again = worker.start()
        assert scheduler.run_until(again.done, scheduler.now + RESTARTED_S)
        if wakes:
            scheduler.unblock_actor(blocked)
            scheduler.run_for(1.0)
            assert blocked not in scheduler.actors
        fresh = worker.ask("a short answer")
        assert scheduler.run_until(fresh.done, scheduler.now + RESTARTED_S)
        assert fresh.get(timeout=0)["state"] is RequestState.COMPLETED
        stopped = worker.stop()
        assert scheduler.run_until(stopped.done, scheduler.now + RESTARTED_S)
        worker.close()
        scheduler.run_for(RESTARTED_S)
        assert scheduler.actors == ([] if wakes else [blocked])
        assert all(each.ended for each in bench.machine.launched)


@pytest.mark.parametrize(
    "reason", [RequestFailReason.WORKER_STOPPED, RequestFailReason.WORKER_RESTARTED]
)
def test_a_stream_that_never_closes_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, reason: RequestFailReason
) -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    bench.machine.reply_to = first_is_long
    with bench.ready():
        worker.submit("job", "", "a long answer")
        result = worker.result(1)
        scheduler.run_for(5.0)
        monkeypatch.setattr(SimStream, "_read_soon", lambda stream: None)
        scheduler.block_actor(actor_of(bench, "transport"))  # it waits for the stream's lock
        stops = reason is RequestFailReason.WORKER_STOPPED
        goes_on = worker.stop() if stops else worker.wait_slot()
        assert scheduler.run_until(result.done, scheduler.now + FOUND_S)
        told = result.get(timeout=0)
        assert told["ok"]
        assert told["fail_reason"] is reason
        assert len(told["text"]) > 100
        assert scheduler.run_until(goes_on.done, scheduler.now + RESTARTED_S)


def test_two_deaths_at_once_end_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    whole = TransportActor.died

    def died(actor: TransportActor, detail: str) -> None:
        scheduler.after(1.0, lambda: whole(actor, detail), "the news is late")

    with bench.ready():
        monkeypatch.setattr(TransportActor, "died", died)
        scheduler.break_actor(actor_of(bench, "transport"))
        scheduler.run_for(0.1)
        answer = worker.ask("a question")
        scheduler.run_for(0.1)
        bench.server.die(-9)
        assert scheduler.run_until(answer.done, scheduler.now + 5.0)
        with pytest.raises(RequestFailed, match="server_died"):
            answer.get(timeout=0)


def test_a_handler_that_returns_too_late_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    posted: list[int] = []

    def reply_to(request_id: int, turn: int) -> Reply:
        posted.append(request_id)
        return Reply(key="r", prompt_tokens=10, reasoning_tokens=0, text_tokens=5, step_tokens=1)

    bench.machine.reply_to = reply_to
    whole = Request.step

    def step(request: Request, message: RequestInput, now: float) -> Sequence[RequestOutput]:
        effects = whole(request, message, now)
        if any(isinstance(effect, PostChat) for effect in effects):
            stuck = actor_of(bench, "request[0]").actor
            assert isinstance(stuck, RequestActor)
            assert stuck.give_up("meanwhile its parent gives it up")
        return effects

    with bench.ready():
        monkeypatch.setattr(Request, "step", step)
        answer = worker.ask("a question")
        assert scheduler.run_until(answer.done, scheduler.now + RESTARTED_S)
        scheduler.run_for(5.0)
        assert not posted


def test_a_given_up_requests_signal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    bench = quiet_bench(
        exit_tools=(TOOL,), on_signal=lambda signal, **_: heard.append(signal["tool_name"])
    )
    scheduler, worker = bench.scheduler, bench.worker
    bench.machine.reply_to = lambda request_id, turn: Reply(
        key="r", prompt_tokens=10, reasoning_tokens=0, text_tokens=5, step_tokens=1, calls_tool=True
    )
    whole = Request._step

    def step(request: Request, message: RequestInput, now: float) -> Sequence[RequestOutput]:
        effects = whole(request, message, now)
        if request.status()["signals"]:
            stuck = actor_of(bench, "request[0]").actor
            assert isinstance(stuck, RequestActor)
            stuck.give_up("before it can tell")
        return effects

    with bench.ready():
        monkeypatch.setattr(Request, "_step", step)
        answer = worker.ask("a question")
        assert scheduler.run_until(answer.done, scheduler.now + RESTARTED_S)
        scheduler.run_for(1.0)
        assert heard == ["search"]


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_an_untold_end_keeps_its_output(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    bench.machine.reply_to = first_is_long
    whole, lacks = RequestActor._carry_out, [error()]

    def carry_out(actor: RequestActor, effect: RequestOutput) -> None:
        if isinstance(effect, RequestEnded) and lacks:
            raise lacks.pop()
        whole(actor, effect)

    with bench.ready():
        worker.submit("job", "", "a long answer")
        result = worker.result(1)
        scheduler.run_for(5.0)
        monkeypatch.setattr(RequestActor, "_carry_out", carry_out)
        worker.cancel(1)
        assert scheduler.run_until(result.done, scheduler.now + 1.0)
        told = result.get(timeout=0)
        assert told["ok"]
        assert told["state"] is RequestState.CANCELED
        assert len(told["text"]) > 100


def test_a_handler_that_returns_in_time_costs_nothing() -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    bench.machine.reply_to = first_is_long
    with bench.ready():
        answer = worker.ask("a long answer")
        for name in ("request[0]", "process", "transport", "watchdog"):
            scheduler.run_for(1.0)
            blocked = actor_of(bench, name)
            scheduler.block_actor(blocked)
            scheduler.run_for(ANSWER_S - 1.0)
            scheduler.unblock_actor(blocked)
        assert scheduler.run_until(answer.done, scheduler.now + 600.0)
        assert answer.get(timeout=0)["state"] is RequestState.COMPLETED


@pytest.mark.parametrize("name", ["process", "transport"])
@pytest.mark.parametrize("late_s", [0.0, 2 * DEATH_NEWS_S, 2 * LATE_NEWS_S])
def test_the_end_of_an_actor_is_no_disconnect_however_late_it_is_told(
    name: str, late_s: float
) -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    bench.machine.reply_to = first_is_long
    with bench.ready():
        answer = worker.ask("a long answer")
        scheduler.run_for(5.0)
        in_front = actor_of(bench, "worker")
        scheduler.block_actor(in_front)
        scheduler.break_actor(actor_of(bench, name))  # its server is killed, or its connections end
        scheduler.run_for(late_s)
        scheduler.unblock_actor(in_front)
        assert scheduler.run_until(answer.done, scheduler.now + RESTARTED_S)
        with pytest.raises(RequestFailed, match=f"worker_restarted: actor_died: {name}") as failed:
            answer.get(timeout=0)
        assert len(failed.value.result["text"]) > 100


@pytest.mark.parametrize("name", ["request[1]", "process", "transport", "watchdog", "tool_loop"])
def test_unread_output_outlives_another_actor(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    bench.machine.reply_to = first_is_long
    monkeypatch.setattr(bench.machine, "read_delay_s", lambda: 0.25)
    with bench.ready():
        worker.submit("job", "", "a long answer")
        result = worker.result(1)
        scheduler.run_for(5.0)
        (stream,) = bench.runtime.streams
        assert stream.exchange is not None
        assert stream._buffer
        said = "".join(stream.exchange.said)
        scheduler.break_actor(actor_of(bench, name))
        assert scheduler.run_until(result.done, scheduler.now + 1.0)
        told = result.get(timeout=0)
        assert told["ok"]
        assert told["fail_reason"] is RequestFailReason.WORKER_RESTARTED
        assert told["text"].startswith(said)


def test_a_stop_ends_requests_as_stopped_though_no_stream_can_be_flushed() -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    bench.machine.reply_to = lambda request_id, turn: Reply(
        key="r", prompt_tokens=100, reasoning_tokens=0, text_tokens=2_000, step_tokens=1
    )
    with bench.in_use():
        started = worker.start()
        assert scheduler.run_until(started.done, scheduler.now + 60.0)
        answer = worker.ask("a long answer")
        scheduler.run_for(5.0)
        scheduler.block_actor(actor_of(bench, "transport"))
        stopped = worker.stop()
        assert scheduler.run_until(stopped.done, scheduler.now + bench.config.timeouts.stop_grace_s)
        with pytest.raises(RequestFailed, match="worker_stopped") as failed:
            answer.get(timeout=0)
        assert len(failed.value.result["text"]) > 100


def test_a_server_that_ends_at_once_has_not_died_before_its_process_actor() -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    bench.machine.reply_to = lambda request_id, turn: Reply(
        key="r", prompt_tokens=100, reasoning_tokens=0, text_tokens=2_000, step_tokens=1
    )

    def guard_tells_at_once(process: SimServerProcess, signal: Signal) -> None:
        process._reply_to.tell(Died(epoch=process.epoch, returncode=-9))

    with bench.in_use():
        started = worker.start()
        assert scheduler.run_until(started.done, scheduler.now + 60.0)
        answer = worker.ask("a long answer")
        scheduler.run_for(5.0)
        bench.machine.on_signal = guard_tells_at_once
        scheduler.break_actor(actor_of(bench, "process"))
        assert scheduler.run_until(answer.done, scheduler.now + RESTARTED_S)
        with pytest.raises(RequestFailed, match="worker_restarted: actor_died: process"):
            answer.get(timeout=0)
