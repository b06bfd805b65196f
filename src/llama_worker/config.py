"""What a worker is configured with, checked on construction. Pure.

A wrong type raises TypeError, a value that cannot work ConfigError (a ValueError); the text names the field, the
value and what would be right. What was given is copied: changing it afterwards changes no config.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from datetime import UTC, tzinfo
from typing import Any, Self, get_args
from zoneinfo import ZoneInfo

from llama_worker.checks import (
    checked_bool,
    checked_int,
    checked_json_object,
    checked_number,
    checked_seconds,
    checked_str,
    optional,
    shown,
)
from llama_worker.errors import ConfigError
from llama_worker.prompting import default_bios
from llama_worker.types import (
    BiosProvider,
    ChatMessage,
    LivenessProbe,
    SystemPromptMode,
    ToolCallMode,
    ToolDef,
    ToolRunner,
)

MASK = "***"

_HOST_NAME = re.compile(r"[\w.-]+")  # an IPv4 address, too
_HOST_FLAGS = ("--host",)
_PORT_FLAGS = ("--port",)
_SLOT_FLAGS = ("-np", "--parallel", "--n-parallel")
_SECRET_FLAGS = ("--api-key", "-hft", "--hf-token")
_SECRET_VARIABLE = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutProfile:
    """How long to wait for what, in seconds; None turns off what may be turned off. Defaults: slow hardware."""

    connect_timeout_s: float = 3.0
    headers_timeout_s: float = 30.0
    ttft_timeout_s: float | None = None
    prefill_liveness_timeout_s: float | None = 3600.0
    idle_stream_timeout_s: float | None = 300.0
    absolute_timeout_s: float | None = None
    silent_work_timeout_s: float | None = 3600.0
    liveness_probe_interval_s: float = 5.0
    startup_timeout_s: float = 120.0
    load_timeout_s: float | None = None
    stop_grace_s: float = 10.0
    health_probe_interval_s: float | None = 30.0
    health_failures_before_restart: int = 3

    def __post_init__(self) -> None:
        for name in (
            "connect_timeout_s",
            "headers_timeout_s",
            "liveness_probe_interval_s",
            "startup_timeout_s",
        ):
            checked_seconds(name, getattr(self, name), above=0)
        checked_seconds("stop_grace_s", self.stop_grace_s, at_least=0)
        for name in (
            "ttft_timeout_s",
            "prefill_liveness_timeout_s",
            "idle_stream_timeout_s",
            "absolute_timeout_s",
            "silent_work_timeout_s",
            "load_timeout_s",
            "health_probe_interval_s",
        ):
            optional(checked_seconds, name, getattr(self, name), above=0)
        checked_int("health_failures_before_restart", self.health_failures_before_restart, at_least=1)

    @classmethod
    def slow_prefill(cls) -> Self:
        """The defaults: prefill may take tens of minutes."""
        return cls()

    @classmethod
    def normal(cls) -> Self:
        """A GPU that reads a prompt within minutes."""
        return cls(prefill_liveness_timeout_s=600.0, idle_stream_timeout_s=120.0, silent_work_timeout_s=1200.0)

    @classmethod
    def fast(cls) -> Self:
        """A GPU that answers within seconds."""
        return cls(
            headers_timeout_s=10.0,
            prefill_liveness_timeout_s=60.0,
            idle_stream_timeout_s=30.0,
            silent_work_timeout_s=300.0,
            startup_timeout_s=60.0,
        )

    @classmethod
    def debug(cls) -> Self:
        """Nothing is given up that need not be: for a server under a debugger."""
        return cls(
            prefill_liveness_timeout_s=None,
            idle_stream_timeout_s=None,
            silent_work_timeout_s=None,
            health_probe_interval_s=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a server is started again, how soon, and how often before the worker gives up."""

    restart_backoff_s: float = 5.0
    backoff_factor: float = 2.0
    backoff_max_s: float = 60.0
    restart_window_s: float = 120.0
    max_restarts_per_window: int = 5
    stable_after_s: float = 600.0
    restart_on_stall: bool = True
    transport_failures_before_restart: int = 2
    server_errors_before_restart: int = 5

    def __post_init__(self) -> None:
        for name in ("restart_backoff_s", "backoff_max_s", "stable_after_s"):
            checked_seconds(name, getattr(self, name), at_least=0)
        checked_number("backoff_factor", self.backoff_factor, at_least=1)
        checked_seconds("restart_window_s", self.restart_window_s, above=0)
        checked_int("max_restarts_per_window", self.max_restarts_per_window, at_least=0)
        checked_bool("restart_on_stall", self.restart_on_stall)
        for name in ("transport_failures_before_restart", "server_errors_before_restart"):
            checked_int(name, getattr(self, name), at_least=1)

    @classmethod
    def never(cls) -> Self:
        """No restart: whatever would ask for one leaves the worker FAILED."""
        return cls(max_restarts_per_window=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDetector:
    """When repeated lines are a loop; counts of characters and of consecutive repeats."""

    min_line_chars: int = 32
    long_line_chars: int = 64
    short_line_repeats: int = 12
    long_line_repeats: int = 8
    min_output_chars: int = 256
    max_period: int = 8

    def __post_init__(self) -> None:
        for name in ("min_line_chars", "long_line_chars", "max_period"):
            checked_int(name, getattr(self, name), at_least=1)
        for name in ("short_line_repeats", "long_line_repeats"):
            checked_int(name, getattr(self, name), at_least=2)
        checked_int("min_output_chars", self.min_output_chars, at_least=0)
        if self.long_line_chars < self.min_line_chars:
            raise ConfigError(
                f"long_line_chars {self.long_line_chars} must be at least min_line_chars {self.min_line_chars}"
            )


@dataclass(frozen=True)
class WorkerConfig:
    """One worker: one llama-server on one port."""

    name: str
    host: str
    port: int
    server_cmd: Sequence[str]
    _: KW_ONLY
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    slots: int = 1
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    normal_tools: Sequence[ToolDef] = ()
    tool_runner: ToolRunner | None = None
    max_tool_iterations: int = 8
    tool_timeout_s: float = 10.0
    tool_call_mode: ToolCallMode = "auto"
    exit_tools: Sequence[ToolDef] = ()
    bios_provider: BiosProvider = default_bios
    system_prompt_mode: SystemPromptMode = "merged"
    timezone_name: str = "UTC"
    max_tokens: int | None = 4096
    default_params: Mapping[str, Any] = field(default_factory=dict)
    loop_detector: LoopDetector | None = field(default_factory=LoopDetector)
    liveness_probes: Sequence[LivenessProbe] | None = None
    api_key: str | None = field(default=None, repr=False)
    log_lines: int = 500
    result_ttl_s: float | None = None

    def __post_init__(self) -> None:
        checked_str("name", self.name, empty=False)
        if not self.name.isprintable():
            raise ConfigError(f"name must be printable, since it stands in log lines and prompts; not {self.name!r}")
        _checked_host(self.host)
        checked_int("port", self.port, at_least=1, at_most=65535)
        checked_int("slots", self.slots, at_least=1)
        self._set("server_cmd", _checked_strings("server_cmd", self.server_cmd))
        self._set("env", _checked_env(self.env))
        _checked_type("timeouts", self.timeouts, TimeoutProfile)
        _checked_type("restart", self.restart, RestartPolicy)
        self._set("normal_tools", _checked_tools("normal_tools", self.normal_tools))
        self._set("exit_tools", _checked_tools("exit_tools", self.exit_tools))
        checked_int("max_tool_iterations", self.max_tool_iterations, at_least=0)
        checked_seconds("tool_timeout_s", self.tool_timeout_s, above=0)
        _checked_choice("tool_call_mode", self.tool_call_mode, get_args(ToolCallMode))
        _checked_choice("system_prompt_mode", self.system_prompt_mode, get_args(SystemPromptMode))
        if not callable(self.bios_provider):
            raise TypeError(f"bios_provider must be callable, not {shown(self.bios_provider)}")
        _checked_zone(self.timezone_name)
        optional(checked_int, "max_tokens", self.max_tokens, at_least=1)
        given = checked_json_object("default_params", self.default_params)
        self._set("default_params", given)
        if self.loop_detector is not None:
            _checked_type("loop_detector", self.loop_detector, LoopDetector)
        if self.liveness_probes is not None:
            self._set("liveness_probes", _checked_probes(self.liveness_probes))
        if self.api_key is not None:
            checked_str("api_key", self.api_key, empty=False, secret=True)
            if not self.api_key.isascii() or not self.api_key.isprintable():
                raise ConfigError("api_key must be printable ASCII: it travels in an HTTP header")
        checked_int("log_lines", self.log_lines, at_least=1)
        optional(checked_seconds, "result_ttl_s", self.result_ttl_s, above=0)
        self._check_tools_together()
        _check_command(self.server_cmd, host=self.host, port=self.port, slots=self.slots)

    @property
    def connect_host(self) -> str:
        """Where this machine reaches the server: the loopback for one that listens everywhere."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host.strip("[]"))

    @property
    def timezone(self) -> tzinfo:
        """The zone of `timezone_name`; UTC needs no zone database."""
        return UTC if self.timezone_name == "UTC" else ZoneInfo(self.timezone_name)

    @property
    def config_hash(self) -> str:
        """SHA-256 (hex) over the config's data, without secrets and callables; equal data, equal hash.

        Secrets are `api_key`, what `masked_server_cmd` masks, and the values of variables with a name as `HF_TOKEN`.
        """
        left_out = {"api_key", "tool_runner", "bios_provider", "liveness_probes"}
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        data["env"] = {name: MASK if _SECRET_VARIABLE.search(name) else text for name, text in self.env.items()}
        data["server_cmd"] = masked_server_cmd(self.server_cmd, self.api_key)
        text = json.dumps(_canonical(data), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __repr__(self) -> str:
        command = list(masked_server_cmd(self.server_cmd, self.api_key))
        return f"WorkerConfig(name={self.name!r}, host={self.host!r}, port={self.port}, server_cmd={command!r})"

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else

    def _check_tools_together(self) -> None:
        if self.normal_tools and self.tool_runner is None:
            names = ", ".join(repr(tool["function"]["name"]) for tool in self.normal_tools)
            raise ConfigError(f"normal_tools ({names}) need a tool_runner that runs them; it is None")
        if self.tool_runner is not None and not callable(getattr(self.tool_runner, "run_tool", None)):
            raise TypeError(f"tool_runner must have a run_tool method; {type(self.tool_runner).__name__} has none")
        both = {t["function"]["name"] for t in self.normal_tools} & {t["function"]["name"] for t in self.exit_tools}
        if both:
            names = ", ".join(map(repr, sorted(both)))
            raise ConfigError(f"normal_tools and exit_tools must have no name in common; both have {names}")


def llama_server_cmd(
    model: str,
    *,
    host: str,
    port: int,
    slots: int,
    executable: str = "llama-server",
    extra_args: Iterable[str] = (),
) -> tuple[str, ...]:
    """A command for `WorkerConfig.server_cmd` that agrees with its host, port and slots.

    It passes `--parallel`: without it a server opens four slots that share one context (b11434).
    """
    checked_str("model", str(model), empty=False)
    if isinstance(extra_args, Iterable) and not isinstance(extra_args, (str, bytes)):
        extra_args = tuple(extra_args)
    return (
        str(executable),
        *("--model", str(model)),
        *("--host", host),
        *("--port", str(port)),
        *("--parallel", str(slots)),
        *_checked_strings("extra_args", extra_args, may_be_empty=True),
    )


def masked_server_cmd(server_cmd: Sequence[str], api_key: str | None) -> tuple[str, ...]:
    """The command as it may be shown: keys are masked. Pure."""
    shown: list[str] = []
    for word in server_cmd:
        flag, equals, _ = word.partition("=")
        if shown and shown[-1] in _SECRET_FLAGS:
            shown.append(MASK)
        elif equals and flag in _SECRET_FLAGS:
            shown.append(f"{flag}={MASK}")
        else:
            shown.append(masked(word, api_key))
    return tuple(shown)


def masked(text: str, api_key: str | None) -> str:
    """The text as it may be shown, the server's own words among them: the key is masked. Pure."""
    return text.replace(api_key, MASK) if api_key else text


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidSubmission:
    """What a host submitted, checked and copied."""

    job_name: str
    system_prompt: str
    user_prompt: str
    params: dict[str, Any]
    messages: tuple[ChatMessage, ...]


def validate_submit(
    job_name: str,
    system_prompt: str,
    user_prompt: str,
    params: Mapping[str, Any] | None,
    messages: Iterable[ChatMessage] | None,
) -> ValidSubmission:
    """Raises TypeError or ConfigError for what could not be sent to a server."""
    for name, text in (
        ("job_name", job_name),
        ("system_prompt", system_prompt),
        ("user_prompt", user_prompt),
    ):
        checked_str(name, text)
    if messages is None:
        messages = ()
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(f"messages must be a sequence of messages, not {type(messages).__name__}: {shown(messages)}")
    checked: list[ChatMessage] = []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        plain = checked_json_object(name, message)
        if not isinstance(plain.get("role"), str) or not plain["role"]:
            raise ConfigError(f"{name} needs a 'role' that is a non-empty str, not {shown(plain.get('role'))}")
        checked.append(plain)  # type: ignore[arg-type]
    return ValidSubmission(
        job_name=job_name,
        system_prompt=system_prompt,
        user_prompt=user_prompt,
        params=checked_json_object("params", params if params is not None else {}),
        messages=tuple(checked),
    )


def _checked_strings(name: str, value: object, *, may_be_empty: bool = False) -> tuple[str, ...]:
    if isinstance(value, str):
        told = " ".join(masked_server_cmd(value.split(), None))
        raise TypeError(f"{name} must be a sequence of words, not one str: {told!r}")
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a sequence of str, not {type(value).__name__}")
    if not may_be_empty and (not value or value[0] == ""):
        raise ConfigError(f"{name} must begin with the executable, not be {shown(value[:1])}")
    for index, word in enumerate(value):
        secret = index > 0 and value[index - 1] in _SECRET_FLAGS
        checked_str(f"{name}[{index}]", word, nul=False, secret=secret)
    return tuple(value)


def _checked_env(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError(f"env must be a mapping of str to str, not {type(value).__name__}")
    for name, text in value.items():
        checked_str("env key", name, empty=False, nul=False)
        if "=" in name:
            raise ConfigError(f"env key {name!r} must not contain '='")
        checked_str(f"env[{name!r}]", text, nul=False, secret=True)
    return dict(value)


def _checked_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, not {type(value).__name__}: {shown(value)}")


def _checked_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}: {shown(value)}")
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, not {shown(value)}")


def _checked_host(host: object) -> None:
    checked_str("host", host)
    if not _HOST_NAME.fullmatch(str(host)) and _address(str(host)) is None:
        raise ConfigError(f"host must be an address or a name, without port or path, not {shown(host)}")


def _address(host: str) -> str | None:
    try:
        return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        return None


def _checked_zone(name: object) -> None:
    checked_str("timezone_name", name, empty=False)
    try:
        if name != "UTC":
            ZoneInfo(str(name))
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(
            f"timezone_name {name!r} is unknown here; an IANA name such as 'Europe/Vienna' is needed"
        ) from error


def _checked_probes(value: object) -> tuple[LivenessProbe, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"liveness_probes must be a sequence of probes or None, not {shown(value)}")
    for index, probe in enumerate(value):
        if not isinstance(probe, LivenessProbe):
            raise TypeError(
                f"liveness_probes[{index}] needs the methods probe and reset; {type(probe).__name__} has not both"
            )
    return tuple(value)


def _checked_tools(name: str, value: object) -> tuple[ToolDef, ...]:
    """OpenAI function definitions with distinct names; copies."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a sequence of tool definitions, not {shown(value)}")
    names: set[str] = set()
    tools: list[ToolDef] = []
    for index, given in enumerate(value):
        where = f"{name}[{index}]"
        tool = checked_json_object(where, given)
        if tool.get("type") != "function":
            raise ConfigError(f"{where} needs 'type': 'function', not {shown(tool.get('type'))}")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise TypeError(f"{where} needs 'function', a mapping with a name, not {shown(function)}")
        checked_str(f"{where} function name", function.get("name"), empty=False)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise TypeError(f"{where} parameters must be a JSON schema object, not {shown(parameters)}")
        if function["name"] in names:
            raise ConfigError(f"{name} has two tools named {function['name']!r}")
        names.add(function["name"])
        tools.append(tool)  # type: ignore[arg-type]
    return tuple(tools)


def _check_command(command: Sequence[str], *, host: str, port: int, slots: int) -> None:
    """The command and the config must mean the same server."""
    checks: tuple[tuple[str, tuple[str, ...], object, Callable[[str], bool]], ...] = (
        ("host", _HOST_FLAGS, host, lambda told: _same_host(told, host)),
        ("port", _PORT_FLAGS, port, lambda told: told.strip() == str(port)),
        ("slots", _SLOT_FLAGS, slots, lambda told: told.strip() == str(slots)),
    )
    for name, flags, value, agrees in checks:
        for flag, told in _flag_values(command, flags):
            if not agrees(told):
                raise ConfigError(f"server_cmd says {flag} {told}, but {name} is {value!r}: make them agree")


def _flag_values(command: Sequence[str], flags: tuple[str, ...]) -> list[tuple[str, str]]:
    found = []
    for index, word in enumerate(command):
        flag, equals, told = word.partition("=")
        if flag in flags and equals:
            found.append((flag, told))
        elif word in flags:
            found.append((word, command[index + 1] if index + 1 < len(command) else ""))
    return found


def _same_host(told: str, host: str) -> bool:
    def canonical(name: str) -> str:
        name = name.strip().lower()
        return _address(name) or ("127.0.0.1" if name == "localhost" else name)

    return canonical(told) == canonical(host)


def _canonical(value: object) -> object:
    """As JSON knows it, one form for equal values: 10 and 10.0 are the same timeout."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case Mapping():
            return {name: _canonical(item) for name, item in value.items()}
        case list() | tuple():
            return [_canonical(item) for item in value]
        case TimeoutProfile() | RestartPolicy() | LoopDetector():
            return {f.name: _canonical(getattr(value, f.name)) for f in fields(value)}
        case _:
            return value


__all__ = [
    "LoopDetector",
    "RestartPolicy",
    "TimeoutProfile",
    "ValidSubmission",
    "WorkerConfig",
    "llama_server_cmd",
    "masked_server_cmd",
    "validate_submit",
]
