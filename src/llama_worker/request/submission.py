"""What a host submits, checked. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llama_worker.errors import ConfigError
from llama_worker.types import ChatMessage
from llama_worker.validation import checked_json_object, checked_str, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a host asks of the model; checked and copied."""

    job_name: str
    system_prompt: str
    user_prompt: str
    params: dict[str, Any]
    messages: tuple[ChatMessage, ...]


def validate_submit(
    job_name: str,
    system_prompt: str,
    user_prompt: str,
    params: Mapping[str, Any] | None,
    messages: Iterable[ChatMessage] | None,
) -> Submission:
    """Raises TypeError or ConfigError for what could not be sent to a server."""
    for name, text in (
        ("job_name", job_name),
        ("system_prompt", system_prompt),
        ("user_prompt", user_prompt),
    ):
        checked_str(name, text)
    if messages is None:
        messages = ()
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(f"messages must be a sequence of messages, not {type(messages).__name__}: {shown(messages)}")
    checked: list[ChatMessage] = []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        plain = checked_json_object(name, message)
        if not isinstance(plain.get("role"), str) or not plain["role"]:
            raise ConfigError(f"{name} needs a 'role' that is a non-empty str, not {shown(plain.get('role'))}")
        checked.append(plain)  # type: ignore[arg-type]
    return Submission(
        job_name=job_name,
        system_prompt=system_prompt,
        user_prompt=user_prompt,
        params=checked_json_object("params", params if params is not None else {}),
        messages=tuple(checked),
    )
