"""One run of an UpstreamActor: a server that nobody here started, and the clients of a proxy that
wait for it. The server's processes are not seen; only what it sends, and its `/slots`.

What must hold: no request is given up without a fault; a stream that gets nothing is given up in
time, and its connection closed; how a request ended is known to its client; when nobody waits any
more, nothing is asked, watched or planned.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pykka

from llama_worker.actors.base import LiveSet
from llama_worker.actors.upstream import UpstreamActor
from llama_worker.config.profiles import TimeoutProfile
from llama_worker.config.settings import WorkerConfig
from llama_worker.mailbox import Mailbox
from llama_worker.request.table import Admitted
from llama_worker.server.health import probe_timeout_s
from llama_worker.server.messages import Probed, ProbeOutcome
from llama_worker.server.traits import ServerTraits
from tests.simulation.bench import COMMAND
from tests.simulation.dice import Dice
from tests.simulation.faults import KINDS, SLACK_S, Stage
from tests.simulation.leases import ProxiedClient
from tests.simulation.machine import Machine
from tests.simulation.promises import Promise, Violation
from tests.simulation.runtime import SimQuestion, SimRuntime
from tests.simulation.scheduler import Choices, Scheduler
from tests.simulation.server import Build, Exchange, Headers, LlamaServer, Reply
from tests.simulation.trace import Trace

CLIENTS = 12
OF_ONE = ("connection lost", "hung stream", "request lost", "wrong reply")
OF_THE_SERVER = ("livelock", "stopped")


class UpstreamSimRuntime(SimRuntime):
    """See `ports.UpstreamRuntime`."""

    probes_asked = 0

    def probe(self, epoch: int, reply_to: Mailbox[Probed]) -> SimQuestion:
        self.probes_asked += 1

        def probed(outcome: ProbeOutcome) -> Probed:
            return Probed(epoch=epoch, outcome=outcome, detail="told", traits=ServerTraits())

        def answer(server: LlamaServer | None) -> Probed | None:
            return probed(ProbeOutcome.READY) if server is not None and server.answers else None

        limit_s = probe_timeout_s(self._config.timeouts)
        return SimQuestion(
            self, "probe", limit_s, reply_to, answer, otherwise=lambda: probed(ProbeOutcome.FAILED)
        )


class Client:
    """One of the proxy's, and what was done to it."""

    def __init__(self, number: int, proxied: ProxiedClient) -> None:
        self.number, self.proxied = number, proxied
        self.exchange: Exchange | None = None  # as the server sees it
        self.fault = ""
        self.has_left = self.is_over = False

    @property
    def is_given_up(self) -> bool:
        return self.proxied.exchange.is_given_up


