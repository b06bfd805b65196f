"""An actor whose handler does not return counts as dead; if it goes on one day, nobody listens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from llama_worker import RequestFailed
from llama_worker.actors.request import RequestActor
from llama_worker.actors.transport import TransportActor
from llama_worker.config.profiles import TimeoutProfile
from llama_worker.mailbox import Tick
from llama_worker.request.messages import PostChat, RequestEnded, RequestInput, RequestOutput
from llama_worker.request.request import Request
from llama_worker.request.states import EXIT_REPORT_WAIT_S, LATE_EXIT_REPORT_WAIT_S
from llama_worker.server.messages import Died
from llama_worker.server.roll_call import ANSWER_TIMEOUT_S, ASK_INTERVAL_S
from llama_worker.server.termination import Signal
from llama_worker.types.request import RequestFailReason, RequestResult, RequestState
from tests.simulation.bench import Bench, ready_bench
from tests.simulation.runtime import SimServerProcess, SimStream
from tests.simulation.server import Reply
from tests.simulation.world import TOOL
from tests.tables import cases

FOUND_S = ASK_INTERVAL_S + ANSWER_TIMEOUT_S + 5.0
RESTARTED_S = 30.0


class LongAnswer:
    """Request 1 of a worker, in the middle of a long answer; any other gets a short one."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        bench.worker.submit("job", "", "a long answer")
        self.result = bench.worker.result(1)
        bench.scheduler.run_for(5.0)

    def ended(self, within_s: float) -> RequestResult:
        """How, and with all its output."""
        result: RequestResult = self.bench.answer(self.result, within_s)
        assert result["ok"]
        assert len(result["text"]) > 100
        return result


@contextmanager
def in_a_long_answer() -> Iterator[LongAnswer]:
    long = Reply(prompt_tokens=100, text_tokens=10_000, step_tokens=1)
    with ready_bench(reply=long) as (bench, _, _):
        request = LongAnswer(bench)
        bench.machine.reply_to = lambda request_id, turn: replace(long, text_tokens=20)
        yield request


@pytest.mark.parametrize("name", ["request[0]", "process", "transport", "watchdog", "tool_loop"])
@pytest.mark.parametrize("wakes", [True, False])
def test_blocked_actor_is_replaced_and_its_request_fails(name: str, wakes: bool) -> None:
    with in_a_long_answer() as request:
        bench, scheduler, worker = request.bench, request.bench.scheduler, request.bench.worker
        blocked = bench.actor_of(name)
        scheduler.block_actor(blocked)
        result = request.ended(FOUND_S)
        assert result["state"] is RequestState.FAILED
        if name == "request[0]":
            assert result["fail_reason"] is RequestFailReason.UNKNOWN_ERROR
            assert f"has not answered for {ANSWER_TIMEOUT_S:g} s" in (result["fail_detail"] or "")
        assert blocked.actor.is_given_up

        bench.answer(worker.start(), RESTARTED_S)
        if wakes:
            scheduler.unblock_actor(blocked)
            scheduler.run_for(1.0)
            assert blocked not in scheduler.actors
        fresh = bench.answer(worker.ask("a short answer"), RESTARTED_S)
        assert fresh["state"] is RequestState.COMPLETED
        bench.answer(worker.stop(), RESTARTED_S)
        worker.close()
        scheduler.run_for(RESTARTED_S)
        assert scheduler.actors == ([] if wakes else [blocked])
        assert all(each.ended for each in bench.machine.launched)


STOPPED, RESTARTED = RequestFailReason.WORKER_STOPPED, RequestFailReason.WORKER_RESTARTED


@cases(
    "reason, closes, within_s",
    {
        "stop": (STOPPED, True, TimeoutProfile().stop_grace_s),
        "stop, and the stream never closes": (STOPPED, False, FOUND_S),
        "the stream never closes": (RESTARTED, False, FOUND_S),
    },
)
def test_unflushable_stream_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, reason: RequestFailReason, closes: bool, within_s: float
) -> None:
    with in_a_long_answer() as request:
        bench = request.bench
        if not closes:
            monkeypatch.setattr(SimStream, "_read_soon", lambda stream: None)
        bench.scheduler.block_actor(bench.actor_of("transport"))  # waits for the stream's lock
        goes_on = bench.worker.stop() if reason is STOPPED else bench.worker.wait_slot()
        assert request.ended(within_s)["fail_reason"] is reason
        bench.answer(goes_on, RESTARTED_S)


def test_two_deaths_at_once_end_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TransportActor.on_crash

    def on_crash(actor: TransportActor, detail: str) -> None:
        scheduler.after(1.0, lambda: whole(actor, detail), "the news is late")

    with ready_bench() as (bench, scheduler, worker):
        monkeypatch.setattr(TransportActor, "on_crash", on_crash)
        scheduler.break_actor(bench.actor_of("transport"))
        scheduler.run_for(0.1)
        answer = worker.ask("a question")
        scheduler.run_for(0.1)
        bench.server.die(-9)
        with pytest.raises(RequestFailed, match="server_died"):
            bench.answer(answer, 5.0)


