"""`llama-worker run`: asks a model from the terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from llama_worker import ChatMessage, LlamaWorker, RequestResult, WorkerConfig
from llama_worker.cli import exits, run_report
from llama_worker.cli.exits import Problem
from llama_worker.cli.servers import log_tail, make_ready
from llama_worker.cli.terminal import Interrupts, Screen
from llama_worker.cli.text import printable

_TICK_S = 0.05
_LOG_LINES = 10  # shown of the log of a server that died
_JOB = "run"


class RunOptions(Struct, frozen=True, kw_only=True):
    """What to ask the model, and how to show the answer. `prompt` may be empty in a chat."""

    prompt: str
    system: str = ""
    chat: bool = False
    as_json: bool = False
    quiet: bool = False
    params: dict[str, Any] = field(default_factory=dict)


def run(config: WorkerConfig, options: RunOptions) -> int:
    """Start the server, ask, stop the server; returns the exit code. Main thread only."""
    # the screen shows what would be logged
    logging.getLogger("llama_worker").addHandler(logging.NullHandler())
    screen = Screen(quiet=options.quiet, shows_text=not options.as_json)
    with Interrupts() as interrupts, contextlib.closing(LlamaWorker(config)) as worker:
        session = _ChatSession(worker, screen, interrupts, options)
        try:
            return session.chat() if options.chat else session.ask_once()
        finally:
            screen.activity_over()


class _ChatSession:
    """Sends the user's prompts to a worker and shows the answers."""

    def __init__(
        self, worker: LlamaWorker, screen: Screen, interrupts: Interrupts, options: RunOptions
    ) -> None:
        self._worker = worker
        self._screen = screen
        self._interrupts = interrupts
        self._options = options
        self._warned: set[str] = set()
        self._tokens: int | None = None  # received for the last answer

    def ask_once(self) -> int:
        try:
            self._make_ready()
        except KeyboardInterrupt:
            return self._stopped("cancelled while the server was starting")
        result = self._ask(self._options.prompt, ())
        if self._options.as_json:
            self._screen.activity_over()
            warnings = self._worker.get_worker_status().get()["warnings"]
            print(json.dumps(run_report.json_report(result, warnings)), flush=True)
        self._show_end(result)
        interrupts = self._interrupts
        return interrupts.exit_code if interrupts.asked else run_report.exit_code(result)

    def chat(self) -> int:
        """Converse until the end of the input; each request gets the turns before it."""
        history: list[ChatMessage] = []
        try:
            self._make_ready()
            for prompt in self._prompts():
                self._make_ready()
                result = self._ask(prompt, history)
                self._show_end(result)
                if result["text"]:  # chat templates require alternating turns
                    history += result["conversation"]
                if self._interrupts.ended_by is not None:
                    break
                self._interrupts.presses = 0
        except KeyboardInterrupt:
            return self._stopped("ended")
        return exits.DONE if self._interrupts.ended_by is None else self._interrupts.exit_code

    def _stopped(self, how: str) -> int:
        self._screen.complain(how)
        if self._options.as_json:
            report = run_report.json_without_answer("canceled", "canceled", how)
            print(json.dumps(report), flush=True)
        return self._interrupts.exit_code

    def _make_ready(self) -> None:
        """Start the server unless it is READY; show each of its warnings once. Raises Problem,
        KeyboardInterrupt."""
        make_ready(self._worker, self._screen, self._interrupts)
        for line in self._worker.get_worker_status().get()["warnings"]:
            if line not in self._warned:
                self._warned.add(line)
                self._screen.say(f"note: {printable(line)}")

    def _ask(self, prompt: str, history: Sequence[ChatMessage]) -> RequestResult:
        """Send the prompt, show the answer as it comes; Ctrl-C cancels it. Raises Problem."""
        options = self._options
        admitted = self._worker.submit(
            _JOB, options.system, prompt, params=options.params, messages=history
        ).get()
        if not admitted["ok"]:
            reason = admitted["error"]  # the server has failed or is being restarted
            raise Problem(reason, f"the request was refused: {reason}", "run the command again")
        request_id = admitted["request_id"]
        cancelled = False
        for chunk in self._worker.iter_output(request_id, timeout_s=_TICK_S):
            self._screen.show(chunk["reasoning"], chunk["text"])
            if self._interrupts.asked and not cancelled:
                self._worker.cancel(request_id)
                cancelled = True
            if self._screen.has_room:
                self._show_work(request_id)
        self._screen.end_answer()
        status = self._worker.get_status(request_id).get()
        self._tokens = status.get("tokens_received") if status["ok"] else None
        ended = self._worker.result(request_id).get()
        assert ended["ok"], ended
        return ended

    def _show_work(self, request_id: int) -> None:
        status = self._worker.get_status(request_id).get()
        if status["ok"]:
            self._screen.activity(run_report.working(status))

    def _show_end(self, result: RequestResult) -> None:
        is_well = run_report.exit_code(result) == exits.DONE
        tell = self._screen.say if is_well else self._screen.complain
        for line in run_report.ending(result, log_tail(self._worker, _LOG_LINES), self._tokens):
            tell(line)

    def _prompts(self) -> Iterator[str]:
        """The given prompt, then the non-empty lines of stdin. Raises KeyboardInterrupt."""
        if sys.stdin.isatty():
            self._screen.say("Ctrl-D ends the conversation; Ctrl-C cancels an answer.")
        if self._options.prompt:
            yield self._options.prompt
        while True:
            try:
                with self._interrupts.raising():
                    line = _read_line(self._interrupts)
            except EOFError:
                return
            if line.strip():
                yield line.strip()


def _read_line(interrupts: Interrupts) -> str:
    """A line of stdin, with the terminal's own editing. Raises EOFError at the end.

    `input()` is not used: its readline misses a Ctrl-C that comes while it shows its prompt.
    """
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        print("> ", end="", flush=True)
        interrupts.wait_readable(sys.stdin.fileno())
    if line := sys.stdin.readline():
        return line
    if at_terminal:
        print()
    raise EOFError
