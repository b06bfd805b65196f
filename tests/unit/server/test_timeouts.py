"""The verdicts on silent requests, with a literal clock."""

from dataclasses import replace
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.request.progress import Progress, newest
from llama_worker.server.timeouts import Neighbours, SlotSigns, timeout_verdict
from llama_worker.types.request import RequestFailReason, RequestPhase
from tests.tables import cases

WAITING, PREFILL, GENERATING = RequestPhase.WAITING, RequestPhase.PREFILL, RequestPhase.GENERATING
TOOL, DONE = RequestPhase.TOOL, RequestPhase.DONE
HEADERS, TTFT = RequestFailReason.HEADERS_TIMEOUT, RequestFailReason.TTFT_TIMEOUT
STALL, ABSOLUTE = RequestFailReason.STALL_TIMEOUT, RequestFailReason.ABSOLUTE_TIMEOUT
PROFILE = TimeoutProfile(
    connect_timeout_s=3.0,
    headers_timeout_s=30.0,
    ttft_timeout_s=None,
    prefill_liveness_timeout_s=600.0,
    idle_stream_timeout_s=120.0,
    absolute_timeout_s=None,
    silent_work_timeout_s=1200.0,
)


def progress(phase: RequestPhase, **times: Any) -> Progress:
    return Progress(
        phase=phase,
        **{"request_id": 1, "dispatched_at": 1000.0, "turn_started_at": 1000.0, **times},
    )


