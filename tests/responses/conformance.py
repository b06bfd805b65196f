"""The tests of Open Responses' compliance suite, by its names: what each asks of a server, in our
own words and held to our own schemas."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from websockets.sync.client import connect
from websockets.sync.connection import Connection

from llama_worker.testing.scripts import Script, ScriptedReply, Text, ToolCall, plain_reply
from tests.responses.open_responses import SOCKET_ERROR, check_reply
from tests.responses.oracle import TERMINAL, check_events, check_response, read_sse

Json = dict[str, Any]
_WAIT_S = 300.0
_PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAE"
    "hQGAhKmMIQAAAABJRU5ErkJggg=="
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
CAPABLE = Script(
    replies=[
        ScriptedReply(
            plain_reply(
                ToolCall(name="get_weather", arguments={"place": "Oslo"}), reason="tool_calls"
            ),
            marker="weather",
            times=None,
        ),
        ScriptedReply(plain_reply(Text("Hel"), Text("lo")), times=None),
    ]
)
"""For a scripted server that answers as a model with tools and eyes would."""


class Api:
    """A server that is to conform."""

    def __init__(self, base_url: str) -> None:
        self.url = urlsplit(base_url)

    def post(self, path: str, body: Json) -> tuple[int, bytes]:
        address = (self.url.hostname or "", self.url.port)
        with contextlib.closing(http.client.HTTPConnection(*address, timeout=_WAIT_S)) as client:
            data = json.dumps(body).encode()
            client.request("POST", self.url.path + path, data, {"Content-Type": "application/json"})
            response = client.getresponse()
            return response.status, response.read()

    def create(self, *items: Json, **body: Any) -> Json:
        """A response in one piece, which is completed and says something."""
        status, data = self.post("/responses", {"model": "m", "input": list(items), **body})
        response: Json = json.loads(data)
        assert status == 200, response
        check_response(response)
        return _completed(response)

    @contextlib.contextmanager
    def socket(self) -> Iterator[Socket]:
        url = f"ws://{self.url.netloc}{self.url.path}/responses"
        with connect(url, open_timeout=_WAIT_S, proxy=None) as client:
            yield Socket(client)


class Socket:
    """A WebSocket on which one response is made after the other."""

    def __init__(self, client: Connection) -> None:
        self._client = client

    def create(self, **body: Any) -> Json:
        """Its final response."""
        events = self._turn(body)
        assert events[-1]["type"] != "error", events[-1]
        return _completed(check_events(events))

    def refused(self, **body: Any) -> Json:
        """Why there is none."""
        (event,) = self._turn(body)
        SOCKET_ERROR.validate(event)
        error: Json = event["error"]
        return error

    def _turn(self, body: Json) -> list[Json]:
        request = {"type": "response.create", "model": "m", "store": False, **body}
        self._client.send(json.dumps(request))
        events: list[Json] = []
        while not events or events[-1]["type"] not in (*TERMINAL, "error"):
            events.append(json.loads(self._client.recv(_WAIT_S)))
        return events


def _completed(response: Json) -> Json:
    assert response["status"] == "completed", response
    assert response["output"], response
    return response


def _said(role: str, text: str, **fields: str) -> Json:
    return {"type": "message", "role": role, "content": text, **fields}


# --- HTTP -----------------------------------------------------------------------------------------


def basic_response(api: Api) -> None:
    api.create(_said("user", "Greet me in three words."))


def streaming_response(api: Api) -> None:
    body = {"model": "m", "input": [_said("user", "Count to five.")], "stream": True}
    status, data = api.post("/responses", body)
    assert status == 200, data
    _completed(check_events(read_sse(data)))


def system_prompt(api: Api) -> None:
    api.create(_said("system", "Talk like a sailor."), _said("user", "Greet me."))


def multi_turn(api: Api) -> None:
    api.create(
        _said("user", "I am called Ada."),
        _said("assistant", "Good day, Ada."),
        _said("user", "What am I called?"),
    )


def tool_calling(api: Api) -> None:
    response = api.create(_said("user", "How is the weather in Oslo?"), tools=[WEATHER])
    assert "function_call" in {item["type"] for item in response["output"]}


def image_input(api: Api) -> None:
    parts = [
        {"type": "input_text", "text": "What is in the picture?"},
        {"type": "input_image", "image_url": _PNG},
    ]
    api.create({"type": "message", "role": "user", "content": parts})


def assistant_phase(api: Api) -> None:
    api.create(
        _said("assistant", "I look the number up.", phase="commentary"),
        _said("assistant", "It is seven.", phase="final_answer"),
        _said("user", "Say it again."),
    )


def response_output_phase_schema(api: Api) -> None:
    """Our schemas take both phases and no other; the suite's test needs no server either."""
    response = api.create(_said("user", "Hi"))
    (message,) = response["output"]
    for phase, good in (("commentary", True), ("final_answer", True), ("other", False)):
        item = {**message, "phase": phase}
        with contextlib.nullcontext() if good else _fails():
            check_reply(200, {**response, "output": [item]})


