"""What the host is told: by events as they happen, and by the status, the totals and the debug info
when it asks. All of it has to agree with what happened, as the simulator counts it by itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from llama_worker.types.worker import WorkerDebugInfo, WorkerStatus
from tests.simulation.promises import Promise
from tests.simulation.server import Build

if TYPE_CHECKING:
    from tests.simulation.invariants import Invariants

KEPT_EVENTS, KEPT_RESTARTS = 200, 50
# how actors die by Nature's doing
_PLANTED = ("planted in the actor", "has not answered", "can't start new thread")


class Told:
    """Of one worker. `heard` is the host's `on_event`, `signalled` its `on_signal`."""

    def __init__(self, invariants: Invariants, build: Build, config_slots: int) -> None:
        self.warnings = _of_build(build, config_slots)  # that there is reason for; words of them
        self.restarts: Counter[str] = Counter()  # by reason
        self.state = "stopped"
        self._invariants = invariants
        self._slots, self._sees = config_slots, build.takes_media
        self._of_build = frozenset(self.warnings)
        self._events: list[Mapping[str, Any]] = []
        self._endings: dict[int, tuple[str, str | None] | None] = {}  # by request
        self._signals: list[tuple[int, Mapping[str, Any]]] = []  # with the request's id

    def signalled(self, request_id: int, signal: Mapping[str, Any]) -> None:
        self._signals.append((request_id, signal))

    def heard(self, event: Mapping[str, Any]) -> None:
        endings = self._endings
        newest_at = self._events[-1]["at"] if self._events else 0.0
        if not newest_at <= event["at"] <= self._invariants.unix_now:
            _fail(f"{event} comes behind an event of {newest_at}")
        self._events.append(event)
        match event["event"], event.get("request_id", 0):
            case "state", _:
                if event["before"] != self.state:
                    _fail(f"the state was {self.state}, and then {event['before']} was left")
                self.state = event["state"]
            case "restart", _:
                self.restarts[event["reason"]] += 1
            case "actor_died", _ if not any(each in event["detail"] for each in _PLANTED):
                what = f"{event['role']} died, and nobody did it: {event['detail']}"
                raise Promise.KILLS_AND_RESTARTS(what)
            case "admitted", request_id if request_id not in endings:
                endings[request_id] = None
            case "ended", request_id if request_id in endings and endings[request_id] is None:
                reason = event.get("fail_reason")
                endings[request_id] = event["state"], None if reason is None else str(reason)
            case "admitted" | "ended" as what, request_id:
                _fail(f"request {request_id}: {what} twice")
            case _:
                pass

    # ------------------------------------------------------------ at rest

    def check(self, status: WorkerStatus, debug: WorkerDebugInfo) -> None:
        """At rest: the host has heard of everything, and both answers were given just now."""
        self._check_events(debug)
        self._check_signals()
        self._check_status(status)
        self._check_totals(debug)
        for restart, event in zip(
            debug["recent_restarts"][::-1],
            [each for each in self._events if each["event"] in ("restart", "locked_out")][::-1],
            strict=False,
        ):
            _compare("a restart", dict(restart), {name: event[name] for name in restart})
        self._check_evidence(debug["evidence"])

    def _check_events(self, debug: WorkerDebugInfo) -> None:
        truth = self._invariants
        happened = {
            i: (str(each.record.result["state"]), _text(each.record.result["fail_reason"]))
            for i, each in truth.requests.items()
            if each.record is not None
        }
        _compare("how requests ended", self._endings, happened)
        _compare("the state", self.state, str(truth.state))
        _compare("how many restarts", self.restarts.total(), truth.restarts_count)
        _compare("the events", debug["recent_events"], self._events[-KEPT_EVENTS:])
        kept = min(
            KEPT_RESTARTS, sum(e["event"] in ("restart", "locked_out") for e in self._events)
        )
        _compare("how many restarts are kept", len(debug["recent_restarts"]), kept)
        _compare("how many events were dropped", debug["events_dropped_count"], 0)
        _compare("since progress", debug["seconds_since_progress"], None)

    def _check_signals(self) -> None:
        """Each signal in a result came to both handlers, once and in order, and no other did."""
        for request_id, truth in self._invariants.requests.items():
            result = None if truth.record is None else truth.record.result
            signals = [] if result is None else result["signals"]
            came = [signal for other_id, signal in self._signals if other_id == request_id]
            _compare(f"signals of request {request_id}", came, signals)
        events = [
            (event["request_id"], event["tool_name"])
            for event in self._events
            if event["event"] == "signal"
        ]
        named = [(request_id, signal["tool_name"]) for request_id, signal in self._signals]
        _compare("the events of signals", events, named)

    def _check_status(self, status: WorkerStatus) -> None:
        truth = self._invariants
        server = truth.living_server
        ready_at = truth.ready_at
        expected = {
            "name": "simulated",
            "state": truth.state,
            "slots_total": self._slots,
            "slots_used": 0,
            "active_request_ids": [],
            "active_jobs": {},
            "draining": False,
            "restart_count": truth.restarts_count,
            "pid": server.pid if server is not None else None,
            "last_ready_at": truth.ready_unix if ready_at else None,
            "next_restart_at": None,
            "n_ctx": 4096 if ready_at else None,
            "model": "small" if ready_at else None,
            "modalities": {"vision": self._sees, "audio": False, "video": self._sees}
            if ready_at
            else None,
        }
        _compare("the status", {name: status.get(name) for name in expected}, expected)
        finished = set(status["finished_request_ids"])
        if not finished <= truth.requests.keys():
            _fail(f"results of {finished - truth.requests.keys()} wait, which never ran")
        for line in status["warnings"]:
            if not any(words in line for words in self.warnings):
                _fail(f"there is no reason for the warning {line}")
        for words in self._of_build:
            if truth.ready_at and not any(words in line for line in status["warnings"]):
                _fail(f"nothing warns of what is wrong with the server: {words}")
        if len(set(status["warnings"])) < len(status["warnings"]):
            _fail(f"the warnings are {status['warnings']}")

    def _check_totals(self, debug: WorkerDebugInfo) -> None:
        records = [each.record for each in self._invariants.requests.values()]
        requests: dict[str, Counter[str]] = {}
        ttft_s, durations_s = list[float](), dict[str, list[float]]()
        usage: Counter[str] = Counter()
        for record in filter(None, records):
            result, outcome = record.result, str(record.result["state"])
            reason = str(result["fail_reason"] or result["finish_reason"])
            requests.setdefault(outcome, Counter())[reason] += 1
            usage["generated"] += record.status.get("tokens_received", 0)
            usage["prompt"] += result.get("usage", {}).get("prompt_tokens", 0)
            usage["cached"] += result.get("usage", {}).get("cached_tokens", 0)
            if "timings" in result:
                durations_s.setdefault(outcome, []).append(result["timings"]["total_s"])
                if "ttft_s" in result["timings"]:
                    ttft_s.append(result["timings"]["ttft_s"])
        totals = debug["totals"]
        told = {outcome: reasons for outcome, reasons in totals["requests"].items() if reasons}
        _compare("the totals of requests", told, requests)
        _compare("the totals of restarts", totals["restarts"], self.restarts)
        signals = Counter(signal["tool_name"] for _, signal in self._signals)
        _compare("the totals of signals", totals["signals"], signals)
        _compare("generated tokens", totals["generated_tokens"], usage["generated"])
        _compare("prompt tokens", totals["prompt_tokens"], usage["prompt"])
        _compare("cached tokens", totals["cached_tokens"], usage["cached"])
        _check_durations("ttft", totals["ttft"], ttft_s)
        for outcome, histogram in totals["duration"].items():
            _check_durations(outcome, histogram, durations_s.get(outcome, []))

    def _check_evidence(self, evidence: Mapping[str, Any]) -> None:
        """Of the last kill: what was known of the server and of each request."""
        if bool(evidence) != bool(self._invariants.killed_with_evidence):
            _fail(f"the evidence is {evidence}")
        if not evidence:
            return
        _, at, pid = self._invariants.killed_with_evidence[-1]
        _compare("when the evidence was kept", evidence["at"], at)
        seen = (evidence["pid"], evidence.get("processes", {}).get("root_pid"))
        if not {*seen} <= {pid, None}:
            _fail(f"the evidence of process {pid} is of {seen}")
        for request in evidence["requests"]:
            ages = [age for name, age in request.items() if name.endswith("_ago_s")]
            truth = self._invariants.requests[request["request_id"]]
            if not all(age is None or 0 <= age <= at for age in ages) or truth.admitted_at > at:
                _fail(f"the evidence of {at} shows {request}")


