"""Costs that grow with the size and not with its square, on a machine of any speed."""

import time
from collections.abc import Callable

_TIMES = 8
_SLACK, _SLACK_S = 4.0, 0.2


def is_linear(work: Callable[[int], object], size: int) -> bool:
    """Whether the work for eight times the size costs about eight times as much of this thread's
    CPU time, and not 64 times. The least of some tries counts, since all else only adds."""

    def seconds(size: int) -> float:
        began = time.thread_time()
        work(size)
        return time.thread_time() - began

    bound_s = _TIMES * min(seconds(size) for _ in range(3)) * _SLACK + _SLACK_S
    return any(seconds(size * _TIMES) < bound_s for _ in range(2))
