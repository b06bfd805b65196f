"""What the head of a GGUF file says of its context, from files written byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from llama_worker.cli.gguf import ContextNeeds, context_needs, read_context_needs
from llama_worker.cli.models import find_model

UINT32, STRING, ARRAY = 4, 8, 9
LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 8192,
    "llama.embedding_length": 512,
    "llama.attention.head_count": 8,
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STRING) + text(value)
    if isinstance(value, list):
        kind = STRING if isinstance(value[0], str) else UINT32
        items = b"".join(text(item) if kind == STRING else struct.pack("<I", item) for item in value)
        return text(key) + struct.pack("<IIQ", ARRAY, kind, len(value)) + items
    return text(key) + struct.pack("<II", UINT32, value)


def head(entries_count: int, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, 0, entries_count)


def gguf(entries: dict[str, Any], version: int = 3) -> bytes:
    return head(len(entries), version) + b"".join(entry(key, value) for key, value in entries.items())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("more", "bytes_per_token"),
    [
        ({}, 4 * 8 * (64 + 64) * 2),
        ({"llama.attention.head_count_kv": 2}, 4 * 2 * (64 + 64) * 2),
        ({"llama.attention.head_count_kv": [2, 0, 2, 0]}, 4 * (64 + 64) * 2),  # layers without attention
        ({"llama.attention.key_length": 128, "llama.attention.value_length": 32}, 4 * 8 * (128 + 32) * 2),
    ],
)
def test_each_token_takes_its_keys_and_values_in_every_layer(
    model: Path, more: dict[str, Any], bytes_per_token: int
) -> None:
    model.write_bytes(gguf({**LLAMA, "tokenizer.ggml.tokens": ["<s>", "a", ""], **more}))
    assert read_context_needs(model) == ContextNeeds(trained_tokens=8192, bytes_per_token=bytes_per_token)


def test_the_small_real_model(smollm2: str) -> None:
    """Its server (b11434) says: 180.00 MiB for 8192 cells."""
    assert find_model(smollm2).context == ContextNeeds(trained_tokens=8192, bytes_per_token=180 * 2**20 // 8192)


def test_a_file_that_ends_anywhere_says_nothing(model: Path) -> None:
    whole = gguf({**LLAMA, "tokenizer.ggml.tokens": ["<s>", "a"]})
    for length in range(len(whole)):
        model.write_bytes(whole[:length])
        assert read_context_needs(model) is None, length


@pytest.mark.parametrize(
    "odd",
    [
        *(gguf({key: value for key, value in LLAMA.items() if key != lost}) for lost in LLAMA),
        gguf(LLAMA, version=1),
        gguf({**LLAMA, "llama.attention.head_count": "eight"}),
        head(1) + text("k") + struct.pack("<I", 99),
        head(1) + text("k") + struct.pack("<IIQ", ARRAY, UINT32, 2**63),
        head(1) + struct.pack("<Q", 2**63),
        head(1) + text("k") + struct.pack("<I", ARRAY) + b"\x09\0\0\0\x01" * 9999,
    ],
)
def test_a_file_that_leaves_something_out_or_is_odd_says_nothing(model: Path, odd: bytes) -> None:
    model.write_bytes(odd)
    assert read_context_needs(model) is None


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="-4"):
        context_needs({**LLAMA, "llama.block_count": -4})
