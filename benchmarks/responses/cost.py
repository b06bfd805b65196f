"""What the Responses proxy costs: time to the first token and to a whole reply, CPU per event, many
clients, idle.

How much later the first event comes beside a thousand half requests, and what a full store holds.

    python -m benchmarks.responses.cost [--json FILE]

Against the same chat completion asked of the server itself. The proxy runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.common import HOST, interleave, quantile, report, script, server, table
from benchmarks.responses.servers import OURS, proxy
from benchmarks.stream import bare_loop, cpu_us
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.testing.scripts import Sleep, Step, Text, Tokens, plain_reply

ROUNDS, CALLS, EVENTS, CLIENTS, IDLE_S = 6, 100, 20_000, 64, 10.0
EACH, MANY_ROUNDS = 600, 3  # 20 s: a request's beginning and end cost as much as 50 events
# of calls that take milliseconds: what else the machine does comes and goes by the second
SHORT_ROUNDS = 20
LATE_S = 0.005
CROWD = 1000
_HALF_A_BODY = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
Call = Callable[[], float]


def _ms(port: int, path: str, body: dict[str, Any], until: bytes) -> float:
    """Milliseconds until these bytes are there."""
    connection = http.client.HTTPConnection(HOST, port)
    began = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response, seen = connection.getresponse(), b""
    while until not in seen:
        data = response.read1(65536)
        assert data, seen
        seen += data
    took = time.perf_counter() - began
    connection.close()
    return took * 1000


def _ask(stream: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same question in both APIs."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    return chat, {"model": "m", "input": "x", "stream": stream, "store": False}


def added_ms(direct: int, through: int, *, stream: bool) -> dict[str, float]:
    """What the proxy adds to the first token, or to a reply in one piece; of each way the least of
    the rounds."""
    chat, response = _ask(stream)
    until = (b"first", b"first") if stream else (b"[DONE]", b'"completed"')
    rounds = [
        interleave(
            CALLS,
            {
                "direct": lambda: _ms(direct, "/v1/chat/completions", chat, until[0]),
                "proxy": lambda: _ms(through, "/v1/responses", response, until[1]),
            },
        )
        for _ in range(SHORT_ROUNDS)
    ]
    least = {
        name: {
            way: min(quantile(seen[way], share) for seen in rounds) for way in ("direct", "proxy")
        }
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {name: ways["proxy"] - ways["direct"] for name, ways in least.items()}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _read_all(port: int) -> None:
    connection = http.client.HTTPConnection(HOST, port)
    connection.request(
        "POST", "/v1/responses", json.dumps(_ask(True)[1]), {"Content-Type": "application/json"}
    )
    response, tail, completed = connection.getresponse(), b"", False
    while data := response.read1(65536):
        completed = completed or b"event: response.completed" in tail + data
        tail = data[-32:]
    assert completed
    connection.close()


def _proxy_us(process: psutil.Process, events: int, run: Callable[[], None]) -> float:
    before = _cpu_s(process)
    run()
    return (_cpu_s(process) - before) / events * 1e6


def _many(read: Callable[[int], object], port: int) -> None:
    threads = [threading.Thread(target=read, args=(port,)) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def _proxy_before(*steps: Step) -> Iterator[tuple[int, int, psutil.Process]]:
    """The ports of a server that replies so and of a proxy before it, and the proxy's process."""
    with (
        server(script(*plain_reply(*steps)), slots=CLIENTS) as upstream,
        proxy(OURS, upstream) as running,
    ):
        yield (
            urlsplit(upstream).port or 0,
            urlsplit(running.base_url).port or 0,
            psutil.Process(running.pid),
        )


def bulk_us() -> dict[str, float]:
    """CPU per event of one stream that comes as fast as it can."""
    with _proxy_before(Tokens(EVENTS)) as (direct, through, process):
        _read_all(through)
        measures: dict[str, Call] = {
            "bare loop": lambda: cpu_us(EVENTS, lambda: bare_loop(direct)),
            "proxy": lambda: _proxy_us(process, EVENTS, lambda: _read_all(through)),
        }
        return {name: min(values) for name, values in interleave(4, measures).items()}


