"""Plays a situation on the simulated server, and records it."""

from functools import partial

from tests.recordings.records import BodyReader, Director, Recording, error_name, rate, slots_line
from tests.recordings.situations import ITEM_TOKENS, Ask, Close, Look, Situation, Step, Terminate
from tests.simulation.scheduler import Choices, Scheduler
from tests.simulation.server import Build, Exchange, LlamaServer, Reply
from tests.simulation.trace import Trace

_SOON_S = 0.0001  # a client takes to send something: less than any batch
# What goes with the template, of a prompt whose length the recording does not say.
_TEMPLATE_TOKENS = 32


def play(
    situation: Situation,
    prompts: dict[str, list[int]],
    server_class: type[LlamaServer] = LlamaServer,
) -> Recording:
    """`prompts`: as in the recording of the real server, whose tokenizer and prompt cache the model
    lacks."""
    return _Play(situation, prompts, server_class).run()


class _Play:
    """Stands in for the machine, too: it says what the server replies."""

    def __init__(
        self, situation: Situation, prompts: dict[str, list[int]], server_class: type[LlamaServer]
    ) -> None:
        self._situation, self._prompts = situation, prompts
        self._director = Director(situation)
        self._scheduler = Scheduler(Choices(lambda: 0.0, 0.0, 0.0, 0.0), Trace(), 0.0)
        self._exchanges: dict[str, Exchange] = {}
        build = Build(
            slots=situation.slots,
            prefill_tokens_per_s=7000.0,
            decode_tokens_per_s=80.0,
            batch_tokens=situation.batch,
            load_s=0.1,
        )
        self._server = server_class(self._scheduler, build, self, epoch=1, pid=1)  # type: ignore[arg-type]
        self._server.on_death = lambda returncode: self._note("server", f"exit {returncode}")
        self._server.on_slot = lambda slot, what: self._log.append(f"slot {slot} {what}")
        self._log: list[str] = []

    def run(self) -> Recording:
        self._server.begin_load(0.1)
        self._scheduler.run_for(1.0)
        ticks, began_at = self._ticks(), self._scheduler.now
        self._go_on()
        while self._scheduler.step():
            pass
        if not self._server.gone:
            span_s = self._scheduler.now - began_at
            self._note("proc", rate((self._ticks() - ticks) / span_s))
            ticks = self._ticks()
            self._scheduler.run_for(0.5)
            self._note("proc", rate((self._ticks() - ticks) / 0.5))
        for line in self._log:
            self._note("log", line)
        self._director.recording.prompts = self._prompts
        return self._director.recording

    def _ticks(self) -> float:
        return sum(each.cpu_ticks for each in self._server.counters().values())

    def _note(self, who: str, what: str) -> None:
        self._director.note(who, what, self._scheduler.now)

    def _go_on(self) -> None:
        for step in self._director.due():
            self._scheduler.after(_SOON_S, partial(self._do, step), "step")

    def _do(self, step: Step) -> None:
        match step:
            case Ask():
                client = _Client(self, step)
                body = {"return_progress": True, **step.body}
                exchange = self._server.accept(client, (ord(step.request), 1), body)  # type: ignore[arg-type]
                if exchange is not None:
                    self._exchanges[step.request] = exchange
            case Close():
                self._note(step.request, "closed")
                self._server.client_closed(self._exchanges[step.request])
            case Look():
                self._note("slots", slots_line(self._server.slots_view()))
            case Terminate():
                self._note("server", "SIGTERM")
                self._server.terminate()
        self._go_on()

    # ------------------------------------------------------------ the machine

    def reply_to(self, request_id: int, turn: int) -> Reply:
        ask = next(each for each in self._situation.requests if ord(each.request) == request_id)
        total, cached = self._prompts[ask.request]
        total = total or ask.items * ITEM_TOKENS + _TEMPLATE_TOKENS
        room = self._situation.slot_tokens - total
        return Reply(
            key=ask.request,
            prompt_tokens=total,
            cached_tokens=cached,
            text_tokens=min(ask.answer, room),
            step_tokens=1,
            finish="length",
            status=200 if room > 0 else 400,
        )

    def twist(self, server: LlamaServer, exchange: Exchange) -> None:
        raise AssertionError("no reply of a situation has a twist")


class _Client:
    """One connection's other end."""

    def __init__(self, play: _Play, ask: Ask) -> None:
        self._play, self._name = play, ask.request
        self._body = BodyReader()

    def headers(self, status: int) -> None:
        if self._is_closed:
            return
        self._play._note(self._name, f"headers {status}")
        if status != 200:
            error = {"code": status, "type": "exceed_context_size_error"}
            self._play._note(self._name, error_name(error))
            self.end(regular=True)
        self._play._go_on()

    def receive(self, data: bytes) -> None:
        if not self._is_closed:
            for what in self._body.feed(data):
                self._play._note(self._name, what)
        self._play._go_on()

    def end(self, *, regular: bool) -> None:
        if not self._is_closed:
            self._play._note(self._name, "end" if regular else "cut")
        self._play._go_on()

    @property
    def _is_closed(self) -> bool:
        return "closed" in self._play._director.recording.of(self._name)
