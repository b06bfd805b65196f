"""Codex, run without a terminal: what its user asks for happens, whatever the server does."""

import json

from llama_worker.testing.scripts import HttpError, ScriptedReply
from tests.responses.clients.coding import Call, CodingClient, calls, cut_by_the_limit, said
from tests.responses.clients.stage import MCP_SERVER, PACKAGES, Done, Meanwhile, Stage
from tests.responses.conftest import Json

CONFIG = """\
model = "{model}"
model_provider = "llama"
model_context_window = 32768
model_auto_compact_token_limit = 28000
web_search = "disabled"

[model_providers.llama]
name = "llama-server"
base_url = "{base_url}"
wire_api = "responses"
stream_idle_timeout_ms = {idle_ms}
request_max_retries = 4
stream_max_retries = 3

[mcp_servers.dict]
command = "python3"
args = ["{mcp}"]
"""
FREEFORM, AMONG_THE_INPUT = (
    "gpt-5.5",
    "gpt-6-sol",
)  # models that Codex knows: their tools come in other forms
LOOKUP = "mcp__dict__lookup"
PATCH = "*** Begin Patch\n*** Add File: new.txt\n+patched\n*** End Patch\n"
_N: Json = {"n": {"type": "integer"}}
NUMBER = {"type": "object", "properties": _N, "required": ["n"], "additionalProperties": False}


def codex(
    on: Stage,
    *arguments: str,
    model: str = "local",
    patience_s: float = 300.0,
    sandbox: str = "danger-full-access",
    meanwhile: Meanwhile | None = None,
) -> Done:
    folder = on.home / ".codex"
    folder.mkdir(exist_ok=True)
    values = {
        "model": model,
        "base_url": on.base_url,
        "idle_ms": int(patience_s * 1000),
        "mcp": MCP_SERVER,
    }
    (folder / "config.toml").write_text(CONFIG.format(**values))
    options = ["--json", "--skip-git-repo-check", "-s", sandbox]
    return on.run(str(PACKAGES / "codex"), "exec", *options, *arguments, meanwhile=meanwhile)


def items(done: Done, kind: str) -> list[Json]:
    found = [event["item"] for event in done.events("item.completed")]
    return [item for item in found if item["type"] == kind]


def answer(done: Done) -> str:
    """The last thing that its user read."""
    said = items(done, "agent_message")
    assert done.returncode == 0, (done.stdout, done.stderr)
    return str(said[-1]["text"]) if said else ""


def shell(command: str) -> Call:
    return "exec_command", {"cmd": command}


CODEX = CodingClient(
    run=codex,
    answer=answer,
    thoughts=lambda done: "".join(item["text"] for item in items(done, "reasoning")),
    input_tokens=lambda done: int(done.events("turn.completed")[-1]["usage"]["input_tokens"]),
    sees=lambda done, hint: answer(done) == "Whole.",  # it has asked again
    shell=shell,
    lookup=LOOKUP,
    resume=("resume", "--last"),
    image="-i",
    show_thoughts=("-c", 'model_reasoning_summary="detailed"'),
    patience_s=1.0,
)


def edits_a_file(on: Stage) -> None:
    on.plays(calls(shell("sed -i s/old/new/ text.txt")), said("Edited."))
    (on.project / "text.txt").write_text("old\n")
    assert answer(codex(on, "Replace old by new.")) == "Edited."
    assert (on.project / "text.txt").read_text() == "new\n"


def applies_a_freeform_patch(on: Stage) -> None:
    on.plays(calls(("apply_patch", {"input": PATCH})), said("Patched."))
    done = codex(on, "Add a file.", model=FREEFORM)
    assert answer(done) == "Patched."
    assert (on.project / "new.txt").read_text() == "patched\n"
    assert items(done, "file_change")
    assert "Success" in on.results()[0]
    on.each_turn_begins_with_the_one_before()


def is_told_of_a_patch_that_does_not_fit(on: Stage) -> None:
    bad = PATCH.replace("Add File", "Update File").replace("+patched", "@@\n-absent\n+patched")
    on.plays(calls(("apply_patch", {"input": bad})), said("It failed."))
    assert answer(codex(on, "Change a file.", model=FREEFORM)) == "It failed."
    assert "fail" in on.results()[0].lower() or "error" in on.results()[0].lower(), on.results()


