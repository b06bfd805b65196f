"""The worker's state machine against a model of its surroundings: a process that may do anything at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llama_worker.errors import WorkerStartError
from llama_worker.messages import Abandon, CloseAllStreams, Launch, Start, Terminate
from llama_worker.profiles import RestartPolicy
from llama_worker.server.lifecycle import CLOSING_S, Lifecycle, request_completed
from llama_worker.server.lifecycle_states import (
    BackingOff,
    Effect,
    Effects,
    Ending,
    Failed,
    Launching,
    Ready,
    RecordRestart,
    Resolve,
    Stopped,
    ToStopped,
)
from llama_worker.types import RequestFailReason, StartFailReason, WorkerState
from tests import lives

LEAVES_STOPPED = (StartFailReason.PORT_IN_USE, StartFailReason.STOPPED)
PUBLIC_STEPS = {
    (WorkerState.STOPPED, WorkerState.RUNNING),
    (WorkerState.RUNNING, WorkerState.READY),
    (WorkerState.RUNNING, WorkerState.FAILED),
    (WorkerState.RUNNING, WorkerState.STOPPED),
    (WorkerState.READY, WorkerState.RUNNING),
    (WorkerState.READY, WorkerState.FAILED),  # a restart that is refused
    (WorkerState.FAILED, WorkerState.RUNNING),
    (WorkerState.FAILED, WorkerState.STOPPED),
}
POLICIES = st.builds(
    RestartPolicy,
    restart_backoff_s=st.sampled_from([0.0, 1.0, 5.0]),
    backoff_factor=st.sampled_from([1.0, 2.0]),
    backoff_max_s=st.sampled_from([0.0, 8.0, 60.0]),
    restart_window_s=st.sampled_from([10.0, 120.0]),
    max_restarts_per_window=st.integers(0, 3),
    stable_after_s=st.sampled_from([0.0, 20.0, 600.0]),
)
SECONDS = st.sampled_from([0.0, 0.1, 0.9, 1.0, 4.0, 9.9, 10.0, 30.0, 130.0])
GRACES = st.sampled_from([0.0, 2.0, 10.0])
BAD_STARTS = st.sampled_from([StartFailReason.STARTUP_TIMEOUT, StartFailReason.PORT_IN_USE])


@dataclass(slots=True)
class Process:
    """The server as it really is."""

    epoch: int
    told_to_end: bool = False
    dead: bool = False  # the first process, and we were told


class WorkerLife(RuleBasedStateMachine):
    """Carries the effects out as the WorkerActor does, and keeps books of its own."""

    @initialize(policy=POLICIES)
    def construct(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.now = 1000.0
        self.life = Lifecycle(policy=policy)
        self.process: Process | None = None
        self.launches_count = 0
        self.requests: set[int] = set()
        self.requests_count = 0
        self.starts_waiting = 0
        self.stops_waiting = 0
        self.connections_open = False
        self.closing_since: float | None = None
        self.grace_allowed = 0.0
        self.start_failed: StartFailReason | None = None  # and nobody has stopped it since
        self.stuck = False  # the process outlives SIGKILL
        # The books of restarts, by the words of the contract.
        self.restarts_count = 0
        self.restarts_at: list[float] = []
        self.row_count = 0
        self.ready_since: float | None = None
        self.longest_ready_s = 0.0
        self.next_launch_at: float | None = None

    # ------------------------------------------------------------ the host

    @rule()
    def start(self) -> None:
        before = self.life.state
        self.starts_waiting += 1
        if isinstance(before, (Stopped, Failed)):
            self.forget_restarts()
        self.take(lives.start(self.life, self.now))
        if isinstance(before, Ready):
            assert self.life.state == before

    @rule(grace_s=GRACES)
    def stop(self, grace_s: float) -> None:
        before = self.life.state
        self.stops_waiting += 1
        self.start_failed = None
        fresh = isinstance(before, (Ready, Launching))
        self.grace_allowed = grace_s if fresh else min(self.grace_allowed, grace_s)
        if fresh:
            self.closing_since = self.now
        self.take(lives.stop(self.life, self.now, grace_s=grace_s))
        if isinstance(before, (Stopped, Failed, BackingOff)):
            assert self.life.state == Stopped()  # a backoff never delays it
        else:
            assert isinstance(self.life.state, Ending)
            assert self.life.state.goal == ToStopped()

    @precondition(lambda self: self.life.public_state is WorkerState.READY)
    @rule()
    def admit(self) -> None:
        self.requests_count += 1
        self.requests.add(self.requests_count)
        self.connections_open = True

    @precondition(lambda self: self.requests)
    @rule()
    def complete(self) -> None:
        self.requests.pop()
        self.life = request_completed(self.life, self.now)
        self.row_count = 0

    # ------------------------------------------------------------ whole stories

    @rule(
        serves_s=SECONDS,
        completes=st.booleans(),
        killed=st.booleans(),
        announced=st.booleans(),
        recovers=st.booleans(),
    )
    def serve_and_fall(self, serves_s: float, completes: bool, killed: bool, announced: bool, recovers: bool) -> None:
        """A server that becomes ready, works for a while, and dies or is given up."""
        if isinstance(self.life.state, (Stopped, Failed)):
            self.start()
        if isinstance(self.life.state, Launching):
            self.become_ready()
        if completes and isinstance(self.life.state, Ready):
            self.admit()
            self.complete()
        self.pass_time(serves_s)
        if killed:
            self.get_into_trouble()
            self.check()
        if announced and self.process is not None and not self.process.dead:
            self.die(1)
            self.check()
        if self.process is not None:
            self.exit(False, 1)
            self.check()
        if recovers and isinstance(self.life.state, BackingOff):
            self.pass_time(self.life.state.resume_at - self.now)
            self.check()

    def check(self) -> None:
        """The invariants, in the middle of a story."""
        self.a_process_is_there_when_the_state_says_so()
        self.requests_run_only_while_ready()
        self.nobody_waits_for_what_will_not_come()
        self.what_ends_was_told_to_end_or_will_be_within_a_second()
        self.restarts_are_counted_for_ever()

    # ------------------------------------------------------------ the server and its watchers

    @precondition(lambda self: self.process is not None and not self.process.dead)
    @rule(returncode=st.sampled_from([0, 1, -9]))
    def die(self, returncode: int) -> None:
        assert self.process is not None
        self.process.dead = True
        self.take(lives.died(self.life, self.now, returncode, epoch=self.process.epoch))
        assert not self.requests
        assert self.life.public_state is not WorkerState.READY

    @precondition(lambda self: self.process is not None)
    @rule(port_taken=st.booleans(), returncode=st.sampled_from([0, 1, -9, None]))
    def exit(self, port_taken: bool, returncode: int | None) -> None:
        assert self.process is not None
        epoch, self.process = self.process.epoch, None
        first = isinstance(self.life.state, Launching) and self.life.state.first
        self.take(lives.exited(self.life, self.now, returncode, epoch=epoch, port_taken=port_taken))
        assert not (first and isinstance(self.life.state, BackingOff)), "the first launch is not retried"
        if self.start_failed is not None:
            assert self.starts_waiting == 0
            assert self.process is None
            self.start_failed = None

    @precondition(lambda self: self.process is not None)
    @rule(reason=st.sampled_from([StartFailReason.SPAWN_FAILED, StartFailReason.PORT_IN_USE]))
    def fail_to_launch(self, reason: StartFailReason) -> None:
        assert self.process is not None
        if isinstance(self.life.state, Ready):
            return  # it has a process
        epoch, self.process = self.process.epoch, None
        self.take(lives.launch_failed(self.life, self.now, reason, epoch=epoch))
        self.start_failed = None  # its process is gone without an exit

    @precondition(lambda self: self.process is not None)
    @rule()
    def become_ready(self) -> None:
        assert self.process is not None
        launching = isinstance(self.life.state, Launching)
        if launching:
            self.ready_since = self.now
        self.take(lives.became_ready(self.life, self.now, epoch=self.process.epoch))
        assert not launching or self.life.public_state is WorkerState.READY

    @precondition(lambda self: self.process is not None)
    @rule(reason=BAD_STARTS, another=st.booleans())
    def fail_to_start(self, reason: StartFailReason, another: bool) -> None:
        assert self.process is not None
        if isinstance(self.life.state, Launching) and self.life.state.first:
            self.start_failed = reason
        self.take(lives.startup_failed(self.life, self.now, reason, epoch=self.process.epoch))
        if another:
            self.start()  # it shares the outcome

    @rule()
    def get_into_trouble(self) -> None:
        self.take(lives.trouble(self.life, self.now))

    @precondition(lambda self: self.process is not None and self.process.told_to_end)
    @rule()
    def outlive_sigkill(self) -> None:
        assert self.process is not None
        self.take(lives.unkillable(self.life, self.now, epoch=self.process.epoch))
        assert self.life.public_state is WorkerState.FAILED
        assert self.starts_waiting == self.stops_waiting == 0
        self.stuck = True

    @precondition(lambda self: self.closing_since is not None)
    @rule()
    def close_connections(self) -> None:
        self.connections_open = False
        self.take(lives.streams_closed(self.life, self.now, epoch=self.life.epoch))

    @precondition(lambda self: self.life.epoch > 1)
    @rule(back=st.integers(1, 3), which=st.integers(0, 6))
    def hear_old_news(self, back: int, which: int) -> None:
        """Of a launch that is over."""
        life, now, epoch = self.life, self.now, self.life.epoch - back
        timeout = StartFailReason.STARTUP_TIMEOUT
        news: list[Callable[[], tuple[Lifecycle, Effects]]] = [
            lambda: lives.became_ready(life, now, epoch=epoch),
            lambda: lives.exited(life, now, 0, epoch=epoch, port_taken=True),
            lambda: lives.died(life, now, 0, epoch=epoch),
            lambda: lives.startup_failed(life, now, timeout, epoch=epoch),
            lambda: lives.launch_failed(life, now, StartFailReason.SPAWN_FAILED, epoch=epoch),
            lambda: lives.streams_closed(life, now, epoch=epoch),
            lambda: lives.unkillable(life, now, epoch=epoch),
        ]
        assert news[which]() == (life, ())

    # ------------------------------------------------------------ time

    @rule(seconds=SECONDS)
    def pass_time(self, seconds: float) -> None:
        """A timer fires when it is due, and not much later."""
        end = self.now + seconds
        while self.life.deadline is not None and self.life.deadline <= end:
            self.now = max(self.now, self.life.deadline)
            self.tick()
        self.now = end

    @precondition(lambda self: self.life.deadline is None or self.life.deadline > self.now)
    @rule()
    def tick_early(self) -> None:
        assert lives.tick(self.life, self.now) == (self.life, ())

    def tick(self) -> None:
        before = self.life
        self.take(lives.tick(self.life, self.now))
        assert self.life != before, "a deadline that does nothing would come again and again"

    # ------------------------------------------------------------ what must hold

    @invariant()
    def a_process_is_there_when_the_state_says_so(self) -> None:
        match self.life.state:
            case Stopped() | Failed() | BackingOff():
                assert self.process is None
            case Launching(epoch=epoch) | Ready(epoch=epoch) | Ending(epoch=epoch):
                assert self.process is not None
                assert self.process.epoch == epoch == self.life.epoch
            case _:
                assert_never(self.life.state)

    @invariant()
    def requests_run_only_while_ready(self) -> None:
        assert not self.requests or self.life.public_state is WorkerState.READY

    @invariant()
    def nobody_waits_for_what_will_not_come(self) -> None:
        if self.life.public_state is not WorkerState.RUNNING:
            assert self.starts_waiting == 0
        ending = isinstance(self.life.state, Ending) and isinstance(self.life.state.goal, ToStopped)
        assert ending or self.stops_waiting == 0

    @invariant()
    def what_ends_was_told_to_end_or_will_be_within_a_second(self) -> None:
        if isinstance(self.life.state, Ending) and self.process is not None and not self.process.told_to_end:
            assert self.life.deadline is not None
            assert self.life.deadline <= self.now + CLOSING_S
        if isinstance(self.life.state, BackingOff):
            assert self.life.deadline is not None

    @invariant()
    def what_outlives_sigkill_is_failed_and_keeps_nobody_waiting(self) -> None:
        if self.stuck and self.process is not None:
            assert self.life.public_state is WorkerState.FAILED
            assert self.life.deadline is None
            assert self.starts_waiting == self.stops_waiting == 0

    @invariant()
    def restarts_are_counted_for_ever(self) -> None:
        assert self.life.budget.restart_count == self.restarts_count

    def teardown(self) -> None:
        """From wherever it is, `stop()` leads to STOPPED, and everybody has an answer."""
        if not hasattr(self, "life"):
            return
        self.stop(2.0)
        self.pass_time(CLOSING_S)
        if self.process is not None:
            assert self.process.told_to_end
            self.exit(False, 0)
        assert self.life.state == Stopped()
        assert self.starts_waiting == self.stops_waiting == 0
        self.a_process_is_there_when_the_state_says_so()

    # ------------------------------------------------------------ effects

    def take(self, step: tuple[Lifecycle, Effects]) -> None:
        before = self.life.public_state
        self.life, effects = step
        after = self.life.public_state
        assert before is after or (before, after) in PUBLIC_STEPS
        if before is WorkerState.READY and after is not WorkerState.READY:
            self.leave_ready()
        for effect in effects:
            self.carry_out(effect, before)

    def carry_out(self, effect: Effect, before: WorkerState) -> None:
        match effect:
            case Launch(epoch=epoch):
                self.launches_count += 1
                assert self.process is None, "two servers on one port"
                assert epoch == self.launches_count
                assert isinstance(self.life.state, Launching)
                if self.life.state.first:
                    self.forget_restarts()
                else:
                    assert self.next_launch_at is not None
                    assert self.now >= self.next_launch_at
                self.process, self.stuck = Process(epoch), False
            case Terminate(epoch=epoch, grace_s=grace_s, keep_evidence=evidence):
                assert self.process is not None
                assert epoch == self.process.epoch
                if self.closing_since is not None:  # the server would wait for our open connections
                    assert not self.connections_open or self.now >= self.closing_since + CLOSING_S
                    assert grace_s <= self.grace_allowed
                assert grace_s == 0.0 or not evidence
                self.process.told_to_end = True
            case CloseAllStreams(epoch=epoch):
                assert epoch == self.life.epoch
                self.connections_open = False if self.closing_since is None else self.connections_open
            case Abandon(reason=reason):
                assert reason in (
                    RequestFailReason.SERVER_DIED,
                    RequestFailReason.WORKER_RESTARTED,
                    RequestFailReason.WORKER_STOPPED,
                )
                self.requests.clear()
            case RecordRestart(delay_s=delay_s):
                self.expect_restart(delay_s)
            case Resolve(order=order, error=WorkerStartError() | None as error) if order is Start:
                self.starts_waiting = 0
                if error is None:
                    assert self.life.public_state is WorkerState.READY
                elif self.life.public_state is not WorkerState.RUNNING:
                    stopped = error.reason in LEAVES_STOPPED
                    assert self.life.public_state is (WorkerState.STOPPED if stopped else WorkerState.FAILED)
                else:
                    assert error.reason is StartFailReason.STOPPED
            case Resolve(error=None):
                assert self.process is None
                self.stops_waiting = 0
                self.closing_since = None
            case Resolve():
                assert self.process is not None
                assert self.life.public_state is WorkerState.FAILED
                self.stops_waiting = 0
            case _:
                assert_never(effect)

    # ------------------------------------------------------------ the books of restarts

    def forget_restarts(self) -> None:
        """An explicit start clears the budget."""
        self.restarts_at, self.row_count, self.longest_ready_s, self.ready_since = [], 0, 0.0, None

    def leave_ready(self) -> None:
        if self.ready_since is not None:
            self.longest_ready_s = max(self.longest_ready_s, self.now - self.ready_since)
        self.ready_since = None

    def expect_restart(self, delay_s: float | None) -> None:
        policy, limit = self.policy, self.policy.max_restarts_per_window
        if self.longest_ready_s >= policy.stable_after_s:
            self.row_count = 0
        within = [at for at in self.restarts_at if self.now - at < policy.restart_window_s]
        if len(within) >= limit or self.row_count >= limit:
            assert delay_s is None
            return
        expected_s = min(policy.restart_backoff_s * policy.backoff_factor**self.row_count, policy.backoff_max_s)
        assert delay_s == expected_s
        self.next_launch_at = self.now + expected_s
        self.restarts_count += 1
        self.longest_ready_s = 0.0
        self.row_count += 1
        self.restarts_at.append(self.now)


TestWorkerLife = WorkerLife.TestCase
TestWorkerLife.settings = settings(max_examples=200, stateful_step_count=40)
