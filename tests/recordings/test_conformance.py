"""The simulated server does in each situation what the real one was recorded to do."""

import pytest

from tests.recordings.conformance import LEFT_OUT, differences, essence
from tests.recordings.on_model import play
from tests.recordings.record import STORED
from tests.recordings.records import Record, Recording, in_order_of_batches, path_of, read
from tests.recordings.situations import SITUATIONS, Situation
from tests.simulation.server import Exchange, LlamaServer


def unlike(situation: Situation, server_class: type[LlamaServer] = LlamaServer) -> list[str]:
    """How the simulated server differs from the recording of the real one."""
    recorded = read(path_of(STORED, situation))
    played = play(situation, recorded.prompts, server_class)
    left_out = {about for name, about in LEFT_OUT if name == situation.name}
    return differences(
        *(
            {about: lines for about, lines in essence(each).items() if about not in left_out}
            for each in (recorded, played)
        )
    )


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.name)
def test_the_simulated_server_does_as_the_real_one(situation: Situation) -> None:
    assert unlike(situation) == []


def test_every_recording_belongs_to_a_situation() -> None:
    assert {path_of(STORED, each) for each in SITUATIONS} == set(STORED.iterdir())


@pytest.mark.parametrize(("name", "about"), LEFT_OUT)
def test_what_is_left_out_differs_indeed(name: str, about: str) -> None:
    situation = next(each for each in SITUATIONS if each.name == name)
    recorded = read(path_of(STORED, situation))
    played = play(situation, recorded.prompts)
    assert essence(recorded).get(about) != essence(played).get(about)


class FillsEverySlot(LlamaServer):
    """Each slot that reads gets a whole batch, whatever the others get."""

    def _fill_batch(self) -> float | None:
        seconds = super()._fill_batch()
        for each in self.busy:
            if each.is_begun and not each.has_read:
                left = each.reply.prompt_tokens - each.processed
                each.in_batch = min(left, self.build.batch_tokens)
        return seconds


class ReportsOnlyWhatMoved(LlamaServer):
    def _read_prompt(self, exchange: Exchange) -> bool:
        if exchange.in_batch:
            return super()._read_prompt(exchange)
        return exchange.has_read


class TakesTheLowestSlot(LlamaServer):
    def _free_slot(self) -> int | None:
        return next((slot for slot, holder in enumerate(self.slots) if holder is None), None)


class ForgetsWhoGenerates(LlamaServer):
    """Their tokens take no room in the batch."""

    def _fill_batch(self) -> float | None:
        seconds = super()._fill_batch()
        reading = [each for each in self.busy if each.in_batch]
        if reading:
            left = reading[-1].reply.prompt_tokens - reading[-1].processed
            room = self.build.batch_tokens - sum(each.in_batch for each in reading[:-1])
            reading[-1].in_batch = min(left, room)
        return seconds


class WorksBehindSigterm(LlamaServer):
    def work(self) -> None:
        terms, self._terms = self._terms, 0
        super().work()
        self._terms = terms


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (FillsEverySlot, "two long prompts side by side"),
        (FillsEverySlot, "four long prompts side by side"),
        (FillsEverySlot, "a higher slot is free while a lower one reads"),
        (ReportsOnlyWhatMoved, "two long prompts side by side"),
        (TakesTheLowestSlot, "a prompt that comes while another is half read"),
        (ForgetsWhoGenerates, "a prompt beside a generation"),
        (WorksBehindSigterm, "SIGTERM with open streams"),
    ],
)
def test_another_model_is_rejected(model: type[LlamaServer], name: str) -> None:
    situation = next(each for each in SITUATIONS if each.name == name)
    assert unlike(situation, model)


def test_one_slot_alone_cannot_tell_how_batches_fill() -> None:
    assert unlike(SITUATIONS[1], FillsEverySlot) == []


def recording(*records: str) -> Recording:
    """Each as "who: what"."""
    split = (record.split(": ", 1) for record in records)
    return Recording("x", {}, [Record(who, what) for who, what in split])


def test_first_report_stands_behind_the_batch_before_it() -> None:
    seen = [
        Record("a", "report 2 of 9", 0.10),
        Record("b", "headers 200", 0.20),
        Record("b", "report 0 of 9", 0.20),
        Record("a", "report 4 of 9", 0.21),
        Record("b", "report 2 of 9", 0.30),
        Record("a", "report 4 of 9 again", 0.30),
    ]
    ordered = in_order_of_batches(seen, within_s=0.02)
    assert ordered == [seen[0], seen[3], seen[1], seen[2], *seen[4:]]
    assert in_order_of_batches(seen, within_s=0.001) == seen


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        # two clients hear of one batch in either order
        (
            ("a: report 2 of 9", "b: report 4 of 9", "a: report 4 of 9", "b: report 4 of 9 again"),
            ("b: report 4 of 9", "a: report 2 of 9", "b: report 4 of 9 again", "a: report 4 of 9"),
            True,
        ),
        # what one batch gave to both, two batches gave in turn
        (
            ("a: report 2 of 9", "b: report 4 of 9", "a: report 4 of 9"),
            ("a: report 2 of 9", "a: report 4 of 9", "b: report 4 of 9"),
            False,
        ),
        # two streams of tokens are independent
        (("a: token", "b: token", "a: token"), ("a: token", "a: token", "b: token"), True),
        (("a: token", "a: token"), ("a: token",), False),
        # until its client closed, the machine decides how many there were
        (("a: token", "a: token", "a: closed"), ("a: token", "a: closed"), True),
        (("a: finish stop", "a: usage"), ("a: usage", "a: finish stop"), False),
        (("slots: 0 idle",), ("slots: 0 writes",), False),
    ],
)
def test_what_counts_as_the_same(
    one: tuple[str, ...], other: tuple[str, ...], is_same: bool
) -> None:
    assert (differences(essence(recording(*one)), essence(recording(*other))) == []) is is_same
