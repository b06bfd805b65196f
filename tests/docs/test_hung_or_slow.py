"""The tables of verdicts (hung-or-slow.md) and of restarts (failure-reasons.md) agree with the
code."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_worker import RequestFailReason, RequestPhase, StartFailReason, TimeoutProfile
from llama_worker.actors import server_life
from llama_worker.actors import worker as worker_actor
from llama_worker.request.progress import Progress
from llama_worker.server import blame, lifecycle, lifecycle_states, liveness, pace, slot_verdicts
from llama_worker.server.blame import Verdict
from llama_worker.server.timeouts import (
    NO_SLOT_SIGNS,
    STALLED_ALONE_MULTIPLE,
    Neighbours,
    SlotSigns,
    timeout_verdict,
)
from tests.docs.pages import DOCS, names_in, table

# Every state in which a request can be.
WAITING = Progress(request_id=1, phase=RequestPhase.WAITING, dispatched_at=0.0, turn_started_at=0.0)
PREFILL = replace(WAITING, phase=RequestPhase.PREFILL, headers_at=0.0)
WRITES = replace(PREFILL, phase=RequestPhase.GENERATING, first_token_at=0.0, last_data_at=0.0)
REPEATED = (1.0, 2.0, 3.0)
STATES = {
    "waiting": WAITING,
    "waiting for one piece": replace(WAITING, in_one_piece=True),
    "silent prefill": PREFILL,
    "reporting prefill": replace(PREFILL, prompt_progress_at=0.0),
    "generating": WRITES,
    "repeating prefill": replace(PREFILL, prompt_progress_at=0.0, repeated_at=REPEATED),
    "generating repeats": replace(WRITES, repeated_at=REPEATED),
    "in a tool": replace(WAITING, phase=RequestPhase.TOOL),
}
LIMITS = (
    *("headers_timeout_s", "prefill_liveness_timeout_s", "idle_stream_timeout_s"),
    *("ttft_timeout_s", "silent_work_timeout_s", "absolute_timeout_s"),
)


NOTHING_MOVED = SlotSigns(shows_prompt_progress=True, shows_all=True)


def judge(
    state: Progress,
    limit: str,
    *,
    liveness_at: float | None = None,
    neighbour_data_at: float | None = None,
    slots: SlotSigns = NOTHING_MOVED,
    now: float = 10.0,
) -> Verdict | None:
    """The verdict after 10 s, with that limit at 5 s and every other off, or far away."""
    off = dict.fromkeys(LIMITS)
    profile = replace(TimeoutProfile(), **{**off, "headers_timeout_s": 1e6, limit: 5.0})  # type: ignore[arg-type]
    return timeout_verdict(
        state,
        liveness_at=liveness_at,
        neighbours=Neighbours(data_at=neighbour_data_at),
        slots=slots,
        profile=profile,
        now=now,
    )


PAGE = (DOCS / "hung-or-slow.md").read_text()
# Connecting has a limit of its own, the connection's: no verdict.
CONNECTING, *ROWS, DEAD_BESIDE = table(PAGE, "the request is")
# What the first column of the table means.
WHEN = {
    "waiting for response headers": {"waiting"},
    "waiting for a reply in one piece": {"waiting for one piece"},
    "in prefill, nothing heard but headers or a role chunk": {"silent prefill"},
    "in prefill with progress reported": {"reporting prefill"},
    "generating": {"generating"},
    "in prefill, and gets the same again and again": {"repeating prefill"},
    "generating, and gets the same again and again": {"generating repeats"},
    "before its first token": {
        *("waiting", "waiting for one piece", "silent prefill"),
        *("reporting prefill", "repeating prefill"),
    },
    "anywhere but in a tool": set(STATES) - {"in a tool"},
    "anywhere": set(STATES),
}


def test_what_counts_as_work_matches_the_code_numbers() -> None:
    signs = {row[0] for row in table(PAGE, "seen")}
    ticks = f"{liveness.MIN_CPU_TICKS} ticks (of {liveness.TICK_S * 1000:g} ms) in all"
    rate = f"{liveness.MIN_CPU_TICKS_PER_S:g} a second, over {liveness.WINDOW_S:g} s or more"
    assert f"CPU time of the server's processes: {ticks} and {rate}" in signs
    disk = f"bytes read from disk or written to it ({liveness.MIN_DISK_BYTES_PER_S / 1024:g} KiB/s)"
    assert f"{disk}, or major page faults ({liveness.MIN_MAJOR_FAULTS_PER_S:g}/s)" in signs


def test_learnt_margin_is_documented_with_the_code_numbers() -> None:
    assert pace.PACE_MULTIPLE == 10
    assert "for ten times what such a batch takes by all that prompts of this" in PAGE
    assert f"and for {pace.PACE_MIN_S:g} s at least" in PAGE
    assert slot_verdicts.STEP_MULTIPLE == 6
    assert "only if the looks cover six times the longest time that passed" in PAGE


def test_verdict_table_gives_each_limit_in_its_phases() -> None:
    in_table = {
        (state, names_in(limit)[0], names_in(reason)[0])
        for when, reason, limit in ROWS
        for state in WHEN[when]
    }
    in_code = {
        (name, limit, str(found.reason))
        for name, state in STATES.items()
        for limit in LIMITS
        if (found := judge(state, limit))
    }
    assert in_table == in_code


def test_first_table_row_states_the_connect_limit() -> None:
    when, reason, after = CONNECTING
    assert (when, names_in(reason)) == ("connecting", [str(RequestFailReason.CONNECT_FAILED)])
    assert f"`connect_timeout_s` ({TimeoutProfile().connect_timeout_s:g})" in after


def test_last_row_limits_dead_streams_beside_live_ones() -> None:
    when, reason, after = DEAD_BESIDE
    assert when == "generating, and others get data"
    assert f"{STALLED_ALONE_MULTIPLE} x `idle_stream_timeout_s`" in after
    told: Any = {"liveness_at": 19.9, "neighbour_data_at": 19.9, "slots": NO_SLOT_SIGNS}
    found = judge(STATES["generating"], "idle_stream_timeout_s", **told, now=20.0)
    assert found is not None
    assert (names_in(reason), found.alone) == ([str(found.reason)], True)
    assert judge(STATES["generating"], "idle_stream_timeout_s", **told, now=19.9) is None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row_says_default_keepalive_cause_and_restart_cost(row: list[str]) -> None:
    when, _, after = row
    limit = names_in(after)[0]
    for name in WHEN[when]:
        worked = judge(STATES[name], limit, liveness_at=9.0) is None
        assert worked == ("without evidence of work" in after)
        neighboured = judge(STATES[name], limit, neighbour_data_at=9.0) is None
        assert neighboured == ("unless another request gets data" in after)
        heard = judge(replace(STATES[name], last_data_at=9.0), limit) is None
        assert heard == ("without data" in after or "without headers" in after)
        found = judge(STATES[name], limit)
        assert found is not None
        assert found.counts_against_server != ("no restart" in after)
    default = getattr(TimeoutProfile(), limit)
    assert re.findall(rf"`{limit}` \((\d+)\)", after) == (
        [] if default is None else [f"{default:g}"]
    )
    assert ("if set" in after) == (default is None)


def test_exactly_the_causes_of_restarts_are_explained() -> None:
    page = (DOCS / "failure-reasons.md").read_text()
    causes = [name for row in table(page, "cause") for name in names_in(row[0])]
    calls = (
        r"\.restart\(\s*now,|_replace_server\(\s*life,\s*now,|RestartCause\(|RecordRestart\(reason="
    )
    named = rf"{calls}|_cause\(\w+,|oom_evidence is None else"
    said = rf'(?:{named})\s*"(\w+)"'
    sources = [
        Path(str(module.__file__)).read_text()
        for module in (lifecycle, lifecycle_states, server_life, worker_actor, blame)
    ]
    in_code = {cause for source in sources for cause in re.findall(said, source)}
    launches = set(StartFailReason) - {StartFailReason.STOPPED, StartFailReason.UNKILLABLE}
    verdicts = [judge(state, limit) for state in STATES.values() for limit in LIMITS]
    fatal = {found.reason for found in verdicts if found and found.counts_against_server}
    by_slots = RequestFailReason.REQUEST_LOST  # the second one
    assert sorted(causes) == sorted({*in_code, *launches, *fatal, by_slots})
