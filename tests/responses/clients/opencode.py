"""OpenCode, run without a terminal: what its user asks for happens, whatever the server does."""

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
from tests.responses.clients.coding import HALF, CodingClient, begins_with_the_one_before, calls, results, said
from tests.responses.clients.stage import MCP_SERVER, PACKAGES, Done, Json, Stage, stage

DOCUMENTED: Json = {"reasoning": True, "limit": {"context": 32768, "output": 4096}}
WITH_IMAGES: Json = {**DOCUMENTED, "attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}


def opencode(
    on: Stage,
    *arguments: str,
    model: Json = DOCUMENTED,
    options: Json | None = None,
    title: bool = False,
    meanwhile: Callable[[subprocess.Popen[str]], object] | None = None,
) -> Done:
    """One run of `opencode run`."""
    config = {
        "provider": {
            "llama": {
                "npm": "@ai-sdk/openai",
                "options": {"baseURL": on.proxy.base_url, "apiKey": "none", **(options or {})},
                "models": {"local": model},
            }
        },
        "model": "llama/local",
        "small_model": "llama/local",
        "share": "disabled",
        "autoupdate": False,
        "mcp": {"dict": {"type": "local", "command": ["python3", str(MCP_SERVER)], "enabled": True}},
    }
    (on.project / "opencode.json").write_text(json.dumps(config))
    program = str(PACKAGES / "node_modules/.bin/opencode")
    named = [] if title else ["--title", "A title"]  # else it asks for one, at the same time
    env = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return on.run([program, "run", "--format", "json", "--auto", *named, *arguments], env, meanwhile)


def parts(done: Done, kind: str) -> list[Json]:
    """The parts of that kind."""
    return [event["part"] for event in done.events if event["type"] == kind]


def answer(done: Done) -> str:
    """The last thing that its user read."""
    texts = parts(done, "text")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert not [event for event in done.events if event["type"] == "error"], done.stdout
    return str(texts[-1]["text"]) if texts else ""


def bash(command: str) -> tuple[str, Json]:
    return "bash", {"command": command, "description": "Runs it"}


# ---------------------------------------------------------------- it works


def answers() -> list[Json]:
    with stage(said("Hello there.")) as on:
        done = opencode(on, "Say hello.")
        assert answer(done) == "Hello there."
        assert parts(done, "step_finish")[-1]["tokens"]["input"] == 10
        return on.bodies


def answers_with_the_least_configuration() -> list[Json]:
    with stage(calls(bash("echo made > made.txt"), before=[Reasoning("I must.")]), said("Made.")) as on:
        assert answer(opencode(on, "Make a file.", model={})) == "Made."
        assert (on.project / "made.txt").exists()
        begins_with_the_one_before(on)
        return on.bodies


def asks_for_a_title() -> list[Json]:
    with stage(said("Hello there.")) as on:
        assert answer(opencode(on, "Say hello.", title=True)) == "Hello there."
        assert any("title" in str(chat["messages"][0]["content"]).lower() for chat in on.chats())
        return on.bodies


def edits_a_file() -> list[Json]:
    path = "text.txt"
    with stage(
        calls(("read", {"filePath": path})),
        calls(("edit", {"filePath": path, "oldString": "old", "newString": "new"})),
        said("Edited."),
    ) as on:
        (on.project / path).write_text("old\n")
        assert answer(opencode(on, "Replace old by new.")) == "Edited."
        assert (on.project / path).read_text() == "new\n"
        return on.bodies


def writes_a_file() -> list[Json]:
    with stage(calls(("write", {"filePath": "new.txt", "content": 'wörld "quoted"\n\t'})), said("Written.")) as on:
        assert answer(opencode(on, "Write a file.")) == "Written."
        assert (on.project / "new.txt").read_text() == 'wörld "quoted"\n\t'
        return on.bodies


def calls_a_tool_of_an_mcp_server() -> list[Json]:
    with stage(calls(("dict_lookup", {"word": "tree"})), said("A plant.")) as on:
        assert answer(opencode(on, "What is a tree?")) == "A plant."
        assert "the meaning of tree" in results(on)[0]
        begins_with_the_one_before(on)
        return on.bodies


def runs_a_sub_agent() -> list[Json]:
    task = {"description": "Find it", "prompt": "Find the ANSWER.", "subagent_type": "general"}
    with stage(
        Reply(said("It is 42."), marker="Find the ANSWER."), Reply(calls(("task", task))), Reply(said("42."))
    ) as on:
        assert answer(opencode(on, "Ask somebody.")) == "42."
        assert "It is 42." in results(on)[0]
        return on.bodies


def is_told_of_a_tool_that_does_not_exist() -> list[Json]:
    with stage(calls(("no_such_tool", {})), said("I see.")) as on:
        assert answer(opencode(on, "Do it.")) == "I see."
        assert results(on)
        return on.bodies


# ---------------------------------------------------------------- reasoning, state


def shows_reasoning_and_gives_it_back() -> list[Json]:
    with stage(calls(bash("true"), before=[Reasoning("I must look.")]), said("Seen.")) as on:
        done = opencode(on, "--thinking", "Look.")
        assert answer(done) == "Seen."
        assert parts(done, "reasoning")[0]["text"] == "I must look."
        turn = next(message for message in on.messages() if message["role"] == "assistant")
        assert turn["reasoning_content"] == "I must look."
        begins_with_the_one_before(on)
        return on.bodies


def compacts_a_long_conversation() -> list[Json]:
    begin, call, end = [Headers(), Role()], ToolCall(bash("true")[0], json.dumps(bash("true")[1])), Finish("tool_calls")
    long = [*begin, call, end, Usage(prompt_tokens=31_000)]
    with stage(long, said("SUMMARY of it."), said("Went on.")) as on:
        assert answer(opencode(on, "Work.")) == "Went on."
        assert any("SUMMARY of it." in str(message["content"]) for message in on.messages())
        return on.bodies


# ---------------------------------------------------------------- what goes wrong


def shows_an_error(*fault: Step, hint: str) -> list[Json]:
    """Its user reads what went wrong; half an answer is not taken for a whole one."""
    with stage(fault, said("Whole.")) as on:
        done = opencode(on, "Answer.")
        errors = [event for event in done.events if event["type"] == "error"]
        assert hint in json.dumps(errors) or answer(done) == "Whole.", done.stdout
        assert "Half an ans" not in json.dumps(on.messages())
        return on.bodies


def survives_an_error_in_mid_stream() -> list[Json]:
    return shows_an_error(*HALF, ErrorData(500, "out of memory"), hint="out of memory")


def survives_a_reset_in_mid_stream() -> list[Json]:
    return shows_an_error(*HALF, Reset(), hint="connection ended")


def survives_an_end_in_mid_stream() -> list[Json]:
    return shows_an_error(*HALF, Fin(), hint="connection ended")


def makes_room_when_the_context_is_full() -> list[Json]:
    full = [HttpError(400, "the request exceeds the available context size", "exceed_context_size_error")]
    with stage(said("First."), full, said("SUMMARY of it."), said("Went on.")) as on:
        opencode(on, "One?")
        done = opencode(on, "--continue", "Two?")
        errors = json.dumps([event for event in done.events if event["type"] == "error"])
        assert "context" in errors.lower() or "Went on." in answer(done), done.stdout
        return on.bodies


def does_not_run_a_call_that_the_limit_cut() -> list[Json]:
    name, arguments = bash("touch ran.txt")
    cut: list[Step] = [*HALF, ToolCall(name, json.dumps(arguments)[:-4]), Finish("length"), Usage()]
    with stage(cut, said("Whole.")) as on:
        done = opencode(on, "Answer.")
        assert not (on.project / "ran.txt").exists()
        assert "Half an ans" in json.dumps(parts(done, "text")), done.stdout
        return on.bodies


def waits_for_a_long_prompt() -> list[Json]:
    """Longer than the time that its user allows between two pieces of a reply: events keep it."""
    with stage([Headers(), Sleep(9.0), *said("Read it all.")[1:]], heartbeat_s=0.3) as on:
        assert answer(opencode(on, "Read.", options={"chunkTimeout": 6000})) == "Read it all."
        assert len(on.bodies) == 1
        return on.bodies


OPENCODE = CodingClient(run=opencode, answer=answer, shell=bash, resume=("--continue",), image="--file")


def shows_an_image() -> list[Json]:
    return OPENCODE.shows_an_image(model=WITH_IMAGES)


SCENARIOS = [
    answers, answers_with_the_least_configuration, asks_for_a_title, OPENCODE.runs_a_command,
    OPENCODE.runs_commands_in_parallel, OPENCODE.works_in_several_turns, edits_a_file, writes_a_file,
    calls_a_tool_of_an_mcp_server, runs_a_sub_agent, is_told_of_a_tool_that_does_not_exist,
    shows_reasoning_and_gives_it_back, OPENCODE.resumes_a_conversation, compacts_a_long_conversation,
    shows_an_image, survives_an_error_in_mid_stream, survives_a_reset_in_mid_stream, survives_an_end_in_mid_stream,
    OPENCODE.survives_an_error_before_the_stream, OPENCODE.does_not_run_half_a_call,
    OPENCODE.waits_while_the_model_is_loading, makes_room_when_the_context_is_full,
    does_not_run_a_call_that_the_limit_cut, OPENCODE.lets_go_when_interrupted, waits_for_a_long_prompt,
]  # fmt: skip
