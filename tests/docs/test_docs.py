"""What the documentation shows runs as it stands, and the site of it is whole.

The runnable blocks of one page are one program, in their order, in a fresh Python. What a reader
has to put in is put in: any model is the small real one, `llama-server` is on the PATH, and the
ports 8000 to 8099 are free ones.
"""

import ast
import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from llama_worker import ConfigError, TimeoutProfile, load_config
from llama_worker.runtime.process.guard import ORPHAN_GRACE_S
from tests.conftest import running
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, files, runnable, with_ports
from tests.server.pace import lean_server, patience


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.server
@pytest.mark.parametrize(
    "page", [page for page in PAGES if runnable(page.read_text(), "python")], ids=page_id
)
def test_the_code_of_a_page_runs(
    page: Path, thin_model: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
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
def test_what_a_page_shows_and_links_to_exists(page: Path) -> None:
    text = page.read_text()
    for block in blocks(text):
        assert block.mark or block.language != "python", (
            "write `python runnable`, `python FILE`, or `text`"
        )
        if "/" in block.mark:  # it is taken from a file of the repository
            assert block.code.strip() in (ROOT / block.mark).read_text(), block.mark
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_and_folders_that_a_page_names_exist(page: Path) -> None:
    rooms = [ROOT, ROOT / "src" / "llama_worker", ROOT / "tests", page.parent]
    folders = "actors|benchmarks|docs|examples|src|tests|tools"
    path = rf"(?<![\w./-])(?:[a-z_]+(?:/\w+)+\.py\b|(?:{folders})/[\w./-]*\w)"
    named = re.findall(path, page.read_text())
    assert [name for name in named if not any((room / name).exists() for room in rooms)] == []


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=page_id)
def test_an_examples_commands_can_be_copied(example: Path) -> None:
    text = (ast.get_docstring(ast.parse(example.read_text())) or "").replace("\\\n", "")
    starts = r"(?:LLAMA_SERVER=\S+ )?python examples/|curl "
    commands = re.findall(rf"^ *(?:{starts}).*", text, flags=re.MULTILINE)
    assert f"examples/{example.name}" in commands[0], "it says how it is started"
    assert len(commands) == len(re.findall(starts, text)), "each stands on a line of its own"
    for command in commands:
        shlex.split(command)  # raises ValueError where a quotation is cut off


def test_errors_on_fleet_page_are_those_really_raised(tmp_path: Path) -> None:
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


# ---------------------------------------------------------------- how-to/systemd.md

SERVICE = files((DOCS / "how-to" / "systemd.md").read_text())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "llama-host.service"
    there = SERVICE[unit.name].replace("/srv/llama/.venv/bin/python", sys.executable)
    unit.write_text(there.replace("/srv/llama", str(tmp_path)))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=patience()
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_unit_times_leave_room_for_stop_and_guards() -> None:
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(SERVICE["llama-host.service"])
    service = unit["Service"]
    assert (service["KillMode"], service["OOMPolicy"], service["Restart"]) == (
        "mixed",
        "continue",
        "on-failure",
    )
    assert int(service["TimeoutStopSec"]) > TimeoutProfile().stop_grace_s + 2
    # all is gone within 5 s of the host's death
    assert int(service["RestartSec"]) > ORPHAN_GRACE_S + 3


@pytest.mark.server
def test_the_program_ends_with_its_servers_at_sigterm(
    thin_model: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "host.py").write_text(SERVICE["host.py"])
    (tmp_path / "fleet.toml").write_text(
        f'[defaults]\nhost = "127.0.0.1"\nmodel = "{thin_model}"\nexecutable = '
        f'"{lean_server(tmp_path)}"\n'
        f"[workers.one]\nport = {free_port()}\n[workers.two]\nport = {free_port()}\n"
    )
    with running(sys.executable, "host.py", "fleet.toml", cwd=tmp_path) as (program, output):
        assert [output.readline() for _ in range(2)] == ["one is ready\n", "two is ready\n"]
        tree = psutil.Process(program.pid).children(recursive=True)
        assert len(tree) >= 4  # a guard and a server each
        program.send_signal(signal.SIGTERM)
        _, errors = program.communicate(timeout=patience())
    assert (program.returncode, errors) == (0, "")
    assert not [process for process in tree if process.is_running()]


# -------------------------------------------- the site is whole, and fetches nothing from elsewhere


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link, an anchor or a name that leads nowhere fails."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_reference_has_what_the_docstrings_say(site: Path) -> None:
    reference = (site / "reference" / "index.html").read_text()
    assert 'id="llama_worker.LlamaWorker.submit"' in reference
    assert "Admit a request to a free slot, or refuse it, at once." in reference
    assert 'id="llama_worker.LlamaWorker.__enter__"' in reference  # which is inherited
    assert 'id="llama_worker.RequestStatus.prompt_progress"' in reference


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    fetches = re.compile(
        r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>|@import[^;]*https?:"
    )
    for page in site.rglob("*.html"):
        assert fetches.findall(page.read_text()) == [], page


def test_outbound_documentation_links_lead_to_copies_in_site(site: Path) -> None:
    page = (site / "how-to" / "web-server" / "index.html").read_text()
    (link,) = set(re.findall(r'href="([^"]*threaded_web_server.py)"', page))
    copied = (site / "how-to" / "web-server" / link).resolve()
    assert copied.read_text() == (ROOT / "examples" / "threaded_web_server.py").read_text()


def test_code_blocks_show_the_file_they_belong_to(site: Path) -> None:
    page = (site / "how-to" / "systemd" / "index.html").read_text()
    assert '<span class="filename">llama-host.service</span>' in page
    assert "```" not in page
