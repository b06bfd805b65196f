"""Turns doctor's facts and the servers' commands into findings for the user. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from llama_worker import WorkerConfig
from llama_worker.cli.doctor_facts import MachineFacts, ServerFacts, Trial
from llama_worker.cli.exits import Problem
from llama_worker.cli.gguf import Model
from llama_worker.cli.text import one_line, printable, seconds, size, wrapped
from llama_worker.config import command_flags
from llama_worker.config.command import program_at
from llama_worker.server.traits import known_flaws
from llama_worker.start_advice import ILLEGAL, NOT_EXECUTED, described

Level = Literal["ok", "note", "problem"]

MIN_OPEN_FILES = 256  # a worker needs some 30, each request a few, and the host its own
MIN_THREADS = 128  # a server starts several per core, a worker ten
_SAME_MEMORY = 0.02  # free memory that differs by no more than this is the same
_TOKENS_STEP = 256  # the server rounds the context up to a multiple of this
_FREE_MIB = re.compile(r"(\d+) MiB free")
_SAID_CHARS = 200
# if the model alone is larger than the memory: the level, the consequence, what to do
_TOO_BIG: dict[str, tuple[Level, str, str]] = {
    "memory": ("problem", "", "use a smaller quantisation or model, or end other programs"),
    "GPU memory": (
        "note",
        ": part of the model will run on the CPU, which is far slower",
        "use a smaller quantisation or more GPUs, or end other programs that use them",
    ),
}


class Finding(Struct, frozen=True):
    """One line of the report. `todo` says what to do: every problem has one, a note may have one.
    `more`: further lines, such as the last lines of the server's log."""

    level: Level
    subject: str
    text: str
    todo: str | None = None
    more: tuple[str, ...] = ()


def _checked(
    subject: str, is_well: bool, *, text: str, problem: str | None = None, todo: str
) -> Finding:
    """An "ok" with `text` if `is_well`, else a problem with `problem` (None: `text`) and `todo`."""
    if is_well:
        return Finding("ok", subject, text)
    return Finding("problem", subject, problem or text, todo)


def of_problem(subject: str, problem: Problem) -> Finding:
    """The finding for a Problem, which would end any other command."""
    return Finding("problem", subject, printable(problem.what), problem.todo, problem.more)


def of_server(server: ServerFacts) -> Iterator[Finding]:
    """The program and the devices that it can use."""
    if server.version is None:
        yield of_broken_server("llama-server", server)
        return
    text = f"{server.path} ({server.how}), {printable(server.version)}"
    yield Finding("ok", "llama-server", text)
    if server.devices:
        yield Finding("ok", "devices", "it can use " + printable("; ".join(server.devices)))
    elif server.devices is not None:
        yield Finding("note", "devices", "it cannot use a GPU and computes on the CPU")


def of_broken_server(subject: str, server: ServerFacts) -> Finding:
    """The finding for a program that does not print its version."""
    program = f"{server.path} ({server.how})"
    if server.returncode == -signal.SIGILL or ILLEGAL.search(server.said):
        text = f"{program} --version ended with {described(server.returncode)}"
        return Finding("problem", subject, text, NOT_EXECUTED)
    said = one_line(server.said, _SAID_CHARS) or "nothing"
    todo = (
        "use a build of llama-server for this system, or install the libraries it lacks; a "
        'script must pass on its arguments ("$@")'
    )
    text = f"{program} does not report its version; its output: {said}"
    return Finding("problem", subject, text, todo)


def of_gpus(machine: MachineFacts, server: ServerFacts | None) -> Iterator[Finding]:
    """Whether the server can use the NVIDIA GPUs, and whether the library can see their work."""
    if machine.nvml is None:
        text = "NVML does not answer: the library cannot see what servers do on them"
        todo = "look for a lost GPU in the kernel's log (`dmesg`), and restart the machine"
        yield Finding("problem", "GPUs", text, todo)
    if not machine.gpus:
        yield Finding(
            "note", "GPUs", "no NVIDIA GPU was found (nvidia-smi is missing, or lists none)"
        )
        return
    yield Finding("ok", "GPUs", printable("; ".join(machine.gpus)))
    if server is not None and server.devices == ():
        todo = (
            "use a build with CUDA (--server), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on "
            "the CPU"
        )
        text = "this llama-server was built without support for them"
        yield Finding("problem", "GPUs", text, todo)
    if machine.nvml is False:
        text = "the library cannot see their work, and may take a busy server for a hung one"
        yield Finding("problem", "GPUs", text, "pip install 'llama-worker[nvidia]'")


