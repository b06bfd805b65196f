"""A few generated servers in every test run; `make adversary` runs as many as one likes."""

from __future__ import annotations

import pytest

from llama_worker.server import watch
from tests.adversary.__main__ import Figures, run, run_parts
from tests.adversary.case import Case
from tests.adversary.wedges import WEDGES


def test_no_honest_server_is_given_up_and_every_wedge_is_found_in_time() -> None:
    figures = run(45, seed=20)
    assert figures.false_kills == []
    assert figures.missed == []
    assert figures.late == []
    assert set(figures.found) == set(WEDGES)


def test_a_campaign_in_parts_and_processes_is_the_same_campaign() -> None:
    in_parts = Figures()
    for first in range(0, 6, 2):
        in_parts.add(run(2, seed=21, first=first))
    by_processes = run_parts(6, 21, None, first=0, jobs=2)
    in_parts.cpu_s = by_processes.cpu_s
    assert in_parts == by_processes


@pytest.mark.parametrize("name", [None, *WEDGES])
def test_a_case_is_a_function_of_its_seed(name: str | None) -> None:
    wedge = None if name is None else WEDGES[name]
    assert Case(77, wedge).run() == Case(77, wedge).run()


def test_without_the_slots_wedges_are_found_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "judge_by_slots", lambda *args, **kwargs: None)
    assert run(18, seed=20, kinds=["livelock", "dead stream"]).late


def test_a_verdict_on_every_silence_kills_honest_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.ServerWatch, "_worked_at", lambda *args: None)
    assert run(40, seed=20, kinds=["stopped"]).false_kills
