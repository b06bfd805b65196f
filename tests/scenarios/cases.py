"""Every scenario, by topic. The name of each is its claim. A hang is followed by its honest twin,
where it has one."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from signal import SIGCONT, SIGKILL
from typing import Any

from llama_worker import RequestFailReason
from llama_worker.server.slots import LOOK_INTERVAL_S, LOOKS_COUNT
from llama_worker.testing.scripts import (
    Answer,
    Burn,
    DiskReads,
    DoneMarker,
    Fin,
    Finish,
    FreezeEndpoints,
    Headers,
    Json,
    Note,
    PingEvery,
    Prefill,
    PromptProgress,
    Raw,
    Reasoning,
    Repeat,
    Role,
    Script,
    Sleep,
    Startup,
    Step,
    StopSelf,
    Text,
    Tokens,
    Usage,
    WaitClose,
)
from tests.scenarios.scenario import IDLE_PARENT, SIDECAR, Ask, Move, Scenario, Truth, silent

HUNG, SLOW, DEAD = Truth.HUNG, Truth.SLOW, Truth.DEAD
HEADERS, STALL = RequestFailReason.HEADERS_TIMEOUT, RequestFailReason.STALL_TIMEOUT
RESTARTED, DIED = RequestFailReason.WORKER_RESTARTED, RequestFailReason.SERVER_DIED
DISCONNECTED, LOST = RequestFailReason.STREAM_DISCONNECTED, RequestFailReason.REQUEST_LOST
LOOP = RequestFailReason.REPEATED_TEXT_LOOP
HEADERS_S, PREFILL_S, IDLE_S = 0.8, 1.5, 1.2  # as in TIMEOUTS

END = (Finish(), Usage(), DoneMarker())
HI = (Text("hi"), *END)
PINGS = PingEvery(0.15)
# Clearly above what counts as work (5 ticks/s), and cheap enough to run many side by side.
TICKS = 30.0
ALONE: Mapping[str, Any] = {"restart_reason": ""}  # the request ends, the server goes on


def work(seconds: float | None) -> Step:
    return Burn(seconds, TICKS)


def hung(
    name: str,
    reply: Sequence[Step],
    limit_s: float,
    *,
    fails: RequestFailReason = STALL,
    first: Sequence[Move] = (),
    then: Sequence[Move] = (),
    **more: Any,
) -> Scenario:
    """One request, given up `limit_s` after `silent("a")`; the server is restarted. Moves come
    `first` or `then`."""
    moves = (*first, Ask("a", reply, fails), *then)
    return Scenario(
        name=name,
        truth=HUNG,
        moves=moves,
        limit_s=limit_s,
        **{"restart_reason": str(fails), **more},
    )


def slow(
    name: str,
    reply: Sequence[Step],
    *,
    first: Sequence[Move] = (),
    then: Sequence[Move] = (),
    **more: Any,
) -> Scenario:
    """One request, which completes. Moves may come `first`, or `then`."""
    moves = (*first, Ask("a", reply), *then)
    return Scenario(name=name, truth=SLOW, moves=moves, **more)


_headers = (
    hung(
        "a stream that is dead, and a queue behind it",
        [Tokens(3), silent("a"), WaitClose()],
        IDLE_S,
        then=["silent a", Ask("b", [WaitClose()], RESTARTED)],
    ),
    slow(
        "headers that a neighbour's batch holds back, on an idle CPU",
        [Sleep(2.0), *HI],
        first=[Ask("b", [PromptProgress(1, 9), Sleep(2.0), *HI])],
        timeouts={"idle_stream_timeout_s": 4.0},
    ),
    slow(
        "a queue in front of the server's slots",
        [Repeat(30, [work(0.1), Text("x")]), *END],
        then=[Ask("b", [Sleep(3.0), *HI])],
    ),
    hung(
        "half a status line",
        [Raw("HTTP/1.1 20", framed=False), silent("a"), WaitClose()],
        HEADERS_S,
        fails=HEADERS,
    ),
    hung("no headers, idle", [silent("a"), WaitClose()], HEADERS_S, fails=HEADERS),
    slow("no headers for 3 s, at work", [work(3.0), *HI]),
)

_prefill = (
    hung("headers, then pings only, idle", [Headers(), PINGS, silent("a"), WaitClose()], PREFILL_S),
    slow("headers, then pings only, at work", [Headers(), PINGS, work(3.5), *HI]),
    hung("a role chunk, then silence", [Headers(), Role(), silent("a"), WaitClose()], PREFILL_S),
    slow("a role chunk, then silent work", [Headers(), Role(), work(3.5), *HI]),
    hung(
        "prompt progress, then silence",
        [PromptProgress(1, 9), Sleep(0.3), PromptProgress(2, 9), PINGS, silent("a"), WaitClose()],
        IDLE_S,
        timeouts={"prefill_liveness_timeout_s": 60.0},
    ),
    slow("prompt progress, then silent work", [PromptProgress(1, 9), work(3.0), *HI]),
    hung(
        "prompt progress in circles, at work, without /slots",
        [
            PromptProgress(5, 9),
            silent("a"),
            Repeat(None, [PromptProgress(1, 9), PromptProgress(5, 9), work(0.1)]),
        ],
        IDLE_S,
    ),
    slow("prompt progress on an idle CPU", [Prefill(total=5, batch=1, interval_s=0.8), *HI]),
    hung(
        "3 ticks a second, for ever, are no work",
        [Headers(), PingEvery(0.5), silent("a"), Burn(None, 3.0)],
        3.0,
        timeouts={"prefill_liveness_timeout_s": 3.0},
    ),
    slow("work at 12 ticks a second", [Headers(), Burn(3.5, 12.0), *HI]),
    hung(
        "an idle child of an idle parent",
        [silent("a"), WaitClose()],
        HEADERS_S,
        fails=HEADERS,
        front=IDLE_PARENT,
    ),
    slow("a busy child of an idle parent", [Headers(), work(3.5), *HI], front=IDLE_PARENT),
)

_NUMBERS = ", ".join(map(str, range(3000)))
_generating = (
    hung("tokens, then silence", [Tokens(5, 0.02), silent("a"), WaitClose()], IDLE_S),
    slow("tokens, then reads from disk, then tokens", [Tokens(3), DiskReads(3.0), *HI]),
    hung(
        "role chunks for ever", [Text("x"), silent("a"), Repeat(None, [Role(), work(0.1)])], IDLE_S
    ),
    slow("tokens, then hard work, then tokens", [Tokens(3), work(3.0), *HI]),
    hung(
        "a token later than idle_stream_timeout_s",
        [Text("x"), silent("a"), Sleep(2.0), *HI],
        IDLE_S,
    ),
    slow("one token every idle_stream_timeout_s less a little", [Tokens(5, 0.85), *END]),
    hung("reasoning, then silence", [Reasoning("hm"), silent("a"), WaitClose()], IDLE_S),
    slow("slow reasoning", [Tokens(4, 0.85, reasoning=True), *HI]),
    hung("stopped in mid-stream", [Tokens(3), silent("a"), StopSelf(), WaitClose()], IDLE_S),
    slow(
        "stopped in mid-stream, continued in time",
        [Tokens(3), Note("stops"), StopSelf(), Sleep(0.2), *HI],
        then=["stops", 1.0, SIGCONT],
        timeouts={"idle_stream_timeout_s": 2.5},
    ),
    hung(
        "a record that never ends, byte by byte",
        [Text("x"), Raw('data: {"x": "'), silent("a"), Repeat(None, [Raw("y"), Sleep(0.2)])],
        IDLE_S,
    ),
    hung(
        "one character for ever",
        [silent("a"), Repeat(None, [Text("/" * 64)])],
        0.0,
        fails=LOOP,
        **ALONE,
    ),
    slow("a long list of numbers", [Text(_NUMBERS), *END]),
)

_NEIGHBOUR = Ask("b", [Tokens(1_000_000, 0.1)], RequestFailReason.CANCELED)
_neighbours = (
    hung(
        "a neighbour streams while one stream is dead: it ends alone",
        [Tokens(2), silent("a"), WaitClose()],
        IDLE_S,
        first=[_NEIGHBOUR],
        **ALONE,
    ),
    slow(
        "a neighbour's tokens vouch for silent work",
        [Headers(), Role(), work(4.0), *HI],
        first=[_NEIGHBOUR],
        timeouts={"silent_work_timeout_s": 2.0},
    ),
    hung(
        "two dead streams: one is the culprit, the other falls with the server",
        [Tokens(3), silent("a"), WaitClose()],
        IDLE_S,
        after_work=True,
        then=["silent a", Ask("b", [Headers(), Role(), WaitClose()], RESTARTED)],
        timeouts={"prefill_liveness_timeout_s": 30.0},
    ),
)

_often = {"health_probe_interval_s": 0.4}
_health = (
    hung(
        "health hangs and no data",
        [Tokens(2), FreezeEndpoints(), silent("a"), WaitClose()],
        3 * 1.0,  # a probe is given up after 1 s here
        after_work=True,
        fails=RESTARTED,
        timeouts={**_often, "idle_stream_timeout_s": 60.0},
        restart_reason="health_lost",
    ),
    slow(
        "health hangs while streaming goes on",
        [FreezeEndpoints(), Tokens(35, 0.12), FreezeEndpoints(frozen=False), *END],
        timeouts=_often,
    ),
    Scenario(
        name="health 503 while short requests complete, each ending as soon as it is heard of",
        truth=SLOW,
        moves=[Ask("a", [Headers(), Sleep(0.15), *HI]), 0.25] * 12,
        script=Script(models=[Answer(times=1), Answer(status=503)]),
        timeouts=_often,
    ),
)

_death = (
    Scenario(
        name="two broken streams in a row",
        truth=DEAD,
        moves=[Ask(name, [Tokens(2), Fin()], DISCONNECTED) for name in "ab"],
        restart_reason="transport_failures",
    ),
    Scenario(
        name="dies with neighbours: all of them failed, with their output",
        truth=DEAD,
        moves=[
            Ask("a", [Tokens(4), Note("a"), WaitClose()], DIED),
            Ask("b", [Reasoning("hm"), Note("b"), WaitClose()], DIED),
            Ask("c", [Note("c"), WaitClose()], DIED),
            *("a", "b", "c", 0.3, SIGKILL),
        ],
        limit_s=0.0,
        since="SIGKILL",
        restart_reason="server_died",
    ),
)


def load_fails(name: str, startup: Startup, limit_s: float = 1.5, **timeouts: float) -> Scenario:
    """It is not ready within `startup_timeout_s`, which is 1.5 s here, or within
    `load_timeout_s`."""
    return Scenario(
        name=name,
        truth=HUNG,
        script=Script(startup=startup),
        limit_s=limit_s,
        since="start",
        after_work=True,
        timeouts={"startup_timeout_s": 1.5, **timeouts},
    )


_load = (
    load_fails("never listens", Startup(never_bind=True)),
    load_fails(
        "a load at work is over load_timeout_s",
        Startup(load_s=None, load_ticks_per_s=TICKS),
        2.0,
        startup_timeout_s=20.0,
        load_timeout_s=2.0,
    ),
    load_fails("a load that hangs answers 503 for ever", Startup(load_s=None)),
    Scenario(
        name="a long load with 503, at work",
        truth=SLOW,
        script=Script(startup=Startup(load_s=5.0, load_ticks_per_s=TICKS)),
        timeouts={"startup_timeout_s": 1.5},
    ),
)

# ------------------------------------------------ what only /slots, or the process itself, can tell

SUSPECT_S = 1.0
FOUND_S = SUSPECT_S + (LOOKS_COUNT - 1) * LOOK_INTERVAL_S
_SUSPICIOUS = {
    "suspect_after_s": SUSPECT_S,
    "idle_stream_timeout_s": 60.0,
    "prefill_liveness_timeout_s": 60.0,
}


def _slot(index: int = 0, *, busy: bool = True, prompt: int = 20, decoded: int = 0) -> Json:
    """As b11434 tells it."""
    return {
        "id": index,
        "is_processing": busy,
        "id_task": 7 + index,
        "n_prompt_tokens": 20,
        "n_prompt_tokens_processed": prompt if busy else 0,
        "next_token": [
            {"has_next_token": busy, "n_remain": -1, "n_decoded": decoded if busy else 0}
        ],
    }


def _shows(*looks: Sequence[Json], **timeouts: float) -> Json:
    """What `/slots` says in turn; the last stands still."""
    script = Script(slots=[Answer(body=list(look), times=1) for look in looks])
    return {"timeouts": {**_SUSPICIOUS, **timeouts}, "script": script}


_slots = (
    hung(
        "a livelock: 100 % CPU, and no slot moves",
        [Tokens(3), silent("a"), PINGS, work(None)],
        FOUND_S,
        **_shows([_slot(decoded=3)]),
    ),
    slow(
        "text that is held back while its slot moves",
        [Tokens(3), work(9.0), *HI],
        **_shows(*([_slot(decoded=n)] for n in range(3, 43))),
    ),
    hung(
        "spins at 100 % and sends nothing",
        [Headers(), silent("a"), Burn(None)],
        2.5,
        timeouts={"silent_work_timeout_s": 2.5},
    ),
    hung(
        "spins and sends pings only",
        [Headers(), Role(), PINGS, silent("a"), work(None)],
        2.5,
        timeouts={"silent_work_timeout_s": 2.5},
    ),
    slow(
        "silent work on a server without /slots",
        [Headers(), work(9.0), *HI],
        timeouts=_SUSPICIOUS,
        script=Script(slots=[Answer(status=501)]),
    ),
    hung(
        "the same prompt progress for ever, at work",
        [PromptProgress(1, 9), silent("a"), Repeat(None, [PromptProgress(1, 9), work(0.2)])],
        FOUND_S,
        **_shows([_slot(prompt=1)]),
    ),
    slow(
        "prompt progress that grows, in batches of two seconds",
        [*(step for n in range(1, 6) for step in (work(2.0), PromptProgress(n, 5))), *HI],
        **_shows([_slot(prompt=1)]),
    ),
    slow(
        "one long batch: nothing moves, and a slot is in prefill",
        [Headers(), Role(), PINGS, work(9.0), *HI],
        **_shows([_slot(prompt=0)]),
    ),
    hung(
        "a request that the server lost: its slot is idle, its connection open",
        [Headers(), PINGS, silent("a"), work(None)],
        FOUND_S,
        fails=LOST,
        **_shows([_slot(busy=False)]),
        **ALONE,
    ),
    slow(
        "/slots hangs, the request does not",
        [Headers(), work(9.0), *HI],
        timeouts=_SUSPICIOUS,
        script=Script(slots=[Answer(hang=True)]),
    ),
    hung(
        "a dead stream beside a live neighbour ends alone",
        [Tokens(3), silent("a"), PINGS, work(None)],
        FOUND_S,
        first=[_NEIGHBOUR],
        **_shows(*([_slot(decoded=3), _slot(1, decoded=n)] for n in range(50, 90))),
        **ALONE,
    ),
    slow(
        "held-back text beside a live neighbour, both slots move",
        [Tokens(3), work(9.0), *HI],
        first=[_NEIGHBOUR],
        **_shows(*([_slot(decoded=n), _slot(1, decoded=n)] for n in range(3, 43))),
    ),
    hung(
        "queued for ever although a slot is idle",
        [silent("a"), WaitClose()],
        FOUND_S,
        fails=LOST,
        first=[_NEIGHBOUR],
        **_shows(
            *([_slot(decoded=n), _slot(1, busy=False)] for n in range(10, 50)),
            headers_timeout_s=60.0,
        ),
        **ALONE,
    ),
    slow(
        "queued behind a neighbour that gets data, no CPU seen",
        [Sleep(4.0), *HI],
        first=[_NEIGHBOUR],
    ),
    hung(
        "a sidecar computes, and the server does not",
        [Tokens(3), silent("a"), PINGS, WaitClose()],
        IDLE_S,
        front=SIDECAR,
    ),
    slow("a sidecar computes, and so does the server", [Tokens(3), work(3.5), *HI], front=SIDECAR),
)

GROUPS: Mapping[str, Sequence[Scenario]] = {
    "headers": _headers,
    "prefill": _prefill,
    "generating": _generating,
    "neighbours": _neighbours,
    "health": _health,
    "death": _death,
    "load": _load,
    "slots": _slots,
}

# A hang, and the honest server that looks like it: the one that follows.
TWINS = [
    (hang, twin)
    for scenarios in GROUPS.values()
    for hang, twin in pairwise(scenarios)
    if (hang.truth, twin.truth) == (HUNG, SLOW)
]
