"""The model and the llama-server that the command was given, looked at before anything is
started; and the worker's config of both."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llama_worker.cli.exits import Problem
from llama_worker.cli.gguf import ContextNeeds, read_context_needs
from llama_worker.cli.text import one_line
from llama_worker.config.profiles import (
    TIMEOUT_PRESETS,
    RestartPolicy,
    TimeoutPreset,
    TimeoutProfile,
)
from llama_worker.config.settings import WorkerConfig
from llama_worker.runtime.process import server_program
from llama_worker.runtime.process.server_program import FoundServer

MAGIC = b"GGUF"
Timeouts = Literal["slow", TimeoutPreset]
_STOP_GRACE_S = 2.0  # a person waits at the terminal
_HEAD_BYTES = 64
_SHOWN_MODELS = 3
_PART = re.compile(r"(.+-)(\d{5})(-of-)(\d{5})(\.gguf)")
_DOWNLOAD_AGAIN = "download the model again, the file itself, in the GGUF format"
_LOOKS_LIKE: tuple[tuple[bytes, str, str], ...] = (
    (b"", "it is empty", _DOWNLOAD_AGAIN),
    (
        b"version https://git-lfs",
        "it is a pointer of Git LFS",
        "run `git lfs pull` where it was cloned",
    ),
    (b"<", "it is a web page", _DOWNLOAD_AGAIN + ": on Hugging Face by its download link"),
    (
        b"PK",
        "it is a PyTorch file or a zip archive",
        "convert it with llama.cpp's convert_hf_to_gguf.py",
    ),
)
_SAFETENSORS = re.compile(rb'.{7}\x00\{"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Model:
    """A GGUF file; `size_bytes` is that of all of its parts, `context` None where the file does not
    say it."""

    path: str
    size_bytes: int
    context: ContextNeeds | None = None


def find_model(named: str) -> Model:
    """Raises Problem `no_model` or `not_a_gguf`."""
    path = Path(os.path.expanduser(named))
    if path.is_dir():
        raise Problem("no_model", f"{named} is a folder, not a model file", _name_one(path))
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        raise Problem("no_model", f"there is no file {named}", _name_one(path.parent)) from None
    except OSError as error:
        raise Problem(
            "no_model",
            f"{named} cannot be read: {error.strerror}",
            f"chmod u+r {path}, or run as its owner",
        ) from None
    if misfit := not_a_gguf(head):
        raise Problem("not_a_gguf", f"{named} is not a GGUF model: {misfit[0]}", misfit[1])
    names = part_names(path.name)
    if names and path.name != names[0]:
        raise Problem(
            "no_model", f"{named} is a later part of a model", f"give the first part: {names[0]}"
        )
    parts = [path.with_name(name) for name in names] or [path]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise Problem(
            "no_model",
            f"parts of the model are missing: {', '.join(missing)}",
            "put them beside the first",
        )
    return Model(str(path), sum(part.stat().st_size for part in parts), read_context_needs(path))


def not_a_gguf(head: bytes) -> tuple[str, str] | None:
    """What a file with these first bytes is instead, and what to do; None for a GGUF. Pure."""
    if head.startswith(MAGIC):
        return None
    for start, what, todo in _LOOKS_LIKE:
        if head.lstrip().startswith(start) if start else not head:
            return what, todo
    if _SAFETENSORS.match(head):
        return "it is a safetensors file", "convert it with llama.cpp's convert_hf_to_gguf.py"
    begins = one_line(head[:8].decode("latin-1"), 8)
    return f"it begins with {begins!r}, not with 'GGUF'", _DOWNLOAD_AGAIN


def part_names(name: str) -> list[str]:
    """All parts of a model that was split, in their order; [] for one that was not. Pure."""
    split = _PART.fullmatch(name)
    if split is None:
        return []
    stem, _, of, count, suffix = split.groups()
    return [f"{stem}{number:05d}{of}{count}{suffix}" for number in range(1, int(count) + 1)]


def _name_one(folder: Path) -> str:
    there = sorted(str(path) for path in folder.glob("*.gguf")) if folder.is_dir() else []
    if not there:
        return "give the path of a model in the GGUF format"
    more = f" and {len(there) - _SHOWN_MODELS} more" if len(there) > _SHOWN_MODELS else ""
    return f"give the path of a GGUF file; there are {', '.join(there[:_SHOWN_MODELS])}{more}"


def find_server(named: str | None, *, option: str = "--server") -> FoundServer:
    """`named`, by the option, else where the library looks. Raises Problem `no_server`."""
    try:
        return server_program.find_server(named, option=option)
    except server_program.ServerNotFound as error:
        raise Problem("no_server", error.what, error.todo) from error


def timeouts_of(named: Timeouts) -> TimeoutProfile:
    """The preset of that name; `slow` is short for `slow_prefill`. Pure."""
    return TIMEOUT_PRESETS["slow_prefill" if named == "slow" else named]()


def worker_config(
    model: Model, server: FoundServer, *, timeouts: Timeouts = "slow_prefill", **config: Any
) -> WorkerConfig:
    """One worker that is never restarted by itself: who sits at the terminal is told.

    `config`: further arguments of `WorkerConfig.for_model`. Raises ConfigError. Pure.
    """
    return WorkerConfig.for_model(
        model.path,
        name="run",
        executable=server.path,
        timeouts=replace(timeouts_of(timeouts), stop_grace_s=_STOP_GRACE_S),
        restart=RestartPolicy.never(),
        **config,
    )
