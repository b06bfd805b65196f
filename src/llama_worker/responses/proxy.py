"""`ResponsesProxy`, the public handle that starts and closes a Responses proxy."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Any

import pykka

from llama_worker.actors.base import LiveSet, Ref
from llama_worker.actors.messages import EndLease, Lease, UpstreamMessage
from llama_worker.actors.upstream import UpstreamActor
from llama_worker.config.settings import Endpoint
from llama_worker.config.validation import checked_type
from llama_worker.errors import ConfigError
from llama_worker.mailbox import Mailbox
from llama_worker.responses.actor import ResponsesProxyActor
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.exchange import Upstream
from llama_worker.responses.messages import ProxyMessage, StartListening, StopListening
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.real import UpstreamQuestions
from llama_worker.startable import Startable
from llama_worker.worker import LlamaWorker

__all__ = ["ResponsesProxy", "ResponsesProxyConfig"]

_STOP_S = 15.0
_LEAVE_S = 5.0


class ResponsesProxy(Startable):
    """Makes a llama-server usable by clients that speak only OpenAI's Responses API. Any thread may
    use it; it is a context manager.

    In front of a worker's server, each response and each chat completion that is passed through
    holds one of the worker's slots, and is watched like the worker's own requests.
    """

    def __init__(
        self, config: ResponsesProxyConfig | None = None, *, worker: LlamaWorker | None = None
    ) -> None:
        """Does not listen yet: `start` does.

        Args:
            config: None: the defaults, which need a `worker`.
            worker: the worker whose server is the upstream, instead of `config.upstream`. The proxy
                neither starts nor closes the worker, and may be started before it.

        Raises:
            ConfigError: if neither or both of `config.upstream` and `worker` are given.
            TypeError: if an argument is of another type.
        """
        config = config or ResponsesProxyConfig()
        checked_type("config", config, ResponsesProxyConfig)
        if worker is not None:
            checked_type("worker", worker, LlamaWorker)
        if (config.upstream is None) is (worker is None):
            raise ConfigError("give either upstream (in the config) or worker")
        self._live = LiveSet()
        self._pid = os.getpid()
        self._upstream: Ref[UpstreamMessage] | None = None  # None: the worker's actor watches
        if worker is not None:
            server = Endpoint.of(worker.config)
            config = replace(
                config, upstream=server.base_url, api_key=config.api_key or server.api_key
            )
        self.config = config
        endpoint = Endpoint(
            base_url=config.base_url,
            connect_timeout_s=config.connect_timeout_s,
            api_key=config.api_key,
            ca_file=config.ca_file,
        )
        if worker is not None:
            watch: Mailbox[Lease | EndLease] = Ref(worker.actor_ref)
        else:
            runtime = UpstreamQuestions(endpoint)
            actor = UpstreamActor.start(self._live, runtime, config.timeouts)
            watch = self._upstream = Ref(actor)
        upstream = Upstream(endpoint=endpoint, watch=watch, restarts=worker is not None)
        self._port: WorkerFuture[int] = WorkerFuture()
        self._stopped: WorkerFuture[None] = WorkerFuture()
        self.actor_ref: pykka.ActorRef[Any]
        try:
            self.actor_ref = ResponsesProxyActor.start(self._live, config, upstream)
        except RuntimeError:  # no thread can be started; the caller gets no object to close
            if self._upstream is not None:
                self._upstream.stop()
            raise
        self._ref: Ref[ProxyMessage] = Ref(self.actor_ref)

    @property
    def port(self) -> int:
        """The port on which it listens. Raises RuntimeError before it does, and the error of a
        start that failed."""
        if not self._port.done():
            raise RuntimeError("the proxy does not listen yet: wait for start().get()")
        return self._port.get(timeout=0)

    @property
    def base_url(self) -> str:
        """The base URL for clients. Raises as `port`."""
        host = self.config.host
        return f"http://[{host}]:{self.port}/v1" if ":" in host else f"http://{host}:{self.port}/v1"

    def start(self) -> WorkerFuture[int]:
        """Start to listen. The future resolves with the port; it raises OSError if the port cannot
        be bound, RuntimeError after `close` and in a forked child. Later calls return the same."""
        if os.getpid() != self._pid:
            why = f"the proxy belongs to process {self._pid}; create a new one after a fork"
        elif self._ref.tell(StartListening(reply=self._port)):
            return self._port
        else:
            why = "the proxy is closed"
        refused: WorkerFuture[int] = WorkerFuture()
        refused.fail(RuntimeError(why))
        return refused

    def close(self) -> None:
        """Cut running requests and stop listening. Blocks until no request runs; idempotent."""
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads
        if self._ref.tell(StopListening(reply=self._stopped)):
            with contextlib.suppress(pykka.Timeout):  # the actor has crashed
                self._stopped.get(timeout=_STOP_S)
            self._ref.stop()
        if self._upstream is not None:
            self._upstream.stop()
        self._live.wait(_LEAVE_S)
        # no effect if it is resolved; else the order came too late for the actor
        self._port.fail(RuntimeError("the proxy is closed"))
