"""What a chat-completion stream says, as events: what travels upward from it. Pure."""

from dataclasses import dataclass

import msgspec

from llama_worker.types import ContextUse


class TextDelta(msgspec.Struct, frozen=True):  # there are many of these: it costs a fifth of a dataclass
    """Text of the answer; `count` deltas of the server that came together and follow one another."""

    text: str
    count: int = 1


class ReasoningDelta(msgspec.Struct, frozen=True):
    """Reasoning, likewise."""

    text: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the turn's call number `index`.

    `call_id` and `name` come whole, and may come again: assign them. `arguments` is to be appended.
    """

    index: int
    call_id: str | None
    name: str | None
    arguments: str | None


@dataclass(frozen=True, slots=True)
class RoleOnly:
    """The answer's first chunk, with nothing in it yet."""


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Tokens of the prompt that are done (those from the cache included), all, and from the cache."""

    processed: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Timings:
    """The server's own measurements of this turn; a number that it did not give, or not finite, is None."""

    cache_n: int | None
    prompt_n: int | None
    predicted_n: int | None
    predicted_per_second: float | None


@dataclass(frozen=True, slots=True)
class ServerError:
    """The server gave up this stream; terminal, even after a Finish."""

    message: str
    code: int | None
    type: str | None
    context: ContextUse | None = None  # of a prompt that does not fit


@dataclass(frozen=True, slots=True)
class Finish:
    """The model is done: "stop", "length", "tool_calls", or what else the server said."""

    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The stream's own end mark, `[DONE]`."""


StreamEvent = (
    TextDelta
    | ReasoningDelta
    | ToolCallDelta
    | RoleOnly
    | PromptProgress
    | Usage
    | Timings
    | ServerError
    | Finish
    | Done
)
