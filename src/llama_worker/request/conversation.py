"""The conversation of one request: the messages of its turns. Pure; mutates no input.

The server's prompt cache is a prefix cache, so a `Conversation` only grows: what was sent in a turn
is sent to the byte the same in every later one, and what changes from turn to turn (clock, budget)
goes to the end.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from llama_worker.bios import STATUS_CLOSE, STATUS_OPEN
from llama_worker.request.submission import Submission
from llama_worker.stream.calls import ParsedCall
from llama_worker.stream.tagged_calls import tagged_call
from llama_worker.types import BiosText, ChatMessage, SystemPromptMode

SYSTEM_PROMPT_DELIMITER = "\n\n===== SYSTEM PROMPT OF THIS TASK =====\n\n"


class Conversation(Struct, frozen=True, kw_only=True):
    """All messages of a request. Each turn gives a new one; the old one stays as it was."""

    head: tuple[ChatMessage, ...]  # system messages: BIOS, then the caller's
    body: tuple[ChatMessage, ...]
    prompt_at: int  # where in the body the user prompt is; before it is what the caller had
    system_prompt: str
    system_prompt_mode: SystemPromptMode
    prompted: bool  # tools by text: the server knows of none

    @classmethod
    def begin(
        cls,
        bios: BiosText | str,
        submission: Submission,
        *,
        system_prompt_mode: SystemPromptMode,
        prompted: bool,
    ) -> Conversation:
        """The first turn.

        An empty user prompt is left out where the submission's messages end in something to answer:
        two user messages in a row fail on templates that want the roles to alternate.
        """
        body, user_prompt = copy.deepcopy(list(submission.messages)), submission.user_prompt
        if user_prompt or not body or body[-1].get("role") not in ("user", "tool"):
            body.append({"role": "user", "content": user_prompt})
        return cls(
            head=_system_messages(_stable(bios), submission.system_prompt, system_prompt_mode),
            body=_with_volatile(body, _volatile(bios)),
            prompt_at=len(body) - 1,
            system_prompt=submission.system_prompt,
            system_prompt_mode=system_prompt_mode,
            prompted=prompted,
        )

    def after_tools(
        self,
        bios: BiosText | str,
        *,
        text: str,
        reasoning: str,
        calls: Sequence[ParsedCall],
        results: Sequence[str],
    ) -> Conversation:
        """The next turn: what the model said, its normal calls and their results, one for each
        call.

        Of a BiosText the stable part is not looked at again: the head stays. A str is the new head.
        """
        if not calls or len(results) != len(calls):
            raise ValueError(f"one result per call is needed, not {len(results)} for {len(calls)}")
        added = (_prompted_turn if self.prompted else _native_turn)(text, reasoning, calls, results)
        head = self.head
        if isinstance(bios, str):
            head = _system_messages(bios, self.system_prompt, self.system_prompt_mode)
        return replace(self, head=head, body=(*self.body, *_with_volatile(added, _volatile(bios))))

    def since_prompt(self, *, text: str, reasoning: str) -> list[ChatMessage]:
        """From the user prompt on, with what the model said to the last of it: what a follow-up has
        between its `messages` and its own prompt."""
        said = [_assistant(text, reasoning)] if text or reasoning else []
        return [*self.body[self.prompt_at :], *said]

    def messages(self) -> list[ChatMessage]:
        """For the request's body; the messages are shared with this conversation, not copied."""
        return [*self.head, *self.body]


def _stable(bios: BiosText | str) -> str:
    return bios if isinstance(bios, str) else bios.stable


def _volatile(bios: BiosText | str) -> str:
    return "" if isinstance(bios, str) else bios.volatile


def _system_messages(
    stable: str, system_prompt: str, mode: SystemPromptMode
) -> tuple[ChatMessage, ...]:
    texts = [text for text in (stable, system_prompt) if text]
    if mode == "merged":
        texts = [SYSTEM_PROMPT_DELIMITER.join(texts)] if texts else []
    return tuple({"role": "system", "content": text} for text in texts)


def _with_volatile(messages: list[ChatMessage], volatile: str) -> tuple[ChatMessage, ...]:
    """The messages, `volatile` delimited at the end of the last one, which is replaced."""
    if not volatile:
        return tuple(messages)
    status = f"{STATUS_OPEN}\n{volatile}\n{STATUS_CLOSE}"
    last = messages[-1].copy()
    content = last.get("content")
    if isinstance(content, list):
        last["content"] = [*content, {"type": "text", "text": f"\n\n{status}"}]
    else:
        last["content"] = f"{content}\n\n{status}" if content else status
    return (*messages[:-1], last)


def _native_turn(
    text: str, reasoning: str, calls: Sequence[ParsedCall], results: Sequence[str]
) -> list[ChatMessage]:
    assistant = _assistant(text, reasoning)
    assistant["tool_calls"] = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_json},
        }
        for call in calls
    ]
    answers: list[ChatMessage] = [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}
        for call, result in zip(calls, results, strict=True)
    ]
    return [assistant, *answers]


def _prompted_turn(
    text: str, reasoning: str, calls: Sequence[ParsedCall], results: Sequence[str]
) -> list[ChatMessage]:
    """Two messages: templates without tools know no role but system, user and assistant."""
    written = "\n".join(
        call.tagged or tagged_call(call.name, call.arguments_json) for call in calls
    )
    answers = "\n".join(
        f'<tool_response id="{call.id}" name="{call.name}">\n{result}\n</tool_response>'
        for call, result in zip(calls, results, strict=True)
    )
    return [_assistant(text + written, reasoning), {"role": "user", "content": answers}]


def _assistant(text: str, reasoning: str) -> ChatMessage:
    """Reasoning in its own field, content never null: what every template takes."""
    message: ChatMessage = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message
