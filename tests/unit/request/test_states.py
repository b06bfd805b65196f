"""Every state of a request against every event, beside the table in the module's docstring."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_args

import pytest

from llama_worker.request import states
from llama_worker.request.messages import AskIfServerDied
from llama_worker.stream.events import Done, StreamEvent, TextDelta
from tests.unit.request.playbook import (
    BOOM,
    CALLS,
    CANCEL,
    LINE,
    RESET,
    RESTARTED,
    SERVER_DIED,
    SERVER_IS_ALIVE,
    SERVER_IS_GONE,
    STOP,
    TOOLS_REFUSED,
    WITH_TOOLS,
    Event,
    Play,
    asked,
    bios,
    call,
    closed,
    disconnected,
    failure,
    generating,
    in_tools,
    reading_rest,
    returned,
    settling,
)


def settling_with_calls() -> Play:
    play = asked(WITH_TOOLS)
    assert play >> 101.0 >> (TextDelta("a"), call("add"), CALLS)
    return play


def asked_why() -> Play:
    play = disconnected()
    assert play >> 103.2 << AskIfServerDied
    return play


def ended() -> Play:
    play = settling()
    play >> Done()
    play.drop_effects()
    return play


STATES: dict[str, Callable[[], Play]] = {
    "Prompting": lambda: Play(writes_bios=False),
    "Streaming": lambda: generating(WITH_TOOLS),
    "Settling": lambda: settling(WITH_TOOLS),
    "Settling with calls": settling_with_calls,
    "Disconnected": disconnected,
    "Disconnected and asked": asked_why,
    "ReadingRest": reading_rest,
    "RunningTools": in_tools,
    "Ended": ended,
}
EVENTS: dict[str, Event | tuple[StreamEvent, ...]] = {
    "BIOS written": bios(),
    "BIOS failed": bios(error="no prompt today"),
    "finish reason": STOP,
    "[DONE]": Done(),
    "error record": BOOM,
    "loop": TextDelta(LINE * 30),
    "connection lost": closed(RESET),
    "HTTP error": closed(failure("http_error", "HTTP 500: no", 500)),
    "tools refused": closed(TOOLS_REFUSED),
    "server died": SERVER_DIED,
    "server is alive": SERVER_IS_ALIVE,
    "server is gone": SERVER_IS_GONE,
    "text": TextDelta("more"),
    "last call returned": returned("3"),
    "call failed": returned("no", ok=False),
    "abandoned": RESTARTED,
    "cancelled": CANCEL,
}


def table() -> dict[tuple[str, str], str]:
    """The next state by state and event, as the docstring has it."""
    rows = re.findall(r"^    (\w[\w ]*?)  +(.+?)  +(\w+)$", states.__doc__ or "", re.M)
    arrows: dict[tuple[str, str], str] = {}
    for state, events, following in rows:
        named = [name for name in STATES if name != "Ended"]
        for name in named if state == "any but Ended" else [state]:
            for event in events.split(" | "):
                assert (name, event) not in arrows
                arrows[name, event] = following
    return arrows


def following(state: str, event: str) -> str:
    play = STATES[state]()
    play.writes_bios = False
    play.drop_effects()
    play >> (EVENTS[event] if event != "deadline" else play.request.deadline or 1e6)
    return type(play.request.state).__name__


def test_every_state_is_reached() -> None:
    reached = {type(make().request.state) for make in STATES.values()}
    assert reached == set(get_args(states.State))


@pytest.mark.parametrize("state", STATES)
def test_arrows_are_as_documented(state: str) -> None:
    events = [*EVENTS, "deadline"]
    documented = {event: table().get((state, event), state.split()[0]) for event in events}
    assert {event: following(state, event) for event in events} == documented


def test_the_table_names_nothing_else() -> None:
    assert {state for state, _ in table()} == STATES.keys() - {"Ended"}
    assert {event for _, event in table()} <= {*EVENTS, "deadline"}
