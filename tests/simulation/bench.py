"""One worker on one simulated machine: what every run begins with, and what is left of none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pykka

from llama_worker import LlamaWorker
from llama_worker.backend import open_backends
from llama_worker.config.profiles import TimeoutProfile
from llama_worker.config.settings import WorkerConfig
from llama_worker.runtime.host.futures import WorkerFuture, _awaited
from tests.simulation.dice import Dice
from tests.simulation.machine import Machine
from tests.simulation.runtime import SimRuntime
from tests.simulation.scheduler import Choices, Scheduler, SimulatedActor
from tests.simulation.server import Build, LlamaServer, Reply
from tests.simulation.trace import Trace

IMAGE: list[dict[str, Any]] = [
    {"type": "text", "text": "what is it?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
]
LINKED_IMAGE: list[dict[str, Any]] = [
    IMAGE[0],
    {"type": "image_url", "image_url": {"url": "http://192.0.2.1/a.png"}},
]
VIDEO: list[dict[str, Any]] = [IMAGE[0], {"type": "input_video", "input_video": {"data": "AAAA"}}]
COMMAND = ("llama-server", "--model", "small.gguf", "--port", "8080")


class Bench:
    """The worker is not started yet. `actor` is its WorkerActor, to look into."""

    def __init__(
        self,
        choices: Choices,
        trace: Trace,
        now: float,
        build: Build,
        for_machine: Dice,
        for_runtime: Dice,
        **config: Any,
    ) -> None:
        self.trace = trace
        self.build = build
        self.scheduler = Scheduler(choices, trace, now)
        self.machine = Machine(self.scheduler, for_machine, build)
        command = (*COMMAND, "--parallel", str(config["slots"]))
        self.config = WorkerConfig("simulated", "127.0.0.1", 8080, command, **config)
        self.runtime = SimRuntime(self.config, self.scheduler, self.machine, for_runtime)
        self.worker = LlamaWorker(self.config, _runtime=self.runtime)
        self.actor: Any = next(
            each.actor for each in self.scheduler.actors if each.actor.role == "worker"
        )

    @property
    def server(self) -> LlamaServer:
        """The one that lives."""
        server = self.machine.listening()
        assert server is not None
        return server

    def actor_of(self, role: str) -> SimulatedActor:
        """The one that lives; a request's is named `request[0]`."""
        return next(each for each in self.scheduler.actors if each.name == role)

    def answer(self, future: WorkerFuture[Any], within_s: float = 60.0) -> Any:
        """Its value; it has to resolve in time."""
        assert self.scheduler.run_until(future.done, self.scheduler.now + within_s)
        return future.get(timeout=0)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Nothing is logged meanwhile, and nothing in the process remembers the worker
        afterwards."""
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            for simulated in self.scheduler.actors:
                pykka.ActorRegistry.unregister(simulated.actor.actor_ref)
            self.scheduler.forget()
            _awaited.clear()
            open_backends.discard(self.worker._backend)
            del self.worker  # its finalizer holds the backend, and that holds everything else

    @contextmanager
    def ready(self) -> Iterator[None]:
        """`in_use`, with a worker that is READY."""
        with self.in_use():
            self.answer(self.worker.start())
            yield


FAST = Build(
    slots=2, prefill_tokens_per_s=500.0, decode_tokens_per_s=50.0, batch_tokens=512, load_s=1.0
)


def quiet_bench(
    build: Build = FAST,
    slots: int = 2,
    timeouts: TimeoutProfile = TimeoutProfile(),  # noqa: B008 - immutable
    **config: Any,
) -> Bench:
    """One on which every thread runs at once and every timer is on time."""
    dice = Dice(1)
    return Bench(
        Choices(dice.fork().random, preempts=0.0, sleeps=0.0, late=0.0),
        Trace(),
        now=1000.0,
        build=build,
        for_machine=dice.fork(),
        for_runtime=dice.fork(),
        slots=slots,
        timeouts=timeouts,
        **config,
    )


@contextmanager
def ready_bench(
    build: Build = FAST, reply: Reply | None = None, **config: Any
) -> Iterator[tuple[Bench, Scheduler, LlamaWorker]]:
    """A quiet one whose worker is READY, and whose server says `reply` to every request."""
    bench = quiet_bench(build, **config)
    if reply is not None:
        bench.machine.reply_to = lambda request_id, turn: reply
    with bench.ready():
        yield bench, bench.scheduler, bench.worker
