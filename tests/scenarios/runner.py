"""Runs a scenario on a real process, and compares what happened with what was due."""

import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from signal import Signals

from llama_worker import (
    LlamaWorker,
    RequestFailReason,
    RequestState,
    StartFailReason,
    WorkerConfig,
    WorkerStartError,
    WorkerState,
)
from llama_worker.testing.scripts import JournalReader, scripted_server_cmd
from tests.actors.conftest import HOST, Rig
from tests.scenarios.scenario import INTERVAL_S, RESTART, TIMEOUTS, Ask, Move, Scenario, Truth

PATIENCE_S = 120.0  # for anything that must happen
# The specification's own bound is the timeout and two probe intervals, plus the window of the CPU
# rate where the server had worked. What comes on top is the noise of a busy machine; `__main__`
# shows the real figures.
NOISE_S = 1.0
WINDOW_S = 3.0
EARLY_S = 0.3  # the mark is written by another process
_STATES = {None: RequestState.COMPLETED, RequestFailReason.CANCELED: RequestState.CANCELED}


@dataclass
class Report:
    """What became of a scenario."""

    scenario: Scenario
    wrong: list[str] = field(default_factory=list)  # what was not as due; empty: all well
    given_up: bool = False  # the worker ended a request or the server
    late_s: float | None = None  # after its limit
    allowed_s: float = math.inf  # so late at most, unless the machine is
    took_s: float = 0.0

    @property
    def is_late(self) -> bool:
        """Whether the end came later than promised, or the machine was too busy to tell."""
        return self.late_s is not None and self.late_s > self.allowed_s

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
    report = Report(scenario)
    slots = max(1, sum(isinstance(move, Ask) for move in scenario.moves))
    with tempfile.TemporaryDirectory(prefix="scenario-") as folder:
        journal = JournalReader(Path(folder) / "journal")
        cmd = scripted_server_cmd(
            scenario.script, host=HOST, port=port, slots=slots, journal=journal.path
        )
        config = WorkerConfig(
            name="scenario",
            host=HOST,
            port=port,
            slots=slots,
            server_cmd=(*scenario.front, *cmd),
            timeouts=replace(TIMEOUTS, **scenario.timeouts),
            restart=RESTART,
        )
        with closing(LlamaWorker(config)) as worker:
            rig = Rig(worker, config, journal)
            try:
                _Run(scenario, rig, report).go()
            except Exception as error:
                report.wrong.append(f"{type(error).__name__}: {error}")
                report.given_up |= rig.status()["restart_count"] > 0
        report.wrong += [
            f"mistake in the script: {fact['error']}" for fact in journal.facts("script_error")
        ]
    report.took_s = time.monotonic() - began_at
    if not report.right:
        report.wrong.append(
            "given up, but only slow" if report.given_up else "spared, but not slow"
        )
    return report


@dataclass
class _Run:
    """One worker and its scenario."""

    scenario: Scenario
    rig: Rig
    report: Report
    marks: dict[str, float] = field(default_factory=dict)
    submitted: list[tuple[Ask, int]] = field(default_factory=list)  # with their ids

    def go(self) -> None:
        """Start, move, compare."""
        if self.scenario.since == "start":
            self.check_failed_start()
            return
        self.rig.start()
        for move in self.scenario.moves:
            self.move(move)
        for ask, request_id in sorted(self.submitted, key=lambda each: each[0].is_endless):
            self.check_end(ask, request_id)
        self.check_server()

    def expect(self, what: str, seen: object, due: object) -> None:
        if seen != due:
            self.report.wrong.append(f"{what}: {seen!r}, due: {due!r}")

    def move(self, move: Move) -> None:
        match move:
            case Ask():
                self.submitted.append((move, self.rig.submit(*move.reply, job_name=move.name)))
            case str():
                self.rig.journal.wait("note", timeout=PATIENCE_S, name=move)
            case Signals():
                self.marks[move.name] = time.time()
                os.kill(self.rig.journal.facts("launched")[-1]["pid"], move)
            case seconds:
                time.sleep(seconds)

    # -- comparisons --

    def check_failed_start(self) -> None:
        self.marks["start"] = time.time()
        try:
            self.rig.start()
            reason = None
        except WorkerStartError as error:
            reason = error.reason
            self.report.given_up = True
            self.check_time(time.time())
        self.expect("start failed with", reason, StartFailReason.STARTUP_TIMEOUT)
        self.expect("state", self.rig.status()["state"], WorkerState.FAILED)

    def check_end(self, ask: Ask, request_id: int) -> None:
        """One request: its end, its output, its time."""
        if ask.is_endless:
            self.rig.worker.cancel(request_id).get()
        ended = threading.Event()
        self.rig.worker.result(request_id).add_done_callback(lambda _: ended.set())
        if not ended.wait(PATIENCE_S):
            raise TimeoutError(f"request {ask.name} does not end: {self.rig.request(request_id)}")
        status = self.rig.request(request_id)  # the result is not taken yet
        result = self.rig.ended(request_id)
        self.expect(f"{ask.name} failed with", result.get("fail_reason"), ask.fails)
        self.expect(ask.name, result["state"], _STATES.get(ask.fails, RequestState.FAILED))
        if ask.output is not None:
            seen = result["text"], result["reasoning"]
            self.expect(f"output of {ask.name}", seen, ask.output)
        self.report.given_up |= result["state"] is RequestState.FAILED
        if ask.name == "a" and self.scenario.limit_s is not None:
            self.check_time(status["completed_at"])

    def check_time(self, at: float) -> None:
        since, limit_s = self.scenario.since, self.scenario.limit_s
        assert limit_s is not None
        took_s = at - (self.marks.get(since) or self.rig.journal.wait("note", name=since)["at"])
        self.report.late_s = took_s - limit_s
        self.report.allowed_s = 2 * INTERVAL_S + NOISE_S + WINDOW_S * self.scenario.after_work
        if self.report.late_s < -EARLY_S:
            self.report.wrong.append(f"ended {took_s:.2f} s after {since!r}, due: {limit_s} s")

    def check_server(self) -> None:
        """Restarts, evidence, and that a request of another job completes."""
        scenario, rig = self.scenario, self.rig
        rig.start()  # shares the outcome of a restart that is under way
        status = rig.status()
        self.report.given_up |= status["restart_count"] > 0
        seen = status["state"], status["restart_count"], status["slots_used"]
        self.expect(
            "state, restarts, slots used",
            seen,
            (WorkerState.READY, int(bool(scenario.restart_reason)), 0),
        )
        restarts = rig.debug()["recent_restarts"]
        reason = restarts[-1]["reason"] if restarts else ""
        self.expect("reason of the restart", reason, scenario.restart_reason)
        self.expect(
            "the request afterwards", rig.run(job_name="control")["state"], RequestState.COMPLETED
        )
