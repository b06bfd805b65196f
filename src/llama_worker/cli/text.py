"""Makes text safe and short enough for a terminal. Pure."""

from __future__ import annotations

import textwrap

# control characters as visible signs: ESC is shown as ␛
_PICTURES = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_KEPT = {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}
_LOST = dict.fromkeys(
    (
        *range(0x80, 0xA0),  # C1 controls, among them an 8-bit ESC [
        *range(0x202A, 0x202F),  # changes of the reading direction
        *range(0x2066, 0x206A),
        *range(0xD800, 0xE000),  # lone surrogates: they cannot be encoded
    ),
    0xFFFD,
)
_HARMLESS: dict[int, int | str] = {**_PICTURES, **_LOST, **_KEPT}


def printable(text: str) -> str:
    """Replace all control characters except newline and tab; carriage returns are dropped.

    Each character is replaced on its own, so text may be cut anywhere and shown piece by piece.
    """
    return text.translate(_HARMLESS)


def one_line(text: str, width: int) -> str:
    """Harmless, on one line of at most `width` characters."""
    line = " ".join(printable(text).split())
    return line if len(line) <= width else line[: max(0, width - 3)] + "..."


def wrapped(text: str, width: int | None, hang: int = 2) -> str:
    """Break lines at spaces, with `hang` more indent after each break. `width` None: unchanged."""
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        begins_at = len(line) - len(line.lstrip())
        within = textwrap.TextWrapper(
            width=max(width, begins_at + hang + 20),
            initial_indent=" " * begins_at,
            subsequent_indent=" " * (begins_at + hang),
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        lines.append(line if len(line) <= width else within.fill(line.lstrip()))
    return "\n".join(lines)


def size(count_bytes: float) -> str:
    """`98.1 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count_bytes < 1024:
            return f"{count_bytes:.0f} B" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.1f} GiB"


def seconds(duration_s: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`."""
    if duration_s < 10:
        return f"{duration_s:.1f} s"
    if duration_s < 120:
        return f"{duration_s:.0f} s"
    return f"{int(duration_s) // 60} min {int(duration_s) % 60} s"
