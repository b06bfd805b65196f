"""`llama-worker doctor`: what would keep a server from running well here."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from rich.text import Text

from llama_worker import WorkerStartError
from llama_worker.cli import doctor_facts, doctor_findings, exits, run_report
from llama_worker.cli.doctor_facts import ServerFacts, Trial
from llama_worker.cli.doctor_findings import Finding
from llama_worker.cli.exits import Problem
from llama_worker.cli.interrupts import Interrupts
from llama_worker.cli.models import Model, find_model
from llama_worker.cli.run_options import ServerOptions, worker_config
from llama_worker.cli.screen import Screen, console_for, is_styled
from llama_worker.cli.servers import find_server
from llama_worker.cli.starting import Stopped

_STYLES = {"problem": "bold red", "note": "yellow", "ok": "green"}


def examine(model_named: str | None, server_named: str | None, *, as_json: bool) -> int:
    """Look, judge, tell; the exit code. For the main thread."""
    with Interrupts() as interrupts:
        try:
            return _examine(model_named, server_named, interrupts, as_json=as_json)
        except (KeyboardInterrupt, Stopped):
            return interrupts.exit_code


def _examine(model_named: str | None, server_named: str | None, interrupts: Interrupts, *, as_json: bool) -> int:
    findings: list[Finding] = []
    with interrupts.raising():  # a program that does not end is ended, too
        server = _server(server_named, findings)
    machine = doctor_facts.look_at_machine()
    findings += doctor_findings.of_gpus(machine, server)
    model, trial = None, None
    if model_named is None:
        findings.append(Finding("note", "model", "none was given", "llama-worker doctor MODEL.gguf tries it out"))
    else:
        model = _model(model_named, findings)
    if model is not None:
        findings += doctor_findings.of_model(model, machine, server)
        if server is not None and server.version is not None and machine.free_port is not None:
            trial = _trial(model, server, machine.free_port, interrupts, findings)
    findings += doctor_findings.of_machine(machine, trial)
    is_well = all(finding.level != "problem" for finding in findings)
    if as_json:
        facts = {"server": server, "model": model, "machine": machine, "trial": trial}
        told = {name: asdict(fact) if fact is not None else None for name, fact in facts.items()}
        print(json.dumps({"ok": is_well, "findings": [asdict(finding) for finding in findings], **told}))
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


def _trial(
    model: Model, server: ServerFacts, port: int, interrupts: Interrupts, findings: list[Finding]
) -> Trial | None:
    screen = Screen()
    try:
        config = worker_config(ServerOptions(model=model.path, executable=server.path, port=port))
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
    for line in doctor_findings.lines(findings):
        text = Text(line)
        if is_styled(console):
            text.stylize(_STYLES.get(line.split(" ", 1)[0], ""), 0, 8)
        console.print(text, soft_wrap=True)
