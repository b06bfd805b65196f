"""The build of a llama-server, with a cmake and a ninja that are scripts; real are the cache, the locks and pip."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.build_server import OPTIONS, SOURCE_PACKAGE, planned

ROOT = Path(__file__).parents[2]
WAIT_S = 100.0
STEPS = 'for n in 1 2 3; do echo "[$n/3] Building CXX object src/file-$n.cpp.o"; done'
SERVER = 'mkdir -p "$2/bin"; echo "the server" > "$2/bin/llama-server"'


@dataclass(frozen=True, slots=True)
class Bench:
    """A user's cache, and the programs on the PATH."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Without what the tester has: no server, no compiler, no cache, no index."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("LLAMA_", "PIP_", "C"))}
        bare = {"PATH": str(self.folder / "bin"), "XDG_CACHE_HOME": str(self.folder / "cache"), "PIP_NO_INDEX": "1"}
        return {**kept, **bare}

    def put(self, name: str, script: str) -> None:
        """A program."""
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        path.chmod(0o755)

    def put_tool(self, name: str, script: str) -> None:
        """A program that tells its version."""
        self.put(name, f'[ "$1" = --version ] && echo "{name} version 3.25.1" && exit; {script}')

    def put_tools(self, *, ninja: str = f"{STEPS}; {SERVER}") -> None:
        """Compilers, cmake and ninja; and what is downloaded, as an interrupted build leaves it."""
        for name in ("cc", "c++"):
            self.put(name, "exit 0")
        self.put_tool("cmake", f'echo "$@" > {self.folder}/flags')
        self.put_tool("ninja", ninja)
        work = planned(self.environment).folder / "work"
        for name in ("source", "tools/setuptools"):
            (work / name).mkdir(parents=True)

    def started(self, **env: str) -> subprocess.Popen[str]:
        """A build, which shows the path at its end."""
        command, env = [sys.executable, "-m", "tools.build_server"], {**self.environment, **env}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    def build(self, **env: str) -> subprocess.CompletedProcess[str]:
        """To its end."""
        with self.started(**env) as process:
            output, errors = process.communicate(timeout=WAIT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "bin").mkdir()
    return Bench(tmp_path)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """What a person is told where it fails."""
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "what to do: " in done.stderr
    return done.stderr


def test_the_binary_is_kept_and_found_again(bench: Bench) -> None:
    bench.put_tools()
    first = bench.build()
    assert first.returncode == 0, first.stderr
    binary = planned(bench.environment).binary
    assert first.stdout.splitlines()[-1] == str(binary)
    assert binary.read_text() == "the server\n"
    assert re.search(r"compiling +33 %  0:00  file-1\.cpp\.o", first.stdout)  # progress
    assert "compiling: done in 0:0" in first.stdout
    assert not (binary.parent / "work").exists()
    flags = shlex.split((bench.folder / "flags").read_text())
    assert {*OPTIONS, "-DGGML_NATIVE=OFF"} <= set(flags)
    assert any(flag.startswith("-DCMAKE_PROJECT_llama.cpp_INCLUDE=") for flag in flags)
    bench.put("ninja", "exit 1")
    assert bench.build().stdout.splitlines() == [str(binary)]  # nothing is built


def test_two_at_once_build_once(bench: Bench) -> None:
    bench.put_tools(ninja=f"echo x >> {bench.folder}/builds; sleep 1; {SERVER}")
    both = [bench.started() for _ in range(2)]
    told = [each.communicate(timeout=WAIT_S) for each in both]
    assert [each.returncode for each in both] == [0, 0], told
    assert (bench.folder / "builds").read_text() == "x\n"


@pytest.mark.parametrize(
    "change", [{"CMAKE_ARGS": "-DGGML_CUDA=ON"}, {"CXXFLAGS": "-march=native"}, {"CC": "clang"}, {"LDFLAGS": "-s"}]
)
def test_other_flags_have_another_place(change: Mapping[str, str]) -> None:
    plain = {"XDG_CACHE_HOME": "/cache"}
    assert planned({**plain, **change}).binary != planned(plain).binary
    assert planned({**plain, "LANG": "C"}).binary == planned(plain).binary


def test_the_place_names_the_source_and_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert str(planned({"XDG_CACHE_HOME": "/cache"}).binary).startswith("/cache/llama_worker/llama-server-11434.0.0-")
    assert SOURCE_PACKAGE.endswith("==11434.0.0")
    for not_valid in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert planned(not_valid).folder.parent == Path("/home/me/.cache/llama_worker")


def test_an_interrupted_build_is_gone_on_with(bench: Bench) -> None:
    bench.put_tools(ninja=f"{STEPS}; exec sleep 100")
    with bench.started() as process:
        assert process.stdout is not None
        while "compiling  33 %" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    assert not planned(bench.environment).binary.exists()
    bench.put_tool("ninja", SERVER)
    assert bench.build().returncode == 0  # with what was downloaded, since there is no index


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ({}, ["no C++ compiler", "apt install g++", "LLAMA_SERVER"]),
        (
            dict.fromkeys(("cc", "c++"), "exit 0"),
            ["pip could not get", "No matching distribution found", "check the network", "LLAMA_SERVER"],
        ),
    ],
    ids=["no compiler", "no network"],
)
def test_what_is_missing(bench: Bench, programs: dict[str, str], said: list[str]) -> None:
    for name, script in programs.items():
        bench.put(name, script)
    told = refusal(bench.build())
    assert [text for text in said if text not in told] == []


@pytest.mark.parametrize(
    ("said", "todo"),
    [
        ("fatal error: error writing to /x.o: No space left on device", "XDG_CACHE_HOME"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "ran out of memory"),
        ("x.cpp:1:1: error: expected declaration", "a newer compiler may help"),
    ],
)
def test_a_build_that_fails(bench: Bench, said: str, todo: str) -> None:
    bench.put_tools(ninja=f"{STEPS}; echo 'FAILED: x.o'; echo {shlex.quote(said)}; exit 1")
    told = refusal(bench.build())
    assert said in told
    assert todo in told
    assert not planned(bench.environment).binary.exists()


def test_a_cache_that_cannot_be_written(bench: Bench) -> None:
    bench.put_tools()
    (bench.folder / "file").touch()
    said = refusal(bench.build(XDG_CACHE_HOME=str(bench.folder / "file")))
    assert "cannot be written" in said
    assert "XDG_CACHE_HOME" in said
