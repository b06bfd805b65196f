"""The suite under other conditions, and what is told of it."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import shell_program
from tools import pythons
from tools.soak import CONDITIONS, failures, main

SHUFFLED = next(each for each in CONDITIONS if each.shuffled)
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
    assert said.endswith(f"{code} of 1 rounds failed\n")
    assert (f"test_it::test_it\n    {SHUFFLED.name}: 1 of 1\n" in said) == bool(code), said
    shutil.rmtree(tmp_path / "logs")
