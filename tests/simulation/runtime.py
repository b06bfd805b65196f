"""The runtime's ports, simulated: what waits becomes events of the scheduler."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from signal import Signals
from typing import Any, Literal

from llama_worker.clock import ClockTimer
from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import LlamaWorkerError
from llama_worker.mailbox import Mailbox, Reply
from llama_worker.ports import Abortable, Waitable
from llama_worker.request.messages import (
    BiosWritten,
    CallEnded,
    CountTokens,
    OpenStream,
    RunTool,
    StreamClosed,
    StreamEvents,
    StreamOpened,
    StuckToolThreads,
    WriteBios,
)
from llama_worker.runtime.probes.readiness import unanswered
from llama_worker.runtime.process.log_ring import LogRing
from llama_worker.runtime.real import COUNT_S
from llama_worker.server.health import models_outcome, probe_timeout_s
from llama_worker.server.liveness import Counters, ProcessActivity, ProcessSample
from llama_worker.server.messages import (
    Died,
    EvidenceSeen,
    Exited,
    GpuFaulted,
    Launched,
    LaunchFailed,
    Look,
    LookAtSlots,
    Probed,
    ProbeOutcome,
    SlotsSeen,
)
from llama_worker.server.slots import LOOK_TIMEOUT_S, SlotsLook, SlotsTimeout, parse_slots
from llama_worker.server.termination import Signal, SilentGuardWatch
from llama_worker.server.traits import server_traits
from llama_worker.stream.decoder import StreamDecoder
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.lazy_reading import LazyReading, Portion
from llama_worker.types.request import RequestFailReason, TokenCount
from llama_worker.types.worker import StartFailReason
from tests.simulation.dice import Dice
from tests.simulation.instants import Looks, LostShare
from tests.simulation.machine import Machine
from tests.simulation.promises import Violation
from tests.simulation.scheduler import Event, Scheduler
from tests.simulation.server import Exchange, LlamaServer

UNIX_EPOCH = 1_700_000_000.0
_THREAD_START_S, _PROBE_S = 0.0002, 0.004  # until a new thread runs, until a probe has its answer
_MOST_LOST = 0.9  # of the time, else what an idle server uses never passes for work
_ASK_AGAIN_S = 1.0  # until a server that did not answer may answer


class SimRuntime:
    """One worker's runtime; see llama_worker.ports."""

    warnings = ()

    def __init__(
        self, config: WorkerConfig, scheduler: Scheduler, machine: Machine, dice: Dice
    ) -> None:
        self.log = LogRing(config.log_lines, api_key=config.api_key)
        self.probes_count = 1 + machine.has_foreign_probe
        self.streams: list[SimStream] = []  # those whose reader has not ended
        self.scheduler = scheduler
        self.machine = machine
        self.dice = dice
        self._config = config
        self._activity, self._lost_share = ProcessActivity(100), LostShare()
        self.slots_asked = 0
        self._looks: dict[int, Looks] = {}  # by launch
        self._host_calls: deque[Callable[[], object]] = deque()  # not made yet: one thread has them
        self.tool_threads: list[SimToolThread] = []  # all that were started
        self.server: SimServerProcess | None = None  # launched last

    def now(self) -> float:
        return self.scheduler.host_time

    def unix(self, at: float) -> float:
        return at + (UNIX_EPOCH + self.scheduler.lost_s)

    def unix_now(self) -> float:
        return UNIX_EPOCH + self.scheduler.now + self.machine.unix_jump_s

    def call_at(self, at: float, call: Callable[[], object]) -> ClockTimer:
        return self.scheduler.timer(at, call)

    def run_actor(self, start_thread: Callable[[], None], actor: Any) -> None:
        self.machine.need_thread()
        self.scheduler.start_actor(actor)

    def call_host(self, call: Callable[[], object], name: str) -> None:
        self._host_calls.append(call)
        if self.machine.slowness or len(self._host_calls) > 1:
            self.scheduler.after(0.0, self._call_host_next, "callback")
        else:  # what callbacks do is noted only: at whatever time, it is the same
            self._call_host_next()

    def _call_host_next(self) -> None:
        self._host_calls.popleft()()

    def write_log(self, *record: Any) -> None:
        """Of an exception that ends an actor, too: a violation ends the run instead."""
        error = sys.exc_info()[1]
        if isinstance(error, Violation):
            raise error

    def start_server(self, epoch: int, reply_to: Mailbox[Any]) -> SimServerProcess:
        self.machine.need_thread()
        self.log.begin_launch()
        self.server = SimServerProcess(self, epoch, reply_to)
        return self.server

    def anon_bytes(self, pid: int) -> int | None:
        server = self.machine.find(pid)
        return None if server is None else server.anon_bytes

    def process_evidence(self, pid: int) -> Mapping[str, Any]:
        return {"root_pid": pid, "processes_count": 1, "processes": []}

    def open_stream(self, order: OpenStream, on_closed: Mailbox[StreamClosed]) -> SimStream:
        self.machine.need_thread()
        stream = SimStream(self, order, on_closed)
        self.streams.append(stream)
        return stream

    def probe_readiness(
        self, epoch: int, root_pid: int, *, first: bool, reply_to: Mailbox[Probed]
    ) -> Abortable:
        if self.machine.lacks_threads:
            refused = unanswered(RuntimeError("can't start new thread"))
            reply_to.tell(Probed(epoch=epoch, outcome=refused[0], detail=refused[1]))
            return _NotAsked()
        limit_s = probe_timeout_s(self._config.timeouts)

        def probed(reply: int | Exception) -> Probed:
            server = self.machine.listening()
            outcome, detail = (
                models_outcome(reply, {}) if isinstance(reply, int) else unanswered(reply)
            )
            if server is not None and first and outcome is ProbeOutcome.READY:
                outcome = server.first_outcome
            props = server.props() if server is not None else {}
            traits = server_traits(props, {"prompt": "<|user|>-<|assistant|>"})
            return Probed(epoch=epoch, outcome=outcome, detail=detail, traits=traits)

        def answer(server: LlamaServer | None) -> Probed | None:
            if server is None:
                return probed(ConnectionRefusedError())
            if not server.answers:
                return None
            return probed(200 if server.loaded else 503)

        return SimQuestion(
            self, "probe", limit_s, reply_to, answer, otherwise=lambda: probed(TimeoutError())
        )

    def look(self, look: Look, root_pid: int, reply_to: Mailbox[EvidenceSeen]) -> None:
        if self.machine.lacks_threads:
            reply_to.tell(EvidenceSeen(look=look, at=self.now(), by_shortage=True))
            return

        def looked() -> None:
            if look.fresh and look.probe == 0:
                self._activity, self._lost_share = ProcessActivity(100), LostShare()
            evidence = None
            server = self.machine.find(root_pid) if look.probe == 0 else None
            if server is not None:
                processes = {
                    (pid, 1.0): Counters(
                        cpu_ticks=int(used.cpu_ticks),
                        read_bytes=int(used.read_bytes),
                        major_faults=int(used.major_faults),
                        waited_ns=int(1e7 * used.waited_ticks),
                    )
                    for pid, used in server.counters().items()
                    # once somebody listens, a child that does not is no server
                    if used.serves or not server.loaded
                }
                at, lost_s = self.scheduler.now, self.scheduler.now - self.now()
                self._activity, evidence = self._activity.observe(
                    ProcessSample(at=at, lost_s=lost_s, processes=processes)
                )
                hardly_ran = self._lost_share.looked(at, lost_s) > _MOST_LOST
                if evidence is not None and evidence.alive and hardly_ran:
                    server.seemed_busy_at = self.now()
            now = self.now()
            if evidence is None:
                reply_to.tell(EvidenceSeen(look=look, at=now))
            else:
                alive, detail, reads = evidence.alive, evidence.detail, evidence.reads
                told = EvidenceSeen(look=look, alive=alive, reads=reads, at=now, detail=detail)
                reply_to.tell(told)

        if look.probe == 0 or not self.machine.looks_hang:
            self.scheduler.after(_THREAD_START_S * self.machine.slowness, looked, "look")

    def look_at_slots(self, order: LookAtSlots, reply_to: Mailbox[SlotsSeen]) -> Abortable:
        if self.machine.lacks_threads:
            reply_to.tell(SlotsSeen(epoch=order.epoch, look=None, by_shortage=True))
            return _NotAsked()
        self.slots_asked += 1
        looks = self._looks.setdefault(order.epoch, Looks())
        looks.asked(self.now())
        asked_at, nothing = self.now(), SlotsSeen(epoch=order.epoch, look=None)
        has_waited = False

        def answer(server: LlamaServer | None) -> SlotsSeen | float:
            nonlocal has_waited
            if server is None or not server.build.shows_slots or not server.loaded:
                looks.refused(self.now())
                return nothing
            wait_s = server.slots_wait_s
            if not server.answers or wait_s == math.inf:
                return _ASK_AGAIN_S
            if wait_s and not has_waited:
                has_waited = True
                return wait_s + _PROBE_S  # behind what the batch did
            slots = parse_slots(server.slots_view())
            assert slots is not None
            since = max(asked_at, self.now() - LOOK_TIMEOUT_S)
            return SlotsSeen(epoch=order.epoch, look=SlotsLook(asked_at=since, slots=slots))

        silence = SlotsSeen(epoch=order.epoch, look=SlotsTimeout())
        return SimQuestion(
            self, "look at the slots", order.timeout_s, reply_to, answer, otherwise=lambda: silence
        )

    def count_tokens(self, order: CountTokens, *, prompted: bool, n_ctx: int) -> None:
        self.machine.need_thread()
        no_answer = LlamaWorkerError("the tokens could not be counted")
        count: TokenCount = {"ok": True, "n_prompt_tokens": 7, "n_ctx": n_ctx, "n_left": n_ctx - 7}

        def answer(server: LlamaServer | None) -> TokenCount | LlamaWorkerError | None:
            if server is None or not server.loaded:
                return no_answer
            return count if server.answers else None

        asker = _Asker(order.reply)
        SimQuestion(self, "count tokens", COUNT_S, asker, answer, otherwise=lambda: no_answer)

    def watch_gpus(self, epoch: int, root_pid: int, reply_to: Mailbox[GpuFaulted]) -> None:
        self.machine.need_thread()
        self.machine.gpu_watch = (
            epoch,
            lambda fault: reply_to.tell(GpuFaulted(epoch=epoch, fault=fault)),
        )

    def write_bios(self, order: WriteBios, reply_to: Mailbox[BiosWritten]) -> None:
        if self._config.has_builtin_bios:
            reply_to.tell(BiosWritten(turn_id=order.turn_id, bios="", error=None))
            return
        self.machine.need_thread()
        seconds, error = self.machine.bios_call(order.turn_id[0])
        if seconds is not None:
            written = BiosWritten(turn_id=order.turn_id, bios="", error=error)
            self.scheduler.after(seconds, lambda: reply_to.tell(written), "BIOS written")

    def wait(self, what: Waitable, timeout_s: float | None) -> bool:
        return self.scheduler.run_until(
            what.done, math.inf if timeout_s is None else self.scheduler.now + timeout_s
        )

    def run_tool(self, order: RunTool) -> SimToolThread:
        self.machine.need_thread()
        thread = SimToolThread()
        self.tool_threads.append(thread)
        seconds, ok = self.machine.tool_call(order.turn_id[0])

        def returned() -> None:
            thread.has_returned = True
            text = '"found"' if ok else "tool raised ValueError"
            order.reply_to.tell(
                CallEnded(
                    turn_id=order.turn_id, call_id=order.call.id, ok=ok, text=text, at=self.now()
                )
            )
            if thread.given_up_to is not None:
                thread.given_up_to.tell(StuckToolThreads(change=-1))

        if seconds is not None:  # else it never returns
            self.scheduler.after(seconds, returned, "a tool returns")
        return thread


