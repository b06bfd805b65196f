"""CPU per stream event, one stream: the worker against a bare loop, the `openai` client and
httpx-sse.

    python -m benchmarks.stream [--json FILE]

CPU is that of this process, all threads; the server runs in another. The least of interleaved
rounds counts: noise only ever adds.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable

import httpx
import httpx_sse
import openai

from benchmarks.common import HOST, complete, config, interleave, report, script, table
from llama_worker import LlamaWorker
from llama_worker.testing.scripts import Tokens, plain_reply

BULK, RATE_HZ, SECONDS = 20_000, 500, 20
BODY = {"messages": [{"role": "user", "content": "x"}], "stream": True, "model": "m"}


def bare_loop(port: int) -> int:
    """The least that Python can do: http.client and json.loads; the deltas that came."""
    connection = http.client.HTTPConnection(HOST, port)
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY))
    response = connection.getresponse()
    texts, rest = [], b""
    while data := response.read1(65536):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text = choice["delta"].get("content")
                    if text:
                        texts.append(text)
    connection.close()
    return len(texts)


def openai_client(port: int) -> int:
    """The official client's stream."""
    client = openai.OpenAI(base_url=f"http://{HOST}:{port}/v1", api_key="-")
    stream = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], stream=True
    )
    return sum(1 for chunk in stream if chunk.choices and chunk.choices[0].delta.content)


def httpx_client(port: int) -> int:
    """httpx with httpx-sse."""
    count = 0
    with (
        httpx.Client(timeout=None) as client,
        httpx_sse.connect_sse(
            client, "POST", f"http://{HOST}:{port}/v1/chat/completions", json=BODY
        ) as source,
    ):
        for event in source.iter_sse():
            if event.data.startswith("{"):
                choices = json.loads(event.data)["choices"]
                count += bool(choices and choices[0]["delta"].get("content"))
    return count


def cpu_us(events: int, run: Callable[[], object]) -> float:
    """Microseconds of this process's CPU per event."""
    before = time.process_time()
    run()
    return (time.process_time() - before) / events * 1e6


def compare(events: int, interval_s: float, rounds: int) -> dict[str, float]:
    """The least CPU per event of each client, for one stream."""
    settings = config(script(*plain_reply(Tokens(events, interval_s))), slots=1)
    with LlamaWorker(settings) as worker:
        complete(worker, 1)
        measures: dict[str, Callable[[], float]] = {
            "bare loop": lambda: cpu_us(events, lambda: bare_loop(settings.port)),
            "worker": lambda: cpu_us(events, lambda: complete(worker, 1)),
            "openai": lambda: cpu_us(events, lambda: openai_client(settings.port)),
            "httpx-sse": lambda: cpu_us(events, lambda: httpx_client(settings.port)),
        }
        return {name: min(values) for name, values in interleave(rounds, measures).items()}


def main() -> None:
    """Measure and print."""
    bulk = compare(BULK, 0.0, 4)
    paced = compare(RATE_HZ * SECONDS, 1 / RATE_HZ, 2)
    rows: list[list[object]] = []
    for name in bulk:
        rows.append(
            [
                name,
                bulk[name],
                bulk[name] / bulk["bare loop"],
                paced[name],
                paced[name] / paced["bare loop"],
            ]
        )
    text = table(["client", "bulk us", "x bare", f"{RATE_HZ} Hz us", "x bare"], rows)
    report("stream", text, {"bulk_us": bulk, "paced_us": paced})


if __name__ == "__main__":
    main()
