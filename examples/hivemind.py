"""Two workers: one asks for a decision through an exit tool, the other decides, and a new request
carries the decision back.

    python examples/hivemind.py --server llama-server --model model.gguf

This file is the program in the middle, the orchestrator. An exit tool is one-way: the model that
asks gets no answer in its conversation. The orchestrator decides what follows. Here it asks another
worker at once, while the first model is still generating, and then sends the first a new request.

The grammar is there because a small model seldom writes a tool call by itself; a large one needs
none.
"""

from __future__ import annotations

import argparse
import json
import queue
from typing import Any

from llama_worker import ExitSignal, LlamaWorker, RequestFailed, RequestResult
from llama_worker.exit_tools import REQUEST_DECISION

TASK = "Plan our team's picnic on Saturday. The weather forecast says rain."

# A call of `request_decision`, written as in prompted mode, and then a long invitation.
ASKING = r"""
root ::= call " " invitation
call ::= "<tool_call>{\"name\": \"request_decision\", \"arguments\": " arguments "}</tool_call>"
arguments ::= "{\"question\": " question ", \"options\": [\"" first "\", \"" second "\"], \"default\": \"" first "\"}"
question ::= "\"Should we " [a-z ]{5,60} "?\""
first ::= "have it indoors"
second ::= "move it to Sunday"
invitation ::= [A-Z] [a-z ,]{500,600} "."
"""
ONE_SENTENCE = """root ::= [A-Z] [A-Za-z0-9 ,']{20,160} "." """

wanted: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()


def note(signal: ExitSignal, *, request_id: int, job_name: str) -> None:
    """On the thread of callbacks. A call that the model wrote badly has no arguments to go by."""
    if signal["tool_name"] == "request_decision" and "malformed" not in signal:
        wanted.put((request_id, signal["arguments"]))


def main() -> None:
    """Let the planner ask, let the judge decide, let the planner go on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", required=True, help="the llama-server executable")
    parser.add_argument("--model", required=True, help="a GGUF file; both workers run it")
    options = parser.parse_args()

    def worker(name: str, **config: Any) -> LlamaWorker:
        return LlamaWorker.from_model(
            options.model,
            name=name,
            executable=options.server,
            extra_args=("--ctx-size", "4096"),
            **config,
        )

    print("starting two servers ...", flush=True)
    planner_tools = {
        "exit_tools": [REQUEST_DECISION],
        "tool_call_mode": "prompted",
        "on_signal": note,
    }
    with worker("planner", **planner_tools) as planner, worker("judge") as judge:
        draft = planner.ask(TASK, job_name="draft", params=params(ASKING))
        request_id, asked = wanted.get(timeout=300)
        print(f"planner asks: {asked['question']} {asked['options']}, else {asked['default']!r}")
        decision = decide(judge, asked)
        status = planner.get_status(request_id).get()
        state = status["state"] if status["ok"] else "over"
        print(f"judge decides: {decision} (the planner's draft: {state})")

        planner.cancel(request_id).get()  # its draft lacks the decision, and is of no use any more
        try:
            print("planner's draft:", draft.get(timeout=300)["state"])
        except RequestFailed as cut_short:
            print("planner's draft:", cut_short.result["state"])
        plan = ask(
            planner,
            f"{TASK} It was decided to {decision}. Invite the team, in one sentence.",
            ONE_SENTENCE,
        )
        print("planner:", plan["text"].strip())
    print("stopped.")


def decide(judge: LlamaWorker, asked: dict[str, Any]) -> str:
    """One of the options; the default where the judge fails."""
    choices = " | ".join(json.dumps(option) for option in asked["options"])
    question = f"{asked['question']} Choose one: {', '.join(asked['options'])}."
    try:
        return ask(judge, question, grammar=f"root ::= {choices}")["text"]
    except RequestFailed:
        return str(asked["default"])


def ask(worker: LlamaWorker, prompt: str, grammar: str) -> RequestResult:
    """Make one request and wait. An orchestrator with more to do would keep the future and go on."""
    return worker.ask(
        prompt, system_prompt="You are a planner. Be brief.", params=params(grammar)
    ).get(timeout=300)


def params(grammar: str) -> dict[str, Any]:
    """Request params that make a small model write what the example needs."""
    return {"temperature": 0, "max_tokens": 400, "grammar": grammar}


if __name__ == "__main__":
    main()
