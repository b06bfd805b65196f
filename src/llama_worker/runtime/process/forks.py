"""Puts off forks by the host's other threads while a descriptor is open that no child may keep."""

from __future__ import annotations

import os
import threading

# reentrant: the thread that holds it may run a signal handler of the host's that forks
no_fork = threading.RLock()

# the child's copy belongs to the one thread that it has, which has forked
os.register_at_fork(
    before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release
)
