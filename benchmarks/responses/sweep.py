"""What the proxy adds to a reply beside other gateways, at several concurrencies.

    python -m benchmarks.responses.sweep [--json FILE] [--seconds S]

Every gateway stands in a process of its own before the same upstream, which answers at once. So
many connections each send their next request as soon as they have their reply; what a gateway adds
is its quantile less that of the upstream alone, at the same concurrency. The ways take turns. The
command makes LiteLLM an environment of its own, once, for which it needs PyPI; it is then told to
ask nobody else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from benchmarks.common import HOST, quantile, report, table, take_port
from benchmarks.responses.servers import OURS

CONCURRENCIES = (1, 16, 64)
ROUNDS = 3
SECONDS = 2.0  # of each way, concurrency and round
LITELLM = "1.106.2"
_LITELLM_HOME = Path.home() / ".cache" / "llama_worker" / f"litellm-{LITELLM}"
_START_S = 180.0
_REPLY_S = 60.0
_CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
_RESPONSE = {"model": "m", "input": "Hi", "store": False}
_CHAT_PATH, _RESPONSES_PATH = "/v1/chat/completions", "/v1/responses"


class Gateway(Struct, frozen=True):
    """One that runs. `cold_start_s`: from its command to its first reply."""

    port: int
    process: psutil.Process
    cold_start_s: float

    def rss_mb(self) -> float:
        """Of all its processes."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(float(process.memory_info().rss) for process in family) / 1e6


