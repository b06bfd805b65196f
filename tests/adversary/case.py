"""One generated server against the real worker, in virtual time: is it given up, and when?

An honest one does what honest servers do: it is slow, computes long batches, pauses, holds text
back, queues, refuses `/slots`. A wedged one is honest up to a random moment.

Honest is who shows some sign of work within each limit that the profile names. So the ranges below
end where no sign is left: text is not held back for longer than `headers_timeout_s` while another
request waits for its headers and neither CPU time nor data shows that anybody works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.errors import RequestFailed
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.server.request_watch import RequestWatch
from llama_worker.types.request import RequestState
from tests.simulation.bench import IMAGE, LINKED_IMAGE, VIDEO, Bench
from tests.simulation.dice import Dice
from tests.simulation.scheduler import Choices
from tests.simulation.server import Build, Exchange, Headers, LlamaServer, Reply
from tests.simulation.strangers import FOREIGN, Unheard
from tests.simulation.trace import Trace

PROFILE = TimeoutProfile.normal()
HORIZON_S = 3 * 3600.0
# 15 s are promised: a round of looks may have begun just before what it shows. Timers fire late,
# and threads sleep.
SLACK_S = 15.0 + 3.0
DEEPEST = 4.0  # how much longer a token at the end of the longest prompts takes than the first
_MEDIA = 0x94D049BB133111EB
_LINKS = 0x85EBCA6B27D4EB2F
_KINDS = 0xC2B2AE3D27D4EB4F
_QUEUES = 0x9E3779B97F4A7C15
_MODELS = 0xD6E8FEB86659FD93
_SHORT_ONES = 0xA0761D6478BD642F
_SHORT_ONES_COUNT = 30
_SHORT_BATCH_S = 100.0  # such a batch passes for no livelock, however short earlier ones were
_LONGEST_INFILL_S = 100.0  # chats wait for it, whatever they wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one case."""

    is_void: bool  # the wedge never had anybody to hurt
    # since the wedge began, or (honest) since the start; None: spared
    given_up_after_s: float | None
    promised_s: float | None  # by the profile, for such a wedge; None: nothing was promised
    detail: str
    slots_asked: int
    messages: int


class Silence(Trace):
    """Nobody wants the story: half the time of a run."""

    def message(self, now: float, actor: str, message: Any) -> None: ...


