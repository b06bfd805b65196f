"""Nature: does the kinds of faults.py to one world, at random moments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from llama_worker.server.blame import fault_of_xid, gpu_lost, uncorrectable_memory_error
from llama_worker.server.health import probe_timeout_s
from llama_worker.server.messages import ProbeOutcome
from llama_worker.server.roll_call import ANSWER_TIMEOUT_S, ASK_INTERVAL_S
from llama_worker.server.termination import Signal
from llama_worker.types.worker import StartFailReason
from tests.simulation.dice import Dice
from tests.simulation.faults import KINDS, Kind, Scope, Stage, longest_load_s
from tests.simulation.invariants import QUICK_S, Fault, Truth
from tests.simulation.promises import Promise
from tests.simulation.runtime import SimServerProcess
from tests.simulation.scheduler import SimulatedActor
from tests.simulation.server import Exchange, LlamaServer, Reply

if TYPE_CHECKING:
    from tests.simulation.world import World

HOUR_S = 3600.0
_GIVEN_UP_S = ASK_INTERVAL_S + ANSWER_TIMEOUT_S + 10.0  # timers are late, threads sleep
_TOOL_S = 12.0  # a request may be in its tools when a fault of the server begins
# Five looks at it, a second apart, each as late as timers are; and what it has to reap.
_GUARD_SILENT_S = 5 * 1.8 + 3.0
_EMPTY = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":null}]}\n\n'
# what goes out before the connection ends, and whether the body ends in the regular way
_LAST_BYTES = {
    "connection reset": (b"", False),
    "cut in a record": (b'data: {"choices":[{"index":0,"del', True),
    "ends without a finish": (b"", True),
    "error record": (
        b'data: {"error":{"code":500,"message":"CUDA error","type":"server_error"}}\n\n',
        True,
    ),
    "garbage": (b"data: {garbage\n\n", True),
}
_ARGUMENTS = (
    b"data: "
    b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"%s"}}]}}]}\n\n'
) % (b"1,2," * 16)
# NVIDIA's numbers: nothing computes on the GPU any more; a process is gone, which may be another;
# to be ignored
_FATAL_XIDS, _PROCESS_XIDS, _HARMLESS_XIDS = (48, 79, 95, 119), (8, 13, 31, 94, 999), (43, 45, 63)
_HTTP_DEAD = ("HTTP thread dead", "connections cut, HTTP dead")
_OWN_DICE = 0xD6E8FEB86659FD93
_LAUNCH_FAILURES = {
    "spawn fails": (StartFailReason.SPAWN_FAILED, "no such file"),
    "port taken": (StartFailReason.PORT_IN_USE, "the port is taken by another process"),
}


class Nature:
    """What it does is drawn from its own generator; `calm` ends it."""

    def __init__(self, world: World, dice: Dice) -> None:
        setting, machine = world.setting, world.machine
        self._scheduler, self._machine, self._invariants = (
            world.scheduler,
            machine,
            world.invariants,
        )
        self._dice, self._profile = dice, world.profile
        self._is_in_one_piece = world.is_in_one_piece
        self._in_one_piece: list[Truth] = []  # those that are, ended ones too
        self._apart = Dice(setting.seed ^ _OWN_DICE)  # so that other draws stay as they are
        kinds = {KINDS[name]: weight for name, weight in setting.kinds.items()}
        kinds = kinds or {kind: kind.weight for kind in KINDS.values()}
        self.is_calm = False
        self.counts: Counter[str] = Counter()
        self._kinds = {
            kind: weight for kind, weight in kinds.items() if kind.scope is not Scope.REPLY
        }
        self._reply_kinds = {
            kind: weight for kind, weight in kinds.items() if kind.scope is Scope.REPLY
        }
        rate = setting.faults_per_hour
        if world.has_short_ones:  # a server that dies first hides what else is wrong
            rate *= 0.25
        self._mean_s = HOUR_S / rate if rate else math.inf
        self._next_load: Kind | None = None
        self._crashes_left: int | None = None  # of a crash loop
        self._at_next_request: list[Kind] = []
        self._on_server: dict[int, list[Fault]] = {}  # by epoch: those that hurt every request
        self._loading_faults: dict[int, Fault] = {}
        self._blocked: list[SimulatedActor] = []
        self._held_up: set[int] = set()  # launches that are unkillable for minutes
        self._tool_kinds: dict[int, str] = {}
        # of the next call: which kind, after how long, with which error
        self._bios: tuple[str, float | None, str | None] | None = None
        machine.loads = self._load
        machine.launch_failure = self._launch_failure
        machine.twist = self._twist
        machine.tool_call = self._tool_call
        machine.bios_call = self._bios_call
        machine.on_signal = self._on_signal
        machine.on_death = lambda server: self._on_server.pop(server.epoch, None)
        machine.on_exit = self._on_exit
        world.invariants.on_admitted = self._admitted

    def begin(self) -> None:
        if self._mean_s < math.inf and self._kinds:
            self._later(self._dice.waiting_time(self._mean_s), self._strike, "nature")

    def calm(self) -> None:
        """Nothing new goes wrong, and what lasts is over."""
        self.is_calm = True
        self._machine.lacks_threads = self._machine.looks_hang = False
        self._next_load = self._bios = None
        for each in self._blocked:
            self._scheduler.unblock_actor(each)

    def reply_kind(self, chance: float) -> str | None:
        if self.is_calm or not self._reply_kinds or not self._dice.chance(chance):
            return None
        return self._dice.weighted(self._reply_kinds).name

    def _later(self, seconds: float, call: Callable[[], object], what: str) -> None:
        self._scheduler.after(seconds, call, what, of_host=False)

    def _fault(
        self, name: str, *, epoch: int | None = None, request_id: int | None = None
    ) -> Fault:
        self.counts[name] += 1
        return self._invariants.fault(KINDS[name], epoch=epoch, request_id=request_id)

    def _strike(self) -> None:
        if self.is_calm:
            return
        self._later(self._dice.waiting_time(self._mean_s), self._strike, "nature")
        kind = self._dice.weighted(self._kinds)
        if kind.scope in (Scope.SERVER, Scope.HOST) and self._dice.chance(0.6):
            self._at_next_request.append(kind)
        else:
            self.strike(kind)

    def strike(self, kind: Kind) -> None:
        """Do it now, if there is anything to do it to and it is not calm."""
        if self.is_calm:
            return
        server = self._machine.listening()
        match kind.scope:
            case Scope.LOAD:
                self._next_load = kind
                if server is not None and self._dice.chance(0.5):
                    self._crash(server, "crash", 139)
            case Scope.SERVER if server is not None and server.loaded:
                wedged = server.frozen or server.stopped or server.http_dead
                if not wedged or kind.name in ("crash", "killed by the system", "guard killed"):
                    self._to_server(kind, server)
            case Scope.KILL if server is not None and not (server.frozen or server.stopped):
                self._to_process(kind, server)
            case Scope.HOST:
                self._to_host(kind)

    # ------------------------------------------------------------ the server at work

    def _to_server(self, kind: Kind, server: LlamaServer) -> None:
        name, dice, within_s = kind.name, self._dice, self._shortest_s()
        match name:
            case "crash":
                self._crash(server, name, dice.choice((1, 134, 139, -6, -11)))
            case "killed by the system":
                if self._apart.chance(0.5):
                    server.oom_evidence = "the kernel killed it for lack of memory"
                self._crash(server, name, -9)
            case "guard killed":
                self._fault(name, epoch=server.epoch)
                self._process_of(server).kill_guard()
            case "pause":
                self._fault(name, epoch=server.epoch)
                server.freeze(spins=dice.chance(0.5))
                self._later(dice.between(0.1, within_s), server.thaw, "the pause ends")
            case "short SIGSTOP":
                self._fault(name, epoch=server.epoch)
                server.stop_signal()
                self._later(
                    dice.between(0.1, within_s), partial(self._machine.resume, server), "SIGCONT"
                )
            case "guard stopped":
                self._fault(name, epoch=server.epoch)
                self._process_of(server).stop_guard(for_ever=dice.chance(0.5))
            case "connections cut, HTTP dead":
                self._hurt(name, server)
                server.http_dead = True
                for exchange in list(server.exchanges):
                    server.hang_up(exchange, regular=False)
            case "GPU lost" | "another process's GPU error":
                self._gpu_error(name, server)
            case "sidecar's CPU":
                server.begin_sidecar()
                server.freeze(spins=False)
                self._hurt(name, server)
            case _:
                self._wedge(name, server)

    def _shortest_s(self) -> float:
        """Of pauses that no limit minds."""
        profile = self._profile
        limits = (
            profile.headers_timeout_s,
            profile.idle_stream_timeout_s,
            profile.prefill_liveness_timeout_s,
        )
        return 0.4 * min(limit or 1e9 for limit in limits)

    def _process_of(self, server: LlamaServer) -> SimServerProcess:
        return next(each for each in self._machine.launched if each.server is server)

    def _gpu_error(self, name: str, server: LlamaServer) -> None:
        """It is told only of a launch that is watched: one that became READY while there was a
        thread for that."""
        epoch, tell = self._machine.gpu_watch
        if epoch != server.epoch:
            return
        dice = self._apart
        if name == "GPU lost":
            server.freeze(spins=True)
            self._hurt(name, server)
            number = dice.choice(_FATAL_XIDS)
            found = fault_of_xid("GPU 0", number) if dice.chance(0.5) else None
            tell(found or dice.choice((gpu_lost, uncorrectable_memory_error))("GPU 0"))
            return
        self._fault(name, epoch=epoch)
        number = dice.choice(_PROCESS_XIDS + _HARMLESS_XIDS)
        fault = fault_of_xid("GPU 0", number)
        if fault is not None:
            tell(fault)
        if number in _PROCESS_XIDS:
            self._invariants.expect_warning(f"GPU 0: Xid {number}", epoch)

    def _wedge(self, name: str, server: LlamaServer) -> None:
        if name == "SIGSTOP":
            server.stop_signal()
        elif name != "HTTP thread dead":
            server.freeze(spins=name in ("livelock", "stuck task queue"))
        server.ignores_term |= name in ("livelock", "stuck task queue")
        server.http_dead = name in ("dead altogether", "HTTP thread dead")
        fault = self._hurt(name, server)
        if name == "stuck task queue":  # what `/slots` waits for, at once or after a while
            silence = partial(self._silence_slots, fault, server)
            self._later(self._dice.log_between(0.1, 300.0), silence, "/slots falls silent")
        if self._dice.chance(0.3):  # some come back by themselves
            self._later(
                self._dice.log_between(1.0, 4000.0),
                lambda: self._recover(fault, server),
                "it goes on",
            )

    def _silence_slots(self, fault: Fault, server: LlamaServer) -> None:
        server.slots_silent = fault.ended_at is None

    def _recover(self, fault: Fault, server: LlamaServer) -> None:
        if server.gone:
            return
        for each in (fault, *self._on_server.get(server.epoch, ())):
            each.ended_at = self._scheduler.host_time
        server.http_dead = server.ignores_term = server.slots_silent = False
        server.back_at = self._scheduler.host_time
        server.thaw()
        self._machine.resume(server)

    def _hurt(self, name: str, server: LlamaServer) -> Fault:
        fault = self._fault(name, epoch=server.epoch)
        self._bound(fault, server)
        return fault

    def _bound(self, fault: Fault, server: LlamaServer) -> None:
        """Every request in flight must be found; those that are admitted later, too
        (`_admitted`)."""
        self._on_server.setdefault(server.epoch, []).append(fault)
        self._bound_active(fault)
        if fault.kind.name in (*_HTTP_DEAD, "SIGSTOP", "dead altogether"):
            bound_s = KINDS["HTTP thread dead"].found_within(self._profile, Stage.UNKNOWN)
            if bound_s is not None:
                self._invariants.expect(
                    Promise.HUNG_OR_SLOW,
                    bound_s + (self._profile.silent_work_timeout_s or 0.0),
                    f"{fault.kind.name} of launch {server.epoch}",
                    lambda: server.gone or server.killed or fault.ended_at is not None,
                )

    def _bound_active(self, fault: Fault) -> None:
        for request_id in self._invariants.active:
            self._expect(fault, self._invariants.requests[request_id])

    def _admitted(self, truth: Truth) -> None:
        while self._at_next_request:
            kind = self._at_next_request.pop(0)
            self._later(self._dice.log_between(0.001, 60.0), partial(self.strike, kind), "nature")
        if self._is_in_one_piece(truth.request_id):
            self._in_one_piece.append(truth)
        for fault in self._on_server.get(truth.epoch, ()):
            if fault.ended_at is None:
                self._expect(fault, truth)

    def _expect(self, fault: Fault, truth: Truth) -> None:
        if fault.kind.name not in _HTTP_DEAD:  # its requests go on

            def bound_s() -> float | None:
                found_s = fault.kind.found_within(self._profile, self._stage(truth, fault))
                return found_s and found_s + _TOOL_S

            self._invariants.expect_found(fault, bound_s, truth)

    def _crash(self, server: LlamaServer, name: str, returncode: int) -> None:
        self._bound_active(self._fault(name, epoch=server.epoch))
        server.unkillable = False
        server.die(returncode)

    # ------------------------------------------------------------ one request

    def prepare(self, name: str, request_id: int, reply: Reply) -> None:
        """The reply is to go wrong in this way."""
        if name.startswith("status"):
            reply.status = int(name[-3:])
            self._bound_reply(name, request_id)
        elif name.startswith("tool"):
            reply.calls_tool = True
            self._tool_kinds[request_id] = name
        else:
            reply.twist = name

    def _bound_reply(self, name: str, request_id: int, epoch: int | None = None) -> Fault:
        truth = self._invariants.requests[request_id]
        fault = self._fault(
            name, epoch=epoch if epoch is not None else truth.epoch, request_id=request_id
        )
        if truth.ended_at is None:
            bound_s = partial(fault.kind.found_within, self._profile, Stage.UNKNOWN)
            self._invariants.expect_found(fault, bound_s, truth)
        else:
            fault.ended_at = self._scheduler.host_time
        return fault

    def _twist(self, server: LlamaServer, exchange: Exchange) -> None:
        """The moment has come, or comes again, for what the reply's `twist` says."""
        name = exchange.reply.twist
        assert name is not None
        first = not exchange.twists
        if first or not self._scheduler.host_is_halted:
            exchange.twists += 1
        most = KINDS[name].most_records
        if exchange.twists == most and not self._scheduler.host_is_halted:
            what = f"request {exchange.request_id} takes more than {most} records of {name!r}"
            self._invariants.expect(Promise.HUNG_OR_SLOW, QUICK_S, what, lambda: exchange.over)
        if first:
            fault = self._bound_reply(name, exchange.request_id, server.epoch)
            if fault.kind.neighbours_spare and fault.ended_at is None:
                truth = self._invariants.requests[exchange.request_id]
                self._invariants.beside_others.expect_end(fault, truth, exchange)
        if name in _LAST_BYTES:
            data, regular = _LAST_BYTES[name]
            server.send(exchange, data)
            server.hang_up(exchange, regular=regular)
            return
        if name in ("repeated lines", "endless characters", "endless arguments"):
            exchange.advanced_at = self._scheduler.host_time  # nonsense, but new
        match name:
            case "crash in the answer":
                server.send_words(exchange, "the last words")
                server.die(-11)
            case "repeated lines":
                server.send_words(
                    exchange, "the same line comes over and over again, for ever and ever\n" * 4
                )
            case "endless characters":
                server.send_words(exchange, "/" * 64)
            case "endless arguments":
                server.send(exchange, _ARGUMENTS)
            case "empty frames":
                server.send(exchange, _EMPTY)
            case "dead stream, live neighbour":
                exchange.dead = True
            case "request lost":
                server.release_slot(exchange)
            case "frozen progress" if first:
                server.freeze(spins=True)
                # it hurts whoever comes later, also where this request has ended by now
                fault.request_id = fault.ended_at = None
                self._bound(fault, server)
                server.repeat(exchange, 2.0, partial(server.send_progress, exchange))

    # ------------------------------------------------------------ a launch, and its end

    def _launch_failure(self) -> tuple[StartFailReason, str] | None:
        kind = self._next_load
        if kind is None or kind.name not in _LAUNCH_FAILURES:
            return None
        self._next_load = None
        self._fault(kind.name, epoch=self._invariants.lifecycle.epoch)
        return _LAUNCH_FAILURES[kind.name]

    def _load(self, server: LlamaServer) -> None:
        kind, self._next_load = self._next_load, None
        if kind is not None and kind.name == "crash loop":
            self._crashes_left = 8 if self._crashes_left is None else self._crashes_left - 1
            self._next_load = kind if self._crashes_left else None
            self._crashes_left = self._crashes_left or None
        load_s = server.build.load_s * self._dice.between(0.8, 1.2)
        if kind is None or kind.scope is not Scope.LOAD:
            server.begin_load(load_s)
            return
        fault = self._fault(kind.name, epoch=server.epoch)
        match kind.name:
            case "load crashes" | "crash loop":
                server.port_taken = self._apart.chance(0.2)
                server.begin_load(load_s * self._dice.random(), returncode=1)
            case "canary fails":
                server.first_outcome = ProbeOutcome.CANARY_FAILED
                server.begin_load(load_s)
            case "a stranger has the port":
                server.first_outcome = ProbeOutcome.OTHER_PROCESS
                server.begin_load(load_s)
            case "load hangs":
                server.begin_load(None, works=False)
            case "load spins":
                server.begin_load(None)
                # nothing ends it but a host that has had enough
                if longest_load_s(self._profile) is None:
                    self._later(900.0, lambda: server.die(-6), "the load gives up")
            case _:
                slow_s = load_s + self._dice.log_between(1.0, 1200.0)
                server.begin_load(min(slow_s, 0.5 * (longest_load_s(self._profile) or math.inf)))
        bound_s = kind.found_within(self._profile, Stage.UNKNOWN)
        if bound_s is not None:
            what = f"{kind.name} of launch {server.epoch}"
            self._loading_faults[server.epoch] = fault
            # A probe that met it stopped has its time first.
            wakes_s = probe_timeout_s(self._profile) + bound_s

            def spared_s() -> float:
                now = self._invariants.now
                back_at = now if server.stopped else server.back_at
                noise_at = server.seemed_busy_at if kind.name == "load hangs" else -math.inf
                return max(back_at + wakes_s, noise_at + bound_s) - now

            self._invariants.expect(
                Promise.HUNG_OR_SLOW,
                bound_s + load_s,
                what,
                lambda: (
                    server.gone
                    or server.killed
                    or server.frozen  # by another fault, which has its own bound
                    or self._host_ends_it_since(fault.began_at)
                ),
                spared_s,
            )

    def _host_ends_it_since(self, since: float) -> bool:
        """It has its grace period then, and needs no verdict."""
        called_at = max(self._invariants.stop_called_at, self._invariants.drain_called_at)
        return called_at >= since

    def _to_process(self, kind: Kind, server: LlamaServer) -> None:
        self._fault(kind.name, epoch=server.epoch)
        if kind.name == "SIGTERM ignored":
            server.ignores_term = True
        else:
            server.unkillable = True
            server.freeze(spins=False)
            if kind.name == "unkillable for minutes":
                self._held_up.add(server.epoch)

    def _on_signal(self, process: SimServerProcess, signal: Signal) -> None:
        self._invariants.signaled(process, signal)
        fault = self._loading_faults.pop(process.epoch, None)
        if fault is not None and signal is not Signal.TERMINATE:
            self._invariants.found.append(
                (fault.kind.name, self._scheduler.host_time - fault.began_at)
            )
        if process.epoch in self._held_up and process.server is not None:
            self._held_up.remove(process.epoch)
            seconds = self._dice.log_between(20.0, 900.0)
            self._later(seconds, process.server.become_killable, "what held it up is over")

    def _on_exit(self, process: SimServerProcess) -> None:
        what = f"the end of launch {process.epoch}, whatever its guard does"
        self._invariants.expect(
            Promise.KILLS_AND_RESTARTS, _GUARD_SILENT_S, what, lambda: process.ended
        )

    # ------------------------------------------------------------ the host program

    def _to_host(self, kind: Kind) -> None:
        dice, machine, name = self._dice, self._machine, kind.name
        if name == "BIOS provider raises":
            self._bios = name, 0.001, "KeyError: 'now'"
            return
        if name == "BIOS provider blocks":
            self._bios = name, None if dice.chance(0.5) else dice.log_between(0.1, 100.0), None
            return
        fault = self._fault(name)
        fault.ended_at = self._scheduler.host_time
        match name:
            case "actor's exception":
                actors = [each for each in self._scheduler.actors if each.actor.role != "worker"]
                if actors:
                    self._scheduler.break_actor(dice.choice(actors))
            case "an actor is blocked":
                self._block_actor(fault)
            case "host always late":
                self._be_late(20 + dice.below(60))
            case "a probe hangs":
                machine.looks_hang = True
                seconds = dice.log_between(1.0, 300.0)
                self._later(
                    seconds, partial(setattr, machine, "looks_hang", False), "looks return again"
                )
            case "host stalled" | "host and server stalled" if not self._scheduler.host_is_halted:
                seconds = dice.log_between(1.0, 4000.0)
                self._scheduler.halt_host(seconds)
                server = machine.listening()
                if name == "host and server stalled" and server is not None and not server.stopped:
                    server.stop_signal()
                    later_s = seconds + self._apart.log_between(0.01, self._shortest_s())
                    self._later(later_s, partial(machine.resume, server), "all go on")
            case "host lacks threads":
                machine.lacks_threads = True
                seconds = dice.log_between(0.1, 30.0)
                self._invariants.blind_until = self._scheduler.host_time + seconds
                self._later(
                    seconds,
                    partial(setattr, machine, "lacks_threads", False),
                    "there are threads again",
                )
            case "clock set":
                machine.unix_jump_s += dice.between(-7200.0, 7200.0)

    def _block_actor(self, fault: Fault) -> None:
        """One handler does not return for a while, or never: whoever owes an answer is given up."""
        actors = [each for each in self._scheduler.actors if each.actor.role != "worker"]
        actors = [each for each in actors if not each.is_blocked]
        if not actors:
            return
        blocked = self._dice.choice(actors)
        fault.ended_at = None
        self._scheduler.block_actor(blocked)
        self._blocked.append(blocked)
        ends = self._invariants.actor_blocked(blocked)
        what = f"{blocked.name}, which is blocked while there is work"
        busy_s: Callable[[], float] | None = None

        def look() -> None:
            nonlocal busy_s
            scheduler = self._scheduler
            if blocked.actor.is_given_up or not blocked.is_blocked:
                fault.ended_at = scheduler.host_time
                ends()
                return
            busy_s = (busy_s or scheduler.stopwatch()) if self._invariants.active else None
            if busy_s is not None and busy_s() > _GIVEN_UP_S:
                raise Promise.HUNG_OR_SLOW(f"not given up within {_GIVEN_UP_S:g} s: {what}")
            self._later(10.0 if busy_s is None else 1.0, look, "the blocked actor")

        look()
        if self._dice.chance(0.5):
            unblock = partial(self._scheduler.unblock_actor, blocked)
            self._later(self._dice.log_between(1.0, 2000.0), unblock, "a handler returns")

    def _be_late(self, times: int) -> None:
        """A machine that never gets to what is due: suspended, overcommitted."""
        if self._scheduler.host_is_halted or not times or self.is_calm:
            return
        late_s = self._dice.between(6.0, 20.0)
        self._scheduler.halt_host(late_s)
        again = partial(self._be_late, times - 1)
        self._later(late_s + self._dice.between(0.5, 8.0), again, "late again")

    def _bios_call(self, request_id: int) -> tuple[float | None, str | None]:
        if self._bios is None:
            return 0.001, None
        (name, after_s, error), self._bios = self._bios, None
        self._fault(name, request_id=request_id).ended_at = self._scheduler.host_time
        return after_s, error

    def _stage(self, truth: Truth, fault: Fault) -> Stage:
        exchange = _exchange(truth) if truth.epoch == fault.epoch else None
        if exchange is not None and exchange.has_headers and not exchange.in_one_piece:
            return Stage.SPEAKING if exchange.spoke else Stage.SILENT
        if self._is_beside_one_piece(fault):
            return Stage.IN_ONE_PIECE
        if exchange is None or any(map(self._has_headers, self._invariants.active)):
            return Stage.UNKNOWN
        return Stage.WAITING

    def _is_beside_one_piece(self, fault: Fault) -> bool:
        """Whether such a reply was awaited since: what waits may wait for it."""
        return any(
            each.epoch == fault.epoch and (each.ended_at is None or each.ended_at > fault.began_at)
            for each in self._in_one_piece
        )

    def _has_headers(self, request_id: int) -> bool:
        exchange = _exchange(self._invariants.requests[request_id])
        return exchange is not None and exchange.has_headers

    def _tool_call(self, request_id: int) -> tuple[float | None, bool]:
        kind = self._tool_kinds.get(request_id)
        if kind is None:
            return self._dice.log_between(0.001, 5.0), True
        self._bound_reply(kind, request_id)
        return (None, False) if kind == "tool never returns" else (0.01, False)


def _exchange(truth: Truth) -> Exchange | None:
    """The one that the server works on."""
    exchange = truth.exchanges[-1] if truth.exchanges else None
    return None if exchange is None or exchange.over else exchange
