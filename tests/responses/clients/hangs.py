"""Codex in front of a watched server that hangs, and of honest ones that look the same: a hang ends
with its reason, and the conversation goes on."""

import contextlib
import json
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import psutil

from llama_worker import TimeoutProfile, llama_server_cmd
from llama_worker.server import request_watch
from llama_worker.server import slots as slots_watch
from llama_worker.server.slots import parse_slots
from llama_worker.testing import scripts as fs
from tests.actors.conftest import HOST, eventually
from tests.conftest import LLAMA_WORKER, running
from tests.responses.clients.codex import answer, codex
from tests.responses.clients.coding import BEGUN, HALF, said
from tests.responses.clients.stage import WAIT_S, Done, Stage
from tests.scenarios.cases import _SUSPICIOUS, _slot
from tests.scenarios.scenario import TIMEOUTS
from tests.server.pace import SERVER_ARGS
from tools.found import find_model, find_server

SUSPICIOUS = replace(TIMEOUTS, **_SUSPICIOUS)  # type: ignore[arg-type]
ONCE = ("-c", "model_providers.llama.stream_max_retries=0")  # its user sees the first failure
FAST_S = 30.0 + 2 * 5.0 + 3.0  # what `--timeouts fast` promises of one that generates
# Of all that Codex says the model is shown the last message, and how it is repeated: short enough
# for a small model on a slow machine. A probe is shown as a whole: else the messages become one.
PARROT = """\
{%- set said = messages[-1]['content'] -%}
{%- if messages[0]['content'].startswith('probe-') -%}
{%- for message in messages -%}{{- message['content'] + '\\n' -}}{%- endfor -%}
{%- endif -%}
{%- for _ in range(2) -%}
{{- '<|im_start|>user\\n' + said + '<|im_end|>\\n<|im_start|>assistant\\n' -}}
{%- if not loop.last -%}{{- said + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
"""
TALE = " ".join(["tick tock"] * 60)


def survives_a_stopped_server(on: Stage) -> None:
    """`responses-proxy` and the real server, which is stopped in the middle of an answer."""
    on.patience_s = 5 * WAIT_S  # a real model, on a machine that may be busy
    template = on.home / "parrot.jinja"
    template.write_text(PARROT)
    parrot = ("--ctx-size", "4096", "--temp", "0", "--jinja", "--chat-template-file", str(template))
    command = llama_server_cmd(
        find_model(),
        host=HOST,
        port=11111,
        slots=1,
        executable=find_server(),
        extra_args=(*SERVER_ARGS, *parrot),
    )
    given = shlex.join(command).replace("11111", "{port}")
    options = ("--server-cmd", given, "--timeouts", "fast", "--port", "0")
    proxy = (*LLAMA_WORKER, "responses-proxy", *options)
    with running(*proxy) as (process, output):
        on.base_url = output.readline().split()[0]
        server = _server_of(process)

        def stop(client: subprocess.Popen[str]) -> None:
            eventually(lambda: _decoded(on) >= 3, "a few words", on.patience_s)
            server.suspend()

        message = _failure(codex(on, *ONCE, TALE, meanwhile=stop), "stall_timeout")
        assert float(message.partition(" for ")[2].partition(" s")[0]) <= FAST_S, message
        assert answer(codex(on, "resume", "--last", "Hello there.")) == "Hello there."
        assert _server_of(process).pid != server.pid
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)


def survives_a_decode_that_dies(on: Stage) -> None:
    _survives(on, [*HALF, fs.WaitClose()], "stall_timeout")


def survives_a_server_that_spins(on: Stage) -> None:
    slots = [fs.Answer(body=[_slot(decoded=3)])]
    _survives(on, [*HALF, fs.Burn(None, 30.0)], "stall_timeout", slots, SUSPICIOUS)


def survives_a_stuck_task_queue(on: Stage) -> None:
    on.enter_context(mock.patch.object(request_watch, "SILENT_S", 3.0))  # of a minute
    on.enter_context(mock.patch.object(slots_watch, "PAUSE_S", 0.3))  # of 5 s
    still = fs.Answer(body=[_slot(decoded=1)], times=3)
    goes_on = fs.Answer(body=[_slot(decoded=2)], times=1)  # so it answers in the middle of a batch
    slots = [still, goes_on, fs.Answer(hang=True)]
    _survives(on, [*HALF, fs.Burn(None, 30.0)], "/slots has not answered", slots, SUSPICIOUS)


def survives_a_lost_request(on: Stage) -> None:
    """It costs no restart: the server serves others."""
    slots = [fs.Answer(body=[_slot(busy=False)])]
    hang = [*HALF, fs.Burn(None, 30.0)]
    _survives(on, hang, "request_lost", slots, SUSPICIOUS, restarts=0)


def waits_for_silent_work(on: Stage) -> None:
    """A long prompt, without a word, far beyond the limit for one that does not work."""
    on.watches(
        fs.Script(replies=[fs.ScriptedReply([*BEGUN, fs.Burn(3.5, 30.0), *said("Read.")[2:]])])
    )
    assert answer(codex(on, *ONCE, "Read.")) == "Read."
    assert _restarts(on) == 0


def waits_for_a_neighbours_long_batch(on: Stage) -> None:
    """No headers come, as long as the neighbour gets data."""
    late = fs.ScriptedReply([fs.Sleep(3.0), *said("Late.")], marker="Answer.")
    long = fs.ScriptedReply([*BEGUN, fs.Prefill(5000, 1, 0.2)], marker="neighbour")
    on.watches(fs.Script(replies=[late, long]))
    neighbour = on.worker.submit("neighbour", "", "neighbour").get(timeout=WAIT_S)
    assert neighbour["ok"]
    assert answer(codex(on, *ONCE, "Answer.")) == "Late."
    status = on.worker.get_status(neighbour["request_id"]).get(timeout=WAIT_S)
    assert status["ok"]
    assert status["phase"] == "prefill"
    assert _restarts(on) == 0


def _survives(
    on: Stage,
    hang: Sequence[fs.Step],
    reason: str,
    slots: Sequence[fs.Answer] = (),
    timeouts: TimeoutProfile = TIMEOUTS,
    *,
    restarts: int = 1,
) -> None:
    """Its user is told the reason; the next turn of the conversation is answered."""
    replies = [fs.ScriptedReply(hang, marker="Answer."), fs.ScriptedReply(said("Whole."))]
    script = fs.Script(replies=replies, slots=list(slots))
    on.watches(script, timeouts=timeouts)
    _failure(codex(on, *ONCE, "Answer."), reason)
    assert answer(codex(on, "resume", "--last", "Go on.")) == "Whole."
    assert _restarts(on) == restarts
    assert "Answer." in json.dumps(on.messages())


def _failure(done: Done, reason: str) -> str:
    """What its user read."""
    message: str = done.events("turn.failed")[-1]["error"]["message"]
    assert reason in message, done.stdout
    return message


def _restarts(on: Stage) -> int:
    return on.worker.get_worker_status().get(timeout=WAIT_S)["restart_count"]


def _decoded(on: Stage) -> int:
    """How many tokens of its answer the server has made."""
    with contextlib.closing(
        urllib.request.urlopen(f"{on.base_url.removesuffix('/v1')}/slots", timeout=WAIT_S)
    ) as reply:
        slots = parse_slots(json.load(reply))
    assert slots is not None
    return slots[0].decoded_tokens


def _server_of(process: subprocess.Popen[str]) -> psutil.Process:
    (server,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.exe() == find_server()
    ]
    return server