class Case(Bench):
    """See the module. `wedge` hurts somebody and says whom, or says that there is nobody yet."""

    def __init__(
        self, seed: int, wedge: Callable[[Case], bool] | None = None, *, trace: Trace | None = None
    ) -> None:
        dice = self.dice = Dice(seed)
        build, self.deepest, self.batch_s, self.longest_batch_s = _build(dice)
        self.for_media = Dice(seed ^ _MEDIA)  # so that other draws stay as they are
        self.for_links = Dice(seed ^ _LINKS)
        self.for_kinds = Dice(seed ^ _KINDS)
        self.for_queues = Dice(seed ^ _QUEUES)
        models = Dice(seed ^ _MODELS)
        self.for_short_ones = Dice(seed ^ _SHORT_ONES)
        self.short_ones_come = self.for_short_ones.chance(0.1)  # all the time
        takes_media = models.chance(0.5)
        build = replace(build, drafts=self.for_media.chance(0.05), takes_media=takes_media)
        if build.cpu_shows:
            self.has_strangers = dice.chance(0.5)
        else:  # who waits behind a stranger knows only by the slots that anybody works
            self.has_strangers = build.shows_reading and models.chance(0.5)
            if self.has_strangers:
                build = self._with_short_batches(build)
        super().__init__(
            Choices(dice.fork().random, preempts=0.02, sleeps=0.005, late=0.02),
            trace or Silence(),
            now=1000.0,
            build=build,
            for_machine=dice.fork(),
            slots=build.slots + dice.below(3),  # some wait in the server
            timeouts=PROFILE,
            loop_detector=None,  # its words are all alike
            for_runtime=dice.fork(),
        )
        self.wedge = wedge
        self.wedged_at: float | None = None
        self.promised_s: float | None = None
        self.by_pace = False  # a batch may be told from a hang by what was learnt of others
        self.by_steps = False  # the same of a token, which is looked at for as long again at most
        self.is_bounded = False  # whatever others receive
        self.machine.reply_to = self._reply
        self.machine.twist = self._hold_back
        self.exchanges: list[Exchange] = []  # ended ones too
        self.machine.on_exchange = self.exchanges.append
        self.to_come = 0
        self._short_ones_left = _SHORT_ONES_COUNT
        self._draws_images = self.for_media.chance(0.05)
        self.has_images = False  # which take as long as they take
        self.was_halted = False  # a batch that took the machine's sleep, too, passes for a long one
        self.paused_s = 0.0  # in all, by what is honest
        self._running = 0
        self._gave_up: tuple[float, str] | None = None
        self._held_since: dict[int, int] = {}  # tokens, by request
        self._delays_tokenizing()

    def _with_short_batches(self, build: Build) -> Build:
        """Such that each is over well before who waits for headers is given up."""
        self.longest_batch_s = 0.3 * PROFILE.headers_timeout_s
        factor = max(1.0, self.batch_s / self.longest_batch_s)
        self.batch_s /= factor
        return replace(
            build,
            prefill_tokens_per_s=build.prefill_tokens_per_s * factor,
            deep_tokens=build.deep_tokens * factor,
        )

    def run(self) -> Outcome:
        with self.in_use():
            started = self.worker.start()
            self.scheduler.run_until(started.done, self.scheduler.host_time + 600.0)
            started.get(timeout=0)
            self._serve_before()
            self.machine.on_signal = lambda process, signal: self._given_up(
                str(self.actor._server.lifecycle.last_error)
            )
            self._plan()
            end = self.scheduler.host_time + HORIZON_S
            self.scheduler.run_until(lambda: self._gave_up is not None or self._is_over(), end)
            return self._outcome()

    def _serve_before(self) -> None:
        """Most servers have served somebody when they wedge; some were started anew since."""
        for _ in range(0 if self.dice.chance(0.1) else 1 + self.dice.below(3)):
            answer = self.worker.ask("before", job_name="before")
            self.scheduler.run_until(answer.done, self.scheduler.host_time + HORIZON_S)
            if not self._has_completed(answer):
                return
        if self.dice.chance(0.2):
            again = self.worker.restart("as in service")
            self.scheduler.run_until(again.done, self.scheduler.host_time + 600.0)
            again.get(timeout=0)

    def _has_completed(self, answer: WorkerFuture[Any]) -> bool:
        try:
            return answer.get(timeout=0)["state"] is RequestState.COMPLETED
        except RequestFailed as failure:
            self._given_up(str(failure))
            return False

    @property
    def slots_are_clear(self) -> bool:
        """Whether `/slots` shows at any time what each request does, and nobody new comes. What a
        draft model reads behind a first token is not shown."""
        is_seen = not self.build.drafts or all(each.decoded > 1 for each in self.server.busy)
        tells = self.build.shows_slots and self.build.answers_during_batches
        return tells and is_seen and self.all_have_come

    @property
    def all_have_come(self) -> bool:
        """Whether every request of the plan is with the server, or has ended."""
        return not self.to_come and self._running == sum(
            each.request_id < FOREIGN for each in self.server.exchanges
        )

    def _is_over(self) -> bool:
        return not self.to_come and not self._running

    def _outcome(self) -> Outcome:
        since = self.wedged_at if self.wedged_at is not None else 1000.0
        promised_s = self._promised_s()
        server = self.machine.servers[0]
        somebody_moves = not server.frozen and any(not each.dead for each in server.busy)
        if (
            promised_s is not None
            and not self.is_bounded
            and (promised_s > (PROFILE.silent_work_timeout_s or 0.0) or not somebody_moves)
        ):
            promised_s += max(0.0, server.advanced_at - since)  # from the last data of anybody
        gave_up_at, detail = self._gave_up or (None, "")
        return Outcome(
            is_void=self.wedge is not None and self.wedged_at is None,
            given_up_after_s=None if gave_up_at is None else gave_up_at - since,
            promised_s=promised_s,
            detail=detail,
            slots_asked=self.runtime.slots_asked,
            messages=self.scheduler.messages_count,
        )

    def _promised_s(self) -> float | None:
        """With what the watch had learnt by the end."""
        if self.promised_s is None or not (self.by_pace or self.by_steps):
            return self.promised_s
        actors = [each.actor for each in self.scheduler.actors]
        (watch,) = [actor._watch for actor in actors if actor.role == "watchdog"]
        if self.by_steps:
            gaps = [each.longest_gap_s for each in watch._requests.progress.values()]
            longest_s = max((gap or math.inf for gap in gaps), default=0.0)
            return self.promised_s + min(6.0 * longest_s, PROFILE.suspect_after_s or 0.0)
        reading = [each for each in self.server.busy if not each.decoded]
        tokens = sum(each.in_batch or 1 for each in self.server.busy)
        depth = max(each.processed + each.in_batch for each in reading)
        limit_s = _longest_standstill_s(watch._requests, tokens, depth)
        if limit_s is None:
            return self.promised_s
        last_resort_s = self.promised_s - SLACK_S
        return min(last_resort_s, (PROFILE.suspect_after_s or 0.0) + limit_s) + SLACK_S

    def _given_up(self, detail: str) -> None:
        if self._gave_up is None:
            self._gave_up = self.scheduler.host_time, detail

    def later(self, seconds: float, call: Callable[[], object], what: str = "adversary") -> None:
        """The world's doing, not the host's."""
        self.scheduler.after(seconds, call, what, of_host=False)

    def _plan(self) -> None:
        dice = self.dice
        self.to_come = 1 + dice.below(2 * self.config.slots)
        for _ in range(self.to_come):
            self.later(dice.log_between(0.01, 300.0), self._submit)
        if self.short_ones_come:
            self.to_come += _SHORT_ONES_COUNT
            self._ask_shortly()
        for _ in range(dice.below(4)):
            self.later(dice.log_between(1.0, 1000.0), self._oddity)
        if self.wedge is not None:
            self.later(dice.log_between(0.1, 300.0), self._strike)

    def _ask_shortly(self) -> None:
        """One of many, whose answers take a second."""
        self._submit()
        self._short_ones_left -= 1
        if self._short_ones_left:
            self.later(self.for_short_ones.log_between(0.1, 60.0), self._ask_shortly)

    def _submit(self) -> None:
        self.to_come -= 1
        has_image = self._draws_images and self.for_media.chance(0.5) and self.build.takes_media
        self.has_images |= has_image
        prompt = IMAGE if has_image else "hello"
        if has_image and self.wedge is None:  # of a wedge beside one that is fetched nothing shows
            prompt = self.for_links.choice((IMAGE, LINKED_IMAGE, VIDEO))
        answer = self.worker.submit("job", "", prompt)
        self._running += 1
        answer._add_waker(partial(self._admitted, answer))

    def _admitted(self, answer: WorkerFuture[Any]) -> None:
        told = answer.get(timeout=0)
        if not told["ok"]:
            self._running -= 1
            return
        result = self.worker.result(told["request_id"])
        result._add_waker(partial(self._ended, result))

    def _ended(self, result: WorkerFuture[Any]) -> None:
        told = result.get(timeout=0)
        self._running -= 1
        if told["state"] is RequestState.FAILED:
            self._given_up(f"{told['fail_reason']}: {told['fail_detail']}")

    def _strike(self) -> None:
        assert self.wedge is not None
        if self.wedge(self):
            self.wedged_at = self.scheduler.host_time
            self.trace.note(self.scheduler.host_time, "WEDGED")
        elif not self._is_over():
            self.later(self.dice.log_between(0.1, 10.0), self._strike)

    def _oddity(self) -> None:
        """Something honest: a pause, a stop, a foreign client. A wedged server has no more of
        them."""
        server, dice = self.machine.listening(), self.dice
        if server is None or self.wedged_at is not None or server.frozen or server.stopped:
            return
        seconds = dice.log_between(0.1, 15.0)
        match dice.below(8):
            case 0 if self.for_queues.chance(0.5):
                self._fill_queue(server)
            case 0:
                if any(each.reply.twist for each in server.exchanges):
                    # where all text is held back, a longer one cannot be told from a hang
                    seconds = min(seconds, 4.0)
                self.paused_s += seconds
                server.freeze(spins=dice.chance(0.5))
                self.later(seconds, lambda: None if self.wedged_at is not None else server.thaw())
            case 1:
                self.paused_s += seconds
                server.stop_signal()
                self.later(seconds, partial(self.machine.resume, server))
            case 2 if self.has_strangers:
                connection: Any = Unheard()
                server.accept(connection, (FOREIGN + dice.below(1000), 1), {})
            case 3:
                self.was_halted = True
                halted_s = dice.log_between(1.0, 2000.0)
                self.scheduler.halt_host(halted_s)
                server.stop_signal()  # a machine that sleeps
                self.later(halted_s, partial(self.machine.resume, server))
            case 4:
                self._lose_cores(server)
            case 5:
                self._lose_memory(server)
            case 6:
                self.was_halted = True
                self._be_late(dice.below(40))
            case 7:
                self._cancel_one()

    def _fill_queue(self, server: LlamaServer) -> None:
        """It copies prompts to its cache, or prepares a grammar: CPU time, HTTP is well, and
        `/slots` waits for less than the minute after which its task queue passes for stuck."""
        seconds = self.for_queues.log_between(0.1, 50.0)
        server.freeze(spins=True)
        server.slots_silent = True
        self.later(seconds, partial(self._empty_queue, server))

    def _empty_queue(self, server: LlamaServer) -> None:
        if self.wedged_at is None:
            server.slots_silent = False
            server.thaw()

    def _cancel_one(self) -> None:
        """What was computed for it goes on to the end of its batch; one that is queued has a batch
        yet to come."""
        own = [each for each in self.server.exchanges if each.request_id < FOREIGN]
        if own:
            self.worker.cancel(self.dice.choice(own).request_id)

    def _be_late(self, times: int) -> None:
        """The host never gets to what is due, for a while."""
        if times and self.wedged_at is None and not self.scheduler.host_is_halted:
            late_s = self.dice.between(6.0, 20.0)
            self.scheduler.halt_host(late_s)
            again = partial(self._be_late, times - 1)
            self.later(late_s + self.dice.between(0.5, 8.0), again)

    def _lose_cores(self, server: LlamaServer) -> None:
        """Others compute on the machine for a while: prompts are read up to sixty times more slowly
        (CPU time is no sign of work then), as far as their batches stay within what the profile
        allows, and beyond eight times, as far as they don't pass for a livelock."""
        factor = min(
            self.dice.log_between(1.0, 60.0),
            self.longest_batch_s / self.batch_s,
            max(8.0, _SHORT_BATCH_S / self.batch_s),
        )
        if factor > 1.0 and self.build.reports_progress and server.slowness == 1.0:
            server.slow_down(factor)
            seconds = self.dice.log_between(1.0, 1000.0)
            self.later(seconds, lambda: None if server.gone else server.slow_down(1 / factor))

    def _lose_memory(self, server: LlamaServer) -> None:
        """The model was pushed out of the memory and is read from disk anew, in one batch."""
        if any(each.in_batch for each in server.busy):
            seconds = self.dice.log_between(1.0, 400.0)
            self.paused_s += seconds
            server.page_in(seconds)

    def _reply(self, request_id: int, turn: int) -> Reply:
        dice, build = self.dice, self.build
        longest = _longest_prompt(build, self.deepest)
        if request_id >= FOREIGN:  # what it gets, nobody sees
            longest_s = 1000.0 if build.shows_reading else 50.0
            longest = min(longest, build.prefill_tokens_per_s / self.deepest * longest_s)
        if not dice.chance(0.03):  # thousands of batches take long to simulate and tell little more
            longest = min(longest, 100.0 * build.batch_tokens)
        longest = max(2, int(longest))
        holds_back = dice.chance(0.2) and request_id < FOREIGN
        steps = 1 + int(dice.log_between(1, 60))
        # One step makes one token: a step of more of them, as here, is short.
        # else who waits for headers sees nothing for too long
        slowest_s = 30.0 if build.cpu_shows else 8.0
        step_s = dice.log_between(0.05, slowest_s / build.slots)
        step_tokens = max(1, int(build.decode_tokens_per_s * step_s))
        reply = Reply(
            key=f"r{request_id}",
            prompt_tokens=1 + int(dice.log_between(1, longest)),
            text_tokens=steps * step_tokens,
            step_tokens=step_tokens,
            fetch_s=self.for_links.log_between(0.1, 300.0),
            encode_s=self.for_media.log_between(0.1, self._longest_look_s()),
            draft_s=self.for_media.log_between(0.1, self._longest_look_s()) * build.drafts,
        )
        if request_id >= FOREIGN and self.wedge is None and self.for_kinds.chance(0.5):
            reply.is_infill = True
            longest_s = 1000.0 if build.shows_slots else _LONGEST_INFILL_S
            longest_tokens = int(longest_s * build.decode_tokens_per_s)
            reply.text_tokens = min(reply.text_tokens, max(1, longest_tokens))
        is_short = self.short_ones_come and request_id < FOREIGN and self.for_short_ones.chance(0.8)
        if is_short:
            reply.prompt_tokens = min(reply.prompt_tokens, 40)
            reply.text_tokens = max(1, int(build.decode_tokens_per_s))
        elif holds_back:
            reply.twist, reply.twist_at = "held back", 1 + dice.below(reply.text_tokens)
        return reply

    def _longest_look_s(self) -> float:
        """At an image, or at a prompt by a draft model. Who waits knows that somebody works by CPU
        time only."""
        longest_s = 400.0 if self.build.cpu_shows else 15.0
        return longest_s / self.build.slots

    def _hold_back(self, server: LlamaServer, exchange: Exchange) -> None:
        """It generates, and what it says may be the start of something: nothing is sent for
        minutes."""
        reply = exchange.reply
        if exchange.request_id not in self._held_since:
            self._held_since[exchange.request_id] = exchange.decoded
            let_go = partial(setattr, reply, "twist", None)
            self.later(self.dice.log_between(1.0, self._longest_hold_s()), let_go)
        exchange.decoded = min(reply.answer_tokens, exchange.decoded + 1)
        if exchange.decoded == reply.answer_tokens:
            reply.twist = None
        if reply.twist is None:
            held = range(self._held_since[exchange.request_id], exchange.decoded)
            server.send_words(exchange, "".join(reply.word(index) for index in held))

    def _longest_hold_s(self) -> float:
        build = self.build
        if not build.cpu_shows and self.config.slots > build.slots:
            return 8.0  # a step of the others and a pause come on top, where somebody waits
        if not (build.shows_slots and build.answers_during_batches):
            # while batches are long it cannot be told from a dead stream beside live ones
            return 300.0 if build.cpu_shows else 60.0
        return 600.0

    def _delays_tokenizing(self) -> None:
        serve, dice = self.machine.serve, self.dice.fork()

        def delayed(server: LlamaServer, stream: Any, body: Mapping[str, Any]) -> None:
            def arrives() -> None:
                if not stream._aborted and not server.gone:
                    serve(server, stream, body)

            self.later(dice.log_between(0.001, 10.0) if dice.chance(0.2) else 0.0, arrives)

        self.machine.serve = delayed  # type: ignore[method-assign]


