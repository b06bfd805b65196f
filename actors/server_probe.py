"""The thread behind one readiness probe: is the server ready, and is it ours?"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

import psutil
import urllib3.exceptions

from llama_worker.actors.chat_exchange import Endpoint
from llama_worker.actors.connections import Abort, plain_connection
from llama_worker.actors.timers import call_at
from llama_worker.messages import Probed, ProbeOutcome, ProbeServer
from llama_worker.server_traits import ServerTraits, server_traits

_TRAITS_TIMEOUT_S = 2.0
_NO_ANSWER = (urllib3.exceptions.HTTPError, HTTPException, OSError)
_MAX_BODY_BYTES = 4 * 1024 * 1024  # /props holds the chat template


class ServerProbe:
    """One probe. The constructor starts a daemon thread; `abort` may be called from any thread.

    The asker gets one Probed; then `on_end` is called.
    """

    def __init__(
        self, order: ProbeServer, *, endpoint: Endpoint, port: int, on_end: Callable[[], object], name: str
    ) -> None:
        self._order = order
        self._endpoint = endpoint
        self._port = port
        self._on_end = on_end
        self._abort = Abort()
        threading.Thread(target=self._run, name=f"{name}-probe", daemon=True).start()

    def abort(self) -> None:
        """Close the connection now; the outcome is then FAILED."""
        self._abort.abort()

    def _run(self) -> None:
        traits = ServerTraits()
        # requests bounds each read, not the whole: a server that drips would be asked for ever.
        limit = call_at(time.monotonic() + self._order.timeout_s + 2 * _TRAITS_TIMEOUT_S, self.abort)
        try:
            outcome, detail = self._probe()
            if outcome is ProbeOutcome.READY and self._order.first:
                if not owns_port(self._order.root_pid, self._port):
                    outcome, detail = ProbeOutcome.STRANGER, f"another process answers on port {self._port}"
                else:
                    traits = self._ask_traits()
        except Exception as error:
            outcome, detail = ProbeOutcome.FAILED, f"{type(error).__name__}: {error}"
        finally:
            limit.cancel()
            self._abort.detach()
        self._order.reply_to.tell(Probed(epoch=self._order.epoch, outcome=outcome, detail=detail, traits=traits))
        self._on_end()

    def _probe(self) -> tuple[ProbeOutcome, str]:
        timeout_s = self._order.timeout_s
        try:
            status, told = self._ask("GET", "/v1/models", timeout_s)
        except _NO_ANSWER as error:
            return ProbeOutcome.FAILED, f"GET /v1/models: {type(error).__name__}"
        if status == 503:
            return ProbeOutcome.LOADING, "GET /v1/models: 503, loading the model"
        if status != 200:
            return ProbeOutcome.FAILED, f"GET /v1/models: {status}"
        if told is None:
            return ProbeOutcome.FAILED, "GET /v1/models: 200, but no JSON"
        return ProbeOutcome.READY, "GET /v1/models: 200"

    def _ask_traits(self) -> ServerTraits:
        chat = {"messages": [{"role": "user", "content": "-"}]}
        told: list[dict[str, Any]] = []
        for method, path, body in (("GET", "/props", None), ("POST", "/apply-template", chat)):
            try:
                status, answer = self._ask(method, path, _TRAITS_TIMEOUT_S, body)
            except _NO_ANSWER:
                status, answer = 0, None
            told.append(answer if status == 200 and isinstance(answer, dict) else {})
        return server_traits(*told)

    def _ask(self, method: str, path: str, timeout_s: float, body: object = None) -> tuple[int, Any]:
        """(status, the JSON of the body or None)."""
        headers = {"Connection": "close", "Content-Type": "application/json", **self._endpoint.headers()}
        data = json.dumps(body).encode() if body is not None else None
        connect_timeout_s = min(timeout_s, self._endpoint.connect_timeout_s)
        # Without requests around it: probes are all that an idle worker costs, and it would more than double that.
        with contextlib.closing(plain_connection(self._abort, self._endpoint.base_url, connect_timeout_s)) as http:
            http.connect()
            http.timeout = timeout_s
            http.request(method, path, body=data, headers=headers, preload_content=False)
            response = http.getresponse()
            try:
                return response.status, json.loads(response.read(_MAX_BODY_BYTES))
            except (ValueError, RecursionError):
                return response.status, None


def owns_port(root_pid: int, port: int) -> bool:
    """Whether a process of the tree listens on the port."""
    try:
        root = psutil.Process(root_pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.Error:
        return False
    for process in tree:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
            return True
    return False
