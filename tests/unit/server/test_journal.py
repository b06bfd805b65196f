"""What a worker keeps for a person and counts for metrics, with literal times."""

import copy
import logging
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any

import pytest

from llama_worker.request.progress import Progress
from llama_worker.request.table import Admitted, RequestRecord
from llama_worker.runtime.host.threads import write_log
from llama_worker.server.journal import BOUNDS_S, EventFeed, Journal
from llama_worker.server.messages import Observed
from llama_worker.types.request import (
    RequestFailReason,
    RequestFinishReason,
    RequestPhase,
    RequestState,
)

UNIX = 1000.0  # what makes Unix seconds of the clock here


@pytest.fixture
def log() -> list[tuple[int, str]]:
    return []


@pytest.fixture
def journal(log: list[tuple[int, str]]) -> Journal:
    return Journal("w", UNIX.__add__, lambda *line: log.append(line))


def told(journal: Journal) -> Any:
    return journal.debug_info(("llama-server",), [], (), 0.0)


# ---------------------------------------------------------------- events, warnings, restarts


def test_event_is_kept_and_logged_without_unknown_fields(
    journal: Journal, log: list[tuple[int, str]]
) -> None:
    facts: dict[str, Any] = {"request_id": 7, "job_name": "two\nlines", "pid": None}
    for level in (logging.INFO, logging.WARNING):
        journal.note("request_ended", 100.0, level=level, **facts)
    line = "request_ended worker='w' request_id=7 job_name='two\\nlines'"
    assert log == [(logging.INFO, line), (logging.WARNING, line)]
    kept = {
        "at": 1100.0,
        "event": "request_ended",
        "worker": "w",
        "request_id": 7,
        "job_name": "two\nlines",
    }
    assert told(journal)["recent_events"] == [kept, kept]


def test_enum_member_is_kept_and_logged_as_value(
    journal: Journal, log: list[tuple[int, str]]
) -> None:
    journal.note("ended", 0.0, state=RequestState.FAILED, fail_reason=RequestFailReason.SERVER_DIED)
    assert log == [(logging.INFO, "ended worker='w' state='failed' fail_reason='server_died'")]
    (kept,) = told(journal)["recent_events"]
    assert [type(kept[name]) for name in ("state", "fail_reason")] == [str, str]


def test_last_200_events_and_first_50_warnings_kept(journal: Journal) -> None:
    for number in range(250):
        journal.warn(f"line {number}", number - UNIX)
        journal.note("e", number - UNIX)
    assert [event["at"] for event in told(journal)["recent_events"]] == list(range(50, 250))
    assert journal.warnings == [f"line {number}" for number in range(50)]


def test_lines_are_logged_as_library_on_own_thread() -> None:
    written: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger, handler = logging.getLogger("llama_worker"), QueueHandler(written)
    logger.addHandler(handler)
    try:
        write_log(logger, logging.DEBUG - 1, "below the level: not written")
        write_log(logger, logging.ERROR, "100 %s")
        line = written.get(timeout=60)
    finally:
        logger.removeHandler(handler)
    assert (line.name, line.levelno, line.getMessage()) == ("llama_worker", logging.ERROR, "100 %s")
    assert line.threadName == "llama_worker-log"


def test_warning_is_kept_once_and_is_an_event(journal: Journal) -> None:
    journal.warn("fewer slots", 100.0)
    journal.warn("fewer slots", 101.0)
    journal.warnings.append("a host's own")
    assert journal.warnings == ["fewer slots"]
    assert [event["event"] for event in told(journal)["recent_events"]] == ["warning"]


# ---------------------------------------------------------------- the host's on_event


def test_events_are_handed_over_in_order() -> None:
    heard: list[dict[str, Any]] = []
    feed = EventFeed(heard.append, lambda call, name: call())
    journal = Journal("w", UNIX.__add__, lambda *line: None, feed)
    journal.note("launched", 100.0, pid=5)
    journal.warn("fewer slots", 101.0)
    assert heard == told(journal)["recent_events"]
    heard[0].clear()
    assert told(journal)["recent_events"][0]["pid"] == 5


def test_slow_handler_loses_events_and_learns_how_many() -> None:
    heard: list[dict[str, Any]] = []
    calls: list[Any] = []
    feed = EventFeed(heard.append, lambda call, name: calls.append(call))
    journal = Journal("w", UNIX.__add__, lambda *line: None, feed)
    for number in range(1007):
        journal.note("e", 100.0, number=number)
    for call in calls[:2]:
        call()
    journal.note("e", 101.0, number=1007)
    for call in calls[2:]:
        call()
    journal.note("e", 102.0, number=1008)
    calls[-1]()
    *_, last, lost, next_one, another = heard
    assert (last["number"], next_one["number"], another["number"]) == (999, 1007, 1008)
    assert lost == {"at": 1101.0, "event": "events_dropped", "worker": "w", "count": 7}
    assert told(journal)["events_dropped_count"] == 7


# ---------------------------------------------------------------- evidence


def running(phase: RequestPhase, request_id: int = 7, since: float = 100.0, **at: Any) -> Progress:
    times = {"dispatched_at": since, "turn_started_at": since} | at
    return Progress(request_id=request_id, phase=phase, **times)


def observed(at: float, *requests: Progress, liveness_at: float | None = 105.0) -> Observed:
    return Observed(epoch=1, at=at, activity="no CPU", liveness_at=liveness_at, requests=requests)


