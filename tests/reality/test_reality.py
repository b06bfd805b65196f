"""The plan, the matrix, and one small episode of the campaign that `make reality` runs at
length."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.reality.campaign import play
from tests.reality.limits import found_within_s, tight_limits
from tests.reality.matrix import Matrix
from tests.reality.plan import (
    LAYERS,
    MAX_PROMPT_TOKENS,
    SLOT_TOKENS,
    Disturbance,
    Episode,
    Hang,
    Job,
    Shape,
    planned,
)

SHAPE = Shape(slots=2, batch_tokens=128, threads=1, layers=1, shows_slots=True, has_tools=True)
JOB = Job(at_s=0.0, prompt_tokens=3000, reply="exact", reply_tokens=30, cancel_after_s=None)
SMALL = Episode(
    seed=0,
    shape=SHAPE,
    jobs=(JOB, JOB, replace(JOB, reply="tool"), replace(JOB, cancel_after_s=0.05)),
    disturbances=(
        Disturbance(at_s=0.1, kind="host stopped", for_s=2.0),
        Disturbance(at_s=0.2, kind="one core", for_s=1.0),
        Disturbance(at_s=0.2, kind="burners", for_s=1.0, count=1),
    ),
    hang=Hang(after_s=0.2, prompts_tokens=(3000,)),
)


@pytest.mark.server
def test_the_healthy_complete_and_the_stopped_is_found(llama_server: str, thin_model: str) -> None:
    matrix = Matrix()
    facts, errors = play(SMALL, burners=0, server=llama_server, model=thin_model)
    assert matrix.add(SMALL, facts) == [], (facts, errors)
    assert matrix.healthy["completed"] >= 4  # the cancel may come too late
    assert matrix.hung == Counter(found=1)


# ---------------------------------------------------------------- the plan


def test_a_seed_has_one_plan() -> None:
    assert planned(7) == planned(7) != planned(8)


def test_the_plans_cover_what_they_claim() -> None:
    episodes = [planned(seed) for seed in range(300)]
    shapes = [episode.shape for episode in episodes]
    jobs = [job for episode in episodes for job in episode.jobs]
    hangs = [episode.hang for episode in episodes if episode.hang is not None]
    kinds = {each.kind for episode in episodes for each in episode.disturbances}
    assert {shape.slots for shape in shapes} == {1, 2, 3, 4}
    assert {shape.layers for shape in shapes} == set(LAYERS)
    assert len({shape.batch_tokens for shape in shapes}) == 5
    assert {job.reply for job in jobs} == {"exact", "free", "tool"}
    assert kinds == {"burners", "one core", "host stopped"}
    assert {bool(hang.prompts_tokens) for hang in hangs} == {True, False}
    assert min(job.prompt_tokens for job in jobs) < 20
    assert max(job.prompt_tokens for job in jobs) > 6500
    assert all(job.prompt_tokens <= MAX_PROMPT_TOKENS < SLOT_TOKENS for job in jobs)


def test_a_limit_grows_with_what_a_batch_takes() -> None:
    fast, slow = (tight_limits(SMALL, token_s, 0) for token_s in (0.0001, 0.01))
    assert fast.idle_stream_timeout_s == pytest.approx(4.0 + 128 * 0.0001 * 4 * 2)
    assert slow.idle_stream_timeout_s == pytest.approx(4.0 + 128 * 0.01 * 4 * 2)
    assert found_within_s(slow, in_flight=True) == pytest.approx(34.24)
    assert found_within_s(slow, in_flight=False) == 55.0


# ---------------------------------------------------------------- the matrix


def well_played() -> dict[str, dict[str, Any]]:
    """What the host says of the small episode if nothing is wrong, by a name each."""
    return {
        **{
            f"job {number}": {"fact": "ended", "job": number, "how": how, "detail": None}
            for number, how in ((0, "completed"), (1, "completed"), (2, "completed"))
        },
        "job 3": {"fact": "ended", "job": 3, "how": "cancelled", "detail": None},
        "jobs over": {"fact": "jobs over", "died": 0, "restarts": 0},
        "hang": {
            "fact": "hang",
            "phases": ["prefill"],
            "early_restarts": 0,
            "found_s": 5.0,
            "bound_s": 9.0,
        },
        "next": {"fact": "ended", "job": -1, "how": "completed", "detail": None},
        "closed": {"fact": "closed"},
    }


def test_an_episode_without_a_mistake_is_counted() -> None:
    matrix = Matrix()
    assert matrix.add(SMALL, list(well_played().values())) == []
    assert matrix.healthy == Counter(completed=4, cancelled=1)
    assert "median 5.0 s, worst 5.0 s" in str(matrix)


@pytest.mark.parametrize(
    ("name", "change", "mistake"),
    [
        ("job 1", {"how": "given up", "detail": "stall_timeout"}, "job 1: given up: stall_timeout"),
        ("job 1", {"how": "wrong text", "detail": "x"}, "job 1: wrong text: x"),
        ("job 1", None, "job 1: unfinished: the host did not say"),
        ("jobs over", {"restarts": 1}, "1 restarts of a healthy server"),
        ("jobs over", {"died": 2}, "the server died by itself, 2 times"),
        ("hang", {"early_restarts": 2}, "2 restarts of a healthy server"),
        ("hang", {"found_s": None}, "hang in ['prefill'] not found within 9.0 s"),
        ("hang", None, "the host did not come to the hang"),
        ("next", {"how": "given up", "detail": "x"}, "the request after the hang: given up: x"),
        ("closed", None, "the host did not end"),
    ],
)
def test_each_mistake_is_named(name: str, change: dict[str, Any] | None, mistake: str) -> None:
    facts = well_played()
    if change is None:
        del facts[name]
    else:
        facts[name] |= change
    matrix = Matrix()
    assert matrix.add(SMALL, list(facts.values())) == [mistake]
    assert matrix.mistakes_count == 1