def of_model(
    model: Model, machine: MachineFacts, server: ServerFacts | None, config: WorkerConfig | None
) -> Iterator[Finding]:
    """Compare the model and its context with the memory; `config`: the worker's, if it has one."""
    yield Finding("ok", "model", f"{model.path}, {size(model.size_bytes)}")
    devices = (server and server.devices) or ()
    free_bytes = [int(mib) << 20 for text in devices for mib in _FREE_MIB.findall(text)]
    main = machine.available_bytes  # an integrated GPU has no other memory, and reports this
    on_gpus = sum(each for each in free_bytes if abs(each - main) > _SAME_MEMORY * main)
    tokens = _context_tokens(model, config)
    available = main + on_gpus
    compared = _of_memory("memory", model, tokens, available, f"{size(available)} available")
    if server is None and compared.level == "problem":  # a script, say: it may use GPUs
        compared = replace(compared, level="note")
    yield compared
    if on_gpus:
        yield _of_memory("GPU memory", model, tokens, on_gpus, f"{size(on_gpus)} free on the GPUs")


def _context_tokens(model: Model, config: WorkerConfig | None) -> int:
    """The context of all slots together: as the command says, or else as long as the model was
    trained for."""
    trained_tokens = model.context.trained_tokens if model.context is not None else 0
    if config is None:
        return trained_tokens
    command, env = config.server_cmd, config.env
    contexts = command_flags.contexts_count(command, env, config.slots)
    return command_flags.commanded_n_ctx(command, env, 1) or trained_tokens * contexts


def _of_memory(kind: str, model: Model, tokens: int, free_bytes: int, free: str) -> Finding:
    """Compare the model and a context of so many tokens with one kind of memory."""
    compared, context_bytes, per_token = f"{free}, the model takes {size(model.size_bytes)}", 0, 0
    if model.context is not None:
        per_token = model.context.bytes_per_token
        context_bytes = tokens * per_token
        compared += f", its context of {tokens} tokens at most {size(context_bytes)}"
    if model.size_bytes > free_bytes:
        level, consequence, todo = _TOO_BIG[kind]
        return Finding(level, kind, compared + consequence, todo)
    left_bytes = free_bytes - model.size_bytes
    if context_bytes > left_bytes:
        fitting = left_bytes // per_token // _TOKENS_STEP * _TOKENS_STEP
        todo = f"use a --ctx-size of at most {fitting}, for all slots together"
        if not fitting:
            todo = "use a smaller quantisation"
        return Finding("note", kind, f"{compared}: not all of it fits", todo)
    return Finding("ok", kind, compared)


def of_trial(trial: Trial, server: ServerFacts) -> Iterator[Finding]:
    """What the server reports with the model loaded, and whether NVML sees it on NVIDIA GPUs."""
    context = f", {trial.n_ctx} tokens of context" if trial.n_ctx is not None else ""
    yield Finding("ok", "start", f"ready after {seconds(trial.started_in_s)}{context}")
    if trial.slots not in (None, 1):
        yield Finding(
            "problem",
            "slots",
            f"asked for 1, but the server has {trial.slots}: the program adds its own options",
            "make the program pass --parallel on to llama-server unchanged",
        )
    if trial.tools:
        yield Finding("ok", "tools", "native: the model's chat template supports tools")
    elif trial.tools is None:
        text = "not reported by the server: native, or prompted if the server refuses tools"
        yield Finding("note", "tools", text)
    else:
        text = "the model's chat template has no tools; the system prompt explains them"
        todo = (
            "for native tools, use another model or another template (--server-arg "
            "--chat-template-file ...)"
        )
        yield Finding("note", "tools", f"prompted: {text}", todo)
    uses_cuda = any(device.startswith("CUDA") for device in server.devices or ())
    if trial.gpus:
        yield Finding("ok", "GPUs", f"the server was seen on {', '.join(trial.gpus)}")
    elif trial.gpus is not None and uses_cuda:
        text = (
            "the server was not seen on any of them, so its work and errors there are not visible"
        )
        todo = (
            "start a container with --pid=host; outside a container, check whether the server uses "
            "a GPU at all"
        )
        yield Finding("problem", "GPUs", text, todo)


