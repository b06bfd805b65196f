"""Workers' configurations from one TOML file: a fleet. docs/fleet.md describes the format."""

from __future__ import annotations

import os
import re
import tomllib
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llama_worker.config.command import llama_server_cmd
from llama_worker.config.command_flags import memory_warning
from llama_worker.config.machine import memory_bytes
from llama_worker.config.profiles import (
    TIMEOUT_PRESETS,
    LoopDetector,
    Recycle,
    RestartPolicy,
    TimeoutProfile,
)
from llama_worker.config.settings import CALLABLES, WorkerConfig
from llama_worker.config.validation import did_you_mean
from llama_worker.errors import ConfigError

KeyPath = tuple[str, ...]
Table = Mapping[str, Any]
T = TypeVar("T")

_IN_CODE_ONLY = {*CALLABLES, "normal_tools", "exit_tools", "canary"}
# what llama_server_cmd makes a server_cmd of, beside the worker's own host, port and slots
_COMMAND_KEYS = {"model", "executable", "extra_args", "cache_ram_mib", "batch_size"}
_WORKER_KEYS = {field.name for field in fields(WorkerConfig)} - _IN_CODE_ONLY - {
    "name"
} | _COMMAND_KEYS
_OFF = "off"  # TOML has no None
_MAY_BE_OFF = {"batch_size", "loop_detector", "max_tokens", "result_ttl_s"}
_PROFILES: tuple[tuple[str, type[Any], dict[str, Callable[[], Any]]], ...] = (
    ("timeouts", TimeoutProfile, TIMEOUT_PRESETS),
    ("restart", RestartPolicy, {"never": RestartPolicy.never}),
    ("loop_detector", LoopDetector, {}),
)
_WITH_PRESETS = {key for key, _, presets in _PROFILES if presets}


def load_config(path: str | os.PathLike[str]) -> dict[str, WorkerConfig]:
    """The file's workers by name, in its order, with the defaults merged in. Starts nothing.

    What TOML cannot hold (tools, callables, probes) is added afterwards with `dataclasses.replace`.
    Raises ConfigError, which names the file, the line where there is one, and the key; OSError
    where it cannot be read. Warns (UserWarning) where the servers' prompt caches together may
    outgrow this machine's memory.
    """
    try:
        text = Path(path).read_bytes().decode()
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the latter of what is nested too deeply
        raise ConfigError(f"{os.fspath(path)}: {error}") from error
    try:
        configs = _fleet(data)
    except _BadEntry as invalid:
        number = _line_of(text, invalid.path)
        place = os.fspath(path) if number is None else f"{os.fspath(path)}:{number}"
        keys = ".".join(key if re.fullmatch(r"[\w-]+", key) else repr(key) for key in invalid.path)
        raise ConfigError(": ".join(filter(None, (place, keys, invalid.problem)))) from invalid
    commands = {name: config.server_cmd for name, config in configs.items()}
    if line := memory_warning(commands, memory_bytes()):
        warnings.warn(f"{os.fspath(path)}: {line}", stacklevel=2)
    return configs


class _BadEntry(Exception):
    """The entry at `path` is invalid."""

    def __init__(self, path: KeyPath, problem: str) -> None:
        super().__init__(problem)
        self.path = path
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _PlacedTable:
    """A table of the file, and its path."""

    at: KeyPath
    table: Table


@dataclass(frozen=True, slots=True)
class _Merged:
    """Tables over one another, key by key."""

    values: dict[str, Any]
    at: KeyPath  # of the topmost table
    origins: Mapping[str, KeyPath]  # where each value stands

    @classmethod
    def of(cls, levels: Sequence[_PlacedTable]) -> _Merged:
        """A later level's value replaces an earlier one's."""
        values = {key: value for level in levels for key, value in level.table.items()}
        origins = {key: (*level.at, key) for level in levels for key in level.table}
        return cls(values, levels[-1].at, origins)

    def build(self, make: Callable[..., T], **arguments: Any) -> T:
        """`make(**arguments)`; what it refuses is attributed to the first key here that its
        message names."""
        try:
            return make(**arguments)
        except (TypeError, ConfigError) as error:
            named = (word for word in re.findall(r"\w+", str(error)) if word in self.origins)
            raise _BadEntry(self.origins.get(next(named, ""), self.at), str(error)) from error


def _fleet(data: Table) -> dict[str, WorkerConfig]:
    _check_keys(_PlacedTable((), data), {"defaults", "workers"})
    defaults = _PlacedTable(("defaults",), _table(("defaults",), data.get("defaults", {})))
    _check_keys(defaults, _WORKER_KEYS - {"port", "server_cmd"})
    workers = _table(("workers",), data.get("workers", {}))
    if not workers:
        raise _BadEntry((), "no workers; each needs a table [workers.NAME]")
    configs: dict[str, WorkerConfig] = {}
    ports: dict[tuple[str, int], str] = {}
    for name, table in workers.items():
        own = _PlacedTable(("workers", name), _table(("workers", name), table))
        _check_keys(own, _WORKER_KEYS)
        config = configs[name] = _worker(name, defaults, own)
        other = ports.setdefault((config.connect_host, config.port), name)
        if other != name:
            raise _BadEntry((*own.at, "port"), f"{config.port} is the port of {other!r} already")
    return configs


