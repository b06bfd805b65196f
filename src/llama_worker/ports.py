"""Protocols for all that actors need from outside: time, threads, processes, HTTP, the host's code.

`runtime.real` implements them, and so does the simulator (tests/simulation); a WorkerActor is given
its runtime. No method but `wait` blocks: what takes time runs elsewhere and tells a mailbox when it
is over. If the host lacks threads, descriptors or memory, a method that begins something raises
OSError or RuntimeError and has begun nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from llama_worker.clock import ClockTimer
from llama_worker.mailbox import Mailbox
from llama_worker.request import messages as request
from llama_worker.server import messages as server
from llama_worker.server.termination import Signal


class Host(Protocol):
    """Time, calls at an instant, and threads for actors and for the host's code."""

    def now(self) -> float:
        """Seconds of a clock that stands while this program does not run: see `clock`."""

    def unix(self, at: float) -> float:
        """The Unix seconds of an instant of `now()`. For the same instant they never fall, and grow
        only by the time in which this program did not run."""

    def call_at(self, at: float, call: Callable[[], object]) -> ClockTimer:
        """Make the call once `now()` has reached `at`, on a thread of the runtime. The call must
        not block."""

    def run_actor(self, start_thread: Callable[[], None], actor: Any) -> None:
        """Run an actor: on the thread that Pykka starts for it, or as the simulator schedules it.
        Raises RuntimeError if the system has no thread left."""

    def call_host(self, call: Callable[[], object], name: str) -> None:
        """Call the host's code, in order with other such calls, on a thread that it may block. If
        it raises, the log shows `name`."""

    def write_log(self, level: int, line: str) -> None:
        """Pass the line to the host's `logging`; returns at once even if a handler blocks."""


class ServerProcess(Protocol):
    """One launch of the server, under its guard."""

    @property
    def ended(self) -> bool:
        """Whether no process of it is left; true before Exited or LaunchFailed is sent."""

    def is_gone(self) -> bool:
        """Whether it was started and its first process has ended; the message that says so may
        still be on its way. Quick."""

    def send(self, signal: Signal) -> None:
        """Signal the process tree; no effect once it is gone."""


class ServerLog(Protocol):
    """The last lines of a worker's servers, newest last."""

    def lines(self) -> list[str]:
        """All lines kept, including those of earlier launches and an unfinished last line."""

    def tail(self, count: int) -> tuple[str, ...]:
        """The newest `count` lines of the present launch."""


class Abortable(Protocol):
    """A stream or a probe under way."""

    def abort(self) -> None:
        """Close its connection now, in whatever phase it is. Its last message follows."""


class Stream(Abortable, Protocol):
    """An open stream."""

    def flush(self) -> None:
        """Send now what was received and not sent yet."""

    def hurry(self) -> None:
        """A reader waits for text: send what was read now, and what comes soon at once; see
        `stream.lazy_reading`."""


class ToolThread(Protocol):
    """The thread of one tool call."""

    def is_alive(self) -> bool:
        """Whether it still runs."""

    def give_up(self, reply_to: Mailbox[request.StuckToolThreads]) -> None:
        """Tell the call, unless it has returned, that its result is no longer awaited. Quick.

        `reply_to` gets StuckToolThreads, and another once the call returns.
        """


class Waitable(Protocol):
    """Something whose end a thread can wait for."""

    def done(self) -> bool:
        """Whether it has ended."""

    def wait(self, timeout_s: float | None) -> bool:
        """Block the calling thread until it has ended; False: not within `timeout_s`."""


class UpstreamRuntime(Host, Protocol):
    """The runtime for a server that this program did not start."""

    def probe(self, epoch: int, reply_to: Mailbox[server.Probed]) -> Abortable:
        """Ask whether the server answers; `reply_to` gets one Probed, READY for any answer."""

    def look_at_slots(
        self, order: server.LookAtSlots, reply_to: Mailbox[server.SlotsSeen]
    ) -> Abortable:
        """Ask the server's `/slots`; `reply_to` gets one SlotsSeen."""


class Runtime(Host, Protocol):
    """The runtime of one worker's actors."""

    @property
    def log(self) -> ServerLog:
        """The server's last lines; read by the ProcessActor and the WorkerActor."""

    @property
    def warnings(self) -> Sequence[str]:
        """What on this machine reconfigures a server; a line each."""

    @property
    def probes_count(self) -> int:
        """How many liveness probes `look` can ask."""

    def wait(self, what: Waitable, timeout_s: float | None) -> bool:
        """Block the calling thread, one of the host's, until `what` is done; False: not in time."""

    def start_server(self, epoch: int, reply_to: Mailbox[server.LaunchReport]) -> ServerProcess:
        """Launch the configured server.

        `reply_to` gets Launched or LaunchFailed; after Launched, Died (unless the guard was killed)
        and, last, one Exited.
        """

    def process_evidence(self, pid: int) -> Mapping[str, Any]:
        """The state of the process tree at this instant, as JSON values. Takes about a
        millisecond."""

    def anon_bytes(self, pid: int) -> int | None:
        """The anonymous memory of the process tree, swapped out or not; None if it cannot be
        read. Quick."""

    def open_stream(
        self, order: request.OpenStream, on_closed: Mailbox[request.StreamClosed]
    ) -> Stream:
        """POST the order's body.

        Its `reply_to` gets StreamOpened, StreamEvents and, last, StreamClosed, which `on_closed`
        gets, too. Text that comes fast is batched for the order's `max_hold_s` at most, unless
        `flush` or `hurry` is called. Everything else, and the first text, is sent within 0.3 s.
        """

    def probe_readiness(
        self, epoch: int, root_pid: int, *, first: bool, reply_to: Mailbox[server.Probed]
    ) -> Abortable:
        """Ask the server whether it is ready; the `first` probe of a launch also asks whether it is
        ours, and what it can do.

        `reply_to` gets one Probed.
        """

    def look(
        self, look: server.Look, root_pid: int, reply_to: Mailbox[server.EvidenceSeen]
    ) -> None:
        """Ask liveness probe number `look.probe`; if `look.fresh`, it first forgets what it saw.

        `reply_to` gets one EvidenceSeen.
        """

    def watch_gpus(self, epoch: int, root_pid: int, reply_to: Mailbox[server.GpuFaulted]) -> None:
        """Wait for errors of the GPUs that the process tree uses, for as long as it lives.

        `reply_to` gets one GpuFaulted for each kind of error.
        """

    def look_at_slots(
        self, order: server.LookAtSlots, reply_to: Mailbox[server.SlotsSeen]
    ) -> Abortable:
        """Ask the server's `/slots`; `reply_to` gets one SlotsSeen."""

    def write_bios(self, order: request.WriteBios, reply_to: Mailbox[request.BiosWritten]) -> None:
        """Ask the BIOS provider; `reply_to` gets BiosWritten, before this returns or later."""

    def count_tokens(self, order: request.CountTokens, *, prompted: bool, n_ctx: int) -> None:
        """Count the order's prompt; its reply has the count of tokens or an error within 10 s."""

    def run_tool(self, order: request.RunTool) -> ToolThread:
        """Run the call; the order's `reply_to` gets CallEnded."""
