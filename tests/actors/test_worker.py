"""The handle's own rules: start, stop, close, admission, results."""

from __future__ import annotations

from tests.actors.conftest import MakeWorker


def test_a_request_completes(make_worker: MakeWorker) -> None:
    rig = make_worker()
    result = rig.run()
    assert (result["state"], result["finish_reason"], result["text"]) == ("completed", "stop", "Hello")
