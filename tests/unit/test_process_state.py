"""What is signalled to a server's process, and when; with a literal clock."""

from __future__ import annotations

import pytest

from llama_worker.server.termination import (
    Absent,
    Killing,
    Present,
    ProcessState,
    Signal,
    Terminating,
    deadline,
    terminate,
    tick,
)


def test_a_process_is_asked_first_and_killed_after_the_grace() -> None:
    state, signal = terminate(Present(1), epoch=1, grace_s=10.0, now=5.0)
    assert (state, signal, deadline(state)) == (Terminating(1, 15.0, 7.0), Signal.TERMINATE, 7.0)
    assert tick(state, now=6.9) == (state, None)
    assert tick(state, now=15.0) == (Killing(1, 16.0), Signal.KILL)


def test_it_is_asked_a_second_time_and_no_third() -> None:
    state, signal = tick(Terminating(1, 15.0, 7.0), now=7.0)
    assert (state, signal, deadline(state)) == (Terminating(1, 15.0, None), Signal.TERMINATE, 15.0)
    assert tick(state, now=14.9) == (state, None)
    assert tick(state, now=15.0) == (Killing(1, 16.0), Signal.KILL)


def test_a_grace_that_is_over_before_the_second_time_comes_kills() -> None:
    assert deadline(Terminating(1, 6.0, 7.0)) == 6.0
    assert tick(Terminating(1, 6.0, 7.0), now=7.0) == (Killing(1, 8.0), Signal.KILL)


@pytest.mark.parametrize("grace_s", [0.0, -1.0])
@pytest.mark.parametrize("state", [Present(1), Terminating(1, 15.0, 7.0)])
def test_without_grace_it_is_killed_at_once(state: ProcessState, grace_s: float) -> None:
    assert terminate(state, epoch=1, grace_s=grace_s, now=5.0) == (Killing(1, 6.0), Signal.KILL)


@pytest.mark.parametrize(("grace_s", "kill_at"), [(2.5, 7.5), (20.0, 15.0)])
def test_a_second_order_only_shortens_the_grace(grace_s: float, kill_at: float) -> None:
    assert terminate(Terminating(1, 15.0, 7.0), epoch=1, grace_s=grace_s, now=5.0) == (
        Terminating(1, kill_at, 7.0),
        None,
    )


@pytest.mark.parametrize("grace_s", [0.0, 10.0])
@pytest.mark.parametrize("state", [Absent(), Present(2), Terminating(2, 15.0, 7.0), Killing(2, 6.0), Killing(1, 6.0)])
def test_an_order_for_another_launch_or_too_late_changes_nothing(state: ProcessState, grace_s: float) -> None:
    assert terminate(state, epoch=1, grace_s=grace_s, now=5.0) == (state, None)


def test_should_the_end_not_be_seen_it_is_killed_past_the_guard_again_and_again() -> None:
    state = Killing(1, 16.0)
    assert deadline(state) == 16.0
    assert tick(state, now=15.9) == (state, None)
    assert tick(state, now=16.0) == (Killing(1, 17.0), Signal.FORCE)
    assert tick(Killing(1, 17.0), now=17.0) == (Killing(1, 18.0), Signal.FORCE)


@pytest.mark.parametrize("state", [Absent(), Present(1)])
def test_otherwise_time_changes_nothing(state: ProcessState) -> None:
    assert deadline(state) is None
    assert tick(state, now=1e9) == (state, None)
