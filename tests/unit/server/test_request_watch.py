"""What is kept of the requests in flight between two rounds of verdicts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.request.progress import Progress
from llama_worker.server.messages import Unwatch
from llama_worker.server.request_watch import RequestWatch
from tests.virtual_watch import generating

IDS = (1, 2, 3, 4, 5, 6)


def watch_of(*request_ids: int) -> RequestWatch:
    watch = RequestWatch(TimeoutProfile(idle_stream_timeout_s=1.0), epoch=1)
    for request_id in request_ids:
        watch.begin(request_id)
    return watch


@given(
    st.lists(st.tuples(st.sampled_from(IDS), st.floats(0.0, 100.0), st.booleans()), max_size=40),
    st.sampled_from((*IDS, 7)),
)
def test_the_data_of_others_stay_known_when_they_have_ended(
    news: list[tuple[int, float, bool]], asked: int
) -> None:
    watch, heard, running = watch_of(*IDS), [], set(IDS)
    for request_id, at, ends in news:
        if request_id not in running:
            continue
        watch.heard(generating(at, request_id), at, for_verdict=False)
        heard.append((request_id, at))
        if ends and request_id != asked:
            watch.end(Unwatch(request_id=request_id, data_at=None, completed=False), at)
            running.remove(request_id)
    assert watch.data_at == max((at for _, at in heard), default=None)
    others = max((at for other, at in heard if other != asked), default=None)
    assert watch.data_of_others(asked) == others


def test_a_round_is_over_when_all_have_answered_once_or_ended() -> None:
    def answer(request_id: int) -> list[int]:
        """Whose verdicts follow."""
        silent: Progress = generating(0.0, request_id)
        return [stalled.request_id for stalled in watch.heard(silent, 9.0, for_verdict=True)]

    watch = watch_of(1, 2, 3, 4)
    assert watch.begin_round(9.0) == []
    assert (answer(2), answer(4), answer(2)) == ([], [], [])
    for request_id in (3, 4):
        order = Unwatch(request_id=request_id, data_at=None, completed=False)
        assert watch.end(order, 9.0) == []
    assert answer(1) == [2, 1]
    assert answer(1) == []
