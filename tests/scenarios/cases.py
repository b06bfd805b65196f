"""Every scenario, by topic. The name of each is its claim. A hang is followed by its honest twin, where it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from llama_worker import RequestFailReason, ToolDef
from llama_worker.server.slots import LOOK_INTERVAL_S, LOOKS_COUNT
from tests.fake_script import (
    Answer,
    Burn,
    DiskReads,
    DoneMarker,
    Exit,
    Fin,
    Finish,
    FreezeEndpoints,
    Headers,
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
    Text,
    Tokens,
    ToolCall,
    Usage,
    WaitClose,
)
from tests.scenarios.scenario import Ask, Found, Scenario, Truth, silent

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


def toks(n: int) -> str:
    return "".join(f"tok{i} " for i in range(n))


def hung(
    name: str,
    reply: Sequence[Step],
    limit_s: float,
    *,
    fails: RequestFailReason = STALL,
    since: str = "silent a",
    after_work: bool = False,
    text: str | None = "",
    reasoning: str = "",
    beside: Sequence[Ask] = (),
    **more: Any,
) -> Scenario:
    """One request (with others `beside` it), given up `limit_s` after `silent("a")`; the server is restarted."""
    found = Found(limit_s, since=since, after_work=after_work)
    ask = Ask("a", reply, fails=fails, found=found, text=text, reasoning=reasoning)
    return Scenario(name=name, truth=HUNG, asks=(ask, *beside), **{"restart_reason": str(fails), **more})


def slow(
    name: str, reply: Sequence[Step], *, text: str = "hi", reasoning: str = "", beside: Sequence[Ask] = (), **more: Any
) -> Scenario:
    """One request (with others `beside` it), which completes."""
    ask = Ask("a", reply, text=text, reasoning=reasoning)
    return Scenario(name=name, truth=SLOW, asks=(ask, *beside), **more)


def dead(name: str, *asks: Ask, restart_reason: str, **more: Any) -> Scenario:
    """Its process ends, or its connections break; it is restarted."""
    return Scenario(name=name, truth=DEAD, asks=asks, restart_reason=restart_reason, **more)


_headers = (
    hung("no headers, idle", [silent("a"), WaitClose()], HEADERS_S, fails=HEADERS),
    slow("no headers for 3 s, at work", [work(3.0), *HI]),
    hung(
        "a queue behind a stream that is dead",
        [silent("a"), WaitClose()],
        HEADERS_S,
        fails=HEADERS,
        after_work=True,
        beside=[Ask("b", [Tokens(3), silent("b"), WaitClose()], fails=RESTARTED, text=toks(3))],
        # Long after b's last data, or b would pass for a busy neighbour.
        timeouts={"idle_stream_timeout_s": 30.0},
        moves="submit b, await silent b, pause 1.2, submit a",
    ),
    slow(
        "a queue in front of the server's slots",
        [Repeat(30, [work(0.1), Text("x")]), *END],
        text="x" * 30,
        beside=[Ask("b", [Sleep(3.0), *HI], text="hi")],
    ),
    hung(
        "half a status line, then silence",
        [Raw("HTTP/1.1 200 OK\r\nContent-", framed=False), silent("a"), WaitClose()],
        HEADERS_S,
        fails=HEADERS,
    ),
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
        [PromptProgress(5, 9), silent("a"), Repeat(None, [PromptProgress(1, 9), PromptProgress(5, 9), work(0.1)])],
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
    hung("children of an idle process are idle too", [Headers(), silent("a"), WaitClose()], PREFILL_S, wrapped=True),
    slow("children of an idle process do the work", [Headers(), work(3.5), *HI], wrapped=True),
    hung(
        "work, then idle silence",
        [Headers(), PINGS, work(2.0), silent("a"), WaitClose()],
        PREFILL_S,
        after_work=True,
    ),
)

_generating = (
    hung("tokens, then silence", [Tokens(5, 0.02), silent("a"), WaitClose()], IDLE_S, text=toks(5)),
    slow("tokens, then reads from disk, then tokens", [Tokens(3), DiskReads(3.0), *HI], text=toks(3) + "hi"),
    hung(
        "role chunks for ever, at work",
        [Tokens(1), silent("a"), Repeat(None, [Role(), work(0.1)])],
        IDLE_S,
        text=toks(1),
    ),
    slow("tokens, then hard work, then tokens", [Tokens(3), work(3.0), *HI], text=toks(3) + "hi"),
    hung(
        "one token, a little later than idle_stream_timeout_s",
        [Text("x"), silent("a"), Sleep(2.0), *HI],
        IDLE_S,
        text="x",
    ),
    slow("one token every idle_stream_timeout_s less a little", [Tokens(5, 0.85), *END], text=toks(5)),
    hung(
        "reasoning, then silence",
        [Reasoning("hm "), Reasoning("hm"), silent("a"), WaitClose()],
        IDLE_S,
        reasoning="hm hm",
    ),
    slow("slow reasoning", [Tokens(4, 0.85, reasoning=True), *HI], reasoning=toks(4).rstrip()),
    hung(
        "stopped in mid-stream, continued too late",
        [Note("streaming"), Tokens(500, 0.1)],
        IDLE_S,
        since="SIGSTOP",
        text=None,
        moves="submit a, await streaming, pause 0.3, signal SIGSTOP, end a, signal SIGCONT",
    ),
    slow(
        "stopped in mid-stream, continued in time",
        [Note("streaming"), Tokens(20, 0.1), *END],
        text=toks(20),
        moves="submit a, await streaming, pause 0.3, signal SIGSTOP, pause 1.0, signal SIGCONT",
        timeouts={"idle_stream_timeout_s": 2.5},
    ),
    hung(
        "a record that never ends, byte by byte",
        [Tokens(2), Raw('data: {"x": "'), silent("a"), Repeat(None, [Raw("y"), Sleep(0.2)])],
        IDLE_S,
        text=toks(2),
    ),
)

_NOTE: ToolDef = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}
_TABLE = (
    "| name | bytes |\n| :--- | ---: |\n",
    *(f"| file-{number:04d} | {number * 37 % 1000:5} |\n" for number in range(300)),
    "-" * 400 + "\n",
    ", ".join(map(str, range(3000))),
)

_repetition = (
    hung(
        "one character for ever",
        [silent("a"), Repeat(None, [Text("/" * 64)])],
        0.0,
        fails=LOOP,
        text=None,
        **ALONE,
    ),
    slow("a table, a ruler and a list of numbers", [*map(Text, _TABLE), *END], text="".join(_TABLE)),
    hung(
        "arguments of a call that repeat themselves for ever",
        [silent("a"), Repeat(None, [ToolCall("note", '"1,2,', call_id="call00001")])],
        0.0,
        fails=LOOP,
        text=None,
        config={"exit_tools": (_NOTE,)},
        **ALONE,
    ),
    slow(
        "long arguments that do not repeat themselves",
        [ToolCall("note", {"rows": [{"id": n, "square": n * n} for n in range(2000)]}, pieces=200), *END],
        text="",
        config={"exit_tools": (_NOTE,)},
    ),
)

_STREAMS = Ask("b", [Tokens(25, 0.15), *END], text=toks(25))
_neighbours = (
    hung(
        "a neighbour streams while one stream is dead: it ends alone",
        [Tokens(2), silent("a"), WaitClose()],
        IDLE_S,
        text=toks(2),
        beside=[_STREAMS],
        moves="submit b, submit a",
        **ALONE,
    ),
    slow(
        "a neighbour's tokens vouch for silent work",
        [Headers(), Role(), work(4.0), *HI],
        beside=[_STREAMS],
        moves="submit b, submit a",
        timeouts={"silent_work_timeout_s": 2.0},
    ),
    hung(
        "two dead streams: one is the culprit, the other falls with the server",
        [Tokens(3), silent("a"), WaitClose()],
        1.6,
        after_work=True,
        text=toks(3),
        beside=[Ask("b", [Headers(), Role(), WaitClose()], fails=RESTARTED, text="")],
        timeouts={"idle_stream_timeout_s": 1.6, "prefill_liveness_timeout_s": 30.0},
        moves="submit a, await silent a, submit b",
    ),
)

_often = {"health_probe_interval_s": 0.4}
_no_verdicts = {**_often, "idle_stream_timeout_s": 60.0, "prefill_liveness_timeout_s": 60.0}


def models(*after: Answer) -> Script:
    """Ready at once; `/v1/models` then answers like this."""
    return Script(models=[Answer(times=1), *after])


_health = (
    hung(
        "health hangs and no data",
        [Tokens(2), FreezeEndpoints(), silent("a"), WaitClose()],
        3 * 1.0,  # a probe is given up after 1 s here
        after_work=True,
        fails=RESTARTED,
        text=toks(2),
        timeouts=_no_verdicts,
        restart_reason="health_lost",
    ),
    slow(
        "health hangs while streaming goes on",
        [FreezeEndpoints(), Tokens(35, 0.12), FreezeEndpoints(frozen=False), *END],
        text=toks(35),
        timeouts=_often,
    ),
    slow(
        "health 503 while short requests complete, each ending as soon as it is heard of",
        [Headers(), Sleep(0.15), *HI],
        moves=", ".join(["submit a, end a"] * 18),
        launches=(models(Answer(status=503)),),
        timeouts=_often,
    ),
    Scenario(
        name="an idle server is stopped",
        truth=HUNG,
        moves="signal SIGSTOP, state running",
        timeouts=_often,
        restart_reason="health_lost",
    ),
)

_BREAKS: Sequence[Step] = [Tokens(2), Fin()]
_transport = (
    dead(
        "two broken streams in a row",
        *(Ask(name, _BREAKS, fails=DISCONNECTED, text=toks(2)) for name in "ab"),
        moves="submit a, end a, submit b, end b",
        restart_reason="transport_failures",
    ),
    dead(
        "a broken stream, and the probe fails",
        Ask("a", [Tokens(3, 0.05), WaitClose()], fails=RESTARTED, text=toks(3)),
        Ask("b", _BREAKS, fails=DISCONNECTED, text=toks(2)),
        moves="submit a, heard a 15, submit b",
        launches=(models(Answer(reset=True)), Script()),
        timeouts={"idle_stream_timeout_s": 60.0},
        restart_reason="health_lost",
    ),
    dead(
        "nobody listens any more, and the probe fails",
        Ask("a", [Note("open"), Tokens(500, 0.1)], fails=RESTARTED),
        Ask("b", HI, fails=RequestFailReason.CONNECT_FAILED, text=""),
        # From outside: a llama-server then closes its port and waits for the open request.
        moves="submit a, await open, signal SIGTERM, pause 0.3, submit b",
        restart_reason="health_lost",
        leaves=True,
    ),
)

_crash = Script(exits=[Exit(1, "request", log=["ggml_abort: out of memory"])])

_death = (
    dead(
        "dies when a request arrives",
        Ask("a", HI, fails=DIED, found=Found(0.0, since="submit a"), text=""),
        launches=(_crash, Script()),
        restart_reason="out_of_memory",
    ),
    dead(
        "dies with neighbours: all of them failed, with their output",
        Ask("a", [Tokens(4), WaitClose()], fails=DIED, text=toks(4)),
        Ask("b", [Reasoning("hm"), WaitClose()], fails=DIED, text="", reasoning="hm"),
        Ask("c", [Note("open c"), WaitClose()], fails=DIED, found=Found(0.0, since="SIGKILL"), text=""),
        moves="submit a, submit b, submit c, heard a 20, heard b 2, await open c, signal SIGKILL",
        restart_reason="server_died",
    ),
    dead(
        "dies, dies again during the restart, then recovers",
        Ask("a", HI, fails=DIED, text=""),
        launches=(_crash, Script(exits=[Exit(1, "before_bind")]), Script(exits=[Exit(1, "after_bind")]), Script()),
        restarts=3,
        restart_reason="exited",
    ),
)

_LOADED_S = 1.5  # startup_timeout_s here


def load(name: str, startup: Startup, startup_timeout_s: float = _LOADED_S, **more: Any) -> Scenario:
    """A first start, which succeeds."""
    timeouts = {"startup_timeout_s": startup_timeout_s}
    return Scenario(name=name, truth=SLOW, launches=(Script(startup=startup),), timeouts=timeouts, **more)


def load_fails(name: str, startup: Startup, limit_s: float, **timeouts: float) -> Scenario:
    return Scenario(
        name=name,
        truth=HUNG,
        launches=(Script(startup=startup),),
        start_found=Found(limit_s, since="start", after_work=True),
        timeouts={"startup_timeout_s": _LOADED_S, **timeouts},
    )


_load = (
    load_fails("a load that hangs answers 503 for ever", Startup(load_s=None), _LOADED_S),
    load("a long load with 503, at work", Startup(load_s=5.0, load_ticks_per_s=TICKS)),
    load_fails(
        "a load at work is over load_timeout_s",
        Startup(load_s=None, load_ticks_per_s=TICKS),
        2.0,
        startup_timeout_s=20.0,
        load_timeout_s=2.0,
    ),
    load("a long load that reads from disk", Startup(load_s=5.0, load_bytes_per_s=8e6)),
    load(
        "a long load in a child of an idle process",
        Startup(load_s=10.0, load_ticks_per_s=TICKS),
        startup_timeout_s=7.0,  # new children are looked for every 5 s only
        wrapped=True,
    ),
    load_fails("never listens", Startup(never_bind=True), _LOADED_S),
)

# ---------------------------------------------------------------- what only /slots, or the process itself, can tell

SUSPECT_S = 1.0
FOUND_S = SUSPECT_S + (LOOKS_COUNT - 1) * LOOK_INTERVAL_S
_SUSPICIOUS = {"suspect_after_s": SUSPECT_S, "idle_stream_timeout_s": 60.0, "prefill_liveness_timeout_s": 60.0}
_GIVES_UP_WORK: Mapping[str, Any] = {"timeouts": {"silent_work_timeout_s": 2.5}}


def _slot(index: int = 0, *, busy: bool = True, prompt: int = 20, decoded: int = 0) -> dict[str, Any]:
    """As b11434 tells it."""
    return {
        "id": index,
        "is_processing": busy,
        "id_task": 7 + index,
        "n_prompt_tokens": 20,
        "n_prompt_tokens_processed": prompt if busy else 0,
        "next_token": [{"has_next_token": busy, "n_remain": -1, "n_decoded": decoded if busy else 0}],
    }


def _shows(*slots: dict[str, Any]) -> Mapping[str, Any]:
    """A server whose `/slots` stands still."""
    return {"timeouts": _SUSPICIOUS, "launches": (Script(slots=[Answer(body=list(slots))]),)}


def _moves(look: Callable[[int], list[dict[str, Any]]]) -> Mapping[str, Any]:
    """One whose `/slots` says something else each time."""
    answers = [Answer(body=look(number), times=1) for number in range(40)]
    return {"timeouts": _SUSPICIOUS, "launches": (Script(slots=answers),)}


def _refuses(answer: Answer) -> Mapping[str, Any]:
    return {"timeouts": _SUSPICIOUS, "launches": (Script(slots=[answer]),)}


_LIVE = Ask("b", [Tokens(100, 0.1), *END], text=toks(100))
_slots = (
    hung(
        "a livelock: 100 % CPU, and no slot moves",
        [Tokens(3), silent("a"), PINGS, work(None)],
        FOUND_S,
        text=toks(3),
        **_shows(_slot(decoded=3)),
    ),
    slow(
        "text that is held back while its slot moves",
        [Tokens(3), work(9.0), *HI],
        text=toks(3) + "hi",
        **_moves(lambda number: [_slot(decoded=3 + number)]),
    ),
    hung("spins at 100 % and sends nothing", [Headers(), silent("a"), Burn(None)], 2.5, **_GIVES_UP_WORK),
    slow(
        "one long batch: nothing moves, and a slot is in prefill",
        [Headers(), Role(), PINGS, work(9.0), *HI],
        **_shows(_slot(prompt=0)),
    ),
    hung("spins and sends pings only", [Headers(), Role(), PINGS, silent("a"), work(None)], 2.5, **_GIVES_UP_WORK),
    slow(
        "an hour of silent work, scaled down, on a server without /slots",
        [Headers(), work(9.0), *HI],
        **_refuses(Answer(status=501)),
    ),
    hung(
        "a request that the server lost: its slot is idle, its connection open",
        [Headers(), PINGS, silent("a"), work(None)],
        FOUND_S,
        fails=LOST,
        **_shows(_slot(busy=False)),
        **ALONE,
    ),
    slow("/slots hangs, the request does not", [Headers(), work(9.0), *HI], **_refuses(Answer(hang=True))),
    hung(
        "a dead stream beside a live neighbour ends alone",
        [Tokens(3), silent("a"), PINGS, work(None)],
        FOUND_S,
        text=toks(3),
        beside=[_LIVE],
        **_moves(lambda number: [_slot(decoded=3), _slot(1, decoded=50 + number)]),
        **ALONE,
    ),
    slow(
        "held-back text beside a live neighbour, both slots move",
        [Tokens(3), work(9.0), *HI],
        text=toks(3) + "hi",
        beside=[_LIVE],
        **_moves(lambda number: [_slot(decoded=3 + number), _slot(1, decoded=50 + number)]),
    ),
    hung(
        "the same prompt progress for ever, at work",
        [PromptProgress(1, 9), silent("a"), Repeat(None, [PromptProgress(1, 9), work(0.2)])],
        FOUND_S,
        **_shows(_slot(prompt=1)),
    ),
    slow(
        "prompt progress that grows, in batches of two seconds",
        [Prefill(total=5, batch=1, interval_s=2.0, ticks_per_s=100), *HI],
        **_shows(_slot(prompt=1)),
    ),
    hung(
        "queued for ever although a slot is idle",
        [silent("a"), WaitClose()],
        FOUND_S,
        fails=LOST,
        beside=[_LIVE],
        moves="submit b, heard b 1, submit a",
        **{
            **_moves(lambda number: [_slot(decoded=10 + number), _slot(1, busy=False)]),
            "timeouts": {**_SUSPICIOUS, "headers_timeout_s": 60.0},
        },
        **ALONE,
    ),
    slow(
        "queued behind a neighbour that gets data, no CPU seen",
        [Sleep(4.0), *HI],
        beside=[Ask("b", [Tokens(60, 0.1), *END], text=toks(60))],
        moves="submit b, heard b 1, submit a",
    ),
    hung(
        "a sidecar computes, and the server does not",
        [Tokens(3), silent("a"), PINGS, WaitClose()],
        IDLE_S,
        text=toks(3),
        sidecar=True,
    ),
    slow("a sidecar computes, and so does the server", [Tokens(3), work(3.5), *HI], text=toks(3) + "hi", sidecar=True),
)

GROUPS: Mapping[str, Sequence[Scenario]] = {
    "headers": _headers,
    "prefill": _prefill,
    "generating": (*_generating, *_repetition),
    "neighbours": _neighbours,
    "health": _health,
    "transport": _transport,
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
