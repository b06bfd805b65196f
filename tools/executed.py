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
        self._by_line: dict[str, dict[int, list[str]]] = {}  # of the files asked about so far
        contexts = self._data.measured_contexts()
        self.every_test = {each.rpartition("|")[0] for each in contexts} - {""}

    def tests(self, mutation: Mutation, source: bytes) -> list[str]:
        """Those that execute its line, or the next one above that is executed; all of them if an
        import does. Those that share words with its module's name come first."""
        found = self.every_test
        if mutation.is_in_function and mutation.path in self._files:
            by_line = self._contexts(mutation.path)
            first = mutation.line(source)
            lines = range(first, source.count(b"\n", 0, mutation.end) + 2)
            executed = max((line for line in by_line if line <= first), default=first)
            contexts = {each for line in (executed, *lines) for each in by_line.get(line, ())}
            found = {each.rpartition("|")[0] for each in contexts} - {""}
            # they may run it in a process of its own
            found |= {each for each in self.every_test if _is_of(each, mutation.path)}
        return sorted(found, key=lambda test: (*_distance(test, mutation.path), test))

    def _contexts(self, path: str) -> dict[int, list[str]]:
        if path not in self._by_line:
            self._by_line[path] = self._data.contexts_by_lineno(self._files[path])
        return self._by_line[path]


def _is_of(test: str, path: str) -> bool:
    """Whether the test's file bears the module's name."""
    return f"/test_{Path(path).name}::" in test


def _distance(test: str, path: str) -> tuple[bool, int]:
    file = Path(test.partition("::")[0])
    words = {*file.parent.parts, *file.stem.removeprefix("test_").split("_")}
    return not _is_of(test, path), -len(words & set(re.split(r"[/_.]", path)))
