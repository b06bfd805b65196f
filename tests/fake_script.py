"""Scripts for `fake_llama_server.py`, typed, and a reader for its journal.

    script = Script(replies=[Reply([Headers(), Text("ab"), Sleep(0.5), Ping(), Finish(), DoneMarker()])])
    cmd = fake_server_cmd(script, host="127.0.0.1", port=port, slots=1, journal=path)

`steps_json` puts steps into one request: `params={"fake_script": steps_json(Text("a"), Finish())}`; they win
over the server's own script. A reply whose steps are used up ends regularly. Waits of every kind notice the
client's close at once, journal it and end the reply.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, dataclass_transform

Json = Any
SERVER = Path(__file__).with_name("fake_llama_server.py")
MAX_SCRIPT_BYTES = 120_000  # Linux: 131072 for one argument
Work = Literal["idle", "cpu", "disk"]


@dataclass_transform(frozen_default=True)
class Step:
    """Something that a reply does; the server's function of that name (`do_...`) carries it out.

    Every kind of step is a frozen dataclass.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


# -- headers and framing --


class Headers(Step):
    """Sends the response headers now; the first body step does it where no `Headers` came before.

    `framing`: "chunked", "close" (delimited by the end of the connection) or "length" (`length` bytes).
    """

    status: int = 200
    framing: Literal["chunked", "close", "length"] = "chunked"
    length: int | None = None


class HttpError(Step):
    """Instead of a stream: a status with llama-server's error body."""

    status: int
    message: str = "fake error"
    error_type: str = "server_error"


class Redirect(Step):
    location: str
    status: int = 302


class Fin(Step):
    """Closes without the terminating chunk, or before Content-Length is reached."""


class Reset(Step):
    """Closes with a TCP reset."""


class End(Step):
    """Ends the reply regularly, the steps that follow notwithstanding."""


# -- records --


class Role(Step):
    """llama-server's first chunk: role and null content."""


class Text(Step):
    """One content delta."""

    text: str


class Reasoning(Step):
    text: str


class ToolCall(Step):
    """A tool call in `pieces` deltas. `arguments`: an object, or text that is sent as it is."""

    name: str
    arguments: Json = "{}"
    call_id: str = "call00001"
    index: int = 0
    pieces: int = 1


class PromptProgress(Step):
    processed: int
    total: int


class Prefill(Step):
    """Progress chunks from 0 to `total`, `interval_s` of work of a kind between them."""

    total: int
    batch: int
    interval_s: float
    work_kind: Work = "idle"


class Finish(Step):
    reason: str = "stop"


class Usage(Step):
    """The usage chunk, `choices: []`; completion tokens default to the deltas sent."""

    prompt_tokens: int = 10
    completion_tokens: int | None = None
    cached_tokens: int = 0


class DoneMarker(Step):
    """`data: [DONE]`."""


class Tokens(Step):
    """`n` deltas, `interval_s` apart, `batch` of them in one send; in `text` {i} is the number, {at} the Unix time."""

    n: int
    interval_s: float = 0.0
    text: str = "tok{i} "
    start: int = 0
    reasoning: bool = False
    batch: int = 1


class Lines(Step):
    """The block of `lines`, `n` times; each line is a delta."""

    lines: Sequence[str]
    n: int = 1


class ErrorData(Step):
    """`data: {"error": {...}}`; today's form."""

    code: int = 500
    message: str = "fake error"


class ErrorField(Step):
    """`error: {...}`; the old form, to be followed by `DoneMarker`."""

    code: int = 400
    message: str = "fake error"


class Record(Step):
    """Any record. Text data goes as it is, other data as JSON.

    `end` replaces the blank line ("": unterminated); `cut` keeps only so many first bytes.
    """

    data: Json
    end: str | None = None
    cut: int | None = None


