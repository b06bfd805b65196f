"""What is asked about a server, and when it is judged, step by step with a literal clock."""

import itertools
import math
from typing import Any

import pytest
from msgspec.structs import replace

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.mailbox import Tick
from llama_worker.request.messages import ProgressReported
from llama_worker.request.progress import Batch, Progress
from llama_worker.server import messages, watch
from llama_worker.server.blame import GpuFault, ProbeNow
from llama_worker.server.messages import (
    AskForProgress,
    EvidenceSeen,
    Launch,
    Launched,
    Look,
    LookAtSlots,
    ProbeOutcome,
    ProbeReadiness,
    StopWatching,
    Watch,
)
from llama_worker.server.pace import PACE_MULTIPLE, Pace
from llama_worker.server.traits import ServerTraits
from llama_worker.server.watch import ServerWatch
from llama_worker.types.worker import StartFailReason
from tests.docs.pages import table
from tests.tables import cases
from tests.virtual_watch import VirtualWatch, generating, probed, unwatch

STALLS_AFTER_1_S = TimeoutProfile(
    idle_stream_timeout_s=1.0,
    suspect_after_s=None,
    liveness_probe_interval_s=0.1,
    health_probe_interval_s=None,
)


class Watched:
    """A `ServerWatch` and the conversation with it."""

    def __init__(self, profile: TimeoutProfile, *, probes_count: int = 0) -> None:
        self.watch = ServerWatch(profile, epoch=1, probes_count=probes_count)

    def __call__(self, message: messages.WatchdogMessage, now: float) -> list[Any]:
        """What follows from a message, apart from the notes for the evidence of a kill."""
        return [
            effect
            for effect in self.watch.step(message, now)
            if not isinstance(effect, messages.Observed)
        ]


def ready(profile: TimeoutProfile, *, probes_count: int = 0) -> Watched:
    """Since 0.1, with the process 7."""
    step = Watched(profile, probes_count=probes_count)
    step(Launch(epoch=1), 0.0)
    for effect in [*step(Launched(epoch=1, pid=7), 0.0), *step(Tick(), 0.1)]:
        if isinstance(effect, Look):
            step(EvidenceSeen(look=effect, at=0.1), 0.1)
    assert step(probed(ProbeOutcome.READY), 0.1) == [
        messages.BecameReady(epoch=1, traits=ServerTraits()),
        LookAtSlots(epoch=1, timeout_s=2.0),
    ]
    assert step(messages.SlotsSeen(epoch=1, look=None), 0.1) == []
    assert step.watch.root_pid == 7
    return step


def told(progress: Progress) -> ProgressReported:
    return ProgressReported(progress=progress, for_verdict=True)


@cases(
    "next_message, at, restarts_server",
    {
        "the other answers late": (told(generating(60.1, request_id=2)), 60.15, False),
        "the other ends": (unwatch(2, last_data_at=60.1), 60.15, False),
        "it never answers: nobody is held up for ever": (Tick(), 60.2, True),
    },
)
def test_no_verdict_before_every_request_has_answered(
    next_message: messages.WatchdogMessage, at: float, restarts_server: bool
) -> None:
    step = ready(STALLS_AFTER_1_S)
    for request_id in (1, 2):
        assert step(Watch(request_id=request_id), 60.0) == []
    (asked,) = step(Tick(), 60.1)
    assert asked.for_verdict
    assert step(told(generating(0.0)), 60.1) == []
    stalled, *asked_again = step(next_message, at)
    (given_up,) = stalled.given_up
    assert (given_up.request_id, given_up.restarts_server) == (1, restarts_server)
    assert [type(effect) for effect in asked_again] == [AskForProgress] * isinstance(
        next_message, Tick
    )


def test_those_given_up_at_one_look_are_told_together() -> None:
    step = ready(STALLS_AFTER_1_S)
    for request_id in (1, 2, 3):
        step(Watch(request_id=request_id), 60.0)
    step(Tick(), 60.1)
    for request_id in (2, 1):
        assert step(told(generating(0.0, request_id=request_id)), 60.1) == []
    (stalled,) = step(told(generating(0.0, request_id=3)), 60.1)
    assert [(each.request_id, each.restarts_server) for each in stalled.given_up] == [
        *((2, True), (1, True), (3, True))
    ]


