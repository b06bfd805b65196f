"""`make mutants N= SEED=`: plants N small mistakes, one at a time, and counts who notices.

A mutant is tried against the unit tests that are nearest to its module, then the simulator (fixed
runs, an adversary, a campaign of HOURS worker-hours), the nearest tests in real time, and last the
tests of the modules that import it and all others of its room; the first that fails has killed it.
Nearest is what bears the module's name, first at its place in the tree, then what imports it. A
test in real time has to pass without the mutant, run again by itself, or its failure does not
count.

Everything is read from a copy of the tree, made at the start, and happens in further ones, in a
process namespace of its own, with limits of CPU and wall time; who exceeds one is killed as "timed
out". The sample is a function of the seed and the sources.

`tools/equivalent_mutants.toml` lists those that change nothing that could be seen, with reasons.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from tools.mutations import Mutation, mutations

ROOT: Final = Path(__file__).parents[1]
EQUIVALENT: Final = "tools/equivalent_mutants.toml"
PACKAGE: Final = "src/llama_worker/"
SIMULATED: Final = ("actors/", *(f"{PACKAGE}{room}/" for room in ("server", "request", "stream")))
RUNTIME: Final = f"{PACKAGE}runtime/"
ROOMS: Final = (*SIMULATED, RUNTIME)
UNIT, IN_REAL_TIME = "tests/unit/", ("tests/runtime/", "tests/actors/")
FIXED_RUNS = ("tests/simulation", "-k", "not nobody_has_seen and not planted and not promise")
TIMED_OUT = "timed out"
WITHIN_H = re.compile(r"^within ([\d.]+) worker-hours$", re.MULTILINE)  # as a campaign says
TEST_LIMIT_S = 60  # one test, and the tidying behind it
STAGE_LIMIT_S = 120.0  # beside what it takes without a mutant, several times
# Everything in it ends with the thread that waits for it, however that ends. The shell reaps what
# a test leaves to the namespace's first process, as init does.
NAMESPACE = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", '"$@"; exit $?', "sh"),
)

_stamps = count(1)


class Ended(NamedTuple):
    """A command's end."""

    returncode: int
    timed_out: bool
    output: str
    seconds: float


class Stage(NamedTuple):
    """One way to notice a mutant: a command, which succeeds where it does not."""

    name: str
    command: tuple[str, ...]
    in_real_time: bool = False

    def may_be_noise(self, ended: Ended) -> bool:
        """Whether a test failed, which on a busy machine may have reasons of its own."""
        return self.in_real_time and ended.returncode == 1


class Tree:
    """A copy of the sources and tests."""

    def __init__(self, origin: Path, folder: Path) -> None:
        self.folder = folder
        self.paths = sorted(path for path in _listed(origin) if os.path.lexists(origin / path))
        for path in self.paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin / path, folder / path, follow_symlinks=False)
        texts = {path: (folder / path).read_text() for path in self.paths if path.endswith(".py")}
        self._modules = {path: text for path, text in texts.items() if path.startswith(ROOMS)}
        self._tests = {
            path: text
            for path, text in texts.items()
            if path.startswith((UNIT, *IN_REAL_TIME)) and "/test_" in path
        }

    def copied(self, folder: Path) -> Path:
        """Another one, to plant mutants in."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return folder

    def read(self, path: str) -> bytes:
        """The source without a mutant."""
        return (self.folder / path).read_bytes()

    def mutations(self, under: tuple[str, ...]) -> list[Mutation]:
        """All that can be made there."""
        modules = (path for path in self._modules if path.startswith(under))
        return [each for path in modules for each in mutations(path, self.read(path))]

    def nearest_tests(self, path: str) -> list[str]:
        """The module's own, then those that import it; without any, those of its importers."""
        own = _mirrors(self._tests, path)
        importing = [*_importers(self._tests, path)]
        if own or importing:
            return [*dict.fromkeys((*own, *importing))]
        modules = _importers(self._modules, path)
        return [*dict.fromkeys(test for each in modules for test in _mirrors(self._tests, each))]

    def further_tests(self, path: str) -> list[str]:
        """Those of the modules that import it, then all at its place in the tree; what runs real
        servers and threads, if it does, too. Those that share words with its name come first."""
        of_importers = [
            test for each in _importers(self._modules, path) for test in _mirrors(self._tests, each)
        ]
        room = next(room for room in ROOMS if path.startswith(room)).rstrip("/").rpartition("/")[2]
        runs_for_real = IN_REAL_TIME if path.startswith((RUNTIME, "actors/")) else ()
        tests = [
            each for each in self._tests if each.startswith((f"{UNIT}{room}/", *runs_for_real))
        ]
        tests.sort(key=lambda each: -_words_in_common(each, path))
        return [*dict.fromkeys((*of_importers, *tests))]


