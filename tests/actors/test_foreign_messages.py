"""Any program may broadcast to all of Pykka's actors: what is not theirs, a worker's actors
drop."""

import logging
from pathlib import Path
from typing import Any

import pykka
import pytest

from llama_worker.testing.scripts import Gate, Headers, Text, WaitClose
from tests.actors.conftest import WAIT_S, Rig, eventually


def strays_for(ref: pykka.ActorRef[Any], known: frozenset[Any]) -> list[Any]:
    """What is not ours, and one of each kind that is another actor's; what is in it nobody
    reads."""
    others = [
        kind(**dict.fromkeys(kind.__struct_fields__)) for kind in known - ref.actor_class.accepts
    ]
    assert others
    return ["hello", {"command": "pykka_stop"}, None, 7, object(), *others]


def test_unknown_messages_change_nothing(
    rig: Rig, gate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = rig.submit(Headers(), Text("before "), Gate(gate), Text("after"), WaitClose())
    rig.wait_text(request, "before ")
    before, actors = rig.status(), set(pykka.ActorRegistry.get_all())
    known = frozenset[Any]().union(*(ref.actor_class.accepts for ref in actors))
    told: list[Any] = []
    dropped = "dropped an unknown message: "
    with caplog.at_level(logging.WARNING, logger="llama_worker"):
        for ref in actors:  # one after the other: only 1,000 log lines wait
            strays = strays_for(ref, known)
            for message in strays:
                ref.tell(message)
            told.extend(strays)
            eventually(lambda: caplog.text.count(dropped) == len(told), "the actor's warnings")
    for ref in actors:
        assert ref.ask("hello", timeout=WAIT_S) is None, "a question is answered with None"
    assert rig.status() == before
    assert set(pykka.ActorRegistry.get_all()) == actors
    gate.touch()
    rig.wait_text(request, "before after")
    assert rig.worker.cancel(request).get(timeout=WAIT_S) is True
    events = [event["event"] for event in rig.debug()["recent_events"]]
    assert not {"actor_died", "restart"} & set(events)
