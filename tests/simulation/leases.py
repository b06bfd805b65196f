"""A client of a proxy around the worker: the thread that serves it, as worker and server see it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from llama_worker.actors.base import Ref
from llama_worker.actors.messages import EndLease, Lease, WorkerMessage
from llama_worker.request.leased import LeasedRequest
from llama_worker.request.messages import OpenStream, StreamClosed, StreamEvents, StreamOpened
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.http.abortable_socket import Aborted
from llama_worker.runtime.http.leased_exchange import LeasedExchange
from llama_worker.stream.events import Finish
from llama_worker.types.request import SubmitResult
from tests.simulation.bench import IMAGE

if TYPE_CHECKING:
    from tests.simulation.world import World


IN_ONE_PIECE = "responses:in one piece "  # begins the job names of such requests


class SimAbort:
    """Of a simulated connection, in place of the runtime's."""

    def __init__(self) -> None:
        self.error: Aborted | None = None
        self.stream: Any = None

    def abort(self) -> None:
        self.error = self.error or Aborted("the request was aborted")
        if self.stream is not None:
            self.stream.abort()

    def wait_readable(self, timeout_s: float) -> bool:
        return False


class ProxiedClient:
    """One response: `ask`, `open` once a slot was granted, `end` in any case."""

    def __init__(
        self, world: World, number: int, has_image: bool, *, in_one_piece: bool = False
    ) -> None:
        self.closed: WorkerFuture[StreamClosed] = WorkerFuture()
        self.abort = SimAbort()
        self.exchange = LeasedExchange(
            self.abort,  # type: ignore[arg-type]
            new=partial(LeasedRequest, has_media=has_image, in_one_piece=in_one_piece),
        )
        self._content = IMAGE if has_image else "hello"
        self.has_finish = False  # what breaks behind it is no failure to the client
        self._world = world
        self._name = f"{IN_ONE_PIECE if in_one_piece else 'responses:'}{number}"
        self._in_one_piece = in_one_piece
        self._worker: Ref[WorkerMessage] = Ref(world.worker.actor_ref)

    def ask(self) -> WorkerFuture[SubmitResult]:
        """Admitted, or refused."""
        reply: WorkerFuture[SubmitResult] = WorkerFuture()
        self._worker.tell(Lease(job_name=self._name, exchange=self.exchange, reply=reply))
        return reply

    def open(self) -> None:
        """Post the request; what comes is told to the exchange, as its thread does."""
        order = OpenStream(
            turn_id=(self.exchange.request_id, 1),
            body={
                "messages": [{"role": "user", "content": self._content}],
                "return_progress": True,
                "stream": not self._in_one_piece,
            },
            max_hold_s=0.0,  # the thread waits for each token
            reply_to=self,
        )
        self.exchange.started_waiting()
        self.abort.stream = self._world.runtime.open_stream(order, self)
        if self.abort.error is not None:
            self.abort.stream.abort()

    def end(self) -> None:
        self._worker.tell(EndLease(exchange=self.exchange))

    def tell(self, message: Any) -> bool:
        """From the stream."""
        match message:
            case StreamOpened(at=at):
                self.exchange.opened(at)
            case StreamEvents(events=events, at=at):
                self.exchange.received(events, at)
                self.has_finish |= any(isinstance(event, Finish) for event in events)
            case StreamClosed():
                self.closed.answer(message)
        self.exchange.before_reading()
        return True
