"""What every actor here is built on: a typed address, one release, and a parent that is told of
its death."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from traceback import format_exception
from typing import Any, ClassVar, Generic, TypeVar, get_args

import pykka

from llama_worker.actors.messages import ActorDied, ReportedIn, ReportIn, WorkerMessage
from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import described_error
from llama_worker.mailbox import Mailbox, Tick
from llama_worker.ports import Host, Runtime, Timer
from llama_worker.runtime.host.futures import WorkerFuture, never_wait_here
from llama_worker.server.roll_call import Member

M = TypeVar("M")


def message_types(union: Any) -> frozenset[type]:
    """The message types of a mailbox's union."""
    return frozenset(get_args(union))


class Ref(Generic[M]):
    """An actor's typed address. Any thread may tell; nobody may ask."""

    __slots__ = ("_actor_ref",)

    def __init__(self, actor_ref: pykka.ActorRef[Any] | None = None) -> None:
        self._actor_ref = actor_ref  # None: there is no such actor so far

    def tell(self, message: M) -> bool:
        """Put the message into the actor's mailbox; False where the actor is dead, or there is
        none. Never blocks."""
        if self._actor_ref is None:
            return False
        try:
            self._actor_ref.tell(message)
        except pykka.ActorDeadError:
            return False
        return True

    def stop(self) -> None:
        """Let the actor end once it has handled what is in its mailbox. Never blocks."""
        if self._actor_ref is not None:
            with contextlib.suppress(pykka.ActorDeadError):
                self._actor_ref.tell(_StopRequested())


class LiveSet:
    """The actors of one worker that are alive, and its launches that are not over. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: set[object] = set()
        # may be waited for in a signal handler, while the thread it interrupts waits for it, too
        self._nobody_left: WorkerFuture[None] = WorkerFuture()

    def enter(self, member: object) -> None:
        with self._lock:
            self._alive.add(member)

    def leave(self, member: object) -> None:
        """It has released everything, or nobody waits for it any more. Idempotent."""
        with self._lock:
            self._alive.discard(member)
        if self.done():
            self._nobody_left.answer(None)

    def __contains__(self, member: object) -> bool:
        return member in self._alive

    def done(self) -> bool:
        """Nobody is left."""
        return not self._alive

    def wait(self, timeout_s: float | None) -> bool:
        """Block the calling thread (the host's, never an actor's) until nobody is left; False: not
        in time.

        The worker's own actor enters first and leaves last.
        """
        return self._nobody_left.wait(timeout_s)


class _StopRequested:
    """Pykka's own stop message is private to it; this one is ours."""


class Alarm:
    """The one instant that an actor waits for; it gets a Tick then. For the actor's own thread."""

    def __init__(self, clock: Host, mailbox: Mailbox[Tick]) -> None:
        self._clock = clock
        self._mailbox = mailbox
        self._at: float | None = None
        self._timer: Timer | None = None

    def set(self, at: float | None) -> None:
        """Ring at this instant (monotonic seconds) and no more at the one set before; None: not at
        all."""
        if at == self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = at
        self._timer = None if at is None else self._clock.call_at(at, self._ring)

    def _ring(self) -> None:
        self._mailbox.tell(Tick())

    def rang(self) -> None:
        """The same instant may be set again."""
        self._at = None


