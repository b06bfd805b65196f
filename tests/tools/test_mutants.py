"""`make mutants` on a small tree: which tests it asks, what counts as a kill."""

import dataclasses
import queue
import subprocess
from pathlib import Path

import pytest

from tools import forked, mutants
from tools.mutants import Hunter, Tree, report
from tools.mutations import Mutation

MODULE = "src/llama_worker/runtime/host/clock.py"
ITS_TEST = "tests/runtime/test_clock.py"
FILES = {
    MODULE: (
        "def is_late(now, limit):\n    while now < 0:\n        now += 1\n    return now > limit\n"
    ),
    "src/llama_worker/runtime/host/threads.py": "def due():\n    return 0\n",
    ITS_TEST: (
        "from llama_worker.runtime.host.clock import is_late\n"
        "def test_it():\n    assert is_late(2, 1) and is_late(-2, -3) and not is_late(0, 1)\n"
    ),
    "tests/simulation/__main__.py": "",
    "tests/adversary/__main__.py": "",
    "tools/equivalent_mutants.toml": "",
    "tools/forked.py": Path(forked.__file__).read_text(),
}
AT_THE_LIMIT, NEVER = ("now > limit", "(now >= limit)"), ("now > limit", "(now <= limit)")
FOR_EVER = ("1", "0 * 1")
A_UNIT_TEST = {
    "tests/unit/runtime/test_clock.py": (
        "import pytest\n"
        "from llama_worker.runtime.host.clock import is_late\n"
        "@pytest.mark.parametrize('now', [0, -1])\n"
        "def test_it(now): assert not is_late(now, 1)\n"
    )
}


def repository(folder: Path, test: str = FILES[ITS_TEST], **more: str) -> Path:
    """The small tree, perhaps with another test, and more files."""
    for path, text in (FILES | {ITS_TEST: test} | more).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    subprocess.run(("git", "init", "--quiet"), cwd=folder, check=True)
    return folder


def mutant(before: str, after: str) -> Mutation:
    begin = FILES[MODULE].index(before)
    return Mutation(MODULE, "is_late", before, after, begin, begin + len(before))


def hunter(tree: Tree, by: str = "all") -> Hunter:
    return Hunter(tree, 1.0, 1, mutants.STAGES[by])