@contextlib.contextmanager
def _gateway(command: Sequence[str], port: int, **env: str) -> Iterator[Gateway]:
    began = time.monotonic()
    process = psutil.Popen(
        command,
        env={**os.environ, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        request = _request(_CHAT_PATH, _CHAT)
        while not asyncio.run(_answers(port, request)):
            if time.monotonic() - began > _START_S or process.poll() is not None:
                raise SystemExit(f"{command[0]} does not answer within {_START_S:g} s")
            time.sleep(0.02)
        yield Gateway(port, process, time.monotonic() - began)
    finally:
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


# --- load -----------------------------------------------------------------------------------------


def _request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    """One request and its whole reply. Raises OSError or EOFError where it is not a good one."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200 "):
        raise ConnectionError(head[:40].decode("latin-1"))
    _, found, length = head.partition(b"content-length:")
    if found:
        await reader.readexactly(int(length.split(b"\r\n")[0]))
    else:
        await reader.readuntil(b"\r\n0\r\n\r\n")


async def _answers(port: int, request: bytes) -> bool:
    try:
        async with asyncio.timeout(_REPLY_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                await _ask(reader, writer, request)
            finally:
                writer.close()
    except (OSError, EOFError):
        return False
    return True


async def _load(port: int, request: bytes, concurrency: int, seconds: float) -> list[float]:
    """The milliseconds of every reply within that time."""
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        while (began := time.perf_counter()) < end:
            await _ask(reader, writer, request)
            taken.append((time.perf_counter() - began) * 1000)
        writer.close()

    async with asyncio.timeout(seconds + _REPLY_S), asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(client())
    return taken


# --- gateways -------------------------------------------------------------------------------------


def _litellm() -> str:
    """Its program, installed the first time."""
    installed = _LITELLM_HOME / "installed"
    if not installed.exists():
        venv.create(_LITELLM_HOME, with_pip=True, clear=True)
        pip = [str(_LITELLM_HOME / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"litellm[proxy]=={LITELLM}"], check=True)
        installed.touch()
    return str(_LITELLM_HOME / "bin" / "litellm")


def _litellm_config(folder: Path, upstream: str) -> str:
    path = folder / "litellm.yaml"
    params = {"model": "lm_studio/m", "api_base": f"{upstream}/v1", "api_key": "none"}
    path.write_text(json.dumps({"model_list": [{"model_name": "m", "litellm_params": params}]}))
    return str(path)  # JSON is YAML


_LITELLM_ENV = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_LOG": "ERROR",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # it listens on loopback only
}


@contextlib.contextmanager
def gateways() -> Iterator[dict[str, tuple[Gateway, bytes]]]:
    """By the way's name: who is asked, and for what. "direct" is the upstream itself."""
    here = [sys.executable, "-m", "benchmarks.responses.instant"]
    program = _litellm()
    up, relay, proxy, litellm = (take_port() for _ in range(4))
    upstream = f"http://{HOST}:{up}"
    chat, response = _request(_CHAT_PATH, _CHAT), _request(_RESPONSES_PATH, _RESPONSE)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        direct = stack.enter_context(_gateway([*here, "upstream", str(up)], up))
        bare = stack.enter_context(_gateway([*here, "relay", str(relay), upstream], relay))
        ours = stack.enter_context(
            _gateway([*OURS, "--upstream", upstream, "--port", str(proxy)], proxy)
        )
        config = _litellm_config(folder, upstream)
        other = stack.enter_context(
            _gateway(
                [program, "--config", config, "--host", HOST, "--port", str(litellm)],
                litellm,
                **_LITELLM_ENV,
            )
        )
        yield {
            "direct": (direct, chat),
            "bare requests relay": (bare, chat),
            "proxy, passed through": (ours, chat),
            "proxy, /v1/responses": (ours, response),
            "LiteLLM, passed through": (other, chat),
            "LiteLLM, /v1/responses": (other, response),
        }


def sweep(seconds: float) -> dict[str, Any]:
    """By the way: what it adds by concurrency, its memory and its start."""
    with gateways() as ways:
        seen: dict[str, dict[int, list[float]]] = {
            name: {concurrency: [] for concurrency in CONCURRENCIES} for name in ways
        }
        for gateway, request in ways.values():
            asyncio.run(_load(gateway.port, request, CONCURRENCIES[-1], seconds / 2))  # warm
        for _ in range(ROUNDS):
            for concurrency in CONCURRENCIES:
                for name, (gateway, request) in ways.items():
                    seen[name][concurrency] += asyncio.run(
                        _load(gateway.port, request, concurrency, seconds)
                    )
        return {
            name: {
                "rss_mb": gateway.rss_mb(),
                "cold_start_s": gateway.cold_start_s,
                **{str(number): _figures(seen, name, number, seconds) for number in CONCURRENCIES},
            }
            for name, (gateway, _) in ways.items()
        }


def _figures(
    seen: dict[str, dict[int, list[float]]], name: str, concurrency: int, seconds: float
) -> dict[str, float]:
    taken, alone = seen[name][concurrency], seen["direct"][concurrency]
    return {
        "added_p50_ms": quantile(taken, 0.5) - quantile(alone, 0.5),
        "added_p99_ms": quantile(taken, 0.99) - quantile(alone, 0.99),
        "requests_per_s": len(taken) / (ROUNDS * seconds),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.responses.sweep")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    figures = sweep(parser.parse_args().seconds)
    header = [f"added ms, p50 / p99, and requests/s, of {ROUNDS} rounds"]
    header += [f"{concurrency} at once" for concurrency in CONCURRENCIES]
    rows: list[list[object]] = []
    for name, of_way in figures.items():
        cells = [of_way[str(concurrency)] for concurrency in CONCURRENCIES]
        added = "-" if name == "direct" else "{added_p50_ms:.2f} / {added_p99_ms:.2f}"
        rows.append(
            [name, *(f"{added.format(**cell)}, {cell['requests_per_s']:.0f}/s" for cell in cells)]
        )
    text = table(header, rows)
    held: list[list[object]] = [
        [name.partition(",")[0], round(of_way["rss_mb"]), of_way["cold_start_s"]]
        for name, of_way in figures.items()
        if not name.endswith("/v1/responses")
    ]
    text += "\n\n" + table(["after the sweep", "RSS, MB", "cold start, s"], held)
    report("responses.sweep", text, {**figures, "litellm": LITELLM})


if __name__ == "__main__":
    main()
