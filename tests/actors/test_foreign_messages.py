"""Any program may broadcast to all of Pykka's actors: what is not theirs, a worker's actors drop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pykka
import pytest

from llama_worker import messages
from llama_worker.actors.base import members
from llama_worker.types import WorkerState
from tests.actors.conftest import WAIT_S, MakeGate, MakeWorker, eventually
from tests.fake_script import Gate, Headers, Text, WaitClose, plain_reply

MAILBOXES = (
    messages.WorkerMessage,
    messages.ProcessMessage,
    messages.TransportMessage,
    messages.RequestMessage,
    messages.ToolMessage,
    messages.WatchdogMessage,
)
OURS = frozenset[Any]().union(*map(members, MAILBOXES))


def theirs(ref: pykka.ActorRef[Any]) -> list[Any]:
    return ["hello", {"command": "pykka_stop"}, None, 7, object()]


def others(ref: pykka.ActorRef[Any]) -> list[Any]:
    """One of each kind that is another actor's; what is in it nobody reads."""
    return [kind(**dict.fromkeys(kind.__struct_fields__)) for kind in OURS - ref.actor_class.accepts]


@pytest.mark.parametrize("strays_for", [theirs, others], ids=["not ours", "another actor's"])
def test_messages_that_an_actor_does_not_know_change_nothing(
    make_worker: MakeWorker,
    make_gate: MakeGate,
    caplog: pytest.LogCaptureFixture,
    strays_for: Callable[[Any], list[Any]],
) -> None:
    gate, rig = make_gate(), make_worker(slots=2)
    request = rig.submit(Headers(), Text("before "), Gate(gate), Text("after"), WaitClose())
    rig.wait_text(request, "before ")
    before, actors = rig.status(), set(pykka.ActorRegistry.get_all())
    strays = {ref: strays_for(ref) for ref in actors}
    assert all(strays.values())
    with caplog.at_level(logging.WARNING, logger="llama_worker"):
        for ref, unknown in strays.items():
            for message in unknown:
                ref.tell(message)
        count = sum(map(len, strays.values()))
        dropped = "dropped a message that it does not know: "
        eventually(lambda: caplog.text.count(dropped) == count, "every actor's warnings")
    assert rig.status() == before
    assert set(pykka.ActorRegistry.get_all()) == actors
    gate.touch()
    rig.wait_text(request, "before after")
    assert rig.run(*plain_reply(Text("fine")))["text"] == "fine"
    assert rig.worker.cancel(request).get(timeout=WAIT_S) is True
    events = [event["event"] for event in rig.worker.get_debug_info().get(timeout=WAIT_S)["recent_events"]]
    assert not {"actor_died", "restart"} & set(events)
    assert rig.status()["state"] is WorkerState.READY


def test_who_asks_an_actor_something_foreign_is_answered(make_worker: MakeWorker) -> None:
    rig = make_worker(start=False)
    for ref in pykka.ActorRegistry.get_all():
        assert ref.ask("hello", timeout=WAIT_S) is None
    assert rig.status()["state"] is WorkerState.STOPPED