class Raw(Step):
    """Bytes as they are.

    Not `framed`: past the chunked framing, and, where no `Headers` came before, instead of a whole response.
    """

    pieces: Sequence[bytes]
    framed: bool = True


class Newlines(Step):
    r"""The line ends of all records that follow: "\n", "\r\n" or "\r"."""

    kind: str


class Ping(Step):
    """One keepalive comment."""


class PingEvery(Step):
    """Keepalives from now on, beside whatever waits, burns or reads; None ends them."""

    every_s: float | None


# -- time and work --


class Sleep(Step):
    seconds: float


class Burn(Step):
    """Burns CPU, silently: a whole core, or `ticks_per_s` (of 10 ms). None seconds: for ever."""

    seconds: float | None
    ticks_per_s: float | None = None


class DiskReads(Step):
    """Reads from the disk under $TMPDIR or /tmp, past the page cache, with little CPU."""

    seconds: float | None
    bytes_per_s: float = 20e6


class WaitClose(Step):
    """Silence until the client closes."""


class Gate(Step):
    """Waits until the file `path` exists."""

    path: Path | str


class Note(Step):
    """Journals the fact "note" with this name."""

    name: str


# -- control --


class Repeat(Step):
    """`steps`, `n` times (None: for ever)."""

    n: int | None
    steps: Sequence[Step]


class Turns(Step):
    """The steps of this turn of a tool conversation; the last repeats.

    Turns are counted by the assistant messages of the history that hold a tool call, in either mode.
    """

    turns: Sequence[Sequence[Step]]


class FreezeEndpoints(Step):
    """From now on every endpoint but the chat one accepts and never answers."""

    frozen: bool = True


class KillSelf(Step):
    signal_name: str = "SIGKILL"


class StopSelf(Step):
    """SIGSTOP; the steps go on after a SIGCONT."""


class ExitSelf(Step):
    code: int
    log: Sequence[str] = ()


# -- the server around the replies --


@dataclass(frozen=True, slots=True)
class Reply:
    """For requests whose last user message holds `marker`, or (None) for the others.

    Replies of one marker are used in order, each `times` times (None: for ever); the last repeats.
    """

    steps: Sequence[Step]
    marker: str | None = None
    times: int | None = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """What a plain endpoint answers, `times` times (None: from then on).

    `body`: JSON (None: what llama-server says); `text`: another body.
    """

    status: int = 200
    body: Json = None
    text: str | None = None
    hang: bool = False
    reset: bool = False
    times: int | None = None


@dataclass(frozen=True, slots=True)
class Startup:
    """`load_s`: answering 503 for so long (None: for ever), at work of a kind; SIGTERM kills meanwhile."""

    log: Sequence[str] = ()
    bind_delay_s: float = 0.0
    never_bind: bool = False
    load_s: float | None = 0.0
    load_work: Work = "idle"
    load_ticks_per_s: float | None = None
    load_bytes_per_s: float = 20e6


@dataclass(frozen=True, slots=True)
class Exit:
    """Ends the process with `code` (negative: by that signal) after printing `log`.

    "request": when chat request number `request` arrives; "answered": when so many have ended; "after_s":
    `after_s` seconds after the launch.
    """

    code: int
    when: Literal["before_bind", "after_bind", "after_s", "request", "answered"]
    log: Sequence[str] = ()
    after_s: float = 0.0
    request: int = 1


@dataclass(frozen=True, slots=True)
class Child:
    """A process spawned at launch, in the same group, another session, or double-forked into one."""

    kind: Literal["group", "session", "daemon"] = "group"
    ignore_term: bool = True
    keep_output: bool = True


@dataclass(frozen=True, slots=True)
class Flood:
    """Output without end: `lines_per_s` (None: as fast as the pipe takes it)."""

    line: bytes = b"srv  fake: a line of log output that nobody asked for"
    lines_per_s: float | None = None
    newline: bool = True


