"""A host's BIOS provider may block, raise or be slow: its request fails in time, everything else goes on."""

from __future__ import annotations

import threading

import pytest

from llama_worker import BiosContext
from llama_worker.runtime.real import RealRuntime
from tests.actors.conftest import WAIT_S, MakeWorker, eventually
from tests.conftest import Speechless
from tests.fake_script import Text, plain_reply


class Provider:
    """Blocks while it is closed."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, ctx: BiosContext) -> str:
        self.entered.release()
        assert self.open.wait(3 * WAIT_S)
        return "bios"


def test_while_it_blocks_questions_are_answered_and_a_cancel_takes_effect(make_worker: MakeWorker) -> None:
    provider = Provider()
    rig = make_worker(bios_provider=provider, slots=2)
    kept, canceled = (rig.submit(*plain_reply(Text("fine"))) for _ in range(2))
    for _ in range(2):
        assert provider.entered.acquire(timeout=WAIT_S)
    status = rig.request(kept)
    assert (status["state"], status["phase"], status["output_chars"]) == ("running", "waiting", 0)
    assert rig.worker.get_result(kept).get(timeout=WAIT_S)["ok"] is False
    assert rig.worker.cancel(canceled).get(timeout=WAIT_S) is True
    assert rig.ended(canceled)["state"] == "canceled"
    assert rig.status()["active_request_ids"] == [kept]
    provider.open.set()
    assert rig.ended(kept)["text"] == "fine"
    assert len(rig.journal.facts("started")) == 1, "the cancelled one never reached the server"


def test_one_that_raises_fails_its_request_and_nothing_else(make_worker: MakeWorker) -> None:
    errors: list[type[BaseException]] = [LookupError, SystemExit, KeyboardInterrupt, Speechless]

    def provider(ctx: BiosContext) -> str:
        if errors:
            raise errors[0]("no prompt today")
        return "bios"

    rig = make_worker(bios_provider=provider)
    while errors:
        result = rig.run(*plain_reply(Text("fine")))
        assert result["fail_reason"] == "prompt_error"
        assert "the BIOS provider raised" in result["fail_detail"]
        assert errors[0].__name__ in result["fail_detail"]
        del errors[0]
    assert rig.run(*plain_reply(Text("fine")))["text"] == "fine"
    assert rig.status()["restart_count"] == 0


def test_it_gets_the_hosts_time_as_it_is_and_stamps_never_run_backwards(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [2_000_000_000.0]
    monkeypatch.setattr(RealRuntime, "unix_now", lambda _: clock[0])
    seen: list[float] = []

    def provider(ctx: BiosContext) -> str:
        seen.append(ctx.now.timestamp())
        return "bios"

    rig = make_worker(bios_provider=provider)
    set_to = [clock[0], clock[0] + 86400.0, 1_000_000_000.0]  # as it was, a suspended day later, set back
    stamps = [rig.status()["last_ready_at"]]
    for unix in set_to:
        clock[0] = unix
        request = rig.submit(*plain_reply(Text("fine")))
        eventually(rig.worker.result(request).done, "the end")
        status = rig.request(request)
        stamps += [status["created_at"], status["first_token_at"], status["completed_at"]]
    assert seen == set_to
    stamps.append(rig.worker.get_debug_info().get(timeout=WAIT_S)["recent_events"][-1]["at"])
    assert stamps == sorted(stamps)
    assert stamps[0] >= 2_000_000_000.0
    assert stamps[-1] < 2_000_000_000.0 + 60.0, "monotonic seconds since the worker was made, on its first Unix second"
