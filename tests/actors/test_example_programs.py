"""The examples that take several models, on scripted servers."""

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llama_worker import LlamaWorker, RequestRefused
from llama_worker.testing import scripts as fs
from tests.actors.conftest import server_program
from tests.conftest import running

MakeServer = Callable[[Mapping[str | None, list[fs.Step]]], None]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def journal(tmp_path: Path) -> fs.JournalReader:
    """What all servers of the example wrote down."""
    return fs.JournalReader(tmp_path / "journal")


@pytest.fixture
def make_server(
    tmp_path: Path, journal: fs.JournalReader, monkeypatch: pytest.MonkeyPatch
) -> MakeServer:
    """Puts a scripted llama-server where programs look for one: what it says by a word of the
    prompt, the first that is there."""

    def make(sayings: Mapping[str | None, list[fs.Step]]) -> None:
        replies = [
            fs.ScriptedReply(fs.plain_reply(*steps), marker=marker, times=None)
            for marker, steps in sayings.items()
        ]
        program = server_program(tmp_path, fs.Script(replies=replies), journal.path)
        monkeypatch.setenv("LLAMA_SERVER", program)

    return make


def example(name: str, *arguments: str) -> Any:
    """The program, under way, and its output."""
    return running(sys.executable, str(EXAMPLES / name), *arguments, env=dict(os.environ))


def chats(journal: fs.JournalReader) -> list[str]:
    """The last message of each chat request."""
    asked = journal.facts("request", path="/v1/chat/completions")
    return [fact["body"]["messages"][-1]["content"] for fact in asked]


@pytest.mark.parametrize(("name", "most"), [("job_runner.py", 45), ("orchestrator.py", 199)])
def test_examples_are_short(name: str, most: int) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= most


def test_thirty_jobs_over_three_workers_all_get_slots(
    make_server: MakeServer, journal: fs.JournalReader
) -> None:
    make_server({None: [fs.Text("The Inn.")]})
    with example("job_runner.py", "m.gguf") as (program, output):
        lines = output.read().splitlines()
        assert program.wait() == 0
    assert sorted(lines) == sorted(f"job-{n}: 'The Inn.'" for n in range(1, 31))
    assert len(chats(journal)) == 30
    assert len(journal.facts("launched")) == 3


def test_jobs_that_no_worker_takes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed(contextlib.nullcontext[None]):
        """A worker that is FAILED."""

        def wait_slot(self) -> None:
            raise RequestRefused("WORKER_FAILED")

    monkeypatch.setattr(LlamaWorker, "from_model", lambda *_, **__: Failed())
    monkeypatch.setattr(sys, "argv", ["job_runner.py", "m.gguf"])
    with pytest.raises(SystemExit, match=r"not done: job-1, .*, job-30$"):
        runpy.run_path(str(EXAMPLES / "job_runner.py"), run_name="__main__")


def tell(to: str, text: str, index: int = 0) -> fs.Step:
    return fs.ToolCall("tell", {"to": to, "text": text}, index=index)


def test_other_workers_continue_while_one_swapped_or_killed(
    make_server: MakeServer, journal: fs.JournalReader, tmp_path: Path
) -> None:
    swapped, killed, renamed = (tmp_path / name for name in ("swapped", "killed", "renamed"))
    sayings: dict[str | None, list[fs.Step]] = {
        "user says": [fs.Text("Let us begin."), tell("coder", "Write it.")],
        "planner says": [fs.Gate(swapped), fs.Text("Written."), tell("critic", "Review it.")],
        "coder says": [fs.Text("Hm."), fs.Gate(killed), tell("coder", "Rename it.")],
        "critic says": [fs.Text("Renamed."), tell("planner", "It is done.")],
        "It is done.": [
            fs.Gate(renamed),
            fs.Text("So it is."),
            fs.ToolCall("declare_outcome", {"outcome": "success", "summary": "Done."}),
        ],
    }
    make_server(dict(reversed(sayings.items())))
    models = ["a.gguf", "old.gguf", "b.gguf", "--next-coder", "new.gguf", "--kill-critic"]
    with example("orchestrator.py", *models, "Build it.") as (program, output):
        told = []
        for line in output:
            told.append(line.rstrip("\n"))
            if told[-1] == "coder: coder-new is ready":
                swapped.touch()  # until then the old one was at work
            if told[-1] == "critic: killed":
                killed.touch()
            if {"critic: 'Hm.'", "coder: 'Renamed.'"} <= set(told):
                renamed.touch()  # the program ends with the outcome, whoever still speaks
        assert program.wait() == 0
    assert told[:3] == ["planner-a is ready", "coder-old is ready", "critic-b is ready"]
    # What one says and what becomes of another have no order.
    assert [line for line in told if line.startswith("coder: '")] == [
        "coder: 'Written.'",
        "coder: 'Renamed.'",
    ]
    assert [line for line in told if line.startswith(("critic: ", "outcome"))] == [
        "critic: killed",
        "critic: restarts (server_died)",
        "critic: server_died",
        "critic: 'Hm.'",
        "outcome: success",
    ]
    assert "coder-old has ended its work" in told
    assert told[-1] == "stopped."
    assert len(journal.facts("launched")) == 5


def test_message_waiting_at_swap_goes_to_new_model(make_server: MakeServer, tmp_path: Path) -> None:
    swapped = tmp_path / "swapped"
    sayings: dict[str | None, list[fs.Step]] = {
        "user says": [tell("coder", "Write it."), tell("coder", "Test it.", index=1)],
        "Write it.": [fs.Gate(swapped), fs.Text("Written.")],
        "Test it.": [fs.Text("Tested.")],
    }
    make_server(sayings)
    models = ["a.gguf", "old.gguf", "b.gguf", "--next-coder", "new.gguf"]
    with example("orchestrator.py", *models, "Build it.") as (program, output):
        printed = set()
        for line in output:
            printed.add(line.rstrip("\n"))
            if "coder: coder-new is ready" in printed:
                swapped.touch()
        assert program.wait() == 0
    assert {"coder: 'Written.'", "coder: 'Tested.'", "outcome: None"} <= printed
