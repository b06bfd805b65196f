"""Every guarantee of the README is an invariant by that name, or it is said why it is none."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import DOCS, ROOT, names_in, table
from tests.simulation.promises import Promise

HERE = Path(__file__).parent
NOT_SIMULATED = table((DOCS / "testing.md").read_text(), "promise")


def test_every_guarantee_is_simulated_or_excused() -> None:
    _, _, section = (ROOT / "README.md").read_text().partition("## What it guarantees")
    rows = re.findall(r"^\| ([^|]*[a-z]) \|", section.partition("\n## ")[0], flags=re.MULTILINE)
    simulated = {promise.value for promise in Promise}
    excused = {name.partition(" (")[0] for name, _, _ in NOT_SIMULATED}
    assert simulated | excused == set(rows)
    assert not simulated & {name for name, _, _ in NOT_SIMULATED}


def test_every_promise_is_looked_after() -> None:
    checks = "".join(path.read_text() for path in HERE.glob("*.py"))
    looked_after = set(re.findall(r"Promise\.(\w+)[,(]", checks))
    assert looked_after >= set(Promise.__members__)


def test_what_covers_the_rest_exists() -> None:
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = {name for *_, covered_by in NOT_SIMULATED for name in names_in(covered_by)}
    assert {name for name in named if name.endswith(".py")} <= files
