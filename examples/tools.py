"""A normal tool and an exit tool: the model asks for a sum, gets it, and signals that it is done.

    python examples/tools.py --server llama-server --model model.gguf

The example helps a small model with a grammar, and with a conversation that shows how it is done; a
large model needs neither. The grammar writes tool calls as in prompted mode, so that mode is set;
otherwise leave it at "auto".
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from llama_worker import BiosContext, ChatMessage, LlamaWorker, RequestFailed, ToolDef, default_bios
from llama_worker.exit_tools import DECLARE_OUTCOME

ADD: ToolDef = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}

# Every turn either calls `add`, or answers in one sentence and declares the outcome. The model
# chooses which of the two, and the numbers.
GRAMMAR = r"""
root ::= add | answer
add ::= "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": " number ", \"b\": " number "}}</tool_call>"
answer ::= sentence " " outcome
sentence ::= "The sum of " number " and " number " is " number "."
outcome ::= "<tool_call>{\"name\": \"declare_outcome\", \"arguments\": {\"outcome\": \"success\", \"summary\": " string "}}</tool_call>"
number ::= [1-9] [0-9]{0,5}
string ::= "\"" [a-zA-Z0-9 ,.]{1,60} "\""
"""


def shown(a: int, b: int) -> list[ChatMessage]:
    """One finished example, as if it were part of the conversation."""
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    outcome = f'{{"outcome": "success", "summary": "Added {a} and {b}."}}'
    return [
        {"role": "user", "content": f"What is {a} plus {b}?"},
        {"role": "assistant", "content": call},
        {
            "role": "user",
            "content": (
                f'<tool_response id="c00000001" name="add">\n{{"sum": {a + b}}}\n</tool_response>'
            ),
        },
        {
            "role": "assistant",
            "content": f"The sum of {a} and {b} is {a + b}. "
            f'<tool_call>{{"name": "declare_outcome", "arguments": {outcome}}}</tool_call>',
        },
    ]


def bios(ctx: BiosContext) -> str:
    """The default without its volatile part (the time, the iterations left), which distracts a small
    model."""
    return default_bios(ctx).stable


class Calculator:
    """The host's tools. Called on a thread of its own; it may take its time, up to
    `tool_timeout_s`."""

    def run_tool(
        self, *, name: str, arguments: Mapping[str, Any], request_id: int, job_name: str
    ) -> Any:
        """Any JSON value goes back to the model; an exception fails the request."""
        if name == "add":
            return {"sum": arguments["a"] + arguments["b"]}
        raise LookupError(f"no tool {name!r}")


def main() -> None:
    """Make one request with two turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", required=True, help="the llama-server executable")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--port", type=int, help="a free port (default: one is chosen)")
    options = parser.parse_args()
    worker = LlamaWorker.from_model(
        options.model,
        name="tools",
        port=options.port,
        executable=options.server,
        extra_args=("--ctx-size", "4096"),
        normal_tools=[ADD],
        tool_runner=Calculator(),
        exit_tools=[DECLARE_OUTCOME],
        tool_call_mode="prompted",
        bios_provider=bios,
    )

    print("starting the server ...", flush=True)
    with worker:
        asked = worker.ask(
            "What is 17 plus 25?",
            system_prompt="You add numbers. Call add first, then answer with its result.",
            params={"grammar": GRAMMAR, "temperature": 0, "max_tokens": 200},
            messages=[*shown(12, 30), *shown(7, 51)],
        )
        try:
            result = asked.get(timeout=300)
        except RequestFailed as failed:
            result = failed.result  # it still has all output that came
    for call in result["tool_trace"]:
        print(
            f"called: {call['tool_name']}({call['arguments']}), {call['duration_s'] * 1000:.1f} ms"
        )
    print("text:  ", result["text"])
    for signal in result["signals"]:
        print(f"signal: {signal['tool_name']} {signal['arguments']}")
    print(f"{result['state']}, {result.get('fail_detail', result['finish_reason'])}")


if __name__ == "__main__":
    main()
