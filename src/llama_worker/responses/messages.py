"""The messages of the ResponsesProxyActor, which answers each `reply`."""

from __future__ import annotations

from msgspec import Struct

from llama_worker.mailbox import Reply
from llama_worker.responses.api.store import RecalledResponses, References, StoredResponse


class StartListening(Struct, frozen=True, kw_only=True):
    """Start to listen. Answered with the port once connections are accepted; fails with OSError if
    the port cannot be bound. A repeated order carries the same `reply`."""

    reply: Reply[int]


class StopListening(Struct, frozen=True, kw_only=True):
    """Cut every exchange and end the listener; answered when its threads have ended."""

    reply: Reply[None]


class ListenerEnded(Struct, frozen=True, kw_only=True):
    """From the listener's thread, its last message. `error`: why it ended; None: it was stopped."""

    error: BaseException | None


class ResponseBegun(Struct, frozen=True, kw_only=True):
    """A response that is to be stored is being generated."""

    response_id: str


class ResponseEnded(Struct, frozen=True, kw_only=True):
    """The response is no longer being generated. `stored`: what to keep of it; None: nothing."""

    response_id: str
    stored: StoredResponse | None = None


class Recall(Struct, frozen=True, kw_only=True):
    """Look up stored responses. Like the other questions, it is answered once none of those wanted
    is still being generated.

    A client that cuts a stream may refer to it before the proxy has noticed.
    """

    wanted: References
    reply: Reply[RecalledResponses]

    def response_ids(self) -> set[str]:
        return self.wanted.response_ids()


class Fetch(Struct, frozen=True, kw_only=True):
    """Look up one stored response, and `forget` it; answered with None if it is unknown."""

    response_id: str
    forget: bool = False
    reply: Reply[StoredResponse | None]

    def response_ids(self) -> set[str]:
        return {self.response_id}


Question = Recall | Fetch
ProxyMessage = (
    StartListening | StopListening | ListenerEnded | ResponseBegun | ResponseEnded | Question
)
