"""Random faults and random callers against real workers on scripted servers, and what must hold all the same.

A campaign is a row of episodes; each has one worker with a config of its own and several host threads. Every
action is drawn from the seed and the numbers of its episode, its thread and itself alone: the same seed gives the
same plan, whatever the machine's speed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pykka

from llama_worker import LlamaWorker, RestartPolicy, TimeoutProfile, WorkerClosed, WorkerConfig, WorkerStartError
from llama_worker.actors.base import SupervisedActor
from llama_worker.actors.process import ProcessActor
from llama_worker.actors.request import RequestActor
from llama_worker.actors.tool_loop import ToolLoopActor
from llama_worker.actors.transport import TransportActor
from llama_worker.actors.watchdog import WatchdogActor
from llama_worker.messages import Submit
from llama_worker.request.state import Request
from llama_worker.request.table import RequestRecord
from llama_worker.runtime.futures import WorkerFuture
from llama_worker.types import RequestFailReason, RequestState, StartFailReason, WorkerState
from tests import fake_script as fs
from tests.chaos.replies import EXIT_TOOL, TOOLS, Plan, random_plan, tool_def
from tests.conftest import Leftovers

HOST = "127.0.0.1"
ANSWER_S = 2.0  # every ordinary future
GRACE_S = 0.3
ABSOLUTE_S = 3.0
MARGIN_S = 3.0  # for a machine whose cores are all busy, on top of what is promised
REQUEST_S = ABSOLUTE_S + 1.0 + MARGIN_S
STOP_S = GRACE_S + 2.0 + MARGIN_S
START_S = 30.0
CLOSED_CONNECTION_S = 2.0  # the reader thread of a request that has ended is gone
GROWTH_LIMIT_BYTES = 24 << 20
THREADS = 4
_QUESTIONS_PER_SLOT = 20  # that a worker may remember for the case that the actor that was asked dies
STEPS_PER_EPISODE = 200

# What any request may fail with while others kill, stop and stall the server.
_WEATHER = frozenset(
    {
        RequestFailReason.WORKER_RESTARTED,
        RequestFailReason.WORKER_STOPPED,
        RequestFailReason.SERVER_DIED,
        RequestFailReason.CONNECT_FAILED,
        RequestFailReason.HEADERS_TIMEOUT,
        RequestFailReason.TTFT_TIMEOUT,
        RequestFailReason.STALL_TIMEOUT,
        RequestFailReason.ABSOLUTE_TIMEOUT,
        RequestFailReason.STREAM_DISCONNECTED,
    }
)
_DAILY = {"submit": 40.0, "pause": 14.0, "status": 8.0, "read": 14.0, "result": 14.0, "cancel": 6.0, "start": 1.0}
_STORM = {
    "stop": 0.4,
    "kill server": 0.6,
    "stop server": 0.5,
    "continue server": 1.5,
    "kill guard": 0.3,
    "stop guard": 0.2,
    "poison": 0.7,
}
_ENDS = ("drain and close", "stop and close", "close", "close under fire", "crash", "lost handle")
_INNER_ACTORS: tuple[type[SupervisedActor[Any]], ...] = (
    ProcessActor,
    TransportActor,
    ToolLoopActor,
    WatchdogActor,
    RequestActor,
)
T = TypeVar("T")


class Violation(AssertionError):
    """Something that must hold did not."""


class _Poison:
    """A message that no actor knows; an inner actor dies of it."""


@dataclass(slots=True)
class Tracked:
    """What the callers know of one admitted request."""

    plan: Plan
    request_id: int
    admitted_at: float
    text: str = ""
    reasoning: str = ""
    cancel_called: bool = False
    ending: tuple[Any, ...] | None = None
    ended_by: float | None = None  # known to have ended at this instant
    held: list[WorkerFuture[Any]] = field(default_factory=list)  # of `result()`, until they are drained
    taken: bool = False

    def __str__(self) -> str:
        return f"request {self.request_id} ({self.plan.kind})"


class _Tools:
    """The host's tools. `release` lets the hanging ones return."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def run_tool(self, *, name: str, arguments: dict[str, Any], request_id: int, job_name: str) -> Any:
        match name:
            case "boom":
                raise RuntimeError("boom")
            case "slow":
                self.released.wait(60.0)
            case "odd":
                return {1, 2}
        return {"for": job_name, **arguments}


