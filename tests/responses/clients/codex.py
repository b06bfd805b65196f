"""Codex, run without a terminal: what its user asks for happens, whatever the server does."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

from tests.fake_script import (
    ErrorData,
    Fin,
    Finish,
    Headers,
    HttpError,
    Reasoning,
    Reply,
    Reset,
    Role,
    Sleep,
    Step,
    ToolCall,
    Usage,
)
from tests.responses.clients.coding import (
    HALF,
    CodingClient,
    begins_with_the_one_before,
    calls,
    images,
    png,
    results,
    said,
)
from tests.responses.clients.stage import MCP_SERVER, PACKAGES, Done, Json, Stage, stage

CONFIG = """\
model = "{model}"
model_provider = "llama"
model_context_window = 32768
model_auto_compact_token_limit = {compact_at}
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
FREEFORM, AMONG_THE_INPUT = "gpt-5.5", "gpt-6-sol"  # models that Codex knows: their tools come in other forms
PATCH = "*** Begin Patch\n*** Add File: new.txt\n+patched\n*** End Patch\n"


def codex(
    on: Stage,
    *arguments: str,
    model: str = "local",
    idle_ms: int = 300_000,
    compact_at: int = 28_000,
    sandbox: str = "danger-full-access",
    meanwhile: Callable[[subprocess.Popen[str]], object] | None = None,
) -> Done:
    """One run of `codex exec`."""
    folder = on.home / ".codex"
    folder.mkdir(exist_ok=True)
    values = {"model": model, "base_url": on.proxy.base_url, "idle_ms": idle_ms, "compact_at": compact_at}
    (folder / "config.toml").write_text(CONFIG.format(**values, mcp=MCP_SERVER))
    program = str(PACKAGES / "node_modules/.bin/codex")
    options = ["--json", "--skip-git-repo-check", "-s", sandbox]
    return on.run([program, "exec", *options, *arguments], {}, meanwhile)


def items(done: Done, kind: str) -> list[Json]:
    """The completed items of that kind."""
    found = [event["item"] for event in done.events if event["type"] == "item.completed"]
    return [item for item in found if item["type"] == kind]


def answer(done: Done) -> str:
    """The last thing that its user read."""
    said = items(done, "agent_message")
    assert done.returncode == 0, (done.stdout, done.stderr)
    return str(said[-1]["text"]) if said else ""


def shell(command: str) -> tuple[str, Json]:
    return "exec_command", {"cmd": command}


# ---------------------------------------------------------------- it works


def answers() -> list[Json]:
    with stage(said("Hello there.")) as on:
        done = codex(on, "Say hello.")
        assert answer(done) == "Hello there."
        assert done.events[-1]["usage"]["input_tokens"] == 10
        return on.bodies


def edits_a_file() -> list[Json]:
    with stage(calls(shell("sed -i s/old/new/ text.txt")), said("Edited.")) as on:
        (on.project / "text.txt").write_text("old\n")
        assert answer(codex(on, "Replace old by new.")) == "Edited."
        assert (on.project / "text.txt").read_text() == "new\n"
        return on.bodies


def applies_a_freeform_patch() -> list[Json]:
    with stage(calls(("apply_patch", {"input": PATCH})), said("Patched.")) as on:
        done = codex(on, "Add a file.", model=FREEFORM)
        assert answer(done) == "Patched."
        assert (on.project / "new.txt").read_text() == "patched\n"
        assert items(done, "file_change")
        assert "Success" in results(on)[0]
        begins_with_the_one_before(on)
        return on.bodies


def is_told_of_a_patch_that_does_not_fit() -> list[Json]:
    bad = PATCH.replace("Add File", "Update File").replace("+patched", "@@\n-absent\n+patched")
    with stage(calls(("apply_patch", {"input": bad})), said("It failed.")) as on:
        assert answer(codex(on, "Change a file.", model=FREEFORM)) == "It failed."
        assert "fail" in results(on)[0].lower() or "error" in results(on)[0].lower(), results(on)
        return on.bodies


