"""A model of llama-server: one launch, from load to reaped, with the counters that /proc and
`/slots` would show.

The main loop works in batches, filled as the real server fills them (tests/recordings): every
slot that writes an answer takes one step of the reply's `step_tokens`; what is left of
`batch_tokens` goes to the slots that read a prompt, in the order of their numbers, so that a lower
one starves a higher one. After each batch every slot that reads sends its report, also one that got
nothing. A long batch holds up every slot; a closed connection is noticed between two batches. An
HTTP thread beside the loop accepts, answers probes and sends keepalives, whatever the loop does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_worker.request.submission import is_link
from llama_worker.server.messages import ProbeOutcome
from tests.simulation.scheduler import Event, Scheduler

if TYPE_CHECKING:
    from tests.simulation.machine import Machine
    from tests.simulation.runtime import SimStream

# CPU ticks per second of a process that waits, and of one thread that computes (b11434)
IDLE, BUSY = 0.6, 95.0
PING_S = 30.0
_START_MIB = 500

_encode = json.JSONEncoder(separators=(",", ":")).encode
# The records that are sent most, by far.
_WORDS = b'data: {"choices":[{"index":0,"delta":{"%b":%b},"finish_reason":null}]}\n\n'
_PROGRESS = (
    b"data: "
    b'{"choices":[{"index":0,"delta":{"role":"assistant","content":null},"finish_reason":null}],'
    b'"prompt_progress":{"total":%d,"cache":%d,"processed":%d,"time_ms":1}}\n\n'
)


class Headers(Enum):
    """When the response headers go out: it differs between builds."""

    AT_ONCE = "at once"
    IN_SLOT = "when the request's slot first comes to its turn in a batch"
    WITH_PROGRESS = "with the first progress report"
    WITH_FIRST_TOKEN = "with the first token"


class Use(NamedTuple):
    """Of one process, each second."""

    cpu: float  # ticks
    read_bytes: float = 0.0
    major_faults: float = 0.0
    waits: float = 0.0  # ticks that its main thread waits for a core


NO_USE, IDLE_USE, BUSY_USE = Use(cpu=0.0), Use(cpu=IDLE), Use(cpu=BUSY)
FROM_DISK = Use(cpu=IDLE, read_bytes=8e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What kind of server runs on what kind of machine."""

    slots: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    batch_tokens: int
    load_s: float
    load_reads: bool = False  # the load shows as reads from disk, else as CPU time
    cpu_shows: bool = True  # a GPU's work may not show in the CPU time
    headers: Headers = Headers.IN_SLOT
    reports_progress: bool = True
    shows_slots: bool = True  # `--no-slots` and old builds do not
    number: int | None = 11434  # as `--version` tells it
    answers_during_batches: bool = True  # `/slots`; builds before b10453 do between two only
    deep_tokens: float = math.inf  # so deep in the context a token takes twice as long
    leak_mib: int = 0  # with each request
    drafts: bool = False  # by another model
    takes_media: bool = True
    idle: Use = IDLE_USE  # under memory pressure the health probe brings back some code
    reading: Use = FROM_DISK  # of a model that comes from disk
    busy: Use = BUSY_USE

    @property
    def shows_prompt_progress(self) -> bool:
        """Whether `/slots` tells how far a prompt is read."""
        return self.number is None or self.number >= 9544

    @property
    def shows_reading(self) -> bool:
        """Whether how far a prompt is read can be seen in `/slots`, also if the first look at it
        comes in a long batch: then a launch that answers between two only is not asked again soon.
        """
        is_shown = self.shows_slots and self.shows_prompt_progress
        return is_shown and self.answers_during_batches

    @property
    def keeps_counts(self) -> bool:
        """Whether `/slots` tells in prefill what the task before has generated."""
        return self.number is not None and self.number < 10453