PROBE = ProbeReadiness(epoch=1, first=False)
DOUBT = ProbeNow("a broken connection")
DOUBT_CONFIRMED = messages.HealthLost(
    epoch=1, detail="a broken connection, and then the probe failed: told"
)


def test_a_probe_wanted_during_a_probe_follows_it() -> None:
    step = ready(TimeoutProfile(health_probe_interval_s=30.0, health_failures_before_restart=99))
    assert step(Tick(), 31.0) == [PROBE]
    assert step(DOUBT, 31.2) == []
    # the first one had reached the server before that
    assert step(probed(ProbeOutcome.READY), 31.3) == [PROBE]
    assert step(probed(ProbeOutcome.FAILED), 31.4) == [DOUBT_CONFIRMED]


@pytest.mark.parametrize(("data_at", "works"), [(None, False), (30.9, False), (36.0, True)])
def test_data_since_the_probe_began_overrides_its_failure(
    data_at: float | None, works: bool
) -> None:
    step = ready(TimeoutProfile(health_probe_interval_s=None))
    step(Watch(request_id=2), 30.9)
    assert step(DOUBT, 31.0)[-1] == PROBE
    while (due_at := step.watch.deadline) is not None and due_at < 41.0:
        step(Tick(), due_at)
        if data_at is not None:
            step(told(generating(min(due_at, data_at), request_id=2)), due_at)
    assert step(probed(ProbeOutcome.FAILED), 41.0) == ([] if works else [DOUBT_CONFIRMED])


def test_a_doubt_waits_for_the_silence_of_those_who_received_data_lately() -> None:
    step = ready(TimeoutProfile(health_probe_interval_s=None))
    step(Watch(request_id=1), 30.0)
    step(Watch(request_id=2), 30.0)
    step(told(generating(30.0, request_id=2)), 31.0)
    step(unwatch(1, last_data_at=30.99), 31.0)
    assert step(DOUBT, 31.0)[-1] == PROBE
    now, probed_at = 31.01, []
    while not (effects := step(probed(ProbeOutcome.FAILED), now)):
        probed_at.append(now)
        while PROBE not in step(Tick(), now := step.watch.deadline or math.inf):
            pass
    assert effects[-1] == DOUBT_CONFIRMED
    assert len(probed_at) == 9
    assert now == pytest.approx(40.01)


@cases("ends_at", {"during a slow probe": 40.5, "during a fast one": 31.005})
def test_who_completes_during_the_probe_speaks_for_the_server(ends_at: float) -> None:
    step = ready(TimeoutProfile(health_probe_interval_s=None))
    step(Watch(request_id=1), 30.0)
    step(Watch(request_id=2), 30.0)
    step(unwatch(1, last_data_at=30.99), 31.0)
    assert step(DOUBT, 31.0)[-1] == PROBE
    step(unwatch(2, completed=True, last_data_at=ends_at), ends_at)
    assert step(probed(ProbeOutcome.FAILED), ends_at + 0.5) == []


def test_a_probe_that_was_not_asked_is_retried() -> None:
    step = ready(TimeoutProfile(health_probe_interval_s=None, health_failures_before_restart=99))
    assert step(DOUBT, 1.0) == [PROBE]
    for at in (1.1, 2.2):
        assert step(probed(ProbeOutcome.NOT_ASKED), at) == []
        assert step(Tick(), at + 1.0) == [PROBE]
    assert step(probed(ProbeOutcome.FAILED), 3.3) == [DOUBT_CONFIRMED]


def test_gpu_error_is_told_as_is_while_ready() -> None:
    step = ready(TimeoutProfile())
    error = messages.GpuFaulted(epoch=1, fault=GpuFault(fatal=False, detail="GPU 0: Xid 31"))
    assert step(error, 1.0) == [error]
    assert step(replace(error, epoch=2), 1.0) == []
    step(StopWatching(), 2.0)
    assert step(error, 3.0) == []


