"""One run: a worker, its host, its machine and Nature, all from one seed; and what came of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from llama_worker.config.profiles import Recycle, RestartPolicy, TimeoutProfile
from llama_worker.errors import WorkerClosed
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.types.chat import ToolDef
from llama_worker.types.request import RequestState
from llama_worker.types.worker import WorkerState
from tests.simulation.bench import Bench
from tests.simulation.dice import Dice
from tests.simulation.faults import KINDS
from tests.simulation.host import SHORT, Host, Plan
from tests.simulation.invariants import QUICK_S, Invariants
from tests.simulation.leases import IN_ONE_PIECE
from tests.simulation.many_runs import Figures
from tests.simulation.nature import HOUR_S, Nature
from tests.simulation.promises import Promise
from tests.simulation.scheduler import Choices
from tests.simulation.server import BUSY_USE, FROM_DISK, IDLE, IDLE_USE, Build, Headers, Reply, Use
from tests.simulation.strangers import FOREIGN, Strangers
from tests.simulation.trace import Trace

_PLANS = 0x9E3779B97F4A7C15
_PROXY = 0xC2B2AE3D27D4EB4F
_VARIETY = 0x165667B19E3779F9
_SIGNALS = 0x27D4EB2F165667C5
_STRANGERS = 0x85EBCA77C2B2AE63
_SHORT_ONES = 0xA0761D6478BD642F
# what an idle server may show, and what a model that comes from disk shows
_IDLE = (IDLE_USE, Use(cpu=2.5, read_bytes=3e5, major_faults=3.0))
_READING = (
    FROM_DISK,
    Use(cpu=IDLE, read_bytes=1.1e6),  # a slow share
    Use(cpu=IDLE, read_bytes=2.5e5, major_faults=60.0),  # at random
)
# number, and whether it answers `/slots` in the middle of a batch
_GENERATIONS = (*[(11434, True)] * 6, (10453, True), (10452, False), (9093, False), (None, True))
TOOL: ToolDef = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object"}},
}
EXIT_TOOL: ToolDef = {
    "type": "function",
    "function": {"name": "report", "parameters": {"type": "object"}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    seed: int
    hours: float = 24.0
    requests_per_hour: float = 1.5  # a third of them by clients of a proxy
    faults_per_hour: float = 0.15
    kinds: Mapping[str, float] = field(default_factory=dict)  # weights by name; empty: all
    # as runs were at first: the model calls no exit tool, nobody else uses the server, and every
    # client of the proxy wants a stream
    is_early: bool = False


@dataclass(kw_only=True)
class Report(Figures):
    hours: float = 0.0
    messages: int = 0
    requests: int = 0
    restarts: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    # which fault, and after how many seconds
    found: list[tuple[str, float]] = field(default_factory=list)
    digest: str = ""


class Failure(Exception):
    """A run broke an invariant: its setting, which plays it again, which one, and the last
    steps."""

    def __init__(self, setting: Setting, broken: BaseException, story: list[str]) -> None:
        super().__init__(setting, broken, story)
        self.setting, self.broken, self.story = setting, broken, story

    def __str__(self) -> str:
        return f"{self.setting}: {type(self.broken).__name__}: {self.broken}"


class World(Bench):
    def __init__(
        self,
        setting: Setting,
        choices: Choices | None = None,
        dice: Dice | None = None,
        trace: Trace | None = None,
    ) -> None:
        dice = dice or Dice(setting.seed)
        self.setting = setting
        self.profile = _profile(dice, idle=setting.hours > 24)
        slots = 1 + dice.below(4)
        self._for_short_ones = Dice(setting.seed ^ _SHORT_ONES)
        # short requests come and go all the time, beside longer ones; in days they would be many
        may_have_short_ones = not setting.is_early and setting.hours <= 24
        self.has_short_ones = may_have_short_ones and self._for_short_ones.chance(0.2)
        if self.has_short_ones:
            slots = max(2, slots)
        variety = Dice(setting.seed ^ _VARIETY)  # apart, so that other draws stay as they are
        self.profile = _varied_profile(variety, self.profile)
        build = _varied_build(variety, _build(dice, self.profile, slots))
        if self.has_short_ones:  # else each prompt that is read may hold an image
            build = replace(build, takes_media=False)
        plans = Dice(setting.seed ^ _PLANS)  # apart, so that other draws stay as they are
        policy = _varied_policy(variety, _policy(plans, setting.hours))
        self.ends_by_death = plans.chance(0.2)
        self._for_swapper = plans.fork()
        if choices is None:
            wild = dice.chance(0.5)
            choices = Choices(
                dice.fork().random,
                preempts=0.2 if wild else 0.02,
                sleeps=0.02 if wild else 0.002,
                late=0.1 if wild else 0.02,
            )
        super().__init__(
            choices,
            trace or Trace(),
            now=1000.0 + 1e5 * dice.random(),
            build=build,
            for_machine=dice.fork(),
            for_runtime=dice.fork(),
            slots=slots,
            timeouts=self.profile,
            restart=policy,
            normal_tools=(TOOL,),
            exit_tools=(EXIT_TOOL,),
            on_signal=lambda signal, *, request_id, job_name: self.invariants.told.signalled(
                request_id, signal
            ),
            tool_runner=SimpleNamespace(
                run_tool=lambda **call: None
            ),  # never called: the runtime runs no code of a host's
            bios_provider=lambda context: "",  # not the default, so that its thread is simulated
            on_event=lambda event: self.invariants.told.heard(event),
            result_ttl_s=plans.log_between(30.0, 3600.0) if plans.chance(0.25) else None,
        )
        self._variety = variety
        self._for_proxy = Dice(setting.seed ^ _PROXY)
        self._for_signals = Dice(setting.seed ^ _SIGNALS)
        self.invariants: Invariants = Invariants(self)
        self.strangers = Strangers(self, Dice(setting.seed ^ _STRANGERS))
        self.strangers.is_over |= setting.is_early or self.has_short_ones
        self.nature = Nature(self, dice.fork())
        self.host = Host(self, dice.fork())
        self.machine.on_launch = lambda epoch: self.invariants.launch(self.machine.launched, epoch)
        self.machine.reply_to = self._reply
        self.machine.on_exchange = lambda begun: self.invariants.requests[
            begun.request_id
        ].exchanges.append(begun)
        self._dice = dice.fork()
        self._twist_chance = min(
            0.5, setting.faults_per_hour / max(setting.requests_per_hour, 1e-9)
        )
        if self.has_short_ones:
            self._twist_chance = min(0.5, 4 * self._twist_chance)

    def _reply(self, request_id: int, exchange: int) -> Reply:
        if request_id >= FOREIGN:
            return self.strangers.reply()
        if self.job_of(request_id) == SHORT:
            return self._short_reply(request_id)
        self.strangers.may_come(self.server)
        dice = self._dice
        reports = self.build.reports_progress and not self.is_in_one_piece(request_id)
        is_seen = reports or self.build.shows_reading
        share, most = (0.1, 8000) if self.setting.is_early or not is_seen else (1.5, math.inf)
        longest_s = share * (self.profile.silent_work_timeout_s or 3600.0)
        longest = min(most, int(longest_s * self.build.prefill_tokens_per_s))
        tokens = 1 + int(dice.log_between(1, 300))
        # A batch is as long, with that of other slots. On a real server each token is one: a slot
        # that writes does not stand still for as long as it takes to be suspected.
        if self.build.cpu_shows:
            step_s = 0.2 * (self.profile.suspect_after_s or math.inf)
        else:
            step_s = 0.1 * self.profile.headers_timeout_s
        reply = Reply(
            key=f"r{request_id}t{exchange}",
            prompt_tokens=10 + int(dice.log_between(1, max(2, longest))),
            reasoning_tokens=dice.below(tokens) if dice.chance(0.3) else 0,
            text_tokens=tokens,
            step_tokens=max(1, int(min(tokens // 10, step_s * self.build.decode_tokens_per_s))),
            calls_tool=exchange <= 3 and dice.chance(0.15),
            finish="length" if dice.chance(0.05) else "stop",
            encode_s=self._variety.log_between(0.01, self._longest_step_s()),
        )
        if self.build.drafts:
            reply.draft_s = self._variety.log_between(0.01, self._longest_step_s())
        if not self.setting.is_early and not self._is_leased(request_id):
            reply.signals = 1 + self._for_signals.below(2) if self._for_signals.chance(0.1) else 0
        twist = self.nature.reply_kind(self._twist_chance) if exchange == 1 else None
        if twist is not None and self._is_leased(request_id) and KINDS[twist].most_records:
            twist = None  # what it says is its client's to judge
        if self.is_in_one_piece(request_id):
            twist = None  # it says nothing until it is complete
        if twist is not None:
            is_at_once = twist in ("frozen progress", "request lost")
            if twist == "request lost" and self.has_short_ones:
                is_at_once = self._for_short_ones.chance(0.5)
            reply.twist_at = 0 if is_at_once else dice.below(reply.answer_tokens) + 1
            self.nature.prepare(twist, request_id, reply)
        return reply

    def _short_reply(self, request_id: int) -> Reply:
        """Two tokens to a prompt that hardly fills a batch."""
        tokens = 1 + self._for_short_ones.below(20)
        return Reply(key=f"r{request_id}", prompt_tokens=tokens, text_tokens=2, step_tokens=1)

    def _longest_step_s(self) -> float:
        """Of four requests together, beside a batch: within the limits."""
        profile = self.profile
        if self.build.cpu_shows:
            return 0.06 * (profile.silent_work_timeout_s or 3600.0)
        return 0.05 * profile.headers_timeout_s

    def job_of(self, request_id: int) -> str:
        """Its job's name; empty if it is not known."""
        admitted = self.actor._table.find(request_id)
        return "" if admitted is None else str(admitted.job_name)

    def _is_leased(self, request_id: int) -> bool:
        return self.job_of(request_id).startswith("responses:")

    def is_in_one_piece(self, request_id: int) -> bool:
        """Whether it is a proxy's client's, and its reply is no stream."""
        return self.job_of(request_id).startswith(IN_ONE_PIECE)

    def run(self) -> Report:
        self.do(self._live, self.come_to_rest, self.leave)
        return Report(
            hours=self.setting.hours,
            messages=self.scheduler.messages_count,
            requests=len(self.invariants.requests),
            restarts=self.invariants.restarts_count,
            faults=self.nature.counts,
            outcomes=self.host.outcomes,
            found=self.invariants.found,
            digest=self.trace.digest,
        )

    def do(self, *parts: Callable[[], object]) -> None:
        """The parts, in order; raises Failure. Nothing of the world is left then."""
        with self.in_use():
            try:
                for part in parts:
                    part()
            except Exception as broken:
                raise Failure(self.setting, broken, self.trace.story(60)) from broken

    def _live(self) -> None:
        setting, host, dice = self.setting, self.host, self._dice
        hectic = setting.requests_per_hour > 10
        host.run(host.keep_running(stops_every_s=1800.0 if hectic else 40 * HOUR_S))
        clients = 1 + dice.below(3)
        for _ in range(clients):
            host.run(host.client(every_s=1.5 * clients * HOUR_S / setting.requests_per_hour))
        host.run(host.meddler(every_s=300.0 if hectic else 4 * HOUR_S))
        host.run(host.swapper(self._for_swapper, every_s=1200.0 if hectic else 20 * HOUR_S))
        every_s = 3 * HOUR_S / setting.requests_per_hour
        host.run(host.proxied_client(self._for_proxy, every_s=every_s))
        if self.has_short_ones:
            host.run(host.short_ones(self._for_short_ones.fork()))
        self.nature.begin()
        self.scheduler.run_for(setting.hours * HOUR_S)

    def come_to_rest(self) -> None:
        """Once nothing new goes wrong, the worker comes to rest, and a fresh request
        completes."""
        self.nature.calm()
        self.strangers.is_over = True
        self.scheduler.run_until(lambda: not self.scheduler.host_is_halted, math.inf)
        self.host.is_leaving = True
        for server in self.machine.servers:
            server.become_killable()
        rest_s = self.host.start_bound_s + (self.profile.silent_work_timeout_s or 0.0) + 7200.0
        end_at = self.scheduler.now + rest_s
        while self.scheduler.run_until(self._is_at_rest, end_at):
            self.scheduler.run_for(10.0)
            if self._is_at_rest():  # nobody has come at the last moment
                break
        else:
            raise Promise.KILLS_AND_RESTARTS(
                f"{self.invariants.state} with {self.invariants.active} {rest_s:.0f} s after "
                "the faults"
            )
        if not all(future.done() for future in self.host.asked):
            raise Promise.KILLS_AND_RESTARTS("an ask() has not resolved, and nothing is in flight")
        # what a fault left behind (a frozen server, say) may have to be found first
        for _ in range(4):
            done: list[str] = []
            self.host.run(self._fresh_request(done))
            if not self.scheduler.run_until(partial(bool, done), self.scheduler.now + 2 * rest_s):
                what = f"a fresh request has no answer {2 * rest_s:.0f} s after the faults"
                raise Promise.KILLS_AND_RESTARTS(what)
            if done[0] == "completed":
                self._check_told()
                return
            self.scheduler.run_for(300.0)
        what = f"fresh requests do not complete after the faults: {done[0]}"
        raise Promise.KILLS_AND_RESTARTS(what)

    def _check_told(self) -> None:
        """What the host can hear of, or ask for, is what happened."""
        while True:
            self.scheduler.run_until(self._is_at_rest, math.inf)
            self.scheduler.run_for(QUICK_S)
            if self._is_at_rest():  # else a planned restart has begun
                break
        asked = self.host.quick(self.worker.get_worker_status(), "get_worker_status()")
        also = self.host.quick(self.worker.get_debug_info(), "get_debug_info()")
        both = (asked, also)
        self.scheduler.run_until(lambda: all(each.done() for each in both), math.inf)
        status, debug = asked.get(timeout=0), also.get(timeout=0)
        self.invariants.told.check(status, debug)
        counted = debug["stuck_tool_threads_count"]
        stuck = sum(thread.is_stuck for thread in self.runtime.tool_threads)
        if counted != stuck:
            raise Promise.TOOLS(f"{counted} stuck tool threads, it says, of {stuck}")

    def _is_at_rest(self) -> bool:
        rest = (WorkerState.READY, WorkerState.FAILED, WorkerState.STOPPED)
        return self.invariants.state in rest and not self.invariants.active

    def _fresh_request(self, done: list[str]) -> Plan:
        try:
            yield self.host.start()
        except Exception as error:
            done.append(f"start() raised {error}")
            return
        answer = yield self.host.quick(self.worker.submit("fresh", "", "hello"), "submit()")
        if not answer["ok"]:
            done.append(answer["error"])
            return
        result = yield self.worker.result(answer["request_id"])
        completed = result["ok"] and result["state"] is RequestState.COMPLETED
        done.append("completed" if completed else str(result))

    def leave(self) -> None:
        """After `close()`, and where the worker's actor died before it, nothing is
        left."""
        if self.ends_by_death:
            self._worker_dies()
        self.host.close()
        self.scheduler.run_until(lambda: not self.scheduler.actors, self.scheduler.now + 30.0)
        left: list[str] = [simulated.name for simulated in self.scheduler.actors]
        left += [f"stream {stream.turn_id}" for stream in self.runtime.streams]
        left += [
            f"process of launch {each.epoch}" for each in self.machine.launched if not each.ended
        ]
        left += ["timer"] * len(self.scheduler.waiting_timers)
        if not self.ends_by_death:
            left += [
                f"request {i}"
                for i, truth in self.invariants.requests.items()
                if truth.ended_at is None
            ]
        if left:
            raise Promise.LEAVES_NOTHING(f"left after close(): {', '.join(left)}")

    def _worker_dies(self) -> None:
        """In the middle of a request; every future is answered, every later call raises
        WorkerClosed."""
        submitted = self.host.quick(self.worker.submit("last", "", "hello"), "submit()")
        self.scheduler.run_for(self._dice.log_between(0.001, 30.0))
        # an answer may take longer than that
        self.scheduler.run_until(submitted.done, self.scheduler.now + QUICK_S)
        answer = submitted.get(timeout=0)
        open_futures: list[WorkerFuture[Any]] = [self.worker.start()]
        if answer["ok"]:
            open_futures += [self.worker.result(answer["request_id"]), self.worker.ask("hello")]
        simulated = next(each for each in self.scheduler.actors if each.actor is self.actor)
        self.invariants.stop_called_at = self.scheduler.now
        self.invariants.fault(KINDS["actor's exception"])
        self.scheduler.break_actor(simulated)
        self.scheduler.run_until(
            lambda: not self.scheduler.actors, self.scheduler.now + self.host.stop_bound_s
        )
        # Readers are threads of their own, and whether a kill had its effect is looked at behind
        # the actor's end, too.
        self.scheduler.run_for(self.profile.kill_timeout_s + QUICK_S)
        if not all(future.done() for future in open_futures):
            raise Promise.ANSWERS("the worker's actor died, and a future has no answer")
        with suppress(WorkerClosed):
            self.worker.get_worker_status()
            raise Promise.ANSWERS("the worker's actor died, and its handle takes calls")


