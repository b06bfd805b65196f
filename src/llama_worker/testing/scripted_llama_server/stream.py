"""One chat reply: framing, SSE records, and what can be done step by step."""

from __future__ import annotations

import json
import math
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from .whole_reply import whole_reply
from .wire import JSON_TYPE, Json, head, hung_up

if TYPE_CHECKING:
    from .server import Server

Step = dict[str, Any]
PACE = float(os.environ.get("SCRIPTED_SERVER_PACE", "1"))
"""Of the pauses between tokens and between batches; 0: as fast as it can."""
P = ParamSpec("P")
STEPS: dict[str, Callable[..., None]] = {}


class ClientGone(Exception):
    """The client closed (or half-closed) its connection."""


class EndReply(Exception):
    """The script ended the reply: "complete", "fin" (no terminating chunk) or "reset"."""


class ReplyStream:
    """One chat reply: framing, SSE records, and waits that notice the client's close at once.

    One that is wanted `in_one_piece` holds back what is sent, and `finish` makes one JSON body of
    it.
    """

    def __init__(self, server: Server, sock: socket.socket, number: int, body: Json) -> None:
        self.server = server
        self.sock = sock
        self.number = number
        self.body = body
        # llama-server streams only if asked to
        self.in_one_piece = isinstance(body, dict) and body.get("stream") is not True
        self.held = bytearray()
        self.headers_sent = False
        self.framing = "chunked"
        self.newline = "\n"
        self.ping_every_s: float | None = None
        self.next_ping_at = math.inf
        self.deltas = 0

    def note(self, fact: str, **more: Json) -> None:
        self.server.journal.note(fact, n=self.number, **more)

    def run(self, steps: Sequence[Step]) -> None:
        for described in steps:
            arguments = dict(described)
            STEPS[arguments.pop("do")](self, **arguments)

    # -- noticing the client --

    def gone(self) -> None:
        self.note("client_closed", phase="streaming" if self.headers_sent else "before_headers")

    def wait(self, seconds: float | None) -> None:
        """Sleeps (None: for ever), sending pings that are due; ends with ClientGone on a close."""
        end_at = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            left = max(0.0, min(end_at, self.next_ping_at) - time.monotonic())
            if hung_up(self.sock, None if left == math.inf else left):
                self.gone()
                raise ClientGone
            now = time.monotonic()
            if now >= self.next_ping_at and self.ping_every_s is not None:
                self.next_ping_at = now + self.ping_every_s
                self.send(f":{self.newline}{self.newline}".encode())
            if now >= end_at:
                return

    # -- bytes --

    def wire(self, data: bytes) -> None:
        """Bytes straight to the socket."""
        if self.server.script["journal_tokens"] and not select.select([], [self.sock], [], 0)[1]:
            self.note("send_waits")  # for the client to read
        try:
            self.sock.sendall(data)
        except OSError as error:
            self.gone()
            raise ClientGone from error

    def send_headers(self, status: int, framing: str = "length", **headers: object) -> None:
        self.framing = framing
        self.headers_sent = True
        self.note("headers")
        self.wire(head(status, **headers))

    def send(self, *pieces: bytes) -> None:
        """Body bytes, each piece a chunk of its own, all in one send."""
        if self.in_one_piece:
            self.held += b"".join(pieces)
            return
        if not self.headers_sent:
            self.run([{"do": "Headers"}])
        if self.framing == "chunked":
            self.wire(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece))
        else:
            self.wire(b"".join(pieces))

    def finish(self) -> None:
        """The regular end of a reply."""
        if not self.in_one_piece:
            self.send()
            if self.framing == "chunked":
                self.wire(b"0\r\n\r\n")
        elif not self.headers_sent:
            status, body = whole_reply(self.held)
            self.send_json(status, {"usage": self.usage(), **body} if status == 200 else body)

    def send_json(self, status: int, body: Json) -> None:
        """A whole response."""
        content = json.dumps(body).encode()
        self.send_headers(status, Content_Type=JSON_TYPE, Content_Length=len(content))
        self.wire(content)

    # -- records --

    def record(self, data: Json, field: str = "data") -> bytes:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        return f"{field}: {text}{self.newline}{self.newline}".encode("utf-8", "replace")

    def chunk(self, delta: Json, finish_reason: str | None = None, **more: Json) -> bytes:
        return self.envelope([{"finish_reason": finish_reason, "index": 0, "delta": delta}], **more)

    def envelope(self, choices: Json, **more: Json) -> bytes:
        return self.record(
            {
                "choices": choices,
                "created": int(time.time()),
                "id": f"chatcmpl-fake-{self.number}",
                "model": "fake",
                "system_fingerprint": "fake",
                "object": "chat.completion.chunk",
                **more,
            }
        )

    def send_deltas(self, *deltas: Json) -> None:
        self.send(*map(self.chunk, deltas))
        if self.server.script["journal_tokens"]:
            self.note("token")
        self.deltas += len(deltas)

    def timings(self) -> Json:
        n = self.deltas
        return {
            "cache_n": 0, "prompt_n": 10, "prompt_ms": 10.0, "prompt_per_second": 1000.0,
            "predicted_n": n, "predicted_ms": n * 10.0, "predicted_per_second": 100.0,
        }  # fmt: skip

    def usage(self, prompt: int = 10, completion: int | None = None, cached: int = 0) -> Json:
        """In tokens; `completion` None: the deltas so far."""
        completion = self.deltas if completion is None else completion
        return {
            "completion_tokens": completion,
            "prompt_tokens": prompt,
            "total_tokens": completion + prompt,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def step(play: Callable[Concatenate[ReplyStream, P], None]) -> Callable[P, Step]:
    """Something that a reply can do. Played by the server; in a script, a call of its name
    describes it. Raises TypeError where the server could not play it."""
    STEPS[play.__name__] = play

    def describe(*args: P.args, **kwargs: P.kwargs) -> Step:
        import inspect  # not at the start of a server, which describes nothing

        try:
            given = inspect.signature(play).bind(None, *args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{play.__name__}: {error}") from None
        return {"do": play.__name__, **dict(list(given.items())[1:])}

    describe.__name__, describe.__doc__ = play.__name__, play.__doc__
    return describe


def work(seconds: float | None, pause: Callable[[float], object], ticks_per_s: float) -> None:
    """Works for `seconds` (None: for ever): CPU ticks of 10 ms (100: a whole core)."""
    end_at = math.inf if seconds is None else time.monotonic() + seconds
    slice_s = 0.05 if ticks_per_s else 3600.0
    while (now := time.monotonic()) < end_at:
        slice_end_at = min(now + slice_s, end_at)
        spun_at = time.thread_time() + ticks_per_s / 100 * (slice_end_at - now)
        while time.thread_time() < spun_at:
            for _ in range(500):
                pass
        pause(max(0.0, slice_end_at - time.monotonic()))
