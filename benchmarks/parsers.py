"""What the parsers cost that could read a stream: microseconds per event, the least of the rounds.

python -m benchmarks.parsers [--json FILE]
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

import h11
import httptools
import msgspec

from benchmarks.common import interleave, report, table
from benchmarks.instructions import wire
from llama_worker.stream.decoder import _decode_chunk

EVENTS, ROUNDS, READ_BYTES = 2000, 20, 16 * 1024


def by_h11(data: bytes) -> int:
    """h11."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "h")]))
    connection.send(h11.EndOfMessage())
    size = 0
    for begin in range(0, len(data), READ_BYTES):
        connection.receive_data(data[begin : begin + READ_BYTES])
        while not isinstance(
            event := connection.next_event(), (type(h11.NEED_DATA), h11.EndOfMessage)
        ):
            size += len(event.data) if isinstance(event, h11.Data) else 0
    return size


def by_loop(data: bytes) -> int:
    """A loop in Python, that takes every framing for right."""
    rest, size = data.partition(b"\r\n\r\n")[2], 0
    at = 0
    while True:
        end = rest.index(b"\r\n", at)
        length = int(rest[at:end], 16)
        if not length:
            return size
        size += len(rest[end + 2 : end + 2 + length])
        at = end + 2 + length + 2


def by_httptools(data: bytes) -> int:
    """httptools."""
    sizes: list[int] = []

    class Reply:
        def on_body(self, body: bytes) -> None:
            sizes.append(len(body))

    parser = httptools.HttpResponseParser(Reply())
    for begin in range(0, len(data), READ_BYTES):
        parser.feed_data(data[begin : begin + READ_BYTES])
    return sum(sizes)


def main() -> None:
    """Measure and print."""
    data = wire(EVENTS)
    record = data.partition(b"data: ")[2].partition(b"\n\n")[0]
    bodies: dict[str, Callable[[bytes], int]] = {
        "h11": by_h11,
        "a loop in Python": by_loop,
        "httptools": by_httptools,
    }
    assert len({parse(data) for parse in bodies.values()}) == 1
    decoders: dict[str, Callable[[bytes], object]] = {
        "json": json.loads, "msgspec": msgspec.json.decode, "msgspec, typed": _decode_chunk,
    }  # fmt: skip

    def us(run: Callable[[], object]) -> Callable[[], float]:
        def once() -> float:
            before = time.thread_time()
            run()
            return (time.thread_time() - before) / EVENTS * 1e6

        return once

    def decode(by: Callable[[bytes], object]) -> Callable[[], object]:
        return lambda: [by(record) for _ in range(EVENTS)]

    measures = {
        f"HTTP body, chunked: {name}": us(partial(parse, data)) for name, parse in bodies.items()
    }
    measures |= {f"JSON of a chunk: {name}": us(decode(by)) for name, by in decoders.items()}
    least = {name: min(values) for name, values in interleave(ROUNDS, measures).items()}
    report("parsers", table(["parser", "us per event"], list(least.items())), least)


if __name__ == "__main__":
    main()
