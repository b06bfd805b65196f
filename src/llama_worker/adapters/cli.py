"""The `llama-worker` command."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from llama_worker import LlamaWorker, LlamaWorkerError, WorkerConfig, llama_server_cmd
from llama_worker.responses.config import ResponsesProxyConfig

_FIRST_PORT, _LAST_PORT = 20000, 31999  # below those that the kernel hands out by itself
_LOCALHOST = "127.0.0.1"


def main(argv: Sequence[str] | None = None) -> int:
    """The command's exit code: 0 after a regular end, 1 where it could not start."""
    options = _parser(os.environ).parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ended = _ended_by_signal()
    try:
        _responses_proxy(options, ended)
    except (LlamaWorkerError, TypeError, ValueError, OSError) as error:
        print(f"llama-worker: {error}", file=sys.stderr)
        return 1
    return 0


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llama-worker", description="llama.cpp servers for other programs")
    commands = parser.add_subparsers(dest="command", required=True)
    proxy = commands.add_parser(
        "responses-proxy",
        help="OpenAI's Responses API in front of a llama-server",
        description="Makes a llama-server usable by clients that speak only OpenAI's Responses API. In front of a "
        "server that runs (--upstream), or of one that this command starts and watches over (--model, --server-cmd).",
    )
    proxy.add_argument("--upstream", metavar="URL", help="the llama-server; also LLAMA_CPP_URL")
    proxy.add_argument("--host", default=environ.get("PROXY_HOST") or _LOCALHOST, help="[PROXY_HOST or %(default)s]")
    proxy.add_argument("--port", type=int, default=environ.get("PROXY_PORT") or 9998, help="[PROXY_PORT or 9998]")
    proxy.add_argument("--api-key-env", metavar="NAME", help="the variable that holds the upstream's API key")
    proxy.add_argument("--ca-file", metavar="FILE", help="whom to trust for an https upstream [public authorities]")
    proxy.add_argument("--max-concurrent", type=int, metavar="N", help="refuse (429) more than N responses at once")
    proxy.add_argument("--model", metavar="FILE", help="start a llama-server with this GGUF file")
    proxy.add_argument("--server", metavar="EXE", default="llama-server", help="for --model [llama-server]")
    proxy.add_argument("--slots", type=int, default=1, help="of the server that is started [1]")
    proxy.add_argument(
        "--server-cmd", metavar="CMD", help="start this llama-server; {host}, {port} and {slots} are filled in"
    )
    return parser


def _responses_proxy(options: argparse.Namespace, ended: threading.Event) -> None:
    from llama_worker.responses_proxy import ResponsesProxy  # the extra `responses`

    api_key = _api_key(options.api_key_env)
    with _upstream(options, api_key) as upstream:
        config = ResponsesProxyConfig(
            upstream=upstream,
            host=options.host,
            port=options.port,
            api_key=api_key,
            ca_file=options.ca_file,
            max_concurrent=options.max_concurrent,
        )
        proxy = ResponsesProxy(config)
        try:
            proxy.start().get()
            print(f"{proxy.base_url} for {config.base_url}", flush=True)
            ended.wait()
        finally:
            proxy.close()


@contextlib.contextmanager
def _upstream(options: argparse.Namespace, api_key: str | None) -> Iterator[str]:
    """The URL of the server that is there, or of one that is started and, at the end, stopped."""
    starts = [given for given in (options.model, options.server_cmd) if given]
    if len(starts) + bool(options.upstream) > 1:
        raise ValueError("give one of --upstream, --model and --server-cmd")
    if not starts:
        url = options.upstream or os.environ.get("LLAMA_CPP_URL")
        if not url:
            raise ValueError("give --upstream (or LLAMA_CPP_URL), --model or --server-cmd")
        yield url
        return
    config = _worker_config(options, api_key)
    with LlamaWorker(config):
        yield f"http://{config.host}:{config.port}"


def _worker_config(options: argparse.Namespace, api_key: str | None) -> WorkerConfig:
    port, slots = _free_port(), options.slots
    if options.model:
        command = llama_server_cmd(options.model, host=_LOCALHOST, port=port, slots=slots, executable=options.server)
    else:
        fill = {"{host}": _LOCALHOST, "{port}": str(port), "{slots}": str(slots)}
        words = shlex.split(options.server_cmd)
        for name, value in fill.items():
            words = [word.replace(name, value) for word in words]
        command = tuple(words)
    env = {"LLAMA_API_KEY": api_key} if api_key else {}
    return WorkerConfig("responses-proxy", _LOCALHOST, port, command, slots=slots, api_key=api_key, env=env)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ValueError(f"--api-key-env: the variable {variable} is not set")
    return key


def _free_port() -> int:
    for port in range(_FIRST_PORT + os.getpid() % 5000, _LAST_PORT):
        with socket.socket() as probe:
            try:
                probe.bind((_LOCALHOST, port))
            except OSError:
                continue
            return port
    raise OSError("no free port")


def _ended_by_signal() -> threading.Event:
    ended = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return ended


if __name__ == "__main__":
    sys.exit(main())
