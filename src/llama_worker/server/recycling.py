"""Whether an idle server is to be replaced as planned. Pure; instants are monotonic seconds."""

from __future__ import annotations

from msgspec import Struct

from llama_worker.config.profiles import Recycle


class Worn(Struct, frozen=True):
    """The server is worn, and idle: replace it."""

    detail: str


def worn(
    policy: Recycle, *, ready_for_s: float, requests_count: int, anon_bytes: int | None
) -> Worn | None:
    """Why a server that has been READY for so long, and answered so many requests, is to be
    replaced.

    `anon_bytes`: its anonymous memory, swapped out or not; None: unknown. Memory of mapped files is
    the kernel's.
    """
    if policy.max_requests is not None and requests_count >= policy.max_requests:
        return Worn(f"{requests_count} requests ended (limit: max_requests {policy.max_requests})")
    if policy.max_age_s is not None and ready_for_s >= policy.max_age_s:
        return Worn(f"ready for {ready_for_s:.0f} s (limit: max_age_s {policy.max_age_s:g})")
    if (
        policy.max_anon_mib is not None
        and anon_bytes is not None
        and anon_bytes >> 20 >= policy.max_anon_mib
    ):
        return Worn(
            f"{anon_bytes >> 20} MiB of anonymous memory (limit: max_anon_mib "
            f"{policy.max_anon_mib})"
        )
    return None
