"""Who does not answer is dead, but for the time in which nothing ran."""

from llama_worker.server.roll_call import ANSWER_TIMEOUT_S, ASK_INTERVAL_S, Member, RollCall

MEMBERS = [Member(1, "process", None), Member(1, "request", 0)]
STUCK = MEMBERS[1]


def asked_at(now: float) -> RollCall:
    """Everybody was asked then, and the process actor has answered."""
    roll_call = RollCall()
    roll_call.keep(busy=True, now=now - ASK_INTERVAL_S)
    for member in roll_call.due(MEMBERS, now):
        roll_call.asked(member, now)
    roll_call.answered(MEMBERS[0])
    return roll_call


def test_an_answer_is_overdue_at_its_own_deadline() -> None:
    at = 1000.1
    assert at + ANSWER_TIMEOUT_S - at < ANSWER_TIMEOUT_S  # rounded
    assert asked_at(at).overdue(at + ANSWER_TIMEOUT_S) == [STUCK]
    assert asked_at(at).overdue(at + ANSWER_TIMEOUT_S - 0.1) == []


def test_nobody_is_asked_before_the_worker_has_been_busy_for_a_while() -> None:
    roll_call = RollCall()
    assert roll_call.due(MEMBERS, 100.0) == []
    roll_call.keep(busy=True, now=100.0)
    assert roll_call.deadline == 100.0 + ASK_INTERVAL_S


def test_each_actor_is_asked_again_after_its_answer() -> None:
    roll_call = asked_at(100.0)
    assert roll_call.due(MEMBERS, 100.0 + ASK_INTERVAL_S - 0.1) == []
    assert roll_call.due(MEMBERS, 100.0 + ASK_INTERVAL_S) == [MEMBERS[0]]


def test_idle_worker_wakes_only_for_what_is_owed() -> None:
    roll_call = asked_at(100.0)
    roll_call.keep(busy=False, now=101.0)
    assert roll_call.deadline == 100.0 + ASK_INTERVAL_S
    roll_call.answered(STUCK)
    roll_call.keep(busy=False, now=102.0)
    assert roll_call.deadline is None