def calls_a_tool_of_an_mcp_server() -> list[Json]:
    with stage(calls(("mcp__dict__lookup", {"word": "tree"})), said("A plant.")) as on:
        done = codex(on, "What is a tree?")
        assert "mcp__dict__lookup" in on.tools()
        assert answer(done) == "A plant."
        assert items(done, "mcp_tool_call")[0]["status"] == "completed"
        assert "the meaning of tree" in results(on)[0]
        begins_with_the_one_before(on)
        return on.bodies


def finds_a_tool_that_it_kept_back() -> list[Json]:
    """Codex has the models that it knows search for the tools of MCP servers."""
    search = calls(("tool_search", {"query": "looks a word up"}))
    with stage(search, calls(("mcp__dict__lookup", {"word": "tree"})), said("A plant.")) as on:
        assert answer(codex(on, "What is a tree?", model=FREEFORM)) == "A plant."
        assert "mcp__dict__lookup" not in on.tools(0)
        assert "mcp__dict__lookup" in results(on)[0]
        assert "the meaning of tree" in results(on)[1]
        return on.bodies


def takes_tools_among_the_input() -> list[Json]:
    """Codex has its newest models call tools by a program: one free text."""
    program = 'text(await tools.exec_command({cmd: "echo made > made.txt"}))'
    with stage(calls(("functions__exec", {"input": program})), said("Made.")) as on:
        assert answer(codex(on, "Make a file.", model=AMONG_THE_INPUT)) == "Made."
        assert any(item.get("type") == "additional_tools" for item in on.bodies[0]["input"])
        assert (on.project / "made.txt").read_text() == "made\n", on.messages()[-1]
        begins_with_the_one_before(on)
        return on.bodies


def runs_a_sub_agent() -> list[Json]:
    spawn = calls(("multi_agent_v1__spawn_agent", {"message": "Find the ANSWER."}))
    with stage(
        Reply(said("It is 42."), marker="Find the ANSWER."),
        Reply(spawn, marker="Ask somebody."),
        Reply(said("They work on it.")),
    ) as on:
        done = codex(on, "Ask somebody.")
        assert answer(done)
        assert any("Find the ANSWER." in str(chat["messages"][-1]["content"]) for chat in on.chats()), "no sub-agent"
        assert any("agent" in text for text in results_of_all(on))
        return on.bodies


def results_of_all(on: Stage) -> list[str]:
    return [str(message["content"]) for chat in on.chats() for message in chat["messages"] if message["role"] == "tool"]


def answers_in_a_given_form() -> list[Json]:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    with stage(said('{"n": 3}')) as on:
        (on.project / "schema.json").write_text(json.dumps(schema))
        assert json.loads(answer(codex(on, "--output-schema", "schema.json", "A number."))) == {"n": 3}
        assert '"integer"' in on.messages()[0]["content"]
        return on.bodies


# ---------------------------------------------------------------- reasoning, state


def shows_reasoning_and_gives_it_back() -> list[Json]:
    with stage(calls(shell("true"), before=[Reasoning("I must look.")]), said("Seen.")) as on:
        done = codex(on, "Look.", "-c", 'model_reasoning_summary="detailed"')
        assert answer(done) == "Seen."
        assert any("I must look." in item["text"] for item in items(done, "reasoning")), done.stdout
        turn = next(message for message in on.messages() if message["role"] == "assistant")
        assert turn["reasoning_content"] == "I must look."
        begins_with_the_one_before(on)
        return on.bodies


def resumes_with_another_policy() -> list[Json]:
    """It tells the model so in a late developer message."""
    with stage(said("First."), said("Second.")) as on:
        codex(on, "One?", sandbox="read-only")
        assert answer(codex(on, "resume", "--last", "Two?", sandbox="danger-full-access")) == "Second."
        roles = [item.get("role") for item in on.bodies[-1]["input"]]
        assert "developer" in roles[roles.index("assistant") :], "no late developer message"
        begins_with_the_one_before(on)
        return on.bodies


