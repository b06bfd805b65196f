"""What a reply can do. A step is played by the server, and described by a call of its name."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import time
from collections.abc import Sequence
from typing import Literal

from .stream import PACE, EndReply, ReplyStream, Step, step, work
from .wire import Json, error_body

# -- headers and framing --


@step
def Headers(
    s: ReplyStream,
    status: int = 200,
    framing: Literal["chunked", "close", "length"] = "chunked",
    length: int | None = None,
) -> None:
    """Sends the response headers now; the first body step does it where no `Headers` came before.

    `framing`: "chunked", "close" (delimited by the end of the connection) or "length" (`length`
    bytes). To a request that wants no stream the headers come with the body, at the end.
    """
    if s.in_one_piece:
        if status != 200:
            raise ValueError(f"to a request that wants no stream: HttpError({status}), not Headers")
        return
    headers: dict[str, object] = {
        "Content_Type": "text/event-stream",
        "Keep_Alive": "timeout=5, max=100",
    }
    if framing == "chunked":
        headers["Transfer_Encoding"] = "chunked"
    if framing == "length":
        headers["Content_Length"] = length
    s.send_headers(status, framing, **headers)


@step
def HttpError(
    s: ReplyStream, status: int, message: str = "fake error", error_type: str = "server_error"
) -> None:
    """Instead of a stream: a status with llama-server's error body."""
    s.send_json(status, error_body(status, message, error_type))
    raise EndReply("complete")


@step
def Redirect(s: ReplyStream, location: str, status: int = 302) -> None:
    """Instead of a stream: a redirect."""
    s.send_headers(status, Location=location, Content_Length=0)
    raise EndReply("complete")


@step
def Fin(s: ReplyStream) -> None:
    """Closes without the terminating chunk, or before Content-Length is reached."""
    raise EndReply("fin")


@step
def Reset(s: ReplyStream) -> None:
    """Closes with a TCP reset."""
    raise EndReply("reset")


# -- records --


@step
def Role(s: ReplyStream) -> None:
    """llama-server's first chunk: role and null content."""
    s.send(s.chunk({"role": "assistant", "content": None}))


@step
def Text(s: ReplyStream, text: str) -> None:
    """One content delta."""
    s.send_deltas({"content": text})


@step
def Reasoning(s: ReplyStream, text: str) -> None:
    """One delta of reasoning."""
    s.send_deltas({"reasoning_content": text})


@step
def ToolCall(
    s: ReplyStream,
    name: str,
    arguments: Json = "{}",
    call_id: str = "call00001",
    index: int = 0,
    pieces: int = 1,
) -> None:
    """A tool call in `pieces` deltas. `arguments`: an object, or text that is sent as it is."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    size = max(1, math.ceil(len(text) / pieces))
    call: dict[str, Json] = {
        "index": index,
        "type": "function",
        "id": call_id,
        "function": {"name": name},
    }
    for at in range(0, len(text) or 1, size):
        call["function"]["arguments"] = text[at : at + size]
        s.send_deltas({"tool_calls": [call]})
        call = {"index": index, "function": {}}


@step
def PromptProgress(s: ReplyStream, processed: int, total: int) -> None:
    """One report of how many tokens of the prompt are read."""
    _report_progress(s, processed, total)


@step
def Prefill(s: ReplyStream, total: int, batch: int, interval_s: float) -> None:
    """Progress chunks from 0 to `total`, `interval_s` between them."""
    for processed in range(0, total + batch, batch):
        _report_progress(s, min(processed, total), total)
        if processed < total:
            s.wait(PACE * interval_s)


@step
def Finish(s: ReplyStream, reason: str = "stop") -> None:
    """The finish reason, with timings."""
    s.send(s.chunk({}, reason, timings=s.timings()))


@step
def Usage(
    s: ReplyStream,
    prompt_tokens: int = 10,
    completion_tokens: int | None = None,
    cached_tokens: int = 0,
) -> None:
    """The usage chunk, `choices: []`; completion tokens default to the deltas sent."""
    usage = s.usage(prompt_tokens, completion_tokens, cached_tokens)
    s.send(s.envelope([], usage=usage, timings=s.timings()))


@step
def DoneMarker(s: ReplyStream) -> None:
    """`data: [DONE]`."""
    s.send(s.record("[DONE]"))


@step
def Tokens(
    s: ReplyStream,
    n: int,
    interval_s: float = 0.0,
    text: str = "tok{i} ",
    start: int = 0,
    reasoning: bool = False,
    batch: int = 1,
) -> None:
    """`n` deltas, `interval_s` apart, `batch` of them in one send; in `text` {i} is the number,
    {at} the Unix time."""
    field = "reasoning_content" if reasoning else "content"
    next_at = time.monotonic()
    for first in range(start, start + n, batch):
        numbers = range(first, min(first + batch, start + n))
        said = (text.replace("{i}", str(i)).replace("{at}", f"{time.time():.6f}") for i in numbers)
        s.send_deltas(*({field: words} for words in said))
        next_at += PACE * interval_s * len(numbers)
        s.wait(max(0.0, next_at - time.monotonic()))


@step
def ErrorData(s: ReplyStream, code: int = 500, message: str = "fake error") -> None:
    """`data: {"error": {...}}`; today's form."""
    s.send(s.record(error_body(code, message)))


