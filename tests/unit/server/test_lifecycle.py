"""The worker's state machine, with a literal clock."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llama_worker.config.profiles import RestartPolicy
from llama_worker.errors import WorkerStartError, WorkerStopError
from llama_worker.mailbox import Tick
from llama_worker.request.messages import Abandon, AllStreamsClosed, CloseAllStreams
from llama_worker.server.blame import GpuFault, RestartBudget, RestartCause
from llama_worker.server.lifecycle import Drained, request_completed, step
from llama_worker.server.lifecycle_states import (
    BackingOff,
    Draining,
    Effects,
    Ending,
    Failed,
    Launching,
    Lifecycle,
    Ready,
    RecordRestart,
    Resolve,
    State,
    Stopped,
    ToFailed,
    ToRestart,
    ToStopped,
)
from llama_worker.server.messages import (
    BecameReady,
    Died,
    Drain,
    Exited,
    GpuFaulted,
    HealthLost,
    Launch,
    LaunchFailed,
    Restart,
    Start,
    StartupFailed,
    Stop,
    Terminate,
    Unkillable,
)
from llama_worker.types.request import RequestFailReason
from llama_worker.types.worker import StartFailReason, WorkerState
from tests.tables import cases

POLICY = RestartPolicy(restart_backoff_s=5.0, max_restarts_per_window=2, restart_window_s=120.0)
ONE_RESTART = replace(POLICY, max_restarts_per_window=1)
Step = tuple[Lifecycle, Effects]
HOST: Any = object()  # who asked; not the life's to answer


# -------------------------------------------------------- a life, told by verbs: each steps it once


def start(life: Lifecycle, now: float) -> Step:
    return step(life, Start(reply=HOST), now)


def stop(life: Lifecycle, now: float, *, grace_s: float = 10.0) -> Step:
    return step(life, Stop(reply=HOST, grace_s=grace_s), now)


def drain(life: Lifecycle, now: float) -> Step:
    return step(life, Drain(reply=HOST), now)


def drained(life: Lifecycle, now: float) -> Step:
    return step(life, Drained(), now)


def restart(life: Lifecycle, now: float, reason: str = "new weights") -> Step:
    return step(life, Restart(reason=reason, reply=HOST), now)


def trouble(life: Lifecycle, now: float) -> Step:
    return step(life, RestartCause("stall_timeout", "silence"), now)


def tick(life: Lifecycle, now: float) -> Step:
    return step(life, Tick(), now)


def news(kind: Callable[..., Any], **usual: Any) -> Callable[..., Step]:
    """A verb for news of the life's own launch, or of launch `epoch`."""
    return lambda life, now, **told: step(life, kind(**{"epoch": life.epoch, **usual, **told}), now)


def last_news(kind: Callable[..., Any], **usual: Any) -> Callable[..., Step]:
    """A verb for news that nothing of the launch's tree is left, and no request in flight."""
    tell = news(kind, **usual)

    def tell_and_drain(life: Lifecycle, now: float, **told: Any) -> Step:
        ended, effects = tell(life, now, **told)
        if not isinstance(ended.state, Ending):
            return ended, effects
        over, then = drained(ended, now)
        return over, (*effects, *then)

    return tell_and_drain


became_ready = news(BecameReady, traits=None)
launch_failed = last_news(LaunchFailed, detail="no process")
startup_failed = news(StartupFailed, detail="no sign of work")
died = news(Died, returncode=-9)
exited = last_news(Exited, returncode=1, log_tail=("oops",), port_taken=False)
unkillable = news(Unkillable, detail="SIGKILL does not end process 5")
streams_closed = news(AllStreamsClosed)


def stopped(policy: RestartPolicy = POLICY) -> Lifecycle:
    return Lifecycle(policy=policy, stop_grace_s=10.0)


def launching(policy: RestartPolicy = POLICY) -> Lifecycle:
    life, effects = start(stopped(policy), 0.0)
    assert effects == (Launch(epoch=1),)
    return life


def ready(policy: RestartPolicy = POLICY) -> Lifecycle:
    life, effects = became_ready(launching(policy), 1.0)
    assert effects == (Resolve(Start),)
    assert life.public_state is WorkerState.READY
    return life


def relaunched(policy: RestartPolicy = POLICY) -> Lifecycle:
    """The server has died once, and its successor is launching."""
    return tick(exited(ready(policy), 10.0)[0], 15.0)[0]


