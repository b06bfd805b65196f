"""Minutes and hours of a server's life, decided in an instant by the parts that decide them at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from llama_worker.messages import BecameReady, HealthLost, ProbeOutcome, Stalled, StartupFailed
from llama_worker.profiles import RestartPolicy, TimeoutProfile
from llama_worker.request.progress import Progress
from llama_worker.server import lifecycle
from llama_worker.server.lifecycle import Lifecycle
from llama_worker.server.lifecycle_states import BackingOff, Failed
from llama_worker.server.liveness import WINDOW_S, Counters, ProcessActivity, ProcessSample
from llama_worker.server.timeouts import Verdict
from llama_worker.types import RequestFailReason, RequestPhase, WorkerState
from tests import lives
from tests.virtual_watch import VirtualWatch, always_ready

DEFAULT = TimeoutProfile()
MINUTE = 60.0
STALL, HEADERS = RequestFailReason.STALL_TIMEOUT, RequestFailReason.HEADERS_TIMEOUT
IDLE, BUSY = 0.6, 95.0  # ticks per second of a server that waits, and of one computing thread (b11434)


class Machine:
    """The server's processes as /proc would show them: CPU and reads, at the rates of each instant."""

    def __init__(self, works: Callable[[float], bool], *, reads: bool = False) -> None:
        self._works = works
        self._reads = reads
        self._activity = ProcessActivity()
        self._at: float | None = None
        self._ticks = 0.0
        self._read_bytes = 0.0

    def __call__(self, now: float, fresh: bool) -> bool:
        """One look; whether it gives evidence of work."""
        span_s = now - self._at if self._at is not None else 0.0
        self._at = now
        at_work = self._works(now)
        self._ticks += (BUSY if at_work and not self._reads else IDLE) * span_s
        self._read_bytes += (8e6 if at_work and self._reads else 0.0) * span_s
        if fresh:
            self._activity = ProcessActivity()
        used = Counters(cpu_ticks=int(self._ticks), read_bytes=int(self._read_bytes), major_faults=0)
        self._activity, evidence = self._activity.observe(ProcessSample(at=now, processes={(1, 1.0): used}))
        return evidence is not None and evidence.alive