def _longest_standstill_s(requests: RequestWatch, tokens: int, depth: int) -> float | None:
    """By what the watch has learnt, as docs/hung-or-slow.md says it."""
    first_s = requests.pace._cold_s if requests._is_cold else ()
    expected_s = requests.pace.expected_s(tokens, depth)
    if expected_s is None:
        return None
    limit_s = max(150.0, 10.0 * max(expected_s, *first_s, 0.0))
    return 2 * limit_s if requests._is_cold and not first_s else limit_s


def _build(dice: Dice) -> tuple[Build, float, float, float]:
    """An honest server, how much slower it is at the end of its longest prompts, the seconds that a
    full batch takes there, and those that `PROFILE` allows."""
    cpu_shows = dice.chance(0.8)
    slots = 1 + dice.below(4)
    batch_tokens = dice.choice((64, 256, 512, 2048))
    longest_s = (250.0 if cpu_shows else 90.0) / slots
    batch_s = dice.log_between(0.05, longest_s)
    deepest = dice.log_between(1.0, DEEPEST)
    number = dice.choice((*[11434] * 15, 9544, 10453, 9093, 10019, None))
    build = Build(
        number=number,
        answers_during_batches=dice.chance(0.5) if number is None else number >= 10453,
        slots=slots,
        prefill_tokens_per_s=deepest * batch_tokens / batch_s,
        decode_tokens_per_s=dice.log_between(0.5 * slots, 100.0),
        batch_tokens=batch_tokens,
        load_s=dice.log_between(0.5, 20.0),
        cpu_shows=cpu_shows,
        headers=dice.choice(tuple(Headers)) if cpu_shows else Headers.IN_SLOT,
        reports_progress=dice.chance(0.7) or not cpu_shows,
        shows_slots=dice.chance(0.85),
    )
    deep_tokens = _longest_prompt(build, deepest) / (deepest - 1) if deepest > 1.01 else math.inf
    return replace(build, deep_tokens=deep_tokens), deepest, batch_s, longest_s


def _longest_prompt(build: Build, deepest: float) -> float:
    """In tokens: each within the limits of who hears nothing until it is read."""
    is_seen = build.reports_progress or build.shows_reading
    silent_s = (2000.0 if is_seen else 500.0) / build.slots
    return build.prefill_tokens_per_s / deepest * silent_s
