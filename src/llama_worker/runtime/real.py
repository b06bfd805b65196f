"""The real runtime of a worker: threads, sockets, processes, /proc."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from llama_worker.bios import PromptError
from llama_worker.config.server_program import (
    host_environment,
    options_file_warnings,
    server_environment,
    working_folder,
)
from llama_worker.config.settings import Endpoint, WorkerConfig
from llama_worker.config.validation import json_of
from llama_worker.errors import LlamaWorkerError, described_error, masked
from llama_worker.mailbox import Mailbox
from llama_worker.ports import Waitable
from llama_worker.request import messages as request
from llama_worker.request.prompt import Prompts, bios_text, write_bios
from llama_worker.runtime.host import threads
from llama_worker.runtime.host.host_code import SerializedProbe, ToolCallThread
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.runtime.http.session import ask
from llama_worker.runtime.http.stream_reader import StreamReader
from llama_worker.runtime.probes import readiness
from llama_worker.runtime.probes.gpu_watch import watch_gpus
from llama_worker.runtime.probes.liveness_probes import anon_bytes, default_probes, process_evidence
from llama_worker.runtime.process.log_ring import LogRing
from llama_worker.runtime.process.server_process import GuardedServer
from llama_worker.server import messages as server
from llama_worker.stream.failure import StreamFailure, describe_http_error, refuses_tools
from llama_worker.types.request import TokenCount

COUNT_S = 10.0  # to count a prompt's tokens
_MAX_COUNTED_BYTES = 128 * 1024 * 1024  # the prompt as JSON, or its tokens, some 7 bytes each
_logger = logging.getLogger("llama_worker")
_SUSPENDED_S = 1.0  # a smaller difference is the time between the reads of two clocks


class RealHost:
    """See `ports.Host`. Thread-safe. Actors run on daemon threads: a host that forgets `close()`
    can still exit."""

    def __init__(self) -> None:
        self._suspended_s = _suspended_s()
        self._unix_at_boot = time.time() - time.monotonic() - self._suspended_s
        threads.start_timers()

    now = staticmethod(threads.now)
    unix_now = staticmethod(time.time)
    call_at = staticmethod(threads.call_at)
    call_host = staticmethod(threads.call_host)

    def unix(self, at: float) -> float:
        suspended_s = _suspended_s()
        if suspended_s - self._suspended_s > _SUSPENDED_S:
            self._suspended_s = suspended_s
        return at + (self._unix_at_boot + self._suspended_s + threads.lost_s())

    def run_actor(self, start_thread: Callable[[], None], actor: Any) -> None:
        start_thread()

    def write_log(self, level: int, line: str) -> None:
        threads.write_log(_logger, level, line)


class UpstreamQuestions(RealHost):
    """Asks a server, also one that this program did not start; see `ports.UpstreamRuntime`.
    Thread-safe."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._endpoint = endpoint

    def probe(self, epoch: int, reply_to: Mailbox[server.Probed]) -> Abort:
        return readiness.probe_answer(self._endpoint, epoch=epoch, reply_to=reply_to)

    def look_at_slots(
        self, order: server.LookAtSlots, reply_to: Mailbox[server.SlotsSeen]
    ) -> Abort:
        return readiness.look_at_slots(self._endpoint, order, reply_to)


