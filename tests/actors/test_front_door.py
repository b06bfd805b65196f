"""The short way: from a model to an answer, with no port, command or config to write."""

import errno
import gc
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from llama_worker import (
    ConfigError,
    LlamaWorker,
    LlamaWorkerError,
    RequestFailed,
    RequestRefused,
    ToolDef,
)
from llama_worker.runtime import real
from llama_worker.runtime.probes import readiness
from llama_worker.server.traits import ServerTraits
from llama_worker.testing import scripts as fs
from tests.actors.conftest import (
    WAIT_S,
    MakeWorker,
    Rig,
    eventually,
    fast_restart,
    fast_timeouts,
    server_program,
)

SEARCH: ToolDef = {"type": "function", "function": {"name": "search"}}
HELLO = "Hello"  # what a scripted server says unless it is told otherwise


@pytest.fixture
def server(tmp_path: Path) -> str:
    """A scripted llama-server that is run by its path."""
    return server_program(tmp_path, fs.Script(), tmp_path / "journal")


# ---------------------------------------------------------------- from_model


def test_from_a_model_to_an_answer(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SERVER", server)  # one of the places where the command line finds it
    worker = LlamaWorker.from_model(
        "models/tiny.gguf", slots=3, extra_args=["--ctx-size", "512"], timeouts=fast_timeouts()
    )
    with worker:
        assert worker.ask("Hello?").get(timeout=WAIT_S)["text"] == HELLO
        status, debug = worker.get_worker_status().get(), worker.get_debug_info().get()
    assert (status["name"], status["slots_total"]) == ("tiny", 3)
    program, *words = debug["server_cmd"]
    assert program == server
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert 20000 <= int(options.pop("--port")) < 32000
    model = {"--model": "models/tiny.gguf", "--host": "127.0.0.1", "--batch-size": "512"}
    assert options == {**model, "--parallel": "3", "--ctx-size": "512"}


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (
            {"executable": "/no/such"},
            ConfigError,
            r"executable: /no/such does not exist; get one .*github.com",
        ),
        ({"model": 3}, TypeError, "model must be a path, not int: 3"),
        ({"executable": b"x"}, TypeError, "executable must be a path, not bytes"),
        ({"host": 3}, TypeError, "host must be a str, not int: 3"),
        ({"slots": 0}, ConfigError, "slots"),
        ({"max_token": 1}, TypeError, "max_token"),
        ({"server_cmd": ["x"]}, TypeError, "server_cmd"),
        ({"extra_args": "--ctx-size 1"}, TypeError, "extra_args"),
        ({"extra_args": ["--port", "1"]}, ConfigError, "port"),
    ],
)
def test_values_that_cannot_work_are_refused(
    server: str, given: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        LlamaWorker.from_model(**{"model": "m.gguf", "executable": server, **given})


# ---------------------------------------------------------------- ask


def test_ask_passes_everything_on_and_leaves_nothing_behind(rig: Rig) -> None:
    asked = rig.worker.ask(
        "And now?",
        system_prompt="Be terse.",
        job_name="a job",
        params={"temperature": 0},
        messages=[{"role": "user", "content": "Before."}, {"role": "assistant", "content": "Yes."}],
    )
    result = asked.get(timeout=WAIT_S)
    assert (result["job_name"], result["text"]) == ("a job", HELLO)
    body = rig.journal.facts("request", method="POST")[-1]["body"]
    assert body["temperature"] == 0
    assert [message["role"] for message in body["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert "Be terse." in body["messages"][0]["content"]
    assert asked.get() == result
    eventually(
        lambda: not rig.worker.get_result(result["request_id"]).get()["ok"], "the end of its record"
    )


def test_an_answer_that_nobody_waits_for_is_forgotten(rig: Rig, gate: Path) -> None:
    rig.worker.ask(
        "Hello?",
        params={"scripted_reply": fs.steps_json(*fs.plain_reply(fs.Gate(gate), fs.Text("done")))},
    )
    eventually(lambda: rig.status()["active_request_ids"] == [1], "the request")
    gc.collect()
    gate.touch()
    eventually(
        lambda: rig.worker.get_status(1).get().get("error") == "NOT_FOUND", "the end of its record"
    )


def test_a_refusal_is_raised_with_its_code(make_worker: MakeWorker) -> None:
    with pytest.raises(RequestRefused, match=r"WORKER_NOT_READY: .*start") as caught:
        make_worker(start=False).worker.ask("Hello?").get(timeout=WAIT_S)
    assert caught.value.error == "WORKER_NOT_READY"
    assert str(RequestRefused("WORKER_FAILED")).startswith("WORKER_FAILED: ")


def test_failure_is_raised_with_all_output_that_came(rig: Rig) -> None:
    reply = fs.steps_json(fs.Headers(), fs.Text("half an answ"), fs.ErrorData(400, "no more"))
    with pytest.raises(RequestFailed, match=r"server_error: .*no more.*12 characters") as caught:
        rig.worker.ask("Hello?", params={"scripted_reply": reply}).get(timeout=WAIT_S)
    result = caught.value.result
    assert (result["text"], result["fail_reason"]) == ("half an answ", "server_error")
    assert pickle.loads(pickle.dumps(caught.value)).result == result
    assert rig.worker.get_result(result["request_id"]).get(timeout=WAIT_S)["ok"] is False


def test_a_cancelled_answer_is_raised(rig: Rig) -> None:
    reply = fs.steps_json(fs.Headers(), fs.Text("half"), fs.WaitClose())
    asked = rig.worker.ask("Hello?", params={"scripted_reply": reply})
    rig.wait_text(1, "half")
    rig.worker.cancel(1).get(timeout=WAIT_S)
    with pytest.raises(RequestFailed) as caught:
        asked.get(timeout=WAIT_S)
    assert (caught.value.result["fail_reason"], caught.value.result["text"]) == ("canceled", "half")


# ---------------------------------------------------------------- does it fit


def test_refused_tools_are_counted_in_the_prompt(make_worker: MakeWorker) -> None:
    refusal = {"error": {"message": "tools param requires --jinja flag"}}  # b11434 with --no-jinja
    runner = SimpleNamespace(run_tool=lambda **call: None)
    script = fs.Script(
        apply_template=[fs.Answer(times=1), fs.Answer(500, refusal, times=1), fs.Answer()]
    )
    rig = make_worker(script, normal_tools=[SEARCH], tool_runner=runner)
    assert rig.worker.count_tokens("", "Where?").get(timeout=WAIT_S)["ok"]
    template, tokenize = (
        rig.journal.facts("request", path=path)[-1]["body"]
        for path in ("/apply-template", "/tokenize")
    )
    assert "tools" not in template
    assert "<tool_call>" in template["messages"][0]["content"]
    assert (tokenize["add_special"], tokenize["parse_special"]) == (True, True)


def test_a_prompt_far_too_large_is_counted(rig: Rig) -> None:
    count = rig.worker.count_tokens("", "word " * 1_000_000).get(timeout=WAIT_S)
    assert count["n_prompt_tokens"] > 1_000_000
    assert count["n_left"] == 4096 - count["n_prompt_tokens"]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (fs.Script(tokenize=[fs.Answer(status=500)]), "POST /tokenize: HTTP 500: fake error"),
        (fs.Script(tokenize=[fs.Answer(text="[1, 2")]), "POST /tokenize: HTTP 200"),
        (fs.Script(tokenize=[fs.Answer(reset=True)]), "could not be counted"),
        (
            fs.Script(apply_template=[fs.Answer(times=1), fs.Answer(hang=True)]),
            "no answer within 0.2 s",
        ),
    ],
)
def test_a_token_count_that_fails_is_an_error(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, script: fs.Script, says: str
) -> None:
    monkeypatch.setattr(real, "COUNT_S", 0.2 if "within" in says else WAIT_S)
    with pytest.raises(LlamaWorkerError, match=says):
        make_worker(script).worker.count_tokens("", "Hello?").get(timeout=WAIT_S)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError("none is left"), "none is left"),
        (TimeoutError(errno.ETIMEDOUT, "no connection"), "no connection"),
    ],
)
def test_a_token_count_that_cannot_ask_says_why(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    monkeypatch.setattr(real, "ask", Mock(side_effect=error))
    with pytest.raises(LlamaWorkerError, match=says):
        rig.worker.count_tokens("", "Hello?").get(timeout=WAIT_S)


def test_token_count_needs_the_size_of_context(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "server_traits", lambda *_: ServerTraits())  # /props said none
    with pytest.raises(LlamaWorkerError, match="does not report its context size"):
        make_worker().worker.count_tokens("", "Hello?").get(timeout=WAIT_S)


def test_token_count_needs_a_server_and_valid_input(make_worker: MakeWorker) -> None:
    rig = make_worker(start=False)
    with pytest.raises(RequestRefused, match="WORKER_NOT_READY"):
        rig.worker.count_tokens("", "Hello?").get(timeout=WAIT_S)
    with pytest.raises(TypeError, match="user_prompt"):
        rig.worker.count_tokens("", 7).get(timeout=WAIT_S)  # type: ignore[arg-type]


# ---------------------------------------------------------------- output as it comes


def test_iter_output_gives_empty_chunk_after_each_silence(rig: Rig, gate: Path) -> None:
    request_id = rig.submit(*fs.plain_reply(fs.Text("one"), fs.Gate(gate), fs.Text("two")))
    seen: list[str] = []
    for chunk in rig.worker.iter_output(request_id, timeout_s=0.01):
        seen.append(chunk["text"])
        assert chunk["text_offset"] == len("".join(seen))
        if seen[-3:] == ["one", "", ""]:
            gate.touch()
    assert "".join(seen) == "onetwo"
    assert chunk["done"]


def test_iter_output_checks_its_arguments_at_once(rig: Rig) -> None:
    for timeout_s in (0, -1.0):
        with pytest.raises(ConfigError, match="timeout_s must be above 0"):
            rig.worker.iter_output(1, timeout_s=timeout_s)
    with pytest.raises(TypeError, match="request_id must be an int, not str"):
        rig.worker.iter_output("1")  # type: ignore[arg-type]


def test_iter_output_gives_what_comes_and_finally_done(rig: Rig, gate: Path) -> None:
    request_id = rig.submit(
        *fs.plain_reply(fs.Reasoning("hm"), fs.Text("one"), fs.Gate(gate), fs.Text("two"))
    )
    seen = []
    for chunk in rig.worker.iter_output(request_id):
        seen.append(chunk)
        if "".join(part["text"] for part in seen) == "one":
            gate.touch()  # only now there is more: the first chunk did not wait for it
    assert "".join(chunk["reasoning"] for chunk in seen) == "hm"
    assert "".join(chunk["text"] for chunk in seen) == "onetwo"
    assert [chunk["done"] for chunk in seen[:-1]] == [False] * (len(seen) - 1)
    assert seen[-1]["done"]
    assert rig.ended(request_id)["text"] == "onetwo"
    with pytest.raises(LookupError, match=f"no request {request_id}"):
        next(rig.worker.iter_output(request_id))


def test_waiting_read_resolves_at_end_if_nothing_comes(rig: Rig, gate: Path) -> None:
    with pytest.raises(TypeError, match="wait must be a bool, not int: 1"):
        rig.worker.read_output(1, wait=1).get(timeout=WAIT_S)  # type: ignore[arg-type]
    request_id = rig.submit(*fs.plain_reply(fs.Text("a"), fs.Gate(gate)))
    rig.wait_text(request_id, "a")
    waiting = rig.worker.read_output(request_id, text_offset=1, wait=True)
    assert not rig.worker.read_output(request_id, text_offset=1).get(timeout=WAIT_S).get("done")
    assert not waiting.done()
    gate.touch()
    chunk = waiting.get(timeout=WAIT_S)
    assert chunk["ok"]
    assert (chunk["text"], chunk["text_offset"], chunk["done"]) == ("", 1, True)


def test_questions_that_nobody_named_are_a_job_each(make_worker: MakeWorker) -> None:
    """A GPU that failed may leave a server that is well, and answers every request with a 500."""
    rig = make_worker(restart=fast_restart(server_errors_before_restart=2))
    broken = {"scripted_reply": fs.steps_json(fs.HttpError(500, "CUDA error"))}

    def ask(prompt: str, job_name: str = "ask") -> None:
        with pytest.raises(RequestFailed, match="CUDA error"):
            rig.worker.ask(prompt, params=broken, job_name=job_name).get(timeout=WAIT_S)

    for prompt in ("Who?", "Where?"):
        ask(prompt, job_name="the same job")
    ask("Who?")  # the second job
    rig.wait_restarted()
    for _ in range(3):
        ask("Who?")
    assert rig.status()["restart_count"] == 1
    ask("Where?")
    rig.wait_restarted(2)
