"""The messages of the ResponsesProxyActor, which answers each `reply`."""

from __future__ import annotations

from msgspec import Struct

from llama_worker.mailbox import Reply
from llama_worker.responses.api.store import RecalledResponses, References, StoredResponse
from llama_worker.responses.http.listener import SocketListener


class StartListening(Struct, frozen=True, kw_only=True):
    """Answered with the port once connections are taken; fails with OSError where the port is not
    to be had. Sent again, it has the same `reply`."""

    reply: Reply[int]


class StopListening(Struct, frozen=True, kw_only=True):
    """Cut every exchange and end the listener; answered when its threads have ended."""

    reply: Reply[None]


class Listening(Struct, frozen=True, kw_only=True):
    """From the listener's thread: it is bound and takes connections."""

    listener: SocketListener


class ListenerEnded(Struct, frozen=True, kw_only=True):
    """From the listener's thread, its last word. `error`: why, where nobody asked for it."""

    error: BaseException | None


class ResponseBegun(Struct, frozen=True, kw_only=True):
    """A response is made that can be referred to."""

    response_id: str


class ResponseEnded(Struct, frozen=True, kw_only=True):
    """It is made no longer. `stored`: the response to keep, None for none."""

    response_id: str
    stored: StoredResponse | None = None


class Recall(Struct, frozen=True, kw_only=True):
    """Answered with what the store has, as soon as no response that is wanted still runs.

    A client that breaks off a stream may go on from it before the proxy has noticed.
    """

    wanted: References
    reply: Reply[RecalledResponses]


class Fetch(Struct, frozen=True, kw_only=True):
    """Answered with the response, None where it is unknown."""

    response_id: str
    reply: Reply[StoredResponse | None]


class Forget(Struct, frozen=True, kw_only=True):
    """Answered with whether it was there."""

    response_id: str
    reply: Reply[bool]


ProxyMessage = (
    StartListening
    | StopListening
    | Listening
    | ListenerEnded
    | ResponseBegun
    | ResponseEnded
    | Recall
    | Fetch
    | Forget
)
