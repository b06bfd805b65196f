"""What is signalled to a server's process, and when; with a literal clock."""

from signal import SIGCONT, SIGKILL

import pytest

from llama_worker.mailbox import Tick
from llama_worker.server import termination
from llama_worker.server.messages import Exited, Launch, LaunchFailed, ProcessMessage, Terminate
from llama_worker.server.termination import (
    Absent,
    Killing,
    Present,
    ProcessState,
    Signal,
    SilentGuardWatch,
    Stuck,
    Terminating,
    deadline,
)
from llama_worker.types.worker import StartFailReason

Step = tuple[ProcessState, Signal | None]


def step(
    state: ProcessState, message: ProcessMessage, now: float, kill_timeout_s: float = 4.0
) -> Step:
    return termination.step(state, message, now, kill_timeout_s=kill_timeout_s)


def terminate(state: ProcessState, now: float, *, grace_s: float) -> Step:
    return step(state, Terminate(grace_s=grace_s), now)


def tick(state: ProcessState, now: float) -> Step:
    return step(state, Tick(), now)


def test_sigterm_is_repeated_once_then_sigkill_follows() -> None:
    state, signal = terminate(Present(), 5.0, grace_s=10.0)
    assert (state, signal, deadline(state)) == (Terminating(15.0, 7.0), Signal.TERMINATE, 7.0)
    assert tick(state, 6.9) == (state, None)
    assert tick(state, 15.0) == (Killing(16.0, 19.0), Signal.KILL)
    state, signal = tick(state, 7.0)
    assert (state, signal, deadline(state)) == (Terminating(15.0, None), Signal.TERMINATE, 15.0)
    assert tick(state, 14.9) == (state, None)
    assert tick(state, 15.0) == (Killing(16.0, 19.0), Signal.KILL)


def test_a_grace_shorter_than_the_repeat_kills() -> None:
    assert deadline(Terminating(6.0, 7.0)) == 6.0
    assert tick(Terminating(6.0, 7.0), 7.0) == (Killing(8.0, 11.0), Signal.KILL)
    assert terminate(Present(), 5.0, grace_s=0.5) == (Terminating(5.5, 7.0), Signal.TERMINATE)


@pytest.mark.parametrize("grace_s", [0.0, -1.0])
@pytest.mark.parametrize("state", [Present(), Terminating(15.0, 7.0)])
def test_without_grace_the_server_is_killed_at_once(state: ProcessState, grace_s: float) -> None:
    assert terminate(state, 5.0, grace_s=grace_s) == (Killing(6.0, 9.0), Signal.KILL)


@pytest.mark.parametrize(("grace_s", "kill_at"), [(2.5, 7.5), (20.0, 15.0)])
def test_a_second_order_only_shortens_the_grace(grace_s: float, kill_at: float) -> None:
    shortened = Terminating(kill_at, 7.0)
    assert terminate(Terminating(15.0, 7.0), 5.0, grace_s=grace_s) == (shortened, None)


@pytest.mark.parametrize("grace_s", [0.0, 10.0])
@pytest.mark.parametrize("state", [Absent(), Killing(6.0, 9.0), Stuck()])
def test_a_late_order_changes_nothing(state: ProcessState, grace_s: float) -> None:
    assert terminate(state, 5.0, grace_s=grace_s) == (state, None)


@pytest.mark.parametrize("state", [Absent(), Present(), Stuck()])
def test_a_tick_before_the_deadline_changes_nothing(state: ProcessState) -> None:
    assert deadline(state) is None
    assert tick(state, 1e9) == (state, None)


@pytest.mark.parametrize(
    "state", [Absent(), Present(), Terminating(15.0, 7.0), Killing(16.0, 19.0), Stuck()]
)
@pytest.mark.parametrize(
    ("message", "after"),
    [
        (Exited(epoch=1, returncode=-9, log_tail=()), Absent()),
        (LaunchFailed(epoch=1, reason=StartFailReason.SPAWN_FAILED, detail="no"), Absent()),
        (Launch(epoch=1), Present()),
    ],
)
def test_exit_and_launch_are_same_in_every_state(
    state: ProcessState, message: ProcessMessage, after: ProcessState
) -> None:
    assert step(state, message, 20.0) == (after, None)


def test_a_process_that_outlives_sigkill_is_given_up() -> None:
    state, _ = terminate(Present(), 5.0, grace_s=0.0)
    assert tick(state, 5.9) == (state, None)
    told = []
    while (due := deadline(state)) is not None:
        state, what = tick(state, due)
        told.append((due, what))
    assert told == [(6.0, Signal.FORCE), (7.0, Signal.FORCE), (8.0, Signal.FORCE), (9.0, None)]
    assert state == Stuck()


@pytest.mark.parametrize("kill_timeout_s", [0.0, 0.5, 1.0])
def test_a_short_kill_timeout_is_kept(kill_timeout_s: float) -> None:
    order = Terminate(grace_s=0.0)
    state, signal = step(Present(), order, 5.0, kill_timeout_s)
    assert (signal, deadline(state)) == (Signal.KILL, 5.0 + kill_timeout_s)
    assert step(state, Tick(), 5.0 + kill_timeout_s, kill_timeout_s) == (Stuck(), None)


def test_an_unkillable_process_is_described_with_its_wchan() -> None:
    process = {"pid": 5, "state": "D", "uid": 0, "wchan": "nfs_wait_bit_killable", "stack": ""}
    told = termination.describe_stuck(5, {"processes": [process, {"pid": 6, "state": "Z"}]})
    assert told == "SIGKILL does not end process 5; state D; uid 0; wchan nfs_wait_bit_killable"
    assert termination.describe_stuck(5, {"processes": []}) == (  # only what it has started
        "SIGKILL does not end the tree of process 5"
    )
    assert termination.describe_stuck(None, {}) == (
        "SIGKILL does not end the start of the server's process"
    )


@pytest.mark.parametrize(
    ("looks", "sent"),
    [
        ([(0.0, False), (100.0, False)], [None, None]),
        ([(0.0, True), (0.9, True), (1.0, True)], [None, None, SIGCONT]),
        ([(0.0, True), (0.1, False), (50.0, True)], [None, None, None]),
        (
            [(0.0, True), (1.0, True), (600.0, True), (600.5, True), (601.0, True), (602.0, True)],
            [None, SIGCONT, SIGCONT, None, SIGCONT, SIGCONT],
        ),
        (
            [(float(second), True) for second in range(8)],
            [None, SIGCONT, SIGCONT, SIGCONT, SIGCONT, SIGKILL, SIGKILL, SIGKILL],
        ),
    ],
    ids=["nothing is due", "a second", "in time", "a gap is one check", "too long"],
)
def test_a_silent_guard_is_resumed_or_killed(
    looks: list[tuple[float, bool]], sent: list[object]
) -> None:
    silence = SilentGuardWatch()
    assert [silence.step(now, overdue=overdue) for now, overdue in looks] == sent


def test_a_guard_without_an_overdue_report_wakes_nobody() -> None:
    silence = SilentGuardWatch()
    assert silence.wait_ms(5.0) is None
    silence.step(5.0, overdue=True)
    assert silence.wait_ms(5.25) == 750.0
    assert silence.wait_ms(7.0) == 0.0
    silence.step(7.0, overdue=False)
    assert silence.wait_ms(7.0) is None
