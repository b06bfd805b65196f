"""What `llama-worker run` was asked for, as the library wants it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from msgspec import Struct

from llama_worker import (
    RestartPolicy,
    TimeoutProfile,
    WorkerConfig,
    default_bios,
    llama_server_cmd,
)
from llama_worker.exit_tools import ALL_EXIT_TOOLS

HOST = "127.0.0.1"
STOP_GRACE_S = 2.0  # a person waits at the terminal
Timeouts = Literal["slow", "slow_prefill", "normal", "fast", "debug"]
PRESETS: Mapping[Timeouts, Callable[[], TimeoutProfile]] = {
    "slow": TimeoutProfile.slow_prefill,
    "slow_prefill": TimeoutProfile.slow_prefill,
    "normal": TimeoutProfile.normal,
    "fast": TimeoutProfile.fast,
    "debug": TimeoutProfile.debug,
}


class ServerOptions(Struct, frozen=True, kw_only=True):
    """One server; None where the server decides."""

    model: str
    executable: str
    port: int
    slots: int = 1
    ctx_size: int | None = None
    gpu_layers: str | None = None
    server_args: tuple[str, ...] = ()
    timeouts: Timeouts = "slow_prefill"
    exit_tools: bool = False


def worker_config(options: ServerOptions) -> WorkerConfig:
    """One worker that is never restarted by itself: who sits at the terminal is told. Raises
    ConfigError."""
    flags = {"--ctx-size": options.ctx_size, "--n-gpu-layers": options.gpu_layers}
    named = [
        word for flag, value in flags.items() if value is not None for word in (flag, str(value))
    ]
    command = llama_server_cmd(
        options.model,
        host=HOST,
        port=options.port,
        slots=options.slots,
        executable=options.executable,
        extra_args=(*named, *options.server_args),
    )
    return WorkerConfig(
        "run",
        HOST,
        options.port,
        command,
        slots=options.slots,
        timeouts=replace(PRESETS[options.timeouts](), stop_grace_s=STOP_GRACE_S),
        restart=RestartPolicy.never(),
        exit_tools=ALL_EXIT_TOOLS if options.exit_tools else (),
        bios_provider=default_bios if options.exit_tools else None,
    )


def request_params(
    max_tokens: int | None, temperature: float | None, seed: int | None
) -> dict[str, Any]:
    """The parameters that were given."""
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    return {name: value for name, value in given.items() if value is not None}
