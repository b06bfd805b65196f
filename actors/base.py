"""The base classes of the actors: a typed address, a release that runs once, and for each child a
parent that is told of its death."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from functools import partial
from traceback import format_exception
from typing import Any, ClassVar, Generic, TypeVar, get_args

import pykka

from llama_worker.actors.messages import ActorDied, ReportedIn, ReportIn, WorkerMessage
from llama_worker.clock import ClockTimer
from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import described_error
from llama_worker.mailbox import Mailbox, Tick
from llama_worker.ports import Host, Runtime
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.host.threads import never_block_this_thread
from llama_worker.server.roll_call import Member

M = TypeVar("M")


def message_types(union: Any) -> frozenset[type]:
    """The message types of a mailbox's union."""
    return frozenset(get_args(union))


class Ref(Generic[M]):
    """An actor's typed address. Any thread may tell; nobody may ask."""

    __slots__ = ("_actor_ref",)

    def __init__(self, actor_ref: pykka.ActorRef[Any] | None = None) -> None:
        self._actor_ref = actor_ref  # None: the actor was not started yet

    def tell(self, message: M) -> bool:
        """Put the message into the actor's mailbox. Returns False if the actor is dead or was never
        started. Never blocks."""
        if self._actor_ref is not None:
            with contextlib.suppress(pykka.ActorDeadError):
                self._actor_ref.tell(message)
                return True
        return False

    def stop(self) -> None:
        """Tell the actor to end after the messages that are in its mailbox. Never blocks."""
        if self._actor_ref is not None:
            with contextlib.suppress(pykka.ActorDeadError):
                self._actor_ref.tell(_StopRequested())


class LiveSet:
    """The live actors of one worker, and its launches that have not ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: set[object] = set()
        # a signal handler may wait for it while the thread that it interrupts waits for it, too
        self._emptied: WorkerFuture[None] = WorkerFuture()

    def enter(self, member: object) -> None:
        with self._lock:
            self._alive.add(member)

    def leave(self, member: object) -> None:
        """Remove a member that has released everything, or that was given up. Idempotent."""
        with self._lock:
            self._alive.discard(member)
        if self.done():
            self._emptied.answer(None)

    def __contains__(self, member: object) -> bool:
        return member in self._alive

    def done(self) -> bool:
        """Whether no member is left."""
        return not self._alive

    def wait(self, timeout_s: float | None) -> bool:
        """Block the calling thread (the host's, never an actor's) until no member is left. Returns
        False on timeout.

        The worker's own actor enters first: the set is not empty before it has left.
        """
        return self._emptied.wait(timeout_s)


class _StopRequested:
    """Asks an actor to end. Pykka's own stop message is private to Pykka."""


class Alarm:
    """An actor's one timer, which sends it a Tick. For the actor's own thread."""

    def __init__(self, clock: Host, mailbox: Mailbox[Tick]) -> None:
        self._clock = clock
        self._mailbox = mailbox
        self._at: float | None = None
        self._timer: ClockTimer | None = None

    def set(self, at: float | None) -> None:
        """Send the Tick at this instant (monotonic seconds) instead of the one set before; None:
        never."""
        if at == self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = at
        self._timer = None
        if at is not None:
            self._timer = self._clock.call_at(at, partial(self._mailbox.tell, Tick()))

    def fired(self) -> None:
        """Call it for each Tick: the same instant may then be set again."""
        self._at = None


