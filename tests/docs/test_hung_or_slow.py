"""The tables of hung-or-slow.md agree with the code that gives the verdicts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from llama_worker import RequestFailReason, TimeoutProfile
from llama_worker.server import liveness
from tests.docs.pages import DOCS, names_in, table
from tests.docs.verdicts import LIMITS, STATES, judge

PAGE = (DOCS / "hung-or-slow.md").read_text()
# Connecting has a limit of its own, the connection's: no verdict.
CONNECTING, *ROWS = table(PAGE, "the request is")
# What the first column of the table means.
WHEN = {
    "waiting for response headers": {"waiting"},
    "in prefill, nothing heard but headers or a role chunk": {"silent prefill"},
    "in prefill with progress reported, or generating": {"reporting prefill", "generating"},
    "before its first token": {"waiting", "silent prefill", "reporting prefill"},
    "anywhere but in a tool": set(STATES) - {"in a tool"},
    "anywhere": set(STATES),
}


def test_what_counts_as_work_is_said_in_the_numbers_of_the_code() -> None:
    signs = {row[0] for row in table(PAGE, "seen")}
    ticks = f"{liveness.MIN_CPU_TICKS} ticks (of {liveness.TICK_S * 1000:g} ms) in all"
    rate = f"{liveness.MIN_CPU_TICKS_PER_S:g} a second, over {liveness.WINDOW_S:g} s or more"
    assert f"CPU time of the server's processes: {ticks} and {rate}" in signs
    read = f"bytes read from disk ({liveness.MIN_READ_BYTES_PER_S / 1024:g} KiB/s)"
    assert f"{read} or major page faults ({liveness.MIN_MAJOR_FAULTS_PER_S:g}/s)" in signs


def test_the_table_of_verdicts_gives_each_limit_in_the_phases_in_which_it_counts() -> None:
    in_table = {
        (state, names_in(limit)[0], names_in(reason)[0]) for when, reason, limit in ROWS for state in WHEN[when]
    }
    in_code = {
        (name, limit, str(found.reason))
        for name, state in STATES.items()
        for limit in LIMITS
        if (found := judge(state, limit))
    }
    assert in_table == in_code


def test_the_first_row_of_the_table_says_the_limit_of_connecting() -> None:
    when, reason, after = CONNECTING
    assert (when, names_in(reason)) == ("connecting", [str(RequestFailReason.CONNECT_FAILED)])
    assert f"`connect_timeout_s` ({TimeoutProfile().connect_timeout_s:g})" in after


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_says_the_default_what_keeps_the_request_alive_and_whether_it_costs_a_restart(row: list[str]) -> None:
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
        assert found.restart != ("no restart" in after)
    default = getattr(TimeoutProfile(), limit)
    assert re.findall(rf"`{limit}` \((\d+)\)", after) == ([] if default is None else [f"{default:g}"])
    assert ("if set" in after) == (default is None)
