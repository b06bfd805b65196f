"""The guard's interpreter, and what a host does about a guard that owes news."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from signal import SIGCONT, SIGKILL

import pytest

from llama_worker.runtime.server_process import Owing, interpreter
from tests.conftest import shell_program


def test_the_guard_runs_on_this_python() -> None:
    assert interpreter() == sys.executable


@pytest.mark.parametrize("name", ["uwsgi", "my_app", ""])
def test_a_program_that_embeds_python_is_not_started_again(
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


@pytest.mark.parametrize(
    ("looks", "sent"),
    [
        ([(0.0, False), (100.0, False)], [None, None]),
        ([(0.0, True), (0.9, True), (1.0, True)], [None, None, SIGCONT]),
        ([(0.0, True), (0.1, False), (50.0, True)], [None, None, None]),
        (
            [(0.0, True), (1.0, True), (600.0, True), (600.5, True), (601.0, True), (602.0, True)],
            [None, SIGCONT, SIGCONT, None, SIGCONT, SIGCONT],
        ),
        (
            [(float(second), True) for second in range(8)],
            [None, SIGCONT, SIGCONT, SIGCONT, SIGCONT, SIGKILL, SIGKILL, SIGKILL],
        ),
    ],
    ids=["owes nothing", "a second", "in time", "a gap is one look", "too long"],
)
def test_a_guard_that_owes_news_goes_on_or_is_killed(
    looks: list[tuple[float, bool]], sent: list[object]
) -> None:
    owing = Owing()
    assert [owing.step(now, owes=owes) for now, owes in looks] == sent


def test_nobody_is_woken_for_a_guard_that_owes_nothing() -> None:
    owing = Owing()
    assert owing.wait_ms(5.0) is None
    owing.step(5.0, owes=True)
    assert owing.wait_ms(5.25) == 750.0
    assert owing.wait_ms(7.0) == 0.0
    owing.step(7.0, owes=False)
    assert owing.wait_ms(7.0) is None
