"""Whether a server died for lack of memory. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from llama_worker.server.start_advice import OUT_OF_MEMORY

_LAST_WORDS = 5  # lines of the log


def lack_of_memory(
    returncode: int | None, *, oom_kills: int, kernel_line: str | None, log_tail: Sequence[str]
) -> str | None:
    """What tells that a server which we did not kill died for lack of memory; None where nothing does.

    Args:
        returncode: negative, the signal's number.
        oom_kills: how often the kernel killed in the server's control group while it ran.
        kernel_line: what the kernel's log says of this process, where it can be read.
        log_tail: the last lines that the server wrote.
    """
    if returncode == -signal.SIGKILL and kernel_line is not None:
        return f"the kernel killed it for lack of memory: {kernel_line}"
    if returncode == -signal.SIGKILL and oom_kills > 0:
        return f"the kernel killed it for lack of memory (its control group counts it: oom_kill +{oom_kills})"
    if returncode == 0:
        return None
    said = next((line for line in reversed(log_tail[-_LAST_WORDS:]) if OUT_OF_MEMORY.search(line)), None)
    return f"it ran out of memory; its last words: {said.strip()}" if said is not None else None
