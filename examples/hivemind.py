"""Two workers: one asks for a decision through an exit tool, the other takes it, a new request carries it back.

python examples/hivemind.py --server llama-server --model model.gguf

The program in the middle, the orchestrator, is this file. An exit tool is one-way: the model that asks gets no answer
in its conversation. What follows is the orchestrator's choice: here, a question to another worker, and then a new
request to the first one.

A large model needs no grammar; it is there because a small one seldom writes a tool call by itself.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from llama_worker import ExitSignal, LlamaWorker, RequestResult, WorkerConfig, free_port, llama_server_cmd
from llama_worker.exit_tools import REQUEST_DECISION

HOST = "127.0.0.1"
TASK = "Plan our team's picnic on Saturday. The weather forecast says rain."

# A sentence, then a call of `request_decision`, written the way of prompted mode.
ASKING = r"""
root ::= [A-Z] [a-z ,]{20,80} ". " call
call ::= "<tool_call>{\"name\": \"request_decision\", \"arguments\": " arguments "}</tool_call>"
arguments ::= "{\"question\": " question ", \"options\": [\"" first "\", \"" second "\"], \"default\": \"" first "\"}"
question ::= "\"Should we " [a-z ]{5,60} "?\""
first ::= "have it indoors"
second ::= "move it to Sunday"
"""
ONE_SENTENCE = """root ::= [A-Z] [A-Za-z0-9 ,']{20,160} "." """


def main() -> None:
    """Ask, decide, go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="the llama-server executable")
    parser.add_argument("--model", required=True, help="a GGUF file; both workers run it")
    options = parser.parse_args()

    def config(name: str, **more: Any) -> WorkerConfig:
        port = free_port()
        command = llama_server_cmd(
            options.model,
            host=HOST,
            port=port,
            slots=1,
            executable=options.server,
            extra_args=("--ctx-size", "4096"),
        )
        return WorkerConfig(name=name, host=HOST, port=port, server_cmd=command, **more)

    print("starting two servers ...", flush=True)
    planner_config = config("planner", exit_tools=[REQUEST_DECISION], tool_call_mode="prompted")
    with LlamaWorker(planner_config) as planner, LlamaWorker(config("judge")) as judge:
        draft = ask(planner, "draft", TASK, grammar=ASKING)
        print("planner:", draft["text"].strip())

        for number, signal in enumerate(decisions_wanted(draft)):
            wanted = signal["arguments"]
            print(f"planner asks: {wanted['question']} {wanted['options']}, else {wanted['default']!r}")
            decision = decide(judge, f"decision-{number}", wanted)
            print("judge decides:", decision)

            prompt = f"{TASK} It was decided to {decision}. Invite the team, in one sentence."
            plan = ask(planner, f"plan-{number}", prompt, grammar=ONE_SENTENCE)
            print("planner:", plan["text"].strip())
    print("stopped.")


def decisions_wanted(result: RequestResult) -> list[ExitSignal]:
    """The requests for a decision among the signals; one that the model wrote badly has no arguments to go by."""
    return [s for s in result["signals"] if s["tool_name"] == "request_decision" and "malformed" not in s]


def decide(judge: LlamaWorker, job_name: str, wanted: dict[str, Any]) -> str:
    """One of the options; the default where the judge fails."""
    choices = " | ".join(json.dumps(option) for option in wanted["options"])
    question = f"{wanted['question']} Choose one: {', '.join(wanted['options'])}."
    answer = ask(judge, job_name, question, grammar=f"root ::= {choices}")
    return answer["text"] if answer["state"] == "completed" else str(wanted["default"])


def ask(worker: LlamaWorker, job_name: str, prompt: str, **params: Any) -> RequestResult:
    """One request, waited for. An orchestrator with more to do would keep the future and go on."""
    params = {"temperature": 0, "max_tokens": 200, **params}
    admitted = worker.submit(job_name, "You are a planner. Be brief.", prompt, params=params).get()
    assert admitted["ok"], admitted
    result = worker.result(admitted["request_id"]).get(timeout=300)
    assert result["ok"], result
    return result


if __name__ == "__main__":
    main()