def heard(
    work: float | None = None,
    neighbour: float | None = None,
    beside: bool = False,
    behind: bool = False,
    left: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """When a sign of work and a neighbour's data came last, whether it is `beside` one that is
    served, `behind` a reply in one piece, or when one `left`; what more the slots showed; judged by
    these limits."""
    signs = {name: more.pop(name) for name in SlotSigns.__struct_fields__ if name in more}
    return {
        "liveness_at": work,
        "neighbours": Neighbours(
            data_at=neighbour,
            any_is_served=beside,
            any_awaits_one_piece=behind,
            leftover_since=left,
        ),
        "slots": SlotSigns(**signs),
        "profile": replace(PROFILE, **more),
    }


def reason_at(now: float, at: Progress, told: dict[str, Any]) -> RequestFailReason | None:
    found = timeout_verdict(at, now=now, **told)
    return None if found is None else found.reason


# ---------------------------------------------------------------- SPEC's table

QUEUED = progress(WAITING)
IN_ONE_PIECE = replace(QUEUED, in_one_piece=True)
READS = progress(PREFILL, headers_at=1010.0)
HAS_A_ROLE = progress(PREFILL, headers_at=1010.0, last_data_at=1016.0)
REPORTS = progress(PREFILL, headers_at=1010.0, prompt_progress_at=1020.0)
SAME_AGAIN = {"last_data_at": 1100.0, "repeated_at": (1101.0, 1103.0, 1105.0)}
REPEATS = progress(PREFILL, prompt_progress_at=1100.0, **SAME_AGAIN)
SHOWS_PROMPTS: dict[str, Any] = {"shows_prompt_progress": True}
REPEATED_BEFORE = replace(REPEATS, repeated_at=(1101.0, 1103.0, 1189.0))
WRITES_THE_SAME = progress(GENERATING, first_token_at=1050.0, **SAME_AGAIN)
WRITES = progress(GENERATING, first_token_at=1050.0, last_data_at=1100.0)
STARVES = replace(REPEATS, repeated_at=(5000.0, 5010.0, 5020.0))  # one after each batch
SECOND_TURN = progress(
    PREFILL, turn_started_at=1500.0, headers_at=1501.0, prompt_progress_at=1559.0
)
OLD_TOKEN = replace(SECOND_TURN, first_token_at=1100.0)
BUSY = progress(TOOL, turn_started_at=1499.0, headers_at=1499.0, last_data_at=1499.0)
HAS_500_S: dict[str, Any] = {"absolute_timeout_s": 500.0}  # from the dispatch on, at 1000.0


def due(
    at: Progress, due_at: float, reason: RequestFailReason = STALL, **told: Any
) -> tuple[Progress, dict[str, Any], float, RequestFailReason]:
    return at, heard(**told), due_at, reason


@cases(
    "at, told, due_at, reason",
    {
        "no headers and no work": due(QUEUED, 1030.0, HEADERS),
        "no headers, and the work has ended": due(QUEUED, 1050.0, HEADERS, work=1020.0),
        "work before the turn saves nothing": due(QUEUED, 1030.0, HEADERS, work=999.0),
        "behind a neighbour that gets data": due(QUEUED, 1059.0, HEADERS, neighbour=1029.0),
        "silent work before the headers": due(QUEUED, 2200.0, work=2199.0),
        "the batch of one that is gone": due(QUEUED, 1130.0, HEADERS, left=1010.0),
        "a batch that must be over": due(
            QUEUED, 1030.0, HEADERS, left=1005.0, idle_stream_timeout_s=20.0
        ),
        "silent work behind another client's prompt": due(
            QUEUED, 3395.0, work=3394.0, any_moved_at=2195.0, held_up_at=2195.0
        ),
        "silent work beside what holds nobody up": due(
            QUEUED, 2200.0, work=2199.0, any_moved_at=2195.0
        ),
        "beside one that has limits of its own": due(QUEUED, 2200.0, beside=True),
        "what it links to is fetched": due(replace(QUEUED, links_media=True), 2200.0),
        "behind a reply in one piece": due(
            QUEUED, 2350.0, behind=True, any_moved_at=1150.0, held_up_at=1150.0
        ),
        "the same, and its slot stands still": due(
            QUEUED, 1270.0, behind=True, any_moved_at=1150.0, shows_all=True
        ),
        "a reply in one piece, by its slots": due(
            IN_ONE_PIECE, 2350.0, work=2345.0, any_moved_at=1150.0
        ),
        "the same, of a server whose work does not show": due(
            IN_ONE_PIECE, 2350.0, any_moved_at=1150.0
        ),
        "a reply in one piece, and its slot stands still": due(
            IN_ONE_PIECE, 1270.0, work=1100.0, any_moved_at=1150.0, shows_all=True
        ),
        "the same, and the work ends later": due(
            IN_ONE_PIECE, 1280.0, work=1160.0, any_moved_at=1150.0, shows_all=True
        ),
        "the same, behind the batch of one that is gone": due(
            IN_ONE_PIECE, 1290.0, left=1170.0, any_moved_at=1150.0, shows_all=True
        ),
        "the same, beside one that has limits of its own": due(
            IN_ONE_PIECE, 2350.0, beside=True, any_moved_at=1150.0, shows_all=True
        ),
        "silent prefill, from the headers on": due(READS, 1610.0),
        "headers are no data for silent work": due(READS, 2200.0, work=2199.0),
        "a slot that may be its own counts": due(
            READS, 3395.0, work=3394.0, moved_at=2195.0, held_up_at=2195.5
        ),
        "not if it would hold nobody up": due(READS, 2200.0, work=2199.0, moved_at=2195.0),
        "another's does not": due(
            READS, 2200.0, work=2199.0, any_moved_at=2195.0, held_up_at=2195.0
        ),
        "nor does its own behind data": due(
            HAS_A_ROLE, 2216.0, work=2215.0, moved_at=2215.0, any_moved_at=2215.0
        ),
        "a role chunk is data": due(HAS_A_ROLE, 1616.0),
        "prefill that works": due(HAS_A_ROLE, 1617.0, work=1017.0),
        "reported prefill has the stream's limit": due(REPORTS, 1140.0),
        "and not the prefill's": due(REPORTS, 1140.0, prefill_liveness_timeout_s=10.0),
        "reported prefill that works": due(REPORTS, 1141.0, work=1021.0),
        "it repeats itself while it computes": due(REPEATS, 1220.0, work=1219.0, **SHOWS_PROMPTS),
        "the same, or it waits behind another client": due(REPEATS, 2300.0, work=2299.0),
        "a silent stream": due(WRITES, 1220.0),
        "a silent stream of a server that works": due(WRITES, 1221.0, work=1101.0),
        "a server that spins": due(WRITES, 2300.0, work=2299.0),
        "dead beside a live one": due(WRITES, 1580.0, work=3199.0, neighbour=2000.0),
        "the same, and its own slot moved": due(
            WRITES, 1680.0, work=3199.0, neighbour=2000.0, moved_at=1200.0
        ),
        "a neighbour that went on for a while": due(WRITES, 2419.0, work=2299.0, neighbour=1219.0),
        "repeats, and neighbours stand still": due(
            REPEATS, 1220.5, work=1219.0, neighbour=1100.5, **SHOWS_PROMPTS
        ),
        "repeats, and no slot moves any more": due(
            REPEATS, 1220.5, work=1219.0, any_moved_at=1100.5, **SHOWS_PROMPTS
        ),
        "read in turn, and no sign of work": due(REPORTS, 1250.0, neighbour=1130.0),
        "the same, beside a neighbour": due(WRITES_THE_SAME, 1220.0, work=1219.0, neighbour=1219.0),
        "writes the same, its slot moved once": due(
            WRITES_THE_SAME, 1220.5, work=1219.0, moved_at=1100.5, any_moved_at=1219.0
        ),
        "no token in this turn": due(SECOND_TURN, 1560.0, TTFT, work=1559.0, ttft_timeout_s=60.0),
        "a token of the turn before": due(
            OLD_TOKEN, 1560.0, TTFT, work=1559.0, ttft_timeout_s=60.0
        ),
        "late, its tool runs": due(BUSY, 1500.0, ABSOLUTE, work=1499.9, **HAS_500_S),
        "late, its client reads slowly": due(
            replace(WRITES, concluding=True), 1500.0, ABSOLUTE, work=1499.9, **HAS_500_S
        ),
    },
)
def test_an_exceeded_limit_gives_its_verdict(
    at: Progress, told: dict[str, Any], due_at: float, reason: RequestFailReason
) -> None:
    assert timeout_verdict(at, now=due_at - 0.1, **told) is None
    found = timeout_verdict(at, now=due_at, **told)
    assert found is not None
    assert (found.reason, found.counts_against_server) == (reason, reason is not ABSOLUTE)


STRICT = heard(idle_stream_timeout_s=1.0, ttft_timeout_s=1.0)
ONLY_TTFT = heard(ttft_timeout_s=60.0, idle_stream_timeout_s=None, silent_work_timeout_s=None)
OFF = heard() | {"profile": TimeoutProfile.debug()}


@cases(
    "at, told",
    {
        "tools have their own deadline": (progress(TOOL, last_data_at=1100.0), heard()),
        "it has ended": (progress(DONE), heard(absolute_timeout_s=1.0)),
        "the first token came": (progress(GENERATING, first_token_at=1050.0), ONLY_TTFT),
        "off: waiting": (progress(WAITING), OFF | {"liveness_at": 1e9 - 1}),
        **{f"off: {phase}": (progress(phase), OFF) for phase in (PREFILL, GENERATING, TOOL)},
        "a batch of one that is gone may take for ever": (
            QUEUED,
            heard(left=1010.0, idle_stream_timeout_s=None, silent_work_timeout_s=None),
        ),
        "the turn has finished": (progress(GENERATING, concluding=True), STRICT),
    },
)
def test_without_a_limit_there_is_no_verdict(at: Progress, told: dict[str, Any]) -> None:
    assert timeout_verdict(at, now=1e9, **told) is None


@cases(
    "at, told",
    {
        "a neighbour's prompt is read first": (STARVES, heard(neighbour=5019.0, **SHOWS_PROMPTS)),
        "a stranger's prompt is": (STARVES, heard(any_moved_at=5019.0, **SHOWS_PROMPTS)),
        "repeats until a neighbour went on": (
            REPEATED_BEFORE,
            heard(work=1219.0, neighbour=1188.0, **SHOWS_PROMPTS),
        ),
        "the same twice, and then a batch": (
            replace(REPEATS, repeated_at=(1101.0, 1103.0)),
            heard(work=1219.0, **SHOWS_PROMPTS),
        ),
        "text held back, and its slot moves": (
            WRITES_THE_SAME,
            heard(moved_at=1218.0, any_moved_at=1218.0),
        ),
    },
)
def test_request_waiting_for_turn_is_not_given_up(at: Progress, told: dict[str, Any]) -> None:
    heard_at = max(told["neighbours"].data_at or 0.0, told["slots"].any_moved_at or 0.0, 1100.0)
    assert reason_at(heard_at + 119.0, at, told | {"liveness_at": heard_at}) is None


def test_the_first_limit_over_gives_the_reason() -> None:
    limits: dict[str, Any] = {"absolute_timeout_s": 100.0, "ttft_timeout_s": 50.0}
    assert reason_at(5000.0, progress(WAITING), heard(**limits)) is HEADERS
    assert reason_at(5000.0, progress(WAITING), heard(work=1040.0, **limits)) is TTFT
    assert reason_at(5000.0, progress(TOOL), heard(**limits)) is ABSOLUTE


def test_detail_names_the_limit_and_the_times() -> None:
    at = progress(GENERATING, request_id=7, last_data_at=1100.0, last_stream_byte_at=1245.0)
    found = timeout_verdict(at, now=1250.0, **heard(work=1110.0))
    assert found is not None
    assert found.detail == (
        "no data and no sign of work for 140.0 s (limit: idle_stream_timeout_s 120); request 7 in "
        "phase generating, turn began 250.0 s ago, headers never, first token never, prompt "
        "progress never, last data 150.0 s ago, last byte 5.0 s ago, last sign of work 140.0 s ago"
    )
    waits = timeout_verdict(QUEUED, now=1130.0, **heard(left=1010.0))
    assert waits is not None
    assert "work since an earlier request was aborted for 120.0 s" in waits.detail
    beside = timeout_verdict(WRITES, now=1580.0, **heard(work=1579.0, neighbour=1579.0))
    assert beside is not None
    assert beside.alone
    assert "for 480.0 s (limit: 4 x idle_stream_timeout_s 120)" in beside.detail


# ---------------------------------------------------------------- properties

offsets = st.floats(min_value=0.0, max_value=4000.0)
maybe = st.none() | offsets.map(lambda s: 1000.0 + s)
some = st.floats(min_value=0.1, max_value=4000.0)
profiles = st.builds(
    TimeoutProfile,
    headers_timeout_s=some,
    ttft_timeout_s=st.none() | some,
    prefill_liveness_timeout_s=st.none() | some,
    idle_stream_timeout_s=st.none() | some,
    absolute_timeout_s=st.none() | some,
    silent_work_timeout_s=st.none() | some,
)
neighbours = st.builds(
    Neighbours,
    data_at=maybe,
    any_is_served=st.booleans(),
    any_awaits_one_piece=st.booleans(),
    leftover_since=maybe,
)
what_is_heard = st.fixed_dictionaries(
    {"liveness_at": maybe, "neighbours": neighbours, "profile": profiles}
)


@st.composite
def progresses(draw: st.DrawFn) -> Progress:
    turn_started_at = 1000.0 + draw(offsets)
    later = st.none() | offsets.map(lambda s: turn_started_at + s)
    instants = (
        "headers_at",
        "first_token_at",
        "prompt_progress_at",
        "last_data_at",
        "last_stream_byte_at",
    )
    times = {name: draw(later) for name in instants}
    return progress(draw(st.sampled_from(RequestPhase)), turn_started_at=turn_started_at, **times)


@given(progresses(), what_is_heard, offsets, offsets)
def test_a_due_verdict_stays_the_same(
    at: Progress, told: dict[str, Any], age: float, more: float
) -> None:
    now = at.turn_started_at + age
    reason = reason_at(now, at, told)
    if reason is not None:
        assert reason_at(now + more, at, told) is reason


@given(progresses(), what_is_heard, offsets, offsets)
def test_more_signs_of_work_never_cause_a_verdict(
    at: Progress, told: dict[str, Any], age: float, more: float
) -> None:
    now = at.turn_started_at + age
    assume(timeout_verdict(at, now=now, **told) is None)
    heard_at = 1000.0 + more
    works = {**told, "liveness_at": newest(heard_at, told["liveness_at"])}
    assert timeout_verdict(at, now=now, **works) is None
    newer = replace(at, last_data_at=newest(at.turn_started_at + more, at.last_data_at))
    assert timeout_verdict(newer, now=now, **works) is None
    beside = told["neighbours"]
    served = replace_struct(beside, data_at=newest(heard_at, beside.data_at))
    found = timeout_verdict(at, now=now, **{**works, "neighbours": served})
    # But one that generates gets data when the others do, or its stream alone is dead.
    assert found is None or (found.alone and at.phase is GENERATING)
