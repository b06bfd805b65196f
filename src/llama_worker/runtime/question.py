"""One question to the server, beside its streams, answered in JSON; one look at its `/slots`."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from llama_worker.config import WorkerConfig
from llama_worker.messages import Mailbox, SlotsSeen
from llama_worker.runtime.chat_exchange import Endpoint
from llama_worker.runtime.connections import Abort, Aborted
from llama_worker.runtime.plain_http import exchange
from llama_worker.server.slots import SlotsLook, parse_slots

_SLOTS_TIMEOUT_S = 2.0  # it answers within 0.21 s, also in the middle of a long batch (b11434)
_logger = logging.getLogger("llama_worker")
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


def look_at_slots(
    abort: Abort, config: WorkerConfig, endpoint: Endpoint, epoch: int, reply_to: Mailbox[SlotsSeen]
) -> None:
    """Ask for `/slots`, and tell one SlotsSeen; blocks."""
    asked_at = time.monotonic()
    slots = None
    try:
        status, told = ask(abort, config, endpoint, "GET", "/slots", timeout_s=_SLOTS_TIMEOUT_S)
        slots = parse_slots(told) if status == 200 else None
    except NO_ANSWER:
        pass
    except Exception:
        _logger.exception("a look at /slots failed")
    look = None if slots is None else SlotsLook(asked_at=asked_at, slots=slots)
    reply_to.tell(SlotsSeen(epoch=epoch, look=look))
