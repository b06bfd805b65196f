"""Questions to the server, beside its streams, each on a thread: is it ready, and is it ours? What
do its slots do?"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import psutil

from llama_worker.config.settings import Endpoint, WorkerConfig
from llama_worker.config.validation import json_of
from llama_worker.errors import described_error, is_shortage, masked
from llama_worker.mailbox import Mailbox
from llama_worker.runtime.host import timers
from llama_worker.runtime.host.threads import run_probe
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.runtime.http.session import ask
from llama_worker.runtime.probes.liveness_probes import PROC, listening_ports, tree_pids
from llama_worker.server.health import (
    PROBE_TIMEOUT_S,
    canary_body,
    canary_problem,
    models_outcome,
    probe_timeout_s,
)
from llama_worker.server.messages import Probed, ProbeOutcome, SlotsSeen
from llama_worker.server.slots import LOOK_TIMEOUT_S, SlotsLook, SlotsSilence, parse_slots
from llama_worker.server.traits import ServerTraits, server_traits

_LISTEN = "0A"  # a socket's state in /proc/net/tcp
_TRAITS_TIMEOUT_S = 2.0
_CANARY_TIMEOUT_S = 1e6  # the startup has its own limits, which abort this


class _Question:
    """The constructor has it asked, on a thread that tells the answer; any thread may call `abort`.

    Raises RuntimeError where the host has no thread.
    """

    def __init__(self, endpoint: Endpoint, *, epoch: int, reply_to: Mailbox[Any]) -> None:
        self._endpoint = endpoint
        self._epoch = epoch
        self._reply_to = reply_to
        self._abort = Abort()
        run_probe(self._run)

    def abort(self) -> None:
        """Close the connection now; the answer is then that there was none."""
        self._abort.abort()

    def _run(self) -> None:
        raise NotImplementedError

    def _ask(
        self, method: str, path: str, timeout_s: float, body: object = None
    ) -> tuple[int, bytes]:
        return ask(self._endpoint, method, path, timeout_s=timeout_s, body=body, abort=self._abort)

    def _tell(self, outcome: ProbeOutcome, detail: str, traits: ServerTraits) -> None:
        shown = masked(detail, self._endpoint.api_key)  # it may quote the server
        self._reply_to.tell(Probed(epoch=self._epoch, outcome=outcome, detail=shown, traits=traits))


class ReadinessProbe(_Question):
    """One probe of the worker's server, which tells one Probed.

    The `first` READY of a launch also needs the listener to belong to `root_pid`'s tree, and brings
    the traits.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        epoch: int,
        root_pid: int,
        first: bool,
        reply_to: Mailbox[Probed],
    ) -> None:
        self._config = config
        self._root_pid = root_pid
        self._first = first
        super().__init__(Endpoint.of(config), epoch=epoch, reply_to=reply_to)

    def _run(self) -> None:
        timeout_s = probe_timeout_s(self._config.timeouts)
        traits = ServerTraits()
        try:
            status, body = self._ask("GET", "/v1/models", timeout_s)
        except Exception as error:
            self._tell(*unanswered(error), traits)
            return
        outcome, detail = models_outcome(status, json_of(body))
        try:
            if outcome is ProbeOutcome.READY and self._first:
                if owns_port(self._root_pid, self._config.port):
                    traits = self._ask_traits()
                    outcome, detail = self._try_canary(outcome, detail)
                else:
                    outcome = ProbeOutcome.STRANGER
                    detail = f"another process answers on port {self._config.port}"
        except Exception as error:
            outcome, detail = unanswered(error)[0], described_error(error)
        self._tell(outcome, detail, traits)

    def _ask_traits(self) -> ServerTraits:
        """As far as the server tells them. Raises what this machine lacks: it is to be asked
        again."""
        chat = {"messages": [{"role": "user", "content": "-"}]}
        answers: list[dict[str, Any]] = []
        for method, path, body in (("GET", "/props", None), ("POST", "/apply-template", chat)):
            try:
                status, answer = self._ask(method, path, _TRAITS_TIMEOUT_S, body)
            except (OSError, ValueError) as error:
                if is_shortage(error):
                    raise
                status, answer = 0, b""
            value = json_of(answer) if status == 200 else None
            answers.append(value if isinstance(value, dict) else {})
        return server_traits(*answers)

    def _try_canary(self, outcome: ProbeOutcome, detail: str) -> tuple[ProbeOutcome, str]:
        """As long as it takes: the startup's limits end it."""
        canary = self._config.canary
        if canary is None:
            return outcome, detail
        try:
            status, answer = self._ask(
                "POST", "/v1/chat/completions", _CANARY_TIMEOUT_S, canary_body(canary)
            )
        except (OSError, ValueError) as error:
            return unanswered(error)[0], f"the canary: {described_error(error)}"
        problem = canary_problem(canary.check, status, json_of(answer))
        return (outcome, detail) if problem is None else (ProbeOutcome.UNFIT, problem)


class AnswerProbe(_Question):
    """Does a server that this program did not start answer anything? Tells one Probed."""

    def _run(self) -> None:
        try:
            status, _ = self._ask("GET", "/v1/models", PROBE_TIMEOUT_S)
            outcome, detail = ProbeOutcome.READY, f"GET /v1/models: {status}"
        except Exception as error:
            outcome, detail = unanswered(error)
        self._tell(outcome, detail, ServerTraits())


class SlotsQuestion(_Question):
    """One look at `/slots`; tells one SlotsSeen."""

    def _run(self) -> None:
        asked_at = timers.now()
        look: SlotsLook | SlotsSilence | None = None
        try:
            status, body = self._ask("GET", "/slots", LOOK_TIMEOUT_S)
            slots = parse_slots(json_of(body)) if status == 200 else None
            if slots is not None:
                look = SlotsLook(asked_at=asked_at, slots=slots)
        except TimeoutError:
            look = SlotsSilence()
        except Exception:  # no answer, or this machine lacks something: nothing was seen
            pass
        self._reply_to.tell(SlotsSeen(epoch=self._epoch, look=look))


def unanswered(error: Exception) -> tuple[ProbeOutcome, str]:
    """Of `GET /v1/models` without an answer: what this machine lacks, or that it cannot look up a
    name, says nothing about the server."""
    blind = is_shortage(error) or isinstance(error, socket.gaierror)
    outcome = ProbeOutcome.NO_NEWS if blind else ProbeOutcome.FAILED
    return outcome, f"GET /v1/models: {type(error).__name__}"


def owns_port(root_pid: int, port: int) -> bool:
    """Whether a process of the tree listens on the port.

    A process that may not be looked into (its program has file capabilities, or is another user's)
    is believed to, where a socket of its user does: nobody listened there before the launch. So is
    every process where /proc is not there to tell.
    """
    if not os.path.exists(f"{PROC}/self"):
        return True
    hidden_uids: set[int] = set()
    for pid in tree_pids(root_pid):
        try:
            process = psutil.Process(pid)
            try:
                if port in listening_ports(process):
                    return True
            except psutil.AccessDenied:
                uids = process.uids()
                hidden_uids |= {uids.effective, uids.saved}
        except psutil.Error:
            continue
    return bool(hidden_uids) and not hidden_uids.isdisjoint(_listening_uids(port))


def _listening_uids(port: int) -> Iterator[int]:
    """The users of the sockets that listen on the port."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{table}") as lines:
            for line in lines:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield int(fields[7])