def _listed(origin: Path) -> list[str]:
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=origin, capture_output=True, check=True, text=True)
    return listed.stdout.splitlines()


def _mirrors(tests: Iterable[str], path: str) -> list[str]:
    """Those that bear the module's name, first in a folder that bears that of one of its
    folders."""
    module = Path(path)
    named = (each for each in tests if Path(each).name == f"test_{module.name}")
    return sorted(named, key=lambda each: Path(each).parent.name not in module.parts)


def _words_in_common(test: str, path: str) -> int:
    words = set(re.split(r"[/_.]", path))
    return len(words & set(Path(test).stem.removeprefix("test_").split("_")))


def _importers(texts: dict[str, str], path: str) -> Iterator[str]:
    stem = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__")
    dotted = (stem if stem.startswith("llama_worker") else f"llama_worker/{stem}").replace("/", ".")
    package, _, name = dotted.rpartition(".")
    imported = re.compile(
        rf"\b{re.escape(dotted)}\b|^from {re.escape(package)} import .*\b{name}\b", re.MULTILINE
    )
    return (each for each, text in texts.items() if each != path and imported.search(text))


class Hunter:
    """Tries mutants. Thread-safe."""

    def __init__(
        self,
        tree: Tree,
        hours: float,
        seed: int,
        *,
        simulator_only: bool,
        campaign_only: bool = False,
    ) -> None:
        self.found_within_h: dict[Mutation, float] = {}  # those killed by the campaign
        self._tree, self._simulator_only = tree, simulator_only
        campaign = ("-m", "tests.simulation", "--seed", str(seed), "--hours", str(hours))
        adversary = ("-m", "tests.adversary", "--seed", str(seed), "--count", "300")
        self._simulation = (
            Stage("adversary", (sys.executable, *adversary)),
            Stage("fixed runs", _pytest(FIXED_RUNS)),
            Stage("campaign", (sys.executable, *campaign, "--faults", str(hours))),
        )[-1 if campaign_only else 0 :]
        self._limits_s: dict[str, float] = {}  # by the stage's name

    def stages(self, mutation: Mutation) -> Iterator[Stage]:
        """In the order of their cost."""
        path = mutation.path
        if self._simulator_only:
            yield from self._simulation
            return
        nearest = self._tree.nearest_tests(path)
        unit = [each for each in nearest if each.startswith(UNIT)]
        slow = [each for each in nearest if each.startswith(IN_REAL_TIME)]
        others = [each for each in self._tree.further_tests(path) if each not in nearest]
        if unit:
            yield Stage("unit tests", _pytest(unit))
        if path.startswith(SIMULATED):
            yield from self._simulation
        if slow:
            yield Stage("tests in real time", _pytest(slow), in_real_time=True)
        if others:
            yield Stage("further tests", _pytest(others), in_real_time=True)

    def holds_without_mutants(self, tried: Sequence[Mutation], copy: Path) -> bool:
        """Whether every stage does; it also measures how long they take."""
        stages = {stage for each in tried for stage in self.stages(each)}
        names = sorted({stage.name for stage in stages} - {each.name for each in self._simulation})
        tests = {
            name: {
                word
                for stage in stages
                if stage.name == name
                for word in stage.command
                if word.startswith("tests/")
            }
            for name in names
        }
        together = [Stage(name, _pytest(sorted(tests[name])), in_real_time=True) for name in names]
        used = [each for each in self._simulation if each in stages]
        holds = True
        for stage in (*used, *together):
            ended = _run(stage.command, copy, 3600.0)
            self._limits_s[stage.name] = STAGE_LIMIT_S + 5 * ended.seconds
            is_noise = stage.may_be_noise(ended) and _passes_now(stage, copy)
            if ended.returncode and not is_noise:
                print(f"fails without a mutant: {stage.name}\n{ended.output[-3000:]}", flush=True)
                holds = False
        return holds

    def hunt(self, mutation: Mutation, copies: queue.SimpleQueue[Path]) -> str | None:
        """What killed it; None: nothing did."""
        copy = copies.get()
        try:
            for stage in self.stages(mutation):
                for _ in range(3):
                    _write(copy / mutation.path, mutation.applied(self._tree.read(mutation.path)))
                    limit_s = self._limits_s.get(stage.name, STAGE_LIMIT_S)
                    ended = _run(stage.command, copy, limit_s)
                    _write(copy / mutation.path, self._tree.read(mutation.path))
                    if ended.returncode == 0:
                        break
                    if not stage.may_be_noise(ended) or _passes_now(stage, copy):
                        if found := WITHIN_H.search(ended.output):
                            self.found_within_h[mutation] = float(found[1])
                        return TIMED_OUT if ended.timed_out else stage.name
            return None
        finally:
            copies.put(copy)


