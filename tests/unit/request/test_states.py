"""Every state of a request against every event, beside the table in the module's docstring."""

import re
from collections.abc import Callable
from typing import get_args

import pytest

from llama_worker.request import states
from llama_worker.request.messages import AskIfServerDied
from llama_worker.stream.events import Done, StreamEvent, TextDelta
from tests.unit.request import playbook


def settling_with_calls() -> playbook.Play:
    play = playbook.asked(playbook.WITH_TOOLS)
    assert play >> 101.0 >> (TextDelta("a"), playbook.call("add"), playbook.CALLS)
    return play


def asked_why() -> playbook.Play:
    play = playbook.disconnected()
    assert play >> 103.2 << AskIfServerDied
    return play


def ended() -> playbook.Play:
    play = playbook.settling()
    play >> Done()
    play.drop_effects()
    return play


STATES: dict[str, Callable[[], playbook.Play]] = {
    "Prompting": lambda: playbook.Play(writes_bios=False),
    "Streaming": lambda: playbook.generating(playbook.WITH_TOOLS),
    "Settling": lambda: playbook.settling(playbook.WITH_TOOLS),
    "Settling with calls": settling_with_calls,
    "Disconnected": playbook.disconnected,
    "Disconnected and asked": asked_why,
    "ReadingRest": playbook.reading_rest,
    "RunningTools": playbook.in_tools,
    "Ended": ended,
}
EVENTS: dict[str, playbook.Event | tuple[StreamEvent, ...]] = {
    "BIOS written": playbook.bios(),
    "BIOS failed": playbook.bios(error="no prompt today"),
    "finish reason": playbook.STOP,
    "[DONE]": Done(),
    "error record": playbook.BOOM,
    "loop": TextDelta(playbook.LINE * 30),
    "connection lost": playbook.closed(playbook.RESET),
    "HTTP error": playbook.closed(playbook.failure("http_error", "HTTP 500: no", 500)),
    "tools refused": playbook.closed(playbook.TOOLS_REFUSED),
    "server died": playbook.SERVER_DIED,
    "server is alive": playbook.SERVER_IS_ALIVE,
    "server is gone": playbook.SERVER_IS_GONE,
    "text": TextDelta("more"),
    "last call returned": playbook.returned("3"),
    "call failed": playbook.returned("no", ok=False),
    "abandoned": playbook.RESTARTED,
    "cancelled": playbook.CANCEL,
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
