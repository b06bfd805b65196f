"""What a scenario plays on: a scripted server, a proxy in front of it, a home and a project of the
client's own."""

import base64
import contextlib
import copy
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from llama_worker import LlamaWorker, TimeoutProfile, WorkerConfig, free_port
from llama_worker.responses.api.request import parse_body
from llama_worker.responses.proxy import ResponsesProxy, ResponsesProxyConfig
from llama_worker.testing.scripts import (
    JournalReader,
    Script,
    ScriptedReply,
    Step,
    scripted_server_cmd,
)
from tests.actors.conftest import HOST, fast_restart
from tests.responses.conftest import Json, scripted_server
from tests.scenarios.scenario import TIMEOUTS

PACKAGES = Path(__file__).parent / "npm/node_modules/.bin"
MCP_SERVER = Path(__file__).with_name("mcp_server.py")
RED_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEXHbQSACj/P8Fu7N9hAAAAAElFTkSuQmCC"
WAIT_S = 90.0
Meanwhile = Callable[[subprocess.Popen[str]], object]


@dataclass(frozen=True)
class Done:
    """What a client said: events in JSON, a line each."""

    returncode: int
    stdout: str
    stderr: str

    def events(self, kind: str) -> list[Json]:
        """Those of that type."""
        events = [json.loads(line) for line in self.stdout.splitlines() if line.startswith("{")]
        return [event for event in events if event["type"] == kind]


class Stage(contextlib.ExitStack):
    """For one scenario. `bodies`: the requests for responses, as the client sent them."""

    proxy: ResponsesProxy
    base_url: str  # of the proxy
    worker: LlamaWorker  # that is watched, if one is

    def __init__(self) -> None:
        super().__init__()
        folder = Path(self.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        self.home, self.project, self.journal = (
            folder / "home",
            folder / "project",
            JournalReader(folder / "journal"),
        )
        self.home.mkdir()
        self.project.mkdir()
        self.bodies: list[Json] = []
        self.patience_s = WAIT_S  # with a client

    def plays(self, *replies: Sequence[Step] | ScriptedReply, **config: Any) -> None:
        """Begin, with `replies` in the order of the requests; the last one repeats."""
        script = Script(
            replies=[
                reply if isinstance(reply, ScriptedReply) else ScriptedReply(reply)
                for reply in replies
            ]
        )
        url = self.enter_context(scripted_server(script, self.journal, port=free_port(), slots=8))
        self._serve(upstream=url, **config)

    def watches(self, script: Script, *, timeouts: TimeoutProfile = TIMEOUTS) -> None:
        """Begin, with a worker between the proxy and the server."""
        port = free_port()
        command = scripted_server_cmd(
            script, host=HOST, port=port, slots=4, journal=self.journal.path
        )
        config = WorkerConfig(
            "watched", HOST, port, command, slots=4, timeouts=timeouts, restart=fast_restart()
        )
        self.worker = self.enter_context(LlamaWorker(config))
        self._serve(worker=self.worker)

    def _serve(self, *, worker: LlamaWorker | None = None, **config: Any) -> None:
        self.enter_context(
            mock.patch("llama_worker.responses.app.parse_body", self._parse_and_keep)
        )
        self.proxy = self.enter_context(
            ResponsesProxy(ResponsesProxyConfig(port=0, **config), worker=worker)
        )
        self.base_url = self.proxy.base_url

    def _parse_and_keep(self, data: bytes) -> Json:
        body = parse_body(data)
        self.bodies.append(copy.deepcopy(body))
        return body

    def chats(self) -> list[Json]:
        """The chat completions that the server was asked for."""
        return [fact["body"] for fact in self.journal.facts("request", path="/v1/chat/completions")]

    def messages(self) -> list[Json]:
        """Of the last one."""
        found: list[Json] = self.chats()[-1]["messages"]
        return found

    def results(self) -> list[str]:
        """The results of tools in it."""
        return [str(message["content"]) for message in self.messages() if message["role"] == "tool"]

    def each_turn_begins_with_the_one_before(self) -> None:
        """What the server was sent for each turn is what it was sent for the one before, and
        more."""
        for before, after in pairwise(self.chats()):
            assert after["messages"][: len(before["messages"])] == before["messages"]
            assert after.get("tools") == before.get("tools")

    def paint(self) -> None:
        """red.png in the project."""
        (self.project / "red.png").write_bytes(base64.b64decode(RED_PNG))

    def has_shown_an_image(self) -> bool:
        """Whether the model was shown one."""
        parts = [
            part
            for message in self.messages()
            for part in message["content"] or ()
            if isinstance(part, dict)
        ]
        return any(
            part["type"] == "image_url" and part["image_url"]["url"].startswith("data:image/")
            for part in parts
        )

    def run(self, *command: str, meanwhile: Meanwhile | None = None, **env: str) -> Done:
        """Run a client to its end; `meanwhile` may do something to it."""
        full = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **env,
        }
        process = subprocess.Popen(
            command, cwd=self.project, env=full, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        overdue = threading.Timer(self.patience_s, lambda: os.killpg(process.pid, signal.SIGKILL))
        overdue.start()
        try:
            if meanwhile:
                meanwhile(process)
            stdout, stderr = process.communicate()
        finally:
            overdue.cancel()
            with contextlib.suppress(ProcessLookupError):  # what it left behind
                os.killpg(process.pid, signal.SIGKILL)
        return Done(process.returncode, stdout, stderr)
