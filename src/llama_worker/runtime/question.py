"""One question to the server, beside its streams, answered in JSON."""

from __future__ import annotations

import json
import time
from typing import Any

from llama_worker.config import WorkerConfig
from llama_worker.runtime.chat_exchange import Endpoint
from llama_worker.runtime.connections import Abort, Aborted
from llama_worker.runtime.plain_http import exchange

NO_ANSWER = (Aborted, OSError, ValueError)  # what `ask` raises


def ask(
    abort: Abort,
    config: WorkerConfig,
    endpoint: Endpoint,
    method: str,
    path: str,
    *,
    timeout_s: float,
    body: object = None,
) -> tuple[int, Any]:
    """(status, the JSON of the body or None), within `timeout_s`; blocks."""
    status, told = exchange(
        abort,
        (config.connect_host, config.port),
        method,
        path,
        headers={
            "Host": endpoint.base_url.removeprefix("http://"),
            "Content-Type": "application/json",
            **endpoint.headers(),
        },
        body=json.dumps(body).encode() if body is not None else b"",
        connect_timeout_s=endpoint.connect_timeout_s,
        deadline=time.monotonic() + timeout_s,
    )
    try:
        return status, json.loads(told)
    except (ValueError, RecursionError):
        return status, None
