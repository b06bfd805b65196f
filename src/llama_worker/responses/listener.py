"""The threaded HTTP server (`cheroot`) that runs the Responses proxy's WSGI application."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from typing import Any

from cheroot import wsgi

from llama_worker.messages import Mailbox
from llama_worker.responses.client_watch import ClientWatch
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.exchange import AT_THE_END, CLIENT_SOCKET
from llama_worker.responses.http import READ_BYTES
from llama_worker.responses.messages import ProxyMessage
from llama_worker.responses.wsgi import ResponsesApp

_THREADS = 8  # grows with the number of requests that run
_LOOK_UP_S = 30.0  # how often connections that nobody uses are looked for; what comes is noticed at once
_POKE_S = 0.01
_logger = logging.getLogger("llama_worker.responses")


class _Gateway(wsgi.Gateway_10):
    """Lets the application know the client's socket."""

    def get_environ(self) -> dict[str, Any]:  # type: ignore[override]  # cheroot's types are a sketch
        environ: dict[str, Any] = super().get_environ()  # type: ignore[no-untyped-call]
        environ[CLIENT_SOCKET] = self.req.conn.socket
        return environ

    def respond(self) -> None:
        self.req.server.more_threads()
        try:
            super().respond()
        finally:  # the application's iterable is not closed where the headers of an empty reply cannot be sent
            self.env.get(AT_THE_END, lambda: None)()

    def start_response(self, *args: Any) -> Any:
        """Replies that come before the request was read end the connection: the rest is no next request."""
        body = self.req.rfile
        unread = not body.closed if self.req.chunked_read else body.remaining > READ_BYTES
        if unread:
            self.req.close_connection = True
        return super().start_response(*args)


class _Server(wsgi.Server):
    """Grows its threads with the requests that run: a stream holds one for as long as it lasts."""

    def __init__(self, config: ResponsesProxyConfig, app: ResponsesApp) -> None:
        super().__init__(
            (config.host, config.port),
            app,
            numthreads=_THREADS,
            server_name="llama-worker",
            request_queue_size=128,
            timeout=config.client_timeout_s,
        )
        self.gateway = _Gateway
        self.expiration_interval = _LOOK_UP_S
        self.max_request_body_size = config.max_body_bytes + READ_BYTES  # ours comes first, and says it in JSON
        self._growing = threading.Lock()

    def more_threads(self) -> None:
        """Called on a thread that is about to be busy."""
        with self._growing:
            if self.ready and self.requests.idle == 0:
                self.requests.grow(_THREADS)

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        """The error's name: its text and its traceback could show what is nobody's business."""
        _logger.log(level, "%s", msg.partition("(")[0])


class CherootListener:
    """The server and its threads. The constructor binds the port: OSError where it cannot."""

    def __init__(self, config: ResponsesProxyConfig, proxy: Mailbox[ProxyMessage]) -> None:
        self._watch = ClientWatch("llama_worker-responses-watch")
        self._server = _Server(config, ResponsesApp(config, proxy, self._watch))
        self._served = threading.Event()
        self._stops: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
        try:
            self._server.prepare()
        except BaseException:
            self._watch.stop()
            raise

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.bind_addr[1])

    def serve(self) -> None:
        """Take connections until stopped. Blocks until every thread has ended."""
        try:
            self._server.serve()
        finally:
            self._served.set()
            if self._stops.empty():  # it ended by itself
                self.stop()
            self._stops.get().join()
            self._watch.stop()

    def stop(self) -> None:
        """Let `serve` return. Never blocks."""
        thread = threading.Thread(target=self._stop, name="llama_worker-responses-stop", daemon=True)
        thread.start()
        self._stops.put(thread)

    def _stop(self) -> None:
        host, port = self._server.bind_addr[:2]
        stopping = threading.Thread(target=self._server.stop, name="llama_worker-responses-join", daemon=True)
        stopping.start()
        while not self._served.wait(_POKE_S):
            try:
                socket.create_connection((host, port), timeout=1.0).close()  # the server looks up when somebody comes
            except OSError:
                continue
        stopping.join()
