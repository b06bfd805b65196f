"""`llama-worker responses-proxy`: OpenAI's Responses API in front of a llama-server."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import ssl
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from msgspec import Struct

from llama_worker import LlamaWorker, TimeoutProfile, WorkerConfig, WorkerState, free_port
from llama_worker.cli import exits, run_report
from llama_worker.cli.exits import Problem, UsageProblem
from llama_worker.cli.gguf import find_model
from llama_worker.cli.servers import find_server, make_ready
from llama_worker.cli.terminal import Interrupts, Screen
from llama_worker.responses.proxy import ResponsesProxy, ResponsesProxyConfig

_LOCALHOST = "127.0.0.1"
_LOOK_S = 1.0  # between two looks at whether the worker has given its server up


class ServerChoice(Struct, frozen=True, kw_only=True):
    """Which server to use: the one at `url`, or one to start with a `model` or a `command`, and
    `slots` (None: 1)."""

    url: str | None
    model: str | None
    server: str | None
    slots: int | None
    command: str | None


def serve(upstream: ServerChoice, config: ResponsesProxyConfig, *, api_key_env: str | None) -> int:
    """Serve until a signal comes; returns the exit code. Main thread only. Raises Problem if it
    cannot serve, or no longer: the server that it started has failed for good.

    The upstream and the API key of `config` are set here.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        _check_choice(upstream, config.ca_file)
        api_key = _api_key(api_key_env)
        _check_ca_file(config.ca_file)
        with (
            Interrupts() as interrupts,
            _server(upstream, api_key, config.timeouts) as (url, worker),
            contextlib.closing(
                ResponsesProxy(replace(config, upstream=url, api_key=api_key), worker=worker)
            ) as proxy,
        ):
            _listen(proxy, f"{config.host}:{config.port}")  # may fail: before a model is loaded
            if worker is not None:
                make_ready(worker, Screen(quiet=True), interrupts)
            print(f"{proxy.base_url} for {proxy.config.base_url}", flush=True)
            while not interrupts.wait(_LOOK_S):
                if worker is not None:
                    _check_lockout(worker)
    return exits.DONE


def _check_lockout(worker: LlamaWorker) -> None:
    """Raises Problem if the worker has given its server up."""
    if worker.get_worker_status().get()["state"] is not WorkerState.FAILED:
        return
    debug_info = worker.get_debug_info().get()
    for event in debug_info["recent_events"]:  # FAILED may also be unkillable, which may pass
        if event["event"] == "locked_out":
            detail = f"{event['reason']}: {event['detail']}"
            raise run_report.lockout_problem(detail, debug_info["recent_logs"])


def _listen(proxy: ResponsesProxy, where: str) -> None:
    try:
        proxy.start().get()
    except OSError as error:
        todo = (
            "give another --port, a --host of this machine, or end the program that listens "
            "there (ss -ltnp)"
        )
        raise Problem("no_port", f"the proxy cannot listen on {where}: {error}", todo) from error


def _starts_server(upstream: ServerChoice) -> bool:
    return bool(upstream.model or upstream.command)


def _check_choice(upstream: ServerChoice, ca_file: str | None) -> None:
    """Refuse what would be ignored. Raises UsageProblem."""
    if sum(map(bool, (upstream.url, upstream.model, upstream.command))) > 1:
        raise UsageProblem("give one of --upstream, --model and --server-cmd")
    if upstream.server and not upstream.model:
        raise UsageProblem("--server needs --model: it names the program that is started with it")
    if upstream.slots is not None and not _starts_server(upstream):
        raise UsageProblem("--slots needs --model or --server-cmd: a running server has its own")
    if ca_file is not None and _starts_server(upstream):
        raise UsageProblem("--ca-file needs --upstream: a started server is reached without TLS")


@contextlib.contextmanager
def _server(
    upstream: ServerChoice, api_key: str | None, timeouts: TimeoutProfile
) -> Iterator[tuple[str | None, LlamaWorker | None]]:
    """The URL of a running server, or the worker of one that is to be started; stopped at exit."""
    if not _starts_server(upstream):
        url = upstream.url or os.environ.get("LLAMA_CPP_URL")
        if not url:
            raise UsageProblem("give --upstream (or LLAMA_CPP_URL), --model or --server-cmd")
        yield url, None
        return
    config = _worker_config(upstream, api_key, timeouts)
    with contextlib.closing(LlamaWorker(config)) as worker:
        yield None, worker


def _worker_config(
    upstream: ServerChoice, api_key: str | None, timeouts: TimeoutProfile
) -> WorkerConfig:
    port, name, slots = free_port(), "responses-proxy", upstream.slots or 1
    fields: dict[str, Any] = {
        "slots": slots,
        "api_key": api_key,
        "env": {"LLAMA_API_KEY": api_key} if api_key else {},
        "timeouts": timeouts,
    }
    if upstream.model:
        model, server = find_model(upstream.model), find_server(upstream.server)
        return WorkerConfig.for_model(
            model.path, name=name, port=port, executable=server.path, **fields
        )
    try:
        words = shlex.split(upstream.command or "")
    except ValueError as error:
        raise UsageProblem(f"--server-cmd: {error}") from error
    fill = {"{host}": _LOCALHOST, "{port}": str(port), "{slots}": str(slots)}
    for placeholder, value in fill.items():
        words = [word.replace(placeholder, value) for word in words]
    return WorkerConfig(name, _LOCALHOST, port, tuple(words), **fields)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise UsageProblem(f"--api-key-env: the variable {variable} is not set")
    return key


def _check_ca_file(path: str | None) -> None:
    """Fail at the start, not at a client's request. Raises UsageProblem."""
    if path is None:
        return
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:
        raise UsageProblem(
            f"--ca-file: {path} has no certificates (PEM): {error.strerror or error}"
        ) from error
