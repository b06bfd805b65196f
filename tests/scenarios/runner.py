"""Runs a scenario on a real process, and compares what happened with what was due."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from llama_worker import (
    LlamaWorker,
    RequestFailReason,
    RequestState,
    StartFailReason,
    WorkerConfig,
    WorkerStartError,
    WorkerState,
)
from tests.actors.conftest import eventually
from tests.fake_script import Journal, Script, fake_server_cmd, steps_json
from tests.scenarios.scenario import INTERVAL_S, RESTART, TIMEOUTS, Ask, Found, Scenario, Truth

HOST = "127.0.0.1"
PATIENCE_S = 30.0  # for anything that must happen
# The specification's own bound is the timeout and two probe intervals, plus the window of the CPU rate where the
# server had worked. What comes on top is the noise of a busy machine; `__main__` shows the real figures.
NOISE_S = 1.0
WINDOW_S = 3.0
EARLY_S = 0.3  # the mark is written by another process
_BY_SILENCE = (RequestFailReason.STALL_TIMEOUT, RequestFailReason.HEADERS_TIMEOUT)
# The process ended by itself: nothing was left to take evidence of.
_OWN_REASONS = {"server_died", "out_of_memory", "exited"}

# An idle process in front of the server.
_WRAPPER = (sys.executable, "-S", "-E", "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))")

# The server, with a child that uses a third of a core for itself.
_SPIN = "end = time.monotonic() + 0.03\n    while time.monotonic() < end: pass\n    time.sleep(0.06)"
_SPINS = f"import os, sys, time\nif os.fork(): os.execv(sys.argv[1], sys.argv[1:])\nwhile True:\n    {_SPIN}"
_SIDECAR = (sys.executable, "-S", "-E", "-c", _SPINS)


@dataclass(kw_only=True)
class Report:
    """What became of a scenario."""

    scenario: Scenario
    wrong: list[str] = field(default_factory=list)  # what was not as due; empty: all well
    given_up: bool = False  # the worker ended a request or the server
    late_s: dict[str, float] = field(default_factory=dict)  # request -> seconds after its limit
    window_s: float = 0.0  # of the CPU rate, which had to pass first
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.wrong

    @property
    def right(self) -> bool:
        """Whether the verdict was the one that is due."""
        return self.given_up is (self.scenario.truth is not Truth.SLOW)


def run_all(scenarios: Sequence[Scenario], ports: Sequence[int]) -> Iterator[Report]:
    """Side by side, as many at a time as there are ports; in the order in which they end."""
    free: SimpleQueue[int] = SimpleQueue()
    for port in ports:
        free.put(port)

    def one(scenario: Scenario) -> Report:
        port = free.get()
        try:
            return run(scenario, port)
        finally:
            free.put(port)

    with ThreadPoolExecutor(max_workers=len(ports), thread_name_prefix="scenario") as pool:
        for future in as_completed([pool.submit(one, scenario) for scenario in scenarios]):
            yield future.result()


def run(scenario: Scenario, port: int) -> Report:
    """One scenario, from a worker's birth to its end."""
    began_at = time.monotonic()
    report = Report(scenario=scenario)
    with tempfile.TemporaryDirectory(prefix="scenario-") as folder:
        journal = Journal(Path(folder) / "journal")
        config = _config(scenario, port, journal)
        worker = LlamaWorker(config)
        try:
            _Run(scenario, worker, journal, report).go()
        except Exception as error:
            report.wrong.append(f"{type(error).__name__}: {error}")
            report.given_up |= worker.get_worker_status().get()["restart_count"] > 0
        finally:
            worker.close()
        report.wrong += [f"mistake in the script: {fact['error']}" for fact in journal.facts("script_error")]
    report.took_s = time.monotonic() - began_at
    if not report.right:
        report.wrong.append("given up, but only slow" if report.given_up else "spared, but not slow")
    return report


