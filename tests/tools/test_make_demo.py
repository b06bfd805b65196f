"""`make demo` in a copy of the tree, as a newcomer meets it: servers that work, that do not, and
none."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.conftest import shell_program
from tests.server.pace import HANG_GUARD_S, lean_server

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone in which llama_worker is installed already: that takes a network."""
    clone = tmp_path / "clone"
    for name in ("tools", "examples", "Makefile", "pyproject.toml", "setup.cfg"):
        source = ROOT / name
        shutil.copytree(source, clone / name) if source.is_dir() else shutil.copy2(
            source, clone / name
        )
    venv.create(clone / ".venv", symlinks=True)
    (site,) = (clone / ".venv" / "lib").glob("python*/site-packages")
    (site / "ours.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    (clone / ".venv" / ".package").touch()
    return clone


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A folder for the PATH: no llama-server, no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "make", "touch", "rm", "grep", "sleep"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def make(clone: Path, path: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`make demo`, with nothing of the tester's own."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("LLAMA_", "MAKE", "PYTHON"))
    }
    environment = {**kept, "PATH": str(path), "XDG_CACHE_HOME": str(clone / "cache"), **env}
    done = subprocess.run(
        ["make", "demo", *words],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """What a newcomer is told."""
    assert done.returncode != 0
    # the command's own status; that of make is 2 for any error
    assert "Error 1" in done.stderr.splitlines()[-1]
    assert done.stderr.count("error: ") == 1
    return done.stderr


def test_a_server_that_works(clone: Path, bare_path: Path, thin_model: str, tmp_path: Path) -> None:
    (bare_path / "llama-server").symlink_to(lean_server(tmp_path))
    done = make(clone, bare_path, LLAMA_MODEL=thin_model)
    assert (done.returncode, done.stderr) == (0, "")
    told = r"\(on the PATH\).*checking that it answers: done.*  sky \| .*stopped\.\n"
    assert re.search(told + r"\Z", done.stdout, flags=re.DOTALL)
    assert not (clone / "cache").exists()  # nothing was built


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (
            {},
            (
                "no llama-server, and no C.. compiler.*to do: install a compiler .*: apt install "
                "g.*LLAMA_SERVER"
            ),
        ),
        ({"LLAMA_SERVER": "/no/such/server"}, "LLAMA_SERVER: /no/such/server does not exist"),
        ({"LLAMA_SERVER": "LEAN", "LLAMA_MODEL": __file__}, "the file is not a GGUF model"),
        (
            {"LLAMA_SERVER": "ILL"},
            r"\(signal 4\).*instructions that the CPU.*--no-repack.*a portable build",
        ),
    ],
    ids=[
        "no server and no compiler",
        "a server that is not there",
        "a model that is none",
        "an unknown instruction",
    ],
)
def test_what_cannot_work(
    clone: Path, bare_path: Path, thin_model: str, tmp_path: Path, env: dict[str, str], told: str
) -> None:
    known = {
        "ILL": shell_program(tmp_path / "ill", "kill -ILL $$"),
        "LEAN": str(lean_server(tmp_path)),
    }
    given = {
        name: known.get(value, value) for name, value in {"LLAMA_MODEL": thin_model, **env}.items()
    }
    assert re.search(told, refusal(make(clone, bare_path, **given)), flags=re.DOTALL)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (None, "Python 3.11 or later is needed"),
        ("exit 1", "Python 3.11 or later is needed"),  # what an older one does when it is asked
        (f'[ "$1" = -c ] && exec {sys.executable} "$@"; exit 1', "Python's venv is needed"),
    ],
)
def test_a_python_that_will_not_do(
    clone: Path, bare_path: Path, tmp_path: Path, script: str | None, told: str
) -> None:
    python = shell_program(tmp_path / "python3.9", script) if script else "python3.9"
    assert told in refusal(make(clone, bare_path, f"PYTHON={python}"))
    assert not (clone / ".venv-python3.9").exists()


def test_no_index(clone: Path, bare_path: Path, tmp_path: Path) -> None:
    (clone / ".venv" / ".package").unlink()
    # faster than a real one
    copies = f'[ "$2" = venv ] && exec /bin/cp -r .venv "$3"; exec {sys.executable} "$@"'
    done = make(
        clone,
        bare_path,
        f"PYTHON={shell_program(tmp_path / 'python3.9', copies)}",
        PIP_NO_INDEX="1",
    )
    assert done.returncode != 0
    # after what pip says itself
    assert "pip could not install what is needed: check the network" in done.stderr
