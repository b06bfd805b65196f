"""`llama-worker doctor`: checks what would keep a server from running well on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from msgspec import to_builtins
from rich.text import Text

from llama_worker import ConfigError, WorkerConfig
from llama_worker.cli import doctor_facts, doctor_findings, exits
from llama_worker.cli.doctor_facts import ServerFacts
from llama_worker.cli.doctor_findings import Finding
from llama_worker.cli.exits import Problem, UsageProblem
from llama_worker.cli.gguf import find_model
from llama_worker.cli.servers import find_server, worker_config
from llama_worker.cli.terminal import Interrupts, Screen, console_for, is_styled, width_of
from llama_worker.cli.text import printable
from llama_worker.config.command import PROGRAM, flag_values, program_at
from llama_worker.config.command_flags import downloads_model, program_of
from llama_worker.config.file import read_fleet
from llama_worker.config.server_program import (
    FoundServer,
    host_environment,
    options_file_warnings,
    server_environment,
)

_STYLES = {"problem": "bold red", "note": "yellow", "ok": "green"}
P = ParamSpec("P")
T = TypeVar("T")


def examine(
    named: str | None, server_named: str | None, server_args: Sequence[str], *, as_json: bool
) -> int:
    """Collect the facts, print the findings; returns the exit code. `named` is a model or a fleet
    file. Main thread only. Raises UsageProblem."""
    fleet = named if named is not None and named.endswith(".toml") else None
    if fleet and (server_named or server_args):
        raise UsageProblem("a fleet file has its own commands: leave out --server and --server-arg")
    if named is None and server_args:
        raise UsageProblem("--server-arg needs a MODEL: without one no server is started")
    with Interrupts() as interrupts:
        try:
            if fleet:
                findings, facts = _examine_fleet(fleet, interrupts)
            else:
                findings, facts = _examine(named, server_named, server_args, interrupts)
        except KeyboardInterrupt:
            return interrupts.exit_code
        if interrupts.asked:
            return interrupts.exit_code
    is_well = all(finding.level != "problem" for finding in findings)
    if as_json:
        print(json.dumps({"ok": is_well, "findings": to_builtins(findings), **facts}))
    else:
        _print_findings(findings)
    return exits.DONE if is_well else exits.FAILED


def _examine(
    model_named: str | None,
    server_named: str | None,
    server_args: Sequence[str],
    interrupts: Interrupts,
) -> tuple[list[Finding], dict[str, Any]]:
    findings: list[Finding] = []
    environment = server_environment(host_environment(), {})
    found, server = _found(findings, "llama-server", find_server, server_named), None
    if found is not None:
        server = doctor_facts.look_at_server(found, interrupts, environment)
    machine = doctor_facts.look_at_machine(interrupts)
    if server is not None:
        findings += doctor_findings.of_server(server)
        files = options_file_warnings(environment)
        findings += [doctor_findings.of_warning("options", line) for line in files]
    findings += doctor_findings.of_gpus(machine, server)
    model, config, trial = None, None, None
    if model_named is None:
        todo = "llama-worker doctor MODEL.gguf tries it out"
        findings.append(Finding("note", "model", "none was given", todo))
    else:
        model = _found(findings, "model", find_model, model_named)
    port = machine.free_port
    if model and server and server.version is not None and port:
        config = worker_config(model, server.path, port=port, server_args=server_args)
    if model is not None:
        findings += doctor_findings.of_model(model, machine, server, config)
    if server is not None and config is not None:
        if server_args:
            known = doctor_facts.known_flags(server.path, interrupts, environment)
            findings += doctor_findings.of_command("command", config, known)
        findings += doctor_findings.of_batch("batches", config)
        findings += doctor_findings.of_caches({"it": config}, machine.memory_bytes)
        trial = _found(findings, "start", doctor_facts.try_out, config, Screen(), interrupts)
        if trial is not None:
            findings += doctor_findings.of_trial(trial, server)
    if server is not None:
        command = config.server_cmd if config is not None else ()
        findings += doctor_findings.of_build("build", server.build, command)
    findings += doctor_findings.of_machine(machine, trial)
    facts = {"server": server, "model": model, "machine": machine, "trial": trial}
    return findings, {name: to_builtins(each) for name, each in facts.items()}


def _examine_fleet(path: str, interrupts: Interrupts) -> tuple[list[Finding], dict[str, Any]]:
    """Check every worker's program, command and model; starts no server."""
    findings: list[Finding] = []
    try:
        fleet = read_fleet(path)
    except (ConfigError, OSError) as error:
        todo = "docs/fleet.md describes the file"
        return [Finding("problem", "fleet", printable(str(error)), todo)], {}
    machine = doctor_facts.look_at_machine(interrupts)
    for name, config in fleet.items():
        server = _examine_program(findings, name, config, interrupts)
        for _, named in flag_values(config.server_cmd, ("-m", "--model"))[-1:]:
            if os.path.expanduser(named) != named:
                text = f"there is no file {printable(named)}: llama-server does not expand ~"
                findings.append(Finding("problem", "model", text, "write the home folder in full"))
            elif not os.path.exists(named) and downloads_model(config.server_cmd, config.env):
                text = f"there is no file {printable(named)}: its server downloads it"
                findings.append(Finding("note", "model", text))
            elif (model := _found(findings, "model", find_model, named)) is not None:
                findings += doctor_findings.of_model(model, machine, server, config)
    findings += doctor_findings.of_caches(fleet, machine.memory_bytes)
    findings += doctor_findings.of_machine(machine, None)
    return findings, {"workers": sorted(fleet), "machine": to_builtins(machine)}


def _found(
    findings: list[Finding], subject: str, look: Callable[P, T], *args: P.args, **named: P.kwargs
) -> T | None:
    """The result of `look`; if it raises Problem, None, and a finding is added to `findings`."""
    try:
        return look(*args, **named)
    except Problem as problem:
        findings.append(doctor_findings.of_problem(subject, problem))
        return None


def _examine_program(
    findings: list[Finding], name: str, config: WorkerConfig, interrupts: Interrupts
) -> ServerFacts | None:
    """Check a worker's command, and its program in the environment that the server would get; adds
    to the findings. None: there is no such program, or it may be a script, which is not run."""
    environment = server_environment(host_environment(), config.env)
    first, *words = config.server_cmd
    found = _found(findings, name, find_server, first, option="executable", environment=environment)
    if found is None:
        return None
    server, known = None, None
    if program_at(config.server_cmd) is not None:  # any other may be a script that takes no options
        program = program_of((found.path, *words))
        found = FoundServer(program, found.how)
        server = doctor_facts.look_at_server(found, interrupts, environment)
        # a wrapper may find another program
        if server.version is None and os.path.basename(first).startswith(PROGRAM):
            findings.append(doctor_findings.of_broken_server(name, server))
            return server
        known = doctor_facts.known_flags(program, interrupts, environment)
    files = options_file_warnings(environment)
    findings += [doctor_findings.of_warning(name, line) for line in files]
    findings += doctor_findings.of_command(name, config, known)
    if server is not None:
        findings += doctor_findings.of_build(name, server.build, config.server_cmd)
    findings += doctor_findings.of_batch(name, config)
    return server


def _print_findings(findings: list[Finding]) -> None:
    console = console_for(sys.stdout)
    for line in doctor_findings.lines(findings, width_of(sys.stdout)):
        text = Text(line)
        if is_styled(console):
            text.stylize(_STYLES.get(line.split(" ", 1)[0], ""), 0, 8)
        console.print(text, soft_wrap=True)
