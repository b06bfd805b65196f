"""The states of a request, and the transitions between them. Data.

The table lists every transition but one: text far beyond the token limit, which the server then
ignores, ends a request as a loop does. Other events keep the state. A request starts in Prompting.

    state                   event                                            next state
    ----------------------  -----------------------------------------------  ------------
    Prompting               BIOS written                                     Streaming
    Prompting               BIOS failed | deadline | server died             Ended
    Streaming               finish reason                                    Settling
    Streaming               connection lost                                  Disconnected
    Streaming               tools refused                                    Prompting
    Streaming               [DONE] | HTTP error | error record | loop        Ended
    Streaming               server died                                      ReadingRest
    Settling                [DONE] | connection lost | HTTP error | deadline  Ended
    Settling                tools refused | error record | loop              Ended
    Settling                server died                                      ReadingRest
    Settling with calls     [DONE] | connection lost | HTTP error | deadline  RunningTools
    Settling with calls     tools refused                                    RunningTools
    Settling with calls     error record | loop                              Ended
    Settling with calls     server died                                      ReadingRest
    Disconnected            server died                                      Ended
    Disconnected and asked  server is alive | server died | deadline         Ended
    ReadingRest             [DONE] | connection lost | HTTP error | deadline  Ended
    ReadingRest             tools refused | error record | loop | server died  Ended
    RunningTools            last call returned                               Prompting
    RunningTools            call failed | deadline | server died             Ended
    any but Ended           cancelled | abandoned                            Ended
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from llama_worker.request.ending import Outcome
from llama_worker.request.table import RequestRecord
from llama_worker.request.turn import ToolBatch
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.turn_end import SETTLE_S
from llama_worker.types.request import RequestPhase

EXIT_REPORT_WAIT_S = 0.2  # an exit is reported 0.03 s after the connection broke (idle machine)
LATE_EXIT_REPORT_WAIT_S = 10.0  # the process is gone; on a busy machine its exit is reported late
# a request whose connection broke has ended by then: it waits for the report, asks, and waits again
LONGEST_END_S = EXIT_REPORT_WAIT_S + 2 * LATE_EXIT_REPORT_WAIT_S + 1.0
READ_REST_S = 2.0  # what a dead process had sent may still be on its way through the reader

# ---------------------------------------------------------------- states


class Timed(Struct, frozen=True, kw_only=True):
    """A state with a deadline, in monotonic seconds."""

    since: float
    limit_s: float

    @property
    def until(self) -> float:
        return self.since + self.limit_s


class Prompting(Timed, frozen=True, kw_only=True):
    """The BIOS provider writes the prompt of the next turn, which continues after `batch`."""

    batch: ToolBatch | None = None


class Streaming(Struct, frozen=True):
    """The server works on the turn; the watchdog decides how long that may take."""


class Settling(Timed, frozen=True, kw_only=True):
    """The turn has its finish reason; usage, [DONE] or an error record may still follow."""

    limit_s: float = SETTLE_S


class Disconnected(Timed, frozen=True, kw_only=True):
    """The connection broke, perhaps as the server died: that may be reported, or is asked for."""

    failure: StreamFailure
    limit_s: float = EXIT_REPORT_WAIT_S
    is_asked: bool = False

    @classmethod
    def asked(cls, failure: StreamFailure, now: float) -> Disconnected:
        """The server's process is being checked, or was found to be gone."""
        return cls(since=now, limit_s=LATE_EXIT_REPORT_WAIT_S, failure=failure, is_asked=True)


class ReadingRest(Timed, frozen=True, kw_only=True):
    """The server died; what it sent before is still being read."""

    outcome: Outcome
    limit_s: float = READ_REST_S


class RunningTools(Timed, frozen=True, kw_only=True):
    """A call of the turn runs; the next one of the batch is ordered once it has returned."""

    batch: ToolBatch


class Ended(Struct, frozen=True):
    """Terminal."""

    record: RequestRecord


State = Prompting | Streaming | Settling | Disconnected | ReadingRest | RunningTools | Ended

PHASES: Mapping[type[State], RequestPhase] = {  # the other states have the turn's phase
    Prompting: RequestPhase.WAITING,
    RunningTools: RequestPhase.TOOL,
    Ended: RequestPhase.DONE,
}
