"""Checks that a command's model is a GGUF file, and reads from the file's header how much memory
its context takes."""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from llama_worker.cli.exits import Problem
from llama_worker.cli.text import one_line
from llama_worker.config.validation import checked_path
from llama_worker.errors import ConfigError

MAGIC = b"GGUF"
_HEAD_BYTES = 64
_SHOWN_NAMES = 3  # of files
_SHOWN_CHARS = 80  # of a MODEL argument that is not a path, such as a prompt
_PART = re.compile(r"(.+-)(\d{5})(-of-)(\d{5})(\.gguf)")
_DOWNLOAD_AGAIN = "download the model again: the file itself, in the GGUF format"
_CONVERT = "convert it with llama.cpp's convert_hf_to_gguf.py"
_LOOKS_LIKE = (  # a file's first bytes, what kind of file it is, what to do
    (rb"\Z", "it is empty", _DOWNLOAD_AGAIN),
    (rb"version https://git-lfs", "it is a Git LFS pointer", "run `git lfs pull` in its clone"),
    (rb"\s*<", "it is a web page", _DOWNLOAD_AGAIN + "; on Hugging Face, use its download link"),
    (rb"PK", "it is a PyTorch file or a zip archive", _CONVERT),
    (rb'(?s:.{7})\0\{"', "it is a safetensors file", _CONVERT),
)

# the format's type numbers, with the format characters of `struct`
_SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_HEAD = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of entries
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")
_OLDEST_VERSION = 2  # the first with lengths of 64 bits
_MAX_LAYERS = 10_000  # a few hundred in the largest models
_CACHE_VALUE_BYTES = 2  # the server keeps keys and values as f16 unless told otherwise


class ContextNeeds(Struct, frozen=True):
    """Memory that the context takes in addition to the model."""

    # the longest context that the model was trained for, which is the server's default
    trained_tokens: int
    # an upper bound: layers with a window, without attention or with compressed keys take less
    bytes_per_token: int


class Model(Struct, frozen=True):
    """A GGUF file; `size_bytes` is the size of all of its parts, `context` is None if the file does
    not say it."""

    path: str
    size_bytes: int
    context: ContextNeeds | None = None


def find_model(named: str) -> Model:
    """Check the model at the path `named`. Raises Problem `no_model` or `not_a_gguf`."""
    path = Path(os.path.expanduser(named))
    try:
        checked_path("the model's path", named)
        return _model_at(path, named)
    except ConfigError as error:
        todo = "give the path of a model in the GGUF format; rename it if it is not valid Unicode"
        raise Problem("no_model", str(error), todo) from None
    except FileNotFoundError:
        raise Problem("no_model", f"there is no file {named}", _models_in(path.parent)) from None
    except OSError as error:
        todo = (
            f"chmod u+r {path}, or run as its owner"
            if isinstance(error, PermissionError)
            else "give the path of a model in the GGUF format; the prompt comes after it"
        )
        what = f"{one_line(named, _SHOWN_CHARS)} cannot be read: {error.strerror}"
        raise Problem("no_model", what, todo) from None


def _model_at(path: Path, named: str) -> Model:
    """As `find_model`, but OSError is not caught."""
    if path.is_dir():
        raise Problem("no_model", f"{named} is a folder, not a model file", _models_in(path))
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe might block for ever
        todo = "give the path of the file itself: the server opens it"
        raise Problem("no_model", f"{named} is a pipe or a device, not a model file", todo)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if mismatch := not_a_gguf(head):
        raise Problem("not_a_gguf", f"{named} is not a GGUF model: {mismatch[0]}", mismatch[1])
    names = part_names(path.name)
    if names and path.name != names[0]:
        what = f"{named} is a later part of a model"
        raise Problem("no_model", what, f"give the first part: {names[0]}")
    parts = [path.with_name(name) for name in names] or [path]
    if missing := [part.name for part in parts if not part.is_file()]:
        what = f"parts of the model are missing: {_first_of(missing)}"
        raise Problem("no_model", what, "put them into the folder of the first part")
    return Model(str(path), sum(part.stat().st_size for part in parts), read_context_needs(path))


