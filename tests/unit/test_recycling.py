"""When a server is worn, and what a canary is."""

from __future__ import annotations

from typing import Any

import pytest

from llama_worker import Canary, ConfigError, Recycle
from llama_worker.runtime.canary import canary_body, canary_problem
from llama_worker.server.recycling import worn

MIB = 1 << 20


# ---------------------------------------------------------------- planned restarts


@pytest.mark.parametrize(
    ("policy", "ready_for_s", "requests", "anon", "says"),
    [
        (Recycle(max_requests=3), 1e9, 2, 1 << 60, None),
        (Recycle(max_requests=3), 0.0, 3, None, "3 requests ended (limit: max_requests 3)"),
        (Recycle(max_age_s=60), 59.9, 10**9, None, None),
        (Recycle(max_age_s=60), 60.0, 0, None, "ready for 60 s (limit: max_age_s 60)"),
        (Recycle(max_anon_mib=100), 1e9, 1, 100 * MIB - 1, None),
        (Recycle(max_anon_mib=100), 0.0, 1, 100 * MIB, "100 MiB of anonymous memory (limit: max_anon_mib 100)"),
        (Recycle(max_anon_mib=100), 1e9, 1, None, None),  # it cannot be seen
    ],
)
def test_a_server_is_worn_at_its_limit(
    policy: Recycle, ready_for_s: float, requests: int, anon: int | None, says: str | None
) -> None:
    found = worn(policy, ready_for_s=ready_for_s, requests_count=requests, anon_bytes=anon)
    assert (found.detail if found else None) == says


@pytest.mark.parametrize(
    "given", [{}, {"max_requests": 0}, {"max_anon_mib": -1}, {"max_age_s": 0}, {"max_age_s": float("inf")}]
)
def test_limits_that_limit_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"max_|recycle"):
        Recycle(**given)


# ---------------------------------------------------------------- canary


def answer(content: Any) -> Any:
    return {"choices": [{"message": {"content": content}}]}


def raises(text: str) -> bool:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("check", "status", "told", "problem"),
    [
        (lambda text: "4" in text, 200, answer("2 + 2 = 4"), None),
        (lambda text: "4" in text, 200, answer("????"), "the canary's check refused the answer '????'"),
        (lambda text: "4" in text, 200, answer(None), "refused the answer ''"),
        (lambda text: not text, 200, [], None),
        (lambda text: True, 500, {"error": "no"}, "the canary got HTTP 500: {'error': 'no'}"),
        (raises, 200, answer("x"), "the canary's check raised SystemExit: 3"),
    ],
)
def test_a_canary_lives_or_not(check: Any, status: int, told: Any, problem: str | None) -> None:
    found = canary_problem(check, status, told)
    assert (found is None) == (problem is None)
    assert (problem or "") in (found or "")


def test_a_canary_is_greedy() -> None:
    body = canary_body(Canary(prompt="2 + 2?", check=bool, max_tokens=5))
    assert (body["temperature"], body["max_tokens"], body["messages"][0]["content"]) == (0, 5, "2 + 2?")


async def async_check(text: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"prompt": "", "check": bool}, ConfigError),
        ({"prompt": 7, "check": bool}, TypeError),
        ({"prompt": "x", "check": "yes"}, TypeError),
        ({"prompt": "x", "check": async_check}, TypeError),
        ({"prompt": "x", "check": bool, "max_tokens": 0}, ConfigError),
    ],
)
def test_a_canary_of_no_use_is_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="canary"):
        Canary(**given)
