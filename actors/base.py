"""What every actor here is built on: a typed address, one release, and a parent that hears of a
death."""

from __future__ import annotations

import logging
import queue
import threading
from traceback import format_exception
from typing import Any, ClassVar, Generic, TypeVar, get_args

import pykka

from llama_worker.config import WorkerConfig
from llama_worker.errors import described_error
from llama_worker.messages import (
    ActorDied,
    Mailbox,
    ReportedIn,
    ReportIn,
    Tick,
    WorkerMessage,
)
from llama_worker.runtime.futures import WorkerFuture
from llama_worker.runtime.ports import ActorRunner, Clock, Runtime, Timer

M = TypeVar("M")


def members(union: Any) -> frozenset[type]:
    """The message types of a mailbox's union."""
    return frozenset(get_args(union))


class Ref(Generic[M]):
    """An actor's typed address. Any thread may tell; nobody may ask."""

    __slots__ = ("_actor_ref",)

    def __init__(self, actor_ref: pykka.ActorRef[Any]) -> None:
        self._actor_ref = actor_ref

    def tell(self, message: M) -> bool:
        """Put the message into the actor's mailbox; False where the actor is dead. Never blocks."""
        try:
            self._actor_ref.tell(message)
        except pykka.ActorDeadError:
            return False
        return True

    def stop(self) -> None:
        """Let the actor end once it has handled what is in its mailbox. Never blocks."""
        try:
            self._actor_ref.tell(_StopRequested())
        except pykka.ActorDeadError:
            return


class LiveCount:
    """The actors of one worker that are alive, and its launched servers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: set[object] = set()
        # a signal handler may wait over somebody who waits
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
    """The one instant that an actor waits for: it then gets a Tick."""

    def __init__(self, clock: Clock, mailbox: Mailbox[Tick]) -> None:
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
        """A Tick came: the same instant may be set again."""
        self._at = None


class SupervisedActor(pykka.ThreadingActor, Generic[M]):
    """Handles `M`, releases what it owns exactly once, tells its parent of a crash.

    A subclass defines `handle`, the `accepts` of its messages and, where it owns something,
    `release`. An exception in `handle` ends the actor: it is logged, `release` runs, and the parent
    gets `ActorDied`.
    """

    use_daemon_thread = True  # a host that forgets close() can still exit
    role = "actor"
    accepts: ClassVar[frozenset[type]] = frozenset()

    def __init__(
        self,
        parent: Mailbox[WorkerMessage] | None,
        live_count: LiveCount,
        runner: ActorRunner,
        *,
        slot: int | None = None,
    ) -> None:
        super().__init__()
        self._runner = runner
        self._parent = parent
        self._live_count = live_count
        self._slot = slot
        self._released = False
        live_count.enter(self)

    @staticmethod
    def _create_actor_inbox() -> Any:
        """Pykka's point of extension: a mailbox in C, into which a signal handler may put a message
        while the thread that it interrupts does."""
        return queue.SimpleQueue()

    def _start_actor_loop(self) -> None:
        """Pykka's point of extension: as it does, unless the runner runs actors in another way."""
        try:
            self._runner.run_actor(super()._start_actor_loop, self)
        except BaseException:  # Pykka has registered it, and calls no hook
            self._leave_pykka()
            self._release_once(None)
            raise

    def on_start(self) -> None:
        """Pykka's hook, on the actor's own thread."""
        threading.current_thread().name = f"llama_worker-{self.role}"

    def me(self) -> Ref[M]:
        """This actor's own address, for the messages and threads that answer to it."""
        return Ref(self.actor_ref)

    def handle(self, message: M) -> None:
        """Act on one message. Never blocks."""
        raise NotImplementedError

    def release(self, failure: str | None) -> None:
        """Give back what the actor owns; `failure` is the crash's text, None for a regular end."""

    def will_report(self) -> bool:
        """After `release`: whether what the actor owned is still to tell the parent of its end."""
        return False

    @property
    def is_given_up(self) -> bool:
        """Another actor has taken its place."""
        return False

    def _report_in(self) -> None:
        if self._parent is not None:
            self._parent.tell(ReportedIn(role=self.role, slot=self._slot))

    def on_receive(self, message: Any) -> None:
        """Pykka's entry."""
        try:
            if self.is_given_up:
                self.stop()
            elif type(message) in self.accepts:
                self.handle(message)
            elif isinstance(message, ReportIn):
                self._report_in()
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
            if self._parent is not None:
                self._parent.tell(
                    ActorDied(
                        role=self.role,
                        slot=self._slot,
                        detail=detail,
                        will_report=self.will_report(),
                    )
                )

    def _leave_pykka(self) -> None:
        """Take no message any more, and let the thread end."""
        pykka.ActorRegistry.unregister(self.actor_ref)
        self.actor_stopped.set()

    def _release_once(self, failure: str | None) -> None:
        if self._released:
            return
        self._released = True
        try:
            self.release(failure)
        finally:
            self._live_count.leave(self)


class Line:
    """A child's way to its parent, until it is cut. Thread-safe."""

    def __init__(self, parent: Mailbox[WorkerMessage]) -> None:
        self.parent = parent
        self.is_cut = False
        self.child: Child[Any] | None = None

    def tell(self, message: WorkerMessage) -> bool:
        return not self.is_cut and self.parent.tell(message)


class Child(SupervisedActor[M]):
    """One of the actors that a WorkerActor starts, which is its parent."""

    def __init__(
        self,
        line: Line,
        live_count: LiveCount,
        runtime: Runtime,
        config: WorkerConfig,
        *,
        slot: int | None = None,
    ) -> None:
        super().__init__(line, live_count, runtime, slot=slot)
        self._worker = self._line = line
        self._runtime = runtime
        self._config = config
        line.child = self

    @property
    def is_given_up(self) -> bool:
        return self._line.is_cut

    def give_up(self, detail: str) -> bool:
        """Called by the parent, on its own thread, where this actor does not answer; returns
        `will_report`.

        A thread that is blocked cannot be ended: the actor counts as dead, and nobody waits for it.
        Should it wake up one day, what it tells its parent from now on is dropped, and so is what
        lies in its mailbox; what it tells others carries a turn or a launch that is over. It then
        releases what it owns, and ends.
        """
        self._line.is_cut = True
        self.abandon(detail)
        self._live_count.leave(self)
        return self.will_report()

    def abandon(self, detail: str) -> None:
        """End what must not outlive this actor, and save what can be, whatever it is in the middle
        of. Called on the parent's thread."""
