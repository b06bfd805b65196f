"""What came of the episodes, as a confusion matrix, and what of it is a mistake. Pure."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.reality.plan import Episode

Fact = Mapping[str, Any]
_MISTAKES = ("given up", "lost with its server", "wrong text", "unfinished")


class Matrix:
    """Healthy requests by how they ended, hangs by whether they were found; kept over episodes."""

    def __init__(self) -> None:
        self.healthy: Counter[str] = Counter()
        self.hung: Counter[str] = Counter()
        self.found_s: list[float] = []
        self.mistakes_count = 0

    def add(self, episode: Episode, facts: Sequence[Fact]) -> list[str]:
        """Count an episode; its mistakes, each a line for a person."""
        mistakes = [
            *self._count_jobs(episode, facts),
            *self._count_hang(episode, facts),
            *_restarts(facts),
            *([] if any(fact["fact"] == "closed" for fact in facts) else ["the host did not end"]),
        ]
        self.mistakes_count += len(mistakes)
        return mistakes

    def _count_jobs(self, episode: Episode, facts: Sequence[Fact]) -> list[str]:
        ended = {fact["job"]: fact for fact in facts if fact["fact"] == "ended"}
        due = [*range(len(episode.jobs)), *([-1] if episode.hang is not None else [])]
        mistakes = []
        for number in due:
            fact = ended.get(number, {"how": "unfinished", "detail": "the host did not say"})
            self.healthy[fact["how"]] += 1
            if fact["how"] in _MISTAKES:
                name = "the request after the hang" if number == -1 else f"job {number}"
                mistakes.append(f"{name}: {fact['how']}: {fact['detail']}")
        return mistakes

    def _count_hang(self, episode: Episode, facts: Sequence[Fact]) -> list[str]:
        if episode.hang is None:
            return []
        hang = next((fact for fact in facts if fact["fact"] == "hang"), None)
        if hang is None:
            return ["the host did not come to the hang"]
        if hang["found_s"] is None:
            self.hung["missed"] += 1
            return [f"hang in {hang['phases'] or 'idle'} not found within {hang['bound_s']:.1f} s"]
        self.hung["found"] += 1
        self.found_s.append(hang["found_s"])
        return []

    def __str__(self) -> str:
        rows = [
            ("healthy", "completed", self.healthy["completed"]),
            ("", "cancelled by us", self.healthy["cancelled"]),
            ("", "given up (false)", self.healthy["given up"]),
            ("", "lost with its server", self.healthy["lost with its server"]),
            ("", "wrong text", self.healthy["wrong text"]),
            ("", "unfinished", self.healthy["unfinished"]),
            ("hung", "found", self.hung["found"]),
            ("", "missed", self.hung["missed"]),
        ]
        lines = [f"{what:<8} {how:<20} {count:>6}" for what, how, count in rows]
        if self.found_s:
            median, worst = statistics.median(self.found_s), max(self.found_s)
            lines.append(f"time to find a hang: median {median:.1f} s, worst {worst:.1f} s")
        return "\n".join([*lines, f"mistakes: {self.mistakes_count}"])


def _restarts(facts: Sequence[Fact]) -> list[str]:
    """A healthy server is not restarted, with or without a request; nor does it end by itself."""
    died = sum(fact.get("died", 0) for fact in facts)
    false = sum(fact.get("restarts", 0) + fact.get("early_restarts", 0) for fact in facts)
    return [
        *([f"{false} restarts of a healthy server"] if false else []),
        *([f"the server died by itself, {died} times"] if died else []),
    ]
