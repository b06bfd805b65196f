"""Who waits for output: answered once there is some, and forgotten with whoever asked."""

from __future__ import annotations

import gc

import pytest

from llama_worker.messages import ReadOutput
from llama_worker.request.waiting_reads import WaitingReads, is_answered_by
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.types import NotFound, OutputChunk

Future = WorkerFuture[OutputChunk | NotFound]
CHUNK = OutputChunk(ok=True, text="", reasoning="", text_offset=0, reasoning_offset=0, done=False)


def read(
    future: Future, text_offset: int = 0, reasoning_offset: int = 0, *, wait: bool = True
) -> ReadOutput:
    return ReadOutput(
        request_id=7,
        text_offset=text_offset,
        reasoning_offset=reasoning_offset,
        wait=wait,
        reply=future,
    )


@pytest.mark.parametrize(
    ("offsets", "chars", "wait", "answered"),
    [
        ((0, 0), (0, 0), True, False),
        ((0, 0), (0, 0), False, True),
        ((0, 0), (1, 0), True, True),
        ((0, 0), (0, 1), True, True),
        ((5, 5), (5, 5), True, False),
        ((5, 5), (5, 6), True, True),
        ((9, 9), (5, 5), True, False),  # behind the end: nothing new there, yet
    ],
)
def test_a_question_is_answered_by_what_is_behind_its_offsets(
    offsets: tuple[int, int], chars: tuple[int, int], wait: bool, answered: bool
) -> None:
    assert is_answered_by(read(Future(), *offsets, wait=wait), *chars) == answered


def test_each_waits_for_its_own_offset() -> None:
    early, late = read(Future(), 3), read(Future(), 5)
    reads = WaitingReads()
    reads.add(early)
    reads.add(late)
    assert [reads.take(3, 0), reads.take(4, 0), reads.take(), reads.take()] == [
        [],
        [early],
        [late],
        [],
    ]


def test_who_was_answered_or_gave_up_waiting_is_forgotten() -> None:
    reads, answered = WaitingReads(), Future()
    reads.add(read(answered))
    reads.add(read(Future()))  # and dropped
    answered.answer(CHUNK)
    gc.collect()
    assert reads.take() == []


def test_a_host_that_waits_again_and_again_leaves_little_behind() -> None:
    reads, kept = WaitingReads(), Future()
    reads.add(read(kept))
    for _ in range(1000):
        reads.add(read(Future()))
    assert len(reads) <= 32
    assert reads.take(1, 0) == [read(kept)]
