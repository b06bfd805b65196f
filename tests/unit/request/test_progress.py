"""How far a turn is: what brings it forward, and what only keeps its connection busy."""

from typing import Any

import pytest

from llama_worker.request.progress import Batch, NoveltyDetector, Progress, TurnProgress
from llama_worker.stream import events
from llama_worker.types.request import RequestPhase
from tests.tables import cases


def advances(*stream: events.StreamEvent) -> list[bool]:
    """For each event, whether it brought the turn forward."""
    return list(map(NoveltyDetector().is_new, stream))


ALWAYS, ONCE, NEVER = [True, True, True], [True, False, False], [False, False, False]


@cases(
    "stream, advance",
    {
        "text": ([events.TextDelta("a")] * 3, ALWAYS),
        "reasoning": ([events.ReasoningDelta("a")] * 3, ALWAYS),
        "arguments": ([events.ToolCallDelta(0, "c", None, '{"')] * 3, ALWAYS),
        "the head of a call": ([events.ToolCallDelta(0, "c", "look", "")] * 3, ONCE),
        "the head of a call without a name": ([events.ToolCallDelta(0, "c", None, "")] * 3, ONCE),
        "the head of a call without an id": ([events.ToolCallDelta(0, None, "look", "")] * 3, ONCE),
        "prompt progress": ([events.PromptReport(7, 100, 0)] * 3, ONCE),
        "usage, also another": ([events.UsageReport(1, tokens, None) for tokens in range(3)], ONCE),
        "timings, also others": (
            [events.TimingsReport(None, None, tokens, None) for tokens in range(3)],
            ONCE,
        ),
        "a finish": ([events.Finish("stop")] * 3, ONCE),
        "an error": ([events.ServerError("no", None, None)] * 3, ONCE),
        "the end mark": ([events.Done()] * 3, ONCE),
        "what has no name here": ([events.UnknownContent(7)] * 3, ONCE),
        "more of the prompt than there is": (
            [events.PromptReport(processed, 100, 0) for processed in (100, 101, 2**62)],
            ONCE,
        ),
        "a role": ([events.EmptyRecord()] * 3, NEVER),
        "no text": ([events.TextDelta("")] * 3, NEVER),
        "no reasoning": ([events.ReasoningDelta("")] * 3, NEVER),
        "an empty call": ([events.ToolCallDelta(0, None, None, None)] * 3, NEVER),
    },
)
def test_the_same_again_and_again(stream: list[events.StreamEvent], advance: list[bool]) -> None:
    assert advances(*stream) == advance


def test_prompt_progress_advances_only_beyond_everything_reported() -> None:
    in_circles = [
        events.PromptReport(processed, 100, 0) for processed in (0, 40, 80, 0, 40, 80, 81, 80)
    ]
    assert advances(*in_circles) == [True, True, True, False, False, False, True, False]


def test_unknown_content_advances_while_it_changes() -> None:
    words = [events.UnknownContent(number) for number in range(4097)]
    assert all(advances(*words))
    assert advances(*words[1:], *words[1:]) == [True] * 4096 + [False] * 4096
    assert all(advances(*words, *words)), "the first ones were forgotten"


def test_calls_that_begin_for_ever_advance_no_more() -> None:
    heads = [events.ToolCallDelta(number, f"c{number}", "look", "") for number in range(1000)]
    assert advances(*heads) == [True] * 256 + [False] * 744


@cases(
    "phase, how, is_served, awaits_one_piece",
    {
        "waiting": (RequestPhase.WAITING, {}, False, False),
        "waiting for all": (RequestPhase.WAITING, {"in_one_piece": True}, False, True),
        "it has all": (RequestPhase.GENERATING, {"in_one_piece": True}, True, False),
        "prefill": (RequestPhase.PREFILL, {}, True, False),
        "over": (RequestPhase.GENERATING, {"concluding": True}, False, False),
        "tools": (RequestPhase.TOOL, {}, False, False),
    },
)
def test_whether_the_server_works_on_it(
    phase: RequestPhase, how: dict[str, Any], is_served: bool, awaits_one_piece: bool
) -> None:
    it = Progress(request_id=7, phase=phase, dispatched_at=0.0, turn_started_at=0.0, **how)
    assert (it.is_served, it.awaits_one_piece) == (is_served, awaits_one_piece)


# ---------------------------------------------------------------- of one turn


def record(progress: TurnProgress, *stream: events.StreamEvent, at: float = 1.0) -> None:
    for event in stream:
        progress.record(event, at)


def test_tokens_are_servers_count_or_else_deltas() -> None:
    it = TurnProgress(0.0)
    record(
        it, events.TextDelta("a"), events.TextDelta("b"), events.ToolCallDelta(0, "x", "add", "{}")
    )
    assert it.tokens == 3
    record(it, events.TimingsReport(None, None, 7, None))
    assert it.tokens == 7
    record(it, events.UsageReport(10, 9, None))
    assert it.tokens == 9
    it.usage, it.timings = None, events.TimingsReport(None, None, None, None)
    assert it.tokens == 3


