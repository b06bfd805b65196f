"""LlamaWorker, the host's handle of one worker: each call becomes a message to its WorkerActor."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import pykka
from msgspec.structs import replace

from llama_worker.actors.messages import (
    Ask,
    AwaitResult,
    GetDebugInfo,
    GetResult,
    GetWorkerStatus,
    HostMessage,
    ReleaseResult,
    Submit,
    WaitSlot,
)
from llama_worker.backend import Backend
from llama_worker.config.server_program import find_server
from llama_worker.config.settings import WorkerConfig
from llama_worker.config.validation import (
    checked_int,
    checked_path,
    checked_seconds,
    checked_str,
    checked_type,
    optional,
    plain_str,
)
from llama_worker.ports import Runtime
from llama_worker.request.messages import CancelRequest, CountTokens, GetStatus, ReadOutput
from llama_worker.request.output import read_output
from llama_worker.request.submission import valid_id, validate_submit
from llama_worker.runtime.host.futures import ResultFuture, WorkerFuture
from llama_worker.runtime.process.free_port import free_port
from llama_worker.runtime.real import RealRuntime
from llama_worker.server.messages import Drain, Restart, Start, Stop
from llama_worker.startable import Startable
from llama_worker.types.chat import ChatMessage, ContentPart
from llama_worker.types.request import (
    NotFound,
    NotReady,
    OutputChunk,
    RequestResult,
    RequestStatus,
    SubmitResult,
    TokenCount,
)
from llama_worker.types.worker import WorkerDebugInfo, WorkerStatus

T = TypeVar("T")


def no_such_request(request_id: int) -> str:
    """The text of a LookupError."""
    return f"no request {request_id}: the id is unknown, or its result was taken or has expired"


class LlamaWorker(Startable):
    """One llama-server under supervision, with a number of slots for chat requests.

    Every method may be called from any thread. All but `close` and `iter_output` return at once,
    with a future that any thread may wait on, or await in asyncio. The futures of `start`,
    `restart`, `stop`, `drain`, `result`, `ask`, `wait_slot`, `count_tokens` and of a waiting
    `read_output` resolve when what they wait for has happened, all others within milliseconds.
    After `close` every method raises WorkerClosed.
    """

    def __init__(self, config: WorkerConfig, *, _runtime: Runtime | None = None) -> None:
        """Start the worker's actors; no server yet. Raises TypeError if `config` is not a
        WorkerConfig, RuntimeError if the system has no thread left."""
        if not isinstance(config, WorkerConfig):
            raise TypeError(f"config must be a WorkerConfig, not {type(config).__name__}")
        self._backend = Backend(config, RealRuntime(config) if _runtime is None else _runtime)
        self.actor_ref: pykka.ActorRef[Any] = self._backend.actor_ref
        # When the handle is garbage-collected without `close`, its server ends, too.
        weakref.finalize(self, self._backend.abandon).atexit = False

    @classmethod
    def from_model(
        cls,
        model: str | os.PathLike[str],
        *,
        slots: int = 1,
        name: str | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        executable: str | os.PathLike[str] | None = None,
        extra_args: Iterable[str] = (),
        **config: Any,
    ) -> Self:
        """A worker for a model, not started: the short way to a WorkerConfig.

        Args:
            model: the path of a GGUF file.
            slots: requests at the same time.
            name: for logs and prompts; None: the file's name.
            host: where the server will listen.
            port: its port; None: one that is free now.
            executable: the llama-server; None: LLAMA_SERVER, PATH, then this Python environment.
            extra_args: further words of the server's command.
            config: further arguments of `WorkerConfig.for_model`, such as `batch_size`.

        Raises:
            ConfigError: no llama-server was found, or a value cannot work.
            TypeError: a wrong type, or an unknown field.
            OSError: no port is free.
        """
        named = None if executable is None else checked_path("executable", executable)
        return cls(
            WorkerConfig.for_model(
                model,
                port=free_port(host) if port is None else port,
                host=host,
                slots=slots,
                name=name,
                executable=find_server(named, option="executable").path,
                extra_args=extra_args,
                **config,
            )
        )

    @property
    def config(self) -> WorkerConfig:
        """The configuration, as it was given."""
        return self._backend.config

    def __repr__(self) -> str:
        return f"<LlamaWorker {self._backend.config.name!r}>"

    def start(self) -> WorkerFuture[WorkerStatus]:
        """Launch the server. Resolves when it is READY.

        Raises WorkerStartError (in the future), at the latest after `startup_timeout_s` without a
        sign of work, or after `load_timeout_s` in all (if that is None, `silent_work_timeout_s`).
        While the worker restarts by itself, it launches nothing more, and resolves or raises as
        those restarts end.
        """
        return self._ask(lambda reply: Start(reply=reply))

    def stop(self) -> WorkerFuture[None]:
        """End the requests and the server; `start` may follow. Resolves when no process of the
        server is left, within `stop_grace_s` + 2 s.

        Raises WorkerStopError (in the future) if the server has not ended `kill_timeout_s` after
        SIGKILL.
        """
        return self._ask(lambda reply: Stop(reply=reply))

    def drain(self) -> WorkerFuture[None]:
        """Stop once the requests in flight have ended.

        From now on `submit` is refused with WORKER_DRAINING; requests in flight run to their ends,
        under the usual limits. After the last one, or if none runs, the worker stops, and the
        future resolves as that of `stop`. `stop` cuts a drain short; `start` during a drain starts
        the worker again once it has stopped.
        """
        return self._ask(lambda reply: Drain(reply=reply))

    def restart(self, reason: str = "") -> WorkerFuture[WorkerStatus]:
        """Replace the server now, without backoff and outside of the restart budget.

        Requests in flight fail with `worker_restarted` and keep their output. Resolves when READY;
        the launch has the limits of `start`.

        Args:
            reason: shown in the fail detail of those requests, in the log and in the events; not
                recorded where a restart is due anyway, which is only brought forward.

        Raises (in the future):
            WorkerStartError: the worker is stopped, FAILED or draining (reason `stopped`), or the
                new server could not be kept running.
        """

        def order(reply: WorkerFuture[WorkerStatus]) -> Restart:
            checked_str("reason", reason)
            return Restart(reason=plain_str(reason), reply=reply)

        return self._ask(order)

    def close(self) -> None:
        """`stop()` and the end of the worker's actors. Blocks, 5 s longer than `stop` at most;
        idempotent."""
        self._backend.close()

    def submit(
        self,
        job_name: str,
        system_prompt: str,
        user_prompt: str | Sequence[ContentPart],
        *,
        params: Mapping[str, Any] | None = None,
        messages: Iterable[ChatMessage] | None = None,
    ) -> WorkerFuture[SubmitResult]:
        """Admit a request to a free slot, or refuse it, at once.

        Args:
            job_name: the caller's name for it, in statuses and logs.
            system_prompt: follows the BIOS text.
            user_prompt: text, or content parts (text, images, audio) for a model that takes them.
            params: further parameters of the chat request, passed on as they are.
            messages: a prior conversation, between the system prompts and `user_prompt`.

        Returns:
            A future of SubmitOk or SubmitErr. Bad input resolves as TypeError or ValueError and
            takes no slot.
        """

        def order(reply: WorkerFuture[SubmitResult]) -> Submit:
            prompt = validate_submit(job_name, system_prompt, user_prompt, params, messages)
            return Submit(submission=prompt, reply=reply)

        return self._ask(order)

    def ask(
        self,
        user_prompt: str | Sequence[ContentPart],
        *,
        system_prompt: str = "",
        job_name: str = "ask",
        params: Mapping[str, Any] | None = None,
        messages: Iterable[ChatMessage] | None = None,
    ) -> WorkerFuture[RequestResult]:
        """`submit` and `result` in one: a future of the result, which the worker forgets once the
        future has it.

        Arguments are those of `submit`. Resolves as `result` does. A `get` that times out does not
        end the request: `get` may be called again.

        Raises (in the future):
            RequestRefused: the request was not admitted.
            RequestFailed: it ended in another state than `completed`; the error's `result` has all
                output received.
        """

        def order(reply: WorkerFuture[RequestResult]) -> Ask:
            prompt = validate_submit(job_name, system_prompt, user_prompt, params, messages)
            if job_name == "ask":  # the caller did not name the job
                prompt = replace(prompt, job_key=f"ask {hash(repr(prompt.user_prompt)):x}")
            return Ask(submission=prompt, reply=reply)

        return self._ask(order)

    def count_tokens(
        self,
        system_prompt: str,
        user_prompt: str | Sequence[ContentPart],
        *,
        messages: Iterable[ChatMessage] | None = None,
    ) -> WorkerFuture[TokenCount]:
        """How many tokens the prompt has as `submit` would send it, with BIOS and tools, and how
        many are left of a slot's context. Takes no slot; images and audio are not counted.

        Resolves within 10 s, however busy the server is.

        Raises (in the future):
            RequestRefused: the worker is not READY.
            LlamaWorkerError: the server, or the BIOS provider, failed or did not answer in time.
            ConfigError, TypeError: as for `submit`.
        """

        def question(reply: WorkerFuture[TokenCount]) -> CountTokens:
            prompt = validate_submit("count", system_prompt, user_prompt, None, messages)
            return CountTokens(submission=prompt, reply=reply)

        return self._ask(question)

    def get_status(self, request_id: int) -> WorkerFuture[RequestStatus | NotFound]:
        """The request's state, phase and progress so far."""
        return self._ask(lambda reply: GetStatus(request_id=valid_id(request_id), reply=reply))

    def get_result(self, request_id: int) -> WorkerFuture[RequestResult | NotReady | NotFound]:
        """The result of a terminal request, which is then forgotten."""
        return self._ask(lambda reply: GetResult(request_id=valid_id(request_id), reply=reply))

    def release(self, request_id: int) -> WorkerFuture[bool]:
        """Forget the result of a request that has ended; False if there is none."""
        return self._ask(lambda reply: ReleaseResult(request_id=valid_id(request_id), reply=reply))

    def wait_slot(self) -> WorkerFuture[None]:
        """Resolves when the worker is READY and a slot is free, at once if it is so already.

        A hint, not a reservation: another thread's `submit` may be first. Raises RequestRefused (in
        the future) if the worker is stopped, draining or FAILED and `start` was not called since.
        """
        return self._ask(lambda reply: WaitSlot(reply=reply))

    def result(self, request_id: int) -> ResultFuture[RequestResult | NotFound]:
        """Resolves when the request is terminal; it is forgotten once a `get` has returned the
        value.

        `absolute_timeout_s` bounds the wait, if it is set. Else the other limits of TimeoutProfile,
        `max_tokens` and `tool_timeout_s` do, each of at most `max_tool_iterations` + 1 turns.
        """
        backend = self._backend

        def release(value: RequestResult | NotFound) -> None:
            if value["ok"]:
                backend.tell(ReleaseResult(request_id=request_id))

        return backend.ask(
            ResultFuture(release),
            lambda reply: AwaitResult(request_id=valid_id(request_id), reply=reply),
        )

    def read_output(
        self,
        request_id: int,
        *,
        text_offset: int = 0,
        reasoning_offset: int = 0,
        wait: bool = False,
    ) -> WorkerFuture[OutputChunk | NotFound]:
        """The output after the offsets (in characters), for live display; the result is not
        released. With `wait` the future resolves once there is new output, or the request has
        ended, so that no polling is needed.
        """

        def question(reply: WorkerFuture[OutputChunk | NotFound]) -> ReadOutput:
            checked_int("text_offset", text_offset, at_least=0)
            checked_int("reasoning_offset", reasoning_offset, at_least=0)
            checked_type("wait", wait, bool)
            return ReadOutput(
                request_id=valid_id(request_id),
                text_offset=text_offset,
                reasoning_offset=reasoning_offset,
                wait=wait,
                reply=reply,
            )

        return self._ask(question)

    def iter_output(
        self, request_id: int, *, timeout_s: float | None = None
    ) -> Iterator[OutputChunk]:
        """Yield the output as it comes, from its beginning; only the last chunk has `done` True.

        Blocks the caller between the chunks, and polls nothing. The result is not released; leaving
        the loop early leaves the request running.

        Args:
            request_id: of a request that runs or has ended.
            timeout_s: an empty chunk is yielded after every so many seconds without output; None:
                never.

        Raises:
            LookupError: the id is unknown, or the result was taken or has expired meanwhile.
            WorkerClosed: after `close`.
        """
        self._backend.check_open()
        optional(checked_seconds, "timeout_s", timeout_s, above=0)
        return self._iter_output(valid_id(request_id), timeout_s)

    def _iter_output(self, request_id: int, timeout_s: float | None) -> Iterator[OutputChunk]:
        chunk = read_output("", "", 0, 0, done=False)
        while not chunk["done"]:
            more = self.read_output(
                request_id,
                text_offset=chunk["text_offset"],
                reasoning_offset=chunk["reasoning_offset"],
                wait=True,
            )
            while not more.wait(timeout_s):
                yield {**chunk, "text": "", "reasoning": ""}
            answer = more.get()
            if not answer["ok"]:
                raise LookupError(no_such_request(request_id))
            chunk = answer
            yield chunk.copy()  # the caller may change it

    def cancel(self, request_id: int) -> WorkerFuture[bool]:
        """Cancel a running request. True once it is cancelled and its slot is free; False if it was
        not running."""
        return self._ask(lambda reply: CancelRequest(request_id=valid_id(request_id), reply=reply))

    def get_worker_status(self) -> WorkerFuture[WorkerStatus]:
        """The worker's state, its slots, its server, and warnings."""
        return self._ask(lambda reply: GetWorkerStatus(reply=reply))

    def get_debug_info(self) -> WorkerFuture[WorkerDebugInfo]:
        """Recent logs, events and restarts, and counters, for debugging."""
        return self._ask(lambda reply: GetDebugInfo(reply=reply))

    def _ask(self, message: Callable[[WorkerFuture[T]], HostMessage]) -> WorkerFuture[T]:
        return self._backend.ask(WorkerFuture[T](), message)