@dataclass(frozen=True, slots=True)
class Script:
    """One server; or, with `launches`, what each launch is in turn (the last repeats).

    Launches are counted in `state_file`. SIGTERM: `ignore_term`; `term_waits` until open chats are closed, as
    llama-server does (a second one exits 1); `term_delay_s` passes before the exit. `limit_slots`: a request
    beyond `--parallel` waits silently. The process ends itself after `lifetime_s`.
    """

    startup: Startup = Startup()
    replies: Sequence[Reply] = ()
    models: Sequence[Answer] = ()
    health: Sequence[Answer] = ()
    props: Sequence[Answer] = ()
    slots: Sequence[Answer] = ()
    apply_template: Sequence[Answer] = ()
    exits: Sequence[Exit] = ()
    children: Sequence[Child] = ()
    floods: Sequence[Flood] = ()
    limit_slots: bool = True
    ignore_term: bool = False
    term_waits: bool = True
    term_delay_s: float = 0.0
    journal_tokens: bool = False  # and every send that has to wait
    lifetime_s: float = 3600.0
    launches: Sequence[Script] = ()
    state_file: Path | str | None = None

    def __post_init__(self) -> None:
        if self.launches and self.state_file is None:
            raise ValueError("Script.launches needs a state_file to count launches in")


def to_json(value: Any) -> Json:
    """The JSON form of a script or a part of it; bytes become Latin-1 text."""
    if is_dataclass(value) and not isinstance(value, type):
        data = {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
        return {"do": step_name(type(value)), **data} if isinstance(value, Step) else data
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def step_name(step: type[Step]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", step.__name__).lower()


def steps_json(*steps: Step) -> list[Json]:
    """Steps for a request's own `"fake_script"` key."""
    return [to_json(step) for step in steps]


def plain_reply(*steps: Step, reason: str = "stop") -> list[Step]:
    """`steps` in a whole reply: headers and role before; finish, usage and `[DONE]` after."""
    return [Headers(), Role(), *steps, Finish(reason), Usage(), DoneMarker()]


def fake_server_cmd(
    script: Script, *, host: str, port: int, slots: int, journal: Path | str | None = None
) -> tuple[str, ...]:
    """The command for `WorkerConfig.server_cmd`."""
    text = json.dumps(to_json(script))
    if len(text) > MAX_SCRIPT_BYTES:
        raise ValueError(f"script of {len(text)} bytes: at most {MAX_SCRIPT_BYTES} fit into an argument")
    cmd = [sys.executable, "-S", "-E", str(SERVER)]
    cmd += ["--host", host, "--port", str(port), "--parallel", str(slots), "--script", text]
    return (*cmd, "--journal", str(journal)) if journal is not None else tuple(cmd)


class Journal:
    """What a fake server has seen so far; the file may not exist yet. Any number of readers."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def facts(self, fact: str | None = None, /, **match: Json) -> list[dict[str, Json]]:
        """All whole lines so far whose fact is `fact` (None: any) and whose fields equal `match`."""
        data = self.path.read_bytes() if self.path.exists() else b""
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        found = [json.loads(line) for line in lines if line.endswith(b"}") and line.startswith(b"{")]
        wanted = match if fact is None else {"fact": fact, **match}
        return [seen for seen in found if all(seen.get(key) == wanted[key] for key in wanted)]

    def wait(self, fact: str, /, timeout: float = 5.0, count: int = 1, **match: Json) -> dict[str, Json]:
        """The `count`-th such fact, waited for; TimeoutError with the last facts after `timeout` seconds."""
        end_at = time.monotonic() + timeout
        while True:
            found = self.facts(fact, **match)
            if len(found) >= count:
                return found[count - 1]
            if time.monotonic() >= end_at:
                tail = "\n".join(str(seen)[:300] for seen in self.facts()[-20:])
                raise TimeoutError(f"no {fact} {match} (number {count}) in {timeout} s; facts:\n{tail}")
            time.sleep(0.01)
