"""Keeps the requests in flight and the records of those that ended. Pure; not thread-safe; instants
are monotonic."""

from __future__ import annotations

import copy
from collections import OrderedDict

from msgspec import Struct

from llama_worker.request.progress import Batch
from llama_worker.types.request import (
    NotFound,
    NotReady,
    RequestFailReason,
    RequestPhase,
    RequestResult,
    RequestStatus,
)

# Each answer is a copy of these: the host may change it.
NOT_FOUND: NotFound = {"ok": False, "error": "NOT_FOUND"}
NOT_READY: NotReady = {"ok": False, "error": "NOT_READY"}
# After these failures the server has no work left for the request.
_NO_WORK_LEFT = frozenset(
    {
        RequestFailReason.CONNECT_FAILED,
        RequestFailReason.CONTEXT_EXCEEDED,
        RequestFailReason.HTTP_ERROR,
        RequestFailReason.PROMPT_ERROR,
        RequestFailReason.SERVER_ERROR,
        RequestFailReason.TOOL_EXECUTION_ERROR,
        RequestFailReason.TOOL_PARSE_ERROR,
    }
)


class RequestRecord(Struct, frozen=True, kw_only=True):
    """A terminal request, as the worker keeps it until the host takes it."""

    request_id: int
    job_name: str
    status: RequestStatus
    result: RequestResult
    last_data_at: float | None = None  # of its last turn
    batches: tuple[Batch, ...] = ()  # of its last turn's prompt
    http_status: int | None = None  # of an `http_error` or a `server_error`
    ended_in: RequestPhase = RequestPhase.DONE  # DONE: the server had no work left for it
    was_sent: bool = True  # its last turn, or a part of it; False: certainly not
    has_media: bool = False  # images or sounds in its prompt
    is_leased: bool = False  # its output went to its client and is not kept here
    job_key: str = ""  # the same for each retry; set if nobody named the job

    @property
    def is_broken_off(self) -> bool:
        """Whether the server may still compute a batch of it: it was sent, and was cancelled or
        given up, and not while its tools ran."""
        fail_reason = self.result["fail_reason"]
        has_work = fail_reason is not None and fail_reason not in _NO_WORK_LEFT
        return has_work and self.was_sent and self.ended_in is not RequestPhase.TOOL

    @property
    def job(self) -> str:
        """The same for a request and its retries: each lease has its own job name, and all requests
        that a host does not name share one, so `job_key` is preferred."""
        return self.job_key or self.job_name

    def copy_of_status(self) -> RequestStatus:
        """A copy for one host to keep: no two get the same dicts."""
        return copy.deepcopy(self.status)

    def copy_of_result(self) -> RequestResult:
        """A copy for one host to keep; the strings are shared."""
        return copy.deepcopy(self.result)


class _Kept(Struct, frozen=True):
    record: RequestRecord
    since: float


class Admitted(Struct, frozen=True):
    """A request that is not terminal; it holds the slot."""

    request_id: int
    slot: int
    job_name: str
    created_at: float
    is_leased: bool = False


class RequestTable:
    """Admits requests, and keeps the records that hosts have not taken, each for at most `ttl_s`
    seconds (None: for ever)."""

    def __init__(self, slots: int, ttl_s: float | None = None) -> None:
        self._ttl_s = ttl_s
        self._free = list(range(slots))
        self._active: dict[int, Admitted] = {}
        # Oldest first. An OrderedDict: a dict searches the places of removed items for its oldest.
        self._records: OrderedDict[int, _Kept] = OrderedDict()
        self.newest_id = 0

    @property
    def active(self) -> tuple[Admitted, ...]:
        """The requests that hold a slot, oldest first."""
        return tuple(self._active.values())

    def admit(self, job_name: str, now: float, *, is_leased: bool = False) -> Admitted | None:
        """Take the free slot with the lowest number; None if all are used."""
        if not self._free:
            return None
        self.newest_id += 1
        admitted = Admitted(self.newest_id, self._free.pop(0), job_name, now, is_leased)
        self._active[admitted.request_id] = admitted
        return admitted

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    @property
    def finished_ids(self) -> list[int]:
        """Ids of the requests whose records are kept, in the order in which they ended."""
        return list(self._records)

    def find(self, request_id: int) -> Admitted | None:
        """The request, if it is not terminal."""
        return self._active.get(request_id)

    def in_slot(self, slot: int) -> Admitted | None:
        return next((admitted for admitted in self._active.values() if admitted.slot == slot), None)

    def end(self, record: RequestRecord, now: float) -> bool:
        """The request is terminal: free its slot, keep its record from `now` on.

        False if it was terminal already. Its last event may be much older than `now`, if the host
        was halted before the end was told.
        """
        admitted = self._active.pop(record.request_id, None)
        if admitted is None:
            return False
        self._free.append(admitted.slot)
        self._free.sort()
        self._records[record.request_id] = _Kept(record, now)
        return True

    def record(self, request_id: int) -> RequestRecord | None:
        """The record, if the request is terminal and nobody has taken its result."""
        kept = self._records.get(request_id)
        return None if kept is None else kept.record

    def release(self, request_id: int) -> bool:
        """Forget the record; False if there was no such record."""
        return self._records.pop(request_id, None) is not None

    def expire(self, now: float) -> tuple[RequestRecord, ...]:
        """Forget the records that have expired; returns them."""
        expired = []
        while (at := self.expires_at) is not None and now >= at:
            expired.append(self._records.popitem(last=False)[1].record)
        return tuple(expired)

    @property
    def expires_at(self) -> float | None:
        """When the oldest record expires; None: never."""
        if self._ttl_s is None:
            return None
        return next((kept.since + self._ttl_s for kept in self._records.values()), None)
