"""What goes wrong, by name: how it is done to the model, how soon it must be found, what it
excuses.

A `Kind` of the table is done by Nature at a random moment, or to a request when its turn comes.
`found_within` is what the profile promises for it, from the moment when it begins to hurt; None:
nothing to be found. `honest`: it only looks like a wedge, and excuses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from llama_worker.config.profiles import TimeoutProfile

SLACK_S: Final = 8.0  # threads that sleep, timers that are late, a window of 3 s of CPU time


class Stage(Enum):
    """How far a request is, as the server knows it, when a fault begins."""

    UNKNOWN = "not at the server, or nothing is known"
    WAITING = "no headers sent, to nobody else either"
    SILENT = "headers sent, and nothing else"
    SPEAKING = "progress or answers sent"
    IN_ONE_PIECE = "nothing is sent before the reply is complete"


class Scope(Enum):
    """What a kind is done to."""

    REPLY = "one request"
    SERVER = "the server at work"
    LOAD = "a launch"
    KILL = "a process that is to end"
    HOST = "the host program"


@dataclass(frozen=True, slots=True)
class Kind:
    """One way for things to go wrong."""

    name: str
    scope: Scope
    found_within: Callable[[TimeoutProfile, Stage], float | None] = lambda profile, stage: None
    honest: bool = False
    kills: bool = True  # excuses the end of the server
    weight: float = 1.0
    # where others of the server receive data, the bound counts from the last of it
    neighbours_spare: bool = False
    most_records: int | None = None  # of nonsense, before the request is over


def _soon(profile: TimeoutProfile, stage: Stage) -> float:
    return SLACK_S


def _looks(profile: TimeoutProfile) -> float:
    return 2 * profile.liveness_probe_interval_s + SLACK_S


def _silence(profile: TimeoutProfile, stage: Stage) -> float | None:
    """No CPU time and no data."""
    # Another may be broken off as late as this limit allows, and its batch gets its time.
    waiting_s = profile.headers_timeout_s + (profile.idle_stream_timeout_s or math.inf)
    limit = {
        Stage.WAITING: waiting_s,
        Stage.SILENT: profile.prefill_liveness_timeout_s,
        Stage.SPEAKING: profile.idle_stream_timeout_s,
        Stage.IN_ONE_PIECE: profile.silent_work_timeout_s,
        Stage.UNKNOWN: max(waiting_s, profile.prefill_liveness_timeout_s or math.inf),
    }[stage]
    return None if limit is None or limit == math.inf else limit + _looks(profile)


def _silent_work(profile: TimeoutProfile, stage: Stage) -> float | None:
    limit = profile.silent_work_timeout_s
    return None if limit is None else limit + _looks(profile)


def _health(profile: TimeoutProfile, stage: Stage) -> float | None:
    interval_s = profile.health_probe_interval_s
    return (
        None
        if interval_s is None
        else (profile.health_failures_before_restart + 1) * (interval_s + 12.0) + SLACK_S
    )


def _load(profile: TimeoutProfile, stage: Stage) -> float | None:
    limit = longest_load_s(profile)
    return None if limit is None else limit + _looks(profile)


def longest_load_s(profile: TimeoutProfile) -> float | None:
    """How long a load may work; None: for ever."""
    return (
        profile.silent_work_timeout_s if profile.load_timeout_s is None else profile.load_timeout_s
    )


_KINDS = (
    # ---- one request
    Kind("connection reset", Scope.REPLY, found_within=_soon),
    Kind("cut in a record", Scope.REPLY, found_within=_soon),
    Kind("ends without a finish", Scope.REPLY, found_within=_soon),
    Kind("error record", Scope.REPLY, found_within=_soon),
    Kind("status 500", Scope.REPLY, found_within=_soon),
    Kind("status 400", Scope.REPLY, found_within=_soon, kills=False),
    Kind("garbage", Scope.REPLY, found_within=_soon),
    Kind("repeated lines", Scope.REPLY, most_records=20, kills=False),
    Kind("crash in the answer", Scope.REPLY, found_within=_soon),
    Kind("tool raises", Scope.REPLY, found_within=_soon, kills=False),
    Kind(
        "tool never returns",
        Scope.REPLY,
        found_within=lambda profile, stage: 10.0 + SLACK_S,
        kills=False,
    ),
    Kind("frozen progress", Scope.REPLY, found_within=_silent_work, neighbours_spare=True),
    Kind("empty frames", Scope.REPLY, found_within=_silent_work, neighbours_spare=True),
    Kind("endless characters", Scope.REPLY, most_records=200, kills=False),
    Kind("endless arguments", Scope.REPLY, most_records=200, kills=False),
    Kind(
        "dead stream, live neighbour", Scope.REPLY, found_within=_silent_work, neighbours_spare=True
    ),
    Kind("request lost", Scope.REPLY, found_within=_silent_work, neighbours_spare=True),
    # ---- the server at work
    Kind("decode dead, HTTP alive", Scope.SERVER, found_within=_silence),
    Kind("livelock", Scope.SERVER, found_within=_silent_work),
    Kind("stuck task queue", Scope.SERVER, found_within=_silent_work),
    Kind("SIGSTOP", Scope.SERVER, found_within=_silence),
    Kind("dead altogether", Scope.SERVER, found_within=_silence),
    Kind("HTTP thread dead", Scope.SERVER, found_within=_health),
    Kind("connections cut, HTTP dead", Scope.SERVER, found_within=_health, weight=0.5),
    Kind("GPU lost", Scope.SERVER, found_within=_soon),
    Kind("another process's GPU error", Scope.SERVER, honest=True),
    Kind("crash", Scope.SERVER, found_within=_soon),
    Kind("killed by the system", Scope.SERVER, found_within=_soon),
    Kind("guard killed", Scope.SERVER, found_within=_soon),
    Kind("guard stopped", Scope.SERVER, honest=True, weight=0.5),
    Kind("pause", Scope.SERVER, honest=True, weight=2.0),
    Kind("short SIGSTOP", Scope.SERVER, honest=True),
    Kind("sidecar's CPU", Scope.SERVER, found_within=_silence),
    # ---- a launch
    Kind("load crashes", Scope.LOAD, found_within=_soon),
    Kind("crash loop", Scope.LOAD, found_within=_soon, weight=0.5),
    Kind(
        "load hangs",
        Scope.LOAD,
        found_within=lambda profile, stage: profile.startup_timeout_s + _looks(profile),
    ),
    Kind("load spins", Scope.LOAD, found_within=_load),
    Kind("slow load", Scope.LOAD, honest=True, weight=2.0),
    Kind("canary fails", Scope.LOAD, found_within=_soon, weight=0.5),
    Kind("a stranger has the port", Scope.LOAD, found_within=_soon, weight=0.5),
    Kind("spawn fails", Scope.LOAD, found_within=_soon),
    Kind("port taken", Scope.LOAD, found_within=_soon),
    # ---- a process that is to end
    Kind("SIGTERM ignored", Scope.KILL, honest=True),
    Kind("unkillable for minutes", Scope.KILL),
    Kind("unkillable for ever", Scope.KILL, weight=0.2),
    # ---- the host program
    Kind("actor's exception", Scope.HOST),
    Kind("an actor is blocked", Scope.HOST),
    Kind("a probe hangs", Scope.HOST, honest=True),
    Kind("host always late", Scope.HOST, honest=True),
    Kind("host stalled", Scope.HOST, honest=True),
    Kind("host and server stalled", Scope.HOST, honest=True),
    Kind("host lacks threads", Scope.HOST, kills=False),
    Kind("clock set", Scope.HOST, honest=True),
    Kind("BIOS provider raises", Scope.HOST, kills=False),
    Kind("BIOS provider blocks", Scope.HOST, kills=False),
)
KINDS: Final[Mapping[str, Kind]] = {kind.name: kind for kind in _KINDS}