class RealRuntime(UpstreamQuestions):
    """The runtime of one worker; see `ports.Runtime`. Thread-safe."""

    process_evidence = staticmethod(process_evidence)
    anon_bytes = staticmethod(anon_bytes)

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(Endpoint.of(config))
        self._config = config
        self._name = f"llama_worker-{config.name}"
        # the host may change its own, and a restart must find what the start found
        self._folder = working_folder()
        self._inherited = server_environment(host_environment(), {})
        self.warnings = options_file_warnings({**self._inherited, **config.env})
        probes = default_probes() if config.liveness_probes is None else config.liveness_probes
        self._probes = [SerializedProbe(probe) for probe in probes]
        self.probes_count = len(self._probes)
        self.log = LogRing(config.log_lines, api_key=config.api_key)

    def wait(self, what: Waitable, timeout_s: float | None) -> bool:
        return what.wait(timeout_s)

    def start_server(self, epoch: int, reply_to: Mailbox[server.LaunchReport]) -> GuardedServer:
        return GuardedServer(
            epoch=epoch,
            config=self._config,
            folder=self._folder,
            inherited=self._inherited,
            log=self.log,
            reply_to=reply_to,
        )

    def open_stream(
        self, order: request.OpenStream, on_closed: Mailbox[request.StreamClosed]
    ) -> StreamReader:
        return StreamReader(order, self._endpoint, on_closed=on_closed, name=self._name)

    def probe_readiness(
        self, epoch: int, root_pid: int, *, first: bool, reply_to: Mailbox[server.Probed]
    ) -> Abort:
        return readiness.probe_readiness(
            self._config, epoch=epoch, root_pid=root_pid, first=first, reply_to=reply_to
        )

    def look(
        self, look: server.Look, root_pid: int, reply_to: Mailbox[server.EvidenceSeen]
    ) -> None:
        self._probes[look.probe].look(look, root_pid, reply_to)

    def watch_gpus(self, epoch: int, root_pid: int, reply_to: Mailbox[server.GpuFaulted]) -> None:
        threads.start_thread(f"{self._name}-gpus", partial(watch_gpus, root_pid, epoch, reply_to))

    def write_bios(self, order: request.WriteBios, reply_to: Mailbox[request.BiosWritten]) -> None:
        def tell_bios() -> None:
            reply_to.tell(write_bios(order, self._config, self.unix_now()))

        if self._config.has_builtin_bios:  # pure and quick: it needs no thread
            tell_bios()
        else:
            threads.start_thread(f"{self._name}-bios", tell_bios)

    def count_tokens(self, order: request.CountTokens, *, prompted: bool, n_ctx: int) -> None:
        unix_now = self.unix_now()
        _count_tokens(order, self._config, prompted=prompted, n_ctx=n_ctx, unix_now=unix_now)

    def run_tool(self, order: request.RunTool) -> ToolCallThread:
        request_id, turn = order.turn_id
        return ToolCallThread(order, self._config, f"{self._name}-tool-{request_id}.{turn}")


def _suspended_s() -> float:
    """How long this machine was suspended since its boot; the monotonic clock stood still then."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


def _count_tokens(
    order: request.CountTokens, config: WorkerConfig, *, prompted: bool, n_ctx: int, unix_now: float
) -> None:
    """Count with the server's template and tokenizer, without using a slot, on another thread; the
    order's reply is answered within COUNT_S.

    Raises RuntimeError if the system has no thread left.
    """
    abort = Abort()
    post = partial(ask, Endpoint.of(config), "POST", abort=abort, max_bytes=_MAX_COUNTED_BYTES)

    def give_up() -> None:
        """Fail without waiting for the thread: the BIOS provider may be what takes so long."""
        fail(f"no answer within {COUNT_S:g} s")
        abort.abort()

    def fail(why: str) -> None:
        shown = masked(f"the tokens could not be counted: {why}", config.api_key)
        order.reply.fail(LlamaWorkerError(shown))

    def server_answer(path: str, body: Mapping[str, Any], key: str) -> Any:
        """The value of `key` in the server's answer."""
        status, reply = post(path, timeout_s=COUNT_S, body=body)
        answer = json_of(reply)
        value = answer.get(key) if isinstance(answer, dict) else None
        if status != 200 or not isinstance(value, list | str):
            raise _BadAnswerError(path, describe_http_error(status, reply))
        return value

    def templated_prompt(*, prompted: bool) -> Any:
        """The prompt as the server's template writes it."""
        left = config.max_tool_iterations
        with threads.may_block_this_thread():
            bios = bios_text(config, unix_now, iterations_left=left, prompted=prompted)
        body = Prompts(config, order.submission, prompted=prompted).next_body(bios)
        return server_answer("/apply-template", body, "prompt")

    def count() -> TokenCount:
        try:
            prompt = templated_prompt(prompted=prompted)
        except _BadAnswerError as error:  # a request would fall back to prompted mode, too
            if config.tool_call_mode != "auto" or not refuses_tools(error.failure):
                raise
            prompt = templated_prompt(prompted=True)
        text = {"content": prompt, "add_special": True, "parse_special": True}
        n_tokens = len(server_answer("/tokenize", text, "tokens"))
        return {"ok": True, "n_prompt_tokens": n_tokens, "n_ctx": n_ctx, "n_left": n_ctx - n_tokens}

    def run() -> None:
        try:
            order.reply.answer(count())
        except (PromptError, LlamaWorkerError) as error:
            fail(str(error))
        except Exception as error:  # the server does not answer, or this machine lacks something
            fail(described_error(error))
        finally:
            timer.cancel()

    timer = threads.call_at(threads.now() + COUNT_S, give_up)
    try:
        threads.run_on_thread(f"llama_worker-{config.name}-count", run)
    except RuntimeError:
        timer.cancel()
        raise


class _BadAnswerError(LlamaWorkerError):
    """The server refused, or its answer lacks the value that was asked for."""

    def __init__(self, path: str, failure: StreamFailure) -> None:
        self.failure = failure
        super().__init__(f"POST {path}: {failure.detail}")