def compact_response(api: Api) -> None:
    body = {
        "model": "m",
        "prompt_cache_key": "key",
        "input": [
            _said("user", "We start on Monday, and tell the press first."),
            _said("assistant", "Monday it is, and the press knows before."),
        ],
    }
    compaction = _compacted(api, body)
    api.create(*compaction, _said("user", "When do we start?"))


def compact_missing_model(api: Api) -> None:
    status, data = api.post("/responses/compact", {"input": "Sum up."})
    assert status in (400, 422), data
    check_reply(status, json.loads(data))


def _compacted(api: Api, body: Json) -> list[Json]:
    status, data = api.post("/responses/compact", body)
    reply: Json = json.loads(data)
    check_reply(status, reply)
    assert (status, reply.get("object")) == (200, "response.compaction"), reply
    assert "compaction" in {item["type"] for item in reply["output"]}
    output: list[Json] = reply["output"]
    return output


@contextlib.contextmanager
def _fails() -> Iterator[None]:
    try:
        yield
    except Exception:
        return
    raise AssertionError("the schema takes what it should not")


# --- WebSocket ------------------------------------------------------------------------------------


def websocket_response(api: Api) -> None:
    with api.socket() as socket:
        socket.create(input=[_said("user", "Count to three.")])


def websocket_sequential_responses(api: Api) -> None:
    with api.socket() as socket:
        first, second = (socket.create(input=f"Say {word}.") for word in ("one", "two"))
    assert first["id"] != second["id"]


def websocket_continuation(api: Api) -> None:
    with api.socket() as socket:
        first = socket.create(input="The word is violet.")
        second = socket.create(input="Which word?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]


def websocket_reconnect_store_false_recovery(api: Api) -> None:
    with api.socket() as socket:
        first = socket.create(input="The word is ochre.")
    with api.socket() as socket:
        _is_unknown(socket, first["id"])
        socket.create(input="We begin anew.")


def websocket_previous_response_not_found(api: Api) -> None:
    with api.socket() as socket:
        _is_unknown(socket, "resp_that_never_was")


def websocket_failed_continuation_evicts_cache(api: Api) -> None:
    with api.socket() as socket:
        first = socket.create(input="The word is amber.")
        orphan = {"type": "function_call_output", "call_id": "call_none", "output": "nothing"}
        socket.refused(input=[orphan], previous_response_id=first["id"])
        _is_unknown(socket, first["id"])


def websocket_compact_new_chain(api: Api) -> None:
    output = _compacted(api, {"model": "m", "input": "The word is teal."})
    with api.socket() as socket:
        socket.create(input=[*output, _said("user", "Go on.")], tools=[])


def _is_unknown(socket: Socket, response_id: str) -> None:
    error = socket.refused(input="Go on.", previous_response_id=response_id)
    assert error["code"] == "previous_response_not_found", error


TESTS: dict[str, Callable[[Api], None]] = {
    test.__name__.replace("_", "-"): test
    for test in (
        basic_response,
        streaming_response,
        system_prompt,
        multi_turn,
        tool_calling,
        image_input,
        assistant_phase,
        response_output_phase_schema,
        compact_response,
        compact_missing_model,
        websocket_response,
        websocket_sequential_responses,
        websocket_continuation,
        websocket_reconnect_store_false_recovery,
        websocket_previous_response_not_found,
        websocket_failed_continuation_evicts_cache,
        websocket_compact_new_chain,
    )
}
