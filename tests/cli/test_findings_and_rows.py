"""What the doctor reads of the system and makes of it, and the rows of `top`: tables of cases."""

import os
import re
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from llama_worker import WorkerConfig
from llama_worker.cli import doctor_facts, doctor_findings, top
from llama_worker.cli.doctor_facts import MachineFacts, ServerFacts, Trial, trial_of
from llama_worker.cli.gguf import ContextNeeds, Model
from llama_worker.cli.terminal import Interrupts
from llama_worker.cli.top_rows import Answers, MetricsHistory, Row, ServersHistory, plain_table
from llama_worker.config.server_program import FoundServer
from llama_worker.server.slots import parse_slots
from tests.conftest import shell_program
from tests.server.pace import HANG_GUARD_S

GIB = 1 << 30
CACHED = f"anon {GIB}\nfile {6 * GIB}\ninactive_file {4 * GIB}\nactive_file {GIB}\nshmem {GIB}\n"
WELL = MachineFacts(
    free_port=20000,
    gpus=None,
    nvml=False,
    proc_stat=True,
    proc_io=True,
    memory_bytes=32 * GIB,
    available_bytes=16 * GIB,
    open_files=1024,
    threads_left=1000,
    pidfd=True,
)
WITH_GPU = replace(WELL, gpus=("H200",), nvml=True)
SERVER = ServerFacts(
    path="/s", how="--server", version="7", build=None, devices=(), said="", returncode=0
)
UNTOLD = replace(SERVER, devices=None)  # by an older build
CAPS = {"supports_tools": True, "supports_tool_calls": True}
PROPS: dict[str, Any] = {
    "total_slots": 1,
    "default_generation_settings": {"n_ctx": 4096},
    "chat_template_caps": CAPS,
}


def on_gpus(*free_mib: int) -> ServerFacts:
    return replace(
        SERVER,
        devices=tuple(f"CUDA{i}: A ({mib} MiB, {mib} MiB free)" for i, mib in enumerate(free_mib)),
    )


ON_GPU = on_gpus(142653)


def trial(**props: Any) -> Trial:
    return trial_of({**PROPS, **props}, started_in_s=1.0, proc_stat=True, proc_io=True, gpus=None)


def levels(findings: Any) -> list[tuple[str, str]]:
    return [(finding.subject, finding.level) for finding in findings if finding.level != "ok"]


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (("max", str(7 * GIB), CACHED), 32 * GIB),  # the machine's
        ((str(8 * GIB), str(GIB), ""), 7 * GIB),
        # a model that was read before takes none of it
        ((str(8 * GIB), str(7 * GIB), CACHED), 6 * GIB),
        ((str(8 * GIB), str(9 * GIB), ""), 0),
        ((str(64 * GIB), "0", ""), 32 * GIB),
        ((), 32 * GIB),
    ],
)
def test_available_is_what_machine_and_container_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], available: int
) -> None:
    for name, text in zip(("memory.max", "memory.current", "memory.stat"), files, strict=False):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(doctor_facts, "CGROUP", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=32 * GIB))
    assert doctor_facts.look_at_machine(Interrupts()).available_bytes == available


def test_all_memory_counts_as_available_where_use_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_facts, "CGROUP", tmp_path)
    hidden = Mock(side_effect=FileNotFoundError("/proc/meminfo"))
    monkeypatch.setattr("psutil.virtual_memory", hidden)
    machine = doctor_facts.look_at_machine(Interrupts())
    assert machine.available_bytes == machine.memory_bytes


@pytest.mark.parametrize(
    ("said", "gpus"),
    [
        (
            "NVIDIA H200, 143771 MiB, 143156 MiB, 580.159.04\nA, B, 8 MiB, 1 MiB, 5",
            ("NVIDIA H200, 143771 MiB, 143156 MiB, 580.159.04", "A, B, 8 MiB, 1 MiB, 5"),
        ),
        ("Failed to initialize NVML: Driver/library version mismatch", None),
    ],
)
def test_gpus_are_named_with_memory_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, gpus: tuple[str, ...] | None
) -> None:
    shell_program(tmp_path / "nvidia-smi", f"cat <<'END'\n{said}\nEND\nexit {18 * (gpus is None)}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor_facts.look_at_machine(Interrupts()).gpus == gpus


def test_signal_just_after_program_start_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]  # not at run time
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            begun.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    shell_program(tmp_path / "server", "exec sleep 1000")
    found = FoundServer(str(tmp_path / "server"), "--server")
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        doctor_facts.look_at_server(found, interrupts, os.environ)
    assert [process.wait() for process in begun] == [-signal.SIGKILL]


