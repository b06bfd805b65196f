"""What the library raises: one root, data as attributes, text for a person: the cause and what to
do come first."""

import copy
import errno
import os
import pickle
import signal

import pytest

from llama_worker import (
    ConfigError,
    LlamaWorkerError,
    RequestRefused,
    StartFailReason,
    WorkerClosed,
    WorkerStartError,
    WorkerStopError,
)
from llama_worker.errors import described_error
from llama_worker.start_advice import described, not_executed, oom_evidence
from tests.conftest import Speechless


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WorkerStartError("exited", "it ended", -9, ("a", "b")), "exited: it ended (signal 9)"),
        (WorkerStopError("unkillable", "pid 5"), "unkillable: pid 5"),
        (WorkerClosed("w"), "worker 'w' is closed"),
        (RequestRefused("NO_SLOT_AVAILABLE"), "NO_SLOT_AVAILABLE: all slots are in use"),
        (ConfigError("slots must be 1 or more"), "slots must be 1 or more"),
    ],
)
def test_errors_share_one_root_and_survive_pickling(error: LlamaWorkerError, text: str) -> None:
    assert isinstance(error, LlamaWorkerError)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other).startswith(text)
        assert (str(other), other.__dict__) == (str(error), error.__dict__)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (Speechless(), "Speechless: <exception str() failed>"),
        (SyntaxError("no", ("f", 1, 1, b"bytes")), "SyntaxError"),  # type: ignore[arg-type]
    ],
)
def test_any_exception_has_a_description(error: BaseException, text: str) -> None:
    assert described_error(error).endswith(text)


# ---------------------------------------------------------------- a start that failed


def test_a_start_error_has_reason_and_last_lines() -> None:
    lines = tuple(f"line {number}" for number in range(40))
    error = WorkerStartError("exited", "the server ended", 1, lines)
    assert (error.reason, error.returncode, error.log_tail, error.advice) == (
        StartFailReason.EXITED,
        1,
        lines,
        None,
    )
    first, *others = str(error).splitlines()
    assert first == "exited: the server ended (return code 1); the last lines of the server's log:"
    assert [line.strip() for line in others] == list(lines[-20:])


@pytest.mark.parametrize("reason", [reason for reason in StartFailReason if reason != "exited"])
def test_without_a_process_there_are_no_last_lines(reason: StartFailReason) -> None:
    error = WorkerStartError(reason, "detail")
    assert (str(error), error.returncode, error.log_tail) == (f"{reason}: detail", None, ())


def test_unknown_reasons_are_refused() -> None:
    with pytest.raises(ValueError, match="bored"):
        WorkerStartError("bored", "")


@pytest.mark.parametrize(
    ("returncode", "log", "says"),
    [
        (1, "ggml_aligned_malloc: insufficient memory (attempted to allocate 22 MB)", "--ctx-size"),
        (1, "CUDA error: out of memory", "memory"),
        (-signal.SIGABRT, "GGML_ASSERT(ctx->mem_buffer != NULL) failed", "--ctx-size"),
        (-signal.SIGKILL, "load_tensors", "(signal 9); it was killed, probably by the kernel for"),
        (1, "error: invalid argument: --frob", "rejects --frob as it was given: compare"),
        (1, 'error while handling argument "-c": stoi', "rejects an option as it was"),
        (
            1,
            "failed to open GGUF file 'x.gguf' (No such file or directory)",
            "there is no model file x.gguf: check the path",
        ),
        (1, "failed to open GGUF file 'x.gguf' (Permission denied)", "chmod u+r"),
        (1, "gguf_init_from_reader: failed to read magic", "name the .gguf file itself"),
        (1, "invalid magic characters: 'hell', expected 'GGUF'", "not a GGUF model"),
        (1, "string length 20 exceeds remaining file size 8 bytes", "the model file is incomplete"),
        (1, "model is corrupted or incomplete", "download it again"),
        (1, "error loading model: unknown model architecture: 'new'", "newer build"),
        (127, "error while loading shared libraries: libggml.so: cannot open", "libraries"),
        (1, "ggml_cuda_init: CUDA driver version is insufficient", "driver"),
        (1, "failed to mlock 9-byte buffer: Cannot allocate memory\ninvalid magic", "GGUF"),
        (1, "posix_madvise(POSIX_MADV_RANDOM) failed: Invalid argument\ninvalid magic", "GGUF"),
        (-signal.SIGABRT, "CUDA error: invalid argument", "the GPU or its driver fails"),
        (-signal.SIGABRT, "ggml-cuda/ggml-cuda.cu:109: CUDA error", "or its memory is full"),
        (1, "couldn't bind HTTP server socket, hostname: 10.9.9.9", "address of this machine"),
        (-signal.SIGILL, "", "add --no-repack, which avoids AMX; or take a portable build"),
        (132, "./run.sh: line 2: 4711 Illegal instruction (core dumped)", "add --no-repack"),
        (-signal.SIGSEGV, "", "crashed"),
        (0, "", "check that server_cmd starts a llama-server"),
    ],
)
def test_a_server_that_ended(returncode: int, log: str, says: str) -> None:
    lines = ["before", log, "after"] if log else []
    error = WorkerStartError("exited", "the server ended before it was ready", returncode, lines)
    assert says in str(error).splitlines()[0]


