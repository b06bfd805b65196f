"""Reads the configs of a fleet's workers from one TOML file. docs/fleet.md describes the format."""

from __future__ import annotations

import os
import re
import tomllib
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from llama_worker.config.command import canonical, llama_server_cmd
from llama_worker.config.command_flags import cache_ram_mib, memory_warning
from llama_worker.config.profiles import (
    TIMEOUT_PRESETS,
    LoopDetector,
    Recycle,
    RestartPolicy,
    TimeoutProfile,
)
from llama_worker.config.server_program import memory_bytes
from llama_worker.config.settings import CALLABLES, WorkerConfig
from llama_worker.config.validation import NONE_TOO, did_you_mean
from llama_worker.errors import ConfigError

KeyPath = tuple[str, ...]
Table = Mapping[str, Any]
T = TypeVar("T")

_IN_CODE_ONLY = {*CALLABLES, "normal_tools", "exit_tools", "canary"}
# arguments of llama_server_cmd, besides the worker's own host, port and slots
_COMMAND_KEYS = {"model", "executable", "extra_args", "cache_ram_mib", "batch_size"}
_WORKER_KEYS = {field.name for field in fields(WorkerConfig)} - _IN_CODE_ONLY - {
    "name"
} | _COMMAND_KEYS
_OFF = "off"  # TOML has no None
_MAY_BE_OFF = {"batch_size", "loop_detector", "max_tokens", "result_ttl_s"}
_PROFILES: dict[str, tuple[type[Any], dict[str, Callable[[], Any]]]] = {
    "timeouts": (TimeoutProfile, TIMEOUT_PRESETS),
    "restart": (RestartPolicy, {"never": RestartPolicy.never}),
    "loop_detector": (LoopDetector, {}),
}
# what may stand for a table
_WORDS = {
    key: (*presets, *([_OFF] if key in _MAY_BE_OFF else ()))
    for key, (_, presets) in _PROFILES.items()
}
_MERGED_TABLES = {"env", "default_params", *_PROFILES}


def load_config(path: str | os.PathLike[str]) -> dict[str, WorkerConfig]:
    """The file's workers by name, in the file's order, with the defaults merged in. Starts nothing.

    What TOML cannot hold (tools, callables, probes) is added afterwards with `dataclasses.replace`.
    Raises ConfigError, which names the file, the line if there is one, and the key; OSError if the
    file cannot be read. Warns (UserWarning) if the servers' prompt caches together may outgrow this
    machine's memory.
    """
    configs = read_fleet(path)
    limits = {name: cache_ram_mib(each.server_cmd, each.env) for name, each in configs.items()}
    if line := memory_warning(limits, memory_bytes()):
        warnings.warn(f"{os.fspath(path)}: {line}", stacklevel=2)
    return configs


