"""`make mutants N= SEED=`: plants N small mistakes, one at a time, and counts who notices.

A mutant is tried against the unit tests that execute its line (coverage.py has seen them do so),
all mutants in forks first (`tools/forked.py`), the others once more from a fresh start; then the
simulator (a campaign of HOURS worker-hours, fixed runs, an adversary), then the tests in real time
that execute it; the first that fails has killed it. Those that share words with the module's name
come first. What is executed by an import, as constants are, is tried against all. A test in real
time has to pass without the mutant, run again by itself, or its failure does not count.

Everything is read from a copy of the tree, made at the start, and happens in further ones, in a
process namespace of its own, with limits of CPU and wall time; who exceeds one is killed as "timed
out". The sample is a function of the seed and the sources.

`tools/equivalent_mutants.toml` lists those that change nothing that could be seen, with reasons.
"""

from __future__ import annotations

import argparse
import json
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from tools.executed import Executed
from tools.forked import Plan
from tools.mutations import Mutation, mutations

ROOT: Final = Path(__file__).parents[1]
EQUIVALENT: Final = "tools/equivalent_mutants.toml"
PACKAGE: Final = "src/llama_worker/"
SIMULATED: Final = ("actors/", *(f"{PACKAGE}{room}/" for room in ("server", "request", "stream")))
RUNTIME: Final = f"{PACKAGE}runtime/"
ROOMS: Final = (*SIMULATED, RUNTIME)
UNIT, FIXED, IN_REAL_TIME = "unit tests", "fixed runs", "tests in real time"
CAMPAIGN, ADVERSARY = "campaign", "adversary"
STAGES: Final = {  # in the order of their cost
    "all": (UNIT, CAMPAIGN, FIXED, ADVERSARY, IN_REAL_TIME),
    "unit": (UNIT,),
    "simulator": (CAMPAIGN, FIXED, ADVERSARY),
    "campaign": (CAMPAIGN,),
}
TESTS: Final = {  # by the stage's name, as patterns
    UNIT: "tests/unit/",
    FIXED: "tests/simulation/",
    IN_REAL_TIME: "tests/(runtime|actors)/|tests/responses/test_(?!node_)",
}
NOT_FIXED = ("-k", "not nobody_has_seen and not planted and not promise")
ASKED = "asked.txt"  # the tests of a stage
PLANS, VERDICTS = "plans.jsonl", "verdicts.txt"
IN_FORKS = ("-p", "tools.forked", "--mutants-from", PLANS, "--mutants-to", VERDICTS)
LIMIT_IN_FORKS_S = 60.0  # all tests of a mutant
NOT_FOUND = 4  # says pytest, of a test or of what it needs
COVERED = (
    *("--cov=src", "--cov=actors", "--cov-append", "--cov-context=test", "--cov-report="),
    *("--maxfail=1000", "--timeout=600"),  # it takes several times as long
)
TIMED_OUT = "timed out"
WITHIN_H = re.compile(r"^within ([\d.]+) worker-hours$", re.MULTILINE)  # as a campaign says
TEST_LIMIT_S = 120  # one test, and the tidying behind it
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
    tests: tuple[str, ...] = ()  # of pytest
    in_real_time: bool = False

    def may_be_noise(self, ended: Ended) -> bool:
        """Whether a test failed, which on a busy machine may have reasons of its own."""
        return self.in_real_time and ended.returncode == 1

    def run(self, copy: Path, limit_s: float, *further: str) -> Ended:
        """There, with further flags."""
        if not self.tests:
            return _run((*self.command, *further), copy, limit_s)
        (copy / ASKED).write_text("\n".join(self.tests))
        ended = _run((*self.command, *further, f"@{ASKED}"), copy, limit_s)
        if ended.returncode != NOT_FOUND:
            return ended
        # a test's parameters may be read from what the mutant has changed
        files = dict.fromkeys(each.partition("::")[0] for each in self.tests)
        return _run((*self.command, *further, *files), copy, limit_s)


