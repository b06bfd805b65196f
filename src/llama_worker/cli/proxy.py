"""`llama-worker responses-proxy`: OpenAI's Responses API in front of a llama-server."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import ssl
from collections.abc import Iterator
from types import FrameType

from msgspec import Struct

from llama_worker import (
    ConfigError,
    LlamaWorker,
    WorkerConfig,
    WorkerStartError,
    free_port,
    llama_server_cmd,
)
from llama_worker.cli import exits, run_report
from llama_worker.cli.exits import Problem, UsageProblem
from llama_worker.cli.models import find_model, find_server
from llama_worker.cli.run_options import PRESETS, Timeouts
from llama_worker.cli.starting import Stopped
from llama_worker.responses.proxy import ResponsesProxy, ResponsesProxyConfig
from llama_worker.runtime.futures import WorkerFuture

_LOCALHOST = "127.0.0.1"
_TICK_S = 0.05


class ProxyOptions(Struct, frozen=True, kw_only=True):
    """One of `upstream`, `model` and `server_cmd` says which server."""

    upstream: str | None
    host: str
    port: int
    api_key_env: str | None
    ca_file: str | None
    max_concurrent: int | None
    allow_origins: tuple[str, ...]
    model: str | None
    server: str | None
    slots: int
    server_cmd: str | None
    timeouts: Timeouts


def serve(options: ProxyOptions) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. For the main thread."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        with _ended_by_signal() as ended:
            _serve(options, ended)
    except Stopped:
        pass
    except ConfigError as error:  # every value is an option's
        raise UsageProblem(str(error)) from error
    return exits.DONE


def _serve(options: ProxyOptions, ended: WorkerFuture[None]) -> None:
    api_key = _api_key(options.api_key_env)
    _check_ca_file(options.ca_file)
    with _upstream(options, api_key, ended) as server:
        worker = server if isinstance(server, LlamaWorker) else None
        config = ResponsesProxyConfig(
            upstream=None if worker is not None else str(server),
            host=options.host,
            port=options.port,
            api_key=api_key,
            ca_file=options.ca_file,
            max_concurrent=options.max_concurrent,
            allow_origins=options.allow_origins,
            timeouts=PRESETS[options.timeouts](),
        )
        proxy = ResponsesProxy(config, worker=worker)
        try:
            _listen(proxy, f"{config.host}:{config.port}")
            print(f"{proxy.base_url} for {proxy.config.base_url}", flush=True)
            ended.get()
        finally:
            proxy.close()


def _listen(proxy: ResponsesProxy, where: str) -> None:
    try:
        proxy.start().get()
    except OSError as error:
        todo = (
            "give another --port, a --host of this machine, or end the program that listens "
            "there (ss -ltnp)"
        )
        raise Problem("no_port", f"the proxy cannot listen on {where}: {error}", todo) from error


@contextlib.contextmanager
def _upstream(
    options: ProxyOptions, api_key: str | None, ended: WorkerFuture[None]
) -> Iterator[str | LlamaWorker]:
    """The URL of the server that is there, or the worker of one that is started and, at the end,
    stopped.

    Raises Stopped where a signal comes before it is ready.
    """
    starts = [given for given in (options.model, options.server_cmd) if given]
    if len(starts) + bool(options.upstream) > 1:
        raise UsageProblem("give one of --upstream, --model and --server-cmd")
    if not starts:
        url = options.upstream or os.environ.get("LLAMA_CPP_URL")
        if not url:
            raise UsageProblem("give --upstream (or LLAMA_CPP_URL), --model or --server-cmd")
        yield url
        return
    config = _worker_config(options, api_key)
    with contextlib.closing(LlamaWorker(config)) as worker:
        starting = worker.start()
        while not starting.done():
            if ended.wait(_TICK_S):
                raise Stopped
        try:
            starting.get()
        except WorkerStartError as error:
            raise run_report.start_problem(error) from error
        yield worker


def _worker_config(options: ProxyOptions, api_key: str | None) -> WorkerConfig:
    port, slots = free_port(), options.slots
    if options.model:
        model, server = find_model(options.model), find_server(options.server)
        command = llama_server_cmd(
            model.path, host=_LOCALHOST, port=port, slots=slots, executable=server.path
        )
    else:
        fill = {"{host}": _LOCALHOST, "{port}": str(port), "{slots}": str(slots)}
        try:
            words = shlex.split(options.server_cmd or "")
        except ValueError as error:
            raise UsageProblem(f"--server-cmd: {error}") from error
        for name, value in fill.items():
            words = [word.replace(name, value) for word in words]
        command = tuple(words)
    env = {"LLAMA_API_KEY": api_key} if api_key else {}
    return WorkerConfig(
        "responses-proxy",
        _LOCALHOST,
        port,
        command,
        slots=slots,
        api_key=api_key,
        env=env,
        timeouts=PRESETS[options.timeouts](),
    )


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise UsageProblem(f"--api-key-env: the variable {variable} is not set")
    return key


def _check_ca_file(path: str | None) -> None:
    """Else clients would be told, one by one."""
    if path is None:
        return
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:
        raise UsageProblem(
            f"--ca-file: {path} holds no certificates (PEM): {error.strerror or error}"
        ) from error


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[WorkerFuture[None]]:
    """Answered by SIGINT or SIGTERM; who handled them before does so again afterwards."""
    ended: WorkerFuture[None] = WorkerFuture()  # a wait for it misses no signal

    def on_signal(number: int, frame: FrameType | None) -> None:
        ended.answer(None)

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