def test_evidence_then_progress_then_verdict() -> None:
    step = ready(STALLS_AFTER_1_S, probes_count=2)
    assert step(Watch(request_id=1), 60.0) == []
    first, second = step(Tick(), 60.05)
    assert (first.fresh, second.fresh) == (True, True)
    assert [step(EvidenceSeen(look=look, at=60.05), 60.05) for look in (first, second)] == [[], []]
    first, second = step(Tick(), 60.1)
    assert step(EvidenceSeen(look=first, at=60.1), 60.11) == []
    (asked,) = step(EvidenceSeen(look=second, alive=True, at=60.1), 60.12)
    assert (asked.for_verdict, asked.liveness_at) == (True, 60.1)
    assert step(told(generating(0.0)), 60.13) == []  # it works


def test_probe_is_reset_by_the_look_that_is_made() -> None:
    step = ready(STALLS_AFTER_1_S, probes_count=1)
    step(Watch(request_id=1), 60.0)
    (refused,) = step(Tick(), 60.05)
    (asked,) = step(EvidenceSeen(look=refused, at=60.05, by_shortage=True), 60.05)
    assert asked.for_verdict
    assert step(told(generating(0.0)), 60.06) == []  # nobody could look
    (made,) = step(Tick(), 60.1)
    step(EvidenceSeen(look=made, at=60.1), 60.1)
    (later,) = step(Tick(), 60.2)
    assert [look.fresh for look in (refused, made, later)] == [True, True, False]


def test_hanging_probe_is_unrepeated_and_delays_no_verdict() -> None:
    step = ready(STALLS_AFTER_1_S, probes_count=2)
    step(Watch(request_id=1), 60.0)
    hanging, quick = step(Tick(), 60.05)
    assert step(EvidenceSeen(look=quick, at=60.05), 60.05) == []
    look, asked = step(Tick(), 60.1)
    assert (look.probe, asked.for_verdict) == (quick.probe, True)
    (again,) = step(told(generating(0.0)), 60.1)
    assert isinstance(again, messages.Stalled)
    assert hanging.probe not in [e.probe for e in step(Tick(), 60.2) if isinstance(e, Look)]


@pytest.mark.parametrize("returns_at", [62.02, 62.5])
def test_probe_results_before_watching_began_do_not_count(returns_at: float) -> None:
    step = ready(STALLS_AFTER_1_S, probes_count=1)
    step(Watch(request_id=1), 60.0)
    (old,) = step(Tick(), 60.05)
    step(unwatch(1), 61.0)
    step(Watch(request_id=2), 62.0)
    if returns_at > 62.05:
        assert step(Tick(), 62.05) == []  # the probe is still out
    looks = step(EvidenceSeen(look=old, alive=True, at=returns_at), returns_at)
    (reset,) = looks or step(Tick(), 62.05)
    assert reset.fresh
    asked = [e for e in step(Tick(), 63.0) if isinstance(e, AskForProgress)]
    assert [e.liveness_at for e in asked] == [None]


def test_a_launch_that_is_over_leaves_no_probe() -> None:
    step = Watched(TimeoutProfile(), probes_count=1)
    step(Launch(epoch=1), 0.0)
    (look,) = step(Launched(epoch=1, pid=7), 0.0)
    assert look.fresh
    step(Tick(), 0.1)
    assert messages.AbortProbes() in step(StopWatching(), 0.2)
    assert step.watch.deadline is None
    assert step(probed(ProbeOutcome.READY), 0.3) == []
    assert step(Launched(epoch=1, pid=7), 0.3) == []
    assert step(ProbeNow("late"), 0.3) == []
    assert step(EvidenceSeen(look=look, alive=True, at=0.3), 0.3) == []