@dataclass(slots=True, kw_only=True)
class Reply:
    """What the server says to one request, were nothing in the way."""

    key: str = "r"  # makes its words unlike those of every other
    prompt_tokens: int
    reasoning_tokens: int = 0
    text_tokens: int
    step_tokens: int = 8  # of the answer, in one record
    calls_tool: bool = False  # behind the text
    signals: int = 0  # calls of the exit tool, behind those
    finish: str = "stop"
    status: int = 200
    cached_tokens: int = 0  # of the prompt: they are not read again
    fetch_s: float = 0.0  # until the server has its media: it fetches a link, decodes a video
    encode_s: float = 0.0  # of its image or video, where it has one
    draft_s: float = 0.0  # of another model's first reading of the prompt, behind the first token
    is_infill: bool = False  # not computed beside chats
    twist: str | None = None  # a misbehaviour of faults.py
    twist_at: int = 0  # tokens of the answer before it

    @property
    def answer_tokens(self) -> int:
        return self.reasoning_tokens + self.text_tokens

    def word(self, index: int) -> str:
        """Token number `index`; a line ends now and then, never at a word's end, where reasoning
        would lose it."""
        return f"{self.key}\n{index}," if index % 16 == 15 else f"{self.key}.{index},"


@dataclass(eq=False, slots=True)
class Exchange:
    """One chat request as the server sees it."""

    connection: SimStream
    reply: Reply
    request_id: int
    wants_progress: bool
    in_one_piece: bool = False  # nothing is sent before it is complete
    slot: int | None = None
    is_begun: bool = False  # its slot had a turn in a batch
    processed: int = 0
    has_media: bool = False
    in_batch: int = 0  # tokens of the prompt in the batch under way
    decoded: int = 0
    has_headers: bool = False
    spoke: bool = False  # sent more than headers
    closed_by_client: bool = False
    over: bool = False
    twists: int = 0  # how often it misbehaved
    dead: bool = False  # its slot is stuck while the others go on
    died: bool = False  # its server did
    said: list[str] = field(default_factory=list)  # text sent so far
    signals: int = 0  # sent so far
    advanced_at: float = 0.0
    sent_at: float = 0.0  # more than headers and keepalives
    began_at: float = 0.0  # its slot's first turn
    # it had its slot, on the host's clock
    slot_since: float = math.inf
    slot_until: float = math.inf
    read_at: float = 0.0
    ping: Event | None = None

    @property
    def has_read(self) -> bool:
        """The whole prompt."""
        return self.processed >= self.reply.prompt_tokens


@dataclass(slots=True)
class Counters:
    rate: Use
    serves: bool = True  # its work is the server's
    cpu_ticks: float = 0.0
    read_bytes: float = 0.0
    major_faults: float = 0.0
    waited_ticks: float = 0.0


