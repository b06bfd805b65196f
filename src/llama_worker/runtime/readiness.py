"""One readiness probe: is the server ready, and is it ours?

Most of them are the health probes of servers that are well, and all that an idle worker costs: they
take no thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import psutil

from llama_worker.config import WorkerConfig
from llama_worker.errors import described_error
from llama_worker.messages import Mailbox, Probed, ProbeOutcome
from llama_worker.runtime.canary import canary_body, canary_problem
from llama_worker.runtime.chat_exchange import Endpoint
from llama_worker.runtime.connections import Abort
from llama_worker.runtime.host_code import start_thread
from llama_worker.runtime.liveness_probes import tree_pids
from llama_worker.runtime.question import NO_ANSWER, Question, ask, json_of
from llama_worker.runtime.shortage import is_shortage
from llama_worker.server.gaps import LATE_S
from llama_worker.server.health import probe_timeout_s
from llama_worker.server.traits import ServerTraits, server_traits
from llama_worker.stream.plain_reply import PlainReply

_LISTEN = "0A"  # a socket's state in /proc/net/tcp
_READY = "GET /v1/models: 200"
_TRAITS_TIMEOUT_S = 2.0
_CANARY_TIMEOUT_S = 1e6  # the startup has its own limits, which abort this


class ReadinessProbe:
    """One probe. The constructor begins it; it tells one Probed; any thread may call `abort`.

    The `first` READY of a launch also needs the listener to belong to `root_pid`'s tree, and brings
    the traits; a daemon thread finds that out.
    """

    def __init__(
        self,
        config: WorkerConfig,
        endpoint: Endpoint,
        *,
        epoch: int,
        root_pid: int,
        first: bool,
        reply_to: Mailbox[Probed],
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._epoch = epoch
        self._root_pid = root_pid
        self._first = first
        self._reply_to = reply_to
        self._abort = Abort()
        timeout_s = probe_timeout_s(config.timeouts)
        self._deadline = time.monotonic() + timeout_s
        self._question: Question | None = None
        name = f"llama_worker-{config.name}-probe"
        try:
            self._question = Question(
                endpoint, "/v1/models", timeout_s=timeout_s, name=name, on_end=self._answered
            )
        except Exception as error:
            self._answered(error)

    def abort(self) -> None:
        """Close the connection now; the outcome is then FAILED."""
        self._abort.abort()
        if self._question is not None:
            self._question.abort()

    def _answered(self, reply: PlainReply | Exception) -> None:
        """`/v1/models` was answered, or not."""
        outcome, detail = models_outcome(reply, late_s=time.monotonic() - self._deadline)
        if outcome is ProbeOutcome.READY and self._first:
            try:
                start_thread(f"llama_worker-{self._config.name}-probe", self._look_closer)
                return
            except RuntimeError as error:
                outcome, detail = _outcome(error), described_error(error)
        self._tell(outcome, detail, ServerTraits())

    def _look_closer(self) -> None:
        """The first READY of a launch, on a thread."""
        traits, outcome, detail = ServerTraits(), ProbeOutcome.READY, _READY
        try:
            if owns_port(self._root_pid, self._config.port):
                traits = self._ask_traits()
                outcome, detail = self._try_canary(outcome, detail)
            else:
                outcome, detail = (
                    ProbeOutcome.STRANGER,
                    f"another process answers on port {self._config.port}",
                )
        except Exception as error:
            outcome, detail = _outcome(error), described_error(error)
        self._tell(outcome, detail, traits)

    def _tell(self, outcome: ProbeOutcome, detail: str, traits: ServerTraits) -> None:
        self._reply_to.tell(
            Probed(epoch=self._epoch, outcome=outcome, detail=detail, traits=traits)
        )

    def _ask_traits(self) -> ServerTraits:
        chat = {"messages": [{"role": "user", "content": "-"}]}
        told: list[dict[str, Any]] = []
        for method, path, body in (("GET", "/props", None), ("POST", "/apply-template", chat)):
            try:
                status, answer = self._ask(method, path, _TRAITS_TIMEOUT_S, body)
            except NO_ANSWER:
                status, answer = 0, None
            told.append(answer if status == 200 and isinstance(answer, dict) else {})
        return server_traits(*told)

    def _try_canary(self, outcome: ProbeOutcome, detail: str) -> tuple[ProbeOutcome, str]:
        """As long as it takes: the startup's limits end it."""
        canary = self._config.canary
        if canary is None:
            return outcome, detail
        try:
            status, answer = self._ask(
                "POST", "/v1/chat/completions", _CANARY_TIMEOUT_S, canary_body(canary)
            )
        except NO_ANSWER as error:
            return _outcome(error), f"the canary: {described_error(error)}"
        problem = canary_problem(canary.check, status, answer)
        return (outcome, detail) if problem is None else (ProbeOutcome.UNFIT, problem)

    def _ask(
        self, method: str, path: str, timeout_s: float, body: object = None
    ) -> tuple[int, Any]:
        return ask(
            self._abort, self._config, self._endpoint, method, path, timeout_s=timeout_s, body=body
        )


def models_outcome(reply: PlainReply | Exception, *, late_s: float) -> tuple[ProbeOutcome, str]:
    """What the reply to `/v1/models` says, or that there is none; `late_s`: how long its deadline
    is over. Pure."""
    if isinstance(reply, Exception):
        # Long past its deadline, this process did not run, and so perhaps nothing else did.
        outcome = ProbeOutcome.NO_NEWS if late_s > LATE_S else _outcome(reply)
        return outcome, f"GET /v1/models: {type(reply).__name__}"
    if reply.status == 503:
        return ProbeOutcome.LOADING, "GET /v1/models: 503, loading the model"
    if reply.status != 200:
        return ProbeOutcome.FAILED, f"GET /v1/models: {reply.status}"
    if json_of(reply.body) is None:
        return ProbeOutcome.FAILED, "GET /v1/models: 200, but no JSON"
    return ProbeOutcome.READY, _READY


def _outcome(error: Exception) -> ProbeOutcome:
    """Of a probe without an answer: what this machine lacks says nothing about the server."""
    return ProbeOutcome.NO_NEWS if is_shortage(error) else ProbeOutcome.FAILED


def owns_port(root_pid: int, port: int) -> bool:
    """Whether a process of the tree listens on the port.

    A process that may not be looked into (its program has file capabilities, or is another user's)
    is believed to, where a socket of its user does: nobody listened there before the launch.
    """
    hidden_uids: set[int] = set()
    for pid in tree_pids(root_pid):
        try:
            process = psutil.Process(pid)
            try:
                connections = process.net_connections(kind="tcp")
            except psutil.AccessDenied:
                uids = process.uids()
                hidden_uids |= {uids.effective, uids.saved}
                continue
        except psutil.Error:
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
            return True
    return bool(hidden_uids) and not hidden_uids.isdisjoint(_listening_uids(port))


def _listening_uids(port: int) -> Iterator[int]:
    """The users of the sockets that listen on the port."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{table}") as lines:
            for line in lines:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield int(fields[7])