def many_us() -> dict[str, float]:
    """CPU per event of many streams at 33 Hz."""
    events = EACH * CLIENTS
    with _proxy_before(Tokens(EACH, 0.03)) as (direct, through, process):
        measures: dict[str, Call] = {
            "bare loop": lambda: cpu_us(events, lambda: _many(bare_loop, direct)),
            "proxy": lambda: _proxy_us(process, events, lambda: _many(_read_all, through)),
        }
        return {name: min(values) for name, values in interleave(MANY_ROUNDS, measures).items()}


HALVES = {
    "silent": b"",
    "half a head": b"POST /v1/responses HTTP/1.1\r\n",
    "half a body": _HALF_A_BODY,
}


def crowded_over_alone() -> dict[str, float]:
    """Time from a new client's connect to its first event: beside a crowd of each kind, over that
    without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * CROWD)), hard))
    body = _ask(True)[1]
    found = {}
    with _proxy_before(Text("first")) as (_, through, _):

        def first_event_ms() -> float:
            return min(_ms(through, "/v1/responses", body, b"response.created") for _ in range(25))

        for kind, said in HALVES.items():
            alone, crowded = [], []
            for _ in range(ROUNDS):
                alone.append(first_event_ms())
                with contextlib.ExitStack() as crowd:
                    for _ in range(CROWD):
                        crowd.enter_context(socket.create_connection((HOST, through))).sendall(said)
                    crowded.append(first_event_ms())
            found[kind] = min(crowded) / min(alone)
    return found


def full_store_over_limit() -> float:
    """The memory that the proxy takes for a store that is full, over what the store's limit
    says."""
    limit = ResponsesProxyConfig(upstream=f"http://{HOST}").max_stored_bytes
    items = [{"role": "user", "content": f"{number} " + "word " * 40} for number in range(1000)]
    body = {"model": "m", "input": items, "stream": True, "store": True}
    with _proxy_before(Text("first")) as (_, through, process):
        _ms(through, "/v1/responses", {**body, "store": False}, b"response.completed")
        before = process.memory_full_info().uss
        for _ in range(3 * limit // (2 * len(json.dumps(items)))):
            _ms(through, "/v1/responses", body, b"response.completed")
        return float((process.memory_full_info().uss - before) / limit)


def main() -> None:
    """Measure and print."""
    figures: dict[str, Any] = {}
    with _proxy_before(Text("first")) as (direct, through, process):
        figures["first_token_ms"] = added_ms(direct, through, stream=True)
        figures["reply_ms"] = added_ms(direct, through, stream=False)
        before = _cpu_s(process)
        time.sleep(IDLE_S)
        figures["idle_percent"] = (_cpu_s(process) - before) / IDLE_S * 100
        figures["memory_mb"] = process.memory_full_info().uss / 1e6
    with _proxy_before(Sleep(LATE_S), Text("first")) as (direct, through, _):
        figures["late_first_token_ms"] = added_ms(direct, through, stream=True)
    figures["bulk_us"] = bulk = bulk_us()
    figures["many_us"] = many = many_us()
    rows: list[list[object]] = [
        [what, figures[name]["p50"], figures[name]["p99"]]
        for what, name in (
            ("added to the first token of a server that answers at once", "first_token_ms"),
            (f"the same, of one that takes {LATE_S * 1000:g} ms", "late_first_token_ms"),
            ("added to a reply in one piece, of one that answers at once", "reply_ms"),
        )
    ]
    text = table(["ms", "p50", "p99"], rows)
    header = ["CPU, us per event", "bare loop", "proxy", "x bare"]
    rows = [
        [what, us["bare loop"], us["proxy"], us["proxy"] / us["bare loop"]]
        for what, us in (("bulk", bulk), (f"{CLIENTS} clients at 33 Hz", many))
    ]
    text += "\n\n" + table(header, rows)
    figures["crowded"] = crowded = crowded_over_alone()
    rows = [[f"beside {CROWD} connections: {kind}", ratio] for kind, ratio in crowded.items()]
    text += "\n\n" + table(["first event of a new client", "x alone"], rows)
    figures["full_store"] = full_store_over_limit()
    text += (
        f"\n\na full store takes {figures['full_store']:.2f} times the memory that its limit says"
    )
    text += f"\n\nidle: {figures['idle_percent']:.2f} % of a core, {figures['memory_mb']:.1f} MB"
    report("responses.cost", text, figures)


if __name__ == "__main__":
    main()