class LlamaServer:
    """See the module. `on_death` is called with the return code when the process has ended;
    `on_slot` when a slot "begins" a request or "ends" one."""

    def __init__(
        self, scheduler: Scheduler, build: Build, machine: Machine, *, epoch: int, pid: int
    ) -> None:
        self.epoch, self.pid, self.build = epoch, pid, build
        self.loaded = self.gone = self.http_dead = self.ignores_term = self.unkillable = False
        self.frozen = False  # the main loop
        self.stopped = False  # SIGSTOP
        # of the first probe that it answers; else its canary fails, or a stranger has its port
        self.first_outcome = ProbeOutcome.READY
        self.killed = False  # SIGKILL was sent
        self.back_at = -math.inf  # when it last answered again
        # when a look last showed work, of a time of which over nine tenths were lost: what an idle
        # server uses may pass for work then
        self.seemed_busy_at = -math.inf
        self.port_taken = False  # it ends for this
        self.oom_evidence: str | None = None  # the same
        self.advanced_at = scheduler.host_time
        self.exchanges: list[Exchange] = []
        self.slots: list[Exchange | None] = [None] * build.slots
        self.queue: list[Exchange] = []
        self.processes: dict[int, Counters] = {pid: Counters(build.idle)}
        self.on_death: Callable[[int], object] = lambda returncode: None
        self.on_slot: Callable[[int, str], object] = lambda slot, what: None
        self._scheduler = scheduler
        self._machine = machine  # decides what it says, and how it misbehaves
        self._accounted_at = scheduler.now
        self._batch: Event | None = None
        self._batch_left_s: float | None = None  # of one that was interrupted
        self.slowness = 1.0  # of the reading of prompts: what others on the machine take away
        self._pages_in = False  # the batch under way reads the model
        self.slots_silent = False  # `/slots` waits for a task queue that is stuck
        self._load_works = True
        self._after_stop: Callable[[], object] | None = None  # what was due while it was stopped
        self._terms = 0
        self._used: dict[int, Exchange] = {}  # by slot: who had it last
        self._used_at = [-1.0] * build.slots  # until when
        self._served_count = 0

    # ------------------------------------------------------------ life and signals

    def begin_load(
        self, seconds: float | None, *, works: bool = True, returncode: int | None = None
    ) -> None:
        """Load for so long, None: for ever; then be ready, or end with the code."""
        self._load_works = works
        self._show_load()
        if seconds is None:
            return

        def loaded() -> None:
            if self.gone:
                return
            if self.stopped:
                self._after_stop = loaded
            elif returncode is not None:
                self.die(returncode)
            else:
                self.loaded = True
                self.advanced_at = self._scheduler.host_time
                self._uses(self.build.idle)
                self.work()

        self._scheduler.after(seconds, loaded, "the load ends", of_host=False)

    def _show_load(self) -> None:
        works, reads = self._load_works, self.build.load_reads
        build = self.build
        self._uses((build.reading if reads else self._busy_use) if works else build.idle)

    def terminate(self) -> None:
        if self.gone or self.ignores_term or self.stopped:
            return
        self._terms += 1
        if not self.loaded:
            self.die(-15)
        elif self._terms > 1:
            self.die(1)
        else:
            self._leave_when_free()

    def _leave_when_free(self) -> None:
        """The first SIGTERM waits for the batch under way, the last one, and for open connections:
        each ends with its client, or behind its next keepalive."""
        if (
            self._terms
            and not self.gone
            and not self.exchanges
            and self._batch is None
            and not self.frozen
        ):
            self._scheduler.after(0.1, lambda: self.die(0), "the server leaves", of_host=False)

    def kill(self) -> None:
        self.killed = True
        if not self.unkillable:
            self.die(-9)

    def become_killable(self) -> None:
        self.unkillable = False
        if self.killed:
            self.die(-9)

    def stop_signal(self) -> None:
        """SIGSTOP, a debugger, a frozen control group: nothing of it runs."""
        if self.stopped or self.gone:
            return
        self.stopped = True
        self._keep_batch()
        self._interrupt(NO_USE)

    def continue_signal(self) -> None:
        if not self.stopped:
            return
        self.stopped, self.back_at = False, self._scheduler.host_time
        if not self.loaded:
            self._show_load()
        self._go_on()
        after_stop, self._after_stop = self._after_stop, None
        if after_stop is not None:
            after_stop()

    def die(self, returncode: int) -> None:
        """The process ends; the kernel closes its connections."""
        if self.gone:
            return
        self._interrupt(NO_USE)
        self.gone = True
        for exchange in list(self.exchanges):
            self._drop(exchange)
            exchange.died = True
            exchange.connection.end(regular=False)
        self.on_death(returncode)

    # ------------------------------------------------------------ wedges

    def freeze(self, *, spins: bool) -> None:
        """The main loop does nothing more: it waits, or it spins."""
        self.frozen = True
        self._keep_batch()
        self._interrupt(self._busy_use if spins else self.build.idle)

    def _keep_batch(self) -> None:
        if self._batch is not None:
            self._batch_left_s = self._batch.at - self._scheduler.now

    def _go_on(self) -> None:
        """With the batch that was interrupted, where there is one."""
        if self.frozen or self.stopped:
            return
        left_s, self._batch_left_s = self._batch_left_s, None
        if left_s is not None:
            self._start_batch(left_s)
        self.work()

    def _interrupt(self, use: Use) -> None:
        if self._batch is not None:
            self._batch.cancel()
            self._batch = None
        self._uses(use)

    def finish_now(self) -> None:
        """The requests under way are answered with the batch that ends at this instant."""
        for exchange in self.exchanges:
            exchange.is_begun, exchange.in_batch = True, 0
            exchange.processed = exchange.reply.prompt_tokens
            exchange.reply.reasoning_tokens = min(exchange.reply.reasoning_tokens, exchange.decoded)
            exchange.reply.text_tokens = exchange.decoded + 1 - exchange.reply.reasoning_tokens
        if self._batch is not None:
            self._batch.cancel()
            self._start_batch(0.0)

    def slow_down(self, factor: float) -> None:
        """Others take cores away, or (below 1) give them back: also for the batch under way."""
        self.slowness *= factor
        if self._batch is not None and any(each.in_batch for each in self.busy):
            left_s = (self._batch.at - self._scheduler.now) * factor
            self._batch.cancel()
            self._start_batch(left_s)

    def page_in(self, seconds: float) -> None:
        """The model has left the memory: the batch under way waits for the disk."""
        if self._batch is not None:
            left_s = self._batch.at - self._scheduler.now + seconds
            self._batch.cancel()
            self._pages_in = True
            self._start_batch(left_s)

    def thaw(self) -> None:
        self.frozen = False
        self._go_on()

    def begin_sidecar(self) -> None:
        """A child that uses CPU time of its own: a log shipper, a tool."""
        self._account()
        self.processes[self.pid + 1] = Counters(self.build.busy, serves=False)

    # ------------------------------------------------------------ HTTP

    @property
    def anon_bytes(self) -> int:
        """It leaks with every request."""
        return (_START_MIB + self.build.leak_mib * self._served_count) << 20

    @property
    def answers(self) -> bool:
        return not self.gone and not self.http_dead and not self.stopped

    def accept(
        self, connection: SimStream, turn_id: tuple[int, int], body: Mapping[str, Any]
    ) -> Exchange | None:
        """A chat request; None: refused, with the status told."""
        reply = self._machine.reply_to(*turn_id) if self.loaded else None
        if reply is None or reply.status != 200:
            connection.headers(503 if reply is None else reply.status)
            return None
        exchange = Exchange(
            connection=connection,
            reply=reply,
            processed=reply.cached_tokens,
            request_id=turn_id[0],
            has_media=any(part["type"] != "text" for part in _parts(body)),
            in_one_piece=body.get("stream") is False,
            wants_progress=bool(body.get("return_progress")) and self.build.reports_progress,
            advanced_at=self._scheduler.host_time,
        )
        self.exchanges.append(exchange)
        self._served_count += 1
        if any(map(is_link, _parts(body))):
            queue = partial(self._queue, exchange)
            self._scheduler.after(reply.fetch_s, queue, "an image is fetched", of_host=False)
        elif any(part["type"] == "input_video" for part in _parts(body)):
            self._decode_video(exchange)
        else:
            self._queue(exchange)
        return exchange

    def _decode_video(self, exchange: Exchange) -> None:
        """By a child, whatever the main loop does."""
        self._account()
        pid = self.pid + 1 + self._served_count
        self.processes[pid] = Counters(BUSY_USE)

        def decoded() -> None:
            self._account()
            del self.processes[pid]
            self._queue(exchange)

        self._scheduler.after(exchange.reply.fetch_s, decoded, "a video is decoded", of_host=False)

    def _queue(self, exchange: Exchange) -> None:
        """All that it is made of is there."""
        if exchange.over or self.gone:
            return
        if self.build.headers is Headers.AT_ONCE:
            self._send_headers(exchange)
        self.queue.append(exchange)
        self.work()

    def client_closed(self, exchange: Exchange) -> None:
        """The client is gone; noticed between two batches, and while it waits for a slot not before
        it has had a batch."""
        exchange.closed_by_client = True
        is_lost = exchange.slot is None and exchange not in self.queue
        waits_for_no_batch = self._batch is None or exchange.dead or is_lost
        if waits_for_no_batch and not self.frozen and not self.stopped:
            self._drop(exchange)
            self.work()
        self._leave_when_free()

    def props(self) -> dict[str, Any]:
        """The body of `/props`."""
        number, sees = self.build.number, self.build.takes_media
        return {
            "total_slots": self.build.slots,
            "default_generation_settings": {"n_ctx": 4096},
            "model_alias": "small",
            "model_path": "/models/another.gguf",
            "modalities": {"vision": sees, "audio": False, "video": sees},
            "chat_template_caps": {"supports_tools": True, "supports_tool_calls": True},
            "build_info": "" if number is None else f"b{number}-8f2c1d0",
        }

    @property
    def slots_wait_s(self) -> float:
        """How long `/slots` waits for the main loop."""
        if self.slots_silent or (self.frozen and not self.build.answers_during_batches):
            return math.inf
        if self._batch is None or self.build.answers_during_batches:
            return 0.0
        return self._batch.at - self._scheduler.now

    def slots_view(self) -> list[dict[str, Any]]:
        view = []
        for index, exchange in enumerate(self.slots):
            shown: dict[str, Any] = {
                "id": index,
                "n_ctx": 4096,
                "speculative": self.build.drafts,
                "is_processing": False,
            }
            last = exchange or self._used.get(index)
            if last is not None:
                active = exchange is not None
                total, cached = last.reply.prompt_tokens, last.reply.cached_tokens
                decoded = last.decoded if active else 0
                if active and not decoded and self.build.keeps_counts and index in self._used:
                    decoded = self._used[index].decoded
                shown.update(
                    is_processing=active,
                    id_task=last.request_id,
                    n_prompt_tokens=last.processed + last.in_batch if active else total,
                    n_prompt_tokens_cache=cached if active else 0,
                    next_token=[{"has_next_token": active, "n_remain": -1, "n_decoded": decoded}],
                )
                if self.build.shows_prompt_progress:
                    done = last.processed - cached if active else 0
                    shown.update(n_prompt_tokens_processed=done)
            view.append(shown)
        return view

    # ------------------------------------------------------------ the main loop

    @property
    def busy(self) -> list[Exchange]:
        """Those that have a slot."""
        return [exchange for exchange in self.slots if exchange is not None]

    def work(self) -> None:
        """Begin the next batch, if there is anything to do and nothing in the way."""
        if self.gone or self.frozen or self.stopped or not self.loaded or self._batch is not None:
            return
        if self._terms:
            self._uses(self.build.idle)
            self._leave_when_free()
            return
        for exchange in [each for each in self.busy if each.closed_by_client]:
            self._drop(exchange)
        while self.queue and (slot := self._free_slot()) is not None:
            exchange = self.queue.pop(0)
            exchange.slot, self.slots[slot] = slot, exchange
            exchange.slot_since = self._scheduler.host_time
            self.on_slot(slot, "begins")
        seconds = self._fill_batch()
        if self.frozen:
            return
        if seconds is None and self.queue and self._free_slot() is not None:
            self.work()  # a misbehaviour has just made room
        elif seconds is None:
            self._uses(self.build.idle)
            self._leave_when_free()
        else:
            # Nonsense may go on for as long as the host stands still.
            nonsense = any(exchange.twists for exchange in self.busy)
            self._start_batch(max(seconds, 0.05 if nonsense else 0.001))

    def _free_slot(self) -> int | None:
        """The one that was idle longest; of those never used, the highest."""
        free = [slot for slot, holder in enumerate(self.slots) if holder is None]
        return min(free, key=lambda slot: (self._used_at[slot], -slot), default=None)

    def _fill_batch(self) -> float | None:
        """Decide what each slot has in the next batch: the seconds that it takes, None without
        anything to do."""
        build, busy = self.build, self._of_one_kind()
        writing = [exchange for exchange in busy if exchange.has_read]
        seconds = float(sum(max(1, self._next_tokens(each)) for each in writing))
        seconds /= build.decode_tokens_per_s
        seconds += sum(each.reply.draft_s for each in writing if each.decoded == 1)
        room = build.batch_tokens - len(writing)
        for exchange in busy:
            if exchange.has_read or room <= 0:
                continue
            if not exchange.is_begun:
                self._begin(exchange)
                if self.frozen:
                    return None
                if exchange.slot is None:
                    continue
                seconds += exchange.reply.encode_s if exchange.has_media else 0.0
            exchange.in_batch = min(exchange.reply.prompt_tokens - exchange.processed, room)
            room -= exchange.in_batch
            depth = exchange.processed + exchange.in_batch / 2
            rate = build.prefill_tokens_per_s / (1 + depth / build.deep_tokens) / self.slowness
            seconds += exchange.in_batch / rate
        return seconds if any(each.has_read or each.in_batch for each in busy) else None

    def _of_one_kind(self) -> list[Exchange]:
        """Those that share the next batch: of the kind of the first that writes, else of the first
        that reads."""
        busy = [exchange for exchange in self.busy if not exchange.dead]
        first = next((each for each in busy if each.has_read), busy[0] if busy else None)
        return [each for each in busy if first and each.reply.is_infill == first.reply.is_infill]

    def _begin(self, exchange: Exchange) -> None:
        """The first turn of its slot; a misbehaviour may take it out of it."""
        exchange.is_begun, exchange.began_at = True, self._scheduler.now
        if self.build.headers is Headers.IN_SLOT:
            self._send_headers(exchange)
        if exchange.wants_progress:
            if self.build.headers is Headers.WITH_PROGRESS:
                self._send_headers(exchange)
            self.send_progress(exchange)
        if exchange.reply.twist is not None and exchange.reply.twist_at <= 0:
            self._machine.twist(self, exchange)

    def _start_batch(self, seconds: float) -> None:
        computes = self.build.cpu_shows and not self._pages_in
        build = self.build
        shown = self._busy_use if computes else build.idle
        self._uses(build.reading if self._pages_in else shown)
        self._batch = self._scheduler.after(seconds, self._batch_done, "batch", of_host=False)

    def _batch_done(self) -> None:
        self._batch, self._pages_in = None, False
        self.advanced_at = self._scheduler.host_time
        of_batch = self._of_one_kind()
        for exchange in [each for each in self.busy if not each.dead]:
            if exchange.closed_by_client:
                self._drop(exchange)
            elif exchange not in of_batch:
                if exchange.is_begun and not exchange.has_read and exchange.wants_progress:
                    self.send_progress(exchange)
            elif exchange.has_read:
                self._write_answer(exchange, self._next_tokens(exchange))
            elif exchange.is_begun and self._read_prompt(exchange):
                self._write_answer(exchange, min(1, self._next_tokens(exchange)))
            if self.frozen or self.gone:
                return
        self.work()

    def _read_prompt(self, exchange: Exchange) -> bool:
        """Whether the prompt is read now: then the batch gave the first token, too."""
        if exchange.in_batch:
            exchange.processed += exchange.in_batch
            exchange.in_batch = 0
            exchange.advanced_at = self._scheduler.host_time
            exchange.read_at = self._scheduler.now
        if exchange.wants_progress:
            self.send_progress(exchange)
        return exchange.has_read

    def _next_tokens(self, exchange: Exchange) -> int:
        reply = exchange.reply
        border = (
            reply.reasoning_tokens
            if exchange.decoded < reply.reasoning_tokens
            else reply.answer_tokens
        )
        return max(0, min(reply.step_tokens, border - exchange.decoded))

    def _write_answer(self, exchange: Exchange, count: int) -> None:
        reply = exchange.reply
        self._send_headers(exchange)
        if reply.twist is not None and exchange.decoded >= reply.twist_at:
            self._machine.twist(self, exchange)
            return
        if exchange.decoded == 0:
            self.send(exchange, _delta({"role": "assistant", "content": None}))
        if count:
            words = "".join(
                reply.word(index) for index in range(exchange.decoded, exchange.decoded + count)
            )
            self.send_words(exchange, words, reasons=exchange.decoded < reply.reasoning_tokens)
            exchange.decoded += count
            exchange.advanced_at = self._scheduler.host_time
        if exchange.decoded >= reply.answer_tokens and reply.twist is None:
            self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        if exchange.in_one_piece:
            exchange.in_one_piece = False
            self._send_headers(exchange)
            self.hang_up(exchange, regular=True)
            return
        reply = exchange.reply
        names = ["search"] * reply.calls_tool + ["report"] * reply.signals
        for index, name in enumerate(names):
            function = {"name": name, "arguments": '{"n": 1}'}
            call = {"index": index, "id": f"c{index}", "function": function}
            self.send(exchange, _delta({"tool_calls": [call]}))
        exchange.signals = reply.signals
        self.send(exchange, _delta({}, finish="tool_calls" if names else reply.finish))
        usage = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.answer_tokens}
        timings = {
            "cache_n": reply.cached_tokens,
            "prompt_n": reply.prompt_tokens - reply.cached_tokens,
            "prompt_ms": 1000 * (exchange.read_at - exchange.began_at),
        }
        self.send(exchange, _record({"choices": [], "usage": usage, "timings": timings}))
        self.send(exchange, b"data: [DONE]\n\n")
        self.hang_up(exchange, regular=True)

    # ------------------------------------------------------------ what goes out

    def send(self, exchange: Exchange, data: bytes) -> None:
        """Bytes of a body, headers first."""
        if exchange.in_one_piece:
            return
        self._send_headers(exchange)
        if not exchange.over:
            exchange.spoke, exchange.sent_at = True, self._scheduler.now
            exchange.connection.receive(data)

    def send_words(self, exchange: Exchange, words: str, *, reasons: bool = False) -> None:
        if not reasons and not exchange.in_one_piece:
            exchange.said.append(words)
        self.send(
            exchange,
            _WORDS % (b"reasoning_content" if reasons else b"content", _encode(words).encode()),
        )

    def send_progress(self, exchange: Exchange) -> None:
        reply = exchange.reply
        self.send(
            exchange, _PROGRESS % (reply.prompt_tokens, reply.cached_tokens, exchange.processed)
        )

    def repeat(self, exchange: Exchange, every_s: float, send: Callable[[], object]) -> None:
        """Send the same again and again."""
        if not exchange.over and not self.gone:
            send()
            again = partial(self.repeat, exchange, every_s, send)
            self._scheduler.after(every_s, again, "the same again", of_host=False)

    def hang_up(self, exchange: Exchange, *, regular: bool) -> None:
        self._drop(exchange)
        exchange.connection.end(regular=regular)
        self._leave_when_free()

    def release_slot(self, exchange: Exchange) -> None:
        """The slot is idle; the connection stays open."""
        if exchange.slot is not None:
            self._used[exchange.slot] = exchange
            self._used_at[exchange.slot] = self._scheduler.now
            self.on_slot(exchange.slot, "ends")
            exchange.in_batch = 0
            exchange.slot_until = self._scheduler.host_time
            self.slots[exchange.slot] = None
            exchange.slot = None

    def _send_headers(self, exchange: Exchange) -> None:
        if exchange.has_headers or exchange.over or exchange.in_one_piece:
            return
        exchange.has_headers = True
        exchange.connection.headers(200)
        self._ping_later(exchange)

    def _ping_later(self, exchange: Exchange) -> None:
        def ping() -> None:
            if exchange.over or self.gone:
                return
            if self.answers:
                exchange.connection.receive(b":\n\n")
                if self._terms:
                    self.hang_up(exchange, regular=False)
                    return
            self._ping_later(exchange)

        exchange.ping = self._scheduler.after(PING_S, ping, "ping", of_host=False)

    def _drop(self, exchange: Exchange) -> None:
        exchange.over = True
        if exchange.ping is not None:
            exchange.ping.cancel()
        self.release_slot(exchange)
        if exchange in self.queue:
            self.queue.remove(exchange)
        if exchange in self.exchanges:
            self.exchanges.remove(exchange)

    # ------------------------------------------------------------ what /proc shows

    def counters(self) -> dict[int, Counters]:
        """Of the process and its children, as of now."""
        self._account()
        return self.processes

    @property
    def _busy_use(self) -> Use:
        """Others that take cores away leave it less CPU time; it waits for the rest."""
        busy = self.build.busy
        cpu = busy.cpu / max(1.0, self.slowness)
        return busy._replace(cpu=cpu, waits=busy.cpu - cpu)

    def _uses(self, use: Use) -> None:
        self._account()
        self.processes[self.pid].rate = use

    def _account(self) -> None:
        span_s = self._scheduler.now - self._accounted_at
        self._accounted_at = self._scheduler.now
        if self.gone:
            return
        for used in self.processes.values():
            used.cpu_ticks += used.rate.cpu * span_s
            used.read_bytes += used.rate.read_bytes * span_s
            used.major_faults += used.rate.major_faults * span_s
            used.waited_ticks += used.rate.waits * span_s


def _parts(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in body.get("messages", ())]
    return [part for content in contents if isinstance(content, list) for part in content]


def _record(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode(chunk).encode() + b"\n\n"


def _delta(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return _record({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