def _pytest(what: Iterable[str]) -> tuple[str, ...]:
    flags = ("-q", "-x", "-p", "no:randomly", "-p", "no:xdist", "--timeout", str(TEST_LIMIT_S))
    return (sys.executable, "-m", "pytest", *flags, *what)


def _passes_now(stage: Stage, copy: Path) -> bool:
    """Whether the tests that failed pass by themselves, without a mutant."""
    again = ("--last-failed", "--last-failed-no-failures", "none")
    return _run((*stage.command, *again), copy, 3600.0).returncode == 0


def _write(file: Path, source: bytes) -> None:
    """With a time of its own, so that no compiled file of the one before is taken for its own."""
    file.write_bytes(source)
    at = 1_000_000_000 + next(_stamps)
    os.utime(file, (at, at))


def _run(command: Sequence[str], copy: Path, limit_s: float) -> Ended:
    limits = ("prlimit", f"--cpu={limit_s:.0f}", f"--as={8 << 30}")
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}:{copy}"}
    began = time.monotonic()
    try:
        ended = subprocess.run(
            (*_namespace(), *limits, *command),
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ended(-9, timed_out=True, output="", seconds=limit_s)
    output = ended.stdout.decode(errors="replace")
    # a shell's word for a signal: of the limit of CPU time, or of pytest's for a test
    timed_out = ended.returncode in (128 + 9, 128 + 24) or "Timeout (>" in output
    return Ended(ended.returncode, timed_out, output, time.monotonic() - began)


@cache
def _namespace() -> tuple[str, ...]:
    """A mutant may kill whom it likes: of the processes that it can see."""
    works = subprocess.run((*NAMESPACE, "true"), capture_output=True, check=False).returncode == 0
    if not works:
        raise SystemExit("error: mutants need process namespaces (unshare --map-root-user --pid)")
    return NAMESPACE


def _key(mutation: Mutation) -> tuple[str, ...]:
    return mutation.path, mutation.inside, mutation.before, mutation.after


def _equivalent(tree: Tree) -> set[tuple[str, ...]]:
    listed = tomllib.loads(tree.read(EQUIVALENT).decode())["equivalent"]
    return {(each["path"], each["inside"], each["before"], each["after"]) for each in listed}


def report(tree: Tree, killed_by: dict[Mutation, str | None]) -> Iterator[str]:
    """The survivors, then the figures."""
    for mutation, name in killed_by.items():
        if name is None:
            yield "\n" + mutation.diff(tree.read(mutation.path))
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


def main() -> int:
    """0, whoever survives; 2: something fails without a mutant."""
    parser = argparse.ArgumentParser("python -m tools.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="of mutants")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--hours", type=float, default=300.0, help="worker-hours for each")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--simulator-only", action="store_true", help="in actors/ and server/")
    parser.add_argument(
        "--campaign-only",
        action="store_true",
        help="and how many worker-hours of a campaign by itself find half of the mutants",
    )
    parser.add_argument("--under", action="append", default=[], help="a path to begin with; ROOMS")
    given = parser.parse_args()
    print(f"SEED={given.seed}", flush=True)
    in_simulator = ("actors/", f"{PACKAGE}server/")
    simulator_only = given.simulator_only or given.campaign_only
    rooms = tuple(given.under) or (in_simulator if simulator_only else ROOMS)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(ROOT, Path(folder) / "tree")
        everything = tree.mutations(rooms)
        chosen = random.Random(given.seed).sample(everything, min(given.count, len(everything)))
        known = _equivalent(tree)
        tried = [each for each in chosen if _key(each) not in known]
        unseen = len(chosen) - len(tried)
        print(f"{len(everything):,} mutants can be made; {unseen} of the sample change nothing")
        hunter = Hunter(
            tree,
            given.hours,
            given.seed,
            simulator_only=simulator_only,
            campaign_only=given.campaign_only,
        )
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(given.jobs):
            copies.put(copy := tree.copied(Path(folder) / str(number)))
        if not hunter.holds_without_mutants(tried, copy):
            return 2
        began = time.monotonic()
        killed_by = dict[Mutation, str | None]()
        with ThreadPoolExecutor(given.jobs) as pool:
            names = pool.map(lambda each: hunter.hunt(each, copies), tried)
            for each, name in zip(tried, names, strict=True):
                killed_by[each] = name
                what = f"{each.path} ({each.inside}): {each.before:.40} -> {each.after:.40}"
                print(f"{len(killed_by):4} {name or 'SURVIVED':18} {what}", flush=True)
        print(*report(tree, killed_by), sep="\n")
        if given.campaign_only:
            found_h = sorted(hunter.found_within_h.get(each, math.inf) for each in tried)
            print(f"half of them within {statistics.median(found_h):.1f} worker-hours")
        mean_s = (time.monotonic() - began) / max(1, len(tried))
        print(f"{mean_s:.1f} s for a mutant, on average")
    return 0


if __name__ == "__main__":
    sys.exit(main())