def compacts_a_long_conversation() -> list[Json]:
    long = [Headers(), Role(), *calls(shell("true"))[2:-2], Usage(prompt_tokens=25_000), *calls(shell("true"))[-1:]]
    with stage(long, said("SUMMARY of it."), said("Went on.")) as on:
        assert answer(codex(on, "Work.", compact_at=20_000)) == "Went on."
        assert any("SUMMARY of it." in str(message["content"]) for message in on.messages())
        return on.bodies


def looks_at_an_image() -> list[Json]:
    with stage(calls(("view_image", {"path": "red.png"})), said("Red.")) as on:
        (on.project / "red.png").write_bytes(png())
        assert answer(codex(on, "Look at red.png.")) == "Red."
        assert images(on)[0].startswith("data:image/")
        return on.bodies


# ---------------------------------------------------------------- what goes wrong


def after_a_fault(*fault: Step) -> list[Json]:
    """It asks again, and half an answer is not part of its history."""
    with stage(fault, said("Whole.")) as on:
        assert answer(codex(on, "Answer.")) == "Whole."
        assert "Half an ans" not in json.dumps(on.messages())
        begins_with_the_one_before(on)
        return on.bodies


def survives_an_error_in_mid_stream() -> list[Json]:
    return after_a_fault(*HALF, ErrorData(500, "out of memory"))


def survives_a_reset_in_mid_stream() -> list[Json]:
    return after_a_fault(*HALF, Reset())


def survives_an_end_in_mid_stream() -> list[Json]:
    return after_a_fault(*HALF, Fin())


def says_that_the_context_is_full() -> list[Json]:
    with stage([HttpError(400, "the request exceeds the context size", "exceed_context_size_error")]) as on:
        done = codex(on, "Hello.")
        assert "context" in json.dumps(done.events).lower(), done.stdout
        assert done.returncode != 0
        return on.bodies


def does_not_take_a_cut_answer_for_a_whole_one() -> list[Json]:
    name, arguments = shell("touch ran.txt")
    cut = [*HALF, ToolCall(name, json.dumps(arguments)[:-4]), Finish("length"), Usage()]
    with stage(cut) as on:
        done = codex(on, "Answer.")
        assert "max_output_tokens" in done.events[-1]["error"]["message"], done.stdout
        assert done.returncode != 0
        assert "function arguments" not in done.stderr, done.stderr  # so does it run half a call
        return on.bodies


def waits_for_a_long_prompt() -> list[Json]:
    """Four times its idle time: events keep it."""
    idle_s = 1.0
    with stage([Headers(), Sleep(4 * idle_s), *said("Read it all.")[1:]], heartbeat_s=idle_s / 5) as on:
        assert answer(codex(on, "Read.", idle_ms=int(idle_s * 1000))) == "Read it all."
        assert len(on.bodies) == 1
        return on.bodies


CODEX = CodingClient(run=codex, answer=answer, shell=shell, resume=("resume", "--last"), image="-i")
SCENARIOS = [
    answers, CODEX.runs_a_command, CODEX.runs_commands_in_parallel, CODEX.works_in_several_turns, edits_a_file,
    applies_a_freeform_patch, is_told_of_a_patch_that_does_not_fit, calls_a_tool_of_an_mcp_server,
    finds_a_tool_that_it_kept_back, takes_tools_among_the_input, runs_a_sub_agent, answers_in_a_given_form,
    shows_reasoning_and_gives_it_back, CODEX.resumes_a_conversation, resumes_with_another_policy,
    compacts_a_long_conversation, CODEX.shows_an_image, looks_at_an_image, survives_an_error_in_mid_stream,
    survives_a_reset_in_mid_stream, survives_an_end_in_mid_stream, CODEX.survives_an_error_before_the_stream,
    CODEX.does_not_run_half_a_call, CODEX.waits_while_the_model_is_loading, says_that_the_context_is_full,
    does_not_take_a_cut_answer_for_a_whole_one, CODEX.lets_go_when_interrupted, waits_for_a_long_prompt,
]  # fmt: skip
