"""A few generated servers in every test run; `make adversary` runs as many as one likes."""

import subprocess
import sys
from typing import Any

import pytest

from llama_worker.server import request_watch, timeouts
from llama_worker.server.blame import Verdict
from llama_worker.server.slot_verdicts import SlotsRound
from tests.adversary.campaign import run, table
from tests.adversary.case import Case
from tests.adversary.wedges import WEDGES
from tests.simulation.server import BUSY, LlamaServer, Use


def test_honest_servers_stay_and_wedges_found_in_time() -> None:
    figures = run(45, seed=20)
    assert figures.wrong == []
    assert {each.kind for each in figures.found} == set(WEDGES)


def test_a_pause_behind_a_strangers_request_is_spared() -> None:
    assert Case(777094124).run().given_up_after_s is None


def test_server_without_cores_is_spared_for_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Case(1016908).run().given_up_after_s is None
    hardly_runs = property(lambda server: Use(cpu=BUSY / server.slowness))
    monkeypatch.setattr(LlamaServer, "_busy_use", hardly_runs)
    assert Case(1016908).run().given_up_after_s is not None


def test_campaign_split_over_processes_is_the_same_campaign() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.adversary",
        "--count",
        "4",
        "--seed",
        "21",
        "--jobs",
        "2",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[1:-1] == table(run(4, seed=21))


@pytest.mark.parametrize("name", [None, *WEDGES])
def test_a_case_is_a_function_of_its_seed(name: str | None) -> None:
    wedge = None if name is None else WEDGES[name]
    assert Case(77, wedge).run() == Case(77, wedge).run()


def test_without_the_slots_wedges_are_found_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotsRound, "judge", lambda slots_round: None)
    assert run(18, seed=20, kinds=["livelock", "dead stream"]).late


def test_dead_stream_has_a_bound_without_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STALLED_ALONE_MULTIPLE", 40)
    outcome = Case(41000024, WEDGES["dead stream"]).run()
    assert outcome.given_up_after_s is not None
    assert outcome.promised_s is not None
    assert outcome.given_up_after_s > outcome.promised_s


def test_a_verdict_on_every_silence_kills_honest_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = timeouts.timeout_verdict

    def blind(*args: Any, **named: Any) -> Verdict | None:
        return right(*args, **named | {"liveness_at": None})

    monkeypatch.setattr(request_watch, "timeout_verdict", blind)
    assert run(40, seed=20, kinds=["stopped"]).false_kills