class SupervisedActor(pykka.ThreadingActor, Generic[M]):
    """An actor that handles messages of type `M`, and releases what it owns exactly once.

    A subclass defines `handle`, the message types that it `accepts` and, if it owns something,
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
        """Pykka's extension point: a mailbox written in C, into which a signal handler may put a
        message while the thread that it interrupts does so, too."""
        return queue.SimpleQueue()

    def _start_actor_loop(self) -> None:
        """Pykka's extension point: start the thread, unless the runner runs actors differently."""
        try:
            self._runner.run_actor(super()._start_actor_loop, self)
        except BaseException as error:  # Pykka has registered the actor, and calls no hook
            self._unregister()
            self._release_once(described_error(error))
            raise

    def on_start(self) -> None:
        """Pykka's hook, on the actor's own thread."""
        threading.current_thread().name = f"llama_worker-{self.role}"
        never_block_this_thread()

    def me(self) -> Ref[M]:
        """This actor's own address, for the messages and threads that answer to it."""
        return Ref(self.actor_ref)

    def handle(self, message: M) -> None:
        """Act on one message. Never blocks."""
        raise NotImplementedError

    def release(self, failure: str | None) -> None:
        """Release what the actor owns. `failure`: the crash's text; None if it did not crash."""

    def on_crash(self, detail: str) -> None:
        """Called last, if an exception ended the actor."""

    def on_receive(self, message: Any) -> None:
        """Called by Pykka for each message."""
        try:
            if type(message) in self.accepts:
                if isinstance(message, Tick):
                    self._alarm.fired()
                self.handle(message)
            elif isinstance(message, _StopRequested):
                self.stop()
            else:  # any program may broadcast to all of Pykka's actors
                line = f"{self.role} actor: dropped an unknown message: {type(message).__name__}"
                self._runner.write_log(logging.WARNING, line)
        except BaseException as error:
            # Pykka must not see it: it would log on this thread, where one of the host's handlers
            # may block, and stop every actor of the host program on a SystemExit.
            text = "".join(format_exception(error))
            self._runner.write_log(logging.ERROR, f"unhandled exception in {self}:\n{text}")
            self.on_failure(type(error), error, error.__traceback__)

    def on_stop(self) -> None:
        """Pykka's hook, called when the actor ends without a crash."""
        self._release_once(None)

    def on_failure(
        self, exception_type: Any, exception_value: BaseException | None, traceback: Any
    ) -> None:
        """End the actor after an exception. Pykka calls it for those that `on_receive` does not
        see, such as one in a proxy's call."""
        if self._released:
            return
        self._unregister()
        detail = described_error(exception_value)
        try:
            self._release_once(detail)
        finally:
            self.on_crash(detail)

    def _unregister(self) -> None:
        """Accept no more messages, and let the thread end."""
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
    """An actor that a WorkerActor, its parent, starts for a launch and finds in `registry`.

    If it crashes, the parent gets `ActorDied`, after all that it sent the parent before.
    """

    def __init__(
        self,
        parent: Mailbox[WorkerMessage],
        member: Member,
        registry: dict[Member, Child[Any]],
        live: LiveSet,
        runtime: Runtime,
        config: WorkerConfig,
    ) -> None:
        super().__init__(live, runtime)
        self.member = member
        self.is_given_up = False  # True: it counts as dead, and must handle no more messages
        self._worker = parent
        self._runtime = runtime
        self._config = config
        registry[member] = self

    def tell_worker(self, message: WorkerMessage) -> None:
        """Send the message to the parent, unless that has given this actor up. Any thread."""
        if not self.is_given_up:
            self._worker.tell(message)

    def on_crash(self, detail: str) -> None:
        """Tell the parent, which then ends the other actors and the server."""
        self.tell_worker(ActorDied(member=self.member, detail=detail))

    def on_receive(self, message: Any) -> None:
        if self.is_given_up:
            self.stop()
        elif isinstance(message, ReportIn):
            self.tell_worker(ReportedIn(member=self.member))
        else:
            super().on_receive(message)

    def give_up(self, detail: str) -> bool:
        """Count this actor as dead, because it does not answer. The parent calls this, on its own
        thread. Returns False if the actor had ended.

        A blocked thread cannot be ended, so nobody waits for it. If it wakes up later, what it
        sends its parent and what is in its mailbox is dropped; the other actors to which it sends
        are gone. It then releases what it owns, and ends.
        """
        if self not in self._live:
            return False
        with contextlib.suppress(Exception):  # its thread may go on at this very moment
            self.abandon(detail)
        self.is_given_up = True
        self._live.leave(self)
        return True

    def abandon(self, detail: str) -> None:
        """End what must not outlive this actor, and save what can be saved, at whatever point its
        thread is blocked. Called on the parent's thread."""
        self.release(detail)
