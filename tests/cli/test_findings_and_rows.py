"""What the doctor makes of what it saw, and the rows of `top`: tables of cases."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from llama_worker.cli import doctor_findings
from llama_worker.cli.doctor_facts import MachineFacts, ServerFacts, Trial, trial_of
from llama_worker.cli.gguf import ContextNeeds
from llama_worker.cli.models import Model
from llama_worker.cli.top_rows import HEADINGS, Answers, MetricsHistory, Row, ServersHistory, plain_table

GIB = 1 << 30
WELL = MachineFacts(
    free_port=20000,
    gpus=None,
    nvml=False,
    proc_stat=True,
    proc_io=True,
    hidepid=None,
    memory_bytes=32 * GIB,
    available_bytes=16 * GIB,
    address_space_bytes=None,
    open_files=1024,
    threads_left=1000,
    pidfd=True,
)
SERVER = ServerFacts(path="/s", how="--server", version="7", devices=())
ON_GPU = replace(SERVER, devices=("CUDA0: NVIDIA H200 (143156 MiB, 142653 MiB free)",))
SMALL_GPU = replace(SERVER, devices=("CUDA0: NVIDIA T400 (8188 MiB, 5120 MiB free)",))
CAPS = {"supports_tools": True, "supports_tool_calls": True, "supports_system_role": True}
PROPS: dict[str, Any] = {"total_slots": 1, "default_generation_settings": {"n_ctx": 4096}, "chat_template_caps": CAPS}
MODEL = Model("m.gguf", 4 * GIB)


def trial(**props: Any) -> Trial:
    return trial_of({**PROPS, **props}, started_in_s=1.0, proc_stat=True, proc_io=True)


def levels(findings: Any) -> list[tuple[str, str]]:
    return [(finding.subject, finding.level) for finding in findings if finding.level != "ok"]


@pytest.mark.parametrize("limits", [{}, {"open_files": None, "threads_left": None}])
def test_a_machine_that_is_well(limits: dict[str, Any]) -> None:
    assert levels(doctor_findings.of_machine(replace(WELL, **limits), None)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"free_port": None}, ("ports", "problem")),
        ({"proc_stat": False, "proc_io": False, "hidepid": "hidepid=2"}, ("/proc", "problem")),
        ({"proc_io": False}, ("/proc", "note")),
        ({"open_files": 255}, ("open files", "problem")),
        ({"threads_left": 127}, ("threads", "problem")),
        ({"pidfd": False}, ("pidfd", "problem")),
    ],
)
def test_each_lack_of_a_machine_is_found(change: dict[str, Any], expected: tuple[str, str]) -> None:
    (found,) = (f for f in doctor_findings.of_machine(replace(WELL, **change), None) if f.level != "ok")
    assert (found.subject, found.level, bool(found.todo)) == (*expected, True)


def test_what_was_seen_of_the_server_counts_for_more_than_of_this_process() -> None:
    hidden = replace(trial(), proc_stat=False)
    assert ("/proc", "problem") in levels(doctor_findings.of_machine(WELL, hidden))


@pytest.mark.parametrize(
    ("machine", "server", "expected"),
    [
        (WELL, SERVER, [("GPUs", "note")]),
        (replace(WELL, gpus=("H200",), nvml=True), ON_GPU, []),
        (replace(WELL, gpus=("H200",), nvml=True), SERVER, [("GPUs", "problem")]),
        (replace(WELL, gpus=("H200",), nvml=False), ON_GPU, [("GPUs", "problem")]),
        (replace(WELL, gpus=("H200",), nvml=True), replace(SERVER, devices=None), []),  # an older build
    ],
)
def test_gpus_must_be_used_and_seen(
    machine: MachineFacts, server: ServerFacts, expected: list[tuple[str, str]]
) -> None:
    assert levels(doctor_findings.of_gpus(machine, server)) == expected


@pytest.mark.parametrize(
    ("size_bytes", "server", "address_space", "expected"),
    [
        (4 * GIB, SERVER, None, []),
        (15 * GIB, SERVER, None, [("memory", "note")]),
        (17 * GIB, SERVER, None, [("memory", "problem")]),
        (17 * GIB, ON_GPU, None, []),
        (4 * GIB, SERVER, 5 * GIB, [("address space", "problem")]),
    ],
)
def test_the_model_against_the_memory(
    size_bytes: int, server: ServerFacts, address_space: int | None, expected: list[tuple[str, str]]
) -> None:
    machine = replace(WELL, address_space_bytes=address_space)
    assert levels(doctor_findings.of_model(Model("m", size_bytes), machine, server)) == expected


@pytest.mark.parametrize(
    ("trained_tokens", "server", "expected"),
    [
        (8192, SERVER, []),
        (65536, SERVER, [("memory", "note", "a --ctx-size of at most 49152, for all slots together")]),
        (8192, ON_GPU, []),
        (65536, ON_GPU, []),
        (65536, SMALL_GPU, [("GPU memory", "note", "a --ctx-size of at most 4096, for all slots together")]),
        (
            65536,
            replace(SERVER, devices=("CUDA0: (8188 MiB, 4100 MiB free)",)),
            [("GPU memory", "note", "a smaller quantisation")],
        ),
        (
            8192,
            replace(SERVER, devices=("CUDA0: (8188 MiB, 2048 MiB free)",)),
            [("GPU memory", "note", "a smaller quantisation, more GPUs, or end what else uses them")],
        ),
        (8192, replace(SERVER, devices=("CUDA0: (8188 MiB, 4096 MiB free)",) * 2), []),
    ],
)
def test_the_model_with_its_full_context_against_the_memory(
    trained_tokens: int, server: ServerFacts, expected: list[tuple[str, str, str]]
) -> None:
    model = Model("m", 4 * GIB, ContextNeeds(trained_tokens, bytes_per_token=256 * 1024))
    found = [(f.subject, f.level, f.todo) for f in doctor_findings.of_model(model, WELL, server) if f.level != "ok"]
    assert found == expected


def test_what_the_model_takes_is_named() -> None:
    model = Model("m", 4 * GIB, ContextNeeds(8192, bytes_per_token=128 * 1024))
    told = {f.subject: f.text for f in doctor_findings.of_model(model, WELL, ON_GPU)}
    needs = "the model takes 4.0 GiB, its full context of 8192 tokens at most 1.0 GiB"
    assert told == {
        "model": "m, 4.0 GiB",
        "memory": f"155.3 GiB available, {needs}",
        "GPU memory": f"139.3 GiB free on the GPUs, {needs}",
    }


@pytest.mark.parametrize(
    ("returncode", "said", "todo"),
    [
        (-4, "", "--no-repack.*a portable build"),
        (132, "Illegal instruction (core dumped)", "--no-repack.*a portable build"),
        (1, "\x1b[31musage:\n" + "x" * 999, "take a build of llama-server for this system"),
    ],
)
def test_a_program_that_does_not_tell_its_version(returncode: int, said: str, todo: str) -> None:
    (found,) = doctor_findings.of_server(replace(SERVER, version=None, said=said, returncode=returncode))
    assert found.level == "problem"
    assert re.search(todo, found.todo or "")
    assert not {"\x1b", "\n"} & set(found.text)


@pytest.mark.parametrize(
    ("gpus", "server", "expected"),
    [
        (None, ON_GPU, []),
        (("GPU 0",), ON_GPU, [("GPUs", "ok")]),
        ((), ON_GPU, [("GPUs", "problem")]),
        ((), SERVER, []),  # computes on the CPU
        ((), replace(SERVER, devices=("Vulkan0: A (8188 MiB, 4100 MiB free)",)), []),
        ((), replace(SERVER, devices=None), []),
    ],
)
def test_a_server_with_cuda_must_be_seen_on_a_gpu(
    gpus: tuple[str, ...] | None, server: ServerFacts, expected: list[tuple[str, str]]
) -> None:
    found = doctor_findings.of_server_on_gpus(replace(trial(), gpus=gpus), server)
    assert [(finding.subject, finding.level) for finding in found] == expected


@pytest.mark.parametrize(
    ("props", "tools", "expected"),
    [
        ({}, "native", []),
        ({"chat_template_caps": {"supports_tools": False}}, "prompted", [("tools", "note")]),
        ({"chat_template_caps": None}, "the server does not tell", [("tools", "note")]),
        ({"total_slots": 4}, "native", [("slots", "problem")]),
        ({"default_generation_settings": "odd"}, "native", []),
        ({"chat_template_caps": {**CAPS, "supports_system_role": False}}, "native", [("template", "note")]),
    ],
)
def test_what_the_template_can_do(props: dict[str, Any], tools: str, expected: list[tuple[str, str]]) -> None:
    findings = list(doctor_findings.of_trial(trial(**props)))
    assert levels(findings) == expected
    assert next(finding.text for finding in findings if finding.subject == "tools").startswith(tools)


# ---------------------------------------------------------------- rows from metrics


def samples(tokens: float = 0, completed: int = 0, stalled: int = 0, restarts: int = 0, state: str = "ready") -> Any:
    planner = {"worker": "planner"}
    yield "python_info", {}, 1.0
    for each in ("ready", "running"):
        yield "llama_worker_state", {**planner, "state": each}, float(each == state)
    yield "llama_worker_slots", planner, 2.0
    yield "llama_worker_slots_used", planner, 1.0
    yield "llama_worker_generated_tokens_total", planner, tokens
    yield "llama_worker_requests_total", {**planner, "outcome": "completed", "reason": "stop"}, float(completed)
    yield "llama_worker_requests_total", {**planner, "outcome": "failed", "reason": "stall_timeout"}, float(stalled)
    yield "llama_worker_restarts_total", {**planner, "cause": "server_died"}, float(restarts)


def test_a_row_of_metrics() -> None:
    (row,) = MetricsHistory().rows(samples(tokens=5, completed=3, stalled=1), 0.0)
    counts = {"completed": 3, "failed": 1, "canceled": 0, "restarts": 0}
    assert row == Row(
        worker="planner", state="ready", slots_used=1, slots_total=2, last_reason="stall_timeout", **counts
    )


def test_tokens_per_second_are_those_of_the_last_minute() -> None:
    history = MetricsHistory()
    rounds = [(0, 0.0, None), (60, 30.0, 2.0), (60, 90.0, 0.0), (5, 93.0, None), (11, 96.0, 2.0)]  # 5: another program
    for tokens, at, speed in rounds:
        assert history.rows(samples(tokens=tokens), at)[0].tokens_per_s == speed


def test_the_last_reason_is_what_grew_last_and_none_of_several_old_ones() -> None:
    history = MetricsHistory()
    steps = [(0, 0, ""), (1, 0, "stall_timeout"), (1, 1, "restart: server_died"), (1, 1, "restart: server_died")]
    for at, (stalled, restarts, reason) in enumerate(steps):
        (row,) = history.rows(samples(stalled=stalled, restarts=restarts), float(at))
        assert row.last_reason == reason
    assert MetricsHistory().rows(samples(stalled=1, restarts=1), 0.0)[0].last_reason == ""


# ---------------------------------------------------------------- rows from servers


def slot(number: int, task: int, decoded: int, *, busy: bool = True, old: bool = False) -> dict[str, Any]:
    token = {"n_decoded": decoded}
    return {"id": number, "id_task": task, "is_processing": busy, "next_token": token if old else [token]}


def test_tokens_per_second_of_slots() -> None:
    history = ServersHistory()
    rounds = [
        (0.0, [slot(0, 1, 10), slot(1, 2, 5, old=True)], None),
        (2.0, [slot(0, 1, 20), slot(1, 3, 4)], 7.0),  # ten more of task 1, four of a new task
        (4.0, [slot(0, 1, 20, busy=False), {"id": 1, "is_processing": False}], 0.0),
    ]
    for at, slots, speed in rounds:
        (row,) = history.rows([Answers(worker="w", slots_configured=2, health=200, slots=slots)], at)
        assert (row.state, row.tokens_per_s) == ("ready", speed)
    assert (row.slots_used, row.slots_total) == (0, 2)


@pytest.mark.parametrize(
    ("health", "state", "reason"),
    [(503, "loading", ""), (500, "ill", "/health: 500"), ("connection refused", "down", "connection refused")],
)
def test_a_server_that_is_not_ready(health: int | str, state: str, reason: str) -> None:
    (row,) = ServersHistory().rows([Answers(worker="w", slots_configured=2, health=health)], 0.0)
    assert row == Row(worker="w", state=state, slots_total=2, last_reason=reason)


def test_a_server_with_other_slots_than_the_file_says() -> None:
    answer = Answers(worker="w", slots_configured=1, health=200, slots=[slot(0, 1, 0), slot(1, 2, 0)])
    (row,) = ServersHistory().rows([answer], 0.0)
    assert (row.slots_used, row.slots_total, row.last_reason) == (2, 2, "the file says 1 slots")


def test_metrics_serve_where_slots_are_off() -> None:
    history = ServersHistory()
    text = "# HELP llamacpp:x\nllamacpp:tokens_predicted_total {}\nllamacpp:requests_processing 1\n"
    for at, tokens, speed in ((0.0, 10, None), (2.0, 1.4e1, 2.0)):
        answer = Answers(worker="w", slots_configured=2, health=200, metrics=text.format(tokens))
        (row,) = history.rows([answer], at)
        assert (row.slots_used, row.tokens_per_s) == (1, speed)


def test_a_table_for_pipes() -> None:
    table = plain_table([Row(worker="w\x1b[2J", state="ready", slots_used=1, slots_total=2, tokens_per_s=3.14)])
    heading, row = table.splitlines()
    assert heading.split("  ")[0].strip() == HEADINGS[0]
    assert row.split() == ["w␛[2J", "ready", "1/2", "3.1", "-", "-", "-", "-", "-"]
    assert heading.index("state") == row.index("ready")