@pytest.mark.parametrize(
    ("returncode", "log"), [(3, "something"), (-signal.SIGRTMIN, "x"), (-40, "x"), (None, "x")]
)
def test_an_unknown_cause_gives_no_advice(returncode: int | None, log: str) -> None:
    error = WorkerStartError("exited", "it ended", returncode, [log])
    assert str(error) == f"{error.summary}; the last lines of the server's log:\n  {log}"


@pytest.mark.parametrize(
    ("reason", "detail", "log", "says"),
    [
        ("exited", "transport: RuntimeError: can't start new thread", "loading", "`ulimit -u`"),
        ("spawn_failed", "no process: can't start new thread", "loading", "`ulimit -u`"),
        ("spawn_failed", "[Errno 24] Too many open files", "loading", "`ulimit -n`"),
        ("startup_timeout", "not ready", "main: listening on http://h:81", "on http://h:81: pass"),
        ("startup_timeout", "not ready", "main: listening on https://h:81", "without --ssl-key"),
        ("startup_timeout", "GET /v1/models: 401", "listening on http://h:81", "; give the worker"),
        ("unauthorized", "GET /v1/models: 403", "listening on http://h:81", "; give the worker"),
        ("startup_timeout", "GET /v1/models: 404", "listening on http://h:81", "--api-prefix"),
    ],
)
def test_advice_by_what_the_worker_saw(reason: str, detail: str, log: str, says: str) -> None:
    assert says in str(WorkerStartError(reason, detail, None, [log])).splitlines()[0]


@pytest.mark.parametrize(
    ("program", "number", "told"),
    [
        ("llama-server", errno.ENOENT, "no program 'llama-server' on the PATH: install"),
        ("./llama-server", errno.ENOENT, "No such file or directory; begin server_cmd with the"),
        ("./llama-server", errno.EACCES, "chmod +x"),
        ("./llama-server", errno.ENOEXEC, "not a program for this system"),
        ("./llama-server", errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_a_program_that_cannot_be_executed(program: str, number: int, told: str) -> None:
    text = not_executed(program, number, os.strerror(number))
    assert told in text
    assert repr(program) in text


def test_a_return_code_in_words() -> None:
    assert [described(code) for code in (1, 0, -9, None)] == [
        "return code 1",
        "return code 0",
        "signal 9",
        "an unknown return code",
    ]


LINE = "Out of memory: Killed process 7 (llama-server) total-vm:1kB"


@pytest.mark.parametrize(
    ("returncode", "kills", "line", "log", "says"),
    [
        (-9, 0, None, (), None),  # somebody else's kill
        (-9, 1, None, (), "(its whole control group counts oom_kill +1 since the launch)"),
        (-9, 0, LINE, (), f"the kernel killed it for lack of memory: {LINE}"),
        (-6, 1, LINE, (), None),  # it was another process that the kernel killed
        (1, 0, None, ("failed to allocate buffer", "bye"), "it wrote: failed to allocate buffer"),
        (-6, 0, None, ("terminate: std::bad_alloc",), "it wrote: terminate: std::bad_alloc"),
        (0, 0, None, ("out of memory",), None),
        (1, 0, None, ("out of memory", "1", "2", "3", "4", "5"), None),  # long ago
        (None, 1, None, (), None),
    ],
)
def test_evidence_that_memory_ran_out(
    returncode: int | None, kills: int, line: str | None, log: tuple[str, ...], says: str | None
) -> None:
    cause = oom_evidence(returncode, oom_kills=kills, kernel_line=line, log_tail=log)
    assert (cause is None) == (says is None)
    assert (says or "") in (cause or "")
