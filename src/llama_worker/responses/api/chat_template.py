"""Adapts a conversation to the model's chat template. Pure.

A template that lacks or refuses something is found out by a probe: a body for `/apply-template`.
Messages are only changed where the template needs it, and the messages of one turn still begin with
those of the turn before: llama-server's prompt cache needs that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]

_TURNS = ("user", "assistant")
_REASONING = "reasoning_content"
# Put between a call's result and the user's message: OpenCode sends Mistral's models the same.
_ANSWER: Message = {"role": "assistant", "content": "Done."}


def _probe(*roles: str) -> Message:
    return {
        "messages": [
            {"role": role, "content": f"probe-{number}"} for number, role in enumerate(roles)
        ]
    }


def is_rendered(probe: Message, prompt: object) -> bool:
    """Whether the prompt, from the answer to the probe, has all of its messages in their order."""
    if not isinstance(prompt, str):
        return False
    places = [prompt.find(message["content"]) for message in probe["messages"]]
    return -1 not in places and places == sorted(places)


def late_instructions_as_user(messages: Sequence[Message]) -> list[Message]:
    """The messages with late system messages as user messages, for templates that lose them."""
    late = [{**one, "role": "user"} if one["role"] == "system" else one for one in messages[1:]]
    return [*messages[:1], *late]


def alternating(messages: Sequence[Message]) -> list[Message]:
    """The messages with user and assistant in turn, calls and their results aside, for templates
    that refuse anything else: adjacent messages of one role become one, also an answer and the
    calls after it, and a short answer comes between a result and a user's message."""
    adapted: list[Message] = []
    role_before = ""  # of the latest message that counts
    for run in _runs(messages):
        role = run[0]["role"]
        if role in _TURNS and not _calls(run[-1]):
            if role == role_before == "user":
                adapted.append(_ANSWER)
            role_before = role
        adapted.append(_merged(run))
    return adapted


def _runs(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Those that become one message."""
    run: list[Message] = []
    for message in messages:
        role = message["role"]
        if run and (role not in _TURNS or role != run[-1]["role"] or _calls(run[-1])):
            yield run
            run = []
        run.append(message)
    if run:
        yield run


def _calls(message: Message) -> bool:
    return bool(message.get("tool_calls"))


def _merged(run: list[Message]) -> Message:
    """Messages of one role as one: texts joined by a blank line, parts in their order."""
    if len(run) == 1:
        return run[0]
    contents = [message["content"] for message in run if message["content"]]
    if all(isinstance(content, str) for content in contents):
        content: Any = "\n\n".join(contents)
    else:
        parts = [part for content in contents for part in (*_parts("\n\n"), *_parts(content))]
        content = parts[1:]
    merged = {**run[0], **run[-1], "content": content}
    thoughts = [message[_REASONING] for message in run if message.get(_REASONING)]
    return {**merged, _REASONING: "\n\n".join(thoughts)} if thoughts else merged


def _parts(content: str | list[Message]) -> list[Message]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


ADAPTERS = (
    (_probe("system", "user", "assistant", "system", "user"), late_instructions_as_user),
    (_probe("user", "user"), alternating),
)
"""What some templates drop, move or refuse, as the probe that shows it, and how to do without."""
