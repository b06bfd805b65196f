"""`UpstreamFacts`: what the upstream server says of its model, asked for on a request's thread."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from llama_worker.config.validation import json_of
from llama_worker.responses.api.chat_template import ADAPTERS, Message, is_rendered
from llama_worker.responses.api.tools import as_object
from llama_worker.responses.exchange import Exchange
from llama_worker.responses.http.request_reader import HttpRequest
from llama_worker.runtime.http import session
from llama_worker.server.traits import server_traits

_QUERY_TIMEOUT_S = 2.0  # timeout of a small question, which the server answers within milliseconds
_SAYS_OF_TEMPLATE = (200, 400, 500)  # of `/apply-template`; the others say that nothing was tried
_PROPS_S = 60.0  # how long what `/props` says is cached
_PROPS_RETRY_S = 5.0  # and how long if it did not tell: the server is loading, or busy

# The defaults of llama-server (b11434), unless a request or the server's command sets others.
LLAMA_SERVER_SAMPLING = {
    "temperature": 0.8,
    "top_p": 0.95,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class UpstreamFacts:
    """What the server says, or last said if a busy one does not answer. Any number of threads may
    use it."""

    def __init__(self) -> None:
        self.ignores_tools = False
        self._accepted: dict[object, bool] = {}  # by adapter: whether its probe was
        self._sampling: Mapping[str, float] = LLAMA_SERVER_SAMPLING
        self._props_until = -math.inf  # until when what `/props` said is valid (monotonic)

    def as_template_takes(
        self, messages: list[Message], exchange: Exchange, request: HttpRequest
    ) -> list[Message]:
        """The messages as the server's template takes them. It is asked only about what they have,
        and each time: the server may have got another model."""
        for probe, adapt in ADAPTERS:
            adapted = adapt(messages)
            if adapted == messages:
                continue
            status, answer = self._ask(exchange, request, "POST", "/apply-template", probe)
            if status in _SAYS_OF_TEMPLATE:
                self._accepted[adapt] = is_rendered(probe, as_object(answer).get("prompt"))
            if not self._accepted.get(adapt):
                messages = adapted
        return messages

    def sampling(self, exchange: Exchange, request: HttpRequest) -> Mapping[str, float]:
        """The server's sampling parameters, which apply if a request does not set its own."""
        if time.monotonic() >= self._props_until:
            props = as_object(self._ask(exchange, request, "GET", "/props")[1])
            sampling = _sampling_of(props)
            if sampling:
                self._sampling = sampling
                self.ignores_tools = server_traits(props, {}).tools is False
            self._props_until = time.monotonic() + (_PROPS_S if sampling else _PROPS_RETRY_S)
        return self._sampling

    def _ask(
        self,
        exchange: Exchange,
        request: HttpRequest,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
    ) -> tuple[int, object]:
        """The status and the answer's JSON; (0, None) without an answer."""
        try:
            status, answer = session.ask(
                exchange.upstream.endpoint,
                method,
                path,
                headers={"Authorization": request.header("authorization")},
                body=body,
                timeout_s=_QUERY_TIMEOUT_S,
                abort=exchange.abort,
            )
        except (OSError, ValueError):
            return 0, None
        return status, json_of(answer)


def _sampling_of(props: object) -> dict[str, float] | None:
    """The server's sampling parameters, for requests that set none, from the body of its `/props`;
    None if that does not tell."""
    params = as_object(as_object(props).get("default_generation_settings")).get("params")
    if not isinstance(params, Mapping):
        return None
    return sampling_echo(params, LLAMA_SERVER_SAMPLING)


def sampling_echo(params: Mapping[str, Any], defaults: Mapping[str, float]) -> dict[str, float]:
    """The sampling parameters in effect: those in `params`, else those in `defaults`."""
    return {name: _number(params.get(name), default) for name, default in defaults.items()}


def _number(value: object, default: float) -> float:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default
