"""A scripted stand-in for llama-server: real process, real sockets, every misbehaviour on demand.

    python -S -E scripted_llama_server.py --host H --port P --parallel N --script JSON [--journal FILE]

`llama_worker.testing.scripts` builds scripts and reads journals. Other llama-server flags are accepted and
ignored. One thread per connection, standard library only. The script: an object with the fields of
`scripts.Script`; a step of a reply: `{"do": NAME, ...}`, with the name and the arguments of one
of the functions marked `@step`.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec

Json = Any
Step = dict[str, Any]
P = ParamSpec("P")
JSON_TYPE = "application/json; charset=utf-8"
USUAL_ANSWER = {
    "status": 200,
    "body": None,
    "text": None,
    "hang": False,
    "reset": False,
    "times": None,
}
FLOOD_LINE = b"srv  fake: a line of log output that nobody asked for"
ROUTES = ("/v1/models", "/health", "/props", "/slots", "/apply-template", "/tokenize")


def error_body(code: int, message: str = "fake error", error_type: str = "server_error") -> Json:
    return {"error": {"code": code, "message": message, "type": error_type}}


def head(status: int, **headers: object) -> bytes:
    """Status line and headers of a response."""
    lines = [f"HTTP/1.1 {status} {'OK' if status == 200 else 'Status'}", "Server: llama.cpp"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


class ClientGone(Exception):
    """The client closed (or half-closed) its connection."""


class EndReply(Exception):
    """The script ended the reply: "complete", "fin" (no terminating chunk) or "reset"."""


class JournalWriter:
    """Appends one JSON line per observed fact; single writes, so that threads and children may
    share it."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(self, fact: str, **fields: Json) -> None:
        line = json.dumps({"fact": fact, "at": time.time(), **fields})
        # SIGKILL may cut a write short: the next line is whole again
        os.write(self._fd, f"\n{line}\n".encode())

    def count(self, fact: str) -> int:
        """How often it was noted, by servers before this one, too."""
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0).count(
            json.dumps({"fact": fact})[:-1].encode()
        )


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


def hung_up(sock: socket.socket, wait_s: float | None = 0.0) -> bool:
    """Whether the client has closed its end, or does so within `wait_s` (None: for ever)."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(None if wait_s is None else math.ceil(wait_s * 1000)))


class Stream:
    """One chat reply: framing, SSE records, and waits that notice the client's close at once."""

    def __init__(self, server: Server, sock: socket.socket, number: int, body: Json) -> None:
        self.server = server
        self.sock = sock
        self.number = number
        self.body = body
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
        if not self.headers_sent:
            self.run([Headers()])
        if self.framing == "chunked":
            self.wire(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece))
        else:
            self.wire(b"".join(pieces))

    def finish(self) -> None:
        """The regular end of a reply."""
        self.send()
        if self.framing == "chunked":
            self.wire(b"0\r\n\r\n")

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


STEPS: dict[str, Callable[..., None]] = {}


def step(play: Callable[Concatenate[Stream, P], None]) -> Callable[P, Step]:
    """Something that a reply can do. Played by the server; in a script, a call of its name
    describes it."""
    STEPS[play.__name__] = play
    names = play.__code__.co_varnames[1:]

    def describe(*args: P.args, **kwargs: P.kwargs) -> Step:
        return {"do": play.__name__, **dict(zip(names, args, strict=False)), **kwargs}

    return describe


# -- headers and framing --


@step
def Headers(
    s: Stream,
    status: int = 200,
    framing: Literal["chunked", "close", "length"] = "chunked",
    length: int | None = None,
) -> None:
    """Sends the response headers now; the first body step does it where no `Headers` came before.

    `framing`: "chunked", "close" (delimited by the end of the connection) or "length" (`length`
    bytes).
    """
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
    s: Stream, status: int, message: str = "fake error", error_type: str = "server_error"
) -> None:
    """Instead of a stream: a status with llama-server's error body."""
    content = json.dumps(error_body(status, message, error_type)).encode()
    s.send_headers(status, Content_Type=JSON_TYPE, Content_Length=len(content))
    s.wire(content)
    raise EndReply("complete")


@step
def Redirect(s: Stream, location: str, status: int = 302) -> None:
    s.send_headers(status, Location=location, Content_Length=0)
    raise EndReply("complete")


@step
def Fin(s: Stream) -> None:
    """Closes without the terminating chunk, or before Content-Length is reached."""
    raise EndReply("fin")


@step
def Reset(s: Stream) -> None:
    """Closes with a TCP reset."""
    raise EndReply("reset")


