"""Why a server did not start: the cause and what to do stand in the first line of the error."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from llama_worker import StartFailReason, WorkerStartError
from llama_worker.server.start_advice import described, not_executed


@pytest.mark.parametrize(
    ("returncode", "log", "told"),
    [
        (1, "E ggml_aligned_malloc: insufficient memory (attempted to allocate 2197265.62 MB)", "--ctx-size"),
        (1, "CUDA error: out of memory", "memory"),
        (-signal.SIGABRT, "ggml.c:1644: GGML_ASSERT(ctx->mem_buffer != NULL) failed", "--ctx-size"),
        (-signal.SIGKILL, "load_tensors", "memory"),
        (1, "error: invalid argument: --frob", "`llama-server --help`"),
        (1, "E gguf_init_from_file: failed to open GGUF file 'x.gguf' (No such file or directory)", "check the path"),
        (1, "E gguf_init_from_file: failed to open GGUF file 'x.gguf' (Permission denied)", "chmod u+r"),
        (1, "E gguf_init_from_reader: failed to read magic", "name the .gguf file itself"),
        (1, "E gguf_init_from_reader: invalid magic characters: 'hell', expected 'GGUF'", "not a GGUF model"),
        (1, "E read: string length 20 exceeds remaining file size 8 bytes", "the model file is incomplete"),
        (1, "data is not within the file bounds, model is corrupted or incomplete", "download it again"),
        (1, "error loading model: unknown model architecture: 'new'", "newer build"),
        (127, "error while loading shared libraries: libggml.so: cannot open shared object file", "libraries"),
        (1, "ggml_cuda_init: CUDA driver version is insufficient", "driver"),
        (1, "E srv start: couldn't bind HTTP server socket, hostname: 10.9.9.9, port: 80", "address of this machine"),
        (1, "E srv start: couldn't bind HTTP server socket, hostname: 10.9.9.9, port: 80", "above 1023"),
        (-signal.SIGILL, "", "add --no-repack, which avoids AMX; or take a portable build"),
        (132, "./run.sh: line 2: 4711 Illegal instruction (core dumped) llama-server", "add --no-repack"),
        (-signal.SIGSEGV, "", "crashed"),
        (0, "", "check that server_cmd starts a llama-server"),
    ],
)
def test_a_server_that_ended(returncode: int, log: str, told: str) -> None:
    lines = ["before", log, "after"] if log else []
    error = WorkerStartError("exited", "the server ended before it was ready", returncode, lines)
    assert told in str(error).splitlines()[0]


@pytest.mark.parametrize(("returncode", "log"), [(3, "something"), (-signal.SIGRTMIN, "x"), (-40, "x"), (None, "x")])
def test_what_is_not_known_is_left_to_the_servers_last_lines(returncode: int | None, log: str) -> None:
    error = WorkerStartError("exited", "it ended", returncode, [log])
    assert error.advice is None
    assert str(error) == f"{error.summary}; the server's last lines:\n  {log}"


@pytest.mark.parametrize(
    ("reason", "why", "told"),
    [
        ("exited", "actor_died: transport: RuntimeError: can't start new thread", "`ulimit -u`"),
        ("spawn_failed", "no process could be started: can't start new thread", "`ulimit -u`"),
        ("spawn_failed", "no process could be started: [Errno 24] Too many open files", "`ulimit -n`"),
    ],
)
def test_a_host_that_is_at_its_limits(reason: str, why: str, told: str) -> None:
    assert told in str(WorkerStartError(StartFailReason(reason), why, None, ["loading"])).splitlines()[0]


def test_a_server_that_listens_elsewhere() -> None:
    error = WorkerStartError("startup_timeout", "not ready", None, ["I srv main: listening on http://127.0.0.1:8081"])
    assert "it listens on http://127.0.0.1:8081: pass it the worker's host and port" in str(error).splitlines()[0]


@pytest.mark.parametrize("reason", [reason for reason in StartFailReason if reason != "exited"])
def test_the_other_reasons_are_told_by_their_detail(reason: StartFailReason) -> None:
    assert str(WorkerStartError(reason, "detail")) == f"{reason}: detail"


@pytest.mark.parametrize(
    ("program", "number", "told"),
    [
        ("llama-server", errno.ENOENT, "no program 'llama-server' on the PATH: install"),
        ("./llama-server", errno.ENOENT, "No such file or directory; begin server_cmd with the path"),
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
    assert [described(code) for code in (1, -9, None)] == ["return code 1", "signal 9", "an unknown return code"]