def error_of(effects: Effects) -> WorkerStartError:
    (error,) = [e.error for e in effects if isinstance(e, Resolve) and e.order is Start]
    assert isinstance(error, WorkerStartError)
    return error


def replace_state(state: State) -> Lifecycle:
    return structs.replace(ready(), state=state)


@cases(
    "state, seen, refusal",
    {
        "stopped": (Stopped(), WorkerState.STOPPED, "WORKER_NOT_READY"),
        "failed": (Failed(), WorkerState.FAILED, "WORKER_FAILED"),
        "launching": (Launching(first=True), WorkerState.RUNNING, "WORKER_NOT_READY"),
        "ready": (Ready(), WorkerState.READY, None),
        "draining": (Draining(), WorkerState.READY, "WORKER_DRAINING"),
        "drained": (Ending(goal=ToStopped(draining=True)), WorkerState.RUNNING, "WORKER_DRAINING"),
        "ending": (Ending(goal=ToFailed()), WorkerState.RUNNING, "WORKER_NOT_READY"),
        "stuck": (Ending(goal=ToFailed(), stuck="D"), WorkerState.FAILED, "WORKER_FAILED"),
        "backing off": (BackingOff(resume_at=9.0), WorkerState.RUNNING, "WORKER_NOT_READY"),
    },
)
def test_what_the_host_sees_of_a_state(state: State, seen: WorkerState, refusal: str) -> None:
    life = replace_state(state)
    assert (life.public_state, life.refusal) == (seen, refusal)


# ---------------------------------------------------------------- start and stop


def test_start_and_stop_without_effect_resolve_at_once() -> None:
    assert start(ready(), 2.0) == (ready(), (Resolve(Start),))
    assert stop(stopped(), 0.0) == (stopped(), (Resolve(Stop),))
    life, effects = stop(exited(ready(), 10.0)[0], 10.1)
    assert (life.state, effects[-1]) == (Stopped(), Resolve(Stop))
    assert error_of(effects).reason is StartFailReason.STOPPED


@pytest.mark.parametrize("lives", [launching, ready])
def test_stop_ends_start_and_briefly_awaits_connections(lives: Callable[[], Lifecycle]) -> None:
    life, effects = stop(lives(), 2.0, grace_s=10.0)
    assert [type(e) for e in effects] == [Abandon, Resolve, CloseAllStreams]
    assert error_of(effects).reason is StartFailReason.STOPPED
    assert (life.deadline, tick(life, 2.9)) == (3.0, (life, ()))
    for closed, effects in (streams_closed(life, 2.1), tick(life, 3.0)):
        assert effects == (Terminate(grace_s=10.0),)
        ended, effects = exited(closed, 3.1, returncode=0)
        assert (ended.state, effects) == (Stopped(), (Resolve(Stop),))
        assert ended.last_error is None


def test_start_during_a_stop_launches_anew_afterwards() -> None:
    joined, effects = start(stop(ready(), 2.0)[0], 2.1)
    assert effects == ()
    life, effects = exited(joined, 2.5, returncode=0)
    assert (life.state, effects) == (Launching(first=True), (Resolve(Stop), Launch(epoch=2)))
    life, effects = stop(joined, 2.2)
    assert error_of(effects).reason is StartFailReason.STOPPED
    life, effects = exited(life, 2.5, returncode=0)
    assert (life.state, effects) == (Stopped(), (Resolve(Stop),))


def test_an_order_never_extends_the_grace() -> None:
    life = structs.replace(ready(), stop_grace_s=0.5)
    assert streams_closed(stop(life, 2.0, grace_s=2.0)[0], 2.1)[1] == (Terminate(grace_s=0.5),)


def test_a_later_stop_shortens_the_grace_period() -> None:
    life, _ = streams_closed(stop(ready(), 2.0, grace_s=10.0)[0], 2.1)
    assert Terminate(grace_s=2.0) in stop(life, 2.2, grace_s=2.0)[1]
    for first_s, second_s in ((10.0, 2.0), (2.0, 10.0)):  # while connections are being closed
        life, effects = stop(stop(ready(), 2.0, grace_s=first_s)[0], 2.1, grace_s=second_s)
        assert [type(e) for e in effects] == [Resolve]
        assert streams_closed(life, 2.2)[1] == (Terminate(grace_s=2.0),)


# ---------------------------------------------------------------- launches that fail


