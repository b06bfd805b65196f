"""What the actors ask of the world: everything that waits, as small Protocols. `runtime.real` has
the real one.

The simulator has another (tests/simulation). The actors know neither: a WorkerActor is given its
runtime. No method blocks; what takes time runs elsewhere and tells a mailbox when it is over. Where
the host lacks threads, descriptors or memory, a method that begins something raises OSError or
RuntimeError and has begun nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from llama_worker.mailbox import Mailbox
from llama_worker.request.messages import (
    BiosWritten,
    CountTokens,
    OpenStream,
    RunTool,
    StreamClosed,
    ToolThreadNews,
    WriteBios,
)
from llama_worker.server.messages import (
    EvidenceSeen,
    GpuFaulted,
    Look,
    Probed,
    ServerNews,
    SlotsSeen,
)
from llama_worker.server.termination import Signal


class Timer(Protocol):
    """One deadline."""

    def cancel(self) -> None:
        """Forget it; a call that is being made at this moment may still arrive. Idempotent."""


class Host(Protocol):
    """Time, calls at an instant, and threads for actors and for the host's code."""

    def now(self) -> float:
        """Seconds of a clock that stands while this program does not run: see `clock`."""

    def unix_offset(self) -> float:
        """What makes Unix seconds of an instant of now: it never falls, and grows only by the
        time in which this program did not run."""

    def unix_now(self) -> float:
        """Unix seconds; may jump in both directions."""

    def call_at(self, at: float, call: Callable[[], object]) -> Timer:
        """Make the call once `now()` has reached `at`, on a thread of the runtime's. It must only
        tell."""

    def run_actor(self, start_thread: Callable[[], None], actor: Any) -> None:
        """Run an actor: on the thread that Pykka starts for it, or as whoever simulates one does.
        Raises RuntimeError where the system has no thread left."""

    def call_host(self, call: Callable[[], object], name: str) -> None:
        """Make a call into the host's code, in order with the others, on a thread that may wait for
        long. `name` is for the log, should it raise."""

    def write_log(self, level: int, line: str) -> None:
        """Give the line to the host's `logging`, whose handlers may block, and not here."""


class ServerProcess(Protocol):
    """One launch of the server, under its guard."""

    @property
    def ended(self) -> bool:
        """Nothing of it is left; true before its last word is told."""

    def is_gone(self) -> bool:
        """Whether it was started and its first process has ended; news of it may be on their way.
        Quick."""

    def send(self, signal: Signal) -> None:
        """Signal the tree; without effect once it is gone."""


class ServerLog(Protocol):
    """The last lines of a worker's servers, newest last."""

    def lines(self) -> list[str]:
        """All that are kept, those of earlier launches and an unfinished one among them."""

    def tail(self, count: int) -> tuple[str, ...]:
        """The newest `count` lines of the present launch."""


class Abortable(Protocol):
    """A stream or a probe under way."""

    def abort(self) -> None:
        """Close its connection now, in whatever phase it is. Its last word follows."""


class Stream(Abortable, Protocol):
    """A stream that goes on. No call takes time."""

    def flush(self) -> None:
        """Tell now what has come and was not told yet."""

    def hurry(self) -> None:
        """Somebody waits for text: what was read is told now, and what comes soon at once; see
        `stream.lazy_reading`."""


class ToolThread(Protocol):
    """The thread of one tool call."""

    def is_alive(self) -> bool:
        """Whether it still runs."""

    def give_up(self, reply_to: Mailbox[ToolThreadNews]) -> None:
        """Tell the call, unless it has returned, that nobody waits for it any more. Quick.

        `reply_to` gets ToolThreadStuck and, once it returns, ToolThreadReturned.
        """


class Waitable(Protocol):
    """Something that is done one day."""

    def done(self) -> bool:
        """Whether it is."""

    def wait(self, timeout_s: float | None) -> bool:
        """Block the calling thread until it is; False: not in time."""


class UpstreamRuntime(Host, Protocol):
    """What is asked of a server that this program did not start."""

    def probe(self, epoch: int, reply_to: Mailbox[Probed]) -> Abortable:
        """Ask the server anything; `reply_to` gets one Probed: READY whatever it answers."""

    def look_at_slots(self, epoch: int, reply_to: Mailbox[SlotsSeen]) -> Abortable:
        """Ask the server's `/slots`; `reply_to` gets one SlotsSeen."""


class Runtime(Host, Protocol):
    """What one worker's actors ask of the world."""

    @property
    def log(self) -> ServerLog:
        """Read by the actor of the process alone."""

    @property
    def probes_count(self) -> int:
        """Of the liveness probes that `look` can ask."""

    def wait(self, what: Waitable, timeout_s: float | None) -> bool:
        """Block the calling thread, which is the host's, until it is done; False: not in time."""

    def start_server(self, epoch: int, reply_to: Mailbox[ServerNews]) -> ServerProcess:
        """Launch the configured server.

        `reply_to` gets Launched or LaunchFailed; after Launched, Died (unless the guard was killed)
        and then one Exited, its last word.
        """

    def process_evidence(self, pid: int) -> Mapping[str, Any]:
        """What is to be seen of the process tree at this instant, fit for JSON. Takes about a
        millisecond."""

    def anon_bytes(self, pid: int) -> int | None:
        """The anonymous memory of the process tree, swapped out or not; None where it cannot be
        seen. Quick."""

    def open_stream(self, order: OpenStream, on_closed: Mailbox[StreamClosed]) -> Stream:
        """Post the order's body.

        Its `reply_to` gets StreamOpened, StreamEvents and, last, StreamClosed, which `on_closed`
        gets, too. Text that comes fast may wait for more, the order's `tell_s` at most, unless it
        is flushed or hurried. Everything else, and the first text, is told within 0.3 s.
        """

    def probe_readiness(
        self, epoch: int, root_pid: int, *, first: bool, reply_to: Mailbox[Probed]
    ) -> Abortable:
        """Ask the server whether it is ready; `first` of a launch: whether it is ours, and what it
        can do.

        `reply_to` gets one Probed.
        """

    def look(self, look: Look, root_pid: int, reply_to: Mailbox[EvidenceSeen]) -> None:
        """Ask liveness probe number `look.probe`, which forgets what it saw before if `look.fresh`.

        `reply_to` gets one EvidenceSeen.
        """

    def watch_gpus(self, epoch: int, root_pid: int, reply_to: Mailbox[GpuFaulted]) -> None:
        """Wait for errors of the GPUs that the process tree uses, for as long as it lives.

        `reply_to` gets one GpuFaulted for each kind of error.
        """

    def look_at_slots(self, epoch: int, reply_to: Mailbox[SlotsSeen]) -> Abortable:
        """Ask the server's `/slots`; `reply_to` gets one SlotsSeen."""

    def write_bios(self, order: WriteBios, reply_to: Mailbox[BiosWritten]) -> None:
        """Ask the BIOS provider; `reply_to` gets BiosWritten, before this returns or later."""

    def count_tokens(self, order: CountTokens, *, prompted: bool, n_ctx: int) -> None:
        """Count the order's prompt; its reply has the count of tokens or an error within 10 s."""

    def run_tool(self, order: RunTool) -> ToolThread:
        """Run the call; the order's `reply_to` gets CallEnded."""