class UpstreamWorld:
    """See the module; `run` raises Violation, with the last steps as a note."""

    def __init__(self, seed: int) -> None:
        self.seed, self.trace = seed, Trace()
        dice = self._dice = Dice(seed)
        make = dice.choice((TimeoutProfile.fast, TimeoutProfile.normal))
        profile: TimeoutProfile = make()
        self.profile = profile
        self.build = _build(dice)
        choices = Choices(dice.fork().random, preempts=0.02, sleeps=0.005, late=0.02)
        self.scheduler = Scheduler(choices, self.trace, 1000.0)
        self.machine = Machine(self.scheduler, dice.fork(), self.build)
        self.machine.loads = lambda server: server.begin_load(0.001)
        self.machine.reply_to = self._reply
        self.machine.twist = self._twist
        self.machine.on_exchange = self._arrived
        config = WorkerConfig(
            "upstream", "127.0.0.1", 8080, COMMAND, slots=self.build.slots, timeouts=profile
        )
        self.runtime = UpstreamSimRuntime(config, self.scheduler, self.machine, dice.fork())
        self.clients: dict[int, Client] = {}
        self.faults: Counter[str] = Counter()
        self.given_up: Counter[str] = Counter()
        self.server_fault, self.struck_at = "", math.inf
        self._ref: Any = UpstreamActor.start(LiveSet(), self.runtime, profile)
        # all that ProxiedClient asks of a world
        self._for_clients: Any = SimpleNamespace(
            runtime=self.runtime, worker=SimpleNamespace(actor_ref=self._ref)
        )

    def run(self) -> None:
        """All clients come and are served, or given up."""
        try:
            self.machine.start_server(0)
            self.scheduler.run_for(1.0)
            at_s = 0.0
            for number in range(1, CLIENTS + 1):
                at_s += self._dice.log_between(0.1, 300.0)
                self.scheduler.after(at_s, partial(self._come, number), "host")
            if self._dice.chance(0.4):
                fault = self._dice.choice(OF_THE_SERVER)
                self._later(self._dice.between(1.0, at_s), partial(self._strike, fault))
            for _ in range(self._dice.below(4)):
                self._later(self._dice.between(1.0, at_s), self._slow_down)
            longest_s = max(self._limits_s) + at_s
            end_at = self.scheduler.now + CLIENTS * longest_s
            if not self.scheduler.run_until(self._is_over, end_at):
                waiting = [each.number for each in self.clients.values() if not each.is_over]
                raise Promise.HUNG_OR_SLOW(f"requests {waiting} have not ended")
            self._check_rest()
        except Violation as broken:
            again = f"UpstreamWorld({self.seed}).run()"
            broken.add_note("\n".join([*self.trace.story(60), f"again: {again}"]))
            raise
        finally:
            pykka.ActorRegistry.unregister(self._ref)
            self.scheduler.forget()

    @property
    def _limits_s(self) -> tuple[float, ...]:
        profile = self.profile
        limits = (
            profile.silent_work_timeout_s,
            profile.prefill_liveness_timeout_s,
            profile.idle_stream_timeout_s,
        )
        return tuple(limit or 0.0 for limit in limits)

    def _is_over(self) -> bool:
        return len(self.clients) == CLIENTS and all(each.is_over for each in self.clients.values())

    def _later(self, seconds: float, call: Any) -> None:
        self.scheduler.after(seconds, call, "nature", of_host=False)

    # ------------------------------------------------------------ clients

    def _come(self, number: int) -> None:
        client = Client(number, ProxiedClient(self._for_clients, number, has_image=False))
        self.clients[number] = client
        name, now = f"responses:{number}", self.runtime.now()
        admitted = Admitted(number, 0, name, now, is_leased=True)
        client.proxied.exchange.begin(admitted, api_key=None, unix=self.runtime.unix)
        client.proxied.ask()
        client.proxied.open()
        client.proxied.closed._add_waker(partial(self._closed, client))
        if self.server_fault:
            self._expect_found(client)
        if self._dice.chance(0.1):
            self.scheduler.after(
                self._dice.log_between(0.001, 100.0), partial(self._leave, client), "host"
            )

    def _leave(self, client: Client) -> None:
        if not client.is_over:
            client.has_left = True
            client.proxied.abort.abort()

    def _closed(self, client: Client) -> None:
        exchange = client.proxied.exchange
        failure = client.proxied.closed.get(timeout=0).failure
        is_given_up = exchange.is_given_up
        exchange.record_closed(failure)
        told = exchange.failure_for_client(failure)
        client.proxied.end()
        client.is_over = True
        hurt = client.fault or self.server_fault
        if is_given_up:
            self.given_up[hurt] += 1
        if client.has_left:
            return
        if is_given_up and not hurt:
            raise Promise.HUNG_OR_SLOW(f"request {client.number} is given up, by no fault: {told}")
        if told is None and hurt and not client.proxied.has_finish:
            raise Promise.SHOWS_FAILURES(f"request {client.number} ended badly, and nobody is told")
        if told is not None and not hurt:
            raise Promise.WATCHES_CLIENTS(f"request {client.number} was told of {told}")

    # ------------------------------------------------------------ the server, and what goes wrong

    def _reply(self, request_id: int, exchange: int) -> Reply:
        dice, build = self._dice, self.build
        idle_s = self.profile.idle_stream_timeout_s or 0.0
        step_s = dice.log_between(0.05, 0.2 * idle_s / build.slots)
        step_tokens = max(1, int(step_s * build.decode_tokens_per_s))
        longest_s = 0.2 * min(self._limits_s) / build.slots
        reply = Reply(
            key=f"r{request_id}",
            prompt_tokens=2 + int(dice.random() * longest_s * build.prefill_tokens_per_s),
            text_tokens=step_tokens * (1 + dice.below(30)),
            step_tokens=step_tokens,
        )
        if dice.chance(0.3):
            reply.twist = dice.choice(OF_ONE)
            reply.twist_at = dice.below(reply.text_tokens)
        return reply

    def _arrived(self, exchange: Exchange) -> None:
        self.clients[exchange.request_id].exchange = exchange

    def _twist(self, server: LlamaServer, exchange: Exchange) -> None:
        client, name = self.clients[exchange.request_id], exchange.reply.twist
        assert name is not None
        self._hurt(client, name)
        exchange.reply.twist = None
        match name:
            case "connection lost":
                server.hang_up(exchange, regular=False)
            case "wrong reply":
                server.send(exchange, b"data: {garbage\n\n")
                server.hang_up(exchange, regular=True)
            case "hung stream":
                exchange.dead = True
            case "request lost":
                server.release_slot(exchange)

    def _strike(self, name: str) -> None:
        server = self.machine.listening()
        assert server is not None
        self.server_fault, self.struck_at = name, self.scheduler.host_time
        self.faults[name] += 1
        for client in self.clients.values():
            self._expect_found(client)
        if name == "livelock":
            server.freeze(spins=True)
        else:
            server.stop_signal()

    def _slow_down(self) -> None:
        """Something honest: a pause of the server's, or this program does not run."""
        server = self.machine.listening()
        if server is None or self.server_fault or server.frozen or server.stopped:
            return
        seconds = self._dice.log_between(0.1, 0.2 * min(self._limits_s))
        if self._dice.chance(0.5):
            server.freeze(spins=False)
            self._later(seconds, lambda: None if self.server_fault else server.thaw())
        elif not self.scheduler.host_is_halted:
            self.scheduler.halt_host(100.0 * seconds)

    def _hurt(self, client: Client, name: str) -> None:
        client.fault = name
        self.faults[name] += 1
        self._expect_found(client)

    def _expect_found(self, client: Client) -> None:
        self._later(SLACK_S, partial(self._check_found, client, self.scheduler.host_time))

    def _check_found(self, client: Client, since: float) -> None:
        """A stopped server is found by its health, a stream that generated by its own silence where
        no slot can pass for its own; else by the longest limit since anybody had data, or the end
        of a request was a slot's move."""
        if client.is_over or client.proxied.closed.done():
            return
        own, looks_s = client.exchange, 2 * self.profile.liveness_probe_interval_s + SLACK_S
        bound_s = max(self._limits_s) + looks_s
        if self.server_fault == "stopped":
            health = KINDS["HTTP thread dead"].found_within
            bound_s = health(self.profile, Stage.UNKNOWN) or math.inf
            since = max(since, self.struck_at)
        elif own is not None and own.decoded and not self.build.shows_slots:
            bound_s = (self.profile.idle_stream_timeout_s or math.inf) + looks_s
        else:
            for other in (each.exchange for each in self.clients.values() if each is not client):
                if other is not None:
                    had_slot_until = other.slot_until if other.slot_until < math.inf else since
                    since = max(since, other.advanced_at, had_slot_until)
        left_s = since + bound_s - self.scheduler.host_time
        if left_s <= 0.0:
            hurt = client.fault or self.server_fault
            raise Promise.HUNG_OR_SLOW(f"request {client.number} under {hurt!r}")
        self._later(left_s + 1e-3, partial(self._check_found, client, since))

    # ------------------------------------------------------------ at rest

    def _check_rest(self) -> None:
        """Once nobody waits."""
        self.scheduler.run_for(60.0)
        asked = self.runtime.probes_asked, self.runtime.slots_asked
        self.scheduler.run_for(2 * max(self._limits_s))
        left = [f"stream {each.turn_id}" for each in self.runtime.streams]
        left += ["timer"] * len(self.scheduler.waiting_timers)
        if asked != (self.runtime.probes_asked, self.runtime.slots_asked):
            left.append("questions to the server")
        if left:
            raise Promise.LEAVES_NOTHING(f"nobody waits, and there are {', '.join(left)}")
        open_ones = [
            each.number
            for each in self.clients.values()
            if each.exchange is not None
            and not (each.exchange.over or each.exchange.closed_by_client)
        ]
        if open_ones:
            raise Promise.CANCELS(f"the connections of {open_ones} are open")
        (actor,) = [each.actor for each in self.scheduler.actors]
        if actor._exchanges or actor._probes:
            raise Promise.LEAVES_NOTHING(f"{actor._exchanges} are watched, {actor._probes} asked")


def _build(dice: Dice) -> Build:
    return Build(
        slots=1 + dice.below(4),
        prefill_tokens_per_s=dice.log_between(50.0, 500.0),
        decode_tokens_per_s=dice.log_between(5.0, 50.0),
        batch_tokens=dice.choice((64, 256)),
        load_s=1.0,
        headers=dice.choice(tuple(Headers)),
        reports_progress=dice.chance(0.7),
        shows_slots=dice.chance(0.6),
        takes_media=dice.chance(0.5),
    )
