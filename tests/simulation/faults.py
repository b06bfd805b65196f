"""What goes wrong, by name: how it is done to the model, how soon it must be found, what it excuses.

A `Kind` of the table is done by Nature at a random moment, or to a request when its turn comes. `found_within` is what
the profile promises for it, from the moment when it begins to hurt; None: nothing to be found. `honest`: it only looks
like a wedge, and excuses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from llama_worker.profiles import TimeoutProfile

SLACK_S: Final = 8.0  # threads that sleep, timers that are late, a window of 3 s of CPU time


class Stage(Enum):
    """How far a request is, as the server knows it, when a fault begins."""

    UNKNOWN = "not at the server, or nothing is known"
    WAITING = "no headers sent"
    SILENT = "headers sent, and nothing else"
    SPEAKING = "progress or answers sent"


class Scope(Enum):
    """What a kind is done to."""

    REPLY = "one request"
    SERVER = "the server at work"
    LOAD = "a launch"
    KILL = "a process that is to end"
    HOST = "the host program"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way for things to go wrong."""

    name: str
    scope: Scope
    found_within: Callable[[TimeoutProfile, Stage], float | None] = lambda profile, stage: None
    honest: bool = False
    kills: bool = True  # excuses the end of the server
    weight: float = 1.0
    neighbours_spare: bool = False  # where others of the server receive data, the bound counts from the last of it
    most_records: int | None = None  # of nonsense, before the request is over


def _soon(profile: TimeoutProfile, stage: Stage) -> float:
    return SLACK_S


def _looks(profile: TimeoutProfile) -> float:
    return 2 * profile.liveness_probe_interval_s + SLACK_S


def _silence(profile: TimeoutProfile, stage: Stage) -> float | None:
    """No CPU time and no data."""
    limit = {
        Stage.WAITING: profile.headers_timeout_s,
        Stage.SILENT: profile.prefill_liveness_timeout_s,
        Stage.SPEAKING: profile.idle_stream_timeout_s,
        Stage.UNKNOWN: max(profile.headers_timeout_s, profile.prefill_liveness_timeout_s or math.inf),
    }[stage]
    return None if limit is None or limit == math.inf else limit + _looks(profile)


def _silent_work(profile: TimeoutProfile, stage: Stage) -> float | None:
    limit = profile.silent_work_timeout_s
    return None if limit is None else limit + _looks(profile)


def _health(profile: TimeoutProfile, stage: Stage) -> float | None:
    interval_s = profile.health_probe_interval_s
    return None if interval_s is None else (profile.health_failures_before_restart + 1) * (interval_s + 12.0) + SLACK_S


def _load(profile: TimeoutProfile, stage: Stage) -> float | None:
    limit = longest_load_s(profile)
    return None if limit is None else limit + _looks(profile)


def longest_load_s(profile: TimeoutProfile) -> float | None:
    """How long a load may work; None: for ever."""
    return profile.silent_work_timeout_s if profile.load_timeout_s is None else profile.load_timeout_s


_KINDS = (
    # ---- one request
    Kind(name="connection reset", scope=Scope.REPLY, found_within=_soon),
    Kind(name="cut in a record", scope=Scope.REPLY, found_within=_soon),
    Kind(name="ends without a finish", scope=Scope.REPLY, found_within=_soon),
    Kind(name="error record", scope=Scope.REPLY, found_within=_soon),
    Kind(name="status 500", scope=Scope.REPLY, found_within=_soon),
    Kind(name="status 400", scope=Scope.REPLY, found_within=_soon, kills=False),
    Kind(name="garbage", scope=Scope.REPLY, found_within=_soon),
    Kind(name="repeated lines", scope=Scope.REPLY, most_records=20, kills=False),
    Kind(name="crash in the answer", scope=Scope.REPLY, found_within=_soon),
    Kind(name="tool raises", scope=Scope.REPLY, found_within=_soon, kills=False),
    Kind(name="tool never returns", scope=Scope.REPLY, found_within=lambda profile, stage: 10.0 + SLACK_S, kills=False),
    Kind(name="frozen progress", scope=Scope.REPLY, found_within=_silent_work, neighbours_spare=True),
    Kind(name="empty frames", scope=Scope.REPLY, found_within=_silent_work, neighbours_spare=True),
    Kind(name="endless characters", scope=Scope.REPLY, most_records=200, kills=False),
    Kind(name="endless arguments", scope=Scope.REPLY, most_records=200, kills=False),
    Kind(name="dead stream, live neighbour", scope=Scope.REPLY, found_within=_silent_work, neighbours_spare=True),
    Kind(name="request lost", scope=Scope.REPLY, found_within=_silent_work, neighbours_spare=True),
    # ---- the server at work
    Kind(name="decode dead, HTTP alive", scope=Scope.SERVER, found_within=_silence),
    Kind(name="livelock", scope=Scope.SERVER, found_within=_silent_work),
    Kind(name="SIGSTOP", scope=Scope.SERVER, found_within=_silence),
    Kind(name="dead altogether", scope=Scope.SERVER, found_within=_silence),
    Kind(name="HTTP thread dead", scope=Scope.SERVER, found_within=_health),
    Kind(name="GPU lost", scope=Scope.SERVER, found_within=_soon),
    Kind(name="another process's GPU error", scope=Scope.SERVER, honest=True),
    Kind(name="crash", scope=Scope.SERVER, found_within=_soon),
    Kind(name="killed by the system", scope=Scope.SERVER, found_within=_soon),
    Kind(name="guard killed", scope=Scope.SERVER, found_within=_soon),
    Kind(name="pause", scope=Scope.SERVER, honest=True, weight=2.0),
    Kind(name="short SIGSTOP", scope=Scope.SERVER, honest=True),
    Kind(name="sidecar's CPU", scope=Scope.SERVER, found_within=_silence),
    # ---- a launch
    Kind(name="load crashes", scope=Scope.LOAD, found_within=_soon),
    Kind(name="crash loop", scope=Scope.LOAD, found_within=_soon, weight=0.5),
    Kind(
        name="load hangs", scope=Scope.LOAD, found_within=lambda profile, _: profile.startup_timeout_s + _looks(profile)
    ),
    Kind(name="load spins", scope=Scope.LOAD, found_within=_load),
    Kind(name="slow load", scope=Scope.LOAD, honest=True, weight=2.0),
    Kind(name="canary fails", scope=Scope.LOAD, found_within=_soon, weight=0.5),
    Kind(name="spawn fails", scope=Scope.LOAD, found_within=_soon),
    Kind(name="port taken", scope=Scope.LOAD, found_within=_soon),
    # ---- a process that is to end
    Kind(name="SIGTERM ignored", scope=Scope.KILL),
    Kind(name="unkillable for minutes", scope=Scope.KILL),
    Kind(name="unkillable for ever", scope=Scope.KILL, weight=0.2),
    # ---- the host program
    Kind(name="actor's exception", scope=Scope.HOST),
    Kind(name="a probe hangs", scope=Scope.HOST, honest=True),
    Kind(name="host stalled", scope=Scope.HOST, honest=True),
    Kind(name="host and server stalled", scope=Scope.HOST, honest=True),
    Kind(name="host lacks threads", scope=Scope.HOST, kills=False),
    Kind(name="clock set", scope=Scope.HOST, honest=True),
    Kind(name="BIOS provider raises", scope=Scope.HOST, kills=False),
    Kind(name="BIOS provider blocks", scope=Scope.HOST, kills=False),
)
KINDS: Final[Mapping[str, Kind]] = {kind.name: kind for kind in _KINDS}