def _profile(dice: Dice, *, idle: bool) -> TimeoutProfile:
    """`idle`: for a run of days in which little happens. It has a health probe every ten minutes,
    not every 30 s."""
    make = dice.choice((TimeoutProfile.fast, TimeoutProfile.normal, TimeoutProfile.slow_prefill))
    profile: TimeoutProfile = make()
    if dice.chance(0.2):
        profile = replace(profile, load_timeout_s=1800.0)
    if idle:
        profile = replace(profile, health_probe_interval_s=600.0)
    return profile


def _policy(dice: Dice, hours: float) -> RestartPolicy:
    """With planned recycling (for its age 60 times a run at most) and a limit for nonsense, or
    without."""
    recycle = None
    if dice.chance(0.3):
        requests, age_s = 1 + dice.below(20), max(dice.log_between(60.0, 1e5), 60.0 * hours)
        most = 500 + dice.below(200) if dice.chance(0.3) else None
        recycle = Recycle(
            max_requests=requests if dice.chance(0.7) else None, max_age_s=age_s, max_anon_mib=most
        )
    return RestartPolicy(
        recycle=recycle,
        degenerate_outputs_before_restart=1 + dice.below(3) if dice.chance(0.3) else None,
    )


def _varied_profile(dice: Dice, profile: TimeoutProfile) -> TimeoutProfile:
    return replace(
        profile,
        stop_grace_s=dice.choice((10.0, 10.0, 0.0, 0.5, 30.0)),
        kill_timeout_s=dice.choice((10.0, 10.0, 4.0, 15.0)),
        liveness_probe_interval_s=dice.choice((5.0, 5.0, 2.0, 8.0)),
    )


