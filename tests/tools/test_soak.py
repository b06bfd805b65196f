"""The suite under other conditions, and what is told of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import shell_program
from tools import pythons
from tools.soak import CONDITIONS, Condition, Round, command, failures, main, table

ALONE, SHUFFLED = CONDITIONS[0], next(each for each in CONDITIONS if each.shuffled)
OLD = Condition("python3.11", python="python3.11")
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_one[x]"/>
<testcase classname="tests.a" name="test_two"><failure/></testcase>
<testcase classname="tests.b" name="test_three"><error/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("junit", "returncode", "failed"),
    [
        (JUNIT, 1, ("tests.a::test_two", "tests.b::test_three")),
        ("<testsuites/>", 0, ()),
        ("<testsuites/>", 5, ("pytest ended with 5",)),
        (None, -9, ("pytest ended with -9",)),
    ],
)
def test_what_failed_is_read_from_the_report(
    junit: str | None, returncode: int, failed: tuple[str, ...]
) -> None:
    assert failures(junit, returncode) == failed


def test_a_condition_is_in_the_command() -> None:
    words = command(SHUFFLED, 7, Path("report"), ["tests/unit"])
    assert words[-5:] == ["-p", "tools.shuffled", "--order-seed", "7", "tests/unit"]
    assert command(OLD, 7, Path("report"), [])[0] == ".venv-python3.11/bin/python"
    assert "--order-seed" not in command(ALONE, 7, Path("report"), [])


@pytest.mark.parametrize(("shim", "found"), [(127, True), (0, False)])
def test_a_python_behind_an_empty_shim_is_found(
    shim: int, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim_path = shell_program(tmp_path / "python3.12", f"exit {shim}")
    installed = tmp_path / "versions" / "3.12.1" / "bin" / "python3.12"
    installed.parent.mkdir(parents=True)
    shell_program(installed, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert pythons.find("python3.12") == (str(installed) if found else shim_path)
    assert pythons.find("python3.13") is None


def test_the_table_names_conditions_and_counts() -> None:
    rounds = [
        Round(ALONE, (), 1.0),
        Round(ALONE, ("a", "a"), 1.0),
        Round(SHUFFLED, ("a", "b"), 1.0),
    ]
    assert list(table(rounds)) == [
        "2 of 3 rounds: a",
        f"    {ALONE.name}: 1 of 2",
        f"    {SHUFFLED.name}: 1 of 1",
        "1 of 3 rounds: b",
        f"    {SHUFFLED.name}: 1 of 1",
        "2 of 3 rounds failed",
    ]


@pytest.mark.parametrize(("body", "code"), [("True", 0), ("False", 1)])
def test_a_soak_with_a_failure_ends_with_1(
    body: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    assert {body}\n")
    monkeypatch.setattr("tools.soak.CONDITIONS", (SHUFFLED,))
    monkeypatch.setattr("tools.soak.LOGS", tmp_path / "logs")
    assert main(["--rounds", "1", "--seed", "7", str(tmp_path / "test_it.py")]) == code
    said = capsys.readouterr().out
    assert "SEED=7, 1 rounds" in said
    assert f"{code} of 1 rounds failed" in said
    shutil.rmtree(tmp_path / "logs")
