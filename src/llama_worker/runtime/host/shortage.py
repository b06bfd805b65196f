"""What this machine lacks for a moment: descriptors, threads, ports, memory. It says nothing about
the server."""

from __future__ import annotations

import errno

_SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EADDRNOTAVAIL, errno.ENOMEM, errno.ENOBUFS}
)


def is_shortage(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, is a lack of the host's."""
    while error is not None:
        if isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error.errno in _SHORTAGES
        ):
            return True
        if isinstance(error, RuntimeError) and "start new thread" in str(error):
            return True
        hidden = error.__suppress_context__  # "from None", or from its cause
        error = error.__cause__ if hidden else error.__context__
    return False