def not_a_gguf(head: bytes) -> tuple[str, str] | None:
    """What a file with these first bytes is, and what to do; None if it is a GGUF. Pure."""
    if head.startswith(MAGIC):
        return None
    for pattern, what, todo in _LOOKS_LIKE:
        if re.match(pattern, head):
            return what, todo
    begins = one_line(head[:8].decode("latin-1"), 8)
    return f"it begins with {begins!r}, not with 'GGUF'", _DOWNLOAD_AGAIN


def part_names(name: str) -> list[str]:
    """File names of all parts of a split model, in order; [] if it is not split. Pure."""
    split = _PART.fullmatch(name)
    if split is None:
        return []
    stem, _, of, count, suffix = split.groups()
    return [f"{stem}{number:05d}{of}{count}{suffix}" for number in range(1, int(count) + 1)]


def _models_in(folder: Path) -> str:
    there = sorted(str(path) for path in folder.glob("*.gguf")) if folder.is_dir() else []
    if not there:
        return "give the path of a model in the GGUF format"
    return f"give the path of a GGUF file; found {_first_of(there)}"


def _first_of(names: list[str]) -> str:
    """`a, b, c and 2 more`."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


# ---------------------------------------------------------------- the head of the file


def read_context_needs(path: Path) -> ContextNeeds | None:
    """What the file's header says; None if entries are missing or invalid, or the file system maps
    no files. Raises OSError if the file cannot be opened."""
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return context_needs(HeadReader(data).entries())
        except (OSError, struct.error, ValueError, LookupError, RecursionError):
            return None


def context_needs(entries: Mapping[str, Any]) -> ContextNeeds | None:
    """What the entries of a header say. Pure. Raises KeyError or ValueError if one is missing or
    invalid."""
    kind = entries["general.architecture"]
    layers_count = _count(entries[f"{kind}.block_count"])
    heads = _per_layer(entries[f"{kind}.attention.head_count"], layers_count)
    kv_heads = _per_layer(entries.get(f"{kind}.attention.head_count_kv", heads), layers_count)
    per_head = _count(entries[f"{kind}.embedding_length"]) // max(1, *heads)
    values_per_head = sum(
        _count(entries.get(f"{kind}.attention.{part}_length", per_head))
        for part in ("key", "value")
    )
    return ContextNeeds(
        trained_tokens=_count(entries[f"{kind}.context_length"]),
        bytes_per_token=sum(kv_heads) * values_per_head * _CACHE_VALUE_BYTES,
    )


def _per_layer(value: object, layers_count: int) -> list[int]:
    """One number for each layer; most models have a single number for all layers."""
    if not 0 < layers_count <= _MAX_LAYERS:
        raise ValueError(layers_count)
    values = value if isinstance(value, list) else [value] * layers_count
    if not values:
        raise ValueError(values)
    return [_count(number) for number in values]


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


class HeadReader:
    """Reads a file's header, forward from `at`. Raises struct.error, LookupError or ValueError if
    the file is corrupt."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self.at = 0

    def entries(self) -> dict[str, Any]:
        _, version, _, entries_count = self._take(_HEAD)
        if version < _OLDEST_VERSION:
            raise ValueError(version)
        return {self._string(): self._value(self._take(_TYPE)[0]) for _ in range(entries_count)}

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(struct.Struct("<" + _SCALARS[kind]))[0]
        (item_kind,), (count,) = self._take(_TYPE), self._take(_LENGTH)
        if item_kind == _STRING:  # a vocabulary: not needed here
            for _ in range(count):
                self._skip_string()
            return None
        if item_kind == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        return list(self._take(struct.Struct(f"<{count}{_SCALARS[item_kind]}")))

    def _string(self) -> str:
        start = self.at
        self._skip_string()
        return self._data[start + _LENGTH.size : self.at].decode(errors="replace")

    def _skip_string(self) -> None:
        (length,) = _LENGTH.unpack_from(self._data, self.at)
        self.at += _LENGTH.size + length
        if self.at > len(self._data):
            raise IndexError(self.at)

    def _take(self, form: struct.Struct) -> tuple[Any, ...]:
        values = form.unpack_from(self._data, self.at)
        self.at += form.size
        return values
