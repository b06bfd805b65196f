"""What a scenario plays on: a scripted server, a proxy in front of it, a home and a project of the client's own."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from llama_worker import free_port
from llama_worker.responses.proxy import ResponsesProxy, ResponsesProxyConfig
from llama_worker.responses.request import parse_body
from tests.fake_script import Journal, Reply, Script, Step, fake_server_cmd

HOST = "127.0.0.1"
PACKAGES = Path(__file__).parent / "npm"
MCP_SERVER = Path(__file__).with_name("mcp_server.py")
WAIT_S = 90.0
Json = dict[str, Any]


@dataclass
class Stage:
    """`bodies`: the requests for responses, as the client sent them."""

    proxy: ResponsesProxy
    journal: Journal
    home: Path
    project: Path
    bodies: list[Json]

    def chats(self) -> list[Json]:
        """The chat completions that the server was asked for."""
        asked = [fact for fact in self.journal.facts("request") if fact["path"] == "/v1/chat/completions"]
        return [fact["body"] for fact in asked]

    def messages(self, number: int = -1) -> list[Json]:
        """Of one of them."""
        found: list[Json] = self.chats()[number]["messages"]
        return found

    def tools(self, number: int = -1) -> set[str]:
        """The names of the tools that were offered in it."""
        return {tool["function"]["name"] for tool in self.chats()[number].get("tools", [])}

    def run(
        self, command: Sequence[str], env: dict[str, str], meanwhile: Callable[[subprocess.Popen[str]], object] | None
    ) -> Done:
        """Run a client to its end; `meanwhile` may do something to it."""
        full = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "dumb", **env}
        process = subprocess.Popen(
            command, cwd=self.project, env=full, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        overdue = threading.Timer(WAIT_S, lambda: os.killpg(process.pid, signal.SIGKILL))
        overdue.start()
        try:
            if meanwhile is not None:
                meanwhile(process)
            stdout, stderr = process.communicate()
        finally:
            overdue.cancel()
            with contextlib.suppress(ProcessLookupError):  # what it left behind
                os.killpg(process.pid, signal.SIGKILL)
        return Done(process.returncode, stdout, stderr)


@dataclass(frozen=True)
class Done:
    """What a client said: events in JSON, a line each."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def events(self) -> list[Json]:
        """Those of them that are."""
        return [json.loads(line) for line in self.stdout.splitlines() if line.startswith("{")]


@contextlib.contextmanager
def stage(*replies: Sequence[Step] | Reply, **config: Any) -> Iterator[Stage]:
    """`replies` in the order of the requests; the last one repeats."""
    script = Script(replies=[reply if isinstance(reply, Reply) else Reply(reply) for reply in replies])
    bodies: list[Json] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as stack:
        home, project = Path(folder, "home"), Path(folder, "project")
        for made in (home, project):
            made.mkdir()
        journal, port = Journal(Path(folder, "journal")), free_port()
        command = fake_server_cmd(script, host=HOST, port=port, slots=8, journal=journal.path)
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        stack.callback(server.kill)
        journal.wait("ready", timeout=WAIT_S)
        stack.enter_context(_recording(bodies))
        proxy_config = ResponsesProxyConfig(upstream=f"http://{HOST}:{port}", port=0, **config)
        proxy = stack.enter_context(ResponsesProxy(proxy_config))
        yield Stage(proxy, journal, home, project, bodies)


def _recording(bodies: list[Json]) -> Any:
    """The proxy keeps what it is sent, as long as this context lasts."""

    def parse_and_keep(data: bytes) -> Json:
        body = parse_body(data)
        bodies.append(copy.deepcopy(body))
        return body

    return mock.patch("llama_worker.responses.app.parse_body", parse_and_keep)
