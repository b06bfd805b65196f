"""Other clients of the same server: the worker hears nothing of their requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.dice import Dice
from tests.simulation.server import LlamaServer, Reply

if TYPE_CHECKING:
    from tests.simulation.world import World

FOREIGN = 1_000_000  # request ids from here on are theirs
_CHANCE = 0.05  # that some come just before one of the worker's own requests
_SLOWEST_STEP_S = 20.0


class Unheard:
    """A stranger's end of its connection."""

    def headers(self, status: int) -> None: ...

    def receive(self, data: bytes) -> None: ...

    def end(self, *, regular: bool) -> None: ...


class Strangers:
    """They take slots of the server, and their answers come in slow steps. Who waits behind them
    sees only by the server's CPU time, or by its slots, that it works."""

    def __init__(self, world: World, dice: Dice) -> None:
        build = world.build
        self.is_over = not (build.cpu_shows or build.shows_reading)
        self.count = 0
        self._world, self._dice = world, dice
        # All of them together: who waits for headers has that limit, unless it sees slots move.
        share = 1.5 if build.shows_slots else 0.15
        self._longest_s = share * (world.profile.silent_work_timeout_s or 3600.0)
        suspect_after_s = world.profile.suspect_after_s or 60.0
        self._slowest_step_s = min(_SLOWEST_STEP_S, 0.4 * suspect_after_s, 0.5 * self._longest_s)
        if not build.cpu_shows:
            headers_s = world.profile.headers_timeout_s
            self._slowest_step_s = min(self._slowest_step_s, 0.3 * headers_s)

    def may_come(self, server: LlamaServer) -> None:
        """One of the worker's own requests is about to arrive."""
        if self.is_over or not self._dice.chance(_CHANCE):
            return
        for _ in range(1 + self._dice.below(self._world.build.slots)):
            self.count += 1
            connection: Any = Unheard()
            server.accept(connection, (FOREIGN + self.count, 1), {})

    def reply(self) -> Reply:
        """Of a few long steps; all slots' steps together make one of the server's."""
        build, dice = self._world.build, self._dice
        step_s = dice.log_between(0.5, self._slowest_step_s) / build.slots
        steps = 1 + dice.below(max(1, int(self._longest_s / (step_s * build.slots))))
        step_tokens = max(1, int(step_s * build.decode_tokens_per_s))
        longest_s = self._longest_s if build.shows_reading else 0.0
        longest = max(20, int(longest_s * build.prefill_tokens_per_s))
        return Reply(
            key="stranger",
            prompt_tokens=1 + int(dice.log_between(1, longest)),
            text_tokens=min(steps, 200) * step_tokens,
            step_tokens=step_tokens,
        )
