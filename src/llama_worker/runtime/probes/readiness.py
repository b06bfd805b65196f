"""Questions to the server, outside its streams and each on a thread: whether it is ready and ours,
and what its slots do.

A function that asks returns what closes the connection at once; the question then counts as
unanswered. It raises RuntimeError if the system has no thread left.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil

from llama_worker.config.profiles import Canary
from llama_worker.config.settings import Endpoint, WorkerConfig
from llama_worker.config.validation import json_of
from llama_worker.errors import described_error, is_shortage, masked
from llama_worker.mailbox import Mailbox
from llama_worker.runtime.host import threads
from llama_worker.runtime.host.probe_queue import run_probe
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.runtime.http.session import ask
from llama_worker.runtime.probes.liveness_probes import PROC, listening_addresses, tree_pids
from llama_worker.server.health import (
    PROBE_TIMEOUT_S,
    canary_body,
    canary_problem,
    models_outcome,
    probe_timeout_s,
)
from llama_worker.server.messages import LookAtSlots, Probed, ProbeOutcome, SlotsSeen
from llama_worker.server.slots import LOOK_TIMEOUT_S, SlotsLook, SlotsTimeout, parse_slots
from llama_worker.server.traits import ServerTraits, server_traits

_Ask = Callable[..., tuple[int, bytes]]  # `ask`, of one server

_LISTEN = "0A"  # the state of a listening socket in /proc/net/tcp
_TRAITS_TIMEOUT_S = 2.0
_CANARY_TIMEOUT_S = 1e6  # the startup has its own limits, which abort this
_OF_ITS_OWN = (ProbeOutcome.READY, ProbeOutcome.UNAUTHORIZED)  # said by the launch's own processes


def probe_readiness(
    config: WorkerConfig, *, epoch: int, root_pid: int, first: bool, reply_to: Mailbox[Probed]
) -> Abort:
    """Probe the worker's server. Sends one Probed.

    The `first` READY or UNAUTHORIZED of a launch also requires that the listener belongs to
    `root_pid`'s tree; READY has the traits.
    """
    endpoint, abort = Endpoint.of(config), Abort()
    ask_server = partial(ask, endpoint, abort=abort)

    def report(outcome: ProbeOutcome, detail: str, traits: ServerTraits) -> None:
        shown = masked(detail, endpoint.api_key)  # it may quote the server
        reply_to.tell(Probed(epoch=epoch, outcome=outcome, detail=shown, traits=traits))

    def run() -> None:
        timeout_s = probe_timeout_s(config.timeouts)
        traits = ServerTraits()
        try:
            status, body = ask_server("GET", "/v1/models", timeout_s=timeout_s)
            outcome, detail = models_outcome(status, json_of(body))
        except Exception as error:  # the answer may need more memory than there is
            report(*unanswered(error), traits)
            return
        try:
            ip, port = abort.peer_ip, config.port
            if first and outcome in _OF_ITS_OWN and not owns_port(root_pid, port, ip):
                # one that has just ended has no port either: does anybody answer still?
                ask_server("GET", "/v1/models", timeout_s=timeout_s)
                outcome = ProbeOutcome.OTHER_PROCESS
                shown = f"[{ip}]" if ":" in ip else ip
                detail = f"another process answers on {shown}:{port}"
            elif first and outcome is ProbeOutcome.READY:
                traits = _ask_traits(ask_server)
                if config.canary is not None:
                    outcome, detail = _try_canary(ask_server, config.canary, detail)
        except Exception as error:
            outcome, detail = unanswered(error)[0], described_error(error)
        report(outcome, detail, traits)

    run_probe(run, lambda error: report(*unanswered(error), ServerTraits()))
    return abort


def probe_answer(endpoint: Endpoint, *, epoch: int, reply_to: Mailbox[Probed]) -> Abort:
    """Ask whether a server that this program did not start answers at all. Sends one Probed.

    `/health`, since a llama-server that wakes from sleep holds the lock of its task queue while it
    loads the model, and `/v1/models` waits for that (b11434). Every HTTP status is an answer.
    """
    abort, asked = Abort(), "GET /health"

    def report(outcome: ProbeOutcome, detail: str) -> None:
        reply_to.tell(Probed(epoch=epoch, outcome=outcome, detail=detail))

    def run() -> None:
        try:
            status, _ = ask(endpoint, "GET", "/health", timeout_s=PROBE_TIMEOUT_S, abort=abort)
            report(ProbeOutcome.READY, f"{asked}: {status}")
        except Exception as error:
            report(*unanswered(error, asked))

    run_probe(run, lambda error: report(*unanswered(error, asked)))
    return abort


def look_at_slots(endpoint: Endpoint, order: LookAtSlots, reply_to: Mailbox[SlotsSeen]) -> Abort:
    """Look at `/slots`. Sends one SlotsSeen."""
    abort = Abort()

    def run() -> None:
        asked_at = threads.now()
        look: SlotsLook | SlotsTimeout | None = None
        by_shortage = False
        try:
            status, body = ask(endpoint, "GET", "/slots", timeout_s=order.timeout_s, abort=abort)
            slots = parse_slots(json_of(body)) if status == 200 else None
            if slots is not None:
                # A late answer shows the slots of shortly before it came.
                asked_at = max(asked_at, threads.now() - LOOK_TIMEOUT_S)
                look = SlotsLook(asked_at=asked_at, slots=slots)
        except TimeoutError:
            look = SlotsTimeout()
        except Exception as error:  # no answer: nothing was seen
            by_shortage = is_shortage(error)
        reply_to.tell(SlotsSeen(epoch=order.epoch, look=look, by_shortage=by_shortage))

    not_asked = SlotsSeen(epoch=order.epoch, look=None, by_shortage=True)
    run_probe(run, lambda _: reply_to.tell(not_asked))
    return abort


def _ask_traits(ask_server: _Ask) -> ServerTraits:
    """The traits that the server reports, none if it takes too long. Raises OSError if it ended
    or this machine is short of something: the probe must be repeated."""
    chat = {"messages": [{"role": "user", "content": "-"}]}
    answers: list[dict[str, Any]] = []
    for method, path, body in (("GET", "/props", None), ("POST", "/apply-template", chat)):
        try:
            status, answer = ask_server(method, path, timeout_s=_TRAITS_TIMEOUT_S, body=body)
            value = json_of(answer) if status == 200 else None
        except (TimeoutError, ValueError):
            value = None
        answers.append(value if isinstance(value, dict) else {})
    return server_traits(*answers)


def _try_canary(ask_server: _Ask, canary: Canary, ready: str) -> tuple[ProbeOutcome, str]:
    """Send the canary and wait as long as it takes: the startup's limits end the wait. `ready`: the
    detail if its answer is right."""
    path, body = "/v1/chat/completions", canary_body(canary)
    try:
        status, answer = ask_server("POST", path, timeout_s=_CANARY_TIMEOUT_S, body=body)
    except (OSError, ValueError) as error:
        return unanswered(error)[0], f"the canary request failed: {described_error(error)}"
    with threads.may_block_this_thread():
        problem = canary_problem(canary.check, status, json_of(answer))
    if problem is not None:
        return ProbeOutcome.CANARY_FAILED, problem
    return ProbeOutcome.READY, ready


def unanswered(error: Exception, asked: str = "GET /v1/models") -> tuple[ProbeOutcome, str]:
    """The outcome and the detail of a probe without an answer. A shortage of this machine, or a
    failed name lookup, says nothing about the server."""
    unknown = is_shortage(error) or isinstance(error, socket.gaierror)
    outcome = ProbeOutcome.NOT_ASKED if unknown else ProbeOutcome.FAILED
    return outcome, f"{asked}: {type(error).__name__}"


def owns_port(root_pid: int, port: int, ip: str) -> bool:
    """Whether a process of the tree listens on the port of this address of the machine.

    A process that may not be inspected (its program has file capabilities, or is another user's)
    counts as the listener if a socket of its user listens: nobody did before the launch. Without
    /proc/net, which systemd may hide (ProcSubset=pid), every process counts as the listener.
    """
    if not os.path.exists(f"{PROC}/net/tcp"):
        return True
    hidden_uids: set[int] = set()
    for pid in tree_pids(root_pid):
        try:
            process = psutil.Process(pid)
            try:
                for listens_on, listens_at in listening_addresses(process):
                    if listens_at == port and _takes(listens_on, ip):
                        return True
            except psutil.AccessDenied:
                uids = process.uids()
                hidden_uids |= {uids.effective, uids.saved}
        except psutil.Error:
            continue
    return bool(hidden_uids) and not hidden_uids.isdisjoint(_listening_uids(port, ip))


def _listening_uids(port: int, ip: str) -> Iterator[int]:
    """The users of the sockets that listen on the port of the address."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{table}") as lines:
            for line in lines:
                fields = line.split()
                shown_ip, _, shown_port = fields[1].rpartition(":")
                if fields[3] == _LISTEN and int(shown_port, 16) == port:
                    # words of four bytes, each in this machine's byte order
                    words = struct.iter_unpack(">I", bytes.fromhex(shown_ip))
                    if _takes(b"".join(struct.pack("=I", *word) for word in words), ip):
                        yield int(fields[7])


def _takes(listens_on: str | bytes, ip: str) -> bool:
    """Whether a socket that listens on one address takes connections to the other: to its own, or
    to all of its family; one on all of IPv6 also takes IPv4."""
    listening, asked = _plain(listens_on), _plain(ip.partition("%")[0])  # without the scope
    if listening.is_unspecified:
        return listening.version >= asked.version
    return listening == asked


def _plain(ip: str | bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address; an IPv4 one that is written as IPv6 is IPv4."""
    address = ipaddress.ip_address(ip)
    return getattr(address, "ipv4_mapped", None) or address
