"""ToolLoopActor: batches of tool calls, each batch on a thread of its own.

Receives RunTools, DropTools. Its threads tell the asking RequestActor CallEnded, call by call; that one decides
when a call has taken too long. Sends the WorkerActor ToolThreadStuck. A thread whose call never returns is left
alone: it is a daemon, and counted.
"""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass
from typing import assert_never

from llama_worker.actors.base import LiveCount, SupervisedActor
from llama_worker.config import WorkerConfig
from llama_worker.errors import described_error
from llama_worker.messages import (
    BatchId,
    CallEnded,
    DropTools,
    Mailbox,
    RunTools,
    ToolMessage,
    ToolThreadStuck,
    WorkerMessage,
)
from llama_worker.request.tool_results import ToolResultError, encode_result


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that somebody waits for, or whose thread has ended."""

    thread: threading.Thread
    dropped: threading.Event  # tells the thread not to begin another call


class ToolLoopActor(SupervisedActor[ToolMessage]):
    """Runs tools. A crash of this actor leaves no call begun behind it."""

    role = "tool_loop"

    def __init__(self, parent: Mailbox[WorkerMessage], live_count: LiveCount, config: WorkerConfig) -> None:
        super().__init__(parent, live_count)
        self._worker = parent
        self._config = config
        self._batches: dict[BatchId, _Batch] = {}

    def handle(self, message: ToolMessage) -> None:
        """See the messages' own docstrings."""
        match message:
            case RunTools():
                self._run(message)
            case DropTools(batch_id=batch_id):
                self._drop(batch_id)
            case _:
                assert_never(message)

    def release(self, failure: str | None) -> None:
        """Begin no further call."""
        for batch_id in list(self._batches):
            self._drop(batch_id)

    def _run(self, order: RunTools) -> None:
        self._batches = {number: batch for number, batch in self._batches.items() if batch.thread.is_alive()}
        dropped = threading.Event()
        thread = threading.Thread(
            target=_run_calls,
            args=(order, self._config, dropped),
            name=f"llama_worker-{self._config.name}-tool-{order.batch_id[0]}.{order.batch_id[1]}",
            daemon=True,
        )
        self._batches[order.batch_id] = _Batch(thread, dropped)
        thread.start()

    def _drop(self, batch_id: BatchId) -> None:
        batch = self._batches.pop(batch_id, None)
        if batch is None:
            return
        batch.dropped.set()
        if batch.thread.is_alive():
            self._worker.tell(ToolThreadStuck(is_alive=batch.thread.is_alive))


def _run_calls(order: RunTools, config: WorkerConfig, dropped: threading.Event) -> None:
    """The thread of one batch: the calls in order, up to the first that fails."""
    assert config.tool_runner is not None
    for call in order.calls:
        if dropped.is_set():
            break
        ok = False
        try:
            value = config.tool_runner.run_tool(
                name=call.name,
                arguments=copy.deepcopy(call.arguments),
                request_id=order.batch_id[0],
                job_name=order.job_name,
            )
            text, ok = encode_result(value), True
        except ToolResultError as unfit:
            text = f"tool {call.name!r} returned what JSON cannot hold: {unfit}"
        except BaseException as raised:  # SystemExit and KeyboardInterrupt in a tool are its failures, no more
            text = f"tool {call.name!r} raised {described_error(raised)}"
        order.reply_to.tell(CallEnded(batch_id=order.batch_id, ok=ok, text=text, at=time.monotonic()))
        if not ok:
            break