@step
def ErrorField(s: ReplyStream, code: int = 400, message: str = "fake error") -> None:
    """`error: {...}`; the old form, to be followed by `DoneMarker`."""
    s.send(s.record(error_body(code, message, "invalid_request_error")["error"], "error"))


@step
def Record(s: ReplyStream, data: Json, cut: int | None = None) -> None:
    """Any record. Text data goes as it is, other data as JSON. `cut` keeps only so many first
    bytes."""
    s.send(s.record(data)[:cut])


@step
def Raw(s: ReplyStream, data: str, framed: bool = True) -> None:
    """Characters of Latin-1 as bytes.

    Not `framed`: past the chunked framing, and, where no `Headers` came before, instead of a whole
    response.
    """
    if not framed and not s.headers_sent:
        s.headers_sent = True
        s.framing = "close"
    (s.send if framed else s.wire)(data.encode("latin-1"))


@step
def Newlines(s: ReplyStream, kind: str) -> None:
    r"""The line ends of all records that follow: "\n", "\r\n" or "\r"."""
    s.newline = kind


@step
def PingEvery(s: ReplyStream, every_s: float) -> None:
    """Keepalive comments from now on, beside whatever waits, burns or reads."""
    s.ping_every_s = every_s
    s.next_ping_at = time.monotonic() + every_s


# -- time and work --


@step
def Sleep(s: ReplyStream, seconds: float) -> None:
    """Silence for so long; keepalives go on, if there are any."""
    s.wait(seconds)


@step
def Burn(s: ReplyStream, seconds: float | None, ticks_per_s: float = 100.0) -> None:
    """Burns CPU, silently: a whole core, or `ticks_per_s` (of 10 ms). None seconds: for ever."""
    work(seconds, s.wait, ticks_per_s)


@step
def DiskReads(s: ReplyStream, seconds: float) -> None:
    """Reads from the disk under $TMPDIR or /tmp: `read_bytes` in /proc/PID/io grows, CPU hardly
    does."""
    import tempfile

    end_at = time.monotonic() + seconds
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(b"\xa5" * (1 << 20))
        os.fsync(file.fileno())
        while time.monotonic() < end_at:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # out of the page cache
            os.pread(file.fileno(), 1 << 20, 0)
            s.wait(0.05)


@step
def WaitClose(s: ReplyStream) -> None:
    """Silence until the client closes."""
    s.wait(None)


@step
def Gate(s: ReplyStream, path: str | os.PathLike[str]) -> None:
    """Waits until the file `path` exists."""
    while not os.path.exists(path):
        s.wait(0.02)


@step
def Note(s: ReplyStream, name: str) -> None:
    """Journals the fact "note" with this name."""
    s.note("note", name=name)


# -- control --


@step
def Repeat(s: ReplyStream, n: int | None, steps: Sequence[Step]) -> None:
    """`steps`, `n` times (None: for ever)."""
    count = 0
    while n is None or count < n:
        count += 1
        s.run(steps)


@step
def Turns(s: ReplyStream, turns: Sequence[Sequence[Step]]) -> None:
    """The steps of this turn of a tool conversation; the last repeats.

    Turns are counted by the assistant messages of the history that hold a tool call, in either
    mode.
    """
    assistants = [message for message in s.body["messages"] if message.get("role") == "assistant"]
    done = sum(1 for m in assistants if m.get("tool_calls") or "<tool_call>" in message_text(m))
    s.run(turns[min(done, len(turns) - 1)])


@step
def FreezeEndpoints(s: ReplyStream, frozen: bool = True) -> None:
    """From now on every endpoint but the chat one accepts and never answers."""
    s.server.frozen = frozen


@step
def KillSelf(s: ReplyStream, code: int = -signal.SIGKILL, log: Sequence[str] = ()) -> None:
    """Ends the process with `code` (negative: by that signal) after printing `log`; its connections
    break once it has ended."""
    # The system breaks them first, on a busy machine long before: a child holds them.
    ends = select.poll()
    ends.register(os.pidfd_open(os.getpid()), select.POLLIN)
    if os.fork() == 0:
        ends.poll(5000)
        os._exit(0)
    s.server.end(code, log)


@step
def StopSelf(s: ReplyStream) -> None:
    """SIGSTOP; the steps go on after a SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def plain_reply(*steps: Step, reason: str = "stop") -> list[Step]:
    """`steps` in a whole reply: headers and role before; finish, usage and `[DONE]` after."""
    return [Headers(), Role(), *steps, Finish(reason), Usage(), DoneMarker()]


def _report_progress(s: ReplyStream, processed: int, total: int) -> None:
    progress = {"total": total, "cache": 0, "processed": processed, "time_ms": 0}
    s.send(s.chunk({"role": "assistant", "content": None}, prompt_progress=progress))


def message_text(message: Json) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def last_prompt(messages: Sequence[Json]) -> str:
    """The last user message that is no result of a tool in prompted mode, without what the worker
    adds to it."""
    texts = (message_text(said) for said in reversed(messages) if said.get("role") == "user")
    prompt = next((text for text in texts if not text.startswith("<tool_response")), "")
    return prompt.partition("<worker_status>")[0]
