"""`llama-worker doctor`: what would keep a server from running well here."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from llama_worker import ConfigError, WorkerConfig, WorkerStartError, load_config
from llama_worker.cli import doctor_commands, doctor_facts, doctor_findings, exits, run_report
from llama_worker.cli.doctor_facts import ServerFacts, Trial
from llama_worker.cli.doctor_findings import Finding
from llama_worker.cli.exits import Problem
from llama_worker.cli.interrupts import Interrupts
from llama_worker.cli.models import Model, find_model, find_server
from llama_worker.cli.run_options import ServerOptions, worker_config
from llama_worker.cli.screen import Screen, console_for, is_styled, width_of
from llama_worker.cli.starting import Stopped
from llama_worker.cli.text import harmless
from llama_worker.server.command import flag_values
from llama_worker.server.command_flags import program_of

_STYLES = {"problem": "bold red", "note": "yellow", "ok": "green"}


def examine(
    named: str | None, server_named: str | None, server_args: Sequence[str] = (), *, as_json: bool
) -> int:
    """Look, judge, tell; the exit code. `named` is a model, or a fleet file. For the main
    thread."""
    with Interrupts() as interrupts:
        try:
            if named is not None and named.endswith(".toml"):
                return _examine_fleet(named, interrupts, as_json=as_json)
            return _examine(named, server_named, tuple(server_args), interrupts, as_json=as_json)
        except (KeyboardInterrupt, Stopped):
            return interrupts.exit_code


def _examine(
    model_named: str | None,
    server_named: str | None,
    server_args: tuple[str, ...],
    interrupts: Interrupts,
    *,
    as_json: bool,
) -> int:
    findings: list[Finding] = []
    with interrupts.raising():  # a program that does not end is ended, too
        server = _server(server_named, findings)
    machine = doctor_facts.look_at_machine()
    findings += doctor_findings.of_gpus(machine, server)
    model, trial = None, None
    command: Sequence[str] = ()
    if model_named is None:
        findings.append(
            Finding(
                "note", "model", "none was given", "llama-worker doctor MODEL.gguf tries it out"
            )
        )
    else:
        model = _model(model_named, findings)
    if model is not None:
        findings += doctor_findings.of_model(model, machine, server)
        if server is not None and server.version is not None and machine.free_port is not None:
            options = ServerOptions(
                model=model.path,
                executable=server.path,
                port=machine.free_port,
                server_args=server_args,
            )
            config = worker_config(options)
            command = config.server_cmd
            if server_args:
                with interrupts.raising():
                    findings += doctor_commands.of_command(
                        "command", config, doctor_facts.known_flags(server.path)
                    )
            findings += doctor_commands.of_batch("batches", config)
            findings += doctor_commands.of_caches({"it": config}, machine.memory_bytes)
            trial = _trial(config, interrupts, findings)
    if server is not None:
        findings += doctor_commands.of_build("build", server.build, command)
    if server is not None and trial is not None:
        findings += doctor_findings.of_server_on_gpus(trial, server)
    findings += doctor_findings.of_machine(machine, trial)
    facts = {"server": server, "model": model, "machine": machine, "trial": trial}
    told = {name: asdict(fact) if fact is not None else None for name, fact in facts.items()}
    return _answer(findings, told, as_json=as_json)


def _examine_fleet(path: str, interrupts: Interrupts, *, as_json: bool) -> int:
    """Every worker's program, command and model; no server is started."""
    findings: list[Finding] = []
    with warnings.catch_warnings(), interrupts.raising():
        warnings.simplefilter("ignore")  # of the caches: said below
        try:
            fleet = load_config(path)
        except (ConfigError, OSError) as error:
            problem = Finding(
                "problem", "fleet", harmless(str(error)), "docs/fleet.md describes the file"
            )
            return _answer([problem], {}, as_json=as_json)
        programs = {name: _program(name, config, findings) for name, config in fleet.items()}
        there = sorted({program for program in programs.values() if program})
        known = {program: doctor_facts.known_flags(program) for program in there}
        build = {program: doctor_facts.build_of(program) for program in there}
        machine = doctor_facts.look_at_machine()
    for name, config in fleet.items():
        if program := programs[name]:
            findings += doctor_commands.of_command(name, config, known[program])
            findings += doctor_commands.of_build(name, build[program], config.server_cmd)
            findings += doctor_commands.of_batch(name, config)
        for _, model in flag_values(config.server_cmd, ("-m", "--model")):
            if (found := _model(model, findings)) is not None:
                findings += doctor_findings.of_model(found, machine, None)
    findings += doctor_commands.of_caches(fleet, machine.memory_bytes)
    findings += doctor_findings.of_machine(machine, None)
    return _answer(
        findings, {"workers": sorted(fleet), "machine": asdict(machine)}, as_json=as_json
    )


def _program(name: str, config: WorkerConfig, findings: list[Finding]) -> str | None:
    """The llama-server of a worker's command, as it would be started; None where it cannot be."""
    try:
        first = find_server(config.server_cmd[0], option="executable").path
    except Problem as problem:
        findings.append(doctor_findings.of_problem(name, problem))
        return None
    return program_of((first, *config.server_cmd[1:]))


def _answer(findings: list[Finding], facts: dict[str, Any], *, as_json: bool) -> int:
    is_well = all(finding.level != "problem" for finding in findings)
    if as_json:
        print(
            json.dumps(
                {"ok": is_well, "findings": [asdict(finding) for finding in findings], **facts}
            )
        )
    else:
        _tell(findings)
    return exits.DONE if is_well else exits.FAILED


def _server(named: str | None, findings: list[Finding]) -> ServerFacts | None:
    try:
        server = doctor_facts.look_at_server(find_server(named))
    except Problem as problem:
        findings.append(doctor_findings.of_problem("llama-server", problem))
        return None
    findings += doctor_findings.of_server(server)
    return server


def _model(named: str, findings: list[Finding]) -> Model | None:
    try:
        return find_model(named)
    except Problem as problem:
        findings.append(doctor_findings.of_problem("model", problem))
        return None


def _trial(config: WorkerConfig, interrupts: Interrupts, findings: list[Finding]) -> Trial | None:
    screen = Screen()
    try:
        trial = doctor_facts.try_out(config, screen, interrupts)
    except WorkerStartError as error:
        findings.append(doctor_findings.of_problem("start", run_report.start_problem(error)))
        return None
    finally:
        screen.activity_over()
    findings += doctor_findings.of_trial(trial)
    return trial


def _tell(findings: list[Finding]) -> None:
    console = console_for(sys.stdout)
    width = width_of(sys.stdout)
    for line in doctor_findings.lines(findings, width):
        text = Text(line)
        if is_styled(console):
            text.stylize(_STYLES.get(line.split(" ", 1)[0], ""), 0, 8)
        console.print(text, soft_wrap=True)
