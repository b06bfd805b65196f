"""Decides how often and how soon a server is restarted, and when an idle one is recycled. Pure.

The limits are in `config.profiles.RestartPolicy`. Instants (`now`) are monotonic seconds.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from llama_worker.config.profiles import Recycle, RestartPolicy


class RestartBudget(Struct, frozen=True, kw_only=True):
    """The restarts so far, and what the lockout and the backoff count of them."""

    restart_count: int = 0  # since construction; never cleared
    recent: tuple[float, ...] = ()  # restarts within the window, oldest first
    row_count: int = 0  # restarts in a row: no completed request or stable READY between
    ready_at: float | None = None  # READY since
    ready_for_s: float = -math.inf  # the longest READY since the last restart; -inf: there was none

    def next(self, now: float, policy: RestartPolicy) -> tuple[RestartBudget, float | str]:
        """The server is down or must be ended: the seconds to wait before the restart or, as a
        text, why there is no other (the lockout). Implies `left_ready`."""
        left = self.left_ready(now)
        recent = tuple(at for at in left.recent if now - at < policy.restart_window_s)
        row_count = 0 if left.ready_for_s >= policy.stable_after_s else left.row_count
        left = replace(left, recent=recent, row_count=row_count)
        limit = policy.max_restarts_per_window
        if limit == 0:
            return left, "restarts are turned off (max_restarts_per_window 0)"
        if len(recent) >= limit:
            history = f"restarted {len(recent)} times within {now - recent[0]:.1f} s"
            allowed = (
                f"max_restarts_per_window {limit} in restart_window_s {policy.restart_window_s:g}"
            )
            return left, f"{history} (limit: {allowed})"
        if row_count >= limit:
            history = (
                f"restarted {row_count} times in a row (limit: max_restarts_per_window {limit})"
            )
            lacking = (
                f"no completed request and no {policy.stable_after_s:g} s of READY "
                "(stable_after_s) in between"
            )
            return left, f"{history} with {lacking}"
        next_budget = RestartBudget(
            restart_count=left.restart_count + 1, recent=(*recent, now), row_count=row_count + 1
        )
        return next_budget, backoff_s(row_count + 1, policy)

    def planned(self, now: float) -> RestartBudget:
        """A restart that no failure caused: only `restart_count` grows. Implies `left_ready`."""
        return replace(self.left_ready(now), restart_count=self.restart_count + 1)

    def became_ready(self, now: float) -> RestartBudget:
        return replace(self, ready_at=now)

    def left_ready(self, now: float) -> RestartBudget:
        """READY ended, for any cause; no effect if the server was not READY."""
        if self.ready_at is None:
            return self
        return replace(self, ready_at=None, ready_for_s=max(self.ready_for_s, now - self.ready_at))

    def request_completed(self) -> RestartBudget:
        """A request reached `completed`: the row ends. The window still counts."""
        return replace(self, row_count=0)

    def cleared(self) -> RestartBudget:
        """The budget of an explicit start: only `restart_count` is kept."""
        return RestartBudget(restart_count=self.restart_count)


def backoff_s(number: int, policy: RestartPolicy) -> float:
    """Seconds to wait before restart `number` (1, 2, ...) in a row."""
    try:
        raw = policy.restart_backoff_s * policy.backoff_factor ** (number - 1)
    except OverflowError:
        raw = policy.backoff_max_s if policy.restart_backoff_s > 0 else 0.0
    return float(min(raw, policy.backoff_max_s))


def recycle_due(
    policy: Recycle, *, ready_at: float, requests_count: int, anon_bytes: int | None, now: float
) -> str | None:
    """Why to replace a server that has been READY since `ready_at` and has ended `requests_count`
    requests; None: not yet.

    `anon_bytes`: its anonymous memory, swapped out or not; None: unknown. Memory of mapped files
    belongs to the kernel and does not count.
    """
    if policy.max_requests is not None and requests_count >= policy.max_requests:
        ended = f"{requests_count} requests ended"
        return f"{ended} (limit: max_requests {policy.max_requests})"
    if policy.max_age_s is not None and now >= ready_at + policy.max_age_s:
        ready = f"ready for {now - ready_at:.0f} s"
        return f"{ready} (limit: max_age_s {policy.max_age_s:g})"
    if (
        policy.max_anon_mib is not None
        and requests_count  # else it is no leak, and the next server would have no less
        and anon_bytes is not None
        and anon_bytes >> 20 >= policy.max_anon_mib
    ):
        return (
            f"{anon_bytes >> 20} MiB of anonymous memory (limit: max_anon_mib "
            f"{policy.max_anon_mib})"
        )
    return None
