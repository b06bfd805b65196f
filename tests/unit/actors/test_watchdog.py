"""What a WatchdogActor asks, and what becomes of it."""

from unittest.mock import Mock

import pykka
import pytest

from llama_worker.actors.base import LiveSet
from llama_worker.actors.watchdog import WatchdogActor
from llama_worker.mailbox import Tick
from llama_worker.server.health import FIRST_PROBE_S
from llama_worker.server.messages import Launch, Launched, Probed, ProbeOutcome, StopWatching
from llama_worker.server.roll_call import Member
from llama_worker.server.traits import ServerTraits
from tests.unit.config.cases import config

EPOCH = 1
MEMBER = Member(EPOCH, "watchdog", None)
READY = Probed(epoch=EPOCH, outcome=ProbeOutcome.READY, detail="told", traits=ServerTraits())


@pytest.mark.parametrize("is_ready", [False, True])
def test_what_is_asked_is_aborted_when_the_watch_is_over(is_ready: bool) -> None:
    now = 0.0
    runtime = Mock(now=lambda: now, probes_count=1)
    actor = WatchdogActor(Mock(), MEMBER, {}, LiveSet(), runtime, config())
    asked = runtime.look_at_slots if is_ready else runtime.probe_readiness
    actor.handle(Launch(epoch=EPOCH))
    actor.handle(Launched(epoch=EPOCH, pid=7))
    now = FIRST_PROBE_S
    actor.handle(Tick())
    if is_ready:
        actor.handle(READY)
    asked.assert_called_once()
    asked.return_value.abort.assert_not_called()
    actor.handle(StopWatching())
    asked.return_value.abort.assert_called_once_with()


def test_an_actor_that_gets_no_thread_is_not_waited_for() -> None:
    runtime, live = Mock(probes_count=1), LiveSet()
    runtime.run_actor.side_effect = RuntimeError("can't start new thread")
    before = {*pykka.ActorRegistry.get_all()}
    with pytest.raises(RuntimeError, match="can't start"):
        WatchdogActor.start(Mock(), MEMBER, {}, live, runtime, config())
    assert live.wait(0.0)
    assert not {*pykka.ActorRegistry.get_all()} - before


def test_an_actor_that_has_ended_does_not_die_again() -> None:
    parent = Mock()
    runtime = Mock(probes_count=1)
    actor = WatchdogActor(parent, MEMBER, {}, LiveSet(), runtime, config())
    actor.on_stop()
    error = ValueError("in what Pykka does behind the end")
    actor.on_failure(ValueError, error, None)
    parent.tell.assert_not_called()