def test_a_handler_that_returns_too_late_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Request.step

    def step(request: Request, message: RequestInput, now: float) -> Sequence[RequestOutput]:
        effects = whole(request, message, now)
        if any(isinstance(effect, PostChat) for effect in effects):
            assert give_up_request(bench, "meanwhile its parent gives it up")
        return effects

    with ready_bench() as (bench, scheduler, worker):
        reply_to = bench.machine.reply_to = Mock()
        monkeypatch.setattr(Request, "step", step)
        with pytest.raises(RequestFailed):
            bench.answer(worker.ask("a question"), RESTARTED_S)
        scheduler.run_for(5.0)
        reply_to.assert_not_called()


def give_up_request(bench: Bench, why: str) -> bool:
    stuck = bench.actor_of("request[0]").actor
    assert isinstance(stuck, RequestActor)
    return stuck.give_up(why)


def test_a_given_up_requests_signal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    tools: dict[str, Any] = {
        "exit_tools": (TOOL,),
        "on_signal": lambda signal, **_: heard.append(signal["tool_name"]),
    }
    reply = Reply(prompt_tokens=10, text_tokens=5, step_tokens=1, calls_tool=True)
    whole = Request._step

    def step(request: Request, message: RequestInput, now: float) -> Sequence[RequestOutput]:
        effects = whole(request, message, now)
        if request.status()["signals"]:
            give_up_request(bench, "before it can tell")
        return effects

    with ready_bench(reply=reply, **tools) as (bench, scheduler, worker):
        monkeypatch.setattr(Request, "_step", step)
        with pytest.raises(RequestFailed):
            bench.answer(worker.ask("a question"), RESTARTED_S)
        scheduler.run_for(1.0)
        assert heard == ["search"]


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_an_untold_end_keeps_its_output(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    whole, lacks = RequestActor._carry_out, [error()]

    def carry_out(actor: RequestActor, effect: RequestOutput) -> None:
        if isinstance(effect, RequestEnded) and lacks:
            raise lacks.pop()
        whole(actor, effect)

    with in_a_long_answer() as request:
        monkeypatch.setattr(RequestActor, "_carry_out", carry_out)
        request.bench.worker.cancel(1)
        assert request.ended(1.0)["state"] is RequestState.CANCELED


def test_a_handler_that_returns_in_time_costs_nothing() -> None:
    with in_a_long_answer() as request:
        scheduler = request.bench.scheduler
        for name in ("request[0]", "process", "transport", "watchdog"):
            scheduler.run_for(1.0)
            blocked = request.bench.actor_of(name)
            scheduler.block_actor(blocked)
            scheduler.run_for(ANSWER_TIMEOUT_S - 1.0)
            scheduler.unblock_actor(blocked)
        assert request.ended(600.0)["state"] is RequestState.COMPLETED


def test_an_actor_served_meanwhile_does_not_wake_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with ready_bench() as (bench, scheduler, _):
        transport = bench.actor_of("transport")
        monkeypatch.setattr(scheduler._choices, "wake_delay_s", lambda: 1.0)
        transport.actor.actor_ref.tell(Tick())
        scheduler.block_actor(transport)
        scheduler.unblock_actor(transport)
        monkeypatch.setattr(scheduler._choices, "wake_delay_s", lambda: 0.0)
        scheduler.run_for(2.0)
        assert not transport.inbox


@pytest.mark.parametrize("name", ["process", "transport"])
@pytest.mark.parametrize("late_s", [0.0, 2 * EXIT_REPORT_WAIT_S, 2 * LATE_EXIT_REPORT_WAIT_S])
def test_an_actors_end_is_no_disconnect_however_late(name: str, late_s: float) -> None:
    with in_a_long_answer() as request:
        bench, scheduler = request.bench, request.bench.scheduler
        in_front = bench.actor_of("worker")
        scheduler.block_actor(in_front)
        scheduler.break_actor(bench.actor_of(name))  # its server is killed, or connections end
        scheduler.run_for(late_s)
        scheduler.unblock_actor(in_front)
        check_actor_died(name, request.ended(RESTARTED_S))


def check_actor_died(name: str, result: RequestResult) -> None:
    assert result["fail_reason"] is RESTARTED
    assert (result["fail_detail"] or "").startswith(f"actor_died: {name}")


@pytest.mark.parametrize("name", ["request[1]", "process", "transport", "watchdog", "tool_loop"])
def test_unread_output_outlives_another_actor(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with in_a_long_answer() as request:
        bench = request.bench
        monkeypatch.setattr(bench.machine, "read_delay_s", lambda: 0.25)
        bench.scheduler.run_for(1.0)
        (stream,) = bench.runtime.streams
        assert stream.exchange is not None
        assert stream._buffer
        said = "".join(stream.exchange.said)
        bench.scheduler.break_actor(bench.actor_of(name))
        result = request.ended(1.0)
        assert result["fail_reason"] is RESTARTED
        assert result["text"].startswith(said)


def test_server_ending_at_once_died_after_its_actor() -> None:
    def guard_tells_at_once(process: SimServerProcess, signal: Signal) -> None:
        process._reply_to.tell(Died(epoch=process.epoch, returncode=-9))

    with in_a_long_answer() as request:
        bench = request.bench
        bench.machine.on_signal = guard_tells_at_once
        bench.scheduler.break_actor(bench.actor_of("process"))
        check_actor_died("process", request.ended(RESTARTED_S))
