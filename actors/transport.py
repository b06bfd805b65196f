"""TransportActor: the connections to the server.

Receives OpenStream, CloseStream, CloseAllStreams. Its reader threads answer the askers directly; itself it sends the
WorkerActor StreamsClosed. Owns every open stream, one thread and one connection each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from llama_worker.actors.base import LiveCount, SupervisedActor
from llama_worker.config import WorkerConfig
from llama_worker.messages import (
    CloseAllStreams,
    CloseStream,
    Mailbox,
    OpenStream,
    ReaderEnded,
    StreamId,
    StreamsClosed,
    TransportMessage,
    WorkerMessage,
)
from llama_worker.runtime.chat_exchange import Endpoint
from llama_worker.runtime.stream_reader import StreamReader


class TransportActor(SupervisedActor[TransportMessage]):
    """Opens and closes streams. A crash of this actor closes every connection."""

    role = "transport"

    def __init__(self, parent: Mailbox[WorkerMessage], live_count: LiveCount, config: WorkerConfig) -> None:
        super().__init__(parent, live_count)
        self._worker = parent
        self._name = f"llama_worker-{config.name}"
        self._endpoint = endpoint(config)
        self._streams: dict[StreamId, StreamReader] = {}
        self._closing: int | None = None  # the epoch whose StreamsClosed is owed

    def handle(self, message: TransportMessage) -> None:
        """See the messages' own docstrings."""
        match message:
            case OpenStream(stream_id=stream_id):
                self._streams[stream_id] = StreamReader(
                    stream_id=stream_id,
                    endpoint=self._endpoint,
                    body=message.body,
                    reply_to=message.reply_to,
                    on_end=self._tell_end(stream_id),
                    name=self._name,
                )
            case CloseStream(stream_id=stream_id):
                if stream_id in self._streams:
                    self._streams[stream_id].abort()
            case CloseAllStreams(epoch=epoch):
                self._closing = epoch
                self.release(None)
                self._report_closed()
            case ReaderEnded(stream_id=stream_id):
                self._streams.pop(stream_id, None)
                self._report_closed()
            case _:
                assert_never(message)

    def release(self, failure: str | None) -> None:
        """Close every connection; the threads end by themselves."""
        for stream in self._streams.values():
            stream.abort()

    def _tell_end(self, stream_id: StreamId) -> Callable[[], object]:
        me = self.me()
        return lambda: me.tell(ReaderEnded(stream_id=stream_id))

    def _report_closed(self) -> None:
        if self._closing is not None and not self._streams:
            self._worker.tell(StreamsClosed(epoch=self._closing))
            self._closing = None


def endpoint(config: WorkerConfig) -> Endpoint:
    """Where the config's server is reached from this machine."""
    host = config.connect_host
    return Endpoint(
        base_url=f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}",
        connect_timeout_s=config.timeouts.connect_timeout_s,
        api_key=config.api_key,
    )
