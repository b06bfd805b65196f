"""The canary: one completion that a server has to get right before it is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llama_worker.config.profiles import Canary
from llama_worker.errors import described_error

_SHOWN_CHARS = 200


def canary_body(canary: Canary) -> dict[str, Any]:
    """The request: greedy, so that the same server says the same."""
    return {
        "messages": [{"role": "user", "content": canary.prompt}],
        "max_tokens": canary.max_tokens,
        "temperature": 0,
        "stream": False,
    }


def canary_problem(check: Callable[[str], bool], status: int, answer: Any) -> str | None:
    """What is wrong with the server's answer; None where `check`, the host's own, is content."""
    if status != 200:
        return f"the canary got HTTP {status}: {str(answer)[:_SHOWN_CHARS]}"
    text = _text_of(answer)
    try:
        fine = check(text)
    except BaseException as error:  # SystemExit in the host's code is its failure, no more
        return f"the canary's check raised {described_error(error)}"
    return None if fine else f"the canary's check refused the answer {text[:_SHOWN_CHARS]!r}"


def _text_of(answer: Any) -> str:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, str) else ""
