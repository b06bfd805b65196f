"""The BIOS: what a worker tells a model before the host's own prompt. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable

from llama_worker.errors import described_error
from llama_worker.types.chat import ToolDef
from llama_worker.types.hooks import BiosContext, BiosProvider, BiosText

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"

STATUS_OPEN = "<worker_status>"
STATUS_CLOSE = "</worker_status>"

# When to call each exit tool of llama_worker.exit_tools.
_EXIT_TOOL_USES = {
    "signal_issue": (
        "your confidence is low, the input is missing or contradictory, or a tool fails. "
        "Say what it is, and how severe."
    ),
    "request_escalation": (
        "you need information from outside, or an ability that you lack. "
        "Say what is needed, and give what you have."
    ),
    "request_decision": (
        "a decision has to be taken by others. "
        "Put the question with its options, and go on with your default."
    ),
    "declare_outcome": "how the work ended: success, partial or failure. Once, at the end.",
}
_WITHOUT_CALLS = (
    "If you have no way of your own to call a tool, write the call as plain text: an XML element "
    'named tool_call that holds nothing but a JSON object with the keys "name" and "arguments".'
)


def tagged_call(name: str, arguments_json: str) -> str:
    """A tool call as a model writes it in prompted mode."""
    return f'{CALL_OPEN}{{"name": {json.dumps(name)}, "arguments": {arguments_json}}}{CALL_CLOSE}'


class PromptError(Exception):
    """The BIOS provider failed; the text says how."""


def default_bios(ctx: BiosContext) -> BiosText:
    """The default BIOS: `now` and `tool_iters_remaining` are in `volatile`, all the rest is in
    `stable`.

    It mentions tools only if there are any; without tools it is three lines and the time.
    """
    sections = [
        f"{ctx.bios_version}\n"
        f"You are worker {ctx.worker_name!r} in a hivemind of co-operating models.\n"
        f"What {STATUS_OPEN} says is from your worker, not the user."
    ]
    if ctx.normal_tools:
        sections.append(
            f"Tools that answer: {_names(ctx.normal_tools)}\n"
            "- Call one where it helps. Its result comes back to you, then you go on.\n"
            "- Calls of one turn run in the order given. A turn with any number of them "
            "costs one iteration: put independent calls into one turn.\n"
            "- With no iterations left, call none of them: answer with what you have.\n"
            "- A result that says nothing was found is an answer, too."
        )
    if ctx.exit_tools:
        names = [tool["function"]["name"] for tool in ctx.exit_tools]
        uses = [
            f"- {name}: {_EXIT_TOOL_USES.get(name, 'as its description says.')}" for name in names
        ]
        rules = (
            f"Exit tools: {', '.join(names)}",
            "- They are one-way signals to the orchestrator: no answer comes back, they cost no "
            "iteration and they stop nothing.",
            "- Call them near the end of your work, unless the matter is urgent, and still finish "
            "your answer.",
        )
        sections.append("\n".join((*rules, *uses)))
    if ctx.normal_tools or ctx.exit_tools:
        prompted = ctx.tool_call_mode == "prompted"
        sections.append(
            prompted_tools_text(ctx.normal_tools, ctx.exit_tools) if prompted else _WITHOUT_CALLS
        )
    volatile = f"Time: {ctx.now.isoformat(sep=' ', timespec='seconds')} ({ctx.timezone_name})"
    if ctx.normal_tools:
        volatile += f"\nTool iterations left: {ctx.tool_iters_remaining}"
    return BiosText(stable="\n\n".join(sections), volatile=volatile)


def prompted_tools_text(normal_tools: Iterable[ToolDef], exit_tools: Iterable[ToolDef]) -> str:
    """The list of tools and how to write a call, for models whose chat template knows no tools.

    `default_bios` includes it. A provider of your own must include it if `ctx.tool_call_mode` is
    "prompted": nothing else tells the model about the tools.
    """
    lines = [
        "How to call a tool: write, as plain text and nothing but JSON between the tags,",
        tagged_call("name of the tool", '{"name of the argument": "its value"}'),
        "Both keys are needed; arguments is an object that fits the tool's parameters. Put several "
        "calls one after the other. After calls of tools that answer, end your turn: the results "
        "come in the next message, between <tool_response> and </tool_response>.",
    ]
    for title, tools in (("Tools that answer", normal_tools), ("Exit tools", exit_tools)):
        functions = [
            json.dumps(tool["function"], ensure_ascii=False, default=dict) for tool in tools
        ]
        if functions:
            lines += ["", f"{title}, one a line:", *functions]
    return "\n".join(lines)


def _names(tools: Iterable[ToolDef]) -> str:
    return ", ".join(tool["function"]["name"] for tool in tools)


def no_bios(ctx: BiosContext) -> str:
    """The BIOS for `bios_provider=None`: empty, or in prompted mode the list of tools."""
    tools = ctx.normal_tools or ctx.exit_tools
    if tools and ctx.tool_call_mode == "prompted":
        return prompted_tools_text(ctx.normal_tools, ctx.exit_tools)
    return ""


def run_bios(provider: BiosProvider | None, ctx: BiosContext) -> BiosText | str:
    """Call the provider; raises PromptError if it raises, or returns anything but valid text."""
    try:
        bios = no_bios(ctx) if provider is None else provider(ctx)
        return _plain(bios)  # what it reads may raise, too
    except PromptError:
        raise
    except BaseException as exc:  # CancelledError and SystemExit, too: only the prompt fails
        raise PromptError(f"the BIOS provider raised {described_error(exc)}") from exc


def _plain(bios: object) -> BiosText | str:
    plain: list[str] = []
    for text in (bios.stable, bios.volatile) if isinstance(bios, BiosText) else (bios,):
        if not isinstance(text, str):
            raise PromptError(
                "the BIOS provider must return a str, or a BiosText of two strs, not "
                f"{type(text).__name__}"
            )
        plain.append(str.__str__(text))  # a subclass may hold what cannot be copied
        try:
            plain[-1].encode()
        except UnicodeEncodeError as exc:
            raise PromptError(f"the BIOS provider's text is not valid Unicode: {exc}") from exc
    return BiosText(*plain) if isinstance(bios, BiosText) else plain[0]