@pytest.mark.parametrize(
    "profile",
    [
        TimeoutProfile(startup_timeout_s=10.0),
        TimeoutProfile(load_timeout_s=10.0),
        TimeoutProfile(silent_work_timeout_s=10.0),
    ],
)
def test_abandoned_launch_tells_of_its_last_probe(profile: TimeoutProfile) -> None:
    step = Watched(profile)
    step(Launch(epoch=1), 0.0)
    step(Launched(epoch=1, pid=7), 0.0)
    news: list[Any] = []
    while not any(isinstance(each, messages.StartupFailed) for each in news):
        now = step.watch.deadline
        assert now is not None
        news = step(Tick(), now)
        if any(isinstance(each, messages.ProbeReadiness) for each in news):
            step(probed(ProbeOutcome.FAILED), now)
    (failed,) = (each for each in news if isinstance(each, messages.StartupFailed))
    assert failed.detail.endswith("; the last probe: told")


def test_a_launch_that_refuses_the_key_fails_at_once() -> None:
    step = in_state("starting")
    failed = next(
        each
        for each in step(probed(ProbeOutcome.UNAUTHORIZED), 0.2)
        if isinstance(each, messages.StartupFailed)
    )
    assert (failed.reason, failed.detail) == (StartFailReason.UNAUTHORIZED, "told")


@cases(
    "outcome, fails",
    {
        "no name server": (ProbeOutcome.NOT_ASKED, False),
        "it was asked": (ProbeOutcome.LOADING, True),
    },
)
def test_unasked_probe_is_no_silence_of_launch(outcome: ProbeOutcome, fails: bool) -> None:
    watch = VirtualWatch(TimeoutProfile(startup_timeout_s=120.0), readiness=lambda now: outcome)
    assert (watch.run(300.0, messages.StartupFailed) is not None) is fails


def test_launch_without_process_is_unprobed_and_abandoned_timely() -> None:
    step = Watched(TimeoutProfile(startup_timeout_s=10.0))
    step(Launch(epoch=1), 0.0)
    news: list[Any] = []
    while not news and step.watch.deadline is not None:
        now = step.watch.deadline
        news = step(Tick(), now)
    assert [type(told) for told in news] == [messages.StartupFailed, messages.AbortProbes]
    assert 10.0 <= now <= 10.5
    assert step.watch.deadline is None


def test_idle_hour_does_not_affect_next_request() -> None:
    step = ready(TimeoutProfile(health_probe_interval_s=None), probes_count=1)
    step(Watch(request_id=1), 9.5)
    (look,) = step(Tick(), 10.0)
    step(EvidenceSeen(look=look, at=10.0, by_shortage=True), 10.0)
    step(unwatch(1, completed=True), 10.0)
    step(Watch(request_id=2), 3600.0)
    (look,) = step(Tick(), 3600.5)
    step(EvidenceSeen(look=look, at=3600.5), 3600.5)
    batches = (Batch(3601.0, 3603.0, 512, 512),)
    step(unwatch(2, completed=True, last_data_at=3603.0, batches=batches), 3603.0)
    learnt, _ = step(StopWatching(), 3604.0)
    assert learnt.pace.expected_s(512, 512) == 2.0


def test_batch_times_outlive_a_launch() -> None:
    pace = Pace()
    pace.learn(1, [Batch(1.0, 3.0, 512, 512)])
    pace.learn(2, [Batch(1.0, 61.0, 7, 7)], is_cold=True)
    step = Watched(TimeoutProfile())
    step(messages.PaceLearnt(pace), 10.0)
    step(Launch(epoch=1), 10.0)
    learnt, _ = step(StopWatching(), 20.0)
    assert learnt.pace.expected_s(512, 512) == 2.0
    assert learnt.pace.longest_standstill_s(7, 7, is_cold=True) == PACE_MULTIPLE * 60.0


@pytest.mark.parametrize("probes_count", [0, 1], ids=["no probe", "a probe that hangs"])
def test_every_look_tells_how_far_the_requests_are(probes_count: int) -> None:
    step = ready(TimeoutProfile(health_probe_interval_s=None), probes_count=probes_count)
    step(Watch(request_id=1), 10.0)
    step(Tick(), 10.5)
    step(Tick(), 15.0)
    step(told(generating(14.9)), 15.0)
    seen = [e for e in step.watch.step(Tick(), 20.0) if isinstance(e, messages.Observed)]
    assert [e.requests for e in seen] == [(generating(14.9),)]


