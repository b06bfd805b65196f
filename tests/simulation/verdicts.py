"""What a verdict says: each number in its words is one that was set, or one that was so."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.request.progress import REPEATS_APART_S, REPEATS_KEPT
from tests.simulation.promises import Promise

_WAITED = re.compile(r" for ([\d.]+) s \(limit: (?:(\d+) x )?(\w+) ([\d.e+]+)\)")
_STILL = re.compile(r"no slot of the server made progress for ([\d.]+) s")
_PACED = re.compile(r"\(limit: ([\d.]+) s\)")
_LAST_BYTE = re.compile(r"last byte ([\d.]+) s ago")
_ROUNDING_S = 0.06
_SLACK_S = 20.0  # threads sleep
_SHORTEST_STANDSTILL_S = 150.0  # of a batch, by what others took
_MULTIPLE = 4  # of `idle_stream_timeout_s`, beside those who get data


def check_words(
    detail: str,
    profile: TimeoutProfile,
    *,
    in_time: bool,
    heard_at: Iterable[float],
    records_at: Iterable[float],
    now: float,
) -> None:
    """`in_time`: the host ran all the time, so that no verdict is late; `heard_at`: when bytes
    came, of late; `records_at`: when they held records."""
    waited = _WAITED.search(detail)
    if waited is not None:
        waited_s, times, setting, limit_s = waited.groups()
        due_s = int(times or 1) * float(limit_s)
        _require(detail, times is None or int(times) == _MULTIPLE)
        _require(detail, float(limit_s) == getattr(profile, setting))
        _require(detail, float(waited_s) >= due_s - _ROUNDING_S)
        if "only repeated records" in detail:  # which has to be seen first
            since = now - float(waited_s)
            due_s = max(due_s, _repeated_at(records_at, since + _ROUNDING_S) - since)
        if "no slot moved" in detail:  # which nobody looks at before
            due_s = max(due_s, profile.suspect_after_s or 0.0)
        latest_s = due_s + 2 * profile.liveness_probe_interval_s + _SLACK_S
        _require(detail, not in_time or float(waited_s) <= latest_s)
    still, paced, byte = (each.search(detail) for each in (_STILL, _PACED, _LAST_BYTE))
    if still is not None and paced is not None:
        limit_s = float(paced[1])
        _require(detail, _SHORTEST_STANDSTILL_S <= limit_s <= float(still[1]) + _ROUNDING_S)
    if byte is not None:
        at, slack_s = now - float(byte[1]), _ROUNDING_S + _SLACK_S
        _require(detail, any(abs(each - at) <= slack_s for each in heard_at))


def _repeated_at(records_at: Iterable[float], since: float) -> float:
    """When a record had come as often as makes it a repetition, or `since`."""
    repeats = [since - REPEATS_APART_S]
    for at in records_at:
        if at > since and at - repeats[-1] >= REPEATS_APART_S:
            repeats.append(at)
    return next(islice(repeats, REPEATS_KEPT, None), since)


def _require(detail: str, is_so: bool) -> None:
    if not is_so:
        raise Promise.HUNG_OR_SLOW(f"the verdict's words are wrong: {detail}")
