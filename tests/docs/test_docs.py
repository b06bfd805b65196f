"""What the documentation shows runs as it stands.

The runnable blocks of one page are one program, in their order, in a fresh Python. What a reader has to put in is put
in: any model is the small real one, `llama-server` is on the PATH, and the ports 8000 to 8099 are free ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_worker import ConfigError, load_config
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, files, runnable, with_ports
from tests.server.pace import lean_server, patience


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.server
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page.read_text(), "python")], ids=page_id)
def test_the_code_of_a_page_runs(page: Path, thin_model: str, free_port: Callable[[], int], tmp_path: Path) -> None:
    text = re.sub(r'"[\w./~-]+\.gguf"', f'"{thin_model}"', with_ports(page.read_text(), free_port))
    for name, content in files(text).items():
        (tmp_path / name).write_text(content)
    server = lean_server(tmp_path, "--temp", "0")
    done = subprocess.run(
        [sys.executable, "-c", runnable(text, "python")],
        cwd=tmp_path,
        env={**os.environ, "LLAMA_SERVER": str(server), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=patience(),
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1, "more than the end of an empty line"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_what_a_page_shows_and_links_to_is_there(page: Path) -> None:
    text = page.read_text()
    for block in blocks(text):
        assert block.mark or block.language != "python", "write `python runnable`, `python FILE`, or `text`"
        if "/" in block.mark:  # it is taken from a file of the repository
            assert block.code.strip() in (ROOT / block.mark).read_text(), block.mark
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_errors_that_the_fleet_page_shows_are_those_that_are_raised(tmp_path: Path) -> None:
    page = (DOCS / "fleet.md").read_text()
    ((name, content),) = files(page).items()
    changes = [("slots = 1\n", "slot = 1\n"), ("slots = 2\n", 'slots = "2"\n'), ("8082", "8081")]
    (shown,) = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)
    raised = []
    for old, new in changes:
        (tmp_path / name).write_text(content.replace(old, new))
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name)
        raised.append(str(caught.value).removeprefix(f"{tmp_path}/"))
    assert shown.splitlines() == raised
