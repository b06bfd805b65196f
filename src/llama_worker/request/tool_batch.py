"""The calls of one turn, run in order, each with a deadline: what they returned, how each of them
went. Pure."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llama_worker.stream.calls import MalformedCall, ParsedCall, RawCall
from llama_worker.types import ToolTraceEntry


class ToolBatch(Struct, frozen=True, kw_only=True):
    """How far a batch is. Instants are monotonic seconds, but those of the trace."""

    calls: tuple[ParsedCall, ...]
    iteration: int
    timeout_s: float
    unix_offset: float
    started_at: float  # of the call under way
    results: tuple[str, ...] = ()
    trace: tuple[ToolTraceEntry, ...] = ()
    put_off_s: float = 0.0  # time of the call under way in which the host itself did not run

    @property
    def call(self) -> ParsedCall:
        """The one under way."""
        return self.calls[len(self.results)]

    @property
    def deadline(self) -> float:
        """When the call under way has taken too long."""
        return self.started_at + self.timeout_s + self.put_off_s

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.calls)

    def returned(self, result: str, at: float, *, error: str | None = None) -> ToolBatch:
        """The call under way returned a JSON text, or its error is told; the next one begins at
        once."""
        entry = self._entry(at, error)
        entry["result"] = result
        return replace(
            self,
            results=(*self.results, result),
            trace=(*self.trace, entry),
            started_at=at,
            put_off_s=0.0,
        )

    def failed(self, error: str, at: float) -> ToolBatch:
        """The call under way failed, or was given up; the ones behind it are not run."""
        return replace(self, trace=(*self.trace, self._entry(at, error)))

    def timeout_text(self) -> str:
        """For a person: what took too long."""
        return f"tool {self.call.name!r} did not return within tool_timeout_s {self.timeout_s:g} s"

    def _entry(self, at: float, error: str | None) -> ToolTraceEntry:
        call = self.call
        entry: ToolTraceEntry = {
            "tool_call_id": call.id,
            "tool_name": call.name,
            "arguments": call.arguments,
            "iteration": self.iteration,
            "started_at": self.started_at + self.unix_offset,
            "duration_s": at - self.started_at,
            "ok": error is None,
        }
        if error is not None:
            entry["error"] = error
        return entry


def unrun_entry(
    call: RawCall | MalformedCall, why: str, iteration: int, unix_at: float
) -> ToolTraceEntry:
    """The trace of a call that was not run: its arguments as they came."""
    raw = call if isinstance(call, RawCall) else RawCall(None, "", call.text)
    return {
        "tool_call_id": raw.call_id or "",
        "tool_name": raw.name,
        "arguments": raw.arguments,
        "iteration": iteration,
        "started_at": unix_at,
        "duration_s": 0.0,
        "ok": False,
        "error": why,
    }
