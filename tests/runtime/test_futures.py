"""The futures that a host gets: awaitable, with callbacks, handed over once, always answered."""

import asyncio
import logging
import math
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from unittest.mock import Mock

import pykka
import pytest

from llama_worker.runtime.host import futures, threads
from llama_worker.runtime.host.futures import OpenFutures, ResultFuture, WeakList, WorkerFuture
from llama_worker.runtime.host.threads import start_timers
from tests.actors.conftest import WAIT_S, no_threads, run_async

CALLBACKS = "llama_worker-callbacks"


async def wait(future: WorkerFuture[Any]) -> Any:
    return await future


@pytest.fixture
def future() -> WorkerFuture[Any]:
    return WorkerFuture()


class HandedOver(ResultFuture[int]):
    """Its value goes to `taken` when it is taken."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        super().__init__(self.taken.append)


@pytest.fixture
def handed_over() -> HandedOver:
    return HandedOver()


# ---------------------------------------------------------------- get


def test_ctrl_c_ends_a_wait_of_main_thread(future: WorkerFuture[None]) -> None:
    """Another thread is sent the signal; to Python that is the same as one in the instant before
    the wait."""

    def interrupt() -> None:
        time.sleep(0.2)  # earlier it would show nothing
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def wait() -> None:  # on a busy machine the signal may come before `get` waits
        threading.Thread(target=interrupt).start()
        future.get()

    with pytest.raises(KeyboardInterrupt):
        wait()


@pytest.mark.parametrize(
    "use",
    [lambda f: f["text"], lambda f: f.text, lambda f: f.result(), list, lambda f: [*f]],
    ids=["item", "attribute", "result()", "list", "star"],
)
def test_a_forgotten_get_gives_a_clear_error(
    future: WorkerFuture[Any], use: Callable[[Any], object]
) -> None:
    with pytest.raises((TypeError, AttributeError), match=r"call get\(timeout=...\) for its value"):
        use(future)


def test_printed_future_says_how_to_get_its_value(future: WorkerFuture[Any]) -> None:
    assert repr(future) == "<WorkerFuture, pending: get(timeout=...) returns its value>"
    future.answer(1)
    assert "resolved" in str(future)
    assert future  # a future is no value: it is never false


@pytest.mark.parametrize("value", [1, None])
def test_the_first_answer_or_failure_counts(future: WorkerFuture[Any], value: Any) -> None:
    assert isinstance(future, pykka.ThreadingFuture)
    for timeout in (0.01, 0, -1, math.nan):
        with pytest.raises(pykka.Timeout):
            future.get(timeout=timeout)
        with ThreadPoolExecutor(1) as pool:  # which no signal wakes
            late = pool.submit(future.get, timeout=timeout).exception(WAIT_S)
            assert isinstance(late, pykka.Timeout)
    assert not future.done()
    assert future not in futures._awaited
    future.answer(value)
    failed: WorkerFuture[Any] = WorkerFuture()
    failed.fail(LookupError("lost"))
    for each in (future, failed):
        each.answer(2)
        each.fail(RuntimeError())
    assert future.done()
    assert [future.get(), future.get(timeout=0)] == [value, value]
    for _ in range(2):
        with pytest.raises(LookupError, match="lost"):
            failed.get()


def test_concurrent_answers_resolve_a_future_once() -> None:
    for _ in range(50):
        taken: queue.SimpleQueue[int] = queue.SimpleQueue()
        future: ResultFuture[int] = ResultFuture(taken.put)
        with ThreadPoolExecutor(8) as pool:
            got = [pool.submit(future.get, timeout=WAIT_S) for _ in range(4)]
            for number in range(4):
                pool.submit(future.answer, number)
            assert len({each.result(WAIT_S) for each in got}) == 1
        assert taken.qsize() == 1


def test_a_late_answer_waits_for_no_lock(future: WorkerFuture[int]) -> None:
    """A signal handler of the host's may run in the thread that holds it."""
    future.answer(1)
    late = threading.Thread(target=future.answer, args=(2,))
    with future._condition:
        late.start()
        late.join(WAIT_S)
        assert not late.is_alive()


