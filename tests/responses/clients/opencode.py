"""OpenCode, run without a terminal: what its user asks for happens, whatever the server does."""

import json

from llama_worker.testing.scripts import HttpError, Reasoning, ScriptedReply
from tests.responses.clients.coding import Call, CodingClient, calls, cut_by_the_limit, said
from tests.responses.clients.stage import MCP_SERVER, PACKAGES, Done, Meanwhile, Stage
from tests.responses.conftest import Json

DOCUMENTED: Json = {"reasoning": True, "limit": {"context": 32768, "output": 4096}}
WITH_IMAGES: Json = {
    **DOCUMENTED,
    "attachment": True,
    "modalities": {"input": ["text", "image"], "output": ["text"]},
}
ENVIRONMENT = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def opencode(
    on: Stage,
    *arguments: str,
    model: Json = DOCUMENTED,
    patience_s: float | None = None,
    title: bool = False,
    meanwhile: Meanwhile | None = None,
) -> Done:
    options: Json = {"baseURL": on.base_url, "apiKey": "none"}
    if patience_s is not None:
        options["chunkTimeout"] = int(patience_s * 1000)
    if "--file" in arguments:
        model = WITH_IMAGES
    config = {
        "provider": {
            "llama": {"npm": "@ai-sdk/openai", "options": options, "models": {"local": model}}
        },
        "model": "llama/local",
        "small_model": "llama/local",
        "share": "disabled",
        "autoupdate": False,
        "mcp": {
            "dict": {"type": "local", "command": ["python3", str(MCP_SERVER)], "enabled": True}
        },
    }
    (on.project / "opencode.json").write_text(json.dumps(config))
    named = [] if title else ["--title", "A title"]  # else it asks for one, at the same time
    command = [str(PACKAGES / "opencode"), "run", "--format", "json", "--auto", *named, *arguments]
    return on.run(*command, meanwhile=meanwhile, **ENVIRONMENT)


def parts(done: Done, kind: str) -> list[Json]:
    return [event["part"] for event in done.events(kind)]


def answer(done: Done) -> str:
    """The last thing that its user read."""
    texts = parts(done, "text")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert not done.events("error"), done.stdout
    return str(texts[-1]["text"]) if texts else ""


def sees(done: Done, hint: str) -> bool:
    """Of a fault, unless it has asked again."""
    return hint in json.dumps(done.events("error")) or answer(done) == "Whole."


def bash(command: str) -> Call:
    return "bash", {"command": command, "description": "Runs it"}


OPENCODE = CodingClient(
    run=opencode,
    answer=answer,
    thoughts=lambda done: "".join(part["text"] for part in parts(done, "reasoning")),
    input_tokens=lambda done: int(parts(done, "step_finish")[-1]["tokens"]["input"]),
    sees=sees,
    shell=bash,
    lookup="dict_lookup",
    resume=("--continue",),
    image="--file",
    show_thoughts=("--thinking",),
    patience_s=6.0,
)


def answers_with_the_least_configuration(on: Stage) -> None:
    on.plays(calls(bash("echo made > made.txt"), before=[Reasoning("I must.")]), said("Made."))
    assert answer(opencode(on, "Make a file.", model={})) == "Made."
    assert (on.project / "made.txt").exists()
    on.each_turn_begins_with_the_one_before()


def asks_for_a_title(on: Stage) -> None:
    on.plays(said("Hello there."))
    assert answer(opencode(on, "Say hello.", title=True)) == "Hello there."
    assert any("title" in str(chat["messages"][0]["content"]).lower() for chat in on.chats())


def edits_a_file(on: Stage) -> None:
    path = "text.txt"
    edit = ("edit", {"filePath": path, "oldString": "old", "newString": "new"})
    on.plays(calls(("read", {"filePath": path})), calls(edit), said("Edited."))
    (on.project / path).write_text("old\n")
    assert answer(opencode(on, "Replace old by new.")) == "Edited."
    assert (on.project / path).read_text() == "new\n"


def writes_a_file(on: Stage) -> None:
    on.plays(
        calls(("write", {"filePath": "new.txt", "content": 'wörld "quoted"\n\t'})), said("Written.")
    )
    assert answer(opencode(on, "Write a file.")) == "Written."
    assert (on.project / "new.txt").read_text() == 'wörld "quoted"\n\t'


def runs_a_sub_agent(on: Stage) -> None:
    task = {"description": "Find it", "prompt": "Find the ANSWER.", "subagent_type": "general"}
    found = ScriptedReply(said("It is 42."), marker="Find the ANSWER.")
    on.plays(found, ScriptedReply(calls(("task", task))), ScriptedReply(said("42.")))
    assert answer(opencode(on, "Ask somebody.")) == "42."
    assert "It is 42." in on.results()[0]


def is_told_of_a_tool_that_does_not_exist(on: Stage) -> None:
    on.plays(calls(("no_such_tool", {})), said("I see."))
    assert answer(opencode(on, "Do it.")) == "I see."
    assert on.results()


# ---------------------------------------------------------------- what goes wrong


def makes_room_when_the_context_is_full(on: Stage) -> None:
    full = [
        HttpError(
            400, "the request exceeds the available context size", "exceed_context_size_error"
        )
    ]
    on.plays(said("First."), full, said("SUMMARY of it."), said("Went on."))
    opencode(on, "One?")
    done = opencode(on, "--continue", "Two?")
    assert "context" in json.dumps(done.events("error")).lower() or "Went on." in answer(done), (
        done.stdout
    )


def does_not_run_a_call_that_the_limit_cut(on: Stage) -> None:
    on.plays(cut_by_the_limit(bash("touch ran.txt")), said("Whole."))
    done = opencode(on, "Answer.")
    assert not (on.project / "ran.txt").exists()
    assert "Half an ans" in json.dumps(parts(done, "text")), done.stdout