class Tree:
    """A copy of the sources and tests."""

    def __init__(self, origin: Path, folder: Path) -> None:
        self.folder = folder
        self.paths = sorted(path for path in _listed(origin) if os.path.lexists(origin / path))
        for path in self.paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin / path, folder / path, follow_symlinks=False)

    def copied(self, folder: Path) -> Path:
        """Another one, to plant mutants in."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return folder

    def read(self, path: str) -> bytes:
        """The source without a mutant."""
        return (self.folder / path).read_bytes()

    def mutations(self, under: tuple[str, ...]) -> list[Mutation]:
        """All that can be made there."""
        modules = (path for path in self.paths if path.endswith(".py") and path.startswith(under))
        return [each for path in modules for each in mutations(path, self.read(path))]


def _listed(origin: Path) -> list[str]:
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=origin, capture_output=True, check=True, text=True)
    return listed.stdout.splitlines()


class Hunter:
    """Tries mutants. Thread-safe."""

    def __init__(self, tree: Tree, hours: float, seed: int, stages: Sequence[str]) -> None:
        self.found_within_h: dict[Mutation, float] = {}  # those killed by the campaign
        self._tree, self._stages = tree, stages
        campaign = ("-m", "tests.simulation", "--seed", str(seed), "--hours", str(hours))
        adversary = ("-m", "tests.adversary", "--seed", str(seed), "--count", "300")
        self._commands = {
            CAMPAIGN: (sys.executable, *campaign, "--faults", str(hours)),
            ADVERSARY: (sys.executable, *adversary),
        }
        self._executed: Executed | None = None
        self._limits_s: dict[str, float] = {}  # by the stage's name

    def stages(self, mutation: Mutation) -> Iterator[Stage]:
        """In the order of their cost."""
        for name in self._stages:
            if name in TESTS:
                if tests := self._tests(name, mutation):
                    yield _of_tests(name, tests)
            elif mutation.path.startswith(SIMULATED):
                yield Stage(name, self._commands[name])

    def _tests(self, name: str, mutation: Mutation) -> list[str]:
        """Those of the stage that execute it."""
        assert self._executed is not None, "measure() comes first"
        tests = self._executed.tests(mutation, self._tree.read(mutation.path))
        return [*filter(re.compile(TESTS[name]).match, tests)]

    def measure(self, copy: Path, jobs: int = 1) -> bool:
        """How long everything takes without a mutant, and which tests execute which lines; False:
        something fails."""
        everything = [Stage(*each) for each in self._commands.items() if each[0] in self._stages]
        for name in (each for each in TESTS if each in self._stages):
            paths = sorted(filter(re.compile(TESTS[name]).match, self._tree.paths))
            is_alone = name == IN_REAL_TIME or jobs == 1
            in_parallel = () if is_alone else ("--numprocesses", str(jobs))
            if files := [each for each in paths if "/test_" in each]:
                everything.append(_of_tests(name, files, *COVERED, *in_parallel))
        holds = True
        for stage in everything:
            ended = stage.run(copy, 3600.0)
            self._limits_s[stage.name] = STAGE_LIMIT_S + 5 * ended.seconds
            is_noise = stage.may_be_noise(ended) and _passes_now(stage, copy)
            if ended.returncode and not is_noise:
                print(f"fails without a mutant: {stage.name}\n{ended.output[-3000:]}", flush=True)
                holds = False
        if TESTS.keys() & self._stages:
            self._executed = Executed(copy)
        return holds and (UNIT not in self._stages or self._holds_in_fork(copy))

    def _holds_in_fork(self, copy: Path) -> bool:
        """Whether no unit test fails in a fork in which a function has the code that it had."""
        assert self._executed is not None
        everything = [*filter(re.compile(TESTS[UNIT]).match, self._executed.every_test)]
        if not everything:
            return True
        in_functions = (each for each in self._tree.mutations(ROOMS) if each.is_in_function)
        plan = self._plan(next(each for each in in_functions if self._tests(UNIT, each)))
        plan |= {"source": self._tree.read(plan["path"]).decode(), "tests": everything}
        verdicts, output = _verdicts([plan], copy, self._limits_s[UNIT])
        if verdicts != ["survived"]:
            print(f"without a mutant: {UNIT} in a fork: {verdicts}\n{output}", flush=True)
        return verdicts == ["survived"]

    def hunt_in_forks(self, tried: Sequence[Mutation], copy: Path) -> dict[Mutation, str]:
        """What killed them there; who is not in it may yet be killed, by unit tests too."""
        verdicts, _ = _verdicts([self._plan(each) for each in tried], copy, LIMIT_IN_FORKS_S)
        names = {"killed": UNIT, "timed out": TIMED_OUT}
        found = zip(tried, map(names.get, verdicts), strict=False)  # one may have ended them all
        return {each: name for each, name in found if name is not None}

    def _plan(self, mutation: Mutation) -> Plan:
        source = self._tree.read(mutation.path)
        return {
            "path": mutation.path,
            "line": mutation.line(source),
            "source": mutation.applied(source).decode(),
            "tests": self._tests(UNIT, mutation),
        }

    def hunt(self, mutation: Mutation, copies: queue.SimpleQueue[Path]) -> str | None:
        """What killed it; None: nothing did."""
        copy = copies.get()
        try:
            for stage in self.stages(mutation):
                for _ in range(3):
                    _write(copy / mutation.path, mutation.applied(self._tree.read(mutation.path)))
                    ended = stage.run(copy, self._limits_s.get(stage.name, STAGE_LIMIT_S))
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


def _verdicts(plans: Sequence[Plan], copy: Path, limit_s: float) -> tuple[list[str], str]:
    """What `tools/forked.py` says of each, within so many seconds for each; and the output."""
    (copy / PLANS).write_text("".join(f"{json.dumps(each)}\n" for each in plans))
    (copy / VERDICTS).touch()
    further = (*IN_FORKS, "--mutant-limit", str(limit_s), TESTS[UNIT])
    ended = _run((*_of_tests(UNIT, ()).command, *further), copy, 600 + limit_s * len(plans))
    return (copy / VERDICTS).read_text().splitlines(), ended.output[-3000:]


def _of_tests(name: str, tests: Sequence[str], *further: str) -> Stage:
    flags = ["-q", "-x", "-p", "no:randomly", "--timeout", str(TEST_LIMIT_S)]
    if name == FIXED:
        flags += NOT_FIXED
    command = (sys.executable, "-m", "pytest", *flags, *further)
    return Stage(name, command, tuple(tests), in_real_time=name == IN_REAL_TIME)


def _passes_now(stage: Stage, copy: Path) -> bool:
    """Whether the tests that failed pass by themselves, without a mutant."""
    again = ("--last-failed", "--last-failed-no-failures", "none")
    return stage.run(copy, 3600.0, *again).returncode == 0


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
    parser.add_argument("--by", choices=STAGES, default="all", help="who may notice them")
    parser.add_argument("--under", action="append", default=[], help="a path to begin with; ROOMS")
    given = parser.parse_args()
    print(f"SEED={given.seed}", flush=True)
    stages = STAGES[given.by]
    rooms = tuple(given.under) or (ROOMS if UNIT in stages else ("actors/", f"{PACKAGE}server/"))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(ROOT, Path(folder) / "tree")
        everything = tree.mutations(rooms)
        chosen = random.Random(given.seed).sample(everything, min(given.count, len(everything)))
        known = _equivalent(tree)
        tried = [each for each in chosen if _key(each) not in known]
        unseen = len(chosen) - len(tried)
        print(f"{len(everything):,} mutants can be made; {unseen} of the sample change nothing")
        hunter = Hunter(tree, given.hours, given.seed, stages)
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        every_copy = [tree.copied(Path(folder) / str(number)) for number in range(given.jobs)]
        for copy in every_copy:
            copies.put(copy)
        if not hunter.measure(every_copy[0], given.jobs):
            return 2
        began = time.monotonic()
        killed_by = dict[Mutation, str | None]()
        with ThreadPoolExecutor(given.jobs) as pool:
            in_forks = dict[Mutation, str]()
            if UNIT in stages:
                parts = [tried[number :: given.jobs] for number in range(given.jobs)]
                for found in pool.map(hunter.hunt_in_forks, parts, every_copy):
                    in_forks |= found
            names = pool.map(lambda each: in_forks.get(each) or hunter.hunt(each, copies), tried)
            for each, name in zip(tried, names, strict=True):
                killed_by[each] = name
                what = f"{each.path} ({each.inside}): {each.before:.40} -> {each.after:.40}"
                print(f"{len(killed_by):4} {name or 'SURVIVED':18} {what}", flush=True)
        print(*report(tree, killed_by), sep="\n")
        if given.by == CAMPAIGN:
            found_h = sorted(hunter.found_within_h.get(each, math.inf) for each in tried)
            print(f"half of them within {statistics.median(found_h):.1f} worker-hours")
        mean_s = (time.monotonic() - began) / max(1, len(tried))
        print(f"{mean_s:.1f} s for a mutant, on average")
    return 0


if __name__ == "__main__":
    sys.exit(main())
