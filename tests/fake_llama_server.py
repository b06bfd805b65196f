"""A scripted stand-in for llama-server: real process, real sockets, every misbehaviour on demand.

    python -S -E fake_llama_server.py --host H --port P --parallel N --script JSON [--journal FILE]

`tests/fake_script.py` builds scripts and reads journals. Other llama-server flags are accepted and ignored.
One thread per connection, blocking polls, standard library only. The script format: an object with the
fields of `fake_script.Script`; a step is `{"do": NAME, ...}`, where NAME is a function `do_NAME` below.
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
from typing import Any, NoReturn

Json = Any
JSON_TYPE = "application/json; charset=utf-8"
ROUTES = {
    "/v1/models": "models",
    "/models": "models",
    "/health": "health",
    "/props": "props",
    "/slots": "slots",
    "/apply-template": "apply_template",
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
}
REASONS = {
    200: "OK", 302: "Found", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
    500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip
DEFAULT_STEPS: list[Json] = [
    {"do": "headers"},
    {"do": "role"},
    {"do": "text", "text": "Hello"},
    {"do": "finish"},
    {"do": "usage"},
    {"do": "done_marker"},
]


def error_body(code: int, message: str = "fake error", error_type: str = "server_error") -> Json:
    return {"error": {"code": code, "message": message, "type": error_type}}


NO_SUCH_ROUTE = error_body(404, "File Not Found", "not_found_error")
LOADING = error_body(503, "Loading model", "unavailable_error")
BAD_KEY = error_body(401, "Invalid API Key", "authentication_error")


class ClientGone(Exception):
    """The client closed (or half-closed) its connection."""


class EndReply(Exception):
    """The script ended the reply. `how`: "complete", "fin" (no terminating chunk) or "reset"."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Journal:
    """Appends one JSON line per observed fact; single writes, so that threads and children may share it."""

    def __init__(self, path: str | None) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644) if path else None

    def note(self, fact: str, **fields: Json) -> None:
        if self._fd is not None:
            line = json.dumps({"fact": fact, "at": time.time(), **fields})
            os.write(self._fd, f"\n{line}\n".encode())  # SIGKILL may cut a write short: the next line is whole again


class DiskReader:
    """Reads real bytes from a disk: `read_bytes` in /proc/PID/io grows, CPU hardly does."""

    SIZE = 16 << 20

    def __init__(self) -> None:
        directory = os.environ.get("TMPDIR", "/tmp")
        path = f"{directory}/fake-llama-{os.getpid()}-{threading.get_ident()}"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
        os.write(self._fd, b"\xa5" * self.SIZE)
        os.fsync(self._fd)
        self._offset = 0

    def read(self, count_bytes: float) -> None:
        """Reads at least `count_bytes`."""
        while count_bytes > 0:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)  # out of the page cache
            done = len(os.pread(self._fd, 1 << 20, self._offset))
            self._offset = (self._offset + done) % self.SIZE
            count_bytes -= done

    def close(self) -> None:
        os.close(self._fd)


def spin_cpu(cpu_s: float) -> None:
    """Spends `cpu_s` seconds of this thread's CPU time."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        for _ in range(500):
            pass


def work(
    kind: str,
    seconds: float | None,
    pause: Callable[[float], object],
    ticks_per_s: float | None = None,
    bytes_per_s: float = 20e6,
) -> None:
    """Works for `seconds` (None: for ever) as "idle", "cpu" (None ticks: a whole core) or "disk"."""
    end_at = math.inf if seconds is None else time.monotonic() + seconds
    disk = DiskReader() if kind == "disk" else None
    try:
        while (now := time.monotonic()) < end_at:
            slice_end_at = min(now + 0.1, end_at)
            if kind == "cpu" and ticks_per_s is None:
                spin_cpu(min(0.005, end_at - now))
                pause(0.0)
                continue
            if kind == "cpu" and ticks_per_s is not None:
                spin_cpu(ticks_per_s / 100 * (slice_end_at - now))
            elif disk is not None:
                disk.read(bytes_per_s * (slice_end_at - now))
            else:
                slice_end_at = end_at
            pause(min(max(0.0, slice_end_at - time.monotonic()), 3600.0))
    finally:
        if disk is not None:
            disk.close()


def hung_up(sock: socket.socket) -> bool:
    """Whether the client has closed its end."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(0))


