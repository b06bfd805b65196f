"""What a ProcessActor reads of its server's processes, without a server."""

from unittest.mock import Mock

import pytest

from llama_worker.actors.base import LiveSet
from llama_worker.actors.process import ProcessActor
from llama_worker.server.messages import Exited, Launch, Launched, MeasureMemory, Terminate
from llama_worker.server.roll_call import Member
from tests.unit.config.cases import config

PID = 7


@pytest.mark.parametrize("has_ended", [False, True])
def test_nothing_is_read_of_a_gone_servers_pid(has_ended: bool) -> None:
    """It may be another program's by now. An order may cross the report of its end."""
    runtime = Mock(now=lambda: 0.0)
    actor = ProcessActor(Mock(), Member(1, "process", None), {}, LiveSet(), runtime, config())
    actor.handle(Launch(epoch=1))
    actor.handle(Launched(epoch=1, pid=PID))
    if has_ended:
        actor.handle(Exited(epoch=1, returncode=0, log_tail=()))
    actor.handle(MeasureMemory())
    actor.handle(Terminate(grace_s=0.0, keep_evidence=True))
    read = [call.args for call in runtime.anon_bytes.mock_calls]
    read += [call.args for call in runtime.process_evidence.mock_calls]
    assert read == ([] if has_ended else [(PID,), (PID,)])