def calls_a_tool_of_an_mcp_server(on: Stage) -> None:
    CODEX.calls_a_tool_of_an_mcp_server(on)
    assert LOOKUP in str(on.chats()[0]["tools"])


def finds_a_tool_that_it_kept_back(on: Stage) -> None:
    """Codex has the models that it knows search for the tools of MCP servers."""
    search = calls(("tool_search", {"query": "looks a word up"}))
    on.plays(search, calls((LOOKUP, {"word": "tree"})), said("A plant."))
    assert answer(codex(on, "What is a tree?", model=FREEFORM)) == "A plant."
    assert LOOKUP not in str(on.chats()[0]["tools"])
    assert LOOKUP in on.results()[0]
    assert "the meaning of tree" in on.results()[1]


def takes_tools_among_the_input(on: Stage) -> None:
    """Codex has its newest models call tools by a program: one free text."""
    program = 'text(await tools.exec_command({cmd: "echo made > made.txt"}))'
    on.plays(calls(("functions__exec", {"input": program})), said("Made."))
    assert answer(codex(on, "Make a file.", model=AMONG_THE_INPUT)) == "Made."
    assert any(item.get("type") == "additional_tools" for item in on.bodies[0]["input"])
    assert (on.project / "made.txt").read_text() == "made\n", on.messages()[-1]
    on.each_turn_begins_with_the_one_before()


def runs_a_sub_agent(on: Stage) -> None:
    spawn = calls(("multi_agent_v1__spawn_agent", {"message": "Find the ANSWER."}))
    on.plays(
        ScriptedReply(said("It is 42."), marker="Find the ANSWER."),
        ScriptedReply(spawn, marker="Ask somebody."),
        ScriptedReply(said("They work on it.")),
    )
    assert answer(codex(on, "Ask somebody."))
    messages = [message for chat in on.chats() for message in chat["messages"]]
    assert any("Find the ANSWER." in str(chat["messages"][-1]["content"]) for chat in on.chats()), (
        "no sub-agent"
    )
    assert any(
        "agent" in str(message["content"]) for message in messages if message["role"] == "tool"
    )


def answers_in_a_given_form(on: Stage) -> None:
    on.plays(said('{"n": 3}'))
    (on.project / "schema.json").write_text(json.dumps(NUMBER))
    assert json.loads(answer(codex(on, "--output-schema", "schema.json", "A number."))) == {"n": 3}
    assert '"integer"' in on.messages()[0]["content"]


def resumes_with_another_policy(on: Stage) -> None:
    """It tells the model so in a late developer message."""
    on.plays(said("First."), said("Second."))
    codex(on, "One?", sandbox="read-only")
    assert answer(codex(on, "resume", "--last", "Two?", sandbox="danger-full-access")) == "Second."
    roles = [item.get("role") for item in on.bodies[-1]["input"]]
    assert "developer" in roles[roles.index("assistant") :], "no late developer message"
    on.each_turn_begins_with_the_one_before()


def looks_at_an_image(on: Stage) -> None:
    on.plays(calls(("view_image", {"path": "red.png"})), said("Red."))
    on.paint()
    assert answer(codex(on, "Look at red.png.")) == "Red."
    assert on.has_shown_an_image()


# ---------------------------------------------------------------- what goes wrong


def says_that_the_context_is_full(on: Stage) -> None:
    on.plays([HttpError(400, "the request exceeds the context size", "exceed_context_size_error")])
    done = codex(on, "Hello.")
    assert "context" in done.stdout.lower(), done.stdout
    assert done.returncode != 0


def does_not_take_a_cut_answer_for_a_whole_one(on: Stage) -> None:
    on.plays(cut_by_the_limit(shell("touch ran.txt")))
    done = codex(on, "Answer.")
    assert "max_output_tokens" in done.events("turn.failed")[-1]["error"]["message"], done.stdout
    assert done.returncode != 0
    assert "function arguments" not in done.stderr, done.stderr  # so does it run half a call