def test_answer_as_a_wait_ends_keeps_no_future(future: WorkerFuture[int]) -> None:
    class Wakers(list[Callable[[], object]]):
        asked_count = 0

        def __bool__(self) -> bool:
            """Another thread waits, too, and is answered after the second time."""
            self.asked_count += 1
            if self.asked_count == 2:
                future.answer(1)
            return self.asked_count == 2

    future._wakers = Wakers()
    assert future.get(timeout=0.001) == 1
    assert future not in futures._awaited


# ---------------------------------------------------------------- await


def test_awaiting_leaves_the_event_loop_running(future: WorkerFuture[str]) -> None:
    async def main() -> Any:
        waiting = asyncio.create_task(wait(future))
        await asyncio.sleep(0)
        # reached only if the wait does not block
        threading.Thread(target=future.answer, args=("done",)).start()
        return await waiting

    assert run_async(main()) == "done"
    assert run_async(wait(future)) == "done"  # what is answered already returns at once


def test_awaiting_raises_what_the_future_failed_with(future: WorkerFuture[int]) -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: future.fail(LookupError("lost")))
        await future

    with pytest.raises(LookupError, match="lost"):
        run_async(main())


def test_a_cancelled_task_takes_nothing_and_leaves_nothing(handed_over: HandedOver) -> None:
    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(handed_over), 0.01)

    run_async(main())
    assert handed_over._wakers == []
    handed_over.answer(5)
    assert handed_over.taken == []


def test_answer_after_the_event_loop_closed_harms_nobody(future: WorkerFuture[int]) -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(wait(future))
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    future.answer(1)
    assert future.get(timeout=0) == 1
    task._log_destroy_pending = False  # type: ignore[attr-defined]


# ---------------------------------------------------------------- callbacks


@pytest.mark.parametrize("is_answered", [False, True], ids=["before the answer", "after it"])
def test_callback_runs_on_a_thread_of_its_own(future: WorkerFuture[int], is_answered: bool) -> None:
    called: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    if is_answered:
        future.answer(1)
    for _ in range(2):
        future.add_done_callback(
            lambda f: called.put((f.get(timeout=0), threading.current_thread().name))
        )
    future.answer(1)
    assert [called.get(timeout=WAIT_S) for _ in range(2)] == [(1, CALLBACKS)] * 2


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_callback_exception_is_logged_and_the_next_runs(
    future: WorkerFuture[int], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_: object) -> None:
        raise error

    called = threading.Event()
    with caplog.at_level(logging.ERROR, logger="llama_worker.futures"):
        future.add_done_callback(failing)
        future.add_done_callback(lambda _: called.set())
        future.answer(1)
        assert called.wait(WAIT_S)
        threads.flush_callbacks_and_log(WAIT_S)
    (entry,) = [record for record in caplog.records if record.name == "llama_worker.futures"]
    assert entry.exc_info is not None
    assert entry.exc_info[1] is error


class _BrokenLogging:
    """A filter of the host's that raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.asked = threading.Semaphore(0)

    def filter(self, _: logging.LogRecord) -> bool:
        self.asked.release()
        raise self._error


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_callbacks_and_log_lines_survive_broken_host_logging(
    future: WorkerFuture[int],
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        threads, "_callback_thread", threads._CallbackThread("llama_worker-callbacks")
    )
    monkeypatch.setattr(threads, "_log_thread", threads._LogThread())
    logger, broken = logging.getLogger("llama_worker.futures"), _BrokenLogging(error)
    called = threading.Event()
    logger.addFilter(broken)
    try:
        for _ in range(2):  # its own failure is logged, to the same filter
            threads.write_log(logger, logging.ERROR, "a line")
            assert broken.asked.acquire(timeout=WAIT_S)
            assert broken.asked.acquire(timeout=WAIT_S)
        future.add_done_callback(lambda _: 1 / 0)  # logged, too
        future.add_done_callback(lambda _: called.set())
        future.answer(1)
        assert called.wait(WAIT_S)
    finally:
        logger.removeFilter(broken)
    assert type(error).__name__ in capsys.readouterr().err


def test_host_configuring_its_logging_holds_up_nobody() -> None:
    logger = logging.getLogger("llama_worker.futures")
    logger.setLevel(logger.level)  # logging forgets which levels are enabled
    line = threading.Thread(target=threads.write_log, args=(logger, logging.ERROR, "a line"))
    with logging._lock:  # type: ignore[attr-defined]  # as while a handler is made
        line.start()
        line.join(5.0)
        assert not line.is_alive()


def test_the_first_line_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a new thread, also before the one that starts it goes on: a flush may follow."""
    monkeypatch.setattr(threads, "_log_thread", threads._LogThread())
    logger, handler, start = logging.getLogger("llama_worker"), Mock(level=0), threads.start_thread
    written = threading.Event()
    handler.handle.side_effect = lambda record: written.set()

    def start_and_wait(name: str, target: Callable[[], object]) -> threading.Thread:
        thread = start(name, target)
        assert written.wait(WAIT_S)
        return thread

    monkeypatch.setattr(threads, "start_thread", start_and_wait)
    logger.addHandler(handler)
    try:
        threads.write_log(logger, logging.ERROR, "a line")
    finally:
        logger.removeHandler(handler)


