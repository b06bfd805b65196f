"""For tests of host programs: a llama-server that follows a script, and resolved futures.

The pytest plugin's fixtures `scripted_server` and `scripted_worker` are available wherever
llama_worker is installed. docs/how-to/testing.md shows a test.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from llama_worker import RestartPolicy, TimeoutProfile, WorkerConfig, free_port
from llama_worker.config.validation import shown
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.testing import scripts
from llama_worker.testing.scripts import *  # noqa: F403 - what its __all__ lists
from llama_worker.testing.scripts import JournalReader, Script, ScriptedReply, Step
from llama_worker.types.request import RequestFinishReason, RequestResult, RequestState

__all__ = ["Hold", "ScriptedServer", "failed", "request_result", "resolved", *scripts.__all__]

_HOST = "127.0.0.1"
_BEFORE_A_REPLY = ("Headers", "HttpError", "Redirect", "Raw", "Fin", "Reset", "Turns")
T = TypeVar("T")


class ScriptedServer:
    """A stand-in for llama-server: a real process with real sockets, which a worker starts and
    stops like the real one. Any thread may call.

    Replies may be added while the server runs. They are used in order, also across restarts, and
    the last one repeats. Without any the server says "Hello".

    Attributes:
        journal: what the server saw: requests, closed connections, signals, and more.
    """

    def __init__(self, folder: str | os.PathLike[str], script: Script | None = None) -> None:
        """Write the script to `folder`; nothing is started.

        Args:
            folder: for the script and the journal; empty, or not there yet.
            script: how the server starts and what else it does; replies are added by `reply`.
        """
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._script = script or Script()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards the script, and the file that holds it
        self.journal = JournalReader(self._folder / "journal")
        self._write()

    def config(self, *, slots: int = 2, port: int | None = None, **fields: Any) -> WorkerConfig:
        """The config of a worker on this server: a free port, quick restarts, short limits.

        `fields` are further fields of WorkerConfig. Use one server per worker.
        """
        port = free_port(_HOST) if port is None else port
        command = scripts.scripted_server_cmd(
            self._path, host=_HOST, port=port, slots=slots, journal=self.journal.path
        )
        usual: dict[str, Any] = {
            "name": "scripted",
            "timeouts": replace(TimeoutProfile.fast(), stop_grace_s=2.0),
            "restart": RestartPolicy(restart_backoff_s=0.05, backoff_max_s=0.2),
        }
        return WorkerConfig(
            host=_HOST, port=port, server_cmd=command, slots=slots, **usual | fields
        )

    def reply(
        self, *said: str | Step, to: str | None = None, times: int | None = 1, reason: str = "stop"
    ) -> None:
        """Add a reply.

        Args:
            said: text, and steps such as `Tokens(20, interval_s=0.05)`, `Reasoning("...")`,
                `ToolCall("add", {"a": 1})`, `KillSelf()` or `HttpError(500)`. They are wrapped into
                a whole reply, unless the first one replaces it (`Headers`, `HttpError`).
            to: for requests whose last user message contains this; None: for all others.
            times: how often; None: for ever.
            reason: the finish reason: `tool_calls` after tool calls, `length` for a cut reply.

        Raises:
            TypeError: an argument is neither text nor a step.
        """
        for each in said:
            if not isinstance(each, str) and not (isinstance(each, dict) and "do" in each):
                raise TypeError(f"a reply is made of str and of steps, not {shown(each)}")
        steps = [scripts.Text(each) if isinstance(each, str) else each for each in said]
        if not steps or steps[0]["do"] not in _BEFORE_A_REPLY:
            steps = scripts.plain_reply(*steps, reason=reason)
        added = ScriptedReply(steps, marker=to, times=times)
        with self._lock:
            self._script = replace(self._script, replies=(*self._script.replies, added))
            self._write()

    def hold(self) -> Hold:
        """A gate for a reply: the server waits there until the test calls `release`."""
        return Hold(self._folder, f"hold-{next(self._numbers)}", self.journal)

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The bodies of the chat requests so far, in order."""
        facts = self.journal.facts("request", path="/v1/chat/completions")
        return [fact["body"] for fact in facts]

    def wait_request(self, count: int = 1, timeout_s: float = 20.0) -> dict[str, Any]:
        """Wait for the body of the `count`-th chat request; TimeoutError if it does not come."""
        path = "/v1/chat/completions"
        fact = self.journal.wait("request", timeout=timeout_s, count=count, path=path)
        body: dict[str, Any] = fact["body"]
        return body

    @property
    def _path(self) -> Path:
        return self._folder / "script.json"

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(scripts.to_json(self._script)))
        new.replace(self._path)  # atomic: a server reads the old or the new script


class Hold:
    """A gate in a reply: `reply("Once", hold.step, " upon a time")`. Any thread may call."""

    def __init__(self, folder: Path, name: str, journal: JournalReader) -> None:
        self._gate = folder / name
        self._journal = journal
        self.step: Step = scripts.Repeat(1, [scripts.Note(name), scripts.Gate(str(self._gate))])

    def wait_reached(self, timeout_s: float = 20.0) -> None:
        """Block until the server waits there; TimeoutError if it does not."""
        self._journal.wait("note", timeout=timeout_s, name=self._gate.name)

    def release(self) -> None:
        """Let the server go on, now and each time it comes here again."""
        self._gate.touch()


def resolved(value: T) -> WorkerFuture[T]:
    """A future that is resolved. For one that resolves later, make a `WorkerFuture()` and call its
    `answer(value)` or `fail(error)` from any thread."""
    future: WorkerFuture[T] = WorkerFuture()
    future.answer(value)
    return future


def failed(error: BaseException) -> WorkerFuture[Any]:
    """A future whose `get` raises the error."""
    future: WorkerFuture[Any] = WorkerFuture()
    future.fail(error)
    return future


def request_result(text: str = "", **changes: Any) -> RequestResult:
    """The result of a completed request with this text; `changes` are other keys of it."""
    usual: RequestResult = {
        "ok": True,
        "request_id": 1,
        "job_name": "job",
        "state": RequestState.COMPLETED,
        "finish_reason": RequestFinishReason.STOP,
        "text": text,
        "reasoning": "",
        "signals": [],
        "tool_trace": [],
        "fail_reason": None,
        "conversation": [],
    }
    return cast("RequestResult", {**usual, **changes})