def test_what_a_script_started_is_killed_with_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    script = f"exec 3>{tmp_path / 'held'}\nsleep infinity &\nkill -TERM $PPID\nwait"
    shell_program(tmp_path / "server", script)
    found = FoundServer(str(tmp_path / "server"), "--server")
    try:
        with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
            doctor_facts.look_at_server(found, interrupts, os.environ)
        # readable: neither the shell nor its child has it open any longer
        assert select.select([held], [], [], HANG_GUARD_S)[0]
    finally:
        os.close(held)


def test_a_program_that_cannot_be_killed_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    class Begun(subprocess.Popen):  # type: ignore[type-arg]  # not at run time
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            begun.append(self)

    monkeypatch.setattr(subprocess, "Popen", Begun)
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    monkeypatch.setattr(doctor_facts, "_ASK_S", 0.1)
    monkeypatch.setattr(doctor_facts, "_KILLED_S", 0.1)
    shell_program(tmp_path / "server", "exec sleep 1000")
    found = FoundServer(str(tmp_path / "server"), "--server")
    server = doctor_facts.look_at_server(found, Interrupts(), os.environ)
    (process,) = begun
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (server.returncode, server.said) == (None, "it did not end within 0.1 s")


@pytest.fixture
def hanging_nvml(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Has NVML hang until the test ends, once what is given here was called."""
    released = threading.Event()
    asked: list[threading.Thread] = []

    def hang(first: Callable[[], object]) -> None:
        def load() -> None:
            asked.append(threading.current_thread())
            first()
            released.wait()

        monkeypatch.setattr(doctor_facts, "load_nvml", load)

    yield hang
    released.set()
    for thread in asked:
        thread.join()


def test_an_nvml_that_hangs_is_a_fact(
    monkeypatch: pytest.MonkeyPatch, hanging_nvml: Callable[[Callable[[], object]], None]
) -> None:
    hanging_nvml(lambda: None)
    monkeypatch.setattr(doctor_facts, "_ASK_S", 0.1)
    monkeypatch.setattr(doctor_facts, "_gpus", lambda _: None)
    assert doctor_facts.look_at_machine(Interrupts()).nvml is None


def test_a_signal_ends_the_wait_for_nvml(
    hanging_nvml: Callable[[Callable[[], object]], None],
) -> None:
    hanging_nvml(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        doctor_facts.look_at_machine(interrupts)
    assert interrupts.ended_by == signal.SIGTERM


# of the server, which counts for more than what this process sees
UNSEEN = replace(trial(), proc_stat=False)


@pytest.mark.parametrize(
    ("change", "seen", "expected"),
    [
        ({}, UNSEEN, [("/proc", "problem")]),
        ({"open_files": None, "threads_left": None}, None, []),
        ({"free_port": None}, None, [("ports", "problem")]),
        ({"proc_stat": False, "proc_io": False}, None, [("/proc", "problem")]),
        ({"proc_io": False}, None, [("/proc", "note")]),
        ({"open_files": 255}, None, [("open files", "problem")]),
        ({"threads_left": 127}, None, [("threads", "problem")]),
        ({"pidfd": False}, None, [("pidfd", "problem")]),
    ],
)
def test_each_lack_of_a_machine_is_found(
    change: dict[str, Any], seen: Trial | None, expected: list[tuple[str, str]]
) -> None:
    found = list(doctor_findings.of_machine(replace(WELL, **change), seen))
    assert levels(found) == expected
    assert all(finding.todo for finding in found if finding.level != "ok")


@pytest.mark.parametrize(
    ("machine", "server", "expected"),
    [
        (WELL, SERVER, [("GPUs", "note")]),
        (WITH_GPU, ON_GPU, []),
        (WITH_GPU, SERVER, [("GPUs", "problem")]),
        (replace(WITH_GPU, nvml=False), ON_GPU, [("GPUs", "problem")]),
        (WITH_GPU, UNTOLD, []),
        (replace(WELL, nvml=None), SERVER, [("GPUs", "problem"), ("GPUs", "note")]),
        (replace(WITH_GPU, nvml=None), ON_GPU, [("GPUs", "problem")]),
    ],
)
def test_gpus_must_be_used_and_seen(
    machine: MachineFacts, server: ServerFacts, expected: list[tuple[str, str]]
) -> None:
    assert levels(doctor_findings.of_gpus(machine, server)) == expected


CONTEXT = "use a --ctx-size of at most {}, for all slots together"
SMALLER = "use a smaller quantisation or model, or end other programs"
MORE_GPUS = "use a smaller quantisation or more GPUs, or end other programs that use them"


@pytest.mark.parametrize(
    ("size_bytes", "trained_tokens", "server", "expected"),
    [
        (4 * GIB, None, SERVER, []),
        (17 * GIB, None, SERVER, [("memory", "problem", SMALLER)]),
        (17 * GIB, None, ON_GPU, []),
        (4 * GIB, 8192, SERVER, []),
        (4 * GIB, 65536, SERVER, [("memory", "note", CONTEXT.format(49152))]),
        (4 * GIB, 8192, ON_GPU, []),
        (4 * GIB, 65536, ON_GPU, []),
        (4 * GIB, 65536, on_gpus(5120), [("GPU memory", "note", CONTEXT.format(4096))]),
        (4 * GIB, 65536, on_gpus(4100), [("GPU memory", "note", "use a smaller quantisation")]),
        (4 * GIB, 8192, on_gpus(2048), [("GPU memory", "note", MORE_GPUS)]),
        (4 * GIB, 8192, on_gpus(4096, 4096), []),
        # the same memory, told by an integrated GPU
        (17 * GIB, None, on_gpus(16384), [("memory", "problem", SMALLER)]),
    ],
)
def test_the_model_with_its_context_against_the_memory(
    size_bytes: int,
    trained_tokens: int | None,
    server: ServerFacts,
    expected: list[tuple[str, str, str]],
) -> None:
    context = ContextNeeds(trained_tokens, bytes_per_token=256 * 1024) if trained_tokens else None
    findings = doctor_findings.of_model(Model("m", size_bytes, context), WELL, server, None)
    found = [
        (f.subject, f.level, (f.todo or "").partition(";")[0]) for f in findings if f.level != "ok"
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("--parallel 4 --ctx-size 4096", 4096),
        *((f"--parallel 4{more}", 4 * 8192) for more in ("", " -c 0", " -no-kvu")),
        ("--parallel 4 --kv-unified", 8192),  # all slots share it
        ("", 8192),
    ],
)
def test_the_context_is_the_commands(words: str, tokens: int) -> None:
    model = Model("m", 4 * GIB, ContextNeeds(8192, bytes_per_token=32 * 1024))
    command = ("llama-server", "-m", "m", *words.split())
    config = WorkerConfig("w", "127.0.0.1", 8080, command, slots=4)
    told = doctor_findings.of_model(model, WELL, SERVER, config)
    assert [f.level for f in told if f"its context of {tokens} tokens at most" in f.text] == ["ok"]


def test_oversized_model_may_fit_in_unknown_servers_memory() -> None:
    levels = {
        server: [
            f.level
            for f in doctor_findings.of_model(Model("m", 99 * GIB, None), WELL, server, None)
        ]
        for server in (SERVER, None)
    }
    assert levels == {SERVER: ["ok", "problem"], None: ["ok", "note"]}


def test_what_the_model_takes_is_named() -> None:
    model = Model("m", 4 * GIB, ContextNeeds(8192, bytes_per_token=128 * 1024))
    told = {f.subject: f.text for f in doctor_findings.of_model(model, WELL, ON_GPU, None)}
    needs = "the model takes 4.0 GiB, its context of 8192 tokens at most 1.0 GiB"
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
        (1, "\x1b[31musage:\n" + "x" * 999, "use a build of llama-server for this system"),
    ],
)
def test_a_program_that_does_not_tell_its_version(returncode: int, said: str, todo: str) -> None:
    (found,) = doctor_findings.of_server(
        replace(SERVER, version=None, said=said, returncode=returncode)
    )
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
        ((), UNTOLD, []),
    ],
)
def test_a_cuda_server_must_be_on_a_gpu(
    gpus: tuple[str, ...] | None, server: ServerFacts, expected: list[tuple[str, str]]
) -> None:
    found = doctor_findings.of_trial(replace(trial(), gpus=gpus), server)
    assert [(one.subject, one.level) for one in found if one.subject == "GPUs"] == expected


@pytest.mark.parametrize(
    ("props", "tools", "expected"),
    [
        ({}, "native", []),
        ({"chat_template_caps": {"supports_tools": False}}, "prompted", [("tools", "note")]),
        ({"chat_template_caps": None}, "not reported by the server", [("tools", "note")]),
        ({"total_slots": 4}, "native", [("slots", "problem")]),
        ({"default_generation_settings": "odd"}, "native", []),
    ],
)
def test_what_the_template_can_do(
    props: dict[str, Any], tools: str, expected: list[tuple[str, str]]
) -> None:
    findings = list(doctor_findings.of_trial(trial(**props), SERVER))
    assert levels(findings) == expected
    assert next(finding.text for finding in findings if finding.subject == "tools").startswith(
        tools
    )


# ---------------------------------------------------------------- rows from metrics


def samples(tokens: float = 0, stalled: int = 0, restarts: int = 0) -> Any:
    planner = {"worker": "planner"}
    yield "python_info", {}, 1.0
    yield "llama_worker_generated_tokens_total", planner, tokens
    yield (
        "llama_worker_requests_total",
        {**planner, "outcome": "failed", "reason": "stall_timeout"},
        float(stalled),
    )
    yield "llama_worker_restarts_total", {**planner, "reason": "server_died"}, float(restarts)


def test_tokens_per_second_of_the_last_minute() -> None:
    history = MetricsHistory()
    # 5: the host was restarted
    rounds = [(0, 0.0, None), (60, 30.0, 2.0), (60, 90.0, 0.0), (5, 93.0, None), (11, 96.0, 2.0)]
    seldom = [(61, 196.0, 0.5), (111, 296.0, 0.5)]  # --interval 100
    for tokens, at, speed in [*rounds, *seldom]:
        assert history.rows(samples(tokens=tokens), at)[0].tokens_per_s == speed


def test_the_last_reason_is_what_grew_last() -> None:
    history = MetricsHistory()
    steps = [
        (0, 0, ""),
        (1, 0, "stall_timeout"),
        (1, 1, "restart: server_died"),
        (1, 1, "restart: server_died"),
    ]
    for at, (stalled, restarts, reason) in enumerate(steps):
        (row,) = history.rows(samples(stalled=stalled, restarts=restarts), float(at))
        assert row.last_reason == reason
    assert MetricsHistory().rows(samples(stalled=1, restarts=1), 0.0)[0].last_reason == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_sample_is_what_is_no_number(value: float) -> None:
    slots = ("llama_worker_slots", {"worker": "planner"}, value)
    (row,) = MetricsHistory().rows([*samples(), slots], 0.0)
    assert row.slots_total is None


# ---------------------------------------------------------------- rows from servers


def slot(
    number: int, task: int, decoded: int, *, busy: bool = True, old: bool = False
) -> dict[str, Any]:
    token = {"n_decoded": decoded}
    return {
        "id": number,
        "id_task": task,
        "is_processing": busy,
        "next_token": token if old else [token],
    }


def test_tokens_per_second_of_slots() -> None:
    history = ServersHistory()
    rounds = [
        (0.0, [slot(0, 1, 10), slot(1, 2, 5, old=True)], None),
        # ten more of task 1; what a new task shows may be of the task before
        (2.0, [slot(0, 1, 20), slot(1, 3, 4)], 5.0),
        (4.0, [slot(0, 1, 20, busy=False), {"id": 1, "is_processing": False}], 0.0),
    ]
    for at, slots, speed in rounds:
        answer = Answers(worker="w", slots_configured=2, health=200, slots=parse_slots(slots))
        (row,) = history.rows([answer], at)
        assert (row.state, row.tokens_per_s) == ("ready", speed)
    assert (row.slots_used, row.slots_total) == (0, 2)


def test_no_answer_about_slots_adds_no_tokens() -> None:
    history, known = ServersHistory(), parse_slots([slot(0, 1, 1000)])
    rounds = [(0.0, known, None), (2.0, None, None), (4.0, known, 0.0)]
    for at, slots, speed in rounds:
        answer = Answers(worker="w", slots_configured=1, health=200, slots=slots)
        (row,) = history.rows([answer], at)
        assert (row.state, row.tokens_per_s) == ("ready", speed)


def test_a_server_in_a_batch_is_not_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ask(_: object, __: str, target: str, **___: float) -> tuple[int, bytes]:
        if target == "/slots":
            raise TimeoutError
        return 200, b""

    monkeypatch.setattr(top, "ask", ask)
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[workers.w]\nhost = "127.0.0.1"\nport = 9\nmodel = "m.gguf"\n')
    (row,) = top.FleetSource(str(fleet)).rows()
    assert row == Row(worker="w", state="ready", slots_total=1)


@pytest.mark.parametrize(
    ("health", "state", "reason"), [(503, "loading", ""), (500, "unhealthy", "/health: 500")]
)
def test_a_server_that_is_not_ready(health: int, state: str, reason: str) -> None:
    (row,) = ServersHistory().rows([Answers(worker="w", slots_configured=2, health=health)], 0.0)
    assert row == Row(worker="w", state=state, slots_total=2, last_reason=reason)


def test_a_server_whose_slots_differ_from_the_file() -> None:
    slots = parse_slots([slot(0, 1, 0), slot(1, 2, 0)])
    answer = Answers(worker="w", slots_configured=1, health=200, slots=slots)
    (row,) = ServersHistory().rows([answer], 0.0)
    assert (row.slots_used, row.slots_total, row.last_reason) == (2, 2, "configured slots: 1")


@pytest.mark.parametrize(
    "odd",
    [slot(0, 1, 9) | {"id": [], "id_task": {}}, *(slot(0, 1, value) for value in (10**400, True))],
    ids=lambda odd: str(odd)[:60],
)
def test_an_odd_answer_ends_no_table(odd: dict[str, Any]) -> None:
    history = ServersHistory()
    for at in (0.0, 2.0):
        answer = Answers(worker="w", slots_configured=1, health=200, slots=parse_slots([odd]))
        (row,) = history.rows([answer], at)
        assert row.state == "ready"


def test_a_table_for_pipes_has_aligned_columns() -> None:
    heading, row = plain_table(
        [Row(worker="worker\x1b[2J", state="ready", tokens_per_s=3.14)]
    ).splitlines()
    assert row.split()[:4] == ["worker␛[2J", "ready", "-/-", "3.1"]
    assert heading.index("state") == row.index("ready")


def test_a_finding_goes_on_below_its_own_column() -> None:
    finding = doctor_findings.Finding("note", "GPUs", "no NVIDIA GPU is seen", "look for one")
    assert doctor_findings.lines([finding], 36) == [
        "note     GPUs  no NVIDIA GPU is seen",
        "               what to do: look for\n               one",
    ]
    assert doctor_findings.lines([finding], 35)[0] == (
        "note     GPUs  no NVIDIA GPU is\n               seen"
    )


def test_no_part_of_a_finding_controls_the_terminal() -> None:
    """It may name a file, or quote a server's log."""
    finding = doctor_findings.Finding("problem", "a\x1b", "b\x1b", "c\x1b", ("d\x1b",))
    shown = "\n".join(doctor_findings.lines([finding]))
    assert shown.count("\u241b") == 4
    assert "\x1b" not in shown
