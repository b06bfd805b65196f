"""The worker's state machine, with a literal clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs

from llama_worker.errors import WorkerStartError, WorkerStopError
from llama_worker.messages import Abandon, CloseAllStreams, GpuFaulted, Launch, Start, Stop, Terminate
from llama_worker.profiles import RestartPolicy
from llama_worker.server.gpu_faults import GpuFault
from llama_worker.server.lifecycle import Lifecycle, step
from llama_worker.server.lifecycle_states import (
    BackingOff,
    Effects,
    Ending,
    Failed,
    Launching,
    RecordRestart,
    Resolve,
    State,
    Stopped,
    ToRestart,
)
from llama_worker.types import RequestFailReason, StartFailReason, WorkerState
from tests.lives import (
    Step,
    became_ready,
    died,
    exited,
    launch_failed,
    start,
    startup_failed,
    stop,
    streams_closed,
    tick,
    trouble,
    unkillable,
)

POLICY = RestartPolicy(restart_backoff_s=5.0, max_restarts_per_window=2, restart_window_s=120.0)


def launching() -> Lifecycle:
    life, effects = start(Lifecycle(policy=POLICY), 0.0)
    assert effects == (Launch(epoch=1),)
    return life


def ready() -> Lifecycle:
    life, effects = became_ready(launching(), 1.0)
    assert effects == (Resolve(Start),)
    assert life.public_state is WorkerState.READY
    return life


def error_of(effects: Effects) -> WorkerStartError:
    (error,) = [e.error for e in effects if isinstance(e, Resolve) and e.order is Start]
    assert isinstance(error, WorkerStartError)
    return error


def test_a_gpu_that_fails_restarts_the_server() -> None:
    lost = GpuFaulted(epoch=1, fault=GpuFault(fatal=True, detail="GPU 0: the GPU is lost"))
    life, effects = step(ready(), lost, 2.0)
    assert effects == (
        RecordRestart(reason="gpu_failed", detail="GPU 0: the GPU is lost", delay_s=5.0),
        Abandon(reason=RequestFailReason.WORKER_RESTARTED, detail="gpu_failed: GPU 0: the GPU is lost"),
        CloseAllStreams(epoch=1),
        Terminate(epoch=1, grace_s=0.0, keep_evidence=True),
    )
    assert step(life, lost, 2.1) == (life, ())


def test_an_error_of_a_gpu_that_is_not_fatal_changes_nothing() -> None:
    life = ready()
    assert step(life, GpuFaulted(epoch=1, fault=GpuFault(fatal=False, detail="Xid 31")), 2.0) == (life, ())


def test_start_on_a_ready_worker_resolves_at_once() -> None:
    life = ready()
    assert start(life, 2.0) == (life, (Resolve(Start),))


def test_stop_on_a_stopped_worker_resolves_at_once() -> None:
    life = Lifecycle(policy=POLICY)
    assert stop(life, 0.0, grace_s=10.0) == (life, (Resolve(Stop),))


def test_stop_closes_connections_before_it_terminates() -> None:
    life, effects = stop(ready(), 2.0, grace_s=10.0)
    assert [type(e) for e in effects] == [Abandon, Resolve, CloseAllStreams]
    assert not any(isinstance(e, Terminate) for e in effects)
    life, effects = streams_closed(life, 2.1)
    assert effects == (Terminate(epoch=1, grace_s=10.0),)
    life, effects = exited(life, 2.2, returncode=0)
    assert (life.state, effects) == (Stopped(), (Resolve(Stop),))


@pytest.mark.parametrize(("now", "terminated"), [(2.9, False), (3.0, True)])
def test_termination_waits_a_second_at_most_for_connections(now: float, terminated: bool) -> None:
    life, _ = stop(ready(), 2.0, grace_s=10.0)
    assert life.deadline == 3.0
    _, effects = tick(life, now)
    assert bool(effects) is terminated


def test_stop_during_a_start_ends_it() -> None:
    _, effects = stop(launching(), 0.5, grace_s=10.0)
    assert error_of(effects).reason is StartFailReason.STOPPED


def test_start_during_a_stop_launches_anew_when_the_old_server_is_gone() -> None:
    life, _ = stop(ready(), 2.0, grace_s=10.0)
    life, effects = start(life, 2.1)
    assert effects == ()
    life, effects = exited(life, 2.5, returncode=0)
    assert effects == (Resolve(Stop), Launch(epoch=2))
    assert life.state == Launching(epoch=2, first=True)


def test_stop_after_that_start_ends_it_too() -> None:
    life, _ = stop(ready(), 2.0, grace_s=10.0)
    life, _ = start(life, 2.1)
    life, effects = stop(life, 2.2, grace_s=10.0)
    assert error_of(effects).reason is StartFailReason.STOPPED
    life, effects = exited(life, 2.5, returncode=0)
    assert (life.state, effects) == (Stopped(), (Resolve(Stop),))


def test_a_hurried_stop_shortens_the_grace_of_one_under_way() -> None:
    life, _ = stop(ready(), 2.0, grace_s=10.0)
    life, _ = streams_closed(life, 2.1)
    _, effects = stop(life, 2.2, grace_s=2.0)
    assert Terminate(epoch=1, grace_s=2.0) in effects


@pytest.mark.parametrize(
    ("port_taken", "reason", "state"),
    [
        (False, StartFailReason.EXITED, WorkerState.FAILED),
        (True, StartFailReason.PORT_IN_USE, WorkerState.STOPPED),
    ],
)
def test_the_first_launch_is_not_retried(port_taken: bool, reason: StartFailReason, state: WorkerState) -> None:
    life, effects = exited(launching(), 1.0, port_taken=port_taken)
    error = error_of(effects)
    assert (error.reason, error.returncode, error.log_tail) == (reason, 1, ("oops",))
    assert life.public_state is state


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (StartFailReason.PORT_IN_USE, Stopped()),
        (StartFailReason.SPAWN_FAILED, Failed()),
    ],
)
def test_a_launch_without_a_process_fails_the_start(reason: StartFailReason, state: State) -> None:
    life, effects = launch_failed(launching(), 0.1, reason)
    assert life.state == state
    assert error_of(effects).reason is reason


def test_a_startup_timeout_kills_first_and_then_fails_with_what_the_server_said() -> None:
    life, effects = startup_failed(launching(), 120.0, StartFailReason.STARTUP_TIMEOUT)
    assert Terminate(epoch=1, grace_s=0.0, keep_evidence=True) in effects
    assert not any(isinstance(e, Resolve) and e.order is Start for e in effects)
    life, effects = exited(life, 120.1, returncode=-9)
    assert life.public_state is WorkerState.FAILED
    error = error_of(effects)
    assert (error.reason, error.log_tail) == (StartFailReason.STARTUP_TIMEOUT, ("oops",))


def test_death_while_ready_fails_requests_and_restarts_after_the_backoff() -> None:
    life, effects = exited(ready(), 10.0, returncode=-9)
    assert effects[-1] == Abandon(reason=RequestFailReason.SERVER_DIED, detail="the server ended with signal 9")
    assert life.state == BackingOff(resume_at=15.0)
    assert life.public_state is WorkerState.RUNNING
    assert tick(life, 14.9)[1] == ()
    life, effects = tick(life, 15.0)
    assert effects == (Launch(epoch=2),)
    assert life.state == Launching(epoch=2, first=False)


def test_requests_hear_of_the_death_before_the_rest_of_the_tree_is_gone() -> None:
    life, effects = died(ready(), 10.0, -9)
    assert effects[1:] == (
        Abandon(reason=RequestFailReason.SERVER_DIED, detail="the server ended with signal 9"),
        Terminate(epoch=1, grace_s=0.0),
    )
    assert life.state == Ending(epoch=1, goal=ToRestart(15.0))
    assert died(life, 10.1, -9) == (life, ())
    life, effects = exited(life, 10.2, returncode=-9)
    assert (life.state, effects) == (BackingOff(resume_at=15.0), ())
    assert life.budget.restart_count == 1


def test_the_last_death_is_failed_once_the_tree_is_gone() -> None:
    life = Lifecycle(policy=RestartPolicy.never())
    life, _ = start(life, 0.0)
    life, _ = became_ready(life, 1.0)
    life, effects = died(life, 10.0, 1)
    assert not any(isinstance(e, Resolve) and e.order is Start for e in effects)
    assert life.public_state is WorkerState.RUNNING
    life, effects = exited(life, 10.1)
    assert life.public_state is WorkerState.FAILED
    assert "code 1" in error_of(effects).detail


@pytest.mark.parametrize("how", ["launching", "stopping", "stopped"])
def test_elsewhere_a_death_waits_for_the_end_of_the_tree(how: str) -> None:
    life = launching() if how == "launching" else ready()
    if how != "launching":
        life, _ = stop(life, 5.0, grace_s=10.0)
    if how == "stopped":
        life, _ = exited(life, 6.0)
    assert died(life, 10.0, -9) == (life, ())


def test_backoff_runs_while_the_old_tree_is_ended() -> None:
    life, effects = trouble(ready(), 10.0)
    assert life.state == Ending(epoch=1, goal=ToRestart(15.0))
    assert Terminate(epoch=1, grace_s=0.0, keep_evidence=True) in effects
    late, effects = exited(life, 16.0)
    assert effects == (Launch(epoch=2),)
    early, _ = exited(life, 10.1)
    assert early.state == BackingOff(resume_at=15.0)
    assert late.budget.restart_count == early.budget.restart_count == 1


def test_stop_during_backoff_is_immediate() -> None:
    life, _ = exited(ready(), 10.0)
    life, effects = stop(life, 10.1, grace_s=10.0)
    assert life.state == Stopped()
    assert Resolve(Stop) in effects


def test_a_launch_that_ends_before_ready_counts_as_a_restart() -> None:
    life, _ = exited(ready(), 10.0)
    life, _ = tick(life, 15.0)
    life, effects = exited(life, 15.1)
    assert life.budget.restart_count == 2
    assert isinstance(effects[0], RecordRestart)


def test_locked_out_after_too_many_restarts_and_started_again_by_hand() -> None:
    life = ready()
    now = 10.0
    while not isinstance(life.state, Failed):
        life, effects = exited(life, now)
        now += 30.0
        if isinstance(life.state, BackingOff):
            life, _ = tick(life, now)
            life, _ = became_ready(life, now)
    assert life.budget.restart_count == 2
    assert RecordRestart(reason="server_died", detail=effects[0].detail, delay_s=None) == effects[0]  # type: ignore[union-attr]
    life, effects = start(life, now)
    assert effects == (Launch(epoch=life.epoch),)
    assert life.budget.restart_count == 2
    assert life.budget.recent == ()


@pytest.mark.parametrize("port_taken", [True, False])
def test_who_joins_the_last_restart_is_told_what_the_server_said(port_taken: bool) -> None:
    life, _ = exited(structs.replace(ready(), policy=replace(POLICY, max_restarts_per_window=1)), 10.0)
    life, _ = tick(life, 15.0)
    assert start(life, 16.0) == (life, ())
    life, effects = exited(life, 17.0, returncode=3, log_tail=("out of memory",), port_taken=port_taken)
    error = error_of(effects)
    assert (error.reason, error.returncode, error.log_tail) == (StartFailReason.EXITED, 3, ("out of memory",))


@pytest.mark.parametrize("reason", [StartFailReason.STARTUP_TIMEOUT, StartFailReason.SPAWN_FAILED])
def test_the_last_restart_fails_a_start_with_its_own_reason(reason: StartFailReason) -> None:
    life, _ = exited(structs.replace(ready(), policy=replace(POLICY, max_restarts_per_window=1)), 10.0)
    life, _ = tick(life, 15.0)
    if reason is StartFailReason.SPAWN_FAILED:
        life, effects = launch_failed(life, 16.0, reason)
    else:
        life, _ = startup_failed(life, 16.0, reason)
        life, effects = exited(life, 16.1, returncode=-9)
    assert error_of(effects).reason is reason
    assert life.public_state is WorkerState.FAILED


def test_news_of_an_older_launch_changes_nothing() -> None:
    life, _ = exited(ready(), 10.0)
    life, _ = tick(life, 15.0)
    assert became_ready(life, 16.0, epoch=1) == (life, ())
    assert exited(life, 16.0, epoch=1) == (life, ())
    assert died(life, 16.0, epoch=1) == (life, ())
    assert streams_closed(life, 16.0, epoch=1) == (life, ())
    stale = startup_failed(life, 16.0, StartFailReason.STARTUP_TIMEOUT, epoch=1)
    assert stale == (life, ())


# ---------------------------------------------------------------- what SIGKILL does not end


def ending(how: str) -> Lifecycle:
    """In each of the ways in which a server is ended."""
    ways: dict[str, Callable[[], Step]] = {
        "stop": lambda: stop(ready(), 2.0),
        "stop, start": lambda: start(stop(ready(), 2.0)[0], 2.1),
        "restart": lambda: trouble(ready(), 2.0),
        "last restart": lambda: trouble(structs.replace(ready(), policy=RestartPolicy.never()), 2.0),
        "startup timeout": lambda: startup_failed(launching(), 2.0, StartFailReason.STARTUP_TIMEOUT),
        "a stranger's port": lambda: startup_failed(launching(), 2.0, StartFailReason.PORT_IN_USE),
    }
    life, _ = ways[how]()
    assert isinstance(life.state, Ending)
    return life


AFTERWARDS: dict[str, State] = {
    "stop": Stopped(),
    "stop, start": Stopped(),  # who started was told that it failed
    "restart": Launching(epoch=2, first=False),
    "last restart": Failed(),
    "startup timeout": Failed(),
    "a stranger's port": Stopped(),
}


@pytest.mark.parametrize("how", AFTERWARDS)
def test_a_server_that_cannot_be_killed_is_failed_and_keeps_nobody_waiting(how: str) -> None:
    life, effects = unkillable(ending(how), 9.0)
    assert (life.public_state, life.deadline) == (WorkerState.FAILED, None)
    assert life.last_error == "unkillable: SIGKILL does not end process 5"
    assert error_of(effects).reason is StartFailReason.UNKILLABLE
    (stops,) = [effect for effect in effects if isinstance(effect, Resolve) and effect.order is Stop]
    assert isinstance(stops.error, WorkerStopError)
    assert str(stops.error) == "unkillable: SIGKILL does not end process 5"
    assert len(effects) == 2
    assert unkillable(life, 9.1)[0] == life


@pytest.mark.parametrize("how", AFTERWARDS)
def test_beside_it_no_second_server_is_started(how: str) -> None:
    life, _ = unkillable(ending(how), 9.0)
    again, effects = start(life, 10.0)
    assert again == life
    assert error_of(effects).reason is StartFailReason.UNKILLABLE
    assert len(effects) == 1
    assert tick(life, 1e6) == (life, ())
    life, effects = stop(life, 11.0)
    assert [effect.order for effect in effects if isinstance(effect, Resolve)] == [Stop]
    assert life.public_state is WorkerState.FAILED
    assert start(life, 12.0)[0] == life


@pytest.mark.parametrize(("how", "state"), AFTERWARDS.items())
def test_once_it_is_gone_what_was_meant_to_follow_follows(how: str, state: State) -> None:
    life, _ = unkillable(ending(how), 9.0)
    assert died(life, 90.0, -9) == (life, ())
    life, effects = exited(life, 100.0, -9)
    assert life.state == state
    launches = [effect for effect in effects if isinstance(effect, Launch)]
    assert launches == ([Launch(epoch=2)] if how == "restart" else [])


@pytest.mark.parametrize("how", AFTERWARDS)
def test_a_stop_meanwhile_leaves_it_stopped_once_it_is_gone_and_startable_again(how: str) -> None:
    life, _ = unkillable(ending(how), 9.0)
    life, _ = stop(life, 10.0)
    life, _ = exited(life, 100.0, -9)
    assert life.state == Stopped()
    life, effects = start(life, 101.0)
    assert effects == (Launch(epoch=2),)
    assert life.last_error is None


def test_a_server_that_nobody_ends_is_not_unkillable() -> None:
    for life in (ready(), launching(), exited(ready(), 10.0)[0], Lifecycle(policy=POLICY)):
        assert unkillable(life, 11.0) == (life, ())
