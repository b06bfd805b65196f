"""`make mutants N= SEED=`: plants N small mistakes, one at a time, and counts who notices.

A mutant is tried against the unit tests that name its module, the fixed runs of the simulator, a
campaign of HOURS worker-hours and last the tests in real time that name its module; the first that
fails has killed it. Everything happens in a copy of the tree, in a process namespace of its own,
with limits of CPU and wall time. The sample is a function of the seed and the sources.

`tools/equivalent_mutants.toml` lists those that change nothing that could be seen, with reasons.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

from tools.mutations import Mutation, mutations

ROOT = Path(__file__).parents[1]
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.toml"
PACKAGE = "src/llama_worker/"
SIMULATED = ("actors/", *(f"{PACKAGE}{room}/" for room in ("server", "request", "stream")))
ROOMS = (*SIMULATED, f"{PACKAGE}runtime/")
UNIT, IN_REAL_TIME = "tests/unit/", ("tests/runtime/", "tests/actors/")
TESTS = (UNIT, *IN_REAL_TIME)
_OF_THE_WHOLE = ("tests/unit/test_packaging.py",)  # builds it: no module's own tests
FIXED_RUNS = ("tests/simulation", "-k", "not nobody_has_seen and not planted and not promise")
CPU_LIMIT_S, WALL_LIMIT_S = 120, 900
# everything in it ends with the thread that waits for it, however that ends
NAMESPACE = (
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--map-root-user",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)

_stamps = count(1)


class Stage(NamedTuple):
    """One way to notice a mutant: a command, which succeeds where it does not."""

    name: str
    command: tuple[str, ...]


def main() -> int:
    """0, whoever survives; 2: something fails without a mutant."""
    parser = argparse.ArgumentParser("python -m tools.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="of mutants")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--hours", type=float, default=300.0, help="worker-hours for each")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--simulator-only", action="store_true", help="in actors/ and server/")
    parser.add_argument("--no-real-time", action="store_true", help="leave those tests out")
    parser.add_argument("--under", action="append", default=[], help="a path to begin with; ROOMS")
    given = parser.parse_args()
    print(f"SEED={given.seed}", flush=True)
    in_simulator = ("actors/", f"{PACKAGE}server/")
    rooms = tuple(given.under) or (in_simulator if given.simulator_only else ROOMS)
    everything = [each for path in _listed() if path.startswith(rooms) for each in _of_file(path)]
    chosen = random.Random(given.seed).sample(everything, min(given.count, len(everything)))
    known = _equivalent()
    tried = [each for each in chosen if _key(each) not in known]
    print(
        f"{len(everything):,} mutants can be made; {len(chosen) - len(tried)} of the sample change nothing"
    )
    hunter = Hunter(
        given.hours,
        given.seed,
        simulator_only=given.simulator_only,
        real_time=not given.no_real_time,
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(given.jobs):
            copies.put(_copied(Path(folder) / str(number)))
        if not hunter.holds_without_mutants(tried, copies):
            return 2
        killed_by = dict[Mutation, str | None]()
        with ThreadPoolExecutor(given.jobs) as pool:
            for each, name in zip(
                tried, pool.map(lambda each: hunter.hunt(each, copies), tried), strict=True
            ):
                killed_by[each] = name
                what = f"{each.path} ({each.inside}): {each.before:.40} -> {each.after:.40}"
                print(f"{len(killed_by):4} {name or 'SURVIVED':18} {what}", flush=True)
    print(*_report(killed_by), sep="\n")
    return 0


class Hunter:
    """Tries mutants. Thread-safe."""

    def __init__(self, hours: float, seed: int, *, simulator_only: bool, real_time: bool) -> None:
        self._simulator_only, self._real_time = simulator_only, real_time
        campaign = ("-m", "tests.simulation", "--seed", str(seed), "--hours", str(hours))
        adversary = ("-m", "tests.adversary", "--seed", str(seed), "--count", "80")
        self._simulation = (
            Stage("fixed runs", _pytest(FIXED_RUNS)),
            Stage("adversary", (sys.executable, *adversary)),
            Stage("campaign", (sys.executable, *campaign, "--faults", str(hours))),
        )

    def stages(self, mutation: Mutation) -> Iterable[Stage]:
        """In the order of their cost."""
        nearest = _nearest_tests(mutation.path)
        unit = [path for path in nearest if path.startswith(UNIT)]
        slow = [path for path in nearest if path.startswith(IN_REAL_TIME)]
        if unit and not self._simulator_only:
            yield Stage("unit tests", _pytest(unit))
        if mutation.path.startswith(SIMULATED):
            yield from self._simulation
        if slow and self._real_time and not self._simulator_only:
            yield Stage("tests in real time", _pytest(slow))

    def holds_without_mutants(
        self, tried: Sequence[Mutation], copies: queue.SimpleQueue[Path]
    ) -> bool:
        copy = copies.get()
        stages = {stage for each in tried for stage in self.stages(each)} - {*self._simulation}
        tests = {path for stage in stages for path in stage.command if path.startswith(TESTS)}
        beside = [Stage("tests", _pytest(sorted(tests)))] if tests else []
        failed = [stage for stage in (*self._simulation, *beside) if not _holds(stage, copy)]
        copies.put(copy)
        for stage in failed:
            print(f"fails without a mutant: {' '.join(stage.command)}", flush=True)
        return not failed

    def hunt(self, mutation: Mutation, copies: queue.SimpleQueue[Path]) -> str | None:
        """What killed it; None: nothing did."""
        copy = copies.get()
        file = copy / mutation.path
        source = file.read_bytes()
        try:
            _write(file, mutation.applied(source))
            stages = self.stages(mutation)
            return next((stage.name for stage in stages if not _holds(stage, copy)), None)
        finally:
            _write(file, source)
            copies.put(copy)


def _pytest(what: Iterable[str]) -> tuple[str, ...]:
    flags = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist")
    return (sys.executable, "-m", "pytest", *flags, *what)


def _write(file: Path, source: bytes) -> None:
    """With a time of its own, so that no compiled file of the one before is taken for its own."""
    file.write_bytes(source)
    at = 1_000_000_000 + next(_stamps)
    os.utime(file, (at, at))


def _holds(stage: Stage, copy: Path) -> bool:
    limits = ("prlimit", f"--cpu={CPU_LIMIT_S}", f"--as={8 << 30}")
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}:{copy}"}
    process = subprocess.Popen(
        (*_namespace(), *limits, *stage.command),
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(WALL_LIMIT_S) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@cache
def _namespace() -> tuple[str, ...]:
    """A mutant may kill whom it likes: of the processes that it can see."""
    works = subprocess.run((*NAMESPACE, "true"), capture_output=True, check=False).returncode == 0
    if not works:
        raise SystemExit("error: mutants need process namespaces (unshare --map-root-user --pid)")
    return NAMESPACE


def _listed() -> list[str]:
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    return sorted(path for path in listed.stdout.splitlines() if os.path.lexists(ROOT / path))


def _of_file(path: str) -> list[Mutation]:
    return mutations(path, (ROOT / path).read_bytes()) if path.endswith(".py") else []


def _copied(copy: Path) -> Path:
    for path in _listed():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path, follow_symlinks=False)
    return copy


@cache
def _nearest_tests(path: str) -> tuple[str, ...]:
    """Those that import the module or bear its name; without any unit test among them, also the
    unit tests of the modules that import it."""
    nearest = _tests_of(path)
    if any(test.startswith(UNIT) for test in nearest):
        return nearest
    named = _names(path)
    sources = (each for each in _listed() if each.startswith(ROOMS) and each.endswith(".py"))
    importers = (each for each in sources if named.search((ROOT / each).read_text()))
    further = {test for each in importers for test in _tests_of(each) if test.startswith(UNIT)}
    return (*nearest, *sorted(further))


@cache
def _tests_of(path: str) -> tuple[str, ...]:
    named, place = _names(path), Path(path)
    own = f"/{place.parent.name}/test_{place.name}"
    tests = (each for each in _listed() if each.startswith(TESTS) and "/test_" in each)
    return tuple(
        each
        for each in tests
        if each not in _OF_THE_WHOLE
        if each.endswith(own) or named.search((ROOT / each).read_text())
    )


def _names(path: str) -> re.Pattern[str]:
    """What an import of the module reads like."""
    stem = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__")
    module = stem if stem.startswith("llama_worker") else f"llama_worker/{stem}"
    return re.compile(rf"\b{re.escape(module.replace('/', '.'))}\b")


def _key(mutation: Mutation) -> tuple[str, ...]:
    return mutation.path, mutation.inside, mutation.before, mutation.after


def _equivalent() -> set[tuple[str, ...]]:
    listed = tomllib.loads(EQUIVALENT.read_text())["equivalent"]
    return {(each["path"], each["inside"], each["before"], each["after"]) for each in listed}


def _report(killed_by: dict[Mutation, str | None]) -> Iterable[str]:
    """The survivors, then the figures."""
    for mutation, name in killed_by.items():
        if name is None:
            yield "\n" + mutation.diff((ROOT / mutation.path).read_bytes())
    rooms = {
        each: next(room for room in (*ROOMS, "") if each.path.startswith(room))
        for each in killed_by
    }
    yield f"{'':30}{'tried':>8}{'killed':>8}{'%':>8}"
    for room in (*sorted(set(rooms.values())), "all"):
        names = [name for each, name in killed_by.items() if room in ("all", rooms[each])]
        killed = sum(name is not None for name in names)
        yield f"{room:30}{len(names):8}{killed:8}{100 * killed / max(1, len(names)):8.1f}"
    for name, number in Counter(filter(None, killed_by.values())).most_common():
        yield f"by {name:27}{number:16}"


if __name__ == "__main__":
    sys.exit(main())