@dataclass(frozen=True)
class Story:
    """One request, sent at 0.0. Instants are seconds since."""

    headers_at: float | None = 0.01
    progress_every_s: float | None = None  # prompt progress, until the first token
    first_token_at: float | None = None
    token_every_s: float = 1.0
    last_token_at: float = 0.0
    works: Callable[[float], bool] = lambda now: False  # shows in the CPU time
    neighbour_data_every_s: float | None = None

    def progress(self, now: float) -> Progress:
        def reached(at: float | None) -> float | None:
            return at if at is not None and at <= now else None

        headers_at, first_token_at = reached(self.headers_at), reached(self.first_token_at)
        prompt_progress_at = None
        if self.progress_every_s is not None and headers_at is not None:
            until = min(now, first_token_at if first_token_at is not None else now)
            prompt_progress_at = until // self.progress_every_s * self.progress_every_s
        last_data_at = prompt_progress_at
        if first_token_at is not None:
            until = min(now, self.last_token_at)
            count = max(0.0, (until - first_token_at) // self.token_every_s)
            last_data_at = first_token_at + count * self.token_every_s
        phase = RequestPhase.WAITING
        if headers_at is not None:
            phase = RequestPhase.PREFILL if first_token_at is None else RequestPhase.GENERATING
        return Progress(
            request_id=1,
            phase=phase,
            dispatched_at=0.0,
            turn_started_at=0.0,
            headers_at=headers_at,
            first_token_at=first_token_at,
            prompt_progress_at=prompt_progress_at,
            last_data_at=last_data_at,
            last_stream_byte_at=now,  # keepalives never stop
        )


def ready_at_zero(profile: TimeoutProfile, works: Callable[[float], bool]) -> VirtualWatch:
    """A server that becomes READY at 0.0."""
    watched = VirtualWatch(profile, evidence=Machine(works), now=-0.1)
    assert watched.run(1.0, BecameReady) == (0.0, watched.news[-1][1])
    return watched


def neighbour(every_s: float) -> Callable[[float], Progress]:
    """A request that gets data so often."""
    return lambda now: Progress(
        request_id=2,
        phase=RequestPhase.GENERATING,
        dispatched_at=0.0,
        turn_started_at=0.0,
        headers_at=0.0,
        first_token_at=0.0,
        last_data_at=now // every_s * every_s,
    )


def watch(story: Story, until: float, profile: TimeoutProfile = DEFAULT) -> tuple[float, Verdict] | None:
    """When the story's request is given up, and why; None if it is not, up to `until`."""
    watched = ready_at_zero(profile, story.works)
    requests: dict[int, Callable[[float], Progress]] = {1: story.progress}
    if story.neighbour_data_every_s is not None:
        requests[2] = neighbour(story.neighbour_data_every_s)
    watched.begin(requests)
    found = watched.run(until, Stalled)
    if found is None:
        return None
    at, stalled = found
    assert stalled.request_id == 1
    return at, stalled.verdict


@pytest.mark.parametrize("headers_at", [0.01, 40 * MINUTE], ids=["headers at once", "headers with the first token"])
def test_forty_minutes_of_silent_prefill_at_work_are_spared(headers_at: float) -> None:
    story = Story(
        headers_at=headers_at,
        first_token_at=40 * MINUTE,
        last_token_at=60 * MINUTE,
        works=lambda now: now <= 60 * MINUTE,
    )
    assert watch(story, until=61 * MINUTE) is None


def test_forty_minutes_of_prefill_on_an_idle_cpu_are_spared_while_progress_is_reported() -> None:
    story = Story(progress_every_s=99.0, first_token_at=40 * MINUTE, last_token_at=50 * MINUTE)
    assert watch(story, until=50 * MINUTE) is None


@pytest.mark.parametrize(
    ("story", "reason", "limit_s"),
    [
        pytest.param(Story(headers_at=None), HEADERS, 30.0, id="no headers"),
        pytest.param(Story(), STALL, 3600.0, id="headers and pings"),
        pytest.param(Story(first_token_at=1.0, last_token_at=1.0), STALL, 301.0, id="one token"),
        pytest.param(Story(works=lambda now: True), STALL, 3600.0, id="a spin with pings"),
    ],
)
def test_a_hang_is_found_within_its_timeout_and_two_probe_intervals(
    story: Story, reason: RequestFailReason, limit_s: float
) -> None:
    found = watch(story, until=3 * 3600.0)
    assert found is not None
    at, given = found
    assert given.reason is reason
    assert limit_s <= at <= limit_s + 2 * DEFAULT.liveness_probe_interval_s


def test_a_prefill_that_dies_after_forty_minutes_is_found_one_timeout_after_its_last_work() -> None:
    found = watch(Story(works=lambda now: now <= 40 * MINUTE), until=5 * 3600.0)
    assert found is not None
    at, given = found
    assert given.reason is STALL
    # Silent work is over first: an hour without data, whatever the server was seen to do.
    assert 3600.0 <= at <= 3610.0
    patient = replace(DEFAULT, silent_work_timeout_s=None)
    found = watch(Story(works=lambda now: now <= 40 * MINUTE), until=5 * 3600.0, profile=patient)
    assert found is not None
    assert 6000.0 <= found[0] <= 6000.0 + WINDOW_S + 2 * DEFAULT.liveness_probe_interval_s


def test_hours_behind_a_neighbour_that_moves_are_spared_while_the_server_works() -> None:
    story = Story(headers_at=None, works=lambda now: True, neighbour_data_every_s=90.0)
    assert watch(story, until=5 * 3600.0) is None


def test_a_token_every_five_minutes_less_a_second_is_spared_and_one_later_is_not() -> None:
    slow = Story(first_token_at=10.0, token_every_s=299.0, last_token_at=4 * 3600.0)
    assert watch(slow, until=3 * 3600.0) is None
    slower = Story(first_token_at=10.0, token_every_s=311.0, last_token_at=4 * 3600.0)
    assert watch(slower, until=3 * 3600.0) is not None


# ---------------------------------------------------------------- load


def load(
    *, works: Callable[[float], bool], until: float, profile: TimeoutProfile = DEFAULT, reads: bool = False
) -> tuple[float, str] | None:
    """When and why the launch at 0.0 is given up, a 503 at every probe; None if it is not, up to `until`."""
    loading = VirtualWatch(profile, evidence=Machine(works, reads=reads), readiness=lambda now: ProbeOutcome.LOADING)
    found = loading.run(until, StartupFailed)
    return None if found is None else (found[0], found[1].detail)


@pytest.mark.parametrize("reads", [False, True], ids=["CPU", "disk"])
def test_a_load_of_ten_minutes_with_503_is_waited_for_while_it_works(reads: bool) -> None:
    assert load(works=lambda now: True, until=10 * MINUTE, reads=reads) is None


@pytest.mark.parametrize("hangs_at", [0.0, 8 * MINUTE])
def test_a_load_that_hangs_is_given_up_one_timeout_after_its_last_work(hangs_at: float) -> None:
    found = load(works=lambda now: now <= hangs_at, until=3600.0)
    assert found is not None
    limit_s = hangs_at + DEFAULT.startup_timeout_s
    assert limit_s <= found[0] <= limit_s + WINDOW_S + 4.0  # probes are 2 s apart by then
    assert "startup_timeout_s" in found[1]


def test_load_timeout_s_bounds_a_load_that_works() -> None:
    found = load(works=lambda now: True, until=3600.0, profile=replace(DEFAULT, load_timeout_s=300.0))
    assert found is not None
    assert 300.0 <= found[0] <= 304.0
    assert "load_timeout_s" in found[1]


# ---------------------------------------------------------------- crashes


@dataclass(frozen=True)
class Life:
    """What becomes of one launch."""

    loads_s: float = 20.0
    serves_s: float = 60.0  # READY for so long, then it crashes
    completes: bool = False  # a request, while READY


def live(launches: Iterator[Life], policy: RestartPolicy, until: float) -> tuple[float, Lifecycle]:
    """The worker's life with such launches, up to `until` or FAILED."""
    now = 0.0
    life, _ = lives.start(Lifecycle(policy=policy), now)
    while now < until and not isinstance(life.state, Failed):
        launch = next(launches)
        now += launch.loads_s
        life, _ = lives.became_ready(life, now)
        assert life.public_state is WorkerState.READY
        if launch.completes:
            life = lifecycle.request_completed(life, now + launch.serves_s / 2)
        now += launch.serves_s
        life, _ = lives.exited(life, now)
        if isinstance(life.state, BackingOff):
            now = life.state.resume_at
            life, _ = lives.tick(life, now)
    return now, life


def always(launch: Life) -> Iterator[Life]:
    while True:
        yield launch


def test_a_server_that_crashes_a_minute_after_each_start_ends_failed() -> None:
    at, life = live(always(Life()), RestartPolicy(), until=24 * 3600.0)
    assert life.public_state is WorkerState.FAILED
    assert life.budget.restart_count == 5
    # Six launches of 80 s and backoffs of 5, 10, 20, 40 and 60 s.
    assert at == 6 * 80.0 + 135.0


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(Life(completes=True), id="a completed request between"),
        pytest.param(Life(serves_s=600.0), id="ten minutes of READY between"),
    ],
)
def test_a_server_that_crashes_now_and_then_but_recovers_is_always_started_again(launch: Life) -> None:
    _, life = live(always(launch), RestartPolicy(), until=7 * 24 * 3600.0)
    assert life.public_state is not WorkerState.FAILED
    assert life.budget.restart_count > 500


