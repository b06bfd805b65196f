"""What `llama-worker doctor` makes of servers' commands. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llama_worker import WorkerConfig
from llama_worker.cli.doctor_findings import Finding
from llama_worker.cli.text import harmless
from llama_worker.server.builds import known_flaws
from llama_worker.server.command_flags import (
    KnownFlags,
    batch_warning,
    memory_warning,
    program_of,
    unknown_flags,
)


def of_command(subject: str, config: WorkerConfig, known: KnownFlags | None) -> Iterator[Finding]:
    """One worker's command against the flags of its program; `known` None: that does not list
    them."""
    is_well = True
    if known is None:
        text = (
            f"{program_of(config.server_cmd)} --help lists no flags: the command cannot be "
            "compared with it"
        )
        yield Finding("note", subject, harmless(text))
        is_well = False
    for word in unknown_flags(config.server_cmd, known) if known is not None else ():
        todo = (
            "correct the command, or take another build: `llama-server --help` lists what it knows"
        )
        yield Finding("problem", subject, f"this llama-server does not know {harmless(word)}", todo)
        is_well = False
    for line in config.warnings:
        yield Finding("note", subject, harmless(line))
        is_well = False
    if is_well:
        yield Finding("ok", subject, "the llama-server knows every flag of its command")


def of_build(subject: str, build: int | None, command: Sequence[str]) -> Iterator[Finding]:
    """What is known to be wrong with the build that the command runs."""
    for line in known_flaws(build, command):
        what, _, todo = line.rpartition("; ")
        yield Finding("note", subject, what, todo)


def of_batch(subject: str, config: WorkerConfig) -> Iterator[Finding]:
    """How long everything waits for a batch."""
    line = batch_warning(config.server_cmd, config.env)
    if line is not None:
        what, _, todo = line.rpartition("; ")
        yield Finding("note", subject, what, todo)


def of_caches(configs: Mapping[str, WorkerConfig], memory_bytes: int) -> Iterator[Finding]:
    """The servers' prompt caches against the machine's memory."""
    line = memory_warning(
        {name: config.server_cmd for name, config in configs.items()}, memory_bytes
    )
    if line is not None:
        what, _, todo = line.partition(": set ")
        yield Finding("note", "prompt caches", harmless(what), f"set {todo}")
