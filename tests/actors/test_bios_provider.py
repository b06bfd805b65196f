"""A host's BIOS provider may block: everything else goes on. What it returns, and that it may
raise, is sans-IO."""

import queue
import threading
from typing import Any

import pytest

from llama_worker import BiosContext, LlamaWorkerError
from llama_worker.runtime import real
from llama_worker.runtime.http import session
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.runtime.real import RealRuntime
from llama_worker.testing.scripts import Text, plain_reply
from tests.actors.conftest import WAIT_S, MakeWorker, eventually


def test_blocked_provider_still_answers_questions_and_obeys_cancel(make_worker: MakeWorker) -> None:
    entered, may_return = threading.Semaphore(0), threading.Event()

    def provider(ctx: BiosContext) -> str:
        entered.release()
        assert may_return.wait(3 * WAIT_S)
        return "bios"

    rig = make_worker(bios_provider=provider, slots=2)
    kept, canceled = (rig.submit(*plain_reply(Text("fine"))) for _ in range(2))
    for _ in range(2):
        assert entered.acquire(timeout=WAIT_S)
    status = rig.request(kept)
    assert (status["state"], status["phase"], status["output_chars"]) == ("running", "waiting", 0)
    assert rig.worker.cancel(canceled).get(timeout=WAIT_S) is True
    assert rig.ended(canceled)["state"] == "canceled"
    may_return.set()
    assert rig.ended(kept)["text"] == "fine"
    assert len(rig.journal.facts("started")) == 1, "the cancelled one never reached the server"


def test_a_count_given_up_beside_a_blocked_provider_asks_nothing_later(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_return, aborted = threading.Event(), threading.Event()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    class ToldAbort(Abort):
        def abort(self) -> None:
            super().abort()
            aborted.set()

    def provider(ctx: BiosContext) -> str:
        assert may_return.wait(3 * WAIT_S)
        return "bios"

    def ask(*args: Any, **how: Any) -> Any:
        try:
            answer = session.ask(*args, **how)
        except BaseException as error:
            ended.put(error)
            raise
        ended.put(None)
        return answer

    rig = make_worker(bios_provider=provider)
    for name, changed in {"ask": ask, "Abort": ToldAbort, "COUNT_S": 0.1}.items():
        monkeypatch.setattr(real, name, changed)
    with pytest.raises(LlamaWorkerError, match="no answer within"):
        rig.worker.count_tokens("", "Hello?").get(timeout=WAIT_S)
    assert aborted.wait(WAIT_S)
    monkeypatch.setattr(real, "COUNT_S", WAIT_S)
    may_return.set()
    assert ended.get(timeout=WAIT_S) is not None


def test_bios_gets_host_time_and_timestamps_never_fall(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [2_000_000_000.0]
    monkeypatch.setattr(RealRuntime, "unix_now", lambda _: clock[0])
    seen: list[float] = []

    def provider(ctx: BiosContext) -> str:
        seen.append(ctx.now.timestamp())
        return "bios"

    rig = make_worker(bios_provider=provider)
    set_to = [
        clock[0],
        clock[0] + 86400.0,
        1_000_000_000.0,
    ]  # as it was, a suspended day later, set back
    stamps = [rig.status()["last_ready_at"]]
    for unix in set_to:
        clock[0] = unix
        request = rig.submit(*plain_reply(Text("fine")))
        eventually(rig.worker.result(request).done, "the end")
        status = rig.request(request)
        stamps += [status["created_at"], status["first_token_at"], status["completed_at"]]
    assert seen == set_to
    stamps.append(rig.debug()["recent_events"][-1]["at"])
    assert stamps == sorted(stamps)
    assert stamps[-1] < min(set_to[:2]), "they follow the monotonic clock, not one that is set"