def read_fleet(path: str | os.PathLike[str]) -> dict[str, WorkerConfig]:
    """`load_config` without its warning, for a program that starts none of these servers."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ConfigError(f"{os.fspath(path)}: {error}") from error
    try:
        return _fleet(data)
    except _BadEntry as invalid:
        number = _line_of(text, invalid.path)
        place = os.fspath(path) if number is None else f"{os.fspath(path)}:{number}"
        keys = ".".join(key if re.fullmatch(r"[\w-]+", key) else repr(key) for key in invalid.path)
        raise ConfigError(": ".join(filter(None, (place, keys, invalid.problem)))) from invalid


class _BadEntry(Exception):
    """The entry at `path` is invalid."""

    def __init__(self, path: KeyPath, problem: str) -> None:
        super().__init__(problem)
        self.path = path
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker's own table, and the defaults that it overrides key by key."""

    name: str
    own: Table
    defaults: Table

    @property
    def values(self) -> dict[str, Any]:
        """The merged table; None stands for "off"."""
        values = {**self.defaults, **self.own}
        for key in _MERGED_TABLES & set(values):
            if values[key] is not None:
                values[key] = {**(self.defaults.get(key) or {}), **values[key]}
        return values

    def place(self, *keys: str) -> KeyPath | None:
        """Where the file has the value: in the worker's own table, or in the defaults."""
        for at, level in ((("workers", self.name), self.own), (("defaults",), self.defaults)):
            if _holds(level, keys):
                return (*at, *keys)
        return None

    def bad(self, problem: str, *keys: str) -> _BadEntry:
        """The error about the value at `keys`."""
        return _BadEntry(self.place(*keys) or ("workers", self.name), problem)

    def build(self, make: Callable[..., T], *keys: str, **arguments: Any) -> T:
        """`make(**arguments)`, with values of the table at `keys`. An error is reported at the
        first key of that table that its message names."""
        try:
            return make(**arguments)
        except (TypeError, ConfigError) as error:
            words = re.findall(r"\w+", str(error))
            named = [*islice((word for word in words if self.place(*keys, word)), 1)]
            may_be_off = bool(keys) or not _MAY_BE_OFF.isdisjoint(named)
            problem = str(error).replace(
                NONE_TOO, f" ({_OFF!r} is allowed, too)" if may_be_off else ""
            )
            raise self.bad(problem, *keys, *named) from error


def _fleet(data: Table) -> dict[str, WorkerConfig]:
    _check_keys((), data, {"defaults", "workers"})
    defaults = _level(
        ("defaults",), data.get("defaults", {}), _WORKER_KEYS - {"port", "server_cmd"}
    )
    workers = _table(("workers",), data.get("workers", {}))
    if not workers:
        raise _BadEntry((), "no workers; each needs a table [workers.NAME]")
    configs: dict[str, WorkerConfig] = {}
    ports: dict[tuple[str, int], str] = {}
    for name, table in workers.items():
        worker = _Worker(name, _level(("workers", name), table, _WORKER_KEYS), defaults)
        config = configs[name] = _config(worker)
        other = ports.setdefault((canonical(config.connect_host), config.port), name)
        if other != name:
            raise worker.bad(f"port {config.port} is already used by worker {other!r}", "port")
    return configs


def _level(at: KeyPath, given: object, allowed: set[str]) -> Table:
    """The table at `at`, with None for "off" and a table for the name of a preset."""
    level = dict(_table(at, given))
    _check_keys(at, level, allowed)
    for key, value in level.items():
        if value == _OFF and key in _MAY_BE_OFF:
            level[key] = None
        elif (key, value) == ("restart", "never"):  # whatever the defaults say
            level[key] = {"preset": value, **asdict(RestartPolicy.never())}
        elif isinstance(value, str) and value in _WORDS.get(key, ()):
            level[key] = {"preset": value}
        elif key in _MERGED_TABLES:
            _table((*at, key), value, _WORDS.get(key, ()))
    return level


def _config(worker: _Worker) -> WorkerConfig:
    if "server_cmd" in worker.own:  # a whole command ignores the defaults for its parts
        kept = {k: v for k, v in worker.defaults.items() if k not in _COMMAND_KEYS}
        worker = replace(worker, defaults=kept)
    values = worker.values
    for key, (make, presets) in _PROFILES.items():
        if values.get(key) is not None:
            values[key] = _profile(worker, (key,), values[key], make, presets)
    for key in ("host", "port"):
        if key not in values:
            raise worker.bad(f"{key} is missing")
    of_command = {key: values.pop(key) for key in sorted(_COMMAND_KEYS & set(values))}
    if "server_cmd" not in values:
        values["server_cmd"] = _server_cmd(worker, values, of_command)
    elif of_command:
        problem = "has no effect together with server_cmd: remove one of them"
        raise worker.bad(problem, next(iter(of_command)))
    return worker.build(WorkerConfig, name=worker.name, **values)


