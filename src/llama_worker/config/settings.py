"""The config of a worker, checked on construction. Pure.

A wrong type raises TypeError, a value that cannot work ConfigError (a ValueError); the text names
the field, the value and what would be right. Arguments are copied: changing one later does not
change the config.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from datetime import UTC, tzinfo
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Self
from zoneinfo import ZoneInfo

from msgspec import Struct

from llama_worker.bios import default_bios
from llama_worker.config.command import (
    BATCH_SIZE,
    SECRET_VARIABLE,
    check_command,
    checked_port,
    checked_slots,
    checked_words,
    ip_address_of,
    llama_server_cmd,
    masked_server_cmd,
    without_brackets,
)
from llama_worker.config.command_flags import command_warnings
from llama_worker.config.profiles import (
    Canary,
    LoopDetector,
    Recycle,
    RestartPolicy,
    TimeoutProfile,
)
from llama_worker.config.tool_schemas import checked_tools
from llama_worker.config.validation import (
    Count,
    CountOrZero,
    Seconds,
    check_callback,
    check_fields,
    check_takes,
    checked_api_key,
    checked_int,
    checked_json_object,
    checked_str,
    names_near_fields,
    plain_str,
    shown,
    takes,
)
from llama_worker.errors import MASK, ConfigError
from llama_worker.types.chat import ToolDef
from llama_worker.types.hooks import (
    BiosProvider,
    CancellableToolRunner,
    EventHandler,
    LivenessProbe,
    SignalHandler,
    SystemPromptMode,
    ToolCallMode,
    ToolErrors,
    ToolRunner,
)

_HOST_NAME = re.compile(r"[\w.-]+")  # an IPv4 address, too
CALLABLES = ("tool_runner", "bios_provider", "on_signal", "on_event", "liveness_probes")
_IN_AN_EVENT_LOOP = (
    ", and in it loop.call_soon_threadsafe(...) or asyncio.run_coroutine_threadsafe(..., loop)"
)


@names_near_fields
@dataclass(frozen=True)
class WorkerConfig:
    """One worker: one llama-server on one port. docs/configuration.md says what each field does.

    Raises ConfigError for a value that cannot work, TypeError for a wrong type.
    """

    name: Annotated[str, _checked_name]
    host: Annotated[str, _checked_host]
    port: Annotated[int, checked_port]
    server_cmd: Annotated[Sequence[str], checked_words]
    _: KW_ONLY
    env: Annotated[Mapping[str, str], _checked_env] = field(default_factory=dict, repr=False)
    slots: Annotated[int, checked_slots] = 1
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    normal_tools: Annotated[Sequence[ToolDef], checked_tools] = ()
    tool_runner: Annotated[ToolRunner | CancellableToolRunner, _check_tool_runner] | None = None
    max_tool_iterations: CountOrZero = 8
    tool_timeout_s: Seconds = 10.0
    tool_errors: ToolErrors = "fail"
    tool_call_mode: ToolCallMode = "auto"
    exit_tools: Annotated[Sequence[ToolDef], checked_tools] = ()
    on_signal: Annotated[SignalHandler, _check_on_signal] | None = None
    on_event: Annotated[EventHandler, _check_on_event] | None = None
    bios_provider: Annotated[BiosProvider, _check_bios_provider] | None = default_bios
    system_prompt_mode: SystemPromptMode = "merged"
    timezone_name: Annotated[str, _check_zone] = "UTC"
    max_tokens: Count | None = 4096
    default_params: Annotated[Mapping[str, Any], checked_json_object] = field(default_factory=dict)
    loop_detector: LoopDetector | None = field(default_factory=LoopDetector)
    liveness_probes: Annotated[Sequence[LivenessProbe], _checked_probes] | None = None
    canary: Canary | None = None
    api_key: Annotated[str, checked_api_key] | None = field(default=None, repr=False)
    log_lines: Annotated[int, partial(checked_int, at_least=1, at_most=1_000_000)] = 500
    result_ttl_s: Seconds | None = None

    @classmethod
    def for_model(
        cls,
        model: str | os.PathLike[str],
        *,
        port: int,
        host: str = "127.0.0.1",
        slots: int = 1,
        name: str | None = None,
        executable: str | os.PathLike[str] = "llama-server",
        extra_args: Iterable[str] = (),
        cache_ram_mib: int | None = None,
        batch_size: int | None = BATCH_SIZE,
        **fields: Any,
    ) -> Self:
        """A config whose command is made of the same host, port and slots: each is written once.

        Args:
            model: the path of a GGUF file.
            port: the server's port.
            host: where it listens.
            slots: requests at the same time.
            name: for logs and prompts; None: the file's name.
            executable: the program; `llama-server` is looked up where the server is started.
            extra_args: further words of the command.
            cache_ram_mib: see `llama_server_cmd`.
            batch_size: prompt tokens that the server processes at a time; see `llama_server_cmd`.
            fields: further fields of WorkerConfig.

        Raises:
            ConfigError: a value cannot work.
            TypeError: a wrong type, or no such field.
        """
        command = llama_server_cmd(
            model,
            host=host,
            port=port,
            slots=slots,
            executable=executable,
            extra_args=extra_args,
            cache_ram_mib=cache_ram_mib,
            batch_size=batch_size,
        )
        if name is None:
            name = Path(model).stem
        return cls(name, host, port, command, slots=slots, **fields)

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_tools_together()
        check_command(self.server_cmd, self.env, host=self.host, port=self.port, slots=self.slots)

    @property
    def connect_host(self) -> str:
        """The host to connect to from this machine: loopback for a server on all addresses."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def has_builtin_bios(self) -> bool:
        """Whether the BIOS is `default_bios` or None: pure and fast, unlike a host's provider."""
        return self.bios_provider is None or self.bios_provider is default_bios

    @property
    def warnings(self) -> list[str]:
        """Lines for the user: what in the server's command or environment breaks a promise of this
        library."""
        return command_warnings(self.server_cmd, self.env, self.slots)

    @property
    def timezone(self) -> tzinfo:
        return _zone(self.timezone_name)

    @property
    def config_hash(self) -> str:
        """SHA-256 (hex) over the config's data, without secrets and callables; equal data, equal
        hash.

        Secrets are `api_key`, what `masked_server_cmd` masks, and the values of variables whose
        names look secret, such as `HF_TOKEN`.
        """
        left_out = {"api_key", *CALLABLES}
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        data["env"] = {
            name: MASK if SECRET_VARIABLE.search(name) else text for name, text in self.env.items()
        }
        data["server_cmd"] = masked_server_cmd(self.server_cmd, self.api_key)
        text = json.dumps(_canonical(data), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __repr__(self) -> str:
        command = list(masked_server_cmd(self.server_cmd, self.api_key))
        return (
            f"WorkerConfig(name={self.name!r}, host={self.host!r}, port={self.port}, "
            f"server_cmd={command!r})"
        )

    def _check_tools_together(self) -> None:
        if self.normal_tools and self.tool_runner is None:
            names = ", ".join(repr(tool["function"]["name"]) for tool in self.normal_tools)
            raise ConfigError(
                f"normal_tools ({names}) need a tool_runner that runs them; it is None"
            )
        exit_names = {tool["function"]["name"] for tool in self.exit_tools}
        if both := exit_names & {tool["function"]["name"] for tool in self.normal_tools}:
            names = ", ".join(map(repr, sorted(both)))
            raise ConfigError(
                f"normal_tools and exit_tools must have no name in common; both have {names}"
            )


def _check_tool_runner(field: str, runner: object) -> None:
    run_tool = getattr(runner, "run_tool", None)
    if not callable(run_tool):
        raise TypeError(f"{field} must have a run_tool method; {type(runner).__name__} has none")
    given = {"name": "str", "arguments": "dict", "request_id": "int", "job_name": "str"}
    more = {"call": "RunningCall"} if takes(run_tool, "call") else {}
    check_takes(f"{field}.run_tool", run_tool, **given, **more)


def _check_bios_provider(field: str, provider: object) -> None:
    check_callback(field, provider, "ctx", instead="; it is quick and waits for nothing")


def _check_on_signal(field: str, handler: object) -> None:
    about = {"request_id": "int", "job_name": "str"}
    check_callback(field, handler, "signal", instead=_IN_AN_EVENT_LOOP, **about)


def _check_on_event(field: str, handler: object) -> None:
    check_callback(field, handler, "event", instead=_IN_AN_EVENT_LOOP)


def _checked_env(field: str, value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{field} must be a mapping of str to str, not {type(value).__name__}")
    for name, text in value.items():
        checked_str(f"{field} key", name, empty=False, nul=False)
        if "=" in name:
            raise ConfigError(f"{field} key {name!r} must not contain '='")
        checked_str(f"{field}[{name!r}]", text, nul=False, secret=True)
    return dict(value)


def _checked_name(field: str, name: Any) -> str:
    checked_str(field, name, empty=False)
    if not name.isprintable():
        raise ConfigError(
            f"{field} must be printable, since it appears in log lines and prompts; not {name!r}"
        )
    return plain_str(name)


def _checked_host(field: str, host: Any) -> str:
    checked_str(field, host)
    if not _HOST_NAME.fullmatch(host) and ip_address_of(host) is None:
        raise ConfigError(
            f"{field} must be an address or a name, without port or path, not {shown(host)}"
        )
    return without_brackets(plain_str(host))


def _check_zone(field: str, name: Any) -> None:
    checked_str(field, name, empty=False)
    try:
        _zone(name)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(
            f"{field} {name!r} is not a known time zone; use an IANA name such as 'Europe/Vienna'"
        ) from error


@cache
def _zone(name: str) -> tzinfo:
    """Read once and cached: each request needs it, and the zone database may be unreadable by then.
    UTC needs no database."""
    return UTC if name == "UTC" else ZoneInfo(name)


def _checked_probes(field: str, value: object) -> tuple[LivenessProbe, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{field} must be a sequence of probes, not {shown(value)}")
    for index, probe in enumerate(value):
        each = f"{field}[{index}]"
        if not isinstance(probe, LivenessProbe):
            raise TypeError(
                f"{each} must have the methods probe and reset; {type(probe).__name__} lacks them"
            )
        check_callback(f"{each}.probe", probe.probe, "root_pid", "now")
        check_callback(f"{each}.reset", probe.reset)
    return tuple(value)


def _canonical(value: object) -> object:
    """The value as JSON types, the same for equal values: 10 and 10.0 are the same timeout."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case Mapping():
            return {name: _canonical(item) for name, item in value.items()}
        case list() | tuple():
            return [_canonical(item) for item in value]
        case TimeoutProfile() | RestartPolicy() | LoopDetector() | Recycle() | Canary():
            parts = {f.name: getattr(value, f.name) for f in fields(value)}
            return {name: _canonical(part) for name, part in parts.items() if name != "check"}
        case _:
            return value


class Endpoint(Struct, frozen=True, kw_only=True):
    """A server's URL, and what is needed to connect to it."""

    base_url: str
    connect_timeout_s: float
    api_key: str | None = None
    ca_file: str | None = None  # CA certificates that an https server is checked against

    def __repr__(self) -> str:
        """Without the key: tracebacks that show variables contain this text."""
        return f"Endpoint(base_url={self.base_url!r})"

    @classmethod
    def of(cls, config: WorkerConfig) -> Endpoint:
        """The endpoint of the config's server, as reached from this machine."""
        host = f"[{config.connect_host}]" if ":" in config.connect_host else config.connect_host
        return cls(
            base_url=f"http://{host}:{config.port}",
            connect_timeout_s=config.timeouts.connect_timeout_s,
            api_key=config.api_key,
        )

    def headers(self) -> dict[str, str]:
        """The headers that every request to the server needs."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
