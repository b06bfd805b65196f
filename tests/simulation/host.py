"""The host program: what it calls, when, and whether that is reasonable.

A plan is a generator: it yields seconds to sleep, or a future, whose answer it gets, and is resumed
as a thread of the host's would be. Every answer is checked against what the worker promises for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_worker.errors import (
    LlamaWorkerError,
    RequestFailed,
    RequestRefused,
    WorkerClosed,
    WorkerStartError,
    WorkerStopError,
)
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.real import COUNT_S
from llama_worker.types.request import RequestState
from llama_worker.types.worker import StartFailReason, WorkerState
from tests.simulation.bench import IMAGE
from tests.simulation.dice import Dice
from tests.simulation.invariants import QUICK_S
from tests.simulation.leases import ProxiedClient
from tests.simulation.promises import Promise

if TYPE_CHECKING:
    from tests.simulation.world import World

SHORT = "short"  # the job of short requests
LONGEST_LOAD_S = 1500.0  # of Nature's slow loads
# a start that failed leaves the worker FAILED, but for these; None: whatever was asked for instead
_STATE_BEHIND = {StartFailReason.PORT_IN_USE: WorkerState.STOPPED, StartFailReason.STOPPED: None}
_IMAGES = 0x27D4EB2F165667C5
_CROWDS = 0x9FB21C651E98DF25
Plan = Generator[float | WorkerFuture[Any], Any, None]


class Host:
    """The program around one worker."""

    def __init__(self, world: World, dice: Dice) -> None:
        self.is_leaving = False
        self.outcomes: Counter[str] = Counter()
        # by `ask()`; all are resolved once the worker is at rest
        self.asked: list[WorkerFuture[Any]] = []
        self._world, self._dice = world, dice
        self._for_images = Dice(
            world.setting.seed ^ _IMAGES
        )  # so that other draws stay as they are
        self._for_crowds = Dice(world.setting.seed ^ _CROWDS)
        self._scheduler, self._invariants = world.scheduler, world.invariants
        self._result_ttl_s = world.config.result_ttl_s
        profile, policy = world.config.timeouts, world.config.restart
        self.stop_bound_s = (
            1.0 + profile.stop_grace_s + 2.0 + profile.kill_timeout_s + QUICK_S + 5.0
        )
        self._invariants.stop_bound_s = self.stop_bound_s
        one_start_s = LONGEST_LOAD_S + profile.startup_timeout_s + self.stop_bound_s + 60.0
        self.start_bound_s = (
            one_start_s * (policy.max_restarts_per_window + 2) + policy.backoff_max_s * 8
        )
        # one request, perhaps behind other clients' prompts
        self._drain_bound_s = 4 * (profile.silent_work_timeout_s or 3600.0)
        self._drains: list[WorkerFuture[Any]] = []  # `drain()`, not over yet

    def run(self, plan: Plan) -> None:
        """Begin the plan, on a thread of its own."""
        self._scheduler.after(0.0, lambda: self._resume(plan), "host")

    def _resume(self, plan: Plan, answered: WorkerFuture[Any] | None = None) -> None:
        try:
            try:
                answer = None if answered is None else answered.get(timeout=0)
            except Exception as error:
                awaited = plan.throw(error)
            else:
                awaited = plan.send(answer)
        except (StopIteration, WorkerClosed):
            return
        resume = partial(self._resume, plan)
        if isinstance(awaited, WorkerFuture):
            awaited._add_waker(lambda: self._scheduler.wake_host(partial(resume, awaited)))
        else:
            self._scheduler.after(awaited, resume, "host")

    # ------------------------------------------------------------ calls

    def start(self) -> WorkerFuture[Any]:
        self._invariants.called_at = self._scheduler.host_time
        self._drains = [each for each in self._drains if not each.done()]
        bound_s = self.start_bound_s + (self._drain_bound_s if self._drains else 0.0)
        future = self._world.worker.start()
        self._invariants.expect_answer(future, bound_s, "start()")
        return self._told_of_launch(future)

    def _told_of_launch(self, future: WorkerFuture[Any]) -> WorkerFuture[Any]:
        """READY, or an error that says in which state the worker is now."""

        def resolved() -> None:
            expected: WorkerState | None = WorkerState.READY
            try:
                future.get(timeout=0)
            except WorkerClosed:
                return
            except WorkerStartError as error:
                expected = _STATE_BEHIND.get(error.reason, WorkerState.FAILED)
            state = self._invariants.lifecycle.public_state
            if expected not in (state, None):
                what = f"start() resolved, and the worker is {state}, not {expected}"
                raise Promise.KILLS_AND_RESTARTS(what)

        future._add_waker(resolved)
        return future

    def stop(self) -> WorkerFuture[Any]:
        self._crowd()
        self._invariants.stop_called_at = self._scheduler.host_time
        future = self._ends_launches(self._world.worker.stop, "stop()")
        self._invariants.expect_answer(future, self.stop_bound_s, "stop()")
        return future

    def drain(self) -> WorkerFuture[Any]:
        """`drain()`, which resolves soon after the last request has ended."""
        self._crowd()
        self._invariants.drain_called_at = self._scheduler.host_time
        future = self._ends_launches(self._world.worker.drain, "drain()")
        self._drains.append(future)
        return future

    def _ends_launches(self, call: Callable[[], WorkerFuture[Any]], what: str) -> WorkerFuture[Any]:
        """When it resolves, nothing is left of what was launched before."""
        self._invariants.called_at = self._scheduler.host_time
        launched = tuple(self._world.machine.launched)
        check_gone = self._invariants.check_gone
        return self._checked(call(), lambda answer: check_gone(launched, f"{what} resolved"))

    def restart(self) -> WorkerFuture[Any]:
        self._invariants.restarts_ordered += 1
        self._invariants.called_at = self._scheduler.host_time
        future = self._world.worker.restart("a new model")
        self._invariants.expect_answer(future, self.start_bound_s, "restart()")
        return self._told_of_launch(future)

    def wait_slot(self) -> WorkerFuture[Any]:
        """`wait_slot()`; its answer must be true at the instant it is given."""
        future = self._world.worker.wait_slot()

        def resolved() -> None:
            error = None
            try:
                future.get(timeout=0)
            except RequestRefused as refused:
                error = refused.error
            except WorkerClosed:
                return
            self._invariants.slot_waited(error)

        future._add_waker(resolved)
        return future

    def _crowd(self) -> None:
        """Now and then so many come just then that a further one has to wait for a slot."""
        if self._for_crowds.chance(0.3):
            for _ in range(self._world.config.slots):
                self.submit("one of many")
            self.wait_slot()

    def _checked(
        self, future: WorkerFuture[Any], check: Callable[[Any], object]
    ) -> WorkerFuture[Any]:
        """Its answer is looked at as soon as there is one."""

        def resolved() -> None:
            with suppress(WorkerStopError, WorkerClosed):
                check(future.get(timeout=0))

        future._add_waker(resolved)
        return future

    def quick(self, future: WorkerFuture[Any], what: str) -> WorkerFuture[Any]:
        """A call that waits for nothing."""
        self._invariants.expect_answer(future, QUICK_S, what)
        return future

    def submit(self, job_name: str) -> WorkerFuture[Any]:
        """`submit()`; a refusal must be true at the instant it is given."""
        has_image = self._for_images.chance(0.1) and self._world.build.takes_media
        prompt = IMAGE if has_image else "hello"
        future = self.quick(self._world.worker.submit(job_name, "", prompt), "submit()")
        return self._checked(
            future, lambda answer: self._invariants.admission_answered(answer.get("error"))
        )

    def result(self, request_id: int) -> WorkerFuture[Any]:
        """`result()`, which resolves soon after the request has ended."""
        future = self._world.worker.result(request_id)
        self._invariants.awaits_result(request_id, future)
        return future

    def close(self) -> None:
        """`close()`, which blocks this thread and must return in good time."""
        self._invariants.stop_called_at = self._scheduler.host_time
        elapsed_s = self._scheduler.stopwatch()
        self._world.worker.close()
        took_s = elapsed_s()
        if took_s > self.stop_bound_s + 5.0:
            raise Promise.ANSWERS(f"close() took {took_s:.1f} s")

    # ------------------------------------------------------------ plans

    def keep_running(self, *, stops_every_s: float) -> Plan:
        """Starts the worker, again where it failed; stops it now and then if it likes."""
        dice = self._dice
        while not self.is_leaving:
            future = self.start()
            if dice.chance(0.2):
                self.start()  # twice
            if dice.chance(0.03):
                yield dice.log_between(0.001, 30.0)
                self.stop()  # in the middle of it
            try:
                yield future
            except WorkerStartError:
                yield dice.log_between(0.1, 0.1 * stops_every_s)
                continue
            pause_s = dice.waiting_time(stops_every_s)
            waited_s = 0.0
            while waited_s < pause_s and not self.is_leaving:
                step_s = min(pause_s - waited_s, 600.0)
                yield step_s
                waited_s += step_s
                if self._invariants.state in (WorkerState.FAILED, WorkerState.STOPPED):
                    break
            else:
                if not self.is_leaving:
                    yield from self._stop_now_and_then()

    def _stop_now_and_then(self) -> Plan:
        dice = self._dice
        future = self.stop()
        if dice.chance(0.3):
            self.stop()
        if dice.chance(0.3):
            yield dice.log_between(0.001, 5.0)
            self.start()  # while it stops
        with suppress(WorkerStopError):
            yield future
        yield dice.log_between(0.001, 600.0)

    def swapper(self, dice: Dice, *, every_s: float) -> Plan:
        """Drains the worker, restarts it, or takes the next slot that is free."""
        while True:
            yield dice.waiting_time(every_s)
            if self.is_leaving:
                return
            yield from dice.choice((self._swap, self._restart, self._take_next_slot, self._count))(
                dice
            )

    def _swap(self, dice: Dice) -> Plan:
        future = self.drain()
        if dice.chance(0.2):
            self.drain()
        if dice.chance(0.3):
            yield dice.log_between(0.001, 60.0)
            dice.choice((self.start, self.stop, self.restart))()  # while it drains
        with suppress(WorkerStopError):
            yield future
        yield dice.log_between(0.001, 60.0)

    def _restart(self, dice: Dice) -> Plan:
        future = self.restart()
        if dice.chance(0.2):
            yield dice.log_between(0.001, 60.0)
            dice.choice((self.restart, self.drain, self.stop))()
        with suppress(WorkerStartError):
            yield future

    def _count(self, dice: Dice) -> Plan:
        future = self._world.worker.count_tokens("", "hello")
        self._invariants.expect_answer(future, COUNT_S + QUICK_S, "count_tokens()")
        with suppress(LlamaWorkerError):
            yield future

    def _take_next_slot(self, dice: Dice) -> Plan:
        """A request whose result nobody wants."""
        try:
            yield self.wait_slot()
        except RequestRefused:
            return
        answer = yield self.submit("unwanted")
        if not answer["ok"]:
            return  # somebody was first
        request_id = answer["request_id"]
        truth = self._invariants.requests[request_id]
        while True:
            yield dice.log_between(0.1, 60.0)
            had_ended = truth.ended_at is not None
            may_be_gone = self._may_be_gone(request_id)
            released = yield self.quick(self._world.worker.release(request_id), "release()")
            if released:
                break
            if self._may_be_gone(request_id):
                return
            if had_ended and not may_be_gone:
                what = f"release({request_id}) is False, and the request had ended"
                raise Promise.ENDS_ONCE(what)
        if truth.ended_at is None:
            raise Promise.ENDS_ONCE(f"release({request_id}) is True, and the request runs")
        yield from self._is_gone(request_id, "it was released")

    def client(self, *, every_s: float) -> Plan:
        """Submits one request after the other and follows each in one of several ways."""
        dice = self._dice
        while True:
            yield dice.waiting_time(every_s)
            if self.is_leaving:
                return
            if dice.chance(0.15):
                yield from self._ask()
                continue
            answer = yield self.submit(f"job-{dice.below(50)}")
            if not answer["ok"]:
                self.outcomes[str(answer["error"])] += 1
                continue
            request_id = answer["request_id"]
            if request_id not in self._invariants.requests:
                raise Promise.ENDS_ONCE(f"request {request_id} was admitted and holds no slot")
            follow = dice.weighted(
                {
                    self._await: 4.0,
                    self._poll: 1.0,
                    self._read: 2.0,
                    self._cancel: 1.0,
                    self._forget: 0.5,
                }
            )
            yield from follow(request_id)

    def short_ones(self, dice: Dice) -> Plan:
        """Short requests, one after the other, as long as a longer one is in flight."""
        while not self.is_leaving:
            if all(self._world.job_of(each) in ("", SHORT) for each in self._invariants.active):
                yield 10.0
                continue
            answer = yield self.submit(SHORT)
            if answer["ok"]:
                self.run(self._await(answer["request_id"]))
            yield dice.log_between(0.1, 20.0)

    def proxied_client(self, dice: Dice, *, every_s: float) -> Plan:
        """Has one response after the other made by a proxy around the worker."""
        number = 0
        while True:
            yield dice.waiting_time(every_s)
            if self.is_leaving:
                return
            number += 1
            client = ProxiedClient(
                self._world,
                number,
                self._for_images.chance(0.1) and self._world.build.takes_media,
                in_one_piece=not self._world.setting.is_early and self._for_crowds.chance(0.3),
            )
            answer = yield self._checked(
                self.quick(client.ask(), "a lease"),
                lambda answer: self._invariants.admission_answered(answer.get("error")),
            )
            if not answer["ok"]:
                client.end()
                self.outcomes[str(answer["error"])] += 1
                continue
            yield from self._serve_client(client, dice)

    def _serve_client(self, client: ProxiedClient, dice: Dice) -> Plan:
        exchange, truth = client.exchange, self._invariants.requests[client.exchange.request_id]
        try:
            client.open()
        except RuntimeError:  # the machine has no thread left
            truth.canceled = True
            client.end()
            return

        def leaves() -> None:
            if not client.closed.done():
                truth.canceled = True
                client.abort.abort()

        if dice.chance(0.15):
            self._scheduler.after(dice.log_between(0.001, 120.0), leaves, "host")
        failure = (yield client.closed).failure
        if exchange.record_closed(failure):
            client.end()
            while truth.ended_at is None:
                yield 0.05
        told = exchange.failure_for_client(failure)
        client.end()
        what = f"the slot of {exchange.request_id}, whose client was served"
        self._invariants.expect(
            Promise.WATCHES_CLIENTS, QUICK_S, what, lambda: truth.ended_at is not None
        )
        while truth.ended_at is None:
            yield 0.05
        assert truth.record is not None
        reason = truth.record.result["fail_reason"]
        self.outcomes[str(reason or truth.record.result["finish_reason"])] += 1
        may_differ = truth.canceled or client.has_finish
        if told is not None and not may_differ and told.reason is not reason:
            what = f"the client was told {told.reason}, the record says {reason}"
            raise Promise.WATCHES_CLIENTS(what)

    def _took(self, request_id: int, result: Any) -> None:
        if result["ok"]:
            self._invariants.took_result(request_id, result)
            self.outcomes[str(result.get("fail_reason") or result["finish_reason"])] += 1

    def _may_be_gone(self, request_id: int) -> bool:
        """Whether an unclaimed result is as old as it may get."""
        ended_at = self._invariants.requests[request_id].ended_at
        ttl_s = self._result_ttl_s
        return (
            ttl_s is not None
            and ended_at is not None
            and self._scheduler.host_time - ended_at >= ttl_s
        )

    def _await(self, request_id: int) -> Plan:
        future = self.result(request_id)
        also = self.result(request_id) if self._dice.chance(0.1) else None
        result = yield future
        if self._invariants.requests[request_id].ended_at is None:
            raise Promise.ENDS_ONCE(f"result({request_id}) resolved before the request had ended")
        self._took(request_id, result)
        if also is not None:
            self._took(request_id, (yield also))
        yield 2.0
        yield from self._is_gone(request_id, "its result was taken")

    def _is_gone(self, request_id: int, since: str) -> Plan:
        gone = yield self.quick(self._world.worker.get_result(request_id), "get_result()")
        if gone.get("error") != "NOT_FOUND":
            raise Promise.ENDS_ONCE(f"request {request_id} is still there after {since}")

    def _ask(self) -> Plan:
        """`submit` and `result` in one; its future must be resolved once the worker is at rest."""
        future = self._world.worker.ask("hello", job_name=f"job-{self._dice.below(50)}")
        self.asked.append(future)
        try:
            result = yield future
        except RequestRefused as refused:
            self.outcomes[refused.error] += 1
            return
        except RequestFailed as failed:
            result = failed.result
            if result["state"] is RequestState.COMPLETED:
                what = f"ask() raised, and completed: {result}"
                raise Promise.SHOWS_FAILURES(what) from failed
        self._took(result["request_id"], result)
        yield from self._is_gone(result["request_id"], "ask() resolved")

    def _poll(self, request_id: int) -> Plan:
        while True:
            yield self._dice.log_between(0.1, 60.0)
            result = yield self.quick(self._world.worker.get_result(request_id), "get_result()")
            if result["ok"]:
                self._took(request_id, result)
                return
            if result["error"] == "NOT_FOUND":
                if self._may_be_gone(request_id):
                    return
                raise Promise.ENDS_ONCE(f"request {request_id} is gone, and nobody took its result")

    def _read(self, request_id: int) -> Plan:
        text, reasoning, done = "", "", False
        while not done:
            yield self._dice.log_between(0.05, 30.0)
            status = self.quick(self._world.worker.get_status(request_id), "get_status()")
            waits = self._dice.chance(0.5)
            future: WorkerFuture[Any] = self._world.worker.read_output(
                request_id, text_offset=len(text), reasoning_offset=len(reasoning), wait=waits
            )
            if waits:
                self._invariants.awaits_result(request_id, future)
            else:
                self.quick(future, "read_output()")
            yield status
            chunk = yield future
            if not chunk["ok"]:
                if self._may_be_gone(request_id):
                    return
                raise Promise.ENDS_ONCE(f"request {request_id} is gone, and nobody took its result")
            text, reasoning, done = (
                text + chunk["text"],
                reasoning + chunk["reasoning"],
                chunk["done"],
            )
            if len(text) != chunk["text_offset"]:
                what = f"request {request_id}: text_offset {chunk['text_offset']}, {len(text)} read"
                raise Promise.KEEPS_OUTPUT(what)
        result = yield self.result(request_id)
        self._took(request_id, result)
        if not result["ok"] and self._may_be_gone(request_id):
            return
        if (result["text"], result["reasoning"]) != (text, reasoning):
            what = f"request {request_id}: what was read differs from the result"
            raise Promise.KEEPS_OUTPUT(what)

    def _cancel(self, request_id: int) -> Plan:
        yield self._dice.log_between(0.001, 120.0)
        truth = self._invariants.requests[request_id]
        truth.canceled = True
        future = self.quick(self._world.worker.cancel(request_id), "cancel()")
        twice = (
            self.quick(self._world.worker.cancel(request_id), "cancel()")
            if self._dice.chance(0.3)
            else None
        )
        was_canceled = yield future
        if twice is not None:
            yield twice
        result = yield self.result(request_id)
        self._took(request_id, result)
        if result["ok"] and was_canceled and result["state"] is not RequestState.CANCELED:
            raise Promise.ENDS_ONCE(f"cancel({request_id}) said True: {result['state']}")

    def _forget(self, request_id: int) -> Plan:
        """The result is kept for ever, or as long as the configuration says."""
        yield 0.001
        if self._result_ttl_s is None:
            return
        truth = self._invariants.requests[request_id]
        while truth.ended_at is None:
            if self.is_leaving:
                return
            yield 60.0
        gone_at = truth.ended_at + self._result_ttl_s + QUICK_S
        while (left_s := gone_at - self._scheduler.host_time) > 0.0:  # the worker, too, has to run
            yield max(left_s, QUICK_S)
        yield from self._is_gone(request_id, f"result_ttl_s {self._result_ttl_s:.0f}")

    def _cancel_anything(self) -> WorkerFuture[Any]:
        request_id = self._dice.below(1000)
        self._invariants.canceled_ids.add(request_id)
        if request_id in self._invariants.requests:
            self._invariants.requests[request_id].canceled = True
        return self._world.worker.cancel(request_id)

    def meddler(self, *, every_s: float) -> Plan:
        """Asks at odd moments for odd things."""
        dice, worker = self._dice, self._world.worker
        calls: list[tuple[str, Callable[[], WorkerFuture[Any]]]] = [
            ("get_worker_status()", worker.get_worker_status),
            ("get_debug_info()", worker.get_debug_info),
            ("cancel()", self._cancel_anything),
            ("get_result()", lambda: worker.get_result(10_000 + dice.below(1000))),
            ("get_status()", lambda: worker.get_status(dice.below(1000))),
            (
                "read_output()",
                lambda: worker.read_output(dice.below(1000), text_offset=dice.below(100000)),
            ),
        ]
        while True:
            yield dice.waiting_time(every_s)
            if self.is_leaving:
                return
            what, call = dice.choice(calls)
            answer = yield self.quick(call(), what)
            if what == "get_worker_status()" and answer["slots_used"] != len(
                answer["active_request_ids"]
            ):
                what = f"slots_used {answer['slots_used']}: {answer['active_request_ids']}"
                raise Promise.ENDS_ONCE(what)