def of_machine(machine: MachineFacts, trial: Trial | None) -> Iterator[Finding]:
    yield _checked(
        "ports",
        machine.free_port is not None,
        text=f"{machine.free_port} is free",
        problem="no free port was found",
        todo="end programs that listen on ports; `ss -ltn` lists them",
    )
    stat, io = (trial.proc_stat, trial.proc_io) if trial else (machine.proc_stat, machine.proc_io)
    if not stat:
        text = (
            "the CPU time of processes cannot be read: a slow server cannot be told from a hung one"
        )
        yield Finding("problem", "/proc", text, "mount /proc in the container, without hidepid")
    elif not io:
        text = (
            "CPU time can be read, but disk reads cannot: a model that loads slowly may look hung"
        )
        todo = "run the server as the same user; or use --timeouts slow"
        yield Finding("note", "/proc", text, todo)
    else:
        yield Finding("ok", "/proc", "CPU time and disk reads can be seen")
    files, threads = machine.open_files, machine.threads_left  # None: no limit
    yield _checked(
        "open files",
        files is None or files >= MIN_OPEN_FILES,
        text="no limit" if files is None else f"the limit is {files}",
        todo=f"ulimit -n {4 * MIN_OPEN_FILES}",
    )
    yield _checked(
        "threads",
        threads is None or threads >= MIN_THREADS,
        text="no limit" if threads is None else f"{threads} more can be started",
        todo="raise `ulimit -u` or the container's limit of pids, or end other programs",
    )
    yield _checked(
        "pidfd",
        machine.pidfd,
        text="supported",
        problem="not supported here",
        todo="use Linux 5.3 or later, not emulated",
    )


# ---------------------------------------------------------------- servers' commands


def of_command(
    subject: str, config: WorkerConfig, known: command_flags.KnownFlags | None
) -> Iterator[Finding]:
    """Check one worker's command against the flags of its program; `known` None: its --help lists
    none, or it was not run."""
    findings = [Finding("note", subject, printable(line)) for line in config.warnings]
    if known is None:
        program = command_flags.program_of(config.server_cmd)
        text = f"{program} --help lists no flags: the command cannot be compared with it"
        if program_at(config.server_cmd) is None:
            text = f"{program} is not run, since it may start a server: its flags are not checked"
        yield Finding("note", subject, printable(text))
    todo = "correct the command, or use another build: `llama-server --help` lists its flags"
    unknown = command_flags.unknown_flags(config.server_cmd, known) if known is not None else ()
    for word in unknown:
        text = f"this llama-server does not know {printable(word)}"
        yield Finding("problem", subject, text, todo)
    yield from findings
    if known is not None and not unknown and not findings:
        yield Finding("ok", subject, "the llama-server knows every flag of its command")


def of_build(subject: str, build: int | None, command: Sequence[str]) -> Iterator[Finding]:
    """Known vulnerabilities of the build that the command runs."""
    return (of_warning(subject, line) for line in known_flaws(build, command))


def of_batch(subject: str, config: WorkerConfig) -> Iterator[Finding]:
    """A note if prompt batches are so large that everything else waits for them."""
    if line := command_flags.batch_warning(config.server_cmd, config.env):
        yield of_warning(subject, line)


def of_caches(configs: Mapping[str, WorkerConfig], memory_bytes: int) -> Iterator[Finding]:
    """A note if the servers' prompt caches may outgrow the machine's memory."""
    limits = {
        name: command_flags.cache_ram_mib(each.server_cmd, each.env)
        for name, each in configs.items()
    }
    if line := command_flags.memory_warning(limits, memory_bytes):
        what, _, todo = line.partition(": set ")
        yield Finding("note", "prompt caches", printable(what), f"set {todo}")


def of_warning(subject: str, line: str) -> Finding:
    """The finding for a warning of the library, which says what to do after its last semicolon."""
    what, _, todo = line.rpartition("; ")
    return Finding("note", subject, what, todo)


def lines(findings: Sequence[Finding], columns: int | None = None) -> list[str]:
    """The table, line by line; text beyond `columns` is wrapped within its column."""
    width = max(len(finding.subject) for finding in findings)
    shown = []
    for finding in findings:
        shown.append(f"{finding.level:<8} {finding.subject:<{width}}  {finding.text}")
        if finding.todo:
            shown.append(f"{'':<8} {'':<{width}}  what to do: {finding.todo}")
        shown += [f"{'':<8} {'':<{width}}  {line}" for line in finding.more]
    below = 8 + 1 + width + 2
    return [
        wrapped(printable(line), columns, hang=0 if line.startswith(" ") else below)
        for line in shown
    ]
