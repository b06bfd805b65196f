"""The worker's state machine, with a literal clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llama_worker.errors import WorkerStartError, WorkerStopError
from llama_worker.messages import Abandon, CloseAllStreams, Died, GpuFaulted, Launch, Start, Stop, Terminate
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
from llama_worker.server.recycling import Worn
from llama_worker.server.restart_budget import RestartBudget
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
ONE_RESTART = replace(POLICY, max_restarts_per_window=1)


def launching(policy: RestartPolicy = POLICY) -> Lifecycle:
    life, effects = start(Lifecycle(policy=policy), 0.0)
    assert effects == (Launch(epoch=1),)
    return life


def ready(policy: RestartPolicy = POLICY) -> Lifecycle:
    life, effects = became_ready(launching(policy), 1.0)
    assert effects == (Resolve(Start),)
    assert life.public_state is WorkerState.READY
    return life


def relaunched(policy: RestartPolicy = POLICY) -> Lifecycle:
    """The server has died once, and its successor is launching."""
    life, _ = exited(ready(policy), 10.0)
    return tick(life, 15.0)[0]


def error_of(effects: Effects) -> WorkerStartError:
    (error,) = [e.error for e in effects if isinstance(e, Resolve) and e.order is Start]
    assert isinstance(error, WorkerStartError)
    return error


# ---------------------------------------------------------------- start and stop


def test_what_is_so_already_resolves_at_once() -> None:
    assert start(ready(), 2.0) == (ready(), (Resolve(Start),))
    stopped = Lifecycle(policy=POLICY)
    assert stop(stopped, 0.0) == (stopped, (Resolve(Stop),))


@pytest.mark.parametrize("lives", [launching, ready])
def test_stop_ends_a_start_and_closes_connections_before_it_terminates(lives: Callable[[], Lifecycle]) -> None:
    life, effects = stop(lives(), 2.0, grace_s=10.0)
    assert [type(e) for e in effects] == [Abandon, Resolve, CloseAllStreams]
    assert error_of(effects).reason is StartFailReason.STOPPED
    life, effects = streams_closed(life, 2.1)
    assert effects == (Terminate(epoch=1, grace_s=10.0),)
    life, effects = exited(life, 2.2, returncode=0)
    assert (life.state, effects) == (Stopped(), (Resolve(Stop),))


@pytest.mark.parametrize(("now", "terminated"), [(2.9, False), (3.0, True)])
def test_termination_waits_a_second_at_most_for_connections(now: float, terminated: bool) -> None:
    life, _ = stop(ready(), 2.0)
    assert life.deadline == 3.0
    assert bool(tick(life, now)[1]) is terminated


def test_start_during_a_stop_launches_anew_when_the_old_server_is_gone() -> None:
    life, effects = start(stop(ready(), 2.0)[0], 2.1)
    assert effects == ()
    life, effects = exited(life, 2.5, returncode=0)
    assert effects == (Resolve(Stop), Launch(epoch=2))
    assert life.state == Launching(epoch=2, first=True)


def test_stop_after_that_start_ends_it_too() -> None:
    life, _ = start(stop(ready(), 2.0)[0], 2.1)
    life, effects = stop(life, 2.2)
    assert error_of(effects).reason is StartFailReason.STOPPED
    life, effects = exited(life, 2.5, returncode=0)
    assert (life.state, effects) == (Stopped(), (Resolve(Stop),))


def test_a_hurried_stop_shortens_the_grace_of_one_under_way() -> None:
    life, _ = streams_closed(stop(ready(), 2.0, grace_s=10.0)[0], 2.1)
    assert Terminate(epoch=1, grace_s=2.0) in stop(life, 2.2, grace_s=2.0)[1]


def test_stop_during_backoff_is_immediate() -> None:
    life, effects = stop(exited(ready(), 10.0)[0], 10.1)
    assert life.state == Stopped()
    assert Resolve(Stop) in effects


# ---------------------------------------------------------------- launches that fail


EXITED, PORT_IN_USE = StartFailReason.EXITED, StartFailReason.PORT_IN_USE
TIMEOUT, SPAWN_FAILED = StartFailReason.STARTUP_TIMEOUT, StartFailReason.SPAWN_FAILED
Fail = Callable[[Lifecycle], Step]
launches_that_fail = pytest.mark.parametrize(
    ("fail", "reason", "returncode", "log_tail"),
    [
        pytest.param(lambda life: exited(life, 20.0), EXITED, 1, ("oops",), id="it ends"),
        pytest.param(
            lambda life: exited(life, 20.0, port_taken=True), PORT_IN_USE, 1, ("oops",), id="its port is lost"
        ),
        pytest.param(lambda life: launch_failed(life, 20.0, PORT_IN_USE), PORT_IN_USE, None, (), id="no free port"),
        pytest.param(lambda life: launch_failed(life, 20.0, SPAWN_FAILED), SPAWN_FAILED, None, (), id="no process"),
        pytest.param(lambda life: timed_out(life), TIMEOUT, None, ("oops",), id="it takes too long"),
    ],
)


def timed_out(life: Lifecycle) -> Step:
    """It is killed first; then the start fails with what the server said."""
    killed, effects = startup_failed(life, 20.0, TIMEOUT)
    assert Terminate(epoch=life.epoch, grace_s=0.0, keep_evidence=True) in effects
    assert not any(isinstance(e, Resolve) for e in effects)
    return exited(killed, 20.1, returncode=-9)


@launches_that_fail
def test_the_first_launch_is_not_retried(
    fail: Fail, reason: StartFailReason, returncode: int | None, log_tail: tuple[str, ...]
) -> None:
    life, effects = fail(launching())
    error = error_of(effects)
    assert (error.reason, error.returncode, error.log_tail) == (reason, returncode, log_tail)
    assert life.state == (Stopped() if reason is PORT_IN_USE else Failed())


@launches_that_fail
def test_who_joins_the_last_restart_is_told_how_it_failed_and_that_the_worker_has(
    fail: Fail, reason: StartFailReason, returncode: int | None, log_tail: tuple[str, ...]
) -> None:
    life = relaunched(ONE_RESTART)
    assert start(life, 16.0) == (life, ())
    life, effects = fail(life)
    error = error_of(effects)
    failed = EXITED if reason is PORT_IN_USE else reason
    assert (error.reason, error.returncode, error.log_tail) == (failed, returncode, log_tail)
    assert life.state == Failed()


def test_a_launch_that_ends_before_ready_counts_as_a_restart() -> None:
    life, effects = exited(relaunched(), 15.1)
    assert life.budget.restart_count == 2
    assert isinstance(effects[0], RecordRestart)


# ---------------------------------------------------------------- deaths and restarts

SERVER_DIED = Abandon(reason=RequestFailReason.SERVER_DIED, detail="the server ended with signal 9")


def test_death_while_ready_fails_requests_and_restarts_after_the_backoff() -> None:
    life, effects = exited(ready(), 10.0, returncode=-9)
    assert effects[-1] == SERVER_DIED
    assert (life.state, life.public_state) == (BackingOff(resume_at=15.0), WorkerState.RUNNING)
    assert tick(life, 14.9)[1] == ()
    life, effects = tick(life, 15.0)
    assert (life.state, effects) == (Launching(epoch=2, first=False), (Launch(epoch=2),))


def test_requests_hear_of_the_death_before_the_rest_of_the_tree_is_gone() -> None:
    life, effects = died(ready(), 10.0, -9)
    assert effects[1:] == (SERVER_DIED, Terminate(epoch=1, grace_s=0.0))
    assert life.state == Ending(epoch=1, goal=ToRestart(15.0))
    assert died(life, 10.1, -9) == (life, ())
    life, effects = exited(life, 10.2, returncode=-9)
    assert (life.state, effects) == (BackingOff(resume_at=15.0), ())
    assert life.budget.restart_count == 1


@pytest.mark.parametrize(("why", "reason"), [(None, "server_died"), ("the kernel killed it", "out_of_memory")])
def test_a_death_for_lack_of_memory_is_named_and_the_requests_fail_as_ever(why: str | None, reason: str) -> None:
    _, effects = step(ready(), Died(epoch=1, returncode=-9, lack_of_memory=why), 10.0)
    detail = "the server ended with signal 9" + (f": {why}" if why else "")
    assert effects[:2] == (
        RecordRestart(reason=reason, detail=detail, delay_s=5.0),
        Abandon(reason=RequestFailReason.SERVER_DIED, detail=detail),
    )


def test_the_last_death_is_failed_once_the_tree_is_gone() -> None:
    life, effects = died(ready(RestartPolicy.never()), 10.0, 1)
    assert not any(isinstance(e, Resolve) for e in effects)
    assert life.public_state is WorkerState.RUNNING
    life, effects = exited(life, 10.1)
    assert life.state == Failed()
    assert "code 1" in error_of(effects).detail


def test_elsewhere_a_death_waits_for_the_end_of_the_tree() -> None:
    stopping = stop(ready(), 5.0)[0]
    for life in (launching(), stopping, exited(stopping, 6.0)[0]):
        assert died(life, 10.0, -9) == (life, ())


def test_backoff_runs_while_the_old_tree_is_ended() -> None:
    life, _ = trouble(ready(), 10.0)
    assert life.state == Ending(epoch=1, goal=ToRestart(15.0))
    late, effects = exited(life, 16.0)
    assert effects == (Launch(epoch=2),)
    early, _ = exited(life, 10.1)
    assert early.state == BackingOff(resume_at=15.0)
    assert late.budget.restart_count == early.budget.restart_count == 1


def test_locked_out_after_too_many_restarts_and_started_again_by_hand() -> None:
    life, effects = exited(became_ready(relaunched(ONE_RESTART), 16.0)[0], 40.0)
    assert (life.state, life.budget.restart_count) == (Failed(), 1)
    assert isinstance(effects[0], RecordRestart)
    assert (effects[0].reason, effects[0].delay_s) == ("server_died", None)
    life, effects = start(life, 41.0)
    assert effects == (Launch(epoch=3),)
    assert life.budget == RestartBudget(restart_count=1)


@pytest.mark.parametrize("fatal", [True, False])
def test_a_gpu_that_fails_restarts_the_server_and_a_lesser_error_changes_nothing(fatal: bool) -> None:
    error = GpuFaulted(epoch=1, fault=GpuFault(fatal=fatal, detail="GPU 0: the GPU is lost"))
    life, effects = step(ready(), error, 2.0)
    restart = (
        RecordRestart(reason="gpu_failed", detail="GPU 0: the GPU is lost", delay_s=5.0),
        Abandon(reason=RequestFailReason.WORKER_RESTARTED, detail="gpu_failed: GPU 0: the GPU is lost"),
        CloseAllStreams(epoch=1),
        Terminate(epoch=1, grace_s=0.0, keep_evidence=True),
    )
    assert effects == (restart if fatal else ())
    assert step(life, error, 2.1) == (life, ())


def test_news_of_an_older_launch_changes_nothing() -> None:
    life = relaunched()
    for news in (became_ready, exited, died, streams_closed):
        assert news(life, 16.0, epoch=1) == (life, ())
    assert startup_failed(life, 16.0, StartFailReason.STARTUP_TIMEOUT, epoch=1) == (life, ())


# ---------------------------------------------------------------- planned restarts


def test_a_worn_server_ends_in_peace_and_is_launched_at_once() -> None:
    life, effects = step(ready(), Worn("old"), 10.0)
    assert effects == (RecordRestart(reason="recycled", detail="old", delay_s=0.0), CloseAllStreams(epoch=1))
    assert life.public_state is WorkerState.RUNNING
    life, effects = streams_closed(life, 10.0)
    assert effects == (Terminate(epoch=1, grace_s=10.0),)
    life, effects = exited(life, 11.0, returncode=0)
    assert effects == (Launch(epoch=2),)
    assert (life.budget.restart_count, life.last_error) == (1, None)


def test_planned_restarts_lock_nobody_out() -> None:
    life = ready(ONE_RESTART)
    for _ in range(19):
        life, _ = step(life, Worn("old"), 10.0)
        life, _ = streams_closed(life, 10.0)
        life, _ = exited(life, 10.0, returncode=0)
        life, _ = became_ready(life, 10.0)
        assert life.public_state is WorkerState.READY
    assert (life.budget.restart_count, life.budget.row_count, life.budget.recent) == (19, 0, ())


def test_a_server_that_is_not_ready_is_not_recycled() -> None:
    assert step(launching(), Worn("old"), 1.0) == (launching(), ())


# ---------------------------------------------------------------- what SIGKILL does not end

ENDINGS: dict[str, tuple[Callable[[], Step], State]] = {  # each with what follows once the process is gone
    "stop": (lambda: stop(ready(), 2.0), Stopped()),
    "stop, start": (lambda: start(stop(ready(), 2.0)[0], 2.1), Stopped()),  # who started was told that it failed
    "restart": (lambda: trouble(ready(), 2.0), Launching(epoch=2, first=False)),
    "last restart": (lambda: trouble(ready(RestartPolicy.never()), 2.0), Failed()),
    "startup timeout": (lambda: startup_failed(launching(), 2.0, StartFailReason.STARTUP_TIMEOUT), Failed()),
    "a stranger's port": (lambda: startup_failed(launching(), 2.0, StartFailReason.PORT_IN_USE), Stopped()),
}
every_ending = pytest.mark.parametrize(("end", "afterwards"), ENDINGS.values(), ids=ENDINGS)


@every_ending
def test_a_server_that_cannot_be_killed_is_failed_and_keeps_nobody_waiting(
    end: Callable[[], Step], afterwards: State
) -> None:
    life, effects = unkillable(end()[0], 9.0)
    told = "unkillable: SIGKILL does not end process 5"
    assert (life.public_state, life.deadline, life.last_error) == (WorkerState.FAILED, None, told)
    starts, stops = effects
    assert error_of((starts,)).reason is StartFailReason.UNKILLABLE
    assert isinstance(stops, Resolve)
    assert isinstance(stops.error, WorkerStopError)
    assert (stops.order, str(stops.error)) == (Stop, told)
    assert unkillable(life, 9.1)[0] == life
    assert tick(life, 1e6) == (life, ())


@every_ending
def test_beside_it_no_second_server_is_started(end: Callable[[], Step], afterwards: State) -> None:
    life, _ = unkillable(end()[0], 9.0)
    again, (refusal,) = start(life, 10.0)
    assert (again, error_of((refusal,)).reason) == (life, StartFailReason.UNKILLABLE)
    assert died(life, 90.0, -9) == (life, ())
    life, effects = exited(life, 100.0, -9)
    assert life.state == afterwards
    assert [e for e in effects if isinstance(e, Launch)] == [Launch(epoch=2)] * isinstance(afterwards, Launching)


@every_ending
def test_a_stop_meanwhile_leaves_it_stopped_once_it_is_gone_and_startable_again(
    end: Callable[[], Step], afterwards: State
) -> None:
    life, effects = stop(unkillable(end()[0], 9.0)[0], 11.0)
    assert [effect.order for effect in effects if isinstance(effect, Resolve)] == [Stop]
    assert life.public_state is WorkerState.FAILED
    assert start(life, 12.0)[0] == life
    life, _ = exited(life, 100.0, -9)
    assert life.state == Stopped()
    life, effects = start(life, 101.0)
    assert (effects, life.last_error) == ((Launch(epoch=2),), None)


def test_a_server_that_nobody_ends_is_not_unkillable() -> None:
    for life in (ready(), launching(), exited(ready(), 10.0)[0], Lifecycle(policy=POLICY)):
        assert unkillable(life, 11.0) == (life, ())
