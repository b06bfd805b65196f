"""The machine under the runtime: the port, the processes, what it lacks for a moment, how soon
threads run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llama_worker.server.blame import GpuFault
from llama_worker.server.termination import Signal
from llama_worker.types.worker import StartFailReason
from tests.simulation.dice import Dice
from tests.simulation.scheduler import Scheduler
from tests.simulation.server import Build, Exchange, LlamaServer, Reply

if TYPE_CHECKING:
    from tests.simulation.runtime import SimServerProcess, SimStream


class Machine:
    """Where the server runs. The faults change it; the runtime asks it."""

    def __init__(self, scheduler: Scheduler, dice: Dice, build: Build) -> None:
        self.build = build
        # of everything below; 0.0: all that can happen happens at the same instant
        self.slowness = 1.0
        self.unix_jump_s = 0.0
        self.slow_reads = dice.choice((0.02, 0.3))  # how often a reader sleeps before it reads
        # beside the one of processes; it never has any news
        self.has_foreign_probe = dice.chance(0.3)
        self.looks_hang = False  # the foreign one's
        self.lacks_threads = False
        self.gpu_watch: tuple[int, Callable[[GpuFault], object]] = (
            0,
            lambda fault: None,
        )  # of which launch
        self.launched: list[SimServerProcess] = []
        self.servers: list[LlamaServer] = []  # those whose process lives
        self.unanswered: list[tuple[LlamaServer, SimStream]] = []
        self.loads: Callable[[LlamaServer], object] = lambda server: server.begin_load(build.load_s)
        self.launch_failure: Callable[[], tuple[StartFailReason, str] | None] = lambda: None
        # whoever uses the machine says what its server says
        self.reply_to: Callable[[int, int], Reply]
        self.twist: Callable[[LlamaServer, Exchange], None] = lambda server, exchange: None
        self.tool_call: Callable[[int], tuple[float | None, bool]] = lambda request_id: (0.1, True)
        self.bios_call: Callable[[int], tuple[float | None, str | None]] = lambda request_id: (
            0.001,
            None,
        )
        self.on_signal: Callable[[SimServerProcess, Signal], object] = lambda process, signal: None
        self.on_launch: Callable[[int], object] = lambda epoch: None
        self.on_death: Callable[[LlamaServer], object] = lambda server: None
        self.on_exit: Callable[[SimServerProcess], object] = lambda process: None
        self.on_exchange: Callable[[Exchange], object] = lambda exchange: None
        self._scheduler = scheduler
        self._dice = dice
        self._pid = 100

    def need_thread(self) -> None:
        """Raises where the host cannot start one."""
        if self.lacks_threads:
            raise RuntimeError("can't start new thread")

    def start_server(self, epoch: int) -> LlamaServer:
        self._pid += 10
        self.servers = [server for server in self.servers if not server.gone]
        server = LlamaServer(self._scheduler, self.build, self, epoch=epoch, pid=self._pid)
        self.servers.append(server)
        self.loads(server)
        return server

    def listening(self) -> LlamaServer | None:
        """The newest server that lives."""
        return next((server for server in reversed(self.servers) if not server.gone), None)

    def find(self, pid: int) -> LlamaServer | None:
        return next(
            (server for server in self.servers if server.pid == pid and not server.gone), None
        )

    def serve(self, server: LlamaServer, stream: SimStream, body: Mapping[str, Any]) -> None:
        """A request has arrived at a server that answers."""
        stream.exchange = server.accept(stream, stream.turn_id, body)
        if stream.exchange is not None:
            self.on_exchange(stream.exchange)

    def answer_waiting(self, server: LlamaServer) -> None:
        """The server answers again, and takes what was sent to it meanwhile; or it is gone, and so
        are connections."""
        waiting = [stream for each, stream in self.unanswered if each is server]
        self.unanswered = [entry for entry in self.unanswered if entry[0] is not server]
        for stream in waiting:
            stream.posted()

    def resume(self, server: LlamaServer) -> None:
        """SIGCONT."""
        if not server.gone:
            server.continue_signal()
            self.answer_waiting(server)

    def read_delay_s(self) -> float:
        """Until a reader that has something to read runs."""
        if self._dice.chance(self.slow_reads):
            return self._dice.log_between(0.001, 0.2) * self.slowness
        return 0.0003 * self.slowness

    def between_s(self, low_s: float, high_s: float) -> float:
        return self._dice.log_between(low_s, high_s) * self.slowness