EXITED, PORT_IN_USE = StartFailReason.EXITED, StartFailReason.PORT_IN_USE
TIMEOUT, SPAWN_FAILED = StartFailReason.STARTUP_TIMEOUT, StartFailReason.SPAWN_FAILED
Fail = Callable[[Lifecycle], Step]


def timed_out(life: Lifecycle) -> Step:
    """It is killed first; then the start fails with what the server said."""
    killed, effects = startup_failed(life, 20.0, reason=TIMEOUT)
    assert Terminate(grace_s=0.0, keep_evidence=True) in effects
    assert not any(isinstance(e, Resolve) for e in effects)
    return exited(killed, 20.1, returncode=-9)


def no_process(reason: StartFailReason) -> tuple[Any, ...]:
    return lambda life: launch_failed(life, 20.0, reason=reason), reason, None, ()


@cases(
    "fail, reason, returncode, log_tail",
    {
        "it ends": (lambda life: exited(life, 20.0), EXITED, 1, ("oops",)),
        "port lost": (lambda life: exited(life, 20.0, port_taken=True), PORT_IN_USE, 1, ("oops",)),
        "no port": no_process(PORT_IN_USE),
        "spawn": no_process(SPAWN_FAILED),
        "it takes too long": (timed_out, TIMEOUT, None, ("oops",)),
    },
)
def test_the_first_launch_and_last_restart_are_final(
    fail: Fail, reason: StartFailReason, returncode: int | None, log_tail: tuple[str, ...]
) -> None:
    last, joins = start(relaunched(ONE_RESTART), 16.0)
    assert joins == ()
    a_port_may_be_free_later = reason is PORT_IN_USE
    for life, told, state in (
        (launching(), reason, Stopped() if a_port_may_be_free_later else Failed()),
        (last, EXITED if a_port_may_be_free_later else reason, Failed()),
    ):
        after, effects = fail(life)
        error = error_of(effects)
        assert (error.reason, error.returncode, error.log_tail) == (told, returncode, log_tail)
        assert str(error).count(f"{reason}: ") == 1
        assert (after.last_error or "").startswith(f"{reason}: ")
        assert after.state == state


# ---------------------------------------------------------------- deaths and restarts


@pytest.mark.parametrize(
    ("why", "reason"), [(None, "server_died"), ("the kernel killed it", "out_of_memory")]
)
def test_requests_fail_at_once_and_restart_follows_backoff(why: str | None, reason: str) -> None:
    ending, effects = died(ready(), 10.0, oom_evidence=why)
    detail = "the server ended with signal 9" + (f": {why}" if why else "")
    assert effects == (
        RecordRestart(reason=reason, detail=detail, delay_s=5.0),
        Abandon(reason=RequestFailReason.SERVER_DIED, detail=detail),
        Terminate(grace_s=0.0),
    )
    assert ending.state == Ending(goal=ToRestart(15.0))
    # the first that is heard of it
    life, told = exited(ready(), 10.0, returncode=-9, oom_evidence=why)
    assert (life.state, told) == (BackingOff(resume_at=15.0), effects[:2])
    life, effects = exited(ending, 10.2)
    assert (life.state, effects, life.budget.restart_count) == (BackingOff(resume_at=15.0), (), 1)
    assert life.public_state is WorkerState.RUNNING
    assert tick(life, 14.9) == (life, ())
    for launched, effects in (tick(life, 15.0), exited(ending, 16.0)):
        assert (launched.state, effects) == (Launching(first=False), (Launch(epoch=2),))


def test_a_relaunch_that_takes_too_long_is_followed_by_another() -> None:
    life, effects = startup_failed(relaunched(), 20.0, reason=TIMEOUT)
    assert effects[0] == RecordRestart(
        reason="startup_timeout", detail="no sign of work", delay_s=10.0
    )
    assert exited(life, 20.1)[0].state == BackingOff(resume_at=30.0)


def test_a_stop_may_find_that_there_is_no_process() -> None:
    life, effects = launch_failed(stop(launching(), 1.0)[0], 1.1, reason=SPAWN_FAILED)
    assert (life.state, effects) == (Stopped(), (Resolve(Stop),))


def test_a_completed_request_ends_the_row_of_restarts() -> None:
    life = request_completed(relaunched())
    assert (life.budget.row_count, life.budget.restart_count) == (0, 1)


def test_a_launch_that_lost_its_port_says_so() -> None:
    _, effects = exited(launching(), 20.0, port_taken=True)
    assert error_of(effects).detail == "another process took the port"


