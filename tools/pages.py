"""Parts of the documentation that commands write: each between `<!-- name -->` and `<!-- end
-->`."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_END = "<!-- end -->"


def with_part(page: str, name: str, text: str) -> str:
    """The page with that part replaced. Raises ValueError where it has no place for it."""
    begin = f"<!-- {name} -->\n"
    before, found, rest = page.partition(begin)
    if not found or _END not in rest:
        raise ValueError(f"the page has no place for {name}")
    return before + begin + text + "\n" + _END + rest.partition(_END)[2]


def write_part(page: Path, name: str, text: str) -> None:
    """The same, in its file."""
    page.write_text(with_part(page.read_text(), name, text))
