"""What the pages show passes the type checker as it stands, and says what is in every answer."""

import re
import subprocess
import sys
from pathlib import Path
from typing import is_typeddict

import pytest

from llama_worker.types import request, worker
from tests.docs.pages import PAGES, ROOT, blocks
from tools.answer_tables import PAGE, answers, declared, meanings, with_tables


def test_code_of_every_page_passes_mypy_as_is(tmp_path: Path) -> None:
    """The runnable blocks of a page are one module, each of its files is another."""
    for page in PAGES:
        name = re.sub(r"\W", "_", page.relative_to(ROOT).as_posix().removesuffix(".md"))
        shown = [block for block in blocks(page.read_text()) if block.language == "python"]
        together = "\n".join(block.code for block in shown if block.mark == "runnable")
        if together:
            (tmp_path / f"{name}.py").write_text(together)
        for block in shown:
            if block.mark.endswith(".py") and "/" not in block.mark:
                (tmp_path / f"{name}__{block.mark}").write_text(block.code)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "."]
    done = subprocess.run(
        [*command, "--cache-dir", str(ROOT / ".mypy_cache" / "pages")],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", answers())
def test_every_key_of_an_answer_is_described(name: str) -> None:
    kind = answers()[name]
    assert list(meanings(kind)) == list(declared(kind)) == list(kind.__annotations__)


def test_no_answer_is_left_out() -> None:
    names = {**vars(request), **vars(worker)}
    kinds = {name for name, kind in names.items() if is_typeddict(kind)}
    assert set(answers()) == kinds - {"ChatMessage"}


def test_reference_tables_match_the_types() -> None:
    text = PAGE.read_text()
    assert with_tables(text) == text, "python -m tools.answer_tables"
    assert text.count("| key | type | meaning |") == len(answers())