def test_a_launch_without_memory_says_so() -> None:
    lack = "the kernel killed it for lack of memory"
    _, effects = exited(launching(), 20.0, returncode=-9, oom_evidence=lack)
    assert error_of(effects).detail == f"the server ended before it was ready: {lack}"
    life, effects = exited(relaunched(), 20.0, returncode=-9, oom_evidence=lack)
    detail = f"the server ended with signal 9 before it was ready: {lack}"
    assert effects == (RecordRestart(reason="out_of_memory", detail=detail, delay_s=10.0),)
    assert life.last_error == f"out_of_memory: {detail}"


def test_exit_after_last_restart_leads_to_failed() -> None:
    life, effects = died(became_ready(relaunched(ONE_RESTART), 16.0)[0], 40.0, returncode=1)
    assert isinstance(effects[0], RecordRestart)
    assert (effects[0].reason, effects[0].delay_s) == ("server_died", None)
    assert not any(isinstance(e, Resolve) for e in effects)
    assert life.public_state is WorkerState.RUNNING
    life, effects = exited(life, 40.1)
    assert (life.state, life.budget.restart_count) == (Failed(), 1)
    assert "code 1" in error_of(effects).detail
    assert life.last_error is not None
    assert life.last_error.startswith("server_died: the server ended with return code 1; restarted")
    life, effects = start(life, 41.0)
    assert (effects, life.budget) == ((Launch(epoch=3),), RestartBudget(restart_count=1))


@pytest.mark.parametrize("end", [stop, died])
def test_launch_is_over_when_every_request_has_record(
    end: Callable[[Lifecycle, float], Step],
) -> None:
    ending, _ = end(ready(), 10.0)
    assert drained(ending, 10.0) == (ending, ())
    gone, effects = news(Exited, returncode=1, log_tail=())(ending, 10.1)
    assert (gone.public_state, effects) == (WorkerState.RUNNING, ())
    assert tick(gone, 100.0) == unkillable(gone, 100.0) == (gone, ())
    assert isinstance(drained(gone, 10.2)[0].state, Stopped | BackingOff)


@pytest.mark.parametrize("fatal", [True, False])
def test_gpu_failure_restarts_server_lesser_error_does_nothing(fatal: bool) -> None:
    error = GpuFaulted(epoch=1, fault=GpuFault(fatal=fatal, detail="GPU 0: the GPU is lost"))
    life, effects = step(ready(), error, 2.0)
    restart = (
        RecordRestart(reason="gpu_failed", detail="GPU 0: the GPU is lost", delay_s=5.0),
        Abandon(
            reason=RequestFailReason.WORKER_RESTARTED, detail="gpu_failed: GPU 0: the GPU is lost"
        ),
        CloseAllStreams(),
        Terminate(grace_s=0.0, keep_evidence=True),
    )
    assert effects == (restart if fatal else ())
    assert step(life, error, 2.1) == (life, ())


def test_expected_messages_change_nothing() -> None:
    stopping, ending, backing_off = (
        stop(ready(), 5.0)[0],
        died(ready(), 5.0)[0],
        exited(ready(), 5.0)[0],
    )
    for life in (stopping, exited(stopping, 6.0)[0], ending):
        assert died(life, 10.0) == (life, ())
    for life in (ready(), launching(), backing_off, stopped()):
        assert unkillable(life, 11.0) == (life, ())
    for life in (backing_off, stopped()):
        assert exited(life, 11.0) == launch_failed(life, 11.0, reason=EXITED) == (life, ())


def test_dead_server_does_not_become_ready() -> None:
    life, effects = died(launching(), 1.0)
    assert effects == ()
    assert became_ready(life, 1.1) == (life, ())
    failed, (answered,) = exited(life, 1.2)
    assert failed.public_state is WorkerState.FAILED
    assert isinstance(answered, Resolve)


def test_a_recycled_server_is_followed_at_once() -> None:
    life = ready(ONE_RESTART)
    for epoch in range(1, 20):
        life, effects = step(life, RestartCause("recycled", "old"), 10.0)
        planned = RecordRestart(reason="recycled", detail="old", delay_s=0.0)
        assert effects == (planned, CloseAllStreams())
        assert life.public_state is WorkerState.RUNNING
        life, effects = streams_closed(life, 10.0)
        assert effects == (Terminate(grace_s=10.0),)
        life, effects = exited(life, 10.0, returncode=0)
        assert (effects, life.last_error) == ((Launch(epoch=epoch + 1),), None)
        life, _ = became_ready(life, 10.0)
    assert life.public_state is WorkerState.READY
    assert (life.budget.restart_count, life.budget.row_count, life.budget.recent) == (19, 0, ())


