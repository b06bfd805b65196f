"""What the server refuses is told in the words that clients look for."""

import pytest

from llama_worker.responses.errors import refused_by_server


def test_an_odd_status_of_the_server_is_502() -> None:
    assert refused_by_server(302, "HTTP 302: no message").status == 502


@pytest.mark.parametrize(
    "message",
    [
        "request (99 tokens) exceeds the available context size (exceed_context_size_error)",
        "the request exceeds the available context size. enlarge it",  # before September 2025
        "Context size has been exceeded. (server_error)",
    ],
)
def test_a_full_context_has_its_code(message: str) -> None:
    assert refused_by_server(400, f"HTTP 400: {message}").code == "context_length_exceeded"
