"""Any program may broadcast to all of Pykka's actors: what is not theirs, a worker's actors drop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pykka
import pytest

from llama_worker import messages
from llama_worker.actors.base import members
from llama_worker.request.submission import Submission
from llama_worker.server.traits import ServerTraits
from llama_worker.stream.calls import ParsedCall
from llama_worker.types import RequestFailReason, WorkerState
from tests.actors.conftest import WAIT_S, GatePath, MakeWorker, Rig, eventually
from tests.fake_script import Gate, Headers, Text, WaitClose, plain_reply


class Ear:
    """A mailbox that hears nothing in these tests."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def tell(self, message: Any) -> bool:
        self.heard.append(message)
        return True


EAR = Ear()
CALL = ParsedCall("c00000001", "look", {}, "{}")
SUBMISSION = Submission(job_name="j", system_prompt="", user_prompt="x", params={}, messages=())
OURS: tuple[Any, ...] = (  # one at least of every mailbox; a few of them are of several
    messages.Launch(epoch=1),
    messages.Terminate(epoch=1, grace_s=0.0),
    messages.Exited(epoch=1, returncode=1, log_tail=()),
    messages.HealthLost(epoch=1, detail="a lie"),
    messages.OpenStream(turn_id=(1, 9), body={}, reply_to=EAR),
    messages.CloseAllStreams(epoch=1),
    messages.StreamClosed(turn_id=(1, 1), failure=None, at=0.0),
    messages.Begin(request_id=9, submission=SUBMISSION, transport=EAR, tools=EAR, prompted=False, opens_thinking=False),
    messages.Abandon(request_id=1, reason=RequestFailReason.UNKNOWN_ERROR, detail="a lie"),
    messages.RunTool(turn_id=(1, 1), job_name="j", call=CALL, reply_to=EAR),
    messages.DropTool(turn_id=(1, 1)),
    messages.StandDown(),
    messages.Probed(epoch=1, outcome=messages.ProbeOutcome.STRANGER, detail="a lie", traits=ServerTraits()),
    messages.Tick(),
)
MAILBOXES = (
    messages.WorkerMessage,
    messages.ProcessMessage,
    messages.TransportMessage,
    messages.RequestMessage,
    messages.ToolMessage,
    messages.WatchdogMessage,
)


def streaming(make_worker: MakeWorker, gate: GatePath) -> tuple[Rig, int]:
    rig = make_worker(slots=2)
    request = rig.submit(Headers(), Text("before "), Gate(gate.path), Text("after"), WaitClose())
    rig.wait_text(request, "before ")
    return rig, request


def assert_nothing_changed(
    rig: Rig, request: int, gate: GatePath, before: Any, actors: set[pykka.ActorRef[Any]]
) -> None:
    assert rig.status() == before
    assert set(pykka.ActorRegistry.get_all()) == actors
    gate.open()
    rig.wait_text(request, "before after")
    assert rig.run(*plain_reply(Text("fine")))["text"] == "fine"
    assert rig.worker.cancel(request).get(timeout=WAIT_S) is True
    events = [event["event"] for event in rig.worker.get_debug_info().get(timeout=WAIT_S)["recent_events"]]
    assert not {"actor_died", "restart"} & set(events)
    assert rig.status()["state"] is WorkerState.READY
    assert EAR.heard == []


def test_a_broadcast_changes_nothing(
    make_worker: MakeWorker, make_gate: Callable[[], GatePath], caplog: pytest.LogCaptureFixture
) -> None:
    gate = make_gate()
    rig, request = streaming(make_worker, gate)
    before, actors = rig.status(), set(pykka.ActorRegistry.get_all())
    foreign: tuple[Any, ...] = ("hello", {"command": "pykka_stop"}, None, 7, object())
    with caplog.at_level(logging.WARNING, logger="llama_worker"):
        for message in foreign:
            pykka.ActorRegistry.broadcast(message)
        dropped = "dropped a message that it does not know: "
        eventually(lambda: caplog.text.count(dropped) == len(foreign) * len(actors), "every actor's warnings")
    assert_nothing_changed(rig, request, gate, before, actors)


def test_a_message_of_ours_that_came_to_the_wrong_actor_changes_nothing(
    make_worker: MakeWorker, make_gate: Callable[[], GatePath], caplog: pytest.LogCaptureFixture
) -> None:
    gate = make_gate()
    rig, request = streaming(make_worker, gate)
    before, actors = rig.status(), set(pykka.ActorRegistry.get_all())
    strays = [(ref, message) for ref in actors for message in OURS if type(message) not in ref.actor_class.accepts]
    assert {ref for ref, _ in strays} == actors
    with caplog.at_level(logging.WARNING, logger="llama_worker"):
        for ref, message in strays:
            ref.tell(message)
        eventually(lambda: caplog.text.count("dropped a message") == len(strays), "every warning")
    assert_nothing_changed(rig, request, gate, before, actors)


def test_who_asks_an_actor_something_foreign_is_answered(make_worker: MakeWorker) -> None:
    rig = make_worker(start=False)
    for ref in pykka.ActorRegistry.get_all():
        assert ref.ask("hello", timeout=WAIT_S) is None
    assert rig.status()["state"] is WorkerState.STOPPED


def test_every_mailbox_is_among_the_strays() -> None:
    for mailbox in MAILBOXES:
        assert members(mailbox) & {type(message) for message in OURS}