# ---------------------------------------------------------------- drain


def draining() -> Lifecycle:
    life, effects = drain(ready(), 2.0)
    assert effects == ()
    assert (life.public_state, life.is_draining) == (WorkerState.READY, True)
    return life


def test_a_drained_worker_stops_then_starts_if_asked() -> None:
    for life, state, launches in (
        (draining(), Stopped(), ()),
        (start(draining(), 2.5)[0], Launching(first=True), (Launch(epoch=2),)),
    ):
        ending, effects = drained(life, 3.0)
        assert effects == (CloseAllStreams(),)
        assert ending.is_draining
        closed, effects = streams_closed(ending, 3.1)
        assert effects == (Terminate(grace_s=10.0),)
        ended, effects = exited(closed, 3.2, returncode=0)
        assert (ended.state, effects) == (state, (Resolve(Stop), *launches))
        assert not ended.is_draining


def test_a_second_drain_changes_nothing() -> None:
    assert drain(draining(), 3.0) == (draining(), ())
    assert drained(ready(), 3.0) == (ready(), ())


def test_a_later_drain_takes_back_a_start() -> None:
    life, effects = drain(start(draining(), 2.5)[0], 3.0)
    assert life == draining()
    assert error_of(effects).detail == "drain() was called"


def test_stop_cuts_a_drain_short() -> None:
    life, effects = stop(draining(), 3.0)
    assert [type(e) for e in effects] == [Abandon, Resolve, CloseAllStreams]
    assert not life.is_draining
    assert exited(life, 3.5, returncode=0)[0].state == Stopped()


STREAMS_CLOSED = [Abandon, CloseAllStreams, Terminate]
LEFT_OPEN = [Abandon, Terminate]  # what the server had sent is still read


@pytest.mark.parametrize(
    ("end", "reason", "kinds"),
    [
        (died, RequestFailReason.SERVER_DIED, LEFT_OPEN),
        (trouble, RequestFailReason.WORKER_STOPPED, STREAMS_CLOSED),
        (news(HealthLost, detail=""), RequestFailReason.WORKER_STOPPED, STREAMS_CLOSED),
    ],
)
def test_server_lost_while_draining_is_not_relaunched(
    end: Callable[[Lifecycle, float], Step], reason: RequestFailReason, kinds: list[type]
) -> None:
    life, effects = end(draining(), 3.0)
    assert [type(e) for e in effects] == kinds
    assert life.is_draining
    assert isinstance(effects[0], Abandon)
    assert effects[0].reason is reason
    ended, effects = exited(life, 3.5)
    assert (ended.state, effects, ended.budget.restart_count) == (Stopped(), (Resolve(Stop),), 0)


def test_exited_without_died_ends_the_drain() -> None:
    life, effects = exited(draining(), 3.0)
    assert isinstance(effects[0], Abandon)
    assert (life.state, effects[-1]) == (Stopped(), Resolve(Stop))


def test_drain_of_unready_worker_is_a_stop() -> None:
    for life in (stopped(), replace_state(Failed()), exited(ready(), 10.0)[0]):
        ended, effects = drain(life, 11.0)
        assert (ended.state, effects[-1]) == (Stopped(), Resolve(Stop))
    life, effects = drain(launching(), 1.0)
    assert error_of(effects).detail == "drain() was called"
    assert (life.is_draining, exited(life, 2.0)[0].state) == (True, Stopped())


# ---------------------------------------------------------------- restart by hand


@pytest.mark.parametrize("lives", [launching, ready, relaunched])
def test_manual_restart_has_no_backoff_and_no_budget(lives: Callable[[], Lifecycle]) -> None:
    before = lives()
    life, effects = restart(before, 20.0)
    assert effects == (
        RecordRestart(reason="requested", detail="new weights", delay_s=0.0),
        Abandon(reason=RequestFailReason.WORKER_RESTARTED, detail="requested: new weights"),
        CloseAllStreams(),
        Terminate(grace_s=0.0, keep_evidence=True),
    )
    assert life.budget.restart_count == before.budget.restart_count + 1
    assert (life.budget.recent, life.last_error) == (before.budget.recent, before.last_error)
    launched, effects = exited(life, 20.1, returncode=-9)
    assert effects == (Launch(epoch=before.epoch + 1),)
    assert became_ready(launched, 21.0)[1] == (Resolve(Start),)
    (note, *_) = restart(before, 20.0, reason="")[1]
    assert isinstance(note, RecordRestart)
    assert note.detail == "restart() was called"


