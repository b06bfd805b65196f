"""What docs/how-to/testing.md shows is a test that passes, with the plugin."""

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import DOCS, files
from tests.server.pace import patience


def test_the_tests_that_the_page_shows_pass(tmp_path: Path) -> None:
    for name, content in files((DOCS / "how-to" / "testing.md").read_text()).items():
        (tmp_path / name).write_text(content)
    pytest_of_a_host = [sys.executable, "-m", "pytest", "-q", "-p", "llama_worker.pytest_plugin"]
    done = subprocess.run(
        [*pytest_of_a_host, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
