"""The futures that a host gets: awaitable, with callbacks, handed over once, always answered."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pykka
import pytest

from llama_worker.runtime import futures
from llama_worker.runtime.futures import OpenFutures, ResultFuture, WorkerFuture

TIMEOUT_S = 30.0


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, name="answerer")
    thread.start()
    return thread


# ---------------------------------------------------------------- Ctrl-C


def test_a_ctrl_c_that_does_not_wake_the_main_thread_ends_its_wait() -> None:
    """Another thread is sent the signal; to Python that is the same as one in the instant before the wait."""

    def interrupt() -> None:
        time.sleep(0.2)  # earlier it would show nothing
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def wait() -> None:
        in_thread(interrupt)
        WorkerFuture[None]().get()

    with pytest.raises(KeyboardInterrupt):
        wait()


# ---------------------------------------------------------------- a forgotten get


@pytest.mark.parametrize(
    "use",
    [lambda f: f["text"], lambda f: f.text, lambda f: f.result(), list, lambda f: [*f]],
    ids=["item", "attribute", "result()", "list", "star"],
)
def test_who_forgets_get_is_told_so(use: Callable[[Any], object]) -> None:
    with pytest.raises((TypeError, AttributeError), match=r"call get\(timeout=...\) for its value"):
        use(WorkerFuture())


def test_a_future_that_is_printed_says_how_to_get_its_value() -> None:
    future: WorkerFuture[int] = WorkerFuture()
    assert repr(future) == "<WorkerFuture, pending: get(timeout=...) returns its value>"
    future.answer(1)
    assert "resolved" in str(future)
    assert future  # a future is no value: it is never false


# ---------------------------------------------------------------- one answer


def test_it_is_a_threading_future_of_pykka() -> None:
    assert issubclass(WorkerFuture, pykka.ThreadingFuture)


def test_the_first_answer_counts() -> None:
    future: WorkerFuture[int] = WorkerFuture()
    assert not future.done()
    future.answer(1)
    future.answer(2)
    future.fail(RuntimeError())
    assert future.done()
    assert future.get() == future.get(timeout=0) == 1


def test_the_first_failure_counts() -> None:
    future: WorkerFuture[int] = WorkerFuture()
    error = LookupError("lost")
    future.fail(error)
    future.answer(2)
    for _ in range(2):
        with pytest.raises(LookupError) as caught:
            future.get()
        assert caught.value is error


def test_of_many_answers_at_once_all_see_the_same() -> None:
    for _ in range(50):
        future: WorkerFuture[int] = WorkerFuture()
        with ThreadPoolExecutor(8) as pool:
            got = [pool.submit(future.get, timeout=TIMEOUT_S) for _ in range(4)]
            for number in range(4):
                pool.submit(future.answer, number)
            assert len({each.result(TIMEOUT_S) for each in got}) == 1


def test_none_is_an_answer() -> None:
    future: WorkerFuture[None] = WorkerFuture()
    future.answer(None)
    assert future.done()
    assert future.get(timeout=0) is None


def test_a_get_that_times_out_changes_nothing() -> None:
    future: WorkerFuture[int] = WorkerFuture()
    with pytest.raises(pykka.Timeout):
        future.get(timeout=0.01)
    future.answer(1)
    assert future.get(timeout=0) == 1


# ---------------------------------------------------------------- await


def test_awaiting_leaves_the_event_loop_running() -> None:
    future: WorkerFuture[str] = WorkerFuture()
    ticks = 0

    async def ticker() -> None:
        nonlocal ticks
        while ticks < 10:
            ticks += 1
            await asyncio.sleep(0)
        in_thread(lambda: future.answer("done")).join(TIMEOUT_S)

    async def main() -> str:
        ticking = asyncio.create_task(ticker())
        got = await future  # the answer comes only once the ticker has run
        await ticking
        return got

    assert asyncio.run(asyncio.wait_for(main(), TIMEOUT_S)) == "done"
    assert ticks == 10


def test_awaiting_what_is_answered_already_returns_at_once() -> None:
    future: WorkerFuture[int] = WorkerFuture()
    future.answer(1)

    async def main() -> list[int]:
        return [await future, await future]

    assert asyncio.run(main()) == [1, 1]


def test_many_tasks_of_several_loops_may_await_the_same_future() -> None:
    future: WorkerFuture[int] = WorkerFuture()
    waiting: SimpleQueue[None] = SimpleQueue()

    async def one() -> int:
        waiting.put(None)
        return await future

    async def three() -> list[int]:
        return list(await asyncio.gather(one(), one(), one()))

    with ThreadPoolExecutor(2) as pool:
        loops = [pool.submit(lambda: asyncio.run(three())) for _ in range(2)]
        for _ in range(6):
            waiting.get(timeout=TIMEOUT_S)
        future.answer(7)
        assert [loop.result(TIMEOUT_S) for loop in loops] == [[7, 7, 7]] * 2


def test_awaiting_raises_what_the_future_failed_with() -> None:
    future: WorkerFuture[int] = WorkerFuture()

    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: future.fail(LookupError("lost")))
        await future

    with pytest.raises(LookupError, match="lost"):
        asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_a_cancelled_task_takes_nothing_and_leaves_nothing() -> None:
    taken: list[int] = []
    future: ResultFuture[int] = ResultFuture(taken.append)

    async def main() -> None:
        task = asyncio.create_task(wait(future))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(future), 0.01)

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert future._wakers == []
    future.answer(5)
    assert taken == []
    assert future.get(timeout=0) == 5
    assert taken == [5]


def test_an_answer_after_the_event_loop_was_closed_harms_nobody() -> None:
    future: WorkerFuture[int] = WorkerFuture()
    loop = asyncio.new_event_loop()
    task = loop.create_task(wait(future))
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    future.answer(1)
    assert future.get(timeout=0) == 1
    task._log_destroy_pending = False  # type: ignore[attr-defined]


async def wait(future: WorkerFuture[Any]) -> Any:
    return await future


# ---------------------------------------------------------------- callbacks


def test_a_callback_runs_on_a_thread_of_its_own() -> None:
    future: WorkerFuture[int] = WorkerFuture()
    called: SimpleQueue[tuple[Any, str]] = SimpleQueue()
    for _ in range(2):
        future.add_done_callback(lambda f: called.put((f, threading.current_thread().name)))
    answerer = in_thread(lambda: future.answer(1))
    assert called.get(timeout=TIMEOUT_S) == called.get(timeout=TIMEOUT_S) == (future, "llama_worker-callbacks")
    answerer.join(TIMEOUT_S)


def test_a_callback_added_after_the_answer_runs_too() -> None:
    future: WorkerFuture[int] = WorkerFuture()
    future.answer(1)
    called: SimpleQueue[tuple[int, str]] = SimpleQueue()
    future.add_done_callback(lambda f: called.put((f.get(timeout=0), threading.current_thread().name)))
    assert called.get(timeout=TIMEOUT_S) == (1, "llama_worker-callbacks")


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_an_exception_in_a_callback_is_logged_and_the_next_one_runs(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_: object) -> None:
        raise error

    future: WorkerFuture[int] = WorkerFuture()
    called: SimpleQueue[None] = SimpleQueue()
    with caplog.at_level(logging.ERROR, logger="llama_worker.futures"):
        future.add_done_callback(failing)
        future.add_done_callback(lambda _: called.put(None))
        future.answer(1)
        called.get(timeout=TIMEOUT_S)
    (entry,) = [record for record in caplog.records if record.name == "llama_worker.futures"]
    assert entry.exc_info is not None
    assert entry.exc_info[1] is error


# ---------------------------------------------------------------- a value that is handed over


def test_taking_a_result_is_told_once_and_later_gets_return_it_still() -> None:
    taken: list[int] = []
    future: ResultFuture[int] = ResultFuture(taken.append)
    future.answer(5)
    assert taken == []
    assert [future.get(), future.get(timeout=1)] == [5, 5]
    assert taken == [5]


def test_a_get_that_times_out_takes_nothing() -> None:
    taken: list[int] = []
    future: ResultFuture[int] = ResultFuture(taken.append)
    for _ in range(3):
        with pytest.raises(pykka.Timeout):
            future.get(timeout=0.001)
    future.answer(5)
    assert taken == []


def test_of_concurrent_gets_one_takes() -> None:
    for _ in range(20):
        taken: SimpleQueue[int] = SimpleQueue()
        future: ResultFuture[int] = ResultFuture(taken.put)
        with ThreadPoolExecutor(8) as pool:
            gets = [pool.submit(future.get, timeout=TIMEOUT_S) for _ in range(8)]
            future.answer(5)
            assert [get.result(TIMEOUT_S) for get in gets] == [5] * 8
        assert taken.qsize() == 1


def test_an_await_takes() -> None:
    taken: list[int] = []
    future: ResultFuture[int] = ResultFuture(taken.append)
    future.answer(5)
    assert asyncio.run(wait(future)) == 5
    assert taken == [5]


def test_a_failure_is_not_taken() -> None:
    taken: list[int] = []
    future: ResultFuture[int] = ResultFuture(taken.append)
    future.fail(LookupError())
    with pytest.raises(LookupError):
        future.get()
    assert taken == []


def test_a_done_callback_by_itself_takes_nothing() -> None:
    taken: list[int] = []
    future: ResultFuture[int] = ResultFuture(taken.append)
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    future.answer(5)
    assert called.wait(TIMEOUT_S)
    assert taken == []


# ---------------------------------------------------------------- Pykka's derived futures


def plus_one(value: int) -> int:
    return value + 1


def derived() -> tuple[WorkerFuture[Any], WorkerFuture[Any]]:
    source: WorkerFuture[int] = WorkerFuture()
    return source, source.map(plus_one)  # type: ignore[return-value]


def test_a_mapped_future_can_be_awaited_and_the_event_loop_goes_on() -> None:
    source, mapped = derived()

    async def main() -> Any:
        waiting = asyncio.create_task(wait(mapped))
        await asyncio.sleep(0)
        source.answer(1)  # reached only because the wait above does not block the loop
        return await waiting

    assert asyncio.run(asyncio.wait_for(main(), TIMEOUT_S)) == 2


def test_futures_can_be_joined_and_awaited() -> None:
    one: WorkerFuture[int] = WorkerFuture()
    other: WorkerFuture[int] = WorkerFuture()
    joined = one.join(other)

    async def main() -> Any:
        asyncio.get_running_loop().call_soon(other.answer, 2)
        asyncio.get_running_loop().call_soon(one.answer, 1)
        return await joined

    assert list(asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))) == [1, 2]
    assert list(joined.get(timeout=TIMEOUT_S)) == [1, 2]


def test_a_mapped_result_is_taken_through_the_map() -> None:
    taken: list[int] = []
    future: ResultFuture[int] = ResultFuture(taken.append)
    future.answer(5)
    mapped = future.map(plus_one)
    assert taken == []
    assert mapped.get(timeout=TIMEOUT_S) == 6
    assert taken == [5]


# ---------------------------------------------------------------- the open futures of a worker


def test_every_open_future_fails_at_the_close_and_every_later_one() -> None:
    open_futures = OpenFutures()
    before: WorkerFuture[int] = WorkerFuture()
    answered: WorkerFuture[int] = WorkerFuture()
    open_futures.add(before)
    open_futures.add(answered)
    answered.answer(1)
    assert open_futures.closed_by is None
    closing = LookupError("closed")
    open_futures.close(closing)
    open_futures.close(RuntimeError("again"))
    after: WorkerFuture[int] = WorkerFuture()
    open_futures.add(after)
    assert open_futures.closed_by is closing
    for future in (before, after):
        with pytest.raises(LookupError) as caught:
            future.get(timeout=0)
        assert caught.value is closing
    assert answered.get(timeout=0) == 1


def test_whoever_adds_while_it_closes_gets_an_answer() -> None:
    for _ in range(20):
        open_futures = OpenFutures()
        futures: list[WorkerFuture[int]] = [WorkerFuture() for _ in range(20)]
        with ThreadPoolExecutor(4) as pool:
            for future in futures[:10]:
                pool.submit(open_futures.add, future)
            pool.submit(open_futures.close, LookupError())
            for future in futures[10:]:
                pool.submit(open_futures.add, future)
        for future in futures:
            with pytest.raises(LookupError):
                future.get(timeout=TIMEOUT_S)


def test_an_answered_future_is_not_kept() -> None:
    open_futures = OpenFutures()
    future: WorkerFuture[int] = WorkerFuture()
    open_futures.add(future)
    future.answer(1)
    gone = weakref.ref(future)
    del future
    gc.collect()
    assert gone() is None


def test_an_answer_does_not_fail_where_no_thread_can_be_started_for_a_callback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = futures._CallbackThread()
    monkeypatch.setattr(futures, "_callbacks", callbacks)
    future: WorkerFuture[int] = WorkerFuture()
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    with monkeypatch.context() as exiting:
        exiting.setattr(threading.Thread, "start", _no_more_threads)
        future.answer(1)
    assert future.get(timeout=TIMEOUT_S) == 1
    assert "no more threads" in caplog.text
    assert not called.is_set()


def _no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("no more threads")
