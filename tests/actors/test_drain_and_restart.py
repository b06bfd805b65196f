"""What else happens while a server is drained, and why it is restarted. When such calls resolve,
and what they leave, is the simulator's."""

from pathlib import Path

import pytest

from llama_worker import RequestRefused, RestartPolicy
from llama_worker.testing import scripts as fs
from tests.actors.conftest import WAIT_S, MakeWorker, Rig
from tests.conftest import OwnText
from tests.tables import cases

STRICT = RestartPolicy(
    transport_failures_before_restart=1,
    server_errors_before_restart=1,
    degenerate_outputs_before_restart=1,
)


@cases(
    "bad, policy",
    {
        "nothing": (fs.plain_reply()[1:], STRICT),
        "error": ([fs.ErrorData(500, "broken")], STRICT),
        "reset": ([fs.Reset()], STRICT),
        "a cause for a probe": ([fs.Reset()], RestartPolicy()),
    },
)
def test_no_ending_of_a_request_shortens_a_drain(
    make_worker: MakeWorker, tmp_path: Path, gate: Path, bad: list[fs.Step], policy: RestartPolicy
) -> None:
    rig = make_worker(slots=2, restart=policy)
    probes = rig.journal.facts("request", path="/v1/models")
    running = rig.submit(*fs.plain_reply(fs.Text("one "), fs.Gate(gate), fs.Text("two")))
    bad_gate = tmp_path / "bad"
    failing = rig.submit(fs.Headers(), fs.Gate(bad_gate), *bad)
    rig.wait_text(running, "one ")
    drained = rig.worker.drain()
    bad_gate.touch()
    assert rig.ended(failing)["text"] == ""
    assert rig.status()["draining"]
    gate.touch()
    assert rig.ended(running)["text"] == "one two"
    drained.get(timeout=WAIT_S)
    assert (rig.status()["state"], rig.status()["restart_count"]) == ("stopped", 0)
    assert rig.journal.facts("request", path="/v1/models") == probes


def test_tokens_are_counted_while_draining_but_not_stopping(rig: Rig, gate: Path) -> None:
    running = rig.submit(*fs.plain_reply(fs.Gate(gate)))
    rig.worker.drain()
    assert rig.worker.count_tokens("", "Hello?").get(timeout=WAIT_S)["ok"]
    gate.touch()
    rig.ended(running)
    with pytest.raises(RequestRefused, match="WORKER_"):
        rig.worker.count_tokens("", "Hello?").get(timeout=WAIT_S)


def test_a_restart_is_explained_by_any_str(rig: Rig) -> None:
    rig.worker.restart(OwnText("new weights")).get(timeout=WAIT_S)
    debug = rig.debug()
    assert debug["recent_restarts"][-1]["detail"] == "new weights"
    with pytest.raises(TypeError, match="reason must be a str"):
        rig.worker.restart(7).get(timeout=WAIT_S)  # type: ignore[arg-type]
    assert rig.status()["restart_count"] == 1
