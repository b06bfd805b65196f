"""When a request to somebody else's server is given up, in virtual time."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pykka
import pytest

from llama_worker.actors.base import LiveSet
from llama_worker.actors.messages import EndLease, Lease
from llama_worker.actors.upstream import UpstreamActor
from llama_worker.config.profiles import TimeoutProfile
from llama_worker.request.leased import LeasedRequest
from llama_worker.request.table import Admitted
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.http.leased_exchange import LeasedExchange
from llama_worker.server.messages import LookAtSlots, Probed, ProbeOutcome, SlotsSeen
from llama_worker.server.slots import Slot, SlotsLook, SlotsTimeout
from llama_worker.server.traits import ServerTraits
from llama_worker.stream.events import PromptReport, StreamEvent, TextDelta
from llama_worker.stream.failure import disconnected
from llama_worker.types.request import SubmitResult
from tests.simulation.leases import SimAbort
from tests.simulation.scheduler import Choices, Event, Scheduler
from tests.simulation.trace import Trace
from tests.tables import cases

NORMAL = TimeoutProfile.normal()
HOUR_S = 3600.0
SILENT_S = 1190.0  # `silent_work_timeout_s` is 1200
Slots = tuple[Slot, ...]


class Client:
    """One that has sent its request; `hears` (None: headers alone) is what comes for it, and
    when."""

    def __init__(
        self, *hears: tuple[float, StreamEvent | None], in_one_piece: bool = False
    ) -> None:
        self.exchange = LeasedExchange(
            SimAbort(),  # type: ignore[arg-type]
            new=partial(LeasedRequest, in_one_piece=in_one_piece),
        )
        self.hears = hears

    def hear(self, event: StreamEvent | None, at: float) -> None:
        if event is None:
            self.exchange.opened(at)
        else:
            self.exchange.received([event], at)

    @property
    def given_up(self) -> str | None:
        """With which reason."""
        failure = self.exchange.failure_for_client(disconnected("in mid-stream"))
        return failure.reason if failure is not None and self.exchange.is_given_up else None


class Question:
    def abort(self) -> None:
        pass


class World:
    """The actor's runtime, and what it watches. At each instant `slots` is what `/slots` says
    (None: nothing), `answers` whether the server answers anything."""

    def __init__(
        self,
        timeouts: TimeoutProfile = NORMAL,
        *,
        slots: Callable[[float], Slots | SlotsTimeout | None] = lambda now: None,
        answers: Callable[[float], bool] = lambda now: True,
    ) -> None:
        self.scheduler = Scheduler(Choices(lambda: 0.0, 0.0, 0.0, 0.0), Trace(), 0.0)
        self.slots, self.answers = slots, answers
        self.questions_count = 0
        self.live = LiveSet()
        self.ref = UpstreamActor.start(self.live, self, timeouts)
        self.request_ids = itertools.count(1)

    # ------------------------------------------------------------ ports.UpstreamRuntime

    def now(self) -> float:
        return self.scheduler.now

    def unix(self, at: float) -> float:
        return at

    def call_at(self, at: float, call: Callable[[], object]) -> Event:
        return self.scheduler.at(at, call, "alarm")

    def run_actor(self, start_thread: Callable[[], None], actor: Any) -> None:
        self.actor = actor

    def call_host(self, call: Callable[[], object], name: str) -> None:
        raise AssertionError(name)

    def write_log(self, level: int, line: str) -> None:
        assert "gave up" in line

    def probe(self, epoch: int, reply_to: Any) -> Question:
        self.questions_count += 1
        outcome = ProbeOutcome.READY if self.answers(self.now()) else ProbeOutcome.FAILED
        reply_to.tell(Probed(epoch=epoch, outcome=outcome, detail="told", traits=ServerTraits()))
        return Question()

    def look_at_slots(self, order: LookAtSlots, reply_to: Any) -> Question:
        self.questions_count += 1
        slots = self.slots(self.now()) if self.answers(self.now()) else None
        look = SlotsLook(asked_at=self.now(), slots=slots) if isinstance(slots, tuple) else slots
        reply_to.tell(SlotsSeen(epoch=order.epoch, look=look))
        return Question()

    # ------------------------------------------------------------ what happens

    def begin(self, *clients: Client) -> None:
        now = self.now()
        for client in clients:
            admitted = Admitted(next(self.request_ids), 0, "responses:r", now, is_leased=True)
            client.exchange.begin(admitted, api_key=None, unix=self.unix)
            client.exchange.started_waiting()
            reply: WorkerFuture[SubmitResult] = WorkerFuture()
            self.tell(Lease(job_name="responses:r", exchange=client.exchange, reply=reply))

    def tell(self, message: Any) -> None:
        """And let the actor handle all that follows at this instant."""
        self.ref.tell(message)
        self.handle()

    def handle(self) -> None:
        while not self.actor.actor_inbox.empty():
            self.actor.on_receive(self.actor.actor_inbox.get().message)

    def run(self, *clients: Client, until: float = HOUR_S) -> float:
        """Let time pass until then, or until the last client was given up; that instant."""
        for client in clients:
            for at, event in client.hears:
                self.scheduler.at(at, partial(client.hear, event, at), "heard")
        while not all(client.given_up for client in clients) and self.scheduler.step(until):
            self.handle()
        return self.now()


@pytest.fixture(autouse=True)
def no_actor_is_left() -> Iterable[None]:
    yield
    for ref in pykka.ActorRegistry.get_by_class(UpstreamActor):
        pykka.ActorRegistry.unregister(ref)


def every(step_s: float, until: float, event: Callable[[int], StreamEvent]) -> Sequence[Any]:
    """After the headers."""
    return [(0.0, None), *((step_s * n, event(n)) for n in range(1, int(until / step_s) + 1))]


def report(n: int) -> PromptReport:
    return PromptReport(processed=512 * n, total=10_000_000, cached=0)


def reads(now: float) -> Slots:
    """A prompt, in batches of 50 s."""
    return (Slot(slot_id=0, is_processing=True, prompt_tokens=512 * int(now / 50.0)),)


def generates(now: float) -> Slot:
    return Slot(slot_id=0, is_processing=True, prompt_tokens=20, decoded_tokens=3 + int(now))


GENERATES: Slots = (Slot(slot_id=0, is_processing=True, prompt_tokens=20, decoded_tokens=3),)
IDLE: Slots = (Slot(slot_id=0, is_processing=False),)
READS: Slots = (Slot(slot_id=1, is_processing=True, prompt_tokens=20),)
TEXT = TextDelta("Once ")


@cases(
    "hears, world, reason, by",
    {
        "no headers": ([], {}, "headers_timeout", 1205.0),
        "headers, and no more": ([(0.0, None)], {}, "stall_timeout", 605.0),
        "reports end": (every(1.0, 9.0, report), {}, "stall_timeout", 134.0),
        "text ends": ([(0.0, None), (1.0, TEXT)], {}, "stall_timeout", 126.0),
        "text ends, and its user chose the shortest timeouts": (
            [(0.0, None), (1.0, TEXT)],
            {"timeouts": TimeoutProfile.fast()},
            "stall_timeout",
            36.0,
        ),
        "nothing is answered": ([], {"answers": lambda now: now < 1}, "stall_timeout", 95.0),
    },
)
def test_a_hang_is_found_in_time(hears: Any, world: Any, reason: str, by: float) -> None:
    client, upstream = Client(*hears), World(**world)
    upstream.begin(client)
    assert upstream.run(client) <= by
    assert client.given_up == reason


@cases(
    "clients, world",
    {
        "a long prompt behind held-back headers": ([Client()], {"slots": reads}),
        "a long prompt without reports": ([Client((0.0, None))], {"slots": reads}),
        "a long prompt, no /slots": ([Client(*every(90.0, HOUR_S, report))], {}),
        "a reply in one piece": ([Client(in_one_piece=True)], {"slots": reads}),
        "a neighbour's long prompt": (
            [Client(*every(90.0, HOUR_S, report)), Client((0.0, None)), Client()],
            {},
        ),
        "a server too busy to answer anything else": (
            [Client(*every(60.0, HOUR_S, lambda n: TEXT))],
            {"answers": lambda now: False},
        ),
    },
)
def test_slow_servers_are_not_given_up(clients: list[Client], world: Any) -> None:
    upstream = World(**world)
    upstream.begin(*clients)
    upstream.run(*clients, until=SILENT_S)
    assert [client.given_up for client in clients] == [None] * len(clients)


@pytest.mark.parametrize("hears", [[(0.0, None)], every(1.0, 9.0, report)], ids=["none", "some"])
@cases(
    "slots",
    {
        "idle": lambda now: IDLE,
        "hung": lambda now: GENERATES,
        "one hangs, one does not": lambda now: (generates(now), *READS),
        "silent": lambda now: GENERATES if now < 70 else SlotsTimeout(),
    },
)
def test_slots_of_another_server_give_no_verdict(
    hears: Any, slots: Callable[[float], Slots | SlotsTimeout]
) -> None:
    """Behind a load balancer `/slots` may be answered by one that has not got the request."""
    patient = replace(NORMAL, prefill_liveness_timeout_s=None, idle_stream_timeout_s=None)
    client, neighbour = Client(*hears), Client(*every(1.0, SILENT_S, lambda n: TEXT))
    upstream = World(patient, slots=slots)
    upstream.begin(client, neighbour)
    upstream.run(client, until=SILENT_S)
    assert client.given_up is None


@pytest.mark.parametrize("hears", [[], [(1.0, TEXT)]], ids=["prefill", "generating"])
def test_slots_are_asked_before_the_shortest_limit(hears: Any) -> None:
    fast = TimeoutProfile.fast()
    client = Client((0.0, None), *hears)
    upstream = World(fast, slots=lambda now: (generates(now),))
    upstream.begin(client)
    upstream.run(client, until=(fast.silent_work_timeout_s or 0.0) - 10.0)
    assert client.given_up is None


def test_a_hang_costs_only_its_own_request() -> None:
    hung, well = Client((0.0, None), (1.0, TEXT)), Client(*every(1.0, 900.0, lambda n: TEXT))
    upstream = World()
    upstream.begin(hung, well)
    upstream.run(hung, well, until=900.0)
    assert (hung.given_up, well.given_up) == ("stall_timeout", None)


def test_replies_in_one_piece_that_complete_are_progress() -> None:
    waits, upstream = Client(), World()
    upstream.begin(waits)
    for n in range(1, int(HOUR_S / 300.0) + 1):
        served = Client(in_one_piece=True)
        upstream.begin(served)
        upstream.run(waits, until=300.0 * n)
        upstream.scheduler.now = 300.0 * n
        served.exchange.closed(None)
        upstream.tell(EndLease(exchange=served.exchange))
    assert waits.given_up is None


def test_a_slow_client_is_not_the_servers_fault() -> None:
    client, upstream = Client(), World()
    upstream.begin(client)
    client.exchange.opened(0.0)
    client.exchange.stopped_waiting()  # from now on its thread waits for the client
    upstream.run(client)
    assert client.given_up is None


def test_an_idle_upstream_is_not_probed() -> None:
    client, upstream = Client(), World()
    upstream.begin(client)
    upstream.run(client, until=100.0)
    assert upstream.questions_count > 0
    upstream.tell(EndLease(exchange=client.exchange))
    asked = upstream.questions_count
    assert all(event.call is None for *_, event in upstream.scheduler._heap)
    assert (upstream.run(client), upstream.questions_count) == (upstream.now(), asked)


def test_a_broken_connection_has_no_better_reason() -> None:
    client, upstream = Client(), World()
    upstream.begin(client)
    client.exchange.closed(disconnected("in mid-stream"))
    upstream.tell(EndLease(exchange=client.exchange))
    assert client.exchange.has_ended
    assert client.given_up is None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, "worker_stopped: the proxy was closed"),
        (RuntimeError("a fault"), "unknown_error: RuntimeError: a fault"),
    ],
)
def test_the_actors_end_fails_requests_in_flight(error: Exception | None, told: str) -> None:
    client, upstream = Client(), World()
    upstream.begin(client)
    if error is None:
        upstream.actor.on_stop()
    else:
        upstream.actor.on_failure(type(error), error, None)
    failure = client.exchange.failure_for_client(disconnected("in mid-stream"))
    assert failure is not None
    assert failure.detail == told


def test_the_next_request_is_watched_anew() -> None:
    upstream = World()
    for _ in range(2):
        client = Client()
        upstream.begin(client)
        began_at = upstream.now()
        client.hear(None, began_at)
        client.hear(TEXT, began_at)
        upstream.run(client, until=began_at + HOUR_S)
        assert (client.given_up, upstream.now() - began_at <= 126.0) == ("stall_timeout", True)
