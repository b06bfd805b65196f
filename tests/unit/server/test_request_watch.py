"""What is kept of the requests in flight between two rounds of verdicts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from llama_worker.request.progress import Progress
from llama_worker.server.request_watch import DataLedger, ProgressRound
from llama_worker.types.request import RequestPhase


def progress(request_id: int) -> Progress:
    return Progress(
        request_id=request_id, phase=RequestPhase.PREFILL, dispatched_at=0.0, turn_started_at=0.0
    )


@given(
    st.lists(st.tuples(st.integers(1, 6), st.floats(0.0, 100.0)), max_size=40), st.integers(1, 7)
)
def test_the_data_ledger_answers_as_if_it_kept_everything(
    news: list[tuple[int, float]], asked: int
) -> None:
    ledger = DataLedger()
    for request_id, at in news:
        ledger = ledger.heard(request_id, at).heard(request_id, None)
    assert ledger.of_others(asked) == max(
        (at for other, at in news if other != asked), default=None
    )
    assert len(ledger.latest) <= 2


def test_a_round_is_over_when_all_have_answered_once_or_ended() -> None:
    one, two = progress(1), progress(2)
    heard = ProgressRound(owing=frozenset({1, 2, 3})).answered(two).without(3).answered(one)
    assert heard == ProgressRound(frozenset(), (two, one))
    assert heard.answered(replace(one, last_data_at=5.0)) == heard
    assert heard.without(2) == ProgressRound(frozenset(), (one,))
