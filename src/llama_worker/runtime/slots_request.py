"""The thread behind one look at the server's `/slots`."""

from __future__ import annotations

import logging
import time

from llama_worker.config import WorkerConfig
from llama_worker.messages import Mailbox, SlotsSeen
from llama_worker.runtime.chat_exchange import Endpoint
from llama_worker.runtime.connections import Abort
from llama_worker.runtime.host_code import start_thread
from llama_worker.runtime.question import NO_ANSWER, ask
from llama_worker.server.slots import SlotsLook, parse_slots

_TIMEOUT_S = 2.0  # it answers within 0.21 s, also in the middle of a long batch (b11434)
_logger = logging.getLogger("llama_worker")


class SlotsRequest:
    """The constructor starts a daemon thread, which tells one SlotsSeen; any thread may call `abort`."""

    def __init__(self, config: WorkerConfig, endpoint: Endpoint, *, epoch: int, reply_to: Mailbox[SlotsSeen]) -> None:
        self._config = config
        self._endpoint = endpoint
        self._epoch = epoch
        self._reply_to = reply_to
        self._abort = Abort()
        start_thread(f"llama_worker-{config.name}-slots", self._run)

    def abort(self) -> None:
        """Close the connection now; there is no answer then."""
        self._abort.abort()

    def _run(self) -> None:
        look = None
        try:
            look = self._look()
        except NO_ANSWER:
            pass
        except Exception:
            _logger.exception("a look at /slots failed")
        self._reply_to.tell(SlotsSeen(epoch=self._epoch, look=look))

    def _look(self) -> SlotsLook | None:
        asked_at = time.monotonic()
        status, told = ask(self._abort, self._config, self._endpoint, "GET", "/slots", timeout_s=_TIMEOUT_S)
        slots = parse_slots(told) if status == 200 else None
        return None if slots is None else SlotsLook(asked_at=asked_at, slots=slots)
