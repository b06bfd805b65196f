"""Ready-made exit tools: signals that a model sends upwards to the host's orchestrator. Data only.

    WorkerConfig(..., exit_tools=ALL_EXIT_TOOLS)

A call of one is recorded in the `signals` of its request; it is never executed or answered, and
does not end the request.
"""

from __future__ import annotations

from typing import Any

from llama_worker.types.chat import ToolDef


def _tool(
    name: str, description: str, required: list[str], **properties: dict[str, Any]
) -> ToolDef:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


SIGNAL_ISSUE = _tool(
    "signal_issue",
    "Report a problem that the orchestrator should know of: missing or contradictory input, a "
    "failing tool, a risk you noticed.",
    ["code", "severity", "summary"],
    code={
        "type": "string",
        "description": "Short machine-readable code in snake_case, for example missing_input.",
    },
    severity={
        "type": "string",
        "enum": ["info", "warning", "error", "critical"],
        "description": "info: good to know; critical: the work must not be used as it is.",
    },
    summary={"type": "string", "description": "What is wrong, in one or two sentences."},
)

REQUEST_ESCALATION = _tool(
    "request_escalation",
    "Ask that a more capable model or a person takes this work over.",
    ["reason"],
    reason={"type": "string", "description": "Why you should not finish this yourself."},
    needed={
        "type": "string",
        "description": "What the one who takes over must know or be able to do.",
    },
)

REQUEST_DECISION = _tool(
    "request_decision",
    (
        "Ask for a decision that is not yours to take. No answer comes back in this "
        "conversation: go on with the default."
    ),
    ["question", "options", "default"],
    question={"type": "string", "description": "The question, understandable by itself."},
    options={
        "type": "array",
        "items": {"type": "string"},
        "minItems": 2,
        "maxItems": 6,
        "description": "The possible answers, 2 to 6.",
    },
    default={
        "type": "string",
        "description": "The one of the options that holds if nobody decides.",
    },
)

DECLARE_OUTCOME = _tool(
    "declare_outcome",
    "Declare how the work ended. Call it once, at the end.",
    ["outcome", "summary"],
    outcome={
        "type": "string",
        "enum": ["success", "partial", "failure"],
        "description": "partial: usable, but something is missing.",
    },
    summary={"type": "string", "description": "What was done, and what is missing."},
)

ALL_EXIT_TOOLS: tuple[ToolDef, ...] = (
    SIGNAL_ISSUE,
    REQUEST_ESCALATION,
    REQUEST_DECISION,
    DECLARE_OUTCOME,
)
