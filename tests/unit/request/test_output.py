"""What a request has put out, which only grows, and who waits for more."""

import gc
from collections.abc import Callable

import pytest

from llama_worker.config.profiles import LoopDetector
from llama_worker.request.messages import ReadOutput
from llama_worker.request.output import OpenQuestions, Output, can_answer
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.types.request import NotFound, OutputChunk

LINE = "0123456789" * 4 + "\n"  # a loop where it comes 12 times


def test_output_ends_with_the_line_that_decided() -> None:
    it = Output(LoopDetector())
    it.add("", "a\n" + LINE * 11)
    assert it.loop is None
    it.add("", LINE * 5 + "b")
    assert it.loop is not None
    assert it.text.read() == "a\n" + LINE * 12
    it.add("c", "d")
    it.add_held_back("e", "f")
    assert (it.reasoning.read(), it.text.read()) == ("", "a\n" + LINE * 12)


def test_rest_is_added_whole_and_is_no_loop() -> None:
    it = Output(LoopDetector())
    it.add("hm", "a\n")
    it.add_held_back("\n" + LINE * 20, LINE * 20 + "b")
    assert it.loop is None
    assert (it.reasoning.read(), it.text.read()) == ("hm\n" + LINE * 20, "a\n" + LINE * 20 + "b")


# ---------------------------------------------------------------- who waits

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
def test_what_answers_a_question(
    offsets: tuple[int, int], chars: tuple[int, int], wait: bool, answered: bool
) -> None:
    assert can_answer(read(Future(), *offsets, wait=wait), *chars) == answered


def with_text(chars: int) -> Callable[[ReadOutput], bool]:
    return lambda question: can_answer(question, chars, 0)


def test_each_waits_for_its_own_offset() -> None:
    early, late = read(Future(), 3), read(Future(), 5)
    reads = OpenQuestions[ReadOutput]()
    reads.add(early)
    reads.add(late)
    taken = [reads.take(with_text(3)), reads.take(with_text(4)), reads.take(), reads.take()]
    assert taken == [[], [early], [late], []]


def test_answered_and_abandoned_waits_are_forgotten() -> None:
    reads, answered = OpenQuestions[ReadOutput](), Future()
    reads.add(read(answered))
    reads.add(read(Future()))  # and dropped
    answered.answer(CHUNK)
    gc.collect()
    assert reads.take() == []


class Asked(Future):
    """Counts how often such a one is looked at."""

    count = 0

    def done(self) -> bool:
        Asked.count += 1
        return super().done()


def test_many_open_questions_are_seldom_looked_through() -> None:
    reads, kept = OpenQuestions[ReadOutput](), [Asked() for _ in range(100)]
    for count, each in enumerate(kept, 1):
        reads.add(read(each))
        for _ in range(5):
            reads.add(read(Future()))  # and dropped
        assert len(reads) <= max(16, 2 * count)
    assert Asked.count <= 1000


def test_asking_again_and_again_leaves_little_behind() -> None:
    reads, kept = OpenQuestions[ReadOutput](), Future()
    reads.add(read(kept))
    answered = [Future() for _ in range(1000)]
    for each in answered:
        reads.add(read(Future()))  # and dropped
        reads.add(read(each))
        each.answer(CHUNK)
    assert len(reads) <= 32
    assert reads.take(with_text(1)) == [read(kept)]
