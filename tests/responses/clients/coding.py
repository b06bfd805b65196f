"""What every coding client is put through, and what the scenarios of all of them are made of."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.fake_script import ErrorData, Headers, HttpError, Role, Step, Text, ToolCall, WaitClose, plain_reply
from tests.responses.clients.stage import WAIT_S, Done, Json, Stage, stage

HALF: list[Step] = [Headers(), Role(), Text("Half an ans")]


def said(text: str) -> list[Step]:
    return plain_reply(Text(text))


def calls(*tool_calls: tuple[str, Any], before: Sequence[Step] = ()) -> list[Step]:
    steps = [
        ToolCall(name, json.dumps(arguments), call_id=f"call{index:05}", index=index, pieces=3)
        for index, (name, arguments) in enumerate(tool_calls)
    ]
    return plain_reply(*before, *steps, reason="tool_calls")


def results(on: Stage) -> list[str]:
    """The results of tools in the last request."""
    return [str(message["content"]) for message in on.messages() if message["role"] == "tool"]


def begins_with_the_one_before(on: Stage) -> None:
    """What the server was sent for each turn is what it was sent for the one before, and more."""
    chats = on.chats()
    for before, after in pairwise(chats):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after.get("tools") == before.get("tools")


def png() -> bytes:
    """A red pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + b"\xff\0\0" * 8 for _ in range(8))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def images(on: Stage) -> list[str]:
    parts = [part for message in on.messages() if isinstance(message["content"], list) for part in message["content"]]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


@dataclass(frozen=True)
class CodingClient:
    """A client, and how it says what all of them say. Its methods are scenarios."""

    run: Callable[..., Done]
    answer: Callable[[Done], str]  # the last thing that its user read
    shell: Callable[[str], tuple[str, Json]]  # the call of a command
    resume: tuple[str, ...]
    image: str

    def runs_a_command(self) -> list[Json]:
        with stage(calls(self.shell("echo made > made.txt && cat made.txt")), said("Done.")) as on:
            assert self.answer(self.run(on, "Make a file.")) == "Done."
            assert (on.project / "made.txt").read_text() == "made\n"
            assert "made" in results(on)[0]
            begins_with_the_one_before(on)
            return on.bodies

    def runs_commands_in_parallel(self) -> list[Json]:
        with stage(calls(self.shell("echo one > 1.txt"), self.shell("echo two > 2.txt")), said("Both.")) as on:
            assert self.answer(self.run(on, "Make two files.")) == "Both."
            assert {"1.txt", "2.txt"} <= {file.name for file in on.project.iterdir()}
            assert len(results(on)) == 2
            return on.bodies

    def works_in_several_turns(self) -> list[Json]:
        steps = [self.shell(f"echo {number} >> log.txt") for number in range(9)]
        turns = [calls(step, before=[Text(f"Step {number}.")]) for number, step in enumerate(steps)]
        with stage(*turns, said("Nine.")) as on:
            assert self.answer(self.run(on, "Count.")) == "Nine."
            assert (on.project / "log.txt").read_text() == "".join(f"{number}\n" for number in range(9))
            begins_with_the_one_before(on)
            return on.bodies

    def resumes_a_conversation(self) -> list[Json]:
        with stage(said("First."), said("Second.")) as on:
            assert self.answer(self.run(on, "One?")) == "First."
            assert self.answer(self.run(on, *self.resume, "Two?")) == "Second."
            begins_with_the_one_before(on)
            assert [message["content"] for message in on.messages() if message["role"] == "assistant"] == ["First."]
            return on.bodies

    def shows_an_image(self, **more: Any) -> list[Json]:
        with stage(said("Red.")) as on:
            (on.project / "red.png").write_bytes(png())
            assert self.answer(self.run(on, "Which colour?", self.image, "red.png", **more)) == "Red."
            assert images(on)[0].startswith("data:image/")
            return on.bodies

    def survives_an_error_before_the_stream(self) -> list[Json]:
        with stage([HttpError(500, "oops")], said("Whole.")) as on:
            assert self.answer(self.run(on, "Answer.")) == "Whole."
            return on.bodies

    def does_not_run_half_a_call(self) -> list[Json]:
        name, arguments = self.shell("touch ran.txt")
        half: list[Step] = [Headers(), Role(), ToolCall(name, json.dumps(arguments)), ErrorData(500, "parse error")]
        with stage(half, said("Nothing done.")) as on:
            self.run(on, "Do it.")
            assert not (on.project / "ran.txt").exists()
            return on.bodies

    def waits_while_the_model_is_loading(self) -> list[Json]:
        loading = [HttpError(503, "Loading model", "unavailable_error")]
        with stage(loading, loading, said("Loaded.")) as on:
            assert self.answer(self.run(on, "Hello.")) == "Loaded."
            return on.bodies

    def lets_go_when_interrupted(self) -> list[Json]:
        with stage([*HALF, WaitClose()]) as on:

            def interrupt(process: subprocess.Popen[str]) -> None:
                on.journal.wait("headers", timeout=WAIT_S)
                process.send_signal(signal.SIGINT)

            self.run(on, "Answer.", meanwhile=interrupt)
            on.journal.wait("client_closed", timeout=WAIT_S)
            return on.bodies
