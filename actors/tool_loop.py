"""ToolLoopActor: batches of tool calls, each batch on a thread of its own, each call with a deadline.

Receives RunTools, DropTools. Sends the asking RequestActor ToolsDone or ToolsFailed, the WorkerActor
ToolThreadsStuck. A thread whose call never returns is left alone: it is a daemon, and counted.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
from dataclasses import dataclass
from typing import assert_never

from llama_worker.actors.refs import HouseActor, Household
from llama_worker.actors.timers import Alarm
from llama_worker.config import WorkerConfig
from llama_worker.messages import (
    BatchId,
    CallReturned,
    DropTools,
    Mailbox,
    RequestMessage,
    RunTools,
    Tick,
    ToolMessage,
    ToolsDone,
    ToolsFailed,
    ToolThreadEnded,
    ToolThreadsStuck,
    WorkerMessage,
)
from llama_worker.tool_batch import ToolBatch
from llama_worker.tool_results import ToolResultError, encode_result


@dataclass(slots=True)
class _Running:
    """A batch that somebody waits for."""

    batch: ToolBatch
    reply_to: Mailbox[RequestMessage]
    dropped: threading.Event  # tells the thread not to begin another call
    alarm: Alarm  # at the deadline of the call under way


class ToolLoopActor(HouseActor[ToolMessage]):
    """Runs tools. A crash of this actor leaves no call begun behind it."""

    role = "tool_loop"

    def __init__(
        self,
        parent: Mailbox[WorkerMessage],
        household: Household,
        config: WorkerConfig,
        *,
        unix_offset: float,
    ) -> None:
        super().__init__(parent, household)
        self._worker = parent
        self._config = config
        self._unix_offset = unix_offset
        self._running: dict[BatchId, _Running] = {}
        self._stuck: set[BatchId] = set()  # batches whose thread runs on although nobody waits for it
        self._told_stuck_count = 0

    def handle(self, message: ToolMessage) -> None:
        """See the messages' own docstrings."""
        now = time.monotonic()
        match message:
            case RunTools():
                self._run(message, now)
            case DropTools(batch_id=batch_id):
                self._abandon(batch_id)
            case CallReturned(batch_id=batch_id):
                self._returned(message)
            case ToolThreadEnded(batch_id=batch_id):
                self._stuck.discard(batch_id)
            case Tick():
                for batch_id, running in list(self._running.items()):
                    if now >= running.batch.deadline:
                        self._stuck.add(batch_id)
                        self._fail(batch_id, running.batch.timeout_text(), now)
            case _:
                assert_never(message)
        self._report_stuck()

    def release(self, failure: str | None) -> None:
        """Begin no further call."""
        for batch_id in list(self._running):
            self._forget(batch_id)

    def _run(self, order: RunTools, now: float) -> None:
        batch = ToolBatch(
            calls=order.calls,
            iteration=order.iteration,
            timeout_s=self._config.tool_timeout_s,
            unix_offset=self._unix_offset,
            started_at=now,
        )
        me = self.me()
        running = _Running(batch, order.reply_to, threading.Event(), Alarm(lambda: me.tell(Tick())))
        self._running[order.batch_id] = running
        running.alarm.set(batch.deadline)
        threading.Thread(
            target=_run_calls,
            args=(order, self._config, running.dropped, me),
            name=f"llama_worker-{self._config.name}-tool-{order.batch_id[0]}.{order.batch_id[1]}",
            daemon=True,
        ).start()

    def _returned(self, call: CallReturned) -> None:
        running = self._running.get(call.batch_id)
        if running is None:
            return  # it came too late, or nobody waits for it any more
        if call.result is None:
            self._fail(call.batch_id, call.error or "the tool failed", call.at)
            return
        running.batch = running.batch.returned(call.index, call.result, call.at)
        if running.batch.done:
            self._forget(call.batch_id)
            done = ToolsDone(batch_id=call.batch_id, results=running.batch.results, trace=running.batch.trace)
            running.reply_to.tell(done)
        else:
            running.alarm.set(running.batch.deadline)

    def _fail(self, batch_id: BatchId, detail: str, at: float) -> None:
        running = self._running[batch_id]
        trace = running.batch.failed(detail, at).trace
        self._forget(batch_id)
        running.reply_to.tell(ToolsFailed(batch_id=batch_id, detail=detail, trace=trace))

    def _abandon(self, batch_id: BatchId) -> None:
        if batch_id in self._running:
            self._stuck.add(batch_id)
            self._forget(batch_id)

    def _forget(self, batch_id: BatchId) -> None:
        running = self._running.pop(batch_id, None)
        if running is not None:
            running.dropped.set()
            running.alarm.set(None)

    def _report_stuck(self) -> None:
        count = len(self._stuck)
        if count != self._told_stuck_count:
            self._told_stuck_count = count
            self._worker.tell(ToolThreadsStuck(count=count))


def _run_calls(order: RunTools, config: WorkerConfig, dropped: threading.Event, tell_to: Mailbox[ToolMessage]) -> None:
    """The thread of one batch: the calls in order, up to the first that fails."""
    assert config.tool_runner is not None
    for index, call in enumerate(order.calls):
        if dropped.is_set():
            break
        result, error = None, None
        try:
            value = config.tool_runner.run_tool(
                name=call.name,
                arguments=copy.deepcopy(call.arguments),
                request_id=order.batch_id[0],
                job_name=order.job_name,
            )
            result = encode_result(value)
        except ToolResultError as unfit:
            error = f"tool {call.name!r} returned what JSON cannot hold: {unfit}"
        except BaseException as raised:  # SystemExit and KeyboardInterrupt in a tool are its failures, no more
            said = "".join(traceback.format_exception_only(raised)).strip()  # also where its str() fails
            error = f"tool {call.name!r} raised {said}"
        tell_to.tell(
            CallReturned(batch_id=order.batch_id, index=index, at=time.monotonic(), result=result, error=error)
        )
        if error is not None:
            break
    tell_to.tell(ToolThreadEnded(batch_id=order.batch_id))
