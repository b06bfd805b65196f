"""ToolLoopActor: the host's own code, on threads: batches of tool calls, BIOS providers.

Receives RunTools, DropTools, RunBios. The threads tell the asking RequestActor CallEnded, call by call, or BiosWritten;
that one decides when one has taken too long. Sends the WorkerActor ToolThreadStuck. A thread whose call never returns
is left alone: it is a daemon, and counted.
"""

from __future__ import annotations

from typing import assert_never

from llama_worker.actors.base import LiveCount, SupervisedActor, members
from llama_worker.messages import (
    BiosWritten,
    CallEnded,
    DropTools,
    Mailbox,
    RunBios,
    RunTools,
    ToolMessage,
    ToolThreadStuck,
    WorkerMessage,
)
from llama_worker.request.turn import TurnId
from llama_worker.runtime.ports import Runtime, ToolThread


class ToolLoopActor(SupervisedActor[ToolMessage]):
    """Runs tools. A crash of this actor leaves no call begun behind it."""

    role = "tool_loop"
    accepts = members(ToolMessage)

    def __init__(self, parent: Mailbox[WorkerMessage], live_count: LiveCount, runtime: Runtime) -> None:
        super().__init__(parent, live_count, runtime)
        self._runtime = runtime
        self._worker = parent
        self._batches: dict[TurnId, ToolThread] = {}

    def handle(self, message: ToolMessage) -> None:
        """Start a thread, or forget one."""
        match message:
            case RunTools():
                self._run(message)
            case DropTools(turn_id=turn_id):
                self._drop(turn_id)
            case RunBios(turn_id=turn_id):
                try:
                    self._runtime.run_bios(message)
                except RuntimeError as error:  # the system has no thread left
                    message.reply_to.tell(BiosWritten(turn_id=turn_id, bios="", error=str(error)))
            case _:
                assert_never(message)

    def release(self, failure: str | None) -> None:
        """Begin no further call."""
        for turn_id in list(self._batches):
            self._drop(turn_id)

    def _run(self, order: RunTools) -> None:
        self._batches = {turn_id: thread for turn_id, thread in self._batches.items() if thread.is_alive()}
        try:
            self._batches[order.turn_id] = self._runtime.run_tools(order)
        except RuntimeError as error:  # the system has no thread left
            ended = CallEnded(turn_id=order.turn_id, ok=False, text=str(error), at=self._runtime.now())
            order.reply_to.tell(ended)

    def _drop(self, turn_id: TurnId) -> None:
        thread = self._batches.pop(turn_id, None)
        if thread is None:
            return
        thread.drop()
        if thread.is_alive():
            self._worker.tell(ToolThreadStuck(is_alive=thread.is_alive))
