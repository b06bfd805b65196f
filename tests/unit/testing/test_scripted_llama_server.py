"""The scripted server does what it advertises."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from llama_worker import testing
from llama_worker.testing import scripts as fs
from llama_worker.testing.scripted_llama_server import steps
from llama_worker.testing.scripted_llama_server.wire import JSON_TYPE
from tests.actors.conftest import WAIT_S

STEPS: dict[str, Any] = {
    name: getattr(testing, name) for name in testing.__all__ if hasattr(steps, name)
}
HOST = "127.0.0.1"
MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Fake:
    """A running fake server, with an API key and a child of each kind."""

    process: subprocess.Popen[bytes]
    journal: fs.JournalReader
    url: str

    def ask(self, path: str, body: Any = None, key: str = "sesame") -> requests.Response:
        """The response, of which only the head was read."""
        method, headers = "GET" if body is None else "POST", {"Authorization": f"Bearer {key}"}
        return requests.request(
            method, self.url + path, json=body, headers=headers, stream=True, timeout=WAIT_S
        )

    def chat(self, *steps: fs.Step, stream: bool | None = True) -> requests.Response:
        body = {"messages": MESSAGES, "scripted_reply": fs.steps_json(*steps)}
        given = {} if stream is None else {"stream": stream}
        return self.ask("/v1/chat/completions", body | given)


@pytest.mark.parametrize(
    ("name", "given", "more", "says"),
    [
        ("Tokens", (3,), {"intervall_s": 1}, "Tokens: got an unexpected keyword .*'intervall_s'"),
        ("Sleep", (), {}, "Sleep: missing a required argument: 'seconds'"),
        ("Sleep", (1, 2), {}, "Sleep: too many positional arguments"),
    ],
)
def test_a_step_that_cannot_be_played_is_refused(
    name: str, given: tuple[Any, ...], more: dict[str, Any], says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        STEPS[name](*given, **more)


@pytest.mark.parametrize("odd", [["a", "b"], 4, {"text": "a"}], ids=repr)
def test_a_reply_is_made_of_text_and_steps(odd: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"not {re.escape(repr(odd))}"):
        testing.ScriptedServer(tmp_path).reply("Once", odd)


def test_every_step_says_what_it_does() -> None:
    assert len(STEPS) > 20
    assert [name for name, step in STEPS.items() if not step.__doc__] == []


@pytest.fixture
def fake(
    tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fake]:
    monkeypatch.setenv("NO_PROXY", HOST)
    port, journal = free_port(), fs.JournalReader(tmp_path / "journal")
    script = fs.Script(
        children=[fs.ChildProcess("group"), fs.ChildProcess("session"), fs.ChildProcess("daemon")]
    )
    cmd = fs.scripted_server_cmd(script, host=HOST, port=port, slots=2, journal=journal.path)
    process = subprocess.Popen(
        [*cmd, "-m", "model.gguf", "--api-key", "sesame"], start_new_session=True
    )
    try:
        journal.wait("ready")
        yield Fake(process, journal, f"http://{HOST}:{port}")
    finally:
        process.kill()
        process.wait(WAIT_S)
        for child in journal.facts("child"):
            with suppress(ProcessLookupError):
                os.kill(child["pid"], signal.SIGKILL)


def test_endpoints_answer_as_llama_server_does(fake: Fake) -> None:
    asked = [
        ("/health", ""),
        ("/v1/models", ""),
        ("/v1/models", "sesame"),
        ("/v1/models/", ""),
        ("/v1/models/", "sesame"),
    ]
    told = [fake.ask(path, key=key).status_code for path, key in asked]
    assert told == [200, 401, 200, 401, 404]
    assert fake.ask("/props").json()["total_slots"] == len(fake.ask("/slots").json()) == 2
    assert (
        fake.ask("/apply-template", {"messages": MESSAGES}).json()["prompt"].endswith("assistant\n")
    )
    assert "sesame" not in fake.journal.path.read_text()


def test_a_mistake_in_a_script_is_loud(fake: Fake) -> None:
    refusal = fake.chat({"do": "nonsense"})
    assert refusal.status_code == 599
    assert "script error: KeyError('nonsense')" in refusal.text
    no_number: Any = "3"
    assert "script error: TypeError" in fake.chat(fs.Text("a"), fs.Tokens(no_number)).text
    assert len(fake.journal.facts("script_error")) == 2


@pytest.mark.parametrize(
    ("step", "least_ticks", "most_ticks_per_s", "least_bytes"),
    [
        (fs.Burn(60, ticks_per_s=8), 4, 13, 0),
        (fs.DiskReads(60), 0, 20, 5e6),
        (fs.WaitClose(), 0, 2, 0),
    ],
)
def test_work_shows_in_proc_as_it_should(
    fake: Fake, step: fs.Step, least_ticks: int, most_ticks_per_s: float, least_bytes: float
) -> None:
    process = psutil.Process(fake.process.pid)

    def used() -> tuple[float, int]:
        return 100 * sum(process.cpu_times()[:2]), process.io_counters().read_bytes

    with fake.chat(fs.Headers(), fs.Note("works"), step):
        fake.journal.wait("note")
        began_at, (ticks, read_bytes) = time.monotonic(), used()
        while time.monotonic() < began_at + 1.0 or (
            used()[0] < ticks + least_ticks or used()[1] < read_bytes + least_bytes
        ):
            time.sleep(0.01)  # of what it uses nobody is told
        took_s = time.monotonic() - began_at
        assert used()[0] - ticks <= most_ticks_per_s * took_s


# ---------------------------------------------------------------- replies in one piece


@pytest.mark.parametrize("stream", [False, None])
def test_who_wants_no_stream_gets_one_object(fake: Fake, stream: bool | None) -> None:
    call = fs.ToolCall("add", {"a": 1}, "id1", 0, 3)
    reply = fs.plain_reply(
        *(fs.PingEvery(0.01), fs.Prefill(8, 4, 0.02), fs.Reasoning("h"), fs.Reasoning("m")),
        *(fs.Text("\u2028Let "), fs.Tokens(2, text="{i}"), call, fs.ToolCall("now", index=1)),
        reason="tool_calls",
    )
    response = fake.chat(*reply, stream=stream)
    assert (response.status_code, response.headers["Content-Type"]) == (200, JSON_TYPE)
    assert response.headers["Content-Length"] == str(len(response.content))
    whole = response.json()
    assert whole["choices"] == [
        {
            "finish_reason": "tool_calls",
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "\u2028Let 01",
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "type": "function",
                        "id": call_id,
                        "function": {"name": name, "arguments": arguments},
                    }
                    for call_id, name, arguments in [
                        ("id1", "add", '{"a": 1}'),
                        ("call00001", "now", "{}"),
                    ]
                ],
            },
        }
    ]
    assert whole["object"] == "chat.completion"
    # what b11434 sends
    assert whole.keys() == {
        *("choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings")
    }
    assert whole["usage"]["completion_tokens"] == whole["timings"]["predicted_n"] == 9


def test_one_piece_is_sent_at_the_end(fake: Fake) -> None:
    early = fake.chat(fs.Text("a"), fs.Finish("length"), fs.Newlines("\r\n"), stream=False)
    (choice,) = early.json()["choices"]
    assert choice == {
        "finish_reason": "length",
        "index": 0,
        "message": {"role": "assistant", "content": "a"},
    }
    assert early.json()["usage"]["completion_tokens"] == 1
    for breaks in (fs.Fin(), fs.Reset()):
        with pytest.raises(requests.ConnectionError):
            fake.chat(*fs.plain_reply(fs.Text("a"), breaks), stream=False)
    assert len(fake.journal.facts("headers")) == 1


@pytest.mark.parametrize(
    ("reply", "status", "says"),
    [
        ([fs.HttpError(503, "busy")], 503, "busy"),
        ([fs.Headers(), fs.Text("a"), fs.ErrorData(500, "oh")], 500, "oh"),
        ([fs.Text("a"), fs.ErrorField(400, "oh"), fs.DoneMarker()], 400, "oh"),
        ([fs.Raw("HTTP/1.1 418 Tea\r\n\r\n{}", framed=False)], 418, "{}"),
    ],
)
def test_one_piece_may_be_an_error(
    fake: Fake, reply: list[fs.Step], status: int, says: str
) -> None:
    response = fake.chat(*reply, stream=False)
    assert (response.status_code, says in response.text) == (status, True)
    assert fake.journal.facts("script_error") == []


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ([fs.Text("a")], "needs a Finish"),
        ([fs.Raw("data: {"), fs.Finish()], "JSONDecodeError"),
        ([fs.Record("what", cut=4), fs.Finish()], "no record"),
        ([fs.Headers(503), fs.Text("a"), fs.Finish()], "HttpError(503), not Headers"),
        ([fs.Record({"choices": [3]}), fs.Finish()], "TypeError"),
    ],
)
def test_what_makes_no_whole_object_is_loud(fake: Fake, reply: list[fs.Step], says: str) -> None:
    refusal = fake.chat(*reply, stream=False)
    assert refusal.status_code == 599
    assert "script error: " in refusal.text
    assert says in refusal.text


def test_children_in_every_relation_outlive_the_server(fake: Fake) -> None:
    children = {
        kind: fake.journal.wait("child", kind=kind) for kind in ("group", "session", "daemon")
    }
    fake.process.terminate()
    assert fake.process.wait(WAIT_S) == 0
    assert children["group"]["pgid"] == fake.process.pid
    assert children["session"]["sid"] == children["session"]["pid"]
    assert children["daemon"]["sid"] not in (fake.process.pid, children["daemon"]["pid"])
    for child in children.values():
        os.kill(child["pid"], signal.SIGTERM)
    time.sleep(0.1)  # that they do not die of it is the claim
    assert psutil.STATUS_ZOMBIE not in [
        psutil.Process(child["pid"]).status() for child in children.values()
    ]
