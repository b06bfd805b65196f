"""The lists that are kept by hand agree with what is on disk, a wheel holds all of it, and extras
are named."""

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import llama_worker
from tests.conftest import run_python

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ROOT / "src" / "llama_worker"
HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name == {!r} else find(name, *where)
"""
COMMAND = "import sys; from llama_worker.cli import main; sys.argv[1:] = {}; sys.exit(main())"
# not rglob: it follows no links
SUBPACKAGES = {
    ".".join(path.relative_to(PACKAGE).parent.parts) for path in PACKAGE.glob("*/**/__init__.py")
}
MODULES = [*PACKAGE.rglob("*.py"), *(ROOT / "actors").glob("*.py")]


def test_the_actors_are_reached_by_a_relative_link() -> None:
    assert os.readlink(PACKAGE / "actors") == "../../actors"
    assert (PACKAGE / "actors").resolve() == ROOT / "actors"


def test_every_version_that_is_told_is_the_same() -> None:
    assert (
        PYPROJECT["project"]["version"]
        == llama_worker.__version__
        == importlib.metadata.version("llama-worker")
    )


def test_the_import_contract_covers_every_sans_io_room() -> None:
    sans_io, *_ = PYPROJECT["tool"]["importlinter"]["contracts"]
    waiting = {"actors", "cli", "config", "ray", "responses", "runtime", "testing", "types"}
    assert set(sans_io["source_modules"]) == {
        f"llama_worker.{name}" for name in SUBPACKAGES - waiting if "." not in name
    }


def test_a_star_import_gives_the_public_names() -> None:
    given: dict[str, object] = {}
    exec("from llama_worker import *", given)
    assert given["LlamaWorker"] is llama_worker.LlamaWorker
    assert set(given) - {"__builtins__"} <= set(dir(llama_worker))
    with pytest.raises(AttributeError, match="has no attribute 'LamaWorker'"):
        vars(llama_worker)["__getattr__"]("LamaWorker")


def test_every_class_has_a_name_of_its_own() -> None:
    counts = Counter(
        node.name
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert "LlamaWorker" in counts
    assert "WorkerActor" in counts
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_module_is_longer_than_400_lines() -> None:
    lengths = {str(module): len(module.read_text().splitlines()) for module in MODULES}
    assert {module: length for module, length in lengths.items() if length > 400} == {}


@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("llama_worker", {"pykka", "requests", "psutil", "sseclient", "asyncio"}),
        ("llama_worker.cli.app", {"pykka", "requests", "sseclient"}),
    ],
)
def test_what_is_not_needed_yet_is_not_imported(module: str, left_out: set[str]) -> None:
    program = (
        f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert "llama_worker" in imported
    assert not imported & left_out


@pytest.mark.parametrize(
    ("package", "extra", "program"),
    [
        ("typer", "cli", COMMAND.format(["doctor"])),
        ("rich", "cli", COMMAND.format(["doctor"])),
        ("prometheus_client", "metrics", "from llama_worker.metrics import WorkerCollector"),
        ("ray", "ray", "from llama_worker.ray import Fleet"),
    ],
)
def test_a_missing_extra_says_how_to_install_it(package: str, extra: str, program: str) -> None:
    done = run_python(HIDE.format(package) + program)
    assert done.returncode == 1
    assert f"{package} is missing" in done.stderr
    assert f"pip install 'llama-worker[{extra}]'" in done.stderr


def test_typer_supports_options_of_literals() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    allowed = [
        word for name in ("cli", "test") for word in extras[name] if word.startswith("typer")
    ]
    assert allowed == ["typer>=0.19"] * 2


# ---------------------------------------------------------------- wheels


def checkout(at: Path) -> Path:
    """What a build needs, copied: building leaves folders behind."""
    at.mkdir()
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, at)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "actors"):
        shutil.copytree(ROOT / name, at / name, symlinks=True, ignore=ignored)
    return at


PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def ran(*command: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **how)


def build(source: Path, wheels: Path) -> subprocess.CompletedProcess[str]:
    alone = ("--no-deps", "--no-build-isolation", "--no-index")
    return ran(*PIP, "wheel", *alone, "--wheel-dir", str(wheels), str(source), timeout=100)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = build(checkout(folder / "checkout"), folder)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_every_module_the_actors_too(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    folders = [PACKAGE, *(PACKAGE.joinpath(*name.split(".")) for name in SUBPACKAGES)]
    on_disk = {
        str(path.relative_to(PACKAGE.parent)) for folder in folders for path in folder.glob("*.py")
    }
    assert held == on_disk | {"llama_worker/py.typed"}
    assert "llama_worker/actors/worker.py" in held
    assert wheel.name.startswith(f"llama_worker-{llama_worker.__version__}-py3-none-any")


PLUGIN_TEST = """
def test_the_fixtures_are_there(scripted_server, scripted_worker):
    scripted_server.reply("4")
    assert scripted_worker.ask("What is 2 + 2?").get(timeout=60)["text"] == "4"
"""


def test_a_wheel_installs_into_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    python = str(tmp_path / "bin" / "python")
    subprocess.run([*PIP, "--python", python, "install", str(wheel), "pytest"], check=True)
    program = (
        "import llama_worker.actors.worker as actors; from llama_worker import *; "
        "print(actors.__file__)"
    )
    told = ran(python, "-I", "-c", program, cwd=tmp_path, check=True)
    (installed,) = tmp_path.glob("lib/python*/site-packages/llama_worker/actors/worker.py")
    assert told.stdout.strip() == str(installed)
    command = ran(str(tmp_path / "bin" / "llama-worker"))
    assert command.returncode == 1
    assert "llama-worker[cli]" in command.stderr, "without the extra it says how to get it"
    (tmp_path / "test_host.py").write_text(PLUGIN_TEST)
    done = ran(python, "-I", "-m", "pytest", "-q", "test_host.py", cwd=tmp_path)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout


def test_a_checkout_without_the_actors_builds_no_wheel(tmp_path: Path) -> None:
    source = checkout(tmp_path / "checkout")
    shutil.rmtree(source / "actors")
    done = build(source, tmp_path)
    assert done.returncode != 0
    assert "package directory 'actors' does not exist" in done.stderr + done.stdout
    assert not list(tmp_path.glob("*.whl"))
