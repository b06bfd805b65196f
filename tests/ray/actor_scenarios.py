"""What is to be true of a worker that is a Ray actor."""

from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError

from llama_worker import (
    RequestFailed,
    RequestRefused,
    StartFailReason,
    WorkerClosed,
    WorkerConfig,
    WorkerStartError,
    WorkerState,
)
from llama_worker.testing import scripts as fs
from tests.actors.conftest import HOST, eventually, running
from tests.ray.stage import TALKING, WAIT_S, Stage, actor, assert_gone, get, tree_of


def calls_of_an_actor_wait_side_by_side(stage: Stage) -> None:
    worker = actor(stage.config_for(slots=2), num_gpus=1)
    assert get(worker.submit.remote("job", "", "Hello?")) == {
        "ok": False,
        "error": "WORKER_NOT_READY",
    }
    status = get(worker.start.remote())
    assert (status["state"], status["slots_total"]) == (WorkerState.READY, 2)
    server = psutil.Process(status["pid"])
    assert int(server.cmdline()[server.cmdline().index("--port") + 1]) < 32768
    assert server.environ()["CUDA_VISIBLE_DEVICES"] in ("0", "1"), "the GPU that Ray chose"

    talking = get(
        worker.submit.remote(
            "talk", "", "Hello?", params={"scripted_reply": fs.steps_json(*TALKING)}
        )
    )
    request_id = talking["request_id"]
    waiting = worker.result.remote(request_id)
    eventually(lambda: get(worker.read_output.remote(request_id))["text"], "output", WAIT_S)
    assert get(worker.get_status.remote(request_id))["phase"] == "generating"
    assert get(worker.get_result.remote(request_id)) == {"ok": False, "error": "NOT_READY"}
    assert get(worker.get_worker_status.remote())["active_jobs"] == {request_id: "talk"}
    assert ray.wait([waiting], timeout=0)[0] == []  # it waits, and held up nothing
    assert get(worker.cancel.remote(request_id)) is True
    result = get(waiting)
    assert (result["state"], result["reasoning"], result["text"][:6]) == (
        "canceled",
        "hm",
        "token ",
    )
    assert get(worker.get_debug_info.remote())["recent_logs"]

    seen = tree_of(status["pid"])
    get(worker.stop.remote())
    assert not running(seen)
    assert get(worker.start.remote())["state"] is WorkerState.READY
    get(worker.close.remote())
    with pytest.raises(WorkerClosed):
        get(worker.start.remote())
    ray.kill(worker)


def a_request_can_be_followed_to_its_result(stage: Stage) -> None:
    worker, gate = actor(stage.config_for()), stage.folder / "gate"
    get(worker.start.remote())
    script = fs.steps_json(
        *fs.plain_reply(fs.Reasoning("hm"), fs.Text("one "), fs.Gate(gate), fs.Text("two"))
    )
    request_id = get(worker.submit.remote("job", "", "Hello?", params={"scripted_reply": script}))[
        "request_id"
    ]
    pieces = []
    for ref in worker.follow.remote(request_id):
        pieces.append(get(ref))
        if pieces[-1]["output"]["text"]:
            gate.touch()  # the rest comes only once the first was followed
    assert ["result" in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (
        "".join(piece["output"]["text"] for piece in pieces)
        == pieces[-1]["result"]["text"]
        == "one two"
    )
    with pytest.raises(LookupError):
        next(get(ref) for ref in worker.follow.remote(request_id))
    ray.kill(worker)


def an_actor_asks_counts_drains_and_restarts(stage: Stage) -> None:
    own = stage.folder / "own_events"

    def write(event: dict[str, Any]) -> None:
        with own.open("a") as file:
            file.write(f"{event['event']}\n")

    worker = actor(stage.config_for(slots=2, on_event=write))
    first = get(worker.start.remote())
    heard = worker.events.remote()
    parts = [{"type": "text", "text": "Hello?"}]
    said = {"scripted_reply": fs.steps_json(*fs.plain_reply(fs.Text("hello")))}
    assert get(worker.ask.remote(parts, params=said))["text"] == "hello"
    count = get(worker.count_tokens.remote("You are terse.", parts))
    assert count["n_left"] == count["n_ctx"] - count["n_prompt_tokens"]

    request_id = get(worker.submit.remote("job", "", parts, params=said))["request_id"]
    more = get(worker.read_output.remote(request_id, wait=True))
    assert (more["text"] or more["done"]) is not False
    eventually(lambda: get(worker.get_status.remote(request_id))["phase"] == "done", "its end")
    assert get(worker.release.remote(request_id)) is True
    assert get(worker.release.remote(request_id)) is False

    get(worker.wait_slot.remote())
    cut = worker.ask.remote("Hello?", params={"scripted_reply": fs.steps_json(*TALKING)})
    eventually(lambda: get(worker.get_worker_status.remote())["active_jobs"], "the request", WAIT_S)
    assert get(worker.restart.remote("a new build"))["pid"] != first["pid"]
    with pytest.raises(RequestFailed, match=r"worker_restarted.*a new build"):
        get(cut)

    slow = worker.ask.remote(
        "Hello?",
        params={"scripted_reply": fs.steps_json(*fs.plain_reply(fs.Sleep(1.0), fs.Text("last")))},
    )
    eventually(lambda: get(worker.get_worker_status.remote())["active_jobs"], "the request", WAIT_S)
    get(worker.drain.remote())
    assert get(slow)["text"] == "last"
    assert get(worker.get_worker_status.remote())["state"] is WorkerState.STOPPED
    with pytest.raises(RequestRefused):
        get(worker.ask.remote("Hello?"))
    get(worker.close.remote())
    events = [get(ref)["event"] for ref in heard]  # it ends, since the worker is closed
    assert {"admitted", "ended", "launched", "exited", "draining", "state"} <= set(events)
    assert own.read_text().split()[-len(events) :] == events  # the config's own hears them too
    ray.kill(worker)


def a_lease_that_is_over_ends_the_server(stage: Stage) -> None:
    worker = actor(stage.config_for())
    seen = tree_of(get(worker.start.remote())["pid"])
    get(worker.renew.remote(3600.0))
    get(worker.renew.remote(0.5))
    with pytest.raises(ActorDiedError):
        get(worker.wait_failed.remote())
    assert_gone(seen)


def errors_reach_the_caller_with_their_fields(stage: Stage) -> None:
    script = fs.Script(exits=[fs.Exit(3, "before_bind", log=["no such model"])])
    worker = actor(stage.config_for(script))
    with pytest.raises(WorkerStartError) as caught:
        get(worker.start.remote())
    assert (caught.value.reason, caught.value.returncode) == (StartFailReason.EXITED, 3)
    assert "no such model" in caught.value.log_tail
    with pytest.raises(TypeError, match="request_id must be an int"):
        get(worker.get_status.remote("one"))
    ray.kill(worker)
    without_config = actor(lambda port: WorkerConfig("w", HOST, port, ["x"], max_tokens=0))
    with pytest.raises(ActorDiedError, match="ConfigError: max_tokens must be 1 or more"):
        get(without_config.start.remote())
