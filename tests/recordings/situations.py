"""What is played on the real server and on the simulated one: who asks what, and when.

A step is done after its moment, which is a record that a request got, so that it falls into the
batch that follows: which batch it is does not depend on how fast the machine is. Steps are done in
their order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

ENDLESS: Mapping[str, Any] = {"grammar": 'root ::= "tick " root', "temperature": 0}
ITEM_TOKENS = 8  # of a prompt, about


@dataclass(frozen=True, slots=True)
class After:
    """The moment when a request has got so many records of a kind."""

    request: str
    kind: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Ask:
    """A chat request, by the name under which it is recorded."""

    request: str
    items: int  # of its prompt, ITEM_TOKENS each
    answer: int = 4  # tokens, by `max_tokens`
    after: After | None = None
    about: str = ""  # the prompt begins with it; the request's name if empty
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Close:
    """The client closes the connection of a request."""

    request: str
    after: After


@dataclass(frozen=True, slots=True)
class Look:
    """Somebody asks `/slots`."""

    after: After


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM."""

    after: After


Step = Ask | Close | Look | Terminate


@dataclass(frozen=True, slots=True)
class Situation:
    name: str
    steps: tuple[Step, ...]
    slots: int = 1
    batch: int = 256
    slot_tokens: int = 4096
    args: tuple[str, ...] = ()

    @property
    def requests(self) -> list[Ask]:
        return [step for step in self.steps if isinstance(step, Ask)]


def _side_by_side(name: str, slots: int, batch: int, items: int) -> Situation:
    """One long prompt a slot, each sent when the one before is being read."""
    names = "abcd"[:slots]
    first = Ask("a", items)
    others = (
        Ask(later, items, after=After(before, "report", 2)) for before, later in pairwise(names)
    )
    return Situation(name, (first, *others), slots=slots, batch=batch)


SITUATIONS = (
    Situation("one short prompt", (Ask("a", 2, answer=12),)),
    Situation("one long prompt", (Ask("a", 120),)),
    Situation("one long prompt in small batches", (Ask("a", 120),), batch=128),
    Situation("one long prompt in one batch", (Ask("a", 120),), batch=2048),
    Situation("without progress reports", (Ask("a", 120, body={"return_progress": False}),)),
    _side_by_side("two long prompts side by side", 2, 256, 200),
    _side_by_side("two long prompts in small batches", 2, 128, 120),
    _side_by_side("two long prompts in large batches", 2, 1024, 400),
    _side_by_side("four long prompts side by side", 4, 256, 120),
    Situation(
        "a prompt beside a generation",
        (
            Ask("a", 2, answer=40),
            Ask("b", 160, after=After("a", "token", 3)),
            Look(After("b", "report", 3)),
        ),
        slots=2,
    ),
    Situation(
        "a prompt that comes while another is half read",
        (
            Ask("a", 160),
            Look(After("a", "report", 3)),
            Ask("b", 80, after=After("a", "report", 4)),
            Look(After("b", "report", 2)),
        ),
        slots=2,
    ),
    Situation(
        "a higher slot is free while a lower one reads",
        (
            Ask("a", 2, answer=4),
            Ask("b", 160, after=After("a", "headers")),
            Ask("c", 40, after=After("b", "report", 3)),
        ),
        slots=2,
    ),
    Situation(
        "more requests than slots",
        (
            Ask("a", 80, answer=6),
            Ask("b", 40, after=After("a", "report", 2)),
            Look(After("a", "report", 3)),
        ),
    ),
    Situation(
        "three requests for two slots",
        (
            Ask("a", 120, answer=6),
            Ask("b", 40, answer=6, after=After("a", "report", 2)),
            Ask("c", 40, answer=6, after=After("b", "report", 1)),
        ),
        slots=2,
    ),
    Situation(
        "closed while it waits",
        (
            Ask("a", 120),
            Ask("b", 40, after=After("a", "report", 2)),
            Close("b", After("a", "report", 3)),
        ),
    ),
    Situation(
        "closed while it reads",
        (
            Ask("a", 200),
            Close("a", After("a", "report", 3)),
            Ask("b", 40, after=After("a", "closed")),
        ),
    ),
    Situation(
        "closed while it reads, beside another",
        (
            Ask("a", 200),
            Ask("b", 200, after=After("a", "report", 2)),
            Close("b", After("b", "report", 3)),
        ),
        slots=2,
    ),
    Situation(
        "closed while it generates",
        (
            Ask("a", 2, answer=2000),
            Close("a", After("a", "token", 8)),
            Ask("b", 40, after=After("a", "closed")),
        ),
    ),
    Situation("too long for the slot", (Ask("a", 120),), slot_tokens=512),
    Situation("the slot is full while it generates", (Ask("a", 24, answer=400),), slot_tokens=256),
    Situation(
        "the same prompt again",
        (
            Ask("a", 80, about="same"),
            Ask("b", 80, after=After("a", "end"), about="same"),
            Ask("c", 120, after=After("b", "end"), about="same"),
        ),
    ),
    Situation(
        "SIGTERM with open streams",
        (
            Ask("a", 2, answer=2000, body={"sse_ping_interval": 1}),
            Ask("b", 160, after=After("a", "token", 3), body={"sse_ping_interval": 1}),
            Terminate(After("b", "report", 2)),
        ),
        slots=2,
    ),
    Situation(
        "SIGTERM, and the client closes",
        (Ask("a", 160), Terminate(After("a", "report", 2)), Close("a", After("server", "SIGTERM"))),
    ),
)