def test_lines_a_blocked_log_handler_misses_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    threads.flush_callbacks_and_log(WAIT_S)  # the lines of other tests
    monkeypatch.setattr(threads, "_log_thread", threads._LogThread())
    monkeypatch.setattr(threads, "_MAX_WAITING_LINES", 3)
    logger, handler, let_go = (
        logging.getLogger("llama_worker"),
        logging.Handler(),
        threading.Event(),
    )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(record: logging.LogRecord) -> None:
        lines.put(record.getMessage())
        let_go.wait(WAIT_S)

    handler.emit = emit  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        threads.write_log(logger, logging.ERROR, "0")
        assert lines.get(timeout=WAIT_S) == "0"
        for number in range(1, 7):
            threads.write_log(logger, logging.ERROR, str(number))
        let_go.set()
        dropped, *kept = [lines.get(timeout=WAIT_S) for _ in range(4)]
    finally:
        let_go.set()
        logger.removeHandler(handler)
    assert (dropped.partition(",")[0], kept) == ("3 log lines were dropped", ["1", "2", "3"])


def test_a_callback_without_a_thread_runs_later(
    future: WorkerFuture[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "_callback_thread", threads._CallbackThread())
    start_timers()  # as the first worker does
    called = threading.Event()
    with no_threads():
        future.add_done_callback(lambda _: called.set())
        future.answer(1)
        assert future.get(timeout=WAIT_S) == 1
        assert "can't start new thread" in caplog.text
        assert caplog.text.count("cannot start the thread") == 1, "once for all that want it"
        assert not called.is_set()
    assert called.wait(WAIT_S)


def test_a_callback_is_called_if_nobody_holds_its_future() -> None:
    open_futures, called = OpenFutures(), queue.SimpleQueue[object]()
    dropped: WorkerFuture[int] = WorkerFuture()
    open_futures.add(dropped)
    dropped.add_done_callback(called.put)
    del dropped
    open_futures.close(LookupError())
    assert isinstance(called.get(timeout=WAIT_S), WorkerFuture)


# ---------------------------------------------------------------- derived with Pykka's map()


def test_a_derived_future_has_only_get(future: WorkerFuture[int]) -> None:
    derived = cast("WorkerFuture[int]", future.map(lambda value: 1 // value))
    derived.answer(1)  # no effect
    derived.fail(LookupError())
    assert "derived" in repr(derived)
    for use in (
        derived.done,
        lambda: derived.wait(0),
        lambda: derived.add_done_callback(print),
        lambda: run_async(wait(derived)),
    ):
        with pytest.raises(TypeError, match="has only get"):
            use()
    assert derived not in futures._awaited
    future.answer(0)
    with pytest.raises(ZeroDivisionError):
        derived.get(timeout=0)


def test_waiting_for_a_derived_future_holds_up_nobody(future: WorkerFuture[int]) -> None:
    asked = threading.Event()

    def get(timeout: float | None) -> int:
        asked.set()
        return future.get(timeout=timeout) + 1

    derived: WorkerFuture[int] = WorkerFuture()
    derived.set_get_hook(get)
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(derived.get, timeout=WAIT_S)
        assert asked.wait(WAIT_S)
        with pytest.raises(pykka.Timeout):
            derived.get(timeout=0.001)
        future.answer(1)
        assert patient.result(WAIT_S) == 2


@pytest.mark.parametrize("resolve", [WorkerFuture.set, WorkerFuture.set_exception])
@pytest.mark.parametrize("is_derived", [False, True])
def test_a_second_answer_is_refused_as_by_pykka(
    future: WorkerFuture[int], resolve: Callable[..., None], is_derived: bool
) -> None:
    if is_derived:
        future.set_get_hook(lambda timeout: 1)
    else:
        future.answer(1)
    with pytest.raises(queue.Full):
        resolve(future)
    assert future.get(timeout=WAIT_S) == 1


@pytest.mark.parametrize("is_failure", [False, True])
def test_an_answer_by_a_signal_handler_amid_the_first_is_ignored(
    future: WorkerFuture[int], monkeypatch: pytest.MonkeyPatch, is_failure: bool
) -> None:
    class Interrupted(threading.Condition):
        def __enter__(self) -> bool:
            future.answer(2)
            return super().__enter__()

    monkeypatch.setattr(future, "_condition", Interrupted())
    if is_failure:
        future.fail(ValueError())
        with pytest.raises(ValueError):
            future.get(timeout=WAIT_S)
    else:
        future.answer(1)
        assert future.get(timeout=WAIT_S) == 1


# ---------------------------------------------------------------- a value that is handed over


@pytest.mark.parametrize(
    "take",
    [lambda f: f.get(), lambda f: f.get(timeout=1), lambda f: run_async(wait(f))],
    ids=["get", "get in time", "await"],
)
def test_taking_a_result_is_reported_once(
    handed_over: HandedOver, take: Callable[[Any], int]
) -> None:
    handed_over.answer(5)
    assert handed_over.taken == []
    assert [take(handed_over), handed_over.get()] == [5, 5]
    assert handed_over.taken == [5]


def test_timeout_or_callback_or_failure_takes_nothing(handed_over: HandedOver) -> None:
    called = threading.Event()
    handed_over.add_done_callback(lambda _: called.set())
    with pytest.raises(pykka.Timeout):
        handed_over.get(timeout=0.001)
    handed_over.answer(5)
    assert called.wait(WAIT_S)
    failed = HandedOver()
    failed.fail(LookupError())
    with pytest.raises(LookupError):
        failed.get()
    assert handed_over.taken == failed.taken == []


# ---------------------------------------------------------------- the open futures of a worker


def test_close_fails_every_open_future_and_later_ones() -> None:
    open_futures = OpenFutures()
    before, answered, after = (WorkerFuture[int]() for _ in range(3))
    open_futures.add(before)
    open_futures.add(answered)
    answered.answer(1)
    assert open_futures.closed_by is None
    closing = LookupError("closed")
    open_futures.close(closing)
    open_futures.close(RuntimeError("again"))
    open_futures.add(after)
    assert open_futures.closed_by is closing
    errors = {closing}
    for future in (before, after):
        with pytest.raises(LookupError, match="closed") as caught:
            future.get(timeout=0)
        errors.add(caught.value)
    assert len(errors) == 3  # none holds on to the frames of another's caller
    assert answered.get(timeout=0) == 1


def test_all_living_are_found_while_another_thread_sweeps() -> None:
    weak, lasting = WeakList[threading.Event](), [threading.Event() for _ in range(20)]
    for event in (*[threading.Event() for _ in range(40)], *lasting):
        weak.add(event)
    added = iter([threading.Event() for _ in range(4)])

    def others() -> None:
        for event in added:
            weak.add(event)

    weak._refs[30] = others  # type: ignore[call-overload]
    assert set(weak.alive()) >= set(lasting)
    assert len(weak._refs) < 60


def test_dead_references_are_swept_now_and_then() -> None:
    weak, looked_at = WeakList[threading.Event](), Mock()
    weak._refs.append(looked_at)
    lasting = [threading.Event() for _ in range(1000)]
    for event in lasting:
        weak.add(event)
    assert looked_at.call_count < 10
    for _ in range(5000):
        weak.add(threading.Event())
    assert len(weak._refs) <= 2 * (len(lasting) + 2)


def test_a_future_added_during_close_is_answered() -> None:
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
                future.get(timeout=WAIT_S)
