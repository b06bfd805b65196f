"""Builds what a turn sends: the BIOS, the messages and the request body. Pure; mutates no input.

The server's prompt cache is a prefix cache, so the messages of a request only grow: what one turn
sends, every later turn repeats byte for byte, and what changes from turn to turn (clock, budget)
goes to the end.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from llama_worker.bios import STATUS_CLOSE, STATUS_OPEN, PromptError, run_bios, tagged_call
from llama_worker.config.settings import WorkerConfig
from llama_worker.request.messages import BiosWritten, WriteBios
from llama_worker.request.params import OWNED_PARAMS, TEMPLATE_PARAMS, TOKEN_LIMITS
from llama_worker.request.submission import Submission
from llama_worker.request.turn import ToolBatch, Turn
from llama_worker.stream.calls import ParsedCall
from llama_worker.stream.lazy_reading import MAX_HOLD_S, WAKE_INTERVAL_S
from llama_worker.types.chat import ChatMessage
from llama_worker.types.hooks import BiosContext, BiosText

SYSTEM_PROMPT_DELIMITER = "\n\n===== SYSTEM PROMPT OF THIS TASK =====\n\n"


class Prompts:
    """The prompts of one request's turns: each continues the one before. Not thread-safe.

    `prompted`: tools by text, the server is sent none.
    """

    def __init__(self, config: WorkerConfig, submission: Submission, *, prompted: bool) -> None:
        self.prompted = prompted
        self._config = config
        self._submission = submission
        earlier = submission.messages
        # a second system message is lost, or refused, by many templates
        leading = itertools.takewhile(_instructs, earlier if self._is_merged else ())
        self._instructions = [_text_of(message) for message in leading]
        self._earlier = earlier[len(self._instructions) :]
        self._head: list[ChatMessage] = []  # system messages: BIOS, then the caller's
        self._body: list[ChatMessage] = []  # empty before a BIOS was written
        # where the user prompt is in the body, or would be; the caller's messages come before
        self._prompt_at = len(self._earlier)

    @property
    def _is_merged(self) -> bool:
        return self._config.system_prompt_mode == "merged"

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters that the host sets."""
        return {**self._config.default_params, **self._submission.params}

    @property
    def keep_template_end(self) -> bool:
        """Whether no parameter changes how the template ends the prompt."""
        return TEMPLATE_PARAMS.isdisjoint(self.params)

    @property
    def max_hold_s(self) -> float:
        """How long text may be held back: less in prompted mode, as it may hold a signal."""
        return WAKE_INTERVAL_S if self.prompted and self._config.exit_tools else MAX_HOLD_S

    def next_body(
        self, bios: BiosText | str, after: tuple[Turn, ToolBatch] | None = None
    ) -> dict[str, Any]:
        """The body of the turn that begins now; `after`: the turn that it continues, with the
        results of its calls.

        After the first turn the stable part of a BiosText is ignored: the head stays. A str is the
        new head.
        """
        if after is None or isinstance(bios, str):
            stable = bios if isinstance(bios, str) else bios.stable
            texts = (stable, self._submission.system_prompt, *self._instructions)
            self._head = _system_messages(texts, merged=self._is_merged)
        if after is None:
            self._body, added = [], self._first_messages()
        else:
            turn, batch = after
            of_turn = _prompted_turn if self.prompted else _native_turn
            added = of_turn(turn.text, turn.reasoning, batch.calls, batch.results)
        self._body = [*self._body, *_with_volatile(added, bios)]
        messages = [*self._head, *self._body]
        return request_body(
            self._config,
            self._submission.params,
            messages,
            prompted=self.prompted,
            after_calls=after is not None,
        )

    def _first_messages(self) -> list[ChatMessage]:
        """The caller's messages and the user prompt.

        An empty prompt is left out if the messages end in something to answer: two user messages in
        a row fail on templates that require the roles to alternate.
        """
        messages, user_prompt = list(self._earlier), self._submission.user_prompt
        if self.prompted:
            messages = _as_prompted(messages)
        self._prompt_at = len(messages)
        if user_prompt or not messages or messages[-1].get("role") not in ("user", "tool"):
            messages.append({"role": "user", "content": user_prompt})
        return messages

    def since_prompt(self, *, text: str, reasoning: str, has_answered: bool) -> list[ChatMessage]:
        """The messages from the user prompt on, with what the model said in the last turn, for a
        follow-up.

        The answer may be empty, for instance if the model called only exit tools.
        """
        answer = [_assistant(text, reasoning)] if has_answered or text or reasoning else []
        return [*self._body[self._prompt_at :], *answer]


def _instructs(message: ChatMessage) -> bool:
    return message.get("role") in ("system", "developer") and _text_of(message) is not None


def _system_messages(texts: Iterable[str | None], *, merged: bool) -> list[ChatMessage]:
    shown = [text for text in texts if text]
    if merged and shown:
        shown = [SYSTEM_PROMPT_DELIMITER.join(shown)]
    return [{"role": "system", "content": text} for text in shown]


