"""The small model with most of its layers cut out: the same words and templates, read and said
many times faster.

For tests in which a grammar chooses what the model says, or in which that does not matter.
"""

import re
import struct
from pathlib import Path

from llama_worker.cli.gguf import HeadReader

_LAYER = re.compile(rb"blk\.(\d+)\.")
_ALIGNMENT = 32


def write_thin_model(whole: Path, thin: Path, *, layers: int = 1) -> None:
    """Keeps the first `layers`. The file format is that of GGUF, version 3: a head of entries, then
    what tensors there are, then their data."""
    data = whole.read_bytes()
    reader = HeadReader(data)
    reader.entries()
    magic, version, tensors_count, entries_count = struct.unpack_from("<4sIQQ", data)
    head = bytearray(data[24 : reader.at])
    key = b"llama.block_count"
    struct.pack_into("<I", head, head.index(key) + len(key) + 4, layers)
    tensors, at = [], reader.at
    for _ in range(tensors_count):
        (name_length,) = struct.unpack_from("<Q", data, at)
        (dimensions,) = struct.unpack_from("<I", data, at + 8 + name_length)
        end = at + 8 + name_length + 4 + 8 * dimensions + 4
        tensors.append((data[at:end], *struct.unpack_from("<Q", data, end)))
        at = end + 8
    data_at = _aligned(at)
    ends = [offset for _, offset in tensors[1:]] + [len(data) - data_at]
    infos, body = list[bytes](), bytearray()
    for (info, offset), end in zip(tensors, ends, strict=True):
        layer = _LAYER.match(info, 8)
        if layer is None or int(layer[1]) < layers:
            infos.append(info + struct.pack("<Q", len(body)))
            body += data[data_at + offset : data_at + end]
            body += bytes(_aligned(len(body)) - len(body))
    start = (
        struct.pack("<4sIQQ", magic, version, len(infos), entries_count) + head + b"".join(infos)
    )
    thin.write_bytes(start + bytes(_aligned(len(start)) - len(start)) + body)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
