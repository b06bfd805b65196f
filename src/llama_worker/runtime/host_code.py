"""The threads that run the host's own code: tools, BIOS providers, liveness probes. Each only tells
what came of it."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime

from msgspec.structs import replace

from llama_worker.bios import PromptError, run_bios
from llama_worker.config import WorkerConfig
from llama_worker.errors import described_error
from llama_worker.messages import BiosWritten, CallEnded, EvidenceSeen, Mailbox, RunBios, RunTool
from llama_worker.request.tool_results import ToolResultError, encode_result
from llama_worker.runtime.futures import log_exception
from llama_worker.runtime.shortage import is_shortage
from llama_worker.types import BiosContext, LivenessProbe

_logger = logging.getLogger("llama_worker")


def start_thread(name: str, target: Callable[[], object]) -> threading.Thread:
    """A daemon thread. Raises RuntimeError where the system has none left, or the host exits."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def run_tool(order: RunTool, config: WorkerConfig) -> None:
    """Make the call and tell what came of it, on the calling thread."""
    call, runner, ok = order.call, config.tool_runner, False
    assert runner is not None
    try:
        value = runner.run_tool(
            name=call.name,
            arguments=copy.deepcopy(call.arguments),
            request_id=order.turn_id[0],
            job_name=order.job_name,
        )
        text, ok = encode_result(value), True
    except ToolResultError as unfit:
        text = f"tool {call.name!r} returned what JSON cannot hold: {unfit}"
    except (
        BaseException
    ) as raised:  # SystemExit and KeyboardInterrupt in a tool are its failures, no more
        text = f"tool {call.name!r} raised {described_error(raised)}"
    order.reply_to.tell(CallEnded(turn_id=order.turn_id, ok=ok, text=text, at=time.monotonic()))


def write_bios(order: RunBios, config: WorkerConfig, unix_now: float) -> BiosWritten:
    """Ask the provider, on the calling thread; `unix_now` is the real time, which a suspended
    machine has caught up."""
    context = BiosContext(
        now=datetime.fromtimestamp(unix_now, config.timezone),
        timezone_name=config.timezone_name,
        worker_name=config.name,
        tool_iters_remaining=order.iterations_left,
        normal_tools=tuple(config.normal_tools),
        exit_tools=tuple(config.exit_tools),
        tool_call_mode="prompted" if order.prompted else "native",
    )
    try:
        return BiosWritten(
            turn_id=order.turn_id, bios=run_bios(config.bios_provider, context), error=None
        )
    except PromptError as error:
        return BiosWritten(turn_id=order.turn_id, bios="", error=str(error))


def look(
    probe: LivenessProbe, seen: EvidenceSeen, root_pid: int, reply_to: Mailbox[EvidenceSeen]
) -> None:
    """One probe's look at the server's processes. One that raises, or returns something odd, brings
    no news."""
    alive, detail, blind = False, "", False
    try:
        if seen.fresh:
            probe.reset()
        evidence = probe.probe(root_pid, time.monotonic())
        if evidence is not None:
            alive, detail = bool(evidence.alive), str(evidence.detail)
    except BaseException as error:  # SystemExit in a probe is its failure, no more
        blind = is_shortage(error)
        if not blind:
            log_exception(_logger, "a liveness probe failed")
    reply_to.tell(replace(seen, alive=alive, detail=detail, blind=blind, at=time.monotonic()))
