"""Ray's own calls, for a host that may shut Ray down, and its texts."""

from __future__ import annotations

import asyncio
import re
import textwrap
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from llama_worker.errors import described_error
from llama_worker.runtime.host.threads import start_thread

SHUT_DOWN = "Ray was shut down in this program"
_CHECK_S = 1.0  # between two checks whether Ray was shut down
_KILL_S = 0.2  # Ray takes microseconds to send a kill
_SHOWN_CHARS = 400
_RAY_FIELDS = re.compile("(class_name|actor_id|pid|name|namespace|ip): ")


def call(method: Any, *args: Any, **named: Any) -> Any:
    """Call an actor's method, as its `remote` does. Raises RayError also where that would start a
    new cluster, since Ray was shut down, or raise a plain Exception."""
    if not ray.is_initialized():
        raise RayError(SHUT_DOWN)
    try:
        return method.remote(*args, **named)
    except RayError:
        raise
    except Exception as error:  # Ray's for a call of an actor of an earlier ray.init()
        raise RayError(described_error(error)) from error


async def answer_of(method: Any, *args: Any, **named: Any) -> Any:
    """Call an actor's method and wait for its answer. Raises RayError also once Ray is shut down:
    Ray itself would leave the caller waiting."""
    asked_in, answer = session(), asyncio.ensure_future(call(method, *args, **named))
    try:
        while not answer.done():
            if session() != asked_in:
                raise RayError(SHUT_DOWN)
            await asyncio.wait({answer}, timeout=_CHECK_S)
        return answer.result()
    finally:
        answer.cancel()


def session() -> tuple[str, str] | None:
    """Differs from one `ray.init()` to the next; None while Ray is shut down."""
    if ray.is_initialized():
        with suppress(Exception):  # another thread shuts it down meanwhile
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_job_id()
    return None


def kill(actor: Any) -> None:
    """End an actor's process; the server's guard then ends the server.

    On a thread: Ray waits until its head has registered the actor, which a dead one never does.
    """
    if ray.is_initialized():
        with suppress(RuntimeError):  # the program exits, and Ray ends its actors
            start_thread("llama_worker-kill", partial(_kill, actor)).join(_KILL_S)


def _kill(actor: Any) -> None:
    with suppress(RayError):  # the host has initialised Ray anew: the actor ended before
        ray.kill(actor)


def one_line(error: RayError) -> str:
    """Ray's text about a death or a failed call, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayTaskError) or (
        isinstance(error, ActorDiedError) and error.actor_init_failed
    ):
        lines = lines[-1:]  # the exception, without the traceback above it
    words = " ".join(line for line in lines if not _RAY_FIELDS.match(line))
    return textwrap.shorten(words, _SHOWN_CHARS, placeholder=" ...")