def _config(scenario: Scenario, port: int, journal: Journal) -> WorkerConfig:
    slots = max(1, len(scenario.asks))
    script = Script(launches=scenario.launches or (Script(),))
    cmd = fake_server_cmd(script, host=HOST, port=port, slots=slots, journal=journal.path)
    return WorkerConfig(
        name="scenario",
        host=HOST,
        port=port,
        slots=slots,
        server_cmd=(*(_WRAPPER if scenario.wrapped else _SIDECAR if scenario.sidecar else ()), *cmd),
        timeouts=replace(TIMEOUTS, **scenario.timeouts),
        restart=RESTART,
        **scenario.config,
    )


@dataclass
class _Submitted:
    ask: Ask
    request_id: int
    ended: threading.Event


@dataclass
class _Run:
    """One worker and its scenario."""

    scenario: Scenario
    worker: LlamaWorker
    journal: Journal
    report: Report
    marks: dict[str, float] = field(default_factory=dict)
    submitted: list[_Submitted] = field(default_factory=list)

    def go(self) -> None:
        """Start, move, compare."""
        scenario = self.scenario
        due = WorkerState.FAILED if scenario.start_found else WorkerState.READY
        if self.start():
            in_order = [f"submit {ask.name}" for ask in scenario.asks]
            for move in scenario.moves.split(", ") if scenario.moves else in_order:
                self.move(*move.split())
            for submitted in self.submitted:
                self.check_end(submitted)
            self.check_server()
        self.expect("state", self.worker.get_worker_status().get()["state"], due)

    def expect(self, what: str, seen: object, due: object) -> None:
        if seen != due:
            self.report.wrong.append(f"{what}: {seen!r}, due: {due!r}")

    def start(self) -> bool:
        """True where the server is ready."""
        self.marks["start"] = time.time()
        reason: StartFailReason | None = None
        due = None
        try:
            self.worker.start().get(timeout=PATIENCE_S)
        except WorkerStartError as error:
            reason = error.reason
            self.report.given_up = True
        if self.scenario.start_found is not None:
            due = StartFailReason.STARTUP_TIMEOUT
            self.check_time("start", self.scenario.start_found, time.time())
            self.check_evidence()
        self.expect("start failed with", reason, due)
        return reason is None

    # -- moves --

    def move(self, verb: str, *words: str) -> None:
        match verb, *words:
            case "submit", name:
                self.submit(name)
            case "end", name:
                self.wait_end(next(submitted for submitted in self.submitted[::-1] if submitted.ask.name == name))
            case "await", *_:
                self.journal.wait("note", timeout=PATIENCE_S, name=" ".join(words))
            case "heard", name, chars:
                (request_id,) = [submitted.request_id for submitted in self.submitted if submitted.ask.name == name]
                eventually(lambda: self.heard(request_id) >= int(chars), f"{chars} characters of {name}", PATIENCE_S)
            case "pause", seconds:
                time.sleep(float(seconds))
            case "signal", name:
                self.signal(name)
            case "state", state:
                status = self.worker.get_worker_status
                eventually(lambda: status().get()["state"] == state, f"worker {state}", PATIENCE_S)
            case _:
                raise ValueError(f"no such move: {verb} {words}")

    def submit(self, name: str) -> None:
        ask = next(ask for ask in self.scenario.asks if ask.name == name)
        self.marks.setdefault(f"submit {name}", time.time())
        params = {"fake_script": steps_json(*ask.reply)}
        admitted = self.worker.submit(name, "", "Hello?", params=params).get(timeout=PATIENCE_S)
        assert admitted["ok"], admitted
        submitted = _Submitted(ask, admitted["request_id"], threading.Event())
        self.submitted.append(submitted)
        self.worker.result(submitted.request_id).add_done_callback(lambda _: submitted.ended.set())

    def wait_end(self, submitted: _Submitted) -> None:
        if not submitted.ended.wait(PATIENCE_S):
            status = self.worker.get_status(submitted.request_id).get()
            raise TimeoutError(f"request {submitted.ask.name} does not end: {status}")

    def heard(self, request_id: int) -> int:
        status = self.worker.get_status(request_id).get()
        assert status["ok"], status
        return status["output_chars"] + status["reasoning_chars"]

    def signal(self, name: str) -> None:
        launched = self.journal.facts("launched")[-1]
        self.marks[name] = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(launched["pid"], signal.Signals[name])

    # -- comparisons --

    def check_end(self, submitted: _Submitted) -> None:
        """One request: its end, its output, its time."""
        ask, request_id = submitted.ask, submitted.request_id
        self.wait_end(submitted)
        status = self.worker.get_status(request_id).get()
        result = self.worker.get_result(request_id).get()
        assert status["ok"], status
        assert result["ok"], result
        self.expect(f"{ask.name} failed with", result.get("fail_reason"), ask.fails)
        self.expect(f"{ask.name}", result["state"], RequestState.FAILED if ask.fails else RequestState.COMPLETED)
        if ask.text is not None:
            self.expect(f"text of {ask.name}", result["text"], ask.text)
            self.expect(f"reasoning of {ask.name}", result["reasoning"], ask.reasoning)
        self.report.given_up |= result["state"] is RequestState.FAILED
        if ask.found is not None:
            self.check_time(ask.name, ask.found, status["completed_at"])

    def check_time(self, name: str, found: Found, at: float) -> None:
        noted = self.journal.facts("note", name=found.since)
        since = noted[0]["at"] if noted else self.marks[found.since]
        late_s = at - since - found.limit_s
        self.report.late_s[name] = late_s
        self.report.window_s = WINDOW_S if found.after_work else 0.0
        allowed_s = 2 * INTERVAL_S + NOISE_S + self.report.window_s
        if not -EARLY_S <= late_s <= allowed_s:
            self.report.wrong.append(
                f"{name} ended {at - since:.2f} s after {found.since!r}, due: {found.limit_s} s (+{allowed_s} s)"
            )

    def check_server(self) -> None:
        """Restarts, evidence, rest between launches, and that it serves again."""
        scenario = self.scenario
        # Shares the outcome of a restart that is under way.
        self.worker.start().get(timeout=PATIENCE_S)
        status = self.worker.get_worker_status().get()
        debug = self.worker.get_debug_info().get()
        self.report.given_up |= status["restart_count"] > 0
        self.expect("restarts", status["restart_count"], scenario.restarts if scenario.restart_reason else 0)
        self.expect("slots used", status["slots_used"], 0)
        reason = debug["recent_restarts"][-1]["reason"] if debug["recent_restarts"] else ""
        self.expect("reason of the restart", reason, scenario.restart_reason)
        if reason and reason not in _OWN_REASONS:
            self.check_evidence()
        self.check_serves()

    def check_evidence(self) -> None:
        """Phases of the requests, CPU rate, thread states, the last log lines."""

        def taken() -> Mapping[str, Any]:
            evidence: Mapping[str, Any] = self.worker.get_debug_info().get()["evidence"]
            return evidence if "processes" in evidence else {}

        evidence = eventually(taken, "evidence of processes", PATIENCE_S)
        processes, requests = evidence["processes"]["processes"], evidence["requests"]
        accused = [s.request_id for s in self.submitted if s.ask.fails in _BY_SILENCE][-1:]
        for what, is_there in {
            "thread states": self.scenario.leaves or any(process["threads"] for process in processes),
            "log": evidence["log_tail"],
            "reason": evidence["last_error"],
            "phase": all("phase" in request for request in requests),
            "CPU rate": not requests or "CPU" in evidence["activity"],
            "the culprit": self.scenario.restart_reason not in map(str, _BY_SILENCE)
            or accused[0] in [request["request_id"] for request in requests],
        }.items():
            if not is_there:
                self.report.wrong.append(f"evidence without {what}: {evidence}")

    def check_serves(self) -> None:
        """A request of another job completes."""
        admitted = self.worker.submit("control", "", "anything").get()
        assert admitted["ok"], admitted
        result = self.worker.result(admitted["request_id"]).get(timeout=PATIENCE_S)
        assert result["ok"], result
        self.expect("the request afterwards", result["state"], RequestState.COMPLETED)
