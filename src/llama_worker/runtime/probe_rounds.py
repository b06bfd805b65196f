"""The liveness probes of one worker, asked in rounds, each on a thread of its own.

A foreign probe may hang (NVML with a lost GPU does): it costs nobody else a look, and is not asked again until it
has returned. Belongs to the WatchdogActor; the threads only tell it EvidenceSeen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from llama_worker.messages import EvidenceSeen, Mailbox, WatchdogMessage
from llama_worker.types import LivenessProbe

_logger = logging.getLogger("llama_worker.watchdog")


class ProbeRounds:
    """Not thread-safe: one actor calls it."""

    def __init__(self, probes: Sequence[LivenessProbe], name: str, tell_to: Mailbox[WatchdogMessage]) -> None:
        self._probes = probes
        self._name = name
        self._tell_to = tell_to
        self._round = 0
        self._mark = 0  # the round that began watching; what an older one saw is of no interest
        self._out: set[int] = set()  # probes that have not returned
        self._pending: set[int] = set()  # those of them that the present round waits for
        self._mark_due: set[int] = set()  # probes that are still to forget what they saw before
        self._pid = 0
        self._epoch = 0

    def look(self, pid: int, epoch: int, *, fresh: bool) -> bool:
        """Ask every probe that is not still out; False where all are. `fresh`: watching begins anew."""
        self._pid, self._epoch = pid, epoch
        self._round += 1
        if fresh:
            self._mark = self._round
            self._mark_due = set(range(len(self._probes)))
        self._pending = set(range(len(self._probes))) - self._out
        for index in sorted(self._pending):
            self._ask(index)
        return bool(self._pending)

    def returned(self, seen: EvidenceSeen) -> bool:
        """Take note that a probe is back; whether what it saw is of interest."""
        self._out.discard(seen.probe)
        if seen.probe in self._mark_due:
            self._ask(seen.probe)  # it was out when watching began: set its mark now
        else:
            self._pending.discard(seen.probe)
        return seen.round >= self._mark

    @property
    def complete(self) -> bool:
        """Every probe that the present round asked is back."""
        return not self._pending

    def _ask(self, index: int) -> None:
        fresh = index in self._mark_due
        self._mark_due.discard(index)
        self._out.add(index)
        threading.Thread(
            target=_look,
            args=(self._probes[index], index, self._round, self._pid, self._epoch, fresh, self._tell_to),
            name=f"llama_worker-{self._name}-look",
            daemon=True,
        ).start()


def _look(
    probe: LivenessProbe,
    index: int,
    round_number: int,
    pid: int,
    epoch: int,
    fresh: bool,
    tell_to: Mailbox[WatchdogMessage],
) -> None:
    """One probe's look at the server's processes. One that raises, or returns something odd, brings no news."""
    alive, detail = False, ""
    try:
        if fresh:
            probe.reset()
        evidence = probe.probe(pid, time.monotonic())
        if evidence is not None:
            alive, detail = bool(evidence.alive), str(evidence.detail)
    except Exception:
        _logger.exception("a liveness probe failed")
    tell_to.tell(
        EvidenceSeen(
            epoch=epoch,
            probe=index,
            round=round_number,
            alive=alive,
            at=time.monotonic(),
            detail=detail,
            fresh=fresh,
        )
    )
