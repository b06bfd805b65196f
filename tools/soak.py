"""Runs the suite again and again, each round under another condition, and prints what failed, how
often and where. Ends with 1 if anything did.

python -m tools.soak [--rounds N] [--seed S] [PYTEST_ARGS...]

A round's output is kept in build/soak. The conditions come in turn. Another Python is played where
it is installed, on the PATH or by pyenv.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tools import pythons

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "soak"
BURNER = (sys.executable, "-c", "while True: pass")
# Some seconds of a compiler's work, over and over.
COMPILE = """
while :; do
  printf '#include <regex>\\nbool f(const char *s) { return std::regex_match(s, std::regex(s)); }\\n' |
    c++ -O2 -x c++ -c -o /dev/null - || sleep 1
done
"""


@dataclass(frozen=True)
class Condition:
    """How a round is run. `python`: its name; an environment of its own; None: this one."""

    name: str
    processes: int = 4  # that run tests side by side
    prefix: tuple[str, ...] = ()  # of the command
    beside: tuple[tuple[str, ...], ...] = ()  # what else runs
    env: tuple[tuple[str, str], ...] = ()
    shuffled: bool = False
    python: str | None = None


CONDITIONS = (
    Condition("alone, as fast as it can", processes=1, env=(("SCRIPTED_SERVER_PACE", "0"),)),
    Condition("on one core", prefix=("taskset", "-c", "0")),
    Condition("beside two burners", beside=(BURNER, BURNER)),
    Condition(
        "nice 19, beside a compiler", prefix=("nice", "-n", "19"), beside=(("sh", "-c", COMPILE),)
    ),
    Condition("in random order", shuffled=True),
    Condition("4 processes"),
    Condition("8 processes", processes=8),
    *(Condition(name, python=name) for name in pythons.NAMES),
)


@dataclass(frozen=True)
class Round:
    """What came of one."""

    condition: Condition
    failed: tuple[str, ...]  # names of tests, or what became of the run itself
    seconds: float


def command(condition: Condition, seed: int, junit: Path, args: list[str]) -> list[str]:
    """The round's, as it is run. Pure."""
    order = ["-p", "tools.shuffled", "--order-seed", str(seed)] if condition.shuffled else []
    spread = ["-n", str(condition.processes), "--dist", "loadfile", "--no-loadscope-reorder"]
    python = f".venv-{condition.python}/bin/python" if condition.python else sys.executable
    run = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={junit}"]
    return [*condition.prefix, *run, *spread, *order, *args]


def failures(junit: str | None, returncode: int) -> tuple[str, ...]:
    """The tests that failed, by pytest's report (None: it wrote none). Pure."""
    cases = ElementTree.fromstring(junit).iter("testcase") if junit is not None else ()
    failed = tuple(
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    )
    return failed or ((f"pytest ended with {returncode}",) if returncode else ())


def table(rounds: list[Round]) -> Iterator[str]:
    """What a person reads at the end. Pure."""
    ran = Counter(each.condition.name for each in rounds)
    where: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in rounds:
        for test in dict.fromkeys(each.failed):  # once, though it failed and its fixture, too
            where[test][each.condition.name] += 1
    for test, by_condition in sorted(where.items(), key=lambda entry: -entry[1].total()):
        yield f"{by_condition.total()} of {len(rounds)} rounds: {test}"
        for name, count in by_condition.items():
            yield f"    {name}: {count} of {ran[name]}"
    yield f"{sum(bool(each.failed) for each in rounds)} of {len(rounds)} rounds failed"


@contextmanager
def company(commands: tuple[tuple[str, ...], ...]) -> Iterator[None]:
    """They run meanwhile, each with its children in a process group of its own."""
    with ExitStack() as cleanup:
        for each in commands:
            process = subprocess.Popen(
                each, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            cleanup.callback(process.wait)
            cleanup.callback(os.killpg, process.pid, signal.SIGKILL)
        yield


def play(condition: Condition, seed: int, log: Path, args: list[str]) -> Round:
    """One round; its output goes to `log`."""
    began_at = time.monotonic()
    if condition.python is not None:
        made = f".venv-{condition.python}/.test"
        python = f"PYTHON={pythons.find(condition.python)}"
        subprocess.run(["make", "--silent", made, "server", python], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder, company(condition.beside), log.open("wb") as out:
        junit = Path(folder) / "junit.xml"
        run = command(condition, seed, junit, args)
        env = {**os.environ, **dict(condition.env)}
        returncode = subprocess.run(run, cwd=ROOT, env=env, stdout=out, stderr=out).returncode
        report = junit.read_text() if junit.exists() else None
    return Round(condition, failures(report, returncode), time.monotonic() - began_at)


def is_possible(condition: Condition) -> bool:
    """Whether its Python and its programs are installed."""
    if condition.python is not None:
        return pythons.find(condition.python) is not None
    return all(shutil.which(words[0]) for words in (condition.prefix, *condition.beside) if words)


def main(argv: list[str]) -> int:
    """Play the rounds; 1 where anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=len(CONDITIONS))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the orders")
    options, args = parser.parse_known_args(argv)
    possible = [condition for condition in CONDITIONS if is_possible(condition)]
    for condition in CONDITIONS:
        if condition not in possible:
            print(f"not possible here: {condition.name}")
    print(f"SEED={options.seed}, {options.rounds} rounds, {len(possible)} conditions", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    rounds: list[Round] = []
    for number in range(options.rounds):
        condition = possible[number % len(possible)]
        log = LOGS / f"{number + 1}.log"
        done = play(condition, options.seed + number, log, args)
        rounds.append(done)
        verdict = f"{len(done.failed)} failed, see {log}" if done.failed else "passed"
        print(f"{number + 1:3}  {condition.name:28} {done.seconds:6.0f} s  {verdict}", flush=True)
    print(*table(rounds), sep="\n")
    return int(any(each.failed for each in rounds))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends company, too
    sys.exit(main(sys.argv[1:]))