class SimServerProcess:
    """One launch under its guard: a thread that tells of it, and the server's model."""

    def __init__(self, runtime: SimRuntime, epoch: int, reply_to: Mailbox[Any]) -> None:
        self.ended_at = math.inf  # when it was told that nothing of its tree is left
        self.epoch = epoch
        self.server: LlamaServer | None = None
        self.launched_at = runtime.now()
        self._scheduler, self._machine, self._log = runtime.scheduler, runtime.machine, runtime.log
        self._reply_to = reply_to
        self._orders: list[Signal] = []  # given before the process was there
        self._returncode = 0
        self._guard_killed = False
        self._guard_stops: Literal["not", "until SIGCONT", "for ever"] = "not"
        self._held: list[Callable[[], object]] = []  # what the guard does once it goes on
        self._silence = SilentGuardWatch()
        self._machine.on_launch(epoch)
        self._machine.launched.append(self)
        self._later(0.005, 0.3, self._start, "spawn")

    @property
    def ended(self) -> bool:
        return self.ended_at < math.inf

    def is_gone(self) -> bool:
        return self.server is not None and self.server.gone

    def send(self, signal: Signal) -> None:
        """The guard takes the order as soon as it runs."""
        self._machine.on_signal(self, signal)
        if self.server is None:
            self._orders.append(signal)
        else:
            self._deliver(self.server, signal)

    def _deliver(self, server: LlamaServer, signal: Signal) -> None:
        act = server.terminate if signal is Signal.TERMINATE else server.kill
        if signal is not Signal.FORCE:
            act = partial(self._by_guard, act)
        self._later(0.0002, 0.02, act, f"{signal.name} arrives", of_host=False)

    # ------------------------------------------------------------ the guard

    def kill_guard(self) -> None:
        """From outside: the kernel kills the server with it."""
        self._guard_killed = True
        if self.server is not None:
            self.server.kill()

    def stop_guard(self, *, for_ever: bool) -> None:
        """SIGSTOP, or (`for_ever`) its control group is frozen."""
        self._guard_stops = "for ever" if for_ever else "until SIGCONT"

    def _by_guard(self, act: Callable[[], object]) -> None:
        if self._guard_stops == "not":
            act()
        else:
            self._held.append(act)

    def _look_at_guard(self) -> None:
        """The server has ended, and the guard is to tell so, and that its tree is gone."""
        number = self._silence.step(self._scheduler.now, overdue=not self.ended)
        if number is Signals.SIGKILL:
            self._guard_stops, self._held = "not", []
            self._exited()
        elif number is Signals.SIGCONT and self._guard_stops == "until SIGCONT":
            self._guard_stops = "not"
            for act in self._held:
                act()
        wait_ms = self._silence.wait_ms(self._scheduler.now)
        if wait_ms is not None:
            self._scheduler.after(wait_ms / 1000, self._look_at_guard, "a look at the guard")

    def _later(
        self,
        low_s: float,
        high_s: float,
        call: Callable[[], object],
        what: str,
        of_host: bool = True,
    ) -> None:
        self._scheduler.after(self._machine.between_s(low_s, high_s), call, what, of_host=of_host)

    def _start(self) -> None:
        failure = self._machine.launch_failure()
        if set(self._orders) - {Signal.TERMINATE}:
            failure = failure or (StartFailReason.SPAWN_FAILED, "killed before it ran")
        if failure is not None:
            self.ended_at = self._scheduler.host_time
            self._reply_to.tell(
                LaunchFailed(epoch=self.epoch, reason=failure[0], detail=failure[1])
            )
            return
        self.server = self._machine.start_server(self.epoch)
        self.server.on_death = self._server_died
        self._log.feed(b"loading the model\n")
        self._reply_to.tell(Launched(epoch=self.epoch, pid=self.server.pid))
        for order in self._orders:
            self._deliver(self.server, order)

    def _server_died(self, returncode: int) -> None:
        """The guard's report comes by a thread of the host's; the rest of the tree is reaped after
        it."""
        self._returncode = returncode
        if self.server is not None:
            self._machine.answer_waiting(self.server)
            self._machine.on_death(self.server)
        self._machine.on_exit(self)
        self._later(0.0005, 1.0, partial(self._by_guard, self._died), "the server has ended")
        self._look_at_guard()

    def _died(self) -> None:
        if self.ended:
            return
        if not self._guard_killed:
            self._reply_to.tell(
                Died(epoch=self.epoch, returncode=self._returncode, oom_evidence=self._oom_evidence)
            )
        self._later(0.0005, 0.2, self._exited, "the tree is gone")

    def _exited(self) -> None:
        if self.ended:
            return
        self.ended_at = self._scheduler.host_time
        self._reply_to.tell(
            Exited(
                epoch=self.epoch,
                returncode=self._returncode,
                log_tail=self._log.tail(40),
                port_taken=self.server is not None and self.server.port_taken,
                oom_evidence=self._oom_evidence,
            )
        )

    @property
    def _oom_evidence(self) -> str | None:
        return None if self.server is None else self.server.oom_evidence


