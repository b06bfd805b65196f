"""Counts a prompt's tokens with the server's template and tokenizer, without using a slot."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from llama_worker.bios import PromptError
from llama_worker.config.settings import Endpoint, WorkerConfig
from llama_worker.config.validation import json_of
from llama_worker.errors import LlamaWorkerError, described_error, masked
from llama_worker.request.messages import CountTokens
from llama_worker.request.prompt import Prompts, bios_text
from llama_worker.runtime.host.futures import may_block_this_thread
from llama_worker.runtime.host.threads import run_on_thread
from llama_worker.runtime.host.timers import call_at, now
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.runtime.http.session import ask
from llama_worker.stream.failure import StreamFailure, describe_http_error, refuses_tools
from llama_worker.types.request import TokenCount

COUNT_S = 10.0
_MAX_REPLY_BYTES = 128 * 1024 * 1024  # the prompt as JSON, or its tokens, some 7 bytes each


def count_tokens(
    order: CountTokens, config: WorkerConfig, *, prompted: bool, n_ctx: int, unix_now: float
) -> None:
    """Count on another thread; the order's reply is answered within COUNT_S.

    Raises RuntimeError if the system has no thread left.
    """
    abort = Abort()
    post = partial(ask, Endpoint.of(config), "POST", abort=abort, max_bytes=_MAX_REPLY_BYTES)

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
        with may_block_this_thread():
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
            if isinstance(error, TimeoutError) and error.errno is None:
                give_up()  # the time of one question is up: the timer is about to say so
            else:
                fail(described_error(error))
        finally:
            timer.cancel()

    timer = call_at(now() + COUNT_S, give_up)
    try:
        run_on_thread(f"llama_worker-{config.name}-count", run)
    except RuntimeError:
        timer.cancel()
        raise


class _BadAnswerError(LlamaWorkerError):
    """The server refused, or its answer lacks the value that was asked for."""

    def __init__(self, path: str, failure: StreamFailure) -> None:
        self.failure = failure
        super().__init__(f"POST {path}: {failure.detail}")
