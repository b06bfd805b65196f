"""What every coding client is put through, and what the scenarios of all of them are made of."""

import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llama_worker.testing import scripts as fs
from tests.responses.clients.stage import WAIT_S, Done, Stage
from tests.responses.conftest import Json

Call = tuple[str, Json]
BEGUN: list[fs.Step] = [fs.Headers(), fs.Role()]
HALF = [*BEGUN, fs.Text("Half an ans")]


def said(text: str) -> list[fs.Step]:
    return fs.plain_reply(fs.Text(text))


def tool_calls(*calls: Call) -> list[fs.Step]:
    return [
        fs.ToolCall(name, json.dumps(arguments), call_id=f"call{index:05}", index=index, pieces=3)
        for index, (name, arguments) in enumerate(calls)
    ]


def calls(*calls: Call, before: Sequence[fs.Step] = ()) -> list[fs.Step]:
    return fs.plain_reply(*before, *tool_calls(*calls), reason="tool_calls")


def cut_by_the_limit(call: Call) -> list[fs.Step]:
    """Half an answer and half a call."""
    name, arguments = call
    return [*HALF, fs.ToolCall(name, json.dumps(arguments)[:-4]), fs.Finish("length"), fs.Usage()]


@dataclass(frozen=True)
class CodingClient:
    """A client, and how it says what all of them say. Its public methods are scenarios.

    `answer`: the last thing that its user read; `thoughts`: what they read of the reasoning, with
    the arguments `show_thoughts`. `shell`: the call of a command. `sees`: whether they see a fault
    that has this hint. `patience_s`: what the client is told to wait between two pieces of a reply.
    """

    run: Callable[..., Done]
    answer: Callable[[Done], str]
    thoughts: Callable[[Done], str]
    input_tokens: Callable[[Done], int]
    sees: Callable[[Done, str], bool]
    shell: Callable[[str], Call]
    lookup: str
    resume: Sequence[str]
    image: str
    show_thoughts: Sequence[str]
    patience_s: float

    def answers(self, on: Stage) -> None:
        on.plays(said("Hello there."))
        done = self.run(on, "Say hello.")
        assert (self.answer(done), self.input_tokens(done)) == ("Hello there.", 10)

    def runs_a_command(self, on: Stage) -> None:
        on.plays(calls(self.shell("echo made > made.txt && cat made.txt")), said("Done."))
        assert self.answer(self.run(on, "Make a file.")) == "Done."
        assert (on.project / "made.txt").read_text() == "made\n"
        assert "made" in on.results()[0]
        on.each_turn_begins_with_the_one_before()

    def runs_commands_in_parallel(self, on: Stage) -> None:
        on.plays(
            calls(self.shell("echo one > 1.txt"), self.shell("echo two > 2.txt")), said("Both.")
        )
        assert self.answer(self.run(on, "Make two files.")) == "Both."
        assert {"1.txt", "2.txt"} <= {file.name for file in on.project.iterdir()}
        assert len(on.results()) == 2

    def works_in_several_turns(self, on: Stage) -> None:
        steps = [self.shell(f"echo {number} >> log.txt") for number in range(9)]
        turns = [
            calls(step, before=[fs.Text(f"Step {number}.")]) for number, step in enumerate(steps)
        ]
        on.plays(*turns, said("Nine."))
        assert self.answer(self.run(on, "Count.")) == "Nine."
        assert (on.project / "log.txt").read_text() == "".join(f"{number}\n" for number in range(9))
        on.each_turn_begins_with_the_one_before()

    def calls_a_tool_of_an_mcp_server(self, on: Stage) -> None:
        on.plays(calls((self.lookup, {"word": "tree"})), said("A plant."))
        assert self.answer(self.run(on, "What is a tree?")) == "A plant."
        assert "the meaning of tree" in on.results()[0]
        on.each_turn_begins_with_the_one_before()

    def shows_reasoning_and_gives_it_back(self, on: Stage) -> None:
        on.plays(calls(self.shell("true"), before=[fs.Reasoning("I must look.")]), said("Seen."))
        done = self.run(on, "Look.", *self.show_thoughts)
        assert (self.answer(done), "I must look." in self.thoughts(done)) == ("Seen.", True), (
            done.stdout
        )
        turn = next(message for message in on.messages() if message["role"] == "assistant")
        assert turn["reasoning_content"] == "I must look."
        on.each_turn_begins_with_the_one_before()

    def resumes_a_conversation(self, on: Stage) -> None:
        on.plays(said("First."), said("Second."))
        assert self.answer(self.run(on, "One?")) == "First."
        assert self.answer(self.run(on, *self.resume, "Two?")) == "Second."
        on.each_turn_begins_with_the_one_before()
        assert [
            message["content"] for message in on.messages() if message["role"] == "assistant"
        ] == ["First."]

    def compacts_a_long_conversation(self, on: Stage) -> None:
        call = tool_calls(self.shell("true"))
        long = [
            *BEGUN,
            *call,
            fs.Finish("tool_calls"),
            fs.Usage(prompt_tokens=31_000),
            fs.DoneMarker(),
        ]
        on.plays(long, said("SUMMARY of it."), said("Went on."))
        assert self.answer(self.run(on, "Work.")) == "Went on."
        assert any("SUMMARY of it." in str(message["content"]) for message in on.messages())

    def shows_an_image(self, on: Stage) -> None:
        on.plays(said("Red."))
        on.paint()
        assert self.answer(self.run(on, "Which colour?", self.image, "red.png")) == "Red."
        assert on.has_shown_an_image()

    def survives_an_error_before_the_stream(self, on: Stage) -> None:
        on.plays([fs.HttpError(500, "oops")], said("Whole."))
        assert self.answer(self.run(on, "Answer.")) == "Whole."

    def survives_an_error_in_mid_stream(self, on: Stage) -> None:
        self._survives(on, fs.ErrorData(500, "out of memory"), hint="out of memory")

    def survives_a_reset_in_mid_stream(self, on: Stage) -> None:
        self._survives(on, fs.Reset(), hint="connection ended")

    def survives_an_end_in_mid_stream(self, on: Stage) -> None:
        self._survives(on, fs.Fin(), hint="connection ended")

    def does_not_run_half_a_call(self, on: Stage) -> None:
        call = tool_calls(self.shell("touch ran.txt"))
        on.plays([*BEGUN, *call, fs.ErrorData(500, "parse error")], said("Nothing done."))
        self.run(on, "Do it.")
        assert not (on.project / "ran.txt").exists()

    def waits_while_the_model_is_loading(self, on: Stage) -> None:
        loading = [fs.HttpError(503, "Loading model", "unavailable_error")]
        on.plays(loading, loading, said("Loaded."))
        assert self.answer(self.run(on, "Hello.")) == "Loaded."

    def waits_for_a_long_prompt(self, on: Stage) -> None:
        """Longer than it is told to wait between two pieces of a reply: events keep it."""
        pause = fs.Sleep(self.patience_s + 3.0)
        on.plays([fs.Headers(), pause, *said("Read it all.")[1:]], heartbeat_s=self.patience_s / 5)
        assert self.answer(self.run(on, "Read.", patience_s=self.patience_s)) == "Read it all."
        assert len(on.bodies) == 1

    def lets_go_when_interrupted(self, on: Stage) -> None:
        def interrupt(process: subprocess.Popen[str]) -> None:
            on.journal.wait("headers", timeout=WAIT_S)
            process.send_signal(signal.SIGINT)

        on.plays([*HALF, fs.WaitClose()])
        self.run(on, "Answer.", meanwhile=interrupt)
        on.journal.wait("client_closed", timeout=WAIT_S)

    def _survives(self, on: Stage, fault: fs.Step, *, hint: str) -> None:
        """Its user sees that the answer is not whole, and half an answer is not part of its
        history."""
        on.plays([*HALF, fault], said("Whole."))
        done = self.run(on, "Answer.")
        assert self.sees(done, hint), done.stdout
        assert "Half an ans" not in json.dumps(on.messages())
        on.each_turn_begins_with_the_one_before()