@pytest.mark.parametrize("waiting", [0, 1])
def test_server_activity_before_idling_is_no_evidence(waiting: int) -> None:
    step = ready(TimeoutProfile(health_failures_before_restart=1), probes_count=1)
    step(Watch(request_id=1), 1.0)
    (look,) = step(Tick(), 1.5)
    step(EvidenceSeen(look=look, alive=True, at=1.5, detail="computes"), 1.5)
    step(unwatch(1, completed=True), 2.0)
    step(Tick(), 31.0)
    for request_id in range(waiting):
        step(Watch(request_id=2 + request_id), 31.0)
    seen, lost = step.watch.step(probed(ProbeOutcome.FAILED), 31.1)
    assert isinstance(lost, messages.HealthLost)
    assert isinstance(seen, messages.Observed)
    assert seen.activity == ""


def test_idle_server_wakes_nobody_except_for_health_probe() -> None:
    for interval_s, due_at in ((None, None), (30.0, 31.0)):
        step = ready(TimeoutProfile(health_probe_interval_s=interval_s))
        assert step.watch.deadline == due_at
        step(Watch(request_id=1), 1.0)
        step(Watch(request_id=2), 1.2)
        assert step.watch.deadline == 1.5
        assert step(Tick(), 1.5) == []
        assert step.watch.deadline == 6.0
        step(unwatch(1), 2.0)
        step(unwatch(2), 2.0)
        assert step.watch.deadline == due_at


def test_a_probe_that_is_due_brings_no_look_forward() -> None:
    step = ready(TimeoutProfile(health_probe_interval_s=30.0), probes_count=1)
    step(Watch(request_id=1), 30.9)
    asked, probe = step(Tick(), 31.0)
    assert isinstance(asked, AskForProgress)
    assert probe == PROBE


# ---------------------------------------------------------------- the module's table of states


def in_state(state: str) -> Watched:
    step = ready(TimeoutProfile()) if state == "ready" else Watched(TimeoutProfile())
    if state == "starting":
        step(Launch(epoch=1), 0.0)
        step(Launched(epoch=1, pid=7), 0.0)
        step(Tick(), 0.1)
    if state == "over":
        step(StopWatching(), 0.1)
    return step


def happens(step: Watched, event: str) -> None:
    """Whatever state it is in."""
    match event:
        case "adopt":
            step.watch.adopt(0.2)
        case "Launch":
            step(Launch(epoch=1), 0.2)
        case "StopWatching":
            step(StopWatching(), 0.2)
        case "overdue":
            now = 0.2
            while step.watch.state == "starting":
                now = step.watch.deadline or 1e9
                step(Tick(), now)
        case _:
            step(probed(ProbeOutcome[event]), 0.2)


STATES = ("waiting", "starting", "ready", "over")
EVENTS = (
    *("Launch", "StopWatching", "adopt", "overdue"),
    *(outcome.name for outcome in ProbeOutcome),
)
# a launch is ordered once, and a server that runs already instead of one
IMPOSSIBLE = set(itertools.product(("adopt", "Launch"), STATES[1:]))
ROWS = {(before, event): after for before, event, after in table(str(watch.__doc__), "in")}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_the_watch_follows_its_state_table(state: str, event: str) -> None:
    if (event, state) in IMPOSSIBLE:
        assert (state, event) not in ROWS
        return
    step = in_state(state)
    assert step.watch.state == state
    happens(step, event)
    assert step.watch.state == ROWS.get((state, event), state)


@pytest.mark.parametrize(
    "news",
    [
        ProbeNow("a request failed"),
        messages.GpuFaulted(epoch=1, fault=GpuFault(fatal=True, detail="GPU 0: the GPU is lost")),
    ],
)
def test_a_launch_before_ready_ignores_causes_to_probe(news: messages.WatchdogMessage) -> None:
    watch = ServerWatch(TimeoutProfile(), epoch=1, probes_count=0)
    watch.step(Launch(epoch=1), 0.0)
    watch.step(Launched(epoch=1, pid=5), 0.01)
    assert watch.step(news, 0.02) == []
