"""Which liveness probes are to be asked, and which answers count. Sans-IO; not thread-safe.

The probes are asked in rounds. A foreign probe may hang (NVML with a lost GPU does): it costs no
other probe a look, and is not asked again until it has returned.
"""

from __future__ import annotations

from llama_worker.server.messages import Look


class LookRounds:
    """Each `Look` that is returned here is to be taken."""

    def __init__(self, probes_count: int) -> None:
        self._probes = frozenset(range(probes_count))
        self._epoch = 0
        self._round = 0
        # of the present watching; what was seen in an older one is out of date
        self._first_round = 0
        self._out: set[int] = set()  # probes that have not returned
        self._pending: set[int] = set()  # those of them that the present round waits for
        self._to_reset: set[int] = set()  # probes that still have to forget what they saw before

    def begin(self, epoch: int, *, fresh: bool) -> list[Look]:
        """A round: a look by every probe that is not still out. `fresh`: watching begins anew."""
        self._epoch = epoch
        self._round += 1
        if fresh:
            self._first_round = self._round
            self._to_reset = set(self._probes)
        self._pending = set(self._probes - self._out)
        return [self._look(probe) for probe in sorted(self._pending)]

    def end(self) -> None:
        """Nobody watches any more; a probe that is out may return."""
        self._pending.clear()
        self._to_reset.clear()

    def returned(self, look: Look) -> Look | None:
        """A probe is back; the look that it has to take at once, if it was out when watching began
        anew."""
        self._out.discard(look.probe)
        if look.probe in self._to_reset:
            return self._look(look.probe)
        self._pending.discard(look.probe)
        return None

    def counts(self, look: Look) -> bool:
        """Whether the look was begun since watching began."""
        return look.round >= self._first_round

    @property
    def complete(self) -> bool:
        """Every probe that the present round asked is back."""
        return not self._pending

    def _look(self, probe: int) -> Look:
        fresh = probe in self._to_reset
        self._to_reset.discard(probe)
        self._out.add(probe)
        return Look(epoch=self._epoch, probe=probe, round=self._round, fresh=fresh)