def killer(origin: Path, folder: Path, *texts: str) -> str | None:
    """Who kills the mutant."""
    tree = Tree(origin, folder / "tree")
    hunts = hunter(tree)
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    copies.put(copy := tree.copied(folder / "copy"))
    assert hunts.measure(copy)
    name = hunts.hunt(mutant(*texts), copies)
    assert (copy / MODULE).read_bytes() == tree.read(MODULE)
    return name


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(AT_THE_LIMIT, None), (NEVER, "tests in real time"), (FOR_EVER, mutants.TIMED_OUT)],
)
def test_who_kills_a_mutant(
    texts: tuple[str, str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "TEST_LIMIT_S", 5)
    assert killer(repository(tmp_path / "origin"), tmp_path, *texts) == expected


def test_a_failure_without_the_mutant_counts_for_nothing(tmp_path: Path) -> None:
    fails_the_second_time = (
        "from pathlib import Path\n"
        "from llama_worker.runtime.host.clock import is_late\n"
        "def test_it(seen=Path('seen')):\n"
        "    is_late(2, 1)\n"
        "    runs = len(seen.read_text()) if seen.exists() else 0\n"
        "    seen.write_text('x' * (runs + 1))\n"
        "    assert runs not in (1, 2)\n"
    )
    origin = repository(tmp_path / "origin", test=fails_the_second_time)
    assert killer(origin, tmp_path, *NEVER) is None


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(NEVER, "unit tests"), (FOR_EVER, mutants.TIMED_OUT), (AT_THE_LIMIT, None)],
)
def test_who_is_killed_in_a_fork(
    texts: tuple[str, str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "LIMIT_IN_FORKS_S", 5)
    tree = Tree(repository(tmp_path / "origin", **A_UNIT_TEST), tmp_path / "tree")
    hunts = hunter(tree)
    copy = tree.copied(tmp_path / "copy")
    assert hunts.measure(copy)
    of_the_module = mutant("now, limit", "now, limit=0")
    tried = [mutant(*texts), of_the_module, mutant(*NEVER)]
    found = {mutant(*texts): expected, mutant(*NEVER): "unit tests"}
    assert hunts.hunt_in_forks(tried, copy) == {
        each: name for each, name in found.items() if name is not None
    }


def test_what_fails_in_a_fork_without_a_mutant_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails_in_a_fork = (
        "import os\n"
        "from llama_worker.runtime.host.clock import is_late\n"
        "pid = os.getpid()\n"
        "def test_it(): assert is_late(2, 1) and os.getpid() == pid\n"
    )
    more = {"tests/unit/runtime/test_clock.py": fails_in_a_fork}
    tree = Tree(repository(tmp_path / "origin", **more), tmp_path / "tree")
    assert not hunter(tree, by="unit").measure(tree.folder)
    assert "unit tests in a fork: ['killed']" in capsys.readouterr().out


def test_campaign_itself_says_how_long_it_took(tmp_path: Path) -> None:
    says = "print('within 2.5 worker-hours')\nraise SystemExit(1)\n"
    simulated = dataclasses.replace(mutant(*NEVER), path="src/llama_worker/server/clock.py")
    more = {"tests/simulation/__main__.py": says, simulated.path: FILES[MODULE]}
    tree = Tree(repository(tmp_path / "origin", **more), tmp_path / "tree")
    hunts = hunter(tree, by="campaign")
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    copies.put(tree.copied(tmp_path / "copy"))
    assert hunts.hunt(simulated, copies) == "campaign"
    assert hunts.found_within_h == {simulated: 2.5}


def test_what_a_test_orphans_is_reaped(tmp_path: Path) -> None:
    orphans = (
        "import os, subprocess, time\n"
        "from llama_worker.runtime.host.clock import is_late\n"
        "def test_it():\n"
        "    is_late(2, 1)\n"
        "    command = ('sh', '-c', 'true & echo $!')\n"
        "    orphan = int(subprocess.run(command, capture_output=True).stdout)\n"
        "    while os.path.exists(f'/proc/{orphan}'): time.sleep(0.01)\n"
    )
    assert killer(repository(tmp_path / "origin", test=orphans), tmp_path, *NEVER) is None


def test_what_fails_without_a_mutant_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = Tree(repository(tmp_path / "origin", test="def test_it(): assert 0"), tmp_path / "tree")
    assert not hunter(tree).measure(tree.folder)
    assert "def test_it(): assert 0" in capsys.readouterr().out


def test_only_tests_that_execute_the_line_are_asked(tmp_path: Path) -> None:
    more = {
        "tests/runtime/test_threads.py": (
            "from llama_worker.runtime.host.threads import due\ndef test_it(): assert due() == 0\n"
        ),
        "tests/unit/test_first.py": (
            "import pytest\n"
            "from llama_worker.runtime.host.clock import is_late\n"
            "@pytest.mark.parametrize('now', [0, -1])\n"
            "def test_it(now): assert not is_late(now, 1)\n"
        ),
        "tests/unit/runtime/test_clock.py": (
            "from llama_worker.runtime.host.clock import is_late\n"
            "def test_it(): assert not is_late(0, 1)\n"
        ),
    }
    tree = Tree(repository(tmp_path / "origin", **more), tmp_path / "tree")
    hunts = hunter(tree)
    assert hunts.measure(tree.folder)

    def asked(mutation: Mutation) -> dict[str, tuple[str, ...]]:
        return {stage.name: stage.tests for stage in hunts.stages(mutation)}

    nearest, its_own = "tests/unit/runtime/test_clock.py::test_it", f"{ITS_TEST}::test_it"
    others = [f"tests/unit/test_first.py::test_it[{now}]" for now in (-1, 0)]
    assert asked(mutant(*NEVER)) == {
        "unit tests": (nearest, *others),
        "tests in real time": (its_own,),
    }
    assert asked(mutant("now += 1", "pass")) == {
        "unit tests": (nearest, others[0]),  # its own may run it in another process
        "tests in real time": (its_own,),
    }
    constant = dataclasses.replace(mutant(*NEVER), inside="")
    assert asked(constant) == {
        "unit tests": (nearest, *others),
        "tests in real time": (its_own, "tests/runtime/test_threads.py::test_it"),
    }


def test_tree_edited_meanwhile_changes_no_diff(tmp_path: Path) -> None:
    origin = repository(tmp_path / "origin")
    tree = Tree(origin, tmp_path / "tree")
    (origin / MODULE).write_text("# another\n" + FILES[MODULE])
    shown = "\n".join(report(tree, {mutant(*AT_THE_LIMIT): None}))
    assert "-    return now > limit\n+    return (now >= limit)\n" in shown
    assert "# another" not in shown
