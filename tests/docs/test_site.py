"""The site is whole, and fetches nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link, an anchor or a name that leads nowhere fails."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_reference_has_what_the_docstrings_say(site: Path) -> None:
    reference = (site / "reference" / "index.html").read_text()
    assert 'id="llama_worker.LlamaWorker.submit"' in reference
    assert "Admit a request to a free slot, or refuse it, at once." in reference
    assert 'id="llama_worker.LlamaWorker.__enter__"' in reference  # which is inherited
    assert 'id="llama_worker.RequestStatus.prompt_progress"' in reference


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    fetches = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>|@import[^;]*https?:")
    for page in site.rglob("*.html"):
        assert fetches.findall(page.read_text()) == [], page


def test_links_out_of_the_documentation_lead_to_copies_in_the_site(site: Path) -> None:
    page = (site / "how-to" / "web-server" / "index.html").read_text()
    (link,) = set(re.findall(r'href="([^"]*threaded_web_server.py)"', page))
    copied = (site / "how-to" / "web-server" / link).resolve()
    assert copied.read_text() == (ROOT / "examples" / "threaded_web_server.py").read_text()


def test_code_blocks_show_the_file_that_they_are_of(site: Path) -> None:
    page = (site / "how-to" / "systemd" / "index.html").read_text()
    assert '<span class="filename">llama-host.service</span>' in page
    assert "```" not in page
