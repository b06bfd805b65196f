"""What a verdict says: each number in its words is one that was set, or one that was so."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llama_worker.config.profiles import TimeoutProfile
from tests.simulation.promises import Promise
from tests.simulation.scheduler import Violation

_WAITED = re.compile(r" for ([\d.]+) s \(limit: (?:(\d+) x )?(\w+) ([\d.e+]+)\)")
_STILL = re.compile(r"no slot of the server moved in ([\d.]+) s")
_PACED = re.compile(r"\(limit: ([\d.]+) s\)")
_LAST_BYTE = re.compile(r"last byte ([\d.]+) s ago")
_ROUNDING_S = 0.06
_SLACK_S = 20.0  # records have to repeat themselves first, threads sleep
_SHORTEST_STANDSTILL_S = 150.0  # of a batch, by what others took
_MULTIPLE = 4  # of `idle_stream_timeout_s`, beside those who get data


def check_words(
    detail: str, profile: TimeoutProfile, *, in_time: bool, heard_at: Iterable[float], now: float
) -> None:
    """`in_time`: the host ran all the time, so that no verdict is late; `heard_at`: when bytes
    came, of late."""
    waited = _WAITED.search(detail)
    if waited is not None:
        waited_s, times, setting, limit_s = waited.groups()
        due_s = int(times or 1) * float(limit_s)
        _require(detail, times is None or int(times) == _MULTIPLE)
        _require(detail, float(limit_s) == getattr(profile, setting))
        _require(detail, float(waited_s) >= due_s - _ROUNDING_S)
        latest_s = due_s + 2 * profile.liveness_probe_interval_s + _SLACK_S
        _require(detail, not in_time or float(waited_s) <= latest_s)
    still, paced, byte = (each.search(detail) for each in (_STILL, _PACED, _LAST_BYTE))
    if still is not None and paced is not None:
        limit_s = float(paced[1])
        _require(detail, _SHORTEST_STANDSTILL_S <= limit_s <= float(still[1]) + _ROUNDING_S)
    if byte is not None:
        at, slack_s = now - float(byte[1]), _ROUNDING_S + _SLACK_S
        _require(detail, any(abs(each - at) <= slack_s for each in heard_at))


def _require(detail: str, is_so: bool) -> None:
    if not is_so:
        raise Violation(Promise.HUNG_OR_SLOW, f"the verdict's words are wrong: {detail}")
