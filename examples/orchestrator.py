"""A hivemind: models with roles that send each other messages. While they work, one is swapped for
another model, and the server of one is killed.

    python examples/orchestrator.py planner.gguf coder.gguf critic.gguf \\
        --next-coder better.gguf "Write a program that prints the first ten primes."

A model speaks through two exit tools: `tell` sends text to another role, `declare_outcome` ends the
work. This program is a loop over one queue: the workers' callbacks only put work into it, so that
nothing here needs a lock. A worker neither queues nor replays; this program does.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llama_worker import ExitSignal, LlamaWorker, RestartPolicy, ToolDef, WorkerFuture
from llama_worker.exit_tools import DECLARE_OUTCOME

ROLES = {
    "planner": "You plan. Tell the coder what to write; declare the outcome once it is done.",
    "coder": "You write what you are told to. Tell the critic about it.",
    "critic": "You look for mistakes. Tell the coder about them, or the planner that all is well.",
}
TELL: ToolDef = {
    "type": "function",
    "function": {
        "name": "tell",
        "description": "Send a message to another model. No answer comes back to this call.",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"type": "string", "enum": list(ROLES)},
                "text": {"type": "string"},
            },
            "required": ["to", "text"],
        },
    },
}
TRIES = 3
WORTH_ANOTHER_TRY = {"server_died", "worker_restarted", "stream_disconnected", "connect_failed"}


@dataclass(frozen=True)
class Message:
    """A message between two roles; `tries`: how often it failed because a server was lost."""

    sender: str
    to: str
    text: str
    tries: int = 0


class Hive:
    """The workers, by role, and the messages that wait for them. One thread runs all of it."""

    def __init__(self, stack: ExitStack) -> None:
        self.workers: dict[str, LlamaWorker] = {}
        self.outcome: str | None = None
        self.at_first_request: dict[str, Callable[[], None]] = {}  # by role
        self._stack = stack
        self._open_count = 0  # messages whose request has not ended yet
        self._waiting: defaultdict[str, deque[Message]] = defaultdict(deque)
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self) -> None:
        """Do the queued work until a model has declared the outcome, or no request is left."""
        while self.outcome is None and self._open_count:
            self._todo.get()()

    def launch(self, role: str, model: str) -> WorkerFuture[Any]:
        """Make a worker for the role and start it; the future resolves when it is READY."""
        worker = LlamaWorker.from_model(
            model,
            name=f"{role}-{Path(model).stem}",
            extra_args=("--ctx-size", "4096"),
            restart=RestartPolicy(restart_backoff_s=0.5),
            exit_tools=[TELL, DECLARE_OUTCOME],
            on_signal=lambda sent, **about: self._todo.put(partial(self._route, role, sent)),
            on_event=lambda event: self._todo.put(partial(self._heard, role, event)),
        )
        self.workers[role] = self._stack.enter_context(closing(worker))
        return worker.start()

    # ------------------------------------------------------------ messages

    def deliver(self, message: Message) -> None:
        """Submit the message to its model, now or once there is a free slot."""
        self._open_count += 1
        self._waiting[message.to].append(message)
        self._submit_next(message.to)

    def _submit_next(self, role: str) -> None:
        waiting, worker = self._waiting[role], self.workers[role]
        if not waiting:
            return
        message = waiting[0]
        prompt = f"{message.sender} says: {message.text}"
        answer = worker.submit(role, ROLES[role], prompt, params={"max_tokens": 512}).get()
        if answer["ok"]:
            waiting.popleft()
            self._then(worker.result(answer["request_id"]), partial(self._ended, message))
        else:
            self._then(worker.wait_slot(), partial(self._slot_is_free, role, worker))

    def _slot_is_free(self, role: str, worker: LlamaWorker, free: WorkerFuture[None]) -> None:
        if self.workers[role] is worker:  # else another has taken its place
            free.get()  # raises if none ever will be: the worker is FAILED
        self._submit_next(role)

    def _ended(self, message: Message, ended: WorkerFuture[Any]) -> None:
        result, role = ended.get(), message.to
        print(f"{role}: {result['fail_reason'] or repr(result['text'])}", flush=True)
        if result["fail_reason"] in WORTH_ANOTHER_TRY and message.tries < TRIES:
            self.deliver(replace(message, tries=message.tries + 1))
        else:
            self._submit_next(role)
        self._open_count -= 1

    def _route(self, sender: str, sent: ExitSignal) -> None:
        """A model has called an exit tool. Check its arguments: a schema guarantees nothing."""
        arguments = sent["arguments"]
        if sent["tool_name"] == "declare_outcome":
            self.outcome = str(arguments.get("outcome"))
        elif arguments.get("to") in ROLES:
            self.deliver(Message(sender, arguments["to"], str(arguments.get("text"))))

    # ------------------------------------------------------------ workers

    def swap(self, role: str, model: str) -> None:
        """Give the role's next messages to another model; the old one finishes its requests."""
        old = self.workers[role]
        ready = self.launch(role, model)  # messages wait for its first free slot
        self._then(
            ready, lambda ready: print(f"{role}: {ready.get()['name']} is ready", flush=True)
        )
        self._then(old.drain(), lambda drained: self._retire(old, drained))

    def _retire(self, old: LlamaWorker, drained: WorkerFuture[None]) -> None:
        drained.get()
        print(f"{old.get_worker_status().get()['name']} has ended its work", flush=True)
        old.close()

    def kill(self, role: str) -> None:
        """Kill the role's server, as the kernel's OOM killer would; the worker starts another."""
        os.kill(self.workers[role].get_worker_status().get()["pid"], signal.SIGKILL)
        print(f"{role}: killed", flush=True)

    def _heard(self, role: str, event: dict[str, Any]) -> None:
        if event["event"] == "restart":
            print(f"{role}: restarts ({event['reason']})", flush=True)
        if event["event"] == "admitted" and role in self.at_first_request:
            self.at_first_request.pop(role)()

    def _then(self, future: WorkerFuture[Any], do: Callable[[WorkerFuture[Any]], Any]) -> None:
        """Call `do` with the future, on the loop's own thread, once the future has its value."""
        future.add_done_callback(lambda done: self._todo.put(partial(do, done)))


def main() -> None:
    """Start the models, give the planner its task, and stop once it is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for role in ROLES:
        parser.add_argument(role, help=f"the {role}'s model, a GGUF file")
    parser.add_argument("--next-coder", help="the model that the coder is swapped for")
    parser.add_argument("--kill-critic", action="store_true", help="while it works")
    parser.add_argument("task")
    options = parser.parse_args()
    with ExitStack() as stack:
        hive = Hive(stack)
        if options.next_coder:
            hive.at_first_request["coder"] = partial(hive.swap, "coder", options.next_coder)
        if options.kill_critic:
            hive.at_first_request["critic"] = partial(hive.kill, "critic")
        for starting in [hive.launch(role, getattr(options, role)) for role in ROLES]:
            print(starting.get()["name"], "is ready", flush=True)
        hive.deliver(Message("user", "planner", options.task))
        hive.run()
        print("outcome:", hive.outcome, flush=True)
    print("stopped.")


if __name__ == "__main__":
    main()
