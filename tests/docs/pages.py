"""The pages, and the code blocks in them.

A block's mark, behind its language, says what it is: "runnable" is run; a path
("examples/fleet.py") is an excerpt of that file of the repository; any other file name
("fleet.toml") is that file, beside the program.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(DOCS.rglob("*.md")),
]
_BLOCK = re.compile(r"^```(\w+)(?: +([\w./-]+))?\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    language: str
    mark: str  # "" where it has none
    code: str


def blocks(text: str) -> list[Block]:
    """Every block of a page."""
    return [Block(*found) for found in _BLOCK.findall(text)]


def runnable(text: str, language: str) -> str:
    """The page's runnable blocks of a language, as one program."""
    return "\n".join(
        block.code
        for block in blocks(text)
        if (block.language, block.mark) == (language, "runnable")
    )


def files(text: str) -> dict[str, str]:
    """The page's files, by name."""
    return {
        b.mark: b.code
        for b in blocks(text)
        if b.mark and b.mark != "runnable" and "/" not in b.mark
    }


def with_ports(text: str, free_port: Callable[[], int]) -> str:
    """With free ports for 8000 to 8099."""
    for port in sorted(set(re.findall(r"\b80\d\d\b", text))):
        text = re.sub(rf"\b{port}\b", str(free_port()), text)
    return text


def table(text: str, first_header: str) -> list[list[str]]:
    """The rows, without the head, of the page's table whose first column has that header."""
    found = re.search(
        rf"^\| {re.escape(first_header)} \|.*\n\|[ |-]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE
    )
    assert found, f"no table with {first_header!r}"
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found[1].splitlines()]


def names_in(text: str) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`([^`]+)`", text)
