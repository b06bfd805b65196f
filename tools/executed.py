"""Which tests execute a mutant's line."""

from __future__ import annotations

import re
from pathlib import Path

from coverage import CoverageData

from tools.mutations import Mutation


class Executed:
    """What coverage.py has written into the folder."""

    def __init__(self, folder: Path) -> None:
        self._data = CoverageData(str(folder / ".coverage"))
        self._data.read()
        paths = (Path(each) for each in self._data.measured_files())
        self._files = {str(each.relative_to(folder.resolve())): str(each) for each in paths}
        contexts = self._data.measured_contexts()
        self._tests = {each.rpartition("|")[0] for each in contexts} - {""}

    def tests(self, mutation: Mutation, source: bytes) -> list[str]:
        """Those that execute its line, or the next one above that is executed; all of them if an
        import does. Those that share words with its module's name come first."""
        function = mutation.inside.rpartition(".")[2].lstrip("_")
        found = self._tests
        if function[:1].islower() and mutation.path in self._files:
            by_line = self._data.contexts_by_lineno(self._files[mutation.path])
            first = mutation.line(source)
            lines = range(first, source.count(b"\n", 0, mutation.end) + 2)
            executed = max((line for line in by_line if line <= first), default=first)
            contexts = {each for line in (executed, *lines) for each in by_line.get(line, ())}
            found = {each.rpartition("|")[0] for each in contexts} - {""}
            # they may run it in a process of its own
            found |= {each for each in self._tests if _is_of(each, mutation.path)}
        return sorted(found, key=lambda test: (*_distance(test, mutation.path), test))


def _is_of(test: str, path: str) -> bool:
    """Whether the test's file bears the module's name."""
    return f"/test_{Path(path).name}::" in test


def _distance(test: str, path: str) -> tuple[bool, int]:
    file = Path(test.partition("::")[0])
    words = {*file.parent.parts, *file.stem.removeprefix("test_").split("_")}
    return not _is_of(test, path), -len(words & set(re.split(r"[/_.]", path)))
