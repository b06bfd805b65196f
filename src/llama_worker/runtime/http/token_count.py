"""How many tokens a prompt has: its server's template and tokenizer say it, beside the slots."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from llama_worker.bios import PromptError
from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import LlamaWorkerError, described_error
from llama_worker.request.messages import CountTokens
from llama_worker.request.prompt import Prompts
from llama_worker.runtime.host.host_code import bios_text
from llama_worker.runtime.host.threads import run_on_thread
from llama_worker.runtime.host.timers import call_at
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.runtime.http.session import Endpoint, ask, json_of
from llama_worker.types.request import TokenCount

COUNT_S = 10.0


class TokenCounter:
    """Counts on a thread of its own; the order's reply has its answer within COUNT_S.

    Raises RuntimeError where the system has no thread left.
    """

    def __init__(
        self,
        order: CountTokens,
        config: WorkerConfig,
        endpoint: Endpoint,
        name: str,
        *,
        prompted: bool,
        n_ctx: int,
        unix_now: float,
    ) -> None:
        self._order, self._config, self._endpoint = order, config, endpoint
        self._prompted, self._n_ctx, self._unix_now = prompted, n_ctx, unix_now
        self._abort = Abort()
        self._deadline = time.monotonic() + COUNT_S
        self._timer = call_at(self._deadline, self._give_up)
        try:
            run_on_thread(name, self._run)
        except RuntimeError:
            self._timer.cancel()
            raise

    def _give_up(self) -> None:
        """The BIOS provider may be what takes so long: nobody waits for the thread."""
        self._order.reply.fail(_too_late())
        self._abort.abort()

    def _run(self) -> None:
        try:
            self._order.reply.answer(self._count())
        except (PromptError, _NoCount) as error:
            self._order.reply.fail(_failure(str(error)))
        except TimeoutError:  # the timer is about to say so
            self._order.reply.fail(_too_late())
        except Exception as error:  # the server does not answer, or this machine lacks something
            self._order.reply.fail(_failure(described_error(error)))
        finally:
            self._timer.cancel()

    def _count(self) -> TokenCount:
        config, submission = self._config, self._order.submission
        bios = bios_text(
            config,
            self._unix_now,
            iterations_left=config.max_tool_iterations,
            prompted=self._prompted,
        )
        body = Prompts(config, submission, prompted=self._prompted).next_body(bios)
        prompt = self._asked("/apply-template", body, "prompt")
        text = {"content": prompt, "add_special": True, "parse_special": True}
        count = len(self._asked("/tokenize", text, "tokens"))
        left = self._n_ctx - count
        return {"ok": True, "n_prompt_tokens": count, "n_ctx": self._n_ctx, "n_left": left}

    def _asked(self, path: str, body: Mapping[str, Any], key: str) -> Any:
        """What the server's answer has under the key."""
        left_s = max(0.0, self._deadline - time.monotonic())
        status, reply = ask(
            self._endpoint, "POST", path, timeout_s=left_s, body=dict(body), abort=self._abort
        )
        answer = json_of(reply)
        value = answer.get(key) if isinstance(answer, dict) else None
        if status != 200 or not isinstance(value, list | str):
            raise _NoCount(f"POST {path}: {status}: {_said(answer)}")
        return value


class _NoCount(Exception):
    """The server answered something else."""


def _said(answer: object) -> str:
    """The server's own message, where there is one."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or answer)[:500]


def _too_late() -> LlamaWorkerError:
    return _failure(f"no answer within {COUNT_S:g} s")


def _failure(why: str) -> LlamaWorkerError:
    return LlamaWorkerError(f"the tokens could not be counted: {why}")