def test_a_manual_restart_ends_a_backoff() -> None:
    backing_off = exited(ready(), 10.0)[0]
    launched, effects = restart(backing_off, 11.0)
    assert launched.state == Launching(first=False)
    assert effects == (Launch(epoch=2),)
    ending, effects = restart(died(ready(), 10.0)[0], 11.0)
    assert effects == ()
    assert exited(ending, 11.5)[1] == (Launch(epoch=2),)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (Stopped(), "no server to restart"),
        (Failed(), "no server to restart"),
        (Draining(), "is draining"),
        (Ending(goal=ToStopped()), "no server to restart"),
        (Ending(goal=ToStopped(draining=True)), "is draining"),
    ],
    ids=repr,
)
def test_a_stopped_worker_cannot_be_restarted(state: State, says: str) -> None:
    life, effects = restart(replace_state(state), 2.0)
    assert life == replace_state(state)
    error = error_of(effects)
    assert error.reason is StartFailReason.STOPPED
    assert says in error.detail


@pytest.mark.parametrize(
    "state",
    [
        Draining(then_start=True),
        Ending(goal=ToStopped(then_start=True)),
        Ending(goal=ToFailed(), start_error=WorkerStartError("exited", "crashed")),
    ],
    ids=repr,
)
def test_restart_shares_outcome_of_waiting_start(state: State) -> None:
    assert restart(replace_state(state), 2.0) == (replace_state(state), ())


# ---------------------------------------------------------------- what SIGKILL does not end

# each with what follows once the process is gone
ENDINGS: dict[str, tuple[Callable[[], Step], State]] = {
    "stop": (lambda: stop(ready(), 2.0), Stopped()),
    # who started was told that it failed
    "stop, start": (lambda: start(stop(ready(), 2.0)[0], 2.1), Stopped()),
    "restart": (lambda: trouble(ready(), 2.0), Launching(first=False)),
    "last restart": (lambda: trouble(ready(RestartPolicy.never()), 2.0), Failed()),
    "startup timeout": (lambda: startup_failed(launching(), 2.0, reason=TIMEOUT), Failed()),
    "a stranger's port": (lambda: startup_failed(launching(), 2.0, reason=PORT_IN_USE), Stopped()),
}
every_ending = pytest.mark.parametrize(("end", "afterwards"), ENDINGS.values(), ids=ENDINGS)


@every_ending
def test_unkillable_server_is_failed_and_gets_no_second(
    end: Callable[[], Step], afterwards: State
) -> None:
    life, (starts, stops) = unkillable(end()[0], 9.0)
    told = "unkillable: SIGKILL does not end process 5"
    assert (life.public_state, life.deadline, life.last_error) == (WorkerState.FAILED, None, told)
    assert isinstance(stops, Resolve)
    assert isinstance(stops.error, WorkerStopError)
    assert (stops.order, str(stops.error)) == (Stop, told)
    assert unkillable(life, 9.1)[0] == life
    assert tick(life, 1e6) == died(life, 90.0) == (life, ())
    assert error_of(restart(life, 10.0)[1]).reason is StartFailReason.UNKILLABLE
    again, (refusal,) = start(life, 10.0)
    assert again == life
    assert error_of((starts,)).reason is error_of((refusal,)).reason is StartFailReason.UNKILLABLE
    life, effects = exited(life, 100.0)
    assert life.state == afterwards
    assert [e for e in effects if isinstance(e, Launch)] == [Launch(epoch=2)] * isinstance(
        afterwards, Launching
    )


@every_ending
def test_a_stop_meanwhile_leaves_it_stopped_and_startable(
    end: Callable[[], Step], afterwards: State
) -> None:
    life, effects = stop(unkillable(end()[0], 9.0)[0], 11.0)
    assert [effect.order for effect in effects if isinstance(effect, Resolve)] == [Stop]
    assert life.public_state is WorkerState.FAILED
    assert start(life, 12.0)[0] == life
    life, _ = exited(life, 100.0)
    assert life.state == Stopped()
    life, effects = start(life, 101.0)
    assert (effects, life.last_error) == ((Launch(epoch=2),), None)
