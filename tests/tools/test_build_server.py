"""The build of a llama-server, with a cmake and a ninja that are scripts; real are the cache, the
locks and pip."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import Running, running, shell_program
from tools.build_server import OPTIONS, PINNED, main, planned

ROOT = Path(__file__).parents[2]
WAIT_S = 100.0
STEPS = 'for n in 1 2 3; do echo "[$n/3] Building CXX object src/file-$n.cpp.o"; done'
SERVER = 'mkdir -p "$2/bin"; echo "the server" > "$2/bin/llama-server"'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without what the tester has: no server, no compiler, no cache, no index."""
    for name in os.environ:
        if name.startswith(("LLAMA_", "PIP_", "C")):
            monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path


def put(folder: Path, name: str, script: str = "exit 0") -> None:
    """A program on the PATH, which also tells its version."""
    tells = 'PATH=/usr/bin:/bin\n[ "$1" = --version ] && echo "version 3.25.1" && exit'
    shell_program(folder / "bin" / name, f"{tells}\n{script}")


def put_tools(folder: Path, *, ninja: str = f"{STEPS}; {SERVER}", number: int = PINNED) -> None:
    """Compilers, cmake and ninja; and what is downloaded, as an interrupted build leaves it."""
    for name, script in {
        "cc": "",
        "c++": "",
        "cmake": f'echo "$@" > {folder}/flags',
        "ninja": ninja,
    }.items():
        put(folder, name, script)
    for name in ("source", "tools/setuptools"):
        (planned(os.environ, number).folder / "work" / name).mkdir(parents=True)


def build() -> Running:
    """A build in a process of its own."""
    return running(sys.executable, "-m", "tools.build_server", cwd=ROOT, start_new_session=True)


def refusal() -> str:
    """What a person is told by a build that fails."""
    with pytest.raises(SystemExit) as caught:
        main()
    assert str(caught.value).startswith("error: ")
    assert "what to do: " in str(caught.value)
    assert not planned(os.environ).binary.exists()
    return str(caught.value)


def test_the_binary_is_kept_and_found_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_tools(folder)
    main()
    told, binary = capsys.readouterr(), planned(os.environ).binary
    assert told.out.splitlines() == [str(binary)]
    assert binary.read_text() == "the server\n"
    assert re.search(r"compiling +33 %  0:00  file-1\.cpp\.o", told.err)  # progress
    assert "compiling: done in 0:0" in told.err
    assert not (binary.parent / "work").exists()
    flags = shlex.split((folder / "flags").read_text())
    assert {*OPTIONS, "-DGGML_NATIVE=OFF"} <= set(flags)
    assert any(flag.startswith("-DCMAKE_PROJECT_llama.cpp_INCLUDE=") for flag in flags)
    put(folder, "ninja", "exit 1")
    main()
    assert capsys.readouterr().out.splitlines() == [str(binary)]  # nothing is built


def test_two_at_once_build_once(folder: Path) -> None:
    put_tools(folder, ninja=f"echo x >> {folder}/builds; sleep 1; {SERVER}")
    with build() as (one, _), build() as (other, _):
        told = [each.communicate(timeout=WAIT_S) for each in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0), told
    assert (folder / "builds").read_text() == "x\n"


@pytest.mark.parametrize(
    "change",
    [
        {"CMAKE_ARGS": "-DGGML_CUDA=ON"},
        {"CXXFLAGS": "-march=native"},
        {"CC": "clang"},
        {"LDFLAGS": "-s"},
    ],
)
def test_other_flags_have_another_place(change: Mapping[str, str]) -> None:
    plain = {"XDG_CACHE_HOME": "/cache"}
    assert planned({**plain, **change}).binary != planned(plain).binary
    assert planned({**plain, "LANG": "C"}).binary == planned(plain).binary


def test_the_place_names_the_source_and_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert str(planned({"XDG_CACHE_HOME": "/cache"}).binary).startswith(
        "/cache/llama_worker/llama-server-11434.0.0-"
    )
    for not_valid in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert planned(not_valid).folder.parent == Path("/home/me/.cache/llama_worker")


def test_builds_are_kept_beside_each_other() -> None:
    one, other = planned({}, 9093), planned({}, 10453)
    assert len({one.folder, other.folder, planned({}).folder}) == 3
    assert one.folder.name.startswith("llama-server-9093.0.0-")
    assert "-DLLAMA_BUILD_NUMBER=9093" in one.options
    assert planned({}, PINNED) == planned({})


def test_an_unpinned_build_joins_no_source_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_tools(folder, number=10453)
    main("10453")
    assert capsys.readouterr().out == f"{planned(os.environ, 10453).binary}\n"
    assert "CMAKE_PROJECT" not in (folder / "flags").read_text()
    assert not planned(os.environ).binary.exists()


def test_a_build_must_be_a_number() -> None:
    with pytest.raises(SystemExit, match="no build number: 'b11434'"):
        main("b11434")


def test_an_interrupted_build_is_gone_on_with(folder: Path) -> None:
    put_tools(folder, ninja=f"{STEPS}; exec sleep 100")
    with build() as (process, _):
        assert process.stderr is not None
        while "compiling  33 %" not in process.stderr.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    assert not planned(os.environ).binary.exists()
    put(folder, "ninja", SERVER)
    main()  # with what was downloaded, since there is no index


def test_without_a_network(folder: Path) -> None:
    put(folder, "cc")
    put(folder, "c++")
    said = "pip could not get.*No matching distribution found.*check the network.*LLAMA_SERVER"
    assert re.search(said, refusal(), re.DOTALL)


@pytest.mark.parametrize(
    ("said", "todo"),
    [
        ("fatal error: error writing to /x.o: No space left on device", "XDG_CACHE_HOME"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "ran out of memory"),
        ("x.cpp:1:1: error: expected declaration", "a newer compiler may help"),
    ],
)
def test_a_build_that_fails(folder: Path, said: str, todo: str) -> None:
    put_tools(folder, ninja=f"{STEPS}; echo 'FAILED: x.o'; echo {shlex.quote(said)}; exit 1")
    assert re.search(f"{todo}.*{re.escape(said)}", refusal(), re.DOTALL)


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)
    assert re.search("cannot be written.*XDG_CACHE_HOME", refusal(), re.DOTALL)
