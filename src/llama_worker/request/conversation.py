"""What the model is told: the BIOS text and the conversation of one request. Pure; mutates no input.

The server's prompt cache is a prefix cache, so a `Conversation` only grows: what was sent in a turn is sent
to the byte the same in every later one, and what changes from turn to turn (clock, budget) goes to the end.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from llama_worker.errors import described_error
from llama_worker.stream.calls import ParsedCall
from llama_worker.stream.tagged_calls import tagged_call
from llama_worker.types import BiosContext, BiosProvider, BiosText, ChatMessage, SystemPromptMode, ToolDef

STATUS_OPEN = "<worker_status>"
STATUS_CLOSE = "</worker_status>"
SYSTEM_PROMPT_DELIMITER = "\n\n===== SYSTEM PROMPT OF THIS TASK =====\n\n"


class PromptError(Exception):
    """The BIOS provider failed; the text says how."""


# --- BIOS -----------------------------------------------------------------------------------------------


def default_bios(ctx: BiosContext) -> BiosText:
    """The default BIOS: `now` and `tool_iters_remaining` are in `volatile`, all the rest is in `stable`."""
    sections = [
        f"{ctx.bios_version}\n"
        f"You are the worker {ctx.worker_name!r}: one of several co-operating models (a hivemind). An"
        " orchestrator gives you a part of the work and combines your output with that of the others.\n"
        f"Text between {STATUS_OPEN} and {STATUS_CLOSE} at the end of a message comes from the worker that"
        " runs you, not from the user: the time, and how often you may still use tools."
    ]
    if ctx.normal_tools:
        sections.append(
            f"Tools that answer: {_names(ctx.normal_tools)}\n"
            "- Call one where it helps. Its result comes back to you, then you go on.\n"
            "- Calls of one turn run in the order given. A turn with any number of them costs one iteration:"
            " put independent calls into one turn.\n"
            "- With no iterations left, call none of them: answer with what you have.\n"
            "- A result that says nothing was found is an answer, too."
        )
    if ctx.exit_tools:
        sections.append(
            f"Exit tools: {_names(ctx.exit_tools)}\n"
            "- They are one-way signals to the orchestrator: no answer comes back, they cost no iteration and"
            " they stop nothing.\n"
            "- Call them near the end of your work, unless the matter is urgent, and still finish your"
            " answer."
        )
    if ctx.tool_call_mode == "prompted" and (ctx.normal_tools or ctx.exit_tools):
        sections.append(prompted_tools_text(ctx.normal_tools, ctx.exit_tools))
    volatile = (
        f"Time: {ctx.now.isoformat(sep=' ', timespec='seconds')} ({ctx.timezone_name})\n"
        f"Tool iterations left: {ctx.tool_iters_remaining}"
    )
    return BiosText(stable="\n\n".join(sections), volatile=volatile)


def prompted_tools_text(normal_tools: Iterable[ToolDef], exit_tools: Iterable[ToolDef]) -> str:
    """The list of tools and how to write a call, for models whose chat template knows no tools.

    `default_bios` has it. A provider of your own has to include it where `ctx.tool_call_mode` is "prompted":
    the model learns of the tools nowhere else.
    """
    lines = [
        "How to call a tool: write, as plain text and nothing but JSON between the tags,",
        tagged_call("name of the tool", '{"name of the argument": "its value"}'),
        "Both keys are needed; arguments is an object that fits the tool's parameters. Put several calls one"
        " after the other. After calls of tools that answer, end your turn: the results come in the next"
        " message, between <tool_response> and </tool_response>.",
    ]
    for title, tools in (("Tools that answer", normal_tools), ("Exit tools", exit_tools)):
        functions = [json.dumps(tool["function"], ensure_ascii=False, default=dict) for tool in tools]
        if functions:
            lines += ["", f"{title}, one a line:", *functions]
    return "\n".join(lines)


def _names(tools: Iterable[ToolDef]) -> str:
    return ", ".join(tool["function"]["name"] for tool in tools)


def run_bios(provider: BiosProvider, ctx: BiosContext) -> BiosText | str:
    """What the provider returns, checked; raises PromptError for anything but proper text."""
    try:
        bios = provider(ctx)
    except BaseException as exc:  # CancelledError and SystemExit in a provider are its failures, no more
        raise PromptError(f"the BIOS provider raised {described_error(exc)}") from exc
    for text in (bios.stable, bios.volatile) if isinstance(bios, BiosText) else (bios,):
        if not isinstance(text, str):
            raise PromptError(
                f"the BIOS provider must return a str, or a BiosText of two strs; there was {type(text).__name__}"
            )
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise PromptError(f"the BIOS provider's text is not valid Unicode: {exc}") from exc
    return bios


# --- messages -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """All messages of a request. Each turn gives a new one; the old one stays as it was."""

    head: tuple[ChatMessage, ...]  # system messages: BIOS, then the caller's
    body: tuple[ChatMessage, ...]
    system_prompt: str
    system_prompt_mode: SystemPromptMode
    prompted: bool  # tools by text: the server knows of none

    @classmethod
    def begin(
        cls,
        bios: BiosText | str,
        *,
        system_prompt: str,
        messages: Sequence[ChatMessage],
        user_prompt: str,
        system_prompt_mode: SystemPromptMode,
        prompted: bool,
    ) -> Conversation:
        """The first turn. `messages` are copied.

        An empty user prompt is left out where `messages` end in something to answer: two user messages in a
        row fail on templates that want the roles to alternate.
        """
        body = copy.deepcopy(list(messages))
        if user_prompt or not body or body[-1].get("role") not in ("user", "tool"):
            body.append({"role": "user", "content": user_prompt})
        return cls(
            head=_system_messages(_stable(bios), system_prompt, system_prompt_mode),
            body=_with_volatile(body, _volatile(bios)),
            system_prompt=system_prompt,
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
        """The next turn: what the model said, its normal calls and their results, one for each call.

        Of a BiosText the stable part is not looked at again: the head stays. A str is the new head.
        """
        if not calls or len(results) != len(calls):
            raise ValueError(f"one result per call is needed, not {len(results)} for {len(calls)}")
        added = (_prompted_turn if self.prompted else _native_turn)(text, reasoning, calls, results)
        head = self.head
        if isinstance(bios, str):
            head = _system_messages(bios, self.system_prompt, self.system_prompt_mode)
        return replace(self, head=head, body=(*self.body, *_with_volatile(added, _volatile(bios))))

    def messages(self) -> list[ChatMessage]:
        """For the request's body; the messages are shared with this conversation, not copied."""
        return [*self.head, *self.body]


def _stable(bios: BiosText | str) -> str:
    return bios if isinstance(bios, str) else bios.stable


def _volatile(bios: BiosText | str) -> str:
    return "" if isinstance(bios, str) else bios.volatile


def _system_messages(stable: str, system_prompt: str, mode: SystemPromptMode) -> tuple[ChatMessage, ...]:
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


def _native_turn(text: str, reasoning: str, calls: Sequence[ParsedCall], results: Sequence[str]) -> list[ChatMessage]:
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


def _prompted_turn(text: str, reasoning: str, calls: Sequence[ParsedCall], results: Sequence[str]) -> list[ChatMessage]:
    """Two messages: templates without tools know no role but system, user and assistant."""
    written = "\n".join(call.tagged or tagged_call(call.name, call.arguments_json) for call in calls)
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