def test_a_server_that_completes_requests_and_crashes_at_once_is_stopped_by_the_window() -> None:
    at, life = live(
        always(Life(loads_s=1.0, serves_s=1.0, completes=True)), RestartPolicy(restart_backoff_s=1.0), until=3600.0
    )
    assert life.public_state is WorkerState.FAILED
    assert at < RestartPolicy().restart_window_s


def test_a_server_that_recovers_after_four_crashes_stays_up() -> None:
    def launches() -> Iterator[Life]:
        for _ in range(4):
            yield Life()
        yield Life(serves_s=3600.0, completes=True)
        yield from always(Life(serves_s=3600.0, completes=True))

    _, life = live(launches(), RestartPolicy(), until=24 * 3600.0)
    assert life.public_state is not WorkerState.FAILED


# ---------------------------------------------------------------- health


def test_an_hour_of_failing_health_costs_nothing_while_data_flows_and_90_s_of_silence_cost_the_server() -> None:
    def fails(now: float) -> ProbeOutcome:
        return always_ready(now) if now <= 0.0 else ProbeOutcome.FAILED

    watched = VirtualWatch(replace(DEFAULT, idle_stream_timeout_s=None), readiness=fails, now=-0.1)
    assert watched.run(1.0, BecameReady) is not None
    watched.begin({1: Story(first_token_at=0.0, token_every_s=0.1, last_token_at=3600.0).progress})
    found = watched.run(2 * 3600.0, HealthLost)
    assert found is not None
    assert found[0] == 3600.0 + 90.0