def killed(journal: Journal, *, epoch: int = 1, is_observed: bool = True) -> Any:
    """The evidence, where the watchdog had perhaps observed the launch 1 a second before."""
    if is_observed:
        journal.observed = observed(
            108.9999, running(RequestPhase.PREFILL, turn_started_at=100.9999)
        )
    journal.keep_evidence(
        110.0, epoch=epoch, pid=5, last_error="it hangs", active=[Admitted(7, 0, "j", 100.0)]
    )
    return told(journal)["evidence"]


def test_the_evidence_of_a_kill(journal: Journal) -> None:
    request = {
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
    seen = {"activity": "no CPU", "observed_ago_s": 1.0, "requests": [request]}
    assert killed(journal) == {"at": 1110.0, "pid": 5, "last_error": "it hangs", **seen}


@pytest.mark.parametrize("is_observed", [True, False])
def test_only_observations_of_its_launch_are_evidence(journal: Journal, is_observed: bool) -> None:
    evidence = killed(journal, epoch=2, is_observed=is_observed)
    assert (evidence["activity"], evidence["observed_ago_s"]) == ("", None)
    assert evidence["requests"] == [{"request_id": 7, "job_name": "j", "slot": 0}]


def test_processes_and_last_lines_join_last_kill_only(journal: Journal) -> None:
    killed(journal)
    journal.add_processes({"root_pid": 5}, ("last",))
    evidence = told(journal)["evidence"]
    assert (evidence["processes"], evidence["log_tail"]) == ({"root_pid": 5}, ["last"])
    assert not killed(journal).keys() & {"processes", "log_tail"}


# ---------------------------------------------------------------- time without progress


def test_request_longest_without_progress_counts(journal: Journal) -> None:
    assert journal.seconds_since_progress([], 110.0) is None
    first, second = Admitted(7, 0, "j", 100.0), Admitted(8, 1, "j", 101.0)
    assert journal.seconds_since_progress([first, second], 110.0) == 10.0  # nobody has looked yet
    moving = running(RequestPhase.GENERATING, last_data_at=109.0)
    waiting = running(RequestPhase.WAITING, 8, since=101.0)
    for liveness_at, longest_s in ((None, 9.0), (105.0, 5.0)):
        journal.observed = observed(110.0, moving, waiting, liveness_at=liveness_at)
        assert journal.seconds_since_progress([first, second], 110.0) == longest_s
    assert journal.seconds_since_progress([first], 110.0) == 1.0


def test_a_turn_that_begins_is_progress(journal: Journal) -> None:
    journal.observed = observed(110.0, running(RequestPhase.WAITING, turn_started_at=108.0))
    assert journal.seconds_since_progress([Admitted(7, 0, "j", 100.0)], 110.0) == 2.0


# ---------------------------------------------------------------- totals


def record(
    state: RequestState = RequestState.COMPLETED, *, tokens: int | None = None, **result: Any
) -> RequestRecord:
    return RequestRecord(
        request_id=1,
        job_name="j",
        status={} if tokens is None else {"tokens_received": tokens},  # type: ignore[typeddict-item]
        result={
            "state": state,
            "finish_reason": RequestFinishReason.STOP,
            "fail_reason": None,
            **result,  # type: ignore[typeddict-item]
        },
    )


def counted(journal: Journal, *records: RequestRecord) -> Any:
    for ended in records:
        journal.totals.request_ended(ended)
    return told(journal)["totals"]


@pytest.mark.parametrize(
    ("seconds", "index"),
    [(0.0, 0), (0.1, 0), (0.11, 1), (3600.0, len(BOUNDS_S) - 1), (3601.0, len(BOUNDS_S))],
)
def test_duration_within_bound_counts_once(journal: Journal, seconds: float, index: int) -> None:
    without_a_token = record(RequestState.FAILED, timings={"total_s": 1.0})
    totals = counted(
        journal, record(timings={"total_s": seconds, "ttft_s": seconds}), without_a_token
    )
    counts = [int(at == index) for at in range(len(BOUNDS_S) + 1)]
    once = {"bounds_s": list(BOUNDS_S), "counts": counts, "sum_s": pytest.approx(seconds)}
    assert (totals["ttft"], totals["duration"]["completed"]) == (once, once)
    assert sum(totals["duration"]["failed"]["counts"]) == 1


def test_metrics_count_by_outcome_and_cause(journal: Journal) -> None:
    journal.restart_decided("exited", "code 1", 5.0, 100.0)
    journal.restart_decided("exited", "code 1; too often", None, 101.0)
    journal.totals.signal_emitted("done")
    died = record(RequestState.FAILED, fail_reason=RequestFailReason.SERVER_DIED)
    read = {"prompt_tokens": 5, "cached_tokens": 2}
    totals = counted(journal, record(tokens=3, usage=read), died)
    assert {name: totals[name] for name in totals if name not in ("ttft", "duration")} == {
        "requests": {"completed": {"stop": 1}, "failed": {"server_died": 1}, "canceled": {}},
        "restarts": {"exited": 1},
        "signals": {"done": 1},
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "generated_tokens": 3,
    }
    info = told(journal)
    assert [event["event"] for event in info["recent_events"]] == ["restart", "locked_out"]
    assert [each["at"] for each in info["recent_restarts"]] == [1100.0, 1101.0]
    assert (info["events_dropped_count"], info["stuck_tool_threads_count"]) == (0, 0)


# ---------------------------------------------------------------- whose it is


def empty(value: Any) -> None:
    """Clear it and all that is in it."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            empty(inner)
        value.clear()


def test_answers_to_the_host_are_copies(journal: Journal) -> None:
    journal.restart_decided("exited", "code 1", 5.0, 100.0)
    counted(journal, record(tokens=1, timings={"total_s": 1.0, "ttft_s": 1.0}))
    killed(journal)
    given = told(journal)
    kept = copy.deepcopy(given)
    empty(given)
    assert told(journal) == kept
