"""What a request asks of others. Data: whoever carries an order out adds where its answer goes."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from llama_worker.stream.calls import ParsedCall

TurnId = tuple[int, int]
"""Request id, and the number of the request's turn (one HTTP request each), from 1."""


class WriteBios(Struct, frozen=True, kw_only=True):
    """Ask the BIOS provider for the text of the turn that begins now."""

    turn_id: TurnId
    iterations_left: int
    prompted: bool


class PostChat(Struct, frozen=True, kw_only=True):
    """POST `body` to the chat endpoint."""

    turn_id: TurnId
    body: dict[str, Any]


class CallTool(Struct, frozen=True, kw_only=True):
    """Run the turn's next call."""

    turn_id: TurnId
    job_name: str
    call: ParsedCall


class AskIfServerDied(Struct, frozen=True, kw_only=True):
    """A request's connection broke: has the server's process ended?"""

    request_id: int
