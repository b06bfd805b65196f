"""What a request has put out: it only grows, up to a loop or to the end."""

from __future__ import annotations

from llama_worker.config.profiles import LoopDetector
from llama_worker.request.output import Output

LINE = f"{'y' * 40}\n"  # a loop where it comes 12 times


def test_it_ends_with_the_line_that_decided_on_a_loop() -> None:
    it = Output(LoopDetector())
    it.add("", "a\n" + LINE * 11)
    assert it.loop is None
    it.add("", LINE * 5 + "b")
    assert it.loop is not None
    assert it.text == "a\n" + LINE * 12
    it.add("c", "d")
    it.add_rest("e", "f")
    assert (it.reasoning, it.text) == ("", "a\n" + LINE * 12)


def test_a_loop_in_the_reasoning_ends_the_text_too() -> None:
    it = Output(LoopDetector())
    it.add(LINE * 30, "a")
    assert (it.reasoning, it.text) == (LINE * 12, "")


def test_the_rest_is_added_whole_and_is_no_loop() -> None:
    it = Output(LoopDetector())
    it.add("hm", "a\n")
    it.add_rest("\n" + LINE * 20, LINE * 20 + "b")
    assert it.loop is None
    assert (it.reasoning, it.text) == ("hm\n" + LINE * 20, "a\n" + LINE * 20 + "b")
