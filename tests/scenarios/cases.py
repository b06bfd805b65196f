"""Every scenario, by topic. The name of each is its claim."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_worker import RequestFailReason, RestartPolicy, StartFailReason, ToolDef, WorkerState
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
    HttpError,
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
    Turns,
    Usage,
    WaitClose,
)
from tests.scenarios.scenario import (
    Ask,
    Await,
    AwaitState,
    End,
    Found,
    Heard,
    Pause,
    Scenario,
    Signal,
    Stop,
    Submit,
    Truth,
    found,
    silent,
)

HUNG, SLOW, DEAD = Truth.HUNG, Truth.SLOW, Truth.DEAD
HEADERS, STALL = RequestFailReason.HEADERS_TIMEOUT, RequestFailReason.STALL_TIMEOUT
RESTARTED, DIED = RequestFailReason.WORKER_RESTARTED, RequestFailReason.SERVER_DIED
DISCONNECTED = RequestFailReason.STREAM_DISCONNECTED
HEADERS_S, PREFILL_S, IDLE_S = 0.8, 1.5, 1.2  # as in TIMEOUTS

END = (Finish(), Usage(), DoneMarker())
HI = (Text("hi"), *END)
PINGS = PingEvery(0.15)
# Clearly above what counts as work (5 ticks/s), and cheap enough to run many side by side.
TICKS = 30.0


def work(seconds: float | None) -> Burn:
    return Burn(seconds, TICKS)


def toks(n: int) -> str:
    return "".join(f"tok{i} " for i in range(n))


def hung(
    name: str,
    reply: Sequence[Step],
    limit_s: float,
    *,
    fails: RequestFailReason = STALL,
    after_work: bool = False,
    text: str | None = "",
    reasoning: str = "",
    truth: Truth = HUNG,
    **more: Any,
) -> Scenario:
    """One request, given up `limit_s` after `silent("a")`; the server is restarted."""
    ask = Ask(
        name="a",
        reply=reply,
        fails=fails,
        found=found("a", limit_s, after_work=after_work),
        text=text,
        reasoning=reasoning,
    )
    return Scenario(name=name, truth=truth, asks=(ask,), **{"restarts": 1, "restart_reason": str(fails), **more})


def slow(name: str, reply: Sequence[Step], *, text: str = "hi", reasoning: str = "", **more: Any) -> Scenario:
    """One request, which completes."""
    return Scenario(name=name, truth=SLOW, asks=(Ask(name="a", reply=reply, text=text, reasoning=reasoning),), **more)


_headers = (
    hung("no headers, idle", [silent("a"), WaitClose()], HEADERS_S, fails=HEADERS),
    slow("no headers for 3 s, at work", [work(3.0), *HI]),
    slow("no headers for 3 s, reading from disk", [DiskReads(3.0), *HI]),
    hung(
        "half a status line, then silence",
        [Raw([b"HTTP/1.1 200 OK\r\nContent-"], framed=False), silent("a"), WaitClose()],
        HEADERS_S,
        fails=HEADERS,
    ),
    Scenario(
        name="a half-open connection: the system accepts, the process is stopped",
        truth=HUNG,
        asks=(
            Ask(
                name="a",
                reply=HI,
                fails=HEADERS,
                found=Found(since="submit a", limit_s=HEADERS_S, after_work=True),
                text="",
            ),
        ),
        moves=(Signal("SIGSTOP"), Submit("a")),
        restarts=1,
        restart_reason="headers_timeout",
    ),
    Scenario(
        name="stopped before the headers, continued in time",
        truth=SLOW,
        asks=(Ask(name="a", reply=HI, text="hi"),),
        moves=(Signal("SIGSTOP"), Submit("a"), Pause(0.8), Signal("SIGCONT")),
        timeouts={"headers_timeout_s": 2.5},
    ),
    Scenario(
        name="a queue in front of the server's slots",
        truth=SLOW,
        slots=2,
        asks=(
            Ask(name="a", reply=[Repeat(30, [work(0.1), Text("x")]), *END], text="x" * 30),
            Ask(name="b", reply=[Sleep(3.0), *HI], text="hi"),
        ),
    ),
    Scenario(
        name="a neighbour's long prefill holds everything back",
        truth=SLOW,
        slots=3,
        asks=(
            Ask(name="a", reply=[Headers(), Role(), work(3.5), *HI], text="hi"),
            Ask(name="b", reply=[Sleep(3.3), *HI], text="hi"),
            Ask(name="c", reply=[Headers(), Sleep(3.3), *HI], text="hi"),
        ),
    ),
    Scenario(
        name="a queue behind a stream that is dead",
        truth=HUNG,
        slots=2,
        asks=(
            Ask(name="a", reply=[Tokens(3), silent("a"), WaitClose()], fails=RESTARTED, text=toks(3)),
            Ask(
                name="b",
                reply=[silent("b"), WaitClose()],
                fails=HEADERS,
                found=found("b", HEADERS_S, after_work=True),
                text="",
            ),
        ),
        # Long after a's last data, or a would pass for a busy neighbour.
        timeouts={"idle_stream_timeout_s": 30.0},
        moves=(Submit("a"), Await("silent a"), Pause(1.2), Submit("b")),
        restarts=1,
        restart_reason="headers_timeout",
    ),
)

_prefill = (
    hung("headers, then silence", [Headers(), silent("a"), WaitClose()], PREFILL_S),
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
    slow("prompt progress on an idle CPU", [Prefill(total=5, batch=1, interval_s=0.8), *HI]),
    slow("prompt progress, then silent work", [PromptProgress(1, 9), work(3.0), *HI]),
    slow(
        "a model paged in from disk, with hardly any CPU",
        [Headers(), Role(), DiskReads(3.5, bytes_per_s=8e6), *HI],
    ),
    slow("children of an idle process do the work", [Headers(), work(3.5), *HI], wrapped=True),
    hung("children of an idle process are idle too", [Headers(), silent("a"), WaitClose()], PREFILL_S, wrapped=True),
    slow("work at 12 ticks a second", [Headers(), Burn(3.5, 12.0), *HI]),
    hung(
        "3 ticks a second, for ever, are no work",
        [Headers(), PingEvery(0.5), silent("a"), Burn(None, 3.0)],
        3.0,
        timeouts={"prefill_liveness_timeout_s": 3.0},
    ),
    hung(
        "work, then idle silence",
        [Headers(), PINGS, work(2.0), silent("a"), WaitClose()],
        PREFILL_S,
        after_work=True,
    ),
    Scenario(
        name="stopped in the middle of prefill",
        truth=HUNG,
        asks=(
            Ask(
                name="a",
                reply=[Headers(), Role(), Note("prefill"), work(None)],
                fails=STALL,
                found=Found(since="SIGSTOP", limit_s=PREFILL_S, after_work=True),
                text="",
            ),
        ),
        moves=(Submit("a"), Await("prefill"), Pause(0.7), Signal("SIGSTOP")),
        restarts=1,
        restart_reason="stall_timeout",
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
    hung("spins without headers", [silent("a"), work(None)], 2.5, timeouts={"silent_work_timeout_s": 2.5}),
    hung(
        "no first token in ttft_timeout_s, at work",
        [silent("a"), Headers(), Prefill(total=50, batch=1, interval_s=0.2, work_kind="idle")],
        2.0,
        fails=RequestFailReason.TTFT_TIMEOUT,
        timeouts={"ttft_timeout_s": 2.0},
    ),
    slow(
        "a first token just within ttft_timeout_s",
        [Headers(), work(2.0), Tokens(5, 0.3), *END],
        text=toks(5),
        timeouts={"ttft_timeout_s": 3.2},
    ),
    slow(
        "silent for long, with all timeouts off",
        [Headers(), Sleep(3.5), Text("h"), Sleep(2.0), Text("i"), *END],
        timeouts={
            "prefill_liveness_timeout_s": None,
            "idle_stream_timeout_s": None,
            "silent_work_timeout_s": None,
        },
    ),
)

_tool: ToolDef = {
    "type": "function",
    "function": {"name": "look", "description": "look", "parameters": {"type": "object", "properties": {}}},
}


class SlowTool:
    """Takes longer than every timeout of the stream."""

    def run_tool(self, *, name: str, arguments: Mapping[str, Any], request_id: int, job_name: str) -> Any:
        time.sleep(2.5)
        return "seen"


class QuickTool:
    def run_tool(self, *, name: str, arguments: Mapping[str, Any], request_id: int, job_name: str) -> Any:
        return "seen"


_call = [Headers(), ToolCall("look"), Finish("tool_calls"), Usage(), DoneMarker()]

_generating = (
    hung("tokens, then silence", [Tokens(5, 0.02), silent("a"), WaitClose()], IDLE_S, text=toks(5)),
    hung("tokens, then pings", [Tokens(5, 0.02), PINGS, silent("a"), WaitClose()], IDLE_S, text=toks(5)),
    slow("tokens, then hard work, then tokens", [Tokens(3), work(3.0), *HI], text=toks(3) + "hi"),
    slow("tokens, then reads from disk, then tokens", [Tokens(3), DiskReads(3.0), *HI], text=toks(3) + "hi"),
    slow("one token every idle_stream_timeout_s less a little", [Tokens(5, 0.85), *END], text=toks(5)),
    hung(
        "one token, a little later than idle_stream_timeout_s",
        [Text("x"), silent("a"), Sleep(2.0), *HI],
        IDLE_S,
        text="x",
    ),
    slow("slow reasoning", [Tokens(4, 0.85, reasoning=True), *HI], reasoning=toks(4).rstrip()),
    hung(
        "reasoning, then silence",
        [Reasoning("hm "), Reasoning("hm"), silent("a"), WaitClose()],
        IDLE_S,
        reasoning="hm hm",
    ),
    hung(
        "a record that never ends, byte by byte",
        [Tokens(2), Raw([b'data: {"x": "']), silent("a"), Repeat(None, [Raw([b"y"]), Sleep(0.2)])],
        IDLE_S,
        text=toks(2),
    ),
    Scenario(
        name="stopped in mid-stream",
        truth=HUNG,
        asks=(
            Ask(
                name="a",
                reply=[Tokens(3), Note("streaming"), Tokens(500, 0.1)],
                fails=STALL,
                found=Found(since="SIGSTOP", limit_s=IDLE_S),
            ),
        ),
        moves=(Submit("a"), Await("streaming"), Pause(0.3), Signal("SIGSTOP")),
        restarts=1,
        restart_reason="stall_timeout",
    ),
    Scenario(
        name="stopped in mid-stream, continued in time",
        truth=SLOW,
        asks=(Ask(name="a", reply=[Note("streaming"), Tokens(20, 0.1), *END], text=toks(20)),),
        moves=(Submit("a"), Await("streaming"), Pause(0.3), Signal("SIGSTOP"), Pause(1.0), Signal("SIGCONT")),
        timeouts={"idle_stream_timeout_s": 2.5},
    ),
    Scenario(
        name="stopped in mid-stream, continued too late",
        truth=HUNG,
        asks=(
            Ask(
                name="a",
                reply=[Note("streaming"), Tokens(500, 0.1)],
                fails=STALL,
                found=Found(since="SIGSTOP", limit_s=IDLE_S),
            ),
        ),
        moves=(Submit("a"), Await("streaming"), Pause(0.3), Signal("SIGSTOP"), End("a"), Signal("SIGCONT")),
        restarts=1,
        restart_reason="stall_timeout",
    ),
    slow("a finish reason, then silence", [Tokens(3), Finish(), WaitClose()], text=toks(3)),
    hung(
        "over absolute_timeout_s, in full flow: no restart",
        [silent("a"), Tokens(200, 0.1)],
        2.0,
        fails=RequestFailReason.ABSOLUTE_TIMEOUT,
        timeouts={"absolute_timeout_s": 2.0},
        text=None,
        restarts=0,
        restart_reason="",
    ),
    hung(
        "silent, restart_on_stall off: the request ends alone",
        [Tokens(2), silent("a"), WaitClose()],
        IDLE_S,
        text=toks(2),
        restart=RestartPolicy(restart_on_stall=False),
        restarts=0,
        restart_reason="",
    ),
    slow(
        "a tool takes longer than every timeout of the stream",
        [Turns([_call, [Headers(), *HI]])],
        config={"normal_tools": [_tool], "tool_runner": SlowTool()},
    ),
    hung(
        "the turn after the tool is silent",
        [Turns([_call, [Headers(), Role(), silent("a"), WaitClose()]])],
        PREFILL_S,
        config={"normal_tools": [_tool], "tool_runner": QuickTool()},
    ),
)

_dead_stream = (Tokens(2), WaitClose())
_neighbours = (
    Scenario(
        name="a neighbour streams while one stream is dead: it ends alone",
        truth=HUNG,
        slots=2,
        asks=(
            Ask(name="a", reply=[Tokens(25, 0.15), *END], text=toks(25)),
            Ask(
                name="b",
                reply=[Tokens(2), silent("b"), WaitClose()],
                fails=STALL,
                found=found("b", IDLE_S),
                text=toks(2),
            ),
        ),
    ),
    Scenario(
        name="a second dead stream beside a busy neighbour restarts",
        truth=HUNG,
        slots=2,
        asks=(
            Ask(name="a", reply=[Tokens(200, 0.15), *END], fails=RESTARTED),
            Ask(name="b", reply=_dead_stream, fails=STALL, text=toks(2)),
            Ask(
                name="c",
                reply=[Tokens(1), silent("c"), WaitClose()],
                fails=STALL,
                found=found("c", IDLE_S),
                text=toks(1),
            ),
        ),
        moves=(Submit("a"), Submit("b"), End("b"), Submit("c")),
        restarts=1,
        restart_reason="stall_timeout",
    ),
    Scenario(
        name="dead streams with a completed new request between: both end alone",
        truth=HUNG,
        slots=2,
        asks=(
            Ask(name="a", reply=[Tokens(40, 0.15), *END], text=toks(40)),
            Ask(name="b", reply=_dead_stream, fails=STALL, text=toks(2)),
            Ask(name="c", reply=[*HI], text="hi"),
            Ask(name="d", reply=_dead_stream, fails=STALL, text=toks(2)),
        ),
        moves=(Submit("a"), Submit("b"), End("b"), Submit("c"), End("c"), Submit("d")),
    ),
    Scenario(
        name="a neighbour's tokens vouch for silent work",
        truth=SLOW,
        slots=2,
        asks=(
            Ask(name="a", reply=[Tokens(20, 0.2), *END], text=toks(20)),
            Ask(name="b", reply=[Headers(), Role(), work(4.0), *HI], text="hi"),
        ),
        timeouts={"silent_work_timeout_s": 2.0},
    ),
    Scenario(
        name="a neighbour's prompt progress vouches for silent work",
        truth=SLOW,
        slots=2,
        asks=(
            Ask(name="a", reply=[Prefill(total=8, batch=1, interval_s=0.5), *HI], text="hi"),
            Ask(name="b", reply=[Headers(), Role(), work(4.0), *HI], text="hi"),
        ),
        timeouts={"silent_work_timeout_s": 2.0},
    ),
    Scenario(
        name="two dead streams: one is the culprit, the other falls with the server",
        truth=HUNG,
        slots=2,
        asks=(
            Ask(
                name="a",
                reply=[Tokens(3), silent("a"), WaitClose()],
                fails=STALL,
                found=found("a", 1.6, after_work=True),
                text=toks(3),
            ),
            Ask(name="b", reply=[Headers(), Role(), WaitClose()], fails=RESTARTED, text=""),
        ),
        timeouts={"idle_stream_timeout_s": 1.6, "prefill_liveness_timeout_s": 30.0},
        moves=(Submit("a"), Await("silent a"), Submit("b")),
        restarts=1,
        restart_reason="stall_timeout",
    ),
)


def models(*after: Answer) -> Script:
    """Ready at once; `/v1/models` then answers like this."""
    return Script(models=[Answer(times=1), *after])


_often = {"health_probe_interval_s": 0.4}
_no_verdicts = {**_often, "idle_stream_timeout_s": 60.0, "prefill_liveness_timeout_s": 60.0}

_health = (
    slow(
        "health 503 while streaming goes on",
        [Tokens(30, 0.12), *END],
        text=toks(30),
        launches=(models(Answer(status=503)),),
        timeouts=_often,
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
        moves=(Submit("a"), End("a")) * 18,
        launches=(models(Answer(status=503)),),
        timeouts=_often,
    ),
    slow(
        "health fails twice and recovers",
        [Headers(), Role(), Sleep(2.5), *HI],
        launches=(models(Answer(status=503, times=2), Answer()),),
        timeouts=_no_verdicts,
    ),
    Scenario(
        name="health 503 and no data",
        truth=HUNG,
        asks=(
            Ask(
                name="a",
                reply=[Tokens(2), silent("a"), WaitClose()],
                fails=RESTARTED,
                found=Found(since="silent a", limit_s=3 * 0.4, after_work=True),
                text=toks(2),
            ),
        ),
        launches=(models(Answer(status=503)), Script()),
        timeouts=_no_verdicts,
        restarts=1,
        restart_reason="health_lost",
    ),
    Scenario(
        name="health hangs and no data",
        truth=HUNG,
        asks=(
            Ask(
                name="a",
                reply=[Tokens(2), FreezeEndpoints(), silent("a"), WaitClose()],
                fails=RESTARTED,
                # A probe is given up after 1 s here.
                found=Found(since="silent a", limit_s=3 * 1.0, after_work=True),
                text=toks(2),
            ),
        ),
        timeouts=_no_verdicts,
        restarts=1,
        restart_reason="health_lost",
    ),
    Scenario(
        name="an idle server stops answering",
        truth=HUNG,
        launches=(models(Answer(reset=True)), Script()),
        moves=(AwaitState(WorkerState.RUNNING),),
        timeouts=_often,
        restarts=1,
        restart_reason="health_lost",
    ),
    Scenario(
        name="an idle server is stopped",
        truth=HUNG,
        moves=(Signal("SIGSTOP"), AwaitState(WorkerState.RUNNING)),
        timeouts=_often,
        restarts=1,
        restart_reason="health_lost",
    ),
)


def asks(count: int, reply: Sequence[Step], fails: RequestFailReason, *, job_names: Sequence[str] = ()) -> list[Ask]:
    names = job_names or [f"job{i}" for i in range(count)]
    return [Ask(name=name, reply=reply, fails=fails) for name in names]


def one_by_one(asks: Sequence[Ask]) -> tuple[Submit | End, ...]:
    return tuple(move for ask in asks for move in (Submit(ask.name), End(ask.name)))


_error = [HttpError(500, "it is broken")]
_five = asks(5, _error, RequestFailReason.HTTP_ERROR)
_two_breaks = asks(2, [Tokens(2), Fin()], DISCONNECTED)

_transport = (
    Scenario(
        name="one broken stream, the server is well",
        truth=SLOW,
        asks=(Ask(name="a", reply=[Tokens(2), Fin()], fails=DISCONNECTED, text=toks(2)),),
    ),
    Scenario(
        name="a broken stream, a success, a broken stream",
        truth=SLOW,
        asks=(
            Ask(name="a", reply=[Tokens(2), Fin()], fails=DISCONNECTED, text=toks(2)),
            Ask(name="b", reply=HI, text="hi"),
            Ask(name="c", reply=[Tokens(2), Fin()], fails=DISCONNECTED, text=toks(2)),
        ),
        moves=(Submit("a"), End("a"), Submit("b"), End("b"), Submit("c"), End("c")),
    ),
    Scenario(
        name="two broken streams in a row",
        truth=DEAD,
        asks=_two_breaks,
        moves=one_by_one(_two_breaks),
        restarts=1,
        restart_reason="transport_failures",
        evidence=True,
    ),
    Scenario(
        name="a broken stream, and the probe fails",
        truth=DEAD,
        slots=2,
        asks=(
            Ask(name="a", reply=[Tokens(3, 0.05), WaitClose()], fails=RESTARTED, text=toks(3)),
            Ask(name="b", reply=[Tokens(2), Fin()], fails=DISCONNECTED, text=toks(2)),
        ),
        moves=(Submit("a"), Heard("a", 15), Submit("b")),
        launches=(models(Answer(reset=True)), Script()),
        timeouts={"idle_stream_timeout_s": 60.0},
        restarts=1,
        restart_reason="health_lost",
    ),
    Scenario(
        name="nobody listens any more, and the probe fails",
        truth=DEAD,
        slots=2,
        asks=(
            Ask(name="a", reply=[Note("open"), Tokens(500, 0.1)], fails=RESTARTED),
            Ask(name="b", reply=HI, fails=RequestFailReason.CONNECT_FAILED, text=""),
        ),
        # From outside: a llama-server then closes its port and waits for the open request.
        moves=(Submit("a"), Await("open"), Signal("SIGTERM"), Pause(0.3), Submit("b")),
        restarts=1,
        restart_reason="health_lost",
        leaves=True,
    ),
    Scenario(
        name="five server errors from different jobs",
        truth=DEAD,
        asks=_five,
        moves=one_by_one(_five),
        restarts=1,
        restart_reason="server_errors",
        evidence=True,
    ),
    Scenario(
        name="six server errors from the same job",
        truth=SLOW,
        asks=(Ask(name="same", reply=_error, fails=RequestFailReason.HTTP_ERROR),),
        moves=(Submit("same"), End("same")) * 6,
    ),
    Scenario(
        name="server errors from different jobs with a success between",
        truth=SLOW,
        asks=(*_five, Ask(name="good", reply=HI, text="hi")),
        moves=(*one_by_one(_five[:3]), Submit("good"), End("good"), *one_by_one(_five[3:])),
    ),
)


def killed(name: str, signal: str, reply: Sequence[Step], mark: str) -> Scenario:
    ask = Ask(name="a", reply=reply, fails=DIED, found=Found(since=signal, limit_s=0.0))
    return Scenario(
        name=name,
        truth=DEAD,
        asks=(ask,),
        moves=(Submit("a"), Await(mark), Signal(signal)),
        restarts=1,
        restart_reason="server_died",
        evidence=False,
    )


_crash = Script(exits=[Exit(1, "request", log=["ggml_abort: out of memory"])])

_death = (
    killed("killed in mid-stream", "SIGKILL", [Note("open"), Tokens(500, 0.05)], "open"),
    killed("killed before the headers", "SIGKILL", [Note("open"), WaitClose()], "open"),
    killed("killed in prefill", "SIGKILL", [Headers(), Role(), Note("open"), work(None)], "open"),
    killed("killed by SIGSEGV", "SIGSEGV", [Tokens(2), Note("open"), WaitClose()], "open"),
    Scenario(
        name="dies when a request arrives",
        truth=DEAD,
        asks=(Ask(name="a", reply=HI, fails=DIED, found=Found(since="submit a", limit_s=0.0), text=""),),
        launches=(_crash, Script()),
        restarts=1,
        restart_reason="out_of_memory",
        evidence=False,
    ),
    Scenario(
        name="dies with neighbours: all of them failed, with their output",
        truth=DEAD,
        slots=3,
        asks=(
            Ask(name="a", reply=[Tokens(4), WaitClose()], fails=DIED, text=toks(4)),
            Ask(name="b", reply=[Reasoning("hm"), WaitClose()], fails=DIED, text="", reasoning="hm"),
            Ask(name="c", reply=[Note("open c"), WaitClose()], fails=DIED, text=""),
        ),
        moves=(
            *(Submit(name) for name in "abc"),
            Heard("a", 20),
            Heard("b", 2),
            Await("open c"),
            Signal("SIGKILL"),
        ),
        restarts=1,
        restart_reason="server_died",
        evidence=False,
    ),
    Scenario(
        name="dies during the first start",
        truth=DEAD,
        launches=(Script(exits=[Exit(1, "before_bind", log=["error: no such model"])]),),
        start_fails=StartFailReason.EXITED,
        ends=WorkerState.FAILED,
    ),
    Scenario(
        name="dies while it loads",
        truth=DEAD,
        launches=(Script(startup=Startup(load_s=None), exits=[Exit(-9, "after_s", after_s=1.0)]),),
        start_fails=StartFailReason.EXITED,
        ends=WorkerState.FAILED,
    ),
    Scenario(
        name="dies, dies again during the restart, then recovers",
        truth=DEAD,
        asks=(Ask(name="a", reply=HI, fails=DIED, text=""),),
        launches=(_crash, Script(exits=[Exit(1, "before_bind")]), Script(exits=[Exit(1, "after_bind")]), Script()),
        restarts=3,
        restart_reason="exited",
        evidence=False,
    ),
    Scenario(
        name="never comes back: FAILED after the last restart allowed",
        truth=DEAD,
        asks=(Ask(name="a", reply=HI, fails=DIED, text=""),),
        launches=(_crash, Script(exits=[Exit(1, "before_bind")])),
        moves=(Submit("a"), AwaitState(WorkerState.FAILED)),
        restart=RestartPolicy(restart_backoff_s=0.1, max_restarts_per_window=2),
        restarts=2,
        restart_reason="exited",
        ends=WorkerState.FAILED,
        evidence=False,
    ),
    Scenario(
        name="dies during stop",
        truth=DEAD,
        asks=(
            Ask(
                name="a",
                reply=[Tokens(2), WaitClose()],
                fails=RequestFailReason.WORKER_STOPPED,
                text=toks(2),
            ),
        ),
        launches=(Script(ignore_term=True),),
        moves=(Submit("a"), Heard("a", 10), Stop(within_s=5.0, then=Signal("SIGKILL"))),
        timeouts={"stop_grace_s": 30.0},
        ends=WorkerState.STOPPED,
    ),
    Scenario(
        name="stop during the backoff",
        truth=DEAD,
        asks=(Ask(name="a", reply=HI, fails=DIED, text=""),),
        launches=(_crash, Script()),
        moves=(Submit("a"), AwaitState(WorkerState.RUNNING), Stop(within_s=1.0)),
        restart=RestartPolicy(restart_backoff_s=60.0),
        restarts=1,
        restart_reason="out_of_memory",
        ends=WorkerState.STOPPED,
        evidence=False,
    ),
)

_LOADED_S = 1.5  # startup_timeout_s here


def load(name: str, startup: Startup, **more: Any) -> Scenario:
    """A first start, which succeeds."""
    options: dict[str, Any] = {"timeouts": {"startup_timeout_s": _LOADED_S}, **more}
    return Scenario(name=name, truth=SLOW, launches=(Script(startup=startup),), **options)


def load_fails(name: str, startup: Startup, limit_s: float, **more: Any) -> Scenario:
    options: dict[str, Any] = {"timeouts": {"startup_timeout_s": _LOADED_S}, **more}
    return Scenario(
        name=name,
        truth=HUNG,
        launches=(Script(startup=startup),),
        start_fails=StartFailReason.STARTUP_TIMEOUT,
        start_found=Found(since="start", limit_s=limit_s, after_work=True),
        ends=WorkerState.FAILED,
        **options,
    )


_load = (
    load("a long load with 503, at work", Startup(load_s=5.0, load_work="cpu", load_ticks_per_s=TICKS)),
    load("a long load that reads from disk", Startup(load_s=5.0, load_work="disk", load_bytes_per_s=8e6)),
    load("an idle load within startup_timeout_s", Startup(load_s=0.7)),
    load(
        "a long load in a child of an idle process",
        Startup(load_s=10.0, load_work="cpu", load_ticks_per_s=TICKS),
        wrapped=True,
        timeouts={"startup_timeout_s": 7.0},  # new children are looked for every 5 s only
    ),
    load_fails("a load that hangs answers 503 for ever", Startup(load_s=None), _LOADED_S),
    load_fails("never listens", Startup(never_bind=True), _LOADED_S),
    load_fails(
        "a load at work is over load_timeout_s",
        Startup(load_s=None, load_work="cpu", load_ticks_per_s=TICKS),
        2.0,
        timeouts={"startup_timeout_s": 20.0, "load_timeout_s": 2.0},
    ),
    Scenario(
        name="the restart hangs in its load, the next one does not",
        truth=HUNG,
        asks=(Ask(name="a", reply=HI, fails=DIED, text=""),),
        launches=(_crash, Script(startup=Startup(load_s=None)), Script()),
        timeouts={"startup_timeout_s": _LOADED_S},
        restarts=2,
        restart_reason="startup_timeout",
        evidence=True,
    ),
)

# ---------------------------------------------------------------- what only /slots can tell

LOST = RequestFailReason.REQUEST_LOST
SUSPECT_S = 1.0
FOUND_S = SUSPECT_S + (LOOKS_COUNT - 1) * LOOK_INTERVAL_S
_SUSPICIOUS = {"suspect_after_s": SUSPECT_S, "idle_stream_timeout_s": 60.0, "prefill_liveness_timeout_s": 60.0}


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


def _shows(*slots: dict[str, Any]) -> Sequence[Script]:
    """A server whose `/slots` stands still."""
    return (Script(slots=[Answer(body=list(slots))]),)


def _moves(look: Callable[[int], list[dict[str, Any]]]) -> Sequence[Script]:
    """One whose `/slots` says something else each time."""
    return (Script(slots=[Answer(body=look(number), times=1) for number in range(40)]),)


_NOTE: ToolDef = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}
_TABLE = (
    "| name | bytes |\n| :--- | ---: |\n",
    *(f"| file-{number:04d} | {number * 37 % 1000:5} |\n" for number in range(300)),
    "-" * 400 + "\n",
    ", ".join(map(str, range(3000))),
)

_slots = (
    hung(
        "a livelock: 100 % CPU, and no slot moves",
        [Tokens(3), silent("a"), PINGS, work(None)],
        FOUND_S,
        text=toks(3),
        timeouts=_SUSPICIOUS,
        launches=_shows(_slot(decoded=3)),
    ),
    slow(
        "text that is held back while its slot moves",
        [Tokens(3), work(9.0), *HI],
        text=toks(3) + "hi",
        timeouts=_SUSPICIOUS,
        launches=_moves(lambda number: [_slot(decoded=3 + number)]),
    ),
    hung(
        "a request that the server lost: its slot is idle, its connection open",
        [Headers(), PINGS, silent("a"), work(None)],
        FOUND_S,
        fails=LOST,
        timeouts=_SUSPICIOUS,
        launches=_shows(_slot(busy=False)),
        restarts=0,
        restart_reason="",
    ),
    slow(
        "one long batch: nothing moves, and a slot is in prefill",
        [Headers(), Role(), PINGS, work(9.0), *HI],
        timeouts=_SUSPICIOUS,
        launches=_shows(_slot(prompt=0)),
    ),
    slow(
        "an hour of silent work, scaled down, on a server without /slots",
        [Headers(), work(9.0), *HI],
        timeouts=_SUSPICIOUS,
        launches=(Script(slots=[Answer(status=501)]),),
    ),
    slow(
        "/slots hangs, the request does not",
        [Headers(), work(9.0), *HI],
        timeouts=_SUSPICIOUS,
        launches=(Script(slots=[Answer(hang=True)]),),
    ),
    Scenario(
        name="a dead stream beside a live neighbour ends alone",
        truth=HUNG,
        slots=2,
        asks=(
            Ask(
                name="a",
                reply=[Tokens(3), silent("a"), PINGS, work(None)],
                fails=STALL,
                found=found("a", FOUND_S),
                text=toks(3),
            ),
            Ask(name="b", reply=[Tokens(100, 0.1), *END], text=toks(100)),
        ),
        timeouts=_SUSPICIOUS,
        launches=_moves(lambda number: [_slot(decoded=3), _slot(1, decoded=50 + number)]),
    ),
    Scenario(
        name="held-back text beside a live neighbour, both slots move",
        truth=SLOW,
        slots=2,
        asks=(
            Ask(name="a", reply=[Tokens(3), work(9.0), *HI], text=toks(3) + "hi"),
            Ask(name="b", reply=[Tokens(100, 0.1), *END], text=toks(100)),
        ),
        timeouts=_SUSPICIOUS,
        launches=_moves(lambda number: [_slot(decoded=3 + number), _slot(1, decoded=50 + number)]),
    ),
    hung(
        "the same prompt progress for ever, at work",
        [PromptProgress(1, 9), silent("a"), Repeat(None, [PromptProgress(1, 9), work(0.2)])],
        FOUND_S,
        timeouts=_SUSPICIOUS,
        launches=_shows(_slot(prompt=1)),
    ),
    slow(
        "prompt progress that grows, in batches of two seconds",
        [Prefill(total=5, batch=1, interval_s=2.0, work_kind="cpu"), *HI],
        timeouts=_SUSPICIOUS,
        launches=_shows(_slot(prompt=1)),
    ),
    hung(
        "prompt progress in circles, at work, without /slots",
        [PromptProgress(5, 9), silent("a"), Repeat(None, [PromptProgress(1, 9), PromptProgress(5, 9), work(0.1)])],
        IDLE_S,
    ),
    hung(
        "role chunks for ever, at work",
        [Tokens(1), silent("a"), Repeat(None, [Role(), work(0.1)])],
        IDLE_S,
        text=toks(1),
    ),
    Scenario(
        name="queued behind a neighbour that gets data, no CPU seen",
        truth=SLOW,
        slots=2,
        asks=(
            Ask(name="a", reply=[Tokens(60, 0.1), *END], text=toks(60)),
            Ask(name="b", reply=[Sleep(4.0), *HI], text="hi"),
        ),
        moves=(Submit("a"), Heard("a", 1), Submit("b")),
    ),
    Scenario(
        name="queued for ever although a slot is idle",
        truth=HUNG,
        slots=2,
        asks=(
            Ask(name="a", reply=[Tokens(100, 0.1), *END], text=toks(100)),
            Ask(name="b", reply=[silent("b"), WaitClose()], fails=LOST, found=found("b", FOUND_S), text=""),
        ),
        moves=(Submit("a"), Heard("a", 1), Submit("b")),
        timeouts={**_SUSPICIOUS, "headers_timeout_s": 60.0},
        launches=_moves(lambda number: [_slot(decoded=10 + number), _slot(1, busy=False)]),
    ),
    hung(
        "a sidecar computes, and the server does not",
        [Tokens(3), silent("a"), PINGS, WaitClose()],
        IDLE_S,
        text=toks(3),
        sidecar=True,
    ),
    slow("a sidecar computes, and so does the server", [Tokens(3), work(3.5), *HI], text=toks(3) + "hi", sidecar=True),
    hung(
        "arguments of a call that repeat themselves for ever",
        [silent("a"), Repeat(None, [ToolCall("note", '"1,2,', call_id="call00001")])],
        0.0,
        fails=RequestFailReason.REPEATED_TEXT_LOOP,
        text=None,
        restarts=0,
        restart_reason="",
        config={"exit_tools": (_NOTE,)},
    ),
    slow(
        "long arguments that do not repeat themselves",
        [ToolCall("note", {"rows": [{"id": n, "square": n * n} for n in range(2000)]}, pieces=200), *END],
        text="",
        config={"exit_tools": (_NOTE,)},
    ),
    slow(
        "a table, a ruler and a list of numbers",
        [*map(Text, _TABLE), *END],
        text="".join(_TABLE),
    ),
    hung(
        "one character for ever",
        [silent("a"), Repeat(None, [Text("/" * 64)])],
        0.0,
        fails=RequestFailReason.REPEATED_TEXT_LOOP,
        text=None,
        restarts=0,
        restart_reason="",
    ),
)

GROUPS: Mapping[str, Sequence[Scenario]] = {
    "headers": _headers,
    "prefill": _prefill,
    "generating": _generating,
    "neighbours": _neighbours,
    "health": _health,
    "transport": _transport,
    "death": _death,
    "load": _load,
    "slots": _slots,
}

# What the worker must find, and beside it the honest server that looks like it.
TWINS: Mapping[str, tuple[str, str]] = {
    "nothing comes, not even headers": ("no headers, idle", "no headers for 3 s, at work"),
    "a queue that nobody serves": ("a queue behind a stream that is dead", "a queue in front of the server's slots"),
    "a slot is idle, and the queue waits": (
        "queued for ever although a slot is idle",
        "queued behind a neighbour that gets data, no CPU seen",
    ),
    "headers and pings alone": ("headers, then pings only, idle", "headers, then pings only, at work"),
    "a role chunk alone": ("a role chunk, then silence", "a role chunk, then silent work"),
    "role chunks for ever": ("role chunks for ever, at work", "tokens, then hard work, then tokens"),
    "prompt progress that ends": ("prompt progress, then silence", "prompt progress, then silent work"),
    "the same prompt progress for ever": (
        "the same prompt progress for ever, at work",
        "prompt progress that grows, in batches of two seconds",
    ),
    "prompt progress in circles": (
        "prompt progress in circles, at work, without /slots",
        "prompt progress on an idle CPU",
    ),
    "the CPU ticks of an idle process": ("3 ticks a second, for ever, are no work", "work at 12 ticks a second"),
    "children": ("children of an idle process are idle too", "children of an idle process do the work"),
    "a sidecar": ("a sidecar computes, and the server does not", "a sidecar computes, and so does the server"),
    "a livelock while it generates": (
        "a livelock: 100 % CPU, and no slot moves",
        "text that is held back while its slot moves",
    ),
    "a livelock in prefill": (
        "spins at 100 % and sends nothing",
        "one long batch: nothing moves, and a slot is in prefill",
    ),
    "spinning where /slots is off": (
        "spins and sends pings only",
        "an hour of silent work, scaled down, on a server without /slots",
    ),
    "a lost request": (
        "a request that the server lost: its slot is idle, its connection open",
        "/slots hangs, the request does not",
    ),
    "a dead stream beside a live one": (
        "a dead stream beside a live neighbour ends alone",
        "held-back text beside a live neighbour, both slots move",
    ),
    "decoding is dead": ("tokens, then silence", "tokens, then reads from disk, then tokens"),
    "a token too late": (
        "one token, a little later than idle_stream_timeout_s",
        "one token every idle_stream_timeout_s less a little",
    ),
    "reasoning that ends": ("reasoning, then silence", "slow reasoning"),
    "SIGSTOP": ("stopped in mid-stream, continued too late", "stopped in mid-stream, continued in time"),
    "health that fails": ("health hangs and no data", "health hangs while streaming goes on"),
    "a load that hangs": ("a load that hangs answers 503 for ever", "a long load with 503, at work"),
    "a load without end": ("a load at work is over load_timeout_s", "a long load that reads from disk"),
    "repetition in text": ("one character for ever", "a table, a ruler and a list of numbers"),
    "repetition in arguments": (
        "arguments of a call that repeat themselves for ever",
        "long arguments that do not repeat themselves",
    ),
}
