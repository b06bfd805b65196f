"""What a worker is configured with, checked on construction. Pure.

A wrong type raises TypeError, a value that cannot work ConfigError (a ValueError); the text names
the field, the value and what would be right. What was given is copied: changing it afterwards
changes no config.
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

from llama_worker.bios import default_bios
from llama_worker.config.command import (
    BATCH_SIZE,
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
    TIMEOUT_PRESETS,
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
_SECRET_VARIABLE = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


@names_near_fields
@dataclass(frozen=True)
class WorkerConfig:
    """One worker: one llama-server on one port. docs/configuration.md says what each field does.

    Raises ConfigError for a value that cannot work, TypeError for a wrong type.
    """

    name: Annotated[str, _check_name]
    host: Annotated[str, _check_host]
    port: Annotated[int, checked_port]
    server_cmd: Sequence[str]
    _: KW_ONLY
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    slots: Annotated[int, checked_slots] = 1
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    normal_tools: Sequence[ToolDef] = ()
    tool_runner: ToolRunner | CancellableToolRunner | None = None
    max_tool_iterations: CountOrZero = 8
    tool_timeout_s: Seconds = 10.0
    tool_errors: ToolErrors = "fail"
    tool_call_mode: ToolCallMode = "auto"
    exit_tools: Sequence[ToolDef] = ()
    on_signal: SignalHandler | None = None
    on_event: EventHandler | None = None
    bios_provider: BiosProvider | None = default_bios
    system_prompt_mode: SystemPromptMode = "merged"
    timezone_name: Annotated[str, _check_zone] = "UTC"
    max_tokens: Count | None = 4096
    default_params: Mapping[str, Any] = field(default_factory=dict)
    loop_detector: LoopDetector | None = field(default_factory=LoopDetector)
    liveness_probes: Sequence[LivenessProbe] | None = None
    canary: Canary | None = None
    api_key: Annotated[str, checked_api_key] | None = field(default=None, repr=False)
    log_lines: Annotated[int, partial(checked_int, at_least=1, at_most=1_000_000)] = 500
    result_ttl_s: Seconds | None = None
    check_invariants: bool = False

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
            port: the server's.
            host: where it listens.
            slots: requests at the same time.
            name: for logs and prompts; None: the file's name.
            executable: the program; `llama-server` is looked for where it is started.
            extra_args: further words of the command.
            cache_ram_mib: see `llama_server_cmd`.
            batch_size: tokens of prompts that the server takes at a time; see `llama_server_cmd`.
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
        _check_not_a_preset(self.timeouts)
        check_fields(self)
        self._set("name", plain_str(self.name))
        self._set("host", without_brackets(plain_str(self.host)))
        self._set("server_cmd", checked_words("server_cmd", self.server_cmd))
        self._set("env", _checked_env(self.env))
        self._set("normal_tools", checked_tools("normal_tools", self.normal_tools))
        self._set("exit_tools", checked_tools("exit_tools", self.exit_tools))
        self._check_callbacks()
        self._set("default_params", checked_json_object("default_params", self.default_params))
        if self.liveness_probes is not None:
            self._set("liveness_probes", _checked_probes(self.liveness_probes))
        self._check_tools_together()
        check_command(self.server_cmd, host=self.host, port=self.port, slots=self.slots)

    @property
    def connect_host(self) -> str:
        """Where this machine reaches the server: the loopback for one that listens everywhere."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def has_builtin_bios(self) -> bool:
        """The BIOS is `default_bios`, or none: pure and quick, unlike what a host may plug in."""
        return self.bios_provider is None or self.bios_provider is default_bios

    @property
    def warnings(self) -> list[str]:
        """What in the server's command or environment breaks a promise of this library: lines for a
        person."""
        return command_warnings(self.server_cmd, self.env, self.timeouts, self.slots)

    @property
    def timezone(self) -> tzinfo:
        return _zone(self.timezone_name)

    @property
    def config_hash(self) -> str:
        """SHA-256 (hex) over the config's data, without secrets and callables; equal data, equal
        hash.

        Secrets are `api_key`, what `masked_server_cmd` masks, and the values of variables with a
        name as `HF_TOKEN`.
        """
        left_out = {"api_key", *CALLABLES}
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        data["env"] = {
            name: MASK if _SECRET_VARIABLE.search(name) else text for name, text in self.env.items()
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

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else

    def _check_callbacks(self) -> None:
        if self.bios_provider is not None:
            instead = "; it is quick and waits for nothing"
            check_callback("bios_provider", self.bios_provider, "ctx", instead=instead)
        instead = (
            ", and in it loop.call_soon_threadsafe(...) or "
            "asyncio.run_coroutine_threadsafe(..., loop)"
        )
        if self.on_signal is not None:
            about = {"request_id": "int", "job_name": "str"}
            check_callback("on_signal", self.on_signal, "signal", instead=instead, **about)
        if self.on_event is not None:
            check_callback("on_event", self.on_event, "event", instead=instead)

    def _check_tools_together(self) -> None:
        if self.normal_tools and self.tool_runner is None:
            names = ", ".join(repr(tool["function"]["name"]) for tool in self.normal_tools)
            raise ConfigError(
                f"normal_tools ({names}) need a tool_runner that runs them; it is None"
            )
        if self.tool_runner is not None:
            _check_tool_runner(self.tool_runner)
        exit_names = {tool["function"]["name"] for tool in self.exit_tools}
        if both := exit_names & {tool["function"]["name"] for tool in self.normal_tools}:
            names = ", ".join(map(repr, sorted(both)))
            raise ConfigError(
                f"normal_tools and exit_tools must have no name in common; both have {names}"
            )


def _check_tool_runner(runner: object) -> None:
    run_tool = getattr(runner, "run_tool", None)
    if not callable(run_tool):
        raise TypeError(
            f"tool_runner must have a run_tool method; {type(runner).__name__} has none"
        )
    given = {"name": "str", "arguments": "dict", "request_id": "int", "job_name": "str"}
    more = {"call": "RunningCall"} if takes(run_tool, "call") else {}
    check_takes("tool_runner.run_tool", run_tool, **given, **more)


def _check_not_a_preset(value: object) -> None:
    if isinstance(value, str) and value in TIMEOUT_PRESETS:
        raise TypeError(
            f"timeouts must be a TimeoutProfile: TimeoutProfile.{value}(), not {value!r}"
        )


def _checked_env(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError(f"env must be a mapping of str to str, not {type(value).__name__}")
    for name, text in value.items():
        checked_str("env key", name, empty=False, nul=False)
        if "=" in name:
            raise ConfigError(f"env key {name!r} must not contain '='")
        checked_str(f"env[{name!r}]", text, nul=False, secret=True)
    return dict(value)


def _check_name(field: str, name: Any) -> None:
    checked_str(field, name, empty=False)
    if not name.isprintable():
        raise ConfigError(
            f"{field} must be printable, since it stands in log lines and prompts; not {name!r}"
        )


def _check_host(field: str, host: Any) -> None:
    checked_str(field, host)
    if not _HOST_NAME.fullmatch(host) and ip_address_of(host) is None:
        raise ConfigError(
            f"{field} must be an address or a name, without port or path, not {shown(host)}"
        )


def _check_zone(field: str, name: Any) -> None:
    checked_str(field, name, empty=False)
    try:
        _zone(name)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(
            f"{field} {name!r} is unknown here; an IANA name such as 'Europe/Vienna' is needed"
        ) from error


@cache
def _zone(name: str) -> tzinfo:
    """Read once and kept, since each request asks for it: the zone database's file may be out of
    reach by then. UTC needs none."""
    return UTC if name == "UTC" else ZoneInfo(name)


def _checked_probes(value: object) -> tuple[LivenessProbe, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"liveness_probes must be a sequence of probes or None, not {shown(value)}")
    for index, probe in enumerate(value):
        if not isinstance(probe, LivenessProbe):
            raise TypeError(
                f"liveness_probes[{index}] must have the methods probe and reset; "
                f"{type(probe).__name__} has not"
            )
        check_callback(f"liveness_probes[{index}].probe", probe.probe, "root_pid", "now")
        check_callback(f"liveness_probes[{index}].reset", probe.reset)
    return tuple(value)


def _canonical(value: object) -> object:
    """As JSON knows it, one form for equal values: 10 and 10.0 are the same timeout."""
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