def _worker(name: str, defaults: _PlacedTable, own: _PlacedTable) -> WorkerConfig:
    if "server_cmd" in own.table:  # a whole command takes nothing from the defaults
        defaults = replace(
            defaults, table={k: v for k, v in defaults.table.items() if k not in _COMMAND_KEYS}
        )
    levels = (defaults, own)
    merged = _Merged.of(levels)
    values = {k: None if k in _MAY_BE_OFF and v == _OFF else v for k, v in merged.values.items()}
    for key in ("env", "default_params"):
        if key in values:
            values[key] = _nested(levels, key).values
    for key, make, presets in _PROFILES:
        if values.get(key) is not None:
            values[key] = _profile(_nested(levels, key), make, presets)
    for key in ("host", "port"):
        if key not in values:
            raise _BadEntry(own.at, f"{key} is missing")
    if "server_cmd" not in values:
        values["server_cmd"] = _server_cmd(merged, values)
    elif beside := sorted(_COMMAND_KEYS & set(values)):
        raise _BadEntry(
            merged.origins[beside[0]], "has no effect beside server_cmd: leave out one of them"
        )
    return merged.build(
        WorkerConfig, name=name, **{k: v for k, v in values.items() if k not in _COMMAND_KEYS}
    )


def _server_cmd(merged: _Merged, values: Table) -> tuple[str, ...]:
    if "model" not in values:
        raise _BadEntry(merged.at, "a model (a GGUF file) is missing, or a whole server_cmd")
    for key in ("model", "executable"):
        if key in values and not (isinstance(values[key], str) and values[key]):
            raise _BadEntry(merged.origins[key], f"must be a non-empty str, not {values[key]!r}")
    parts = {key: values[key] for key in _COMMAND_KEYS if key in values}
    return merged.build(
        llama_server_cmd,
        host=values["host"],
        port=values["port"],
        slots=values.get("slots", 1),
        **parts,
    )


def _nested(levels: Sequence[_PlacedTable], key: str) -> _Merged:
    """The tables that stand at `key`, merged; a string is the name of a preset."""
    tables = []
    for level in levels:
        value, at = level.table.get(key), (*level.at, key)
        if value is None or (value == _OFF and key in _MAY_BE_OFF):
            continue
        if isinstance(value, str) and key in _WITH_PRESETS:
            value = {"preset": value}
        tables.append(_PlacedTable(at, _table(at, value)))
    return _Merged.of(tables)


def _profile(merged: _Merged, make: type[Any], presets: Mapping[str, Callable[[], Any]]) -> Any:
    """A preset, and what the table changes of it."""
    may_be_none = {field.name: "None" in str(field.type) for field in fields(make)}
    allowed = {*may_be_none, *(["preset"] if presets else [])}
    for key in merged.values:
        if key not in allowed:
            raise _BadEntry(merged.origins[key], _unknown(key, allowed))
    changes = {k: None if v == _OFF and may_be_none.get(k) else v for k, v in merged.values.items()}
    if isinstance(changes.get("recycle"), Mapping):
        at = merged.origins["recycle"]
        table = _PlacedTable(at, _table(at, changes["recycle"]))
        changes["recycle"] = _profile(_Merged.of([table]), Recycle, {})
    preset = changes.pop("preset", None)
    if preset is None:
        return merged.build(make, **changes)
    if not (isinstance(preset, str) and preset in presets):
        raise _BadEntry(
            merged.origins["preset"],
            f"must be one of {', '.join(map(repr, presets))}, not {preset!r}",
        )
    return merged.build(partial(replace, presets[preset]()), **changes)


def _table(at: KeyPath, value: object) -> Table:
    if not isinstance(value, Mapping):
        raise _BadEntry(at, f"must be a table, not {type(value).__name__}")
    return value


def _check_keys(level: _PlacedTable, allowed: set[str]) -> None:
    for key in level.table:
        if key in allowed:
            continue
        if key in _IN_CODE_ONLY:
            problem = f"cannot be in a file; in the program: dataclasses.replace(config, {key}=...)"
        elif key == "name":
            problem = "the name of the table is the worker's name"
        elif key in _WORKER_KEYS:
            problem = "is each worker's own: it cannot be among the defaults"
        else:
            problem = _unknown(key, allowed)
        raise _BadEntry((*level.at, key), problem)


def _unknown(key: str, allowed: set[str]) -> str:
    hint = did_you_mean(key, sorted(allowed)) or f"known: {', '.join(sorted(allowed))}"
    return f"unknown key; {hint}"


def _line_of(text: str, path: KeyPath) -> int | None:
    """The line where the statement begins that brings `path`, or as much of it as there is; None if
    there is none.

    tomllib tells no positions. Instead it is asked whether the first n lines, taken up to the end
    of a statement, hold the path; n is bisected.
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
