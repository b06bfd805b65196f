"""Random faults and random callers against real workers on scripted servers, and what must hold all
the same.

A campaign is a row of episodes; each has one worker with a config of its own and several host
threads. All that is done is drawn from the seed: the same seed gives the same plan, whatever the
machine's speed.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pykka

from llama_worker import LlamaWorker, TimeoutProfile, WorkerClosed, WorkerConfig, WorkerStartError
from llama_worker.actors.base import Child, SupervisedActor
from llama_worker.actors.messages import Submit
from llama_worker.request.request import Request
from llama_worker.request.table import RequestRecord
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.testing import scripts as fs
from llama_worker.types.chat import ToolDef
from llama_worker.types.request import RequestState
from llama_worker.types.worker import StartFailReason, WorkerState
from tests.actors.conftest import HOST, fast_restart, running, tree
from tests.chaos.replies import EXIT_TOOL, REQUEST_S, TOOLS, Reply, Tracked, random_reply
from tests.conftest import Leftovers
from tests.simulation.dice import Dice

MARGIN_S = 3.0  # for a machine whose cores are all busy, on top of what is promised
ANSWER_S = 2.0  # every ordinary future
STOP_S = 0.3 + 2.0 + MARGIN_S
START_S = 30.0
CLOSED_CONNECTION_S = 2.0  # the reader thread of a request that has ended is gone
TOOL_S = 0.4
GROWTH_LIMIT_BYTES = 24 << 20
THREADS = 4
T = TypeVar("T")
STEPS_PER_EPISODE = 200
_DAILY = {
    "submit": 40.0,
    "pause": 14.0,
    "status": 8.0,
    "read": 14.0,
    "result": 14.0,
    "cancel": 6.0,
    "start": 1.0,
}
_STORM = {
    "stop": 0.4,
    "poison": 2.0,
    "SIGKILL server": 0.6,
    "SIGSTOP server": 0.5,
    "SIGCONT server": 1.5,
}
_WEATHERS = {
    "calm": _DAILY,  # the server and the requests make trouble, nobody else does
    "stormy": _DAILY | _STORM,
    "stormy for the guard too": _DAILY | _STORM | {"SIGKILL guard": 0.3, "SIGSTOP guard": 0.2},
}
# what tells that all actors have ended, and the reply to the message that was handled last
_OTHER_FUTURES = 2
_ENDS = ("drain and close", "stop and close", "close under fire", "crash", "lost handle")
_BAD_LAUNCHES = (
    fs.Script(exits=[fs.Exit(1, "before_bind", ["no such model"])]),
    fs.Script(exits=[fs.Exit(-11, "after_bind")]),
    fs.Script(exits=[fs.Exit(2, "after_s", after_s=0.5)]),
    fs.Script(exits=[fs.Exit(1, "request", request=3)]),
    fs.Script(models=[fs.Answer(text="no JSON")]),
    fs.Script(startup=fs.Startup(never_bind=True)),
    fs.Script(startup=fs.Startup(load_s=None)),
)


def run_campaign(seed: int, steps: int, take_port: Callable[[], int]) -> Counter[tuple[str, str]]:
    """What happened how often; raises the first thing that is wrong."""
    happened: Counter[tuple[str, str]] = Counter()
    memory_bytes: list[int] = []
    dice = Dice(seed)
    gc.collect()
    gc.freeze()  # what is there already, as other tests' own records, is none of the campaign's
    logging.disable(logging.CRITICAL)  # errors are expected here, and looked at in other ways
    try:
        with tempfile.TemporaryDirectory(prefix="llama_worker-chaos-") as folder:
            for first in range(0, steps, STEPS_PER_EPISODE):
                count = min(STEPS_PER_EPISODE, steps - first)
                episode = Episode(
                    dice.fork(),
                    count,
                    take_port(),
                    fs.JournalReader(Path(folder) / f"journal-{first}"),
                )
                print(f"steps {first} to {first + count}: {episode.description}", flush=True)
                episode.run()
                episode.check_nothing_left()
                happened.update((title, text) for _, _, title, text in episode.notes)
                memory_bytes.append(psutil.Process().memory_info().rss)
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        logging.disable(logging.NOTSET)
        gc.unfreeze()
    if (third := len(memory_bytes) // 3) > 1:  # the first episode warms up
        growth = statistics.median(memory_bytes[-third:]) - statistics.median(
            memory_bytes[1 : third + 1]
        )
        assert growth <= GROWTH_LIMIT_BYTES, f"memory grew: {memory_bytes}"
    return happened


def _die(message: object) -> None:
    raise RuntimeError("poison")


def take(future: WorkerFuture[T], what: str, bound_s: float = ANSWER_S) -> T:
    try:
        return future.get(timeout=bound_s)
    except pykka.Timeout:
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        raise AssertionError(f"{what} unanswered within {bound_s} s") from None


@dataclass(eq=False)
class Caller:
    """Its actions are drawn from `dice` alone: the same dice, the same plan, however fast the
    machine is."""

    worker: LlamaWorker
    dice: Dice
    name: str
    weights: dict[str, float]
    note: Callable[[str, str], None]
    tracked: list[Tracked] = field(default_factory=list)

    def act(self, index: int) -> None:
        """One action, and a look at the worker."""
        dice = self.dice.fork()
        action = dice.weighted(self.weights)
        match action.split():
            case ["submit"]:
                self._submit(random_reply(dice, f"{self.name}n{index}"), starts=dice.chance(0.5))
            case ["pause"]:
                time.sleep(dice.choice([0.0, 0.01, 0.1, 0.4]))
            case ["start"]:
                self.start()
            case ["stop"]:
                self.stop()
            case ["poison"]:
                self._poison(dice)
            case [name, whom]:
                self._signal(signal.Signals[name], whom)
            case _ if self.tracked:
                # mostly one of the last
                tracked = self.tracked[-1 - int(len(self.tracked) * dice.random() ** 3)]
                asks = {
                    "cancel": self._cancel,
                    "status": self._status,
                    "read": self._read,
                    "result": self._result,
                }
                asks[action](tracked)
        self.note("action", action)
        self._check_worker()

    # ------------------------------------------------------------ the worker

    def start(self) -> None:
        try:
            status = take(self.worker.start(), "start", START_S)
        except WorkerStartError as error:
            self.note("start", StartFailReason(error.reason))
        else:
            assert status["state"] is WorkerState.READY, f"start() resolved with {status}"

    def stop(self) -> None:
        take(self.worker.stop(), "stop", STOP_S)

    def _signal(self, number: signal.Signals, whom: str) -> None:
        pid = take(self.worker.get_worker_status(), "get_worker_status").get("pid")
        if pid is None:
            return
        with contextlib.suppress(psutil.Error):
            server = psutil.Process(pid)
            guard = server.parent()
            if "scripted_llama_server" not in " ".join(server.cmdline()):
                return  # the pid has gone to somebody else
            if whom == "server":
                server.send_signal(number)
            elif guard is not None and guard.ppid() == os.getpid():
                guard.send_signal(number)

    def _poison(self, dice: Dice) -> None:
        refs = [ref for ref in pykka.ActorRegistry.get_all() if issubclass(ref.actor_class, Child)]
        if refs:
            actor: Any = dice.choice(refs)._actor_weakref()
            if actor is not None:
                actor.handle = _die  # whatever comes next
            # What waits in the dead actor's mailbox is answered all the same.
            running = [tracked for tracked in self.tracked if not tracked.ending]
            for future in [self.worker.get_status(tracked.request_id) for tracked in running]:
                take(future, "get_status")

    def _check_worker(self) -> None:
        """Slots are held by the running requests and by nobody else; connections by nobody who has
        ended."""
        now = time.monotonic()
        status = take(self.worker.get_worker_status(), "get_worker_status")
        active, used = status["active_request_ids"], status["slots_used"]
        assert used == len(active) == len(status["active_jobs"]) <= status["slots_total"], (
            f"slots: {status}"
        )
        over = {t.request_id for t in self.tracked if t.ending or now - t.admitted_at > REQUEST_S}
        assert not over & set(active), (
            f"{over & set(active)} have ended, or should have, and hold slots: {status}"
        )
        late = {
            t.request_id
            for t in self.tracked
            if t.ending and now - t.ended_by > CLOSED_CONNECTION_S
        }
        readers = {f"llama_worker-chaos-stream-{request_id}" for request_id in late}
        open_still = [
            thread.name
            for thread in threading.enumerate()
            if thread.name.rpartition(".")[0] in readers
        ]
        assert not open_still, f"the request has ended, and its connection is open: {open_still}"

    # ------------------------------------------------------------ requests

    def _submit(self, reply: Reply, *, starts: bool) -> None:
        now = time.monotonic()
        params = {"scripted_reply": fs.steps_json(*reply.steps)}
        answer = take(self.worker.submit("chaos", "", "prompt", params=params), "submit")
        if answer["ok"]:
            self.tracked.append(Tracked(reply, answer["request_id"], now))
            self.note("reply", reply.kind)
            return
        self.note("refused", answer["error"])
        if answer["error"] != "NO_SLOT_AVAILABLE" and starts:
            self.start()
        else:
            time.sleep(0.1)

    def _cancel(self, tracked: Tracked) -> None:
        had_ended = tracked.ending
        tracked.cancel_called = True
        futures = self.worker.cancel(tracked.request_id), self.worker.cancel(tracked.request_id)
        canceled, again = (take(future, "cancel") for future in futures)
        assert canceled or not again, f"{tracked} was cancelled by the second of two cancels"
        assert not (canceled and had_ended), f"cancel of {tracked}, which had ended, was True"
        state = self._status(tracked)
        assert state.is_terminal, f"{tracked} runs on after cancel() said {canceled}: {state}"
        assert not canceled or state is RequestState.CANCELED, (
            f"cancel() was True, and {tracked} is {state}"
        )

    def _status(self, tracked: Tracked) -> RequestState:
        status = tracked.answered(take(self.worker.get_status(tracked.request_id), "get_status"))
        assert status["output_chars"] >= len(tracked.text), f"{tracked} had shown more: {status}"
        state = RequestState(status["state"])
        if state.is_terminal:
            tracked.ended(status)
        else:
            assert not tracked.ending, f"{tracked} had ended as {tracked.ending}, and now {status}"
            assert time.monotonic() - tracked.admitted_at <= REQUEST_S, (
                f"{tracked} is still {status}"
            )
        return state

    def _read(self, tracked: Tracked) -> None:
        text, reasoning = tracked.text, tracked.reasoning
        future = self.worker.read_output(
            tracked.request_id, text_offset=len(text), reasoning_offset=len(reasoning)
        )
        chunk = tracked.answered(take(future, "read_output"))
        tracked.saw(text + chunk["text"], reasoning + chunk["reasoning"])
        assert chunk["text_offset"] == len(tracked.text), f"the text_offset of {tracked}: {chunk}"

    def _result(self, tracked: Tracked) -> None:
        tracked.held.append(self.worker.result(tracked.request_id))

    # ------------------------------------------------------------ the end

    def drain(self, end_at: float) -> None:
        """Take every result: the request has ended, whoever waited hears of it, and then it is
        gone."""
        for tracked in self.tracked:
            self._result(tracked)
            answers = [
                take(future, "result", max(0.1, end_at - time.monotonic()))
                for future in tracked.held
            ]
            results = [answer for answer in answers if answer["ok"]]
            assert results, f"nobody got the result of {tracked}: {answers}"
            for result in results:
                tracked.took(result)
            gone: Any = take(self.worker.get_result(tracked.request_id), "get_result")
            assert gone == {"ok": False, "error": "NOT_FOUND"}, (
                f"{tracked} was taken, and get_result says {gone}"
            )
        self._forget_all()

    def check_closed(self) -> None:
        """Who waited for a result has it, or hears that there will be none."""
        for tracked in self.tracked:
            for future in tracked.held:
                with contextlib.suppress(WorkerClosed):
                    result = take(future, "result")
                    if result["ok"]:
                        tracked.took(result)
        self._forget_all()

    def _forget_all(self) -> None:
        for tracked in self.tracked:
            self.note(
                "ended",
                str(tracked.ending[1] or tracked.ending[0]) if tracked.ending else "not seen",
            )
        self.tracked.clear()


class Episode:
    """One worker, from construction to its end."""

    def __init__(self, dice: Dice, steps: int, port: int, journal: fs.JournalReader) -> None:
        # when, by which thread, of what kind, what
        self.notes: list[tuple[float, str, str, str]] = []
        self._journal = journal
        self._before = Leftovers()
        self._steps_per_thread = steps // THREADS or 1
        self._closing = threading.Event()
        self._end = dice.choice(_ENDS)
        weather = dice.weighted({"calm": 0.4, "stormy": 0.2, "stormy for the guard too": 0.4})
        children = (
            [(), (fs.ChildProcess("group"), fs.ChildProcess("daemon"))]
            if "guard" not in weather
            else [()]
        )
        script = _script(dice, dice.choice(children))
        self._config = config = self._make_config(dice, port, script)
        self.description = (
            f"{config.slots} slots, {config.restart.max_restarts_per_window} restarts, "
            f"health {config.timeouts.health_probe_interval_s}, {weather}, end: {self._end}"
        )
        self._worker = LlamaWorker(config)
        self._callers = [
            Caller(
                self._worker,
                dice.fork(),
                f"{dice.below(10**6)}t{thread}",
                _WEATHERS[weather],
                self._note,
            )
            for thread in range(THREADS)
        ]

    def _make_config(self, dice: Dice, port: int, script: fs.Script) -> WorkerConfig:
        slots = 1 + dice.below(4)
        tools: list[ToolDef] = [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
            for name in (*TOOLS, EXIT_TOOL)
        ]
        return WorkerConfig(
            "chaos",
            HOST,
            port,
            fs.scripted_server_cmd(
                script, host=HOST, port=port, slots=slots, journal=self._journal.path
            ),
            slots=slots,
            timeouts=TimeoutProfile(
                connect_timeout_s=1.0,
                headers_timeout_s=0.8,
                ttft_timeout_s=dice.choice([None, None, 1.0]),
                prefill_liveness_timeout_s=0.8,
                idle_stream_timeout_s=0.8,
                absolute_timeout_s=3.0,
                silent_work_timeout_s=1.5,
                liveness_probe_interval_s=0.2,
                startup_timeout_s=2.5,
                stop_grace_s=0.3,
                health_probe_interval_s=dice.choice([None, 0.3]),
                health_failures_before_restart=2,
            ),
            restart=fast_restart(
                max_restarts_per_window=dice.choice([0, 2, 1000, 1000, 1000]),
                restart_on_stall=dice.chance(0.8),
                transport_failures_before_restart=dice.choice([2, 4, 8]),
                server_errors_before_restart=dice.choice([3, 6]),
            ),
            normal_tools=tools[:-1],
            exit_tools=tools[-1:],
            tool_runner=self,
            max_tool_iterations=3,
            tool_timeout_s=TOOL_S,
            tool_call_mode=dice.choice(["auto", "native"]),
            log_lines=dice.choice([1, 50, 500]),
        )

    def run_tool(
        self, *, name: str, arguments: dict[str, Any], request_id: int, job_name: str
    ) -> Any:
        """The host's tools."""
        match name:
            case "boom":
                raise RuntimeError("boom")
            case "slow":
                time.sleep(2 * TOOL_S)
            case "odd":
                return {1, 2}
        return {"for": job_name, **arguments}

    # ------------------------------------------------------------ the course

    def run(self) -> None:
        try:
            self._callers[0].start()
            with ThreadPoolExecutor(THREADS, thread_name_prefix="chaos") as pool:
                threads = [pool.submit(self._act, caller) for caller in self._callers]
            for thread in threads:
                thread.result()
            with self._explained():
                self._finish()
        except Exception:
            self._close()
            raise
        self._callers.clear()
        del self._worker  # for "lost handle" this is what ends it

    def _act(self, caller: Caller) -> None:
        """A thread of the host."""
        half = self._steps_per_thread // 2
        with self._explained():
            try:
                for index in range(self._steps_per_thread):
                    if (
                        self._end == "close under fire"
                        and caller is self._callers[0]
                        and index == half
                    ):
                        self._close()
                    caller.act(index)
            except WorkerClosed:
                assert self._closing.is_set(), "WorkerClosed before close()"

    def _finish(self) -> None:
        if not self._closing.is_set():
            self._stop_and_count()
        if self._end in ("crash", "lost handle"):
            self._abandon()
        if self._end == "lost handle":
            return
        self._close()
        self._check_closed()

    def _check_closed(self) -> None:
        """Not part of `_finish`: what names the worker there stays with the traceback of the
        crash's WorkerClosed."""
        for caller in self._callers:
            caller.check_closed()
        for call in (self._worker.start, self._worker.stop, self._worker.get_worker_status):
            with contextlib.suppress(WorkerClosed):
                call()
                raise AssertionError(f"{call.__name__} works after close()")

    def _stop_and_count(self) -> None:
        """After `stop()` every request has its record, for whom it is due; once all are taken,
        nothing is kept."""
        if self._end == "drain and close":
            self._drain(REQUEST_S)
        self._callers[0].stop()
        status = take(self._worker.get_worker_status(), "get_worker_status")
        assert (status["state"], status["slots_used"]) == (WorkerState.STOPPED, 0), (
            f"after stop(): {status}"
        )
        self._check_no_process("stop()")
        self._drain(ANSWER_S)
        take(self._worker.get_worker_status(), "get_worker_status")  # behind the last release
        kept = _living(Request, RequestRecord, WorkerFuture)
        kept["WorkerFuture"] -= _OTHER_FUTURES
        assert not +kept, f"every result was taken, and the worker keeps {kept}"

    def _drain(self, bound_s: float) -> None:
        end_at = time.monotonic() + bound_s
        for caller in self._callers:
            caller.drain(end_at)

    def _abandon(self) -> None:
        """With a server running and a request in flight the worker's own actor dies, or the handle
        is forgotten."""
        self._callers[0].start()
        params = {"scripted_reply": fs.steps_json(fs.WaitClose())}
        take(self._worker.submit("last", "", "", params=params), "submit")
        if self._end == "crash":
            waiting = self._worker.start()
            self._worker.actor_ref.tell(Submit(submission=None, reply=None))  # type: ignore[arg-type]
            with contextlib.suppress(WorkerStartError, WorkerClosed):
                take(waiting, "start", START_S)

    def _close(self) -> None:
        self._closing.set()
        closing = threading.Thread(target=self._worker.close, daemon=True)
        closing.start()
        closing.join(STOP_S + ANSWER_S)
        assert not closing.is_alive(), "close() does not return"
        self._check_no_process("close()")

    def _check_no_process(self, after: str) -> None:
        """No server, child of one or guard is left; no zombie of this process's either."""
        left = [line for line in self._before.now() if line.startswith("process")]
        assert not left, f"after {after}: {left}"
        assert not running(tree(self._journal)), f"after {after}: {running(tree(self._journal))}"

    def check_nothing_left(self) -> None:
        left = self._before.wait_none(5.0 + MARGIN_S)
        assert not left, f"left behind: {left}"
        self._check_no_process("the end")
        mistakes = self._journal.facts("script_error")
        assert not mistakes, f"the campaign's own: {mistakes}"
        end_at = time.monotonic() + ANSWER_S + MARGIN_S
        while alive := _living(SupervisedActor, WorkerFuture, Request, RequestRecord):
            assert time.monotonic() < end_at, f"still alive after the worker was closed: {alive}"
            time.sleep(0.05)

    # ------------------------------------------------------------ for a person

    def _note(self, title: str, text: str) -> None:
        self.notes.append((time.monotonic(), threading.current_thread().name, title, text))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """With a failure goes what happened before it."""
        try:
            yield
        except Exception as error:
            recent: list[Any] = ["recent events:", *self.notes[-80:]]
            with contextlib.suppress(Exception):
                info = take(self._worker.get_debug_info(), "get_debug_info")
                recent += [
                    "the worker's own:",
                    *info["recent_events"][-60:],
                    *info["recent_logs"][-10:],
                ]
            error.add_note("\n  ".join(map(str, recent)))
            raise


def _script(dice: Dice, children: tuple[fs.ChildProcess, ...]) -> fs.Script:
    """A server that starts well the first time and from the tenth on."""
    good = fs.Script(
        children=children,
        floods=dice.choice([(), (), (fs.Flood(lines_per_s=200),)]),
        ignore_term=dice.chance(0.2),
        term_waits=dice.chance(0.8),
        term_delay_s=dice.choice([0.0, 0.0, 0.1, 1.0]),
        startup=fs.Startup(load_s=dice.choice([0.0, 0.0, 0.2])),
    )
    middle = [dice.choice(_BAD_LAUNCHES) if dice.chance(0.2) else good for _ in range(8)]
    return fs.Script(
        launches=[replace(launch, lifetime_s=300.0) for launch in (good, *middle, good)]
    )


def _living(*kinds: type) -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds))
