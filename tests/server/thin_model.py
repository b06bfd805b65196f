"""The small model with all layers but one cut out: the same words and templates, read and said many times faster.

For tests in which a grammar chooses what the model says, or in which that does not matter.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from llama_worker.cli.gguf import HeadReader

_LAYER = re.compile(rb"blk\.(\d+)\.")
_ALIGNMENT = 32


def write_thin_model(whole: Path, thin: Path) -> None:
    """The file format is that of GGUF, version 3: a head of entries, then what tensors there are, then their data."""
    data = whole.read_bytes()
    reader = HeadReader(data)
    reader.entries()
    magic, version, tensors_count, entries_count = struct.unpack_from("<4sIQQ", data)
    head = bytearray(data[24 : reader.at])
    key = b"llama.block_count"
    struct.pack_into("<I", head, head.index(key) + len(key) + 4, 1)
    tensors, at = [], reader.at
    for _ in range(tensors_count):
        begin, (length,) = at, struct.unpack_from("<Q", data, at)
        name = data[at + 8 : at + 8 + length]
        at += 8 + length
        (dimensions,) = struct.unpack_from("<I", data, at)
        at += 4 + 8 * dimensions + 4
        tensors.append((name, data[begin:at], *struct.unpack_from("<Q", data, at)))
        at += 8
    data_at = _aligned(at)
    ends = [offset for _, _, offset in tensors[1:]] + [len(data) - data_at]
    infos, body = bytearray(), bytearray()
    kept = 0
    for (name, info, offset), end in zip(tensors, ends, strict=True):
        layer = _LAYER.match(name)
        if layer is None or int(layer[1]) == 0:
            kept += 1
            infos += info + struct.pack("<Q", len(body))
            body += data[data_at + offset : data_at + end]
            body += bytes(_aligned(len(body)) - len(body))
    start = struct.pack("<4sIQQ", magic, version, kept, entries_count) + head + infos
    thin.write_bytes(start + bytes(_aligned(len(start)) - len(start)) + body)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
