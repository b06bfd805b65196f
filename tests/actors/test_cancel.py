"""A cancelled request: its connection is closed at once, in every phase, and its slot is free."""

from llama_worker.testing import scripts as fs
from tests.actors.conftest import WAIT_S, MakeWorker

PHASES: dict[str, list[fs.Step]] = {
    "before the headers, at work": [fs.Burn(None)],
    "prefill": [fs.Headers(), fs.PromptProgress(1, 9), fs.Burn(None)],
    "keepalives": [fs.Headers(), fs.PingEvery(0.02), fs.WaitClose()],
    "tokens as fast as can be": [fs.Headers(), fs.Repeat(None, [fs.Text("token ")])],
    "after the finish reason": [fs.Headers(), fs.Text("token "), fs.Finish(), fs.WaitClose()],
}


def test_the_connection_is_closed_in_every_phase(make_worker: MakeWorker) -> None:
    # no limit of tokens: one that is reached before the cancel would end the request
    rig = make_worker(slots=2, loop_detector=None, max_tokens=None)
    for number, steps in enumerate(PHASES.values(), start=1):
        request = rig.submit(*steps)
        rig.journal.wait("started", n=number, timeout=WAIT_S)
        if any(step["do"] in ("Text", "Repeat") for step in steps):
            rig.wait_text(request, "token ")
        assert rig.worker.cancel(request).get(timeout=WAIT_S) is True
        assert rig.request(request)["phase"] == "done"
        assert rig.status()["slots_used"] == 0
        # the script itself never ends it
        rig.journal.wait("client_closed", n=number, timeout=WAIT_S)
        result = rig.ended(request)
        assert {result["state"], result["finish_reason"], result["fail_reason"]} == {"canceled"}
        assert set(result["text"].split()) <= {"token"}
        assert rig.worker.cancel(request).get(timeout=WAIT_S) is False, (
            "the request has ended and was taken"
        )
    assert rig.run()["state"] == "completed"
    assert rig.status()["restart_count"] == 0
