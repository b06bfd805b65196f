"""TransportActor: opens and closes the connections to the server.

Receives OpenStream, CloseStream, FlushStream, HurryStream, CloseAllStreams and each stream's
StreamClosed. The streams send their news to the RequestActors directly. Sends the RequestActors
StreamFlushed, and the WorkerActor AllStreamsClosed. Owns every open stream.
"""

from __future__ import annotations

from typing import Any, assert_never

from llama_worker.actors.base import Child, message_types
from llama_worker.errors import described_error
from llama_worker.ports import Stream
from llama_worker.request import messages
from llama_worker.stream.failure import StreamFailure
from llama_worker.types.request import RequestFailReason


class TransportActor(Child[messages.TransportMessage]):
    """Opens and closes streams. A crash of this actor closes every connection."""

    role = "transport"
    accepts = message_types(messages.TransportMessage)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streams: dict[messages.TurnId, Stream] = {}
        self._is_closing = False  # True: AllStreamsClosed must be sent after the last one

    def handle(self, message: messages.TransportMessage) -> None:
        match message:
            case messages.OpenStream(turn_id=turn_id):
                try:
                    self._streams[turn_id] = self._runtime.open_stream(message, self.me())
                # A shortage of this machine: it says nothing about the server.
                except (RuntimeError, OSError) as error:
                    failure = StreamFailure(
                        reason=RequestFailReason.UNKNOWN_ERROR,
                        detail=f"cannot open a connection: {described_error(error)}",
                        is_unsent=True,
                    )
                    at = self._runtime.now()
                    message.reply_to.tell(
                        messages.StreamClosed(turn_id=turn_id, failure=failure, at=at)
                    )
            case messages.CloseStream(turn_id=turn_id):
                if turn_id in self._streams:
                    self._streams[turn_id].abort()
            case messages.FlushStream(turn_id=turn_id):
                if turn_id in self._streams:
                    self._streams[turn_id].flush()
                message.reply_to.tell(messages.StreamFlushed(turn_id=turn_id))
            case messages.HurryStream(turn_id=turn_id):
                if turn_id in self._streams:
                    self._streams[turn_id].hurry()
            case messages.CloseAllStreams():
                self._is_closing = True
                self.release(None)
                self._report_closed()
            case messages.StreamClosed(turn_id=turn_id):
                self._streams.pop(turn_id, None)
                self._report_closed()
            case _:
                assert_never(message)

    def release(self, failure: str | None) -> None:
        """Close every connection; the streams end by themselves."""
        for stream in list(self._streams.values()):  # a copy: the parent's thread may run this
            stream.abort()

    def _report_closed(self) -> None:
        if self._is_closing and not self._streams:
            self._is_closing = False
            self.tell_worker(messages.AllStreamsClosed(epoch=self.member.epoch))