class Slots:
    """First come, first served; who waits blocks in a poll on its client's socket and an eventfd."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._free = count
        self._waiting: list[int] = []

    def acquire(self, client_fd: int) -> bool:
        """Blocks until a slot is ours; False where the client closed first."""
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return True
            ticket = os.eventfd(0)
            self._waiting.append(ticket)
        poller = select.poll()
        poller.register(client_fd, select.POLLRDHUP)
        poller.register(ticket, select.POLLIN)
        gone = any(fd == client_fd for fd, _ in poller.poll())
        with self._lock:
            granted = ticket not in self._waiting
            if not granted:
                self._waiting.remove(ticket)
            os.close(ticket)
        if gone and granted:
            self.release()
        return not gone

    def release(self) -> None:
        with self._lock:
            if self._waiting:
                os.eventfd_write(self._waiting.pop(0), 1)
            else:
                self._free += 1


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
        self.closed = False
        self._poller = select.poll()
        self._poller.register(sock, select.POLLRDHUP)

    # -- noticing the client --

    def gone(self, **more: Json) -> None:
        if not self.closed:
            self.closed = True
            phase = "streaming" if self.headers_sent else "before_headers"
            self.server.journal.note("client_closed", n=self.number, phase=phase, **more)

    def wait(self, seconds: float | None) -> None:
        """Sleeps (None: for ever), sending pings that are due; ends with ClientGone on a close."""
        end_at = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            now = time.monotonic()
            left = max(0.0, min(end_at, self.next_ping_at) - now)
            if self._poller.poll(None if left == math.inf else math.ceil(left * 1000)):
                self.gone()
                raise ClientGone
            now = time.monotonic()
            if now >= self.next_ping_at and self.ping_every_s is not None:
                self.next_ping_at = now + self.ping_every_s
                self.ping()
            if now >= end_at:
                return

    # -- bytes --

    def wire(self, data: bytes) -> None:
        """Bytes straight to the socket."""
        if self.server.journal_tokens and not select.select([], [self.sock], [], 0)[1]:
            self.server.journal.note("send_waits", n=self.number)  # for the client to read
        try:
            self.sock.sendall(data)
        except OSError as error:
            self.gone()
            raise ClientGone from error

    def send_headers(self, status: int, framing: str, length: int | None, **headers: str) -> None:
        self.framing = framing
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}", "Server: llama.cpp"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if framing == "chunked":
            lines.append("Transfer-Encoding: chunked")
        elif framing == "length":
            lines.append(f"Content-Length: {length}")
        self.headers_sent = True
        self.server.journal.note("headers", n=self.number)
        self.wire("\r\n".join([*lines, "", ""]).encode())

    def send(self, *pieces: bytes) -> None:
        """Body bytes, each piece a chunk of its own, all in one send."""
        if not self.headers_sent:
            do_headers(self)
        if self.framing == "chunked":
            self.wire(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece))
        else:
            self.wire(b"".join(pieces))

    def finish(self) -> None:
        """The regular end of a reply."""
        if not self.headers_sent:
            do_headers(self)
        if self.framing == "chunked":
            self.wire(b"0\r\n\r\n")

    # -- records --

    def record(self, data: Json, field: str = "data") -> bytes:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        return f"{field}: {text}{self.newline}{self.newline}".encode("utf-8", "replace")

    def chunk(self, delta: Json, finish_reason: str | None = None, extra: Json = None) -> Json:
        choice = {"finish_reason": finish_reason, "index": 0, "delta": delta}
        return self.envelope([choice], extra)

    def envelope(self, choices: Json, extra: Json = None) -> Json:
        return {
            "choices": choices,
            "created": int(time.time()),
            "id": f"chatcmpl-fake-{self.number}",
            "model": "fake",
            "system_fingerprint": "fake",
            "object": "chat.completion.chunk",
            **(extra or {}),
        }

    def deltas_sent(self, count: int = 1) -> None:
        if self.deltas == 0:
            self.server.journal.note("first_token", n=self.number)
        if self.server.journal_tokens:
            self.server.journal.note("token", n=self.number, i=self.deltas, count=count)
        self.deltas += count

    def delta(self, delta: Json) -> None:
        self.send(self.record(self.chunk(delta)))
        self.deltas_sent()

    def ping(self) -> None:
        self.send(f":{self.newline}{self.newline}".encode())

    def timings(self) -> Json:
        n = self.deltas
        return {
            "cache_n": 0, "prompt_n": 10, "prompt_ms": 10.0, "prompt_per_second": 1000.0,
            "predicted_n": n, "predicted_ms": n * 10.0, "predicted_per_second": 100.0,
        }  # fmt: skip


# -- steps: what a reply can do; their arguments are the fields of the step of that name in fake_script --


def run_steps(s: Stream, steps: Sequence[Json]) -> None:
    for spec in steps:
        fields = dict(spec)
        name = fields.pop("do", None)
        handler = STEPS.get(name)
        if handler is None:
            raise ValueError(f"unknown step {name!r}")
        handler(s, **fields)


def do_headers(s: Stream, status: int = 200, framing: str = "chunked", length: int | None = None) -> None:
    s.send_headers(status, framing, length, Content_Type="text/event-stream", Keep_Alive="timeout=5, max=100")


def do_role(s: Stream) -> None:
    s.send(s.record(s.chunk({"role": "assistant", "content": None})))


def do_text(s: Stream, text: str) -> None:
    s.delta({"content": text})


def do_reasoning(s: Stream, text: str) -> None:
    s.delta({"reasoning_content": text})


def do_tool_call(
    s: Stream,
    name: str,
    arguments: Json = "{}",
    call_id: str = "call00001",
    index: int = 0,
    pieces: int = 1,
) -> None:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    size = max(1, math.ceil(len(text) / pieces))
    parts = [text[at : at + size] for at in range(0, len(text), size)] or [""]
    for position, part in enumerate(parts):
        call: dict[str, Json] = {"index": index, "function": {"arguments": part}}
        if position == 0:
            call |= {"type": "function", "id": call_id}
            call["function"]["name"] = name
        s.delta({"tool_calls": [call]})


def do_prompt_progress(s: Stream, processed: int, total: int) -> None:
    progress = {"total": total, "cache": 0, "processed": processed, "time_ms": 0}
    delta = {"role": "assistant", "content": None}
    s.send(s.record(s.chunk(delta, extra={"prompt_progress": progress})))


def do_prefill(s: Stream, total: int, batch: int, interval_s: float, work_kind: str = "idle") -> None:
    for processed in range(0, total + batch, batch):
        do_prompt_progress(s, min(processed, total), total)
        if processed < total:
            work(work_kind, interval_s, s.wait)


def do_finish(s: Stream, reason: str = "stop") -> None:
    s.send(s.record(s.chunk({}, reason, {"timings": s.timings()})))


def do_usage(s: Stream, prompt_tokens: int = 10, completion_tokens: int | None = None, cached_tokens: int = 0) -> None:
    completion = s.deltas if completion_tokens is None else completion_tokens
    usage = {
        "completion_tokens": completion,
        "prompt_tokens": prompt_tokens,
        "total_tokens": completion + prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    s.send(s.record(s.envelope([], {"usage": usage, "timings": s.timings()})))


def do_done_marker(s: Stream) -> None:
    s.send(s.record("[DONE]"))


def do_tokens(
    s: Stream,
    n: int,
    interval_s: float = 0.0,
    text: str = "tok{i} ",
    start: int = 0,
    reasoning: bool = False,
    batch: int = 1,
) -> None:
    field = "reasoning_content" if reasoning else "content"
    next_at = time.monotonic()
    for first in range(start, start + n, batch):
        numbers = range(first, min(first + batch, start + n))
        records = []
        for i in numbers:
            said = text.replace("{i}", str(i)).replace("{at}", f"{time.time():.6f}")
            records.append(s.record(s.chunk({field: said})))
        s.send(*records)
        s.deltas_sent(len(numbers))
        next_at += interval_s * len(numbers)
        s.wait(max(0.0, next_at - time.monotonic()))


def do_lines(s: Stream, lines: Sequence[str], n: int = 1) -> None:
    for line in list(lines) * n:
        do_text(s, line + "\n")


def do_ping(s: Stream) -> None:
    s.ping()


def do_ping_every(s: Stream, every_s: float | None) -> None:
    s.ping_every_s = every_s
    s.next_ping_at = math.inf if every_s is None else time.monotonic() + every_s


def do_sleep(s: Stream, seconds: float) -> None:
    s.wait(seconds)


def do_burn(s: Stream, seconds: float | None, ticks_per_s: float | None = None) -> None:
    work("cpu", seconds, s.wait, ticks_per_s)


def do_disk_reads(s: Stream, seconds: float | None, bytes_per_s: float = 20e6) -> None:
    work("disk", seconds, s.wait, bytes_per_s=bytes_per_s)


def do_wait_close(s: Stream) -> None:
    s.wait(None)


def do_gate(s: Stream, path: str) -> None:
    while not os.path.exists(path):
        s.wait(0.02)


def do_note(s: Stream, name: str) -> None:
    s.server.journal.note("note", n=s.number, name=name)


def do_raw(s: Stream, pieces: Sequence[str], framed: bool = True) -> None:
    if not framed and not s.headers_sent:
        s.headers_sent = True
        s.framing = "close"
    for piece in pieces:
        (s.send if framed else s.wire)(piece.encode("latin-1"))


def do_record(s: Stream, data: Json, end: str | None = None, cut: int | None = None) -> None:
    body = s.record(data)
    if end is not None:
        body = body[: -2 * len(s.newline)] + end.encode("latin-1")
    s.send(body[:cut])


def do_newlines(s: Stream, kind: str) -> None:
    s.newline = kind


def do_error_data(s: Stream, code: int = 500, message: str = "fake error") -> None:
    s.send(s.record(error_body(code, message)))


def do_error_field(s: Stream, code: int = 400, message: str = "fake error") -> None:
    s.send(s.record(error_body(code, message, "invalid_request_error")["error"], "error"))


def do_http_error(s: Stream, status: int, message: str = "fake error", error_type: str = "server_error") -> NoReturn:
    content = json.dumps(error_body(status, message, error_type)).encode()
    s.send_headers(status, "length", len(content), Content_Type=JSON_TYPE)
    s.wire(content)
    raise EndReply("complete")


def do_redirect(s: Stream, location: str, status: int = 302) -> NoReturn:
    s.send_headers(status, "length", 0, Location=location)
    raise EndReply("complete")


def do_fin(s: Stream) -> NoReturn:
    raise EndReply("fin")


def do_reset(s: Stream) -> NoReturn:
    raise EndReply("reset")


def do_end(s: Stream) -> NoReturn:
    s.finish()
    raise EndReply("complete")


def do_repeat(s: Stream, n: int | None, steps: Sequence[Json]) -> None:
    count = 0
    while n is None or count < n:
        count += 1
        run_steps(s, steps)


def do_turns(s: Stream, turns: Sequence[Sequence[Json]]) -> None:
    """Which turn this is: the assistant messages in the history that hold a tool call, in either mode."""
    messages = s.body.get("messages", []) if isinstance(s.body, dict) else []
    assistants = [m for m in messages if isinstance(m, dict) and m.get("role") == "assistant"]
    done = sum(1 for m in assistants if m.get("tool_calls") or "<tool_call>" in message_text(m))
    run_steps(s, turns[min(done, len(turns) - 1)])


def do_freeze_endpoints(s: Stream, frozen: bool = True) -> None:
    s.server.frozen = frozen


def do_kill_self(s: Stream, signal_name: str = "SIGKILL") -> None:
    s.server.end(-int(signal.Signals[signal_name]))


def do_stop_self(s: Stream) -> None:
    s.server.journal.note("stopping_self", n=s.number)
    os.kill(os.getpid(), signal.SIGSTOP)


def do_exit_self(s: Stream, code: int, log: Sequence[str] = ()) -> None:
    s.server.end(code, log)


STEPS: dict[Any, Callable[..., None]] = {
    name.removeprefix("do_"): value for name, value in list(globals().items()) if name.startswith("do_")
}


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
    if "chunked" in headers.get("transfer-encoding", ""):
        pieces = []
        while size := int(file.readline().split(b";")[0], 16):
            pieces.append(file.read(size))
            file.readline()
        file.readline()
        body = b"".join(pieces)
    else:
        body = file.read(int(headers.get("content-length", 0)))
    return words[0].decode(), words[1].decode(), headers, body


class Server:
    """The process: startup, endpoints, signals. `open_chats` and `stopping` decide when SIGTERM is obeyed."""

    def __init__(self, options: Mapping[str, str], script: Json, launch: int) -> None:
        self.options = options
        self.script = script
        self.launch = launch
        self.journal = Journal(options.get("--journal"))
        self.journal_tokens = bool(script.get("journal_tokens"))
        self.host = options.get("--host", "127.0.0.1")
        self.port = int(options.get("--port", "8080"))
        self.parallel = int(options.get("--parallel") or options.get("-np") or "4")
        self.api_key = options.get("--api-key") or os.environ.get("LLAMA_API_KEY")
        self.slots = Slots(self.parallel if script.get("limit_slots", True) else 1 << 30)
        self.loading = True
        self.frozen = False
        self.stopping = False
        self.open_chats: dict[int, socket.socket] = {}
        self.chats_seen = 0
        self.chats_done = 0
        self._picks: dict[str, int] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None

    # -- life --

    def run(self) -> NoReturn:
        startup = self.script.get("startup", {})
        signal.alarm(max(1, math.ceil(self.script.get("lifetime_s", 3600))))
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        watched = ("LLAMA", "GGML", "AIP_", "FAKE_")
        env = {k: "***" if "KEY" in k else v for k, v in os.environ.items() if k.startswith(watched)}
        ids = {"pid": os.getpid(), "ppid": os.getppid(), "pgid": os.getpgid(0), "sid": os.getsid(0)}
        self.journal.note("launched", launch=self.launch, env=env, cwd=os.getcwd(), **ids)
        for child in self.script.get("children", []):
            self._spawn_child(child)
        self.log("build: 0 (fake)", *startup.get("log", []))
        for flood in self.script.get("floods", []):
            threading.Thread(target=self._flood, args=(flood,), daemon=True).start()
        for leave in self.script.get("exits", []):
            if leave["when"] == "after_s":
                threading.Thread(target=self._leave_later, args=(leave,), daemon=True).start()
        self._leave_if("before_bind")
        if startup.get("never_bind"):
            while True:
                signal.pause()
        time.sleep(startup.get("bind_delay_s", 0.0))
        self._listener = self._bind()
        self.journal.note("bound", port=self.port)
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
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
            listener.listen(512)
        except OSError:
            where = f"hostname: {self.host}, port: {self.port}"
            self.end(1, [f"start: couldn't bind HTTP server socket, {where}"])
        return listener

    def _load(self, startup: Json) -> None:
        kind, ticks = startup.get("load_work", "idle"), startup.get("load_ticks_per_s")
        work(kind, startup.get("load_s", 0.0), time.sleep, ticks, startup.get("load_bytes_per_s", 20e6))
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
            if -code in (signal.SIGTERM, signal.SIGINT) and threading.current_thread() is threading.main_thread():
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
            time.sleep(5)  # the signal may be taken by another thread
        os._exit(code & 0xFF)

    def _leave_if(self, when: str, count: int = 0) -> None:
        for leave in self.script.get("exits", []):
            if leave["when"] == when and (not count or leave.get("request", 1) == count):
                self.end(leave["code"], leave.get("log", []))

    def _leave_later(self, leave: Json) -> None:
        time.sleep(leave.get("after_s", 0.0))
        self.end(leave["code"], leave.get("log", []))

    def _on_signal(self, number: int, _frame: object) -> None:
        connected = sum(not hung_up(sock) for sock in list(self.open_chats.values()))
        self.journal.note("signal", signal=signal.Signals(number).name, connected=connected)
        if self.script.get("ignore_term"):
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
        if self.stopping and (not self.open_chats or not self.script.get("term_waits", True)):
            time.sleep(self.script.get("term_delay_s", 0.0))
            self.end(0)

    def _spawn_child(self, child: Json) -> None:
        kind = child.get("kind", "group")
        pid = os.fork()
        if pid:
            if kind == "daemon":
                os.waitpid(pid, 0)
            return
        if kind != "group":
            os.setsid()
        if kind == "daemon" and os.fork():
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            ignored = child.get("ignore_term", True)
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        if not child.get("keep_output", True):
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 2)
        signal.alarm(120)
        self.journal.note("child", kind=kind, pid=os.getpid(), pgid=os.getpgid(0), sid=os.getsid(0))
        while True:
            signal.pause()

    def _flood(self, spec: Json) -> None:
        line = spec["line"].encode("latin-1") + (b"\n" if spec.get("newline", True) else b"")
        rate = spec.get("lines_per_s")
        begun_at, written = time.monotonic(), 0
        while True:
            if rate is None:
                write_all(2, line * max(1, 65536 // len(line)))
                continue
            due = int((time.monotonic() - begun_at) * rate) + 1 - written
            write_all(2, line * due)
            written += due
            time.sleep(max(0.02, 1 / rate))

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
        route = ROUTES.get(path, "")
        is_chat = route == "chat" and method == "POST"
        with self._lock:
            self.chats_seen += is_chat
            number = self.chats_seen
        secret = ("authorization", "x-api-key")
        shown = {name: "***" if name in secret else value for name, value in headers.items()}
        parsed = self._parse(body)
        what = {"method": method, "path": target, "headers": shown, "body": parsed}
        self.journal.note("request", n=number if is_chat else None, **what)
        refusal = self._refusal(route, headers)
        if refusal is not None:
            return self._respond(sock, headers, *refusal)
        if is_chat:
            self._chat(sock, number, parsed)
            return False
        if self.frozen:
            return self._hang(sock, path)
        return self._endpoint(sock, route, path, headers, parsed)

    def _parse(self, body: bytes) -> Json:
        try:
            return json.loads(body) if body else None
        except ValueError:
            return {"unparsed": body.decode("latin-1")}

    def _refusal(self, route: str, headers: Mapping[str, str]) -> tuple[int, Json] | None:
        if not route:
            return 404, NO_SUCH_ROUTE
        if self.api_key and route != "health":
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if self.api_key not in (given, headers.get("x-api-key")):
                return 401, BAD_KEY
        return (503, LOADING) if self.loading else None

    def _respond(
        self, sock: socket.socket, headers: Mapping[str, str], status: int, body: Json, text: str | None = None
    ) -> bool:
        content = (json.dumps(body) if text is None else text).encode()
        kind = JSON_TYPE if text is None else "text/plain"
        head = f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\nServer: llama.cpp\r\n"
        head += f"Content-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
        sock.sendall(head.encode() + content)
        return headers.get("connection", "").lower() != "close"

    def _hang(self, sock: socket.socket, path: str) -> bool:
        poller = select.poll()
        poller.register(sock, select.POLLRDHUP)
        poller.poll()
        self.journal.note("client_closed", n=None, path=path, phase="before_headers")
        return False

    def _pick(self, key: str, specs: Sequence[Json]) -> Json:
        """The spec for this use of `key`: each serves `times` uses (None: for ever), the last all others."""
        with self._lock:
            use = self._picks[key] = self._picks.get(key, -1) + 1
        for spec in specs:
            times = spec.get("times", 1 if key.startswith("reply") else None)
            if times is None or use < times:
                return spec
            use -= times
        return specs[-1]

    def _endpoint(self, sock: socket.socket, route: str, path: str, headers: Mapping[str, str], body: Json) -> bool:
        specs = self.script.get(route) or [{}]
        spec = self._pick(route, specs)
        if spec.get("hang"):
            return self._hang(sock, path)
        if spec.get("reset"):
            return self._reset(sock)
        status = spec.get("status", 200)
        given = spec.get("body")
        if given is None and spec.get("text") is None:
            given = self._default_body(route, body) if status < 300 else error_body(status)
        return self._respond(sock, headers, status, given, spec.get("text"))

    def _default_body(self, route: str, body: Json) -> Json:
        if route == "models":
            model = {"id": "fake", "object": "model", "created": int(time.time()), "owned_by": "llamacpp"}
            return {"object": "list", "data": [model]}
        if route == "health":
            return {"status": "ok"}
        if route == "slots":
            busy = min(len(self.open_chats), self.parallel)
            return [{"id": i, "n_ctx": 4096, "is_processing": i < busy} for i in range(self.parallel)]
        if route == "apply_template":
            messages = body.get("messages", []) if isinstance(body, dict) else []
            turns = [f"<|im_start|>{m.get('role')}\n{message_text(m)}<|im_end|>\n" for m in messages]
            return {"prompt": "".join(turns) + "<|im_start|>assistant\n"}
        caps = ("object_arguments", "parallel_tool_calls", "preserve_reasoning", "string_content")
        more = ("system_role", "tool_calls", "tools", "typed_content")
        return {
            "total_slots": self.parallel,
            "model_path": "fake.gguf",
            "chat_template": "{# fake #}",
            "chat_template_caps": {f"supports_{name}": True for name in (*caps, *more)},
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
            if not self.slots.acquire(sock.fileno()):
                stream.gone(queued=True)
            else:
                try:
                    self.journal.note("started", n=number)
                    how = self._reply(stream, body)
                finally:
                    self.slots.release()
        finally:
            if how == "reset":
                self._reset(sock)
            self.journal.note("reply_ended", n=number, how=how, deltas=stream.deltas)
            with self._lock:
                del self.open_chats[number]
                self.chats_done += 1
                done = self.chats_done
            self._leave_if("answered", done)
            self._end_if_idle()

    def _reply(self, stream: Stream, body: Json) -> str:
        try:
            run_steps(stream, self._steps_for(body))
            stream.finish()
        except EndReply as end:
            return end.how
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
            return [{"do": "http_error", "status": 400, "message": "key 'messages' not found"}]
        if isinstance(body.get("fake_script"), list):
            return list(body["fake_script"])
        users = [m for m in body["messages"] if isinstance(m, dict) and m.get("role") == "user"]
        last = message_text(users[-1]) if users else ""
        replies = self.script.get("replies", [])
        for marker in dict.fromkeys(reply["marker"] for reply in replies if reply.get("marker")):
            if marker in last:
                marked = [reply for reply in replies if reply.get("marker") == marker]
                return list(self._pick(f"reply {marker}", marked)["steps"])
        plain = [reply for reply in replies if not reply.get("marker")]
        return list(self._pick("reply", plain)["steps"]) if plain else DEFAULT_STEPS


def parse_options(argv: Sequence[str]) -> dict[str, str]:
    """The last value of each flag; flags that we do not know are kept and ignored."""
    options: dict[str, str] = {}
    for position, word in enumerate(argv):
        if word.startswith("--") and "=" in word:
            name, _, value = word.partition("=")
            options[name] = value
        elif word.startswith("-") and position + 1 < len(argv):
            options[word] = argv[position + 1]
    return options


def count_launch(path: str) -> int:
    """How many launches there were before this one, by a counter in the file `path`."""
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        before = int(os.read(fd, 32) or b"0")
        os.pwrite(fd, str(before + 1).encode(), 0)
    finally:
        os.close(fd)
    return before


def main(argv: Sequence[str]) -> NoReturn:
    options = parse_options(argv)
    script = json.loads(options.get("--script", "{}"))
    launch = 0
    if script.get("state_file"):
        launch = count_launch(script["state_file"])
    if script.get("launches"):
        script = script["launches"][min(launch, len(script["launches"]) - 1)]
    Server(options, script, launch).run()


if __name__ == "__main__":
    main(sys.argv[1:])
