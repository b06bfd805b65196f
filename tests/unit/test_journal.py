"""What a worker keeps for a person, with literal times."""

from __future__ import annotations

from typing import Any

import pytest

from llama_worker.messages import Observed
from llama_worker.request.progress import Progress
from llama_worker.request.table import Admitted
from llama_worker.server.journal import Journal
from llama_worker.types import RequestPhase

UNIX = 1000.0  # what makes Unix seconds of the clock here


@pytest.fixture
def journal() -> Journal:
    return Journal("w", UNIX, lambda level, line: None)


def told(journal: Journal) -> Any:
    return journal.debug_info(("llama-server",))


def events(journal: Journal) -> list[str]:
    return [event["event"] for event in told(journal)["recent_events"]]


def killed(journal: Journal, *, epoch: int = 1) -> Any:
    journal.keep_evidence(110.0, epoch=epoch, pid=5, last_error="it hangs", active=[Admitted(7, 0, "j", 100.0)])
    return told(journal)["evidence"]


def observed() -> Observed:
    progress = Progress(request_id=7, phase=RequestPhase.PREFILL, dispatched_at=100.0, turn_started_at=101.0)
    return Observed(epoch=1, at=109.0, activity="no CPU", liveness_at=105.0, requests=(progress,))


def test_an_event_is_told_in_unix_seconds(journal: Journal) -> None:
    journal.note("launched", 100.0, pid=5)
    assert told(journal)["recent_events"] == [{"at": 1100.0, "event": "launched", "worker": "w", "pid": 5}]


def test_a_warning_is_kept_once_and_is_an_event(journal: Journal) -> None:
    journal.warn("fewer slots", 100.0)
    journal.warn("fewer slots", 101.0)
    journal.warnings.append("a host's own")
    assert (journal.warnings, events(journal)) == (["fewer slots"], ["warning"])


def test_only_so_many_warnings_are_kept(journal: Journal) -> None:
    for number in range(60):
        journal.warn(f"line {number}", 100.0)
    assert journal.warnings == [f"line {number}" for number in range(50)]


def test_a_lockout_is_recorded_and_is_no_restart(journal: Journal) -> None:
    journal.restart_decided("exited", "code 1", 5.0, 100.0)
    journal.restart_decided("exited", "too often", None, 101.0)
    assert told(journal)["recent_restarts"] == [
        {"at": 1100.0, "reason": "exited", "detail": "code 1"},
        {"at": 1101.0, "reason": "exited", "detail": "too often"},
    ]
    assert events(journal) == ["restart", "locked_out"]
    assert journal.totals.snapshot()["restarts"] == {"exited": 1}


def test_the_evidence_of_a_kill(journal: Journal) -> None:
    journal.observed = observed()
    evidence = killed(journal)
    (request,) = evidence.pop("requests")
    assert request == {
        "request_id": 7,
        "job_name": "j",
        "slot": 0,
        "phase": "prefill",
        "turn_began_ago_s": 9.0,
        "headers_ago_s": None,
        "first_token_ago_s": None,
        "prompt_progress_ago_s": None,
        "last_data_ago_s": None,
        "last_byte_ago_s": None,
        "last_sign_of_work_ago_s": 5.0,
    }
    known = {"at": 1110.0, "pid": 5, "last_error": "it hangs"}
    assert evidence == {**known, "activity": "no CPU", "observed_ago_s": 1.0}


def test_what_was_observed_of_another_launch_is_no_evidence(journal: Journal) -> None:
    journal.observed = observed()
    evidence = killed(journal, epoch=2)
    assert (evidence["activity"], evidence["observed_ago_s"]) == ("", None)
    assert evidence["requests"] == [{"request_id": 7, "job_name": "j", "slot": 0}]


def test_the_processes_and_last_lines_join_the_evidence_of_the_last_kill_only(journal: Journal) -> None:
    killed(journal)
    journal.add_processes({"root_pid": 5}, ("last",))
    evidence = told(journal)["evidence"]
    assert (evidence["processes"], evidence["log_tail"]) == ({"root_pid": 5}, ["last"])
    assert not killed(journal).keys() & {"processes", "log_tail"}


def test_a_stuck_tool_thread_counts_for_as_long_as_it_runs(journal: Journal) -> None:
    running = {"first", "second"}
    journal.tool_thread_stuck(lambda: "first" in running)
    journal.tool_thread_stuck(lambda: "second" in running)
    assert told(journal)["stuck_tool_threads_count"] == 2
    running.remove("first")
    assert told(journal)["stuck_tool_threads_count"] == 1
    running.remove("second")
    assert told(journal)["stuck_tool_threads_count"] == 0


def test_what_a_host_is_told_is_its_own(journal: Journal) -> None:
    journal.restart_decided("exited", "code 1", 5.0, 100.0)
    killed(journal)
    given = told(journal)
    given["evidence"]["requests"].clear()
    given["recent_restarts"][0]["reason"] = "other"
    assert told(journal)["evidence"]["requests"]
    assert told(journal)["recent_restarts"][0]["reason"] == "exited"
