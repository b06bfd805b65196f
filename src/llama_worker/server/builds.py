"""Which build of llama-server runs, and what is known to be wrong with it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from llama_worker.config.command import flag_values

# A build from a shallow clone counts one commit, one without git none.
_LEAST_NUMBER = 2
_FORMS = (
    re.compile(r"\bbuild\b[ :=]*b?(\d+)"),  # version: 0.6.0-dev (build 11434, commit 8f2c1d0)
    re.compile(r"^version:\s*b?(\d+)\b(?!\.)", re.MULTILINE),  # version: 7234 (8f2c1d0)
    re.compile(r"^b(\d+)\b"),  # b11434-8f2c1d0, as build_info of /props
)


class _Flaw(Struct, frozen=True, kw_only=True):
    """A vulnerability of the builds from `first` to `last`; `flag`: only with it."""

    names: str
    first: int
    last: int
    what: str
    flag: str | None = None


_FLAWS = (
    _Flaw(
        names="CVE-2026-43631, CVE-2026-43632",
        first=7492,
        last=9060,
        what="memory is used after it was freed when the server falls asleep",
        flag="--sleep-idle-seconds",
    ),
    _Flaw(
        names="CVE-2026-107183",
        first=0,
        last=11392,
        what="memory is used after it was freed while a reply is parsed",
    ),
)


# The oldest build that was measured and does so: docs/servers.md.
_SHOWS_READING = 10019
_ANSWERS_IN_BATCHES = 10453


def unseen(build: int | None) -> list[str]:
    """What a server of that build does not show of its work: lines for a person. [] where the build
    is not known."""
    if build is None or build >= _SHOWS_READING:
        return []
    return [
        f"llama-server b{build} does not show in /slots how far a prompt is read: one that hangs "
        "is found only after silent_work_timeout_s; take b10019 or later"
    ]


def answers_in_batches(build: int | None) -> bool:
    """Whether a server of that build is known to answer `/slots` in the middle of a batch."""
    return build is not None and build >= _ANSWERS_IN_BATCHES


def build_number(said: str) -> int | None:
    """From what `llama-server --version` prints, or `build_info` of `/props`; None where neither
    tells it."""
    for form in _FORMS:
        found = form.search(said)
        if found is not None and int(found[1]) >= _LEAST_NUMBER:
            return int(found[1])
    return None


def known_flaws(build: int | None, command: Sequence[str]) -> list[str]:
    """The published vulnerabilities of a server of that build, run by that command: lines for a
    person. [] where the build is not known."""
    return [
        f"llama-server b{build} has {flaw.names}: {flaw.what}"
        f"{f' ({flaw.flag})' if flaw.flag else ''}; take a later build than b{flaw.last}"
        for flaw in _FLAWS
        if build is not None
        and flaw.first <= build <= flaw.last
        and (flaw.flag is None or any(v != "-1" for _, v in flag_values(command, (flaw.flag,))))
    ]
