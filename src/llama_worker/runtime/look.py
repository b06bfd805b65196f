"""The thread behind one look of a liveness probe."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from llama_worker.messages import EvidenceSeen, Mailbox
from llama_worker.types import LivenessProbe

_logger = logging.getLogger("llama_worker.watchdog")


def look(
    probe: LivenessProbe, seen: EvidenceSeen, root_pid: int, reply_to: Mailbox[EvidenceSeen], *, name: str
) -> None:
    """Ask the probe on a daemon thread of its own: `reply_to` gets `seen`, filled in.

    A probe that raises, or returns something odd, brings no news. Raises RuntimeError where there is no thread.
    """
    threading.Thread(
        target=_look, args=(probe, seen, root_pid, reply_to), name=f"llama_worker-{name}-look", daemon=True
    ).start()


def _look(probe: LivenessProbe, seen: EvidenceSeen, root_pid: int, reply_to: Mailbox[EvidenceSeen]) -> None:
    alive, detail = False, ""
    try:
        if seen.fresh:
            probe.reset()
        evidence = probe.probe(root_pid, time.monotonic())
        if evidence is not None:
            alive, detail = bool(evidence.alive), str(evidence.detail)
    except Exception:
        _logger.exception("a liveness probe failed")
    reply_to.tell(replace(seen, alive=alive, at=time.monotonic(), detail=detail))
