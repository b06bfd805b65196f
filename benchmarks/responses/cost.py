"""What the Responses proxy costs: time to the first token and to a whole reply, CPU per event, many clients, idle.

    python -m benchmarks.responses.cost [--json FILE]

Against the same chat completion asked of the server itself. The proxy runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.common import HOST, interleave, quantile, report, script, server, table
from benchmarks.responses.servers import OURS, proxy
from benchmarks.stream import bare_loop, cpu_us
from tests.fake_script import Sleep, Step, Text, Tokens, plain_reply

ROUNDS, CALLS, EVENTS, CLIENTS, EACH, IDLE_S = 3, 100, 20_000, 64, 200, 10.0
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
    """What the proxy adds to the first token, or to a reply in one piece; of each way the least of the rounds."""
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
        for _ in range(ROUNDS)
    ]
    least = {
        name: {way: min(quantile(seen[way], share) for seen in rounds) for way in ("direct", "proxy")}
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {name: ways["proxy"] - ways["direct"] for name, ways in least.items()}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _read_all(port: int) -> None:
    connection = http.client.HTTPConnection(HOST, port)
    connection.request("POST", "/v1/responses", json.dumps(_ask(True)[1]), {"Content-Type": "application/json"})
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
    with server(script(*plain_reply(*steps)), slots=CLIENTS) as upstream, proxy(OURS, upstream) as running:
        yield urlsplit(upstream).port or 0, urlsplit(running.base_url).port or 0, psutil.Process(running.pid)


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
        return {name: min(values) for name, values in interleave(ROUNDS, measures).items()}


def main() -> None:
    """Measure and print."""
    figures: dict[str, Any] = {}
    with _proxy_before(Sleep(0.005), Text("first")) as (direct, through, process):
        figures["first_token_ms"] = added_ms(direct, through, stream=True)
        figures["reply_ms"] = added_ms(direct, through, stream=False)
        before = _cpu_s(process)
        time.sleep(IDLE_S)
        figures["idle_percent"] = (_cpu_s(process) - before) / IDLE_S * 100
        figures["memory_mb"] = process.memory_full_info().uss / 1e6
    figures["bulk_us"] = bulk = bulk_us()
    figures["many_us"] = many = many_us()
    rows: list[list[object]] = [
        ["added to the first token", figures["first_token_ms"]["p50"], figures["first_token_ms"]["p99"]],
        ["added to a reply in one piece", figures["reply_ms"]["p50"], figures["reply_ms"]["p99"]],
    ]
    text = table(["ms", "p50", "p99"], rows)
    header = ["CPU, us per event", "bare loop", "proxy", "x bare"]
    rows = [
        [what, us["bare loop"], us["proxy"], us["proxy"] / us["bare loop"]]
        for what, us in (("bulk", bulk), (f"{CLIENTS} clients at 33 Hz", many))
    ]
    text += "\n\n" + table(header, rows)
    text += f"\n\nidle: {figures['idle_percent']:.2f} % of a core, {figures['memory_mb']:.1f} MB"
    report("responses.cost", text, figures)


if __name__ == "__main__":
    main()