Counts = dict[str, Counter[str]]  # what happened how often: endings, replies, actions, restarts


@dataclass(kw_only=True)
class Campaign:
    """See the module. `run` raises Violation at the first thing that is wrong."""

    seed: int
    take_port: Callable[[], int]
    steps: int | None = None
    seconds: float = math.inf
    say: Callable[[str], object] = lambda line: None
    counts: Counts = field(default_factory=lambda: defaultdict(Counter))
    steps_done: int = 0
    _memory_bytes: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Episode after episode, until the steps or the seconds are used up."""
        gc.collect()
        gc.freeze()  # what is there already, as other tests' own records, is none of the campaign's
        logging.disable(logging.CRITICAL)  # errors are expected here, and looked at in other ways
        end_at = time.monotonic() + self.seconds
        number = 0
        try:
            with tempfile.TemporaryDirectory(prefix="llama_worker-chaos-") as folder:
                while time.monotonic() < end_at and (self.steps is None or self.steps_done < self.steps):
                    number += 1
                    steps = min(STEPS_PER_EPISODE, (self.steps or math.inf) - self.steps_done)
                    self._run_episode(Episode(self.seed, number, int(steps), self.take_port(), Path(folder), end_at))
                    self._check_nothing_lives()
                    self._memory_bytes.append(psutil.Process().memory_info().rss)
            self._check_memory()
        except AssertionError as error:
            raise Violation(f"seed {self.seed}, episode {number}: {error}") from error
        finally:
            logging.disable(logging.NOTSET)
            gc.unfreeze()

    def _run_episode(self, episode: Episode) -> None:
        before = Leftovers()
        began_at = time.monotonic()
        try:
            episode.run()
            left = before.wait_none(5.0 + MARGIN_S)
            assert not left, f"left behind after {episode.end}: {left}"
            episode.check_journal()
        except AssertionError as error:
            recent = "\n  ".join(episode.recent())
            raise Violation(f"{error}\n{episode.description}\nrecent events:\n  {recent}") from error
        for title, count in episode.counts.items():
            self.counts[title].update(count)
        self.steps_done += episode.steps_done
        self.say(f"{episode.steps_done} steps, {time.monotonic() - began_at:.1f} s; {episode.description}")

    def _check_nothing_lives(self) -> None:
        """No object of a closed worker is reachable any more."""
        end_at = time.monotonic() + ANSWER_S + MARGIN_S
        while alive := _living(SupervisedActor, WorkerFuture, Request, RequestRecord):
            assert time.monotonic() < end_at, f"still alive after the worker was closed: {dict(alive)}"
            time.sleep(0.05)

    def _check_memory(self) -> None:
        """The last third of the campaign needs no more memory than the first, warmed up."""
        seen = self._memory_bytes[1:]
        if len(seen) < 6:
            return
        third = len(seen) // 3
        growth = statistics.median(seen[-third:]) - statistics.median(seen[:third])
        self.say(f"memory: {seen[0] >> 20} MiB early, {seen[-1] >> 20} MiB late")
        assert growth <= GROWTH_LIMIT_BYTES, f"memory grew by {growth / (1 << 20):.1f} MiB: {seen}"

    def report(self) -> str:
        """How often what happened, for a person."""
        lines = [f"{self.steps_done} steps, seed {self.seed}"]
        for title, counts in self.counts.items():
            lines.append(f"{title}: " + ", ".join(f"{name} {count}" for name, count in counts.most_common()))
        return "\n".join(lines)


class Episode:
    """One worker, from construction to the last look for leftovers."""

    def __init__(self, seed: int, number: int, steps: int, port: int, folder: Path, end_at: float) -> None:
        rng = random.Random(f"{seed}.{number}")
        self.counts: Counts = defaultdict(Counter)
        self.steps_done = 0
        self.end = rng.choice(_ENDS)
        self._end_at = end_at
        self._tools = _Tools()
        self._journal = fs.Journal(folder / f"journal-{number}")
        self._port = port
        self._calm = rng.random() < 0.4  # the server and the requests make trouble, nobody else does
        self._guard_faults = rng.random() < 0.7
        self._config = self._make_config(rng)
        self._steps_per_thread = steps // THREADS or 1
        self._key = f"{seed}.{number}"
        self._strangers = set(_family())
        self._lock = threading.Lock()
        self._tracked: dict[int, Tracked] = {}
        self._recent: deque[str] = deque(maxlen=80)
        self._closing = threading.Event()
        self._violation: Exception | None = None
        self._worker: LlamaWorker | None = LlamaWorker(self._config)
        self._last_events: list[str] = []

    # ------------------------------------------------------------ the plan

    def _make_config(self, rng: random.Random) -> WorkerConfig:
        slots = rng.randint(1, 4)
        timeouts = TimeoutProfile(
            connect_timeout_s=1.0,
            headers_timeout_s=0.8,
            ttft_timeout_s=rng.choice([None, None, 1.0]),
            prefill_liveness_timeout_s=0.8,
            idle_stream_timeout_s=0.8,
            absolute_timeout_s=ABSOLUTE_S,
            silent_work_timeout_s=1.5,
            liveness_probe_interval_s=0.2,
            startup_timeout_s=2.5,
            stop_grace_s=GRACE_S,
            health_probe_interval_s=rng.choice([None, 0.3]),
            health_failures_before_restart=2,
        )
        restart = RestartPolicy(
            restart_backoff_s=rng.choice([0.0, 0.05]),
            backoff_max_s=0.2,
            restart_window_s=30.0,
            max_restarts_per_window=rng.choice([0, 2, 1000, 1000, 1000]),
            restart_on_stall=rng.random() < 0.8,
            transport_failures_before_restart=rng.choice([2, 4, 8]),
            server_errors_before_restart=rng.choice([3, 6]),
        )
        self.description = (
            f"{slots} slots, {restart.max_restarts_per_window} restarts, "
            f"health {timeouts.health_probe_interval_s}, {'calm' if self._calm else 'stormy'}, end: {self.end}"
        )
        return WorkerConfig(
            name="chaos",
            host=HOST,
            port=self._port,
            slots=slots,
            server_cmd=fs.fake_server_cmd(
                self._make_script(rng), host=HOST, port=self._port, slots=slots, journal=self._journal.path
            ),
            timeouts=timeouts,
            restart=restart,
            normal_tools=[tool_def(name) for name in TOOLS],
            exit_tools=[tool_def(EXIT_TOOL)],
            tool_runner=self._tools,
            max_tool_iterations=3,
            tool_timeout_s=0.4,
            tool_call_mode=rng.choice(["auto", "native"]),
            log_lines=rng.choice([1, 50, 500]),
        )

    def _make_script(self, rng: random.Random) -> fs.Script:
        children = () if self._guard_faults else rng.choice([(), (fs.Child("group"), fs.Child("daemon"))])

        def good() -> fs.Script:
            return fs.Script(
                children=children,
                floods=rng.choice([(), (), (fs.Flood(lines_per_s=200),)]),
                ignore_term=rng.random() < 0.2,
                term_waits=rng.random() < 0.8,
                term_delay_s=rng.choice([0.0, 0.0, 0.1, 1.0]),
                startup=fs.Startup(load_s=rng.choice([0.0, 0.0, 0.2])),
                lifetime_s=300.0,
            )

        def bad() -> fs.Script:
            return rng.choice(
                [
                    fs.Script(exits=[fs.Exit(1, "before_bind", ["no such model"])]),
                    fs.Script(exits=[fs.Exit(-11, "after_bind")]),
                    fs.Script(exits=[fs.Exit(2, "after_s", after_s=0.5)]),
                    fs.Script(exits=[fs.Exit(1, "request", request=3)]),
                    fs.Script(models=[fs.Answer(text="no JSON")], lifetime_s=300.0),
                    fs.Script(startup=fs.Startup(never_bind=True), lifetime_s=300.0),
                    fs.Script(startup=fs.Startup(load_s=None), lifetime_s=300.0),
                ]
            )

        launches = [good(), *(bad() if rng.random() < 0.2 else good() for _ in range(8)), good()]
        return fs.Script(launches=launches)

    # ------------------------------------------------------------ the course

    def run(self) -> None:
        """Raises Violation."""
        self._start()
        threads = [
            threading.Thread(target=self._guarded, args=(self._act_all, thread), name=f"chaos-{thread}")
            for thread in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        try:
            if self.end == "close under fire":
                half = self._steps_per_thread * THREADS / 2
                while self.steps_done < half and any(thread.is_alive() for thread in threads):
                    time.sleep(0.01)
                self._guarded(self._close)
        finally:
            for thread in threads:
                thread.join()
        self._guarded(self._finish)
        self._tools.released.set()
        if self._violation is not None:
            raise Violation(f"{type(self._violation).__name__}: {self._violation}") from self._violation
        self._tracked.clear()
        self._worker = None

    def recent(self) -> list[str]:
        """The last steps, and what the worker noted, for a person."""
        return [*self._recent, "-- the worker's own:", *self._last_events]

    @property
    def worker(self) -> LlamaWorker:
        assert self._worker is not None
        return self._worker

    def _guarded(self, call: Callable[..., object], *args: object) -> None:
        """Run it; the first violation is kept, and ends the other threads."""
        try:
            call(*args)
        except Exception as error:
            with self._lock:
                first = self._violation is None
                self._violation = self._violation or error
            if first:
                self._note(f"VIOLATION {error!r}")
                self._last_events = [f"process {line}" for line in _family().values()]
                with contextlib.suppress(Exception):
                    info = self.worker.get_debug_info().get(timeout=1.0)
                    self._last_events += [str(event) for event in info["recent_events"][-60:]]
                    self._last_events += [f"log: {line}" for line in info["recent_logs"][-10:]]
            self._tools.released.set()
            # What is wrong may be that it never ends.
            closing = threading.Thread(target=self.worker.close, name="chaos-close", daemon=True)
            closing.start()
            closing.join(STOP_S)

    def _act_all(self, thread: int) -> None:
        weights = _DAILY if self._calm else {**_DAILY, **_STORM}
        for index in range(self._steps_per_thread):
            if self._violation is not None or time.monotonic() > self._end_at:
                return
            key = f"e{self._key}t{thread}n{index}"
            rng = random.Random(key)
            (name,) = rng.choices(list(weights), weights=list(weights.values()))
            try:
                self._act(name, rng, key)
                self._check_worker()
            except WorkerClosed:
                assert self._closing.is_set(), f"WorkerClosed from {name} before close()"
                return
            with self._lock:
                self.steps_done += 1
                self.counts["actions"][name] += 1

    def _act(self, name: str, rng: random.Random, key: str) -> None:
        match name.split():
            case ["submit"]:
                self._submit(random_plan(rng, key), starts=rng.random() < 0.5)
            case ["pause"]:
                threading.Event().wait(rng.choice([0.0, 0.01, 0.1, 0.4]))
            case ["start"]:
                self._start()
            case ["stop"]:
                self._stop()
            case ["poison"]:
                self._poison(rng)
            case [verb, "server" | "guard" as whom]:
                self._signal(verb, whom)
            case _:
                with self._lock:
                    known = list(self._tracked.values())
                if name == "cancel" and rng.random() < 0.9:
                    known = [tracked for tracked in known if tracked.ending is None]
                if known:
                    tracked = known[-1 - int(len(known) * rng.random() ** 3)]  # mostly one of the last
                    about = {"cancel": self._cancel, "status": self._status, "read": self._read, "result": self._result}
                    about[name](tracked)

    # ------------------------------------------------------------ actions

    def _submit(self, plan: Plan, *, starts: bool) -> None:
        before = time.monotonic()
        params = {"fake_script": fs.steps_json(*plan.steps)}
        answer = self._take(self.worker.submit(plan.key, "", f"prompt of {plan.key}", params=params), "submit")
        if not answer["ok"]:
            self.counts["endings"][f"refused: {answer['error']}"] += 1
            if answer["error"] != "NO_SLOT_AVAILABLE" and starts:
                self._start()
            else:
                threading.Event().wait(0.1)
            return
        tracked = Tracked(plan, answer["request_id"], before)
        self.counts["replies"][plan.kind] += 1
        with self._lock:
            assert tracked.request_id not in self._tracked, f"the id of {tracked} was given twice"
            self._tracked[tracked.request_id] = tracked
        self._note(f"submit: {tracked}")

    def _cancel(self, tracked: Tracked) -> None:
        ended = tracked.ending is not None
        tracked.cancel_called = True
        two = self.worker.cancel(tracked.request_id), self.worker.cancel(tracked.request_id)
        canceled, again = (self._take(future, "cancel") for future in two)
        self._note(f"cancel {tracked.request_id}: {canceled}, {again}")
        assert canceled or not again, f"{tracked} was cancelled by the second of two cancels"
        assert not (canceled and ended), f"cancel of {tracked}, which had ended, was True"
        status = self._status(tracked)
        state = RequestState(status["state"])
        assert state.is_terminal, f"{tracked} runs on after cancel() said {canceled}: {status}"
        if canceled:
            assert state is RequestState.CANCELED, f"cancel() was True, and {tracked} is {status}"

    def _status(self, tracked: Tracked) -> dict[str, Any]:
        ended = tracked.ending is not None
        shown = len(tracked.text)
        status = self._there(self._take(self.worker.get_status(tracked.request_id), "get_status"), tracked)
        assert status["output_chars"] >= shown, f"{tracked} showed {shown} characters, and now {status}"
        if RequestState(status["state"]).is_terminal:
            self._ended(tracked, status)
        else:
            assert not ended, f"{tracked} had ended as {tracked.ending}, and now {status}"
            assert time.monotonic() - tracked.admitted_at <= REQUEST_S, f"{tracked} is still {status}"
        return status

    def _read(self, tracked: Tracked) -> None:
        text, reasoning = tracked.text, tracked.reasoning
        future = self.worker.read_output(tracked.request_id, text_offset=len(text), reasoning_offset=len(reasoning))
        chunk = self._there(self._take(future, "read_output"), tracked)
        self._saw(tracked, text + chunk["text"], reasoning + chunk["reasoning"])
        told = chunk["text_offset"]
        assert told == len(text + chunk["text"]), f"text_offset {told} of {tracked}: {chunk}"

    def _result(self, tracked: Tracked) -> None:
        """Wait a moment; it is taken at the end."""
        future, ended = self.worker.result(tracked.request_id), threading.Event()
        tracked.held.append(future)
        future.add_done_callback(lambda _: ended.set())
        ended.wait(0.1)

    def _start(self) -> None:
        try:
            status = self._take(self.worker.start(), "start", START_S)
        except WorkerStartError as error:
            self.counts["endings"][f"start: {error.reason}"] += 1
            self._note(f"start: {error.reason}")
            if not isinstance(error.reason, StartFailReason):
                raise Violation(f"start() failed with {error!r}") from error
            return
        self._note(f"start: {status['state']}, pid {status.get('pid')}")
        assert status["state"] is WorkerState.READY, f"start() resolved with {status}"

    def _stop(self) -> None:
        self._take(self.worker.stop(), "stop", STOP_S)
        self._note("stopped")

    def _signal(self, verb: str, whom: str) -> None:
        pid = self._take(self.worker.get_worker_status(), "get_worker_status").get("pid")
        if pid is None or (whom == "guard" and not self._guard_faults):
            return
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}[verb]
        with contextlib.suppress(psutil.Error):
            server = psutil.Process(pid)
            if "fake_llama_server" not in " ".join(server.cmdline()):
                return  # the pid has gone to somebody else
            victim = server.parent() if whom == "guard" else server
            if victim is not None and (whom == "server" or victim.ppid() == os.getpid()):
                victim.send_signal(number)
                self._note(f"{verb} {whom} {victim.pid}")

    def _poison(self, rng: random.Random) -> None:
        kind = rng.choice(_INNER_ACTORS)
        refs = pykka.ActorRegistry.get_by_class(kind)
        if refs:
            self._note(f"poison for {kind.__name__}")
            with contextlib.suppress(pykka.ActorDeadError):
                rng.choice(refs).tell(_Poison())
            # What waits in the dead actor's mailbox is answered all the same.
            with self._lock:
                running = [tracked for tracked in self._tracked.values() if tracked.ending is None][-4:]
            for future in [self.worker.get_status(tracked.request_id) for tracked in running]:
                self._take(future, "get_status")

    # ------------------------------------------------------------ what must hold

    def _take(self, future: WorkerFuture[T], what: str, bound_s: float = ANSWER_S) -> T:
        try:
            return future.get(timeout=bound_s)
        except pykka.Timeout:
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
            raise Violation(f"{what} unanswered within {bound_s} s") from None

    def _there(self, answer: Any, tracked: Tracked) -> dict[str, Any]:
        """What is said of a request whose result nobody has taken."""
        assert answer["ok"], f"asked for {tracked}, which nobody took: {answer}"
        assert answer.get("request_id", tracked.request_id) == tracked.request_id, f"this is another request: {answer}"
        return dict(answer)

    def _saw(self, tracked: Tracked, text: str, reasoning: str) -> None:
        """Output is what the server was told to send."""
        for seen, plan in (text, tracked.plan.text), (reasoning, tracked.plan.reasoning):
            due = plan[: len(seen) + 40][-300:]
            assert plan.startswith(seen), f"{tracked}: {seen[-300:]!r} is no beginning of {due!r}"
        with self._lock:
            tracked.text = max(tracked.text, text, key=len)
            tracked.reasoning = max(tracked.reasoning, reasoning, key=len)

    def _ended(self, tracked: Tracked, seen: Any) -> None:
        """A terminal state was seen: it is the same for everybody, and one that may come of this."""
        ending = (seen["state"], seen.get("fail_reason"), seen.get("fail_detail"))
        with self._lock:
            first = tracked.ending is None
            tracked.ending = tracked.ending or ending
            tracked.ended_by = tracked.ended_by or time.monotonic()
        if "text" in seen:
            self._check_whole(tracked, seen)
        assert tracked.ending == ending, f"{tracked} ended as {tracked.ending} and as {ending}"
        if first:
            state, reason, detail = ending
            self.counts["endings"][f"{state}" + (f": {reason}" if state is RequestState.FAILED else "")] += 1
            self._note(f"{tracked}: {state} {reason or ''} {detail or ''}")
            if state is RequestState.COMPLETED:
                allowed = tracked.plan.completes
            elif state is RequestState.CANCELED:
                allowed = tracked.cancel_called
            elif reason is RequestFailReason.UNKNOWN_ERROR:
                allowed = "Poison" in str(detail)
            else:
                allowed = reason in tracked.plan.reasons | _WEATHER
            assert allowed, f"{tracked} ended as {state}, {reason}: {detail}"

    def _check_whole(self, tracked: Tracked, result: Any) -> None:
        """It has all that was shown before, and, where it ended by itself, all that was sent."""
        plan, said = tracked.plan, (result["text"], result["reasoning"])
        shown = len(tracked.text), len(tracked.reasoning)
        assert shown == tuple(map(len, said)), f"{tracked} ended with less output than it had shown: {said}"
        completed = result["state"] is RequestState.COMPLETED
        if plan.sent_whole and (completed or result.get("fail_reason") in plan.reasons - _WEATHER):
            assert said == (plan.text, plan.reasoning), f"{tracked} lost output: {said}, and {plan} was sent"
        if plan.kind == "exit call" and completed:
            assert len(result["signals"]) == 1, f"{tracked} has the signals {result['signals']}"

    def _check_worker(self) -> None:
        """Slots are held by the running requests and by nobody else; connections by nobody who has ended."""
        with self._lock:
            known = list(self._tracked.values())
        ended = {tracked.request_id for tracked in known if tracked.ending is not None}
        status = self._take(self.worker.get_worker_status(), "get_worker_status")
        active = status["active_request_ids"]
        used = status["slots_used"]
        assert used == len(active) == len(status["active_jobs"]) <= status["slots_total"], (
            f"slots do not add up: {status}"
        )
        assert not ended & set(active), f"requests {ended & set(active)} have ended and hold slots: {status}"
        now = time.monotonic()
        old = {tracked.request_id for tracked in known if now - tracked.admitted_at > REQUEST_S}
        assert not old & set(active), f"requests {old & set(active)} still run: {status}"
        late = {t.request_id for t in known if t.ended_by is not None and now - t.ended_by > CLOSED_CONNECTION_S}
        readers = {f"llama_worker-chaos-stream-{request_id}" for request_id in late}
        open_still = [thread.name for thread in threading.enumerate() if thread.name.rpartition(".")[0] in readers]
        assert not open_still, f"the request has ended, and its connection is open: {open_still}"

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        if self._violation is not None:
            return
        if self._closing.is_set():
            self._check_closed()
            return
        if self.end == "drain and close":
            self._drain(REQUEST_S)
        self._stop_and_count()
        if self.end in ("crash", "lost handle"):
            self._abandon()
        else:
            self._close()
            self._check_closed()

    def _stop_and_count(self) -> None:
        """After `stop()` every request has its record, for whom it is due; once all are taken, nothing is kept."""
        self._stop()
        status = self._take(self.worker.get_worker_status(), "get_worker_status")
        assert (status["state"], status["slots_used"]) == (WorkerState.STOPPED, 0), f"after stop(): {status}"
        self._check_no_process("stop()")
        for restart in self._take(self.worker.get_debug_info(), "get_debug_info")["recent_restarts"]:
            self.counts["restarts"][restart["reason"]] += 1
        self._drain(ANSWER_S)
        self._take(self.worker.get_worker_status(), "get_worker_status")  # behind the last release
        kept = _living(Request, RequestRecord, WorkerFuture)
        kept["WorkerFuture"] -= _QUESTIONS_PER_SLOT * self._config.slots
        assert not +kept, f"every result was taken, and the worker keeps {dict(kept)}"

    def _check_no_process(self, after: str) -> None:
        """No scripted server, child of one or guard is left; no zombie either. Other tests' own are not counted."""
        left = [
            line
            for pid, line in _family().items()
            if pid not in self._strangers and ("fake_llama_server" in line or psutil.STATUS_ZOMBIE in line)
        ]
        assert not left, f"after {after} these processes are left: {left}"

    def _drain(self, bound_s: float) -> None:
        """Take every result: the request has ended, whoever waited hears of it, and then it is gone."""
        end_at = time.monotonic() + bound_s
        for tracked in self._tracked.values():
            waiting = [] if tracked.taken else [*tracked.held, self.worker.result(tracked.request_id)]
            answers = [self._take(future, "result", max(0.1, end_at - time.monotonic())) for future in waiting]
            tracked.taken, tracked.held = True, []
            results = [answer for answer in answers if answer["ok"]]
            assert results or not waiting, f"nobody got the result of {tracked}: {answers}"
            for result in results:
                self._took(tracked, result)
            gone: Any = self._take(self.worker.get_result(tracked.request_id), "get_result")
            is_gone = gone == {"ok": False, "error": "NOT_FOUND"}
            assert is_gone, f"{tracked} was taken, and get_result says {gone}"

    def _took(self, tracked: Tracked, result: Any) -> None:
        self._saw(tracked, result["text"], result["reasoning"])
        self._ended(tracked, result)

    def _abandon(self) -> None:
        """The worker's own actor dies, or the handle is forgotten, with a server running and requests in flight."""
        starting = self.worker.start()
        with contextlib.suppress(WorkerStartError):
            self._take(starting, "start", START_S)
        self._closing.set()
        submitting = self.worker.submit("last", "", "", params={"fake_script": fs.steps_json(fs.WaitClose())})
        self._take(submitting, "submit")
        if self.end == "lost handle":
            del starting, submitting
            self._worker = None  # the leftovers are looked for by the campaign
            return
        waiting = self.worker.start()
        self.worker.actor_ref.tell(Submit(submission=None, reply=None))  # type: ignore[arg-type]
        with contextlib.suppress(WorkerStartError, WorkerClosed):
            self._take(waiting, "start", START_S)
        self._close()
        self._check_closed()

    def _close(self) -> None:
        self._closing.set()
        began_at = time.monotonic()
        self.worker.close()
        took_s = time.monotonic() - began_at
        self._note(f"closed in {took_s:.2f} s")
        assert took_s <= STOP_S + ANSWER_S, f"close() took {took_s:.1f} s"
        self._check_no_process("close()")

    def _check_closed(self) -> None:
        """Nobody waits for ever, and every call says so."""
        for tracked in self._tracked.values():
            for future in tracked.held:
                with contextlib.suppress(WorkerClosed):
                    result: Any = self._take(future, "result")
                    if result["ok"]:
                        self._took(tracked, result)
        for call in (self.worker.start, self.worker.stop, self.worker.get_worker_status):
            try:
                call()
            except WorkerClosed:
                continue
            raise Violation(f"{call.__name__} works after close()")

    def check_journal(self) -> None:
        """What the servers wrote down: none of them has a process left, and none met a mistake of the campaign's."""
        for fact in self._journal.facts():
            assert fact["fact"] != "script_error", f"the campaign's own mistake: {fact}"
            with contextlib.suppress(psutil.Error, KeyError):
                words = psutil.Process(fact["pid"]).cmdline()
                assert str(self._journal.path) not in words, f"a process of the server's tree is left: {fact}"
        self._journal.path.unlink(missing_ok=True)

    def _note(self, line: str) -> None:
        self._recent.append(f"{time.monotonic():.3f} {threading.current_thread().name}: {line}")


def _living(*kinds: type) -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds))


def _family() -> dict[int, str]:
    """The processes below this one, and what they are doing."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join(child.cmdline())[:1000]
            found[child.pid] = f"{child.pid} of {child.ppid()}, {child.status()}: {words}"
    return found
