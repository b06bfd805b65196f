"""A pytest plugin that tries many mutants against tests that it collects once.

Each mutant gets a process, forked behind the collection, in which the function that it changes has
its new code: a second or less, where starting, importing and collecting alone take several. What
an import has computed stays as it was, so only a kill means anything.

`--mutants-from` names a file of JSON lines, each a `Plan`; `--mutants-to` one to which the answers
are written as they come, a `Verdict` for each plan, in their order.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Literal, TypedDict

import hypothesis
import pytest

Verdict = Literal["killed", "survived", "timed out", "not tried"]

_NOT_TRIED, _KILLED, _SURVIVED = 0, 1, 2  # a child's return codes
_Place = tuple[str, int]  # a function's qualified name and its first line


class Plan(TypedDict):
    """A mutant to try."""

    path: str  # from the root
    line: int  # where its change begins
    source: str  # the whole file with it
    tests: list[str]  # by their ids


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants-from", type=Path, required=True)
    parser.addoption("--mutants-to", type=Path, required=True)
    parser.addoption("--mutant-limit", type=float, required=True, help="seconds for its tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """A smaller example of a failure is of no use here."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", deadline=None, database=None, phases=phases)
    hypothesis.settings.load_profile("mutants")


def pytest_runtestloop(session: pytest.Session) -> bool:
    """In place of the tests' own run."""
    items = {item.nodeid: item for item in session.items}
    plans = session.config.getoption("mutants_from").read_text().splitlines()
    with session.config.getoption("mutants_to").open("w", buffering=1) as answers:
        for plan in map(json.loads, plans):
            answers.write(f"{_tried(plan, items, session)}\n")
    return True


def _tried(plan: Plan, items: dict[str, pytest.Item], session: pytest.Session) -> Verdict:
    tests = [items[test] for test in plan["tests"] if test in items]
    pid = os.fork()
    if not pid:
        os.setsid()
        returncode = _NOT_TRIED
        try:
            if tests and _plant(plan):
                returncode = _run(tests, session)
        finally:
            os._exit(returncode)
    in_time = _ends(pid, session.config.getoption("mutant_limit"))
    try:
        os.killpg(pid, signal.SIGKILL)  # or what it has left
    except ProcessLookupError:
        pass
    returncode = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not in_time:
        return "timed out"
    others: dict[int, Verdict] = {_NOT_TRIED: "not tried", _SURVIVED: "survived"}
    return others.get(returncode, "killed")


def _ends(pid: int, limit_s: float) -> bool:
    """Whether it does so in time; it is not reaped."""
    ending = os.pidfd_open(pid)
    try:
        return bool(select.select([ending], [], [], limit_s)[0])
    finally:
        os.close(ending)


def _run(tests: list[pytest.Item], session: pytest.Session) -> int:
    """In the child."""
    for test, following in zip(tests, [*tests[1:], None], strict=True):
        test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        if session.testsfailed:
            return _KILLED
    return _SURVIVED


def _plant(plan: Plan) -> bool:
    """Gives the functions that live at the place of the change their new code; False: none does,
    or it does not fit."""
    file = Path(plan["path"])
    place = _function_at(plan["line"], ast.parse(file.read_text()))
    code = dict(_functions(compile(plan["source"], str(file), "exec"))).get(place or ("", 0))
    living = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
    of_place = [each for each in living if _place(each.__code__) == place]
    of_place = [each for each in of_place if os.path.samefile(each.__code__.co_filename, file)]
    if code is None:
        return False
    for each in of_place:
        if len(code.co_freevars) != len(each.__code__.co_freevars):
            return False
        each.__code__ = code
    return bool(of_place)


def _function_at(line: int, tree: ast.Module) -> _Place | None:
    """The outermost one around the line: what it contains is made when it runs."""
    within: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    for prefix, owner in within:
        for each in owner.body:
            if not each.lineno <= line <= (each.end_lineno or 0):
                pass
            elif isinstance(each, ast.ClassDef):
                within.append((f"{prefix}{each.name}.", each))
            elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min(node.lineno for node in (each, *each.decorator_list))
                return f"{prefix}{each.name}", first
    return None


def _functions(code: CodeType) -> Iterator[tuple[_Place, CodeType]]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield _place(each), each
            yield from _functions(each)


def _place(code: CodeType) -> _Place:
    return code.co_qualname, code.co_firstlineno
