"""One thread, a virtual clock: which mailbox is served next, and when what else happens.

Actors are Pykka's, without threads: the scheduler hands one of them its oldest message, then
chooses again. An actor may be preempted in the middle of a handler: what it tells from that point
on reaches the mailboxes only when it is resumed. The clock moves only when nothing is left to do at
the present instant.

Two kinds of event: the *host's* (timers, threads, what a program calls) wait while the host does
not run; the *world's* (the server) go on.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llama_worker.actors.base import Child
from llama_worker.clock import PAUSE_AFTER_GAP_S, ClockTimer, PausingClock
from llama_worker.mailbox import Tick
from tests.simulation.promises import Promise, Violation
from tests.simulation.trace import Trace

_LATEST_TIMER_S = 0.8


@dataclass
class Choices:
    """What decides where reality leaves the order open: drawn from a generator, with the rates of
    one run."""

    random: Callable[[], float]
    preempts: float
    sleeps: float
    late: float

    def pick(self, count: int) -> int:
        """Which of `count` (2 or more) things is next."""
        return int(self.random() * count)

    def preempt_after(self) -> float:
        """How many messages a handler sends before it is preempted."""
        return int(self.random() * 3) if self._happens(self.preempts) else math.inf

    def wake_delay_s(self) -> float:
        """How long an actor with a new message waits for its thread to run."""
        # 0.1 ms to 0.5 s
        return 0.0001 * 5000.0 ** self.random() if self._happens(self.sleeps) else 0.0

    def timer_delay_s(self) -> float:
        """How late a timer fires."""
        longest = _LATEST_TIMER_S / 0.001
        return 0.001 * longest ** self.random() if self._happens(self.late) else 0.0

    def _happens(self, rate: float) -> bool:
        return rate > 0.0 and self.random() < rate


@dataclass(eq=False, slots=True)
class Event:
    """Something that will happen. `cancel` is idempotent."""

    at: float
    call: Callable[[], object] | None
    what: str
    of_host: bool

    def cancel(self) -> None:
        self.call = None


@dataclass(eq=False, slots=True)
class SimulatedActor:
    """One actor with its mailbox; `put`, `get` and `empty` are what Pykka knows as the actor's
    inbox."""

    scheduler: Scheduler
    actor: Any
    name: str
    inbox: deque[Any] = field(default_factory=deque)
    # what it has told since it was preempted
    held: deque[Callable[[], object]] = field(default_factory=deque)
    is_ready: bool = False
    is_blocked: bool = False  # in a handler

    def put(self, envelope: Any) -> None:
        self.scheduler.told(self, envelope)

    def get(self) -> Any:
        return self.inbox.popleft()

    def empty(self) -> bool:
        return not self.inbox


class Scheduler:
    def __init__(self, choices: Choices, trace: Trace, now: float) -> None:
        self.now = now
        self.trace = trace
        self.messages_count = 0
        self.actors: list[SimulatedActor] = []  # those that live
        self.before_message: Callable[[SimulatedActor, Any], object] = lambda actor, message: None
        self.after_message: Callable[[SimulatedActor, Any], object] = lambda actor, message: None
        self.on_told: Callable[[Any], object] = lambda message: None
        self._choices = choices
        self._heap: list[tuple[float, int, Event]] = []
        self._due: list[Event] = []
        self._ready: list[SimulatedActor] = []
        self.serving: SimulatedActor | None = None  # whose handler runs
        self._sends_left = math.inf
        self._events_count = 0
        self._starts: dict[str, int] = {}
        self._breaks: set[str] = set()
        self._clock = PausingClock()  # of the host
        self._timers: list[ClockTimer] = []
        self._alarm: Event | None = None  # when its timer thread runs next
        self._alarm_due_at = math.inf  # when that is meant to be
        self.halted_until = now  # the host does not run before
        self._ran_before_s = 0.0  # the host, before the last halt
        self._most_lost_s = 0.0  # what halts explain

    # ------------------------------------------------------------ time

    @property
    def host_time(self) -> float:
        """What the host's clock shows: the time without that in which the host did not run."""
        return self._clock.now(self.now)

    @property
    def _ran_s(self) -> float:
        return self._ran_before_s + max(0.0, self.now - self.halted_until)

    def stopwatch(self) -> Callable[[], float]:
        """How long the host has run since then, and its clock, which learns of a halt only behind
        it: the shorter of both."""
        clock, ran_s = self.host_time, self._ran_s
        return lambda: min(self.host_time - clock, self._ran_s - ran_s)

    @property
    def lost_s(self) -> float:
        """By how much that is behind."""
        return self._clock.lost_s

    def at(
        self, when: float, call: Callable[[], object], what: str, *, of_host: bool = True
    ) -> Event:
        """Make the call at `when`, or now if that is past."""
        event = Event(when, call, what, of_host)
        self._push(when if when > self.now else self.now, event)
        return event

    def _push(self, when: float, event: Event) -> None:
        self._events_count += 1
        heapq.heappush(self._heap, (when, self._events_count, event))

    def after(
        self, seconds: float, call: Callable[[], object], what: str, *, of_host: bool = True
    ) -> Event:
        return self.at(self.now + seconds, call, what, of_host=of_host)

    def timer(self, at: float, call: Callable[[], object]) -> ClockTimer:
        """A timer of the host's clock; it may be late, never early."""
        timer = self._clock.call_at(at, call, self.now)
        self._timers = [*self.waiting_timers, timer]
        self._set_alarm()
        return timer

    @property
    def waiting_timers(self) -> list[ClockTimer]:
        """Those that somebody waits for."""
        return [timer for timer in self._timers if not timer.is_cancelled]

    def _set_alarm(self) -> None:
        """The timer thread wakes for its first timer."""
        due_at = self._clock.wakes_at
        if due_at is None or due_at >= self._alarm_due_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_due_at = due_at
        delay_s = self._choices.timer_delay_s()
        self._alarm = self.at(max(due_at, self.now) + delay_s, self._fire, "timer")

    def _fire(self) -> None:
        self._alarm, self._alarm_due_at = None, math.inf
        while (timer := self._clock.due(self.now)) is not None:
            timer.fire()
        if self.lost_s > self._most_lost_s:
            raise Promise.HUNG_OR_SLOW(f"the clock has lost {self.lost_s:.1f} s")
        self._set_alarm()

    def halt_host(self, seconds: float) -> None:
        """The host does not run for so long: no actor, no thread, no timer of it."""
        if self.now >= self.halted_until:
            self._ran_before_s = self._ran_s
        until = max(self.halted_until, self.now) + seconds
        self._most_lost_s += seconds + PAUSE_AFTER_GAP_S + 2 * _LATEST_TIMER_S
        self.halted_until = until
        self.at(until, lambda: None, "the host runs again", of_host=False)

    @property
    def host_is_halted(self) -> bool:
        return self.now < self.halted_until

    # ------------------------------------------------------------ actors

    def start_actor(self, actor: Any) -> None:
        """Serve the actor's mailbox from now on."""
        slot = actor.member.slot if isinstance(actor, Child) else None
        role = actor.role if slot is None else f"{actor.role}[{slot}]"
        number = self._starts[role] = self._starts.get(role, 0) + 1
        simulated = SimulatedActor(self, actor, role if number == 1 else f"{role}#{number}")
        told_before, actor.actor_inbox = actor.actor_inbox, simulated
        actor.actor_ref.actor_inbox = simulated
        self.actors.append(simulated)
        while not told_before.empty():
            simulated.put(told_before.get())

    def told(self, receiver: SimulatedActor, envelope: Any) -> None:
        """Put the message into the mailbox, or keep it while its sender is preempted."""
        self.on_told(envelope.message)
        if self._sends_left > 0:
            self._put(receiver, envelope)
            self._sends_left -= 1
        else:
            self._hold(partial(self._put, receiver, envelope))

    def wake_host(self, call: Callable[[], object]) -> None:
        """A future was answered: a thread of the host's goes on, after what the actor had told
        before."""
        goes_on = partial(self.after, 0.0, call, "host")
        if self._sends_left > 0:
            goes_on()
        else:
            self._hold(goes_on)

    def _hold(self, act: Callable[[], object]) -> None:
        """Until the actor that does it, and is preempted, is resumed."""
        assert self.serving is not None
        self.serving.held.append(act)

    def _put(self, receiver: SimulatedActor, envelope: Any) -> None:
        receiver.inbox.append(envelope)
        if not receiver.is_ready and not receiver.is_blocked:
            receiver.is_ready = True
            delay_s = self._choices.wake_delay_s()
            if delay_s:
                wakes = partial(self._wakes, receiver)
                self.after(delay_s, wakes, f"{receiver.name} wakes late")
            else:
                self._ready.append(receiver)

    def _wakes(self, simulated: SimulatedActor) -> None:
        """It may have been blocked, unblocked and served since it was to wake."""
        has_work = bool(simulated.inbox or simulated.held)
        if has_work and not simulated.is_blocked and simulated not in self._ready:
            self._ready.append(simulated)

    def block_actor(self, simulated: SimulatedActor) -> None:
        """A handler of it does not return: it takes nothing from its mailbox."""
        simulated.is_blocked, simulated.is_ready = True, False
        if simulated in self._ready:
            self._ready.remove(simulated)

    def unblock_actor(self, simulated: SimulatedActor) -> None:
        """The handler returns after all, unless it has returned before."""
        if not simulated.is_blocked:
            return
        simulated.is_blocked = False
        simulated.is_ready = bool(simulated.inbox or simulated.held)
        if simulated.is_ready:
            self._wakes(simulated)

    def break_actor(self, simulated: SimulatedActor) -> None:
        """It raises at its next message; there will be one."""
        self._breaks.add(simulated.name)
        simulated.actor.actor_ref.tell(Tick())

    # ------------------------------------------------------------ steps

    def step(self, deadline: float = math.inf) -> bool:
        """One message or one event; False where nothing happens any more until `deadline`."""
        heap, due, ready = self._heap, self._due, self._ready
        while True:
            now = self.now
            while heap and heap[0][0] <= now:
                event = heapq.heappop(heap)[2]
                if event.call is None:
                    continue
                if event.of_host and now < self.halted_until:
                    self._push(self.halted_until, event)
                else:
                    due.append(event)
            ready_count = 0 if now < self.halted_until else len(ready)
            count = ready_count + len(due)
            if not count:
                while heap and heap[0][2].call is None:
                    heapq.heappop(heap)
                if not heap or heap[0][0] > deadline:
                    return False
                self.now = heap[0][0]
                continue
            chosen = self._choices.pick(count) if count > 1 else 0
            if chosen < ready_count:
                self._serve(ready[chosen])
                return True
            event = due.pop(chosen - ready_count)
            if event.call is None:
                continue
            if event.of_host and now < self.halted_until:  # halted since it came due
                self._push(self.halted_until, event)
                continue
            self.trace.event(now, event.what)
            event.call()
            return True

    def run_until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Steps until `done`, or until the clock would pass `deadline`; whether it was done."""
        step = self.step
        while not done():
            if not step(deadline):
                self.now = max(self.now, deadline)
                return done()
        return True

    def run_for(self, seconds: float) -> None:
        """Steps until the clock would pass so many seconds."""
        self.run_until(lambda: False, self.now + seconds)

    def forget(self) -> None:
        """Nothing more happens, and nobody is kept alive by what would have."""
        self._heap.clear()
        self._due.clear()

    def _serve(self, simulated: SimulatedActor) -> None:
        """Resume the actor if it was preempted, else hand it its oldest message."""
        if simulated.held:
            simulated.held.popleft()()
            self._requeue(simulated)
            return
        actor, message = simulated.actor, simulated.inbox.popleft().message
        self.messages_count += 1
        self.trace.message(self.now, simulated.name, message)
        before, self.serving = self.serving, simulated
        self._sends_left = self._choices.preempt_after()
        try:
            if simulated.name in self._breaks:
                self._breaks.remove(simulated.name)
                raise RuntimeError("planted in the actor")
            self.before_message(simulated, message)
            actor._handle_receive(message)
        except Violation:
            raise
        except Exception:
            actor.on_failure(*sys.exc_info())
        finally:
            self.serving, self._sends_left = before, math.inf
        self._requeue(simulated)
        self.after_message(simulated, message)

    def _requeue(self, simulated: SimulatedActor) -> None:
        """Whether the actor has more to do, after a step of it."""
        if simulated.held:
            return
        has_stopped = simulated.actor.actor_stopped.is_set()
        if simulated.inbox and not has_stopped:
            return
        self._ready.remove(simulated)
        simulated.is_ready = has_stopped  # if so, nobody puts it among the ready ones any more
        if has_stopped:
            simulated.inbox.clear()
            self.actors.remove(simulated)
