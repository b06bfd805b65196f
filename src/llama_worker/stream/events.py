"""The events of a chat-completion stream. Pure."""

from msgspec import Struct

from llama_worker.types.request import ContextUse


class TextDelta(Struct, frozen=True):
    """Text of the answer: `count` consecutive deltas of the server, joined."""

    text: str
    count: int = 1


class ReasoningDelta(Struct, frozen=True):
    """Reasoning: `count` consecutive deltas of the server, joined."""

    text: str
    count: int = 1


class ToolCallDelta(Struct, frozen=True):
    """A piece of the turn's call number `index`.

    `call_id` and `name` come whole and may be repeated: assign them. Append `arguments`.
    """

    index: int
    call_id: str | None
    name: str | None
    arguments: str | None


class EmptyRecord(Struct, frozen=True):
    """A record with nothing in it: only a role, an empty delta, an empty object."""


class UnknownContent(Struct, frozen=True):
    """Fields of a record that are unknown here; the same content has the same fingerprint."""

    fingerprint: int


class PromptReport(Struct, frozen=True):
    """Tokens of the prompt: read so far (including cached ones), in total, and cached."""

    processed: int
    total: int
    cached: int


class UsageReport(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class TimingsReport(Struct, frozen=True):
    """The server's own measurements of this turn; None: not given, or not finite."""

    cache_n: int | None
    prompt_n: int | None
    predicted_n: int | None
    predicted_per_second: float | None
    prompt_ms: float | None = None  # to read `prompt_n` tokens


class ServerError(Struct, frozen=True):
    """The server gave up this stream; terminal, even after a Finish."""

    message: str
    code: int | None
    type: str | None
    context: ContextUse | None = None  # if the prompt does not fit


class Finish(Struct, frozen=True):
    """The model is done: "stop", "length", "tool_calls", or another reason of the server."""

    reason: str


class Done(Struct, frozen=True):
    """The stream's own end mark, `[DONE]`."""


StreamEvent = (
    TextDelta
    | ReasoningDelta
    | ToolCallDelta
    | EmptyRecord
    | UnknownContent
    | PromptReport
    | UsageReport
    | TimingsReport
    | ServerError
    | Finish
    | Done
)


def encodable(text: str) -> str:
    """The text with lone surrogates replaced: JSON may hold them, UTF-8 may not."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
