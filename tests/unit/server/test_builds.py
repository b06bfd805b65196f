"""Builds of llama-server: their numbers in every form, and what is known to be wrong with them."""

from __future__ import annotations

import pytest

from llama_worker.server.builds import build_number, known_flaws, unseen

MODEL = ("llama-server", "--model", "m.gguf")
SLEEPING = (*MODEL, "--sleep-idle-seconds", "60")


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("version: 0.6.0-dev (build 11434, commit unknown)\nbuilt with GNU 12.2.0", 11434),
        ("version: 1.0.0 (build 11902, commit 8f2c1d0)", 11902),
        ("version: 7234 (8f2c1d0)\nbuilt with cc 13.2.0 for x86_64-linux-gnu", 7234),
        ("version: b9093 (8f2c1d0)", 9093),
        ("ggml_cuda_init: found 1 CUDA devices\nversion: 7234 (8f2c1d0)", 7234),
        ("build: 4567 (8f2c1d0) with cc 13.2.0", 4567),
        ("b11434-unknown", 11434),
        ("b4321-8f2c1d0a", 4321),
        ("version: 1.0.0", None),
        ("version: 10.2", None),
        ("version: 0 (unknown)", None),  # built without git
        ("version: 1 (8f2c1d0)", None),  # from a shallow clone
        ("b0-unknown", None),
        ("built with GNU 12.2.0", None),
        ("", None),
    ],
)
def test_the_number_is_read_in_every_form(said: str, number: int | None) -> None:
    assert build_number(said) == number


@pytest.mark.parametrize(
    ("build", "command", "names"),
    [
        (None, SLEEPING, []),
        (11434, SLEEPING, []),
        (11393, SLEEPING, []),
        (11392, SLEEPING, ["CVE-2026-107183"]),
        (9061, SLEEPING, ["CVE-2026-107183"]),
        (9060, SLEEPING, ["CVE-2026-43631, CVE-2026-43632", "CVE-2026-107183"]),
        (9060, (*MODEL, "--sleep-idle-seconds", "-1"), ["CVE-2026-107183"]),
        (9060, MODEL, ["CVE-2026-107183"]),
        (7492, SLEEPING, ["CVE-2026-43631, CVE-2026-43632", "CVE-2026-107183"]),
        (7491, SLEEPING, ["CVE-2026-107183"]),
    ],
)
def test_the_flaws_of_a_build_are_named(
    build: int | None, command: tuple[str, ...], names: list[str]
) -> None:
    lines = known_flaws(build, command)
    assert [line.partition(" has ")[2].partition(":")[0] for line in lines] == names


@pytest.mark.parametrize(("build", "warns"), [(None, 0), (9093, 1), (10018, 1), (10019, 0)])
def test_what_an_old_build_does_not_show_is_told(build: int | None, warns: int) -> None:
    lines = unseen(build)
    assert len(lines) == warns
    assert all(f"b{build} does not show" in line for line in lines)


def test_a_flaw_says_what_to_take() -> None:
    (line,) = known_flaws(11392, MODEL)
    assert line == (
        "llama-server b11392 has CVE-2026-107183: memory is used after it was freed while a reply "
        "is parsed; take a later build than b11392"
    )
