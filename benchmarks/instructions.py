"""Instructions of one event in bulk, by cachegrind: the same on every machine, however busy it is.

    python -m benchmarks.instructions [--json FILE]

Bytes as they come from the socket to text that can be read: the worker's way (HTTP, SSE, JSON, the
request's machine with its loop detector) against `http.client` with `json.loads`. What the kernel
and other threads add is left out.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from llama_worker.config.command import llama_server_cmd
from llama_worker.config.settings import WorkerConfig
from llama_worker.request.messages import Begin, BiosWritten, PostChat, StreamEvents, StreamOpened
from llama_worker.request.request import Request
from llama_worker.request.submission import validate_submit
from llama_worker.stream.response import ChatBody, ReplyParser

FEW, MANY = 200, 1200
READ_BYTES = 16 * 1024
_CHUNK = {
    "choices": [{"finish_reason": None, "index": 0, "delta": {"content": "token "}}],
    "created": 1790000000,
    "id": "chatcmpl-abcdefghijklmnopqrstuvwxyz012345",
    "model": "model.gguf",
    "system_fingerprint": "b11434-0123456789",
    "object": "chat.completion.chunk",
}


def wire(events: int) -> bytes:
    """A response with so many tokens."""
    record = f"data: {json.dumps(_CHUNK, separators=(',', ':'))}\n\n".encode()
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head + (b"%x\r\n%b\r\n" % (len(record), record)) * events + b"0\r\n\r\n"


def bare_loop(data: bytes) -> int:
    """As benchmarks.stream has it."""

    class Wire:
        def makefile(self, mode: str) -> io.BufferedReader:
            return io.BufferedReader(cast("Any", io.BytesIO(data)))

    response = http.client.HTTPResponse(cast("socket.socket", Wire()))
    response.begin()
    texts, rest = [], b""
    while piece := response.read1(65536):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                texts += [
                    choice["delta"].get("content") for choice in json.loads(line[6:])["choices"]
                ]
    return len("".join(texts))


def worker(data: bytes) -> int:
    """What a stream's thread and its actor do, the headers left out."""
    command = llama_server_cmd("model.gguf", host="127.0.0.1", port=20_000, slots=1)
    config = WorkerConfig(
        "bench", "127.0.0.1", 20_000, command, max_tokens=None, loop_detector=None
    )
    submission = validate_submit("bench", "", "x", None, None)
    begin = Begin(request_id=1, submission=submission, prompted=False, opens_thinking=False)
    request = Request(begin, config=config, unix=lambda at: at, now=0.0)
    request.begin(0.0)
    (order,) = request.step(BiosWritten(turn_id=(1, 1), bios="", error=None), 0.0)
    assert isinstance(order, PostChat)
    request.step(StreamOpened(turn_id=order.turn_id, at=0.0), 0.0)
    body = ChatBody(ReplyParser("POST"))
    for piece in _pieces(data):
        events = tuple(body.feed(piece))
        request.step(StreamEvents(turn_id=order.turn_id, events=events, at=0.0), 0.0)
    return request.output_chars[0]


def _pieces(data: bytes) -> Iterator[bytes]:
    for begin in range(0, len(data), READ_BYTES):
        yield data[begin : begin + READ_BYTES]


WAYS: dict[str, Callable[[bytes], int]] = {"bare loop": bare_loop, "worker": worker}


def count_instructions(runs: Sequence[tuple[str, int]]) -> list[int]:
    """Of whole processes, side by side, that take so many events this way."""
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    command += [sys.executable, "-m", __spec__.name]
    processes = [
        subprocess.Popen([*command, "--run", name, str(events)], stderr=subprocess.PIPE, text=True)
        for name, events in runs
    ]
    counts = []
    for process in processes:
        said = process.communicate()[1]
        found = re.search(r"I +refs: +([\d,]+)", said)
        assert found is not None, said
        counts.append(int(found[1].replace(",", "")))
    return counts


def main() -> None:
    """Measure and print; or be what is measured."""
    if sys.argv[1:2] == ["--run"]:
        name, events = sys.argv[2], int(sys.argv[3])
        assert WAYS[name](wire(events)) == len("token ") * events
        return
    from benchmarks.common import (
        report,
        table,
    )  # what is measured imports little: under valgrind that takes its time

    counts = count_instructions([(name, events) for name in WAYS for events in (FEW, MANY)])
    per_event = {
        name: (many - few) / (MANY - FEW)
        for name, few, many in zip(WAYS, counts[::2], counts[1::2], strict=True)
    }
    bare = per_event["bare loop"]
    rows = [[name, f"{count:.0f}", count / bare] for name, count in per_event.items()]
    report("instructions", table(["one event in bulk", "instructions", "x bare"], rows), per_event)


if __name__ == "__main__":
    main()
