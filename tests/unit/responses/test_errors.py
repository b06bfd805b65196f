"""What the server refuses is told in the words that clients look for."""

from __future__ import annotations

import pytest

from llama_worker.responses.errors import refused_by_server


def test_an_odd_status_of_the_server_is_502() -> None:
    assert refused_by_server(302, "HTTP 302: no message").status == 502