def _server_cmd(worker: _Worker, values: Table, parts: Table) -> tuple[str, ...]:
    if "model" not in parts:
        raise worker.bad("either model (a GGUF file) or server_cmd is needed")
    shared = {"host": values["host"], "port": values["port"], "slots": values.get("slots", 1)}
    return worker.build(llama_server_cmd, **shared, **parts)


def _profile(
    worker: _Worker,
    at: KeyPath,
    table: Table,
    make: type[Any],
    presets: Mapping[str, Callable[[], Any]],
) -> Any:
    """The profile that the worker's table at `at` describes: a preset, and changes to it."""
    may_be_none = {field.name: "None" in str(field.type) for field in fields(make)}
    allowed = {*may_be_none, *(["preset"] if presets else [])}
    for key in table:
        if key not in allowed:
            raise worker.bad(_unknown(key, allowed), *at, key)
    changes = {k: None if v == _OFF and may_be_none.get(k) else v for k, v in table.items()}
    if isinstance(recycle := changes.get("recycle"), Mapping):
        changes["recycle"] = _profile(worker, (*at, "recycle"), recycle, Recycle, {})
    preset = changes.pop("preset", None)
    if preset is None:
        return worker.build(make, *at, **changes)
    if not (isinstance(preset, str) and preset in presets):
        raise worker.bad(f"must be {_one_of(presets)}, not {preset!r}", *at, "preset")
    return worker.build(partial(replace, presets[preset]()), *at, **changes)


def _table(at: KeyPath, value: object, words: Sequence[str] = ()) -> Table:
    """Raises _BadEntry if it is none; `words`: what else would do."""
    if not isinstance(value, Mapping):
        kinds = f"a table or {_one_of(words)}" if words else "a table"
        given = repr(value) if words and isinstance(value, str) else type(value).__name__
        raise _BadEntry(at, f"must be {kinds}, not {given}")
    return value


def _one_of(words: Iterable[str]) -> str:
    shown_words = [*map(repr, words)]
    return ("one of " if len(shown_words) > 1 else "") + ", ".join(shown_words)


def _check_keys(at: KeyPath, table: Table, allowed: set[str]) -> None:
    for key in table:
        if key in allowed:
            continue
        if key in _IN_CODE_ONLY:
            problem = (
                "cannot be set in a file; set it in the program: "
                f"dataclasses.replace(config, {key}=...)"
            )
        elif key == "name":
            problem = "cannot be set: the name of the table is the worker's name"
        elif key in _WORKER_KEYS and at:
            problem = "cannot be set in [defaults]: each worker needs its own"
        elif key in _WORKER_KEYS:
            problem = "belongs into [defaults] or [workers.NAME]"
        else:
            problem = _unknown(key, allowed)
            if "extra_args" in allowed and not did_you_mean(key, allowed, cutoff=0.8):
                problem += " (options of llama-server go into extra_args)"
        raise _BadEntry((*at, key), problem)


def _unknown(key: str, allowed: set[str]) -> str:
    hint = did_you_mean(key, sorted(allowed)) or f"known: {', '.join(sorted(allowed))}"
    return f"unknown key; {hint}"


def _line_of(text: str, path: KeyPath) -> int | None:
    """Line number of the statement that defines `path`, or that has a string where `path` has a
    table; None if there is none.

    tomllib reports no positions. So n is bisected for the least number of lines that, taken up to
    the end of a statement, hold the path.
    """
    lines = text.replace("\r\n", "\n").split("\n")

    def is_there(number: int) -> bool:
        for end in range(number, len(lines) + 1):
            try:
                return _holds(tomllib.loads("\n".join(lines[:end])), path)
            except tomllib.TOMLDecodeError:
                continue  # in the middle of a statement
        return False

    index = bisect_left(range(1, len(lines) + 1), True, key=is_there)
    return index + 1 if path and index < len(lines) else None


def _holds(value: object, path: KeyPath) -> bool:
    for key in path:
        if not isinstance(value, Mapping):
            return True  # a string that stands for a table
        if key not in value:
            return False
        value = value[key]
    return True
