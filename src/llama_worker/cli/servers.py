"""Where the llama-server is, for the command."""

from __future__ import annotations

from llama_worker.cli.exits import Problem
from llama_worker.runtime import server_program
from llama_worker.runtime.server_program import FoundServer


def find_server(named: str | None) -> FoundServer:
    """`named` (--server), else where the library looks. Raises Problem `no_server`."""
    try:
        return server_program.find_server(named, option="--server")
    except server_program.ServerNotFound as error:
        raise Problem("no_server", error.what, error.todo) from error
