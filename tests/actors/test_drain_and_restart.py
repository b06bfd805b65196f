"""Swapping and replacing a server: `drain`, `restart`, `wait_slot`, `release`, and what the status
says meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_worker import RequestRefused, RestartPolicy, WorkerStartError
from llama_worker.testing import scripts as fs
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, fast_restart
from tests.conftest import OwnText
from tests.tables import cases


def submit_error(rig: Rig) -> str | None:
    """Why a request is refused now; None: it was admitted."""
    answer = rig.worker.submit("job", "", "Hello?").get(timeout=WAIT_S)
    return None if answer["ok"] else answer["error"]


def refusal_of_a_slot(rig: Rig) -> str:
    with pytest.raises(RequestRefused) as refused:
        rig.worker.wait_slot().get(timeout=WAIT_S)
    return refused.value.error


# ------------------------------------------------------------ drain


def test_drain_loses_nothing_that_runs(make_worker: MakeWorker, gate: Path) -> None:
    rig = make_worker(slots=2)
    running = rig.submit(*fs.plain_reply(fs.Text("one "), fs.Gate(gate), fs.Text("two")))
    rig.wait_text(running, "one ")
    drained = rig.worker.drain()
    status = rig.status()
    assert (status["state"], status["draining"], status["slots_used"]) == ("ready", True, 1)
    assert submit_error(rig) == refusal_of_a_slot(rig) == "WORKER_DRAINING"
    assert not drained.done()
    gate.touch()
    assert drained.get(timeout=WAIT_S) is None
    status = rig.status()
    assert (status["state"], status["draining"]) == ("stopped", False)
    rig.wait_gone(0.0)
    assert rig.ended(running)["text"] == "one two"
    rig.start()
    assert rig.run(*fs.plain_reply(fs.Text("anew")))["text"] == "anew"


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
def test_no_ending_of_a_request_cuts_a_drain_short(
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


def test_stop_cuts_a_drain_short_and_start_begins_anew_after_it(rig: Rig) -> None:
    running = rig.submit(fs.Headers(), fs.Text("one"), fs.WaitClose())
    rig.wait_text(running, "one")
    drained = rig.worker.drain()
    rig.stop()
    assert drained.get(timeout=WAIT_S) is None
    result = rig.ended(running)
    assert (result["fail_reason"], result["text"]) == ("worker_stopped", "one")
    rig.start()
    running = rig.submit(fs.Headers(), fs.WaitClose())
    drained, started = rig.worker.drain(), rig.worker.start()
    waiting = rig.worker.wait_slot()
    rig.worker.cancel(running).get(timeout=WAIT_S)
    assert drained.get(timeout=WAIT_S) is None
    assert started.get(timeout=WAIT_S)["state"] == "ready"
    waiting.get(timeout=WAIT_S)


def test_tokens_are_counted_while_it_drains_and_not_while_it_stops(rig: Rig, gate: Path) -> None:
    running = rig.submit(*fs.plain_reply(fs.Gate(gate)))
    rig.worker.drain()
    assert rig.worker.count_tokens("", "Hello?").get(timeout=WAIT_S)["ok"]
    gate.touch()
    rig.ended(running)
    with pytest.raises(RequestRefused, match="WORKER_"):
        rig.worker.count_tokens("", "Hello?").get(timeout=WAIT_S)


# ------------------------------------------------------------ restart


def test_restart_replaces_the_server_at_once(make_worker: MakeWorker) -> None:
    rig = make_worker(restart=fast_restart(restart_backoff_s=1000.0, backoff_max_s=1000.0))
    running = rig.submit(fs.Headers(), fs.Text("one"), fs.WaitClose())
    rig.wait_text(running, "one")
    before = rig.status()["pid"]
    status = rig.worker.restart(OwnText("new weights")).get(timeout=WAIT_S)
    assert (status["state"], status["restart_count"]) == ("ready", 1)
    assert status["pid"] != before
    result = rig.ended(running)
    assert (result["fail_reason"], result["text"]) == ("worker_restarted", "one")
    assert "new weights" in result["fail_detail"]
    debug = rig.worker.get_debug_info().get(timeout=WAIT_S)
    assert debug["recent_restarts"][-1]["reason"] == "requested"
    assert debug["totals"]["restarts"] == {"requested": 1}


def test_restart_checks_its_reason(rig: Rig) -> None:
    with pytest.raises(TypeError, match="reason must be a str"):
        rig.worker.restart(7).get(timeout=WAIT_S)  # type: ignore[arg-type]
    assert rig.status()["restart_count"] == 0


# ------------------------------------------------------------ slots


def test_wait_slot_resolves_when_a_slot_is_free(make_worker: MakeWorker, gate: Path) -> None:
    rig = make_worker(slots=2)
    rig.worker.wait_slot().get(timeout=WAIT_S)
    first = rig.submit(*fs.plain_reply(fs.Gate(gate)))
    rig.submit(fs.Headers(), fs.WaitClose())
    waiting = [rig.worker.wait_slot() for _ in range(3)]
    rig.status()
    assert not any(each.done() for each in waiting)
    gate.touch()
    for each in waiting:
        each.get(timeout=WAIT_S)
    assert rig.ended(first)["state"] == "completed"


def test_wait_slot_outlasts_a_start_and_a_restart(make_worker: MakeWorker) -> None:
    rig = make_worker(start=False)
    assert refusal_of_a_slot(rig) == "WORKER_NOT_READY"
    started, waiting = rig.worker.start(), rig.worker.wait_slot()
    waiting.get(timeout=WAIT_S)
    assert started.done()
    restarted, waiting = rig.worker.restart(), rig.worker.wait_slot()
    waiting.get(timeout=WAIT_S)
    assert restarted.done()


def test_wait_slot_says_what_will_not_end_by_itself(make_worker: MakeWorker) -> None:
    rig = make_worker(fs.Script(exits=[fs.Exit(code=3, when="before_bind")]), start=False)
    started, waiting = rig.worker.start(), rig.worker.wait_slot()
    with pytest.raises(WorkerStartError):
        started.get(timeout=WAIT_S)
    with pytest.raises(RequestRefused, match="WORKER_FAILED"):
        waiting.get(timeout=WAIT_S)


# ------------------------------------------------------------ results nobody wants


def test_release_forgets_what_has_ended_and_nothing_else(make_worker: MakeWorker) -> None:
    rig = make_worker(slots=2)
    running = rig.submit(fs.Headers(), fs.WaitClose())
    ended = [rig.submit(*fs.plain_reply(fs.Text("x")))]
    rig.worker.result(ended[0])
    rig.worker.wait_slot().get(timeout=WAIT_S)
    ended.append(rig.submit(*fs.plain_reply(fs.Text("y"))))
    rig.worker.wait_slot().get(timeout=WAIT_S)
    assert rig.status()["finished_request_ids"] == ended
    assert rig.worker.release(ended[0]).get(timeout=WAIT_S) is True
    assert rig.status()["finished_request_ids"] == ended[1:]
    for request_id in (ended[0], running, 99):
        assert rig.worker.release(request_id).get(timeout=WAIT_S) is False
    assert rig.worker.get_result(ended[0]).get(timeout=WAIT_S)["ok"] is False
    assert rig.request(running)["state"] == "running"