def _with_volatile(messages: list[ChatMessage], bios: BiosText | str) -> list[ChatMessage]:
    """The messages with the volatile part of the BIOS, delimited, at the end of a copy of the last
    one."""
    if isinstance(bios, str) or not bios.volatile:
        return messages
    status = f"{STATUS_OPEN}\n{bios.volatile}\n{STATUS_CLOSE}"
    last = messages[-1].copy()
    content = last.get("content")
    if isinstance(content, list):
        last["content"] = [*content, {"type": "text", "text": f"\n\n{status}"}]
    else:
        last["content"] = f"{content}\n\n{status}" if content else status
    return [*messages[:-1], last]


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
    """Two messages: templates without tools know only the roles system, user and assistant."""
    written = "\n".join(
        call.tagged or tagged_call(call.name, call.arguments_json) for call in calls
    )
    answers = "\n".join(
        _tool_response(call.id, call.name, result)
        for call, result in zip(calls, results, strict=True)
    )
    return [_assistant(text + written, reasoning), {"role": "user", "content": answers}]


def _tool_response(call_id: str, name: str, result: str) -> str:
    return f'<tool_response id="{call_id}" name="{name}">\n{result}\n</tool_response>'


def _as_prompted(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Rewrite the tool turns of a native conversation, such as another model's, in the form of
    `_prompted_turn`. Messages that are not only text stay as they are."""
    names: dict[str, str] = {}  # by id, of the calls so far: other programs reuse ids
    body: list[ChatMessage] = []
    for is_answer, group in itertools.groupby(
        messages, lambda message: message.get("role") == "tool" and _text_of(message) is not None
    ):
        if is_answer:
            answers = []
            for message in group:
                call_id = str(message.get("tool_call_id", ""))
                text = _text_of(message) or ""
                answers.append(_tool_response(call_id, names.get(call_id, ""), text))
            body.append({"role": "user", "content": "\n".join(answers)})
            continue
        for message in group:
            calls, said = _calls_of(message), _text_of(message)
            names.update((call_id, name) for call_id, name, _ in calls)
            if calls and said is not None:
                written = "\n".join(tagged_call(name, arguments) for _, name, arguments in calls)
                message = message.copy()
                message.pop("tool_calls", None)
                message["content"] = said + written
            body.append(message)
    return body


def _calls_of(message: ChatMessage) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call; the host's messages may hold anything."""
    calls: Any = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments") or {}
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            found.append((str(call.get("id")), str(function.get("name")), arguments))
    return found


def _text_of(message: ChatMessage) -> str | None:
    """The content if it is only text, else None."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if any(part["type"] != "text" for part in content):
        return None
    return "\n".join(part["text"] for part in content)


def _assistant(text: str, reasoning: str) -> ChatMessage:
    """Reasoning in its own field, content never null: every template accepts that."""
    message: ChatMessage = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


# ---------------------------------------------------------------- the body


def request_body(
    config: WorkerConfig,
    params: Mapping[str, Any],
    messages: list[ChatMessage],
    *,
    prompted: bool,
    after_calls: bool,
) -> dict[str, Any]:
    """The body of the chat request. The caller's parameters override the worker's defaults, but not
    `OWNED_PARAMS`. In prompted mode only the prompt tells the model of the tools.

    A `tool_choice` that forces a call holds until the first calls: a model that must call in every
    turn never answers.
    """
    body: dict[str, Any] = {
        "return_progress": True,
        "stream_options": {"include_usage": True},
        "reasoning_format": "deepseek",
        "sse_ping_interval": 10,
    }
    if config.max_tokens is not None:
        body["max_tokens"] = config.max_tokens
    for given in (config.default_params, params):
        if not given.keys().isdisjoint(TOKEN_LIMITS):  # one limit, under any of its names
            body = {name: value for name, value in body.items() if name not in TOKEN_LIMITS}
        body.update(given)
    for owned in OWNED_PARAMS:
        body.pop(owned, None)
    body["messages"] = messages
    tools = [*config.normal_tools, *config.exit_tools]
    if tools and not prompted:
        body["tools"] = tools
    # without --jinja the server refuses any choice (b11434)
    if prompted or (after_calls and body.get("tool_choice") not in ("auto", "none")):
        body.pop("tool_choice", None)
    body["stream"] = True
    return body


# ---------------------------------------------------------------- the BIOS


def write_bios(order: WriteBios, config: WorkerConfig, unix_now: float) -> BiosWritten:
    """Ask the provider, which is the host's own code, on the calling thread."""
    left, prompted = order.iterations_left, order.prompted
    try:
        bios = bios_text(config, unix_now, iterations_left=left, prompted=prompted)
        return BiosWritten(turn_id=order.turn_id, bios=bios, error=None)
    except PromptError as error:
        return BiosWritten(turn_id=order.turn_id, bios="", error=str(error))


def bios_text(
    config: WorkerConfig, unix_now: float, *, iterations_left: int, prompted: bool
) -> BiosText | str:
    """Call the provider, on the calling thread; raises PromptError.

    `unix_now` is the wall clock's time, correct also after the machine was suspended.
    """
    context = BiosContext(
        now=datetime.fromtimestamp(unix_now, config.timezone),
        timezone_name=config.timezone_name,
        worker_name=config.name,
        tool_iters_remaining=iterations_left,
        normal_tools=tuple(config.normal_tools),
        exit_tools=tuple(config.exit_tools),
        tool_call_mode="prompted" if prompted else "native",
    )
    return run_bios(config.bios_provider, context)