def _varied_policy(dice: Dice, policy: RestartPolicy) -> RestartPolicy:
    if dice.chance(0.5):
        return policy
    return replace(
        policy,
        restart_backoff_s=dice.choice((0.0, 1.0, 5.0)),
        backoff_factor=dice.choice((1.0, 1.5, 3.0)),
        backoff_max_s=dice.choice((10.0, 60.0)),
        restart_window_s=dice.choice((60.0, 120.0, 1800.0)),
        max_restarts_per_window=1 + dice.below(8),
        stable_after_s=dice.choice((60.0, 600.0, 6000.0)),
        transport_failures_before_restart=1 + dice.below(3),
        server_errors_before_restart=1 + dice.below(5),
    )


def _varied_build(dice: Dice, build: Build) -> Build:
    number, answers_during_batches = dice.choice(_GENERATIONS)
    return replace(
        build,
        number=number,
        answers_during_batches=answers_during_batches,
        drafts=dice.chance(0.15),
        leak_mib=dice.choice((0, 5, 20)),
        idle=dice.choice(_IDLE),
        reading=dice.choice(_READING),
        busy=dice.choice((BUSY_USE, Use(cpu=60.0))),
    )


def _build(dice: Dice, profile: TimeoutProfile, slots: int) -> Build:
    """A server whose honest work stays well within the profile's limits."""
    slowness = (profile.silent_work_timeout_s or 3600.0) / 3600.0  # 1: slow hardware; fast: 1/12
    cpu_shows = dice.chance(0.8)
    prefill = dice.log_between(20.0, 200.0) / slowness**1.5
    batch_tokens = 2048 if cpu_shows else min(256, int(prefill * 0.1 * profile.headers_timeout_s))
    headers = dice.choice(tuple(Headers)) if cpu_shows else Headers.IN_SLOT
    return Build(
        slots=slots
        if dice.chance(0.8)
        else 1,  # fewer than the worker's: requests wait behind a neighbour
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=dice.log_between(1.0, 20.0) / slowness**1.5,
        batch_tokens=batch_tokens,
        load_s=dice.log_between(0.5, 100.0 * slowness),
        load_reads=dice.chance(0.3),
        cpu_shows=cpu_shows,
        headers=headers,
        reports_progress=dice.chance(0.7) or not cpu_shows,
        shows_slots=dice.chance(0.8),
    )
