"""Writes the tables of docs/reference.md from the answers' types and docstrings.

python -m tools.answer_tables
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, is_typeddict

from llama_worker.types import request, worker

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
_FIELD = re.compile(r"^    (\w+): (.+)$", re.MULTILINE)
_MEANING = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
_ENTRY = re.compile(r"^::: llama_worker\.(\w+)\n(?:\n*\|[^\n]*\n)*", re.MULTILINE)


def answers() -> dict[str, Any]:
    """The typed dictionaries whose docstring describes their keys, by name."""
    return {
        name: kind
        for module in (request, worker)
        for name, kind in vars(module).items()
        if is_typeddict(kind) and "Attributes:" in (kind.__doc__ or "")
    }


def meanings(kind: Any) -> dict[str, str]:
    """What the docstring says of each key."""
    described = inspect.cleandoc(kind.__doc__).partition("Attributes:\n")[2]
    return {name: " ".join(text.split()) for name, text in _MEANING.findall(described)}


def declared(kind: Any) -> dict[str, str]:
    """The keys with their types, as they are written."""
    body = inspect.getsource(kind).rpartition('"""')[2]
    return dict(_FIELD.findall(body))


def table(kind: Any) -> str:
    """A row for each key."""
    texts = meanings(kind)
    rows = ["| key | type | meaning |", "| --- | --- | --- |"]
    for name, written in declared(kind).items():
        shown = re.sub(r"^(?:Not)?Required\[(.*)\]$", r"\1", written).replace("|", "\\|")
        absent = "" if name in kind.__required_keys__ else "; may be absent"
        rows.append(f"| `{name}` | `{shown}` | {texts[name].removesuffix('.')}{absent} |")
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """The page, the table of each answer behind its name."""
    kinds = answers()

    def entry(found: re.Match[str]) -> str:
        head = f"::: llama_worker.{found[1]}\n"
        return f"{head}\n{table(kinds[found[1]])}\n" if found[1] in kinds else head

    return _ENTRY.sub(entry, page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