class SimStream:
    """A connection and its reader thread: both ends of it. `abort` is the host's, the rest the
    server's."""

    def __init__(
        self, runtime: SimRuntime, order: OpenStream, on_closed: Mailbox[StreamClosed]
    ) -> None:
        self.turn_id = order.turn_id
        self.exchange: Exchange | None = None
        self._runtime, self._scheduler, self._machine = runtime, runtime.scheduler, runtime.machine
        self._order = order
        self._on_closed = on_closed
        self._decoder = StreamDecoder()
        self._lazy: LazyReading  # from the headers on
        self._server: LlamaServer | None = None
        self._status: int | None = None
        self._buffer = bytearray()
        self._opened = self._aborted = self._ended = False
        # nothing more comes from the server; in the regular way, or not
        self._is_over = self._is_cut = False
        self._reading: Event | None = None
        self._looking: Event | None = None
        self._is_locked = False  # by an actor that is preempted while it flushes
        self._scheduler.after(_THREAD_START_S * self._machine.slowness, self._connect, "connect")

    def abort(self) -> None:
        if self._aborted or self._ended:
            return
        self._aborted = True
        if self._server is not None and self.exchange is not None and not self.exchange.over:
            hang_up = partial(self._server.client_closed, self.exchange)
            self._scheduler.after(
                0.001 * self._machine.slowness, hang_up, "the client hangs up", of_host=False
            )
        self._read_soon()

    def flush(self) -> None:
        if self._opened and not self._ended:
            self._decode(len(self._buffer))
            self._tell_locked(self._lazy.all(self._runtime.now()))

    def hurry(self) -> None:
        if self._opened and not self._ended:
            self._tell_locked(self._lazy.hurry(self._runtime.now()))
            self._read_soon()

    def _tell_locked(self, portion: Portion | None) -> None:
        """The reader's thread tells nothing before the portion is in its mailbox."""
        actor = self._scheduler.serving
        assert actor is not None
        held_before = len(actor.held)
        self._tell(portion)
        if len(actor.held) > held_before:
            self._is_locked = True
            actor.held.append(self._unlock)

    def _unlock(self) -> None:
        self._is_locked = False
        self._read_soon()

    # ------------------------------------------------------------ the server's end

    def headers(self, status: int) -> None:
        self._status = status
        self._read_soon()

    def receive(self, data: bytes) -> None:
        self._buffer += data
        if not self._opened or len(self._buffer) >= self._lazy.low_water_bytes:
            self._read_soon()

    def end(self, *, regular: bool) -> None:
        """The body has ended, or the connection has."""
        self._is_over, self._is_cut = True, not regular
        self._read_soon()

    # ------------------------------------------------------------ the reader's thread

    def _connect(self) -> None:
        if self._aborted:
            return
        self._server = self._machine.listening()
        if self._server is None:
            self._fail(RequestFailReason.CONNECT_FAILED, "connection refused")
            return
        self._scheduler.after(
            0.0005 * self._machine.slowness, self.posted, "the request arrives", of_host=False
        )

    def posted(self) -> None:
        """The request has come to the server, or what it had not looked at yet comes up again."""
        server = self._server
        assert server is not None
        if self._aborted:
            return
        if server.gone:
            self.end(regular=False)
        elif not server.answers:
            self._machine.unanswered.append((server, self))
        else:
            self._machine.serve(server, self, self._order.body)

    def _read_soon(self) -> None:
        if self._reading is None and not self._ended:
            self._reading = self._scheduler.after(self._machine.read_delay_s(), self._read, "read")

    def _look(self) -> None:
        self._looking = None
        self._read_soon()

    def _read(self) -> None:
        self._reading = None
        if self._ended or self._is_locked:
            return
        dice = self._runtime.dice
        if self._status is not None and not self._opened and not self._aborted:
            if self._status != 200:
                self._fail(RequestFailReason.HTTP_ERROR, f"HTTP {self._status}", self._status)
                return
            self._opened = True
            self._lazy = LazyReading(self._runtime.now(), max_hold_s=self._order.max_hold_s)
            self._order.reply_to.tell(StreamOpened(turn_id=self.turn_id, at=self._runtime.now()))
        if self._aborted:
            if self._opened and self._buffer:
                self._decode(len(self._buffer))
            self._fail(RequestFailReason.STREAM_DISCONNECTED, "aborted")
            return
        if self._opened and self._buffer:
            size = len(self._buffer)
            if size > 1 and dice.chance(0.2):
                size = 1 + dice.below(size)  # bytes are cut anywhere
            self._decode(size)
        if self._opened and not self._ended:
            self._tell(self._lazy.due(self._runtime.now(), over=False))
            self._look_again()
        if self._buffer:
            self._read_soon()
        elif self._is_cut or (self._is_over and self._decoder.partial):
            where = "in mid-stream" if self._opened else "before the response headers"
            self._fail(RequestFailReason.STREAM_DISCONNECTED, f"the connection ended {where}")
        elif self._is_over:
            self._finish()

    def _decode(self, size: int) -> None:
        """The oldest bytes; where they are no records, the stream has failed."""
        if not size:
            return
        events = self._decoder.feed(bytes(self._buffer[:size]))
        del self._buffer[:size]
        self._lazy.received(events, size, self._runtime.now())
        if self._decoder.error is not None:
            if self._server is not None and self.exchange is not None and not self.exchange.over:
                self._server.client_closed(self.exchange)
            self._fail(RequestFailReason.PROTOCOL_ERROR, self._decoder.error)

    def _look_again(self) -> None:
        """Also if nothing comes, where text may be told then."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        wait_s = self._lazy.wait_s(self._runtime.now())
        if wait_s is not None:
            self._looking = self._scheduler.after(wait_s, self._look, "look for text")

    def _tell(self, portion: Portion | None) -> None:
        if portion is not None:
            self._order.reply_to.tell(
                StreamEvents(turn_id=self.turn_id, events=portion.events, at=portion.at)
            )

    def _fail(self, reason: RequestFailReason, detail: str, status: int | None = None) -> None:
        self._finish(StreamFailure(reason=reason, detail=detail, http_status=status))

    def _finish(self, failure: StreamFailure | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if self._opened:
            self._tell(self._lazy.all(self._runtime.now()))
        if self._looking is not None:
            self._looking.cancel()
        self._runtime.streams.remove(self)
        closed = StreamClosed(
            turn_id=self.turn_id, failure=failure, at=self._runtime.now(), is_aborted=self._aborted
        )
        self._order.reply_to.tell(closed)
        self._on_closed.tell(closed)


class _NotAsked:
    def abort(self) -> None:
        pass


class SimQuestion:
    """One GET beside the streams. `answer` may say after how many seconds to ask it again; where it
    finds none, `otherwise` is told after `limit_s`, or once aborted."""

    def __init__(
        self,
        runtime: SimRuntime,
        what: str,
        limit_s: float,
        reply_to: Mailbox[Any],
        answer: Callable[[LlamaServer | None], Any],
        otherwise: Callable[[], Any],
    ) -> None:
        self._scheduler, self._machine = runtime.scheduler, runtime.machine
        self._what, self._reply_to, self._is_told = what, reply_to, False
        self._answer, self._otherwise = answer, otherwise
        self._event = self._scheduler.after(_PROBE_S * self._machine.slowness, self._ask, what)
        self._timer = runtime.call_at(runtime.now() + limit_s, self.abort)

    def abort(self) -> None:
        if not self._is_told:
            self._end_soon()

    def _ask(self) -> None:
        answer = self._answer(self._machine.listening())
        if isinstance(answer, float):
            self._event = self._scheduler.after(answer, self._ask, self._what)
        elif answer is not None:
            self._tell(answer)

    def _end_soon(self) -> None:
        self._event.cancel()

        def fail() -> None:
            self._tell(self._otherwise())

        self._event = self._scheduler.after(
            0.001 * self._machine.slowness, fail, f"{self._what} ends without an answer"
        )

    def _tell(self, message: Any) -> None:
        self._is_told = True
        self._event.cancel()
        self._timer.cancel()
        self._reply_to.tell(message)


class _Asker:
    """A host's future, as where an answer is told."""

    def __init__(self, reply: Reply[Any]) -> None:
        self._reply = reply

    def tell(self, message: Any) -> bool:
        if isinstance(message, Exception):
            self._reply.fail(message)
        else:
            self._reply.answer(message)
        return True


class SimToolThread:
    """The thread of one call, which does not listen."""

    def __init__(self) -> None:
        self.has_returned = False
        self.given_up_to: Mailbox[StuckToolThreads] | None = None

    def is_alive(self) -> bool:
        return not self.has_returned

    @property
    def is_stuck(self) -> bool:
        """It runs, and nobody waits for it."""
        return self.given_up_to is not None and not self.has_returned

    def give_up(self, reply_to: Mailbox[StuckToolThreads]) -> None:
        if not self.has_returned:
            self.given_up_to = reply_to
            reply_to.tell(StuckToolThreads(change=1))
