"""The service of how-to/systemd.md: systemd accepts it, its times fit the worker's, and its program ends as it says."""

from __future__ import annotations

import configparser
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from llama_worker import TimeoutProfile
from llama_worker.runtime.guard import ORPHAN_GRACE_S
from tests.docs.pages import DOCS, files
from tests.server.pace import lean_server, patience

FILES = files((DOCS / "how-to" / "systemd.md").read_text())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "llama-host.service"
    there = FILES[unit.name].replace("/srv/llama/.venv/bin/python", sys.executable)
    unit.write_text(there.replace("/srv/llama", str(tmp_path)))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=patience())
    assert (done.returncode, done.stderr) == (0, "")


def test_the_units_times_leave_room_for_a_stop_and_for_the_guards() -> None:
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(FILES["llama-host.service"])
    service = unit["Service"]
    assert (service["KillMode"], service["OOMPolicy"], service["Restart"]) == ("mixed", "continue", "on-failure")
    assert int(service["TimeoutStopSec"]) > TimeoutProfile().stop_grace_s + 2
    assert int(service["RestartSec"]) > ORPHAN_GRACE_S + 3  # all is gone within 5 s of the host's death


@pytest.mark.server
def test_the_program_ends_with_its_servers_at_sigterm(
    thin_model: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "host.py").write_text(FILES["host.py"])
    (tmp_path / "fleet.toml").write_text(
        f'[defaults]\nhost = "127.0.0.1"\nmodel = "{thin_model}"\nexecutable = "{lean_server(tmp_path)}"\n'
        f"[workers.one]\nport = {free_port()}\n[workers.two]\nport = {free_port()}\n"
    )
    command = [sys.executable, "host.py", "fleet.toml"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert [program.stdout.readline() for _ in range(2)] == ["one is ready\n", "two is ready\n"]
            tree = psutil.Process(program.pid).children(recursive=True)
            assert len(tree) >= 4  # a guard and a server each
            program.send_signal(signal.SIGTERM)
            _, errors = program.communicate(timeout=patience())
        finally:
            program.kill()
    assert (program.returncode, errors) == (0, "")
    assert not [process for process in tree if process.is_running()]