# -- records --


@step
def Role(s: Stream) -> None:
    """llama-server's first chunk: role and null content."""
    s.send(s.chunk({"role": "assistant", "content": None}))


@step
def Text(s: Stream, text: str) -> None:
    """One content delta."""
    s.send_deltas({"content": text})


@step
def Reasoning(s: Stream, text: str) -> None:
    s.send_deltas({"reasoning_content": text})


@step
def ToolCall(
    s: Stream,
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
def PromptProgress(s: Stream, processed: int, total: int) -> None:
    progress = {"total": total, "cache": 0, "processed": processed, "time_ms": 0}
    s.send(s.chunk({"role": "assistant", "content": None}, prompt_progress=progress))


@step
def Prefill(s: Stream, total: int, batch: int, interval_s: float) -> None:
    """Progress chunks from 0 to `total`, `interval_s` between them."""
    for processed in range(0, total + batch, batch):
        s.run([PromptProgress(min(processed, total), total)])
        if processed < total:
            s.wait(interval_s)


@step
def Finish(s: Stream, reason: str = "stop") -> None:
    s.send(s.chunk({}, reason, timings=s.timings()))


@step
def Usage(
    s: Stream, prompt_tokens: int = 10, completion_tokens: int | None = None, cached_tokens: int = 0
) -> None:
    """The usage chunk, `choices: []`; completion tokens default to the deltas sent."""
    completion = s.deltas if completion_tokens is None else completion_tokens
    usage = {
        "completion_tokens": completion,
        "prompt_tokens": prompt_tokens,
        "total_tokens": completion + prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    s.send(s.envelope([], usage=usage, timings=s.timings()))


@step
def DoneMarker(s: Stream) -> None:
    """`data: [DONE]`."""
    s.send(s.record("[DONE]"))


@step
def Tokens(
    s: Stream,
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
        next_at += interval_s * len(numbers)
        s.wait(max(0.0, next_at - time.monotonic()))


@step
def ErrorData(s: Stream, code: int = 500, message: str = "fake error") -> None:
    """`data: {"error": {...}}`; today's form."""
    s.send(s.record(error_body(code, message)))


@step
def ErrorField(s: Stream, code: int = 400, message: str = "fake error") -> None:
    """`error: {...}`; the old form, to be followed by `DoneMarker`."""
    s.send(s.record(error_body(code, message, "invalid_request_error")["error"], "error"))


@step
def Record(s: Stream, data: Json, cut: int | None = None) -> None:
    """Any record. Text data goes as it is, other data as JSON. `cut` keeps only so many first
    bytes."""
    s.send(s.record(data)[:cut])


@step
def Raw(s: Stream, data: str, framed: bool = True) -> None:
    """Characters of Latin-1 as bytes.

    Not `framed`: past the chunked framing, and, where no `Headers` came before, instead of a whole
    response.
    """
    if not framed and not s.headers_sent:
        s.headers_sent = True
        s.framing = "close"
    (s.send if framed else s.wire)(data.encode("latin-1"))


@step
def Newlines(s: Stream, kind: str) -> None:
    r"""The line ends of all records that follow: "\n", "\r\n" or "\r"."""
    s.newline = kind


@step
def PingEvery(s: Stream, every_s: float) -> None:
    """Keepalive comments from now on, beside whatever waits, burns or reads."""
    s.ping_every_s = every_s
    s.next_ping_at = time.monotonic() + every_s


# -- time and work --


@step
def Sleep(s: Stream, seconds: float) -> None:
    s.wait(seconds)


@step
def Burn(s: Stream, seconds: float | None, ticks_per_s: float = 100.0) -> None:
    """Burns CPU, silently: a whole core, or `ticks_per_s` (of 10 ms). None seconds: for ever."""
    work(seconds, s.wait, ticks_per_s)


@step
def DiskReads(s: Stream, seconds: float) -> None:
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
def WaitClose(s: Stream) -> None:
    """Silence until the client closes."""
    s.wait(None)


@step
def Gate(s: Stream, path: str | os.PathLike[str]) -> None:
    """Waits until the file `path` exists."""
    while not os.path.exists(path):
        s.wait(0.02)


@step
def Note(s: Stream, name: str) -> None:
    """Journals the fact "note" with this name."""
    s.note("note", name=name)


# -- control --


@step
def Repeat(s: Stream, n: int | None, steps: Sequence[Step]) -> None:
    """`steps`, `n` times (None: for ever)."""
    count = 0
    while n is None or count < n:
        count += 1
        s.run(steps)


@step
def Turns(s: Stream, turns: Sequence[Sequence[Step]]) -> None:
    """The steps of this turn of a tool conversation; the last repeats.

    Turns are counted by the assistant messages of the history that hold a tool call, in either
    mode.
    """
    assistants = [message for message in s.body["messages"] if message.get("role") == "assistant"]
    done = sum(1 for m in assistants if m.get("tool_calls") or "<tool_call>" in message_text(m))
    s.run(turns[min(done, len(turns) - 1)])


@step
def FreezeEndpoints(s: Stream, frozen: bool = True) -> None:
    """From now on every endpoint but the chat one accepts and never answers."""
    s.server.frozen = frozen


@step
def KillSelf(s: Stream, code: int = -signal.SIGKILL, log: Sequence[str] = ()) -> None:
    """Ends the process with `code` (negative: by that signal) after printing `log`."""
    s.server.end(code, log)


@step
def StopSelf(s: Stream) -> None:
    """SIGSTOP; the steps go on after a SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def plain_reply(*steps: Step, reason: str = "stop") -> list[Step]:
    """`steps` in a whole reply: headers and role before; finish, usage and `[DONE]` after."""
    return [Headers(), Role(), *steps, Finish(reason), Usage(), DoneMarker()]


def message_text(message: Json) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def write_all(fd: int, data: bytes) -> None:
    """Blocks while the pipe is full, as the real server does; a reader that is gone is no error."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        pass


def read_request(file: Any) -> tuple[str, str, dict[str, str], bytes] | None:
    """Method, path, headers (lower-case names) and body; None at the end of the connection."""
    words = file.readline(65536).split()
    if len(words) < 2:
        return None
    headers: dict[str, str] = {}
    while line := file.readline(65536).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return (
        words[0].decode(),
        words[1].decode(),
        headers,
        file.read(int(headers.get("content-length", 0))),
    )


class Server:
    """The process: startup, endpoints, signals. `open_chats` and `stopping` decide when SIGTERM is
    obeyed."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.journal = JournalWriter(options.get("--journal", os.devnull))
        given = options["--script"]
        self._script_path = given[1:] if given.startswith("@") else None
        self.script = self._read_script() if self._script_path else json.loads(given)
        if launches := self.script["launches"]:
            self.script = launches[min(self.journal.count("launched"), len(launches) - 1)]
        self.host = options.get("--host", "127.0.0.1")
        self.port = int(options.get("--port", "8080"))
        self.parallel = int(options.get("--parallel", "4"))
        self.api_key = options.get("--api-key") or os.environ.pop("LLAMA_API_KEY", None)
        self.slots = threading.Semaphore(self.parallel if self.script["limit_slots"] else 1 << 30)
        self.loading = True
        self.frozen = False
        self.stopping = False
        self.open_chats: dict[int, socket.socket] = {}
        self.chats_seen = 0
        self._picks: dict[str, int] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None

    # -- life --

    def run(self) -> NoReturn:
        script, startup = self.script, self.script["startup"]
        signal.alarm(math.ceil(script["lifetime_s"]))
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        env = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("LLAMA", "GGML", "AIP_"))
        }
        ids = {"pid": os.getpid(), "ppid": os.getppid(), "pgid": os.getpgid(0), "sid": os.getsid(0)}
        self.journal.note("launched", env=env, **ids)
        for child in script["children"]:
            self._spawn_child(**child)
        self.log("build: 0 (fake)", *startup["log"])
        for flood in script["floods"]:
            threading.Thread(target=self._flood, kwargs=flood, daemon=True).start()
        for leave in script["exits"]:
            if leave["when"] == "after_s":
                threading.Timer(leave["after_s"], self.end, (leave["code"], leave["log"])).start()
        self._leave_if("before_bind")
        while startup["never_bind"]:
            signal.pause()
        time.sleep(startup["bind_delay_s"])
        self._listener = self._bind()
        self.journal.note("bound")
        self._leave_if("after_bind")
        threading.Thread(target=self._load, args=(startup,), daemon=True).start()
        while not self.stopping:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                break
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
        while True:
            signal.pause()

    def _bind(self) -> socket.socket:
        try:
            return socket.create_server((self.host, self.port), backlog=512)
        except OSError:
            where = f"hostname: {self.host}, port: {self.port}"
            self.end(1, [f"start: couldn't bind HTTP server socket, {where}"])

    def _load(self, startup: Json) -> None:
        work(startup["load_s"], time.sleep, startup["load_ticks_per_s"])
        self.loading = False
        self.log(f"main: server is listening on http://{self.host}:{self.port}")
        self.journal.note("ready")

    def log(self, *lines: str) -> None:
        if lines:
            write_all(2, "".join(line + "\n" for line in lines).encode())

    def end(self, code: int, log: Sequence[str] = ()) -> NoReturn:
        """Ends the process at once, with `code` or, where negative, by that signal."""
        self.log(*log)
        self.journal.note("exit", code=code)
        if code < 0:
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if (
                -code in (signal.SIGTERM, signal.SIGINT)
                and threading.current_thread() is threading.main_thread()
            ):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
            time.sleep(5)  # the signal may be taken by another thread
        os._exit(code & 0xFF)

    def _leave_if(self, when: str, count: int = 0) -> None:
        for leave in self.script["exits"]:
            if leave["when"] == when and (not count or leave["request"] == count):
                self.end(leave["code"], leave["log"])

    def _on_signal(self, number: int, _frame: object) -> None:
        connected = sum(not hung_up(sock) for sock in list(self.open_chats.values()))
        self.journal.note("signal", signal=signal.Signals(number).name, connected=connected)
        if self.script["ignore_term"]:
            return
        if self.loading:
            self.end(-number)
        if self.stopping:
            self.end(1)
        self.stopping = True
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.stopping and (not self.open_chats or not self.script["term_waits"]):
            time.sleep(self.script["term_delay_s"])
            self.end(0)

    def _spawn_child(self, kind: str, keep_output: bool) -> None:
        if pid := os.fork():
            if kind == "daemon":
                os.waitpid(pid, 0)
            return
        if kind != "group":
            os.setsid()
        if kind == "daemon" and os.fork():
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if not keep_output:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 2)
        signal.alarm(120)
        self.journal.note("child", kind=kind, pid=os.getpid(), pgid=os.getpgid(0), sid=os.getsid(0))
        while True:
            signal.pause()

    def _flood(self, lines_per_s: float | None, newline: bool) -> None:
        line = FLOOD_LINE + b"\n" * newline
        while True:
            write_all(2, line if lines_per_s else line * (65536 // len(line)))
            if lines_per_s:
                time.sleep(1 / lines_per_s)

    # -- requests --

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with sock, sock.makefile("rb") as file:
                while (request := read_request(file)) is not None:
                    if not self._answer_request(sock, *request):
                        break
        except (OSError, ValueError):
            pass

    def _answer_request(
        self, sock: socket.socket, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> bool:
        """True where the connection may carry another request."""
        path = target.partition("?")[0]
        is_chat = method == "POST" and path == "/v1/chat/completions"
        with self._lock:
            self.chats_seen += is_chat
            number = self.chats_seen if is_chat else None
        shown = {
            name: "***" if name == "authorization" else value for name, value in headers.items()
        }
        try:
            parsed = json.loads(body or b"null")
        except ValueError:
            parsed = body.decode("latin-1")
        self.journal.note(
            "request", n=number, method=method, path=target, headers=shown, body=parsed
        )
        answer = self._refusal(path, is_chat, headers)
        if answer is None and number is not None:
            self._chat(sock, number, parsed)
            return False
        answer = answer or self._endpoint(path.rpartition("/")[2].replace("-", "_"), parsed)
        if answer["hang"]:
            hung_up(sock, None)
            self.journal.note("client_closed", n=None, path=path, phase="before_headers")
            return False
        if answer["reset"]:
            return self._reset(sock)
        text, kind = answer["text"], "text/plain"
        if text is None:
            text, kind = json.dumps(answer["body"]), JSON_TYPE
        content = text.encode()
        sock.sendall(
            head(answer["status"], Content_Type=kind, Content_Length=len(content)) + content
        )
        return headers.get("connection", "").lower() != "close"

    def _refusal(self, path: str, is_chat: bool, headers: Mapping[str, str]) -> Json | None:
        if path not in ROUTES and not is_chat:
            status, said = 404, ("File Not Found", "not_found_error")
        elif (
            self.api_key
            and path != "/health"
            and headers.get("authorization") != f"Bearer {self.api_key}"
        ):
            status, said = 401, ("Invalid API Key", "authentication_error")
        elif self.loading:
            status, said = 503, ("Loading model", "unavailable_error")
        else:
            return None
        return {**USUAL_ANSWER, "status": status, "body": error_body(status, *said)}

    def _read_script(self) -> Json:
        """A file may change while the server runs; what it says of replies then counts."""
        assert self._script_path is not None
        with open(self._script_path, encoding="utf-8") as file:
            return json.load(file)

    def _pick(self, key: str, specs: Sequence[Json]) -> Json:
        """The spec for this use of `key`: each serves `times` uses (None: for ever), the last all
        others. Of a script in a file, uses by earlier launches count, too."""
        with self._lock:
            if self._script_path:
                use = self.journal.count(f"use of {key}")
                self.journal.note(f"use of {key}")
            else:
                use = self._picks[key] = self._picks.get(key, -1) + 1
        for spec in specs:
            if spec["times"] is None or use < spec["times"]:
                return spec
            use -= spec["times"]
        return specs[-1]

    def _endpoint(self, route: str, body: Json) -> Json:
        answer = dict(self._pick(route, self.script.get(route) or [USUAL_ANSWER]))
        answer["hang"] |= self.frozen
        if answer["body"] is None:
            answer["body"] = (
                self._default_body(route, body)
                if answer["status"] < 300
                else error_body(answer["status"])
            )
        return answer

    def _default_body(self, route: str, body: Json) -> Json:
        if route == "models":
            model = {
                "id": "fake",
                "object": "model",
                "created": int(time.time()),
                "owned_by": "llamacpp",
            }
            return {"object": "list", "data": [model]}
        if route == "health":
            return {"status": "ok"}
        if route == "slots":
            busy = min(len(self.open_chats), self.parallel)
            return [
                {"id": i, "n_ctx": 4096, "is_processing": i < busy} for i in range(self.parallel)
            ]
        if route == "tokenize":
            content = body.get("content", "") if isinstance(body, dict) else ""
            return {"tokens": list(range(len(str(content).split())))}
        if route == "apply_template":
            messages = body.get("messages", []) if isinstance(body, dict) else []
            turns = [
                f"<|im_start|>{m.get('role')}\n{message_text(m)}<|im_end|>\n" for m in messages
            ]
            return {"prompt": "".join(turns) + "<|im_start|>assistant\n"}
        caps = ("system_role", "tool_calls", "tools", "typed_content")
        return {
            "total_slots": self.parallel,
            "model_path": "fake.gguf",
            "chat_template": "{# fake #}",
            "chat_template_caps": {f"supports_{name}": True for name in caps},
            "default_generation_settings": {"n_ctx": 4096},
            "build_info": "b0-fake",
        }

    def _reset(self, sock: socket.socket) -> bool:
        """Makes the close that follows a reset."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False

    def _chat(self, sock: socket.socket, number: int, body: Json) -> None:
        with self._lock:
            self.open_chats[number] = sock
        self._leave_if("request", number)
        stream = Stream(self, sock, number, body)
        how = "client_closed"
        try:
            while not (gone := hung_up(sock)) and not self.slots.acquire(timeout=0.05):
                pass
            if gone:
                stream.gone()
                return
            try:
                self.journal.note("started", n=number)
                how = self._reply(stream, body)
            finally:
                self.slots.release()
        finally:
            if how == "reset":
                self._reset(sock)
            self.journal.note("reply_ended", n=number, how=how)
            with self._lock:
                del self.open_chats[number]
            self._end_if_idle()

    def _reply(self, stream: Stream, body: Json) -> str:
        try:
            stream.run(self._steps_for(body))
            stream.finish()
        except EndReply as end:
            return str(end)
        except ClientGone:
            return "client_closed"
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            # A mistake in the script: loud on every channel, so that no test passes by accident.
            self.log(f"fake script error: {error!r}")
            self.journal.note("script_error", n=stream.number, error=repr(error))
            if not stream.headers_sent:
                stream.wire(b"HTTP/1.1 599 Fake script error\r\nContent-Length: 0\r\n\r\n")
            return "script_error"
        return "complete"

    def _steps_for(self, body: Json) -> Sequence[Json]:
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return [HttpError(400, "key 'messages' not found")]
        if "scripted_reply" in body:
            return list(body["scripted_reply"])
        last = next(
            (
                message_text(said)
                for said in reversed(body["messages"])
                if said.get("role") == "user"
            ),
            "",
        )
        replies = (self._read_script() if self._script_path else self.script)["replies"]
        marker = next(
            (reply["marker"] for reply in replies if reply["marker"] and reply["marker"] in last),
            None,
        )
        fitting = [reply for reply in replies if reply["marker"] == marker]
        return (
            list(self._pick(f"reply {marker}", fitting)["steps"])
            if fitting
            else plain_reply(Text("Hello"))
        )


if __name__ == "__main__":
    Server(dict(zip(sys.argv, sys.argv[1:], strict=False))).run()