def test_speed_is_servers_or_else_over_deltas() -> None:
    it = TurnProgress(0.0)
    assert it.tokens_per_second() is None
    record(it, events.TextDelta("a"), at=1.0)
    assert it.tokens_per_second() is None
    record(it, events.TextDelta("b"), events.TextDelta("c"), at=5.0)
    assert it.tokens_per_second() == pytest.approx(0.5)
    assert (it.first_token_at, it.last_token_at) == (1.0, 5.0)
    record(it, events.TimingsReport(None, None, None, None))
    assert it.tokens_per_second() == pytest.approx(0.5)
    record(it, events.TimingsReport(None, None, None, 40.0))
    assert it.tokens_per_second() == 40.0


def test_longest_gap_is_known_from_second_token_on() -> None:
    it, gaps = TurnProgress(0.0), []
    for at in (5.0, 5.5, 9.0, 9.5):
        record(it, events.TextDelta("a"), at=at)
        gaps.append(it.longest_gap_s)
    assert gaps == [None, 0.5, 3.5, 3.5]


def test_a_single_token_has_no_speed() -> None:
    it = TurnProgress(0.0)
    record(it, events.TextDelta("a"), events.TimingsReport(0, 39, 1, 0.0), at=1.0)
    assert it.tokens_per_second() is None


def test_prompt_progress_is_data_only_where_it_grows() -> None:
    it = TurnProgress(0.0)
    for at, processed in ((1.0, 0), (5.0, 40), (6.0, 40), (7.0, 20), (9.0, 60), (10.0, 60)):
        it.record(events.PromptReport(processed=processed, total=100, cached=0), at)
    assert (it.last_data_at, it.prompt_progress_at) == (9.0, 9.0)
    assert [batch[:2] for batch in it.batches] == [(1.0, 5.0), (7.0, 9.0)]
    assert it.repeated_at == (10.0,)


def test_first_batch_reported_early_lasts_like_the_second() -> None:
    it = TurnProgress(0.0)
    for at, processed in ((1.0, 0), (1.1, 512), (9.1, 1024)):
        assert not it.batches
        it.record(events.PromptReport(processed=processed, total=2000, cached=0), at)
    it.record(events.PromptReport(processed=1536, total=2000, cached=0), 16.1)
    lasted = [batch.ended_at - batch.began_at for batch in it.batches]
    assert lasted == pytest.approx([8.0, 8.0, 7.0])


def test_a_batch_leaves_out_what_was_cached() -> None:
    it = TurnProgress(0.0)
    for at, processed in ((1.0, 0), (3.0, 1400), (20.0, 1400), (22.5, 1912)):
        it.record(events.PromptReport(processed=processed, total=2000, cached=900), at)
    assert it.batches == (
        Batch(began_at=0.5, ended_at=3.0, tokens=500, depth=1400),
        Batch(began_at=20.0, ended_at=22.5, tokens=512, depth=1912),
    )


@cases(
    "timings, batches",
    {
        "whole": (events.TimingsReport(100, 400, 1, None, 500.0), (Batch(4.5, 5.0, 400, 500),)),
        "old": (events.TimingsReport(None, 400, 1, None, 2000.0), (Batch(3.0, 5.0, 400, 400),)),
        "all of it was cached": (events.TimingsReport(100, 0, 1, None, 2000.0), ()),
        "no duration": (events.TimingsReport(100, 400, 1, None, -1.0), ()),
        "no duration told": (events.TimingsReport(100, 400, 1, None), ()),
    },
)
def test_a_prompt_without_reports_is_one_batch(
    timings: events.TimingsReport, batches: tuple[Batch, ...]
) -> None:
    it, silent = TurnProgress(0.0), TurnProgress(0.0)
    record(it, events.TextDelta("a"), at=5.0)
    record(it, timings, at=9.0)
    record(silent, timings, at=9.0)
    assert (it.batches, silent.batches) == (batches, ())


def test_reports_tell_more_of_batches_than_timings_do() -> None:
    it = TurnProgress(0.0)
    for at, processed in ((1.0, 0), (3.0, 500)):
        it.record(events.PromptReport(processed=processed, total=500, cached=0), at)
    record(it, events.TextDelta("a"), events.TimingsReport(0, 500, 1, None, 9000.0), at=5.0)
    assert it.batches == (Batch(1.0, 3.0, 500, 500),)


def test_repeats_are_kept_and_are_no_tokens() -> None:
    it = TurnProgress(0.0)
    record(it, *[events.EmptyRecord()] * 5, *[events.ToolCallDelta(0, None, None, "")] * 2)
    assert (len(it.repeated_at), it.last_data_at, it.tokens) == (1, None, 0)
    assert it.first_token_at is None
    record(it, events.TextDelta("a"), at=2.0)
    assert (it.repeated_at, it.last_data_at) == ((), 2.0)
    for at in (3.0, 3.4, 5.0, 5.1, 7.0, 7.5):  # what comes together is one
        record(it, events.ToolCallDelta(0, None, None, ""), at=at)
    assert (it.repeated_at, it.last_data_at) == ((5.0, 7.0, 7.5), 2.0)
