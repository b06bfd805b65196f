"""ToolLoopActor: runs the host's tools, each call on a thread.

Receives RunTool and DropTool. The threads send CallEnded to the RequestActor that gave the order,
which orders one call after the other and keeps the deadline of each (`Request`, in
`request.request`). A thread whose call is given up is left running, as a daemon: the WorkerActor
gets StuckToolThreads, and another from the thread if it ends later.
"""

from __future__ import annotations

from typing import Any, assert_never

from llama_worker.actors.base import Child, message_types
from llama_worker.ports import ToolThread
from llama_worker.request.messages import CallEnded, DropTool, RunTool, ToolMessage, TurnId


class ToolLoopActor(Child[ToolMessage]):
    """Starts the tool threads. This actor's end does not wait for those that still run."""

    role = "tool_loop"
    accepts = message_types(ToolMessage)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._threads: dict[TurnId, ToolThread] = {}

    def handle(self, message: ToolMessage) -> None:
        match message:
            case RunTool(turn_id=turn_id):
                self._threads = {
                    key: thread for key, thread in self._threads.items() if thread.is_alive()
                }
                try:
                    self._threads[turn_id] = self._runtime.run_tool(message)
                except RuntimeError as error:  # the system has no thread left
                    ended = CallEnded(
                        turn_id=turn_id,
                        call_id=message.call.id,
                        ok=False,
                        text=str(error),
                        at=self._runtime.now(),
                    )
                    message.reply_to.tell(ended)
            case DropTool(turn_id=turn_id):
                self._drop(turn_id)
            case _:
                assert_never(message)

    def release(self, failure: str | None) -> None:
        for turn_id in list(self._threads):
            self._drop(turn_id)

    def _drop(self, turn_id: TurnId) -> None:
        thread = self._threads.pop(turn_id, None)
        if thread is not None:
            thread.give_up(self._worker)
