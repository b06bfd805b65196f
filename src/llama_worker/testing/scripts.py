"""Scripts for `scripted_llama_server`, and a reader for its journal.

    reply = ScriptedReply([Headers(), Text("ab"), Sleep(0.5), Finish(), DoneMarker()])
    script = Script(replies=[reply])
    cmd = scripted_server_cmd(script, host="127.0.0.1", port=port, slots=1, journal=path)

The steps are the server's own functions that are marked `@step`. `steps_json` puts them into one
request: `params={"scripted_reply": steps_json(Text("a"), Finish())}`; they take precedence over the
server's own script. A reply ends regularly after its last step. Every waiting step notices at once
that the client closes, journals it and ends the reply.
"""

# ruff: noqa: F403, F405 - the steps come by a star import, whose names `__all__` lists
from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llama_worker.testing.scripted_llama_server.steps import *
from llama_worker.testing.scripted_llama_server.stream import Step as Step
from llama_worker.testing.scripted_llama_server.wire import Json as Json

# for hosts; the other steps are for the tests of this repository
__all__ = [
    "Answer", "Burn", "ChildProcess", "DoneMarker", "ErrorData", "Exit", "Fin", "Finish",
    "Flood", "FreezeEndpoints", "Headers", "HttpError", "JournalReader", "KillSelf",
    "Prefill", "PromptProgress", "Raw", "Reasoning", "Repeat", "Reset", "Role", "Script",
    "ScriptedReply", "Sleep", "Startup", "Step", "StopSelf", "Text", "Tokens", "ToolCall",
    "Turns", "Usage", "WaitClose", "plain_reply",
]  # fmt: skip

SERVER = Path(__file__).with_name("scripted_llama_server")


@dataclass(frozen=True)
class ScriptedReply:
    """A reply to requests whose last user message contains `marker`; None: to all others.

    Replies of one marker are used in order, each `times` times (None: for ever); the last repeats.
    """

    steps: Sequence[Step]
    marker: str | None = None
    times: int | None = 1


@dataclass(frozen=True)
class Answer:
    """An answer of a plain endpoint, `times` times (None: from then on; the last one repeats).

    `body`: JSON (None: what llama-server says); `text`: a plain-text body instead.
    """

    status: int = 200
    body: Json = None
    text: str | None = None
    hang: bool = False
    reset: bool = False
    times: int | None = None


@dataclass(frozen=True)
class Startup:
    """How the server starts. For `load_s` seconds (None: for ever) it answers 503, idle or at
    work; SIGTERM kills it meanwhile."""

    log: Sequence[str] = ()
    bind_delay_s: float = 0.0
    never_bind: bool = False
    load_s: float | None = 0.0
    load_ticks_per_s: float = 0.0  # 100: a whole core


@dataclass(frozen=True)
class Exit:
    """Ends the process with `code` (negative: by that signal) after printing `log`.

    "request": when chat request number `request` arrives; "after_s": `after_s` seconds after the
    launch.
    """

    code: int
    when: Literal["before_bind", "after_bind", "after_s", "request"]
    log: Sequence[str] = ()
    after_s: float = 0.0
    request: int = 1


@dataclass(frozen=True)
class ChildProcess:
    """A process spawned at launch, in the same group, another session, or double-forked into one;
    it ignores SIGTERM."""

    kind: Literal["group", "session", "daemon"]
    keep_output: bool = True


@dataclass(frozen=True)
class Flood:
    """Endless output of `lines_per_s` (None: as fast as the pipe takes it)."""

    lines_per_s: float | None = None
    newline: bool = True


@dataclass(frozen=True)
class Script:
    """What a server does; with `launches`, what each launch does in turn (the last repeats).

    Launches are counted in the journal. SIGTERM: `ignore_term` ignores it; `term_waits` waits until
    open chats are closed, as llama-server does (a second SIGTERM exits 1); `term_delay_s` passes
    before the exit.
    `limit_slots`: a request beyond `--parallel` waits silently. The process ends itself after
    `lifetime_s`.
    """

    startup: Startup = Startup()
    replies: Sequence[ScriptedReply] = ()
    models: Sequence[Answer] = ()
    slots: Sequence[Answer] = ()
    apply_template: Sequence[Answer] = ()
    tokenize: Sequence[Answer] = ()
    exits: Sequence[Exit] = ()
    children: Sequence[ChildProcess] = ()
    floods: Sequence[Flood] = ()
    limit_slots: bool = True
    ignore_term: bool = False
    term_waits: bool = True
    term_delay_s: float = 0.0
    journal_tokens: bool = False  # and every send that has to wait for the client
    lifetime_s: float = 3600.0
    launches: Sequence[Script] = ()


def to_json(value: Any) -> Json:
    """The JSON form of a script or a part of it."""
    return json.loads(
        json.dumps(value, default=lambda part: str(part) if isinstance(part, Path) else vars(part))
    )


def steps_json(*steps: Step) -> list[Json]:
    """Steps for a request's own `"scripted_reply"` key."""
    return list(to_json(steps))


def scripted_server_cmd(
    script: Script | Path, *, host: str, port: int, slots: int, journal: Path | str | None = None
) -> tuple[str, ...]:
    """The command for `WorkerConfig.server_cmd`."""
    if isinstance(script, Script) and script.launches and journal is None:
        raise ValueError("launches are counted in the journal: there is none")
    cmd = [sys.executable, "-S", "-E", str(SERVER)]
    cmd += ["--host", host, "--port", str(port), "--parallel", str(slots)]
    cmd += ["--script", f"@{script}" if isinstance(script, Path) else json.dumps(to_json(script))]
    return (*cmd, "--journal", str(journal)) if journal is not None else tuple(cmd)


class JournalReader:
    """Reads what a scripted server journals; the file may not exist yet. Many may read it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def facts(self, fact: str | None = None, /, **match: Json) -> list[dict[str, Json]]:
        """All complete lines so far whose fact is `fact` (None: any) and whose fields equal
        `match`."""
        data = self.path.read_bytes() if self.path.exists() else b""
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        facts = [
            json.loads(line) for line in lines if line.endswith(b"}") and line.startswith(b"{")
        ]
        wanted = match if fact is None else {"fact": fact, **match}
        return [each for each in facts if all(each.get(key) == wanted[key] for key in wanted)]

    def wait(
        self, fact: str, /, timeout: float = 5.0, count: int = 1, **match: Json
    ) -> dict[str, Json]:
        """Wait for the `count`-th such fact; TimeoutError, with the last facts, after `timeout`
        seconds."""
        end_at = time.monotonic() + timeout
        while True:
            facts = self.facts(fact, **match)
            if len(facts) >= count:
                return facts[count - 1]
            if time.monotonic() >= end_at:
                tail = "\n".join(str(seen)[:300] for seen in self.facts()[-20:])
                raise TimeoutError(
                    f"no {fact} {match} (number {count}) in {timeout} s; facts:\n{tail}"
                )
            time.sleep(0.01)
