"""Whatever happens to the upstream, the client is told the truth, in a form that it reads."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest

from llama_worker.responses import actor, app
from llama_worker.responses.messages import StopListening
from llama_worker.responses.proxy import ResponsesProxy, ResponsesProxyConfig
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.testing import scripts as fs
from tests.actors.conftest import WAIT_S, no_threads
from tests.conftest import Leftovers
from tests.responses.conftest import Client, MakeClient, Through, answer
from tests.tables import cases

Steps = list[fs.Step]
HALF: Steps = [fs.Headers(), fs.Role(), fs.Text("Once ")]


@cases(
    "fault",
    {
        "error record": [fs.ErrorData(500, "out of memory")],
        "error field, then [DONE]": [fs.ErrorField(400, "out of memory"), fs.DoneMarker()],
        "error record after the finish reason": [fs.Finish(), fs.ErrorData(500, "out of memory")],
        "end without the last chunk": [fs.Fin()],
        "reset": [fs.Reset()],
        "silent, regular end": [fs.Raw("0\r\n\r\n", framed=False), fs.Fin()],
        "truncated record": [fs.Raw("data: {")],
        "garbage": [fs.Record("no json")],
    },
)
@cases("open_item", {"text": [], "call": [fs.ToolCall("f", '{"a": 1', pieces=2)]})
def test_a_broken_stream_keeps_what_was_said(fake: Client, fault: Steps, open_item: Steps) -> None:
    events = fake.stream(*HALF, *open_item, *fault)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    whole = ["completed"] if open_item else []
    assert [item["status"] for item in events[-1]["response"]["output"]] == whole
    kept = fake.send("GET", f"/v1/responses/{events[-1]['response']['id']}").json["output"]
    assert [item["status"] for item in kept] == [*whole, "incomplete"]
    assert kept[0]["content"][0]["text"] == "Once "


@pytest.mark.parametrize(
    ("status", "kind", "error_type", "code"),
    [
        (400, "exceed_context_size_error", "invalid_request_error", "context_length_exceeded"),
        (401, "authentication_error", "authentication_error", None),
        (500, "server_error", "server_error", None),
        (503, "unavailable_error", "server_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_server_keeps_its_status(
    fake: Client, status: int, kind: str, error_type: str, code: str | None, stream: bool
) -> None:
    reply = fake.create(fs.HttpError(status, "because", kind), stream=stream)
    error = reply.json["error"]
    assert (reply.status, error["type"], error["code"]) == (status, error_type, code)
    assert ("retry-after" in reply.headers) == (status == 503)
    assert "because" in error["message"]


@pytest.mark.parametrize(
    ("status", "stated", "passed_on"),
    [(429, "30", "30"), (503, "30", "30"), (429, "soon", None), (503, "soon", "5")],
)
def test_the_upstream_says_when_to_try_again(
    through: Through, status: int, stated: str, passed_on: str | None
) -> None:
    headers = f"Retry-After: {stated}\r\n".encode()
    client, _ = through(answer(b"{}", b"%d No" % status, headers))
    reply = client.create()
    assert (reply.status, reply.headers.get("retry-after")) == (status, passed_on)


def test_an_absent_upstream_is_502(make_client: MakeClient, free_port: Callable[[], int]) -> None:
    client = make_client(upstream=f"http://127.0.0.1:{free_port()}")
    for reply in (client.create(), client.create(stream=True), client.send("GET", "/v1/models")):
        assert (reply.status, reply.json["error"]["code"]) == (502, "upstream_unreachable")


def test_a_broken_whole_reply_is_a_final_502(fake: Client) -> None:
    reply = fake.create(*HALF, fs.ErrorData(500, "out of memory"))
    assert (reply.status, reply.json["error"]["message"]) == (502, "out of memory")
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("depth", [195, 300, 960, 980])
def test_a_deep_body_is_taken_or_refused(fake: Client, depth: int) -> None:
    item = b'{"type": "function_call_output", "call_id": "c", "output": %b}' % (
        b"[" * depth + b"]" * depth
    )
    reply = fake.send("POST", "/v1/responses", b'{"input": [%b]}' % item)
    assert reply.status == (200 if depth < 200 else 400)
    if reply.status == 200:
        assert fake.send("GET", f"/v1/responses/{reply.json['id']}/input_items").status == 200
    assert fake.create().status == 200


def test_half_a_character_costs_only_itself(fake: Client) -> None:
    """JavaScript cuts strings within a pair of surrogates, and llama-server refuses the half."""
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "\ud83d"}'}
    assert fake.create(input=[{"role": "user", "content": "a\ud83d"}, called]).status == 200
    user, turn = fake.last_chat()["messages"]
    assert user["content"] == "a\ufffd"
    sent = turn["tool_calls"][0]["function"]["arguments"]
    assert sent == '{"malformed_arguments": "{\\"a\\": \\"\ufffd\\"}"}'
    halves = [{"type": "output_text", "text": half} for half in ("\ud83d", "\ude00")]
    user = {"role": "user", "content": "x"}
    fake.create(input=[user, {"role": "assistant", "content": halves}, user])
    assert fake.last_chat()["messages"][1]["content"] == "\U0001f600"


def test_a_fault_of_the_proxy_is_500(
    fake: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("hush")

    monkeypatch.setattr(app, "normalise", broken)
    reply = fake.create()
    assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
    assert "LookupError" in caplog.text
    assert "hush" not in caplog.text + reply.data.decode()


NOWHERE = ResponsesProxyConfig(upstream="http://127.0.0.1:1", port=0)


@pytest.fixture
def proxy() -> Iterator[ResponsesProxy]:
    with contextlib.closing(ResponsesProxy(NOWHERE)) as proxy:
        yield proxy


def test_a_proxy_that_cannot_be_made_leaves_nothing(leftovers: Leftovers) -> None:
    lacks = pytest.raises(RuntimeError, match="new thread")
    with no_threads("ResponsesProxyActor"), lacks:
        ResponsesProxy(NOWHERE)
    assert leftovers.wait_none() == []


def test_proxy_without_a_thread_says_so_and_closes(proxy: ResponsesProxy) -> None:
    with no_threads("responses"), pytest.raises(RuntimeError, match="new thread"):
        proxy.start().get(timeout=WAIT_S)


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_name_that_no_host_has_cannot_be_bound(host: str) -> None:
    not_bound = pytest.raises(OSError, match="not a host name")
    with contextlib.closing(ResponsesProxy(replace(NOWHERE, host=host))) as proxy, not_bound:
        proxy.start().get(timeout=WAIT_S)


@pytest.mark.parametrize("name", ["port", "base_url"])
def test_a_proxy_has_no_address_before_it_listens(proxy: ResponsesProxy, name: str) -> None:
    with pytest.raises(RuntimeError, match=r"does not listen yet: wait for start\(\).get\(\)"):
        getattr(proxy, name)
    proxy.start().get(timeout=WAIT_S)
    assert str(proxy.port) in str(getattr(proxy, name))
    proxy.close()
    assert str(proxy.port) in str(getattr(proxy, name))


def test_a_start_that_failed_is_not_tried_again(
    proxy: ResponsesProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_port = Mock(side_effect=OSError("Address already in use"))
    monkeypatch.setattr(actor, "SocketListener", no_port)
    for _ in range(2):
        with pytest.raises(OSError, match="in use"):
            proxy.start().get(timeout=WAIT_S)
    no_port.assert_called_once()


@cases(
    "end",
    {
        "being closed": lambda proxy: proxy.actor_ref.tell(StopListening(reply=WorkerFuture())),
        "closed": lambda proxy: (proxy.start().get(timeout=WAIT_S), proxy.close()),
    },
)
def test_closed_proxy_does_not_start(
    proxy: ResponsesProxy, end: Callable[[ResponsesProxy], object]
) -> None:
    end(proxy)
    with pytest.raises(RuntimeError, match="closed"):
        proxy.start().get(timeout=WAIT_S)


def test_proxy_whose_actor_is_stopped_does_not_start() -> None:
    """As by Pykka's `ActorRegistry.stop_all`."""
    with contextlib.closing(ResponsesProxy(NOWHERE)) as proxy:
        port = proxy.start()
        proxy.actor_ref.stop()
        with contextlib.suppress(RuntimeError):  # it may have started before
            port.get(timeout=WAIT_S)