class SupervisedActor(pykka.ThreadingActor, Generic[M]):
    """Handles `M`, and releases what it owns exactly once.

    A subclass defines `handle`, the `accepts` of its messages and, where it owns something,
    `release`. One that accepts Tick may set its `_alarm`. An exception in `handle` ends the actor:
    it is logged, and `release` runs.
    """

    use_daemon_thread = True  # a host that forgets close() can still exit
    role = "actor"
    accepts: ClassVar[frozenset[type]] = frozenset()

    def __init__(self, live: LiveSet, runner: Host) -> None:
        super().__init__()
        self._runner = runner
        self._live = live
        self._released = False
        self._alarm = Alarm(runner, Ref(self.actor_ref))
        live.enter(self)

    @staticmethod
    def _create_actor_inbox() -> Any:
        """Pykka's point of extension: a mailbox in C, into which a signal handler may put a message
        while the thread that it interrupts does."""
        return queue.SimpleQueue()

    def _start_actor_loop(self) -> None:
        """Pykka's point of extension: as it does, unless the runner runs actors in another way."""
        try:
            self._runner.run_actor(super()._start_actor_loop, self)
        except BaseException as error:  # Pykka has registered it, and calls no hook
            self._leave_pykka()
            self._release_once(described_error(error))
            raise

    def on_start(self) -> None:
        """Pykka's hook, on the actor's own thread."""
        threading.current_thread().name = f"llama_worker-{self.role}"
        never_wait_here()

    def me(self) -> Ref[M]:
        """This actor's own address, for the messages and threads that answer to it."""
        return Ref(self.actor_ref)

    def handle(self, message: M) -> None:
        """Act on one message. Never blocks."""
        raise NotImplementedError

    def release(self, failure: str | None) -> None:
        """Give back what the actor owns; `failure` is the crash's text, None for a regular end."""

    def died(self, detail: str) -> None:
        """Called last, where an exception ended the actor."""

    def on_receive(self, message: Any) -> None:
        """Pykka's entry."""
        try:
            if type(message) in self.accepts:
                if isinstance(message, Tick):
                    self._alarm.rang()
                self.handle(message)
            elif isinstance(message, _StopRequested):
                self.stop()
            else:  # any program may broadcast to all of Pykka's actors
                line = (
                    f"{self.role} dropped a message that it does not know: {type(message).__name__}"
                )
                self._runner.write_log(logging.WARNING, line)
        except BaseException as error:
            # Not for Pykka: it would log on this thread, where a handler of the host's may block,
            # and answer a SystemExit by stopping every actor of the host program.
            text = "".join(format_exception(error))
            self._runner.write_log(logging.ERROR, f"unhandled exception in {self}:\n{text}")
            self.on_failure(type(error), error, error.__traceback__)

    def on_stop(self) -> None:
        """Pykka's hook for a regular end."""
        self._release_once(None)

    def on_failure(
        self, exception_type: Any, exception_value: BaseException | None, traceback: Any
    ) -> None:
        """The end by an exception; Pykka's hook for those that `on_receive` does not see, such as
        of a proxy's call."""
        if self._released:
            return
        self._leave_pykka()
        detail = described_error(exception_value)
        try:
            self._release_once(detail)
        finally:
            self.died(detail)

    def _leave_pykka(self) -> None:
        """Take no message any more, and let the thread end."""
        pykka.ActorRegistry.unregister(self.actor_ref)
        self.actor_stopped.set()

    def _release_once(self, failure: str | None) -> None:
        if self._released:
            return
        self._released = True
        self._alarm.set(None)
        try:
            self.release(failure)
        finally:
            self._live.leave(self)


class Child(SupervisedActor[M]):
    """One of the actors that a WorkerActor, its parent, starts for a launch and finds in `family`.

    The parent hears of its death by `ActorDied`, behind all that it told before.
    """

    def __init__(
        self,
        parent: Mailbox[WorkerMessage],
        member: Member,
        family: dict[Member, Child[Any]],
        live: LiveSet,
        runtime: Runtime,
        config: WorkerConfig,
    ) -> None:
        super().__init__(live, runtime)
        self.member = member
        self.is_given_up = False  # it counts as dead: it is to handle nothing any more
        self._worker = parent
        self._runtime = runtime
        self._config = config
        family[member] = self

    def tell_worker(self, message: WorkerMessage) -> None:
        """Tell the parent, unless that has given this actor up. Any thread."""
        if not self.is_given_up:
            self._worker.tell(message)

    def died(self, detail: str) -> None:
        """The parent ends the others, and the server."""
        self.tell_worker(ActorDied(member=self.member, detail=detail))

    def on_receive(self, message: Any) -> None:
        """Pykka's entry."""
        if self.is_given_up:
            self.stop()
        elif isinstance(message, ReportIn):
            self.tell_worker(ReportedIn(member=self.member))
        else:
            super().on_receive(message)

    def give_up(self, detail: str) -> bool:
        """Called by the parent, on its own thread, where this actor does not answer; False: it has
        ended.

        A thread that is blocked cannot be ended: the actor counts as dead, and nobody waits for it.
        Should it wake up one day, what it tells its parent from now on is dropped, and so is what
        lies in its mailbox; what it tells others finds them gone. It then releases what it owns,
        and ends.
        """
        if self not in self._live:
            return False
        with contextlib.suppress(Exception):  # it may go on at this very moment
            self.abandon(detail)
        self.is_given_up = True
        self._live.leave(self)
        return True

    def abandon(self, detail: str) -> None:
        """End what must not outlive this actor, and save what can be, whatever it is in the middle
        of. Called on the parent's thread."""
        self.release(detail)
