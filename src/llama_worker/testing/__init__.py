"""For tests of host programs: a llama-server that follows a script, and resolved futures.

The pytest plugin's fixtures `scripted_server` and `scripted_worker` are available wherever
llama_worker is installed. docs/how-to/testing.md shows a test.
"""

from __future__ import annotations

from llama_worker.testing import scripts
from llama_worker.testing.fakes import failed, request_result, resolved
from llama_worker.testing.scripted_server import Hold, ScriptedServer
from llama_worker.testing.scripts import *  # noqa: F403 - what its __all__ lists

__all__ = ["Hold", "ScriptedServer", "failed", "request_result", "resolved", *scripts.__all__]
