"""What earlier batches tell of the time that a batch may take."""

from llama_worker.request.progress import Batch
from llama_worker.server.pace import PACE_MIN_S, PACE_MULTIPLE, Pace


def learnt(*batches: tuple[int, int, float]) -> Pace:
    """Of prompts that were read long ago: tokens, depth and seconds of each batch."""
    pace = Pace()
    for number, (tokens, depth, seconds) in enumerate(batches):
        pace.learn(number, [Batch(-1e5, -1e5 + seconds, tokens, depth)])
    return pace


def test_each_separately_reported_batch_is_learnt_once() -> None:
    pace = Pace()
    pace.learn(1, [Batch(100.0, 100.0, 512, 512), Batch(100.0, 110.0, 0, 1024)])  # cached
    pace.learn(1, [Batch(110.0, 110.0, 512, 1536)])
    assert pace.expected_s(512, 512) is None
    pace.learn(2, [Batch(0.0, 40.0, 512, 512)])
    for _ in range(100):
        pace.learn(1, [Batch(120.0, 150.0, 512, 512), Batch(150.0, 151.0, 512, 1024)])
    assert pace.expected_s(512, 512) == 40.0


def test_first_batches_are_measured_by_first_batches() -> None:
    pace = learnt((512, 512, 1.0))
    assert pace.longest_standstill_s(512, 512, is_cold=True) == 2 * PACE_MIN_S
    pace.learn(100, [Batch(-60.0, 0.0, 1, 1)], is_cold=True)
    assert pace.longest_standstill_s(512, 512, is_cold=True) == PACE_MULTIPLE * 60.0
    assert pace.longest_standstill_s(512, 512, is_cold=False) == PACE_MIN_S
