"""Checks the arguments of a host's calls. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from llama_worker.config.validation import (
    checked_int,
    checked_json_object,
    checked_str,
    plain_str,
    shown,
)
from llama_worker.errors import ConfigError
from llama_worker.types.chat import ChatMessage, ContentPart

# The str fields of the object under the key named like the part's type; `text` holds the text.
_PARTS: dict[str, tuple[str, ...]] = {
    "text": (),
    "image_url": ("url",),
    "input_audio": ("data", "format"),
}


class Submission(Struct, frozen=True, kw_only=True):
    """What a host asks of the model; checked and copied."""

    job_name: str
    system_prompt: str
    user_prompt: str | list[ContentPart]
    params: dict[str, Any]
    messages: tuple[ChatMessage, ...]
    part_kinds: frozenset[str] = frozenset()  # types of the content parts
    links_media: bool = False
    job_key: str = ""  # the same for each retry; set if the host named no job


def valid_id(request_id: int) -> int:
    """Return the id. Raises TypeError or ConfigError if no request can have it."""
    checked_int("request_id", request_id, at_least=0)
    return request_id


def validate_submit(
    job_name: str,
    system_prompt: str,
    user_prompt: str | Sequence[ContentPart],
    params: Mapping[str, Any] | None,
    messages: Iterable[ChatMessage] | None,
) -> Submission:
    """Check and copy. Raises TypeError or ConfigError for what could not be sent to a server."""
    checked_str("job_name", job_name)
    checked_str("system_prompt", system_prompt)
    if messages is None:
        messages = ()
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(
            f"messages must be a sequence of messages, not {type(messages).__name__}: "
            f"{shown(messages)}"
        )
    checked: list[ChatMessage] = []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        plain = checked_json_object(name, message)
        if not isinstance(plain.get("role"), str) or not plain["role"]:
            raise ConfigError(
                f"{name} needs a 'role' that is a non-empty str, not {shown(plain.get('role'))}"
            )
        if plain.get("content") is not None:
            _checked_content(f"{name}['content']", plain["content"])
        checked.append(plain)  # type: ignore[arg-type]
    prompt = _checked_content("user_prompt", user_prompt)
    parts = [*content_parts([{"content": prompt}, *checked])]
    return Submission(
        job_name=plain_str(job_name),
        system_prompt=plain_str(system_prompt),
        user_prompt=prompt,
        params=checked_json_object("params", params if params is not None else {}),
        messages=tuple(checked),
        part_kinds=frozenset(part["type"] for part in parts),
        links_media=any(map(is_link, parts)),
    )


def content_parts(messages: object) -> Iterator[ContentPart]:
    """The content parts of the messages, which need not be valid."""
    for message in messages if isinstance(messages, Sequence) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping):
                yield part


def is_link(part: ContentPart) -> bool:
    """Whether the part is an image, a sound or a video that the server fetches by its URL. It does
    so before anything else, unseen, and waits over two minutes for a host that does not answer."""
    media = part.get(str(part.get("type")))
    urls = [media.get(key) for key in ("url", "data")] if isinstance(media, Mapping) else []
    return any(isinstance(url, str) and url.startswith("http") for url in urls)


def _checked_content(name: str, value: object) -> str | list[ContentPart]:
    """Text, or a copy of a list of parts; the server checks parts of unknown types."""
    if isinstance(value, str):
        checked_str(name, value)
        return plain_str(value)
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        raise TypeError(
            f"{name} must be a str or a list of content parts, not {type(value).__name__}: "
            f"{shown(value)}"
        )
    if not value:
        raise ConfigError(f"{name} must be a str or a list with at least one content part, not []")
    return [_checked_part(f"{name}[{index}]", part) for index, part in enumerate(value)]


def _checked_part(name: str, value: object) -> ContentPart:
    part = checked_json_object(name, value)
    kind = part.get("type")
    if not isinstance(kind, str) or not kind:
        kinds = ", ".join(map(repr, _PARTS))
        raise ConfigError(f"{name} needs a 'type', such as {kinds}, not {shown(kind)}")
    if kind == "text" and not isinstance(part.get("text"), str):
        raise ConfigError(
            f"{name} of type 'text' needs 'text', a str, not {shown(part.get('text'))}"
        )
    for field in _PARTS.get(kind, ()):
        inner = part.get(kind)
        if not (isinstance(inner, Mapping) and isinstance(inner.get(field), str)):
            raise ConfigError(
                f"{name} of type {kind!r} needs {kind!r}: {{{field!r}: a str}}, not {shown(inner)}"
            )
    return part