def _of_build(build: Build, config_slots: int) -> set[str]:
    """What a server of that build lacks, once it has said so."""
    number = build.number
    reasons = {
        "fewer than the worker's": build.slots < config_slots,
        "does not show prompt progress in /slots": number is not None and number < 9544,
        "CVE-2026-107183": number is not None and number <= 11392,
    }
    return {words for words, is_so in reasons.items() if is_so}


def _check_durations(name: str, told: Any, seconds: Iterable[float]) -> None:
    bounds, expected_s = told["bounds_s"], list(seconds)
    ranges = zip([-math.inf, *bounds], [*bounds, math.inf], strict=True)
    counts = [sum(low < each <= high for each in expected_s) for low, high in ranges]
    _compare(f"the histogram of {name}", told["counts"], counts)
    if not math.isclose(told["sum_s"], sum(expected_s), abs_tol=1e-6):
        _fail(f"the sum of {name} is {told['sum_s']}, it was {sum(expected_s)}")


def _text(reason: object) -> str | None:
    return None if reason is None else str(reason)


def _compare(what: str, told: object, happened: object) -> None:
    if told != happened:
        _fail(f"{what}: told {told}, it was {happened}")


def _fail(what: str) -> None:
    raise Promise.SAYS_WHAT_HAPPENS(what)
