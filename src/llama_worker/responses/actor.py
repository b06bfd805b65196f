"""ResponsesProxyActor: runs the listener for clients of the Responses API, and keeps the store of
responses.

Receives orders from its handle (StartListening, StopListening), ListenerEnded from the listener's
thread, and from the threads that serve clients facts (ResponseBegun, ResponseEnded) and questions
(Recall, Fetch). It sends only answers. Owns the listener, the store of responses, and the ids of
the running responses that will be stored.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import assert_never

from llama_worker.actors.base import LiveSet, Ref, SupervisedActor, message_types
from llama_worker.mailbox import Reply
from llama_worker.responses import messages
from llama_worker.responses.api.store import ResponseStore
from llama_worker.responses.app import ResponsesApp
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.exchange import Upstream
from llama_worker.responses.http.listener import SocketListener
from llama_worker.runtime.host.threads import never_block_this_thread, start_thread
from llama_worker.runtime.real import RealHost

_logger = logging.getLogger("llama_worker.responses")


class ResponsesProxyActor(SupervisedActor[messages.ProxyMessage]):
    """Owns the listener and the store of responses. `upstream`: the server behind the proxy."""

    role = "responses-proxy"
    accepts = message_types(messages.ProxyMessage)

    def __init__(self, live: LiveSet, config: ResponsesProxyConfig, upstream: Upstream) -> None:
        super().__init__(live, RealHost())
        self._config = config
        self._upstream = upstream
        self._store = ResponseStore(
            max_count=config.max_responses, max_bytes=config.max_stored_bytes
        )
        self._running: set[str] = set()  # ids of running responses that will be stored
        self._questions: list[messages.Question] = []
        self._listener: SocketListener | None = None
        self._port: Reply[int] | None = None  # None before the order to start
        self._stopping: list[Reply[None]] = []
        self._alive = False  # whether the listener's thread runs
        self._stopped = False

    def handle(self, message: messages.ProxyMessage) -> None:
        match message:
            case messages.StartListening(reply=reply):
                self._begin(reply)
            case messages.StopListening(reply=reply):
                self._stopping.append(reply)
                self._end_all()
            case messages.ListenerEnded(error=error):
                self._ended(error)
            case messages.ResponseBegun(response_id=response_id):
                self._running.add(response_id)
            case messages.ResponseEnded(response_id=response_id, stored=stored):
                self._running.discard(response_id)
                if stored is not None:
                    self._store.put(stored)
                self._answer_questions()
            case messages.Recall() | messages.Fetch():
                self._questions.append(message)
                self._answer_questions()
            case _:
                assert_never(message)

    def release(self, failure: str | None) -> None:
        self._end_all()
        self._answer_stopping()  # a close that did not wait has ended the actor
        if self._port is not None:  # no effect if it was answered
            self._port.fail(RuntimeError("the proxy is closed"))

    def _begin(self, reply: Reply[int]) -> None:
        if self._port is not None:
            return  # a repeated order, with the same `reply`
        if self._stopped:
            reply.fail(RuntimeError("the proxy is closed"))
            return
        self._port = reply
        try:
            start_thread("llama_worker-responses", partial(self._listen, self.me(), reply))
        except RuntimeError as error:  # the system has no thread left
            reply.fail(error)
        else:
            self._alive = True

    def _listen(self, me: Ref[messages.ProxyMessage], port: Reply[int]) -> None:
        """Runs on the listener's thread; the threads that it starts are daemons like itself."""
        never_block_this_thread()
        try:
            app = ResponsesApp(self._config, me, self._upstream)
            listener = SocketListener(self._config, app.serve)  # which binds the port
            self._listener = listener  # first: whoever stops the actor from now on stops it, too
            if self._stopped:
                listener.stop()
            else:
                port.answer(listener.port)
                where = f"{self._config.host}:{listener.port} for {self._config.base_url}"
                self._runner.write_log(logging.INFO, f"responses proxy on {where}")
            listener.serve()
        except BaseException as error:
            me.tell(messages.ListenerEnded(error=error))
        else:
            me.tell(messages.ListenerEnded(error=None))

    def _answer_questions(self) -> None:
        """Answer those that do not wait for a running response, and forget those that are not
        waited for."""
        waiting, self._questions = self._questions, []
        for question in waiting:
            if question.reply.done():
                continue  # nobody waits for the answer any more
            if question.response_ids() & self._running:
                self._questions.append(question)
                continue
            match question:
                case messages.Recall(wanted=wanted, reply=recalled):
                    recalled.answer(self._store.recall(wanted))
                case messages.Fetch(response_id=response_id, forget=forget, reply=fetched):
                    take = self._store.delete if forget else self._store.get
                    fetched.answer(take(response_id))

    def _end_all(self) -> None:
        self._stopped = True
        if self._listener is not None:
            self._listener.stop()
        if not self._alive:
            self._answer_stopping()

    def _ended(self, error: BaseException | None) -> None:
        self._alive = False
        if self._port is not None:  # no effect if it was answered with the port
            self._port.fail(error or RuntimeError("stopped"))
        if error is not None and self._listener is not None:
            _logger.error("the responses proxy's listener ended: %s", type(error).__name__)
        self._answer_stopping()

    def _answer_stopping(self) -> None:
        for reply in self._stopping:
            reply.answer(None)
        self._stopping.clear()
