"""What the documentation shows runs as it stands.

A block marked "python runnable" is run; those of one page are one program, in their order, in a fresh Python. A block
marked with a file name ("toml fleet.toml") is that file, beside the program. What a reader has to put in is put in: any
model is the small real one, `llama-server` is on the PATH, and the ports 8000 to 8099 are free ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama_worker import ConfigError, load_config
from tests.server.conftest import SERVER_ARGS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+) +([\w.-]+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_SKIPPED = re.compile(r"^```python$", flags=re.MULTILINE)


def program(text: str) -> str:
    """The page's runnable blocks."""
    return "\n".join(code for _, mark, code in _BLOCK.findall(text) if mark == "runnable")


def files(text: str) -> Iterator[tuple[str, str]]:
    """The page's files, by name."""
    for _, mark, content in _BLOCK.findall(text):
        if mark != "runnable":
            yield mark, content


def filled_in(text: str, model: str, free_port: Callable[[], int]) -> str:
    """With a model and ports that are there."""
    text = re.sub(r'"[\w./~-]+\.gguf"', f'"{model}"', text)
    for port in sorted(set(re.findall(r"\b80\d\d\b", text))):
        text = re.sub(rf"\b{port}\b", str(free_port()), text)
    return text


@pytest.mark.server
@pytest.mark.parametrize("page", [page for page in PAGES if program(page.read_text())], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(
    page: Path, llama_server: str, smollm2: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    text = filled_in(page.read_text(), smollm2, free_port)
    for name, content in files(text):
        (tmp_path / name).write_text(content)
    server = tmp_path / "llama-server"
    server.write_text(f'#!/bin/sh\nexec "{llama_server}" "$@" {" ".join(SERVER_ARGS)}\n')
    server.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", program(text)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_is_marked_as_runnable(page: Path) -> None:
    assert not _SKIPPED.findall(page.read_text()), "write ```python runnable, or ```text for what is no program"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_errors_that_the_fleet_page_shows_are_those_that_are_raised(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "fleet.md").read_text()
    ((name, content),) = files(page)
    changes = [("slots = 1\n", "slot = 1\n"), ("slots = 2\n", 'slots = "2"\n'), ("8082", "8081")]
    (shown,) = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)
    raised = []
    for old, new in changes:
        (tmp_path / name).write_text(content.replace(old, new))
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name)
        raised.append(str(caught.value).removeprefix(f"{tmp_path}/"))
    assert shown.splitlines() == raised
