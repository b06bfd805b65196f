"""Where network namespaces cannot be made, the command does not pass."""

import re
from pathlib import Path

import pytest

from tests.conftest import shell_program
from tests.two_machines.__main__ import main

REFUSES = "echo 'mount --make-shared failed: Operation not permitted' >&2\nexit 1"


@pytest.mark.parametrize(
    ("ip", "said"),
    [(None, "there is no `ip`"), (REFUSES, "ip netns add .*: .*Operation not permitted")],
    ids=["no ip", "no right to"],
)
def test_without_namespaces_it_ends_with_2(
    ip: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if ip is not None:
        shell_program(tmp_path / "ip", ip)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main() == 2
    error = capsys.readouterr().err
    assert "network namespaces cannot be made here: " in error
    assert re.search(said, error), error
